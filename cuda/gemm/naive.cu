/* naive.cu - C = alpha op(A) op(B) + beta C with one thread an element of C: the specification on the GPU.
 *
 * op(A) [M, K], op(B) [K, N], C [M, N], for each of batch0 x batch1 matrices. A block of 16 x 16 threads makes a 16 x 16 square of
 * C; neighbouring threads have neighbouring columns, so that C, and B unless it is transposed, are accessed in whole sectors.
 * Every element reads its row and its column from memory: 2 M N K elements in all, less what the caches hold.
 *
 * Each element is one sum over k from 0 upwards, in ACC, that starts from beta C: as on the CPU, adding product after product into
 * C is the same chain of additions as one product over all of K.
 */
#include "gemm.cuh"

#define SQUARE 16

template <typename T, typename C> __global__ void gemm_naive_kernel(XtGemm p) { // A and B of T
    typedef XtAcc<T> ACC;
    int64_t a_m = p.trans_a ? 1 : p.lda, a_k = p.trans_a ? p.lda : 1; /* steps in A along m and k */
    int64_t b_k = p.trans_b ? 1 : p.ldb, b_n = p.trans_b ? p.ldb : 1;
    int64_t squares_n = (p.n + SQUARE - 1) / SQUARE, squares = (p.m + SQUARE - 1) / SQUARE * squares_n;
    int64_t items = p.batch[0] * p.batch[1] * squares;
    ACC alpha = (ACC)p.alpha, beta = (ACC)p.beta;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        int64_t square = item % squares;
        int64_t m = square / squares_n * SQUARE + threadIdx.y, n = square % squares_n * SQUARE + threadIdx.x;
        if (m >= p.m || n >= p.n) continue;
        XtGemmOffsets at = xt_gemm_offsets(&p, item / squares);
        const T *a = (const T *)p.a + at.a + m * a_m; /* [K], step a_k */
        const T *b = (const T *)p.b + at.b + n * b_n; /* [K], step b_k */
        C *c = (C *)p.c + at.c + m * p.ldc + n;
        ACC sum = beta == 0 ? ACC(0) : beta * xt_load(*c);
        for (int64_t k = 0; k < p.k; k++) sum += alpha * xt_load(a[k * a_k]) * xt_load(b[k * b_k]);
        *c = xt_store<C>(sum);
    }
}

XtStatus xt_cuda_gemm_naive(const XtGemm *p) {
    XtStatus status;
    if (xt_cuda_gemm_trivial(p, &status)) return status;
    return xt_by_gemm_dtypes(p, [&](auto a, auto c) {
        int64_t squares = xt_divide_up(p->m, SQUARE) * xt_divide_up(p->n, SQUARE);
        unsigned blocks = xt_blocks(p->batch[0] * p->batch[1] * squares, 1);
        xt_launch(gemm_naive_kernel<decltype(a), decltype(c)>, blocks, dim3(SQUARE, SQUARE), 0, *p);
        return xt_launched("gemm_naive", p->batch[0], p->batch[1], p->m, p->n, p->k);
    });
}
