/* gather.c - places that indices name, and rows put there.
 *
 *     positions  out[c] = sum over d of c_d step_d + sum over k of wrap(index_k[c]) stride_k, c running over `shape` in row-major order
 *     scatter    table[ids[r]] = rows[r], r going up: of several the last one stays
 */
#include "contract/layers.h"
#include "cpu/kernel.h"

#include <inttypes.h>
#include <stdlib.h>

typedef struct PositionsJob {
    const XtPositions *p;
    int64_t wrong; /* atomic: the first place with an index out of range */
} PositionsJob;

static int64_t index_at(const XtView *index, const int64_t *at) {
    int64_t offset = 0;
    for (int d = 0; d < index->ndim; d++) offset += at[d] * index->strides[d];
    return ((const int64_t *)index->data)[offset];
}

static void place_of(const XtPositions *p, int64_t c, int64_t *at) {
    for (int d = p->ndim - 1; d >= 0; d--) {
        at[d] = c % p->shape[d];
        c /= p->shape[d];
    }
}

/* The first wrong place of all threads. */
static void wrong_at(PositionsJob *job, int64_t c) {
    int64_t first = __atomic_load_n(&job->wrong, __ATOMIC_RELAXED);
    while (c < first && !__atomic_compare_exchange_n(&job->wrong, &first, c, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

/* In runs along the last dim: first the part of the coordinates, then index after index. */
static XtStatus positions(void *context, int64_t begin, int64_t end) {
    PositionsJob *job = context;
    const XtPositions *p = job->p;
    int64_t at[XT_MAX_DIMS] = {0}, last = p->ndim - 1;
    place_of(p, begin, at);
    for (int64_t c = begin, n; c < end; c += n) {
        n = last < 0 ? 1 : p->shape[last] - at[last] < end - c ? p->shape[last] - at[last] : end - c;
        int64_t *out = p->out + c, step = last < 0 ? 0 : p->step[last], place = 0; /* out [n] */
        for (int d = 0; d <= last; d++) place += at[d] * p->step[d];
        for (int64_t j = 0; j < n; j++) out[j] = place + j * step;
        for (int k = 0; k < p->count; k++) {
            const int64_t *index = p->index[k].data, size = p->size[k], stride = p->stride[k];
            int64_t apart = last < 0 ? 0 : p->index[k].strides[last], wrap = p->wrap ? size : 0;
            for (int d = 0; d <= last; d++) index += at[d] * p->index[k].strides[d];
            for (int64_t j = 0; j < n; j++) {
                int64_t i = XT_READ_ONCE(index + j * apart);
                if (i < 0) i += wrap;
                if (i >= 0 && i < size) out[j] += i * stride;
                else wrong_at(job, c + j);
            }
        }
        if (last < 0) continue;
        at[last] += n;
        for (int d = (int)last; d > 0 && at[d] == p->shape[d]; d--) at[d] = 0, at[d - 1]++;
    }
    return XT_OK;
}

XtStatus xt_cpu_positions(const XtPositions *p) {
    PositionsJob job = {p, INT64_MAX};
    int64_t count = 1, at[XT_MAX_DIMS];
    for (int d = 0; d < p->ndim; d++) count *= p->shape[d];
    XT_CHECK(xt_parallel(count, 4096, positions, &job));
    if (job.wrong == INT64_MAX) return XT_OK;
    place_of(p, job.wrong, at);
    for (int k = 0; k < p->count; k++) {
        int64_t i = index_at(&p->index[k], at), size = p->size[k], low = p->wrap ? -size : 0;
        if (i < low || i >= size)
            return xt_error(XT_INDEX_ERROR, "%s: index must be in [%" PRId64 ", %" PRId64 "), got %" PRId64 " at position %" PRId64,
                            p->op, low, size, i, job.wrong);
    }
    return XT_OK;
}

/* In one thread: rows for one place must not race. */
XtStatus xt_cpu_scatter(const XtScatter *p) {
    size_t nbytes = (size_t)p->cols * xt_dtype_size(p->dtype); /* of a row */
    for (int64_t r = 0; nbytes > 0 && r < p->count; r++)
        memcpy((char *)p->table + (size_t)p->ids[r] * nbytes, (const char *)p->rows + (size_t)r * nbytes, nbytes);
    if (!p->last || p->count == 0 || p->places == 0) return XT_OK;
    size_t scratch = (size_t)p->places;
    uint8_t *taken = calloc(scratch, 1); /* [places]: a later row is there */
    if (!taken) return xt_error(XT_OUT_OF_MEMORY, "scatter: scratch of %zu bytes could not be allocated", scratch);
    for (int64_t r = p->count - 1; r >= 0; r--) {
        p->last[r] = !taken[p->ids[r]];
        taken[p->ids[r]] = 1;
    }
    free(taken);
    return XT_OK;
}
