/* embedding_sort.cuh - the rows of each id, for the backward of embedding.cu: a stable sort of (id, row) by id.
 *
 * Two plans give the same list. The second, one launch, is at the end of this file. The first takes three.
 * Two digits. One launch counts the first digit in each tile of the list, one places every entry by that digit and counts the second,
 * one does the same by the second; every block adds up the counts of all tiles for itself. Lists of more than MOST_TILES tiles go to a
 * library's sort. A bit for each row of dweight says whether its id occurs. More blocks of the last of these launches, which leaves most
 * of the device idle, write zeros to the rows whose ids do not occur.
 *
 * Deterministic: the place of every entry depends on the ids alone. Atomics only count and set bits.
 */
#pragma once

#include "arch/overlap.cuh"
#include "arch/sm90.cuh"
#include "common/cuda.cuh"
#include "common/divide.cuh"
#include "contract/layers.h"

#include <cub/device/device_radix_sort.cuh>

static const int WARPS = 8; /* of a block */

static const int TILE = 1024, MOST_TILES = 256; /* of our own sort: entries of a block, and the most blocks */
static const int DIGIT = 10;                    /* bits of a digit at most */

/* `vocab` for an id out of range: it sorts last and is skipped. */
__device__ inline unsigned key_of(const int64_t *ids, int64_t r, int64_t vocab) {
    const int64_t id = ids[r];
    return (unsigned)(id >= 0 && id < vocab ? id : vocab);
}
__device__ inline void report_unknown(const int64_t *ids, int64_t r, int64_t vocab, XtIndexReport *report) {
    const int64_t id = ids[r];
    if (id < 0 || id >= vocab) xt_report_index(report, XT_INDEX_EMBEDDING, r, id, vocab);
}
/* Sets the bits of a lane's ITEMS keys in present [vocab bits], once for the lanes with the same key; a key of `vocab` has no bit. A
 * common id nearly always finds its bit set. All bits are read before the first is set: one wait. */
template <int ITEMS> __device__ inline void set_present(unsigned *present, const unsigned (&key)[ITEMS], int64_t vocab) {
    unsigned found[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const bool first = (__match_any_sync(0xffffffffu, key[k]) & ((1u << threadIdx.x % 32) - 1)) == 0;
        found[k] = first && key[k] < vocab ? present[key[k] / 32] : ~0u;
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const unsigned bit = 1u << key[k] % 32;
        if (!(found[k] & bit)) atomicOr(&present[key[k] / 32], bit);
    }
}

/* What a launch has to clear: the rows of dweight [vocab, units] whose bits of `present` are not set. A unit is 16 bytes or 2. */
typedef struct Absent {
    void *dweight; /* NULL: nothing */
    const unsigned *present;
    int64_t vocab, units;
    bool wide;
} Absent;

/* Warp `warp` of `warps` clears tiles of 32 rows. */
template <typename U> __device__ inline void clear_rows(const Absent &p, int64_t warp, int64_t warps) {
    const int lane = threadIdx.x % 32;
    for (int64_t tile = warp; tile * 32 < p.vocab; tile += warps) {
        unsigned absent = ~p.present[tile];
        if (p.vocab - tile * 32 < 32) absent &= (1u << (p.vocab - tile * 32)) - 1;
        for (; absent; absent &= absent - 1) {
            U *row = (U *)p.dweight + (tile * 32 + __ffs((int)absent) - 1) * p.units; /* [units] */
            for (int64_t u = lane; u < p.units; u += 32) row[u] = U();
        }
    }
}
/* Block `block` of `blocks`. */
__device__ inline void clear_absent(const Absent &p, int64_t block, int64_t blocks) {
    const int64_t warp = block * WARPS + threadIdx.x / 32, warps = blocks * WARPS;
    if (p.wide) clear_rows<uint4>(p, warp, warps);
    else clear_rows<unsigned short>(p, warp, warps);
}
__global__ void __launch_bounds__(32 * WARPS) embedding_clear_kernel(const __grid_constant__ Absent absent) {
    clear_absent(absent, blockIdx.x, gridDim.x);
}

