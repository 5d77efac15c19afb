/* checksums.c - a sum over the words of each tensor, in pieces. */
#include "contract/optimizer.h"
#include "core/splitmix.h"
#include "cpu/kernel.h"
#include "cpu/optimizer/pieces.h"

enum { WORD = 8 }; /* bytes */

typedef struct Run {
    const XtChecksums *p;
    XtPieces pieces; /* of words */
} Run;

/* Of n whole words of data, the first of which is word `first` of its tensor. */
XT_FAST static uint64_t sum_of_words(const char *data, int64_t first, int64_t n) {
    uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        uint64_t word;
        memcpy(&word, data + i * WORD, WORD);
        sum += xt_splitmix(word + (uint64_t)(first + i + 1) * XT_SPLITMIX_STEP);
    }
    return sum;
}

static int64_t words_of(const XtChecksumItem *item) { return item->nbytes / WORD + (item->nbytes % WORD > 0); }

static XtStatus sum_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t t = xt_pieces_tensor(&run->pieces, piece), n;
        const XtChecksumItem *item = &run->p->items[t];
        const int64_t first = xt_pieces_range(&run->pieces, t, piece, words_of(item), &n);
        const char *data = (const char *)item->data + first * WORD;
        const int64_t left = item->nbytes - first * WORD, whole = left / WORD < n ? left / WORD : n;
        uint64_t sum = sum_of_words(data, first, whole), last = 0;
        if (whole < n) { /* the end of the tensor */
            memcpy(&last, data + whole * WORD, (size_t)(left - whole * WORD));
            sum += sum_of_words((const char *)&last, first + whole, 1);
        }
        __atomic_fetch_add((uint64_t *)&run->p->sums[t], sum, __ATOMIC_RELAXED);
    }
    return XT_OK;
}

XtStatus xt_cpu_checksums(const XtChecksums *p) {
    Run run = {.p = p};
    XT_CHECK(xt_pieces_allocate(&run.pieces, "checksums", p->count));
    for (int64_t i = 0; i < p->count; i++) {
        xt_pieces_add(&run.pieces, i, words_of(&p->items[i]));
        p->sums[i] = p->items[i].nbytes;
    }
    XtStatus status = xt_parallel(run.pieces.first[p->count], 1, sum_pieces, &run);
    free(run.pieces.first);
    return status;
}
