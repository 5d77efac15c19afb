/* select.cu - the table of attention implementations of CUDA. */
#include "attention.cuh"

#define ROW(name, kernel)                       \
    {name,                                      \
     #kernel,                                   \
     xt_cuda_attention_##kernel##_supports_fwd, \
     xt_cuda_attention_##kernel##_fwd,          \
     xt_cuda_attention_##kernel##_supports_bwd, \
     xt_cuda_attention_##kernel##_bwd}

const XtAttentionBackend xt_cuda_attention[] = {
    ROW("flash", flash_hopper),
    ROW("flash", flash_half),
    ROW("flash", flash),
    ROW("materialized", materialized),
    {"reference", "reference", NULL, xt_cuda_attention_reference_fwd, NULL, xt_cuda_attention_reference_bwd},
    {},
};
