/* reduce_job.cuh - what the kernels of reduce.cu share: the types, the work of a lane, the joins of partial results. Its comment has the
 * order of additions. */
#pragma once

#include "reduce.cuh"

#include <math.h>

/* ---- types ------------------------------------------------------------------------------------------------------------------- */

/* Total: sum of a lane, unsigned for integers because overflow wraps. Held: partial results. */
template <typename C> struct ReduceTypes {
    typedef double Total, Held;
};
template <> struct ReduceTypes<int64_t> {
    typedef uint64_t Total;
    typedef int64_t Held;
};
template <typename C> using ReduceHeld = typename ReduceTypes<C>::Held;

/* Kinds of kernels: SUM also makes MEAN; EXTREME makes MAX, MIN and ARGMAX. */
enum { SUM, EXTREME };

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    CHUNK = 64,         /* up to so many segments are one chunk */
    MOST_CHUNKS = 8192, /* about, of a result */
    FEW_SEGMENTS = 16,  /* up to so many, a block makes the whole chunk, even with few blocks: cheaper than a second launch */
    MANY_ROWS = 64,     /* enough rows for a block each */
    WARP_JOIN = 256,    /* chunks up to which a warp joins them; then 1024 threads */
    NONE = 0x7fffffff,  /* position of no element */
};

/* Blocks that a multiprocessor holds, by what their registers allow. LINE: 16-byte loads, evenly spaced. */
template <typename C, bool LINE> constexpr int ROW_BLOCKS = LINE ? (XT_IS_INTEGER<C> ? 4 : 5) : 3;
template <int OP, bool LINE> constexpr int COLUMN_BLOCKS = 2;
constexpr bool COLUMNS_EARLY = true; /* sums of 16-byte loads: the next loads start before these are added */

template <typename H> struct ReducePartial {
    H value;
    int64_t index; /* EXTREME only */
};

struct ReduceJob {
    XtWalk kept;    /* 0: x, 1: out */
    XtWalk reduced; /* 0: x */
    const void *x;
    void *out, *partials; /* of segments, [kept][segments], or of chunks, [kept][chunks]; NULL: the kernel writes results */
    int format;           /* of x */
    bool vector;          /* a group (rows), XT_GROUP columns (columns) are one access */
    bool chunked;         /* rows: a block per chunk */
    bool argmax;
    XtDtype out_dtype;
    int sign;
    double divisor;        /* MEAN */
    int segments, segment; /* of a kept element; elements of one */
    int chunks, chunk;     /* of a kept element; segments of one */
    int lanes;             /* 8 or 32 */
    int64_t row, tiles;    /* columns: innermost kept size; tiles along it */
    int64_t outer, stride; /* kept.numel / row; of the innermost reduced dim */
};

__device__ inline void lowest(float *v) { *v = -INFINITY; }
__device__ inline void lowest(double *v) { *v = -INFINITY; }
__device__ inline void lowest(int64_t *v) { *v = INT64_MIN; }

/* Reverses the order if sign is -1. */
__device__ inline float turned(float v, int sign) { return v * (float)sign; }
__device__ inline double turned(double v, int sign) { return v * (double)sign; }
__device__ inline int64_t turned(int64_t v, int sign) { return v ^ (int64_t)(sign >> 1); }

/* Element c of each of raw[GROUP]: a column of GROUP loaded rows. One branch for all. */
template <typename C>
__device__ inline void unpack_column(XtClassValue<C> *v, const XtPiece<C, XT_GROUP<C>> *raw, int c, int format) {
    if (format == 0) {
#pragma unroll
        for (int e = 0; e < XT_GROUP<C>; e++) v[e] = xt_unpack(raw[e], c, 0);
    } else {
#pragma unroll
        for (int e = 0; e < XT_GROUP<C>; e++) v[e] = xt_unpack(raw[e], c, XT_IS_INTEGER<C> ? format : 1);
    }
}
template <typename C> __device__ inline void unpack_group(XtClassValue<C> *v, const XtPiece<C, XT_GROUP<C>> &raw, int format) {
    if (format == 0) {
#pragma unroll
        for (int e = 0; e < XT_GROUP<C>; e++) v[e] = xt_unpack(raw, e, 0);
    } else {
#pragma unroll
        for (int e = 0; e < XT_GROUP<C>; e++) v[e] = xt_unpack(raw, e, XT_IS_INTEGER<C> ? format : 1);
    }
}

