/* clip_grad_norm.cu - the common norm of all gradients, and clipping by it: one launch each for a whole list of tensors (tables.cuh);
 * clipping takes one for each dtype in the list.
 *
 *     norm = sqrt(sum of g^2 over all tensors);   clip: g *= min(1, max_norm / (norm + 1e-6))
 *
 * Bytes: the norm reads g once; clipping reads and writes it once, or does nothing. The launches overlap: each begins while the one
 * before ends.
 *
 * Deterministic: clipping is elementwise. The norm is one float64 sum per piece, with a tree that depends on the dtype and on whether
 * the tensor begins at a multiple of 16 bytes; a second launch, of one block, adds them in an order of their own.
 */
#include "arch/overlap.cuh"
#include "contract/optimizer.h"
#include "optimizer/tables.cuh"

static const int LOADS = 4;           /* 16-byte vectors under way in each thread */
static const int CLIPPING_BLOCKS = 6; /* of a multiprocessor */

typedef struct Gradient {
    void *data; /* [numel] */
    int64_t numel;
    int dtype;
    bool wide; /* data takes 16-byte accesses */
} Gradient;

static Gradient gradient_of(const XtView *view) {
    Gradient gradient;
    gradient.data = view->data;
    gradient.numel = 1;
    for (int i = 0; i < view->ndim; i++) gradient.numel *= view->shape[i];
    gradient.dtype = (int)view->dtype;
    gradient.wide = (uintptr_t)view->data % 16 == 0;
    return gradient;
}

/* A thread's share of the sum of x^2 over n elements of x, W at a time; n is a multiple of W. */
template <typename T, int W> __device__ inline double squares_range(const T *x, int n) {
    double sum = 0;
    for (int i = threadIdx.x; i < n / W; i += LOADS * THREADS) {
        XtPiece<T, W> q[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            q[u] = xt_all<T, W>(xt_store<T>(0));
            if (i + u * THREADS < n / W) q[u] = xt_read<T, W>(x + (i + u * THREADS) * W);
        }
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            const XtVector<XtAcc<T>, W> v = xt_load(q[u]);
            double part = 0;
#pragma unroll
            for (int j = 0; j < W; j++) part += (double)v.at[j] * (double)v.at[j];
            sum += part;
        }
    }
    return sum;
}

/* Grid: one block a piece; sums [pieces of this table]. */
__global__ void __launch_bounds__(THREADS) squares_kernel(double *sums, const __grid_constant__ Table<Gradient> table) {
    xt_wait_for_previous();
    xt_let_next_begin();
    const int item = item_of(table, blockIdx.x);
    const Gradient &gradient = table.item[item];
    const int64_t begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE;
    const int n = gradient.numel - begin < PIECE ? (int)(gradient.numel - begin) : PIECE;
    double sum = 0;
    by_dtype(gradient.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T *x = (const T *)gradient.data + begin; /* [n] */
        const int middle = gradient.wide ? n - n % XT_WIDTH<T> : 0;
        sum = squares_range<T, XT_WIDTH<T>>(x, middle) + squares_range<T, 1>(x + middle, n - middle);
    });
    sum = xt_block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

/* One block. sums [n] */
__global__ void __launch_bounds__(1024) norm_kernel(float *norm, const double *sums, int64_t n) {
    xt_wait_for_previous();
    xt_let_next_begin();
    constexpr int AHEAD = 16; /* loads that the compiler may start before the first is added */
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += AHEAD * 1024) {
        double q[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) q[u] = i + u * 1024 < n ? sums[i + u * 1024] : 0;
#pragma unroll
        for (int u = 0; u < AHEAD; u++) sum += q[u];
    }
    sum = xt_block_sum(sum);
    if (threadIdx.x == 0) norm[0] = (float)sqrt(sum);
}

XtStatus xt_cuda_grad_norm(const XtGradNorm *p) {
    int64_t pieces = 0, numel = 0;
    for (int64_t i = 0; i < p->count; i++) {
        const int64_t n = gradient_of(&p->items[i]).numel;
        pieces += xt_divide_up(n, PIECE);
        numel += n;
    }
    XtScratch scratch;
    XT_CHECK(scratch.allocate((size_t)pieces * sizeof(double)));
    double *sums = (double *)scratch.data; /* [pieces] */
    by_tables<Gradient>(
        p->count, 0, [&](int64_t i) { return gradient_of(&p->items[i]); },
        [&](const Table<Gradient> &table, int of_table) {
            xt_launch_early(squares_kernel, of_table, THREADS, 0, sums, table);
            sums += of_table;
        });
    xt_launch_early(norm_kernel, 1, 1024, 0, p->norm, (const double *)scratch.data, pieces);
    return xt_launched("grad_norm", p->count, numel);
}

