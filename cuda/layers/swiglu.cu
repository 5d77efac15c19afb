/* swiglu.cu - the gated activation of the MLP (Shazeer 2020, https://arxiv.org/abs/2002.05202).
 *
 *     forward    out = silu(gate) up,  silu(g) = g s,  s = sigmoid(g) = 1 / (1 + exp(-g))
 *     backward   ds/dg = s (1 - s), hence  dgate = dy up s (1 + gate (1 - s)),   dup = dy gate s
 *
 * gate, up, dgate, dup [rows, cols] with rows ld_in apart (two tensors, or the halves of one); out and dy [rows, cols] dense.
 *
 * Plan: a thread has two 16-byte pieces of a row, 256 pieces apart, and loads both before it computes. Without gaps between the
 * rows all of them are one long row, and only its last piece may be short. Unaligned views: one element a piece. Moved: 3 elements
 * read or written per output forward, 5 backward; at 2 bytes each the exponential and the division must be cheap (swiglu.cuh). An output
 * depends on its own inputs alone, which are read before they are overwritten.
 */
#include "arch/overlap.cuh"
#include "common/cuda.cuh"
#include "common/swiglu.cuh"
#include "contract/layers.h"

static constexpr int THREADS = 256;
static constexpr int PIECES = 2; /* of one thread, in flight together */

/* `count` elements: a whole piece, or the short end of the one long row. */
template <typename T, int N> __device__ inline XtPiece<T, N> read(const T *p, int64_t count) {
    if (count >= N) return xt_read<T, N>(p);
    XtVector<T, N> v;
#pragma unroll
    for (int e = 0; e < N; e++) v.at[e] = e < count ? p[e] : xt_store<T>(0);
    return xt_piece(v);
}
template <typename T, int N> __device__ inline void write(T *p, const XtVector<XtAcc<T>, N> &values, int64_t count) {
    XtPiece<T, N> piece = xt_store<T>(values);
    if (count >= N) return xt_write(p, piece);
    XtVector<T, N> v = xt_elements(piece);
#pragma unroll
    for (int e = 0; e < N; e++)
        if (e < count) p[e] = v.at[e];
}

/* Where piece i lies: of `per_row` pieces in every row. */
struct Place {
    int64_t dense, strided,
        count; /* offsets of its first element in dense and strided tensors; elements from there to the row's end */
};
template <int N> __device__ inline Place place(int64_t i, int64_t per_row, int64_t rows, int64_t cols, int64_t ld_in) {
    int64_t row = rows == 1 ? 0 : (int64_t)((uint64_t)i / (uint64_t)per_row), col = (i - row * per_row) * N;
    return {row * cols + col, row * ld_in + col, cols - col};
}

