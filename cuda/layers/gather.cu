/* gather.cu - places that indices name, and rows put there.
 *
 *     positions  out[c] = sum over d of c_d step_d + sum over k of wrap(index_k[c]) stride_k, one place a thread
 *     scatter    table[ids[r]] = rows[r]; of several rows for one place the last counts
 *
 * Scatter first finds the largest row for each place (an integer maximum, whose order does not matter), then writes that row alone: the
 * same bits in every run. Bytes moved: 8 for each place of the table and 16 for each row, and the rows once.
 */
#include "common/strided.cuh"
#include "contract/layers.h"

#include <string.h>

static constexpr int THREADS = 256; /* of a block */

__global__ void __launch_bounds__(THREADS)
    positions_kernel(const __grid_constant__ XtPositions p, int64_t count, XtIndexSlot slot, XtIndexReport *report) {
    for (int64_t c = blockIdx.x * (int64_t)THREADS + threadIdx.x; c < count; c += (int64_t)gridDim.x * THREADS) {
        int64_t offset[XT_MAX_DIMS] = {0}, place = 0, rest = c;
        for (int d = p.ndim - 1; d >= 0; d--) {
            const int64_t at = rest % p.shape[d];
            rest /= p.shape[d];
            place += at * p.step[d];
#pragma unroll
            for (int k = 0; k < XT_MAX_DIMS; k++)
                if (k < p.count) offset[k] += at * p.index[k].strides[d];
        }
        bool known = true;
#pragma unroll
        for (int k = 0; k < XT_MAX_DIMS; k++) {
            if (k >= p.count) continue;
            const int64_t given = ((const int64_t *)p.index[k].data)[offset[k]], size = p.size[k];
            const int64_t i = p.wrap && given < 0 ? given + size : given;
            if (i < 0 || i >= size) {
                xt_report_index(report, slot, c, given, size);
                known = false;
            }
            place += i * p.stride[k];
        }
        p.out[c] = known ? place : -1; /* as absent for whoever reads it; the report is made */
    }
}

static XtIndexSlot slot_of(const XtPositions *p) {
    if (p->wrap) return strcmp(p->op, "index_put") ? XT_INDEX_WRAPPED : XT_INDEX_PUT;
    return !strcmp(p->op, "gather") ? XT_INDEX_GATHER : !strcmp(p->op, "scatter") ? XT_INDEX_SCATTER : XT_INDEX_SCATTER_ADD;
}

XtStatus xt_cuda_positions(const XtPositions *p) {
    int64_t count = 1;
    for (int d = 0; d < p->ndim; d++) count *= p->shape[d];
    if (count == 0) return XT_OK;
    xt_launch(positions_kernel, xt_blocks(count, THREADS), THREADS, 0, *p, count, slot_of(p), xt_index_report());
    return xt_launched("positions", count);
}

/* winner [places] = the largest r with ids[r] == place, from -1. */
__global__ void __launch_bounds__(THREADS) scatter_winner_kernel(long long *winner, const int64_t *ids, int64_t count) {
    for (int64_t r = blockIdx.x * (int64_t)THREADS + threadIdx.x; r < count; r += (int64_t)gridDim.x * THREADS)
        if (ids[r] >= 0) atomicMax(&winner[ids[r]], (long long)r);
}

/* table [places, cols], rows [count, cols]; last [count] or NULL. */
template <typename U>
__global__ void __launch_bounds__(THREADS) scatter_write_kernel(U *table, uint8_t *last, const U *rows, const int64_t *ids,
                                                                const long long *winner, int64_t count, int64_t cols) {
    for (int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x; i < count * cols; i += (int64_t)gridDim.x * THREADS) {
        const int64_t r = i / cols, column = i - r * cols, id = ids[r];
        const bool wins = id >= 0 && winner[id] == r;
        if (wins) table[id * cols + column] = rows[i];
        if (last && column == 0) last[r] = wins;
    }
}

XtStatus xt_cuda_scatter(const XtScatter *p) {
    if (p->count == 0 || p->cols == 0 || p->places == 0) return XT_OK;
    XtScratch scratch;
    const size_t nbytes = (size_t)p->places * sizeof(long long);
    XT_CHECK(scratch.allocate(nbytes));
    long long *winner = (long long *)scratch.data; /* [places] */
    XT_CHECK(xt_cuda_error("scatter", cudaMemsetAsync(winner, 0xff, nbytes, xt_stream())));
    xt_launch(scatter_winner_kernel, xt_blocks(p->count, THREADS), THREADS, 0, winner, p->ids, p->count);
    return xt_by_bits((int64_t)xt_dtype_size(p->dtype), [&](auto zero) {
        using U = decltype(zero);
        xt_launch(scatter_write_kernel<U>, xt_blocks(p->count * p->cols, THREADS), THREADS, 0, (U *)p->table, p->last,
                  (const U *)p->rows, p->ids, winner, p->count, p->cols);
        return xt_launched("scatter", p->count, p->cols, p->places);
    });
}
