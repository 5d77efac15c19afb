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
