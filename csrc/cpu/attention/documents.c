/* documents.c - whether documents are what contract/attention.h says. */
#include "attention.h"

#include <inttypes.h>

XtStatus xt_check_documents(const int32_t *documents, int64_t batch, int64_t seq) {
    for (int64_t b = 0; documents && b < batch; b++) {
        const int32_t *start = documents + 2 * b * seq, *end = start + seq; /* [seq] each */
        for (int64_t i = 0; i < seq; i++) {
            bool begins = i == 0 || i == end[i - 1];
            bool right = begins ? start[i] == i && end[i] > i && end[i] <= seq : start[i] == start[i - 1] && end[i] == end[i - 1];
            if (!right)
                return xt_error(
                    XT_VALUE_ERROR,
                    "scaled_dot_product_attention: documents must lie one behind the other and fill the row, got %d to %d "
                    "at token %" PRId64 " of row %" PRId64,
                    (int)start[i], (int)end[i], i, b);
        }
    }
    return XT_OK;
}
