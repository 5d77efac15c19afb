/* rms_norm.cu - root mean square normalisation (Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467).
 *
 *     forward    rstd = 1 / sqrt(mean_j x_j^2 + eps),  xh = x rstd,  out = w cast(xh)
 *     backward   with g = dy w:  d rstd / dx_i = -rstd^3 x_i / cols, hence
 *                dx_i = rstd (g_i - xh_i mean_j(g_j xh_j)),   dw_j = sum_rows dy_j xh_j
 *
 * x, out, dy, dx [rows, cols] dense, rstd [rows] of ACC, w and dw [cols]. A row is held in the registers of the threads that share
 * it, so every element is read once and written once: 2 elements moved forward, 3 backward. Three plans, by the number of 16-byte
 * pieces in a row:
 *
 *     narrow   up to 128 pieces (QK-norm; cols <= 1024 in bfloat16): 1 to 32 lanes of a warp share a row, V pieces a lane. V is 3
 *              where that leaves no lane idle, as for 384 and 768 columns, and 2 for 128 columns of 16 bits. A block of 256
 *              threads has 8 to 256 rows at a time. Sums over a row are shuffles. Unaligned rows: one element a piece.
 *     block    up to 4096 (forward) and 2048 (backward) pieces: a block has one row at a time, V pieces a thread.
 *     long     all other rows, also unaligned ones: a block reads a row twice, the second time from the cache.
 *
 * dw: block b of P owns the rows (or tiles of rows) b, b + P, b + 2P, ... and keeps its share of dw in registers, in ACC. The
 * shares go to scratch memory, [P, cols]. A second launch adds them: 64 slices of the shares, each in order (after dw itself, to
 * accumulate), then the slices in a tree. P depends on rows and cols alone, so every device gets the same bits. P is two to four
 * blocks for each of XT_PLAN_MULTIPROCESSORS, which keeps enough loads in flight; P cols is bounded, so that the shares stay in the
 * cache. The long plan makes dx and the shares of dw in separate launches.
 */
#include "common/cuda.cuh"
#include "contract/layers.h"

static constexpr int THREADS = 256;                                    /* of a narrow block */
static constexpr int NARROW = 128, BLOCK_FWD = 4096, BLOCK_BWD = 2048; /* most pieces in a row */

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

