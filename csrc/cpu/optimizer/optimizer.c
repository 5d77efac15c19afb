/* optimizer.c - AdamW, the norm of all gradients, and clipping: one call for a whole list of tensors.
 *
 *     AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), PyTorch's order of operations:
 *         p *= 1 - lr weight_decay;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
 *         p -= lr / (1 - beta1^step)  m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
 *     norm = sqrt(sum of g^2 over all tensors);   clip: g *= min(1, max_norm / (norm + 1e-6))
 *
 * Every tensor is cut into pieces of PIECE elements and the pieces of all tensors are numbered through: many small tensors keep the
 * threads as busy as a few large ones, and sums are made per piece and added in the order of the numbers.
 */
#ifndef T
#include "contract/optimizer.h"
#include "cpu/kernel.h"

#include <stdlib.h>

enum { PIECE = 16384 };

/* The numbers of AdamW that do not depend on the element, in float64; ranges cast them to ACC. */
typedef struct AdamWNumbers {
    double decay, beta1, beta2, rest1, rest2, step_size, root2, eps; /* rest = 1 - beta, root2 = sqrt(1 - beta2^step) */
} AdamWNumbers;

#define XT_TEMPLATE "cpu/optimizer/optimizer.c"
#include "cpu/each_float.h"

/* A run over the pieces of a list: tensor t owns the pieces first[t] .. first[t + 1]. */
typedef struct Run {
    const void *params;  /* XtAdamW, XtGradNorm or XtClip */
    int64_t *first;      /* [count + 1], owned */
    int64_t count;       /* tensors */
    double *sums;        /* grad_norm: [pieces] */
    AdamWNumbers number; /* adamw: without decay, which each tensor has of its own */
    double coefficient;  /* clip */
} Run;

static int64_t pieces_of(int64_t numel) { return (numel + PIECE - 1) / PIECE; }

static XtStatus run_allocate(Run *run, const char *op, int64_t count) {
    run->count = count;
    run->first = malloc((size_t)(count + 1) * sizeof *run->first);
    if (!run->first)
        return xt_error(XT_OUT_OF_MEMORY, "%s: scratch for a list of %lld tensors could not be allocated", op, (long long)count);
    run->first[0] = 0;
    return XT_OK;
}

static XtStatus run_over_views(Run *run, const char *op, const XtView *items, int64_t count) {
    XtStatus status = run_allocate(run, op, count);
    for (int64_t t = 0; status == XT_OK && t < count; t++) run->first[t + 1] = run->first[t] + pieces_of(xt_view_numel(&items[t]));
    return status;
}

