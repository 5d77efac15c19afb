/* mhc_pre.cu - makes a layer's input from the streams of hyper-connections (Xie et al. 2025, https://arxiv.org/abs/2512.24880).
 *
 *     forward    r = (mean v^2 + norm_eps)^-1/2,  u = phi (v gamma),  z = a r u + bias
 *                h_pre = sigmoid(z_pre) + hc_eps,  h_post = 2 sigmoid(z_post),  h_res = z_res,  h_in = sum_j h_pre_j x_j
 *     backward   delta = dz;  dq = a delta;  du = r dq;  kappa = -(dq . u) r^3 / K;  S = sum_t du_t v_t^T
 *                dx = gamma (phi^T du) + kappa v + h_pre_j dh_in + sum_i M_ij g_i,  dphi = S gamma,  dgamma = sum_j phi_j S_j
 *
 * x, dx, g [T, n, C], v = a token of x as a vector [K], K = n C; phi, dphi [m, K], m = n^2 + 2n; a = alpha by block of rows.
 *
 * Forward, in two launches. mix computes u and sum v^2 of slices of columns. finish, a block for each token, adds the slices in
 * order and computes the rest. x is read twice, because a multiprocessor cannot hold the rows of a tile of tokens. finish goes from
 * the last token to the first, since the last ones are still in the L2 cache. (2n + 1) C elements a token. Where mhc_pre_once.cuh
 * supports the call it moves (n + 1) C, in another order of additions.
 *
 * Backward, in three steps. deltas computes dh_in . x_j, du and kappa of 16 tokens a block, (n + 1) C elements a token. dx and S
 * read x once more, with dh_in and g, and write dx, (3n + 1) C. sums adds the slices of S in order, which gives dphi and dgamma,
 * and the sums of the blocks of 16 tokens, which gives dbias and dalpha.
 *
 * bfloat16 with n = 2 or 4 and aligned rows uses tensor cores for the products with phi (mhc_pre.cuh, mhc_pre_bwd.cuh). All other
 * cases are plain loops, with a launch for dx and one for S. No atomics. The slices of tokens and columns depend on the sizes
 * alone. So devices that choose the same of these ways get the same bits; the choice depends on the compute capability, and
 * mhc_pre_once.cuh also needs room for all its blocks at once.
 */
#include "contract/mhc.h"
#include "mhc_pre_bwd.cuh"

#include "mhc_pre.cuh"
#include "mhc_pre_once.cuh"

static constexpr int THREADS = 256;
static constexpr int64_t BLOCKS = 4 * XT_PLAN_MULTIPROCESSORS;

/* ---- forward ---------------------------------------------------------------------------------------------------------------- */

static constexpr int CHUNK = 256; /* columns of a tile that are in shared memory */

/* part [gridDim.y][tokens][stride]: u [m], then at stride - 2 the sum of squares. Block (TOKENS tokens, slice of `each`
 * columns). Warp w has rows w, w + 8, .. of phi, at most ROWS. */
