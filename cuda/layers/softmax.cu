/* softmax.cu - softmax over rows, dense [rows, cols].
 *
 *     forward    p_j = exp(x_j - m) / sum_k exp(x_k - m),  m = max_k x_k
 *     backward   dx_i = p_i (dy_i - sum_j dy_j p_j)
 *
 * One of four plans, by the shape:
 *
 *   - tiny, short   8 or 32 neighbouring threads hold a row in registers, in ACC: up to 32 elements a thread
 *   - middle        a block holds a row in registers: up to 1024 threads x 32 elements (float64 16; the backward half)
 *   - long          more columns and many rows: a block reads its row twice, the second time much of it from L2. The forward
 *                   keeps a running maximum and rescales its sum (Milakov & Gimelshein 2018)
 *   - split         more columns and few rows: each row is cut into at most 512 pieces. One launch writes (m, sum) of every piece,
 *                   the next joins the pieces of its row and writes the result
 *
 * Bytes moved: the inputs once (long, split: twice), the output once. 16 bytes an access if cols and pointers allow (float64: 8).
 * Sums are in ACC, in a tree that depends on cols and the plan: a long row among few rows has other bits than among many. A row
 * with NaN or +Inf, or of -Inf only, gives NaN, as on the CPU.
 */
#include "common/cuda.cuh"
#include "contract/layers.h"

#include <math.h>

enum {
    WARP_THREADS = 256,
    LONG_THREADS = 1024,
    SPLIT_THREADS = 256,
    LONG_ROWS = 128, /* with so many rows, a block has a whole long row */
    MOST_PIECES = 512,
    PIECE = 8192, /* columns of a piece at least; a multiple of STRIP */
    STRIP = 2048, /* pieces are multiples of it, hence of 16 bytes */
    AHEAD = 4,    /* loads in flight per thread where a row does not fit in registers */
};

/* Most elements of a row that a thread holds: 32 registers. */
template <typename T> constexpr int HELD = sizeof(XtAcc<T>) == 8 ? 16 : 32;

template <typename A> __device__ inline A no_value(void) { return -(A)INFINITY; }

template <typename T, int N> __device__ inline void load(XtAcc<T> *v, const T *x) {
    static_assert(N == 1 || N * sizeof(T) == 16, "one access");
    if constexpr (N == 1) {
        v[0] = xt_load(*x);
    } else {
        const uint4 raw = *(const uint4 *)x;
        const XtVector<T, N> t = *(const XtVector<T, N> *)&raw;
#pragma unroll
        for (int e = 0; e < N; e++) v[e] = xt_load(t.at[e]);
    }
}

template <typename T, int N> __device__ inline void store(T *out, const XtAcc<T> *v) {
    if constexpr (N == 1) {
        *out = xt_store<T>(v[0]);
    } else {
        XtVector<T, N> t;
#pragma unroll
        for (int e = 0; e < N; e++) t.at[e] = xt_store<T>(v[e]);
        *(uint4 *)out = *(const uint4 *)&t;
    }
}

/* Sum of v[COUNT] in a tree; overwrites v. */
template <int COUNT, typename A> __device__ inline A sum_of(A *v) {
    if constexpr (COUNT == 1) {
        return v[0];
    } else {
#pragma unroll
        for (int e = 0; e < COUNT / 2; e++) v[e] += v[e + COUNT / 2];
        return sum_of<COUNT / 2>(v);
    }
}

/* ---- rows in registers ------------------------------------------------------------------------------------------------------- */

/* One row by LANES threads, or by the whole block if LANES is 0. Element e of vector k of a thread is column (k * threads +
 * lane) * N + e. Columns past the end count as -inf. */
template <typename T, int N, int K, int LANES>
__device__ inline void forward_row(T *out, const T *x, int64_t cols, int lane, int threads, bool here) { // out, x [cols]
    typedef XtAcc<T> A;
    A v[K * N];
    A max = no_value<A>();
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int64_t j = (int64_t)(k * threads + lane) * N;
#pragma unroll
        for (int e = 0; e < N; e++) v[k * N + e] = no_value<A>();
        if (here && j < cols) load<T, N>(v + k * N, x + j);
    }
