/* mhc_post.cu - writes a layer's output back to the streams of hyper-connections (Xie et al. 2025,
 * https://arxiv.org/abs/2512.24880).
 *
 *     forward    out_i = sum_j M_ij x_j + h_i y
 *     backward   dx_j = sum_i M_ij g_i (+ dx_add_j),   dy = sum_i h_i g_i,   dh_i = g_i . y,   dM_ij = g_i . x_j,   g = dout
 *
 * x, out, g, dx [T, n, C], y, dy [T, C] of one dtype; h [T, n], M [T, n, n] of ACC.
 *
 * A thread has 16 bytes of the channels of a token, in all streams: every element is read once and written once, (2n + 1) C
 * elements a token forward, (2n + 2) C backward without dx and (3n + 2) C with it. All threads of a token read the same
 * coefficients, through the L1 cache. Along a row, the n^2 + n sums of the backward stay in registers. Then a warp adds up 32 of
 * them with 31 exchanges, and the warps of the block follow in order: a fixed tree. Unaligned rows: one element a thread.
 */
#include "contract/mhc.h"
#include "mhc.cuh"

static constexpr int FWD_THREADS = 256, BWD_THREADS = 128;

/* Block (pieces, tokens). */
template <typename T, int N, int S>
__global__ void __launch_bounds__(FWD_THREADS, S == 4 ? 3 : 1)
    mhc_post_fwd_kernel(T *out, const T *__restrict__ x, const T *__restrict__ y, const XtAcc<T> *h_post, const XtAcc<T> *m_res,
                        int64_t tokens, int n, int64_t cols) {
    using A = XtAcc<T>;
    for (int64_t t = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; t < tokens; t += (int64_t)gridDim.x * blockDim.y) {
        const A *h = h_post + t * n, *m = m_res + t * n * n; /* [n], [n, n] */
        for (int64_t c = (int64_t)threadIdx.x * N; c < cols; c += (int64_t)blockDim.x * N) {
            const T *from = x + t * n * cols + c; /* [n, cols] from c */
            T *to = out + t * n * cols + c;       /* [n, cols] from c */
            XtPiece<T, N> xs[S], ys = xt_read<T, N>(y + t * cols + c);
#pragma unroll
            for (int j = 0; j < S; j++)
                if (xt_mhc_stream<S>(j, n)) xs[j] = xt_read<T, N>(from + j * cols);
            XtVector<A, N> v[S], w = xt_load(ys);
#pragma unroll
            for (int j = 0; j < S; j++)
                if (xt_mhc_stream<S>(j, n)) v[j] = xt_load(xs[j]);
#pragma unroll
            for (int i = 0; i < S; i++) {
                if (!xt_mhc_stream<S>(i, n)) continue;
                XtVector<A, N> sum;
                A share = h[i];
#pragma unroll
                for (int e = 0; e < N; e++) sum.at[e] = share * w.at[e];
#pragma unroll
                for (int j = 0; j < S; j++) {
                    if (!xt_mhc_stream<S>(j, n)) continue;
                    A factor = m[i * n + j];
#pragma unroll
                    for (int e = 0; e < N; e++) sum.at[e] += factor * v[j].at[e];
                }
                xt_write(to + i * cols, xt_store<T, N>(sum));
            }
        }
    }
}