template <typename T, int ROWS, int TOKENS>
__global__ void __launch_bounds__(THREADS)
    mhc_pre_mix_kernel(XtAcc<T> *part, const T *x, const XtAcc<T> *phi, const XtAcc<T> *gamma, int64_t tokens, int m, int64_t k,
                       int64_t each, int stride) {
    using A = XtAcc<T>;
    __shared__ A v[TOKENS][CHUNK];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t begin = blockIdx.y * each, end = begin + each < k ? begin + each : k;
    for (int64_t first = (int64_t)blockIdx.x * TOKENS; first < tokens; first += (int64_t)gridDim.x * TOKENS) {
        A u[ROWS][TOKENS] = {}, squares[TOKENS / 8] = {};
        for (int64_t at = begin; at < end; at += CHUNK) {
            __syncthreads();
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                v[t][threadIdx.x] =
                    first + t < tokens && at + threadIdx.x < end ? xt_load(x[(first + t) * k + at + threadIdx.x]) : A(0);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < TOKENS / 8; i++)
                for (int c = lane; c < CHUNK; c += 32) squares[i] += v[warp + 8 * i][c] * v[warp + 8 * i][c];
            for (int c = lane; c < CHUNK && at + c < end; c += 32) {
                A scale = gamma ? gamma[at + c] : A(1), value[TOKENS];
#pragma unroll
                for (int t = 0; t < TOKENS; t++) value[t] = v[t][c];
#pragma unroll
                for (int i = 0; i < ROWS; i++) {
                    int row = warp + 8 * i;
                    A factor = row < m ? phi[row * k + at + c] * scale : A(0);
#pragma unroll
                    for (int t = 0; t < TOKENS; t++) u[i][t] += factor * value[t];
                }
            }
        }
        A *to = part + ((int64_t)blockIdx.y * tokens + first) * stride; /* [TOKENS][stride] */
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                A sum = xt_warp_sum(u[i][t]);
                if (lane == 0 && warp + 8 * i < m && first + t < tokens) to[t * stride + warp + 8 * i] = sum;
            }
            A sum = xt_warp_sum(squares[t / 8]);
            if (lane == 0 && t % 8 == warp && first + t < tokens) to[t * stride + stride - 2] = sum;
        }
    }
}

template <typename T> struct Coefficients {
    using A = XtAcc<T>;
    A *h_post, *h_res, *h_pre, *rstd, *mix; /* of the forward */
    const A *alpha, *bias, *part;           /* part [slices][tokens][stride] */
    int64_t slices;
    int stride;
    A norm_eps, hc_eps;
};

/* A block has a token at a time, the last one first. */
template <typename T, int N, int S>
__global__ void __launch_bounds__(THREADS)
    mhc_pre_finish_kernel(T *h_in, const T *x, const Coefficients<T> to, int64_t tokens, int n, int64_t cols) {
    using A = XtAcc<T>;
    __shared__ A u[XT_MHC_ROWS + 1], h[XT_MHC_STREAMS];
    int m = n * n + 2 * n;
    for (int64_t back = blockIdx.x; back < tokens; back += gridDim.x) {
        int64_t t = tokens - 1 - back, c = (int64_t)threadIdx.x * N;
        const T *from = x + t * n * cols; /* [n, cols] */
        XtPiece<T, N> v[S];               /* loaded while the coefficients are computed */
#pragma unroll
        for (int j = 0; j < S; j++)
            if (xt_mhc_stream<S>(j, n) && c < cols) v[j] = xt_read<T, N>(from + j * cols + c);
        for (int i = threadIdx.x; i <= m; i += blockDim.x) {
            const A *part = to.part + t * to.stride + (i < m ? i : to.stride - 2);
            A sum = 0;
#pragma unroll 8
            for (int64_t s = 0; s < to.slices; s++) sum += part[s * tokens * to.stride];
            u[i] = sum;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < m; i += blockDim.x) {
            A r = 1 / sqrt(u[m] / (A)(n * cols) + to.norm_eps), q = r * u[i];
            if (i == 0) to.rstd[t] = r;
            to.mix[t * m + i] = u[i];
            if (i < n) {
                A value = 1 / (1 + exp(-(to.alpha[0] * q + to.bias[i]))) + to.hc_eps;
                to.h_pre[t * n + i] = h[i] = value;
            } else if (i < 2 * n) to.h_post[t * n + i - n] = 2 / (1 + exp(-(to.alpha[1] * q + to.bias[i])));
            else to.h_res[t * n * n + i - 2 * n] = to.alpha[2] * q + to.bias[i];
        }
        __syncthreads();
        while (c < cols) {
            XtVector<A, N> sum = {};
#pragma unroll
            for (int j = 0; j < S; j++) {
                if (!xt_mhc_stream<S>(j, n)) continue;
                XtVector<A, N> value = xt_load(v[j]);
#pragma unroll
                for (int e = 0; e < N; e++) sum.at[e] += h[j] * value.at[e];
            }
            xt_write(h_in + t * cols + c, xt_store<T, N>(sum));
            c += (int64_t)blockDim.x * N;
#pragma unroll
            for (int j = 0; j < S; j++)
                if (xt_mhc_stream<S>(j, n) && c < cols) v[j] = xt_read<T, N>(from + j * cols + c);
        }
    }
}

