/* checksums.cu - a sum over the words of each of a whole list of tensors, in one launch (tables.cuh).
 *
 *     sums[t] = nbytes + sum over its words i of mix(word_i + (i + 1) STEP), modulo 2^64
 *
 * The blocks of a tensor add to its sum with atomics, of integers: any order gives the same bits. Bytes: each once. Mixing a word of 4
 * bytes would take as many instructions as one of 8, so twice as many a byte.
 */
#include "contract/optimizer.h"
#include "core/splitmix.h"
#include "optimizer/tables.cuh"

static constexpr int WORD = 8;  /* bytes of what tables.cuh counts, so a block has 64 KiB */
static constexpr int LOADS = 4; /* 16-byte vectors under way in each thread */

typedef struct Words {
    const unsigned char *data; /* [nbytes] */
    int64_t numel, nbytes;     /* numel: words, of which the end may cut off the last */
    unsigned long long *sum;
    bool wide; /* data takes accesses of 16 bytes */
} Words;

/* A thread's share of n pairs of whole words of data, the first of which is word `first` of its tensor. */
__device__ inline uint64_t sum_of_pairs(const uint4 *data, int64_t first, int n) {
    uint64_t sum = 0;
    for (int i = threadIdx.x; i < n; i += LOADS * THREADS) {
        const uint64_t place = (uint64_t)(first + 2 * i + 1) * XT_SPLITMIX_STEP;
        uint4 q[LOADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++)
            if (i + u * THREADS < n) q[u] = data[i + u * THREADS];
#pragma unroll
        for (int u = 0; u < LOADS; u++) {
            if (i + u * THREADS >= n) continue;
            const uint64_t here = place + (uint64_t)(2 * u * THREADS) * XT_SPLITMIX_STEP;
            sum += xt_splitmix((q[u].x | (uint64_t)q[u].y << 32) + here);
            sum += xt_splitmix((q[u].z | (uint64_t)q[u].w << 32) + (here + XT_SPLITMIX_STEP));
        }
    }
    return sum;
}

/* The same of words [begin, end), of any alignment, byte by byte. */
__device__ inline uint64_t sum_of_words(const Words &t, int64_t begin, int64_t end) {
    uint64_t sum = 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS) {
        const int64_t left = t.nbytes - i * WORD;
        uint64_t word = 0;
#pragma unroll
        for (int b = 0; b < WORD; b++)
            if (b < left) word |= (uint64_t)t.data[i * WORD + b] << 8 * b;
        sum += xt_splitmix(word + (uint64_t)(i + 1) * XT_SPLITMIX_STEP);
    }
    return sum;
}

/* Grid: one block a piece. Sums begin at 0. */
__global__ void __launch_bounds__(THREADS) checksums_kernel(const __grid_constant__ Table<Words> table) {
    const int item = item_of(table, blockIdx.x);
    const Words &t = table.item[item];
    const int64_t begin = (int64_t)((int)blockIdx.x - table.first[item]) * PIECE;
    const int64_t end = t.numel - begin < PIECE ? t.numel : begin + PIECE;
    const int64_t whole = t.nbytes / WORD < end ? t.nbytes / WORD : end;
    const int pairs = t.wide ? (int)(whole - begin) / 2 : 0;
    uint64_t sum = sum_of_pairs((const uint4 *)(t.data + begin * WORD), begin, pairs) + sum_of_words(t, begin + 2 * pairs, end);
    sum = xt_block_sum(sum);
    if (threadIdx.x == 0) atomicAdd(t.sum, begin == 0 ? sum + (uint64_t)t.nbytes : sum);
}

XtStatus xt_cuda_checksums(const XtChecksums *p) {
    if (p->count == 0) return XT_OK;
    int64_t nbytes = 0;
    XT_CHECK(xt_cuda_error("checksums", cudaMemsetAsync(p->sums, 0, (size_t)p->count * sizeof *p->sums, xt_stream())));
    by_tables<Words>(
        p->count, 0,
        [&](int64_t i) {
            const XtChecksumItem *from = &p->items[i];
            Words t;
            t.data = (const unsigned char *)from->data;
            t.nbytes = from->nbytes;
            t.numel = xt_divide_up(from->nbytes, WORD);
            t.sum = (unsigned long long *)&p->sums[i];
            t.wide = (uintptr_t)from->data % 16 == 0;
            nbytes += from->nbytes;
            return t;
        },
        [&](const Table<Words> &table, int pieces) { xt_launch(checksums_kernel, pieces, THREADS, 0, table); });
    return xt_launched("checksums", p->count, nbytes);
}
