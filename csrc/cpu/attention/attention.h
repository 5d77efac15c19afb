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

/* The keys begin <= j < end of a query. */
typedef struct XtSeen {
    int64_t begin, end;
} XtSeen;

/* What query `row` of a sequence sees; start and end: those of its document, 0 and skv without. */
XT_INLINE XtSeen xt_seen(bool causal, int64_t window, int64_t row, int64_t sq, int64_t skv, int64_t start, int64_t end) {
    int64_t place = row + (skv - sq);
    if (causal && place + 1 < end) end = place + 1;
    if (window > 0 && place - window + 1 > start) start = place - window + 1;
    return end > start ? (XtSeen){start, end} : (XtSeen){start, start};
}

/* XT_VALUE_ERROR where documents [batch, 2, seq] are not documents one behind the other that fill each row. */
XtStatus xt_check_documents(const int32_t *documents, int64_t batch, int64_t seq);
