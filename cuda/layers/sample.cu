/* sample.cu - draws a token from each row of logits: temperature, top-k, top-p (contract/layers.h, core/draw.h).
 *
 * Plan: a block has a row, which it reads several times, from L2 after the first:
 *
 *   temperature 0   a row is cut into parts, a block each; the block that ends last takes the largest of all, the first of equals. Above
 *                MOST_ROWS rows: the row's block, in two passes
 *   largest      one pass
 *   top-k        `select`: a pass counts tokens in bins of 1/64 octave, the next ones count digits of the keys in the bin where the k-th
 *                lies. At most LIST tokens are gathered, and the rest works in shared memory
 *   top-p        in the list: each thread adds the weights before its token. Without a list: `select`, with weights instead of counts
 *   the draw     in the list; or a warp adds up each 32nd of the row, and the one that has the token is scanned
 *   few rows     with a top-k that has a list: a row is cut into parts, a block each, which leaves the first tokens of its part; the block
 *                that ends last does the rest with those
 *
 * Sums and atomics are of integers, so their order does not matter: the same tokens as on the CPU, bit for bit.
 */
#include "arch/overlap.cuh"
#include "common/cuda.cuh"
#include "contract/layers.h"
#include "core/draw.h"

#include <math.h>

enum {
    THREADS = 1024,
    OCTAVE = 64, /* bins */
    BINS = 2048, /* the last one has all the rest */
    DIGITS = 256,
    LIST = 1024,        /* tokens in shared memory: one a thread */
    EACH = 8,           /* neighbours that a thread scans in a tile */
    PART_THREADS = 256, /* of a block with a part of a row */
    MOST_ROWS = 32768,  /* whose parts have blocks of their own */
};

typedef unsigned long long Sum;

/* A number that sorts as the element does: the bits of xt_sort_key_f32 and _f64 that the type can have. */
template <typename T> constexpr int KEY_BITS = sizeof(T) == 8 ? 64 : 32;
template <> constexpr int KEY_BITS<XtBf16> = 16;
template <> constexpr int KEY_BITS<XtF16> = 24;
template <typename T> __device__ inline uint64_t key_of(XtAcc<T> v) {
    if constexpr (sizeof(T) == 8) return xt_sort_key_f64(v);
    else return xt_sort_key_f32(v) >> (32 - KEY_BITS<T>);
}

struct Shared {
    unsigned counts[BINS];
    Sum sums[BINS];
    Sum keys[LIST], weights[LIST];
    int indices[LIST];
    Sum of_warp[32];
    int place; /* answers of one warp or thread to all */
    Sum before;
    unsigned length;
};

/* What is left of a row: tokens above key `least`, and those equal to it up to index `last`. */
template <typename T> struct Row {
    const T *x; // [vocab]
    int vocab;
    XtAcc<T> max;
    float factor;
    uint64_t least;
    int last;

    __device__ bool has(uint64_t key, int j) const { return key > least || (key == least && j <= last); }
    __device__ Sum weight(XtAcc<T> v) const { return xt_draw_weight((float)(v - max), factor); }
    __device__ int bin(XtAcc<T> v) const { return (int)fminf(XT_MUL((float)(max - v), factor * OCTAVE), BINS - 1); }
};

/* Blocks of a launch that have finished, for each row. Zeros between launches: the last block of a row resets its count. */
__device__ unsigned row_finished[MOST_ROWS];

/* f(j, x[j]) for each element of x [count], in any order, shared out over `threads` threads, of which this is number `thread`. So many
 * loads are under way at once that their latency is not what a pass takes. */
template <typename T, typename F> __device__ inline void each(const T *x, int count, int thread, int threads, F f) {
    constexpr int N = XT_WIDTH<T>, AHEAD = 2;
    const int head = min(count, (int)((16 - (uintptr_t)x % 16) % 16 / sizeof(T))), pieces = (count - head) / N;
    for (int first = thread; first < pieces; first += threads * AHEAD) {
        XtPiece<T, N> piece[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (first + i * threads < pieces) piece[i] = xt_read<T, N>(x + head + (first + i * threads) * N);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (first + i * threads >= pieces) continue;
            const XtVector<XtAcc<T>, N> v = xt_load(piece[i]);
#pragma unroll
            for (int e = 0; e < N; e++) f(head + (first + i * threads) * N + e, v.at[e]);
        }
    }
    for (int j = thread; j < count - pieces * N; j += threads) {
        const int at = j < head ? j : j + pieces * N;
        f(at, xt_load(x[at]));
    }
}