/* A block a tile. counts [tiles, 1 << bits]: how many ids of a tile have each value of their low `bits`. Also zeroes `clear`
 * [words], the counters of the next launch. */
__global__ void __launch_bounds__(32 * WARPS)
    embedding_count_kernel(unsigned *counts, unsigned *clear, int64_t words, const int64_t *ids, int64_t rows, int64_t vocab,
                           int bits, XtIndexReport *report) {
    xt_wait_for_previous();
    xt_let_next_begin();
    __shared__ unsigned count[1 << DIGIT];
    const int values = 1 << bits;
    for (int d = threadIdx.x; d < values; d += 32 * WARPS) count[d] = 0;
    for (int64_t i = (int64_t)blockIdx.x * 32 * WARPS + threadIdx.x; i < words; i += (int64_t)gridDim.x * 32 * WARPS) clear[i] = 0;
    __syncthreads();
    const int64_t begin = (int64_t)blockIdx.x * TILE;
#pragma unroll
    for (int k = 0; k < TILE / (32 * WARPS); k++) {
        const int64_t r = begin + k * 32 * WARPS + threadIdx.x;
        if (r >= rows) continue;
        report_unknown(ids, r, vocab, report);
        atomicAdd(&count[key_of(ids, r, vocab) & (values - 1)], 1u);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < values; d += 32 * WARPS) counts[(int64_t)blockIdx.x * values + d] = count[d];
}

/* A block for each of `tiles`; the blocks beyond clear `absent`. Sorts the list by `bits` bits of the keys from bit `shift` on; the sort
 * is stable. counts [tiles, 1 << bits] of these bits. FIRST: the list is ids, in row order. The kernel then also counts the bits above
 * these in next_counts [tiles, 1 << next_bits], by tiles of the new list, and sets `present`. */
template <bool FIRST>
__global__ void __launch_bounds__(32 * WARPS)
    embedding_sort_kernel(unsigned *to_keys, unsigned *to_order, unsigned *next_counts, unsigned *present, const int64_t *ids,
                          const unsigned *keys, const unsigned *order, const unsigned *counts, int64_t rows, int64_t vocab,
                          int tiles, int shift, int bits, int next_bits, const __grid_constant__ Absent absent) {
    xt_wait_for_previous();
    xt_let_next_begin();
    constexpr int ITEMS = TILE / (32 * WARPS), EACH = (1 << DIGIT) / (32 * WARPS);
    __shared__ uint16_t within[WARPS][1 << DIGIT]; /* entries of this warp, then of the warps before it */
    __shared__ unsigned start[1 << DIGIT];         /* place of the tile's first entry with this digit */
    __shared__ unsigned of_warp[WARPS];
    if ((int)blockIdx.x >= tiles) return clear_absent(absent, blockIdx.x - tiles, gridDim.x - tiles);
    const unsigned all = 0xffffffffu, mask = (1u << bits) - 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, values = 1 << bits;
    for (int d = threadIdx.x; d < values; d += 32 * WARPS)
#pragma unroll
        for (int w = 0; w < WARPS; w++) within[w][d] = 0;
    const int64_t begin = (int64_t)blockIdx.x * TILE + warp * (TILE / WARPS) + lane;
    unsigned key[ITEMS], row[ITEMS], rank[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const int64_t i = begin + k * 32;
        key[k] = (unsigned)vocab;
        row[k] = (unsigned)i;
        if (i < rows) {
            key[k] = FIRST ? key_of(ids, i, vocab) : keys[i];
            if (!FIRST) row[k] = order[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; k++) { /* a warp's entries in order, 32 at a time */
        const bool here = begin + k * 32 < rows;
        const unsigned digit = key[k] >> shift & mask;
        const unsigned peers = __match_any_sync(all, here ? digit : ~0u), before = peers & ((1u << lane) - 1);
        rank[k] = here ? within[warp][digit] + __popc(before) : 0;
        __syncwarp();
        if (here && !before) within[warp][digit] = (uint16_t)(within[warp][digit] + __popc(peers));
        __syncwarp();
    }
    if (FIRST) set_present<ITEMS>(present, key, vocab);
    /* The entries of each digit in all tiles, and in the tiles before this one. */
    unsigned total[EACH], earlier[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int d = j * 32 * WARPS + threadIdx.x;
        total[j] = earlier[j] = 0;
        if (d >= values) continue;
#pragma unroll 32
        for (int t = 0; t < tiles; t++) {
            const unsigned n = counts[(int64_t)t * values + d];
            total[j] += n;
            earlier[j] += t < (int)blockIdx.x ? n : 0;
        }
        start[d] = total[j];
    }
    __syncthreads();  /* also ends the counting in `within` */
    unsigned sum = 0; /* of digits [EACH t, EACH t + EACH), thread t */
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int d = threadIdx.x * EACH + j;
        total[j] = d < values ? start[d] : 0;
        sum += total[j];
    }
    unsigned scan = sum; /* over the threads of this warp up to this one */
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const unsigned other = __shfl_up_sync(all, scan, step);
        if (lane >= step) scan += other;
    }
    if (lane == 31) of_warp[warp] = scan;
    __syncthreads();
    scan -= sum;
#pragma unroll
    for (int w = 0; w < WARPS; w++) scan += w < warp ? of_warp[w] : 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int d = threadIdx.x * EACH + j;
        if (d < values) start[d] = scan;
        scan += total[j];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int d = j * 32 * WARPS + threadIdx.x;
        if (d < values) start[d] += earlier[j];
    }
    for (int d = threadIdx.x; d < values; d += 32 * WARPS) {
        unsigned run = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const unsigned n = within[w][d];
            within[w][d] = (uint16_t)run;
            run += n;
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const bool here = begin + k * 32 < rows;
        if (!here) continue;
        const unsigned digit = key[k] >> shift & mask, place = start[digit] + within[warp][digit] + rank[k];
        to_keys[place] = key[k];
        to_order[place] = row[k];
        if (FIRST) atomicAdd(&next_counts[((int64_t)(place / TILE) << next_bits) + (key[k] >> bits)], 1u);
    }
}