#pragma unroll
    for (int e = 0; e < K * N; e++) max = XtFirstMax()(max, v[e]);
    if constexpr (LANES > 0) max = xt_warp_reduce<LANES>(max, XtFirstMax());
    else max = xt_block_reduce(max, no_value<A>(), XtMax());
    A part[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int e = 0; e < N; e++) {
            v[k * N + e] = xt_exp_for<T>(v[k * N + e] - max);
            part[k % 4] += v[k * N + e];
        }
    A sum = sum_of<4>(part);
    if constexpr (LANES > 0) sum = xt_warp_sum<LANES>(sum);
    else sum = xt_block_sum(sum);
    const A scale = 1 / sum;
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int64_t j = (int64_t)(k * threads + lane) * N;
#pragma unroll
        for (int e = 0; e < N; e++) v[k * N + e] *= scale;
        if (here && j < cols) store<T, N>(out + j, v + k * N);
    }
}

template <typename T, int N, int K, int LANES>
__device__ inline void backward_row(T *dx, const T *dy, const T *p, int64_t cols, int lane, int threads, bool here) { // all [cols]
    typedef XtAcc<T> A;
    A g[K * N], y[K * N], part[4] = {0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int64_t j = (int64_t)(k * threads + lane) * N;
#pragma unroll
        for (int e = 0; e < N; e++) g[k * N + e] = y[k * N + e] = 0;
        if (here && j < cols) {
            load<T, N>(g + k * N, dy + j);
            load<T, N>(y + k * N, p + j);
        }
    }
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int e = 0; e < N; e++) part[k % 4] += g[k * N + e] * y[k * N + e];
    A dot = sum_of<4>(part);
    if constexpr (LANES > 0) dot = xt_warp_sum<LANES>(dot);
    else dot = xt_block_sum(dot);
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int64_t j = (int64_t)(k * threads + lane) * N;
#pragma unroll
        for (int e = 0; e < N; e++) g[k * N + e] = y[k * N + e] * (g[k * N + e] - dot);
        if (here && j < cols) store<T, N>(dx + j, g + k * N);
    }
}

/* 32 / LANES rows a warp. The lanes of a row past the end compute with -inf and write nothing. */
template <typename T, int N, int K, int LANES>
__global__ void __launch_bounds__(WARP_THREADS)
    softmax_fwd_warp_kernel(T *out, const T *x, int64_t rows, int64_t cols) { // out, x [rows, cols]
    const int64_t step = (int64_t)gridDim.x * (WARP_THREADS / LANES);
    for (int64_t first = (int64_t)blockIdx.x * (WARP_THREADS / LANES) + threadIdx.x / 32 * (32 / LANES); first < rows;
         first += step) {
        const int64_t row = first + threadIdx.x % 32 / LANES, offset = row < rows ? row * cols : 0;
        forward_row<T, N, K, LANES>(out + offset, x + offset, cols, threadIdx.x % LANES, LANES, row < rows);
    }
}
template <typename T, int N, int K, int LANES>
__global__ void __launch_bounds__(WARP_THREADS)
    softmax_bwd_warp_kernel(T *dx, const T *dy, const T *p, int64_t rows, int64_t cols) { // all [rows, cols]
    const int64_t step = (int64_t)gridDim.x * (WARP_THREADS / LANES);
    for (int64_t first = (int64_t)blockIdx.x * (WARP_THREADS / LANES) + threadIdx.x / 32 * (32 / LANES); first < rows;
         first += step) {
        const int64_t row = first + threadIdx.x % 32 / LANES, offset = row < rows ? row * cols : 0;
        backward_row<T, N, K, LANES>(dx + offset, dy + offset, p + offset, cols, threadIdx.x % LANES, LANES, row < rows);
    }
}

/* A row a block. */
template <typename T, int N, int K>
__global__ void __launch_bounds__(1024) softmax_fwd_block_kernel(T *out, const T *x, int64_t rows, int64_t cols) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
        forward_row<T, N, K, 0>(out + row * cols, x + row * cols, cols, threadIdx.x, blockDim.x, true);
}
template <typename T, int N, int K>
__global__ void __launch_bounds__(1024) softmax_bwd_block_kernel(T *dx, const T *dy, const T *p, int64_t rows, int64_t cols) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
        backward_row<T, N, K, 0>(dx + row * cols, dy + row * cols, p + row * cols, cols, threadIdx.x, blockDim.x, true);
}

