/* compare.c - counts the elements of `out` that are not near enough to `ref`, and finds the worst.
 *
 *     d = |out - ref|, limit = atol + rtol |ref|, right when d <= limit
 *
 * One pass over fixed segments. A segment first takes maxima and counts, which vectorises, and looks for the place of a maximum only
 * when it is a new one; segments are then joined in order, so that the first of equals wins, whatever the number of threads. */
#include "contract/reduce.h"
#include "cpu/strided.h"

#include <float.h>
#include <stdlib.h>

enum { SEGMENT = 16384 }; /* elements of a partial result; a multiple of XT_BLOCK */

/* Keeps d / limit defined for limit 0, where it still ranks by d, and is far below any limit that means something. */
#define NO_LIMIT 0x1p-500

typedef struct Compare {
    XtLoop loop; /* operand 0 = out, 1 = ref */
    const XtCompare *p;
    XtDtype wide;           /* float32, float64 or int64: what both are read as */
    XtComparison *partials; /* [segments] */
} Compare;

/* What one element says. `ratio` is 0 for an exact match. */
typedef struct Element {
    double distance, relative, ratio;
    bool finite, wrong;
} Element;

XT_INLINE Element judge(double a, double b, double rtol, double atol) {
    double size = fabs(b), d = fabs(a - b), limit = atol + rtol * size;
    Element e;
    e.finite = fabs(a) <= DBL_MAX && size <= DBL_MAX;
    e.wrong = e.finite ? !(d <= limit && d <= DBL_MAX) : !(a == b);
    e.distance = e.finite ? d : 0;
    e.relative = e.finite && size > 0 ? d / size : 0;
    e.ratio = e.finite ? d / (limit + NO_LIMIT) : e.wrong ? INFINITY : 0;
    return e;
}

/* Integers are never infinite; their distance is taken before it is rounded to a double. */
XT_INLINE Element judge_integer(int64_t a, int64_t b, double rtol, double atol) {
    uint64_t gap = a > b ? (uint64_t)a - (uint64_t)b : (uint64_t)b - (uint64_t)a;
    double size = fabs((double)b), d = (double)gap, limit = atol + rtol * size;
    return (Element){d, size > 0 ? d / size : 0, d / (limit + NO_LIMIT), true, !(d <= limit)};
}

#define XT_LARGER(a, b) ((a) > (b) ? (a) : (b))

#define XT_MAXIMA_AND_COUNTS \
    _Pragma("omp simd reduction(max : distance, relative, size, ratio) reduction(+ : wrong, x_nan, y_nan, x_inf, y_inf)")

/* n elements, the first of them with row-major index `first`. */
#define XT_COMPARE(W, S, JUDGE)                                                                                                    \
    XT_FAST static void compare_##S(const W *x, const W *y, int64_t n, int64_t first, double rtol, double atol, XtComparison *r) { \
        double distance = 0, relative = 0, size = 0, ratio = -1;                                                                   \
        int64_t wrong = 0, x_nan = 0, y_nan = 0, x_inf = 0, y_inf = 0;                                                             \
        XT_MAXIMA_AND_COUNTS                                                                                                       \
        for (int64_t i = 0; i < n; i++) {                                                                                          \
            Element e = JUDGE(x[i], y[i], rtol, atol);                                                                             \
            double a = fabs((double)x[i]), b = fabs((double)y[i]), b_finite = b <= DBL_MAX ? b : 0;                                \
            distance = XT_LARGER(e.distance, distance);                                                                            \
            relative = XT_LARGER(e.relative, relative);                                                                            \
            ratio = XT_LARGER(e.ratio, ratio);                                                                                     \
            size = XT_LARGER(b_finite, size);                                                                                      \
            wrong += e.wrong;                                                                                                      \
            x_nan += a != a;                                                                                                       \
            y_nan += b != b;                                                                                                       \
            x_inf += a > DBL_MAX;                                                                                                  \
            y_inf += b > DBL_MAX;                                                                                                  \
        }                                                                                                                          \
        if (ratio > r->worst_ratio) {                                                                                              \
            int64_t i = 0;                                                                                                         \
            while (i < n - 1 && JUDGE(x[i], y[i], rtol, atol).ratio < ratio) i++;                                                  \
            r->worst = first + i;                                                                                                  \
            r->worst_ratio = ratio;                                                                                                \
        }                                                                                                                          \
        r->max_abs = XT_LARGER(distance, r->max_abs);                                                                              \
        r->max_rel = XT_LARGER(relative, r->max_rel);                                                                              \
        r->max_ref = XT_LARGER(size, r->max_ref);                                                                                  \
        r->errors += wrong;                                                                                                        \
        r->out_nan += x_nan, r->out_inf += x_inf;                                                                                  \
        r->ref_nan += y_nan, r->ref_inf += y_inf;                                                                                  \
    }