/* For the library's sort: keys [rows] of the ids, order [rows] = 0, 1, 2, ...; sets `present`. */
__global__ void __launch_bounds__(32 * WARPS)
    embedding_keys_kernel(unsigned *keys, unsigned *order, unsigned *present, const int64_t *ids, int64_t rows, int64_t vocab,
                          XtIndexReport *report) {
    const int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t first = (int64_t)blockIdx.x * blockDim.x; first < rows; first += step) {
        const int64_t r = first + threadIdx.x;
        const bool here = r < rows;
        const unsigned key[1] = {here ? key_of(ids, r, vocab) : (unsigned)vocab};
        set_present<1>(present, key, vocab);
        if (!here) continue;
        report_unknown(ids, r, vocab, report);
        keys[r] = key[0];
        order[r] = (unsigned)r;
    }
}

typedef struct Sorted {
    const unsigned *keys, *order; /* [rows]: sorted by key, rows of equal keys in order */
    bool once_written;            /* the rows of ids that occur once are written */
} Sorted;

/* Also clears the rows of dweight whose ids do not occur, unless it accumulates. The scratch memory holds two buffers of keys and two of
 * rows, each [rows], the bits, and the temporary memory of the sort. */
static XtStatus sort_rows(const XtEmbeddingBwd *p, XtScratch *scratch, Sorted *out) {
    const int64_t list = xt_divide_up(p->rows, 64) * 64, words = xt_divide_up(p->vocab, 2048) * 64,
                  tiles = xt_divide_up(p->rows, TILE);
    int bits = 0;
    while (bits < 32 && p->vocab >> bits) bits++;
    const int low = (bits + 1) / 2, high = bits - low; /* digits */
    const bool ours = tiles <= MOST_TILES && low <= DIGIT;
    const int64_t low_counts = xt_divide_up(tiles << low, 64) * 64, high_counts = tiles << high;
    size_t temporary = 0;
    cudaError_t error = cudaSuccess;
    cub::DoubleBuffer<unsigned> keys(NULL, NULL), order(NULL, NULL);
    if (ours) temporary = (size_t)(low_counts + high_counts) * sizeof(unsigned);
    else error = cub::DeviceRadixSort::SortPairs(NULL, temporary, keys, order, (unsigned)p->rows, 0, bits, xt_stream());
    if (error != cudaSuccess) return xt_cuda_error("embedding_bwd", error);
    XT_CHECK(scratch->allocate((size_t)(4 * list + words) * sizeof(unsigned) + temporary));
    unsigned *memory = (unsigned *)scratch->data, *present = memory + 4 * list,
             *rest = present + words; /* rest [temporary bytes] */
    const int64_t row_bytes = p->cols * (int64_t)xt_dtype_size(p->dtype);
    const bool wide = row_bytes % 16 == 0 && (uintptr_t)p->dweight % 16 == 0;
    const Absent absent = {p->accumulate ? NULL : p->dweight, present, p->vocab, row_bytes / (wide ? 16 : 2), wide};
    const unsigned clearing = absent.dweight ? xt_blocks(p->vocab, 32 * WARPS) : 0; /* blocks */
    if (ours) {
        /* The bits and the second counts are adjacent: one launch clears both. */
        unsigned *second = rest, *counts = rest + high_counts;
        const unsigned blocks = (unsigned)tiles;
        xt_launch_early(embedding_count_kernel, blocks, 32 * WARPS, 0, counts, present, words + high_counts, p->ids, p->rows,
                        p->vocab, low, xt_index_report());
        if (p->vocab > 0 && p->cols > 0) {
            xt_launch_early(embedding_sort_kernel<true>, blocks, 32 * WARPS, 0, memory, memory + list, second, present, p->ids,
                            (const unsigned *)NULL, (const unsigned *)NULL, counts, p->rows, p->vocab, tiles, 0, low, high,
                            Absent());
            xt_launch_early(embedding_sort_kernel<false>, blocks + clearing, 32 * WARPS, 0, memory + 2 * list, memory + 3 * list,
                            (unsigned *)NULL, (unsigned *)NULL, (const int64_t *)NULL, memory, memory + list, second, p->rows,
                            p->vocab, tiles, low, high, 0, absent);
        }
        out->keys = memory + 2 * list;
        out->order = memory + 3 * list;
        out->once_written = false;
        return XT_OK;
    }
    keys = cub::DoubleBuffer<unsigned>(memory, memory + list);
    order = cub::DoubleBuffer<unsigned>(memory + 2 * list, memory + 3 * list);
    error = cudaMemsetAsync(present, 0, (size_t)words * sizeof(unsigned), xt_stream());
    if (error != cudaSuccess) return xt_cuda_error("embedding_bwd", error);
    xt_launch(embedding_keys_kernel, xt_blocks(p->rows, 32 * WARPS), 32 * WARPS, 0, keys.Current(), order.Current(), present,
              p->ids, p->rows, p->vocab, xt_index_report());
    if (p->vocab > 0 && p->cols > 0) {
        error = cub::DeviceRadixSort::SortPairs(rest, temporary, keys, order, (unsigned)p->rows, 0, bits, xt_stream());
        if (error != cudaSuccess) return xt_cuda_error("embedding_bwd", error);
        xt_count_launch(); /* one for all of the sort's */
        if (clearing) xt_launch(embedding_clear_kernel, clearing, 32 * WARPS, 0, absent);
    }
    out->keys = keys.Current();
    out->order = order.Current();
    out->once_written = false;
    return XT_OK;
}

