/* documents.cu - checks that documents keep the rule of contract/attention.h, before attention or positions read them.
 *
 *     token i begins a document where i = 0 or i = end[i - 1]:  start[i] = i < end[i] <= S
 *     every other token has the bounds of the one before it
 *
 * A thread a token. Bytes moved: 8 a token. The host reads nothing: one of the tokens that break the rule is reported, and the next wait
 * raises it. The kernels of attention clamp what they read, so they may run behind it.
 */
#include "attention.cuh"

static constexpr int THREADS = 256; /* of a block */

__global__ void __launch_bounds__(THREADS) documents_kernel(XtAttentionDocuments p, XtIndexReport *report) {
    const int64_t count = p.batch * p.seq, step = p.stride[2];
    for (int64_t c = blockIdx.x * (int64_t)THREADS + threadIdx.x; c < count; c += (int64_t)gridDim.x * THREADS) {
        const int64_t b = c / p.seq, i = c - b * p.seq;
        const int32_t *start = p.documents + b * p.stride[0] + i * step, *end = start + p.stride[1];
        const bool begins = i == 0 || i == end[-step];
        const bool right = begins ? *start == i && *end > i && *end <= p.seq : *start == start[-step] && *end == end[-step];
        if (!right) xt_report_index(report, XT_DOCUMENTS, i, *start, *end, b);
    }
}

XtStatus xt_cuda_attention_documents(const XtAttentionDocuments *p) {
    const int64_t count = p->batch * p->seq;
    if (!p->documents || count == 0) return XT_OK;
    xt_launch(documents_kernel, xt_blocks(count, THREADS), THREADS, 0, *p, xt_index_report());
    return xt_launched("attention_documents", p->batch, p->seq);
}
