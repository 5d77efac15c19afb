/* bf16_shares.h - how the attentions of bfloat16, bf16.c and amx.c, are cut for threads.
 *
 * A piece is a share of the blocks of a kv head of a document, over the query heads that share it: every n-th block. It packs K and V
 * once. Rows of the forward do not meet, so that its shares suit the threads. dK and dV are sums of a share by one thread, in a fixed
 * order, and then over shares; their number depends on the shape without the batch. So neither threads nor the batch change a bit.
 */
#pragma once

#include "attention.h"

/* What differs between the kernels. Each body gets an XtAttentionJob, and shares [begin, end) counted through the kv heads of all parts. */
typedef struct XtBf16Attention {
    int64_t rows;                              /* of queries, in a block */
    int64_t share_blocks;                      /* at least, in a share of the backward: its sums are written and added up */
    int64_t alone;                             /* multiply-adds that a thread takes at once in the forward, or more */
    int64_t (*sums)(int64_t skv, int64_t dim); /* numbers of dK, or dV, of a share */
    XtBody forward, backward;
    XtBody add; /* share i of a kv head stands for the i-th part of its dK and dV: sums over its shares, and stores */
} XtBf16Attention;

XtStatus xt_attention_bf16_forward(const XtAttentionFwd *p, const XtBf16Attention *kernel);
XtStatus xt_attention_bf16_backward(const XtAttentionBwd *p, const XtBf16Attention *kernel);

/* NULL where there are products of bfloat16, or why there are none. */
const char *xt_attention_bf16_fits(XtDtype dtype, int64_t skv, int64_t dim);

/* Where the rows of a head of a part begin, in numbers from the tensor's first. */
XT_INLINE int64_t xt_rows_at(const int64_t stride[3], const XtPart *part, int64_t head) {
    return part->b * stride[0] + head * stride[1] + part->first * stride[2];
}
