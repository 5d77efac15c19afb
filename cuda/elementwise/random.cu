/* random.cu - uniform, normal and integer fills of a dense dst [n], bit for bit those of the CPU: both use core/philox.h.
 *
 * Plan: a thread makes a Philox block of four words at a time, which is four floats or two integers. Grid stride. Bytes moved: dst
 * once.
 */
#include "common/strided.cuh"
#include "contract/elementwise.h"
#include "core/philox.h"

/* to[0..N) = values as T. `whole`: all N are inside and `to` is aligned for a vector. */
template <int N, typename T, typename W>
static __device__ __forceinline__ void put(T *to, const W *values, bool whole, int64_t count) {
    constexpr int WIDTH = N < XT_WIDTH<T> ? N : XT_WIDTH<T>;
    if (whole) {
#pragma unroll
        for (int v = 0; v < N / WIDTH; v++) {
            XtVector<T, WIDTH> made;
#pragma unroll
            for (int j = 0; j < WIDTH; j++) made.at[j] = xt_cast_to<T>(values[v * WIDTH + j]);
            xt_write(to + v * WIDTH, xt_piece(made));
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j < count) to[j] = xt_cast_to<T>(values[j]);
    }
}

/* UNIFORM: a = low, b = span; NORMAL: a = mean, b = deviation. */
template <typename T>
__global__ void real_kernel(T *dst, int64_t n, XtRandomKind kind, XtPhilox philox, float a, float b, float top, bool aligned) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; 4 * i < n; i += (int64_t)gridDim.x * blockDim.x) {
        XtWords words = xt_philox_block(philox, (uint64_t)i);
        float values[4];
        if (kind == XT_UNIFORM) {
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] = xt_uniform(words.w[j], a, b, top);
        } else {
            xt_box_muller(words.w[0], words.w[1], &values[0], &values[1]);
            xt_box_muller(words.w[2], words.w[3], &values[2], &values[3]);
#pragma unroll
            for (int j = 0; j < 4; j++) values[j] = xt_normal(values[j], a, b);
        }
        put<4>(dst + 4 * i, values, aligned && 4 * i + 4 <= n, n - 4 * i);
    }
}

template <typename T>
__global__ void integer_kernel(T *dst, int64_t n, XtPhilox philox, int64_t low, uint64_t range, bool aligned) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; 2 * i < n; i += (int64_t)gridDim.x * blockDim.x) {
        XtWords words = xt_philox_block(philox, (uint64_t)i);
        int64_t values[2] = {xt_randint(words.w[0], words.w[1], low, range), xt_randint(words.w[2], words.w[3], low, range)};
        put<2>(dst + 2 * i, values, aligned && 2 * i + 2 <= n, n - 2 * i);
    }
}

XtStatus xt_cuda_random(const XtRandom *p) {
    XT_CHECK(
        xt_refuse_captured("draw random numbers, which each replay would repeat: draw them before, and pass them as arguments"));
    int64_t n = 1;
    for (int d = 0; d < p->dst.ndim; d++) n *= p->dst.shape[d];
    if (n == 0) return XT_OK;
    bool aligned = (uintptr_t)p->dst.data % 16 == 0;
    if (p->kind == XT_RANDINT)
        return xt_by_dtype(p->dst.dtype, [&](auto zero) {
            using T = decltype(zero);
            int64_t low = (int64_t)p->low;
            uint64_t range = (uint64_t)(int64_t)p->high - (uint64_t)low;
            xt_launch(integer_kernel<T>, xt_blocks(n, 2 * 256), 256, 0, (T *)p->dst.data, n, p->philox, low, range, aligned);
            return xt_launched("random", n);
        });
    bool uniform = p->kind == XT_UNIFORM;
    float top = uniform ? xt_uniform_top(p->dst.dtype, p->low, p->high) : 0;
    float second = (float)(uniform ? p->high - p->low : p->high);
    return xt_by_float(p->dst.dtype, [&](auto zero) {
        using T = decltype(zero);
        xt_launch(real_kernel<T>, xt_blocks(n, 4 * 256), 256, 0, (T *)p->dst.data, n, p->kind, p->philox, (float)p->low, second,
                  top, aligned);
        return xt_launched("random", n);
    });
}
