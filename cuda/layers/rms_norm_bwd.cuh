/* rms_norm_bwd.cuh - the backward of rms_norm, for rms_norm.cu, whose comment has the formula, the plans and the order of additions. */
#pragma once

#include "arch/overlap.cuh"
#include "arch/warp_ring.cuh"
#include "common/rms_norm.cuh"

static constexpr int BLOCK_BWD = 2048; /* most pieces in a row of a block */

/* ---- narrow ------------------------------------------------------------------------------------------------------------------ */

/* Rows that a lane has in flight, more if a row is one piece a lane; and blocks that fit in a multiprocessor by their registers. */
template <int V> constexpr int ROWS_BWD = V == 1 ? 2 : 1;
template <int V> constexpr int BLOCKS_BWD = V >= 3 ? 2 : V == 2 ? 3 : 4;
/* Whether the next tile is loaded before this one is summed; dtotal takes the registers for it. */
template <int V> constexpr bool AHEAD_BWD = V == 2;

/* The pieces of a lane in R rows of both inputs, from row `first` on, `apart` rows between them; zeros beyond the rows. */
template <typename T, int N, int V, int R>
__device__ inline void read_tile(XtPiece<T, N> (&dv)[R][V], XtPiece<T, N> (&xv)[R][V], XtAcc<T> (&scale)[R], const T *dy,
                                 const T *x, const XtAcc<T> *rstd, int64_t first, int apart, int64_t rows, int cols, int lanes,
                                 int lane) {
#pragma unroll
    for (int k = 0; k < R; k++) {
        int64_t r = first + k * apart;
        scale[k] = r < rows ? rstd[r] : XtAcc<T>(0);
#pragma unroll
        for (int i = 0; i < V; i++) {
            int col = (i * lanes + lane) * N;
            bool here = r < rows && col < cols;
            xv[k][i] = here ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
            dv[k][i] = here ? xt_read<T, N>(dy + r * cols + col) : all<T, N>(0);
        }
    }
}

/* dx (or NULL), dy, x [rows, cols], rstd [rows], weight [cols] or NULL, share [gridDim.x, cols] or NULL; with ADD also dtotal
 * [rows, cols]. */
template <typename T, int N, int V, bool ADD>
__global__ void __launch_bounds__(THREADS, BLOCKS_BWD<V>)
    rms_norm_bwd_narrow_kernel(T *dx, XtAcc<T> *share, const T *dy, const T *dtotal, const T *x, const T *weight,
                               const XtAcc<T> *rstd, int64_t rows, int cols, int lanes, XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    constexpr int R = ROWS_BWD<V>, WARPS = THREADS / 32;
    constexpr bool AHEAD = AHEAD_BWD<V> && sizeof(T) <= 4 && !ADD;
    int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    XtPiece<T, N> w[V], xv[R][V], dv[R][V];
    A dweight[V][N], scale[R];
#pragma unroll
    for (int i = 0; i < V; i++) {
        int col = (i * lanes + lane) * N;
        w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
#pragma unroll
        for (int e = 0; e < N; e++) dweight[i][e] = 0;
    }
    int64_t tile_rows = (int64_t)groups * R, step = gridDim.x * tile_rows, tile = blockIdx.x * tile_rows;
    if (AHEAD) read_tile<T, N, V, R>(dv, xv, scale, dy, x, rstd, tile + group, groups, rows, cols, lanes, lane);
    for (; tile < rows; tile += step) {
        XtPiece<T, N> next_x[R][V], next_d[R][V], other[R][V];
        A next_scale[R], sum[R];
        if (AHEAD)
            read_tile<T, N, V, R>(next_d, next_x, next_scale, dy, x, rstd, tile + step + group, groups, rows, cols, lanes, lane);
        else read_tile<T, N, V, R>(dv, xv, scale, dy, x, rstd, tile + group, groups, rows, cols, lanes, lane);
#pragma unroll
        for (int k = 0; k < R; k++) {
            sum[k] = 0;
#pragma unroll
            for (int i = 0; i < V; i++) sum[k] += dot<T, N>(dv[k][i], xv[k][i], w[i], scale[k], dweight[i]);
        }
        if (ADD && dx) { /* registers are free by now */
#pragma unroll
            for (int k = 0; k < R; k++) {
                int64_t r = tile + k * groups + group;
#pragma unroll
                for (int i = 0; i < V; i++) {
                    int col = (i * lanes + lane) * N;
                    other[k][i] = r < rows && col < cols ? xt_read<T, N>(dtotal + r * cols + col) : all<T, N>(0);
                }
            }
        }
        if (dx) {
            sum_of_lanes<R>(sum, lanes);
#pragma unroll
            for (int k = 0; k < R; k++) {
                int64_t r = tile + k * groups + group;
                A shrink = scale[k] * scale[k] * (sum[k] * inverse_cols);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    int col = (i * lanes + lane) * N;
                    if (r >= rows || col >= cols) continue;
                    XtPiece<T, N> to = input_gradient<T, N>(dv[k][i], xv[k][i], w[i], scale[k], shrink);
                    xt_write(dx + r * cols + col, ADD ? rounded_sum<T, N>(to, other[k][i]) : to);
                }
            }
        }
        if (AHEAD) {
#pragma unroll
            for (int k = 0; k < R; k++) {
                scale[k] = next_scale[k];
#pragma unroll
                for (int i = 0; i < V; i++) xv[k][i] = next_x[k][i], dv[k][i] = next_d[k][i];
            }
        }
    }
    if (!share) return;
    /* The groups of a warp, then the warps of the block. */
    __shared__ A of_warp[WARPS][32 * V * N];
    int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < V; i++) {
#pragma unroll
        for (int e = 0; e < N; e++) {
            A sum = dweight[i][e];
            for (int apart = lanes; apart < 32; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
            if (threadIdx.x % 32 < lanes) of_warp[warp][(i * lanes + lane) * N + e] = sum;
        }
    }
    __syncthreads();
    for (int col = threadIdx.x; col < cols; col += THREADS) {
        A sum = of_warp[0][col];
#pragma unroll
        for (int i = 1; i < WARPS; i++) sum += of_warp[i][col];
        share[(int64_t)blockIdx.x * cols + col] = sum;
    }
}

