/* layer_norm_bwd.cuh - arithmetic of layer_norm on pieces of a row, and its backward. The comment of layer_norm.cu has the formula and
 * the plans. */
#pragma once

#include "arch/overlap.cuh"
#include "arch/warp_ring.cuh"
#include "common/rms_norm.cuh"

static constexpr int BLOCK_BWD = 1024; /* most pieces in a row of a block */

/* ---- arithmetic -------------------------------------------------------------------------------------------------------------- */

/* The share of a piece in sum_j x_j. */
template <typename T, int N> __device__ inline XtAcc<T> elements(const XtPiece<T, N> &piece) {
    const XtVector<XtAcc<T>, N> x = xt_load(piece);
    XtAcc<T> sum = 0;
#pragma unroll
    for (int e = 0; e < N; e++) sum += x.at[e];
    return sum;
}
/* The share of a piece in sum_j (x_j - mean)^2. */
template <typename T, int N> __device__ inline XtAcc<T> squares_from(const XtPiece<T, N> &piece, XtAcc<T> mean) {
    const XtVector<XtAcc<T>, N> x = xt_load(piece);
    XtAcc<T> sum = 0;
#pragma unroll
    for (int e = 0; e < N; e++) sum += (x.at[e] - mean) * (x.at[e] - mean);
    return sum;
}
/* A piece of out. */
template <typename T, int N>
__device__ inline XtPiece<T, N> scaled(const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_weight, const XtPiece<T, N> &of_bias,
                                       XtAcc<T> mean, XtAcc<T> rstd) {
    XtVector<XtAcc<T>, N> x = xt_load(of_x);
    const XtVector<XtAcc<T>, N> weight = xt_load(of_weight), bias = xt_load(of_bias);
#pragma unroll
    for (int e = 0; e < N; e++) x.at[e] = (x.at[e] - mean) * rstd * weight.at[e] + bias.at[e];
    return xt_store<T>(x);
}

/* Sums over a row: of g xh and of g. */
enum { ALONG, LEVEL };

/* Adds a piece's shares to the two sums, and its row's parts to dw and db. */
template <typename T, int N>
__device__ inline void take(XtAcc<T> (&sum)[2], XtAcc<T> *dweight, XtAcc<T> *dbias, const XtPiece<T, N> &of_dy,
                            const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_weight, XtAcc<T> mean, XtAcc<T> rstd) {
    const XtVector<XtAcc<T>, N> dy = xt_load(of_dy), x = xt_load(of_x), weight = xt_load(of_weight);
#pragma unroll
    for (int e = 0; e < N; e++) {
        const XtAcc<T> xh = (x.at[e] - mean) * rstd, g = dy.at[e] * weight.at[e];
        sum[ALONG] += g * xh;
        sum[LEVEL] += g;
        dweight[e] += dy.at[e] * xh;
        dbias[e] += dy.at[e];
    }
}
/* A piece of dx from the two sums divided by cols. */
template <typename T, int N>
__device__ inline XtPiece<T, N> gradient(const XtAcc<T> (&mean_of)[2], const XtPiece<T, N> &of_dy, const XtPiece<T, N> &of_x,
                                         const XtPiece<T, N> &of_weight, XtAcc<T> mean, XtAcc<T> rstd) {
    XtVector<XtAcc<T>, N> dx;
    const XtVector<XtAcc<T>, N> dy = xt_load(of_dy), x = xt_load(of_x), weight = xt_load(of_weight);
#pragma unroll
    for (int e = 0; e < N; e++)
        dx.at[e] = rstd * (dy.at[e] * weight.at[e] - mean_of[LEVEL] - (x.at[e] - mean) * rstd * mean_of[ALONG]);
    return xt_store<T>(dx);
}

/* The same from the sums themselves, its roundings written out, so that kernels that hold different things in registers agree. */
template <typename T, int N>
__device__ inline XtPiece<T, N> gradient_of_sums(const XtAcc<T> (&sum)[2], XtAcc<T> inverse_cols, const XtPiece<T, N> &of_dy,
                                                 const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_weight, XtAcc<T> mean,
                                                 XtAcc<T> rstd) {
    XtVector<XtAcc<T>, N> dx;
    const XtVector<XtAcc<T>, N> dy = xt_load(of_dy), x = xt_load(of_x), weight = xt_load(of_weight);
    const XtAcc<T> along = sum[ALONG] * inverse_cols;
#pragma unroll
    for (int e = 0; e < N; e++) {
        const XtAcc<T> xh = (x.at[e] - mean) * rstd, level_off = fma(-sum[LEVEL], inverse_cols, dy.at[e] * weight.at[e]);
        dx.at[e] = rstd * fma(-xh, along, level_off);
    }
    return xt_store<T>(dx);
}

