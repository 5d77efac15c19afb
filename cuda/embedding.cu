/* embedding.cu - rows of a table, looked up by id.
 *
 *     forward    out[r] = weight[ids[r]]
 *     backward   dweight[v] (+)= sum of dy[r] over the rows r with ids[r] == v
 *
 *     weight, dweight [vocab, cols]; ids [rows]; out, dy [rows, cols]
 *
 * Forward: bytes are bytes, so rows are copied in the widest unit (16 to 2 bytes) that divides the row and both addresses. A warp
 * copies CHUNK units of one row with all of its loads under way at once. Reads and writes rows * cols * sizeof(T) bytes.
 *
 * Backward: a stable radix sort of (id, row) lists the rows of each id in row order; it looks at the bits that ids below vocab have.
 * The list is cut into runs of RUN entries; a warp walks a run for 32 vectors of columns, adding in ACC, and writes a row of dweight
 * when the id changes. An id that begins in one run and ends in the next is finished by the first of the two warps. One that spans
 * more leaves a partial row in each run, with its id: a shorter list of the same kind, which the same kernel sums in the next launch,
 * until one run is left. So a token that fills half the batch is summed by as many warps as a thousand rare ones, and 65536 rows take
 * four launches, of which all but the first find nothing to do when ids are rare. More warps of the first launch write zeros to the
 * rows of dweight whose ids do not occur, which they look up in the sorted list. Reads dy once and writes dweight once.
 *
 * Deterministic: runs depend on the ids alone, and every sum is made in the order of the rows. No atomics.
 */
#include "cuda.cuh"

#include <cub/device/device_radix_sort.cuh>

static const int WARPS = 8;   /* of a block */
static const int CHUNK = 128; /* units copied by a warp */
static const int RUN = 32;    /* entries of a list summed by a warp: one a lane */

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
    const int64_t chunks = units ? xt_divide_up(units, CHUNK) : 1; /* ids are looked at even when there is nothing to copy */
    xt_launch(embedding_fwd_kernel<U>, xt_blocks(p->rows * chunks, WARPS), 32 * WARPS, 0, (U *)p->out, (const U *)p->weight, p->ids,
              p->rows, units, p->vocab, chunks, xt_index_report());
}

XtStatus xt_cuda_embedding_fwd(const XtEmbeddingFwd *p) {
    if (p->rows == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        const int64_t bytes = p->cols * (int64_t)sizeof zero; /* of a row */
        const uintptr_t common = (uintptr_t)p->out | (uintptr_t)p->weight | (uintptr_t)bytes;
        if (common % 16 == 0) copy_rows<uint4>(p, bytes);
        else if (common % 8 == 0) copy_rows<uint2>(p, bytes);
        else if (common % 4 == 0) copy_rows<unsigned>(p, bytes);
        else copy_rows<unsigned short>(p, bytes);
        return xt_launched("embedding_fwd", p->rows, p->cols, p->vocab);
    });
}

/* ---- backward: the list of rows, by id --------------------------------------------------------------------------------------- */

/* keys [rows] = ids, or `vocab` for an id out of range, which sorts last and is skipped; order [rows] = 0, 1, 2, ... */
__global__ void embedding_keys_kernel(unsigned *keys, unsigned *order, const int64_t *ids, int64_t rows, int64_t vocab,
                                      XtIndexReport *report) {
    for (int64_t r = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; r < rows; r += (int64_t)gridDim.x * blockDim.x) {
        const int64_t id = ids[r];
        const bool known = id >= 0 && id < vocab;
        if (!known) xt_report_index(report, XT_INDEX_EMBEDDING, r, id, vocab);
        keys[r] = (unsigned)(known ? id : vocab);
        order[r] = (unsigned)r;
    }
}

typedef struct Sorted {
    const unsigned *keys, *order; /* [rows]: the rows of equal keys stand together, in row order */
} Sorted;