/* ---- narrow, on Hopper --------------------------------------------------------------------------------------------------------- */

/* With a sum, a row of 16-bit elements that all 32 lanes share comes through the warp's ring: the next rows are on their way while this
 * one is summed and written. Rows, lanes and sums are those of the kernel above: the same bits. */
template <typename T, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS_BWD<V>)
    rms_norm_bwd_ring_kernel(T *dx, float *share, const T *dy, const T *dtotal, const T *x, const T *weight, const float *rstd,
                             int64_t rows, int cols, float inverse_cols) {
#ifdef XT_SM90A
    typedef XtRowRing<V, 3, THREADS / 32, BLOCKS_BWD<V>> Ring;
    constexpr int N = XT_WIDTH<T>, WARPS = THREADS / 32, PITCH = Ring::PITCH / (int)sizeof(T);
    extern __shared__ uint4 room[];
    xt_wait_for_previous();
    xt_let_next_begin();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    XtPiece<T, N> w[V];
    float dweight[V][N];
#pragma unroll
    for (int i = 0; i < V; i++) {
        const int col = (i * 32 + lane) * N;
        w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
#pragma unroll
        for (int e = 0; e < N; e++) dweight[i][e] = 0;
    }
    Ring ring(room);
    auto fill = [&](int stage, int64_t r) {
        if (r < rows) ring.fill(stage, {x + r * cols, dy + r * cols, dtotal + r * cols}, cols * (int)sizeof(T));
    };
    const int64_t first = (int64_t)blockIdx.x * WARPS + warp, step = (int64_t)gridDim.x * WARPS;
#pragma unroll 1
    for (int s = 0; s < Ring::STAGES; s++) fill(s, first + s * step);
    float next_scale = first < rows ? rstd[first] : 0;
    for (int64_t r = first; r < rows; r += step) {
        const float scale = next_scale;
        if (r + step < rows) next_scale = rstd[r + step];
        ring.wait();
        const T *row = (const T *)ring.data(); /* [inputs][PITCH] */
        auto piece = [&](int input, int i) {
            const int col = (i * 32 + lane) * N;
            return col < cols ? xt_read<T, N>(row + input * PITCH + col) : all<T, N>(0);
        };
        float sum[1] = {0};
#pragma unroll
        for (int i = 0; i < V; i++) sum[0] += dot<T, N>(piece(1, i), piece(0, i), w[i], scale, dweight[i]);
        sum_of_lanes<1>(sum, 32);
        const float shrink = scale * scale * (sum[0] * inverse_cols);
        __syncwarp(); /* nothing is kept in registers: the row is read from shared memory again */
#pragma unroll
        for (int i = 0; i < V; i++) {
            const int col = (i * 32 + lane) * N;
            if (col >= cols) continue;
            const XtPiece<T, N> to = input_gradient<T, N>(piece(1, i), piece(0, i), w[i], scale, shrink);
            xt_write(dx + r * cols + col, rounded_sum<T, N>(to, piece(2, i)));
        }
        __syncwarp(); /* every lane has read the stage: the stores of dx needed the values */
        fill(ring.stage, r + Ring::STAGES * step);
        ring.advance();
    }
    if (share) join_warps(share + (int64_t)blockIdx.x * cols, (float *)room, dweight, cols);
#else
    XT_NO_SM90A();
#endif
}

