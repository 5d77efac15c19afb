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
XtStatus xt_attention_amx_fwd(const XtAttentionFwd *p); /* bfloat16 in AMX tiles: subnormals count as zero */
XtStatus xt_attention_amx_bwd(const XtAttentionBwd *p);
const char *xt_attention_amx_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device);
const char *xt_attention_amx_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device);
XtStatus xt_attention_bf16_fwd(const XtAttentionFwd *p); /* bfloat16 in AVX512-BF16 instructions: subnormals count as zero */
XtStatus xt_attention_bf16_bwd(const XtAttentionBwd *p);
const char *xt_attention_bf16_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device);
const char *xt_attention_bf16_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device);

extern const XtAttentionBackend xt_cpu_attention_backends[]; /* amx, bf16, materialized, reference */

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

/* XtAttentionDocuments of dense ones. A backward checks again: the memory may have changed since the forward, and bounds become addresses. */
XT_INLINE XtStatus xt_check_documents(const int32_t *documents, int64_t batch, int64_t seq) {
    XtAttentionDocuments p = xt_dense_documents(documents, batch, seq);
    return xt_cpu_attention_documents(&p);
}

/* Queries and keys that see no others: those of an entry of the batch, or of a document. An implementation sets what is below skv. */
typedef struct XtPart {
    int64_t b, first; /* entry; query and key with which it begins */
    int64_t sq, skv;
    int64_t width;        /* keys that a block of queries sees at most */
    int64_t rows, blocks; /* queries in a block; blocks of one head */
    int64_t shares;       /* into which the blocks of a kv head's query heads are cut; 1 at first */
    int64_t index;        /* pieces of the parts before it */
    int64_t numbers;      /* in the sums of one share: dK and dV */
    int64_t sums;         /* numbers of the sums of shares of the parts before it */
} XtPart;

/* What pieces of work read. */
typedef struct XtAttentionJob {
    const void *p; /* XtAttentionFwd or XtAttentionBwd */
    XtPart *parts;
    int64_t count, pieces; /* parts; pieces of all of them */
    void *sums;            /* of each part that is cut: [kv_heads, shares, numbers] */
} XtAttentionJob;

/* All parts, in memory that the caller frees. */
XtStatus xt_attention_parts(const int32_t *documents, int64_t batch, int64_t sq, int64_t skv, XtPart **parts, int64_t *count);

/* The last part that begins at piece `index` or before. */
int64_t xt_part_at(const XtPart *parts, int64_t count, int64_t index);

#define XT_ATTENTION_SUMS (32 << 20) /* bytes, of dK and dV of shares */

/* The backward of `parts`, whose shares and numbers are set: `work` on kv_heads * shares pieces of each, then `add`, which adds up the
 * sums of the same pieces, where a part is cut. Both get an XtAttentionJob: as many parts as have sums with room together, one at least.
 * size: bytes of a number. */
XtStatus xt_attention_shares(const XtAttentionBwd *p, XtPart *parts, int64_t count, size_t size, XtBody work, XtBody add);