struct Smaller {
    __device__ int operator()(int a, int b) const { return a < b ? a : b; }
};

/* The sum of the values of this thread and of those before it; *total: of all. Every thread calls it. */
__device__ static Sum scan(Shared *s, Sum value, Sum *total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Sum other = __shfl_up_sync(0xffffffffu, value, step);
        if (lane >= step) value += other;
    }
    __syncthreads();
    if (lane == 31) s->of_warp[warp] = value;
    __syncthreads();
    Sum all = 0, before = 0;
    for (int w = 0; w < THREADS / 32; w++) {
        if (w < warp) before += s->of_warp[w];
        all += s->of_warp[w];
    }
    *total = all;
    return before + value;
}

/* Sets place to the entry where the sum of measures reaches limit, and before to the sum before it, for `count` entries, a multiple of
 * 32, taken from the last one to the first if `backwards`. Every thread calls it. */
template <bool BY_WEIGHT> __device__ static void cross(Shared *s, int count, bool backwards, Sum limit) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const int each = count / 32, first = threadIdx.x * each;
        Sum sum = 0, before = 0;
        for (int i = first; i < first + each; i++) {
            const int entry = backwards ? count - 1 - i : i;
            sum += BY_WEIGHT ? s->sums[entry] : (Sum)s->counts[entry];
        }
        Sum inclusive = sum;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const Sum other = __shfl_up_sync(0xffffffffu, inclusive, step);
            if (threadIdx.x >= step) inclusive += other;
        }
        before = inclusive - sum;
        if (before < limit && limit <= inclusive)
            for (int i = first; i < first + each; i++) {
                const int entry = backwards ? count - 1 - i : i;
                const Sum one = BY_WEIGHT ? s->sums[entry] : (Sum)s->counts[entry];
                if (before + one >= limit) {
                    s->place = entry;
                    s->before = before;
                    break;
                }
                before += one;
            }
    }
    __syncthreads();
}

__device__ static void clear(Shared *s, int count) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) s->counts[i] = 0, s->sums[i] = 0;
    __syncthreads();
}

/* Leaves the first tokens of the row in the order of logits: those before which there is less than limit, counted or weighed.
 * 1 <= limit <= their sum. Returns the sum of what is left. */
template <bool BY_WEIGHT, typename T> __device__ static Sum select(Shared *s, Row<T> *row, Sum limit) {
    const Row<T> r = *row;
    clear(s, BINS);
    for (int j = threadIdx.x; j < r.vocab; j += THREADS) {
        const XtAcc<T> v = xt_load(r.x[j]);
        if (!r.has(key_of<T>(v), j)) continue;
        if (BY_WEIGHT) atomicAdd(&s->sums[r.bin(v)], r.weight(v));
        else atomicAdd(&s->counts[r.bin(v)], 1u);
    }
    cross<BY_WEIGHT>(s, BINS, false, limit);
    const int bin = s->place;
    Sum before = s->before;
    uint64_t prefix = 0;
    for (int shift = KEY_BITS<T> - 8; shift >= 0; shift -= 8) {
        clear(s, DIGITS);
        for (int j = threadIdx.x; j < r.vocab; j += THREADS) {
            const XtAcc<T> v = xt_load(r.x[j]);
            const uint64_t key = key_of<T>(v);
            if (r.bin(v) != bin || !r.has(key, j) || (shift + 8 < KEY_BITS<T> && key >> (shift + 8) != prefix)) continue;
            const int digit = (int)(key >> shift & (DIGITS - 1));
            atomicAdd(&s->counts[digit], 1u);
            if (BY_WEIGHT) atomicAdd(&s->sums[digit], r.weight(v));
        }
        cross<BY_WEIGHT>(s, DIGITS, true, limit - before);
        prefix = prefix << 8 | (uint64_t)s->place;
        before += s->before;
    }
    /* All with the key `prefix` weigh the same: so many of them, the first ones, are left. */
    const Sum equals = s->counts[s->place], one = BY_WEIGHT ? s->sums[s->place] / equals : 1;
    const Sum taken = (limit - before + one - 1) / one;
    row->least = prefix;
    row->last = r.vocab;
    if (taken < equals) {
        Sum found = 0;
        for (int tile = 0; tile < r.vocab; tile += THREADS) {
            const int j = tile + threadIdx.x;
            const uint64_t key = j < r.vocab ? key_of<T>(xt_load(r.x[j])) : 0;
            const bool equal = j < r.vocab && key == prefix && r.has(key, j);
            Sum in_tile;
            const Sum rank = found + scan(s, equal, &in_tile);
            if (equal && rank == taken) s->place = j;
            found += in_tile;
            if (found >= taken) break; /* all threads agree */
        }
        __syncthreads();
        row->last = s->place;
    }
    __syncthreads();
    return before + taken * one;
}

