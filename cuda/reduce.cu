/* reduce.cu - sum, mean, max, min, argmax over the last dimensions of a view of any strides.
 *
 *     out[k] = reduce over i of x[k, i],  k < kept, i < n (both row-major numbers over the dims of a view)
 *
 * Order of additions, a function of n alone, whichever kernel runs and however the memory lies:
 *
 *     group     GROUP = 16 bytes of neighbouring elements, added in a tree in float32 (integers exactly)
 *     lane      lane l of 32 adds groups l, l + 32, l + 64, ... of a segment in float64
 *     segment   1024, 2048 or 8192 elements: 32 lanes in a tree
 *     result    segments s, s + L, s + 2 L, ... for each s < L, then a tree over s; L = 32, or 1024 when there are many segments
 *
 * so 1e8 float32 of one sign are summed to the last digit. Lanes without a group hold 0 and change nothing: where n is small, 8
 * lanes do the work of 32. Two kernels read x:
 *
 *   - rows:     a warp (8 lanes: a quarter of one) per segment. Groups are 16-byte loads where the memory allows, 8 in flight.
 *   - columns:  reduced dims strided, kept dim dense. Threads side by side hold 16 bytes of columns, 32 (or 8) lanes below each
 *               other hold rows; a group is GROUP rows. The lanes meet in shared memory.
 *
 * Several segments leave partial results (16 bytes per 1024 elements at least) for a second launch; rows of up to 64 segments are
 * finished by their block at once. MIN is MAX of the elements with their order turned round (-x, ~x).
 * Bytes moved: x once, out once. No atomics.
 */
#include "reduce.cuh"

#include <math.h>

/* ---- types ------------------------------------------------------------------------------------------------------------------- */

/* Value: what elements are compared in. Group, Total: sums of a group, of a lane; unsigned, as overflow wraps. Held: partials. */
template <typename T> struct ReduceTypes { /* float32, bfloat16, float16 */
    typedef float Value, Group;
    typedef double Total, Held;
};
template <> struct ReduceTypes<double> {
    typedef double Value, Group, Total, Held;
};
template <> struct ReduceTypes<int32_t> {
    typedef int32_t Value;
    typedef uint64_t Group, Total;
    typedef int64_t Held;
};
template <> struct ReduceTypes<int64_t> {
    typedef int64_t Value, Held;
    typedef uint64_t Group, Total;
};
template <> struct ReduceTypes<uint8_t> {
    typedef int32_t Value, Group;
    typedef uint64_t Total;
    typedef int64_t Held;
};
template <typename T> using ReduceValue = typename ReduceTypes<T>::Value;
template <typename T> using ReduceHeld = typename ReduceTypes<T>::Held;

/* What a kernel does; MEAN is SUM with a divisor, MIN is MAX with sign -1. */
enum { SUM, MAX, ARGMAX };

enum {
    THREADS = 256,
    WHOLE = 64,        /* segments of a row that one block can finish */
    WHOLE_ROWS = 64,   /* rows from which it does */
    WARP_JOIN = 256,   /* segments up to which a warp joins them; then 1024 threads */
    NONE = 0x7fffffff, /* position of no element */
};

template <typename H> struct ReducePartial {
    H value;
    int64_t index; /* ARGMAX only */
};

struct ReduceJob {
    XtWalk kept;    /* 0: x, 1: out */
    XtWalk reduced; /* 0: x */
    const void *x;
    void *out, *partials; /* [kept][segments] */
    XtDtype out_dtype;
    int sign;
    double divisor;            /* MEAN */
    int64_t segments, segment; /* of a kept element; elements of one */
    int64_t row, tiles;        /* columns: innermost kept size; tiles along it */
    int64_t outer;             /* kept.numel / row */
};

__device__ inline void lowest(float *v) { *v = -INFINITY; }
__device__ inline void lowest(double *v) { *v = -INFINITY; }
__device__ inline void lowest(int32_t *v) { *v = INT32_MIN; }
__device__ inline void lowest(int64_t *v) { *v = INT64_MIN; }

/* The order turned round when sign is -1. */
__device__ inline float turned(float v, int sign) { return v * (float)sign; }
__device__ inline double turned(double v, int sign) { return v * (double)sign; }
__device__ inline int32_t turned(int32_t v, int sign) { return v ^ (sign >> 1); }
__device__ inline int64_t turned(int64_t v, int sign) { return v ^ (int64_t)(sign >> 1); }

