/* reduce.c - sum, mean, max, min, argmax over the last dimensions of a view of any strides.
 *
 * The reduced elements, in row-major order, are cut into segments of SEGMENT; a segment of a kept element is one item of
 * parallel work and leaves a partial result; partials are combined from first to last. Two ways to do an item, with the same
 * order of additions: by rows (one kept element at a time; its elements are dense, or gathered) and by columns (TILE kept
 * elements that lie side by side, when the reduced dimension is the strided one). */
#include "contract/reduce.h"
#include "cpu/strided.h"

#include <stdlib.h>

enum {
    LANES = 8,
    SUM_BLOCK = 256, /* elements whose lanes are added in the computing type; divides XT_BLOCK */
    SEGMENT = 8192,  /* reduced elements of an item; a multiple of XT_BLOCK */
    TILE = 128,      /* columns of an item */
    RUN = 64,        /* rows reduced by one call when each is a single short item */
};

/* Result of a segment: a sum or an extreme, and its flat position. Floats are held as float64, integers as int64. */
typedef struct Partial {
    union {
        double f;
        int64_t i;
    } value;
    int64_t index;
} Partial;

typedef struct Reduce {
    const XtReduce *p;
    XtReduceOp op;
    XtDtype dtype, wide;          /* of x; computed in */
    XtLoop kept;                  /* operand 0: x, operand 1: out */
    XtLoop reduced;               /* operand 0: x */
    int64_t segments, tiles, row; /* per kept element; per row of the kept loop; kept elements of such a row */
    Partial *partials;            /* [kept elements][segments], or NULL when there is one segment */
} Reduce;

