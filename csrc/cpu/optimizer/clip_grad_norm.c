/* clip_grad_norm.c - the common norm of all gradients, and clipping by it: a call each for a whole list of tensors.
 *
 *     norm = sqrt(sum of g^2 over all tensors);   clip: g *= min(1, max_norm / (norm + 1e-6))
 */
#ifndef T
#include "contract/optimizer.h"
#include "cpu/kernel.h"
#include "cpu/optimizer/pieces.h"

#include <stdlib.h>

#define XT_TEMPLATE "cpu/optimizer/clip_grad_norm.c"
#include "cpu/each_float.h"

typedef struct Run {
    const XtView *items; /* [count] */
    XtPieces pieces;
    double *sums;       /* norm: [pieces] */
    double coefficient; /* clip */
} Run;

static XtStatus cut(Run *run, const char *op, int64_t count) {
    XtStatus status = xt_pieces_allocate(&run->pieces, op, count);
    for (int64_t t = 0; status == XT_OK && t < count; t++) {
        status = xt_need_float("every gradient", run->items[t].dtype);
        xt_pieces_add(&run->pieces, t, xt_view_numel(&run->items[t]));
    }
    return status;
}

/* The tensor of a piece, where the piece begins in it, and its elements. */
static const XtView *item_of(const Run *run, int64_t piece, int64_t *offset, int64_t *n) {
    int64_t t = xt_pieces_tensor(&run->pieces, piece);
    *offset = xt_pieces_range(&run->pieces, t, piece, xt_view_numel(&run->items[t]), n);
    return &run->items[t];
}

static XtStatus grad_norm_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t offset, n;
        const XtView *item = item_of(run, piece, &offset, &n);
        run->sums[piece] = XT_BY_FLOAT(item->dtype, squares_range)(item->data, offset, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_grad_norm(const XtGradNorm *p) {
    Run run = {.items = p->items};
    XtStatus status = XT_OK;
    XT_TRY(cut(&run, "grad_norm", p->count));
    int64_t pieces = run.pieces.first[p->count];
    run.sums = malloc((size_t)(pieces + 1) * sizeof *run.sums); /* + 1: never 0 bytes */
    if (!run.sums) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "grad_norm: scratch of %lld sums could not be allocated", (long long)pieces));
    XT_TRY(xt_parallel(pieces, 2, grad_norm_pieces, &run));
    double sum = 0;
    for (int64_t i = 0; i < pieces; i++) sum += run.sums[i];
    *p->norm = (float)sqrt(sum);
done:
    free(run.sums);
    free(run.pieces.first);
    return status;
}

static XtStatus clip_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t offset, n;
        const XtView *item = item_of(run, piece, &offset, &n);
        XT_BY_FLOAT(item->dtype, scale_range)(item->data, run->coefficient, offset, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_clip(const XtClip *p) {
    Run run = {.items = p->items, .coefficient = p->max_norm / ((double)p->norm[0] + 1e-6)};
    if (run.coefficient >= 1) return XT_OK; /* false for NaN, which goes on to the gradients */
    XtStatus status = cut(&run, "clip", p->count);
    if (status == XT_OK) status = xt_parallel(run.pieces.first[p->count], 2, clip_pieces, &run);
    free(run.pieces.first);
    return status;
}

#else

/* Sum of x^2 over the elements [offset, offset + n), in float64 for every dtype. */
XT_FAST static double NAME(squares_range)(const void *data, int64_t offset, int64_t n) {
    const T *x = (const T *)data + offset; /* [n] */
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)LOAD(x[i]) * (double)LOAD(x[i]);
    return sum;
}

XT_FAST static void NAME(scale_range)(void *data, double coefficient, int64_t offset, int64_t n) {
    T *x = (T *)data + offset; /* [n] */
    ACC scale = (ACC)coefficient;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = STORE(LOAD(x[i]) * scale);
}

#endif
