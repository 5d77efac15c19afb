/* embedding.c - rows of a table, looked up by id.
 *
 *     forward    out[r] = weight[ids[r]]
 *     backward   dweight[v] (+)= sum of dy[r] over the rows r with ids[r] == v
 *
 * The backward first groups the rows by id, then each row of dweight adds up its own list of rows, in row order and in ACC: nothing is
 * shared between threads, and many occurrences of one id lose nothing to a short dtype. Rows are grouped by a counting sort, or, where
 * most ids do not occur, by one that compares: then scratch and time go with the rows, and the bits are the same.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

#include <inttypes.h>
#include <stdlib.h>

/* Columns added up at once: the sums stay in the first-level cache, and a frequent id is shared out over the column tiles. */
enum { TILE = 256 };

typedef struct EmbeddingBwdJob {
    const XtEmbeddingBwd *p;
    const int64_t *start; /* [vocab + 1]: the rows of id v are order[start[v] .. start[v + 1]) */
    const int64_t *order; /* [rows] */
    const int64_t *id;    /* NULL, or [lists]: the lists are those of these ids */
    int64_t lists;        /* vocab, or fewer */
} EmbeddingBwdJob;

typedef struct Place {
    int64_t id, row;
} Place;

#define XT_TEMPLATE "cpu/layers/embedding.c"
#include "cpu/each_float.h"

static XtStatus check_ids(const int64_t *ids, int64_t rows, int64_t vocab) {
    for (int64_t r = 0; r < rows; r++)
        if (ids[r] < 0 || ids[r] >= vocab)
            return xt_error(XT_INDEX_ERROR, "embedding: id must be in [0, %" PRId64 "), got %" PRId64 " at position %" PRId64,
                            vocab, ids[r], r);
    return XT_OK;
}

/* Rows of one element of type U; of other sizes memcpy is as fast. */
#define COPY(U)                                                        \
    case sizeof(U): {                                                  \
        const U *weight = p->weight; /* [vocab] */                     \
        U *out = p->out;             /* [rows] */                      \
        for (int64_t r = begin; r < end; r++) out[r] = weight[ids[r]]; \
        return XT_OK;                                                  \
    }

static XtStatus embedding_fwd(void *context, int64_t begin, int64_t end) {
    const XtEmbeddingFwd *p = context;
    const int64_t *ids = p->ids;                               /* [rows] */
    size_t nbytes = (size_t)p->cols * xt_dtype_size(p->dtype); /* of a row */
    switch (p->cols == 1 ? nbytes : 0) {
        COPY(uint8_t)
        COPY(uint16_t)
        COPY(uint32_t)
        COPY(uint64_t)
    }
    for (int64_t r = begin; r < end; r++)
        memcpy((char *)p->out + (size_t)r * nbytes, (const char *)p->weight + (size_t)p->ids[r] * nbytes, nbytes);
    return XT_OK;
}

XtStatus xt_cpu_embedding_fwd(const XtEmbeddingFwd *p) {
    XtStatus status = check_ids(p->ids, p->rows, p->vocab);
    if (status != XT_OK || p->cols == 0) return status;
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), embedding_fwd, (void *)p);
}

/* start [vocab + 1], order [rows] from ids [rows]. */
static void group_by_id(int64_t *start, int64_t *order, const int64_t *ids, int64_t rows, int64_t vocab) {
    memset(start, 0, (size_t)vocab * sizeof *start);
    for (int64_t r = 0; r < rows; r++) start[ids[r]]++;
    for (int64_t v = 1; v < vocab; v++) start[v] += start[v - 1];       /* now the end of each list */
    for (int64_t r = rows - 1; r >= 0; r--) order[--start[ids[r]]] = r; /* filled from the back, each list ends up in row order */
    start[vocab] = rows;
}

static int by_id_and_row(const void *a, const void *b) {
    const Place *p = a, *q = b;
    if (p->id != q->id) return p->id < q->id ? -1 : 1;
    return p->row < q->row ? -1 : 1;
}

static XtStatus clear_rows(void *context, int64_t begin, int64_t end) {
    const XtEmbeddingBwd *p = context;
    size_t nbytes = (size_t)p->cols * xt_dtype_size(p->dtype); /* of a row */
    memset((char *)p->dweight + (size_t)begin * nbytes, 0, (size_t)(end - begin) * nbytes);
    return XT_OK;
}