/* A block has a token at a time. dx, dy, dh_post, dm_res, more (dx_add) may be NULL. */
template <typename T, int N, int S>
__global__ void __launch_bounds__(BWD_THREADS)
    mhc_post_bwd_kernel(T *dx, T *dy, XtAcc<T> *dh_post, XtAcc<T> *dm_res, const T *__restrict__ dout, const T *__restrict__ x,
                        const T *__restrict__ y, const XtAcc<T> *__restrict__ h_post, const XtAcc<T> *__restrict__ m_res,
                        const T *more, int64_t tokens, int n, int64_t cols) {
    using A = XtAcc<T>;
    constexpr int SUMS = S * S + S, GROUPS = (SUMS + 31) / 32; /* dM, then dh */
    __shared__ A of_warp[BWD_THREADS / 32][GROUPS * 32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
        const A *h = h_post + t * n, *m = m_res + t * n * n; /* [n], [n, n] */
        A sums[GROUPS][32];
#pragma unroll
        for (int i = 0; i < GROUPS * 32; i++) sums[i / 32][i % 32] = 0;
        for (int64_t c = (int64_t)threadIdx.x * N; c < cols; c += (int64_t)blockDim.x * N) {
            int64_t at = t * n * cols + c;
            XtPiece<T, N> gs[S], xs[S], ys;
#pragma unroll
            for (int i = 0; i < S; i++)
                if (xt_mhc_stream<S>(i, n)) gs[i] = xt_read<T, N>(dout + at + i * cols);
            if (dm_res) {
#pragma unroll
                for (int j = 0; j < S; j++)
                    if (xt_mhc_stream<S>(j, n)) xs[j] = xt_read<T, N>(x + at + j * cols);
            }
            if (dh_post) {
                ys = xt_read<T, N>(y + t * cols + c);
                XtVector<A, N> w = xt_load(ys);
#pragma unroll
                for (int i = 0; i < S; i++) {
                    if (!xt_mhc_stream<S>(i, n)) continue;
                    XtVector<A, N> g = xt_load(gs[i]);
#pragma unroll
                    for (int e = 0; e < N; e++) sums[(S * S + i) / 32][(S * S + i) % 32] += g.at[e] * w.at[e];
                }
            }
            if (dm_res) {
#pragma unroll
                for (int j = 0; j < S; j++) {
                    if (!xt_mhc_stream<S>(j, n)) continue;
                    XtVector<A, N> v = xt_load(xs[j]);
#pragma unroll
                    for (int i = 0; i < S; i++) {
                        if (!xt_mhc_stream<S>(i, n)) continue;
                        XtVector<A, N> g = xt_load(gs[i]);
#pragma unroll
                        for (int e = 0; e < N; e++) sums[(i * S + j) / 32][(i * S + j) % 32] += g.at[e] * v.at[e];
                    }
                }
            }
            if (dy) {
                XtVector<A, N> sum = {};
#pragma unroll
                for (int i = 0; i < S; i++) {
                    if (!xt_mhc_stream<S>(i, n)) continue;
                    XtVector<A, N> g = xt_load(gs[i]);
                    A factor = h[i];
#pragma unroll
                    for (int e = 0; e < N; e++) sum.at[e] += factor * g.at[e];
                }
                xt_write(dy + t * cols + c, xt_store<T, N>(sum));
            }
            if (dx) {
#pragma unroll
                for (int j = 0; j < S; j++) {
                    if (!xt_mhc_stream<S>(j, n)) continue;
                    XtVector<A, N> sum = {};
                    if (more) sum = xt_load(xt_read<T, N>(more + at + j * cols));
#pragma unroll
                    for (int i = 0; i < S; i++) {
                        if (!xt_mhc_stream<S>(i, n)) continue;
                        XtVector<A, N> g = xt_load(gs[i]);
                        A factor = m[i * n + j];
#pragma unroll
                        for (int e = 0; e < N; e++) sum.at[e] += factor * g.at[e];
                    }
                    xt_write(dx + at + j * cols, xt_store<T, N>(sum));
                }
            }
        }
        if (!dh_post && !dm_res) continue;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) of_warp[warp][i * 32 + lane] = xt_mhc_warp_sums(sums[i]);
        __syncthreads();
        for (int i = threadIdx.x; i < SUMS; i += blockDim.x) {
            A sum = 0;
            int row = i / S, col = i % S;
            for (int w = 0; w < warps; w++) sum += of_warp[w][i];
            if (i >= S * S) {
                if (dh_post && col < n) dh_post[t * n + col] = sum;
            } else if (dm_res && row < n && col < n) dm_res[(t * n + row) * n + col] = sum;
        }
        __syncthreads();
    }
}

XtStatus xt_cuda_mhc_post_fwd(const XtMhcPostFwd *p) {
    if (p->tokens == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        using A = XtAcc<T>;
        xt_mhc_plan<T>(xt_aligned<T>(p->cols, p->cols, p->out, p->x, p->y), p->streams, [&](auto width, auto streams) {
            constexpr int N = decltype(width)::value, S = decltype(streams)::value;
            int64_t pieces = p->cols / N;
            unsigned across = xt_mhc_threads(pieces, FWD_THREADS), lanes = 1;
            while (lanes < pieces && lanes < 32) lanes *= 2;
            if (lanes < 32) across = lanes;
            dim3 block(across, FWD_THREADS / across);
            xt_launch(mhc_post_fwd_kernel<T, N, S>, xt_blocks(p->tokens, block.y), block, 0, (T *)p->out, (const T *)p->x,
                      (const T *)p->y, (const A *)p->h_post, (const A *)p->m_res, p->tokens, (int)p->streams, p->cols);
        });
        return xt_launched("mhc_post_fwd", p->tokens, p->streams, p->cols);
    });
}

XtStatus xt_cuda_mhc_post_bwd(const XtMhcPostBwd *p) {
    if (p->tokens == 0 || (!p->dx && !p->dy && !p->dh_post && !p->dm_res)) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        using A = XtAcc<T>;
        bool aligned = xt_aligned<T>(p->cols, p->cols, p->dout, p->x, p->y, p->dx, p->dy, p->dx_add);
        xt_mhc_plan<T>(aligned, p->streams, [&](auto width, auto streams) {
            constexpr int N = decltype(width)::value, S = decltype(streams)::value;
            xt_launch(mhc_post_bwd_kernel<T, N, S>, xt_blocks(p->tokens, 1), xt_mhc_threads(p->cols / N, BWD_THREADS), 0,
                      (T *)p->dx, (T *)p->dy, (A *)p->dh_post, (A *)p->dm_res, (const T *)p->dout, (const T *)p->x, (const T *)p->y,
                      (const A *)p->h_post, (const A *)p->m_res, (const T *)p->dx_add, p->tokens, (int)p->streams, p->cols);
        });
        return xt_launched("mhc_post_bwd", p->tokens, p->streams, p->cols);
    });
}
