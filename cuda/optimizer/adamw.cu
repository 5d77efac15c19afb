/* adamw.cu - one AdamW step of a whole list of tensors in one launch (tables.cuh).
 *
 *     AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), PyTorch's order of operations; n is the number of the step:
 *         p *= 1 - lr weight_decay;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
 *         p -= lr / (1 - beta1^n)  m / (sqrt(v) / sqrt(1 - beta2^n) + eps)
 *
 * Bytes: reads p, g, m, v (master) and writes p, m, v (master) once: 28 an element for float32, 22 for bfloat16, 28 with a master
 * (which is read in the place of p), 30 where its gradient is float32.
 *
 * No parameter of the launch changes from step to step, so a CUDA graph may replay it: lr, guard and the steps are read here, and the
 * last block of a tensor counts its step up. Every block of the tensor reads the step and reports its arrival in one atomic addition,
 * so all of them have read it before it changes. Elementwise, so deterministic: the order of arrival decides nothing else.
 */
#include "contract/optimizer.h"
#include "core/power.h"
#include "optimizer/tables.cuh"

/* The numbers of AdamW that never change, as ACC: computed in float64 by the host, then rounded. */
template <typename A> struct AdamWConstants {
    A beta1, beta2, rest1, rest2, eps; /* rest = 1 - beta */
};
typedef struct AdamWBoth {
    AdamWConstants<float> of_float;
    AdamWConstants<double> of_double;
    double weight_decay;
} AdamWBoth;
static_assert(sizeof(AdamWBoth) + 2 * sizeof(double *) + sizeof(float *) <= OTHER_BYTES, "beside a table");
__device__ inline const AdamWConstants<float> &constants_for(const AdamWBoth &both, float) { return both.of_float; }
__device__ inline const AdamWConstants<double> &constants_for(const AdamWBoth &both, double) { return both.of_double; }

template <typename A> static AdamWConstants<A> constants_of(const XtAdamW *p) {
    return {(A)p->beta1, (A)p->beta2, (A)(1 - p->beta1), (A)(1 - p->beta2), (A)p->eps};
}

typedef struct AdamWTensor {
    void *p, *m, *v, *master; /* [numel] */
    const void *g;            /* [numel] */
    unsigned long long *step; /* while the kernel runs: step + ARRIVAL * blocks that have read it */
    int64_t numel;
    int dtype;
    bool wide_g; /* g has ACC */
    bool wide;   /* all pointers take accesses of 16 bytes */
} AdamWTensor;

/* The upper 24 bits of `step` count blocks, which is enough for 2^37 elements. */
static const unsigned long long ARRIVAL = XT_MOST_STEPS;

/* The numbers of a tensor's step, in float64; ranges round them to ACC. */
typedef struct AdamWNumbers {
    double decay, step_size, root2; /* decay = 1 - lr weight_decay, step_size = lr / (1 - beta1^n), root2 = sqrt(1 - beta2^n) */
} AdamWNumbers;

/* For the first two lanes of a block, which share the work: each computes one power. Lane 0 arrives, and counts the step up when it is
 * the last of the tensor's `pieces` blocks. */
__device__ inline void adamw_numbers(AdamWNumbers *numbers, unsigned long long *step, int pieces, double lr,
                                     const AdamWBoth &both) {
    const int lane = threadIdx.x;
    unsigned long long found = lane == 0 ? atomicAdd(step, ARRIVAL) : 0;
    found = __shfl_sync(3, found, 0);
    const unsigned long long n = found % ARRIVAL + 1;
    const double rest = 1 - xt_power(lane == 0 ? both.of_double.beta1 : both.of_double.beta2, (int64_t)n);
    if (lane == 0) {
        numbers->decay = 1 - __dmul_rn(lr, both.weight_decay); /* as on the host: not fused */
        numbers->step_size = lr / rest;
        if (found / ARRIVAL == (unsigned)pieces - 1) atomicExch(step, n); /* all have read it; the next launch comes later */
    } else {
        numbers->root2 = sqrt(rest);
    }
}

