/* rms_norm.cuh - what kernels with a norm in them share: arithmetic on pieces of a row, the sum of the shares of dweight, and the
 * choice of a plan. Formulas and plans are in layers/rms_norm.cu. */
#pragma once

#include "arch/overlap.cuh"
#include "common/cuda.cuh"
#include "contract/layers.h"

template <typename T, int N> __device__ inline XtPiece<T, N> all(float value) { return xt_all<T, N>(xt_store<T>((XtAcc<T>)value)); }
/* 1 / sqrt(v) within 2 ulp. 0 gives Inf. */
__device__ inline float reciprocal_root(float v) { return rsqrtf(v); }
__device__ inline double reciprocal_root(double v) { return 1 / sqrt(v); }

/* Sums R values over aligned groups of `lanes` lanes, a power of two. All lanes of the warp call it; each gets the sums of its
 * group. The R sums are independent, so their shuffles overlap. */
template <int R, typename A> __device__ inline void sum_of_lanes(A (&value)[R], int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
        for (int k = 0; k < R; k++) value[k] += __shfl_xor_sync(0xffffffffu, value[k], step);
    }
}

/* a b, rounded once. 16-bit types multiply two at a time; that rounds like the product in float32, which is exact. */
template <typename T, int N> __device__ inline XtPiece<T, N> product(const XtPiece<T, N> &of_a, const XtPiece<T, N> &of_b) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        XtPiece<T, N> to;
#pragma unroll
        for (int j = 0; j < N / 2; j++) to.word[j] = xt_word(__hmul2_rn(xt_pair(of_a.word[j], T()), xt_pair(of_b.word[j], T())));
        return to;
    } else {
        XtVector<XtAcc<T>, N> a = xt_load(of_a), b = xt_load(of_b);
#pragma unroll
        for (int e = 0; e < N; e++) a.at[e] *= b.at[e];
        return xt_store<T>(a);
    }
}

/* a + b of values that are rounded already: these are never fused with the multiplication that made a. */
__device__ inline float plain_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double plain_sum(double a, double b) { return __dadd_rn(a, b); }

/* a + b, rounded once, as the op add rounds it. */
template <typename T, int N> __device__ inline XtPiece<T, N> rounded_sum(const XtPiece<T, N> &of_a, const XtPiece<T, N> &of_b) {
    XtVector<XtAcc<T>, N> a = xt_load(of_a), b = xt_load(of_b);
#pragma unroll
    for (int e = 0; e < N; e++) a.at[e] = plain_sum(a.at[e], b.at[e]);
    return xt_store<T>(a);
}