/* ---- block ------------------------------------------------------------------------------------------------------------------- */

/* The pieces of row r of both inputs, zeros beyond the row. */
template <typename T, int N, int V>
__device__ inline void read_row(XtPiece<T, N> *dv, XtPiece<T, N> *xv, const T *dy, const T *x, int64_t r, int cols) {
#pragma unroll
    for (int i = 0; i < V; i++) {
        int col = (i * blockDim.x + threadIdx.x) * N;
        xv[i] = col < cols ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
        dv[i] = col < cols ? xt_read<T, N>(dy + r * cols + col) : all<T, N>(0);
    }
}

/* Loads the next row before it sums this one, if there are registers for it. */
template <typename T, int N, int V, bool ADD>
__global__ void __launch_bounds__(1024)
    rms_norm_bwd_block_kernel(T *dx, XtAcc<T> *share, const T *dy, const T *dtotal, const T *x, const T *weight,
                              const XtAcc<T> *rstd, int64_t rows, int cols, XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    constexpr bool AHEAD = V == 1;
    XtPiece<T, N> w[V], xv[V], dv[V];
    A dweight[V][N], scale = 0;
#pragma unroll
    for (int i = 0; i < V; i++) {
        int col = (i * blockDim.x + threadIdx.x) * N;
        w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
#pragma unroll
        for (int e = 0; e < N; e++) dweight[i][e] = 0;
    }
    int64_t r = blockIdx.x;
    if (AHEAD && r < rows) {
        read_row<T, N, V>(dv, xv, dy, x, r, cols);
        scale = rstd[r];
    }
    for (; r < rows; r += gridDim.x) {
        XtPiece<T, N> next_x[V], next_d[V], other[V];
        A next_scale = 0;
        if (!AHEAD) {
            read_row<T, N, V>(dv, xv, dy, x, r, cols);
            scale = rstd[r];
        } else if (r + gridDim.x < rows) {
            read_row<T, N, V>(next_d, next_x, dy, x, r + gridDim.x, cols);
            next_scale = rstd[r + gridDim.x];
        }
        if (ADD && dx) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                int col = (i * blockDim.x + threadIdx.x) * N;
                other[i] = col < cols ? xt_read<T, N>(dtotal + r * cols + col) : all<T, N>(0);
            }
        }
        A sum = 0;
#pragma unroll
        for (int i = 0; i < V; i++) sum += dot<T, N>(dv[i], xv[i], w[i], scale, dweight[i]);
        if (dx) {
            A shrink = scale * scale * (xt_block_sum(sum) * inverse_cols);
#pragma unroll
            for (int i = 0; i < V; i++) {
                int col = (i * blockDim.x + threadIdx.x) * N;
                if (col >= cols) continue;
                XtPiece<T, N> to = input_gradient<T, N>(dv[i], xv[i], w[i], scale, shrink);
                xt_write(dx + r * cols + col, ADD ? rounded_sum<T, N>(to, other[i]) : to);
            }
        }
        if (AHEAD) {
#pragma unroll
            for (int i = 0; i < V; i++) xv[i] = next_x[i], dv[i] = next_d[i];
            scale = next_scale;
        }
    }
    if (!share) return;
#pragma unroll
    for (int i = 0; i < V; i++) {
        int col = (i * blockDim.x + threadIdx.x) * N;
        if (col < cols) write_share<T, N>(share + (int64_t)blockIdx.x * cols + col, dweight[i]);
    }
}