/* ---- a lane: sequential work of one thread ----------------------------------------------------------------------------------- */

template <typename T> struct ReduceLane {
    typename ReduceTypes<T>::Total total;
    ReduceValue<T> best;
    int at; /* of best, from the start of the segment */
};

/* `first`: position of the lane's first element, NONE if it has none. There the maximum is while nothing exceeds -inf. */
template <typename T> __device__ inline void lane_begin(ReduceLane<T> *lane, int first) {
    lane->total = 0;
    lowest(&lane->best);
    lane->at = first;
}

/* What stands for an element past the end. */
template <int OP, typename V> __device__ inline V missing() {
    V v = 0;
    if (OP != SUM) lowest(&v);
    return v;
}

/* Takes the group that starts at position `at`. */
template <typename T, int OP, int GROUP>
__device__ inline void lane_take(ReduceLane<T> *lane, const ReduceValue<T> (&v)[GROUP], int at, int sign) {
    if constexpr (OP == SUM) {
        typename ReduceTypes<T>::Group t[GROUP];
#pragma unroll
        for (int e = 0; e < GROUP; e++) t[e] = (typename ReduceTypes<T>::Group)v[e];
#pragma unroll
        for (int step = GROUP / 2; step > 0; step /= 2)
#pragma unroll
            for (int e = 0; e < step; e++) t[e] += t[e + step];
        lane->total += (typename ReduceTypes<T>::Total)t[0];
    } else if constexpr (OP == MAX) {
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            ReduceValue<T> here = turned(v[e], sign);
            lane->best = here > lane->best || here != here ? here : lane->best; /* a NaN stays: nothing exceeds it */
        }
    } else {
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            bool better = !(v[e] <= lane->best) && lane->best == lane->best; /* larger, or the first NaN */
            lane->best = better ? v[e] : lane->best;
            lane->at = better ? at + e : lane->at;
        }
    }
}

template <typename T, int OP> __device__ inline ReduceHeld<T> lane_value(const ReduceLane<T> *lane) {
    return OP == SUM ? (ReduceHeld<T>)lane->total : (ReduceHeld<T>)lane->best;
}

/* ---- partial results --------------------------------------------------------------------------------------------------------- */

template <int OP, typename H> __device__ inline ReducePartial<H> partial_none() { return {missing<OP, H>(), INT64_MAX}; }

/* Of equals, and of NaN, the smaller index. Gives the same with a and b exchanged. */
template <int OP, typename H> __device__ inline ReducePartial<H> join(ReducePartial<H> a, ReducePartial<H> b) {
    if constexpr (OP == SUM) {
        if constexpr (sizeof(H) == sizeof(int64_t) && (H)0.5 == (H)0) a.value = (H)((uint64_t)a.value + (uint64_t)b.value);
        else a.value += b.value;
        return a;
    } else if constexpr (OP == MAX) {
        a.value = b.value > a.value || b.value != b.value ? b.value : a.value;
        return a;
    } else {
        bool a_nan = a.value != a.value, b_nan = b.value != b.value;
        bool equal = a.value == b.value || (a_nan && b_nan);
        bool b_wins = equal ? b.index < a.index : a_nan ? false : b_nan || b.value > a.value;
        return b_wins ? b : a;
    }
}

/* Tree over LANES neighbouring threads; all of a warp take part. */
template <int OP, int LANES, typename H> __device__ inline ReducePartial<H> join_lanes(ReducePartial<H> a) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        ReducePartial<H> b = a;
        b.value = __shfl_xor_sync(0xffffffffu, a.value, step);
        if (OP == ARGMAX) b.index = __shfl_xor_sync(0xffffffffu, a.index, step);
        a = join<OP>(a, b);
    }
    return a;
}

