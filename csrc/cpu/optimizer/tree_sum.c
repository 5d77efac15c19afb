/* tree_sum.c - the sum of some tensors in one fixed tree, and the squares of its blocks.
 *
 *     T(x_0..x_{n-1}) = T(x_0..x_{p-1}) + T(x_p..x_{n-1}), p the largest power of two below n
 *
 * A binary counter makes it: node[l] holds the sum of 2^l parts. Part i comes in as a sum of one; for each trailing 1 of i's bits it is
 * added to the node there and becomes the sum of twice as many. What is left at the end is added from the youngest node to the oldest.
 */
#ifndef T
#include "contract/optimizer.h"
#include "cpu/kernel.h"

/* Elements that go through the tree at once, and their bytes; 2^(LEVELS - 1) is XT_MOST_PARTS. */
enum { CHUNK = 256, ROW = CHUNK * sizeof(double), LEVELS = 7 };

#define XT_TEMPLATE "cpu/optimizer/tree_sum.c"
#include "cpu/each_float.h"

/* sum = part, or sum += part, for n elements from `offset` on. */
typedef void (*Take)(void *sum, const void *part, int64_t offset, int64_t n, bool add);

/* The first tensor of a part that ends behind element e of the bank. */
static int64_t tensor_at(const XtTreeSum *p, int64_t e) {
    int64_t low = 0, high = p->tensors;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (p->items[middle].begin + p->items[middle].numel > e) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* Part i into the node, from tensor t on: what no tensor has is 0. */
static void take_part(const XtTreeSum *p, int64_t i, int64_t t, char *node, int64_t offset, int64_t n, bool add) {
    const XtTreeItem *item = p->items + i * p->tensors;
    const size_t size = xt_dtype_size(xt_dtype_accumulator(item->dtype));
    if (!add && !(t < p->tensors && item[t].begin <= offset && item[t].begin + item[t].numel >= offset + n))
        memset(node, 0, (size_t)n * size);
    for (; t < p->tensors && item[t].begin < offset + n; t++) {
        const int64_t end = item[t].begin + item[t].numel;
        const int64_t first = item[t].begin > offset ? item[t].begin : offset, last = end < offset + n ? end : offset + n;
        XT_BY_FLOAT(item[t].dtype, take_range)
        (node + (size_t)(first - offset) * size, item[t].data, first - item[t].begin, last - first, add);
    }
}

/* node: LEVELS rows of CHUNK elements of ACC. Returns the node that holds the sum of elements [offset, offset + n). */
static int chunk_sum(const XtTreeSum *p, Take take_node, char (*node)[ROW], int64_t offset, int64_t n) {
    const int64_t t = tensor_at(p, offset);
    for (int64_t i = 0; i < p->count; i++) {
        take_part(p, i, t, node[0], offset, n, i & 1);
        for (int level = 1; i >> (level - 1) & 1; level++) take_node(node[level], node[level - 1], 0, n, i >> level & 1);
    }
    int level = 0;
    while (!(p->count >> level & 1)) level++;
    for (int older = level + 1; older < LEVELS; older++)
        if (p->count >> older & 1) {
            take_node(node[older], node[level], 0, n, true);
            level = older;
        }
    return level;
}

static XtStatus tree_blocks(void *context, int64_t begin, int64_t end) {
    const XtTreeSum *p = context;
    const XtDtype wide = xt_dtype_accumulator(p->dtype);
    const Take take_node = XT_BY_FLOAT(wide, take_range);
    _Alignas(64) char node[LEVELS][ROW];
    for (int64_t block = begin; block < end; block++) {
        const int64_t first = block * XT_TREE_BLOCK, last = first + XT_TREE_BLOCK < p->numel ? first + XT_TREE_BLOCK : p->numel;
        double squares = 0;
        for (int64_t offset = first; offset < last; offset += CHUNK) {
            const int64_t n = last - offset < CHUNK ? last - offset : CHUNK;
            const char *sum = node[chunk_sum(p, take_node, node, offset, n)];
            if (p->out) XT_BY_FLOAT(p->dtype, give_range)(p->out, sum, offset, n);
            if (p->squares) squares += XT_BY_FLOAT(wide, squares_range)(sum, n);
        }
        if (p->squares) p->squares[block] = squares;
    }
    return XT_OK;
}

XtStatus xt_cpu_tree_sum(const XtTreeSum *p) {
    for (int64_t i = 0; i < p->count * p->tensors; i++) XT_CHECK(xt_need_float("every part", p->items[i].dtype));
    return xt_parallel((p->numel + XT_TREE_BLOCK - 1) / XT_TREE_BLOCK, 1, tree_blocks, (void *)p);
}

#else

XT_FAST static void NAME(take_range)(void *to, const void *data, int64_t offset, int64_t n, bool add) {
    ACC *sum = to;                         /* [n] */
    const T *x = (const T *)data + offset; /* [n] */
    if (add) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) sum[i] += LOAD(x[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) sum[i] = LOAD(x[i]);
    }
}

XT_FAST static void NAME(give_range)(void *out, const void *data, int64_t offset, int64_t n) {
    T *to = (T *)out + offset; /* [n] */
    const ACC *sum = data;     /* [n] */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = STORE(sum[i]);
}

/* Sum of x^2 over n elements, in float64. */
XT_FAST static double NAME(squares_range)(const void *data, int64_t n) {
    const T *x = data; /* [n] */
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)LOAD(x[i]) * (double)LOAD(x[i]);
    return sum;
}

#endif
