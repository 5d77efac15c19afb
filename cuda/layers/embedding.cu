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
 * Backward, in two steps. First a stable sort of (id, row) lists the rows of each id in row order (embedding_sort.cuh). It also writes
 * zeros to the rows whose ids do not occur and, on compute capability 9.0, the rows of ids that occur once.
 * Then the list is cut into runs of RUN entries. A warp walks a run for 32 vectors of columns, adds in ACC, and writes a row of
 * dweight when the id changes. If an id ends in the run after the one where it began, the first of the two warps finishes it. An id
 * that spans more runs leaves a partial row and its id in each: a shorter list of the same kind. The next launch sums that list, a
 * block for each id in it, whose warps take partial rows in turns. So a token that fills half the batch is summed by as many warps as a
 * thousand rare ones, and if ids are rare that launch finds nothing to do. Beyond MOST_RUNS runs the kernel that made the list of
 * partial rows shortens it first. Reads dy once and writes dweight once. The launches overlap: each begins while the one before ends.
 *
 * Deterministic: the list depends on the ids alone, and so does the tree of every sum: the rows of a run in order, then every eighth run
 * in order, then those eight.
 */
#include "embedding_sort.cuh"

static const int CHUNK = 128;          /* units copied by a warp */
static const int RUN = 32;             /* entries that a warp sums, one a lane */
static const int64_t MOST_RUNS = 4096; /* up to so many, the last launch adds the partial rows */
static const int LOOK = 8;             /* runs that a block of that launch looks at */
static const int JOINING_BLOCKS = 4;   /* of that launch, on a multiprocessor */

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
 * parts[2r + 1] for one that goes on into the next: parts [2 * runs, cols], part_keys [2 * runs]. All other sums are complete.
 * once_written: keys that occur once are left out. */
template <typename In, typename T, int W, bool ACCUMULATE>
__global__ void __launch_bounds__(32 * WARPS, 3)
    embedding_bwd_kernel(T *dweight, XtAcc<T> *parts, unsigned *part_keys, const In *values, const unsigned *keys,
                         const unsigned *order, int64_t entries, int64_t cols, unsigned vocab, bool once_written) {
    xt_wait_for_previous();
    xt_let_next_begin();
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

        if (once_written) live &= ~(starts & ends);
        bool open = came; /* the id now summed came from the run before */
        XtVector<A, W> sum;
#pragma unroll
        for (int j = 0; j < W; j++) sum.at[j] = 0;
#pragma unroll 1
        while (live) {
#pragma unroll 1
            for (unsigned rest = live; rest;) {
                int at[GROUP]; /* the next entries */
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    at[u] = __ffs((int)rest) - 1; /* -1: there are no more */
                    rest &= rest - 1;
                }
                XtPiece<In, W> q[GROUP];
                XtPiece<T, W> old[GROUP];
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    const int64_t from = __shfl_sync(all, row, at[u] & 31), to = __shfl_sync(all, key, at[u] & 31);
                    if (at[u] >= 0) q[u] = xt_read<In, W>(source + from * cols);
                    if (ACCUMULATE && at[u] >= 0 && starts >> at[u] & 1u)
                        old[u] = xt_read<T, W>(dweight + to * cols + (inside ? column : 0));
                }
#pragma unroll
                for (int u = 0; u < GROUP; u++) {
                    if (at[u] < 0) continue;
                    if (starts >> at[u] & 1u) {
                        XtVector<A, W> zero = {};
                        if constexpr (ACCUMULATE) sum = xt_load(old[u]);
                        else sum = zero;
                    }
                    const XtVector<XtAcc<In>, W> value = xt_load(q[u]);
#pragma unroll
                    for (int j = 0; j < W; j++) sum.at[j] += value.at[j];
                    if (!(ends >> at[u] & 1u)) continue;
                    const int64_t to = __shfl_sync(all, key, at[u]);
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
__global__ void __launch_bounds__(32 * WARPS, JOINING_BLOCKS)
    embedding_join_kernel(T *dweight, const XtAcc<T> *parts, const unsigned *part_keys, int64_t runs, int64_t cols,
                          unsigned vocab) {
    xt_wait_for_previous();
    xt_let_next_begin();
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
    xt_launch_early(embedding_bwd_kernel<In, T, W, ACCUMULATE>, xt_blocks(items, WARPS), 32 * WARPS, 0, (T *)p->dweight, parts,
                    part_keys, values, list->keys, list->order, entries, p->cols, (unsigned)p->vocab, list->once_written);
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
        const Sorted list = {part_keys, NULL, false};
        const int64_t entries = 2 * runs;
        parts += entries * p->cols;
        part_keys += entries;
        runs = xt_divide_up(entries, RUN);
        sum_level<A, T, OF_PARTS, false>(p, parts, part_keys, values, &list, entries);
    }
    if (runs > 1) {
        /* One wave: where no id spans three runs, the launch costs what its blocks take to see that. */
        const int64_t chunks = xt_divide_up(p->cols, 32 * OF_PARTS), blocks = xt_divide_up(runs, LOOK);
        const int64_t places = JOINING_BLOCKS * xt_multiprocessors() / blocks, most = places < 65535 ? places : 65535;
        const dim3 grid((unsigned)blocks, (unsigned)(most < 1 ? 1 : chunks < most ? chunks : most));
        xt_launch_early(embedding_join_kernel<T, OF_PARTS>, grid, 32 * WARPS, 0, (T *)p->dweight, parts, part_keys, runs, p->cols,
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
        XtStatus status = once_fits(p) ? sort_once<T>(p, &scratch, &sorted) : sort_rows(p, &scratch, &sorted);
        if (status == XT_OK && nbytes) {
            constexpr int W = XT_WIDTH<T>, OF_PARTS = XT_WIDTH<XtAcc<T>>;
            const bool wide = xt_aligned<T>(p->cols, p->cols, p->dweight, p->dy);
            status = wide ? sum_rows<T, W, OF_PARTS>(p, &sorted) : sum_rows<T, 1, 1>(p, &sorted);
        }
        return status == XT_OK ? xt_launched("embedding_bwd", p->rows, p->cols, p->vocab) : status;
    });
}
