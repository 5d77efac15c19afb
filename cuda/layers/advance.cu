/* advance.cu - the end of a step of generation: its tokens are fed and kept, positions and counts go on (contract/layers.h).
 *
 * One block, a few rows a thread: a launch is all that it costs, so it begins before the draw has ended. Thread 0 counts on when all
 * threads have read the slot.
 */
#include "arch/overlap.cuh"
#include "common/cuda.cuh"
#include "contract/layers.h"

static constexpr int MOST_THREADS = 256;

__global__ void advance_kernel(int64_t *ids, int64_t *state, int64_t *made, const int64_t *tokens, int64_t rows, int64_t slots) {
    xt_wait_for_previous();
    xt_let_next_begin();
    int64_t *step = state + rows + 1, *next = step + 1;
    const int64_t slot = *next;
    const bool kept = slot >= 0 && slot < slots;
    for (int64_t b = threadIdx.x; b < rows; b += blockDim.x) {
        const int64_t token = tokens[b];
        ids[b] = max(token, (int64_t)0);
        if (kept) made[slot * rows + b] = token;
        state[b]++;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    ++*step;
    *next = kept && slot + 1 < slots ? slot + 1 : 0;
}

XtStatus xt_cuda_advance(const XtAdvance *p) {
    const int threads = (int)(p->rows < MOST_THREADS ? xt_divide_up(p->rows, 32) * 32 : MOST_THREADS);
    xt_launch_early(advance_kernel, 1, threads > 0 ? threads : 32, 0, p->ids, p->state, p->made, p->tokens, p->rows, p->slots);
    return xt_launched("advance", p->rows, p->slots);
}
