/* compare.cu - counts the elements of `out` that differ too much from `ref`, and finds the worst one.
 *
 *     d = |out - ref|, limit = atol + rtol |ref|, correct if d <= limit                                  (all in float64)
 *
 * At most 1024 blocks stride over both views, with four elements of each in flight. The number of blocks depends on the number of
 * elements alone.
 *
 * A division in float64 costs as much as the rest together. So a thread divides d / limit only where d > 0 and the quotient can be
 * its new maximum, that is unless maximum * limit > d. The results are the same as with all divisions: rounding is monotone, so
 * where the rounded product exceeds d, the exact one does, and the rounded quotient is no larger than the maximum. A thread visits
 * its elements in order and keeps the first of equals; among equal maxima of threads the smallest index wins.
 *
 * A choice of dtype at run time costs less than conversions and comparisons: one kernel serves all integers, one the smaller
 * floats. Bytes moved: both views once, 80 to the host.
 */
#include "contract/reduce.h"
#include "reduce.cuh"

#include <float.h>
#include <math.h>

enum { THREADS = 256, JOIN_THREADS = 1024, MOST_BLOCKS = 1024, EACH = 8, AHEAD = 4 };

/* Added to the limit, so that d / limit is defined for limit 0 and then ranks by d. Far below any meaningful limit. */
#define NO_LIMIT 0x1p-500

/* Results of a thread, whose counts fit in 32 bits. A thread without elements has ratio -1. */
struct CompareLane {
    double max_abs, max_rel, max_ref, ratio;
    int64_t worst;
    unsigned wrong, out_nan, out_inf, ref_nan, ref_inf;
};

/* An element where both are finite; size = |ref|. */
__device__ inline void take(CompareLane *s, int64_t index, double d, double size, double rtol, double atol) {
    const double limit = fma(rtol, size, atol), floor = limit + NO_LIMIT;
    s->wrong += !(d <= limit && d <= DBL_MAX);
    if (!(d > 0)) return;
    s->max_abs = d > s->max_abs ? d : s->max_abs;
    if (size > 0 && !(s->max_rel * size > d)) {
        double relative = d / size;
        s->max_rel = relative > s->max_rel ? relative : s->max_rel;
    }
    if (!(s->ratio * floor > d)) {
        double ratio = d / floor;
        if (ratio > s->ratio) {
            s->ratio = ratio;
            s->worst = index;
        }
    }
}

/* A, B: float or double. */
template <typename A, typename B>
__device__ inline void judge_floats(CompareLane *s, int64_t index, A out, B ref, double rtol, double atol) {
    const bool out_finite = fabs(out) < (A)INFINITY, ref_finite = fabs(ref) < (B)INFINITY;
    const double a = (double)out, b = (double)ref, size = fabs(b);
    if (ref_finite) s->max_ref = size > s->max_ref ? size : s->max_ref;
    if (out_finite && ref_finite) {
        take(s, index, fabs(a - b), size, rtol, atol);
        return;
    }
    const bool wrong = !(a == b);
    s->wrong += wrong;
    s->out_nan += out != out;
    s->ref_nan += ref != ref;
    s->out_inf += out == out && !out_finite;
    s->ref_inf += ref == ref && !ref_finite;
    if (wrong && s->ratio < (double)INFINITY) {
        s->ratio = (double)INFINITY;
        s->worst = index;
    }
}

/* Integers are finite. Their distance is exact before it is rounded to a double. */
__device__ inline void judge_integers(CompareLane *s, int64_t index, int64_t out, int64_t ref, double rtol, double atol) {
    const uint64_t gap = out > ref ? (uint64_t)out - (uint64_t)ref : (uint64_t)ref - (uint64_t)out;
    const double size = fabs((double)ref);
    s->max_ref = size > s->max_ref ? size : s->max_ref;
    take(s, index, (double)gap, size, rtol, atol);
}

/* Every thread gets the result of the block. */
__device__ inline XtComparison join_block(XtComparison r) {
    const double ratio = xt_block_reduce(r.worst_ratio, -1.0, XtMax());
    /* The smallest index among the threads with the maximum, as the largest negated index. */
    const int64_t mine = r.worst_ratio == ratio && r.worst >= 0 ? -r.worst : INT64_MIN;
    const int64_t first = xt_block_reduce(mine, (int64_t)INT64_MIN, XtMax());
    r.worst = first == INT64_MIN ? -1 : -first;
    r.worst_ratio = ratio;
    r.max_abs = xt_block_reduce(r.max_abs, 0.0, XtMax());
    r.max_rel = xt_block_reduce(r.max_rel, 0.0, XtMax());
    r.max_ref = xt_block_reduce(r.max_ref, 0.0, XtMax());
    r.errors = xt_block_sum(r.errors);
    r.out_nan = xt_block_sum(r.out_nan);
    r.out_inf = xt_block_sum(r.out_inf);
    r.ref_nan = xt_block_sum(r.ref_nan);
    r.ref_inf = xt_block_sum(r.ref_inf);
    return r;
}

