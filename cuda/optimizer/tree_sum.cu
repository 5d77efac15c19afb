/* tree_sum.cu - the sum of some banks in one fixed tree, and the squares of its blocks.
 *
 *     T(x_0..x_{n-1}) = T(x_0..x_{p-1}) + T(x_p..x_{n-1}), p the largest power of two below n
 *
 * A block of threads makes XT_TREE_BLOCK elements, W at a time; a thread has a binary counter in registers, as
 * csrc/cpu/optimizer/tree_sum.c has one in memory. Bytes: each part once, out once. The list of tensors is a kernel parameter, as in
 * tables.cuh; a longer list takes more launches, each of whole blocks.
 *
 * Deterministic: an element's additions depend on the number of parts alone, and a block's squares on the place in the block.
 */
#include "contract/optimizer.h"
#include "optimizer/tables.cuh"

static constexpr int W =
    4; /* elements that a thread takes at once: XT_TREE_ALIGN is a multiple, so they lie in one tensor or its tail */
static constexpr int STEPS = XT_TREE_BLOCK / (THREADS * W);
static constexpr int WORDS = (PARAMETER_BYTES - OTHER_BYTES - XT_MOST_PARTS) / 8;
#if CUDART_VERSION >= 12010 /* before, such lists are refused */
static_assert(WORDS >= (XT_TREE_BLOCK / XT_TREE_ALIGN + 1) * (XT_MOST_PARTS / 4 + 2), "the tensors of one block fit into a table");
#endif

/* Tensor t has `count` + 2 words: where it begins in the bank, its elements, and its data in each part. */
struct Banks {
    int tensors, count, out_dtype, pad;
    uint8_t dtype[XT_MOST_PARTS]; /* of each part */
    int64_t word[WORDS];
};
static_assert(sizeof(Banks) + OTHER_BYTES - 16 <= PARAMETER_BYTES, "a kernel parameter");

__device__ inline const int64_t *tensor_of(const Banks &banks, int t) { return banks.word + (int64_t)t * (banks.count + 2); }

/* The last tensor that begins at e or before; 0 where none does. */
__device__ inline int tensor_at(const Banks &banks, int low, int high, int64_t e) {
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (tensor_of(banks, middle)[0] <= e) low = middle;
        else high = middle;
    }
    return low;
}

template <typename T> constexpr bool one_access = W * sizeof(T) <= 16; /* not of float64 */

/* n of W elements from x on, exactly; the rest is 0. */
template <typename T> __device__ inline XtVector<XtAcc<T>, W> elements(const T *x, int n) {
    if constexpr (one_access<T>)
        if (n == W && (uintptr_t)x % (W * sizeof(T)) == 0) return xt_load(xt_read<T, W>(x));
    XtVector<XtAcc<T>, W> v;
#pragma unroll
    for (int j = 0; j < W; j++) v.at[j] = j < n ? xt_load(x[j]) : XtAcc<T>(0);
    return v;
}
/* How a thread reads W elements of a tensor's part. Any: parts of any dtype of one accumulator, n of W elements. Whole<T>: all parts
 * have dtype T and are aligned, and so are all W elements there. */
template <typename A> struct Any {
    typedef A Sum;
    static __device__ inline XtVector<A, W> read(int dtype, const void *data, int64_t offset, int n) {
        if constexpr (sizeof(A) == sizeof(double)) return elements((const double *)data + offset, n);
        else if (dtype == XT_FLOAT32) return elements((const float *)data + offset, n);
        else if (dtype == XT_BFLOAT16) return elements((const XtBf16 *)data + offset, n);
        else return elements((const XtF16 *)data + offset, n);
    }
};
template <typename T> struct Whole {
    typedef XtAcc<T> Sum;
    static __device__ inline XtVector<Sum, W> read(int, const void *data, int64_t offset, int) {
        if constexpr (one_access<T>) return xt_load(xt_read<T, W>((const T *)data + offset));
        else return elements((const T *)data + offset, W);
    }
};

template <typename A> __device__ inline XtVector<A, W> sum_of(const XtVector<A, W> &a, const XtVector<A, W> &b) {
    XtVector<A, W> sum;
#pragma unroll
    for (int j = 0; j < W; j++) sum.at[j] = a.at[j] + b.at[j];
    return sum;
}