/* ---- one launch, on compute capability 9.0 -----------------------------------------------------------------------------------
 *
 * A sort cannot use the memory's bandwidth, and needs few multiprocessors. Rows of dweight whose id occurs at most once need no sort:
 * one row of dy, or zeros. With uniform ids they are most of the rows, and their bytes take longer than the sort. So the grid is
 * clusters of CLUSTER blocks, of which each reads all ids, a part a block, and which never wait for each other:
 *
 *     cluster 0     sorts (id, row) in two digits, each block its part of the list, in shared memory: ranks within a warp by match,
 *                   counts of all blocks by distributed shared memory; entries are put in order within the block first, so that
 *                   neighbours go to neighbouring places of the same block (first digit) or of the result (second digit)
 *     the others    share the ids of the vocabulary. A block counts the occurrences of its ids and keeps the row of one: for each id
 *                   it hears of, a block of the cluster adds to the counter of the block that owns it. Then the block writes its rows.
 *
 * Each row that the others write is written once, in an order that varies. They move the rows of dy whose ids occur once and the rows of
 * dweight of those and of absent ids, once each, and the ids once a cluster, through the L2 cache. */

static constexpr int ONCE_CLUSTER = 8, ONCE_THREADS = 1024, ONCE_WARPS = ONCE_THREADS / 32;
static constexpr int ONCE_ITEMS = 8, ONCE_PART = ONCE_ITEMS * ONCE_THREADS; /* entries of a thread and of a block */
static constexpr int64_t ONCE_ROWS = ONCE_CLUSTER * ONCE_PART;
static constexpr int ONCE_MULTIPROCESSORS = 64; /* a part of a device may have no ONCE_CLUSTER neighbours */
static constexpr unsigned ONCE_NEIGHBOURS = 8;  /* ids side by side that one block owns */
static constexpr unsigned ABSENT = ~0u;         /* a row of dy that is not there */