/* The draw among the tokens that are left, at most LIST, which weigh more than nothing together. indices: of the row's elements, in
 * ascending order; NULL where the row is whole. */
template <typename T>
__device__ static void draw_from_list(Shared *s, const Row<T> &row, const int *indices, double top_p, XtPhilox philox, int64_t *out,
                                      int64_t number) {
    __syncthreads();
    if (threadIdx.x == 0) s->length = 0;
    __syncthreads();
    for (int j = threadIdx.x; j < row.vocab; j += THREADS) {
        const XtAcc<T> v = xt_load(row.x[j]);
        const uint64_t key = key_of<T>(v);
        if (!row.has(key, j)) continue;
        const unsigned place = atomicAdd(&s->length, 1u);
        s->keys[place] = key;
        s->weights[place] = row.weight(v);
        s->indices[place] = j;
    }
    __syncthreads();
    const int count = (int)s->length, i = threadIdx.x;
    const Sum key = i < count ? s->keys[i] : 0, weight = i < count ? s->weights[i] : 0;
    const int index = i < count ? s->indices[i] : 0;
    Sum total, before = 0;
    scan(s, weight, &total);
    const Sum limit = xt_draw_limit(top_p, total);
    for (int k = 0; k < count; k++)
        if (s->keys[k] > key || (s->keys[k] == key && s->indices[k] < index)) before += s->weights[k];
    const bool kept = i < count && before < limit;
    __syncthreads();
    if (i < count && !kept) s->weights[i] = 0;
    scan(s, kept ? weight : 0, &total); /* its barriers show the weights to all */
    const Sum drawn = xt_draw_number(philox, (uint64_t)number, total);
    before = 0;
    for (int k = 0; k < count; k++)
        if (s->indices[k] < index) before += s->weights[k];
    if (kept && before <= drawn && drawn < before + weight) out[number] = indices ? indices[index] : index;
}

