/* ema.cu - exponential averages of a whole list of tensors in one launch (tables.cuh), and one that counts.
 *
 *     average += (x - average) (1 - decay) / (1 - decay^n): Adam's bias correction (Kingma & Ba 2015), made as it goes
 *
 * Bytes an element: x once, the average in and out. The step is read here, so a CUDA graph may replay the launches; it changes in a launch
 * of its own, behind those that read it. Elementwise, so deterministic.
 */
#include "contract/optimizer.h"
#include "core/power.h"
#include "optimizer/tables.cuh"

typedef struct EmaTensor {
    void *average; /* [numel] */
    const void *x; /* [numel] */
    int64_t numel;
    int dtype;
    bool wide; /* both pointers take accesses of 16 bytes */
} EmaTensor;

/* Elements [begin, end), W at a time; end - begin is a multiple of W. */
template <typename T, int W> __device__ inline void ema_range(const EmaTensor &t, XtAcc<T> share, int64_t begin, int64_t end) {
    typedef XtAcc<T> A;
    for (int64_t i = begin + threadIdx.x * W; i < end; i += THREADS * W) {
        const XtPiece<T, W> of_x = xt_read<T, W>((const T *)t.x + i);
        XtVector<A, W> average = xt_load(xt_read<A, W>((const A *)t.average + i));
        const XtVector<A, W> x = xt_load(of_x);
#pragma unroll
        for (int j = 0; j < W; j++) average.at[j] += (x.at[j] - average.at[j]) * share;
        xt_write((A *)t.average + i, xt_piece(average));
    }
}

/* Grid: one block a piece. step [1], guard [1] or NULL. */
__global__ void __launch_bounds__(THREADS)
    ema_kernel(const __grid_constant__ Table<EmaTensor> table, double decay, const int64_t *step, const float *guard) {
    __shared__ double shared;
    if (guard && !isfinite(*guard)) return;
    if (threadIdx.x == 0) shared = (1 - decay) / (1 - xt_power(decay, *step + 1));
    __syncthreads();
    const double share = shared;
    const int item = item_of(table, blockIdx.x);
    const EmaTensor &t = table.item[item];
    const int64_t begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE;
    const int64_t end = t.numel - begin < PIECE ? t.numel : begin + PIECE;
    by_dtype(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int W = XT_WIDTH<XtAcc<T>>;
        const int64_t middle = t.wide ? end - (end - begin) % W : begin;
        ema_range<T, W>(t, (XtAcc<T>)share, begin, middle);
        ema_range<T, 1>(t, (XtAcc<T>)share, middle, end);
    });
}

/* One thread. */
__global__ void ema_step_kernel(int64_t *step, const float *guard) {
    if (!guard || isfinite(*guard)) ++*step;
}

XtStatus xt_cuda_ema(const XtEma *p) {
    int64_t numel = 0;
    by_tables<EmaTensor>(
        p->count, 0,
        [&](int64_t i) {
            const XtEmaItem *from = &p->items[i];
            EmaTensor t;
            t.average = from->average;
            t.x = from->x;
            t.numel = from->numel;
            t.dtype = (int)from->dtype;
            t.wide = (((uintptr_t)t.average | (uintptr_t)t.x) & 15) == 0;
            numel += from->numel;
            return t;
        },
        [&](const Table<EmaTensor> &table, int pieces) {
            xt_launch(ema_kernel, pieces, THREADS, 0, table, p->decay, (const int64_t *)p->step, p->guard);
        });
    xt_launch(ema_step_kernel, 1, 1, 0, p->step, p->guard);
    return xt_launched("ema", p->count, numel);
}
