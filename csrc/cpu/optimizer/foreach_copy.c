/* foreach_copy.c - the bytes of many tensors, in pieces. */
#include "contract/optimizer.h"
#include "cpu/kernel.h"
#include "cpu/optimizer/pieces.h"

typedef struct Run {
    const XtCopies *p;
    XtPieces pieces; /* of bytes */
} Run;

static XtStatus copy_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t t = xt_pieces_tensor(&run->pieces, piece), n;
        const XtCopyItem *item = &run->p->items[t];
        int64_t offset = xt_pieces_range(&run->pieces, t, piece, item->nbytes, &n);
        memcpy((char *)item->to + offset, (const char *)item->from + offset, (size_t)n);
    }
    return XT_OK;
}

XtStatus xt_cpu_foreach_copy(const XtCopies *p) {
    Run run = {.p = p};
    XT_CHECK(xt_pieces_allocate(&run.pieces, "foreach_copy", p->count));
    for (int64_t i = 0; i < p->count; i++) xt_pieces_add(&run.pieces, i, p->items[i].nbytes);
    XtStatus status = xt_parallel(run.pieces.first[p->count], 1, copy_pieces, &run);
    free(run.pieces.first);
    return status;
}
