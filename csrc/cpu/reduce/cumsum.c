/* cumsum.c - running sums along the middle of [rows, count, inner], forwards or backwards, in ACC.
 *
 *     out[r, i, c] = sum of x[r, j, c] over j <= i    (reverse: j >= i), added in the order of j
 *
 * Up to TILE columns side by side are added at once. */
#ifndef T
#include "contract/reduce.h"
#include "cpu/kernel.h"

enum { TILE = 256 };

#define XT_TEMPLATE "cpu/reduce/cumsum.c"
#include "cpu/each_float.h"

#undef PLUS
#define T int64_t
#define ACC int64_t
#define NAME(stem) stem##_i64
#define LOAD(v) (v)
#define STORE(v) (v)
#define PLUS(a, b) (int64_t)((uint64_t)(a) + (uint64_t)(b)) /* wraps around */
#include "cpu/reduce/cumsum.c"
#undef T
#undef ACC
#undef NAME
#undef LOAD
#undef STORE
#undef PLUS

XtStatus xt_cpu_cumsum(const XtCumsum *p) {
    int64_t tiles = (p->inner + TILE - 1) / TILE, work = p->count * (p->inner < TILE ? p->inner : TILE);
    XtBody body = p->dtype == XT_INT64 ? cumsum_i64 : XT_BY_FLOAT(p->dtype, cumsum);
    return xt_parallel(p->rows * tiles, xt_row_grain(work, 16384), body, (void *)p);
}

#else

#ifndef PLUS
#define PLUS(a, b) ((a) + (b))
#endif

/* Items [begin, end) of the grid [rows, tiles]. */
XT_FAST static XtStatus NAME(cumsum)(void *context, int64_t begin, int64_t end) {
    const XtCumsum *p = context;
    int64_t tiles = (p->inner + TILE - 1) / TILE;
    for (int64_t item = begin; item < end; item++) {
        int64_t row = item / tiles, column = item % tiles * TILE, n = p->inner - column < TILE ? p->inner - column : TILE;
        ACC sum[TILE];
        for (int64_t j = 0; j < n; j++) sum[j] = 0;
        for (int64_t i = 0; i < p->count; i++) {
            int64_t at = (row * p->count + (p->reverse ? p->count - 1 - i : i)) * p->inner + column;
            const T *x = (const T *)p->x + at; /* [n] */
            T *out = (T *)p->out + at;         /* [n] */
#pragma omp simd
            for (int64_t j = 0; j < n; j++) {
                sum[j] = PLUS(sum[j], LOAD(x[j]));
                out[j] = STORE(sum[j]);
            }
        }
    }
    return XT_OK;
}

#endif