/* Writes the result of kept element `kept`. */
template <int OP, typename H> __device__ inline void finish(const ReduceJob &p, int64_t kept, ReducePartial<H> r) {
    int64_t at = xt_walk_offset<1>(p.kept, kept);
    if constexpr (OP == ARGMAX) {
        ((int64_t *)p.out)[at] = r.index;
        return;
    }
    H v = OP == MAX ? turned(r.value, p.sign) : r.value;
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

template <int OP, typename H> __device__ inline void keep(const ReduceJob &p, int64_t kept, int64_t segment, ReducePartial<H> r) {
    if (p.segments > 1) ((ReducePartial<H> *)p.partials)[kept * p.segments + segment] = r;
    else finish<OP>(p, kept, r);
}

__device__ inline int segment_length(const ReduceJob &p, int64_t segment) {
    int64_t left = p.reduced.numel - segment * p.segment;
    return (int)(left < p.segment ? left : p.segment);
}

/* ---- rows -------------------------------------------------------------------------------------------------------------------- */

/* Lane `lane` of LANES takes its groups of the elements first .. first + length of the row at x, AHEAD at a time. VECTOR: a group
 * is one load, and length is a multiple of it. DENSE: the row is. */
template <typename T, int OP, bool VECTOR, bool DENSE, int LANES, int AHEAD>
__device__ inline void take_groups(ReduceLane<T> *s, const ReduceJob &p, const T *x, int64_t first, int length, int lane) {
    constexpr int GROUP = XT_WIDTH<T>, STEP = LANES * GROUP, N = VECTOR ? GROUP : 1, LOADS = GROUP / N;
    for (int i = lane * GROUP; i < length; i += AHEAD * STEP) {
        const T *here = x + first + i; /* DENSE */
        XtPacked<T, N> raw[AHEAD][LOADS];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
#pragma unroll
            for (int l = 0; l < LOADS; l++) {
                const int at = i + a * STEP + l;
                if (at < length)
                    raw[a][l] = xt_fetch<T, N>(DENSE ? here + (a * STEP + l) : x + xt_walk_offset<0>(p.reduced, first + at));
            }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int at = i + a * STEP;
            if (at >= length) break;
            ReduceValue<T> v[GROUP];
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
                v[e] = xt_unpack(raw[a][e / N], e % N);
                if (!VECTOR && at + e >= length) v[e] = turned(missing<OP, ReduceValue<T>>(), p.sign); /* lane_take turns it back */
            }
            lane_take<T, OP, GROUP>(s, v, at, p.sign);
        }
    }
}

/* Elements first .. first + length of the row at x, by LANES neighbouring threads, all of which get the result. */
template <typename T, int OP, bool VECTOR, int LANES>
__device__ inline ReducePartial<ReduceHeld<T>> reduce_segment(const ReduceJob &p, const T *x, int64_t first, int length, int lane) {
    constexpr int GROUP = XT_WIDTH<T>, MANY = VECTOR ? (GROUP > 8 ? 4 : 8) : GROUP >= 8 ? 1 : 8 / GROUP;
    ReduceLane<T> s;
    lane_begin(&s, lane * GROUP < length ? lane * GROUP : NONE);
    if (p.reduced.ndim == 1 && p.reduced.strides[0][0] == 1) {
        /* With 8 lanes a lane has one group. */
        take_groups<T, OP, VECTOR, true, LANES, LANES == 8 ? 1 : MANY>(&s, p, x, first, length, lane);
    } else {
        take_groups<T, OP, VECTOR, false, LANES, 1>(&s, p, x, first, length, lane);
    }
    ReducePartial<ReduceHeld<T>> r = {lane_value<T, OP>(&s), s.at == NONE ? INT64_MAX : first + s.at};
    return join_lanes<OP, LANES>(r);
}

template <typename T, int OP, bool VECTOR, int LANES>
__global__ void __launch_bounds__(THREADS, 2) reduce_rows_kernel(const __grid_constant__ ReduceJob p) {
    typedef ReducePartial<ReduceHeld<T>> Partial;
    const int lane = threadIdx.x % LANES, warp = threadIdx.x / 32;
    const int64_t tasks = p.kept.numel * p.segments, step = (int64_t)gridDim.x * (THREADS / LANES);
    /* A warp stays together: `start` is the task of its first lanes. */
    for (int64_t start = (int64_t)blockIdx.x * (THREADS / LANES) + warp * (32 / LANES); start < tasks; start += step) {
        const int64_t task = start + threadIdx.x % 32 / LANES;
        const bool here = task < tasks;
        int64_t kept = here ? task : 0, segment = 0;
        if (p.segments > 1) {
            segment = kept % p.segments;
            kept /= p.segments;
        }
        const T *row = (const T *)p.x + xt_walk_offset<0>(p.kept, kept);
        const int length = here ? segment_length(p, segment) : 0;
        Partial r = reduce_segment<T, OP, VECTOR, LANES>(p, row, segment * p.segment, length, lane);
        if (here && lane == 0) keep<OP>(p, kept, segment, r);
    }
}

