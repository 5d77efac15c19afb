/* select.cu - the table of named GEMMs of CUDA, products of other kernels, and the cases without a product.
 *
 * C *= beta (K == 0 or alpha == 0): one thread an element of C, the elements of all matrices of the batch in one row-major count;
 * writes C once and reads it only when beta != 0.
 */
#include "gemm.cuh"

#include "runtime/cublas.cuh"

static const char *any_dtypes(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    return xt_gemm_plain(p);
}

const XtGemmBackend xt_cuda_gemm[] = {
    {"hopper", "hopper", NULL, xt_cuda_gemm_hopper_supports, xt_cuda_gemm_hopper},
    {"few", "few", NULL, xt_cuda_gemm_few_supports, xt_cuda_gemm_few},
    {"cublas", "cublas", xt_cublas_check, xt_cuda_gemm_cublas_supports, xt_cuda_gemm_cublas},
    {"tiled", "tiled", NULL, any_dtypes, xt_cuda_gemm_tiled},
    {"naive", "naive", NULL, any_dtypes, xt_cuda_gemm_naive},
    {},
};

XtStatus xt_cuda_multiply(const XtGemm *p) { return xt_gemm_select(xt_cuda_gemm, p, xt_traits())->run(p); }

template <typename T> __global__ void gemm_scale_kernel(XtGemm p) { // c [batch0, batch1, M, N]
    typedef XtAcc<T> ACC;
    int64_t count = p.batch[0] * p.batch[1] * p.m * p.n;
    ACC beta = (ACC)p.beta;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t row = i / p.n;
        T *c = (T *)p.c + xt_gemm_offsets(&p, row / p.m).c + row % p.m * p.ldc + i % p.n;
        *c = xt_store<T>(beta == 0 ? ACC(0) : beta * xt_load(*c));
    }
}

bool xt_cuda_gemm_trivial(const XtGemm *p, XtStatus *status) {
    *status = XT_OK;
    if (xt_gemm_multiplies(p)) return false;
    if (p->m <= 0 || p->n <= 0 || p->batch[0] <= 0 || p->batch[1] <= 0) return true;
    *status = xt_by_float(p->dtype_c, [&](auto zero) {
        using T = decltype(zero);
        int64_t count = p->batch[0] * p->batch[1] * p->m * p->n;
        xt_launch(gemm_scale_kernel<T>, xt_blocks(count, 256), 256, 0, *p);
        return xt_launched("gemm", p->batch[0], p->batch[1], p->m, p->n, p->k);
    });
    return true;
}