/* ---- long -------------------------------------------------------------------------------------------------------------------- */

template <typename T, int N, bool ADD, bool PLUS>
__global__ void __launch_bounds__(1024)
    rms_norm_bwd_long_kernel(T *dx, const T *dy, const T *dtotal, const T *x, const T *weight, const XtAcc<T> *rstd, int64_t rows,
                             int64_t cols, XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        A sum = 0, scale = rstd[r], unused[N] = {};
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            sum += dot<T, N, PLUS>(xt_read<T, N>(dy + r * cols + col), xt_read<T, N>(x + r * cols + col), w, scale, unused);
        }
        A shrink = scale * scale * (xt_block_sum(sum) * inverse_cols);
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            XtPiece<T, N> dv = xt_read<T, N>(dy + r * cols + col), xv = xt_read<T, N>(x + r * cols + col);
            XtPiece<T, N> to = input_gradient<T, N, PLUS>(dv, xv, w, scale, shrink);
            xt_write(dx + r * cols + col, ADD ? rounded_sum<T, N>(to, xt_read<T, N>(dtotal + r * cols + col)) : to);
        }
    }
}

/* share [gridDim.y, cols]: a thread has one piece of the columns, a row of blocks one share. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    rms_norm_share_kernel(XtAcc<T> *share, const T *dy, const T *x, const XtAcc<T> *rstd, int64_t rows, int64_t cols) {
    using A = XtAcc<T>;
    for (int64_t col = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N; col < cols; col += (int64_t)gridDim.x * THREADS * N) {
        A sum[N] = {};
#pragma unroll 4
        for (int64_t r = blockIdx.y; r < rows; r += gridDim.y)
            dot<T, N>(xt_read<T, N>(dy + r * cols + col), xt_read<T, N>(x + r * cols + col), all<T, N>(1), rstd[r], sum);
        write_share<T, N>(share + blockIdx.y * cols + col, sum);
    }
}

/* ---- launch ------------------------------------------------------------------------------------------------------------------- */

/* Number of shares of dw: at most `most`, each of at least `each` rows (the last may have fewer). */
static int64_t shares_of(int64_t rows, int64_t each, int64_t most) {
    int64_t count = xt_divide_up(rows, each);
    return count < most ? count : most;
}

