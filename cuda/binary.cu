/* binary.cu - out[i] = a[i] op b[i] with broadcasting, tensors or one tensor and a number; comparisons write bool.
 *
 * Plan: strided.cuh with two inputs. The operation is chosen in the kernel, by a switch that all threads take alike. A number
 * stands in the kernel's arguments in the computing type - a 16-bit tensor does not round it - and its operand is not read. Powers
 * have a kernel of their own, one element a thread: long, and bound by arithmetic. Those by 2, 3, +-1/2, -1 and -2 are not.
 * Bytes moved: each operand once. 16-bit floats compute in float, integers wrap around.
 */
#include "strided.cuh"
#include "unary_math.cuh"

/* Operations that only this file knows: + and - of bool, and powers by a constant. */
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

template <typename T> static __device__ __forceinline__ typename XtArithmetic<T>::W load(T x) {
    if constexpr (XtArithmetic<T>::INTEGER) return x;
    else return xt_load(x);
}
template <typename T, typename R> static __device__ __forceinline__ T store(R x) {
    if constexpr (XtArithmetic<T>::INTEGER) return (T)x;
    else return xt_store<T>(x);
}

/* By squaring, modulo 2^64; narrower types keep the low bits, which is the power modulo their size. */
static __device__ inline uint64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? UINT64_MAX : 1) : 0;
    uint64_t result = 1, square = (uint64_t)base;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= square;
        square *= square;
    }
    return result;
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
    template <int N> __device__ void run(T *out, const T *as, const T *bs, const uint8_t *) const {
        W a[N], b[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            a[j] = constant == 1 ? value : load(as[j]);
            b[j] = constant == 2 ? value : load(bs[j]);
        }
#define XT_CASE(name, expression)                       \
    case name:                                          \
        _Pragma("unroll") for (int j = 0; j < N; j++) { \
            W x = a[j], y = b[j];                       \
            (void)y;                                    \
            out[j] = store<T>(expression);              \
        }                                               \
        return;
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
            switch (op) { /* x != x picks a NaN in x; a NaN in y fails the first comparison and is picked with it */
                XT_CASE(XT_ADD, x + y)
                XT_CASE(XT_SUB, x - y)
                XT_CASE(XT_MUL, x * y)
                XT_CASE(XT_DIV, x / y)
                XT_CASE(XT_MAXIMUM, (x > y) | (x != x) ? x : y)
                XT_CASE(XT_MINIMUM, (x < y) | (x != x) ? x : y)
                XT_CASE(SQUARE, x * x)
                XT_CASE(CUBE, x * x * x)
                XT_CASE(ROOT, xt_root(x))
                XT_CASE(INVERSE_ROOT, 1 / xt_root(x))
                XT_CASE(INVERSE, 1 / x)
                XT_CASE(INVERSE_SQUARE, 1 / (x * x))
            }
        }
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
    template <int N> __device__ void run(uint8_t *out, const T *as, const T *bs, const uint8_t *) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            W x = constant == 1 ? value : load(as[j]), y = constant == 2 ? value : load(bs[j]);
            bool less = x<y, equal = x == y, greater = x> y; /* none of them with a NaN */
            out[j] = op == XT_EQ   ? equal
                     : op == XT_NE ? !equal
                     : op == XT_LT ? less
                     : op == XT_LE ? less | equal
                     : op == XT_GT ? greater
                                   : greater | equal;
        }
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
    template <int N> __device__ void run(T *out, const T *as, const T *bs, const uint8_t *) const {
        W x = constant == 1 ? value : load(as[0]), y = constant == 2 ? value : load(bs[0]);
        if constexpr (XtArithmetic<T>::INTEGER) out[0] = (T)integer_power((int64_t)x, (int64_t)y);
        else out[0] = store<T>(xt_power(x, y));
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
    if (op == XT_POW) return xt_each("binary", XtPowerFn<T>{op, p->constant, value}, {&p->out, &a, &b});
    if (op >= XT_EQ && op <= XT_GE) return xt_each("binary", XtComparisonFn<T>{op, p->constant, value}, {&p->out, &a, &b});
    return xt_each("binary", XtArithmeticFn<T>{op, p->constant, value}, {&p->out, &a, &b});
}

XtStatus xt_cuda_binary(const XtBinary *p) {
    XtDtype dtype = p->constant == 1 ? p->b.dtype : p->a.dtype;
    int op = (int)p->op;
    XtScalar number = p->value;
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
