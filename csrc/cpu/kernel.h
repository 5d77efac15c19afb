/* kernel.h - what the CPU kernels share: the vectorising attribute, low-precision conversions, fast exp, and "once per dtype".
 *
 * A kernel for several float dtypes is a file that includes itself through each_float.h, once per dtype (example: layers/swiglu.c). The
 * part under #ifndef T is compiled once and calls XT_BY_FLOAT(dtype, stem). The part under #else is the template: it uses T, ACC,
 * LOAD and STORE, and names its functions NAME(stem).
 *
 * XT_FAST compiles a function for AVX-512, AVX2+FMA and the baseline, and the loader picks one. Loops are plain C, written so that
 * the compiler vectorises them; `#pragma omp simd reduction(+ : s)` allows it to reorder a sum (the order is fixed at compile time).
 */
#pragma once

#include "kernels.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(XT_SANITIZE)
/* The levels x86-64-v3 and -v4 are asked of the CPU by feature. A model name (arch=haswell) would be asked by model: any newer or
 * other maker's CPU then gets the baseline, silently and many times slower. */
#if __GNUC__ >= 12
#define XT_FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define XT_FAST __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define XT_FAST
#endif
/* For helpers of XT_FAST functions: they must be inlined to be compiled for the same instructions. */
#define XT_INLINE static inline __attribute__((always_inline))

typedef uint16_t XtBf16; /* bit patterns */
typedef uint16_t XtF16;

XT_INLINE float xt_bits_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
XT_INLINE uint32_t xt_float_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

XT_INLINE float xt_bf16_to_float(XtBf16 h) { return xt_bits_float((uint32_t)h << 16); }
/* Round to nearest even; NaN stays NaN (quiet). */
XT_INLINE XtBf16 xt_float_to_bf16(float f) {
    uint32_t u = xt_float_bits(f);
    uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u), nan = u | 0x400000u;
    return (XtBf16)((f != f ? nan : rounded) >> 16);
}

XT_INLINE float xt_f16_to_float(XtF16 h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
    /* Shift exponent and mantissa into float position, then scale by 2^112 to fix the bias: subnormals come out right. */
    float scaled = xt_bits_float(magnitude << 13) * xt_bits_float(0x77800000u);
    uint32_t bits = magnitude >= 0x7c00u ? 0x7f800000u | (magnitude & 0x3ffu) << 13 : xt_float_bits(scaled);
    return xt_bits_float(bits | sign);
}
/* Round to nearest even, with subnormals, overflow to Inf, NaN kept quiet. */
XT_INLINE XtF16 xt_float_to_f16(float f) {
    uint32_t u = xt_float_bits(f), sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    uint32_t normal = (u + 0xfffu + ((u >> 13) & 1u) - 0x38000000u) >> 13;
    /* Below 2^-14: adding 0.5 makes the FPU round to a multiple of 2^-24, the subnormal step. */
    uint32_t subnormal = xt_float_bits(xt_bits_float(u) + 0.5f) - 0x3f000000u;
    uint32_t h = u > 0x7f800000u ? 0x7e00u : u >= 0x477ff000u ? 0x7c00u : u < 0x38800000u ? subnormal : normal;
    return (XtF16)(h | sign);
}

/* exp(x) to 1.2 ulp: x = n ln2 + r, |r| <= ln2 / 2, a degree-6 minimax polynomial in r, then 2^n through the exponent bits.
 * 0 below -87 (no subnormals: they are slow), Inf above 88.72, NaN stays NaN.
 * Written for the vectoriser: no rounding call, no conversion, and the clamp to [-87.4, 89] compares bit patterns: gcc makes min and
 * max of integers, but branches of a float clamp, which it then follows through the whole function. */
XT_INLINE float xt_expf(float x) {
    const float magic = 0x1.8p23f; /* adding it rounds to an integer and leaves that integer in the low bits */
    /* -87.4, compared as unsigned: negative floats come last and in reverse order. 89, compared as signed: they come first. */
    uint32_t u = xt_float_bits(x), lowest = 0xc2aecccdu;
    int32_t i = (int32_t)(u < lowest ? u : lowest), highest = 0x42b20000;
    float clamped = xt_bits_float((uint32_t)(i < highest ? i : highest));
    float shifted = clamped * 1.44269504088896341f + magic;
    float n = shifted - magic; /* -126 .. 128 */
    float r = clamped - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    float poly = 0.00138145f;
    poly = poly * r + 0.00836875f;
    poly = poly * r + 0.04166839f;
    poly = poly * r + 0.1666652f;
    poly = poly * r + 0.49999993f;
    poly = poly * r + 1.0f;
    poly = poly * r + 1.0f;
    /* 2^(n - 1), as 2^128 has no bit pattern; n = -126 gives the pattern of 0. */
    float half_scale = xt_bits_float((xt_float_bits(shifted) - xt_float_bits(magic) + 126u) << 23);
    float y = poly * half_scale * 2.0f;
    return x != x ? x : y;
}

/* The float dtypes of a kernel: `name_f32` and so on, chosen by dtype. Ops have already refused the others: for one that slipped
 * through this is NULL, which xt_parallel refuses to call. A kernel that calls the function itself asks xt_need_float first. */
#define XT_BY_FLOAT(dtype, name)            \
    ((dtype) == XT_FLOAT32    ? name##_f32  \
     : (dtype) == XT_FLOAT64  ? name##_f64  \
     : (dtype) == XT_BFLOAT16 ? name##_bf16 \
     : (dtype) == XT_FLOAT16  ? name##_f16  \
                              : NULL)

XT_INLINE XtStatus xt_need_float(const char *argument, XtDtype dtype) {
    if (xt_dtype_is_float(dtype)) return XT_OK;
    return xt_error(XT_TYPE_ERROR, "%s must have a floating point dtype, got %s", argument, xt_dtype_name(dtype));
}

/* *p, read once. Another thread may write to the tensors of a user while a kernel reads them: an integer that becomes an address is read
 * with this into a local, which is checked right before it is used, whatever was checked before. */
#define XT_READ_ONCE(p) __atomic_load_n((p), __ATOMIC_RELAXED)

/* Rows per piece of work so that a piece has about `target` elements: a function of the shape only. */
XT_INLINE int64_t xt_row_grain(int64_t cols, int64_t target) {
    int64_t grain = target / (cols > 0 ? cols : 1);
    return grain > 0 ? grain : 1;
}

#define XT_X(slot, Params) XtStatus xt_cpu_##slot(const Params *p);
XT_KERNELS(XT_X)
#undef XT_X
