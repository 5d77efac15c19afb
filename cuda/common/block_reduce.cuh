/* block_reduce.cuh - reductions over a warp and a block, with a fixed tree. */
#pragma once

struct XtSum {
    template <typename A> __device__ A operator()(A a, A b) const { return a + b; }
};
/* XtMax returns the second unless the first is larger; XtFirstMax the first unless the second is larger. They differ for NaN. */
struct XtMax {
    template <typename A> __device__ A operator()(A a, A b) const { return a > b ? a : b; }
};
struct XtFirstMax {
    template <typename A> __device__ A operator()(A a, A b) const { return b > a ? b : a; }
};

/* Reduces over LANES neighbouring lanes, a power of two; each of them gets the result. All 32 lanes must call it. */
template <int LANES = 32, typename A, typename Combine> __device__ inline A xt_warp_reduce(A value, Combine combine) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}
template <int LANES = 32, typename A> __device__ inline A xt_warp_sum(A value) { return xt_warp_reduce<LANES>(value, XtSum()); }

/* Every thread of the block gets the result. The block is 1-D, of whole warps, at most 1024 threads. Two calls in a row need no
 * barrier between them: the first barrier in here keeps a warp from overwriting what another still reads. */
template <typename A, typename Combine> __device__ inline A xt_block_reduce(A value, A neutral, Combine combine) {
    __shared__ A of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    value = xt_warp_reduce(value, combine);
    if (warps == 1) return value;
    __syncthreads();
    if (lane == 0) of_warp[warp] = value;
    __syncthreads();
    return xt_warp_reduce(lane < warps ? of_warp[lane] : neutral, combine);
}
template <typename A> __device__ inline A xt_block_sum(A value) { return xt_block_reduce(value, A(0), XtSum()); }
