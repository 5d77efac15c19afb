/* binary.cu - out[i] = a[i] op b[i] with broadcasting, tensors or one tensor and a number; comparisons write bool.
 *
 * Plan: strided.cuh with two inputs. A switch in the kernel, uniform over all threads, chooses the operation. A number is a kernel
 * argument of the computing type, so a 16-bit tensor does not round it, and its operand is never read. Powers are long and limited
 * by arithmetic, so they have a kernel of their own, one element a thread, as // and % have; powers of 2, 3, +-1/2, -1 and -2 stay in the first one.
 * Bytes moved: each operand once. 16-bit floats compute in float; integers wrap around.
 */
#include "common/strided.cuh"
#include "contract/elementwise.h"
#include "unary_math.cuh"

/* Operations beyond XtBinaryOp: + and - of bool, and powers with a constant exponent. */
enum { OR = XT_BINARY_OP_COUNT, XOR, SQUARE, CUBE, ROOT, INVERSE_ROOT, INVERSE, INVERSE_SQUARE };

/* W: what an operation computes in; U: unsigned for sums and products of integers. */
template <typename T> struct XtArithmetic {
    typedef XtAcc<T> W;
    typedef XtAcc<T> U;
    static constexpr bool INTEGER = false;
};
template <> struct XtArithmetic<int32_t> {
    typedef int32_t W;
    typedef uint32_t U;
    static constexpr bool INTEGER = true;
};
template <> struct XtArithmetic<int64_t> {
    typedef int64_t W;
    typedef uint64_t U;
    static constexpr bool INTEGER = true;
};
template <> struct XtArithmetic<uint8_t> {
    typedef uint8_t W;
    typedef uint32_t U;
    static constexpr bool INTEGER = true;
};

/* N elements in the computing type, or N times the number; and back. */
template <typename T, int N, typename W>
static __device__ __forceinline__ XtVector<W, N> load(const XtPiece<T, N> &from, bool constant, W value) {
    XtVector<W, N> to;
    if (constant) {
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = value;
    } else if constexpr (XtArithmetic<T>::INTEGER) {
        XtVector<T, N> element = xt_elements(from);
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = element.at[j];
    } else {
        to = xt_load(from);
    }
    return to;
}
template <typename T, int N, typename W> static __device__ __forceinline__ XtPiece<T, N> store(const XtVector<W, N> &from) {
    if constexpr (XtArithmetic<T>::INTEGER) {
        XtVector<T, N> to;
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = (T)from.at[j];
        return xt_piece(to);
    } else {
        return xt_store<T>(from);
    }
}

/* By repeated squaring, modulo 2^64. The low bits are the power modulo the size of a narrower type. */
static __device__ inline uint64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? UINT64_MAX : 1) : 0;
    uint64_t result = 1, square = (uint64_t)base;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= square;
        square *= square;
    }
    return result;
}

/* As in cpu/elementwise/binary.c. fmod is exact: the same bits. */
static __device__ inline int64_t integer_floor(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return (int64_t)(0 - (uint64_t)a);
    return a / b - ((a % b != 0) & ((a < 0) != (b < 0)));
}
static __device__ inline int64_t integer_remainder(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return 0;
    int64_t m = a % b;
    return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}
template <typename A> static __device__ inline A float_remainder(A a, A b) {
    A m = fmod(a, b);
    if (m == 0) return copysign(m, b);
    return (m < 0) != (b < 0) ? m + b : m;
}
template <typename A> static __device__ inline A float_floor(A a, A b) {
    if (b == 0) return a / b;
    A m = fmod(a, b), q = (a - m) / b;
    if (m != 0 && (m < 0) != (b < 0)) q -= 1;
    if (q == 0) return copysign(A(0), a / b);
    A whole = floor(q);
    return q - whole > A(0.5) ? whole + 1 : whole;
}

