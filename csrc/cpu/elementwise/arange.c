/* arange.c - start + i * step. Each element from its index, so that no error builds up and any partition gives the same numbers. */
#include "contract/elementwise.h"
#include "cpu/strided.h"

XT_FAST static void integers(int64_t *out, int64_t start, int64_t step, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = (int64_t)((uint64_t)start + (uint64_t)(first + i) * (uint64_t)step);
}

XT_FAST static void reals(double *out, double start, double step, int64_t first, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = start + (double)(first + i) * step;
}

static XtStatus arange_piece(void *context, int64_t begin, int64_t end) {
    const XtArange *p = context;
    const size_t size = xt_dtype_size(p->dst.dtype);
    const bool exact = p->start.is_int && p->step.is_int;
    union {
        int64_t i[XT_BLOCK];
        double d[XT_BLOCK];
    } made;
    for (int64_t first = begin; first < end; first += XT_BLOCK) {
        int64_t n = end - first < XT_BLOCK ? end - first : XT_BLOCK;
        if (exact) integers(made.i, p->start.i, p->step.i, first, n);
        else reals(made.d, p->start.d, p->step.d, first, n);
        xt_convert((char *)p->dst.data + (size_t)first * size, p->dst.dtype, &made, exact ? XT_INT64 : XT_FLOAT64, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_arange(const XtArange *p) {
    int64_t n = p->dst.ndim > 0 ? p->dst.shape[0] : 1;
    return xt_parallel(n, XT_EACH_GRAIN, arange_piece, (void *)p);
}
