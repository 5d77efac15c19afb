/* conv1d.cu - a convolution in one dimension: direct, and the two moves around its products (see csrc/cpu/conv/conv1d.c).
 *
 *     y[b, o, t] = bias[o] + sum_ck w[o, c, k] x[b, c, t stride + k dilation - padding]
 *     dx[b, c, s] = sum_ok w[o, c, k] dy[b, o, t] with t stride = s + padding - k dilation;  dw[o, c, k] = sum_bt dy[b, o, t] x[...]
 *
 * Plan: a warp has a stretch of 128 elements of one row of the result, so that which row it is costs one division a warp and neighbours
 * read neighbours. Each element is a sum of its own, in the order of c (or o) and k. An element of dw is the sum of a block: the threads
 * stride over all places, then a fixed tree. Bytes moved by columns and fold: x or dx once, and the columns, which are kernel times as many.
 */
#include "common/cuda.cuh"
#include "contract/conv.h"

static constexpr int THREADS = 256, STRETCH = 128;

/* f(row, element) for each element of the warp's stretch of `rows` rows of `cols`. */
template <typename F> __device__ inline void each_of_stretch(int64_t rows, int64_t cols, F f) {
    int64_t stretches = (cols + STRETCH - 1) / STRETCH, warps = (int64_t)gridDim.x * (THREADS / 32);
    for (int64_t i = blockIdx.x * (int64_t)(THREADS / 32) + threadIdx.x / 32; i < rows * stretches; i += warps) {
        int64_t row = i / stretches, first = i % stretches * STRETCH;
#pragma unroll
        for (int k = 0; k < STRETCH / 32; k++) {
            int64_t at = first + k * 32 + threadIdx.x % 32;
            if (at < cols) f(row, at);
        }
    }
}
static unsigned blocks_of(int64_t rows, int64_t cols) { return xt_blocks(rows * xt_divide_up(cols, STRETCH), THREADS / 32); }

/* The place whose tap k reads element s of a row, or -1. */
__device__ inline int64_t place_of(const XtConv1dShape &shape, int64_t s, int64_t k) {
    int64_t from = s + shape.padding - k * shape.dilation;
    if (from < 0) return -1;
    int64_t t = shape.stride == 1 ? from : from / shape.stride;
    return t < shape.places && t * shape.stride == from ? t : -1;
}

/* Rows of y [batch * out, places]. */
template <typename T> __global__ void __launch_bounds__(THREADS) conv1d_fwd_kernel(const __grid_constant__ XtConv1dFwd p) {
    using A = XtAcc<T>;
    const XtConv1dShape &shape = p.shape;
    int64_t in_group = shape.in / shape.groups, out_group = shape.out / shape.groups;
    each_of_stretch(shape.batch * shape.out, shape.places, [&](int64_t row, int64_t t) {
        int64_t b = row / shape.out, o = row % shape.out;
        const T *x = (const T *)p.x + (b * shape.in + o / out_group * in_group) * shape.length;
        const T *w = (const T *)p.weight + o * in_group * shape.kernel;
        A sum = p.bias ? xt_load(((const T *)p.bias)[o]) : A(0);
        for (int64_t c = 0; c < in_group; c++)
            for (int64_t k = 0; k < shape.kernel; k++) {
                int64_t s = t * shape.stride + k * shape.dilation - shape.padding;
                if (s >= 0 && s < shape.length) sum = fma(xt_load(w[c * shape.kernel + k]), xt_load(x[c * shape.length + s]), sum);
            }
        ((T *)p.y)[row * shape.places + t] = xt_store<T>(sum);
    });
}

/* Rows of dx [batch * in, length]. */
template <typename T> __global__ void __launch_bounds__(THREADS) conv1d_dx_kernel(const __grid_constant__ XtConv1dBwd p) {
    using A = XtAcc<T>;
    const XtConv1dShape &shape = p.shape;
    int64_t in_group = shape.in / shape.groups, out_group = shape.out / shape.groups;
    each_of_stretch(shape.batch * shape.in, shape.length, [&](int64_t row, int64_t s) {
        int64_t b = row / shape.in, c = row % shape.in, first = c / in_group * out_group;
        const T *dy = (const T *)p.dy + (b * shape.out + first) * shape.places;
        const T *w = (const T *)p.weight + (first * in_group + c % in_group) * shape.kernel;
        A sum = 0;
        for (int64_t o = 0; o < out_group; o++)
            for (int64_t k = 0; k < shape.kernel; k++) {
                int64_t t = place_of(shape, s, k);
                if (t >= 0) sum = fma(xt_load(w[o * in_group * shape.kernel + k]), xt_load(dy[o * shape.places + t]), sum);
            }
        ((T *)p.dx)[row * shape.length + s] = xt_store<T>(sum);
    });
}

