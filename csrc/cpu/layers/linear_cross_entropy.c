/* linear_cross_entropy.c - what a backward does with the gradients that a forward in chunks has left: out = x dloss / total, rounded once.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

#define XT_TEMPLATE "cpu/layers/linear_cross_entropy.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_linear_cross_entropy_bwd(const XtLinearCrossEntropyBwd *p) {
    return xt_parallel(p->count, 16384, XT_BY_FLOAT(p->dtype, linear_cross_entropy_bwd), (void *)p);
}

#else

XT_FAST static XtStatus NAME(linear_cross_entropy_bwd)(void *context, int64_t begin, int64_t end) {
    const XtLinearCrossEntropyBwd *p = context;
    const ACC *x = p->x; /* [count] */
    T *out = p->out;     /* [count], which may be x */
    ACC dloss = *(const ACC *)p->dloss, total = p->total ? *(const ACC *)p->total : 1, factor = dloss / total * (ACC)p->scale;
    if (p->accumulate) {
#pragma omp simd
        for (int64_t i = begin; i < end; i++) out[i] = STORE(LOAD(out[i]) + (x[i] == 0 ? 0 : x[i] * factor));
    } else {
#pragma omp simd
        for (int64_t i = begin; i < end; i++) out[i] = STORE(x[i] == 0 ? 0 : x[i] * factor);
    }
    return XT_OK;
}

#endif