/* ---- backward: what every token gives --------------------------------------------------------------------------------------- */

template <typename T> struct Deltas {
    using A = XtAcc<T>;
    const A *dh_post, *dh_res, *alpha, *bias, *h_pre, *rstd, *mix; /* of the backward */
    const A *m_res;                                                /* or NULL */
    A *sums;                                                       /* [blocks of 16 tokens][2 m]: delta, then delta q */
    A *du, *kappa;                                                 /* [T, m] and [T], or NULL */
    char *records;                                                 /* or, in place of du and kappa, those of mhc_pre_bwd.cuh */
};

/* Threads of a block: 16 warps, a token each, if a multiprocessor has registers for two such blocks. */
template <typename T, int N, int S> static constexpr int DELTAS = sizeof(T) == 2 && N == 8 && S == 4 ? 512 : THREADS;

template <typename T, int N, int S>
__global__ void __launch_bounds__(DELTAS<T, N, S>, DELTAS<T, N, S> == 512 ? 2 : 1)
    mhc_pre_deltas_kernel(const Deltas<T> d, const T *dh_in, const T *x, int64_t tokens, int n, int64_t cols) {
    using A = XtAcc<T>;
    constexpr int STRIDE = XT_MHC_ROWS + 1, BLOCK = DELTAS<T, N, S>;
    __shared__ A dots[GROUP][XT_MHC_STREAMS], delta[GROUP][STRIDE], with_q[GROUP][STRIDE], du[GROUP][STRIDE];
    __shared__ A dot[GROUP][STRIDE], kappas[GROUP];
    __shared__ Scale scales[GROUP]; /* for records */
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m = n * n + 2 * n;
    for (int64_t group = blockIdx.x; group * GROUP < tokens; group += gridDim.x) {
        int64_t first = group * GROUP;
        for (int i = warp; i < GROUP; i += BLOCK / 32) {
            A sum[S] = {};
            int64_t t = first + i;
            if (t < tokens) {
#pragma unroll 2
                for (int64_t c = (int64_t)lane * N; c < cols; c += 32 * N) {
                    XtPiece<T, N> g = xt_read<T, N>(dh_in + t * cols + c), v[S];
#pragma unroll
                    for (int j = 0; j < S; j++)
                        if (xt_mhc_stream<S>(j, n)) v[j] = xt_read<T, N>(x + (t * n + j) * cols + c);
                    XtVector<A, N> a = xt_load(g);
#pragma unroll
                    for (int j = 0; j < S; j++) {
                        if (!xt_mhc_stream<S>(j, n)) continue;
                        XtVector<A, N> b = xt_load(v[j]);
#pragma unroll
                        for (int e = 0; e < N; e++) sum[j] += a.at[e] * b.at[e];
                    }
                }
            }
#pragma unroll
            for (int j = 0; j < S; j++) {
                sum[j] = xt_warp_sum(sum[j]);
                if (lane == 0) dots[i][j] = sum[j];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < GROUP * m; i += BLOCK) {
            int token = i / m, row = i % m, block = row < n ? 0 : row < 2 * n ? 1 : 2;
            int64_t t = first + token;
            A value = 0, r = 0, u = 0;
            if (t < tokens) {
                r = d.rstd[t], u = d.mix[t * m + row];
                value = block == 0   ? dots[token][row]
                        : block == 1 ? 2 * d.dh_post[t * n + row - n]
                                     : d.dh_res[t * n * n + row - 2 * n];
                if (block < 2) { /* s (1 - s) from z: where s is almost 1, 1 - s would lose digits */
                    A z = d.alpha[block] * (r * u) + d.bias[row], e = exp(z < 0 ? z : -z);
                    value *= e / ((1 + e) * (1 + e));
                }
            }
            A dq = d.alpha[block] * value;
            delta[token][row] = value;
            with_q[token][row] = value * (r * u);
            du[token][row] = r * dq;
            dot[token][row] = dq * u;
        }
        __syncthreads();
        /* Some threads add two sums over the tokens in order, others compute kappa of each token. */
        if ((int)threadIdx.x < 2 * m) {
            const A *from = (int)threadIdx.x < m ? &delta[0][threadIdx.x] : &with_q[0][threadIdx.x - m];
            A sum = 0;
#pragma unroll
            for (int i = 0; i < GROUP; i++) sum += from[i * STRIDE];
            d.sums[group * 2 * m + threadIdx.x] = sum;
        } else if ((int)threadIdx.x >= BLOCK - GROUP) {
            int i = threadIdx.x - (BLOCK - GROUP);
            int64_t t = first + i;
            A sum = 0, most = 0, r = t < tokens ? d.rstd[t] : A(0);
#pragma unroll 8
            for (int row = 0; row < m; row++) {
                sum += dot[i][row];
                if constexpr (sizeof(T) == 2) most = finite_max(most, du[i][row]);
            }
            if constexpr (sizeof(T) == 2) scales[i] = scale_to_half(most);
            kappas[i] = -sum * r * r * r / (A)(n * cols);
            if (d.kappa && t < tokens) d.kappa[t] = kappas[i];
        }
        if (d.du) {
            for (int i = threadIdx.x; i < GROUP * m; i += BLOCK)
                if (first + i / m < tokens) d.du[first * m + i] = du[i / m][i % m];
        }
        __syncthreads();
        if constexpr (sizeof(T) == 2) {
            if (d.records)
                write_record<S_PARTS>(d.records + group * Record<S_PARTS>::bytes(n), du[0], STRIDE, kappas, scales, d.h_pre,
                                      d.m_res, first, tokens, n);
        }
        __syncthreads();
    }
}

/* ---- backward: dx and S in plain loops -------------------------------------------------------------------------------------- */

template <typename T> struct Gradients {
    using A = XtAcc<T>;
    T *dx;
    const T *x, *dh_in, *dout, *more;                  /* dout and more (dx_add) may be NULL */
    const A *phi, *gamma, *du, *kappa, *h_pre, *m_res; /* gamma may be NULL */
};

/* Block (256 channels, groups of 16 tokens): a thread has a channel of all streams. */
template <typename T>
__global__ void __launch_bounds__(THREADS) mhc_pre_dx_kernel(const Gradients<T> p, int64_t tokens, int n, int64_t cols) {
    using A = XtAcc<T>;
    __shared__ A du[XT_MHC_ROWS][GROUP];
    int m = n * n + 2 * n;
    int64_t k = n * cols, c = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (int64_t first = (int64_t)blockIdx.y * GROUP; first < tokens; first += (int64_t)gridDim.y * GROUP) {
        __syncthreads();
        for (int i = threadIdx.x; i < GROUP * m; i += THREADS)
            du[i % m][i / m] = first + i / m < tokens ? p.du[first * m + i] : A(0);
        __syncthreads();
        for (int j = 0; j < n && c < cols; j++) {
            A w[GROUP] = {}, scale = p.gamma ? p.gamma[j * cols + c] : A(1);
            for (int row = 0; row < m; row++) {
                A factor = p.phi[row * k + j * cols + c];
#pragma unroll
                for (int i = 0; i < GROUP; i++) w[i] += factor * du[row][i];
            }
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                int64_t t = first + i, at = (t * n + j) * cols + c;
                if (t >= tokens) continue;
                A sum = scale * w[i] + p.kappa[t] * xt_load(p.x[at]) + p.h_pre[t * n + j] * xt_load(p.dh_in[t * cols + c]);
                for (int other = 0; p.dout && other < n; other++)
                    sum += p.m_res[(t * n + other) * n + j] * xt_load(p.dout[(t * n + other) * cols + c]);
                if (p.more) sum += xt_load(p.more[at]);
                p.dx[at] = xt_store<T>(sum);
            }
        }
    }
}

