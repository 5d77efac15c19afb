/* pieces.h - a list of tensors cut into numbered pieces, for kernels that take many tensors in one call.
 *
 * Every tensor is cut into pieces of XT_PIECE elements and the pieces of all tensors are numbered through: many small tensors keep the
 * threads as busy as a few large ones, and sums are made per piece and added in the order of the numbers.
 */
#pragma once

#include "xtrain.h"

#include <stdlib.h>

enum { XT_PIECE = 16384 };

typedef struct XtPieces {
    int64_t *first; /* [count + 1], owned: tensor t has the pieces first[t] .. first[t + 1] */
    int64_t count;  /* tensors */
} XtPieces;

static inline XtStatus xt_pieces_allocate(XtPieces *pieces, const char *op, int64_t count) {
    pieces->count = count;
    pieces->first = malloc((size_t)(count + 1) * sizeof *pieces->first);
    if (!pieces->first)
        return xt_error(XT_OUT_OF_MEMORY, "%s: scratch for a list of %lld tensors could not be allocated", op, (long long)count);
    pieces->first[0] = 0;
    return XT_OK;
}

static inline void xt_pieces_add(XtPieces *pieces, int64_t t, int64_t numel) {
    pieces->first[t + 1] = pieces->first[t] + (numel + XT_PIECE - 1) / XT_PIECE;
}

/* The tensor that owns a piece: the last one whose first piece is not after it. */
static inline int64_t xt_pieces_tensor(const XtPieces *pieces, int64_t piece) {
    int64_t low = 0, high = pieces->count; /* first[low] <= piece < first[high] */
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (pieces->first[middle] <= piece) low = middle;
        else high = middle;
    }
    return low;
}

/* Where piece begins in tensor t, and how many elements it has. */
static inline int64_t xt_pieces_range(const XtPieces *pieces, int64_t t, int64_t piece, int64_t numel, int64_t *n) {
    int64_t offset = (piece - pieces->first[t]) * XT_PIECE;
    *n = numel - offset < XT_PIECE ? numel - offset : XT_PIECE;
    return offset;
}
