/* runtime.h - functions about the process and its devices; module.c puts everything into `xtrain._C`. */
#pragma once

#include "py/tensor/tensor.h"

/* Loads the CPU's BLAS, at the first call, and describes it (static text). */
XtStatus py_open_blas(const char **description);

/* The accelerator of a CUDA device, or NULL with an exception. */
struct XtAccelerator;
const struct XtAccelerator *py_accelerator(XtDevice device);

extern const PyFunction py_runtime_functions[], py_select_functions[], py_cuda_functions[], py_testing_functions[],
    py_path_functions[], py_graph_functions[], py_span_functions[], py_pulse_functions[], py_comm_functions[],
    py_ending_functions[];