/* ---- rows read twice --------------------------------------------------------------------------------------------------------- */

/* Maximum and sum of exp(x - maximum) of a part of a row. */
template <typename A> struct SoftmaxPart {
    A max, sum;
};

/* The number to subtract before exp: 0 for a part of -inf only, because -inf - -inf is NaN and the rest of the row may be
 * finite. */
template <typename A> __device__ inline A shift_of(A max) { return max == no_value<A>() ? 0 : max; }

/* Joins the parts of a block's threads; every thread gets the result. A NaN stays in the sum. */
template <typename T> __device__ inline SoftmaxPart<XtAcc<T>> join_block(SoftmaxPart<XtAcc<T>> part) {
    typedef XtAcc<T> A;
    const A max = xt_block_reduce(part.max, no_value<A>(), XtMax());
    return {max, xt_block_sum(part.sum * xt_exp_for<T>(part.max - shift_of(max)))};
}

/* The part of x[n], by the threads of a block. */
template <typename T, int N> __device__ inline SoftmaxPart<XtAcc<T>> forward_part(const T *x, int64_t n) {
    typedef XtAcc<T> A;
    constexpr int K = N == 1 ? 2 * AHEAD : AHEAD;
    SoftmaxPart<A> s = {no_value<A>(), 0};
    for (int64_t i = (int64_t)threadIdx.x * N; i < n; i += (int64_t)blockDim.x * N * K) {
        A v[K * N], max = s.max, part[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t j = i + (int64_t)k * blockDim.x * N;
#pragma unroll
            for (int e = 0; e < N; e++) v[k * N + e] = no_value<A>();
            if (j < n) load<T, N>(v + k * N, x + j);
        }
#pragma unroll
        for (int e = 0; e < K * N; e++) max = XtFirstMax()(max, v[e]);
        const A shift = shift_of(max);
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int e = 0; e < N; e++) part[k % 4] += xt_exp_for<T>(v[k * N + e] - shift);
        s.sum = s.sum * xt_exp_for<T>(s.max - shift) + sum_of<4>(part); /* 0 * 0 the first time */
        s.max = max;
    }
    return join_block<T>(s);
}

template <typename T, int N> __device__ inline void forward_write(T *out, const T *x, int64_t n, SoftmaxPart<XtAcc<T>> row) {
    typedef XtAcc<T> A;
    constexpr int K = N == 1 ? 2 * AHEAD : AHEAD;
    const A scale = 1 / row.sum;
    for (int64_t i = (int64_t)threadIdx.x * N; i < n; i += (int64_t)blockDim.x * N * K) {
        A v[K * N];
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t j = i + (int64_t)k * blockDim.x * N;
            if (j < n) load<T, N>(v + k * N, x + j);
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t j = i + (int64_t)k * blockDim.x * N;
            if (j >= n) break;
#pragma unroll
            for (int e = 0; e < N; e++) v[k * N + e] = xt_exp_for<T>(v[k * N + e] - row.max) * scale;
            store<T, N>(out + j, v + k * N);
        }
    }
}

/* Sum of dy * p over n elements, by the threads of a block. */
template <typename T, int N> __device__ inline XtAcc<T> backward_part(const T *dy, const T *p, int64_t n) {
    typedef XtAcc<T> A;
    constexpr int K = N == 8 ? AHEAD / 2 : AHEAD;
    A dot = 0;
    for (int64_t i = (int64_t)threadIdx.x * N; i < n; i += (int64_t)blockDim.x * N * K) {
        A g[K * N], y[K * N], part[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t j = i + (int64_t)k * blockDim.x * N;
#pragma unroll
            for (int e = 0; e < N; e++) g[k * N + e] = y[k * N + e] = 0;
            if (j < n) {
                load<T, N>(g + k * N, dy + j);
                load<T, N>(y + k * N, p + j);
            }
        }
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int e = 0; e < N; e++) part[k % 4] += g[k * N + e] * y[k * N + e];
        dot += sum_of<4>(part);
    }
    return xt_block_sum(dot);
}

