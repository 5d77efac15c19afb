/* cuda.cuh - what every CUDA kernel includes: launch.cuh, pieces.cuh, block_reduce.cuh and the slots of kernels.h.
 *
 * A kernel file has three parts: a comment with the formula and the plan, the __global__ functions (`..._kernel`), and the slot,
 * which only computes a grid and launches:
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
 * All work of a device goes to one stream, in order. A slot returns when its kernels are queued; only to_host, synchronize, stats
 * and compare wait. The memory pool follows the same stream, so a block may be freed while kernels that use it are still queued.
 *
 * Deterministic: the tree of a sum depends on the shape. Some trees also depend on pointers modulo 16 bytes, or on the instructions
 * or the shared memory that the device has; their files say so. None depends on the number of multiprocessors
 * (XT_PLAN_MULTIPROCESSORS), and no kernel uses float atomics.
 */
#pragma once

#include "common/block_reduce.cuh"
#include "common/launch.cuh"
#include "common/pieces.cuh"
#include "kernels.h"

#define XT_X(slot, Params) XtStatus xt_cuda_##slot(const Params *p);
XT_KERNELS(XT_X)
#undef XT_X
