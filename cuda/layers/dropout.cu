/* dropout.cu - out = x m / (1 - p), m = 0 with probability p, else 1; the backward is the same kernel (see csrc/cpu/layers/dropout.c).
 *
 * Plan: a thread makes a Philox block of four words and has the four elements of that block, in pieces of 16 bytes at most. Grid stride.
 * Bytes moved: x and out once; the mask is never in memory.
 */
#include "common/strided.cuh"
#include "contract/layers.h"
#include "core/philox.h"

static constexpr int THREADS = 256;

/* out, x [n]; random [2] or NULL. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
    dropout_kernel(T *out, const T *x, int64_t n, XtPhilox philox, const int64_t *random, float p, XtAcc<T> scale, bool aligned) {
    using A = XtAcc<T>;
    constexpr int WIDTH = XT_WIDTH<T> < 4 ? XT_WIDTH<T> : 4;
    if (random) philox = {(uint64_t)random[0], (uint64_t)random[1] + philox.stream};
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; 4 * i < n; i += (int64_t)gridDim.x * THREADS) {
        XtWords words = xt_philox_block(philox, (uint64_t)i);
        A kept[4];
#pragma unroll
        for (int j = 0; j < 4; j++) kept[j] = xt_uniform(words.w[j], 0.0f, 1.0f, 1.0f) < p ? A(0) : scale;
        if (aligned && 4 * i + 4 <= n) {
#pragma unroll
            for (int v = 0; v < 4; v += WIDTH) {
                XtVector<A, WIDTH> y = xt_load(xt_read<T, WIDTH>(x + 4 * i + v));
#pragma unroll
                for (int e = 0; e < WIDTH; e++) y.at[e] *= kept[v + e];
                xt_write(out + 4 * i + v, xt_store<T>(y));
            }
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (4 * i + j < n) out[4 * i + j] = xt_store<T>(xt_load(x[4 * i + j]) * kept[j]);
        }
    }
}

XtStatus xt_cuda_dropout(const XtDropout *p) {
    if (!p->random) XT_CHECK(xt_refuse_captured("draw random numbers of the host, which each replay would repeat"));
    if (p->count == 0) return XT_OK;
    bool aligned = (uintptr_t)p->out % 16 == 0 && (uintptr_t)p->x % 16 == 0;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        XtAcc<T> scale = p->p < 1 ? (XtAcc<T>)(1 / (1 - p->p)) : 0;
        xt_launch(dropout_kernel<T>, xt_blocks(p->count, 4 * THREADS), THREADS, 0, (T *)p->out, (const T *)p->x, p->count,
                  p->philox, p->random, (float)p->p, scale, aligned);
        return xt_launched("dropout", p->count);
    });
}
