/* cupti.h - what ran on the GPUs of this process, and when, by NVIDIA's CUPTI: kernels, copies and fills, in replayed graphs too. */
#pragma once

#include "xtrain.h"

typedef struct XtKernel {
    int64_t begin, end; /* ns of xt_clock */
    const char *name;   /* demangled where that is possible; lives as long as the process */
    int64_t nbytes;     /* of a copy or a fill; -1: a kernel */
    int device, stream; /* stream: CUPTI's number of it */
} XtKernel;

/* From now on they are recorded. Opens the library, and waits until the GPUs in use are idle. XT_OK, and nothing happens, where no GPU is
 * in use; an error, and nothing is recorded, says what is missing; XT_INTERRUPTED: Ctrl-C. One thread at a time. */
XtStatus xt_kernels_start(void);
/* Waits for what was queued, and ends that. The caller frees *out, [*count]; *lost were without memory or times. It is an error, with an
 * empty list, that the first use of a GPU came after xt_kernels_start. XT_INTERRUPTED: it has ended without the wait. */
XtStatus xt_kernels_stop(XtKernel **out, int64_t *count, int64_t *lost);
