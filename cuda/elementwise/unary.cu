/* unary.cu - out = f(x) and dx = dy f'(x), any strides; every f and f' is one line in unary_math.cuh.
 *
 * Plan: strided.cuh with one or two inputs. A switch in the kernel, uniform over all threads, chooses the operation. The kernel
 * widens the elements of a piece before the switch and rounds them after it, so each case is only its function. The loop over a
 * piece is not unrolled for long functions (sines, and all of float64, where a piece has two elements): their code would be as
 * large as all the rest. Bytes moved: each operand once. 16-bit floats compute in float.
 *
 * For a dense 16-bit element, index arithmetic and the switch would take longer than memory does. So the activations of dense
 * 16-bit tensors have a kernel of their own, in which a thread loads DENSE_PIECES pieces, a block apart, before it uses the first.
 */
#include "common/strided.cuh"
#include "contract/elementwise.h"
#include "unary_math.cuh"

/* to[j] = f(a[j], b[j]), all [N]. Registers cannot be indexed at run time: a loop that is not unrolled works on the first STEP
 * elements and then moves the others down to their place. */
template <bool KEEP_LOOP, int N, typename W, typename G>
static __device__ __forceinline__ void apply(XtVector<W, N> &to, XtVector<W, N> a, XtVector<W, N> b, G f) {
    if constexpr (!KEEP_LOOP) {
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = f(a.at[j], b.at[j]);
    } else {
        constexpr int STEP = N % 2 == 0 && sizeof(W) == sizeof(float) ? 2 : 1;
        to = a;
#pragma unroll 1
        for (int s = 0; s < N; s += STEP) {
            W made[STEP];
#pragma unroll
            for (int j = 0; j < STEP; j++) made[j] = f(a.at[j], b.at[j]);
#pragma unroll
            for (int j = 0; j + STEP < N; j++) {
                a.at[j] = a.at[j + STEP];
                b.at[j] = b.at[j + STEP];
                to.at[j] = to.at[j + STEP];
            }
#pragma unroll
            for (int j = 0; j < STEP; j++) to.at[N - STEP + j] = made[j];
        }
    }
}

template <typename W, int OP> constexpr bool IS_LONG = sizeof(W) == sizeof(double) || OP == XT_SIN || OP == XT_COS;

template <typename T> struct XtUnaryFn {
    typedef T Out;
    typedef T A; /* x */
    typedef uint8_t B;
    typedef uint8_t C;
    static constexpr int INPUTS = 1, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    XtUnaryOp op;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> from, XtPiece<uint8_t, N>, XtPiece<uint8_t, N>) const {
        using W = XtAcc<T>;
        XtVector<W, N> xs = xt_load(from), ys;
        switch (op) {
#define XT_X(name, ...)                                          \
    case XT_##name:                                              \
        apply<IS_LONG<W, XT_##name>, N>(ys, xs, xs, [](W x, W) { \
            W y;                                                 \
            __VA_ARGS__;                                         \
            return y;                                            \
        });                                                      \
        break;
            XT_UNARY_TABLE(XT_X)
#undef XT_X
        default: break;
        }
        return xt_store<T>(ys);
    }
};

template <typename T> struct XtUnaryBwdFn {
    typedef T Out;
    typedef T A; /* dy */
    typedef T B; /* x */
    typedef uint8_t C;
    static constexpr int INPUTS = 2, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    XtUnaryOp op;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> from_dy, XtPiece<T, N> from_x, XtPiece<uint8_t, N>) const {
        using W = XtAcc<T>;
        XtVector<W, N> dys = xt_load(from_dy), xs = xt_load(from_x), dxs;
        switch (op) {
#define XT_X(name, ...)                                               \
    case XT_##name:                                                   \
        apply<IS_LONG<W, XT_##name>, N>(dxs, dys, xs, [](W dy, W x) { \
            W dx = x;                                                 \
            __VA_ARGS__;                                              \
            return dx;                                                \
        });                                                           \
        break;
            XT_UNARY_BWD_TABLE(XT_X)
#undef XT_X
        default: break;
        }
        return xt_store<T>(dxs);
    }
};

/* ---- activations of dense 16-bit floats ------------------------------------------------------------------------------------- */

enum { DENSE_THREADS = 256, DENSE_PIECES = 4, DENSE_BLOCKS = 5 };

template <typename T, XtUnaryOp OP, int N> __device__ __forceinline__ XtPiece<T, N> unary_piece(const XtPiece<T, N> &from) {
    using W = XtAcc<T>;
    XtVector<W, N> values = xt_load(from);
#pragma unroll
    for (int j = 0; j < N; j++) {
        const W x = values.at[j];
        W y = x;
#define XT_X(name, ...)              \
    if constexpr (OP == XT_##name) { \
        __VA_ARGS__;                 \
    }
        XT_UNARY_TABLE(XT_X)
#undef XT_X
        values.at[j] = y;
    }
    return xt_store<T>(values);
}

/* out, x [n], aligned to pieces. A thread does `each` <= DENSE_PIECES pieces. Block 0 also does the elements after the last whole
 * piece. */