/* Both sums over the block, with one pair of barriers; every thread gets them. The block is whole warps. Two calls in a row need no
 * barrier between them, as in xt_block_reduce. */
template <typename A> __device__ inline void block_sums(A (&sum)[2]) {
    __shared__ A of_warp[2][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    sum_of_lanes<2>(sum, 32);
    if (warps == 1) return;
    __syncthreads(); /* all warps have read what the last call left */
    if (lane == 0) of_warp[0][warp] = sum[0], of_warp[1][warp] = sum[1];
    __syncthreads(); /* every warp has written */
    sum[0] = lane < warps ? of_warp[0][lane] : A(0);
    sum[1] = lane < warps ? of_warp[1][lane] : A(0);
    sum_of_lanes<2>(sum, 32);
}

/* ---- narrow ------------------------------------------------------------------------------------------------------------------ */

/* Rows that a lane has in flight, more if a row is one piece a lane; and blocks that fit in a multiprocessor by their registers. */
template <int V> constexpr int ROWS_BWD = V == 1 ? 2 : 1;
template <int V> constexpr int BLOCKS_BWD = V >= 2 ? 2 : 3;

/* dx (or NULL), dy, x [rows, cols], mean, rstd [rows], weight [cols] or NULL, shares of dw and db [gridDim.x, cols] or NULL;
 * with ADD also dtotal [rows, cols], which is added to dx. */
template <typename T, int N, int V, bool ADD>
__global__ void __launch_bounds__(THREADS, BLOCKS_BWD<V>)
    layer_norm_bwd_narrow_kernel(T *dx, XtAcc<T> *share, XtAcc<T> *bias_share, const T *dy, const T *dtotal, const T *x,
                                 const T *weight, const XtAcc<T> *mean, const XtAcc<T> *rstd, int64_t rows, int cols, int lanes,
                                 XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    constexpr int R = ROWS_BWD<V>, WARPS = THREADS / 32;
    const int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    XtPiece<T, N> w[V];
    A dweight[V][N], dbias[V][N];
#pragma unroll
    for (int i = 0; i < V; i++) {
        const int col = (i * lanes + lane) * N;
        w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
#pragma unroll
        for (int e = 0; e < N; e++) dweight[i][e] = dbias[i][e] = 0;
    }
    const int64_t tile_rows = (int64_t)groups * R, step = gridDim.x * tile_rows;
    for (int64_t tile = blockIdx.x * tile_rows; tile < rows; tile += step) {
        XtPiece<T, N> xv[R][V], dv[R][V];
        A centre[R], scale[R];
#pragma unroll
        for (int k = 0; k < R; k++) {
            const int64_t r = tile + k * groups + group;
            centre[k] = r < rows ? mean[r] : A(0);
            scale[k] = r < rows ? rstd[r] : A(0);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const int col = (i * lanes + lane) * N;
                const bool here = r < rows && col < cols;
                xv[k][i] = here ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
                dv[k][i] = here ? xt_read<T, N>(dy + r * cols + col) : all<T, N>(0); /* 0: nothing is added to any sum */
            }
        }
#pragma unroll
        for (int k = 0; k < R; k++) {
            const int64_t r = tile + k * groups + group;
            A sum[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < V; i++) take<T, N>(sum, dweight[i], dbias[i], dv[k][i], xv[k][i], w[i], centre[k], scale[k]);
            if (!dx) continue;
            XtPiece<T, N> other[V];
            if (ADD) {
#pragma unroll
                for (int i = 0; i < V; i++) { /* loaded while the lanes add up */
                    const int col = (i * lanes + lane) * N;
                    other[i] = r < rows && col < cols ? xt_read<T, N>(dtotal + r * cols + col) : all<T, N>(0);
                }
            }
            sum_of_lanes<2>(sum, lanes);
#pragma unroll
            for (int i = 0; i < V; i++) {
                const int col = (i * lanes + lane) * N;
                if (r >= rows || col >= cols) continue;
                const XtPiece<T, N> to = gradient_of_sums<T, N>(sum, inverse_cols, dv[k][i], xv[k][i], w[i], centre[k], scale[k]);
                xt_write(dx + r * cols + col, ADD ? rounded_sum<T, N>(to, other[i]) : to);
            }
        }
    }
    /* The groups of a warp, then the warps of the block: dw, then db in the same memory. */
    __shared__ A of_warp[WARPS][32 * V * N];
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        A *to = which ? bias_share : share;
        if (!to) continue;
        __syncthreads(); /* all warps have read dw */
#pragma unroll
        for (int i = 0; i < V; i++) {
#pragma unroll
            for (int e = 0; e < N; e++) {
                A sum = which ? dbias[i][e] : dweight[i][e];
                for (int apart = lanes; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
                if (threadIdx.x % 32 < lanes) of_warp[warp][(i * lanes + lane) * N + e] = sum;
            }
        }
        __syncthreads(); /* every warp has written */
        for (int col = threadIdx.x; col < cols; col += THREADS) {
            A sum = of_warp[0][col];
#pragma unroll
            for (int i = 1; i < WARPS; i++) sum += of_warp[i][col];
            to[(int64_t)blockIdx.x * cols + col] = sum;
        }
    }
}