/* ---- a lane: sequential work of one thread ----------------------------------------------------------------------------------- */

template <typename C> struct ReduceLane {
    typename ReduceTypes<C>::Total total; /* SUM */
    XtClassValue<C> best;                 /* EXTREME */
    int at;                               /* of best, from the start of the segment */
};

/* `first`: position of the lane's first element, or NONE. It is the maximum while nothing exceeds -inf. */
template <typename C> __device__ inline void lane_begin(ReduceLane<C> *lane, int first) {
    lane->total = 0;
    lowest(&lane->best);
    lane->at = first;
}

/* The value of an element past the end. */
template <int OP, typename V> __device__ inline V missing() {
    V v = 0;
    if (OP != SUM) lowest(&v);
    return v;
}

/* Adds the group that starts at position `at` and has `count` elements. */
template <typename C, int OP>
__device__ inline void lane_take(ReduceLane<C> *lane, XtClassValue<C> (&v)[XT_GROUP<C>], int at, int count, int sign) {
    constexpr int GROUP = XT_GROUP<C>;
    typedef XtClassValue<C> V;
    if (count < GROUP) {
#pragma unroll
        for (int e = 0; e < GROUP; e++) v[e] = e < count ? v[e] : turned(missing<OP, V>(), sign);
    }
    if constexpr (OP == SUM) {
        typedef typename ReduceTypes<C>::Total Total;
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2)
#pragma unroll
            for (int e = 0; e < step; e++) {
                if constexpr (XT_IS_INTEGER<C>) v[e] = (V)((Total)v[e] + (Total)v[e + step]);
                else v[e] += v[e + step];
            }
        lane->total += (Total)v[0];
    } else {
        int found = -1;
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            const V here = turned(v[e], sign);
            bool better = !(here <= lane->best) && lane->best == lane->best; /* larger, or the first NaN */
            lane->best = better ? here : lane->best;
            found = better ? e : found;
        }
        lane->at = found < 0 ? lane->at : at + found;
    }
}

template <typename C, int OP> __device__ inline ReduceHeld<C> lane_value(const ReduceLane<C> *lane) {
    return OP == SUM ? (ReduceHeld<C>)lane->total : (ReduceHeld<C>)lane->best;
}

/* ---- partial results --------------------------------------------------------------------------------------------------------- */

template <int OP, typename H> __device__ inline ReducePartial<H> partial_none() { return {missing<OP, H>(), INT64_MAX}; }

/* Among equals, and among NaN, the smaller index wins. Symmetric in a and b. */
template <int OP, typename H> __device__ inline ReducePartial<H> join(ReducePartial<H> a, ReducePartial<H> b) {
    if constexpr (OP == SUM) {
        if constexpr ((H)0.5 == (H)0) a.value = (H)((uint64_t)a.value + (uint64_t)b.value);
        else a.value += b.value;
        return a;
    } else {
        bool a_nan = a.value != a.value, b_nan = b.value != b.value;
        bool equal = a.value == b.value || (a_nan && b_nan);
        bool b_wins = equal ? b.index < a.index : a_nan ? false : b_nan || b.value > a.value;
        return b_wins ? b : a;
    }
}

/* A tree over `lanes` neighbouring threads, each of which gets the result. Whole warps must call it. */
template <int OP, typename H> __device__ inline ReducePartial<H> join_lanes(ReducePartial<H> a, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) {
        ReducePartial<H> b = a;
        b.value = __shfl_xor_sync(0xffffffffu, a.value, step);
        if (OP == EXTREME) b.index = __shfl_xor_sync(0xffffffffu, a.index, step);
        a = join<OP>(a, b);
    }
    return a;
}

