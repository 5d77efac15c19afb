/* traits.h - what the choice among the implementations of a product or of attention may know of the device.
 *
 * Each device has a table of implementations per family, the preferred ones first. An implementation says with supports() whether it
 * does a problem, and xt_gemm_select and its like return the first that does. So a choice depends on the problem (the params struct)
 * and on what is here, on no earlier call and on no clock; a named implementation only moves the place where the search begins.
 * docs/internals/selection.md shows how to see it.
 */
#pragma once

#include "xtrain.h"

/* Constant for a device and a process. The CPU's are zeros. */
typedef struct XtDeviceTraits {
    int capability;   /* compute capability: 90 is 9.0 */
    int shared_limit; /* bytes of shared memory that a block can have */
    /* Whether the library was found. The first question opens it, and the answer stays. */
    bool (*has_cublaslt)(void);
    bool (*has_cublas)(void);
} XtDeviceTraits;