/* The tensor that owns a piece: the last one whose first piece is not after it. */
static int64_t tensor_of(const Run *run, int64_t piece) {
    int64_t low = 0, high = run->count; /* first[low] <= piece < first[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (run->first[middle] <= piece) low = middle;
        else high = middle;
    }
    return low;
}

/* Where piece begins in tensor t, and how many elements it has. */
static int64_t piece_range(const Run *run, int64_t t, int64_t piece, int64_t numel, int64_t *n) {
    int64_t offset = (piece - run->first[t]) * PIECE;
    *n = numel - offset < PIECE ? numel - offset : PIECE;
    return offset;
}

static XtStatus adamw_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    const XtAdamW *p = run->params;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t t = tensor_of(run, piece), n, offset = piece_range(run, t, piece, p->items[t].numel, &n);
        AdamWNumbers number = run->number;
        number.decay = 1 - p->lr * p->items[t].weight_decay;
        XT_BY_FLOAT(p->items[t].dtype, adamw_range)(&p->items[t], &number, offset, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_adamw(const XtAdamW *p) {
    Run run = {.params = p};
    const bool stopped = p->guard && !isfinite(*p->guard);
    if (p->missed_after) *p->missed_after = *p->missed + stopped;
    if (stopped) return XT_OK;
    XtStatus status = run_allocate(&run, "adamw", p->count);
    if (status != XT_OK) return status;
    for (int64_t t = 0; t < p->count; t++) run.first[t + 1] = run.first[t] + pieces_of(p->items[t].numel);
    double step = (double)(p->step - (p->missed ? *p->missed : 0));
    run.number = (AdamWNumbers){
        .beta1 = p->beta1,
        .beta2 = p->beta2,
        .rest1 = 1 - p->beta1,
        .rest2 = 1 - p->beta2,
        .step_size = p->lr / (1 - pow(p->beta1, step)),
        .root2 = sqrt(1 - pow(p->beta2, step)),
        .eps = p->eps,
    };
    status = xt_parallel(run.first[p->count], 1, adamw_pieces, &run);
    free(run.first);
    return status;
}

static XtStatus grad_norm_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    const XtView *items = ((const XtGradNorm *)run->params)->items;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t t = tensor_of(run, piece), n, offset = piece_range(run, t, piece, xt_view_numel(&items[t]), &n);
        run->sums[piece] = XT_BY_FLOAT(items[t].dtype, squares_range)(items[t].data, offset, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_grad_norm(const XtGradNorm *p) {
    Run run = {.params = p};
    XtStatus status = XT_OK;
    XT_TRY(run_over_views(&run, "grad_norm", p->items, p->count));
    int64_t pieces = run.first[p->count];
    run.sums = malloc((size_t)(pieces + 1) * sizeof *run.sums); /* + 1: never 0 bytes */
    if (!run.sums) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "grad_norm: scratch of %lld sums could not be allocated", (long long)pieces));
    XT_TRY(xt_parallel(pieces, 2, grad_norm_pieces, &run));
    double sum = 0;
    for (int64_t i = 0; i < pieces; i++) sum += run.sums[i];
    *p->norm = (float)sqrt(sum);
done:
    free(run.sums);
    free(run.first);
    return status;
}

static XtStatus clip_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    const XtView *items = ((const XtClip *)run->params)->items;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t t = tensor_of(run, piece), n, offset = piece_range(run, t, piece, xt_view_numel(&items[t]), &n);
        XT_BY_FLOAT(items[t].dtype, scale_range)(items[t].data, run->coefficient, offset, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_clip(const XtClip *p) {
    Run run = {.params = p, .coefficient = p->max_norm / ((double)p->norm[0] + 1e-6)};
    if (run.coefficient >= 1) return XT_OK; /* false for NaN, which goes on to the gradients */
    XtStatus status = run_over_views(&run, "clip", p->items, p->count);
    if (status != XT_OK) return status;
    status = xt_parallel(run.first[p->count], 2, clip_pieces, &run);
    free(run.first);
    return status;
}

#else

/* One step of n elements. Inlined once with and once without `master`, so that the loop does not branch. All pointers are [n]. */
XT_INLINE void NAME(adamw_loop)(T *p, const T *g, ACC *m, ACC *v, ACC *master, const AdamWNumbers *number, int64_t n) {
    ACC decay = (ACC)number->decay, beta1 = (ACC)number->beta1, beta2 = (ACC)number->beta2, eps = (ACC)number->eps;
    ACC rest1 = (ACC)number->rest1, rest2 = (ACC)number->rest2, step_size = (ACC)number->step_size, root2 = (ACC)number->root2;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        ACC gi = LOAD(g[i]), w = (master ? master[i] : LOAD(p[i])) * decay;
        ACC mi = beta1 * m[i] + rest1 * gi, vi = beta2 * v[i] + rest2 * gi * gi;
        w -= step_size * mi / (SQRT(vi) / root2 + eps);
        m[i] = mi;
        v[i] = vi;
        if (master) master[i] = w;
        p[i] = STORE(w);
    }
}

/* The elements [offset, offset + n) of a tensor. */
XT_FAST static void NAME(adamw_range)(const XtAdamWItem *item, const AdamWNumbers *number, int64_t offset, int64_t n) {
    T *p = (T *)item->p + offset;
    const T *g = (const T *)item->g + offset;
    ACC *m = (ACC *)item->m + offset, *v = (ACC *)item->v + offset;
    if (item->master) NAME(adamw_loop)(p, g, m, v, (ACC *)item->master + offset, number, n);
    else NAME(adamw_loop)(p, g, m, v, NULL, number, n);
}

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
