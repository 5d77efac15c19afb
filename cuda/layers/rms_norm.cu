/* rms_norm.cu - root mean square normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).
 *
 *     forward    rstd = 1 / sqrt(mean_j x_j^2 + eps),  xh = x rstd,  out = w cast(xh)
 *     backward   with g = dy w:  d rstd / dx_i = -rstd^3 x_i / cols, hence
 *                dx_i = rstd (g_i - xh_i mean_j(g_j xh_j)),   dw_j = sum_rows dy_j xh_j
 *
 * With a residual: x + residual, rounded, is written to `sum` and stands for x (4 elements moved forward); backward adds dsum to
 * dx, both rounded first (4 moved). The bits are those of the op add and this one after the other.
 *
 * x, out, dy, dx [rows, cols] dense, rstd [rows] of ACC, w and dw [cols]. A row is held in the registers of the threads that share
 * it, so every element is read once and written once: 2 elements moved forward, 3 backward. Three plans, by the number of 16-byte
 * pieces in a row:
 *
 *     narrow   up to 128 pieces (QK-norm; cols <= 1024 in bfloat16): 1 to 32 lanes of a warp share a row, V pieces a lane. V is 3
 *              where that leaves no lane idle, as for 384 and 768 columns, and 2 for 128 columns of 16 bits. A block of 256
 *              threads has 8 to 256 rows at a time. Sums over a row are shuffles. Unaligned rows: one element a piece.
 *              On Hopper, backward with a sum, rows of 16 bits of four pieces a lane come through a ring (arch/warp_ring.cuh), if they
 *              are many and dx is asked for: the same bits.
 *     block    up to 4096 (forward) and 2048 (backward) pieces: a block has one row at a time, V pieces a thread.
 *     long     all other rows, also unaligned ones: a block reads a row twice, the second time from the cache. With plus_one (PLUS) all
 *              rows: 1 + w stands for w, and out is rounded once.
 *
 * dw: block b of P owns the rows (or tiles of rows) b, b + P, b + 2P, ... and keeps its share of dw in registers, in ACC. The
 * shares go to scratch memory, [P, cols]. A second launch adds them: 64 slices of the shares, each in order (after dw itself, to
 * accumulate), then the slices in a tree. P depends on rows and cols alone, so every device gets the same bits. P is two to four
 * blocks for each of XT_PLAN_MULTIPROCESSORS, which keeps enough loads in flight; P cols is bounded, so that the shares stay in the
 * cache. The long plan makes dx and the shares of dw in separate launches. The backward is in rms_norm_bwd.cuh.
 */
#include "layers/rms_norm_bwd.cuh"

static constexpr int BLOCK_FWD = 4096; /* most pieces in a row of a block */

/* ---- narrow ------------------------------------------------------------------------------------------------------------------ */

/* Rows that a lane has in flight, more if a row is one piece a lane; and blocks that fit in a multiprocessor by their registers. */
template <int V> constexpr int ROWS_FWD = V == 1 ? 4 : V <= 3 ? 2 : 1;
template <int V> constexpr int BLOCKS_FWD = V >= 3 ? 3 : 4;

/* out, x [rows, cols], rstd [rows], weight [cols] or NULL; with ADD also total and residual [rows, cols]. `lanes` share a row; a tile is
 * R rows for each group of lanes. */