template <typename T, XtUnaryOp OP>
__global__ void __launch_bounds__(DENSE_THREADS, DENSE_BLOCKS) unary_dense_kernel(T *out, const T *x, int64_t n, int each) {
    constexpr int N = XT_WIDTH<T>, P = DENSE_PIECES;
    const int64_t pieces = n / N, tile = DENSE_THREADS * (int64_t)each;
    for (int64_t begin = blockIdx.x * tile; begin < pieces; begin += gridDim.x * tile) {
        const T *from = x + (begin + threadIdx.x) * N;
        T *to = out + (begin + threadIdx.x) * N;
        const int left = (int)(pieces - begin < tile ? pieces - begin : tile) - (int)threadIdx.x;
        XtPiece<T, N> piece[P];
#pragma unroll
        for (int k = 0; k < P; k++)
            if (k * DENSE_THREADS < left) piece[k] = xt_read<T, N>(from + k * DENSE_THREADS * N);
#pragma unroll
        for (int k = 0; k < P; k++)
            if (k * DENSE_THREADS < left) xt_write(to + k * DENSE_THREADS * N, unary_piece<T, OP, N>(piece[k]));
    }
    const int64_t last = pieces * N + threadIdx.x;
    if (blockIdx.x == 0 && last < n) xt_write(out + last, unary_piece<T, OP, 1>(xt_read<T, 1>(x + last)));
}

template <typename T, XtUnaryOp OP> static void launch_dense(const XtLoop<2> &loop) {
    const int64_t pieces = loop.numel / XT_WIDTH<T>, at_once = (int64_t)xt_multiprocessors() * DENSE_BLOCKS * DENSE_THREADS;
    const int each = pieces < 2 * at_once ? 1 : (int)DENSE_PIECES;
    xt_launch(unary_dense_kernel<T, OP>, xt_blocks(pieces, DENSE_THREADS * each), DENSE_THREADS, 0, (T *)loop.data[0],
              (const T *)loop.data[1], loop.numel, each);
}

/* Runs such a kernel and returns true, if there is one for p. */
template <typename T> static bool run_dense(const XtUnary *p) {
    if constexpr (sizeof(T) == 2) {
        const bool here = p->op == XT_RELU || p->op == XT_SILU || p->op == XT_GELU || p->op == XT_GELU_TANH;
        if (!here) return false;
        const XtLoop<2> loop = xt_loop<2>({&p->out, &p->x});
        if (loop.numel == 0 || loop.ndim != 1 || loop.strides[1][0] != 1 || !xt_loop_has_vectors(loop, XT_WIDTH<T>)) return false;
        switch (p->op) {
        case XT_RELU: launch_dense<T, XT_RELU>(loop); break;
        case XT_SILU: launch_dense<T, XT_SILU>(loop); break;
        case XT_GELU: launch_dense<T, XT_GELU>(loop); break;
        default: launch_dense<T, XT_GELU_TANH>(loop); break;
        }
        return true;
    }
    return false;
}

/* ---- the rest ---------------------------------------------------------------------------------------------------------------- */

/* NEG and ABS of an integer dtype, computed in the unsigned type U: the smallest integer is its own negative. */
template <typename T, typename U> struct XtIntegerUnary {
    typedef T Out;
    typedef T A;
    typedef uint8_t B;
    typedef uint8_t C;
    static constexpr int INPUTS = 1, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    bool negate_all;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> from, XtPiece<uint8_t, N>, XtPiece<uint8_t, N>) const {
        XtVector<T, N> x = xt_elements(from);
#pragma unroll
        for (int j = 0; j < N; j++)
            if (negate_all || (int64_t)x.at[j] < 0) x.at[j] = (T)(U)(U(0) - (U)x.at[j]);
        return xt_piece(x);
    }
};

XtStatus xt_cuda_unary(const XtUnary *p) {
    bool negate = p->op == XT_NEG;
    if (!xt_dtype_is_float(p->x.dtype) && !negate && p->op != XT_ABS)
        return xt_error(XT_TYPE_ERROR, "input must have a dtype that this operation is defined for, got %s",
                        xt_dtype_name(p->x.dtype));
    switch (p->x.dtype) {
    case XT_INT32: return xt_each("unary", XtIntegerUnary<int32_t, uint32_t>{negate}, {&p->out, &p->x});
    case XT_INT64: return xt_each("unary", XtIntegerUnary<int64_t, uint64_t>{negate}, {&p->out, &p->x});
    case XT_UINT8: return xt_each("unary", XtIntegerUnary<uint8_t, uint8_t>{negate}, {&p->out, &p->x});
    case XT_BOOL: return xt_each("unary", XtIntegerUnary<uint8_t, uint8_t>{false}, {&p->out, &p->x});
    default:
        return xt_by_float(p->x.dtype, [&](auto zero) {
            using T = decltype(zero);
            if (run_dense<T>(p)) return xt_launched_sizes("unary", p->out.ndim, p->out.shape);
            return xt_each("unary", XtUnaryFn<T>{p->op}, {&p->out, &p->x});
        });
    }
}

XtStatus xt_cuda_unary_bwd(const XtUnaryBwd *p) {
    return xt_by_float(
        p->x.dtype, [&](auto zero) { return xt_each("unary_bwd", XtUnaryBwdFn<decltype(zero)>{p->op}, {&p->dx, &p->dy, &p->x}); });
}