/* ---- narrow, on Hopper --------------------------------------------------------------------------------------------------------- */

/* A row of 16-bit elements that all 32 lanes share comes through the warp's ring, as in rms_norm_bwd.cuh: the same bits. FULL:
 * every lane has columns in all V pieces, so none is asked. */
template <typename T, int V, bool ADD, bool FULL>
__global__ void __launch_bounds__(THREADS, BLOCKS_BWD<V>)
    layer_norm_bwd_ring_kernel(T *dx, float *share, float *bias_share, const T *dy, const T *dtotal, const T *x, const T *weight,
                               const float *mean, const float *rstd, int64_t rows, int columns, float inverse_cols) {
#ifdef XT_SM90A
    typedef XtRowRing<V, ADD ? 3 : 2, THREADS / 32, BLOCKS_BWD<V>> Ring;
    constexpr int N = XT_WIDTH<T>, WARPS = THREADS / 32, PITCH = Ring::PITCH / (int)sizeof(T);
    const int cols = FULL ? V * 32 * N : columns;
    extern __shared__ uint4 room[];
    xt_wait_for_previous();
    xt_let_next_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    XtPiece<T, N> w[V];
    float dweight[V][N], dbias[V][N];
#pragma unroll
    for (int i = 0; i < V; i++) {
        const int col = (i * 32 + lane) * N;
        w[i] = weight && (FULL || col < cols) ? xt_read<T, N>(weight + col) : all<T, N>(1);
#pragma unroll
        for (int e = 0; e < N; e++) dweight[i][e] = dbias[i][e] = 0;
    }
    Ring ring(room);
    const int64_t first = (int64_t)blockIdx.x * WARPS + warp, step = (int64_t)gridDim.x * WARPS, stride = step * cols;
    int left = first < rows ? (int)((rows - 1 - first) / step) + 1 : 0; /* rows of this warp */
    int64_t offset = first * cols;                                      /* of the row in x, dy, dtotal and dx */
    auto fill = [&](int stage, int64_t from) { ring.fill(stage, {x + from, dy + from, dtotal + from}, cols * (int)sizeof(T)); };
#pragma unroll 1
    for (int s = 0; s < Ring::STAGES && s < left; s++) fill(s, offset + s * stride);
    /* Lanes l and 16 + l have the mean and the rstd of the l-th of the next 16 rows: one load for 16 rows, long before the first of them.
     * A load for each row would make every row wait for memory that the ring keeps busy. */
    const float *numbers = (lane < 16 ? mean : rstd) + first + lane % 16 * step;
    float held = lane % 16 < left ? *numbers : 0.0f;
    numbers += 16 * step;
    float next_held = lane % 16 + 16 < left ? *numbers : 0.0f;
    int at = 0;
    for (; left > 0; left--, offset += stride) {
        ring.wait();
        const float centre = __shfl_sync(0xffffffffu, held, at), scale = __shfl_sync(0xffffffffu, held, at + 16);
        const T *row = (const T *)ring.data(); /* [inputs][PITCH] */
        auto piece = [&](int input, int i) {
            const int col = (i * 32 + lane) * N;
            return FULL || col < cols ? xt_read<T, N>(row + input * PITCH + col) : all<T, N>(0);
        };
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < V; i++) take<T, N>(sum, dweight[i], dbias[i], piece(1, i), piece(0, i), w[i], centre, scale);
        sum_of_lanes<2>(sum, 32);
        __syncwarp(); /* nothing is kept in registers: the row is read from shared memory again */
#pragma unroll
        for (int i = 0; i < V; i++) {
            const int col = (i * 32 + lane) * N;
            if (!FULL && col >= cols) continue;
            const XtPiece<T, N> to = gradient_of_sums<T, N>(sum, inverse_cols, piece(1, i), piece(0, i), w[i], centre, scale);
            xt_write(dx + offset + col, ADD ? rounded_sum<T, N>(to, piece(2, i)) : to);
        }
        __syncwarp(); /* every lane has read the stage: the stores of dx needed the values */
        if (left > Ring::STAGES) fill(ring.stage, offset + Ring::STAGES * stride);
        ring.advance();
        if (++at == 16) {
            at = 0, held = next_held, numbers += 16 * step;
            next_held = lane % 16 + 16 + 1 < left ? *numbers : 0.0f; /* `left` still counts this row */
        }
    }
    if (share) join_warps(share + (int64_t)blockIdx.x * cols, (float *)room, dweight, cols);
    if (bias_share) join_warps(bias_share + (int64_t)blockIdx.x * cols, (float *)room, dbias, cols);
