/* select.c - the table of named attention implementations. */
#include "attention.h"

const XtAttentionBackend xt_cpu_attention_backends[] = {
    {"amx", "amx", xt_attention_amx_supports_fwd, xt_attention_amx_fwd, xt_attention_amx_supports_bwd, xt_attention_amx_bwd},
    {"bf16", "bf16", xt_attention_bf16_supports_fwd, xt_attention_bf16_fwd, xt_attention_bf16_supports_bwd, xt_attention_bf16_bwd},
    {"materialized", "materialized", xt_attention_materialized_supports_fwd, xt_attention_materialized_fwd,
     xt_attention_materialized_supports_bwd, xt_attention_materialized_bwd},
    {"reference", "reference", NULL, xt_attention_reference_fwd, NULL, xt_attention_reference_bwd},
    {0},
};