/* Few of the ids occur: zeros everywhere, then a list for each that does. */
static XtStatus few_ids(const XtEmbeddingBwd *p) {
    if (!p->accumulate) XT_CHECK(xt_parallel(p->vocab, xt_row_grain(p->cols, 1 << 18), clear_rows, (void *)p));
    size_t nbytes = (size_t)p->rows * (sizeof(Place) + 3 * sizeof(int64_t)) + sizeof(int64_t);
    Place *places = malloc(nbytes); /* [rows] */
    if (!places) return xt_error(XT_OUT_OF_MEMORY, "embedding: scratch of %zu bytes could not be allocated", nbytes);
    int64_t *order = (int64_t *)(places + p->rows), *id = order + p->rows, *start = id + p->rows, lists = 0; /* start [rows + 1] */
    for (int64_t r = 0; r < p->rows; r++) places[r] = (Place){p->ids[r], r};
    qsort(places, (size_t)p->rows, sizeof *places, by_id_and_row);
    for (int64_t r = 0; r < p->rows; r++) {
        order[r] = places[r].row;
        if (r > 0 && places[r].id == places[r - 1].id) continue;
        id[lists] = places[r].id;
        start[lists++] = r;
    }
    start[lists] = p->rows;
    EmbeddingBwdJob job = {p, start, order, id, lists};
    int64_t tiles = p->cols / TILE + (p->cols % TILE != 0);
    XtStatus status = xt_parallel(tiles * lists, xt_row_grain(p->cols < TILE ? p->cols : TILE, 16384),
                                  XT_BY_FLOAT(p->dtype, embedding_bwd), &job);
    free(places);
    return status;
}

XtStatus xt_cpu_embedding_bwd(const XtEmbeddingBwd *p) {
    XtStatus status = check_ids(p->ids, p->rows, p->vocab);
    if (status != XT_OK || p->cols == 0) return status;
    if (p->rows < p->vocab / 8) return few_ids(p);
    size_t nbytes = (size_t)(p->vocab + 1 + p->rows) * sizeof(int64_t);
    int64_t *start = malloc(nbytes);
    if (!start) return xt_error(XT_OUT_OF_MEMORY, "embedding: scratch of %zu bytes could not be allocated", nbytes);
    EmbeddingBwdJob job = {p, start, start + p->vocab + 1, NULL, p->vocab};
    group_by_id(start, start + p->vocab + 1, p->ids, p->rows, p->vocab);
    int64_t tiles = (p->cols + TILE - 1) / TILE;
    /* A piece is about 16384 elements read or written: ids that occur often make for fewer rows of dweight in a piece. */
    int64_t mean = p->vocab > 0 ? 1 + p->rows / p->vocab : 1;
    status = xt_parallel(tiles * p->vocab, xt_row_grain((p->cols < TILE ? p->cols : TILE) * mean, 16384),
                         XT_BY_FLOAT(p->dtype, embedding_bwd), &job);
    free(start);
    return status;
}

#else

/* Items [begin, end) of the grid [tiles, lists]: one tile of columns of one row of dweight each. */
XT_FAST static XtStatus NAME(embedding_bwd)(void *context, int64_t begin, int64_t end) {
    const EmbeddingBwdJob *job = context;
    const XtEmbeddingBwd *p = job->p;
    for (int64_t item = begin, v = begin % job->lists, column = begin / job->lists * TILE; item < end; item++) {
        int64_t n = p->cols - column < TILE ? p->cols - column : TILE;
        T *out = (T *)p->dweight + (job->id ? job->id[v] : v) * p->cols + column; /* [n] */
        int64_t first = job->start[v], last = job->start[v + 1];
        if (first < last) {
            ACC sum[TILE];
            for (int64_t j = 0; j < n; j++) sum[j] = p->accumulate ? LOAD(out[j]) : 0;
            for (int64_t k = first; k < last; k++) {
                const T *dy = (const T *)p->dy + job->order[k] * p->cols + column; /* [n] */
#pragma omp simd
                for (int64_t j = 0; j < n; j++) sum[j] += LOAD(dy[j]);
            }
#pragma omp simd
            for (int64_t j = 0; j < n; j++) out[j] = STORE(sum[j]);
        } else if (!p->accumulate) {
            memset(out, 0, (size_t)n * sizeof(T));
        }
        if (++v == job->lists) v = 0, column += TILE;
    }
    return XT_OK;
}

#endif