template <typename T, int N> __device__ inline void backward_write(T *dx, const T *dy, const T *p, int64_t n, XtAcc<T> dot) {
    typedef XtAcc<T> A;
    constexpr int K = AHEAD / 2;
    for (int64_t i = (int64_t)threadIdx.x * N; i < n; i += (int64_t)blockDim.x * N * K) {
        A g[K * N], y[K * N];
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t j = i + (int64_t)k * blockDim.x * N;
            if (j < n) {
                load<T, N>(g + k * N, dy + j);
                load<T, N>(y + k * N, p + j);
            }
        }
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t j = i + (int64_t)k * blockDim.x * N;
            if (j >= n) break;
#pragma unroll
            for (int e = 0; e < N; e++) g[k * N + e] = y[k * N + e] * (g[k * N + e] - dot);
            store<T, N>(dx + j, g + k * N);
        }
    }
}

template <typename T, int N>
__global__ void __launch_bounds__(LONG_THREADS) softmax_fwd_long_kernel(T *out, const T *x, int64_t rows, int64_t cols) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const SoftmaxPart<XtAcc<T>> whole = forward_part<T, N>(x + row * cols, cols);
        forward_write<T, N>(out + row * cols, x + row * cols, cols, whole);
    }
}
template <typename T, int N>
__global__ void __launch_bounds__(LONG_THREADS)
    softmax_bwd_long_kernel(T *dx, const T *dy, const T *p, int64_t rows, int64_t cols) {
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const XtAcc<T> dot = backward_part<T, N>(dy + row * cols, p + row * cols, cols);
        backward_write<T, N>(dx + row * cols, dy + row * cols, p + row * cols, cols, dot);
    }
}

/* A row has `pieces` of `piece` columns, the last may be shorter; parts [rows, pieces]. */
template <typename T, int N>
__global__ void __launch_bounds__(SPLIT_THREADS)
    softmax_fwd_part_kernel(SoftmaxPart<XtAcc<T>> *parts, const T *x, int64_t rows, int64_t cols, int64_t pieces, int64_t piece) {
    for (int64_t task = blockIdx.x; task < rows * pieces; task += gridDim.x) {
        const int64_t first = task % pieces * piece, n = cols - first < piece ? cols - first : piece;
        const SoftmaxPart<XtAcc<T>> part = forward_part<T, N>(x + task / pieces * cols + first, n);
        if (threadIdx.x == 0) parts[task] = part;
    }
}
template <typename T, int N>
__global__ void __launch_bounds__(SPLIT_THREADS)
    softmax_fwd_write_kernel(T *out, const T *x, const SoftmaxPart<XtAcc<T>> *parts, int64_t rows, int64_t cols, int64_t pieces,
                             int64_t piece) {
    typedef XtAcc<T> A;
    for (int64_t task = blockIdx.x; task < rows * pieces; task += gridDim.x) {
        const int64_t row = task / pieces, first = task % pieces * piece, n = cols - first < piece ? cols - first : piece;
        SoftmaxPart<A> s = {no_value<A>(), 0};
        for (int64_t i = threadIdx.x; i < pieces; i += SPLIT_THREADS) {
            const SoftmaxPart<A> t = parts[row * pieces + i];
            const A max = XtFirstMax()(s.max, t.max), shift = shift_of(max);
            s.sum = s.sum * xt_exp_for<T>(s.max - shift) + t.sum * xt_exp_for<T>(t.max - shift);
            s.max = max;
        }
        s = join_block<T>(s);
        forward_write<T, N>(out + row * cols + first, x + row * cols + first, n, s);
    }
}
template <typename T, int N>
__global__ void __launch_bounds__(SPLIT_THREADS)
    softmax_bwd_part_kernel(XtAcc<T> *parts, const T *dy, const T *p, int64_t rows, int64_t cols, int64_t pieces, int64_t piece) {
    for (int64_t task = blockIdx.x; task < rows * pieces; task += gridDim.x) {
        const int64_t first = task % pieces * piece, n = cols - first < piece ? cols - first : piece;
        const int64_t offset = task / pieces * cols + first;
        const XtAcc<T> dot = backward_part<T, N>(dy + offset, p + offset, n);
        if (threadIdx.x == 0) parts[task] = dot;
    }
}
template <typename T, int N>
__global__ void __launch_bounds__(SPLIT_THREADS)
    softmax_bwd_write_kernel(T *dx, const T *dy, const T *p, const XtAcc<T> *parts, int64_t rows, int64_t cols, int64_t pieces,
                             int64_t piece) {
    for (int64_t task = blockIdx.x; task < rows * pieces; task += gridDim.x) {
        const int64_t row = task / pieces, first = task % pieces * piece, n = cols - first < piece ? cols - first : piece;
        const int64_t offset = row * cols + first;
        XtAcc<T> dot = 0;
        for (int64_t i = threadIdx.x; i < pieces; i += SPLIT_THREADS) dot += parts[row * pieces + i];
        dot = xt_block_sum(dot);
        backward_write<T, N>(dx + offset, dy + offset, p + offset, n, dot);
    }
}

