/* layer_norm.cu - layer normalisation (Ba, Kiros & Hinton 2016, https://arxiv.org/abs/1607.06450).
 *
 *     forward    mean = mean_j x_j,  rstd = 1 / sqrt(mean_j (x_j - mean)^2 + eps),  xh = (x - mean) rstd,  out = w xh + b
 *     backward   with g = dy w:  dx = rstd (g - mean_j(g_j) - xh mean_j(g_j xh_j)),  dw = sum_rows dy xh,  db = sum_rows dy
 *
 * With a residual: x + residual, rounded, is written to `sum` and stands for x (4 elements moved forward); backward adds dsum to dx, also
 * after rounding (4 moved).
 *
 * x, out, dy, dx [rows, cols] dense, mean and rstd [rows] of ACC, w, b, dw, db [cols]. The mean is known before the first square: the row
 * is in registers by then. 2 elements moved forward, 3 backward. The plans are those of rms_norm (rms_norm.cu), but the backward
 * keeps two sums for every column in registers, so
 *
 *     narrow   up to 96 pieces of 16 bytes, 128 of four-byte elements and wider: lanes of a warp share a row. On Hopper, backward,
 *              rows of 16 bits that 32 lanes share (264 to 768 columns) come through a ring, if they are many and dx is asked for
 *     block    up to 4096 (forward) and 1024 (backward) pieces: a block has one row at a time
 *     long     all other rows, also unaligned ones: read three times forward, twice backward, all but the first from the cache
 *
 * dw and db: shares of blocks as in rms_norm, the shares of dw first, then those of db; one launch adds both. The backward is in
 * layer_norm_bwd.cuh.
 */
#include "layers/layer_norm_bwd.cuh"

static constexpr int BLOCK_FWD = 4096; /* most pieces in a row of a block */

/* ---- narrow ------------------------------------------------------------------------------------------------------------------ */

/* Rows that a lane has in flight, more if a row is one piece a lane; and blocks that fit in a multiprocessor by their registers. */
template <int V> constexpr int ROWS_FWD = V == 1 ? 4 : V <= 3 ? 2 : 1;
template <int V> constexpr int BLOCKS_FWD = V >= 3 ? 3 : 4;

/* out, x [rows, cols], mean, rstd [rows], weight, bias [cols] or NULL; with ADD also total and residual [rows, cols]. `lanes` share a row;
 * a tile is R rows for each group of lanes. */
template <typename T, int N, int V, bool ADD>
__global__ void __launch_bounds__(THREADS, BLOCKS_FWD<V>)
    layer_norm_fwd_narrow_kernel(T *out, XtAcc<T> *mean, XtAcc<T> *rstd, T *total, const T *x, const T *residual, const T *weight,
                                 const T *bias, int64_t rows, int cols, int lanes, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    constexpr int R = ROWS_FWD<V>;
    const int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    const int64_t tile_rows = (int64_t)groups * R, step = gridDim.x * tile_rows;
    for (int64_t tile = blockIdx.x * tile_rows; tile < rows; tile += step) {
        XtPiece<T, N> v[R][V], other[R][V];
        A centre[R], sum[R];
#pragma unroll
        for (int k = 0; k < R; k++) {
            const int64_t r = tile + k * groups + group;
            centre[k] = 0;
#pragma unroll
            for (int i = 0; i < V; i++) {
                const int col = (i * lanes + lane) * N;
                v[k][i] = r < rows && col < cols ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
                if (ADD) other[k][i] = r < rows && col < cols ? xt_read<T, N>(residual + r * cols + col) : all<T, N>(0);
            }
        }
        if (ADD) {
#pragma unroll
            for (int k = 0; k < R; k++) {
                const int64_t r = tile + k * groups + group;
#pragma unroll
                for (int i = 0; i < V; i++) {
                    const int col = (i * lanes + lane) * N;
                    v[k][i] = rounded_sum<T, N>(v[k][i], other[k][i]);
                    if (r < rows && col < cols) xt_write(total + r * cols + col, v[k][i]);
                }
            }
        }
#pragma unroll
        for (int k = 0; k < R; k++)
#pragma unroll
            for (int i = 0; i < V; i++) centre[k] += elements<T, N>(v[k][i]);
        sum_of_lanes<R>(centre, lanes);
#pragma unroll
        for (int k = 0; k < R; k++) {
            centre[k] *= inverse_cols;
            sum[k] = 0;
#pragma unroll
            for (int i = 0; i < V; i++)
                if ((i * lanes + lane) * N < cols) sum[k] += squares_from<T, N>(v[k][i], centre[k]);
        }
        sum_of_lanes<R>(sum, lanes);
#pragma unroll
        for (int k = 0; k < R; k++) sum[k] = reciprocal_root(sum[k] * inverse_cols + eps);
#pragma unroll
        for (int k = 0; k < R; k++) {
            const int64_t r = tile + k * groups + group;
            if (r < rows && lane == 0) mean[r] = centre[k], rstd[r] = sum[k];
        }
#pragma unroll
        for (int i = 0; i < V; i++) { /* weight and bias come from the cache, and take no registers before */
            const int col = (i * lanes + lane) * N;
            if (col >= cols) continue;
            const XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            const XtPiece<T, N> b = bias ? xt_read<T, N>(bias + col) : all<T, N>(0);
#pragma unroll
            for (int k = 0; k < R; k++) {
                const int64_t r = tile + k * groups + group;
                if (r < rows) xt_write(out + r * cols + col, scaled<T, N>(v[k][i], w, b, centre[k], sum[k]));
            }
        }
    }
}