/* An element of a class of dtypes: double, int64_t (integers) or float (the rest). size: bytes of one; half: it is float16. */
struct CompareFormat {
    int size;
    bool half;
};
template <typename V> struct CompareRaw {
    uint32_t word[sizeof(V) / 4];
};
template <typename V> __device__ inline CompareRaw<V> fetch(const void *x, int64_t offset, CompareFormat format) {
    const char *at = (const char *)x + offset * format.size;
    CompareRaw<V> raw = {};
    if constexpr (sizeof(V) == 8)
        if (format.size == 8) {
            const uint2 q = *(const uint2 *)at;
            raw.word[0] = q.x, raw.word[1] = q.y;
            return raw;
        }
    if (format.size == 4) raw.word[0] = *(const uint32_t *)at;
    else if (format.size == 2) raw.word[0] = *(const uint16_t *)at;
    else if (format.size == 1) raw.word[0] = *(const uint8_t *)at;
    return raw;
}
__device__ inline float value_of(CompareRaw<float> raw, CompareFormat format) {
    if (format.size == 4) return __uint_as_float(raw.word[0]);
    return format.half ? __half2float(__ushort_as_half((unsigned short)raw.word[0])) : __uint_as_float(raw.word[0] << 16);
}
__device__ inline double value_of(CompareRaw<double> raw, CompareFormat) {
    return __longlong_as_double((long long)((uint64_t)raw.word[1] << 32 | raw.word[0]));
}
__device__ inline int64_t value_of(CompareRaw<int64_t> raw, CompareFormat format) {
    if (format.size == 4) return (int32_t)raw.word[0];
    return (int64_t)((uint64_t)raw.word[1] << 32 | raw.word[0]);
}

/* out, ref: any strides, of the walk's views 0 and 1; partials [blocks] */
template <typename A, typename B>
__global__ void __launch_bounds__(THREADS, sizeof(A) + sizeof(B) > 8 ? 3 : 4)
    compare_kernel(XtComparison *partials, const void *out, const void *ref, CompareFormat out_format, CompareFormat ref_format,
                   const __grid_constant__ XtWalk walk, double rtol, double atol) {
    const int64_t step = (int64_t)gridDim.x * THREADS, start = (int64_t)blockIdx.x * THREADS + threadIdx.x, n = walk.numel;
    const bool dense = walk.ndim == 0 || (walk.ndim == 1 && walk.strides[0][0] == 1 && walk.strides[1][0] == 1);
    CompareLane s = {};
    s.ratio = start < n ? 0 : -1; /* an exact match has ratio 0, so the first element is the worst at first */
    s.worst = start < n ? start : -1;
    for (int64_t i = start; i < n; i += AHEAD * step) {
        CompareRaw<A> a[AHEAD];
        CompareRaw<B> b[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t at = i + k * step;
            if (at >= n) break;
            longlong2 offset = {at, at};
            if (!dense) offset = xt_walk_offsets(&walk, at);
            a[k] = fetch<A>(out, offset.x, out_format);
            b[k] = fetch<B>(ref, offset.y, ref_format);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int64_t at = i + k * step;
            if (at >= n) break;
            const A x = value_of(a[k], out_format);
            const B y = value_of(b[k], ref_format);
            if constexpr (XT_IS_INTEGER<A>) judge_integers(&s, at, x, y, rtol, atol);
            else judge_floats(&s, at, x, y, rtol, atol);
        }
    }
    XtComparison r;
    r.errors = s.wrong;
    r.out_nan = s.out_nan;
    r.out_inf = s.out_inf;
    r.ref_nan = s.ref_nan;
    r.ref_inf = s.ref_inf;
    r.worst = s.worst;
    r.max_abs = s.max_abs;
    r.max_rel = s.max_rel;
    r.max_ref = s.max_ref;
    r.worst_ratio = s.ratio;
    r = join_block(r);
    if (threadIdx.x == 0) partials[blockIdx.x] = r;
}

__device__ inline XtComparison nothing(void) {
    XtComparison r = {};
    r.worst = -1;
    r.worst_ratio = -1;
    return r;
}

__global__ void __launch_bounds__(JOIN_THREADS) compare_join_kernel(XtComparison *partials, int count) { // [count <= JOIN_THREADS]
    XtComparison r = nothing();
    if ((int)threadIdx.x < count) r = partials[threadIdx.x];
    r = join_block(r); /* returns after every thread has read */
    if (threadIdx.x == 0) partials[0] = r;
}

XtStatus xt_cuda_compare(const XtCompare *p) {
    XtComparison result = {};
    result.worst = -1;
    result.worst_ratio = -1;
    *p->result = result;
    /* Unsorted: an index of the walk is a row-major index. */
    XtWalk walk;
    xt_walk_init(&walk, &p->out, &p->ref, 0, p->out.ndim, false);
    if (walk.numel == 0) return XT_OK;
    unsigned blocks = xt_blocks(walk.numel, THREADS * EACH);
    blocks = blocks < (unsigned)MOST_BLOCKS ? blocks : (unsigned)MOST_BLOCKS;
    XtScratch scratch;
    XT_CHECK(scratch.allocate(blocks * sizeof(XtComparison)));
    XtComparison *partials = (XtComparison *)scratch.data;
    const CompareFormat out = {(int)xt_dtype_size(p->out.dtype), p->out.dtype == XT_FLOAT16};
    const CompareFormat ref = {(int)xt_dtype_size(p->ref.dtype), p->ref.dtype == XT_FLOAT16};
    auto launch = [&](auto a, auto b) {
        xt_launch(compare_kernel<decltype(a), decltype(b)>, blocks, THREADS, 0, partials, p->out.data, p->ref.data, out, ref, walk,
                  p->rtol, p->atol);
    };
    const bool out_double = p->out.dtype == XT_FLOAT64, ref_double = p->ref.dtype == XT_FLOAT64;
    if (!xt_dtype_is_float(p->out.dtype)) launch(int64_t(), int64_t());
    else if (out_double && ref_double) launch(double(), double());
    else if (out_double) launch(double(), float());
    else if (ref_double) launch(float(), double());
    else launch(float(), float());
    if (blocks > 1) xt_launch(compare_join_kernel, 1, JOIN_THREADS, 0, partials, (int)blocks);
    XtStatus status = xt_launched("compare", walk.numel);
    return status == XT_OK ? xt_read_back(p->result, partials, sizeof *p->result) : status;
}
