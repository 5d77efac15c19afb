/* swiglu.c - the gated activation of the MLP (Shazeer 2020, https://arxiv.org/abs/2002.05202).
 *
 *     forward    out = silu(gate) up,  silu(g) = g s,  s = sigmoid(g) = 1 / (1 + exp(-g))
 *     backward   ds/dg = s (1 - s), hence  dgate = dy up s (1 + gate (1 - s)),   dup = dy gate s
 *
 * gate and up may be the two halves of one [rows, 2 cols] product: their rows lie ld_in apart.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

#define XT_TEMPLATE "cpu/layers/swiglu.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_swiglu_fwd(const XtSwigluFwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, swiglu_fwd), (void *)p);
}

XtStatus xt_cpu_swiglu_bwd(const XtSwigluBwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, swiglu_bwd), (void *)p);
}

#else

XT_FAST static XtStatus NAME(swiglu_fwd)(void *context, int64_t begin, int64_t end) {
    const XtSwigluFwd *p = context;
    for (int64_t r = begin; r < end; r++) {
        const T *gate = (const T *)p->gate + r * p->ld_in, *up = (const T *)p->up + r * p->ld_in; /* [cols] */
        T *out = (T *)p->out + r * p->cols;                                                       /* [cols] */
#pragma omp simd
        for (int64_t j = 0; j < p->cols; j++) {
            ACC g = LOAD(gate[j]);
            out[j] = STORE(g / (1 + EXP(-g)) * LOAD(up[j]));
        }
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(swiglu_bwd)(void *context, int64_t begin, int64_t end) {
    const XtSwigluBwd *p = context;
    for (int64_t r = begin; r < end; r++) {
        const T *gate = (const T *)p->gate + r * p->ld_in, *up = (const T *)p->up + r * p->ld_in; /* [cols] */
        const T *dy = (const T *)p->dy + r * p->cols;                                             /* [cols] */
        T *dgate = (T *)p->dgate + r * p->ld_in, *dup = (T *)p->dup + r * p->ld_in;               /* [cols] */
#pragma omp simd
        for (int64_t j = 0; j < p->cols; j++) {
            ACC g = LOAD(gate[j]), u = LOAD(up[j]), d = LOAD(dy[j]);
            ACC s = 1 / (1 + EXP(-g));
            dgate[j] = STORE(d * u * s * (1 + g * (1 - s)));
            dup[j] = STORE(d * g * s);
        }
    }
    return XT_OK;
}

#endif
