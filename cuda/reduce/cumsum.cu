/* cumsum.cu - running sums along the middle of [rows, count, inner], forwards or backwards, in ACC.
 *
 *     out[r, i, c] = sum of x[r, j, c] over j <= i    (reverse: j >= i)
 *
 * inner == 1: a block a row, which scans a tile of THREADS elements at a time and carries the sum on. Else a thread a column. Both
 * orders of additions are functions of the shape. Bytes moved: x and out once.
 */
#include "common/cuda.cuh"
#include "contract/reduce.h"

static constexpr int THREADS = 256; /* of a block */

template <typename T> __device__ inline auto read(const T *x) { return xt_load(*x); }
template <> __device__ inline auto read<int64_t>(const int64_t *x) { return *x; }
template <typename T, typename A> __device__ inline void write(T *to, A value) {
    if constexpr (sizeof(T) == sizeof(A) && !std::is_floating_point_v<T>) *to = (T)value;
    else *to = xt_store<T>(value);
}
template <typename T> struct Sum {
    typedef XtAcc<T> A;
};
template <> struct Sum<int64_t> {
    typedef unsigned long long A; /* wraps around */
};

template <typename T>
__global__ void __launch_bounds__(THREADS) cumsum_row_kernel(T *out, const T *x, int64_t rows, int64_t count, bool reverse) {
    typedef typename Sum<T>::A A;
    __shared__ A of_warp[THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        A carry = 0;
        for (int64_t begin = 0; begin < count; begin += THREADS) {
            const int64_t i = begin + threadIdx.x, at = row * count + (reverse ? count - 1 - i : i);
            A sum = i < count ? (A)read(x + at) : A(0);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const A other = __shfl_up_sync(0xffffffffu, sum, step);
                if (lane >= step) sum += other;
            }
            if (lane == 31) of_warp[warp] = sum;
            __syncthreads();
            A before = carry, total = carry;
#pragma unroll
            for (int w = 0; w < THREADS / 32; w++) {
                if (w < warp) before += of_warp[w];
                total += of_warp[w];
            }
            if (i < count) write(out + at, before + sum);
            carry = total;
            __syncthreads(); /* all have read of_warp: the next tile may overwrite it */
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    cumsum_column_kernel(T *out, const T *x, int64_t rows, int64_t count, int64_t inner, bool reverse) {
    typedef typename Sum<T>::A A;
    for (int64_t item = blockIdx.x * (int64_t)THREADS + threadIdx.x; item < rows * inner; item += (int64_t)gridDim.x * THREADS) {
        const int64_t row = item / inner, column = item - row * inner;
        A sum = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = (row * count + (reverse ? count - 1 - i : i)) * inner + column;
            sum += (A)read(x + at);
            write(out + at, sum);
        }
    }
}

template <typename T> static XtStatus cumsum(const XtCumsum *p) {
    if (p->inner == 1)
        xt_launch(cumsum_row_kernel<T>, xt_blocks(p->rows, 1), THREADS, 0, (T *)p->out, (const T *)p->x, p->rows, p->count,
                  p->reverse);
    else
        xt_launch(cumsum_column_kernel<T>, xt_blocks(p->rows * p->inner, THREADS), THREADS, 0, (T *)p->out, (const T *)p->x,
                  p->rows, p->count, p->inner, p->reverse);
    return xt_launched("cumsum", p->rows, p->count, p->inner);
}

XtStatus xt_cuda_cumsum(const XtCumsum *p) {
    if (p->rows == 0 || p->count == 0 || p->inner == 0) return XT_OK;
    if (p->dtype == XT_INT64) return cumsum<int64_t>(p);
    return xt_by_float(p->dtype, [&](auto zero) { return cumsum<decltype(zero)>(p); });
}
