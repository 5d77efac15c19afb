/* binary.c - out = a op b with broadcasting, tensors or one tensor and a number. One dense loop per operation and computing
 * type. */
#include "contract/elementwise.h"
#include "cpu/strided.h"

#define TWO(name, A, S, Out, expression)                                                              \
    XT_FAST static void name##_##S(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)params;                                                                                 \
        const A *as = in[0], *bs = in[1];                                                             \
        Out *to = out;                                                                                \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
            A a = as[i], b = bs[i];                                                                   \
            to[i] = (Out)(expression);                                                                \
        }                                                                                             \
    }

#define COMPARE(A, S)              \
    TWO(EQ, A, S, uint8_t, a == b) \
    TWO(NE, A, S, uint8_t, a != b) \
    TWO(LT, A, S, uint8_t, a < b)  \
    TWO(LE, A, S, uint8_t, a <= b) \
    TWO(GT, A, S, uint8_t, a > b)  \
    TWO(GE, A, S, uint8_t, a >= b)

/* a != a picks a NaN in a; a NaN in b fails the first comparison and is picked with it. */
#define FLOAT_OPS(A, S, power)                          \
    TWO(ADD, A, S, A, a + b)                            \
    TWO(SUB, A, S, A, a - b)                            \
    TWO(MUL, A, S, A, a *b)                             \
    TWO(DIV, A, S, A, a / b)                            \
    TWO(POW, A, S, A, power(a, b))                      \
    TWO(MAXIMUM, A, S, A, ((a > b) | (a != a)) ? a : b) \
    TWO(MINIMUM, A, S, A, ((a < b) | (a != a)) ? a : b) \
    TWO(FLOOR_DIVIDE, A, S, A, floor_divide_##S(a, b))  \
    TWO(REMAINDER, A, S, A, remainder_##S(a, b))        \
    COMPARE(A, S)

/* Sums and products wrap around: computed unsigned, where C defines it. */
#define INTEGER_OPS(A, S, U)                                           \
    TWO(ADD, A, S, A, (U)a + (U)b)                                     \
    TWO(SUB, A, S, A, (U)a - (U)b)                                     \
    TWO(MUL, A, S, A, (U)a *(U)b)                                      \
    TWO(POW, A, S, A, integer_power((int64_t)a, (int64_t)b))           \
    TWO(MAXIMUM, A, S, A, a > b ? a : b)                               \
    TWO(MINIMUM, A, S, A, a < b ? a : b)                               \
    TWO(FLOOR_DIVIDE, A, S, A, integer_floor((int64_t)a, (int64_t)b))  \
    TWO(REMAINDER, A, S, A, integer_remainder((int64_t)a, (int64_t)b)) \
    COMPARE(A, S)

/* By squaring, modulo 2^64; narrower types keep the low bits, which is the power modulo their size. */
XT_INLINE uint64_t integer_power(int64_t base, int64_t exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent & 1 ? UINT64_MAX : 1) : 0;
    uint64_t result = 1, square = (uint64_t)base;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1) result *= square;
        square *= square;
    }
    return result;
}

/* By 0: 0. By -1: without the quotient that overflows. */
XT_INLINE int64_t integer_floor(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return (int64_t)(0 - (uint64_t)a);
    return a / b - ((a % b != 0) & ((a < 0) != (b < 0)));
}
XT_INLINE int64_t integer_remainder(int64_t a, int64_t b) {
    if (b == 0 || b == -1) return 0;
    int64_t m = a % b;
    return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}

/* As CPython's float_divmod does it. */
#define DIVISION(A, S, modulo, down, sign)             \
    XT_INLINE A remainder_##S(A a, A b) {              \
        A m = modulo(a, b);                            \
        if (m == 0) return sign(m, b);                 \
        return (m < 0) != (b < 0) ? m + b : m;         \
    }                                                  \
    XT_INLINE A floor_divide_##S(A a, A b) {           \
        if (b == 0) return a / b;                      \
        A m = modulo(a, b), q = (a - m) / b;           \
        if (m != 0 && (m < 0) != (b < 0)) q -= 1;      \
        if (q == 0) return sign((A)0, a / b);          \
        A whole = down(q);                             \
        return q - whole > (A)0.5 ? whole + 1 : whole; \
    }
DIVISION(float, f32, fmodf, floorf, copysignf)
DIVISION(double, f64, fmod, floor, copysign)

FLOAT_OPS(float, f32, powf)
FLOAT_OPS(double, f64, pow)
INTEGER_OPS(int32_t, i32, uint32_t)
INTEGER_OPS(int64_t, i64, uint64_t)
INTEGER_OPS(uint8_t, u8, uint32_t)
/* bool: + is or, - is exclusive or; the rest is as for uint8. */
TWO(ADD, uint8_t, b8, uint8_t, a | b)
TWO(SUB, uint8_t, b8, uint8_t, a ^ b)

/* Powers by a constant that have a loop of their own; the others go through pow. */
#define ONE(name, A, S, expression)                                                                   \
    XT_FAST static void name##_##S(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)params;                                                                                 \
        const A *as = in[0];                                                                          \
        A *to = out;                                                                                  \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
            A a = as[i];                                                                              \
            to[i] = expression;                                                                       \
        }                                                                                             \
    }
#define POWERS(A, S, square_root)               \
    ONE(square, A, S, a *a)                     \
    ONE(cube, A, S, a * a * a)                  \
    ONE(root, A, S, square_root(a))             \
    ONE(inverse_root, A, S, 1 / square_root(a)) \
    ONE(inverse, A, S, 1 / a)                   \
    ONE(inverse_square, A, S, 1 / (a * a))
POWERS(float, f32, sqrtf)
POWERS(double, f64, sqrt)

