/* launch.cuh - the host's side of a kernel: the device, errors, launching, scratch memory, and reports from the device. */
#pragma once

#include "xtrain.h"

#include <cuda_runtime.h>

/* ---- the calling thread's device (runtime/device.cu) ------------------------------------------------------------------------ */

cudaStream_t xt_stream(void);
int xt_device_index(void);
/* Of the device. It may decide which block does what, never the order of additions: use XT_PLAN_MULTIPROCESSORS for that. */
int xt_multiprocessors(void);
/* Multiprocessors of an H100 SXM or an H200. Where the number of blocks decides an order of additions, the plan assumes this
 * many on every device: same shape, same bits. */
constexpr int XT_PLAN_MULTIPROCESSORS = 132;
int xt_shared_limit(void);       /* bytes of shared memory that one block may ask for */
int xt_compute_capability(void); /* 90 for 9.0 */
/* Both, and more, for the choice of an implementation (contract/traits.h). */
const struct XtDeviceTraits *xt_traits(void);

/* Converts a CUDA status to an XtStatus and a message that names the slot; XT_OK for cudaSuccess. */
XtStatus xt_cuda_error(const char *slot, cudaError_t error);
/* Call it after the launches of a slot: it reports a failed launch with the slot's name and these sizes (at most 8). */
XtStatus xt_launched_sizes(const char *slot, int count, const int64_t *sizes);
template <typename... Sizes> inline XtStatus xt_launched(const char *slot, Sizes... sizes) {
    const int64_t list[] = {(int64_t)sizes..., 0};
    return xt_launched_sizes(slot, (int)sizeof...(sizes), list);
}
void xt_count_launch(void);
/* XT_OK, or, while the device is being captured, the error of something that a replay could not repeat: `what` is a verb phrase, such as
 * "wait for the device". */
XtStatus xt_refuse_captured(const char *what);

/* Queues kernel<<<grid, block, shared>>>(arguments) on the device's stream; arguments convert to the kernel's parameter types. */
template <typename... Parameters, typename... Arguments>
inline void xt_launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Arguments... arguments) {
    kernel<<<grid, block, shared, xt_stream()>>>((Parameters)arguments...);
    xt_count_launch();
}

/* The same with blocks in clusters: `cluster` neighbours run at once, on multiprocessors that see each other's shared memory (compute
 * capability 9.0). The grid is a multiple of it. */
template <typename... Parameters, typename... Arguments>
inline void xt_launch_clusters(void (*kernel)(Parameters...), unsigned cluster, dim3 grid, dim3 block, size_t shared,
                               Arguments... arguments) {
    cudaLaunchAttribute size = {};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim.x = cluster, size.val.clusterDim.y = 1, size.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = xt_stream();
    config.attrs = &size, config.numAttrs = 1;
    cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...); /* xt_launched reports its error */
    xt_count_launch();
}

/* The same for a kernel whose blocks wait for each other: all of them run at once (a cooperative launch). False: another process or a
 * limit has part of the device, so they do not fit, and nothing is queued. */
template <typename... Parameters, typename... Arguments>
inline bool xt_launch_together(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, const Arguments &...arguments) {
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = xt_stream();
    config.attrs = &together, config.numAttrs = 1;
    if (cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...) == cudaErrorCooperativeLaunchTooLarge) {
        cudaGetLastError();
        return false;
    }
    xt_count_launch();
    return true; /* xt_launched reports other errors */
}

/* Lets a kernel have `bytes` of dynamic shared memory; it must ask for more than 48 KiB. */
template <typename Kernel> inline XtStatus xt_allow_shared(const char *slot, Kernel kernel, int bytes) {
    if (bytes <= 48 * 1024) return XT_OK;
    return xt_cuda_error(slot, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

/* Scratch memory of a slot, 256-byte aligned. The destructor frees it in stream order. */
class XtScratch {
  public:
    XtScratch() = default;
    XtScratch(const XtScratch &) = delete;
    XtScratch &operator=(const XtScratch &) = delete;
    ~XtScratch();
    XtStatus allocate(size_t nbytes); /* once */
    void *data = nullptr;

  private:
    int index = 0;
    size_t nbytes = 0;
};

/* Copies a few bytes of results to the host and waits for them. Counts as a synchronisation. */
XtStatus xt_read_back(void *host, const void *device, size_t nbytes);

/* Blocks for `items` with `per_block` each: at least 1, at most the limit of gridDim.x (kernels stride over the rest). */
inline unsigned xt_blocks(int64_t items, int64_t per_block) {
    int64_t blocks = (items + per_block - 1) / per_block;
    return (unsigned)(blocks < 1 ? 1 : blocks > 0x7fffffff ? 0x7fffffff : blocks);
}
inline int64_t xt_divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- errors that only the data can show ----------------------------------------------------------------------------------- */

/* A kernel that meets an index out of range writes it here and treats the element as absent (zeros). The next synchronisation
 * raises the error. */
typedef enum XtIndexSlot {
    XT_INDEX_EMBEDDING = 1,
    XT_INDEX_CROSS_ENTROPY = 2,
    XT_INDEX_LINEAR_CROSS_ENTROPY = 3,
    XT_INDEX_GATHER = 4,
    XT_INDEX_SCATTER = 5,
    XT_INDEX_SCATTER_ADD = 6,
    XT_INDEX_WRAPPED = 7, /* index; this one and the next: negative ones count from the end */
    XT_INDEX_PUT = 8,
    XT_DOCUMENTS = 9 /* no index: value and limit are the bounds of token `position` of a row */
} XtIndexSlot;
typedef struct XtIndexReport {
    unsigned taken; /* 0: no report, 1: being written, 2: complete */
    int slot;       /* XtIndexSlot */
    long long position, value, limit, row;
} XtIndexReport;
XtIndexReport *xt_index_report(void); /* of this device: host memory that kernels can write; pass it to the kernel */

__device__ inline void xt_report_index(XtIndexReport *report, XtIndexSlot slot, int64_t position, int64_t value, int64_t limit,
                                       int64_t row = 0) {
    if (atomicCAS(&report->taken, 0u, 1u) != 0u) return;
    report->slot = slot;
    report->position = position;
    report->value = value;
    report->limit = limit;
    report->row = row;
    __threadfence_system(); /* the host may read while this kernel runs */
    *(volatile unsigned *)&report->taken = 2;
}
