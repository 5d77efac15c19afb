/* embedding.cu - rows of a table, looked up by id.
 *
 *     forward    out[r] = weight[ids[r]]
 *     backward   dweight[v] (+)= sum of dy[r] over the rows r with ids[r] == v
 *
 *     weight, dweight [vocab, cols]; ids [rows]; out, dy [rows, cols]
 *
 * Forward: a copy of bytes, in the widest unit (16 bytes to 1) that divides the row and both addresses. A warp copies CHUNK units
 * of one row and issues all its loads first. Reads and writes rows * cols * sizeof(T) bytes.
 *
 * Backward, in two steps. First a stable sort of (id, row) in two digits lists the rows of each id in row order. One launch counts
 * the first digit in each tile of the list, one places every entry by that digit and counts the second, one does the same by the
 * second; every block adds up the counts of all tiles for itself. Lists of more than MOST_TILES tiles go to a library's sort. A bit
 * for each row of dweight says whether its id occurs. More blocks of the last of these launches, which leaves most of the device idle,
 * write zeros to the rows whose ids do not occur.
 * Then the list is cut into runs of RUN entries. A warp walks a run for 32 vectors of columns, adds in ACC, and writes a row of
 * dweight when the id changes. If an id ends in the run after the one where it began, the first of the two warps finishes it. An id
 * that spans more runs leaves a partial row and its id in each: a shorter list of the same kind. The next launch sums that list, a
 * block for each id in it, whose warps take partial rows in turns. So a token that fills half the batch is summed by as many warps as a thousand rare ones, and if ids are rare that
 * launch finds nothing to do. Beyond MOST_RUNS runs the kernel that made the list of partial rows shortens it first. Reads dy once
 * and writes dweight once.
 *
 * Deterministic: the place of every entry depends on the ids alone, and so does the tree of every sum: the rows of a run in order,
 * then every eighth run in order, then those eight. Atomics only count and set bits.
 */
#include "common/cuda.cuh"
#include "contract/layers.h"

#include <cub/device/device_radix_sort.cuh>

static const int WARPS = 8;   /* of a block */
static const int CHUNK = 128; /* units copied by a warp */
static const int RUN = 32;    /* entries that a warp sums, one a lane */

static const int TILE = 1024, MOST_TILES = 256; /* of our own sort: entries of a block, and the most blocks */
static const int DIGIT = 10;                    /* bits of a digit at most */
static const int64_t MOST_RUNS = 4096;          /* up to so many, the last launch adds the partial rows */
static const int LOOK = 8;                      /* runs that a block of that launch looks at */

/* ---- forward ----------------------------------------------------------------------------------------------------------------- */

/* Grid over rows * chunks of a row, a warp each. U is a unit; out [rows, units], weight [vocab, units]. */
template <typename U>
__global__ void __launch_bounds__(32 * WARPS)
    embedding_fwd_kernel(U *out, const U *weight, const int64_t *ids, int64_t rows, int64_t units, int64_t vocab, int64_t chunks,
                         XtIndexReport *report) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t item = (int64_t)blockIdx.x * WARPS + warp; item < rows * chunks; item += (int64_t)gridDim.x * WARPS) {
        const int64_t row = item / chunks, chunk = item - row * chunks, id = ids[row];
        const bool known = id >= 0 && id < vocab;
        if (!known && chunk == 0 && lane == 0) xt_report_index(report, XT_INDEX_EMBEDDING, row, id, vocab);
        const U *from = weight + (known ? id : 0) * units; /* [units] */
        U *to = out + row * units;                         /* [units] */
        const int64_t first = chunk * CHUNK + lane;
        U q[CHUNK / 32];
#pragma unroll
        for (int u = 0; u < CHUNK / 32; u++) {
            q[u] = U();
            if (known && first + u * 32 < units) q[u] = from[first + u * 32];
        }
#pragma unroll
        for (int u = 0; u < CHUNK / 32; u++)
            if (first + u * 32 < units) to[first + u * 32] = q[u];
    }
}

