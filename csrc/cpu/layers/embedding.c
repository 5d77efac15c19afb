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

static XtStatus wrong_id(int64_t id, int64_t r, int64_t vocab) {
    return xt_error(XT_INDEX_ERROR, "embedding: id must be in [0, %" PRId64 "), got %" PRId64 " at position %" PRId64, vocab, id,
                    r);
}

/* *id = ids[r]. */
XT_INLINE XtStatus read_id(const int64_t *ids, int64_t r, int64_t vocab, int64_t *id) {
    *id = XT_READ_ONCE(ids + r);
    return (uint64_t)*id < (uint64_t)vocab ? XT_OK : wrong_id(*id, r, vocab);
}

XT_FAST static bool are_ids(const int64_t *ids, int64_t rows, int64_t vocab) {
    uint64_t wrong = 0;
#pragma omp simd reduction(| : wrong)
    for (int64_t r = 0; r < rows; r++) wrong |= (uint64_t)ids[r] >= (uint64_t)vocab;
    return !wrong;
}

/* Before the pieces, so that the first wrong id is told. */
static XtStatus check_ids(const int64_t *ids, int64_t rows, int64_t vocab) {
    int64_t id;
    if (are_ids(ids, rows, vocab)) return XT_OK;
    for (int64_t r = 0; r < rows; r++) XT_CHECK(read_id(ids, r, vocab, &id));
    return XT_OK;
}

/* Rows of one element of type U; of other sizes memcpy is as fast. */
#define COPY(U)                                    \
    case sizeof(U): {                              \
        const U *weight = p->weight; /* [vocab] */ \
        U *out = p->out;             /* [rows] */  \
        for (int64_t r = begin; r < end; r++) {    \
            XT_CHECK(read_id(ids, r, vocab, &id)); \
            out[r] = weight[id];                   \
        }                                          \
        return XT_OK;                              \
    }

static XtStatus embedding_fwd(void *context, int64_t begin, int64_t end) {
    const XtEmbeddingFwd *p = context;
    size_t nbytes = (size_t)p->cols * xt_dtype_size(p->dtype); /* of a row */
    const int64_t *ids = p->ids, vocab = p->vocab;             /* [rows] */
    int64_t id;
    switch (p->cols == 1 ? nbytes : 0) {
        COPY(uint8_t)
        COPY(uint16_t)
        COPY(uint32_t)
        COPY(uint64_t)
    }
    for (int64_t r = begin; r < end; r++) {
        XT_CHECK(read_id(ids, r, vocab, &id));
        memcpy((char *)p->out + (size_t)r * nbytes, (const char *)p->weight + (size_t)id * nbytes, nbytes);
    }
    return XT_OK;
}

XtStatus xt_cpu_embedding_fwd(const XtEmbeddingFwd *p) {
    XtStatus status = check_ids(p->ids, p->rows, p->vocab);
    if (status != XT_OK || p->cols == 0) return status;
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), embedding_fwd, (void *)p);
}

/* start [vocab + 1], order [rows] from ids [rows]; id [rows]: scratch, what was read of them. */
static XtStatus group_by_id(int64_t *start, int64_t *order, int64_t *id, const int64_t *ids, int64_t rows, int64_t vocab) {
    memset(start, 0, (size_t)vocab * sizeof *start);
    for (int64_t r = 0; r < rows; r++) {
        XT_CHECK(read_id(ids, r, vocab, &id[r]));
        start[id[r]]++;
    }
    for (int64_t v = 1; v < vocab; v++) start[v] += start[v - 1];      /* now the end of each list */
    for (int64_t r = rows - 1; r >= 0; r--) order[--start[id[r]]] = r; /* filled from the back, each list ends up in row order */
    start[vocab] = rows;
    return XT_OK;
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
    size_t nbytes = (size_t)p->rows * (sizeof(Place) + 3 * sizeof(int64_t)) + sizeof(int64_t);
    Place *places = malloc(nbytes); /* [rows] */
    if (!places) return xt_error(XT_OUT_OF_MEMORY, "embedding: scratch of %zu bytes could not be allocated", nbytes);
    int64_t *order = (int64_t *)(places + p->rows), *id = order + p->rows, *start = id + p->rows, lists = 0; /* start [rows + 1] */
    XtStatus status = XT_OK;
    for (int64_t r = 0; r < p->rows; r++) {
        XT_TRY(read_id(p->ids, r, p->vocab, &places[r].id));
        places[r].row = r;
    }
    if (!p->accumulate) XT_TRY(xt_parallel(p->vocab, xt_row_grain(p->cols, 1 << 18), clear_rows, (void *)p));
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
    status = xt_parallel(tiles * lists, xt_row_grain(p->cols < TILE ? p->cols : TILE, 16384), XT_BY_FLOAT(p->dtype, embedding_bwd),
                         &job);
done:
    free(places);
    return status;
}

XtStatus xt_cpu_embedding_bwd(const XtEmbeddingBwd *p) {
    if (p->cols == 0) return check_ids(p->ids, p->rows, p->vocab);
    if (p->rows < p->vocab / 8) return few_ids(p);
    size_t nbytes = (size_t)(p->vocab + 1 + 2 * p->rows) * sizeof(int64_t);
    int64_t *start = malloc(nbytes);
    if (!start) return xt_error(XT_OUT_OF_MEMORY, "embedding: scratch of %zu bytes could not be allocated", nbytes);
    int64_t *order = start + p->vocab + 1, *id = order + p->rows; /* [rows] each */
    EmbeddingBwdJob job = {p, start, order, NULL, p->vocab};
    XtStatus status = XT_OK;
    XT_TRY(group_by_id(start, order, id, p->ids, p->rows, p->vocab));
    int64_t tiles = (p->cols + TILE - 1) / TILE;
    /* A piece is about 16384 elements read or written: ids that occur often make for fewer rows of dweight in a piece. */
    int64_t mean = p->vocab > 0 ? 1 + p->rows / p->vocab : 1;
    status = xt_parallel(tiles * p->vocab, xt_row_grain((p->cols < TILE ? p->cols : TILE) * mean, 16384),
                         XT_BY_FLOAT(p->dtype, embedding_bwd), &job);
done:
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
