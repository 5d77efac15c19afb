/* strided.cuh - what the elementwise kernels share: conversions between dtypes, and loops over views of any strides.
 *
 * out[i] = f(a[i], b[i], c[i]) for up to three inputs. An operation is a small struct with its types and a function of N elements:
 *
 *     template <typename T> struct Plus {
 *         typedef T Out; typedef T A; typedef T B; typedef uint8_t C;              // no third input: INPUTS is 2
 *         static constexpr int INPUTS = 2, WIDTH = XT_WIDTH<T>, GROUP = 4;
 *         template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> a, XtPiece<T, N> b, XtPiece<uint8_t, N>) const { ... }
 *     };
 *     return xt_each("plus", Plus<float>(), {&p->out, &p->a, &p->b});
 *
 * Plan. The host sorts and merges the dimensions (xt_merge_dims): what is dense in all operands becomes one dimension. Then one of
 * two kernels runs:
 *   - vectors: along the last dimension out is dense and every input is dense or constant, as in row and column broadcasts. An item
 *     is WIDTH elements, 16 bytes of the widest operand. In a large tensor a thread does several items and issues all their loads
 *     before the first use. If there is only one dimension it may have a tail, which takes a block of its own.
 *   - elements: any strides. A thread does GROUP elements, a block apart from each other.
 * Indices are 32-bit, and larger tensors are cut; divisions are multiplications. Offsets are 64-bit, in bytes.
 *
 * Bytes moved: each operand once; a broadcast operand is read from cache. One thread makes an element from its own inputs, and
 * reads them before it writes: out may be one of the inputs.
 */
#pragma once

#include "common/divide.cuh"
#include "cuda.cuh"

/* ---- dtypes, integers too ----------------------------------------------------------------------------------------------- */

struct XtBool {
    uint8_t byte;
};

/* Calls f(T()) for the C++ type of any dtype. */
template <typename F> inline XtStatus xt_by_dtype(XtDtype dtype, F f) {
    switch (dtype) {
    case XT_INT32: return f(int32_t());
    case XT_INT64: return f(int64_t());
    case XT_UINT8: return f(uint8_t());
    case XT_BOOL: return f(XtBool());
    default: return xt_by_float(dtype, f);
    }
}

/* Calls f(U()) for the unsigned integer as large as an element of a dtype: for kernels that only move bits. */
template <typename F> inline XtStatus xt_by_bits(int64_t size, F f) {
    return size == 1 ? f(uint8_t()) : size == 2 ? f(uint16_t()) : size == 4 ? f(uint32_t()) : f(uint64_t());
}

/* Conversions, the same as on the CPU. Every dtype has a wide form: float for itself and the 16-bit floats, double, and int64_t
 * for the rest. Floats to integers truncate, saturate at the ends of the type, and NaN gives 0. Integers to integers wrap. To
 * bool is x != 0. */
__host__ __device__ inline float xt_widen(float x) { return x; }
__host__ __device__ inline double xt_widen(double x) { return x; }
__host__ __device__ inline float xt_widen(XtBf16 x) { return __bfloat162float(x); }
__host__ __device__ inline float xt_widen(XtF16 x) { return __half2float(x); }
__host__ __device__ inline int64_t xt_widen(int32_t x) { return x; }
__host__ __device__ inline int64_t xt_widen(int64_t x) { return x; }
__host__ __device__ inline int64_t xt_widen(uint8_t x) { return x; }
__host__ __device__ inline int64_t xt_widen(XtBool x) { return x.byte; }

/* W is float or double. low and above are exact in both; every value between them converts without overflow. */
template <typename W> __host__ __device__ inline int64_t xt_saturate(W x, W low, W above, int64_t lowest, int64_t highest) {
    if (x != x) return 0;
    return x <= low ? lowest : x >= above ? highest : (int64_t)x;
}
__host__ __device__ inline int64_t xt_saturate(int64_t x, int64_t, int64_t, int64_t, int64_t) { return x; } /* xt_narrow wraps it */

template <typename W> __host__ __device__ inline void xt_narrow(W x, float *to) { *to = (float)x; }
template <typename W> __host__ __device__ inline void xt_narrow(W x, double *to) { *to = (double)x; }
template <typename W> __host__ __device__ inline void xt_narrow(W x, XtBf16 *to) { *to = __float2bfloat16_rn((float)x); }
template <typename W> __host__ __device__ inline void xt_narrow(W x, XtF16 *to) { *to = __float2half_rn((float)x); }
template <typename W> __host__ __device__ inline void xt_narrow(W x, int32_t *to) {
    *to = (int32_t)(uint32_t)(uint64_t)xt_saturate(x, (W)INT32_MIN, (W)2147483648.0, INT32_MIN, INT32_MAX);
}
template <typename W> __host__ __device__ inline void xt_narrow(W x, uint8_t *to) {
    *to = (uint8_t)(uint64_t)xt_saturate(x, (W)0, (W)256, 0, 255);
}
template <typename W> __host__ __device__ inline void xt_narrow(W x, XtBool *to) { to->byte = x != 0; }
__host__ __device__ inline void xt_narrow(int64_t x, int64_t *to) { *to = x; }
template <typename W> __host__ __device__ inline void xt_narrow(W x, int64_t *to) {
    *to = xt_saturate(x, (W)-9223372036854775808.0, (W)9223372036854775808.0, INT64_MIN, INT64_MAX);
}

