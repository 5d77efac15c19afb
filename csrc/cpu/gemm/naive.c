/* naive.c - the matrix product as three loops: the specification that the other backends are compared with.
 *
 * Each element of C is one sum over k, from 0 upwards, in ACC: it depends on its row of op(A) and its column of op(B) alone.
 * The sum starts from beta C, so that adding product after product into C is the same chain of additions as one product over all
 * of K.
 */
#ifndef T
#include "gemm.h"
#define XT_TEMPLATE "cpu/gemm/naive.c"
#include "cpu/each_float.h"

XtStatus xt_gemm_naive(const XtGemm *p) {
    XtStatus status;
    if (xt_gemm_trivial(p, &status)) return status;
    int64_t rows = p->batch[0] * p->batch[1] * p->m;
    return xt_parallel(rows, xt_row_grain(p->n * p->k, 65536), XT_BY_FLOAT(p->dtype_a, naive_rows), (void *)p);
}
#else

/* Element i of C. */
XT_INLINE ACC NAME(load_c)(const XtGemm *p, int64_t i) {
    return p->dtype_c == p->dtype_a ? LOAD(((const T *)p->c)[i]) : (ACC)((const float *)p->c)[i];
}
XT_INLINE void NAME(store_c)(const XtGemm *p, int64_t i, ACC value) {
    if (p->dtype_c == p->dtype_a) ((T *)p->c)[i] = STORE(value);
    else ((float *)p->c)[i] = (float)value;
}

static XtStatus NAME(naive_rows)(void *context, int64_t begin, int64_t end) {
    const XtGemm *p = context;
    int64_t a_m = p->trans_a ? 1 : p->lda, a_k = p->trans_a ? p->lda : 1; /* steps in A along m and k */
    int64_t b_k = p->trans_b ? 1 : p->ldb, b_n = p->trans_b ? p->ldb : 1;
    ACC alpha = (ACC)p->alpha, beta = (ACC)p->beta;
    for (int64_t row = begin; row < end; row++) {
        XtGemmOffsets at = xt_gemm_offsets(p, row / p->m);
        int64_t m = row % p->m;
        const T *a = (const T *)p->a + at.a + m * a_m; /* [K], step a_k */
        int64_t c = at.c + m * p->ldc;                 /* [N] */
        for (int64_t n = 0; n < p->n; n++) {
            const T *b = (const T *)p->b + at.b + n * b_n; /* [K], step b_k */
            ACC sum = beta == 0 ? 0 : beta * NAME(load_c)(p, c + n);
            for (int64_t k = 0; k < p->k; k++) sum += alpha * LOAD(a[k * a_k]) * LOAD(b[k * b_k]);
            NAME(store_c)(p, c + n, sum);
        }
    }
    return XT_OK;
}

#endif