static constexpr int S_ROWS = 24, S_TOKENS = 32; /* rows of S of a thread; tokens whose du is in shared memory at once */

/* share [gridDim.z][m][k]. Block (256 columns, S_ROWS rows, slice of `each` tokens). */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    mhc_pre_s_kernel(XtAcc<T> *share, const T *x, const XtAcc<T> *du, int64_t tokens, int m, int64_t k, int64_t each) {
    using A = XtAcc<T>;
    __shared__ A of[S_TOKENS][S_ROWS];
    int64_t col = (int64_t)blockIdx.x * THREADS + threadIdx.x, begin = blockIdx.z * each;
    int64_t end = begin + each < tokens ? begin + each : tokens;
    int row = blockIdx.y * S_ROWS;
    A s[S_ROWS] = {};
    for (int64_t first = begin; first < end; first += S_TOKENS) {
        __syncthreads();
        for (int i = threadIdx.x; i < S_TOKENS * S_ROWS; i += THREADS) {
            int64_t t = first + i / S_ROWS;
            int r = row + i % S_ROWS;
            of[i / S_ROWS][i % S_ROWS] = t < end && r < m ? du[t * m + r] : A(0);
        }
        __syncthreads();
        if (col >= k) continue;
#pragma unroll 4
        for (int i = 0; i < S_TOKENS; i++) {
            A v = first + i < end ? xt_load(x[(first + i) * k + col]) : A(0);
#pragma unroll
            for (int r = 0; r < S_ROWS; r++) s[r] += of[i][r] * v;
        }
    }
    if (col >= k) return;
#pragma unroll
    for (int r = 0; r < S_ROWS; r++)
        if (row + r < m) share[((int64_t)blockIdx.z * m + row + r) * k + col] = s[r];
}

