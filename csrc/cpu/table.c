/* table.c - the CPU's kernel table, generated from the list in csrc/kernels.h. */
#include "contract/backend.h"
#include "cpu/attention/attention.h"
#include "cpu/gemm/gemm.h"

extern const XtAttentionBackend xt_cpu_attention_backends[];

static XtStatus host_copy(int device_index, void *to, const void *from, size_t nbytes) {
    (void)device_index;
    memcpy(to, from, nbytes);
    return XT_OK;
}

static XtStatus nothing_to_wait_for(int device_index) {
    (void)device_index;
    return XT_OK;
}

/* Memory comes from core/storage.c: allocate and release stay NULL. */
const XtBackend xt_cpu_backend = {
    .name = "cpu",
    .to_host = host_copy,
    .from_host = host_copy,
    .synchronize = nothing_to_wait_for,
#define XT_X(slot, Params) .slot = xt_cpu_##slot,
    XT_KERNELS(XT_X)
#undef XT_X
        .gemm = xt_cpu_gemm_backends,
    .attention = xt_cpu_attention_backends,
    .open = xt_blas_open,
};
