/* embedding_sort.cuh - the rows of each id, for the backward of embedding.cu: a stable sort of (id, row) by id.
 *
 * Two digits. One launch counts the first digit in each tile of the list, one places every entry by that digit and counts the second,
 * one does the same by the second; every block adds up the counts of all tiles for itself. Lists of more than MOST_TILES tiles go to a
 * library's sort. A bit for each row of dweight says whether its id occurs. More blocks of the last of these launches, which leaves most
 * of the device idle, write zeros to the rows whose ids do not occur.
 *
 * Deterministic: the place of every entry depends on the ids alone. Atomics only count and set bits.
 */
#pragma once

#include "arch/overlap.cuh"
#include "common/cuda.cuh"
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
    return XT_OK;
}