template <typename T> __device__ inline void give(T *out, const XtVector<XtAcc<T>, W> &v, int n) {
    if constexpr (one_access<T>)
        if (n == W && (uintptr_t)out % (W * sizeof(T)) == 0) {
            xt_write(out, xt_store<T>(v));
            return;
        }
#pragma unroll
    for (int j = 0; j < W; j++)
        if (j < n) out[j] = xt_store<T>(v.at[j]);
}
__device__ inline void give_as(int dtype, void *out, int64_t e, const XtVector<float, W> &v, int n) {
    switch (dtype) {
    case XT_FLOAT32: give((float *)out + e, v, n); break;
    case XT_BFLOAT16: give((XtBf16 *)out + e, v, n); break;
    default: give((XtF16 *)out + e, v, n); break;
    }
}
__device__ inline void give_as(int, void *out, int64_t e, const XtVector<double, W> &v, int n) { give((double *)out + e, v, n); }

/* T of n elements of a tensor from `offset` on. MOST: as many parts at most. */
template <typename How, int MOST>
__device__ inline XtVector<typename How::Sum, W> tree(const Banks &banks, const int64_t *tensor, int64_t offset, int n) {
    typedef typename How::Sum A;
    if constexpr (MOST <= 4) { /* all loads begin before the first is added */
        XtVector<A, W> x[MOST];
#pragma unroll
        for (int i = 0; i < MOST; i++)
            if (i == 0 || i < banks.count) x[i] = How::read(banks.dtype[i], (const void *)tensor[2 + i], offset, n);
        if constexpr (MOST == 4) {
            if (banks.count > 1) x[0] = sum_of(x[0], x[1]);
            if (banks.count == 4) x[2] = sum_of(x[2], x[3]);
            if (banks.count > 2) x[0] = sum_of(x[0], x[2]);
        }
        return x[0];
    }
    constexpr int LEVELS = 7;    /* 2^(LEVELS - 1) is XT_MOST_PARTS */
    XtVector<A, W> node[LEVELS]; /* node[l]: the sum of 2^l parts, where bit l of the number of parts so far is 1 */
    for (int i = 0; i < banks.count; i++) {
        XtVector<A, W> sum = How::read(banks.dtype[i], (const void *)tensor[2 + i], offset, n);
        bool carry = true;
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (!carry) continue;
            if (i >> level & 1) sum = sum_of(node[level], sum);
            else {
                node[level] = sum;
                carry = false;
            }
        }
    }
    XtVector<A, W> sum;
    bool any = false;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        if (!(banks.count >> level & 1)) continue;
        sum = any ? sum_of(node[level], sum) : node[level];
        any = true;
    }
    return sum;
}

template <typename A> __device__ inline double squares_of(const XtVector<A, W> &v) {
    double sum = 0;
#pragma unroll
    for (int j = 0; j < W; j++) sum += (double)v.at[j] * (double)v.at[j];
    return sum;
}

/* A block that lies in one tensor: this thread's share of its squares. */
template <typename T, int MOST>
__device__ inline double whole_block(const Banks &banks, const int64_t *tensor, void *out, int64_t begin) {
    constexpr int AHEAD = MOST == 1 ? STEPS : MOST == 4 ? 2 : 1; /* steps whose loads begin together */
    double sum = 0;
#pragma unroll 1
    for (int k = 0; k < STEPS; k += AHEAD) {
        XtVector<XtAcc<T>, W> v[AHEAD];
        const int64_t e = begin + (k * THREADS + (int)threadIdx.x) * W;
#pragma unroll
        for (int u = 0; u < AHEAD; u++) v[u] = tree<Whole<T>, MOST>(banks, tensor, e + u * THREADS * W - tensor[0], W);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (out != nullptr) give_as(banks.out_dtype, out, e + u * THREADS * W, v[u], W);
            sum += squares_of(v[u]);
        }
    }
    return sum;
}