template <typename Dst, typename Src> __host__ __device__ inline Dst xt_cast_to(Src x) {
    Dst to;
    xt_narrow(xt_widen(x), &to);
    return to;
}

template <typename A, typename B> constexpr bool xt_same = false;
template <typename A> constexpr bool xt_same<A, A> = true;

/* Converts a number from Python to a dtype. */
template <typename T> inline T xt_scalar_as(XtScalar value) {
    return value.is_int ? xt_cast_to<T>(value.i) : xt_cast_to<T>(value.d);
}

/* ---- loops: merged dimensions of K views (host) ------------------------------------------------------------------------- */

/* Operand 0 is the output. Dimensions come from xt_merge_dims; a single element has one of size 1. */
template <int K> struct XtLoop {
    char *data[K];
    int64_t size[K]; /* bytes of an element */
    int ndim;
    int64_t numel;
    int64_t shape[XT_MAX_DIMS];
    int64_t strides[K][XT_MAX_DIMS];
};

template <int K> inline XtLoop<K> xt_loop(const XtView *const (&views)[K]) {
    XtLoop<K> loop;
    loop.ndim = xt_merge_dims(K, views, 0, views[0]->ndim, true, &loop.numel, loop.shape, loop.strides);
    for (int k = 0; k < K; k++) {
        loop.data[k] = (char *)views[k]->data;
        loop.size[k] = (int64_t)xt_dtype_size(views[k]->dtype);
        if (loop.ndim == 0) loop.strides[k][0] = 1;
    }
    if (loop.ndim == 0) loop.shape[loop.ndim++] = 1;
    return loop;
}

/* Whether the last dimension of every operand can be read `width` elements at a time; constant operands need not. */
template <int K> inline bool xt_loop_has_vectors(const XtLoop<K> &loop, int64_t width) {
    int last = loop.ndim - 1;
    if (loop.strides[0][last] != 1 || (last > 0 && loop.shape[last] % width != 0)) return false;
    for (int k = 0; k < K; k++) {
        if (!loop.data[k] || (k > 0 && loop.strides[k][last] == 0)) continue;
        if (loop.strides[k][last] != 1 || (uintptr_t)loop.data[k] % (uintptr_t)(width * loop.size[k]) != 0) return false;
        for (int d = 0; d < last; d++)
            if (loop.strides[k][d] % width != 0) return false;
    }
    return true;
}

/* ---- walks: the form of a loop for a kernel ------------------------------------------------------------------------------ */

/* Items are elements, or vectors of `width` elements along the last dimension. Strides in bytes, of the last dimension per item.
 * data[k] == NULL: the operand is a number, and never read. */
template <int K> struct XtEachWalk {
    char *data[K];
    uint32_t items;
    int ndim;
    int tail;       /* elements of the last item */
    unsigned still; /* bit k: operand k is constant along a vector */
    XtDivider shape[XT_MAX_DIMS];
    int64_t strides[K][XT_MAX_DIMS];
};

template <int K> inline XtEachWalk<K> xt_each_walk(const XtLoop<K> &loop, int64_t width) {
    XtEachWalk<K> walk;
    int last = loop.ndim - 1;
    int64_t items = loop.numel / loop.shape[last] * xt_divide_up(loop.shape[last], width);
    walk.items = (uint32_t)items;
    walk.ndim = loop.ndim;
    walk.tail = (int)(loop.shape[last] % width ? loop.shape[last] % width : width); /* < width only if there is one dimension */
    walk.still = 0;
    for (int d = 0; d < loop.ndim; d++)
        walk.shape[d] = xt_divider((uint32_t)(d == last ? xt_divide_up(loop.shape[d], width) : loop.shape[d]));
    for (int k = 0; k < K; k++) {
        walk.data[k] = loop.data[k];
        if (loop.strides[k][last] == 0) walk.still |= 1u << k;
        for (int d = 0; d < loop.ndim; d++) walk.strides[k][d] = loop.strides[k][d] * loop.size[k] * (d == last ? width : 1);
    }
    return walk;
}