template <typename U> static void copy_rows(const XtEmbeddingFwd *p, int64_t row_bytes) {
    const int64_t units = row_bytes / (int64_t)sizeof(U);
    const int64_t chunks = units ? xt_divide_up(units, CHUNK) : 1; /* checks the ids even when there is nothing to copy */
    xt_launch(embedding_fwd_kernel<U>, xt_blocks(p->rows * chunks, WARPS), 32 * WARPS, 0, (U *)p->out, (const U *)p->weight, p->ids,
              p->rows, units, p->vocab, chunks, xt_index_report());
}

XtStatus xt_cuda_embedding_fwd(const XtEmbeddingFwd *p) {
    if (p->rows == 0) return XT_OK;
    const int64_t bytes = p->cols * (int64_t)xt_dtype_size(p->dtype); /* of a row */
    const uintptr_t common = (uintptr_t)p->out | (uintptr_t)p->weight | (uintptr_t)bytes;
    if (common % 16 == 0) copy_rows<uint4>(p, bytes);
    else if (common % 8 == 0) copy_rows<uint2>(p, bytes);
    else if (common % 4 == 0) copy_rows<unsigned>(p, bytes);
    else if (common % 2 == 0) copy_rows<unsigned short>(p, bytes);
    else copy_rows<unsigned char>(p, bytes);
    return xt_launched("embedding_fwd", p->rows, p->cols, p->vocab);
}

