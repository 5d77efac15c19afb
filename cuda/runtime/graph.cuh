/* graph.cuh - what the rest of the library asks about captures (graph.cu). */
#pragma once

#include "common/launch.cuh"
#include "contract/backend.h"

/* Of the calling thread's device. */
bool xt_capturing(void);
/* An error if another thread captures on the device: its work and ours would share a graph. */
XtStatus xt_check_capture_of(int index);
/* Called when the thread queues work: in another thread's capture the graph is of no use any more. */
void xt_spoil_capture(int index);
extern bool xt_any_capture; /* atomic: a device is being captured */

/* Members of XtAccelerator. */
XtStatus xt_graph_plan(int index);
XtStatus xt_graph_planned(int index, size_t *nbytes);
XtStatus xt_graph_capture(int index, size_t nbytes, XtGraph **out);
XtStatus xt_graph_end(XtGraph *graph, bool keep, int64_t *calls);
XtStatus xt_graph_replay(XtGraph *graph);
bool xt_graph_owns(const XtGraph *graph, const void *data);
void xt_graph_drop(XtGraph *graph);

/* device.cu */
XtStatus xt_use_device(int index); /* makes it the calling thread's device, whoever captures */
XtStatus xt_drain(int index);      /* waits for the stream; reports from kernels stay for the next wait */
extern bool xt_always_wait;        /* XTRAIN_CUDA_SYNC=1 */