/* ---- block ------------------------------------------------------------------------------------------------------------------- */

/* As above; a block has one row at a time, piece i of thread t is i * blockDim.x + t. */
template <typename T, int N, int V, bool ADD>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd_block_kernel(T *out, XtAcc<T> *mean, XtAcc<T> *rstd, T *total, const T *x, const T *residual, const T *weight,
                                const T *bias, int64_t rows, int cols, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        XtPiece<T, N> v[V], other[V];
        A centre = 0, sum = 0;
#pragma unroll
        for (int i = 0; i < V; i++) {
            const int col = (i * blockDim.x + threadIdx.x) * N;
            v[i] = col < cols ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
            if (ADD) other[i] = col < cols ? xt_read<T, N>(residual + r * cols + col) : all<T, N>(0);
        }
        if (ADD) {
#pragma unroll
            for (int i = 0; i < V; i++) {
                const int col = (i * blockDim.x + threadIdx.x) * N;
                v[i] = rounded_sum<T, N>(v[i], other[i]);
                if (col < cols) xt_write(total + r * cols + col, v[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < V; i++) centre += elements<T, N>(v[i]);
        centre = xt_block_sum(centre) * inverse_cols;
#pragma unroll
        for (int i = 0; i < V; i++)
            if ((i * (int)blockDim.x + (int)threadIdx.x) * N < cols) sum += squares_from<T, N>(v[i], centre);
        sum = reciprocal_root(xt_block_sum(sum) * inverse_cols + eps);
        if (threadIdx.x == 0) mean[r] = centre, rstd[r] = sum;
#pragma unroll
        for (int i = 0; i < V; i++) {
            const int col = (i * blockDim.x + threadIdx.x) * N;
            if (col >= cols) continue;
            const XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            const XtPiece<T, N> b = bias ? xt_read<T, N>(bias + col) : all<T, N>(0);
            xt_write(out + r * cols + col, scaled<T, N>(v[i], w, b, centre, sum));
        }
    }
}

/* ---- long -------------------------------------------------------------------------------------------------------------------- */

template <typename T, int N, bool ADD>
__global__ void __launch_bounds__(1024)
    layer_norm_fwd_long_kernel(T *out, XtAcc<T> *mean, XtAcc<T> *rstd, T *total, const T *x, const T *residual, const T *weight,
                               const T *bias, int64_t rows, int64_t cols, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *from = (ADD ? total : x) + r * cols; /* [cols] */
        T *to = out + r * cols;                       /* [cols] */
        A centre = 0, sum = 0;
        if (ADD) { /* a thread reads back what it wrote itself */
#pragma unroll 4
            for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
                const XtPiece<T, N> v = xt_read<T, N>(x + r * cols + col);
                xt_write(total + r * cols + col, rounded_sum<T, N>(v, xt_read<T, N>(residual + r * cols + col)));
            }
        }
#pragma unroll 4
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) centre += elements<T, N>(xt_read<T, N>(from + col));
        centre = xt_block_sum(centre) * inverse_cols;
#pragma unroll 4
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N)
            sum += squares_from<T, N>(xt_read<T, N>(from + col), centre);
        sum = reciprocal_root(xt_block_sum(sum) * inverse_cols + eps);
        if (threadIdx.x == 0) mean[r] = centre, rstd[r] = sum;
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            const XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            const XtPiece<T, N> b = bias ? xt_read<T, N>(bias + col) : all<T, N>(0);
            xt_write(to + col, scaled<T, N>(xt_read<T, N>(from + col), w, b, centre, sum));
        }
    }
}

