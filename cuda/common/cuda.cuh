/* cuda.cuh - what the CUDA kernels share: launching, scratch memory, dtypes, vectors, reductions, reports from the device.
 *
 * A file of this room holds one kernel: a comment with the formula and the plan, the __global__ functions (`..._kernel`), and the
 * slot, which only computes a grid and launches:
 *
 *     template <typename T> __global__ void silly_kernel(T *out, const T *x, int64_t n) { ... }   // out [n], x [n]
 *     XtStatus xt_cuda_silly(const XtSilly *p) {
 *         if (p->n == 0) return XT_OK;
 *         return xt_by_float(p->dtype, [&](auto zero) {
 *             using T = decltype(zero);
 *             xt_launch(silly_kernel<T>, xt_blocks(p->n, 256), 256, 0, (T *)p->out, (const T *)p->x, p->n);
 *             return xt_launched("silly", p->n);
 *         });
 *     }
 *
 * Everything runs on the one stream of the calling thread's device, in order, and nothing here waits for it: a slot returns when its
 * kernels are queued. Memory comes from a pool that follows the same stream, so a block may be given back while kernels that use it
 * are still queued. Only to_host, synchronize, stats and compare wait.
 *
 * Deterministic: sums have a fixed tree, which depends on the shape and on nothing that differs between two runs; some also depend on
 * pointers modulo 16 bytes or on what the device can run, as their files say. Float atomics are not used.
 */
#ifndef XT_CUDA_CUH
#define XT_CUDA_CUH

#include "common/block_reduce.cuh"
#include "common/launch.cuh"
#include "common/pieces.cuh"
#include "kernels.h"

#define XT_X(slot, Params) XtStatus xt_cuda_##slot(const Params *p);
XT_KERNELS(XT_X)
#undef XT_X

#endif
