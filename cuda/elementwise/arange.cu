/* arange.cu - dst[i] = start + i * step, dst [n] dense: in int64 when both are integers, else in float64.
 *
 * Each element comes from its index, so no error accumulates. Plan: one element a thread, grid stride. Bytes moved: dst once.
 */
#include "common/strided.cuh"
#include "contract/elementwise.h"

template <typename T, typename W> __global__ void arange_kernel(T *dst, W start, W step, int64_t n) { // dst [n]
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        if constexpr (sizeof(W) == sizeof(double) && (W)0.5 != 0) dst[i] = xt_cast_to<T>(fma((double)i, step, start));
        else dst[i] = xt_cast_to<T>((int64_t)((uint64_t)start + (uint64_t)i * (uint64_t)step));
    }
}

XtStatus xt_cuda_arange(const XtArange *p) {
    int64_t n = p->dst.ndim > 0 ? p->dst.shape[0] : 1;
    if (n == 0) return XT_OK;
    return xt_by_dtype(p->dst.dtype, [&](auto zero) {
        using T = decltype(zero);
        T *dst = (T *)p->dst.data;
        if (p->start.is_int && p->step.is_int)
            xt_launch(arange_kernel<T, int64_t>, xt_blocks(n, 256), 256, 0, dst, p->start.i, p->step.i, n);
        else xt_launch(arange_kernel<T, double>, xt_blocks(n, 256), 256, 0, dst, p->start.d, p->step.d, n);
        return xt_launched("arange", n);
    });
}
