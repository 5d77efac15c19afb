/* bf16_shares.c - cuts attention of bfloat16 into shares, for the kernels of bf16.c and amx.c. */
#include "bf16_shares.h"
#include "cpu/gemm/bf16_work.h"

#include <stdlib.h>

#define PIECES 16 /* of the backward of an entry of the batch, where there are fewer kv heads */

static void cut_rows(XtPart *part, int64_t rows) {
    part->rows = rows;
    part->blocks = (part->sq + rows - 1) / rows;
}

XtStatus xt_attention_bf16_forward(const XtAttentionFwd *p, const XtBf16Attention *kernel) {
    XtAttentionJob job = {.p = p};
    if (p->kv_heads == 0) return XT_OK;
    XT_CHECK(xt_attention_parts(p->documents, p->batch, p->sq, p->skv, &job.parts, &job.count));
    const int64_t group = p->heads / p->kv_heads, kv_heads = p->kv_heads, wanted = 4 * (int64_t)xt_num_threads();
    double work = 0, alone = (double)kernel->alone;
    for (int64_t n = 0; n < job.count; n++) {
        XtPart *part = job.parts + n;
        cut_rows(part, kernel->rows);
        const int64_t shares = (wanted - 1) / (job.count * kv_heads) + 1, most = (group * part->blocks + 1) / 2;
        part->shares = wanted > 4 && most > 1 ? least(shares, most) : 1;
        part->index = job.pieces;
        job.pieces += kv_heads * part->shares;
        work += 2.0 * (double)(p->heads * part->sq * p->dim) * (double)part->skv;
    }
    const double each = job.pieces > 0 ? work / (double)job.pieces : 0;
    XtStatus status = xt_parallel(job.pieces, each < alone ? (int64_t)(alone / (each + 1)) : 1, kernel->forward, &job);
    free(job.parts);
    return status;
}

/* How many shares each kv head of a part is cut into: as if its entry, or its document, were alone, for its bits. */
static int64_t shares_of(const XtPart *part, const XtAttentionBwd *p, const XtBf16Attention *kernel) {
    const int64_t blocks = p->heads / p->kv_heads * part->blocks;
    const double fit = XT_ATTENTION_SUMS / (8.0 * (double)p->kv_heads * (double)kernel->sums(part->skv, p->dim));
    int64_t shares = least((PIECES - 1) / p->kv_heads + 1, blocks / kernel->share_blocks);
    shares = fit < (double)shares ? (int64_t)fit : shares;
    return shares > 1 ? shares : 1;
}

XtStatus xt_attention_bf16_backward(const XtAttentionBwd *p, const XtBf16Attention *kernel) {
    XtPart *parts;
    int64_t count;
    if (p->kv_heads == 0) return XT_OK;
    XT_CHECK(xt_attention_parts(p->documents, p->batch, p->sq, p->skv, &parts, &count));
    for (int64_t n = 0; n < count; n++) {
        cut_rows(parts + n, kernel->rows);
        parts[n].shares = shares_of(parts + n, p, kernel);
        parts[n].numbers = 2 * kernel->sums(parts[n].skv, p->dim); /* dK and dV */
    }
    XtStatus status = xt_attention_shares(p, parts, count, sizeof(float), kernel->backward, kernel->add);
    free(parts);
    return status;
}

const char *xt_attention_bf16_fits(XtDtype dtype, int64_t skv, int64_t dim) {
    if (dtype != XT_BFLOAT16) return "the dtype is not bfloat16";
    return dim <= 0 || skv <= 0 ? "there is nothing to multiply" : NULL;
}