/* ---- backward: the list of rows, by id --------------------------------------------------------------------------------------- */

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
        xt_launch(embedding_count_kernel, blocks, 32 * WARPS, 0, counts, present, words + high_counts, p->ids, p->rows, p->vocab,
                  low, xt_index_report());
        if (p->vocab > 0 && p->cols > 0) {
            xt_launch(embedding_sort_kernel<true>, blocks, 32 * WARPS, 0, memory, memory + list, second, present, p->ids,
                      (const unsigned *)NULL, (const unsigned *)NULL, counts, p->rows, p->vocab, tiles, 0, low, high, Absent());
            xt_launch(embedding_sort_kernel<false>, blocks + clearing, 32 * WARPS, 0, memory + 2 * list, memory + 3 * list,
                      (unsigned *)NULL, (unsigned *)NULL, (const int64_t *)NULL, memory, memory + list, second, p->rows, p->vocab,
                      tiles, low, high, 0, absent);
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

/* ---- backward: sums ---------------------------------------------------------------------------------------------------------- */

/* to[0 .. W) = sum, rounded to S. */
template <typename S, typename A, int W> __device__ inline void store_sum(S *to, const XtVector<A, W> &sum) {
    constexpr int N = W < XT_WIDTH<S> ? W : XT_WIDTH<S>;
#pragma unroll
    for (int k = 0; k < W; k += N) {
        XtVector<XtAcc<S>, N> part;
#pragma unroll
        for (int j = 0; j < N; j++) part.at[j] = sum.at[k + j];
        xt_write(to + k, xt_store<S>(part));
    }
}

/* One level. Grid over runs * chunks of 32 vectors of W columns, a warp each.
 * Entry e of the list is the row values[order ? order[e] : e] (values [.., cols]) and belongs to keys[e]; keys [entries], equal
 * ones together; a key of `vocab` means no entry. Of run r, parts[2r] gets the sum for an id that came from the run before,
 * parts[2r + 1] for one that goes on into the next: parts [2 * runs, cols], part_keys [2 * runs]. All other sums are complete. */
template <typename In, typename T, int W, bool ACCUMULATE>
__global__ void __launch_bounds__(32 * WARPS, 3)
    embedding_bwd_kernel(T *dweight, XtAcc<T> *parts, unsigned *part_keys, const In *values, const unsigned *keys,
                         const unsigned *order, int64_t entries, int64_t cols, unsigned vocab) {
    typedef XtAcc<T> A;
    constexpr int GROUP = ACCUMULATE ? 4 : 8; /* entries whose loads are in flight at once */
    const unsigned all = 0xffffffffu;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t runs = (entries + RUN - 1) / RUN, chunks = (cols + 32 * W - 1) / (32 * W);
    for (int64_t item = (int64_t)blockIdx.x * WARPS + warp; item < runs * chunks; item += (int64_t)gridDim.x * WARPS) {
        const int64_t run = item / chunks, chunk = item - run * chunks, begin = run * RUN, column = (chunk * 32 + lane) * W;
        const bool inside = column < cols;
        const In *source = values + (inside ? column : 0); /* rows of cols; lanes outside read column 0 on and write nothing */

        /* This run's entries, one a lane, and the next run's. */
        const int64_t here = begin + lane, there = here + RUN;
        unsigned key = here < entries ? keys[here] : vocab, next_key = there < entries ? keys[there] : vocab;
        unsigned row = order && here < entries ? order[here] : (unsigned)here;
        unsigned next_row = order && there < entries ? order[there] : (unsigned)there;
        const unsigned before = begin > 0 ? keys[begin - 1] : vocab, before_last = begin > RUN ? keys[begin - RUN - 1] : vocab;
        const unsigned after_next = begin + 2 * RUN < entries ? keys[begin + 2 * RUN] : vocab;

        /* The same as bits, equal in all lanes. */
        const unsigned after = __shfl_sync(all, next_key, 0);
        unsigned left = __shfl_up_sync(all, key, 1), right = __shfl_down_sync(all, key, 1);
        if (lane == 0) left = before;
        if (lane == RUN - 1) right = after;
        unsigned live = __ballot_sync(all, key < vocab);
        unsigned starts = __ballot_sync(all, key < vocab && key != left);
        unsigned ends = __ballot_sync(all, key < vocab && key != right);
        const unsigned first_key = __shfl_sync(all, key, 0), last_key = __shfl_sync(all, key, RUN - 1);
        bool came = (live & ~starts) & 1u, goes = (live & ~ends) >> (RUN - 1) & 1u;

        /* Ids in exactly two runs: the warp of the first run finishes them. That is the warp before this one for the first id,
         * this warp for the last id. */
        const unsigned of_first = __ballot_sync(all, key == first_key), of_last = __ballot_sync(all, next_key == last_key);
        if (came && before_last != first_key && after != first_key) {
            live &= ~of_first;
            came = false;
        }
        unsigned next_live = 0;
        if (goes && before != last_key && after_next != last_key) {
            next_live = of_last;
            goes = false;
        }
        if (runs > 1 && chunk == 0 && lane == 0) {
            part_keys[2 * run] = came ? first_key : vocab;
            part_keys[2 * run + 1] = goes ? last_key : vocab;
        }

        bool open = came; /* the id now summed came from the run before */
        XtVector<A, W> sum;
#pragma unroll
        for (int j = 0; j < W; j++) sum.at[j] = 0;
#pragma unroll 1
        while (live) {
#pragma unroll 1
            for (int e = 0; e < RUN; e += GROUP) {
                if ((live >> e & ((1u << GROUP) - 1)) == 0) continue;
                XtPiece<In, W> q[GROUP];
                XtPiece<T, W> old[GROUP];
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    const int64_t from = __shfl_sync(all, row, e + u), to = __shfl_sync(all, key, e + u);
                    if (live >> (e + u) & 1u) q[u] = xt_read<In, W>(source + from * cols);
                    if (ACCUMULATE && (live & starts) >> (e + u) & 1u)
                        old[u] = xt_read<T, W>(dweight + to * cols + (inside ? column : 0));
                }
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    if (!(live >> (e + u) & 1u)) continue;
                    if (starts >> (e + u) & 1u) {
                        XtVector<A, W> zero = {};
                        if constexpr (ACCUMULATE) sum = xt_load(old[u]);
                        else sum = zero;
                    }
                    const XtVector<XtAcc<In>, W> value = xt_load(q[u]);
#pragma unroll
                    for (int j = 0; j < W; j++) sum.at[j] += value.at[j];
                    if (!(ends >> (e + u) & 1u)) continue;
                    const int64_t to = __shfl_sync(all, key, e + u);
                    if (inside && open) store_sum<A>(parts + 2 * run * cols + column, sum);
                    else if (inside) store_sum<T>(dweight + to * cols + column, sum);
                    open = false;
                }
            }
            live = next_live; /* the next run's entries of this id, the low bits; the highest ends the id */
            ends = next_live & ~(next_live >> 1);
            starts = next_live = 0;
            key = next_key;
            row = next_row;
        }
        if (!goes || !inside) continue;
        store_sum<A>(parts + (2 * run + !open) * cols + column, sum);
        if (!open) continue;
        /* The whole run is one id. The second part only continues the id into the next run: its sum is 0. */
#pragma unroll
        for (int j = 0; j < W; j++) sum.at[j] = 0;
        store_sum<A>(parts + (2 * run + 1) * cols + column, sum);
    }
}