static XtDenseFn power_by(double exponent, bool f64) {
    if (exponent == 2) return f64 ? square_f64 : square_f32;
    if (exponent == 3) return f64 ? cube_f64 : cube_f32;
    if (exponent == 0.5) return f64 ? root_f64 : root_f32;
    if (exponent == -0.5) return f64 ? inverse_root_f64 : inverse_root_f32;
    if (exponent == -1) return f64 ? inverse_f64 : inverse_f32;
    if (exponent == -2) return f64 ? inverse_square_f64 : inverse_square_f32;
    return NULL;
}

/* Row-wise scaling and shifting - one value of b for a whole stretch of a - deserve loops that do not read b from memory. */
#define SCALAR(name, A, S, expression)                                                                       \
    XT_FAST static void name##_scalar_##S(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)params;                                                                                        \
        const A *as = in[0], b = *(const A *)in[1];                                                          \
        A *to = out;                                                                                         \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                                \
            A a = as[i];                                                                                     \
            to[i] = expression;                                                                              \
        }                                                                                                    \
    }
#define SCALARS(A, S)        \
    SCALAR(ADD, A, S, a + b) \
    SCALAR(SUB, A, S, a - b) \
    SCALAR(MUL, A, S, a *b)  \
    SCALAR(DIV, A, S, a / b)
SCALARS(float, f32)
SCALARS(double, f64)

static XtDenseFn pick_scalar(XtBinaryOp op, XtDtype dtype) {
    static const XtDenseFn f32[] = {
        [XT_ADD] = ADD_scalar_f32, [XT_SUB] = SUB_scalar_f32, [XT_MUL] = MUL_scalar_f32, [XT_DIV] = DIV_scalar_f32};
    static const XtDenseFn f64[] = {
        [XT_ADD] = ADD_scalar_f64, [XT_SUB] = SUB_scalar_f64, [XT_MUL] = MUL_scalar_f64, [XT_DIV] = DIV_scalar_f64};
    if (op > XT_DIV || !xt_dtype_is_float(dtype)) return NULL;
    return dtype == XT_FLOAT64 ? f64[op] : f32[op];
}

/* The dense loop of every operation for one computing type; integers have no DIV: NULL, which xt_each refuses. */
#define SAME_OPS(S)                                                                                                     \
    [XT_ADD] = ADD_##S, [XT_SUB] = SUB_##S, [XT_MUL] = MUL_##S, [XT_POW] = POW_##S, [XT_MAXIMUM] = MAXIMUM_##S,         \
    [XT_MINIMUM] = MINIMUM_##S, [XT_FLOOR_DIVIDE] = FLOOR_DIVIDE_##S, [XT_REMAINDER] = REMAINDER_##S, [XT_EQ] = EQ_##S, \
    [XT_NE] = NE_##S, [XT_LT] = LT_##S, [XT_LE] = LE_##S, [XT_GT] = GT_##S, [XT_GE] = GE_##S

static XtDenseFn pick(XtBinaryOp op, XtDtype dtype) {
    static const XtDenseFn f32[XT_BINARY_OP_COUNT] = {SAME_OPS(f32), [XT_DIV] = DIV_f32};
    static const XtDenseFn f64[XT_BINARY_OP_COUNT] = {SAME_OPS(f64), [XT_DIV] = DIV_f64};
    static const XtDenseFn i32[XT_BINARY_OP_COUNT] = {SAME_OPS(i32)};
    static const XtDenseFn i64[XT_BINARY_OP_COUNT] = {SAME_OPS(i64)};
    static const XtDenseFn u8[XT_BINARY_OP_COUNT] = {SAME_OPS(u8)};
    switch (dtype) {
    case XT_FLOAT64: return f64[op];
    case XT_INT32: return i32[op];
    case XT_INT64: return i64[op];
    case XT_UINT8: return u8[op];
    case XT_BOOL: return op == XT_ADD ? ADD_b8 : op == XT_SUB ? SUB_b8 : u8[op];
    default: return f32[op];
    }
}

XtStatus xt_cpu_binary(const XtBinary *p) {
    const XtView *a = &p->a, *b = &p->b;
    XtDtype dtype = p->constant == 1 ? b->dtype : a->dtype;
    if (p->constant == 2 && p->op == XT_POW && xt_dtype_is_float(dtype)) {
        XtDenseFn power = power_by(p->value.d, dtype == XT_FLOAT64);
        if (power) return xt_each(power, NULL, true, 2, (const XtView *const[]){&p->out, a});
    }
    /* A number becomes a view of one element with strides 0, in the computing type: a 16-bit tensor does not round it. */
    _Alignas(8) char value[8];
    XtView number = p->out;
    if (p->constant != 0) {
        number.data = value;
        number.dtype = dtype == XT_BFLOAT16 || dtype == XT_FLOAT16 ? XT_FLOAT32 : dtype;
        memset(number.strides, 0, sizeof number.strides);
        if (p->value.is_int) xt_convert(value, number.dtype, &p->value.i, XT_INT64, 1);
        else xt_convert(value, number.dtype, &p->value.d, XT_FLOAT64, 1);
    }
    if (p->constant == 1) a = &number;
    if (p->constant == 2) b = &number;
    if (p->op == XT_ADD || p->op == XT_MUL) { /* the operand that stands still goes second */
        int last = p->out.ndim - 1;
        if (p->constant == 1 || (p->constant == 0 && last >= 0 && a->strides[last] == 0)) {
            const XtView *t = a;
            a = b;
            b = t;
        }
    }
    return xt_each_or_scalar(pick(p->op, dtype), pick_scalar(p->op, dtype), NULL, true, 3, (const XtView *const[]){&p->out, a, b});
}
