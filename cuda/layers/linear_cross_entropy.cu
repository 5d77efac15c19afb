/* linear_cross_entropy.cu - what a backward does with the gradients that a forward in chunks has left: out = x dloss / total, rounded
 * once. x [count] in ACC, out [count] in T.
 *
 * A thread takes N elements, 16 bytes of out, PIECES times. Bytes moved: x once, out once, and once more where it is added to.
 */
#include "common/cuda.cuh"
#include "contract/layers.h"

static constexpr int THREADS = 256, PIECES = 2;

/* Element for element: out may be x. */
template <typename T, int N, bool ADD>
__global__ void __launch_bounds__(THREADS) linear_cross_entropy_bwd_kernel(T *out, const XtAcc<T> *x, const XtAcc<T> *dloss,
                                                                           const XtAcc<T> *total, double scale, int64_t count) {
    using A = XtAcc<T>;
    constexpr int WIDE = N < XT_WIDTH<A> ? N : XT_WIDTH<A>, PARTS = N / WIDE; /* N elements of x are this many accesses */
    const A factor = *dloss / (total ? *total : A(1)) * (A)scale;
    const int64_t pieces = count / N, step = (int64_t)gridDim.x * (THREADS * PIECES);
    for (int64_t first = (int64_t)blockIdx.x * (THREADS * PIECES) + threadIdx.x; first < pieces; first += step) {
        XtPiece<A, WIDE> from[PIECES][PARTS];
        XtPiece<T, N> there[PIECES];
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            const int64_t at = (first + k * THREADS) * N;
            if (first + k * THREADS >= pieces) continue;
#pragma unroll
            for (int part = 0; part < PARTS; part++) from[k][part] = xt_read<A, WIDE>(x + at + part * WIDE);
            if (ADD) there[k] = xt_read<T, N>(out + at);
        }
#pragma unroll
        for (int k = 0; k < PIECES; k++) {
            if (first + k * THREADS >= pieces) continue;
            XtVector<A, N> sum;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const XtVector<A, WIDE> v = xt_elements(from[k][part]);
#pragma unroll
                for (int e = 0; e < WIDE; e++) sum.at[part * WIDE + e] = v.at[e] == 0 ? A(0) : v.at[e] * factor;
            }
            if (ADD) {
                const XtVector<A, N> v = xt_load(there[k]);
#pragma unroll
                for (int e = 0; e < N; e++) sum.at[e] = v.at[e] + sum.at[e];
            }
            xt_write(out + (first + k * THREADS) * N, xt_store<T>(sum));
        }
    }
}

template <typename T, int N> static void launch(const XtLinearCrossEntropyBwd *p, int64_t first, int64_t count) {
    using A = XtAcc<T>;
    xt_launch(p->accumulate ? linear_cross_entropy_bwd_kernel<T, N, true> : linear_cross_entropy_bwd_kernel<T, N, false>,
              xt_blocks(count / N, THREADS * PIECES), THREADS, 0, (T *)p->out + first, (const A *)p->x + first, (const A *)p->dloss,
              (const A *)p->total, p->scale, count);
}

XtStatus xt_cuda_linear_cross_entropy_bwd(const XtLinearCrossEntropyBwd *p) {
    if (p->count == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool aligned = ((uintptr_t)p->out | (uintptr_t)p->x) % 16 == 0;
        const int64_t wide = aligned ? p->count / XT_WIDTH<T> * XT_WIDTH<T> : 0;
        if (wide) launch<T, XT_WIDTH<T>>(p, 0, wide);
        if (wide < p->count) launch<T, 1>(p, wide, p->count - wide);
        return xt_launched("linear_cross_entropy_bwd", p->count);
    });
}