/* The scratch holds two buffers of keys and two of rows, each [rows], and CUB's own. */
static XtStatus sort_rows(const XtEmbeddingBwd *p, XtScratch *scratch, Sorted *out) {
    const size_t list = (size_t)xt_divide_up(p->rows * (int64_t)sizeof(unsigned), 256) * 256;
    int bits = 0;
    while (bits < 32 && p->vocab >> bits) bits++;
    size_t temporary = 0;
    cub::DoubleBuffer<unsigned> keys(NULL, NULL), order(NULL, NULL);
    cudaError_t error = cub::DeviceRadixSort::SortPairs(NULL, temporary, keys, order, (unsigned)p->rows, 0, bits, xt_stream());
    if (error != cudaSuccess) return xt_cuda_error("embedding_bwd", error);
    XtStatus status = scratch->allocate(4 * list + temporary);
    if (status != XT_OK) return status;
    char *memory = (char *)scratch->data;
    keys = cub::DoubleBuffer<unsigned>((unsigned *)memory, (unsigned *)(memory + list));
    order = cub::DoubleBuffer<unsigned>((unsigned *)(memory + 2 * list), (unsigned *)(memory + 3 * list));
    xt_launch(embedding_keys_kernel, xt_blocks(p->rows, 256), 256, 0, keys.Current(), order.Current(), p->ids, p->rows, p->vocab,
              xt_index_report());
    if (p->vocab > 0 && p->cols > 0) {
        error = cub::DeviceRadixSort::SortPairs(memory + 4 * list, temporary, keys, order, (unsigned)p->rows, 0, bits, xt_stream());
        if (error != cudaSuccess) return xt_cuda_error("embedding_bwd", error);
        xt_count_launch(); /* one for all of the sort's */
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

/* Zeros to the rows [32 tile, 32 tile + 32) of dweight [vocab, cols], in W columns a lane, unless their ids are among keys [entries],
 * which are sorted. */
template <typename T, int W>
__device__ inline void clear_absent(T *dweight, const unsigned *keys, int64_t entries, int64_t cols, unsigned vocab, int64_t tile,
                                    int64_t column) {
    const unsigned id = (unsigned)(tile * 32) + threadIdx.x % 32;
    int64_t low = 0, high = entries; /* keys before low are less than id, those from high on are not */
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (keys[middle] < id) low = middle + 1;
        else high = middle;
    }
    unsigned absent = __ballot_sync(0xffffffffu, id < vocab && (low == entries || keys[low] != id));
    for (; absent && column < cols; absent &= absent - 1)
        xt_write(dweight + (tile * 32 + __ffs((int)absent) - 1) * cols + column, xt_all<T, W>(xt_store<T>(0)));
}

/* One level. Grid over (runs + tiles) * chunks of 32 vectors of W columns, a warp each; tiles of 32 rows of dweight to clear.
 * Entry e of the list is the row values[order ? order[e] : e] (values [.., cols]) and belongs to keys[e]; keys [entries], equal
 * ones together; a key of `vocab` means no entry. Of run r, parts[2r] gets the sum for an id that came from the run before,
 * parts[2r + 1] for one that goes on into the next: parts [2 * runs, cols], part_keys [2 * runs]. All other sums are complete. */
template <typename In, typename T, int W, bool ACCUMULATE>
__global__ void __launch_bounds__(32 * WARPS, 3)
    embedding_bwd_kernel(T *dweight, XtAcc<T> *parts, unsigned *part_keys, const In *values, const unsigned *keys,
                         const unsigned *order, int64_t entries, int64_t cols, unsigned vocab, int64_t tiles) {
    typedef XtAcc<T> A;
    constexpr int GROUP = ACCUMULATE ? 4 : 8; /* entries whose loads are under way at once */
    const unsigned all = 0xffffffffu;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t runs = (entries + RUN - 1) / RUN, chunks = (cols + 32 * W - 1) / (32 * W);
    for (int64_t item = (int64_t)blockIdx.x * WARPS + warp; item < (runs + tiles) * chunks; item += (int64_t)gridDim.x * WARPS) {
        const int64_t run = item / chunks, chunk = item - run * chunks, begin = run * RUN, column = (chunk * 32 + lane) * W;
        if (run >= runs) {
            clear_absent<T, W>(dweight, keys, entries, cols, vocab, run - runs, column);
            continue;
        }
        const bool inside = column < cols;
        const In *source = values + (inside ? column : 0); /* rows of cols; lanes outside read what is there and write nothing */

        /* This run's entries, one a lane, and the next run's. */
        const int64_t here = begin + lane, there = here + RUN;
        unsigned key = here < entries ? keys[here] : vocab, next_key = there < entries ? keys[there] : vocab;
        unsigned row = order && here < entries ? order[here] : (unsigned)here;
        unsigned next_row = order && there < entries ? order[there] : (unsigned)there;
        const unsigned before = begin > 0 ? keys[begin - 1] : vocab, before_last = begin > RUN ? keys[begin - RUN - 1] : vocab;
        const unsigned after_next = begin + 2 * RUN < entries ? keys[begin + 2 * RUN] : vocab;

        /* The same as bits, alike in all lanes. */
        const unsigned after = __shfl_sync(all, next_key, 0);
        unsigned left = __shfl_up_sync(all, key, 1), right = __shfl_down_sync(all, key, 1);
        if (lane == 0) left = before;
        if (lane == RUN - 1) right = after;
        unsigned live = __ballot_sync(all, key < vocab);
        unsigned starts = __ballot_sync(all, key < vocab && key != left);
        unsigned ends = __ballot_sync(all, key < vocab && key != right);
        const unsigned first_key = __shfl_sync(all, key, 0), last_key = __shfl_sync(all, key, RUN - 1);
        bool came = (live & ~starts) & 1u, goes = (live & ~ends) >> (RUN - 1) & 1u;

        /* Ids in two runs and no more: the first id may be the last warp's to finish, the last id may be this one's. */
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
            live = next_live; /* the low bits; the highest of them ends the id */
            ends = next_live & ~(next_live >> 1);
            starts = next_live = 0;
            key = next_key;
            row = next_row;
        }
        if (!goes || !inside) continue;
        store_sum<A>(parts + (2 * run + !open) * cols + column, sum);
        if (!open) continue;
        /* The whole run is one id. The other part joins it to the next run; there is nothing left for it to add. */
#pragma unroll
        for (int j = 0; j < W; j++) sum.at[j] = 0;
        store_sum<A>(parts + (2 * run + 1) * cols + column, sum);
    }
}