/* offset[k]: byte offset of item `item` in operand k. */
template <int K> __device__ __forceinline__ void xt_each_walk_to(const XtEachWalk<K> &walk, uint32_t item, int64_t (&offset)[K]) {
#pragma unroll
    for (int k = 0; k < K; k++) offset[k] = 0;
#pragma unroll 1
    for (int d = walk.ndim - 1; d > 0; d--) {
        uint32_t outer = xt_quotient(item, walk.shape[d]), at = item - outer * walk.shape[d].divisor;
#pragma unroll
        for (int k = 0; k < K; k++) offset[k] += (int64_t)at * walk.strides[k][d];
        item = outer;
    }
#pragma unroll
    for (int k = 0; k < K; k++) offset[k] += (int64_t)item * walk.strides[k][0];
}

/* ---- the two kernels ---------------------------------------------------------------------------------------------------- */

enum { XT_EACH_THREADS = 256, XT_EACH_REPEAT = 2, XT_EACH_MOST = 1 << 30 };

/* WIDTH of an operation that needs the elements of T one by one: at most 8, because each takes a register. */
template <typename T> constexpr int XT_EACH_WIDTH = XT_WIDTH<T> < 8 ? XT_WIDTH<T> : 8;

/* N elements of every input, and where the output goes. */
template <typename F, int N> struct XtInputs {
    XtPiece<typename F::A, N> a;
    XtPiece<typename F::B, N> b;
    XtPiece<typename F::C, N> c;
    char *out;
};

/* Reads the whole piece, or its first `count` elements. `still`: the same element N times. */
template <bool WHOLE, typename T, int N>
__device__ __forceinline__ void xt_take_piece(XtPiece<T, N> &to, const char *from, bool still, int count) {
    const T *element = (const T *)from;
    if (still) {
        to = xt_all<T, N>(*element);
    } else if constexpr (WHOLE) {
        to = xt_read<T, N>(element);
    } else {
        XtVector<T, N> v;
#pragma unroll
        for (int j = 0; j < N; j++) v.at[j] = j < count ? element[j] : T();
        to = xt_piece(v);
    }
}

template <bool WHOLE, typename F>
__device__ __forceinline__ void xt_take_item(XtInputs<F, F::WIDTH> &to, const XtEachWalk<F::INPUTS + 1> &walk, uint32_t item) {
    int64_t offset[F::INPUTS + 1];
    xt_each_walk_to(walk, item, offset);
    to.out = walk.data[0] + offset[0];
    if constexpr (F::INPUTS > 0)
        if (walk.data[1]) xt_take_piece<WHOLE>(to.a, walk.data[1] + offset[1], walk.still & 2, walk.tail);
    if constexpr (F::INPUTS > 1)
        if (walk.data[2]) xt_take_piece<WHOLE>(to.b, walk.data[2] + offset[2], walk.still & 4, walk.tail);
    if constexpr (F::INPUTS > 2)
        if (walk.data[3]) xt_take_piece<WHOLE>(to.c, walk.data[3] + offset[3], walk.still & 8, walk.tail);
}

/* Block b does the whole items [b * threads * repeat, (b + 1) * threads * repeat), repeat <= XT_EACH_REPEAT. A block past the last
 * whole item does the tail. A thread issues its loads together, then runs one copy of f's code on item after item. */
template <typename F>
__global__ void __launch_bounds__(XT_EACH_THREADS)
    xt_vectors_kernel(F f, const __grid_constant__ XtEachWalk<F::INPUTS + 1> walk, int repeat) {
    constexpr int N = F::WIDTH, R = XT_EACH_REPEAT;
    typedef typename F::Out Out;
    uint32_t begin = blockIdx.x * (XT_EACH_THREADS * (uint32_t)repeat), whole = walk.items - (walk.tail < N);
    bool is_tail = begin >= whole;
    int count = 0;
    XtInputs<F, N> in[R];
    if (is_tail) {
        if (threadIdx.x > 0) return;
        xt_take_item<false>(in[0], walk, whole);
        count = 1;
    } else {
#pragma unroll
        for (int r = 0; r < R; r++) {
            uint32_t item = begin + (uint32_t)(r * XT_EACH_THREADS) + threadIdx.x;
            if (r >= repeat || item >= whole) continue;
            xt_take_item<true>(in[r], walk, item);
            count = r + 1;
        }
    }
#pragma unroll 1
    for (; count > 0; count--) {
        XtPiece<Out, N> out = f.template run<N>(in[0].a, in[0].b, in[0].c);
        if (!is_tail) {
            xt_write((Out *)in[0].out, out);
        } else {
            XtVector<Out, N> element = xt_elements(out);
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j < walk.tail) ((Out *)in[0].out)[j] = element.at[j];
        }
#pragma unroll
        for (int r = 0; r + 1 < R; r++) in[r] = in[r + 1];
    }
}

