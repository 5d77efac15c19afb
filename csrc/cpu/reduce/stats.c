/* stats.c - minimum, maximum, sum, NaN and Inf counts of a view, in one pass. */
#include "contract/reduce.h"
#include "cpu/strided.h"

#include <float.h>
#include <stdlib.h>

enum { SEGMENT = 16384 }; /* elements of a partial result; a multiple of XT_BLOCK */

/* Minimum and maximum of no finite element are +Inf and -Inf. */
typedef struct Partial {
    double min, max, sum;
    int64_t nan, inf;
} Partial;

typedef struct Stats {
    XtLoop loop;
    const void *data;
    XtDtype dtype, wide;
    Partial *partials; /* [segments] */
} Stats;

#define XT_STATS(W, S, Count, largest)                                                                                            \
    XT_FAST static void stats_##S(const W *x, int64_t n, Partial *p) {                                                            \
        W low = INFINITY, high = -INFINITY;                                                                                       \
        Count nan = 0, finite = 0;                                                                                                \
        double sum = 0;                                                                                                           \
        _Pragma("omp simd reduction(min : low) reduction(max : high) reduction(+ : sum, nan, finite)") for (int64_t i = 0; i < n; \
                                                                                                            i++) {                \
            W v = x[i], a = v < 0 ? -v : v;                                                                                       \
            bool is_finite = a <= largest;                                                                                        \
            W for_low = is_finite ? v : (W)INFINITY, for_high = is_finite ? v : -(W)INFINITY;                                     \
            low = for_low < low ? for_low : low;                                                                                  \
            high = for_high > high ? for_high : high;                                                                             \
            sum += (double)(is_finite ? v : 0);                                                                                   \
            nan += v != v;                                                                                                        \
            finite += is_finite;                                                                                                  \
        }                                                                                                                         \
        p->min = (double)low < p->min ? (double)low : p->min;                                                                     \
        p->max = (double)high > p->max ? (double)high : p->max;                                                                   \
        p->sum += sum;                                                                                                            \
        p->nan += nan;                                                                                                            \
        p->inf += n - nan - finite;                                                                                               \
    }
XT_STATS(float, f32, int32_t, FLT_MAX)
XT_STATS(double, f64, int64_t, DBL_MAX)
#undef XT_STATS

static XtStatus stats_piece(void *context, int64_t begin, int64_t end) {
    const Stats *s = context;
    _Alignas(64) char buffer[2][XT_BLOCK * 8];
    for (int64_t segment = begin; segment < end; segment++) {
        Partial p = {INFINITY, -INFINITY, 0, 0, 0};
        int64_t first = segment * SEGMENT, stop = first + SEGMENT < s->loop.numel ? first + SEGMENT : s->loop.numel;
        XtCursor cursor;
        xt_cursor_set(&cursor, &s->loop, first);
        for (int64_t i = first; i < stop; i += XT_BLOCK) {
            int64_t n = stop - i < XT_BLOCK ? stop - i : XT_BLOCK;
            const void *x = xt_fetch(buffer, s->data, s->dtype, s->wide, &s->loop, 0, &cursor, n);
            if (s->wide == XT_FLOAT32) stats_f32(x, n, &p);
            else stats_f64(x, n, &p);
        }
        s->partials[segment] = p;
    }
    return XT_OK;
}

XtStatus xt_cpu_stats(const XtStats *p) {
    Stats s = {.data = p->x.data, .dtype = p->x.dtype};
    s.wide = xt_wide_dtype(p->x.dtype) == XT_FLOAT32 ? XT_FLOAT32 : XT_FLOAT64;
    xt_loop_init(&s.loop, 1, (const XtView *const[]){&p->x}, 0, p->x.ndim, true);
    int64_t segments = (s.loop.numel + SEGMENT - 1) / SEGMENT;
    Partial total = {INFINITY, -INFINITY, 0, 0, 0};
    s.partials = segments > 1 ? malloc((size_t)segments * sizeof *s.partials) : &total;
    if (!s.partials) return xt_error(XT_OUT_OF_MEMORY, "stats: out of host memory for %lld partial results", (long long)segments);

    XtStatus status = xt_parallel(segments, 2, stats_piece, &s);
    if (segments > 1) {
        for (int64_t i = 0; status == XT_OK && i < segments; i++) {
            const Partial *q = &s.partials[i];
            total.min = q->min < total.min ? q->min : total.min;
            total.max = q->max > total.max ? q->max : total.max;
            total.sum += q->sum;
            total.nan += q->nan;
            total.inf += q->inf;
        }
        free(s.partials);
    }
    p->out[0] = total.min;
    p->out[1] = total.max;
    p->out[2] = total.sum;
    p->out[3] = (double)total.nan;
    p->out[4] = (double)total.inf;
    return status;
}
