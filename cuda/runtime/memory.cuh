/* memory.cuh - allocation of device memory (memory.cu), for tensors (device.cu) and for scratch. */
#pragma once

#include "common/cuda.cuh"
#include "contract/backend.h"

enum { XT_MAX_DEVICES = 16 };

/* The status and message for a wait that failed because of an earlier kernel (device.cu). */
XtStatus xt_late_error(int index, cudaError_t error);

/* Called once a device, by a thread whose current device it is. `stream`: the device's one compute stream; `keep_blocks`: freed blocks go
 * to free lists. */
XtStatus xt_memory_open(int index, cudaStream_t stream, bool keep_blocks);
/* Sets no message for XT_OUT_OF_MEMORY: the caller knows what the memory was for. */
XtStatus xt_memory_allocate(int index, size_t nbytes, void **out);
void xt_memory_release(int index, void *data,
                       size_t nbytes); /* nbytes: as allocated. Ignores errors, since the driver may be shutting down */
void xt_memory_empty_lists(int index); /* returns kept blocks to the pool */
cudaError_t xt_memory_trim(int index); /* returns unused pool memory to the driver */
void xt_memory_reset_peak(int index);
XtStatus xt_memory_counters(int index, XtDeviceCounters *out); /* fills pool_* and *allocations, adds to synchronizations */

/* The memory of a graph (graph.cu). While a region serves, the device's blocks come from it alone, no call reaches the driver, and blocks
 * of elsewhere that are released wait until it ends. */
typedef struct XtRegion XtRegion;
void xt_memory_plan(int index);
size_t xt_memory_planned(int index); /* 0: out of host memory, or there was no plan */
XtStatus xt_memory_reserve(int index, size_t nbytes, XtRegion **out);
void xt_memory_serve(int index, XtRegion *region); /* NULL: no longer */
bool xt_region_holds(const XtRegion *region, const void *data);
void xt_memory_abandon(int index, XtRegion *region); /* its owner is gone: freed once none of its blocks is in use */