template <typename T, int N, int V, bool ADD>
__global__ void __launch_bounds__(THREADS, BLOCKS_FWD<V>)
    rms_norm_fwd_narrow_kernel(T *out, XtAcc<T> *rstd, T *total, const T *x, const T *residual, const T *weight, int64_t rows,
                               int cols, int lanes, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    constexpr int R = ROWS_FWD<V>;
    xt_wait_for_previous();
    xt_let_next_begin();
    int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    XtPiece<T, N> w[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
        int col = (i * lanes + lane) * N;
        w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
    }
    int64_t tile_rows = (int64_t)groups * R, step = gridDim.x * tile_rows;
    for (int64_t tile = blockIdx.x * tile_rows; tile < rows; tile += step) {
        XtPiece<T, N> v[R][V], other[R][V];
        A sum[R];
#pragma unroll
        for (int k = 0; k < R; k++) {
            int64_t r = tile + k * groups + group;
#pragma unroll
            for (int i = 0; i < V; i++) {
                int col = (i * lanes + lane) * N;
                v[k][i] = r < rows && col < cols ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
                if (ADD) other[k][i] = r < rows && col < cols ? xt_read<T, N>(residual + r * cols + col) : all<T, N>(0);
            }
        }
        if (ADD) {
#pragma unroll
            for (int k = 0; k < R; k++) {
                int64_t r = tile + k * groups + group;
#pragma unroll
                for (int i = 0; i < V; i++) {
                    int col = (i * lanes + lane) * N;
                    v[k][i] = rounded_sum<T, N>(v[k][i], other[k][i]);
                    if (r < rows && col < cols) xt_write(total + r * cols + col, v[k][i]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < R; k++) {
            sum[k] = 0;
#pragma unroll
            for (int i = 0; i < V; i++) sum[k] += squares<T, N>(v[k][i]);
        }
        sum_of_lanes<R>(sum, lanes);
#pragma unroll
        for (int k = 0; k < R; k++) sum[k] = reciprocal_root(sum[k] * inverse_cols + eps);
#pragma unroll
        for (int k = 0; k < R; k++) {
            int64_t r = tile + k * groups + group;
            if (r >= rows) continue;
            if (lane == 0) rstd[r] = sum[k];
#pragma unroll
            for (int i = 0; i < V; i++) {
                int col = (i * lanes + lane) * N;
                if (col < cols) xt_write(out + r * cols + col, normalised<T, N>(v[k][i], w[i], sum[k]));
            }
        }
    }
}

/* ---- block ------------------------------------------------------------------------------------------------------------------- */

/* As above; a block has one row at a time, piece i of thread t is i * blockDim.x + t. */
template <typename T, int N, int V, bool ADD>
__global__ void __launch_bounds__(1024)
    rms_norm_fwd_block_kernel(T *out, XtAcc<T> *rstd, T *total, const T *x, const T *residual, const T *weight, int64_t rows,
                              int cols, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    xt_wait_for_previous();
    xt_let_next_begin();
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        XtPiece<T, N> v[V], w[V], other[V];
        A sum = 0;
#pragma unroll
        for (int i = 0; i < V; i++) {
            int col = (i * blockDim.x + threadIdx.x) * N;
            v[i] = col < cols ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
            if (ADD) other[i] = col < cols ? xt_read<T, N>(residual + r * cols + col) : all<T, N>(0);
        }
#pragma unroll
        for (int i = 0; i < V; i++) { /* loaded while the row is summed */
            int col = (i * blockDim.x + threadIdx.x) * N;
            w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
        }
        if (ADD) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                int col = (i * blockDim.x + threadIdx.x) * N;
                v[i] = rounded_sum<T, N>(v[i], other[i]);
                if (col < cols) xt_write(total + r * cols + col, v[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < V; i++) sum += squares<T, N>(v[i]);
        sum = reciprocal_root(xt_block_sum(sum) * inverse_cols + eps);
        if (threadIdx.x == 0) rstd[r] = sum;
#pragma unroll
        for (int i = 0; i < V; i++) {
            int col = (i * blockDim.x + threadIdx.x) * N;
            if (col < cols) xt_write(out + r * cols + col, normalised<T, N>(v[i], w[i], sum));
        }
    }
}

/* ---- long -------------------------------------------------------------------------------------------------------------------- */

template <typename T, int N, bool ADD, bool PLUS>
__global__ void __launch_bounds__(1024)
    rms_norm_fwd_long_kernel(T *out, XtAcc<T> *rstd, T *total, const T *x, const T *residual, const T *weight, int64_t rows,
                             int64_t cols, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *from = (ADD ? total : x) + r * cols; /* [cols] */
        T *to = out + r * cols;                       /* [cols] */
        A sum = 0;
        if (ADD) { /* a thread reads back what it wrote itself */
#pragma unroll 4
            for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
                XtPiece<T, N> v = xt_read<T, N>(x + r * cols + col);
                xt_write(total + r * cols + col, rounded_sum<T, N>(v, xt_read<T, N>(residual + r * cols + col)));
            }
        }
#pragma unroll 4
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) sum += squares<T, N>(xt_read<T, N>(from + col));
        sum = reciprocal_root(xt_block_sum(sum) * inverse_cols + eps);
        if (threadIdx.x == 0) rstd[r] = sum;
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            xt_write(to + col, normalised<T, N, PLUS>(xt_read<T, N>(from + col), w, sum));
        }
    }
}

/* ---- slots ------------------------------------------------------------------------------------------------------------------- */

template <typename T, bool ADD> struct Forward {
    using A = XtAcc<T>;
    template <int N, int V> static void narrow(const XtRmsNormFwd *p) {
        int lanes = lanes_of(p->cols / N, V);
        xt_launch_early(rms_norm_fwd_narrow_kernel<T, N, V, ADD>, xt_blocks(p->rows, THREADS / lanes * ROWS_FWD<V>), THREADS, 0,
                        (T *)p->out, (A *)p->rstd, (T *)p->sum, (const T *)p->x, (const T *)p->residual, (const T *)p->weight,
                        p->rows, (int)p->cols, lanes, A(1) / (A)p->cols, (A)p->eps);
    }
    template <int N, int V> static void block(const XtRmsNormFwd *p) {
        xt_launch_early(rms_norm_fwd_block_kernel<T, N, V, ADD>, xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, V)), 0,
                        (T *)p->out, (A *)p->rstd, (T *)p->sum, (const T *)p->x, (const T *)p->residual, (const T *)p->weight,
                        p->rows, (int)p->cols, A(1) / (A)p->cols, (A)p->eps);
    }
    template <int N> static void long_rows(const XtRmsNormFwd *p) {
        xt_launch(p->plus_one && p->weight ? rms_norm_fwd_long_kernel<T, N, ADD, true> : rms_norm_fwd_long_kernel<T, N, ADD, false>,
                  xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, 4)), 0, (T *)p->out, (A *)p->rstd, (T *)p->sum,
                  (const T *)p->x, (const T *)p->residual, (const T *)p->weight, p->rows, p->cols, A(1) / (A)p->cols, (A)p->eps);
    }
};

template <typename T, bool ADD> static XtStatus forward(const XtRmsNormFwd *p) {
    constexpr int N = XT_WIDTH<T>;
    bool aligned = xt_aligned<T>(p->cols, p->cols, p->out, p->x, p->weight, p->sum, p->residual);
    launch_forward<Forward<T, ADD>, N>(choose(aligned, aligned ? p->cols / N : p->cols, BLOCK_FWD, p->plus_one && p->weight), p);
    return xt_launched("rms_norm_fwd", p->rows, p->cols);
}

XtStatus xt_cuda_rms_norm_fwd(const XtRmsNormFwd *p) {
    if (p->rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        return p->sum ? forward<T, true>(p) : forward<T, false>(p);
    });
}

XtStatus xt_cuda_rms_norm_bwd(const XtRmsNormBwd *p) {
    if (p->cols == 0 || (!p->dx && !p->dweight) || (p->rows == 0 && (!p->dweight || p->accumulate))) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        return p->dsum ? backward<T, true>(p) : backward<T, false>(p);
    });
}
