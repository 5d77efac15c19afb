/* elementwise.h - elementwise kernels and data movement: views of any strides and equal shapes. Rules for all kernels:
 * kernels.h. */
#pragma once

#include "xtrain.h"

/* dst[i] = (dst dtype) src[i]. Any pair of dtypes; float -> int truncates, anything -> bool is (x != 0). src strides may be 0. */
typedef struct XtCopy {
    XtView dst, src;
} XtCopy;

/* dst[i] = value. Any dtype. */
typedef struct XtFill {
    XtView dst;
    XtScalar value;
} XtFill;

/* dst[i] = start + i * step, dst dense 1-D, any dtype but bool; computed in int64 when both are integers, else in float64. */
typedef struct XtArange {
    XtView dst;
    XtScalar start, step;
} XtArange;

typedef enum XtRandomKind {
    XT_UNIFORM, /* low + (high - low) * u, u = (word >> 8) * 2^-24, in [low, high) */
    XT_NORMAL,  /* low + high * z (mean low, deviation high), Box-Muller on words (0,1) and (2,3) of a block in float32 */
    XT_RANDINT, /* integer low + (64-bit word pair (2i, 2i+1) % (high - low)): two words an element */
} XtRandomKind;

/* dst dense. UNIFORM and NORMAL: float dtypes; RANDINT: any dtype. Numbers are made in float32 and cast. */
typedef struct XtRandom {
    XtView dst;
    XtRandomKind kind;
    double low, high;
    XtPhilox philox;
} XtRandom;

/* clang-format off */
#define XT_UNARY_OPS(X) \
    X(NEG) X(ABS) X(EXP) X(LOG) X(SQRT) X(RSQRT) X(RECIPROCAL) X(SIN) X(COS) X(TANH) X(SIGMOID) X(RELU) X(SILU) X(GELU) X(GELU_TANH) X(ERF)
/* clang-format on */
typedef enum XtUnaryOp {
#define XT_X(name) XT_##name,
    XT_UNARY_OPS(XT_X)
#undef XT_X
        XT_UNARY_OP_COUNT
} XtUnaryOp;

/* out[i] = f(x[i]). Same dtype, float; NEG and ABS also integers. GELU is the erf form, GELU_TANH the tanh approximation. */
typedef struct XtUnary {
    XtUnaryOp op;
    XtView out, x;
} XtUnary;

/* dx[i] = dy[i] * f'(x[i]), from the input x. All of one float dtype. f'(0) = 0 for ABS and RELU. */
typedef struct XtUnaryBwd {
    XtUnaryOp op;
    XtView dx, dy, x;
} XtUnaryBwd;

/* clang-format off */
#define XT_BINARY_OPS(X) \
    X(ADD) X(SUB) X(MUL) X(DIV) X(POW) X(MAXIMUM) X(MINIMUM) X(FLOOR_DIVIDE) X(REMAINDER) X(EQ) X(NE) X(LT) X(LE) X(GT) X(GE)
/* clang-format on */
typedef enum XtBinaryOp {
#define XT_X(name) XT_##name,
    XT_BINARY_OPS(XT_X)
#undef XT_X
        XT_BINARY_OP_COUNT
} XtBinaryOp;

/* out[i] = a[i] op b[i]; a and b have out's shape (broadcast by stride 0) and one dtype. Comparisons write bool, the rest a's dtype.
 * constant: 0 = both are tensors; 1 = a is `value`; 2 = b is `value` (that view is then ignored).
 * FLOOR_DIVIDE and REMAINDER are Python's // and %: the quotient is rounded down, the remainder has the sign of b. Floats, with
 * m = fmod(a, b), which is exact: REMAINDER is m, plus b where m and b have opposite signs; FLOOR_DIVIDE is (a - m) / b, less 1 there,
 * to the nearest integer; a zero has the sign of a / b. By 0.0 they are a / b and NaN. Integers by 0: both are 0. No bool.
 * DIV: float dtypes only. Integer POW with a negative exponent gives 0 (1 and -1 excepted). NaN makes MAXIMUM and MINIMUM NaN. */
typedef struct XtBinary {
    XtBinaryOp op;
    XtView out, a, b;
    int constant;
    XtScalar value;
} XtBinary;

/* out[i] = condition[i] ? a[i] : b[i]; condition bool; a, b, out one dtype; all of out's shape. */
typedef struct XtWhere {
    XtView out, condition, a, b;
} XtWhere;
