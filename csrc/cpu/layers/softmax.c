/* softmax.c - softmax over rows.
 *
 *     forward    p_j  = exp(x_j - m) / sum_k exp(x_k - m),  m = max_k x_k     (the shift keeps exp from overflowing)
 *     backward   dp_j/dx_i = p_j ([i == j] - p_i), hence  dx_i = p_i (dy_i - sum_j dy_j p_j)
 *
 * A row that holds a NaN or +Inf, or only -Inf, comes out as NaN, as in PyTorch: the NaN passes through the sum.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/kernel.h"

/* A long row is summed in blocks: 50000 terms added one by one would cost two digits of float32. */
enum { BLOCK = 1024 };

#define XT_TEMPLATE "cpu/layers/softmax.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_softmax_fwd(const XtSoftmaxFwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, softmax_fwd), (void *)p);
}

XtStatus xt_cpu_softmax_bwd(const XtSoftmaxBwd *p) {
    return xt_parallel(p->rows, xt_row_grain(p->cols, 16384), XT_BY_FLOAT(p->dtype, softmax_bwd), (void *)p);
}

#else

XT_FAST static XtStatus NAME(softmax_fwd)(void *context, int64_t begin, int64_t end) {
    const XtSoftmaxFwd *p = context;
    int64_t cols = p->cols;
    for (int64_t r = begin; r < end; r++) {
        const T *x = (const T *)p->x + r * cols; /* [cols] */
        T *out = (T *)p->out + r * cols;         /* [cols] */
        ACC max = -INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
        for (int64_t j = 0; j < cols; j++) {
            ACC v = LOAD(x[j]);
            max = v > max ? v : max;
        }
        for (int64_t block = 0; block < cols; block += BLOCK) {
            int64_t last = block + BLOCK < cols ? block + BLOCK : cols;
            ACC part = 0;
#pragma omp simd reduction(+ : part)
            for (int64_t j = block; j < last; j++) part += EXP(LOAD(x[j]) - max);
            sum += part;
        }
        ACC scale = 1 / sum;
        /* exp a second time: keeping the first one in `out` would round it to a short T before it is scaled. */
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) out[j] = STORE(EXP(LOAD(x[j]) - max) * scale);
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(softmax_bwd)(void *context, int64_t begin, int64_t end) {
    const XtSoftmaxBwd *p = context;
    int64_t cols = p->cols;
    for (int64_t r = begin; r < end; r++) {
        const T *dy = (const T *)p->dy + r * cols; /* [cols] */
        const T *y = (const T *)p->p + r * cols;   /* [cols] */
        T *dx = (T *)p->dx + r * cols;             /* [cols] */
        ACC dot = 0;
#pragma omp simd reduction(+ : dot)
        for (int64_t j = 0; j < cols; j++) dot += LOAD(dy[j]) * LOAD(y[j]);
#pragma omp simd
        for (int64_t j = 0; j < cols; j++) dx[j] = STORE(LOAD(y[j]) * (LOAD(dy[j]) - dot));
    }
    return XT_OK;
}

#endif