/* The share of a piece in sum_j x_j^2. */
template <typename T, int N> __device__ inline XtAcc<T> squares(const XtPiece<T, N> &piece) {
    XtVector<XtAcc<T>, N> x = xt_load(piece);
    XtAcc<T> sum = 0;
#pragma unroll
    for (int e = 0; e < N; e++) sum += x.at[e] * x.at[e];
    return sum;
}
/* A piece of a weight; PLUS: of 1 + weight. */
template <typename T, int N, bool PLUS> __device__ inline XtVector<XtAcc<T>, N> factors(const XtPiece<T, N> &of_weight) {
    XtVector<XtAcc<T>, N> weight = xt_load(of_weight);
    if constexpr (PLUS) {
#pragma unroll
        for (int e = 0; e < N; e++) weight.at[e] += 1;
    }
    return weight;
}
/* A piece of out; PLUS: rounded once, and the others round x rstd first. */
template <typename T, int N, bool PLUS = false>
__device__ inline XtPiece<T, N> normalised(const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_weight, XtAcc<T> rstd) {
    XtVector<XtAcc<T>, N> x = xt_load(of_x);
    if constexpr (PLUS) {
        const XtVector<XtAcc<T>, N> weight = factors<T, N, true>(of_weight);
#pragma unroll
        for (int e = 0; e < N; e++) x.at[e] = x.at[e] * rstd * weight.at[e];
        return xt_store<T>(x);
    } else {
#pragma unroll
        for (int e = 0; e < N; e++) x.at[e] *= rstd;
        return product<T, N>(xt_store<T>(x), of_weight);
    }
}
/* The share of a piece in sum_j g_j x_j; adds its row's part to dw. */
template <typename T, int N, bool PLUS = false>
__device__ inline XtAcc<T> dot(const XtPiece<T, N> &of_dy, const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_weight, XtAcc<T> rstd,
                               XtAcc<T> *dweight) {
    XtVector<XtAcc<T>, N> dy = xt_load(of_dy), x = xt_load(of_x), weight = factors<T, N, PLUS>(of_weight);
    XtAcc<T> sum = 0;
#pragma unroll
    for (int e = 0; e < N; e++) {
        XtAcc<T> product = dy.at[e] * x.at[e];
        sum += product * weight.at[e];
        dweight[e] += product * rstd;
    }
    return sum;
}
/* A piece of dx; shrink = rstd mean(g xh). */
template <typename T, int N, bool PLUS = false>
__device__ inline XtPiece<T, N> input_gradient(const XtPiece<T, N> &of_dy, const XtPiece<T, N> &of_x,
                                               const XtPiece<T, N> &of_weight, XtAcc<T> rstd, XtAcc<T> shrink) {
    XtVector<XtAcc<T>, N> dx, dy = xt_load(of_dy), x = xt_load(of_x), weight = factors<T, N, PLUS>(of_weight);
#pragma unroll
    for (int e = 0; e < N; e++) dx.at[e] = rstd * (dy.at[e] * weight.at[e] - x.at[e] * shrink);
    return xt_store<T>(dx);
}
/* Writes a piece of a share of dw, with as few stores as the alignment of share [P, cols] allows. */
template <typename T, int N> __device__ inline void write_share(XtAcc<T> *share, const XtAcc<T> *sum) {
    constexpr int W = N == 1 ? 1 : XT_WIDTH<XtAcc<T>>;
#pragma unroll
    for (int e = 0; e < N; e += W) {
        XtVector<XtAcc<T>, W> v;
#pragma unroll
        for (int k = 0; k < W; k++) v.at[k] = sum[e + k];
        xt_write(share + e, xt_piece(v));
    }
}

/* A block's share of dw (or db) from those of its warps, added in their order: `sum` of a lane has pieces lane, lane + 32, ... of the
 * columns. room: [warps][V * 32 * N], which the warps may still be reading. */
template <int V, int N> __device__ inline void join_warps(float *share, float *room, const float (&sum)[V][N], int cols) {
    constexpr int WIDTH = V * 32 * N;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads(); /* all warps have read */
#pragma unroll
    for (int i = 0; i < V; i++) {
        float4 *to = (float4 *)(room + warp * WIDTH + (i * 32 + lane) * N);
#pragma unroll
        for (int e = 0; e < N; e += 4) to[e / 4] = make_float4(sum[i][e], sum[i][e + 1], sum[i][e + 2], sum[i][e + 3]);
    }
    __syncthreads(); /* every warp has written */
    for (int col = threadIdx.x; col < cols; col += blockDim.x) {
        float total = room[col];
        for (int k = 1; k < warps; k++) total += room[k * WIDTH + col];
        share[col] = total;
    }
}

/* ---- dweight from its shares ------------------------------------------------------------------------------------------------- */

static constexpr int SUM_COLS = 8, SLICES = 64; /* of a block: 32 bytes of a share in float32 */

/* The shares of one or two weights. */
template <typename T> struct XtShares {
    T *dweight[2];             /* [cols], or NULL: nothing to do */
    const XtAcc<T> *shares[2]; /* [count, cols] */
    int64_t count[2];
    bool accumulate[2];
};

