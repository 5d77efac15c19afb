/* attention.h - the named attention implementations on the CPU, and what they share. */
#pragma once

#include "contract/attention.h"
#include "cpu/kernel.h"

XtStatus xt_attention_reference_fwd(const XtAttentionFwd *p);
XtStatus xt_attention_reference_bwd(const XtAttentionBwd *p);
XtStatus xt_attention_materialized_fwd(const XtAttentionFwd *p);
XtStatus xt_attention_materialized_bwd(const XtAttentionBwd *p);
const char *xt_attention_materialized_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device);
const char *xt_attention_materialized_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device);

extern const XtAttentionBackend xt_cpu_attention_backends[]; /* materialized, reference */

/* How many columns query row `row` sees: a causal square ends in the lower right corner, at column row + (skv - sq). */
XT_INLINE int64_t xt_visible_columns(bool causal, int64_t row, int64_t sq, int64_t skv) {
    if (!causal) return skv;
    int64_t last = row + (skv - sq);
    return last < 0 ? 0 : last + 1;
}
