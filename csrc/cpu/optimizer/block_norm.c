/* block_norm.c - the norm of gradients from the squares of their blocks, and what clipping makes of it. */
#include "contract/optimizer.h"
#include "cpu/kernel.h"

#include <math.h>

XtStatus xt_cpu_block_norm(const XtBlockNorm *p) {
    double sum = 0;
    for (int64_t i = 0; i < p->count; i++) sum += p->squares[i];
    const double norm = sqrt(sum), coefficient = p->most / (norm + 1e-6);
    *p->norm = norm;
    *p->coefficient = coefficient < 1 ? coefficient : 1;
    *p->guard = isfinite(norm) ? 0 : NAN;
    return XT_OK;
}