/* Grid: one block of threads for each block of the bank, from `first` on. out [numel] or NULL, squares [blocks] or NULL */
template <typename A, int MOST>
__global__ void __launch_bounds__(THREADS)
    tree_sum_kernel(void *out, double *squares, int64_t numel, int64_t first, const __grid_constant__ Banks banks) {
    const int64_t begin = (first + blockIdx.x) * XT_TREE_BLOCK;
    const int low = tensor_at(banks, 0, banks.tensors, begin);
    const int high = tensor_at(banks, low, banks.tensors, begin + XT_TREE_BLOCK - 1) + 1;
    const int64_t *only = tensor_of(banks, low);
    bool whole = only[0] <= begin && begin + XT_TREE_BLOCK <= only[0] + only[1];
    for (int i = 0; i < banks.count; i++) whole = whole && only[2 + i] % (W * sizeof(A)) == 0 && banks.dtype[i] == banks.dtype[0];
    double sum = 0;
    if (whole) {
        if constexpr (sizeof(A) == sizeof(double)) sum = whole_block<double, MOST>(banks, only, out, begin);
        else if (banks.dtype[0] == XT_FLOAT32) sum = whole_block<float, MOST>(banks, only, out, begin);
        else if (banks.dtype[0] == XT_BFLOAT16) sum = whole_block<XtBf16, MOST>(banks, only, out, begin);
        else sum = whole_block<XtF16, MOST>(banks, only, out, begin);
    } else {
        for (int k = 0; k < STEPS; k++) {
            const int64_t e = begin + (k * THREADS + (int)threadIdx.x) * W;
            if (e >= numel) continue;
            const int64_t *tensor = tensor_of(banks, tensor_at(banks, low, high, e));
            const int64_t offset = e - tensor[0], rest = tensor[1] - offset;
            const int n = offset < 0 || rest < 0 ? 0 : rest < W ? (int)rest : W;
            XtVector<A, W> v;
#pragma unroll
            for (int j = 0; j < W; j++) v.at[j] = 0;
            if (n > 0) v = tree<Any<A>, MOST>(banks, tensor, offset, n);
            if (out != nullptr) give_as(banks.out_dtype, out, e, v, numel - e < W ? (int)(numel - e) : W);
            sum += squares_of(v);
        }
    }
    if (squares == nullptr) return;
    sum = xt_block_sum(sum);
    if (threadIdx.x == 0) squares[first + blockIdx.x] = sum;
}

template <typename A> static void launch(const XtTreeSum *p, const Banks &banks, int64_t first, int64_t blocks) {
    auto kernel = p->count == 1 ? tree_sum_kernel<A, 1> : p->count <= 4 ? tree_sum_kernel<A, 4> : tree_sum_kernel<A, XT_MOST_PARTS>;
    xt_launch(kernel, (unsigned)blocks, THREADS, 0, p->out, p->squares, p->numel, first, banks);
}

XtStatus xt_cuda_tree_sum(const XtTreeSum *p) {
    if (p->numel == 0) return XT_OK;
    Banks banks;
    banks.count = (int)p->count;
    banks.out_dtype = (int)p->dtype;
    for (int i = 0; i < banks.count; i++) banks.dtype[i] = (uint8_t)p->items[i * p->tensors].dtype;
    const int64_t all = xt_divide_up(p->numel, XT_TREE_BLOCK), room = WORDS / (p->count + 2);
    int64_t next = 0; /* the first tensor that ends behind the blocks so far */
    for (int64_t first = 0, end; first < all; first = end) {
        banks.tensors = 0;
        int64_t left_out = next;
        /* Empty tensors may begin at one place in any number, so they would fill a table without a block of its own. One stays where there
         * is no other: the kernel reads the first. */
        for (; left_out < p->tensors && banks.tensors < room; left_out++) {
            const int64_t t = left_out;
            if (p->items[t].numel == 0 && t + 1 < p->tensors) continue;
            int64_t *word = banks.word + banks.tensors++ * (p->count + 2);
            word[0] = p->items[t].begin;
            word[1] = p->items[t].numel;
            for (int64_t i = 0; i < p->count; i++) word[2 + i] = (int64_t)(uintptr_t)p->items[i * p->tensors + t].data;
        }
        end = left_out < p->tensors ? p->items[left_out].begin / XT_TREE_BLOCK : all;
        if (end == first)
            return xt_error(XT_VALUE_ERROR,
                            "tree_sum: a block of %d elements must have at most %lld tensors with CUDA before 12.1, got more",
                            XT_TREE_BLOCK, (long long)room);
        if (p->dtype == XT_FLOAT64) launch<double>(p, banks, first, end - first);
        else launch<float>(p, banks, first, end - first);
        while (next < p->tensors && p->items[next].begin + p->items[next].numel <= end * XT_TREE_BLOCK) next++;
    }
    return xt_launched("tree_sum", p->count, p->tensors, p->numel);
}