/* x *= scale, for n elements of x, W at a time; n is a multiple of W. */
template <typename T, int W> __device__ inline void scale_range(T *x, XtAcc<T> scale, int n) {
    for (int i = threadIdx.x; i < n / W; i += LOADS * THREADS) {
        XtPiece<T, W> q[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (i + u * THREADS < n / W) q[u] = xt_read<T, W>(x + (i + u * THREADS) * W);
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            if (i + u * THREADS >= n / W) continue;
            XtVector<XtAcc<T>, W> v = xt_load(q[u]);
#pragma unroll
            for (int j = 0; j < W; j++) v.at[j] *= scale;
            xt_write(x + (i + u * THREADS) * W, xt_store<T>(v));
        }
    }
}

/* x *= scale for a whole piece x [PIECE]; calls meanwhile() when the first loads are under way. */
template <typename T, typename F> __device__ inline void scale_piece(T *x, XtAcc<T> scale, F meanwhile) {
    constexpr int W = XT_WIDTH<T>, STEP = THREADS * W;
    static_assert(PIECE % (LOADS * STEP) == 0, "rounds are whole");
    x += threadIdx.x * W;
#pragma unroll 1
    for (int i = 0; i < PIECE; i += LOADS * STEP, x += LOADS * STEP) {
        XtPiece<T, W> q[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) q[u] = xt_read<T, W>(x + u * STEP);
        if (i == 0) meanwhile();
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            XtVector<XtAcc<T>, W> v = xt_load(q[u]);
#pragma unroll
            for (int j = 0; j < W; j++) v.at[j] *= scale;
            xt_write(x + u * STEP, xt_store<T>(v));
        }
    }
}

/* item_of a piece that is not after those of `item`: mostly one of its own. */
__device__ inline int item_back_from(const Table<Gradient> &table, int item, int piece) {
    int low = table.first[item] <= piece ? item : 0, high = low == item ? item + 1 : item; /* as in item_of */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.first[middle] <= piece) low = middle;
        else high = middle;
    }
    return low;
}

/* Blocks take pieces in turns, CLIPPING_BLOCKS at most on a multiprocessor: they are all there at once, so finding nothing to clip
 * costs one wave of empty blocks, not one for every thousand pieces. From the last piece to the first, as the L2 cache may still have
 * the end of what the norm read. All gradients have dtype T. norm [1] */
template <typename T>
__global__ void __launch_bounds__(THREADS, CLIPPING_BLOCKS)
    clip_kernel(const float *norm, double max_norm, const __grid_constant__ Table<Gradient> table) {
    xt_wait_for_previous();
    xt_let_next_begin();
    const double coefficient = max_norm / ((double)norm[0] + 1e-6);
    if (coefficient >= 1) return; /* false for NaN, which goes on to the gradients */
    const XtAcc<T> scale = (XtAcc<T>)coefficient;
    int item = table.count;
    for (int piece = table.first[table.count] - 1 - (int)blockIdx.x; piece >= 0; piece -= (int)gridDim.x) {
        if (item == table.count) item = item_of(table, piece); /* the first; later ones are looked up during the loads before */
        const Gradient &gradient = table.item[item];
        const int64_t begin = (int64_t)(piece - table.first[item]) * PIECE;
        const int n = gradient.numel - begin < PIECE ? (int)(gradient.numel - begin) : PIECE;
        T *x = (T *)gradient.data + begin; /* [n] */
        const bool wide = gradient.wide;
        auto look_up = [&] {
            if (piece >= (int)gridDim.x) item = item_back_from(table, item, piece - (int)gridDim.x);
        };
        if (wide && n == PIECE) {
            scale_piece<T>(x, scale, look_up);
        } else {
            const int middle = wide ? n - n % XT_WIDTH<T> : 0;
            scale_range<T, XT_WIDTH<T>>(x, scale, middle);
            scale_range<T, 1>(x + middle, scale, n - middle);
            look_up();
        }
    }
}

XtStatus xt_cuda_clip(const XtClip *p) {
    int64_t numel = 0;
    bool found[XT_DTYPE_COUNT] = {};
    for (int64_t i = 0; i < p->count; i++) {
        numel += gradient_of(&p->items[i]).numel;
        found[p->items[i].dtype] = true;
    }
    for (int dtype = 0; dtype < XT_DTYPE_COUNT; dtype++) {
        if (!found[dtype]) continue;
        XT_CHECK(xt_by_float((XtDtype)dtype, [&](auto zero) {
            by_tables<Gradient>(
                p->count, 0,
                [&](int64_t i) {
                    Gradient gradient = gradient_of(&p->items[i]);
                    if (gradient.dtype != dtype) gradient.numel = 0; /* has a launch of its own */
                    return gradient;
                },
                [&](const Table<Gradient> &table, int pieces) {
                    const int most = CLIPPING_BLOCKS * xt_multiprocessors();
                    xt_launch_early(clip_kernel<decltype(zero)>, pieces < most ? pieces : most, THREADS, 0, p->norm, p->max_norm,
                                    table);
                });
            return XT_OK;
        }));
    }
    return xt_launched("clip", p->count, numel);
}
