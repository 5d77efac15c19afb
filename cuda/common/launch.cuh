/* launch.cuh - the host's side of a kernel: the device, errors, launching, scratch memory, and reports from the device. */
#ifndef XT_CUDA_LAUNCH_CUH
#define XT_CUDA_LAUNCH_CUH

#include "xtrain.h"

#include <cuda_runtime.h>

/* ---- the calling thread's device (runtime.cu) ----------------------------------------------------------------------------- */

cudaStream_t xt_stream(void);
int xt_device_index(void);
/* Of the device. It may decide who does the work, never the order of additions: that is for XT_PLAN_MULTIPROCESSORS. */
int xt_multiprocessors(void);
/* Those of an H100 SXM and an H200. Where the number of blocks decides an order of additions, a plan counts on this many, whatever
 * the device has: same shape, same bits. */
constexpr int XT_PLAN_MULTIPROCESSORS = 132;
int xt_shared_limit(void);       /* bytes of shared memory that one block may ask for */
int xt_compute_capability(void); /* 90 for 9.0 */

/* Turns a CUDA status into an XtStatus with a message that names the slot; XT_OK for cudaSuccess. */
XtStatus xt_cuda_error(const char *slot, cudaError_t error);
/* After the launches of a slot: reports a failed launch with the slot's name and these sizes (at most 8). */
XtStatus xt_launched_sizes(const char *slot, int count, const int64_t *sizes);
template <typename... Sizes> inline XtStatus xt_launched(const char *slot, Sizes... sizes) {
    const int64_t list[] = {(int64_t)sizes..., 0};
    return xt_launched_sizes(slot, (int)sizeof...(sizes), list);
}
void xt_count_launch(void);

/* Queues kernel<<<grid, block, shared>>>(arguments) on the device's stream; arguments convert to the kernel's parameter types. */
template <typename... Parameters, typename... Arguments>
inline void xt_launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Arguments... arguments) {
    kernel<<<grid, block, shared, xt_stream()>>>((Parameters)arguments...);
    xt_count_launch();
}

/* Memory for the length of a slot, 256-byte aligned, given back in stream order when the variable goes out of scope. */
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

/* A few bytes of results for the host: queues the copy and waits. Counts as a synchronisation. */
XtStatus xt_read_back(void *host, const void *device, size_t nbytes);

/* Numbers of blocks for `items` with `per_block` each; at least 1, and no more than a grid's x takes (kernels stride over the rest). */
inline unsigned xt_blocks(int64_t items, int64_t per_block) {
    int64_t blocks = (items + per_block - 1) / per_block;
    return (unsigned)(blocks < 1 ? 1 : blocks > 0x7fffffff ? 0x7fffffff : blocks);
}
inline int64_t xt_divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- what only the data can show ------------------------------------------------------------------------------------------ */

/* An index out of range is written here by the kernel that meets it, and raised at the next synchronisation; the kernel then treats
 * the element as absent (zeros). */
typedef enum XtIndexSlot { XT_INDEX_EMBEDDING = 1, XT_INDEX_CROSS_ENTROPY = 2, XT_INDEX_LINEAR_CROSS_ENTROPY = 3 } XtIndexSlot;
typedef struct XtIndexReport {
    unsigned taken; /* 0: none yet, 1: being written, 2: there */
    int slot;       /* XtIndexSlot */
    long long position, value, limit;
} XtIndexReport;
XtIndexReport *xt_index_report(void); /* of this device: host memory that the device writes; hand it to the kernel */

__device__ inline void xt_report_index(XtIndexReport *report, XtIndexSlot slot, int64_t position, int64_t value, int64_t limit) {
    if (atomicCAS(&report->taken, 0u, 1u) != 0u) return;
    report->slot = slot;
    report->position = position;
    report->value = value;
    report->limit = limit;
    __threadfence_system(); /* the host may be looking while this kernel runs */
    *(volatile unsigned *)&report->taken = 2;
}

#endif