XT_COMPARE(float, f32, judge)
XT_COMPARE(double, f64, judge)
XT_COMPARE(int64_t, i64, judge_integer)
#undef XT_COMPARE

static const XtComparison NOTHING = {.worst = -1, .worst_ratio = -1};

static XtStatus compare_piece(void *context, int64_t begin, int64_t end) {
    const Compare *c = context;
    const XtCompare *p = c->p;
    _Alignas(64) char x_buffer[2][XT_BLOCK * 8], y_buffer[2][XT_BLOCK * 8];
    for (int64_t segment = begin; segment < end; segment++) {
        XtComparison r = NOTHING;
        int64_t start = segment * SEGMENT, stop = start + SEGMENT < c->loop.numel ? start + SEGMENT : c->loop.numel;
        /* One cursor per operand: xt_fetch moves the one it is given. */
        XtCursor x_at, y_at;
        xt_cursor_set(&x_at, &c->loop, start);
        y_at = x_at;
        for (int64_t i = start; i < stop; i += XT_BLOCK) {
            int64_t n = stop - i < XT_BLOCK ? stop - i : XT_BLOCK;
            const void *x = xt_fetch(x_buffer, p->out.data, p->out.dtype, c->wide, &c->loop, 0, &x_at, n);
            const void *y = xt_fetch(y_buffer, p->ref.data, p->ref.dtype, c->wide, &c->loop, 1, &y_at, n);
            if (c->wide == XT_FLOAT32) compare_f32(x, y, n, i, p->rtol, p->atol, &r);
            else if (c->wide == XT_FLOAT64) compare_f64(x, y, n, i, p->rtol, p->atol, &r);
            else compare_i64(x, y, n, i, p->rtol, p->atol, &r);
        }
        c->partials[segment] = r;
    }
    return XT_OK;
}

static void join(XtComparison *total, const XtComparison *r) {
    if (r->worst_ratio > total->worst_ratio) {
        total->worst = r->worst;
        total->worst_ratio = r->worst_ratio;
    }
    total->max_abs = XT_LARGER(r->max_abs, total->max_abs);
    total->max_rel = XT_LARGER(r->max_rel, total->max_rel);
    total->max_ref = XT_LARGER(r->max_ref, total->max_ref);
    total->errors += r->errors;
    total->out_nan += r->out_nan, total->out_inf += r->out_inf;
    total->ref_nan += r->ref_nan, total->ref_inf += r->ref_inf;
}

XtStatus xt_cpu_compare(const XtCompare *p) {
    Compare c = {.p = p};
    XtDtype a = xt_wide_dtype(p->out.dtype), b = xt_wide_dtype(p->ref.dtype);
    c.wide = a == b ? a : XT_FLOAT64; /* a float32 is exact as a float64 */
    /* Unsorted, so that an index of the loop is a row-major index. */
    const XtView *const views[] = {&p->out, &p->ref};
    xt_loop_init(&c.loop, 2, views, 0, p->out.ndim, false);
    int64_t segments = (c.loop.numel + SEGMENT - 1) / SEGMENT;
    XtComparison only = NOTHING, total = NOTHING;
    c.partials = segments > 1 ? malloc((size_t)segments * sizeof *c.partials) : &only;
    if (!c.partials) return xt_error(XT_OUT_OF_MEMORY, "compare: out of host memory for %lld partial results", (long long)segments);
    XtStatus status = xt_parallel(segments, 2, compare_piece, &c);
    for (int64_t i = 0; status == XT_OK && i < segments; i++) join(&total, &c.partials[i]);
    if (segments > 1) free(c.partials);
    *p->result = total;
    return status;
}
