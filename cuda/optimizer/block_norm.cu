/* block_norm.cu - the norm of gradients from the squares of their blocks, and what clipping makes of it.
 *
 * One block of threads: the host must not wait for the norm. A thread adds every 1024th square, and a tree adds the threads: the order
 * depends on the number of squares alone.
 */
#include "common/cuda.cuh"
#include "contract/optimizer.h"

static constexpr int THREADS = 1024;
static constexpr int AHEAD = 16; /* loads that the compiler may start before the first is added */

/* squares [count] */
__global__ void __launch_bounds__(THREADS)
    block_norm_kernel(double *norm, double *coefficient, float *guard, const double *squares, int64_t count, double most) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += AHEAD * THREADS) {
        double q[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) q[u] = i + u * THREADS < count ? squares[i + u * THREADS] : 0;
#pragma unroll
        for (int u = 0; u < AHEAD; u++) sum += q[u];
    }
    sum = xt_block_sum(sum);
    if (threadIdx.x != 0) return;
    const double found = sqrt(sum), scale = most / (found + 1e-6);
    *norm = found;
    *coefficient = scale < 1 ? scale : 1;
    *guard = isfinite(found) ? 0.0f : NAN;
}

XtStatus xt_cuda_block_norm(const XtBlockNorm *p) {
    xt_launch(block_norm_kernel, 1, THREADS, 0, p->norm, p->coefficient, p->guard, p->squares, p->count, p->most);
    return xt_launched("block_norm", p->count);
}