/* lanes[LANES][TILE] += rows of x that are `stride` apart, row r into lane r % LANES; `fresh` lanes hold nothing yet. */
#define XT_COLUMN_SUM(name, U, From, load)                                                                      \
    XT_FAST static void name(U *lanes, const From *x, int64_t stride, int64_t rows, int64_t cols, bool fresh) { \
        int64_t r = 0;                                                                                          \
        for (; fresh && r < LANES; r++) {                                                                       \
            U *s = lanes + r * TILE;                                                                            \
            if (r >= rows) {                                                                                    \
                memset(s, 0, TILE * sizeof *s);                                                                 \
                continue;                                                                                       \
            }                                                                                                   \
            _Pragma("omp simd") for (int64_t j = 0; j < cols; j++) {                                            \
                From v = x[r * stride + j];                                                                     \
                s[j] = load;                                                                                    \
            }                                                                                                   \
        }                                                                                                       \
        for (; r < rows; r++) {                                                                                 \
            U *s = lanes + (r % LANES) * TILE;                                                                  \
            const From *row = x + r * stride;                                                                   \
            if (cols == TILE) {                                                                                 \
                _Pragma("omp simd") for (int j = 0; j < TILE; j++) {                                            \
                    From v = row[j];                                                                            \
                    s[j] += load;                                                                               \
                }                                                                                               \
            } else {                                                                                            \
                _Pragma("omp simd") for (int64_t j = 0; j < cols; j++) {                                        \
                    From v = row[j];                                                                            \
                    s[j] += load;                                                                               \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
    }
XT_COLUMN_SUM(column_sum_bf16, float, XtBf16, xt_bf16_to_float(v))
XT_COLUMN_SUM(column_sum_f16, float, XtF16, xt_f16_to_float(v))

#define W float
#define U float
#define TOTAL double
#define TOTAL_FIELD f
#define INDEX int32_t
#define IS_NAN(v) ((v) != (v))
#define ANY_NAN(v, w) __builtin_isunordered(v, w)
#define NAME(stem) stem##_f32
#include "reduce_loops.h"
#undef W
#undef U
#undef INDEX
#undef NAME

#define W double
#define U double
#define INDEX int64_t
#define NAME(stem) stem##_f64
#include "reduce_loops.h"
#undef W
#undef U
#undef TOTAL
#undef TOTAL_FIELD
#undef IS_NAN
#undef ANY_NAN
#undef NAME

#define W int64_t
#define U uint64_t
#define TOTAL uint64_t
#define TOTAL_FIELD i
#define IS_NAN(v) false
#define ANY_NAN(v, w) false
#define NAME(stem) stem##_i64
#include "reduce_loops.h"

static void store(const Reduce *r, int64_t offset, Partial result) {
    const XtView *out = &r->p->out;
    void *to = (char *)out->data + offset * (int64_t)xt_dtype_size(out->dtype);
    if (r->op == XT_REDUCE_ARGMAX) {
        memcpy(to, &result.index, sizeof result.index);
        return;
    }
    if (r->op == XT_REDUCE_MEAN) result.value.f /= (double)r->reduced.numel;
    if (r->wide == XT_INT64) {
        xt_convert(to, out->dtype, &result.value.i, XT_INT64, 1);
    } else if (out->dtype == XT_FLOAT32) {
        float value = (float)result.value.f;
        memcpy(to, &value, sizeof value);
    } else {
        xt_convert(to, out->dtype, &result.value.f, XT_FLOAT64, 1);
    }
}

/* Keeps the partial of item (kept element, segment), or writes the result when it is the only one. */
static void keep(const Reduce *r, int64_t kept, int64_t segment, int64_t offset, Partial result) {
    if (r->partials) r->partials[kept * r->segments + segment] = result;
    else store(r, offset, result);
}

static int64_t segment_end(const Reduce *r, int64_t segment) {
    int64_t end = (segment + 1) * SEGMENT;
    return end < r->reduced.numel ? end : r->reduced.numel;
}

static XtStatus rows_piece(void *context, int64_t begin, int64_t end) {
    const Reduce *r = context;
    const int64_t size = (int64_t)xt_dtype_size(r->dtype);
    int64_t kept = begin / r->segments, segment = begin % r->segments;
    XtCursor at;
    xt_cursor_set(&at, &r->kept, kept);
    for (int64_t item = begin; item < end; item++) {
        const char *x = (const char *)r->p->x.data + at.offset[0] * size;
        int64_t first = segment * SEGMENT, stop = segment_end(r, segment);
        Partial result = r->wide == XT_FLOAT32   ? reduce_row_f32(r, x, first, stop)
                         : r->wide == XT_FLOAT64 ? reduce_row_f64(r, x, first, stop)
                                                 : reduce_row_i64(r, x, first, stop);
        keep(r, kept, segment, at.offset[1], result);
        if (++segment == r->segments) {
            segment = 0;
            kept++;
            xt_cursor_advance(&at, &r->kept, 1);
        }
    }
    return XT_OK;
}

/* Rows that are one short dense item each, many at a time. */
static XtStatus runs_piece(void *context, int64_t begin, int64_t end) {
    const Reduce *r = context;
    _Alignas(64) char buffer[XT_BLOCK * 4];
    const int64_t size = (int64_t)xt_dtype_size(r->dtype), n = r->reduced.numel, last = r->kept.ndim - 1;
    const int64_t x_stride = last >= 0 ? r->kept.strides[0][last] : 0, out_stride = last >= 0 ? r->kept.strides[1][last] : 0;
    const int64_t most = r->dtype == r->wide || n * RUN <= XT_BLOCK ? RUN : XT_BLOCK / n;
    XtCursor at;
    xt_cursor_set(&at, &r->kept, begin);
    for (int64_t item = begin; item < end;) {
        int64_t rows = end - item < most ? end - item : most, left = xt_cursor_left(&at, &r->kept), stride = x_stride;
        rows = rows < left ? rows : left;
        Partial results[RUN];
        const void *x = (const char *)r->p->x.data + at.offset[0] * size;
        if (r->dtype != r->wide) { /* float32 from 16 bits */
            if (stride == n) xt_convert(buffer, r->wide, x, r->dtype, rows * n);
            else
                for (int64_t k = 0; k < rows; k++)
                    xt_convert(buffer + k * n * 4, r->wide, (const char *)x + k * stride * size, r->dtype, n);
            x = buffer;
            stride = n;
        }
        if (r->wide == XT_FLOAT32) reduce_run_f32(r, x, stride, rows, results);
        else if (r->wide == XT_FLOAT64) reduce_run_f64(r, x, stride, rows, results);
        else reduce_run_i64(r, x, stride, rows, results);
        if (r->p->out.dtype == XT_FLOAT32) { /* the usual case without the questions of store() */
            float *out = (float *)r->p->out.data + at.offset[1];
            double divisor = r->op == XT_REDUCE_MEAN ? (double)n : 1.0;
            for (int64_t k = 0; k < rows; k++) out[k * out_stride] = (float)(results[k].value.f / divisor);
        } else {
            for (int64_t k = 0; k < rows; k++) store(r, at.offset[1] + k * out_stride, results[k]);
        }
        xt_cursor_advance(&at, &r->kept, rows);
        item += rows;
    }
    return XT_OK;
}

static XtStatus columns_piece(void *context, int64_t begin, int64_t end) {
    const Reduce *r = context;
    const int64_t size = (int64_t)xt_dtype_size(r->dtype), out_stride = r->kept.strides[1][r->kept.ndim - 1];
    for (int64_t item = begin; item < end; item++) {
        int64_t segment = item % r->segments, tile = item / r->segments % r->tiles, row = item / r->segments / r->tiles;
        int64_t kept = row * r->row + tile * TILE, cols = r->row - tile * TILE < TILE ? r->row - tile * TILE : TILE;
        Partial results[TILE];
        XtCursor at;
        xt_cursor_set(&at, &r->kept, kept);
        const char *x = (const char *)r->p->x.data + at.offset[0] * size;
        int64_t first = segment * SEGMENT, stop = segment_end(r, segment);
        if (r->wide == XT_FLOAT32) reduce_columns_f32(r, x, cols, first, stop, results);
        else if (r->wide == XT_FLOAT64) reduce_columns_f64(r, x, cols, first, stop, results);
        else reduce_columns_i64(r, x, cols, first, stop, results);
        for (int64_t j = 0; j < cols; j++) keep(r, kept + j, segment, at.offset[1] + j * out_stride, results[j]);
    }
    return XT_OK;
}

/* Combines the partials of kept elements [begin, end). */
static XtStatus combine_piece(void *context, int64_t begin, int64_t end) {
    const Reduce *r = context;
    const bool integers = r->wide == XT_INT64;
    XtCursor at;
    xt_cursor_set(&at, &r->kept, begin);
    for (int64_t kept = begin; kept < end; kept++) {
        const Partial *partial = r->partials + kept * r->segments;
        Partial result = partial[0];
        for (int64_t s = 1; s < r->segments; s++) {
            Partial next = partial[s];
            if (r->op == XT_REDUCE_SUM || r->op == XT_REDUCE_MEAN) {
                if (integers) result.value.i = (int64_t)((uint64_t)result.value.i + (uint64_t)next.value.i);
                else result.value.f += next.value.f;
                continue;
            }
            bool better, min = r->op == XT_REDUCE_MIN;
            if (integers) better = min ? next.value.i < result.value.i : next.value.i > result.value.i;
            else if (result.value.f != result.value.f) better = false; /* the first NaN wins */
            else better = next.value.f != next.value.f || (min ? next.value.f < result.value.f : next.value.f > result.value.f);
            if (better) result = next;
        }
        store(r, at.offset[1], result);
        xt_cursor_advance(&at, &r->kept, 1);
    }
    return XT_OK;
}

XtStatus xt_cpu_reduce(const XtReduce *p) {
    XtStatus status = XT_OK;
    Reduce r = {.p = p, .op = p->op, .dtype = p->x.dtype, .wide = xt_wide_dtype(p->x.dtype)};
    int kept_ndim = p->out.ndim;
    xt_loop_init(&r.kept, 2, (const XtView *const[]){&p->x, &p->out}, 0, kept_ndim, false);
    xt_loop_init(&r.reduced, 1, (const XtView *const[]){&p->x}, kept_ndim, p->x.ndim - kept_ndim, false);
    if (r.kept.numel == 0) return XT_OK;

    const int64_t n = r.reduced.numel;
    r.segments = n > SEGMENT ? (n + SEGMENT - 1) / SEGMENT : 1;
    r.row = xt_loop_row(&r.kept);
    r.tiles = (r.row + TILE - 1) / TILE;
    if (r.segments > 1) {
        r.partials = malloc((size_t)r.kept.numel * (size_t)r.segments * sizeof *r.partials);
        if (!r.partials)
            return xt_error(XT_OUT_OF_MEMORY, "reduce: out of host memory for %lld partial results",
                            (long long)(r.kept.numel * r.segments));
    }
    const int64_t per_item = n < SEGMENT ? n : SEGMENT;
    bool by_columns = n > 0 && r.kept.ndim > 0 && r.kept.strides[0][r.kept.ndim - 1] == 1 &&
                      (r.reduced.ndim == 0 || r.reduced.strides[0][r.reduced.ndim - 1] != 1);
    bool dense = r.reduced.ndim == 0 || (r.reduced.ndim == 1 && r.reduced.strides[0][0] == 1);
    if (by_columns) {
        int64_t width = r.row < TILE ? r.row : TILE;
        XT_TRY(xt_parallel(r.kept.numel / r.row * r.tiles * r.segments, xt_row_grain(per_item * width, XT_EACH_GRAIN),
                           columns_piece, &r));
    } else if (n > 0 && r.segments == 1 && dense && (r.dtype == r.wide || (r.wide == XT_FLOAT32 && n <= XT_BLOCK))) {
        XT_TRY(xt_parallel(r.kept.numel, xt_row_grain(n, XT_EACH_GRAIN), runs_piece, &r));
    } else {
        XT_TRY(xt_parallel(r.kept.numel * r.segments, xt_row_grain(per_item, XT_EACH_GRAIN), rows_piece, &r));
    }
    if (r.partials) XT_TRY(xt_parallel(r.kept.numel, xt_row_grain(r.segments, XT_EACH_GRAIN), combine_piece, &r));
done:
    free(r.partials);
    return status;
}