/* ---- backward: sums over slices --------------------------------------------------------------------------------------------- */

template <typename A> struct Sums {
    A *dphi, *dgamma, *dalpha, *dbias;   /* each may be NULL */
    const A *share, *sums, *phi, *gamma; /* share [slices][m][k], sums [blocks][2 m] */
    int64_t slices, blocks, k;
    int n;
};

/* Block 0 computes dbias and dalpha; a warp has every 8th block of tokens. Block b > 0 computes 32 columns of dphi and dgamma; a
 * warp has every 8th row. */
template <typename A> __global__ void __launch_bounds__(THREADS) mhc_pre_sums_kernel(const Sums<A> p) {
    __shared__ A of[THREADS / 32][2 * XT_MHC_ROWS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = p.n, m = n * n + 2 * n;
    if (blockIdx.x == 0) {
        for (int i = lane; i < 2 * m; i += 32) {
            A sum = 0;
#pragma unroll 16
            for (int64_t b = warp; b < p.blocks; b += THREADS / 32) sum += p.sums[b * 2 * m + i];
            of[warp][i] = sum;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 2 * m; i += THREADS)
            for (int w = 1; w < THREADS / 32; w++) of[0][i] += of[w][i];
        __syncthreads();
        if (p.dbias && (int)threadIdx.x < m) p.dbias[threadIdx.x] = of[0][threadIdx.x];
        if (p.dalpha && threadIdx.x < 3) {
            const int begin[4] = {0, n, 2 * n, m};
            A sum = 0;
            for (int i = begin[threadIdx.x]; i < begin[threadIdx.x + 1]; i++) sum += of[0][m + i];
            p.dalpha[threadIdx.x] = sum;
        }
        return;
    }
    for (int64_t first = (int64_t)(blockIdx.x - 1) * 32; first < p.k; first += (int64_t)(gridDim.x - 1) * 32) {
        int64_t col = first + lane;
        A total = 0;
        if (col < p.k) {
            for (int row = warp; row < m; row += THREADS / 32) {
                A sum = 0;
#pragma unroll 8
                for (int64_t s = 0; s < p.slices; s++) sum += p.share[(s * m + row) * p.k + col];
                if (p.dphi) p.dphi[row * p.k + col] = p.gamma ? sum * p.gamma[col] : sum;
                if (p.dgamma) total += p.phi[row * p.k + col] * sum;
            }
        }
        if (!p.dgamma) continue;
        of[warp][lane] = total;
        __syncthreads();
        if (warp == 0 && col < p.k) {
            for (int w = 1; w < THREADS / 32; w++) total += of[w][lane];
            p.dgamma[col] = total;
        }
        __syncthreads();
    }
}

/* ---- slots ------------------------------------------------------------------------------------------------------------------ */

static int rows_of(int64_t n) { return (int)(n * n + 2 * n); }
/* How many slices of `items` make about `blocks` blocks with `tiles` tiles; a slice has *each items, at least `least`. */
static int64_t slices_of(int64_t items, int64_t tiles, int64_t least, int64_t blocks, int64_t *each) {
    int64_t count = blocks / tiles, most = items / least;
    if (count > most) count = most;
    if (count > 65535) count = 65535;
    *each = xt_divide_up(items, count < 1 ? 1 : count);
    return xt_divide_up(items, *each);
}
static bool by_mma(XtDtype dtype, int64_t streams) {
    return dtype == XT_BFLOAT16 && (streams == 2 || streams == 4) && xt_compute_capability() >= 80;
}

/* Computes part of all of x; *slices: how many there are. */
template <int MT, int PARTS> static XtStatus mix_mma(const XtMhcPreFwd *p, XtScratch *part, int64_t *slices) {
    int64_t k = p->streams * p->cols, steps = xt_divide_up(k, 32), tiles = xt_divide_up(p->tokens, MIX_TOKENS), each;
    XtScratch frag;
    *slices = slices_of(steps, tiles, 4, BLOCKS / 2, &each);
    XT_CHECK(frag.allocate((size_t)(steps * PARTS * MT * 32) * sizeof(uint4)));
    XT_CHECK(part->allocate((size_t)(*slices * p->tokens * (8 * MT + 2)) * sizeof(float)));
    xt_launch(mhc_pre_cut_kernel<MT, PARTS>, xt_blocks(steps * MT * 32, 256), 256, 0, (uint4 *)frag.data, (const float *)p->phi,
              (const float *)p->gamma, k, steps);
    xt_launch(mhc_pre_mix_mma_kernel<MT, PARTS>, dim3((unsigned)tiles, (unsigned)*slices), 128, 0, (float *)part->data,
              (const XtBf16 *)p->x, (const uint4 *)frag.data, p->tokens, k, steps, each);
    return XT_OK;
}

template <typename T, int ROWS, int TOKENS>
static XtStatus mix_plain(const XtMhcPreFwd *p, XtScratch *part, int64_t *slices, int stride) {
    using A = XtAcc<T>;
    int64_t k = p->streams * p->cols, tiles = xt_divide_up(p->tokens, TOKENS), each;
    *slices = slices_of(xt_divide_up(k, CHUNK), tiles, 2, BLOCKS, &each);
    XT_CHECK(part->allocate((size_t)(*slices * p->tokens * stride) * sizeof(A)));
    xt_launch(mhc_pre_mix_kernel<T, ROWS, TOKENS>, dim3(xt_blocks(tiles, 1), (unsigned)*slices), THREADS, 0, (A *)part->data,
              (const T *)p->x, (const A *)p->phi, (const A *)p->gamma, p->tokens, rows_of(p->streams), k, each * CHUNK, stride);
    return XT_OK;
}

XtStatus xt_cuda_mhc_pre_fwd(const XtMhcPreFwd *p) {
    if (p->tokens == 0) return XT_OK;
    bool queued;
    XtStatus once = mhc_pre_once(p, &queued);
    if (once != XT_OK) return once;
    if (queued) return xt_launched("mhc_pre_fwd", p->tokens, p->streams, p->cols);
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        using A = XtAcc<T>;
        XtScratch part;
        int64_t slices = 0;
        int m = rows_of(p->streams), stride = (m + 7) / 8 * 8 + 2;
        XtStatus status;
        if (by_mma(p->dtype, p->streams) && xt_aligned<T>(p->streams * p->cols, 0, p->x, p->phi, p->gamma)) {
            if (p->streams == 4) status = p->tf32 ? mix_mma<3, 2>(p, &part, &slices) : mix_mma<3, 3>(p, &part, &slices);
            else status = p->tf32 ? mix_mma<1, 2>(p, &part, &slices) : mix_mma<1, 3>(p, &part, &slices);
        } else if (m <= 24) status = mix_plain<T, 3, 16>(p, &part, &slices, stride);
        else status = mix_plain<T, 10, 8>(p, &part, &slices, stride);
        if (status != XT_OK) return status;
        const Coefficients<T> to = {(A *)p->h_post,      (A *)p->h_res,      (A *)p->h_pre,        (A *)p->rstd, (A *)p->mix,
                                    (const A *)p->alpha, (const A *)p->bias, (const A *)part.data, slices,       stride,
                                    (A)p->norm_eps,      (A)p->hc_eps};
        xt_mhc_plan<T>(xt_aligned<T>(p->cols, p->cols, p->x, p->h_in), p->streams, [&](auto width, auto streams) {
            constexpr int N = decltype(width)::value, S = decltype(streams)::value;
            xt_launch(mhc_pre_finish_kernel<T, N, S>, xt_blocks(p->tokens, 1), xt_mhc_threads(p->cols / N, THREADS), 0,
                      (T *)p->h_in, (const T *)p->x, to, p->tokens, (int)p->streams, p->cols);
        });
        return xt_launched("mhc_pre_fwd", p->tokens, p->streams, p->cols);
    });
}