/* Shared memory of a block that sorts. An entry is {key, row}. */
struct OnceSorting {
    uint2 mine[ONCE_PART];                   /* the block's entries by digit */
    uint2 next[ONCE_PART];                   /* the entries of the block's places by the first digit */
    uint16_t within[ONCE_WARPS][1 << DIGIT]; /* entries of a warp with this digit, then of the warps before it */
    unsigned count[1 << DIGIT];              /* of the block */
    unsigned start[1 << DIGIT];              /* where the digit begins in `mine` */
    unsigned shift[1 << DIGIT];              /* from a place in `mine` to the place in the list */
    unsigned of_warp[2][ONCE_WARPS];
};

/* Shared memory of a block that owns ids, as arrays of `slots` after `many`. */
struct OnceOwning {
    unsigned *many;  /* [1] entries of todo */
    unsigned *count; /* [slots] occurrences of an id */
    unsigned *row;   /* [slots] of one of them */
    uint2 *todo;     /* [slots] {id, row or ABSENT} */
};
static constexpr size_t ONCE_MANY = 16, ONCE_EACH = 4 * sizeof(unsigned); /* bytes of `many`, and of a slot in all arrays */

struct OnceTask {
    void *dweight;  /* [vocab, cols] */
    const void *dy; /* [rows, cols] */
    const int64_t *ids;
    unsigned *keys, *order; /* [rows] the sorted list */
    unsigned rows, vocab;
    int64_t cols;
    int low, high;   /* bits of the digits */
    unsigned slots;  /* ids that a block owns at most */
    unsigned pieces; /* of 16 bytes in a row */
    XtDivider by_owners, by_pieces;
};

/* The list's place of item k of this thread, in the part of block `rank`. */
__device__ inline unsigned place_of(unsigned rank, int k) {
    return rank * ONCE_PART + (threadIdx.x / 32) * (32 * ONCE_ITEMS) + k * 32 + threadIdx.x % 32;
}

/* Puts the entries of the cluster in the order of one digit, `bits` from bit `shift` on. Not LAST: they come back in key and row, in
 * this order. LAST: they go to keys and order. */
