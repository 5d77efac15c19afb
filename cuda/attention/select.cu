/* select.cu - the table of named attention implementations; "auto" picks the first. */
#include "attention.cuh"

const XtAttentionBackend xt_cuda_attention[] = {
    {"flash", xt_cuda_attention_flash_fwd, xt_cuda_attention_flash_bwd},
    {"materialized", xt_cuda_attention_materialized_fwd, xt_cuda_attention_materialized_bwd},
    {"reference", xt_cuda_attention_reference_fwd, xt_cuda_attention_reference_bwd},
    {nullptr, nullptr, nullptr},
};
