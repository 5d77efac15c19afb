/* bias_gelu.c - a bias and GELU in one pass (Hendrycks & Gimpel 2016), v = x + bias.
 *
 *     forward    out = v Phi(v), or with tanh  v sigmoid(2 u),  u = sqrt(2 / pi) (v + 0.044715 v^3): v (1 + tanh(u)) / 2
 *     backward   dx = dy (Phi(v) + v phi(v)), or  dy (s + v s (1 - s) 2 u'),  s = sigmoid(2 u)
 *
 * The formulas are those of cpu/elementwise/unary.c: float32 and float64 have the bits of an addition and gelu.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/elementwise/unary_math.h"
#include "cpu/kernel.h"

#define SQRT_2_PI 0.79788456080286535588    /* sqrt(2 / pi) */
#define SQRT_2PI_INV 0.39894228040143267794 /* 1 / sqrt(2 pi) */
#define CUBIC 0.044715

static inline double normal_cdf(double x, double *gauss) {
    *gauss = exp(-0.5 * x * x);
    return 0.5 * erfc(-x * M_SQRT1_2);
}

#define XT_TEMPLATE "cpu/layers/bias_gelu.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_bias_gelu_fwd(const XtBiasGeluFwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, bias_gelu_fwd), (void *)p);
}

XtStatus xt_cpu_bias_gelu_bwd(const XtBiasGeluBwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, bias_gelu_bwd), (void *)p);
}

#else

#if IS_F64
#define CDF(v, gauss) normal_cdf(v, gauss)
#define ABS(v) fabs(v)
#else
#define CDF(v, gauss) xt_normal_cdff(v, gauss)
#define ABS(v) fabsf(v)
#endif

XT_FAST static XtStatus NAME(bias_gelu_fwd)(void *context, int64_t begin, int64_t end) {
    const XtBiasGeluFwd *p = context;
    const T *bias = p->bias; /* [cols] */
    for (int64_t r = begin; r < end; r++) {
        const T *x = (const T *)p->x + r * p->cols; /* [cols] */
        T *out = (T *)p->out + r * p->cols;         /* [cols] */
        if (p->tanh) {
#pragma omp simd
            for (int64_t j = 0; j < p->cols; j++) {
                ACC v = LOAD(x[j]) + LOAD(bias[j]);
                out[j] = STORE(v / (1 + EXP(-2 * (ACC)SQRT_2_PI * (v + (ACC)CUBIC * v * v * v))));
            }
        } else {
#pragma omp simd
            for (int64_t j = 0; j < p->cols; j++) {
                ACC v = LOAD(x[j]) + LOAD(bias[j]), gauss;
                out[j] = STORE(v * CDF(v, &gauss));
            }
        }
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(bias_gelu_bwd)(void *context, int64_t begin, int64_t end) {
    const XtBiasGeluBwd *p = context;
    const T *bias = p->bias; /* [cols] */
    for (int64_t r = begin; r < end; r++) {
        const T *x = (const T *)p->x + r * p->cols, *dy = (const T *)p->dy + r * p->cols; /* [cols] */
        T *dx = (T *)p->dx + r * p->cols;                                                 /* [cols] */
        if (p->tanh) {
#pragma omp simd
            for (int64_t j = 0; j < p->cols; j++) {
                ACC v = LOAD(x[j]) + LOAD(bias[j]), d = LOAD(dy[j]), v2 = v * v;
                ACC u2 = 2 * (ACC)SQRT_2_PI * (v + (ACC)CUBIC * v2 * v), e = EXP(-ABS(u2)), q = 1 / (1 + e);
                ACC s = u2 < 0 ? e * q : q, du2 = 2 * (ACC)SQRT_2_PI * (1 + 3 * (ACC)CUBIC * v2);
                dx[j] = STORE(d * (s + v * (e * q * q) * du2));
            }
        } else {
#pragma omp simd
            for (int64_t j = 0; j < p->cols; j++) {
                ACC v = LOAD(x[j]) + LOAD(bias[j]), d = LOAD(dy[j]), gauss, cdf = CDF(v, &gauss);
                dx[j] = STORE(d * (cdf + v * gauss * (ACC)SQRT_2PI_INV));
            }
        }
    }
    return XT_OK;
}

#undef CDF
#undef ABS
#endif