/* Thread t of a block does its elements t, t + threads, ... */
template <typename F>
__global__ void __launch_bounds__(XT_EACH_THREADS) xt_elements_kernel(F f, const __grid_constant__ XtEachWalk<F::INPUTS + 1> walk) {
    constexpr int N = F::GROUP;
    uint32_t first = blockIdx.x * (uint32_t)(XT_EACH_THREADS * N) + threadIdx.x;
    XtVector<typename F::A, N> a;
    XtVector<typename F::B, N> b;
    XtVector<typename F::C, N> c;
    int64_t to[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        uint32_t item = first + (uint32_t)(j * XT_EACH_THREADS);
        a.at[j] = typename F::A();
        b.at[j] = typename F::B();
        c.at[j] = typename F::C();
        if (item >= walk.items) continue;
        int64_t offset[F::INPUTS + 1];
        xt_each_walk_to(walk, item, offset);
        to[j] = offset[0];
        if constexpr (F::INPUTS > 0)
            if (walk.data[1]) a.at[j] = *(const typename F::A *)(walk.data[1] + offset[1]);
        if constexpr (F::INPUTS > 1)
            if (walk.data[2]) b.at[j] = *(const typename F::B *)(walk.data[2] + offset[2]);
        if constexpr (F::INPUTS > 2)
            if (walk.data[3]) c.at[j] = *(const typename F::C *)(walk.data[3] + offset[3]);
    }
    XtVector<typename F::Out, N> out = xt_elements(f.template run<N>(xt_piece(a), xt_piece(b), xt_piece(c)));
#pragma unroll
    for (int j = 0; j < N; j++)
        if (first + (uint32_t)(j * XT_EACH_THREADS) < walk.items) *(typename F::Out *)(walk.data[0] + to[j]) = out.at[j];
}

/* ---- launching ---------------------------------------------------------------------------------------------------------- */

/* Cuts a loop in two along its largest dimension, at a multiple of 64 elements to keep vectors whole. */
template <int K> inline void xt_loop_split(const XtLoop<K> &loop, XtLoop<K> *first, XtLoop<K> *second) {
    int d = 0;
    for (int i = 1; i < loop.ndim; i++)
        if (loop.shape[i] > loop.shape[d]) d = i;
    int64_t half = loop.shape[d] / 2;
    if (half >= 64) half -= half % 64;
    *first = *second = loop;
    first->shape[d] = half;
    second->shape[d] -= half;
    first->numel = loop.numel / loop.shape[d] * half;
    second->numel = loop.numel - first->numel;
    for (int k = 0; k < K; k++)
        if (loop.data[k]) second->data[k] += half * loop.strides[k][d] * loop.size[k];
}

/* The two kernels, for at most XT_EACH_MOST elements; xt_launch_vectors needs xt_loop_has_vectors. */
template <typename F> inline void xt_launch_vectors(F f, const XtLoop<F::INPUTS + 1> &loop) {
    auto walk = xt_each_walk(loop, F::WIDTH);
    int repeat = (int64_t)walk.items >= (int64_t)xt_multiprocessors() * 2048 * XT_EACH_REPEAT ? XT_EACH_REPEAT : 1;
    int64_t tail = walk.tail < F::WIDTH, blocks = xt_divide_up(walk.items - tail, XT_EACH_THREADS * repeat) + tail;
    xt_launch(xt_vectors_kernel<F>, (unsigned)blocks, XT_EACH_THREADS, 0, f, walk, repeat);
}

template <typename F> inline void xt_launch_elements(F f, const XtLoop<F::INPUTS + 1> &loop) {
    auto walk = xt_each_walk(loop, 1);
    xt_launch(xt_elements_kernel<F>, xt_blocks(walk.items, XT_EACH_THREADS * F::GROUP), XT_EACH_THREADS, 0, f, walk);
}

/* An operation of WIDTH 1 has no kernel of vectors. */
template <typename F> inline void xt_each_loop(F f, const XtLoop<F::INPUTS + 1> &loop) {
    if (loop.numel > XT_EACH_MOST) {
        XtLoop<F::INPUTS + 1> first, second;
        xt_loop_split(loop, &first, &second);
        xt_each_loop(f, first);
        xt_each_loop(f, second);
        return;
    }
    if constexpr (F::WIDTH > 1)
        if (xt_loop_has_vectors(loop, F::WIDTH)) return xt_launch_vectors(f, loop);
    xt_launch_elements(f, loop);
}

/* Runs f over all elements; views[0] is the output. An input whose data is NULL is not read. */
template <typename F> inline XtStatus xt_each(const char *slot, F f, const XtView *const (&views)[F::INPUTS + 1]) {
    auto loop = xt_loop(views);
    if (loop.numel == 0) return XT_OK;
    xt_each_loop(f, loop);
    return xt_launched_sizes(slot, views[0]->ndim, views[0]->shape);
}