template <bool LAST>
__device__ inline void sort_digit(const OnceTask &p, OnceSorting &m, unsigned rank, unsigned (&key)[ONCE_ITEMS],
                                  unsigned (&row)[ONCE_ITEMS], int shift, int bits) {
    const unsigned all = 0xffffffffu, values = 1u << bits, mask = values - 1;
    const unsigned thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    unsigned before[ONCE_ITEMS]; /* entries of the warp before this one with its digit */
    for (unsigned d = lane; d < values; d += 32) m.within[warp][d] = 0;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < ONCE_ITEMS; k++) {
        const bool here = place_of(rank, k) < p.rows;
        const unsigned digit = key[k] >> shift & mask;
        const unsigned peers = __match_any_sync(all, here ? digit : ~0u), earlier = peers & ((1u << lane) - 1);
        before[k] = here ? m.within[warp][digit] + __popc(earlier) : 0;
        __syncwarp();
        if (here && !earlier) m.within[warp][digit] = (uint16_t)(m.within[warp][digit] + __popc(peers));
        __syncwarp();
    }
    __syncthreads();                              /* every warp has counted */
    unsigned mine = 0, total = 0, of_earlier = 0; /* of digit `thread`: in this block, in all, in the blocks before */
    if (thread < values) {
#pragma unroll 8
        for (int w = 0; w < ONCE_WARPS; w++) {
            const unsigned n = m.within[w][thread];
            m.within[w][thread] = (uint16_t)mine;
            mine += n;
        }
        m.count[thread] = mine;
    }
    xt_cluster_sync(); /* every block has counted */
    if (thread < values) {
#pragma unroll
        for (unsigned r = 0; r < ONCE_CLUSTER; r++) {
            const unsigned n = xt_shared_of(m.count, r)[thread];
            total += n;
            of_earlier += r < rank ? n : 0;
        }
    }
    unsigned all_before = total, mine_before = mine; /* of smaller digits; inclusive sums over the warp first */
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const unsigned a = __shfl_up_sync(all, all_before, step), b = __shfl_up_sync(all, mine_before, step);
        if (lane >= step) all_before += a, mine_before += b;
    }
    if (lane == 31) m.of_warp[0][warp] = all_before, m.of_warp[1][warp] = mine_before;
    __syncthreads(); /* every warp has its sums */
    all_before += xt_warp_sum(lane < warp ? m.of_warp[0][lane] : 0u) - total;
    mine_before += xt_warp_sum(lane < warp ? m.of_warp[1][lane] : 0u) - mine;
    if (thread < values) {
        m.start[thread] = mine_before;
        m.shift[thread] = all_before + of_earlier - mine_before;
    }
    __syncthreads(); /* start and shift are there */
#pragma unroll
    for (int k = 0; k < ONCE_ITEMS; k++) {
        const unsigned digit = key[k] >> shift & mask;
        if (place_of(rank, k) < p.rows) m.mine[m.start[digit] + m.within[warp][digit] + before[k]] = make_uint2(key[k], row[k]);
    }
    __syncthreads(); /* the block's entries are in order */
    const unsigned first = rank * ONCE_PART, here = p.rows <= first ? 0 : min(p.rows - first, (unsigned)ONCE_PART);
    for (unsigned i = thread; i < here; i += ONCE_THREADS) {
        const uint2 entry = m.mine[i];
        const unsigned place = i + m.shift[entry.x >> shift & mask];
        if constexpr (LAST) p.keys[place] = entry.x, p.order[place] = entry.y;
        else xt_shared_of(m.next, place / ONCE_PART)[place % ONCE_PART] = entry;
    }
    xt_cluster_sync(); /* all entries have come, and no block reads another's counts any more */
    if constexpr (!LAST) {
#pragma unroll
        for (int k = 0; k < ONCE_ITEMS; k++) {
            if (place_of(rank, k) >= p.rows) continue;
            const uint2 entry = m.next[place_of(0, k)];
            key[k] = entry.x;
            row[k] = entry.y;
        }
    }
}

/* The rows of dweight in todo [many]: (old +) 0 + a row of dy. Every thread takes pieces of 16 bytes in turns. */
template <typename T, bool ACCUMULATE> __device__ inline void write_rows(const OnceTask &p, const uint2 *todo, unsigned many) {
    constexpr int W = XT_WIDTH<T>, LOADS = 4;
    const T *dy = (const T *)p.dy;
    T *dweight = (T *)p.dweight;
    for (unsigned u = threadIdx.x; u < many * p.pieces; u += LOADS * ONCE_THREADS) {
        XtPiece<T, W> q[LOADS], old[LOADS];
        T *to[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            to[l] = nullptr;
            q[l] = xt_all<T, W>(xt_store<T>(0));
            const unsigned unit = u + l * ONCE_THREADS;
            if (unit >= many * p.pieces) continue;
            const unsigned at = xt_quotient(unit, p.by_pieces), column = (unit - at * p.pieces) * W;
            const uint2 job = todo[at];
            to[l] = dweight + (int64_t)job.x * p.cols + column;
            if (job.y != ABSENT) q[l] = xt_read<T, W>(dy + (int64_t)job.y * p.cols + column);
            if (ACCUMULATE) old[l] = xt_read<T, W>(to[l]);
        }
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            if (to[l] == nullptr) continue;
            XtVector<XtAcc<T>, W> sum = {};
            if constexpr (ACCUMULATE) sum = xt_load(old[l]);
            const XtVector<XtAcc<T>, W> value = xt_load(q[l]);
#pragma unroll
            for (int j = 0; j < W; j++) sum.at[j] += value.at[j];
            xt_write(to[l], xt_store<T>(sum));
        }
    }
}

