/* bias_gelu.cu - a bias and GELU in one pass, v = x + bias (see csrc/cpu/layers/bias_gelu.c).
 *
 *     forward    out = gelu(v)          backward   dx = dy gelu'(v)
 *
 * out, x, dx, dy [rows, cols] dense, bias [cols].
 *
 * Plan: a thread has a 16-byte piece of a row, and the piece of the bias beside it, which the L1 cache holds. Unaligned or odd rows: one
 * element a piece. Grid stride. Bytes moved: 2 elements an output forward, 3 backward. An element is read before it is overwritten.
 */
#include "common/cuda.cuh"
#include "common/gelu.cuh"
#include "contract/layers.h"

static constexpr int THREADS = 256;

/* to = gelu(x + bias), or dy gelu'(x + bias) where there is dy. to, dy, x [rows, per_row * N], bias [per_row * N]. */
template <typename T, int N, bool TANH, bool SLOPE>
__global__ void __launch_bounds__(THREADS)
    bias_gelu_kernel(T *to, const T *dy, const T *x, const T *bias, int64_t pieces, int64_t per_row) {
    using A = XtAcc<T>;
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < pieces; i += (int64_t)gridDim.x * THREADS) {
        int64_t col = (int64_t)((uint64_t)i % (uint64_t)per_row) * N;
        XtVector<A, N> v = xt_load(xt_read<T, N>(x + i * N)), b = xt_load(xt_read<T, N>(bias + col)), d, y;
        if constexpr (SLOPE) d = xt_load(xt_read<T, N>(dy + i * N));
#pragma unroll
        for (int e = 0; e < N; e++) {
            A sum = v.at[e] + b.at[e];
            if constexpr (SLOPE) y.at[e] = d.at[e] * xt_gelu_slope<T, TANH>(sum);
            else y.at[e] = xt_gelu<T, TANH>(sum);
        }
        xt_write(to + i * N, xt_store<T>(y));
    }
}

template <typename T, int N, bool SLOPE>
static void launch(T *to, const T *dy, const T *x, const T *bias, int64_t rows, int64_t cols, bool tanh) {
    int64_t per_row = cols / N, pieces = rows * per_row;
    auto with = [&](auto kernel) { xt_launch(kernel, xt_blocks(pieces, THREADS), THREADS, 0, to, dy, x, bias, pieces, per_row); };
    if (tanh) with(bias_gelu_kernel<T, N, true, SLOPE>);
    else with(bias_gelu_kernel<T, N, false, SLOPE>);
}

XtStatus xt_cuda_bias_gelu_fwd(const XtBiasGeluFwd *p) {
    if (p->rows == 0 || p->cols == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        T *out = (T *)p->out;
        const T *x = (const T *)p->x, *bias = (const T *)p->bias;
        if (xt_aligned<T>(p->cols, 0, out, x, bias)) launch<T, XT_WIDTH<T>, false>(out, x, x, bias, p->rows, p->cols, p->tanh);
        else launch<T, 1, false>(out, x, x, bias, p->rows, p->cols, p->tanh);
        return xt_launched("bias_gelu_fwd", p->rows, p->cols);
    });
}

XtStatus xt_cuda_bias_gelu_bwd(const XtBiasGeluBwd *p) {
    if (p->rows == 0 || p->cols == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        T *dx = (T *)p->dx;
        const T *dy = (const T *)p->dy, *x = (const T *)p->x, *bias = (const T *)p->bias;
        if (xt_aligned<T>(p->cols, 0, dx, dy, x, bias)) launch<T, XT_WIDTH<T>, true>(dx, dy, x, bias, p->rows, p->cols, p->tanh);
        else launch<T, 1, true>(dx, dy, x, bias, p->rows, p->cols, p->tanh);
        return xt_launched("bias_gelu_bwd", p->rows, p->cols);
    });
}