XtStatus xt_cuda_mhc_pre_bwd(const XtMhcPreBwd *p) {
    if (!p->dx && !p->dphi && !p->dalpha && !p->dbias && !p->dgamma) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        using A = XtAcc<T>;
        int64_t n = p->streams, m = rows_of(n), k = n * p->cols, groups = xt_divide_up(p->tokens, GROUP), slices = 0, each = 0;
        bool whole = xt_aligned<T>(p->cols, p->cols, p->x, p->dh_in), with_s = p->dphi || p->dgamma;
        bool mma = by_mma(p->dtype, n) && whole && xt_aligned<T>(p->cols, p->cols, p->dx, p->dout, p->dx_add);
        XtScratch tokens, shares; /* tokens: sums, then du and kappa, or the records of groups */
        if (p->tokens > 0) {
            if (mma) slices = dx_slices(groups, p->cols);
            else
                slices = slices_of(xt_divide_up(p->tokens, S_TOKENS), xt_divide_up(k, THREADS) * xt_divide_up(m, S_ROWS), 1, BLOCKS,
                                   &each);
        }
        size_t sums = (size_t)xt_divide_up(groups * 2 * m * (int64_t)sizeof(A), 256) * 256; /* bytes */
        size_t rows = mma ? (size_t)groups * Record<S_PARTS>::bytes((int)n) : (size_t)(p->tokens * m) * sizeof(A);
        rows = (rows + 255) / 256 * 256;
        size_t rest = mma ? 0 : (size_t)p->tokens * sizeof(A);
        XtStatus status = sums + rows + rest ? tokens.allocate(sums + rows + rest) : XT_OK;
        if (status == XT_OK && with_s && slices) status = shares.allocate((size_t)(slices * m * k) * sizeof(A));
        if (status != XT_OK) return status;
        char *of_sums = (char *)tokens.data, *of_du = of_sums + sums, *of_rest = of_du + rows;
        if (p->tokens > 0) {
            const Deltas<T> d = {(const A *)p->dh_post,      (const A *)p->dh_res,         (const A *)p->alpha,
                                 (const A *)p->bias,         (const A *)p->h_pre,          (const A *)p->rstd,
                                 (const A *)p->mix,          (const A *)p->m_res,          (A *)of_sums,
                                 mma ? nullptr : (A *)of_du, mma ? nullptr : (A *)of_rest, mma ? of_du : nullptr};
            xt_mhc_plan<T>(whole, n, [&](auto width, auto streams) {
                constexpr int N = decltype(width)::value, S = decltype(streams)::value;
                xt_launch(mhc_pre_deltas_kernel<T, N, S>, xt_blocks(groups, 1), DELTAS<T, N, S>, 0, d, (const T *)p->dh_in,
                          (const T *)p->x, p->tokens, (int)n, p->cols);
            });
            if (mma && (p->dx || with_s)) {
                const DxMma g = {(XtBf16 *)p->dx,
                                 with_s ? (float *)shares.data : nullptr,
                                 (const XtBf16 *)p->x,
                                 (const XtBf16 *)p->dh_in,
                                 (const XtBf16 *)p->dout,
                                 (const XtBf16 *)p->dx_add,
                                 (const float *)p->phi,
                                 (const float *)p->gamma,
                                 (const uint4 *)of_du,
                                 p->tokens,
                                 p->cols,
                                 groups};
                XT_CHECK(n == 4 ? dx_mma<4>(g, slices) : dx_mma<2>(g, slices));
            }
            if (!mma && p->dx) {
                const Gradients<T> g = {(T *)p->dx,           (const T *)p->x,     (const T *)p->dh_in, (const T *)p->dout,
                                        (const T *)p->dx_add, (const A *)p->phi,   (const A *)p->gamma, (const A *)of_du,
                                        (const A *)of_rest,   (const A *)p->h_pre, (const A *)p->m_res};
                dim3 grid(xt_blocks(p->cols, THREADS), (unsigned)(groups < 65535 ? groups : 65535));
                xt_launch(mhc_pre_dx_kernel<T>, grid, THREADS, 0, g, p->tokens, (int)n, p->cols);
            }
            if (!mma && with_s) {
                dim3 grid(xt_blocks(k, THREADS), (unsigned)xt_divide_up(m, S_ROWS), (unsigned)slices);
                xt_launch(mhc_pre_s_kernel<T>, grid, THREADS, 0, (A *)shares.data, (const T *)p->x, (const A *)of_du, p->tokens,
                          (int)m, k, each * S_TOKENS);
            }
        }
        if (with_s || p->dalpha || p->dbias) {
            const Sums<A> s = {(A *)p->dphi,
                               (A *)p->dgamma,
                               (A *)p->dalpha,
                               (A *)p->dbias,
                               (const A *)shares.data,
                               (const A *)of_sums,
                               (const A *)p->phi,
                               (const A *)p->gamma,
                               slices,
                               groups,
                               k,
                               (int)n};
            xt_launch(mhc_pre_sums_kernel<A>, 1 + (with_s ? xt_blocks(k, 32) : 0u), THREADS, 0, s);
        }
        return xt_launched("mhc_pre_bwd", p->tokens, p->streams, p->cols);
    });
}