#else
    XT_NO_SM90A();
#endif
}

/* ---- block ------------------------------------------------------------------------------------------------------------------- */

/* One piece a thread. Loads the next row before it sums this one. */
template <typename T, int N, bool ADD>
__global__ void __launch_bounds__(1024)
    layer_norm_bwd_block_kernel(T *dx, XtAcc<T> *share, XtAcc<T> *bias_share, const T *dy, const T *dtotal, const T *x,
                                const T *weight, const XtAcc<T> *mean, const XtAcc<T> *rstd, int64_t rows, int cols,
                                XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    const int col = threadIdx.x * N;
    const bool inside = col < cols;
    const XtPiece<T, N> w = weight && inside ? xt_read<T, N>(weight + col) : all<T, N>(1);
    XtPiece<T, N> next_x = all<T, N>(0), next_d = all<T, N>(0);
    A dweight[N] = {}, dbias[N] = {}, next_centre = 0, next_scale = 0;
    auto fetch = [&](int64_t r) {
        if (r >= rows) return;
        next_centre = mean[r];
        next_scale = rstd[r];
        if (!inside) return;
        next_x = xt_read<T, N>(x + r * cols + col);
        next_d = xt_read<T, N>(dy + r * cols + col);
    };
    fetch(blockIdx.x);
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const XtPiece<T, N> xv = next_x, dv = next_d;
        const A centre = next_centre, scale = next_scale;
        fetch(r + gridDim.x);
        A sum[2] = {0, 0};
        if (inside) take<T, N>(sum, dweight, dbias, dv, xv, w, centre, scale);
        if (!dx) continue;
        const XtPiece<T, N> other = ADD && inside ? xt_read<T, N>(dtotal + r * cols + col) : all<T, N>(0);
        block_sums(sum);
        sum[ALONG] *= inverse_cols;
        sum[LEVEL] *= inverse_cols;
        if (!inside) continue;
        const XtPiece<T, N> to = gradient<T, N>(sum, dv, xv, w, centre, scale);
        xt_write(dx + r * cols + col, ADD ? rounded_sum<T, N>(to, other) : to);
    }
    if (!inside) return;
    if (share) write_share<T, N>(share + (int64_t)blockIdx.x * cols + col, dweight);
    if (bias_share) write_share<T, N>(bias_share + (int64_t)blockIdx.x * cols + col, dbias);
}

/* ---- long -------------------------------------------------------------------------------------------------------------------- */

template <typename T, int N, bool ADD>
__global__ void __launch_bounds__(1024)
    layer_norm_bwd_long_kernel(T *dx, const T *dy, const T *dtotal, const T *x, const T *weight, const XtAcc<T> *mean,
                               const XtAcc<T> *rstd, int64_t rows, int64_t cols, XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        A sum[2] = {0, 0}, unused[2][N] = {};
        const A centre = mean[r], scale = rstd[r];
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            const XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            take<T, N>(sum, unused[0], unused[1], xt_read<T, N>(dy + r * cols + col), xt_read<T, N>(x + r * cols + col), w, centre,
                       scale);
        }
        block_sums(sum);
        sum[ALONG] *= inverse_cols;
        sum[LEVEL] *= inverse_cols;
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            const XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            const XtPiece<T, N> dv = xt_read<T, N>(dy + r * cols + col), xv = xt_read<T, N>(x + r * cols + col);
            const XtPiece<T, N> to = gradient<T, N>(sum, dv, xv, w, centre, scale);
            xt_write(dx + r * cols + col, ADD ? rounded_sum<T, N>(to, xt_read<T, N>(dtotal + r * cols + col)) : to);
        }
    }
}

