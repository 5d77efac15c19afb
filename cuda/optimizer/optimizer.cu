/* optimizer.cu - AdamW, the norm of all gradients, and clipping: one launch for a whole list of tensors.
 *
 *     AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), PyTorch's order of operations:
 *         p *= 1 - lr weight_decay;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
 *         p -= lr / (1 - beta1^step)  m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 *     norm = sqrt(sum of g^2 over all tensors);   clip: g *= min(1, max_norm / (norm + 1e-6))
 *
 * Every tensor is cut into pieces of PIECE elements, a block each, and the pieces of all tensors are numbered through. The list of
 * tensors is a kernel parameter (a Table by value): no copy to the device, nothing to keep alive, and a block finds its tensor by
 * bisection in constant memory. Lists that are longer than a table (some hundreds) take a launch per table.
 *
 * Bytes: AdamW reads p, g, m, v (master) and writes p, m, v (master) once: 28 an element for float32, 22 for bfloat16, 28 with a
 * master (which is read in the place of p). The norm reads g once; clipping reads and writes it once, or does nothing.
 *
 * Deterministic: AdamW and clipping are elementwise. The norm is one float64 sum per piece, with a tree that depends on the dtype
 * and on whether the tensor begins at a multiple of 16 bytes; a second launch, of one block, adds them in an order of their own.
 */
#include "common/cuda.cuh"
#include "contract/optimizer.h"

#include <math.h>

static const int PIECE =
    8192; /* elements; a multiple of every vector's width, so pieces begin where their tensor does, modulo 16 */
static const int THREADS = 256; /* of a block */
static const int LOADS = 4;     /* 16-byte vectors under way in each thread of the norm and of clipping */

/* ---- tables ------------------------------------------------------------------------------------------------------------------ */

#if CUDART_VERSION >= 12010
static const int PARAMETER_BYTES = 32764;
#else
static const int PARAMETER_BYTES = 4096;
#endif
static const int OTHER_BYTES = 160; /* of them for the kernel's other parameters */

/* Item i owns the pieces first[i] .. first[i + 1] - 1. An int is enough for 2^44 elements. */
template <typename Item> struct Table {
    static const int ROOM = (PARAMETER_BYTES - OTHER_BYTES - 16) / (int)(sizeof(Item) + sizeof(int));
    int count;
    int first[ROOM + 1];
    Item item[ROOM];
};

/* The item that owns a piece: the last one whose first piece is not after it. */
template <typename Item> __device__ inline int item_of(const Table<Item> &table, int piece) {
    int low = 0, high = table.count; /* first[low] <= piece < first[high] */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.first[middle] <= piece) low = middle;
        else high = middle;
    }
    return low;
}

/* Calls launch(table, pieces) for as many tables as it takes; make(i) gives the item of tensor i. Empty tensors are left out. */
template <typename Item, typename Make, typename Launch> static void by_tables(int64_t count, Make make, Launch launch) {
    Table<Item> table;
    table.count = 0;
    table.first[0] = 0;
    for (int64_t i = 0; i < count; i++) {
        const Item item = make(i);
        if (item.numel > 0) {
            table.item[table.count] = item;
            table.first[table.count + 1] = table.first[table.count] + (int)xt_divide_up(item.numel, PIECE);
            table.count++;
        }
        if (table.count == 0 || (table.count < Table<Item>::ROOM && i + 1 < count)) continue;
        launch(table, table.first[table.count]);
        table.count = 0;
    }
}

