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
    ROW("flash", flash_half),
    ROW("flash", flash),
    ROW("materialized", materialized),
    {"reference", "reference", NULL, xt_cuda_attention_reference_fwd, NULL, xt_cuda_attention_reference_bwd},
    /* Only where the name is chosen: the suites have not run on a GPU with these kernels. Once they pass, flash_hopper becomes the
     * first row of "flash", and the name goes. */
    ROW("hopper", flash_hopper),
    ROW("hopper", flash_half),
    ROW("hopper", flash),
    ROW("hopper", materialized),
    {"hopper", "reference", NULL, xt_cuda_attention_reference_fwd, NULL, xt_cuda_attention_reference_bwd},
    {},
};