/* Shares of dw and db, each [gridDim.y, cols]: a thread has one piece of the columns, a row of blocks one share. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    layer_norm_share_kernel(XtAcc<T> *share, XtAcc<T> *bias_share, const T *dy, const T *x, const XtAcc<T> *mean,
                            const XtAcc<T> *rstd, int64_t rows, int64_t cols) {
    using A = XtAcc<T>;
    for (int64_t col = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; col < cols; col += (int64_t)gridDim.x * THREADS * N) {
        A unused[2] = {0, 0}, dweight[N] = {}, dbias[N] = {};
#pragma unroll 4
        for (int64_t r = blockIdx.y; r < rows; r += gridDim.y)
            take<T, N>(unused, dweight, dbias, xt_read<T, N>(dy + r * cols + col), xt_read<T, N>(x + r * cols + col), all<T, N>(1),
                       mean[r], rstd[r]);
        write_share<T, N>(share + blockIdx.y * cols + col, dweight);
        write_share<T, N>(bias_share + blockIdx.y * cols + col, dbias);
    }
}

/* ---- launch ------------------------------------------------------------------------------------------------------------------- */

/* Number of shares: at most `most`, each of at least `each` rows (the last may have fewer). */
static int64_t shares_of(int64_t rows, int64_t each, int64_t most) {
    const int64_t count = xt_divide_up(rows, each);
    return count < most ? count : most;
}

/* Scratch memory for the shares of dw and, behind them, of db. */
template <typename A> static XtStatus allocate_shares(const XtLayerNormBwd *p, XtScratch *scratch, int64_t count, A *(&share)[2]) {
    if (!p->dweight && !p->dbias) return XT_OK;
    XT_CHECK(scratch->allocate((size_t)(2 * count * p->cols) * sizeof(A)));
    share[0] = (A *)scratch->data;
    share[1] = share[0] + count * p->cols;
    return XT_OK;
}