/* Joins the upper half to the lower until r[0] is the result. */
template <int OP, int COUNT, typename H> __device__ inline void join_tree(ReducePartial<H> *r) {
    if constexpr (COUNT > 1) {
#pragma unroll
        for (int l = 0; l < COUNT / 2; l++) r[l] = join<OP>(r[l], r[l + COUNT / 2]);
        join_tree<OP, COUNT / 2>(r);
    }
}

/* Stores r as partial result `index`, or as the result of kept element `kept`. */
template <int OP, typename H>
__device__ inline void keep(const ReduceJob &p, void *partials, int64_t index, int64_t kept, ReducePartial<H> r) {
    if (partials) {
        ((ReducePartial<H> *)partials)[index] = r;
        return;
    }
    const int64_t at = xt_walk_offset<1>(p.kept, kept);
    if (OP == EXTREME && p.argmax) {
        ((int64_t *)p.out)[at] = r.index;
        return;
    }
    H v = OP == EXTREME ? turned(r.value, p.sign) : r.value;
    if constexpr ((H)0.5 == (H)0) {
        switch (p.out_dtype) {
        case XT_INT64: ((int64_t *)p.out)[at] = v; break;
        case XT_INT32: ((int32_t *)p.out)[at] = (int32_t)v; break;
        default: ((uint8_t *)p.out)[at] = (uint8_t)v; break;
        }
    } else {
        if (OP == SUM && p.divisor != 1) v /= p.divisor; /* nothing / 0 is NaN */
        switch (p.out_dtype) {
        case XT_FLOAT32: ((float *)p.out)[at] = (float)v; break;
        case XT_FLOAT64: ((double *)p.out)[at] = v; break;
        case XT_BFLOAT16: ((XtBf16 *)p.out)[at] = xt_store<XtBf16>((float)v); break;
        default: ((XtF16 *)p.out)[at] = xt_store<XtF16>((float)v); break;
        }
    }
}

__device__ inline int segment_length(const ReduceJob &p, int segment) {
    int64_t left = p.reduced.numel - (int64_t)segment * p.segment;
    return (int)(left < p.segment ? left : p.segment);
}

/* a / b, a % b; both >= 0. Divisions of 64 bits cost several times those of 32. */
__device__ inline int64_t divide(int64_t a, int64_t b, int64_t *rest) {
    int64_t quotient;
    if (((uint64_t)a | (uint64_t)b) >> 32 == 0) quotient = (unsigned)a / (unsigned)b;
    else quotient = a / b;
    *rest = a - quotient * b;
    return quotient;
}

/* Offset in x of reduced element `index`. */
__device__ inline int64_t reduced_offset(const ReduceJob &p, int64_t index) { return xt_walk_offset<0>(p.reduced, index); }

/* Adds up to GROUP elements from number `index` on of the row (or column) at x, with a load for each. */
template <typename C, int OP>
__device__ inline void take_singly(ReduceLane<C> *s, const ReduceJob &p, const char *x, int64_t index, int at, int count) {
    constexpr int GROUP = XT_GROUP<C>;
    XtPiece<C, 1> raw[GROUP];
    XtClassValue<C> v[GROUP];
    if (p.reduced.ndim == 1) {
        x = xt_element<C>(x, index * p.stride, p.format);
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            if (e < count) raw[e] = xt_fetch<C, 1>(xt_element<C>(x, e * p.stride, p.format), p.format);
    } else {
        int64_t offset[GROUP];
#pragma unroll 1 /* offsets are in local memory: with other loads in flight, the call would save registers there */
        for (int e = 0; e < GROUP; e++) offset[e] = e < count ? reduced_offset(p, index + e) : 0;
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            if (e < count) raw[e] = xt_fetch<C, 1>(xt_element<C>(x, offset[e], p.format), p.format);
    }
#pragma unroll
    for (int e = 0; e < GROUP; e++) v[e] = xt_unpack(raw[e], 0, p.format);
    lane_take<C, OP>(s, v, at, count, p.sign);
}