/* The draw among all tokens that are left. A warp adds up a part of the row; then the part that has the token is looked through. */
template <typename T>
__device__ static void draw_from_row(Shared *s, const Row<T> &row, XtPhilox philox, int64_t *out, int64_t number) {
    constexpr int WARPS = THREADS / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = (row.vocab + WARPS - 1) / WARPS;
    const auto weight_of = [&](int j, XtAcc<T> v) { return row.has(key_of<T>(v), j) ? row.weight(v) : (Sum)0; };
    Sum mine = 0, total = 0, before = 0;
    const int start = min(row.vocab, warp * part);
    each(row.x + start, min(part, row.vocab - start), lane, 32, [&](int j, XtAcc<T> v) { mine += weight_of(start + j, v); });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, step);
    __syncthreads();
    if (lane == 0) s->sums[warp] = mine;
    __syncthreads();
    for (int w = 0; w < WARPS; w++) total += s->sums[w];
    const Sum drawn = xt_draw_number(philox, (uint64_t)number, total);
    int w = 0;
    while (w < WARPS - 1 && before + s->sums[w] <= drawn) before += s->sums[w++];
    const int end = min(row.vocab, (w + 1) * part);
    for (int tile = w * part; tile < end; tile += THREADS * EACH) {
        const int first = tile + threadIdx.x * EACH;
        Sum weights[EACH], in_tile;
        mine = 0;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int j = first + e;
            weights[e] = j < end ? weight_of(j, xt_load(row.x[j])) : 0;
            mine += weights[e];
        }
        const Sum last = before + scan(s, mine, &in_tile);
        if (last - mine <= drawn && drawn < last) {
            Sum sum = last - mine;
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                if (sum <= drawn && drawn < sum + weights[e]) out[number] = first + e;
                sum += weights[e];
            }
        }
        before += in_tile;
        if (before > drawn) break; /* all threads agree */
    }
}

/* The largest value of x [count]; *nan: one is a NaN. */
template <typename T> __device__ static XtAcc<T> largest(const T *x, int count, bool *nan) {
    using A = XtAcc<T>;
    A max = -(A)INFINITY;
    bool any = false;
    each(x, count, threadIdx.x, THREADS, [&](int, A v) {
        any |= v != v;
        max = XtFirstMax()(max, v);
    });
    max = xt_block_reduce(max, -(A)INFINITY, XtFirstMax());
    *nan = __syncthreads_or(any);
    return max;
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    sample_kernel(int64_t *out, const T *x, const int64_t *random, int64_t rows, int vocab, int top_k, bool greedy, float factor,
                  double top_p) { // out [rows], x [rows, vocab], random [2]
    using A = XtAcc<T>;
    __shared__ Shared s;
    const XtPhilox philox = {(uint64_t)random[0], (uint64_t)random[1]};
    for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
        Row<T> row = {x + number * vocab, vocab, 0, factor, 0, vocab};
        bool nan;
        const A max = largest<T>(row.x, vocab, &nan);
        if (nan || !(max - max == 0)) { /* all threads agree */
            if (threadIdx.x == 0) out[number] = -1;
            continue;
        }
        row.max = max;
        if (greedy) {
            int first = vocab;
            for (int j = threadIdx.x; j < vocab && first == vocab; j += THREADS)
                if (xt_load(row.x[j]) == max) first = j;
            first = xt_block_reduce(first, vocab, Smaller());
            if (threadIdx.x == 0) out[number] = first;
            continue;
        }
        if (top_k < vocab) select<false>(&s, &row, (Sum)top_k);
        if (top_k < vocab && top_k <= LIST) {
            draw_from_list(&s, row, NULL, top_p, philox, out, number);
            continue;
        }
        if (top_p < 1.0) {
            Sum total = 0;
            each(row.x, vocab, threadIdx.x, THREADS, [&](int j, A v) {
                if (row.has(key_of<T>(v), j)) total += row.weight(v);
            });
            scan(&s, total, &total);
            select<true>(&s, &row, xt_draw_limit(top_p, total));
        }
        draw_from_row(&s, row, philox, out, number);
    }
}

/* ---- few rows, top-k --------------------------------------------------------------------------------------------------------------- */

/* Of each row, what its blocks leave: `count` tokens, top_k of each part but the last. */
template <typename T> struct Candidates {
    XtAcc<T> *max; // [rows, parts]: +Inf for a NaN, too
    int *indices;  // [rows, count]
    T *values;     // [rows, count]
    int count;
};

