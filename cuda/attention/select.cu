/* select.cu - the table of attention implementations of CUDA. Every forward checks its documents first. */
#include "attention.cuh"

template <XtStatus run(const XtAttentionFwd *)> static XtStatus checked(const XtAttentionFwd *p) {
    const XtAttentionDocuments documents = xt_dense_documents(p->documents, p->batch, p->sq);
    XT_CHECK(xt_cuda_attention_documents(&documents));
    return run(p);
}

#define ROW(name, kernel)                       \
    {name,                                      \
     #kernel,                                   \
     xt_cuda_attention_##kernel##_supports_fwd, \
     checked<xt_cuda_attention_##kernel##_fwd>, \
     xt_cuda_attention_##kernel##_supports_bwd, \
     xt_cuda_attention_##kernel##_bwd}

const XtAttentionBackend xt_cuda_attention[] = {
    ROW("flash", flash_hopper),
    ROW("flash", flash_half),
    ROW("flash", flash),
    ROW("materialized", materialized),
    {"reference", "reference", NULL, checked<xt_cuda_attention_reference_fwd>, NULL, xt_cuda_attention_reference_bwd},
    {},
};
