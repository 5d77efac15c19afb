/* select.c - the table of named attention implementations. */
#include "attention.h"

const XtAttentionBackend xt_cpu_attention_backends[] = {
    {"materialized", xt_attention_materialized_fwd, xt_attention_materialized_bwd},
    {"reference", xt_attention_reference_fwd, xt_attention_reference_bwd},
    {NULL, NULL, NULL},
};