/* The first tokens of a row in the order of logits are among the first ones of its parts: with fewer elements to read again and again.
 * Grid (parts, rows): parts of `part` elements, at most 32. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    top_kernel(int64_t *out, const T *x, const int64_t *random, Candidates<T> found, int vocab, int part, int top_k, float factor,
               double top_p) { // out [rows], x [rows, vocab], random [2]
    using A = XtAcc<T>;
    __shared__ Shared s;
    __shared__ bool is_last;
    const int parts = gridDim.x, start = blockIdx.x * part, length = min(part, vocab - start);
    const int64_t number = blockIdx.y;
    found.max += number * parts, found.indices += number * found.count, found.values += number * found.count;
    Row<T> row = {x + number * vocab + start, length, 0, factor, 0, length};
    bool nan;
    row.max = largest<T>(row.x, length, &nan);
    if (!nan) { /* all threads agree; the row has no token, and more of them than `top_k` would seem to be left */
        if (top_k < length) select<false>(&s, &row, (Sum)top_k);
        const int each = (length + THREADS - 1) / THREADS, from = threadIdx.x * each, end = min(length, from + each);
        int mine = 0;
        for (int j = from; j < end; j++) mine += row.has(key_of<T>(xt_load(row.x[j])), j);
        Sum total;
        int place = blockIdx.x * top_k + (int)scan(&s, mine, &total) - mine;
        for (int j = from; j < end; j++)
            if (row.has(key_of<T>(xt_load(row.x[j])), j)) found.values[place] = row.x[j], found.indices[place++] = start + j;
    }
    if (threadIdx.x == 0) found.max[blockIdx.x] = nan ? (A)INFINITY : row.max;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&row_finished[number], 1u) == gridDim.x - 1;
        if (is_last) row_finished[number] = 0;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence(); /* and nothing that other blocks wrote has been read before */
    row = {found.values, found.count, -(A)INFINITY, factor, 0, found.count};
    for (int i = 0; i < parts; i++) row.max = XtFirstMax()(row.max, *(const volatile A *)&found.max[i]);
    const XtPhilox philox = {(uint64_t)random[0], (uint64_t)random[1]};
    if (!(row.max - row.max == 0)) {
        if (threadIdx.x == 0) out[number] = -1;
        return;
    }
    if (top_k < found.count) select<false>(&s, &row, (Sum)top_k);
    draw_from_list(&s, row, found.indices, top_p, philox, out, number);
}

/* Parts of a row; 1 where a block each is as good. */
static int parts_of(const XtSample *p) {
    const int64_t parts = xt_multiprocessors() / p->rows;
    return p->top_k > LIST || parts < 2 || p->top_k * 4 * parts > p->vocab ? 1 : parts < 32 ? (int)parts : 32;
}

template <typename T> static XtStatus top(const XtSample *p, int parts) {
    const int vocab = (int)p->vocab, part = (int)xt_divide_up(vocab, parts), k = (int)p->top_k;
    parts = (int)xt_divide_up(vocab, part);
    const int rest = vocab - (parts - 1) * part;
    Candidates<T> found = {};
    found.count = (parts - 1) * k + (k < rest ? k : rest);
    const size_t places = (size_t)p->rows * found.count, maxima = (size_t)p->rows * parts;
    XtScratch scratch;
    XT_CHECK(scratch.allocate(maxima * sizeof(XtAcc<T>) + places * (sizeof(int) + sizeof(T)) + 16));
    found.max = (XtAcc<T> *)scratch.data;
    found.values = (T *)(found.max + maxima); /* the widest first */
    found.indices = (int *)(found.max + maxima);
    if (sizeof(T) > sizeof(int)) found.indices = (int *)(found.values + places);
    else found.values = (T *)(found.indices + places);
    xt_launch(top_kernel<T>, dim3(parts, (unsigned)p->rows), THREADS, 0, p->out, (const T *)p->x, p->random, found, vocab, part, k,
              xt_draw_factor(p->temperature), p->top_p);
    return xt_launched("sample", p->rows, p->vocab, p->top_k);
}

/* ---- temperature 0 --------------------------------------------------------------------------------------------------------------- */

template <typename A> struct Best {
    A value; /* +Inf for a row with a NaN, too: neither has a token */
    int index;
};
struct Larger { /* and of equals the first */
    template <typename A> __device__ Best<A> operator()(Best<A> a, Best<A> b) const {
        return a.value > b.value || (a.value == b.value && a.index < b.index) ? a : b;
    }
};
template <typename A> __device__ inline Best<A> best_of_warp(Best<A> best) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        best =
            Larger()(best, Best<A>{__shfl_xor_sync(0xffffffffu, best.value, step), __shfl_xor_sync(0xffffffffu, best.index, step)});
    return best;
}

