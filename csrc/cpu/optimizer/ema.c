/* ema.c - exponential averages of a list of tensors in one call.
 *
 *     average += (x - average) (1 - decay) / (1 - decay^n): Adam's bias correction (Kingma & Ba 2015), made as it goes
 */
#ifndef T
#include "contract/optimizer.h"
#include "core/power.h"
#include "cpu/kernel.h"
#include "cpu/optimizer/pieces.h"

#define XT_TEMPLATE "cpu/optimizer/ema.c"
#include "cpu/each_float.h"

typedef struct Run {
    const XtEma *p;
    XtPieces pieces;
    double factor;
} Run;

static XtStatus ema_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t t = xt_pieces_tensor(&run->pieces, piece), n;
        const XtEmaItem *item = &run->p->items[t];
        int64_t offset = xt_pieces_range(&run->pieces, t, piece, item->numel, &n);
        XT_BY_FLOAT(item->dtype, ema_range)(item, run->factor, offset, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_ema(const XtEma *p) {
    Run run = {.p = p};
    XtStatus status = XT_OK;
    if (p->guard && !isfinite(*p->guard)) return XT_OK;
    XT_TRY(xt_pieces_allocate(&run.pieces, "ema", p->count));
    for (int64_t i = 0; i < p->count; i++) {
        XT_TRY(xt_need_float("every tensor", p->items[i].dtype));
        xt_pieces_add(&run.pieces, i, p->items[i].numel);
    }
    run.factor = (1 - p->decay) / (1 - xt_power(p->decay, *p->step + 1));
    XT_TRY(xt_parallel(run.pieces.first[p->count], 1, ema_pieces, &run));
    ++*p->step;
done:
    free(run.pieces.first);
    return status;
}

#else

XT_FAST static void NAME(ema_range)(const XtEmaItem *item, double factor, int64_t offset, int64_t n) {
    ACC *average = (ACC *)item->average + offset; /* [n] */
    const T *x = (const T *)item->x + offset;     /* [n] */
    const ACC share = (ACC)factor;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) average[i] += (LOAD(x[i]) - average[i]) * share;
}

#endif