/* ---- the slots --------------------------------------------------------------------------------------------------------------- */

/* Columns of a piece. */
static int64_t piece_of(int64_t cols) {
    int64_t piece = xt_divide_up(xt_divide_up(cols, MOST_PIECES), STRIP) * STRIP;
    return piece < PIECE ? (int64_t)PIECE : piece;
}

/* Whole warps that hold `cols` elements, `each` a thread. */
static unsigned threads_for(int64_t cols, int each) { return (unsigned)xt_divide_up(xt_divide_up(cols, each), 32) * 32; }

/* Elements an access if aligned: 16 bytes. float64 takes one: a warp still reads 256 bytes, and the kernels for N = 1 serve. */
template <typename T> constexpr int WIDE = sizeof(T) == 8 ? 1 : XT_WIDTH<T>;

/* N elements an access: WIDE<T> or 1. */
template <typename T, int N> static XtStatus forward(const XtSoftmaxFwd *p) {
    constexpr int H = HELD<T>, SMALL = H / 4 / N > 0 ? H / 4 / N : 1; /* vectors a thread holds: H / N, or about a quarter */
    constexpr int FULL = N > 1 ? H / N : H / 2;
    T *out = (T *)p->out;
    const T *x = (const T *)p->x;
    const int64_t rows = p->rows, cols = p->cols;
    if (cols <= 8 * SMALL * N) {
        xt_launch(softmax_fwd_warp_kernel<T, N, SMALL, 8>, xt_blocks(rows, WARP_THREADS / 8), WARP_THREADS, 0, out, x, rows, cols);
    } else if (cols <= 32 * SMALL * N) {
        xt_launch(softmax_fwd_warp_kernel<T, N, SMALL, 32>, xt_blocks(rows, WARP_THREADS / 32), WARP_THREADS, 0, out, x, rows,
                  cols);
    } else if (cols <= 32 * H) {
        xt_launch(softmax_fwd_warp_kernel<T, N, H / N, 32>, xt_blocks(rows, WARP_THREADS / 32), WARP_THREADS, 0, out, x, rows,
                  cols);
    } else if (cols <= 512 * H) {
        xt_launch(softmax_fwd_block_kernel<T, N, H / 2 / N>, xt_blocks(rows, 1), threads_for(cols, H / 2), 0, out, x, rows, cols);
    } else if (N > 1 && cols <= 1024 * H) { /* for N = 1, 32 elements a thread would need too many registers */
        xt_launch(softmax_fwd_block_kernel<T, N, FULL>, xt_blocks(rows, 1), threads_for(cols, H), 0, out, x, rows, cols);
    } else if (rows >= LONG_ROWS) {
        xt_launch(softmax_fwd_long_kernel<T, N>, xt_blocks(rows, 1), LONG_THREADS, 0, out, x, rows, cols);
    } else {
        typedef SoftmaxPart<XtAcc<T>> Part;
        const int64_t piece = piece_of(cols), pieces = xt_divide_up(cols, piece);
        XtScratch scratch;
        XT_CHECK(scratch.allocate((size_t)(rows * pieces) * sizeof(Part)));
        Part *parts = (Part *)scratch.data; /* [rows, pieces] */
        const unsigned blocks = xt_blocks(rows * pieces, 1);
        xt_launch(softmax_fwd_part_kernel<T, N>, blocks, SPLIT_THREADS, 0, parts, x, rows, cols, pieces, piece);
        xt_launch(softmax_fwd_write_kernel<T, N>, blocks, SPLIT_THREADS, 0, out, x, parts, rows, cols, pieces, piece);
    }
    return xt_launched("softmax_fwd", rows, cols);
}