/* The ids that this block owns. Ids come in groups of ONCE_NEIGHBOURS; group g belongs to owner g % owners. */
template <typename T, bool ACCUMULATE>
__device__ inline void write_owned(const OnceTask &p, const OnceOwning &m, unsigned rank, const unsigned (&key)[ONCE_ITEMS]) {
    const unsigned owners = p.by_owners.divisor,
                   first = (blockIdx.x / ONCE_CLUSTER - 1) * ONCE_CLUSTER; /* of this cluster's owners */
    const unsigned thread = threadIdx.x, lane = thread % 32;
    for (unsigned i = thread; i < p.slots; i += ONCE_THREADS) m.count[i] = 0;
    if (thread == 0) *m.many = 0;
    xt_cluster_sync(); /* all counters are 0 */
#pragma unroll
    for (int k = 0; k < ONCE_ITEMS; k++) {
        if (key[k] >= p.vocab) continue;
        const unsigned group = key[k] / ONCE_NEIGHBOURS, turn = xt_quotient(group, p.by_owners),
                       owner = group - turn * owners - first;
        if (owner >= ONCE_CLUSTER) continue; /* below `first`, too */
        const unsigned slot = turn * ONCE_NEIGHBOURS + key[k] % ONCE_NEIGHBOURS;
        atomicAdd(xt_shared_of(m.count, owner) + slot, 1u);
        xt_shared_of(m.row, owner)[slot] = place_of(rank, k);
    }
    xt_cluster_sync(); /* all ids are counted */
    for (unsigned begin = thread - lane; begin < p.slots; begin += ONCE_THREADS) {
        const unsigned slot = begin + lane;
        const unsigned id = (slot / ONCE_NEIGHBOURS * owners + first + rank) * ONCE_NEIGHBOURS + slot % ONCE_NEIGHBOURS;
        const unsigned n = slot < p.slots ? m.count[slot] : 2;
        const bool take = id < p.vocab && (n == 1 || (n == 0 && !ACCUMULATE));
        const unsigned taken = __ballot_sync(0xffffffffu, take);
        unsigned place = 0;
        if (lane == 0 && taken) place = atomicAdd(m.many, (unsigned)__popc(taken));
        place = __shfl_sync(0xffffffffu, place, 0) + __popc(taken & ((1u << lane) - 1));
        if (take) m.todo[place] = make_uint2(id, n ? m.row[slot] : ABSENT);
    }
    __syncthreads(); /* the list of rows is complete */
    write_rows<T, ACCUMULATE>(p, m.todo, *m.many);
}