/* The share of a piece in sum_j x_j^2. */
template <typename T, int N> __device__ inline XtAcc<T> squares(const XtPiece<T, N> &piece) {
    XtVector<XtAcc<T>, N> x = xt_load(piece);
    XtAcc<T> sum = 0;
#pragma unroll
    for (int e = 0; e < N; e++) sum += x.at[e] * x.at[e];
    return sum;
}
/* A piece of out. */
template <typename T, int N>
__device__ inline XtPiece<T, N> normalised(const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_weight, XtAcc<T> rstd) {
    XtVector<XtAcc<T>, N> x = xt_load(of_x);
#pragma unroll
    for (int e = 0; e < N; e++) x.at[e] *= rstd;
    return product<T, N>(xt_store<T>(x), of_weight);
}
/* The share of a piece in sum_j g_j x_j; adds its row's part to dw. */
template <typename T, int N>
__device__ inline XtAcc<T> dot(const XtPiece<T, N> &of_dy, const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_weight, XtAcc<T> rstd,
                               XtAcc<T> *dweight) {
    XtVector<XtAcc<T>, N> dy = xt_load(of_dy), x = xt_load(of_x), weight = xt_load(of_weight);
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
template <typename T, int N>
__device__ inline XtPiece<T, N> input_gradient(const XtPiece<T, N> &of_dy, const XtPiece<T, N> &of_x,
                                               const XtPiece<T, N> &of_weight, XtAcc<T> rstd, XtAcc<T> shrink) {
    XtVector<XtAcc<T>, N> dx, dy = xt_load(of_dy), x = xt_load(of_x), weight = xt_load(of_weight);
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

/* ---- narrow ------------------------------------------------------------------------------------------------------------------ */

/* Rows that a lane has in flight, more if a row is one piece a lane; and blocks that fit in a multiprocessor by their registers. */
template <int V> constexpr int ROWS_FWD = V == 1 ? 4 : V <= 3 ? 2 : 1;
template <int V> constexpr int ROWS_BWD = V == 1 ? 2 : 1;
template <int V> constexpr int BLOCKS_FWD = V >= 3 ? 3 : 4;
template <int V> constexpr int BLOCKS_BWD = V >= 3 ? 2 : V == 2 ? 3 : 4;
/* Whether the next tile is loaded before this one is summed. */
template <int V> constexpr bool AHEAD_BWD = V == 2;

/* out, x [rows, cols], rstd [rows], weight [cols] or NULL. `lanes` share a row; a tile is R rows for each group of lanes. */
template <typename T, int N, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS_FWD<V>)
    rms_norm_fwd_narrow_kernel(T *out, XtAcc<T> *rstd, const T *x, const T *weight, int64_t rows, int cols, int lanes,
                               XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    constexpr int R = ROWS_FWD<V>;
    int groups = THREADS / lanes, group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    XtPiece<T, N> w[V];
#pragma unroll
    for (int i = 0; i < V; i++) {
        int col = (i * lanes + lane) * N;
        w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
    }
    int64_t tile_rows = (int64_t)groups * R, step = gridDim.x * tile_rows;
    for (int64_t tile = blockIdx.x * tile_rows; tile < rows; tile += step) {
        XtPiece<T, N> v[R][V];
        A sum[R];
#pragma unroll
        for (int k = 0; k < R; k++) {
            int64_t r = tile + k * groups + group;
#pragma unroll
            for (int i = 0; i < V; i++) {
                int col = (i * lanes + lane) * N;
                v[k][i] = r < rows && col < cols ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
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

/* dx (or NULL), dy, x [rows, cols], rstd [rows], weight [cols] or NULL, share [gridDim.x, cols] or NULL. */
template <typename T, int N, int V>
__global__ void __launch_bounds__(THREADS, BLOCKS_BWD<V>)
    rms_norm_bwd_narrow_kernel(T *dx, XtAcc<T> *share, const T *dy, const T *x, const T *weight, const XtAcc<T> *rstd, int64_t rows,
                               int cols, int lanes, XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    constexpr int R = ROWS_BWD<V>, WARPS = THREADS / 32;
    constexpr bool AHEAD = AHEAD_BWD<V> && sizeof(T) <= 4;
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
        XtPiece<T, N> next_x[R][V], next_d[R][V];
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
        if (dx) {
            sum_of_lanes<R>(sum, lanes);
#pragma unroll
            for (int k = 0; k < R; k++) {
                int64_t r = tile + k * groups + group;
                A shrink = scale[k] * scale[k] * (sum[k] * inverse_cols);
#pragma unroll
                for (int i = 0; i < V; i++) {
                    int col = (i * lanes + lane) * N;
                    if (r < rows && col < cols)
                        xt_write(dx + r * cols + col, input_gradient<T, N>(dv[k][i], xv[k][i], w[i], scale[k], shrink));
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

/* ---- block ------------------------------------------------------------------------------------------------------------------- */

/* As above; a block has one row at a time, piece i of thread t is i * blockDim.x + t. */
template <typename T, int N, int V>
__global__ void __launch_bounds__(1024) rms_norm_fwd_block_kernel(T *out, XtAcc<T> *rstd, const T *x, const T *weight, int64_t rows,
                                                                  int cols, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        XtPiece<T, N> v[V], w[V];
        A sum = 0;
#pragma unroll
        for (int i = 0; i < V; i++) {
            int col = (i * blockDim.x + threadIdx.x) * N;
            v[i] = col < cols ? xt_read<T, N>(x + r * cols + col) : all<T, N>(0);
        }
#pragma unroll
        for (int i = 0; i < V; i++) { /* loaded while the row is summed */
            int col = (i * blockDim.x + threadIdx.x) * N;
            w[i] = weight && col < cols ? xt_read<T, N>(weight + col) : all<T, N>(1);
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
template <typename T, int N, int V>
__global__ void __launch_bounds__(1024)
    rms_norm_bwd_block_kernel(T *dx, XtAcc<T> *share, const T *dy, const T *x, const T *weight, const XtAcc<T> *rstd, int64_t rows,
                              int cols, XtAcc<T> inverse_cols) {
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
        XtPiece<T, N> next_x[V], next_d[V];
        A next_scale = 0;
        if (!AHEAD) {
            read_row<T, N, V>(dv, xv, dy, x, r, cols);
            scale = rstd[r];
        } else if (r + gridDim.x < rows) {
            read_row<T, N, V>(next_d, next_x, dy, x, r + gridDim.x, cols);
            next_scale = rstd[r + gridDim.x];
        }
        A sum = 0;
#pragma unroll
        for (int i = 0; i < V; i++) sum += dot<T, N>(dv[i], xv[i], w[i], scale, dweight[i]);
        if (dx) {
            A shrink = scale * scale * (xt_block_sum(sum) * inverse_cols);
#pragma unroll
            for (int i = 0; i < V; i++) {
                int col = (i * blockDim.x + threadIdx.x) * N;
                if (col < cols) xt_write(dx + r * cols + col, input_gradient<T, N>(dv[i], xv[i], w[i], scale, shrink));
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

template <typename T, int N>
__global__ void __launch_bounds__(1024) rms_norm_fwd_long_kernel(T *out, XtAcc<T> *rstd, const T *x, const T *weight, int64_t rows,
                                                                 int64_t cols, XtAcc<T> inverse_cols, XtAcc<T> eps) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const T *from = x + r * cols; /* [cols] */
        T *to = out + r * cols;       /* [cols] */
        A sum = 0;
#pragma unroll 4
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) sum += squares<T, N>(xt_read<T, N>(from + col));
        sum = reciprocal_root(xt_block_sum(sum) * inverse_cols + eps);
        if (threadIdx.x == 0) rstd[r] = sum;
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            xt_write(to + col, normalised<T, N>(xt_read<T, N>(from + col), w, sum));
        }
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(1024)
    rms_norm_bwd_long_kernel(T *dx, const T *dy, const T *x, const T *weight, const XtAcc<T> *rstd, int64_t rows, int64_t cols,
                             XtAcc<T> inverse_cols) {
    using A = XtAcc<T>;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        A sum = 0, scale = rstd[r], unused[N] = {};
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            sum += dot<T, N>(xt_read<T, N>(dy + r * cols + col), xt_read<T, N>(x + r * cols + col), w, scale, unused);
        }
        A shrink = scale * scale * (xt_block_sum(sum) * inverse_cols);
#pragma unroll 2
        for (int64_t col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
            XtPiece<T, N> w = weight ? xt_read<T, N>(weight + col) : all<T, N>(1);
            XtPiece<T, N> dv = xt_read<T, N>(dy + r * cols + col), xv = xt_read<T, N>(x + r * cols + col);
            xt_write(dx + r * cols + col, input_gradient<T, N>(dv, xv, w, scale, shrink));
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

/* ---- dweight from its shares ------------------------------------------------------------------------------------------------- */

static constexpr int SUM_COLS = 8, SLICES = 64; /* of a block: 32 bytes of a share in float32 */

/* dweight [cols] (+)= the sum over share [count, cols]. */
template <typename T>
__global__ void __launch_bounds__(SUM_COLS *SLICES)
    rms_norm_dweight_kernel(T *dweight, const XtAcc<T> *share, int64_t count, int64_t cols, bool accumulate) {
    using A = XtAcc<T>;
    __shared__ A tree[SUM_COLS * SLICES]; /* [slice, column] */
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

/* ---- slots ------------------------------------------------------------------------------------------------------------------- */

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

static Plan choose(bool aligned, int64_t pieces, int64_t most) {
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

/* Lanes that share a narrow row of `pieces`, `each` a lane. */
static int lanes_of(int64_t pieces, int each) {
    int lanes = 1;
    while (lanes < 32 && lanes * each < pieces) lanes *= 2;
    return lanes;
}
/* Whole warps for `count` threads, 1024 at most. */
static unsigned warps_for(int64_t count) { return count >= 1024 ? 1024 : (unsigned)(count + 31) / 32 * 32; }

template <typename T, int N, int V> static void fwd_narrow(const XtRmsNormFwd *p) {
    using A = XtAcc<T>;
    int lanes = lanes_of(p->cols / N, V);
    xt_launch(rms_norm_fwd_narrow_kernel<T, N, V>, xt_blocks(p->rows, THREADS / lanes * ROWS_FWD<V>), THREADS, 0, (T *)p->out,
              (A *)p->rstd, (const T *)p->x, (const T *)p->weight, p->rows, (int)p->cols, lanes, A(1) / (A)p->cols, (A)p->eps);
}
template <typename T, int N, int V> static void fwd_block(const XtRmsNormFwd *p) {
    using A = XtAcc<T>;
    xt_launch(rms_norm_fwd_block_kernel<T, N, V>, xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, V)), 0, (T *)p->out,
              (A *)p->rstd, (const T *)p->x, (const T *)p->weight, p->rows, (int)p->cols, A(1) / (A)p->cols, (A)p->eps);
}
template <typename T, int N> static void fwd_long(const XtRmsNormFwd *p) {
    using A = XtAcc<T>;
    xt_launch(rms_norm_fwd_long_kernel<T, N>, xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, 4)), 0, (T *)p->out,
              (A *)p->rstd, (const T *)p->x, (const T *)p->weight, p->rows, p->cols, A(1) / (A)p->cols, (A)p->eps);
}

XtStatus xt_cuda_rms_norm_fwd(const XtRmsNormFwd *p) {
    if (p->rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = XT_WIDTH<T>;
        bool aligned = xt_aligned<T>(p->cols, p->cols, p->out, p->x, p->weight);
        switch (choose(aligned, aligned ? p->cols / N : p->cols, BLOCK_FWD)) {
        case PLAN_NARROW_1: fwd_narrow<T, N, 1>(p); break;
        case PLAN_NARROW_2: fwd_narrow<T, N, 2>(p); break;
        case PLAN_NARROW_3: fwd_narrow<T, N, 3>(p); break;
        case PLAN_NARROW_4: fwd_narrow<T, N, 4>(p); break;
        case PLAN_NARROW_PLAIN: fwd_narrow<T, 1, 4>(p); break;
        case PLAN_BLOCK: fwd_block<T, N, 4>(p); break;
        case PLAN_LONG: fwd_long<T, N>(p); break;
        case PLAN_LONG_PLAIN: fwd_long<T, 1>(p); break;
        }
        return xt_launched("rms_norm_fwd", p->rows, p->cols);
    });
}

/* Number of shares of dw: at most `most`, each of at least `each` rows (the last may have fewer). */
static int64_t shares_of(int64_t rows, int64_t each, int64_t most) {
    int64_t count = xt_divide_up(rows, each);
    return count < most ? count : most;
}

template <typename T, int N, int V>
static void bwd_narrow(const XtRmsNormBwd *p, XtScratch *scratch, XtStatus *status, int64_t *shares) {
    using A = XtAcc<T>;
    int lanes = lanes_of(p->cols / N, V);
    *shares = shares_of(p->rows, THREADS / lanes * ROWS_BWD<V>, XT_PLAN_MULTIPROCESSORS * BLOCKS_BWD<V>);
    if (p->dweight) *status = scratch->allocate((size_t)(*shares * p->cols) * sizeof(A));
    if (*status != XT_OK) return;
    xt_launch(rms_norm_bwd_narrow_kernel<T, N, V>, (unsigned)*shares, THREADS, 0, (T *)p->dx, (A *)scratch->data, (const T *)p->dy,
              (const T *)p->x, (const T *)p->weight, (const A *)p->rstd, p->rows, (int)p->cols, lanes, A(1) / (A)p->cols);
}
template <typename T, int N, int V>
static void bwd_block(const XtRmsNormBwd *p, XtScratch *scratch, XtStatus *status, int64_t *shares) {
    using A = XtAcc<T>;
    unsigned threads = warps_for(xt_divide_up(p->cols / N, V));
    *shares = shares_of(p->rows, 4, XT_PLAN_MULTIPROCESSORS * 1024 / threads);
    if (p->dweight) *status = scratch->allocate((size_t)(*shares * p->cols) * sizeof(A));
    if (*status != XT_OK) return;
    xt_launch(rms_norm_bwd_block_kernel<T, N, V>, (unsigned)*shares, threads, 0, (T *)p->dx, (A *)scratch->data, (const T *)p->dy,
              (const T *)p->x, (const T *)p->weight, (const A *)p->rstd, p->rows, (int)p->cols, A(1) / (A)p->cols);
}
template <typename T, int N> static void bwd_long(const XtRmsNormBwd *p, XtScratch *scratch, XtStatus *status, int64_t *shares) {
    using A = XtAcc<T>;
    if (p->dx)
        xt_launch(rms_norm_bwd_long_kernel<T, N>, xt_blocks(p->rows, 1), warps_for(xt_divide_up(p->cols / N, 4)), 0, (T *)p->dx,
                  (const T *)p->dy, (const T *)p->x, (const T *)p->weight, (const A *)p->rstd, p->rows, p->cols, A(1) / (A)p->cols);
    if (!p->dweight) return;
    int64_t fit = (1 << 21) / p->cols, most = 2 * XT_PLAN_MULTIPROCESSORS; /* 8 MB of shares */
    *shares = shares_of(p->rows, 4, fit < 1 ? 1 : fit < most ? fit : most);
    *status = scratch->allocate((size_t)(*shares * p->cols) * sizeof(A));
    if (*status != XT_OK) return;
    dim3 grid(xt_blocks(p->cols / N, THREADS), (unsigned)*shares);
    xt_launch(rms_norm_share_kernel<T, N>, grid, THREADS, 0, (A *)scratch->data, (const T *)p->dy, (const T *)p->x,
              (const A *)p->rstd, p->rows, p->cols);
}

XtStatus xt_cuda_rms_norm_bwd(const XtRmsNormBwd *p) {
    if (p->cols == 0 || (!p->dx && !p->dweight) || (p->rows == 0 && (!p->dweight || p->accumulate))) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = XT_WIDTH<T>;
        XtScratch scratch;
        XtStatus status = XT_OK;
        int64_t shares = 0;
        bool aligned = xt_aligned<T>(p->cols, p->cols, p->dx, p->dy, p->x, p->weight);
        int64_t pieces = aligned ? p->cols / N : p->cols;
        if (p->rows > 0) {
            switch (choose(aligned, pieces, BLOCK_BWD)) {
            case PLAN_NARROW_1: bwd_narrow<T, N, 1>(p, &scratch, &status, &shares); break;
            case PLAN_NARROW_2: bwd_narrow<T, N, 2>(p, &scratch, &status, &shares); break;
            case PLAN_NARROW_3: bwd_narrow<T, N, 3>(p, &scratch, &status, &shares); break;
            case PLAN_NARROW_4: bwd_narrow<T, N, 4>(p, &scratch, &status, &shares); break;
            case PLAN_NARROW_PLAIN: bwd_narrow<T, 1, 4>(p, &scratch, &status, &shares); break;
            case PLAN_BLOCK:
                if (pieces <= 1024) bwd_block<T, N, 1>(p, &scratch, &status, &shares);
                else bwd_block<T, N, 2>(p, &scratch, &status, &shares);
                break;
            case PLAN_LONG: bwd_long<T, N>(p, &scratch, &status, &shares); break;
            case PLAN_LONG_PLAIN: bwd_long<T, 1>(p, &scratch, &status, &shares); break;
            }
        }
        if (status != XT_OK) return status;
        if (p->dweight)
            xt_launch(rms_norm_dweight_kernel<T>, xt_blocks(p->cols, SUM_COLS), SUM_COLS * SLICES, 0, (T *)p->dweight,
                      (const XtAcc<T> *)scratch.data, shares, p->cols, p->accumulate);
        return xt_launched("rms_norm_bwd", p->rows, p->cols);
    });
}