/* A block for all segments of a row, at most WHOLE. */
template <typename T, int OP, bool VECTOR>
__global__ void __launch_bounds__(THREADS, 2) reduce_whole_rows_kernel(const __grid_constant__ ReduceJob p) {
    typedef ReducePartial<ReduceHeld<T>> Partial;
    __shared__ ReduceHeld<T> value[WHOLE];
    __shared__ int64_t index[WHOLE];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int64_t kept = blockIdx.x; kept < p.kept.numel; kept += gridDim.x) {
        const T *row = (const T *)p.x + xt_walk_offset<0>(p.kept, kept);
        for (int s = warp; s < p.segments; s += warps) {
            Partial r = reduce_segment<T, OP, VECTOR, 32>(p, row, s * p.segment, segment_length(p, s), lane);
            if (lane == 0) value[s] = r.value, index[s] = r.index;
        }
        __syncthreads(); /* all segments are there */
        if (warp == 0) {
            Partial r = partial_none<OP, ReduceHeld<T>>();
            for (int s = lane; s < p.segments; s += 32) r = join<OP>(r, Partial{value[s], index[s]});
            r = join_lanes<OP, 32>(r);
            if (lane == 0) finish<OP>(p, kept, r);
        }
        __syncthreads(); /* and may be overwritten */
    }
}

/* ---- columns ----------------------------------------------------------------------------------------------------------------- */

/* Halves meet until one is left, in r[0]. */
template <int OP, int COUNT, typename H> __device__ inline void join_tree(ReducePartial<H> *r) {
    if constexpr (COUNT > 1) {
#pragma unroll
        for (int l = 0; l < COUNT / 2; l++) r[l] = join<OP>(r[l], r[l + COUNT / 2]);
        join_tree<OP, COUNT / 2>(r);
    }
}

/* Lane `lane` of LANES takes its groups of rows first .. first + length of the N columns at x, AHEAD at a time. */
template <typename T, int OP, int N, bool LINE, int LANES, int AHEAD>
__device__ inline void take_column_groups(ReduceLane<T> *s, const ReduceJob &p, const T *x, int64_t first, int length, int lane) {
    constexpr int GROUP = XT_WIDTH<T>;
    const int64_t stride = p.reduced.strides[0][0];
    for (int i = lane * GROUP; i < length; i += AHEAD * LANES * GROUP) {
        XtPacked<T, N> raw[AHEAD][GROUP];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
                const int at = i + a * LANES * GROUP + e;
                if (at < length)
                    raw[a][e] = xt_fetch<T, N>(x + (LINE ? (first + at) * stride : xt_walk_offset<0>(p.reduced, first + at)));
            }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int at = i + a * LANES * GROUP;
            if (at >= length) break;
#pragma unroll
            for (int c = 0; c < N; c++) {
                ReduceValue<T> v[GROUP];
#pragma unroll
                for (int e = 0; e < GROUP; e++) {
                    v[e] = xt_unpack(raw[a][e], c);
                    if (at + e >= length) v[e] = turned(missing<OP, ReduceValue<T>>(), p.sign); /* lane_take turns it back */
                }
                lane_take<T, OP, GROUP>(&s[c], v, at, p.sign);
            }
        }
    }
}

