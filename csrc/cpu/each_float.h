/* each_float.h - includes XT_TEMPLATE once per float dtype. No include guard, on purpose.
 * Defines T (stored type), ACC (computing type), LOAD(t), STORE(acc), NAME(stem), EXP(acc), SQRT(acc) and IS_F64. */
#define XT_JOIN_(a, b) a##_##b
#define XT_JOIN(a, b) XT_JOIN_(a, b)
#define NAME(stem) XT_JOIN(stem, SUFFIX)

#define ACC float
#define EXP(v) xt_expf(v)
#define SQRT(v) sqrtf(v)
#define IS_F64 0

#define T float
#define SUFFIX f32
#define LOAD(v) (v)
#define STORE(v) (v)
#include XT_TEMPLATE
#undef T
#undef SUFFIX
#undef LOAD
#undef STORE

#define T XtBf16
#define SUFFIX bf16
#define LOAD(v) xt_bf16_to_float(v)
#define STORE(v) xt_float_to_bf16(v)
#include XT_TEMPLATE
#undef T
#undef SUFFIX
#undef LOAD
#undef STORE

#define T XtF16
#define SUFFIX f16
#define LOAD(v) xt_f16_to_float(v)
#define STORE(v) xt_float_to_f16(v)
#include XT_TEMPLATE
#undef T
#undef SUFFIX
#undef LOAD
#undef STORE

#undef ACC
#undef EXP
#undef SQRT
#undef IS_F64

#define ACC double
#define EXP(v) exp(v)
#define SQRT(v) sqrt(v)
#define IS_F64 1
#define T double
#define SUFFIX f64
#define LOAD(v) (v)
#define STORE(v) (v)
#include XT_TEMPLATE
#undef T
#undef SUFFIX
#undef LOAD
#undef STORE
#undef ACC
#undef EXP
#undef SQRT
#undef IS_F64

#undef NAME
#undef XT_JOIN
#undef XT_JOIN_