/* out [rows, cols]; gate, up [rows, cols], rows ld_in apart. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    swiglu_fwd_kernel(T *out, const T *gate, const T *up, int64_t rows, int64_t cols, int64_t ld_in) {
    using A = XtAcc<T>;
    xt_wait_for_previous();
    xt_let_next_begin();
    int64_t per_row = (cols + N - 1) / N, pieces = rows * per_row, step = (int64_t)gridDim.x * (THREADS * PIECES);
    for (int64_t first = (int64_t)blockIdx.x * (THREADS * PIECES) + threadIdx.x; first < pieces; first += step) {
        XtPiece<T, N> g[PIECES], u[PIECES];
        Place at[PIECES];
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            int64_t i = first + k * THREADS;
            if (i >= pieces) continue;
            at[k] = place<N>(i, per_row, rows, cols, ld_in);
            g[k] = read<T, N>(gate + at[k].strided, at[k].count);
            u[k] = read<T, N>(up + at[k].strided, at[k].count);
        }
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            if (first + k * THREADS >= pieces) continue;
            XtVector<A, N> y, of_g = xt_load(g[k]), of_u = xt_load(u[k]);
#pragma unroll
            for (int e = 0; e < N; e++) y.at[e] = xt_swiglu<T>(of_g.at[e], of_u.at[e]);
            write<T, N>(out + at[k].dense, y, at[k].count);
        }
    }
}

/* dgate, dup, gate, up [rows, cols], rows ld_in apart; dy [rows, cols]. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    swiglu_bwd_kernel(T *dgate, T *dup, const T *dy, const T *gate, const T *up, int64_t rows, int64_t cols, int64_t ld_in) {
    using A = XtAcc<T>;
    int64_t per_row = (cols + N - 1) / N, pieces = rows * per_row, step = (int64_t)gridDim.x * (THREADS * PIECES);
    for (int64_t first = (int64_t)blockIdx.x * (THREADS * PIECES) + threadIdx.x; first < pieces; first += step) {
        XtPiece<T, N> d[PIECES], g[PIECES], u[PIECES];
        Place at[PIECES];
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            int64_t i = first + k * THREADS;
            if (i >= pieces) continue;
            at[k] = place<N>(i, per_row, rows, cols, ld_in);
            d[k] = read<T, N>(dy + at[k].dense, at[k].count);
            g[k] = read<T, N>(gate + at[k].strided, at[k].count);
            u[k] = read<T, N>(up + at[k].strided, at[k].count);
        }
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            if (first + k * THREADS >= pieces) continue;
            XtVector<A, N> of_dgate, of_dup, of_d = xt_load(d[k]), of_g = xt_load(g[k]), of_u = xt_load(u[k]);
#pragma unroll
            for (int e = 0; e < N; e++) xt_swiglu_bwd<T>(of_d.at[e], of_g.at[e], of_u.at[e], of_dgate.at[e], of_dup.at[e]);
            write<T, N>(dgate + at[k].strided, of_dgate, at[k].count);
            write<T, N>(dup + at[k].strided, of_dup, at[k].count);
        }
    }
}

template <typename T, int N> static void launch_fwd(const XtSwigluFwd *p, int64_t rows, int64_t cols) {
    unsigned blocks = xt_blocks(rows * xt_divide_up(cols, N), THREADS * PIECES);
    xt_launch_early(swiglu_fwd_kernel<T, N>, blocks, THREADS, 0, (T *)p->out, (const T *)p->gate, (const T *)p->up, rows, cols,
                    p->ld_in);
}
template <typename T, int N> static void launch_bwd(const XtSwigluBwd *p, int64_t rows, int64_t cols) {
    unsigned blocks = xt_blocks(rows * xt_divide_up(cols, N), THREADS * PIECES);
    xt_launch(swiglu_bwd_kernel<T, N>, blocks, THREADS, 0, (T *)p->dgate, (T *)p->dup, (const T *)p->dy, (const T *)p->gate,
              (const T *)p->up, rows, cols, p->ld_in);
}

XtStatus xt_cuda_swiglu_fwd(const XtSwigluFwd *p) {
    if (p->rows == 0 || p->cols == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = XT_WIDTH<T>;
        bool dense = p->rows == 1 || p->ld_in == p->cols; /* one long row */
        int64_t rows = dense ? 1 : p->rows, cols = dense ? p->rows * p->cols : p->cols;
        if (xt_aligned<T>(dense ? 0 : cols, dense ? 0 : p->ld_in, p->out, p->gate, p->up)) launch_fwd<T, N>(p, rows, cols);
        else launch_fwd<T, 1>(p, rows, cols);
        return xt_launched("swiglu_fwd", p->rows, p->cols);
    });
}

XtStatus xt_cuda_swiglu_bwd(const XtSwigluBwd *p) {
    if (p->rows == 0 || p->cols == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = XT_WIDTH<T>;
        bool dense = p->rows == 1 || p->ld_in == p->cols;
        int64_t rows = dense ? 1 : p->rows, cols = dense ? p->rows * p->cols : p->cols;
        if (xt_aligned<T>(dense ? 0 : cols, dense ? 0 : p->ld_in, p->dgate, p->dup, p->dy, p->gate, p->up))
            launch_bwd<T, N>(p, rows, cols);
        else launch_bwd<T, 1>(p, rows, cols);
        return xt_launched("swiglu_bwd", p->rows, p->cols);
    });
}
