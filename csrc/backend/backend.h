/* backend.h - which kernel table serves which device, and which implementation computes a product or attention. */
#pragma once

#include "contract/backend.h"
#include "kernels.h"

/* The table of a device, or an error that says what is missing. CUDA's library is opened at the first call that asks for it. */
XtStatus xt_backend_for(XtDevice device, const XtBackend **out);
/* cuda.c: the CUDA library's table, whatever the device. Folders: where Python packages lie (NVIDIA's among them); kept, not copied. */
XtStatus xt_cuda_table(const XtBackend **out);
bool xt_cuda_is_open(void);
void xt_set_package_folders(const char *const *folders);
const char *const *xt_package_folders(void); /* ends with NULL */
/* elf.c: XT_OK where dlopen can be trusted with the file at `path`; else what is wrong with the CUDA library there. */
XtStatus xt_check_library(const char *path);
#define XT_BUILD_AGAIN "; build it again (XTRAIN_CUDA=1 make build)"

/* meta.c: a table of kernels that compute nothing, and what they would have done: operations of products and attention, and bytes that
 * all others read and write. */
const XtBackend *xt_meta_table(void);
typedef struct XtMetaWork {
    int64_t flops, bytes;
} XtMetaWork;
void xt_meta_work(XtMetaWork *out, bool reset); /* since the last reset */

/* select.c: computes p with the first implementation, from `name` on, that supports it. "auto" or NULL is the choice in force for this
 * thread, else the whole table. An unknown name, or one that this machine lacks something for, is an error. */
typedef struct XtGemm XtGemm; /* contract/gemm.h */
typedef struct XtAttentionFwd XtAttentionFwd;
typedef struct XtAttentionBwd XtAttentionBwd;
XtStatus xt_gemm(XtDevice device, const char *name, const XtGemm *p);
/* *done is false, and nothing happened, where no implementation supports the problem: it has an epilogue that they lack. */
XtStatus xt_gemm_where_supported(XtDevice device, const char *name, const XtGemm *p, bool *done);
XtStatus xt_attention_fwd(XtDevice device, const char *name, const XtAttentionFwd *p);
XtStatus xt_attention_bwd(XtDevice device, const char *name, const XtAttentionBwd *p);

/* The same in two steps, for showing it: where the search begins, and the error of a product that no implementation supports. */
XtStatus xt_gemm_from(XtDevice device, const char *name, const XtGemmBackend **first, const XtDeviceTraits **traits);
XtStatus xt_attention_from(XtDevice device, const char *name, const XtAttentionBackend **first, const XtDeviceTraits **traits);
XtStatus xt_gemm_refuse(const XtGemm *p);
/* Whether the implementation that computes p without p->bias can add the bias, too. A bias never changes the choice, so that the sums are
 * those of the product alone. */
XtStatus xt_gemm_adds_bias(XtDevice device, const char *name, const XtGemm *p, bool *adds);

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