template <typename T, int N> static XtStatus backward(const XtSoftmaxBwd *p) {
    constexpr int H = HELD<T> / 2, SMALL = H / 4 / N > 0 ? H / 4 / N : 1; /* two inputs are held */
    T *dx = (T *)p->dx;
    const T *dy = (const T *)p->dy, *y = (const T *)p->p;
    const int64_t rows = p->rows, cols = p->cols;
    if (cols <= 8 * SMALL * N) {
        xt_launch(softmax_bwd_warp_kernel<T, N, SMALL, 8>, xt_blocks(rows, WARP_THREADS / 8), WARP_THREADS, 0, dx, dy, y, rows,
                  cols);
    } else if (cols <= 32 * SMALL * N) {
        xt_launch(softmax_bwd_warp_kernel<T, N, SMALL, 32>, xt_blocks(rows, WARP_THREADS / 32), WARP_THREADS, 0, dx, dy, y, rows,
                  cols);
    } else if (cols <= 32 * H) {
        xt_launch(softmax_bwd_warp_kernel<T, N, H / N, 32>, xt_blocks(rows, WARP_THREADS / 32), WARP_THREADS, 0, dx, dy, y, rows,
                  cols);
    } else if (cols <= 512 * H) {
        xt_launch(softmax_bwd_block_kernel<T, N, H / 2 / N>, xt_blocks(rows, 1), threads_for(cols, H / 2), 0, dx, dy, y, rows,
                  cols);
    } else if (cols <= 1024 * H) {
        xt_launch(softmax_bwd_block_kernel<T, N, H / N>, xt_blocks(rows, 1), threads_for(cols, H), 0, dx, dy, y, rows, cols);
    } else if (rows >= LONG_ROWS) {
        xt_launch(softmax_bwd_long_kernel<T, N>, xt_blocks(rows, 1), LONG_THREADS, 0, dx, dy, y, rows, cols);
    } else {
        typedef XtAcc<T> A;
        const int64_t piece = piece_of(cols), pieces = xt_divide_up(cols, piece);
        XtScratch scratch;
        XT_CHECK(scratch.allocate((size_t)(rows * pieces) * sizeof(A)));
        A *parts = (A *)scratch.data; /* [rows, pieces] */
        const unsigned blocks = xt_blocks(rows * pieces, 1);
        xt_launch(softmax_bwd_part_kernel<T, N>, blocks, SPLIT_THREADS, 0, parts, dy, y, rows, cols, pieces, piece);
        xt_launch(softmax_bwd_write_kernel<T, N>, blocks, SPLIT_THREADS, 0, dx, dy, y, parts, rows, cols, pieces, piece);
    }
    return xt_launched("softmax_bwd", rows, cols);
}

XtStatus xt_cuda_softmax_fwd(const XtSoftmaxFwd *p) {
    if (p->rows == 0 || p->cols == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        bool wide = xt_aligned<T>(p->cols, p->cols, p->out, p->x);
        return wide ? forward<T, WIDE<T>>(p) : forward<T, 1>(p);
    });
}

XtStatus xt_cuda_softmax_bwd(const XtSoftmaxBwd *p) {
    if (p->rows == 0 || p->cols == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        bool wide = xt_aligned<T>(p->cols, p->cols, p->dx, p->dy, p->p);
        return wide ? backward<T, WIDE<T>>(p) : backward<T, 1>(p);
    });
}
