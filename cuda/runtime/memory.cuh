/* memory.cuh - device memory for device.cu and for scratch; memory.cu has the code. */
#pragma once

#include "common/cuda.cuh"
#include "contract/backend.h"

enum { XT_MAX_DEVICES = 16 };

/* The status of a failed wait: the error of a kernel queued earlier (device.cu). */
XtStatus xt_late_error(int index, cudaError_t error);

/* The calling thread's device is `index`, and `stream` its one compute stream. */
XtStatus xt_memory_open(int index, cudaStream_t stream, bool keep_blocks);
/* XT_OUT_OF_MEMORY comes without a message: the caller knows what it asked for. */
XtStatus xt_memory_allocate(int index, size_t nbytes, void **out);
void xt_memory_release(int index, void *data, size_t nbytes); /* nbytes as allocated; never fails: the process may be ending */
void xt_memory_empty_lists(int index);                        /* returns kept blocks to the pool */
cudaError_t xt_memory_trim(int index);                        /* returns unused pool memory to the driver */
void xt_memory_reset_peak(int index);
XtStatus xt_memory_counters(int index, XtDeviceCounters *out); /* fills pool_*, *allocations; adds its waits */