/* dweight[i] [cols] (+)= the sum over shares[i], i = blockIdx.y. */
template <typename T>
__global__ void __launch_bounds__(SUM_COLS *SLICES) sum_shares_kernel(const __grid_constant__ XtShares<T> p, int64_t cols) {
    using A = XtAcc<T>;
    __shared__ A tree[SUM_COLS * SLICES]; /* [slice, column] */
    xt_wait_for_previous();
    xt_let_next_begin();
    const bool second = blockIdx.y; /* no run-time index: it would put p into local memory */
    T *dweight = second ? p.dweight[1] : p.dweight[0];
    const A *share = second ? p.shares[1] : p.shares[0];
    const int64_t count = second ? p.count[1] : p.count[0];
    const bool accumulate = second ? p.accumulate[1] : p.accumulate[0];
    if (!dweight) return;
    int slice = threadIdx.x / SUM_COLS;
    for (int64_t first = (int64_t)blockIdx.x * SUM_COLS; first < cols; first += (int64_t)gridDim.x * SUM_COLS) {
        int64_t col = first + threadIdx.x % SUM_COLS;
        A sum = 0;
        if (col < cols) {
            if (accumulate && slice == 0) sum = xt_load(dweight[col]);
#pragma unroll 4
            for (int64_t i = slice; i < count; i += SLICES) sum += share[i * cols + col];
        }
        tree[threadIdx.x] = sum;
        for (int apart = SUM_COLS * SLICES / 2; apart >= SUM_COLS; apart /= 2) {
            __syncthreads();
            if (threadIdx.x < apart) tree[threadIdx.x] += tree[threadIdx.x + apart];
        }
        /* Entry t has the sum of column t. Only thread t touches it before the next barrier. */
        if (threadIdx.x < SUM_COLS && col < cols) dweight[col] = xt_store<T>(tree[threadIdx.x]);
    }
}

/* Adds up the shares of `weights` weights of `cols` elements. */
template <typename T> static inline void xt_sum_shares(const XtShares<T> &p, int weights, int64_t cols) {
    xt_launch_early(sum_shares_kernel<T>, dim3(xt_blocks(cols, SUM_COLS), weights), SUM_COLS * SLICES, 0, p, cols);
}

/* ---- plans ------------------------------------------------------------------------------------------------------------------- */

static constexpr int THREADS = 256; /* of a narrow block */
static constexpr int NARROW = 128;  /* most pieces in a row of a narrow plan */

typedef enum Plan {
    PLAN_NARROW_1,
    PLAN_NARROW_2,
    PLAN_NARROW_3,
    PLAN_NARROW_4,
    PLAN_NARROW_PLAIN,
    PLAN_BLOCK,
    PLAN_LONG,
    PLAN_LONG_PLAIN
} Plan;

/* only_long: a kernel has no other plan. */
static inline Plan choose(bool aligned, int64_t pieces, int64_t most, bool only_long = false) {
    if (only_long) return aligned ? PLAN_LONG : PLAN_LONG_PLAIN;
    if (!aligned) return pieces <= NARROW ? PLAN_NARROW_PLAIN : PLAN_LONG_PLAIN;
    bool by_three = pieces == 24 || pieces == 48 || pieces == 96; /* 8, 16 or 32 lanes, none idle */
    return by_three           ? PLAN_NARROW_3
           : pieces == 16     ? PLAN_NARROW_2 /* 8 lanes read a whole line of memory, and their sum takes one step less */
           : pieces <= 32     ? PLAN_NARROW_1
           : pieces <= 64     ? PLAN_NARROW_2
           : pieces <= NARROW ? PLAN_NARROW_4
           : pieces <= most   ? PLAN_BLOCK
                              : PLAN_LONG;
}

/* The launch of a forward by its plan, with pieces of N elements where rows are aligned. Launch has narrow<N, V>, block<N, V> and
 * long_rows<N>; p is its argument. */
template <typename Launch, int N, typename P> static inline void launch_forward(Plan plan, const P *p) {
    switch (plan) {
    case PLAN_NARROW_1: Launch::template narrow<N, 1>(p); break;
    case PLAN_NARROW_2: Launch::template narrow<N, 2>(p); break;
    case PLAN_NARROW_3: Launch::template narrow<N, 3>(p); break;
    case PLAN_NARROW_4: Launch::template narrow<N, 4>(p); break;
    case PLAN_NARROW_PLAIN: Launch::template narrow<1, 4>(p); break;
    case PLAN_BLOCK: Launch::template block<N, 4>(p); break;
    case PLAN_LONG: Launch::template long_rows<N>(p); break;
    case PLAN_LONG_PLAIN: Launch::template long_rows<1>(p); break;
    }
}

/* Lanes that share a narrow row of `pieces`, `each` a lane. */
static inline int lanes_of(int64_t pieces, int each) {
    int lanes = 1;
    while (lanes < 32 && lanes * each < pieces) lanes *= 2;
    return lanes;
}
/* Whole warps for `count` threads, 1024 at most. */
static inline unsigned warps_for(int64_t count) { return count >= 1024 ? 1024 : (unsigned)(count + 31) / 32 * 32; }