/* Clusters of ONCE_CLUSTER blocks, of which the first sorts and the others own ids. */
template <typename T, bool ACCUMULATE>
__global__ void __launch_bounds__(ONCE_THREADS, 1)
    embedding_once_kernel(const __grid_constant__ OnceTask p, XtIndexReport *report) {
#ifdef XT_SM90A
    extern __shared__ __align__(16) unsigned char embedding_shared[];
    unsigned char *shared = embedding_shared;
    xt_wait_for_previous();
    xt_let_next_begin();
    const unsigned rank = xt_cluster_rank();
    unsigned key[ONCE_ITEMS];
#pragma unroll
    for (int k = 0; k < ONCE_ITEMS; k++) key[k] = place_of(rank, k) < p.rows ? key_of(p.ids, place_of(rank, k), p.vocab) : p.vocab;
    if (blockIdx.x >= ONCE_CLUSTER) {
        unsigned *rest = (unsigned *)(shared + ONCE_MANY);
        const OnceOwning owning = {(unsigned *)shared, rest, rest + p.slots, (uint2 *)(rest + 2 * p.slots)};
        return write_owned<T, ACCUMULATE>(p, owning, rank, key);
    }
    unsigned row[ONCE_ITEMS];
#pragma unroll
    for (int k = 0; k < ONCE_ITEMS; k++) {
        row[k] = place_of(rank, k);
        if (row[k] < p.rows && key[k] == p.vocab) report_unknown(p.ids, row[k], p.vocab, report);
    }
    OnceSorting &sorting = *(OnceSorting *)shared;
    sort_digit<false>(p, sorting, rank, key, row, 0, p.low);
    sort_digit<true>(p, sorting, rank, key, row, p.low, p.high);
#else
    XT_NO_SM90A();
#endif
}

/* Blocks that own ids, and the ids that one of them owns at most. */
static int64_t once_owners(int64_t vocab) {
    const int64_t most = xt_multiprocessors() / ONCE_CLUSTER - 3; /* leaves room where neighbours are missing */
    const int64_t wanted = xt_divide_up(vocab, 64 * ONCE_CLUSTER);
    return (wanted < most ? wanted : most) * ONCE_CLUSTER;
}
static int64_t once_slots(int64_t vocab) {
    return xt_divide_up(xt_divide_up(vocab, ONCE_NEIGHBOURS), once_owners(vocab)) * ONCE_NEIGHBOURS;
}

static bool once_fits(const XtEmbeddingBwd *p) {
    const int64_t row_bytes = p->cols * (int64_t)xt_dtype_size(p->dtype);
    return xt_built_for_sm90a() && xt_compute_capability() == 90 && xt_multiprocessors() >= ONCE_MULTIPROCESSORS &&
           xt_shared_limit() >= (int)sizeof(OnceSorting) && p->rows <= ONCE_ROWS && p->vocab > 0 && p->vocab >> 2 * DIGIT == 0 &&
           row_bytes > 0 && row_bytes % 16 == 0 && row_bytes < 1 << 20 && (uintptr_t)p->dy % 16 == 0 &&
           (uintptr_t)p->dweight % 16 == 0 && ONCE_MANY + once_slots(p->vocab) * ONCE_EACH <= sizeof(OnceSorting);
}

/* In place of sort_rows, where once_fits. */
template <typename T> static XtStatus sort_once(const XtEmbeddingBwd *p, XtScratch *scratch, Sorted *out) {
    const int64_t list = xt_divide_up(p->rows, 64) * 64;
    XT_CHECK(scratch->allocate((size_t)(2 * list) * sizeof(unsigned)));
    int bits = 0;
    while (p->vocab >> bits) bits++;
    const int64_t owners = once_owners(p->vocab);
    OnceTask task = {};
    task.dweight = p->dweight, task.dy = p->dy, task.ids = p->ids;
    task.keys = (unsigned *)scratch->data, task.order = task.keys + list;
    task.rows = (unsigned)p->rows, task.vocab = (unsigned)p->vocab, task.cols = p->cols;
    task.low = (bits + 1) / 2, task.high = bits - task.low;
    task.slots = (unsigned)once_slots(p->vocab);
    task.pieces = (unsigned)(p->cols * (int64_t)sizeof(T) / 16);
    task.by_owners = xt_divider((uint32_t)owners), task.by_pieces = xt_divider(task.pieces);
    auto kernel = p->accumulate ? embedding_once_kernel<T, true> : embedding_once_kernel<T, false>;
    const size_t shared = sizeof(OnceSorting);
    XT_CHECK(xt_allow_shared("embedding_bwd", kernel, (int)shared));
    xt_launch_early_clusters(kernel, ONCE_CLUSTER, (unsigned)(ONCE_CLUSTER + owners), ONCE_THREADS, shared, task,
                             xt_index_report());
    out->keys = task.keys;
    out->order = task.order;
    out->once_written = true;
    return XT_OK;
}
