/* adamw.c - one AdamW step of a whole list of tensors in one call.
 *
 *     AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), PyTorch's order of operations; n is the number of the step:
 *         p *= 1 - lr weight_decay;   m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2
 *         p -= lr / (1 - beta1^n)  m / (sqrt(v) / sqrt(1 - beta2^n) + eps)
 */
#ifndef T
#include "contract/optimizer.h"
#include "core/power.h"
#include "cpu/kernel.h"
#include "cpu/optimizer/pieces.h"

#include <stdlib.h>

/* The numbers of a tensor's step that do not depend on the element, in float64; ranges cast them to ACC. */
typedef struct AdamWNumbers {
    const XtAdamWItem *item;
    double decay, beta1, beta2, rest1, rest2, step_size, root2, eps, scale; /* rest = 1 - beta, root2 = sqrt(1 - beta2^n) */
} AdamWNumbers;

#define XT_TEMPLATE "cpu/optimizer/adamw.c"
#include "cpu/each_float.h"

static AdamWNumbers numbers_of(const XtAdamW *p, const XtAdamWItem *item) {
    const int64_t n = *item->step + 1;
    return (AdamWNumbers){
        .item = item,
        .decay = 1 - fma(*p->lr, p->weight_decay, 0.0), /* the product is rounded: compilers fuse a * b - c where the CPU can */
        .beta1 = p->beta1,
        .beta2 = p->beta2,
        .rest1 = 1 - p->beta1,
        .rest2 = 1 - p->beta2,
        .step_size = *p->lr / (1 - xt_power(p->beta1, n)),
        .root2 = sqrt(1 - xt_power(p->beta2, n)),
        .eps = p->eps,
        .scale = p->scale ? *p->scale : 1,
    };
}

typedef struct Run {
    XtPieces pieces;
    AdamWNumbers *numbers; /* [tensors of all groups] */
} Run;

static XtStatus adamw_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t t = xt_pieces_tensor(&run->pieces, piece), n;
        const XtAdamWItem *item = run->numbers[t].item;
        int64_t offset = xt_pieces_range(&run->pieces, t, piece, item->numel, &n);
        XT_BY_FLOAT(item->dtype, adamw_range)(item, &run->numbers[t], offset, n);
    }
    return XT_OK;
}

XtStatus xt_cpu_adamw(const XtAdamW *p) {
    Run run = {0};
    XtStatus status = XT_OK;
    int64_t tensors = 0, t = 0;
    for (const XtAdamW *group = p; group; group = group->next) tensors += group->count;
    if (tensors == 0 || (p->guard && !isfinite(*p->guard))) return XT_OK;
    XT_TRY(xt_pieces_allocate(&run.pieces, "adamw", tensors));
    run.numbers = malloc((size_t)tensors * sizeof *run.numbers);
    if (!run.numbers)
        XT_TRY(xt_error(XT_OUT_OF_MEMORY, "adamw: scratch for the numbers of %lld tensors could not be allocated",
                        (long long)tensors));
    for (const XtAdamW *group = p; group; group = group->next) {
        for (int64_t i = 0; i < group->count; i++, t++) {
            XT_TRY(xt_need_float("every parameter", group->items[i].dtype));
            xt_pieces_add(&run.pieces, t, group->items[i].numel);
            run.numbers[t] = numbers_of(group, &group->items[i]);
        }
    }
    XT_TRY(xt_parallel(run.pieces.first[tensors], 1, adamw_pieces, &run));
    for (t = 0; t < tensors; t++) ++*run.numbers[t].item->step;
done:
    free(run.numbers);
    free(run.pieces.first);
    return status;
}

#else

/* One step of n elements. Inlined once for each set of pointers that are not NULL, so that the loop does not branch. All are [n]; g or
 * wide_g is the gradient. */
XT_INLINE void NAME(adamw_loop)(T *p, const T *g, const ACC *wide_g, ACC *m, ACC *v, ACC *master, const AdamWNumbers *number,
                                int64_t n) {
    ACC decay = (ACC)number->decay, beta1 = (ACC)number->beta1, beta2 = (ACC)number->beta2, eps = (ACC)number->eps;
    ACC rest1 = (ACC)number->rest1, rest2 = (ACC)number->rest2, step_size = (ACC)number->step_size, root2 = (ACC)number->root2;
    ACC scale = (ACC)number->scale;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        ACC gi = (wide_g ? wide_g[i] : LOAD(g[i])) * scale, w = (master ? master[i] : LOAD(p[i])) * decay;
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
    const ACC *wide_g = (const ACC *)item->g + offset;
    ACC *m = (ACC *)item->m + offset, *v = (ACC *)item->v + offset, *master = (ACC *)item->master;
    const bool wide = item->dtype_g != item->dtype;
    if (master && wide) NAME(adamw_loop)(p, NULL, wide_g, m, v, master + offset, number, n);
    else if (master) NAME(adamw_loop)(p, g, NULL, m, v, master + offset, number, n);
    else if (wide) NAME(adamw_loop)(p, NULL, wide_g, m, v, NULL, number, n);
    else NAME(adamw_loop)(p, g, NULL, m, v, NULL, number, n);
}

#endif
