/* overlap.cuh - launches that begin before their predecessor has ended (programmatic dependent launch, compute capability 9.0).
 *
 * A kernel for xt_launch_early calls xt_wait_for_previous in every thread before any other access to memory. It returns when the
 * predecessor has ended and its writes can be seen; the predecessor waited in turn, so everything older has ended too. Then it calls
 * xt_let_next_begin: once all blocks have, the successor may take up the multiprocessors that are free, and wait there. What is gained
 * is the time between two kernels, 1 us, which counts in a step of generation. Captured, the overlap is an edge of the graph.
 *
 * What was written before the predecessor may be read before the wait, as the predecessor let this kernel begin behind its own wait.
 * qk_norm_rope does so: its predecessor makes the table of angles alone.
 *
 * In other launches, and below compute capability 9.0, the functions do nothing.
 */
#pragma once

#include "common/launch.cuh"

__device__ inline void xt_wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void xt_let_next_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/* Starts to bring bytes into the L2 cache; address and count are multiples of 16. Allowed before xt_wait_for_previous: L2 sees later
 * writes. */
__device__ inline void xt_prefetch(const void *from, uint32_t nbytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(nbytes) : "memory");
#endif
}

/* xt_launch for such a kernel; with a `cluster`, blocks are in clusters of so many, as in xt_launch_clusters. */
template <typename... Parameters, typename... Arguments>
inline void xt_launch_early_clusters(void (*kernel)(Parameters...), unsigned cluster, dim3 grid, dim3 block, size_t shared,
                                     Arguments... arguments) {
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = cluster, attributes[1].val.clusterDim.y = 1, attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = xt_stream();
    config.attrs = attributes, config.numAttrs = cluster > 1 ? 2 : 1;
    cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...); /* xt_launched reports its error */
    xt_count_launch();
}
template <typename... Parameters, typename... Arguments>
inline void xt_launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Arguments... arguments) {
    if (xt_compute_capability() < 90) return xt_launch(kernel, grid, block, shared, arguments...);
    xt_launch_early_clusters(kernel, 1, grid, block, shared, arguments...);
}
