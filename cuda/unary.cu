/* unary.cu - out = f(x) and dx = dy f'(x), any strides; every f and f' is one line in unary_math.cuh.
 *
 * Plan: strided.cuh with one or two inputs. The operation is chosen in the kernel, by a switch that all threads take alike; the
 * elements of a piece are widened before it and rounded after it, so that each case is only its function. Long functions - sines,
 * and all of float64, where a piece has two elements - are not unrolled: their code would be as large as all of the others.
 * Bytes moved: each operand once. 16-bit floats compute in float.
 */
#include "strided.cuh"
#include "unary_math.cuh"

/* to[j] = f(a[j], b[j]), all [N]. Registers cannot be indexed at run time, so a loop that is kept works on the first STEP of them and
 * moves the others up. */
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

/* NEG and ABS of an integer dtype by its unsigned twin U; the smallest integer is its own negative. */
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
    switch (p->x.dtype) {
    case XT_INT32: return xt_each("unary", XtIntegerUnary<int32_t, uint32_t>{negate}, {&p->out, &p->x});
    case XT_INT64: return xt_each("unary", XtIntegerUnary<int64_t, uint64_t>{negate}, {&p->out, &p->x});
    case XT_UINT8: return xt_each("unary", XtIntegerUnary<uint8_t, uint8_t>{negate}, {&p->out, &p->x});
    case XT_BOOL: return xt_each("unary", XtIntegerUnary<uint8_t, uint8_t>{false}, {&p->out, &p->x});
    default:
        return xt_by_float(p->x.dtype,
                           [&](auto zero) { return xt_each("unary", XtUnaryFn<decltype(zero)>{p->op}, {&p->out, &p->x}); });
    }
}

XtStatus xt_cuda_unary_bwd(const XtUnaryBwd *p) {
    return xt_by_float(
        p->x.dtype, [&](auto zero) { return xt_each("unary_bwd", XtUnaryBwdFn<decltype(zero)>{p->op}, {&p->dx, &p->dy, &p->x}); });
}
