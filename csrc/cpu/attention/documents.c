/* documents.c - whether documents are what contract/attention.h says, the parts into which they cut a problem, and the backward of such
 * parts by shares. */
#include "attention.h"
#include "cpu/gemm/gemm.h"

#include <inttypes.h>
#include <stdlib.h>

enum { ASK = 1 << 16 }; /* tokens between two looks for Ctrl-C */

/* Tokens [first, last) of row b. */
static XtStatus check_tokens(const XtAttentionDocuments *p, int64_t b, int64_t first, int64_t last) {
    const int64_t seq = p->seq, step = p->stride[2];
    const int32_t *start = p->documents + b * p->stride[0] + first * step, *end = start + p->stride[1]; /* [last - first] each */
    for (int64_t i = first; i < last; i++, start += step, end += step) {
        bool begins = i == 0 || i == end[-step];
        bool right = begins ? *start == i && *end > i && *end <= seq : *start == start[-step] && *end == end[-step];
        if (!right)
            return xt_error(XT_VALUE_ERROR,
                            "scaled_dot_product_attention: documents must lie one behind the other and fill the row, got %d to %d "
                            "at token %" PRId64 " of row %" PRId64,
                            (int)*start, (int)*end, i, b);
    }
    return XT_OK;
}

XtStatus xt_cpu_attention_documents(const XtAttentionDocuments *p) {
    const int64_t seq = p->seq;
    int64_t looked = 0;
    for (int64_t b = 0; p->documents && seq > 0 && b < p->batch; b++)
        for (int64_t first = 0, last; first < seq; first = last) {
            last = seq - first < ASK ? seq : first + ASK;
            looked += last - first;
            if (looked >= ASK && xt_interrupted()) return XT_INTERRUPTED;
            if (looked >= ASK) looked = 0;
            XT_CHECK(check_tokens(p, b, first, last));
        }
    return XT_OK;
}

XtStatus xt_attention_parts(const int32_t *documents, int64_t batch, int64_t sq, int64_t skv, XtPart **parts, int64_t *count) {
    XT_CHECK(xt_check_documents(documents, batch, sq));
    XtPart *list = NULL;
    int64_t room = 0;
    for (int round = 0; round < 2; round++) { /* the first one counts */
        int64_t n = 0;
        for (int64_t b = 0; b < batch; b++) {
            const int32_t *end = documents ? documents + (2 * b + 1) * sq : NULL; /* [sq] */
            for (int64_t first = 0; first < (end ? sq : 1) && (!list || n < room); n++) {
                int64_t length = end ? XT_READ_ONCE(end + first) - first : sq;
                /* Another thread may change bounds after the check. */
                if (end && (length < 1 || length > sq - first)) length = sq - first;
                if (list) list[n] = (XtPart){.b = b, .first = first, .sq = length, .skv = end ? length : skv, .shares = 1};
                first += end ? length : 1;
            }
        }
        room = n;
        *parts = list, *count = n;
        if (!list && n && !(list = malloc((size_t)n * sizeof *list)))
            return xt_error(XT_OUT_OF_MEMORY, "attention: no memory for a list of %lld documents", (long long)n);
    }
    return XT_OK;
}

int64_t xt_part_at(const XtPart *parts, int64_t count, int64_t index) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (parts[middle].index <= index) low = middle;
        else high = middle - 1;
    }
    return low;
}

static XtStatus run_shares(XtAttentionJob *job, size_t nbytes, XtBody work, XtBody add) {
    if (nbytes == 0) return xt_parallel(job->pieces, 1, work, job);
    XtWorkspace workspace;
    XT_CHECK(xt_take_workspace(nbytes, &workspace));
    job->sums = workspace.data;
    XtStatus status = xt_parallel(job->pieces, 1, work, job);
    if (status == XT_OK) status = xt_parallel(job->pieces, 1, add, job);
    xt_give_workspace(&workspace);
    return status;
}

XtStatus xt_attention_shares(const XtAttentionBwd *p, XtPart *parts, int64_t count, size_t size, XtBody work, XtBody add) {
    XtAttentionJob some = {.p = p};
    XtStatus status = XT_OK;
    for (int64_t first = 0; first < count && status == XT_OK; first += some.count) {
        int64_t sums = 0;
        some.parts = parts + first, some.count = some.pieces = 0;
        while (first + some.count < count) {
            XtPart *part = some.parts + some.count;
            const int64_t pieces = p->kv_heads * part->shares, numbers = part->shares > 1 ? pieces * part->numbers : 0;
            if (some.count > 0 && (sums + numbers) * (int64_t)size > XT_ATTENTION_SUMS) break;
            part->index = some.pieces, part->sums = sums;
            some.pieces += pieces, sums += numbers, some.count++;
        }
        status = run_shares(&some, (size_t)sums * size, work, add);
    }
    return status;
}