template <typename In, typename T, int W, bool ACCUMULATE>
static void sum_level(const XtEmbeddingBwd *p, XtAcc<T> *parts, unsigned *part_keys, const In *values, const unsigned *keys,
                      const unsigned *order, int64_t entries, int64_t tiles) {
    const int64_t items = (xt_divide_up(entries, RUN) + tiles) * xt_divide_up(p->cols, 32 * W);
    xt_launch(embedding_bwd_kernel<In, T, W, ACCUMULATE>, xt_blocks(items, WARPS), 32 * WARPS, 0, (T *)p->dweight, parts, part_keys,
              values, keys, order, entries, p->cols, (unsigned)p->vocab, tiles);
}

/* All levels. W elements of T and OF_PARTS of ACC at a time. What was in dweight is added where an id starts, and that is seen by the
 * first level. */
template <typename T, int W, int OF_PARTS> static XtStatus sum_rows(const XtEmbeddingBwd *p, const Sorted *sorted) {
    typedef XtAcc<T> A;
    int64_t runs = xt_divide_up(p->rows, RUN), all_parts = 0;
    for (int64_t r = runs; r > 1; r = xt_divide_up(2 * r, RUN)) all_parts += 2 * r;
    XtScratch parts_scratch, keys_scratch;
    XtStatus status = parts_scratch.allocate((size_t)(all_parts * p->cols) * sizeof(A));
    if (status == XT_OK) status = keys_scratch.allocate((size_t)all_parts * sizeof(unsigned));
    if (status != XT_OK) return status;
    A *parts = (A *)parts_scratch.data;
    unsigned *part_keys = (unsigned *)keys_scratch.data;
    const T *dy = (const T *)p->dy;
    if (p->accumulate) sum_level<T, T, W, true>(p, parts, part_keys, dy, sorted->keys, sorted->order, p->rows, 0);
    else sum_level<T, T, W, false>(p, parts, part_keys, dy, sorted->keys, sorted->order, p->rows, xt_divide_up(p->vocab, 32));
    while (runs > 1) {
        const A *values = parts;
        const unsigned *keys = part_keys;
        const int64_t entries = 2 * runs;
        parts += entries * p->cols;
        part_keys += entries;
        runs = xt_divide_up(entries, RUN);
        sum_level<A, T, OF_PARTS, false>(p, parts, part_keys, values, keys, NULL, entries, 0);
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