template <typename T, int N, int V, bool ADD>
static XtStatus bwd_narrow(const XtLayerNormBwd *p, XtScratch *scratch, int64_t *count, XtAcc<T> *(&share)[2]) {
    using A = XtAcc<T>;
    const int lanes = lanes_of(p->cols / N, V);
    *count = shares_of(p->rows, THREADS / lanes * ROWS_BWD<V>, XT_PLAN_MULTIPROCESSORS * BLOCKS_BWD<V>);
    XT_CHECK(allocate_shares(p, scratch, *count, share));
    if constexpr (sizeof(T) == 2 && N > 1 && V > 1) {
        typedef XtRowRing<V, ADD ? 3 : 2, THREADS / 32, BLOCKS_BWD<V>> Ring;
        /* Without dx nothing would wait for the loads from a stage before it is filled again. */
        if (lanes == 32 && p->dx && xt_has_ring() && p->rows >= XT_RING_ROWS * *count * (THREADS / 32)) {
            auto kernel =
                p->cols == V * 32 * N ? layer_norm_bwd_ring_kernel<T, V, ADD, true> : layer_norm_bwd_ring_kernel<T, V, ADD, false>;
            XT_CHECK(xt_allow_shared("layer_norm_bwd", kernel, Ring::BYTES));
            xt_launch_early(kernel, (unsigned)*count, THREADS, Ring::BYTES, (T *)p->dx, share[0], share[1], (const T *)p->dy,
                            (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->mean, (const A *)p->rstd,
                            p->rows, (int)p->cols, A(1) / (A)p->cols);
            return XT_OK;
        }
    }
    xt_launch(layer_norm_bwd_narrow_kernel<T, N, V, ADD>, (unsigned)*count, THREADS, 0, (T *)p->dx, share[0], share[1],
              (const T *)p->dy, (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->mean, (const A *)p->rstd,
              p->rows, (int)p->cols, lanes, A(1) / (A)p->cols);
    return XT_OK;
}
template <typename T, int N, bool ADD>
static XtStatus bwd_block(const XtLayerNormBwd *p, XtScratch *scratch, int64_t *count, XtAcc<T> *(&share)[2]) {
    using A = XtAcc<T>;
    const unsigned threads = warps_for(p->cols / N);
    *count = shares_of(p->rows, 4, XT_PLAN_MULTIPROCESSORS * 1024 / threads);
    XT_CHECK(allocate_shares(p, scratch, *count, share));
    xt_launch(layer_norm_bwd_block_kernel<T, N, ADD>, (unsigned)*count, threads, 0, (T *)p->dx, share[0], share[1],
              (const T *)p->dy, (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->mean, (const A *)p->rstd,
              p->rows, (int)p->cols, A(1) / (A)p->cols);
    return XT_OK;
}
template <typename T, int N, bool ADD>
static XtStatus bwd_long(const XtLayerNormBwd *p, XtScratch *scratch, int64_t *count, XtAcc<T> *(&share)[2]) {
    using A = XtAcc<T>;
    if (p->dx)
        xt_launch(layer_norm_bwd_long_kernel<T, N, ADD>, xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, 4)), 0,
                  (T *)p->dx, (const T *)p->dy, (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->mean,
                  (const A *)p->rstd, p->rows, p->cols, A(1) / (A)p->cols);
    if (!p->dweight && !p->dbias) return XT_OK;
    const int64_t fit = (1 << 20) / p->cols, most = 2 * XT_PLAN_MULTIPROCESSORS; /* 8 MB of shares */
    *count = shares_of(p->rows, 4, fit < 1 ? 1 : fit < most ? fit : most);
    XT_CHECK(allocate_shares(p, scratch, *count, share));
    const dim3 grid(xt_blocks(p->cols / N, THREADS), (unsigned)*count);
    xt_launch(layer_norm_share_kernel<T, N>, grid, THREADS, 0, share[0], share[1], (const T *)p->dy, (const T *)p->x,
              (const A *)p->mean, (const A *)p->rstd, p->rows, p->cols);
    return XT_OK;
}

template <typename T, bool ADD> static XtStatus backward(const XtLayerNormBwd *p) {
    using A = XtAcc<T>;
    constexpr int N = XT_WIDTH<T>;
    XtScratch scratch;
    int64_t count = 0;
    A *share[2] = {nullptr, nullptr};
    const bool aligned = xt_aligned<T>(p->cols, p->cols, p->dx, p->dy, p->dsum, p->x, p->weight);
    if (p->rows > 0) {
        switch (choose(aligned, aligned ? p->cols / N : p->cols, BLOCK_BWD)) {
        case PLAN_NARROW_1: XT_CHECK((bwd_narrow<T, N, 1, ADD>(p, &scratch, &count, share))); break;
        case PLAN_NARROW_2: XT_CHECK((bwd_narrow<T, N, 2, ADD>(p, &scratch, &count, share))); break;
        case PLAN_NARROW_3: XT_CHECK((bwd_narrow<T, N, 3, ADD>(p, &scratch, &count, share))); break;
        case PLAN_NARROW_4: /* four pieces of 16-bit elements are 64 sums a lane: too many registers */
            if constexpr (N <= 4) XT_CHECK((bwd_narrow<T, N, 4, ADD>(p, &scratch, &count, share)));
            else XT_CHECK((bwd_block<T, N, ADD>(p, &scratch, &count, share)));
            break;
        case PLAN_NARROW_PLAIN: XT_CHECK((bwd_narrow<T, 1, 4, ADD>(p, &scratch, &count, share))); break;
        case PLAN_BLOCK: XT_CHECK((bwd_block<T, N, ADD>(p, &scratch, &count, share))); break;
        case PLAN_LONG: XT_CHECK((bwd_long<T, N, ADD>(p, &scratch, &count, share))); break;
        case PLAN_LONG_PLAIN: XT_CHECK((bwd_long<T, 1, ADD>(p, &scratch, &count, share))); break;
        }
    }
    if (p->dweight || p->dbias) {
        const XtShares<T> both = {
            {(T *)p->dweight, (T *)p->dbias}, {share[0], share[1]}, {count, count}, {p->accumulate_weight, p->accumulate_bias}};
        xt_sum_shares(both, 2, p->cols);
    }
    return xt_launched("layer_norm_bwd", p->rows, p->cols);
}
