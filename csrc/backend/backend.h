/* backend.h - which kernel table serves which device, and which named GEMM or attention implementation is in force. */
#ifndef XT_BACKEND_H
#define XT_BACKEND_H

#include "contract/backend.h"
#include "kernels.h"

/* The table of a device, or an error that says what is missing. CUDA's library is opened at the first call that asks for it. */
XtStatus xt_backend_for(XtDevice device, const XtBackend **out);
/* cuda.c: the CUDA library's table, whatever the device. Folders: where Python packages lie (NVIDIA's among them); kept, not copied. */
XtStatus xt_cuda_table(const XtBackend **out);
void xt_set_package_folders(const char *const *folders);
/* elf.c: XT_OK where dlopen can be trusted with the file at `path`; else what is wrong with the CUDA library there. */
XtStatus xt_check_library(const char *path);
#define XT_BUILD_AGAIN "; build it again (XTRAIN_CUDA=1 make build)"

/* Looks `name` up ("auto" or NULL: the choice in force, else the first) and reports what exists when it does not. */
XtStatus xt_gemm_backend(XtDevice device, const char *name, const XtGemmBackend **out);
XtStatus xt_attention_backend(XtDevice device, const char *name, const XtAttentionBackend **out);

/* The choice in force for this thread (NULL or "auto": none). Starts from XTRAIN_GEMM / XTRAIN_ATTENTION. `name` is copied. */
XtStatus xt_use_gemm_backend(const char *name);
XtStatus xt_use_attention_backend(const char *name);
const char *xt_gemm_backend_in_use(void);
const char *xt_attention_backend_in_use(void);

/* Where tensors are made when no device is named, per thread. Starts as the CPU; a device that cannot be used is refused. */
XtStatus xt_set_default_device(XtDevice device);
XtDevice xt_default_device(void);

/* Whether float32 products may use TF32 units, for the whole process. Starts as no. */
void xt_allow_tf32(bool allow);
bool xt_tf32(void);

#endif