/* The last level: of each id with partial rows, parts [2 * runs, cols] with part_keys [2 * runs] as above, the sum. Grid over
 * runs, LOOK of them a block, and over chunks of 32 vectors of W columns. A block is WARPS warps. */
template <typename T, int W>
__global__ void __launch_bounds__(32 * WARPS) embedding_join_kernel(T *dweight, const XtAcc<T> *parts, const unsigned *part_keys,
                                                                    int64_t runs, int64_t cols, unsigned vocab) {
    typedef XtAcc<T> A;
    constexpr int GROUP = 8; /* partial rows whose loads are in flight at once */
    const unsigned all = 0xffffffffu;
    __shared__ XtVector<A, W> tree[WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t begin = (int64_t)blockIdx.x * LOOK; begin < runs; begin += (int64_t)gridDim.x * LOOK) {
        /* Runs where an id has its first partial row: it goes on, and did not come from the run before. Equal in all warps. */
        const bool look = lane < LOOK && begin + lane < runs;
        const unsigned mine = look ? part_keys[2 * (begin + lane) + 1] : vocab;
        unsigned starts = __ballot_sync(all, mine != vocab && part_keys[2 * (begin + lane)] != mine);
        for (; starts; starts &= starts - 1) {
            const int at = __ffs((int)starts) - 1;
            const unsigned key = __shfl_sync(all, mine, at);
            const int64_t first = begin + at;
            /* The id came into runs first + 1 .. first + more. more is 1 at least; a search finds it. */
            int64_t more = 1, beyond = runs - first;
            while (beyond - more > 1) {
                const int64_t step = (beyond - more + 31) / 32, probe = more + (lane + 1) * step;
                const int inside = __popc(__ballot_sync(all, probe < beyond && part_keys[2 * (first + probe)] == key));
                more += inside * step;
                if (beyond - more > step) beyond = more + step;
            }
            for (int64_t chunk = blockIdx.y; chunk * 32 * W < cols; chunk += gridDim.y) {
                const int64_t column = (chunk * 32 + lane) * W;
                XtVector<A, W> sum = {};
                for (int64_t j = warp; column < cols && j <= more; j += GROUP * WARPS) {
                    XtPiece<A, W> q[GROUP];
#pragma unroll
                    for (int u = 0; u < GROUP; u++) {
                        const int64_t part =
                            j + u * WARPS; /* the first is the second part of its run, the others are first parts */
                        if (part <= more) q[u] = xt_read<A, W>(parts + (2 * (first + part) + (part == 0)) * cols + column);
                    }
#pragma unroll
                    for (int u = 0; u < GROUP; u++) {
                        if (j + u * WARPS > more) break;
                        const XtVector<A, W> value = xt_load(q[u]);
#pragma unroll
                        for (int e = 0; e < W; e++) sum.at[e] += value.at[e];
                    }
                }
                tree[warp][lane] = sum;
                __syncthreads(); /* every warp has written */
                if (warp == 0 && column < cols) {
#pragma unroll
                    for (int w = 1; w < WARPS; w++)
#pragma unroll
                        for (int e = 0; e < W; e++) sum.at[e] += tree[w][lane].at[e];
                    store_sum<T>(dweight + key * cols + column, sum);
                }
                __syncthreads(); /* warp 0 has read: the next chunk may overwrite */
            }
        }
    }
}