/* N columns a thread; the block is ACROSS threads wide and LANES high. */
template <typename T, int OP, int N, int LANES>
__global__ void __launch_bounds__(N > 1 ? THREADS : 1024, N > 1 ? 2 : 1)
    reduce_columns_kernel(const __grid_constant__ ReduceJob p) {
    constexpr int GROUP = XT_WIDTH<T>, AHEAD = GROUP >= 8 || LANES == 8 ? 1 : 8 / GROUP;
    constexpr int ACROSS = N > 1 ? THREADS / LANES : 32, COLS = ACROSS * N;
    typedef ReducePartial<ReduceHeld<T>> Partial;
    __shared__ ReduceHeld<T> value[LANES][COLS + 1];
    __shared__ int position[OP == ARGMAX ? LANES : 1][COLS + 1];
    const int across = threadIdx.x % ACROSS, lane = threadIdx.x / ACROSS;
    const int64_t tiles = p.outer * p.tiles, tasks = tiles * p.segments;
    for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
        const int64_t segment = task / tiles, tile = task % tiles, outer = tile / p.tiles, column = tile % p.tiles * COLS;
        const int64_t first = segment * p.segment;
        const int length = segment_length(p, segment);
        ReduceLane<T> s[N];
#pragma unroll
        for (int c = 0; c < N; c++) lane_begin(&s[c], lane * GROUP < length ? lane * GROUP : NONE);
        if (column + across * N < p.row) {
            const T *x = (const T *)p.x + xt_walk_offset<0>(p.kept, outer * p.row + column + across * N);
            if (p.reduced.ndim == 1) take_column_groups<T, OP, N, true, LANES, AHEAD>(s, p, x, first, length, lane);
            else take_column_groups<T, OP, N, false, LANES, 1>(s, p, x, first, length, lane);
        }
#pragma unroll
        for (int c = 0; c < N; c++) {
            value[lane][across * N + c] = lane_value<T, OP>(&s[c]);
            if (OP == ARGMAX) position[lane][across * N + c] = s[c].at;
        }
        __syncthreads(); /* all lanes are there */
        for (int c = threadIdx.x; c < COLS && column + c < p.row; c += blockDim.x) {
            Partial r[LANES / 2];
#pragma unroll
            for (int l = 0; l < LANES / 2; l++) {
                Partial half[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int at = OP == ARGMAX ? position[l + h * (LANES / 2)][c] : NONE;
                    half[h] = {value[l + h * (LANES / 2)][c], at == NONE ? INT64_MAX : first + at};
                }
                r[l] = join<OP>(half[0], half[1]);
            }
            join_tree<OP, LANES / 2>(r);
            keep<OP>(p, outer * p.row + column + c, segment, r[0]);
        }
        __syncthreads(); /* and may be overwritten */
    }
}

/* ---- segments to results ----------------------------------------------------------------------------------------------------- */

/* A warp per result in blocks of THREADS, or a block of 1024 per result. */
template <int OP, typename H> __global__ void __launch_bounds__(1024) reduce_join_kernel(const __grid_constant__ ReduceJob p) {
    __shared__ H value[32];
    __shared__ int64_t index[32];
    const bool by_warp = blockDim.x == THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t first = by_warp ? (int64_t)blockIdx.x * (THREADS / 32) + warp : blockIdx.x;
    const int64_t step = by_warp ? (int64_t)gridDim.x * (THREADS / 32) : gridDim.x;
    const int lanes = by_warp ? 32 : 1024;
    for (int64_t kept = first; kept < p.kept.numel; kept += step) {
        const ReducePartial<H> *partial = (const ReducePartial<H> *)p.partials + kept * p.segments;
        ReducePartial<H> r = partial_none<OP, H>();
#pragma unroll 4
        for (int64_t s = by_warp ? lane : (int)threadIdx.x; s < p.segments; s += lanes) r = join<OP>(r, partial[s]);
        r = join_lanes<OP, 32>(r);
        if (!by_warp) {
            if (lane == 0) value[warp] = r.value, index[warp] = r.index;
            __syncthreads(); /* all warps are there */
            r = join_lanes<OP, 32>(ReducePartial<H>{value[lane], index[lane]});
            __syncthreads(); /* and may be overwritten */
        }
        if (by_warp ? lane == 0 : threadIdx.x == 0) finish<OP>(p, kept, r);
    }
}

/* ---- the slot ---------------------------------------------------------------------------------------------------------------- */

/* Whether N columns side by side can be read at once everywhere. */
template <typename T, int N> static bool columns_aligned(const ReduceJob *p) {
    for (int d = 0; d < p->reduced.ndim; d++)
        if (p->reduced.strides[0][d] % N != 0) return false;
    return p->row % N == 0 && (uintptr_t)p->x % (N * sizeof(T)) == 0 && xt_walk_outer_multiple(&p->kept, 0, N);
}

/* Whether every group lies in 16 aligned bytes. */
template <typename T> static bool groups_aligned(const ReduceJob *p) {
    constexpr int GROUP = XT_WIDTH<T>;
    for (int d = 0; d < p->kept.ndim; d++)
        if (p->kept.strides[0][d] % GROUP != 0) return false;
    return xt_walk_step(&p->reduced, 0) == 1 && xt_walk_row(&p->reduced) % GROUP == 0 && (uintptr_t)p->x % 16 == 0 &&
           xt_walk_outer_multiple(&p->reduced, 0, GROUP);
}

template <typename T, int OP, int N, int LANES> static void run_columns(ReduceJob *p) {
    constexpr int ACROSS = N > 1 ? THREADS / LANES : 32, COLS = ACROSS * N;
    p->tiles = xt_divide_up(p->row, COLS);
    xt_launch(reduce_columns_kernel<T, OP, N, LANES>, xt_blocks(p->outer * p->tiles * p->segments, 1), ACROSS * LANES, 0, *p);
}

