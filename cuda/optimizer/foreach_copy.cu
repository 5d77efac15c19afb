/* foreach_copy.cu - the bytes of a whole list of tensors in one launch (tables.cuh).
 *
 * A copy of its own for each parameter takes 1.5 to 2 us of a GPU, however small it is. Bytes: each once in and out.
 */
#include "contract/optimizer.h"
#include "optimizer/tables.cuh"

static constexpr int WORD = 4; /* bytes of what tables.cuh counts, so a block has 32 KiB */

typedef struct CopyTensor {
    void *to;         /* [nbytes] */
    const void *from; /* [nbytes] */
    int64_t numel, nbytes;
    bool wide; /* both pointers take accesses of 16 bytes */
} CopyTensor;

template <typename V> __device__ inline void copy_range(const CopyTensor &t, int64_t begin, int64_t end) {
    char *__restrict__ to = (char *)t.to;
    const char *__restrict__ from = (const char *)t.from;
#pragma unroll 8
    for (int64_t i = begin + threadIdx.x * sizeof(V); i < end; i += THREADS * sizeof(V)) *(V *)(to + i) = *(const V *)(from + i);
}

/* Grid: one block a piece. */
__global__ void __launch_bounds__(THREADS) foreach_copy_kernel(const __grid_constant__ Table<CopyTensor> table) {
    const int item = item_of(table, blockIdx.x);
    const CopyTensor &t = table.item[item];
    const int64_t begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE * WORD;
    const int64_t end = t.nbytes - begin < PIECE * WORD ? t.nbytes : begin + PIECE * WORD;
    const int64_t middle = t.wide ? end - (end - begin) % (int64_t)sizeof(uint4) : begin;
    copy_range<uint4>(t, begin, middle);
    copy_range<char>(t, middle, end);
}

XtStatus xt_cuda_foreach_copy(const XtCopies *p) {
    int64_t nbytes = 0;
    by_tables<CopyTensor>(
        p->count, 0,
        [&](int64_t i) {
            const XtCopyItem *from = &p->items[i];
            CopyTensor t;
            t.to = from->to;
            t.from = from->from;
            t.nbytes = from->nbytes;
            t.numel = xt_divide_up(from->nbytes, WORD);
            t.wide = (((uintptr_t)t.to | (uintptr_t)t.from) & 15) == 0;
            nbytes += from->nbytes;
            return t;
        },
        [&](const Table<CopyTensor> &table, int pieces) { xt_launch(foreach_copy_kernel, pieces, THREADS, 0, table); });
    return xt_launched("foreach_copy", p->count, nbytes);
}