template <typename In, typename T, int W, bool ACCUMULATE>
static void sum_level(const XtEmbeddingBwd *p, XtAcc<T> *parts, unsigned *part_keys, const In *values, const Sorted *list,
                      int64_t entries) {
    const int64_t items = xt_divide_up(entries, RUN) * xt_divide_up(p->cols, 32 * W);
    xt_launch(embedding_bwd_kernel<In, T, W, ACCUMULATE>, xt_blocks(items, WARPS), 32 * WARPS, 0, (T *)p->dweight, parts, part_keys,
              values, list->keys, list->order, entries, p->cols, (unsigned)p->vocab);
}

/* All levels. W elements of T and OF_PARTS of ACC at a time. To accumulate, the first level adds the old dweight where an id
 * starts. */
template <typename T, int W, int OF_PARTS> static XtStatus sum_rows(const XtEmbeddingBwd *p, const Sorted *sorted) {
    typedef XtAcc<T> A;
    int64_t runs = xt_divide_up(p->rows, RUN), all_parts = 2 * runs;
    for (int64_t r = runs; r > MOST_RUNS;) all_parts += 2 * (r = xt_divide_up(2 * r, RUN));
    XtScratch parts_scratch, keys_scratch;
    XtStatus status = XT_OK;
    if (runs > 1) status = parts_scratch.allocate((size_t)(all_parts * p->cols) * sizeof(A));
    if (status == XT_OK && runs > 1) status = keys_scratch.allocate((size_t)all_parts * sizeof(unsigned));
    if (status != XT_OK) return status;
    A *parts = (A *)parts_scratch.data;
    unsigned *part_keys = (unsigned *)keys_scratch.data;
    const T *dy = (const T *)p->dy;
    if (p->accumulate) sum_level<T, T, W, true>(p, parts, part_keys, dy, sorted, p->rows);
    else sum_level<T, T, W, false>(p, parts, part_keys, dy, sorted, p->rows);
    while (runs > MOST_RUNS) {
        const A *values = parts;
        const Sorted list = {part_keys, NULL};
        const int64_t entries = 2 * runs;
        parts += entries * p->cols;
        part_keys += entries;
        runs = xt_divide_up(entries, RUN);
        sum_level<A, T, OF_PARTS, false>(p, parts, part_keys, values, &list, entries);
    }
    if (runs > 1) {
        const int64_t chunks = xt_divide_up(p->cols, 32 * OF_PARTS);
        const dim3 grid(xt_blocks(runs, LOOK), (unsigned)(chunks < 65535 ? chunks : 65535));
        xt_launch(embedding_join_kernel<T, OF_PARTS>, grid, 32 * WARPS, 0, (T *)p->dweight, parts, part_keys, runs, p->cols,
                  (unsigned)p->vocab);
    }
    return XT_OK;
}

XtStatus xt_cuda_embedding_bwd(const XtEmbeddingBwd *p) {
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        const size_t nbytes = (size_t)(p->vocab * p->cols) * sizeof(T);
        if (p->rows == 0) {
            if (p->accumulate || nbytes == 0) return XT_OK;
            return xt_cuda_error("embedding_bwd", cudaMemsetAsync(p->dweight, 0, nbytes, xt_stream()));
        }
        if (p->rows > UINT32_MAX || p->vocab > UINT32_MAX)
            return xt_error(XT_NOT_IMPLEMENTED,
                            "embedding: the gradient takes fewer than 2^32 ids and rows of weight, got %lld and %lld",
                            (long long)p->rows, (long long)p->vocab);
        XtScratch scratch;
        Sorted sorted;
        XtStatus status = sort_rows(p, &scratch, &sorted);
        if (status == XT_OK && nbytes) {
            constexpr int W = XT_WIDTH<T>, OF_PARTS = XT_WIDTH<XtAcc<T>>;
            const bool wide = xt_aligned<T>(p->cols, p->cols, p->dweight, p->dy);
            status = wide ? sum_rows<T, W, OF_PARTS>(p, &sorted) : sum_rows<T, 1, 1>(p, &sorted);
        }
        return status == XT_OK ? xt_launched("embedding_bwd", p->rows, p->cols, p->vocab) : status;
    });
}
