/* unary.c - out = f(x) and dx = dy f'(x). Every f is one line in the table FLOAT_UNARY, every f' one in FLOAT_UNARY_BWD. */
#include "contract/elementwise.h"
#include "cpu/strided.h"
#include "unary_math.h"

/* The functions in both precisions, under names that differ in the suffix only. */
#define exp_f32(v) xt_expf(v)
#define exp_f64(v) exp(v)
#define log_f32(v) xt_logf(v)
#define log_f64(v) log(v)
#define sqrt_f32(v) sqrtf(v)
#define sqrt_f64(v) sqrt(v)
#define abs_f32(v) fabsf(v)
#define abs_f64(v) fabs(v)
#define tanh_f32(v) xt_tanhf(v)
#define tanh_f64(v) tanh(v)
#define erf_f32(v) xt_erff(v)
#define erf_f64(v) erf(v)
#define sin_f64(v) sin(v)
#define cos_f64(v) cos(v)
#define cdf_f32(v, gauss) xt_normal_cdff(v, gauss)
#define cdf_f64(v, gauss) normal_cdf(v, gauss)

static double normal_cdf(double x, double *gauss) {
    *gauss = exp(-0.5 * x * x);
    return 0.5 * erfc(-x * M_SQRT1_2);
}

#define SQRT_2_PI 0.79788456080286535588    /* sqrt(2 / pi) */
#define SQRT_2PI_INV 0.39894228040143267794 /* 1 / sqrt(2 pi) */
#define CUBIC 0.044715

#define ONE(name, A, S, expression)                                                                   \
    XT_FAST static void name##_##S(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)params;                                                                                 \
        const A *xs = in[0];                                                                          \
        A *to = out;                                                                                  \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                         \
            A x = xs[i];                                                                              \
            to[i] = (A)(expression);                                                                  \
        }                                                                                             \
    }

/* The derivative's local values are computed before the store: dx may be dy or x. */
#define TWO(name, A, S, statements)                                                                       \
    XT_FAST static void name##_bwd_##S(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)params;                                                                                     \
        const A *dys = in[0], *xs = in[1];                                                                \
        A *to = out;                                                                                      \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                             \
            A x = xs[i], dy = dys[i], dx = x;                                                             \
            statements;                                                                                   \
            to[i] = dx;                                                                                   \
        }                                                                                                 \
    }

/* sin and cos of float32 beyond the range of the fast reduction, or Inf: libm, a block at a time. */
XT_INLINE bool all_small(const float *x, int64_t n) {
    bool large = false;
    for (int64_t i = 0; i < n; i++) large |= !(fabsf(x[i]) <= XT_TRIG_LIMIT);
    return !large;
}

#define TRIG(name, expression_small, expression_large)                                          \
    XT_FAST static void name(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)params;                                                                           \
        const float *xs = in[0];                                                                \
        float *to = out;                                                                        \
        for (int64_t begin = 0; begin < n; begin += XT_BLOCK) {                                 \
            int64_t end = begin + XT_BLOCK < n ? begin + XT_BLOCK : n;                          \
            if (all_small(xs + begin, end - begin)) {                                           \
                _Pragma("omp simd") for (int64_t i = begin; i < end; i++) {                     \
                    float x = xs[i];                                                            \
                    to[i] = expression_small;                                                   \
                }                                                                               \
            } else {                                                                            \
                for (int64_t i = begin; i < end; i++) {                                         \
                    float x = xs[i];                                                            \
                    to[i] = expression_large;                                                   \
                }                                                                               \
            }                                                                                   \
        }                                                                                       \
    }