template <typename T> struct XtArithmeticFn {
    typedef T Out;
    typedef T A;
    typedef T B;
    typedef uint8_t C;
    typedef typename XtArithmetic<T>::W W;
    typedef typename XtArithmetic<T>::U U;
    static constexpr int INPUTS = 2, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    int op, constant;
    W value;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> from_a, XtPiece<T, N> from_b, XtPiece<uint8_t, N>) const {
        XtVector<W, N> a = load(from_a, constant == 1, value), b = load(from_b, constant == 2, value), out;
#define XT_CASE(name, expression)                       \
    case name:                                          \
        _Pragma("unroll") for (int j = 0; j < N; j++) { \
            W x = a.at[j], y = b.at[j];                 \
            (void)y;                                    \
            out.at[j] = (W)(expression);                \
        }                                               \
        break;
        if constexpr (XtArithmetic<T>::INTEGER) {
            switch (op) {
                XT_CASE(XT_ADD, (U)x + (U)y)
                XT_CASE(XT_SUB, (U)x - (U)y)
                XT_CASE(XT_MUL, (U)x * (U)y)
                XT_CASE(XT_MAXIMUM, x > y ? x : y)
                XT_CASE(XT_MINIMUM, x < y ? x : y)
                XT_CASE(OR, x | y)
                XT_CASE(XOR, x ^ y)
            }
        } else {
            switch (op) { /* x != x selects a NaN in x; a NaN in y fails the first comparison, which selects y */
                XT_CASE(XT_ADD, x + y)
                XT_CASE(XT_SUB, x - y)
                XT_CASE(XT_MUL, x * y)
                XT_CASE(XT_DIV, x / y)
                XT_CASE(XT_MAXIMUM, (x > y) | (x != x) ? x : y)
                XT_CASE(XT_MINIMUM, (x < y) | (x != x) ? x : y)
                XT_CASE(SQUARE, x * x)
                XT_CASE(CUBE, x * x * x)
                XT_CASE(ROOT, sqrt(x))
                XT_CASE(INVERSE_ROOT, 1 / sqrt(x))
                XT_CASE(INVERSE, 1 / x)
                XT_CASE(INVERSE_SQUARE, 1 / (x * x))
            }
        }
        return store<T>(out);
#undef XT_CASE
    }
};

template <typename T> struct XtComparisonFn {
    typedef uint8_t Out; /* bool */
    typedef T A;
    typedef T B;
    typedef uint8_t C;
    typedef typename XtArithmetic<T>::W W;
    static constexpr int INPUTS = 2, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    int op, constant;
    W value;
    template <int N> __device__ XtPiece<uint8_t, N> run(XtPiece<T, N> from_a, XtPiece<T, N> from_b, XtPiece<uint8_t, N>) const {
        XtVector<W, N> a = load(from_a, constant == 1, value), b = load(from_b, constant == 2, value);
        XtVector<uint8_t, N> out;
#define XT_CASE(name, expression) \
    case name: _Pragma("unroll") for (int j = 0; j < N; j++) out.at[j] = a.at[j] expression b.at[j]; break;
        switch (op) { /* of a NaN only != is true */
            XT_CASE(XT_EQ, ==)
            XT_CASE(XT_NE, !=)
            XT_CASE(XT_LT, <)
            XT_CASE(XT_LE, <=)
            XT_CASE(XT_GT, >)
            XT_CASE(XT_GE, >=)
        }
#undef XT_CASE
        return xt_piece(out);
    }
};

template <typename T> struct XtPowerFn {
    typedef T Out;
    typedef T A;
    typedef T B;
    typedef uint8_t C;
    typedef typename XtArithmetic<T>::W W;
    static constexpr int INPUTS = 2, WIDTH = 1, GROUP = 1;
    int op, constant;
    W value;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> from_a, XtPiece<T, N> from_b, XtPiece<uint8_t, N>) const {
        XtVector<W, N> a = load(from_a, constant == 1, value), b = load(from_b, constant == 2, value), out;
        if constexpr (XtArithmetic<T>::INTEGER) out.at[0] = (W)integer_power((int64_t)a.at[0], (int64_t)b.at[0]);
        else out.at[0] = pow(a.at[0], b.at[0]);
        return store<T>(out);
    }
};