/* One step of the elements [begin, end) of a tensor with gradients of type G, W at a time; end - begin is a multiple of W. */
template <typename T, typename G, int W>
__device__ inline void adamw_range(const AdamWTensor &t, const AdamWConstants<XtAcc<T>> &constant, const AdamWNumbers &numbers,
                                   XtAcc<T> scale, int64_t begin, int64_t end) {
    typedef XtAcc<T> A;
    typedef XtVector<A, W> Vector;
    const A decay = (A)numbers.decay, step_size = (A)numbers.step_size, root2 = (A)numbers.root2;
    for (int64_t i = begin + threadIdx.x * W; i < end; i += THREADS * W) {
        const XtPiece<G, W> of_g = xt_read<G, W>((const G *)t.g + i);
        const XtPiece<A, W> of_m = xt_read<A, W>((const A *)t.m + i), of_v = xt_read<A, W>((const A *)t.v + i);
        Vector m, v, w;
        if (t.master) w = xt_load(xt_read<A, W>((const A *)t.master + i));
        else w = xt_load(xt_read<T, W>((const T *)t.p + i));
        Vector g = xt_load(of_g);
        m = xt_load(of_m);
        v = xt_load(of_v);
#pragma unroll
        for (int j = 0; j < W; j++) {
            g.at[j] *= scale;
            m.at[j] = constant.beta1 * m.at[j] + constant.rest1 * g.at[j];
            v.at[j] = constant.beta2 * v.at[j] + constant.rest2 * g.at[j] * g.at[j];
            w.at[j] = w.at[j] * decay - step_size * m.at[j] / (sqrt(v.at[j]) / root2 + constant.eps);
        }
        xt_write((A *)t.m + i, xt_piece(m));
        xt_write((A *)t.v + i, xt_piece(v));
        if (t.master) xt_write((A *)t.master + i, xt_piece(w));
        xt_write((T *)t.p + i, xt_store<T>(w));
    }
}

template <typename T, typename G>
__device__ inline void adamw_piece(const AdamWTensor &t, const AdamWBoth &both, const AdamWNumbers &numbers, double scale,
                                   int64_t begin, int64_t end) {
    typedef XtAcc<T> A;
    constexpr int W = XT_WIDTH<A>; /* 16 bytes of the moments, 8 or 16 of p and g: all of them without gaps */
    const int64_t middle = t.wide ? end - (end - begin) % W : begin;
    const AdamWConstants<A> &constant = constants_for(both, A());
    adamw_range<T, G, W>(t, constant, numbers, (A)scale, begin, middle);
    adamw_range<T, G, 1>(t, constant, numbers, (A)scale, middle, end);
}

/* Grid: one block a piece. lr [1], scale [1] or NULL, guard [1] or NULL. */
__global__ void __launch_bounds__(THREADS, 3)
    adamw_kernel(const __grid_constant__ Table<AdamWTensor> table, const __grid_constant__ AdamWBoth both, const double *lr,
                 const double *scale, const float *guard) {
    __shared__ AdamWNumbers shared;
    if (guard && !isfinite(*guard)) return; /* all blocks, so no step is left half counted */
    const int item = item_of(table, blockIdx.x);
    const AdamWTensor &t = table.item[item];
    if (threadIdx.x < 2) adamw_numbers(&shared, t.step, table.first[item + 1] - table.first[item], *lr, both);
    __syncthreads();
    const AdamWNumbers numbers = shared;
    const double by = scale ? *scale : 1;
    const int64_t begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE;
    const int64_t end = t.numel - begin < PIECE ? t.numel : begin + PIECE;
    by_dtype(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (t.wide_g) adamw_piece<T, XtAcc<T>>(t, both, numbers, by, begin, end);
        else adamw_piece<T, T>(t, both, numbers, by, begin, end);
    });
}

static XtStatus adamw_group(const XtAdamW *p) {
    const AdamWBoth both = {constants_of<float>(p), constants_of<double>(p), p->weight_decay};
    int64_t numel = 0;
    by_tables<AdamWTensor>(
        p->count, 1, /* an empty tensor has a block too, which counts its step */
        [&](int64_t i) {
            const XtAdamWItem *from = &p->items[i];
            AdamWTensor t;
            t.p = from->p;
            t.m = from->m;
            t.v = from->v;
            t.master = from->master;
            t.g = from->g;
            t.step = (unsigned long long *)from->step;
            t.numel = from->numel;
            t.dtype = (int)from->dtype;
            t.wide_g = from->dtype_g != from->dtype;
            t.wide = (((uintptr_t)t.p | (uintptr_t)t.m | (uintptr_t)t.v | (uintptr_t)t.master | (uintptr_t)t.g) & 15) == 0;
            numel += from->numel;
            return t;
        },
        [&](const Table<AdamWTensor> &table, int pieces) {
            xt_launch(adamw_kernel, pieces, THREADS, 0, table, both, p->lr, p->scale, p->guard);
        });
    return xt_launched("adamw", p->count, numel);
}

/* A launch or more a group. None takes memory of the host's, so no group is updated without the others. */
XtStatus xt_cuda_adamw(const XtAdamW *p) {
    for (; p; p = p->next) XT_CHECK(adamw_group(p));
    return XT_OK;
}