/* A block an element of dweight [out * in_group * kernel]. */
template <typename T> __global__ void __launch_bounds__(THREADS) conv1d_dweight_kernel(const __grid_constant__ XtConv1dBwd p) {
    using A = XtAcc<T>;
    const XtConv1dShape &shape = p.shape;
    int64_t in_group = shape.in / shape.groups, out_group = shape.out / shape.groups, count = shape.out * in_group * shape.kernel;
    for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
        int64_t k = i % shape.kernel, o = i / shape.kernel / in_group, c = o / out_group * in_group + i / shape.kernel % in_group;
        A sum = 0;
        for (int64_t b = 0; b < shape.batch; b++) {
            const T *dy = (const T *)p.dy + (b * shape.out + o) * shape.places;
            const T *x = (const T *)p.x + (b * shape.in + c) * shape.length;
            for (int64_t t = threadIdx.x; t < shape.places; t += THREADS) {
                int64_t s = t * shape.stride + k * shape.dilation - shape.padding;
                if (s >= 0 && s < shape.length) sum = fma(xt_load(dy[t]), xt_load(x[s]), sum);
            }
        }
        sum = xt_block_sum(sum);
        if (threadIdx.x == 0) ((T *)p.dweight)[i] = xt_store<T>(sum);
    }
}

/* Rows of columns [batch * in * kernel, places]. */
template <typename T> __global__ void __launch_bounds__(THREADS) conv1d_columns_kernel(const __grid_constant__ XtConv1dColumns p) {
    const XtConv1dShape &shape = p.shape;
    each_of_stretch(shape.batch * shape.in * shape.kernel, shape.places, [&](int64_t row, int64_t t) {
        int64_t s = t * shape.stride + row % shape.kernel * shape.dilation - shape.padding;
        bool inside = s >= 0 && s < shape.length;
        ((T *)p.columns)[row * shape.places + t] =
            inside ? ((const T *)p.x)[row / shape.kernel * shape.length + s] : xt_store<T>(0);
    });
}

/* Rows of dx [batch * in, length]. */
template <typename T> __global__ void __launch_bounds__(THREADS) conv1d_fold_kernel(const __grid_constant__ XtConv1dFold p) {
    using A = XtAcc<T>;
    const XtConv1dShape &shape = p.shape;
    each_of_stretch(shape.batch * shape.in, shape.length, [&](int64_t row, int64_t s) {
        const A *columns = (const A *)p.columns + row * shape.kernel * shape.places;
        A sum = 0;
        for (int64_t k = 0; k < shape.kernel; k++) {
            int64_t t = place_of(shape, s, k);
            if (t >= 0) sum += columns[k * shape.places + t];
        }
        ((T *)p.dx)[row * shape.length + s] = xt_store<T>(sum);
    });
}

XtStatus xt_cuda_conv1d_fwd(const XtConv1dFwd *p) {
    const XtConv1dShape &s = p->shape;
    if (s.batch * s.out * s.places == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        xt_launch(conv1d_fwd_kernel<decltype(zero)>, blocks_of(s.batch * s.out, s.places), THREADS, 0, *p);
        return xt_launched("conv1d_fwd", s.batch, s.out, s.places);
    });
}

XtStatus xt_cuda_conv1d_bwd(const XtConv1dBwd *p) {
    const XtConv1dShape &s = p->shape;
    int64_t weights = s.out * (s.in / s.groups) * s.kernel;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        if (p->dx && s.batch * s.in * s.length > 0)
            xt_launch(conv1d_dx_kernel<T>, blocks_of(s.batch * s.in, s.length), THREADS, 0, *p);
        if (p->dweight && weights > 0) xt_launch(conv1d_dweight_kernel<T>, xt_blocks(weights, 1), THREADS, 0, *p);
        return xt_launched("conv1d_bwd", s.batch, s.in, s.out, s.length);
    });
}

XtStatus xt_cuda_conv1d_columns(const XtConv1dColumns *p) {
    const XtConv1dShape &s = p->shape;
    if (s.batch * s.in * s.places == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        xt_launch(conv1d_columns_kernel<decltype(zero)>, blocks_of(s.batch * s.in * s.kernel, s.places), THREADS, 0, *p);
        return xt_launched("conv1d_columns", s.batch, s.in, s.kernel, s.places);
    });
}

XtStatus xt_cuda_conv1d_fold(const XtConv1dFold *p) {
    const XtConv1dShape &s = p->shape;
    if (s.batch * s.in * s.length == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        xt_launch(conv1d_fold_kernel<decltype(zero)>, blocks_of(s.batch * s.in, s.length), THREADS, 0, *p);
        return xt_launched("conv1d_fold", s.batch, s.in, s.kernel, s.length);
    });
}