/* ---- slots ------------------------------------------------------------------------------------------------------------------- */

template <typename T, bool ADD> struct Forward {
    using A = XtAcc<T>;
    template <int N, int V> static void narrow(const XtLayerNormFwd *p) {
        const int lanes = lanes_of(p->cols / N, V);
        xt_launch(layer_norm_fwd_narrow_kernel<T, N, V, ADD>, xt_blocks(p->rows, THREADS / lanes * ROWS_FWD<V>), THREADS, 0,
                  (T *)p->out, (A *)p->mean, (A *)p->rstd, (T *)p->sum, (const T *)p->x, (const T *)p->residual,
                  (const T *)p->weight, (const T *)p->bias, p->rows, (int)p->cols, lanes, A(1) / (A)p->cols, (A)p->eps);
    }
    template <int N, int V> static void block(const XtLayerNormFwd *p) {
        xt_launch(layer_norm_fwd_block_kernel<T, N, V, ADD>, xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, V)), 0,
                  (T *)p->out, (A *)p->mean, (A *)p->rstd, (T *)p->sum, (const T *)p->x, (const T *)p->residual,
                  (const T *)p->weight, (const T *)p->bias, p->rows, (int)p->cols, A(1) / (A)p->cols, (A)p->eps);
    }
    template <int N> static void long_rows(const XtLayerNormFwd *p) {
        xt_launch(layer_norm_fwd_long_kernel<T, N, ADD>, xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, 4)), 0,
                  (T *)p->out, (A *)p->mean, (A *)p->rstd, (T *)p->sum, (const T *)p->x, (const T *)p->residual,
                  (const T *)p->weight, (const T *)p->bias, p->rows, p->cols, A(1) / (A)p->cols, (A)p->eps);
    }
};

template <typename T, bool ADD> static XtStatus forward(const XtLayerNormFwd *p) {
    constexpr int N = XT_WIDTH<T>;
    const bool aligned = xt_aligned<T>(p->cols, p->cols, p->out, p->x, p->weight, p->bias, p->sum, p->residual);
    launch_forward<Forward<T, ADD>, N>(choose(aligned, aligned ? p->cols / N : p->cols, BLOCK_FWD), p);
    return xt_launched("layer_norm_fwd", p->rows, p->cols);
}

XtStatus xt_cuda_layer_norm_fwd(const XtLayerNormFwd *p) {
    if (p->rows == 0 || p->cols == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        return p->sum ? forward<T, true>(p) : forward<T, false>(p);
    });
}

XtStatus xt_cuda_layer_norm_bwd(const XtLayerNormBwd *p) {
    const bool adds = (p->dweight && !p->accumulate_weight) || (p->dbias && !p->accumulate_bias);
    if (p->cols == 0 || (!p->dx && !p->dweight && !p->dbias) || (p->rows == 0 && !adds)) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        return p->dsum ? backward<T, true>(p) : backward<T, false>(p);
    });
}
