/* advance.c - the end of a step of generation: its tokens are fed and kept, positions and counts go on (contract/layers.h). */
#include "contract/layers.h"
#include "cpu/kernel.h"

XtStatus xt_cpu_advance(const XtAdvance *p) {
    int64_t *positions = p->state, *step = p->state + p->rows + 1, slot = XT_READ_ONCE(step + 1);
    const bool kept = slot >= 0 && slot < p->slots;
    for (int64_t b = 0; b < p->rows; b++) {
        p->ids[b] = p->tokens[b] > 0 ? p->tokens[b] : 0;
        if (kept) p->made[slot * p->rows + b] = p->tokens[b];
        positions[b] = (int64_t)((uint64_t)positions[b] + 1);
    }
    *step = (int64_t)((uint64_t)*step + 1);
    step[1] = kept && slot + 1 < p->slots ? slot + 1 : 0;
    return XT_OK;
}