/* f(T()) for the dtype of an item: the same branch for all threads of a block. */
template <typename F> __device__ inline void by_dtype(int dtype, F f) {
    switch (dtype) {
    case XT_FLOAT32: f(float()); break;
    case XT_FLOAT64: f(double()); break;
    case XT_BFLOAT16: f(XtBf16()); break;
    default: f(XtF16()); break;
    }
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------------------- */

/* The numbers of AdamW that do not depend on the element, as ACC. */
template <typename A> struct AdamWNumbers {
    A beta1, beta2, rest1, rest2, step_size, root2, eps; /* rest = 1 - beta, root2 = sqrt(1 - beta2^step) */
};
typedef struct AdamWBoth {
    AdamWNumbers<float> of_float;
    AdamWNumbers<double> of_double;
} AdamWBoth;
__device__ inline const AdamWNumbers<float> &numbers_for(const AdamWBoth &both, float) { return both.of_float; }
__device__ inline const AdamWNumbers<double> &numbers_for(const AdamWBoth &both, double) { return both.of_double; }

/* Computed in float64, then rounded to ACC. */
template <typename A> static AdamWNumbers<A> adamw_numbers(const XtAdamW *p) {
    const double step = (double)p->step;
    AdamWNumbers<A> number;
    number.beta1 = (A)p->beta1;
    number.beta2 = (A)p->beta2;
    number.rest1 = (A)(1 - p->beta1);
    number.rest2 = (A)(1 - p->beta2);
    number.step_size = (A)(p->lr / (1 - pow(p->beta1, step)));
    number.root2 = (A)sqrt(1 - pow(p->beta2, step));
    number.eps = (A)p->eps;
    return number;
}

typedef struct AdamWTensor {
    void *p, *m, *v, *master; /* [numel] */
    const void *g;            /* [numel] */
    int64_t numel;
    double decay; /* 1 - lr weight_decay */
    int dtype;
    bool wide; /* all pointers take accesses of 16 bytes */
} AdamWTensor;

/* What the guards of earlier steps have stopped. missed, after [1]; lr and step as in XtAdamW. */
typedef struct AdamWHistory {
    const int64_t *missed;
    int64_t *after;
    double lr;
    int64_t step;
} AdamWHistory;
static_assert(sizeof(AdamWBoth) + sizeof(AdamWHistory) + sizeof(float *) <= OTHER_BYTES, "beside a table");

/* b^n, n >= 0. */
__device__ inline double power(double b, int64_t n) {
    double result = 1;
    for (; n > 0; n >>= 1, b *= b)
        if (n & 1) result *= b;
    return result;
}

/* One step of the elements [begin, end) of a tensor, W at a time; end - begin is a multiple of W. step_size and root2 stand in for those
 * of `number`. */
template <typename T, int W>
__device__ inline void adamw_range(const AdamWTensor &t, const AdamWNumbers<XtAcc<T>> &number, XtAcc<T> step_size, XtAcc<T> root2,
                                   int64_t begin, int64_t end) {
    typedef XtAcc<T> A;
    typedef XtVector<A, W> Vector;
    const A decay = (A)t.decay;
    for (int64_t i = begin + threadIdx.x * W; i < end; i += THREADS * W) {
        const XtPiece<T, W> of_g = xt_read<T, W>((const T *)t.g + i);
        const XtPiece<A, W> of_m = xt_read<A, W>((const A *)t.m + i), of_v = xt_read<A, W>((const A *)t.v + i);
        Vector m, v, w;
        if (t.master) w = xt_load(xt_read<A, W>((const A *)t.master + i));
        else w = xt_load(xt_read<T, W>((const T *)t.p + i));
        const Vector g = xt_load(of_g);
        m = xt_load(of_m);
        v = xt_load(of_v);
#pragma unroll
        for (int j = 0; j < W; j++) {
            m.at[j] = number.beta1 * m.at[j] + number.rest1 * g.at[j];
            v.at[j] = number.beta2 * v.at[j] + number.rest2 * g.at[j] * g.at[j];
            w.at[j] = w.at[j] * decay - step_size * m.at[j] / (sqrt(v.at[j]) / root2 + number.eps);
        }
        xt_write((A *)t.m + i, xt_piece(m));
        xt_write((A *)t.v + i, xt_piece(v));
        if (t.master) xt_write((A *)t.master + i, xt_piece(w));
        xt_write((T *)t.p + i, xt_store<T>(w));
    }
}

/* Grid: one block a piece. guard [1] or NULL is read here, as the norm is below: the host does not wait for it. The same goes for the
 * number of missed steps; as long as there are none, the numbers are the host's. Several tables write the same to history.after. */
__global__ void __launch_bounds__(THREADS, 3)
    adamw_kernel(const __grid_constant__ Table<AdamWTensor> table, const __grid_constant__ AdamWBoth both, const float *guard,
                 const AdamWHistory history) {
    const int64_t missed = history.missed ? *history.missed : 0;
    const bool stopped = guard && !isfinite(*guard);
    if (history.after && blockIdx.x == 0 && threadIdx.x == 0) *history.after = missed + stopped;
    if (stopped) return;
    const int item = item_of(table, blockIdx.x);
    const AdamWTensor &t = table.item[item];
    const int64_t begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE;
    const int64_t end = t.numel - begin < PIECE ? t.numel : begin + PIECE;
    by_dtype(t.dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int W = XT_WIDTH<XtAcc<T>>; /* 16 bytes of the moments, 8 or 16 of p and g: all of them without gaps */
        const int64_t middle = t.wide ? end - (end - begin) % W : begin;
        const AdamWNumbers<XtAcc<T>> &number = numbers_for(both, XtAcc<T>());
        XtAcc<T> step_size = number.step_size, root2 = number.root2;
        if (missed) {
            const int64_t step = history.step - missed;
            step_size = (XtAcc<T>)(history.lr / (1 - power(both.of_double.beta1, step)));
            root2 = (XtAcc<T>)sqrt(1 - power(both.of_double.beta2, step));
        }
        adamw_range<T, W>(t, number, step_size, root2, begin, middle);
        adamw_range<T, 1>(t, number, step_size, root2, middle, end);
    });
}