template <typename T, int N, int V, bool ADD>
static void bwd_narrow(const XtRmsNormBwd *p, XtScratch *scratch, XtStatus *status, int64_t *shares) {
    using A = XtAcc<T>;
    int lanes = lanes_of(p->cols / N, V);
    *shares = shares_of(p->rows, THREADS / lanes * ROWS_BWD<V>, XT_PLAN_MULTIPROCESSORS * BLOCKS_BWD<V>);
    if (p->dweight) *status = scratch->allocate((size_t)(*shares * p->cols) * sizeof(A));
    if (*status != XT_OK) return;
    if constexpr (sizeof(T) == 2 && N > 1 && V == 4 && ADD) { /* where it is faster: docs/worklog/cuda-kernels.md */
        typedef XtRowRing<V, 3, THREADS / 32, BLOCKS_BWD<V>> Ring;
        /* Without dx nothing would wait for the loads from a stage before it is filled again. */
        if (lanes == 32 && p->dx && xt_has_ring() && p->rows >= XT_RING_ROWS * *shares * (THREADS / 32)) {
            auto kernel = rms_norm_bwd_ring_kernel<T, V>;
            *status = xt_allow_shared("rms_norm_bwd", kernel, Ring::BYTES);
            if (*status != XT_OK) return;
            return xt_launch_early(kernel, (unsigned)*shares, THREADS, Ring::BYTES, (T *)p->dx, (A *)scratch->data,
                                   (const T *)p->dy, (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->rstd,
                                   p->rows, (int)p->cols, A(1) / (A)p->cols);
        }
    }
    xt_launch(rms_norm_bwd_narrow_kernel<T, N, V, ADD>, (unsigned)*shares, THREADS, 0, (T *)p->dx, (A *)scratch->data,
              (const T *)p->dy, (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->rstd, p->rows,
              (int)p->cols, lanes, A(1) / (A)p->cols);
}
template <typename T, int N, int V, bool ADD>
static void bwd_block(const XtRmsNormBwd *p, XtScratch *scratch, XtStatus *status, int64_t *shares) {
    using A = XtAcc<T>;
    unsigned threads = warps_for(xt_divide_up(p->cols / N, V));
    *shares = shares_of(p->rows, 4, XT_PLAN_MULTIPROCESSORS * 1024 / threads);
    if (p->dweight) *status = scratch->allocate((size_t)(*shares * p->cols) * sizeof(A));
    if (*status != XT_OK) return;
    xt_launch(rms_norm_bwd_block_kernel<T, N, V, ADD>, (unsigned)*shares, threads, 0, (T *)p->dx, (A *)scratch->data,
              (const T *)p->dy, (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->rstd, p->rows,
              (int)p->cols, A(1) / (A)p->cols);
}
template <typename T, int N, bool ADD>
static void bwd_long(const XtRmsNormBwd *p, XtScratch *scratch, XtStatus *status, int64_t *shares) {
    using A = XtAcc<T>;
    if (p->dx)
        xt_launch(p->plus_one && p->weight ? rms_norm_bwd_long_kernel<T, N, ADD, true> : rms_norm_bwd_long_kernel<T, N, ADD, false>,
                  xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, 4)), 0, (T *)p->dx, (const T *)p->dy,
                  (const T *)p->dsum, (const T *)p->x, (const T *)p->weight, (const A *)p->rstd, p->rows, p->cols,
                  A(1) / (A)p->cols);
    if (!p->dweight) return;
    int64_t fit = (1 << 21) / p->cols, most = 2 * XT_PLAN_MULTIPROCESSORS; /* 8 MB of shares */
    *shares = shares_of(p->rows, 4, fit < 1 ? 1 : fit < most ? fit : most);
    *status = scratch->allocate((size_t)(*shares * p->cols) * sizeof(A));
    if (*status != XT_OK) return;
    dim3 grid(xt_blocks(p->cols / N, THREADS), (unsigned)*shares);
    xt_launch(rms_norm_share_kernel<T, N>, grid, THREADS, 0, (A *)scratch->data, (const T *)p->dy, (const T *)p->x,
              (const A *)p->rstd, p->rows, p->cols);
}

template <typename T, bool ADD> static XtStatus backward(const XtRmsNormBwd *p) {
    constexpr int N = XT_WIDTH<T>;
    XtScratch scratch;
    XtStatus status = XT_OK;
    int64_t shares = 0;
    bool aligned = xt_aligned<T>(p->cols, p->cols, p->dx, p->dy, p->x, p->weight, p->dsum);
    int64_t pieces = aligned ? p->cols / N : p->cols;
    if (p->rows > 0) {
        switch (choose(aligned, pieces, BLOCK_BWD, p->plus_one && p->weight)) {
        case PLAN_NARROW_1: bwd_narrow<T, N, 1, ADD>(p, &scratch, &status, &shares); break;
        case PLAN_NARROW_2: bwd_narrow<T, N, 2, ADD>(p, &scratch, &status, &shares); break;
        case PLAN_NARROW_3: bwd_narrow<T, N, 3, ADD>(p, &scratch, &status, &shares); break;
        case PLAN_NARROW_4: bwd_narrow<T, N, 4, ADD>(p, &scratch, &status, &shares); break;
        case PLAN_NARROW_PLAIN: bwd_narrow<T, 1, 4, ADD>(p, &scratch, &status, &shares); break;
        case PLAN_BLOCK:
            if (pieces <= 1024) bwd_block<T, N, 1, ADD>(p, &scratch, &status, &shares);
            else bwd_block<T, N, 2, ADD>(p, &scratch, &status, &shares);
            break;
        case PLAN_LONG: bwd_long<T, N, ADD>(p, &scratch, &status, &shares); break;
        case PLAN_LONG_PLAIN: bwd_long<T, 1, ADD>(p, &scratch, &status, &shares); break;
        }
    }
    if (status != XT_OK) return status;
    if (p->dweight) {
        const XtShares<T> one = {{(T *)p->dweight}, {(const XtAcc<T> *)scratch.data}, {shares}, {p->accumulate}};
        xt_sum_shares(one, 1, p->cols);
    }
    return xt_launched("rms_norm_bwd", p->rows, p->cols);
}