template <typename T> struct XtDivisionFn {
    typedef T Out;
    typedef T A;
    typedef T B;
    typedef uint8_t C;
    typedef typename XtArithmetic<T>::W W;
    static constexpr int INPUTS = 2, WIDTH = 1, GROUP = 1;
    int op, constant;
    W value;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> from_a, XtPiece<T, N> from_b, XtPiece<uint8_t, N>) const {
        XtVector<W, N> a = load(from_a, constant == 1, value), b = load(from_b, constant == 2, value), out;
        const bool down = op == XT_FLOOR_DIVIDE;
        if constexpr (XtArithmetic<T>::INTEGER)
            out.at[0] = (W)(down ? integer_floor((int64_t)a.at[0], (int64_t)b.at[0])
                                 : integer_remainder((int64_t)a.at[0], (int64_t)b.at[0]));
        else out.at[0] = down ? float_floor(a.at[0], b.at[0]) : float_remainder(a.at[0], b.at[0]);
        return store<T>(out);
    }
};

static int power_by(double exponent) {
    return exponent == 2      ? SQUARE
           : exponent == 3    ? CUBE
           : exponent == 0.5  ? ROOT
           : exponent == -0.5 ? INVERSE_ROOT
           : exponent == -1   ? INVERSE
           : exponent == -2   ? INVERSE_SQUARE
                              : (int)XT_POW;
}

template <typename T> static XtStatus binary(const XtBinary *p, int op, XtScalar number) {
    typedef typename XtArithmetic<T>::W W;
    W value = xt_scalar_as<W>(number);
    XtView a = p->a, b = p->b;
    if (p->constant != 0) {
        if (p->constant == 1) a = p->b; /* its dtype; never read */
        else b = p->a;
        XtView *absent = p->constant == 1 ? &a : &b;
        absent->data = NULL;
        for (int d = 0; d < XT_MAX_DIMS; d++) absent->strides[d] = 0;
    }
    if (op == XT_FLOOR_DIVIDE || op == XT_REMAINDER)
        return xt_each("binary", XtDivisionFn<T>{op, p->constant, value}, {&p->out, &a, &b});
    if (op == XT_POW) return xt_each("binary", XtPowerFn<T>{op, p->constant, value}, {&p->out, &a, &b});
    if (op >= XT_EQ && op <= XT_GE) return xt_each("binary", XtComparisonFn<T>{op, p->constant, value}, {&p->out, &a, &b});
    return xt_each("binary", XtArithmeticFn<T>{op, p->constant, value}, {&p->out, &a, &b});
}

XtStatus xt_cuda_binary(const XtBinary *p) {
    XtDtype dtype = p->constant == 1 ? p->b.dtype : p->a.dtype;
    int op = (int)p->op;
    XtScalar number = p->value;
    if (p->op == XT_DIV && !xt_dtype_is_float(dtype))
        return xt_error(XT_TYPE_ERROR, "input must have a dtype that this operation is defined for, got %s", xt_dtype_name(dtype));
    switch (dtype) {
    case XT_INT32: return binary<int32_t>(p, op, number);
    case XT_INT64: return binary<int64_t>(p, op, number);
    case XT_UINT8: return binary<uint8_t>(p, op, number);
    case XT_BOOL:
        number.i = number.is_int ? number.i != 0 : number.d != 0;
        number.is_int = true;
        return binary<uint8_t>(p, op == XT_ADD ? (int)OR : op == XT_SUB ? (int)XOR : op, number);
    default:
        if (p->constant == 2 && p->op == XT_POW) op = power_by(p->value.d);
        return xt_by_float(dtype, [&](auto zero) { return binary<decltype(zero)>(p, op, number); });
    }
}
