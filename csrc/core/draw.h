/* draw.h - what drawing tokens from logits is made of: weights in whole numbers, keys that sort, a row's random number. C and CUDA.
 *
 * Probabilities are integers: weight = floor(2^40 e^((x - max) / temperature)), 2^40 for the most likely. Sums of integers do not depend
 * on the order of addition, and the exponential is written in operations that IEEE 754 rounds in one way only (philox.h), so every
 * device and every plan draws the same token. What is less likely than the most likely one by 2^-41 has weight 0 and is never drawn.
 */
#pragma once

#include "core/philox.h"

enum {
    XT_WEIGHT_BITS = 40,
    XT_DRAW_MOST = 1 << 22, /* tokens of a row: the sum of their weights stays below 2^63 */
};

/* 1 / (temperature ln 2), as the factor of xt_draw_weight. */
static inline float xt_draw_factor(double temperature) {
    double factor = 1.0 / (temperature * 0.693147180559945309);
    return factor < 3e38 ? (float)factor : 3e38f;
}

/* floor(2^40 2^(difference * factor)), difference = x - max <= 0, to a part in 2^21 of it (2^24 close to the maximum).
 * 2^f = 1 + f Q(f) on [0, 1), Q fitted for least relative error. */
XT_PHILOX_FN uint64_t xt_draw_weight(float difference, float factor) {
    float whole = floorf(XT_MUL(difference, factor));
    whole = whole > -64.0f ? whole : -64.0f; /* -Inf, too */
    float f = XT_FMA(difference, factor, -whole);
    f = f < 2.0f ? f : 2.0f;
    f = f > 0.0f ? f : 0.0f;
    float q = 0.000216129149f;
    q = XT_FMA(q, f, 0.00124678458f);
    q = XT_FMA(q, f, 0.00967545155f);
    q = XT_FMA(q, f, 0.0554852821f);
    q = XT_FMA(q, f, 0.240229309f);
    q = XT_FMA(q, f, 0.693147063f);
    float power = XT_MUL(XT_FMA(q, f, 1.0f), 8388608.0f); /* 2^23 to 2^25 */
    uint32_t places = (uint32_t)(int32_t)-whole;          /* 0 to 64 */
    uint64_t weight = (uint64_t)(uint32_t)(int32_t)power << (XT_WEIGHT_BITS - 23);
    return places < 48u ? weight >> places : 0;
}

/* An integer that sorts as x does, for x that is no NaN; both zeros have one. */
XT_PHILOX_FN uint32_t xt_sort_key_f32(float x) {
    uint32_t bits;
    x = x == 0.0f ? 0.0f : x;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
XT_PHILOX_FN uint64_t xt_sort_key_f64(double x) {
    uint64_t bits;
    x = x == 0.0 ? 0.0 : x;
    memcpy(&bits, &x, sizeof bits);
    return bits >> 63 ? ~bits : bits | (uint64_t)1 << 63;
}

/* The high 64 bits of a b. */
XT_PHILOX_FN uint64_t xt_multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
    return __umul64hi(a, b);
#else
    return (uint64_t)((unsigned __int128)a * b >> 64);
#endif
}

/* The number in [0, total) that row `row` draws: words 0 and 1 of block `row` of the generator's stream, as a fraction of 2^64. */
XT_PHILOX_FN uint64_t xt_draw_number(XtPhilox philox, uint64_t row, uint64_t total) {
    XtWords words = xt_philox_block(philox, row);
    return xt_multiply_high((uint64_t)words.w[1] << 32 | words.w[0], total);
}

/* Tokens in the order of their logits belong to the nucleus while the weight before them is below this: ceil(top_p total). */
XT_PHILOX_FN uint64_t xt_draw_limit(double top_p, uint64_t total) {
    if (!(top_p < 1.0)) return total;
    double limit = ceil(top_p * (double)total);
    uint64_t whole = (uint64_t)limit;
    return whole < 1 ? 1 : whole < total ? whole : total;
}