/* X(name, A, S, f(x)); GELU_TANH is x sigmoid(2u), the same as x (1 + tanh(u)) / 2 and kinder to small results. */
/* clang-format off */
#define FLOAT_UNARY(X, A, S)                                                                    \
    X(NEG, A, S, -x)                                                                            \
    X(ABS, A, S, abs_##S(x))                                                                    \
    X(EXP, A, S, exp_##S(x))                                                                    \
    X(LOG, A, S, log_##S(x))                                                                    \
    X(SQRT, A, S, sqrt_##S(x))                                                                  \
    X(RSQRT, A, S, 1 / sqrt_##S(x))                                                             \
    X(RECIPROCAL, A, S, 1 / x)                                                                  \
    X(TANH, A, S, tanh_##S(x))                                                                  \
    X(SIGMOID, A, S, 1 / (1 + exp_##S(-x)))                                                     \
    X(RELU, A, S, x <= 0 ? 0 : x)                                                               \
    X(SILU, A, S, x / (1 + exp_##S(-x)))                                                        \
    X(GELU, A, S, x * cdf_##S(x, &(A){0}))                                                      \
    X(GELU_TANH, A, S, x / (1 + exp_##S(-2 * (A)SQRT_2_PI * (x + (A)CUBIC * x * x * x))))       \
    X(ERF, A, S, erf_##S(x))
/* clang-format on */

/* X(name, A, S, statements that set dx from x and dy). The forms in e = exp(-|x|) keep their relative precision far out. */
/* clang-format off */
#define FLOAT_UNARY_BWD(X, A, S)                                                                                      \
    X(NEG, A, S, dx = -dy)                                                                                            \
    X(ABS, A, S, dx = x > 0 ? dy : x < 0 ? -dy : dy * (x * 0))                                                        \
    X(EXP, A, S, dx = dy * exp_##S(x))                                                                                \
    X(LOG, A, S, dx = dy / x)                                                                                         \
    X(SQRT, A, S, dx = dy * (A)0.5 / sqrt_##S(x))                                                                     \
    X(RSQRT, A, S, dx = dy * (A)-0.5 / (x * sqrt_##S(x)))                                                             \
    X(RECIPROCAL, A, S, A r = 1 / x; dx = -dy * r * r)                                                                \
    X(TANH, A, S, A e = exp_##S(-2 * abs_##S(x)); A q = 1 / (1 + e); dx = dy * (4 * e * q * q))                       \
    X(SIGMOID, A, S, A e = exp_##S(-abs_##S(x)); A q = 1 / (1 + e); dx = dy * (e * q * q))                            \
    X(RELU, A, S, dx = x <= 0 ? 0 : dy)                                                                               \
    X(SILU, A, S, A e = exp_##S(-abs_##S(x)); A q = 1 / (1 + e); A s = x < 0 ? e * q : q; dx = dy * (s + x * (e * q * q))) \
    X(GELU, A, S, A gauss; A cdf = cdf_##S(x, &gauss); dx = dy * (cdf + x * gauss * (A)SQRT_2PI_INV))                 \
    X(GELU_TANH, A, S, A x2 = x * x; A u2 = 2 * (A)SQRT_2_PI * (x + (A)CUBIC * x2 * x); \
      A e = exp_##S(-abs_##S(u2)); A q = 1 / (1 + e); A s = u2 < 0 ? e * q : q; \
      A du2 = 2 * (A)SQRT_2_PI * (1 + 3 * (A)CUBIC * x2); dx = dy * (s + x * (e * q * q) * du2)) \
    X(ERF, A, S, dx = dy * (2 * (A)M_SQRT1_2 * (A)SQRT_2_PI * exp_##S(-x * x)))
/* clang-format on */

FLOAT_UNARY(ONE, float, f32)
FLOAT_UNARY(ONE, double, f64)
FLOAT_UNARY_BWD(TWO, float, f32)
FLOAT_UNARY_BWD(TWO, double, f64)
TRIG(SIN_f32, xt_trigf(x, 0), sinf(x))
TRIG(COS_f32, xt_trigf(x, 1), cosf(x))
ONE(SIN, double, f64, sin(x))
ONE(COS, double, f64, cos(x))
TWO(SIN, double, f64, dx = dy * cos(x))
TWO(COS, double, f64, dx = -dy * sin(x))
ONE(NEG, int32_t, i32, -(uint32_t)x)
ONE(NEG, int64_t, i64, -(uint64_t)x)
ONE(NEG, uint8_t, u8, -x)
ONE(ABS, int32_t, i32, x < 0 ? -(uint32_t)x : (uint32_t)x)
ONE(ABS, int64_t, i64, x < 0 ? -(uint64_t)x : (uint64_t)x)
ONE(ABS, uint8_t, u8, x)

/* dy f'(x) for the sine and cosine of float32: f' has the block form above, the product is a second pass over L1. */
#define TRIG_BWD(name, derivative, sign)                                                       \
    static void name(void *out, const void *const *in, int64_t n, const void *params) {        \
        const float *dys = in[0], *xs = in[1];                                                 \
        float *to = out, slope[XT_BLOCK];                                                      \
        for (int64_t begin = 0; begin < n; begin += XT_BLOCK) {                                \
            int64_t part = n - begin < XT_BLOCK ? n - begin : XT_BLOCK;                        \
            derivative(slope, (const void *const[]){xs + begin}, part, params);                \
            for (int64_t i = 0; i < part; i++) to[begin + i] = sign dys[begin + i] * slope[i]; \
        }                                                                                      \
    }
TRIG_BWD(SIN_bwd_f32, COS_f32, +)
TRIG_BWD(COS_bwd_f32, SIN_f32, -)

XtStatus xt_cpu_unary(const XtUnary *p) {
#define XT_X(name) [XT_##name] = name##_f32,
    static const XtDenseFn f32[XT_UNARY_OP_COUNT] = {XT_UNARY_OPS(XT_X)};
#undef XT_X
#define XT_X(name) [XT_##name] = name##_f64,
    static const XtDenseFn f64[XT_UNARY_OP_COUNT] = {XT_UNARY_OPS(XT_X)};
#undef XT_X
    static const XtDenseFn i32[XT_UNARY_OP_COUNT] = {[XT_NEG] = NEG_i32, [XT_ABS] = ABS_i32};
    static const XtDenseFn i64[XT_UNARY_OP_COUNT] = {[XT_NEG] = NEG_i64, [XT_ABS] = ABS_i64};
    static const XtDenseFn u8[XT_UNARY_OP_COUNT] = {[XT_NEG] = NEG_u8, [XT_ABS] = ABS_u8};
    static const XtDenseFn b8[XT_UNARY_OP_COUNT] = {[XT_ABS] = ABS_u8};
    static const XtDenseFn *const table[XT_DTYPE_COUNT] = {[XT_FLOAT32] = f32, [XT_BFLOAT16] = f32, [XT_FLOAT16] = f32,
                                                           [XT_FLOAT64] = f64, [XT_INT32] = i32,    [XT_INT64] = i64,
                                                           [XT_UINT8] = u8,    [XT_BOOL] = b8};
    return xt_each(table[p->x.dtype][p->op], NULL, true, 2, (const XtView *const[]){&p->out, &p->x});
}

XtStatus xt_cpu_unary_bwd(const XtUnaryBwd *p) {
#define XT_X(name) [XT_##name] = name##_bwd_f32,
    static const XtDenseFn f32[XT_UNARY_OP_COUNT] = {XT_UNARY_OPS(XT_X)};
#undef XT_X
#define XT_X(name) [XT_##name] = name##_bwd_f64,
    static const XtDenseFn f64[XT_UNARY_OP_COUNT] = {XT_UNARY_OPS(XT_X)};
#undef XT_X
    XtDenseFn fn = p->x.dtype == XT_FLOAT64 ? f64[p->op] : xt_dtype_is_float(p->x.dtype) ? f32[p->op] : NULL;
    return xt_each(fn, NULL, true, 3, (const XtView *const[]){&p->dx, &p->dy, &p->x});
}