/* out [rows], x [rows, vocab], parts [rows, gridDim.x <= 32]: a block has PART elements of a row, in pieces of N. */
template <typename T, int N>
__global__ void __launch_bounds__(PART_THREADS)
    greedy_kernel(int64_t *out, const T *x, Best<XtAcc<T>> *parts, int vocab, int part) {
    using A = XtAcc<T>;
    __shared__ Best<A> of_warp[PART_THREADS / 32];
    __shared__ bool is_last;
    xt_wait_for_previous();
    xt_let_next_begin();
    const int row = blockIdx.y, first = blockIdx.x * part, end = min(vocab, first + part), lane = threadIdx.x % 32;
    x += (int64_t)row * vocab;
    Best<A> best = {-(A)INFINITY, vocab};
#pragma unroll 4
    for (int j = first + threadIdx.x * N; j < end; j += PART_THREADS * N) {
        const XtVector<A, N> v = xt_load(xt_read<T, N>(x + j));
#pragma unroll
        for (int e = 0; e < N; e++) best = Larger()(best, Best<A>{v.at[e] != v.at[e] ? (A)INFINITY : v.at[e], j + e});
    }
    best = best_of_warp(best);
    if (lane == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int w = 1; w < PART_THREADS / 32; w++) best = Larger()(best, of_warp[w]);
        parts[row * gridDim.x + blockIdx.x] = best;
        __threadfence();
        is_last = atomicAdd(&row_finished[row], 1u) == gridDim.x - 1;
        if (is_last) row_finished[row] = 0;
    }
    __syncthreads();
    if (!is_last || threadIdx.x >= 32) return;
    __threadfence();
    best = {-(A)INFINITY, vocab};
    if (lane < gridDim.x) {
        const volatile Best<A> *from = parts + row * gridDim.x + lane; /* from L2, where other blocks wrote it */
        best.value = from->value, best.index = from->index;
    }
    best = best_of_warp(best);
    if (lane == 0) out[row] = best.value - best.value == 0 ? best.index : -1;
}

template <typename T> static XtStatus greedy(const XtSample *p) {
    constexpr int N = XT_WIDTH<T>, STEP = PART_THREADS * N;
    const int vocab = (int)p->vocab, part = (int)xt_divide_up(xt_divide_up(vocab, 32), STEP) * STEP;
    const dim3 grid(xt_blocks(vocab, part), (unsigned)p->rows);
    XtScratch scratch;
    XT_CHECK(scratch.allocate((size_t)(grid.x * p->rows) * sizeof(Best<XtAcc<T>>)));
    auto *parts = (Best<XtAcc<T>> *)scratch.data;
    if (xt_aligned<T>(vocab, vocab, p->x))
        xt_launch_early(greedy_kernel<T, N>, grid, PART_THREADS, 0, p->out, (const T *)p->x, parts, vocab, part);
    else xt_launch_early(greedy_kernel<T, 1>, grid, PART_THREADS, 0, p->out, (const T *)p->x, parts, vocab, part);
    return xt_launched("sample", p->rows, p->vocab, p->top_k);
}

XtStatus xt_cuda_sample(const XtSample *p) {
    if (p->rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool greedy = p->temperature == 0.0;
        if (greedy && p->rows <= MOST_ROWS && p->vocab < (1 << 30)) return ::greedy<T>(p);
        const int parts = greedy ? 1 : parts_of(p);
        if (parts > 1) return top<T>(p, parts);
        const float factor = greedy ? 0.0f : xt_draw_factor(p->temperature);
        xt_launch(sample_kernel<T>, xt_blocks(p->rows, 1), THREADS, 0, p->out, (const T *)p->x, p->random, p->rows, (int)p->vocab,
                  (int)p->top_k, greedy, factor, p->top_p);
        return xt_launched("sample", p->rows, p->vocab, p->top_k);
    });
}