XtStatus xt_cuda_adamw(const XtAdamW *p) {
    const AdamWBoth both = {adamw_numbers<float>(p), adamw_numbers<double>(p)};
    const AdamWHistory history = {p->missed, p->missed_after, p->lr, p->step};
    int64_t numel = 0;
    by_tables<AdamWTensor>(
        p->count,
        [&](int64_t i) {
            const XtAdamWItem *from = &p->items[i];
            AdamWTensor t;
            t.p = from->p;
            t.m = from->m;
            t.v = from->v;
            t.master = from->master;
            t.g = from->g;
            t.numel = from->numel;
            t.decay = 1 - p->lr * from->weight_decay;
            t.dtype = (int)from->dtype;
            t.wide = (((uintptr_t)t.p | (uintptr_t)t.m | (uintptr_t)t.v | (uintptr_t)t.master | (uintptr_t)t.g) & 15) == 0;
            numel += from->numel;
            return t;
        },
        [&](const Table<AdamWTensor> &table, int pieces) {
            xt_launch(adamw_kernel, pieces, THREADS, 0, table, both, p->guard, history);
        });
    return xt_launched("adamw", p->count, numel);
}

/* ---- the norm, and clipping -------------------------------------------------------------------------------------------------- */

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
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += LOADS * 1024) {
        double q[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) q[u] = i + u * 1024 < n ? sums[i + u * 1024] : 0;
#pragma unroll
        for (int u = 0; u < LOADS; u++) sum += q[u];
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
    XtStatus status = scratch.allocate((size_t)pieces * sizeof(double));
    if (status != XT_OK) return status;
    double *sums = (double *)scratch.data; /* [pieces] */
    by_tables<Gradient>(
        p->count, [&](int64_t i) { return gradient_of(&p->items[i]); },
        [&](const Table<Gradient> &table, int of_table) {
            xt_launch(squares_kernel, of_table, THREADS, 0, sums, table);
            sums += of_table;
        });
    xt_launch(norm_kernel, 1, 1024, 0, p->norm, (const double *)scratch.data, pieces);
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

/* Grid: one block a piece. norm [1] */
__global__ void __launch_bounds__(THREADS)
    clip_kernel(const float *norm, double max_norm, const __grid_constant__ Table<Gradient> table) {
    const double coefficient = max_norm / ((double)norm[0] + 1e-6);
    if (coefficient >= 1) return; /* false for NaN, which goes on to the gradients */
    const int item = item_of(table, blockIdx.x);
    const Gradient &gradient = table.item[item];
    const int64_t begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE;
    const int n = gradient.numel - begin < PIECE ? (int)(gradient.numel - begin) : PIECE;
    by_dtype(gradient.dtype, [&](auto zero) {
        using T = decltype(zero);
        T *x = (T *)gradient.data + begin; /* [n] */
        const int middle = gradient.wide ? n - n % XT_WIDTH<T> : 0;
        scale_range<T, XT_WIDTH<T>>(x, (XtAcc<T>)coefficient, middle);
        scale_range<T, 1>(x + middle, (XtAcc<T>)coefficient, n - middle);
    });
}

XtStatus xt_cuda_clip(const XtClip *p) {
    int64_t numel = 0;
    by_tables<Gradient>(
        p->count,
        [&](int64_t i) {
            const Gradient gradient = gradient_of(&p->items[i]);
            numel += gradient.numel;
            return gradient;
        },
        [&](const Table<Gradient> &table, int pieces) { xt_launch(clip_kernel, pieces, THREADS, 0, p->norm, p->max_norm, table); });
    return xt_launched("clip", p->count, numel);
}
