/* stats.cu - minimum, maximum and sum over the finite elements of a view of any strides, and the numbers of NaN and of infinities.
 *
 * At most 1024 blocks stride over x; their number depends on the number of elements alone. Where x is dense (in any order of its
 * dims) and aligned, a thread has four 16-byte loads in flight, else eight elements. Each thread adds in float64, a block writes
 * five float64, and one more block joins them with the same tree. Bytes moved: x once, 40 to the host.
 */
#include "contract/reduce.h"
#include "reduce.cuh"

#include <math.h>

enum { THREADS = 256, JOIN_THREADS = 1024, MOST_BLOCKS = 1024, EACH = 16 };

/* The slot's out[5]. Counts are exact up to 2^53. Without a finite element min is Inf and max -Inf. */
struct StatsPartial {
    double min, max, sum, nan, inf;
};

/* Every thread gets the result of the block. */
__device__ inline StatsPartial join_block(StatsPartial s) {
    s.min = -xt_block_reduce(-s.min, -(double)INFINITY, XtMax());
    s.max = xt_block_reduce(s.max, -(double)INFINITY, XtMax());
    s.sum = xt_block_sum(s.sum);
    s.nan = xt_block_sum(s.nan);
    s.inf = xt_block_sum(s.inf);
    return s;
}

/* V: float or double, in which elements are compared. */
template <typename V> struct StatsLane {
    V min, max;
    double sum;
    int64_t nan, inf;
};

template <typename V> __device__ inline void take(StatsLane<V> *s, V v) {
    if (fabs(v) < (V)INFINITY) { /* finite */
        s->min = v < s->min ? v : s->min;
        s->max = v > s->max ? v : s->max;
        s->sum += (double)v;
    } else if (v != v) {
        s->nan++;
    } else {
        s->inf++;
    }
}

__device__ inline float stats_value(float v) { return v; }
__device__ inline double stats_value(double v) { return v; }
__device__ inline double stats_value(int64_t v) { return (double)v; }

/* C, format: reduce.cuh. */
template <typename C, bool VECTOR>
__global__ void __launch_bounds__(THREADS)
    stats_kernel(StatsPartial *out, const void *x, int format, const __grid_constant__ XtWalk walk) { // out [blocks]
    typedef decltype(stats_value(XtClassValue<C>())) V;
    constexpr int N = VECTOR ? XT_GROUP<C> : 1, AHEAD = VECTOR ? 4 : 8;
    const int64_t step = (int64_t)gridDim.x * THREADS, start = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t n = walk.numel, vectors = n / N;
    StatsLane<V> s = {(V)INFINITY, -(V)INFINITY, 0, 0, 0};
    for (int64_t i = start; i < vectors; i += AHEAD * step) {
        XtPiece<C, N> raw[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int64_t at = i + a * step;
            if (at < vectors)
                raw[a] = xt_fetch<C, N>(xt_element<C>(x, VECTOR ? at * N : xt_walk_offset<0>(walk, at), format), format);
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (i + a * step >= vectors) break;
#pragma unroll
            for (int e = 0; e < N; e++) take<V>(&s, stats_value(xt_unpack(raw[a], e, format)));
        }
    }
    if (VECTOR && start < n - vectors * N) {
        const XtPiece<C, 1> raw = xt_fetch<C, 1>(xt_element<C>(x, vectors * N + start, format), format);
        take<V>(&s, stats_value(xt_unpack(raw, 0, format)));
    }
    StatsPartial block = join_block({(double)s.min, (double)s.max, s.sum, (double)s.nan, (double)s.inf});
    if (threadIdx.x == 0) out[blockIdx.x] = block;
}

__global__ void __launch_bounds__(JOIN_THREADS)
    stats_join_kernel(StatsPartial *partials, int count) { // [count], count <= JOIN_THREADS
    StatsPartial s = {INFINITY, -INFINITY, 0, 0, 0};
    if ((int)threadIdx.x < count) s = partials[threadIdx.x];
    s = join_block(s); /* returns after every thread has read */
    if (threadIdx.x == 0) partials[0] = s;
}

XtStatus xt_cuda_stats(const XtStats *p) {
    XtWalk walk;
    StatsPartial result = {INFINITY, -INFINITY, 0, 0, 0};
    xt_walk_init(&walk, &p->x, NULL, 0, p->x.ndim, true);
    XtStatus status = XT_OK;
    if (walk.numel > 0) {
        unsigned blocks = xt_blocks(walk.numel, THREADS * EACH);
        blocks = blocks < (unsigned)MOST_BLOCKS ? blocks : (unsigned)MOST_BLOCKS;
        XtScratch scratch;
        XT_CHECK(scratch.allocate(blocks * sizeof(StatsPartial)));
        StatsPartial *partials = (StatsPartial *)scratch.data;
        status = xt_by_class(p->x.dtype, [&](auto zero, int format) {
            using C = decltype(zero);
            const void *x = p->x.data;
            bool dense = walk.ndim == 0 || (walk.ndim == 1 && walk.strides[0][0] == 1);
            if (dense && (uintptr_t)x % 16 == 0) xt_launch(stats_kernel<C, true>, blocks, THREADS, 0, partials, x, format, walk);
            else xt_launch(stats_kernel<C, false>, blocks, THREADS, 0, partials, x, format, walk);
            if (blocks > 1) xt_launch(stats_join_kernel, 1, JOIN_THREADS, 0, partials, (int)blocks);
            return xt_launched("stats", walk.numel);
        });
        if (status == XT_OK) status = xt_read_back(&result, partials, sizeof result);
        if (status != XT_OK) return status;
    }
    p->out[0] = result.min;
    p->out[1] = result.max;
    p->out[2] = result.sum;
    p->out[3] = result.nan;
    p->out[4] = result.inf;
    return XT_OK;
}
