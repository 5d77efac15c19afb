/* tree_sum.cu - the sum of some tensors in one fixed tree, and the squares of its blocks.
 *
 *     T(x_0..x_{n-1}) = T(x_0..x_{p-1}) + T(x_p..x_{n-1}), p the largest power of two below n
 *
 * A block of threads makes XT_TREE_BLOCK elements; a thread has a binary counter in registers, as csrc/cpu/optimizer/tree_sum.c has one in
 * memory. Bytes: each part once, out once. The pointers of all parts are a kernel parameter.
 *
 * Deterministic: an element's additions depend on the number of parts alone, and a block's squares on the place in the block.
 */
#include "common/cuda.cuh"
#include "contract/optimizer.h"

static constexpr int THREADS = 256; /* of a block */
static constexpr int LEVELS = 7;    /* 2^(LEVELS - 1) is XT_MOST_PARTS */

struct Parts {
    const void *data[XT_MOST_PARTS];
    int dtype[XT_MOST_PARTS];
    int count;
};

/* Element e of a part, exactly. The dtype is the same for all threads. */
template <typename A> __device__ inline A element(const Parts &parts, int i, int64_t e) {
    const void *data = parts.data[i];
    switch (parts.dtype[i]) {
    case XT_FLOAT32: return (A)((const float *)data)[e];
    case XT_FLOAT64: return (A)((const double *)data)[e];
    case XT_BFLOAT16: return (A)xt_load(((const XtBf16 *)data)[e]);
    default: return (A)xt_load(((const XtF16 *)data)[e]);
    }
}

template <typename A> __device__ inline A tree(const Parts &parts, int64_t e) {
    A node[LEVELS]; /* node[l]: the sum of 2^l parts, where bit l of the number of parts so far is 1 */
    for (int i = 0; i < parts.count; i++) {
        A sum = element<A>(parts, i, e);
        bool carry = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!carry) continue;
            if (i >> level & 1) sum = node[level] + sum;
            else {
                node[level] = sum;
                carry = false;
            }
        }
    }
    A sum = 0;
    bool any = false;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        if (!(parts.count >> level & 1)) continue;
        sum = any ? node[level] + sum : node[level];
        any = true;
    }
    return sum;
}

/* Grid: one block for each XT_TREE_BLOCK elements. out [numel], squares [blocks] or NULL */
template <typename A>
__global__ void __launch_bounds__(THREADS)
    tree_sum_kernel(A *out, double *squares, int64_t numel, const __grid_constant__ Parts parts) {
    const int64_t first = (int64_t)blockIdx.x * XT_TREE_BLOCK;
    double sum = 0;
    for (int j = threadIdx.x; j < XT_TREE_BLOCK; j += THREADS) {
        if (first + j >= numel) break;
        const A g = tree<A>(parts, first + j);
        out[first + j] = g;
        sum += (double)g * (double)g;
    }
    if (squares == nullptr) return;
    sum = xt_block_sum(sum);
    if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

XtStatus xt_cuda_tree_sum(const XtTreeSum *p) {
    if (p->numel == 0) return XT_OK;
    Parts parts;
    parts.count = (int)p->count;
    for (int i = 0; i < parts.count; i++) {
        parts.data[i] = p->items[i].data;
        parts.dtype[i] = (int)p->items[i].dtype;
    }
    const int64_t blocks = xt_divide_up(p->numel, XT_TREE_BLOCK);
    if (p->dtype == XT_FLOAT64)
        xt_launch(tree_sum_kernel<double>, (unsigned)blocks, THREADS, 0, (double *)p->out, p->squares, p->numel, parts);
    else xt_launch(tree_sum_kernel<float>, (unsigned)blocks, THREADS, 0, (float *)p->out, p->squares, p->numel, parts);
    return xt_launched("tree_sum", p->count, p->numel);
}