template <typename T, int OP, bool VECTOR> static void run_rows(ReduceJob *p, bool whole) {
    const int64_t n = p->reduced.numel, tasks = p->kept.numel * p->segments;
    if (n <= 8 * XT_WIDTH<T>) {
        xt_launch(reduce_rows_kernel<T, OP, VECTOR, 8>, xt_blocks(tasks, THREADS / 8), THREADS, 0, *p);
    } else if (whole) {
        unsigned warps = p->segments < THREADS / 32 ? (unsigned)p->segments : THREADS / 32;
        xt_launch(reduce_whole_rows_kernel<T, OP, VECTOR>, xt_blocks(p->kept.numel, 1), 32 * warps, 0, *p);
    } else {
        xt_launch(reduce_rows_kernel<T, OP, VECTOR, 32>, xt_blocks(tasks, THREADS / 32), THREADS, 0, *p);
    }
}

template <typename T, int OP> static XtStatus run(ReduceJob *p) {
    constexpr int N = XT_WIDTH<T> > 8 ? 4 : XT_WIDTH<T>;
    typedef ReduceHeld<T> H;
    const int64_t n = p->reduced.numel;
    /* Fewer than 8 columns would leave most of a tile idle. */
    const bool columns = n > 0 && p->row >= 8 && xt_walk_step(&p->kept, 0) == 1 && xt_walk_step(&p->reduced, 0) != 1;
    const bool whole = !columns && p->segments > 1 && p->segments <= WHOLE && p->kept.numel >= WHOLE_ROWS;
    XtScratch scratch;
    if (p->segments > 1 && !whole) {
        XtStatus status = scratch.allocate((size_t)p->kept.numel * (size_t)p->segments * sizeof(ReducePartial<H>));
        if (status != XT_OK) return status;
        p->partials = scratch.data;
    }
    if (columns) {
        if (!columns_aligned<T, N>(p)) run_columns<T, OP, 1, 32>(p);
        else if (n <= 8 * XT_WIDTH<T>) run_columns<T, OP, N, 8>(p);
        else run_columns<T, OP, N, 32>(p);
    } else {
        if (groups_aligned<T>(p)) run_rows<T, OP, true>(p, whole);
        else run_rows<T, OP, false>(p, whole);
    }
    if (p->partials) {
        if (p->segments <= WARP_JOIN) xt_launch(reduce_join_kernel<OP, H>, xt_blocks(p->kept.numel, THREADS / 32), THREADS, 0, *p);
        else xt_launch(reduce_join_kernel<OP, H>, xt_blocks(p->kept.numel, 1), 1024, 0, *p);
    }
    return xt_launched("reduce", p->kept.numel, n);
}

XtStatus xt_cuda_reduce(const XtReduce *p) {
    ReduceJob job = {};
    const int kept_ndim = p->out.ndim;
    const bool extreme = p->op == XT_REDUCE_MAX || p->op == XT_REDUCE_MIN; /* of these the order does not matter */
    xt_walk_init(&job.kept, &p->x, &p->out, 0, kept_ndim, true);
    xt_walk_init(&job.reduced, &p->x, NULL, kept_ndim, p->x.ndim - kept_ndim, extreme);
    if (job.kept.numel == 0) return XT_OK;
    const int64_t n = job.reduced.numel;
    job.x = p->x.data;
    job.out = p->out.data;
    job.out_dtype = p->out.dtype;
    job.sign = p->op == XT_REDUCE_MIN ? -1 : 1;
    job.divisor = p->op == XT_REDUCE_MEAN ? (double)n : 1;
    job.segment = n <= 65536 ? 1024 : n <= 8388608 ? 2048 : 8192;
    job.segments = n > job.segment ? xt_divide_up(n, job.segment) : 1;
    job.row = xt_walk_row(&job.kept);
    job.outer = job.kept.numel / job.row;
    return xt_by_number(p->x.dtype, [&](auto zero) {
        using T = decltype(zero);
        switch (p->op) {
        case XT_REDUCE_ARGMAX: return run<T, ARGMAX>(&job);
        case XT_REDUCE_MAX:
        case XT_REDUCE_MIN: return run<T, MAX>(&job);
        default: return run<T, SUM>(&job);
        }
    });
}
