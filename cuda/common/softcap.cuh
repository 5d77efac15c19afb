/* softcap.cuh - tanh for softcaps of logits and scores: c tanh(x / c). */
#pragma once

#include "arch/sm80.cuh"

/* 1 - 2 / (2^(2 x log2 e) + 1), off by 2^-22 at most: two instructions of the unit for functions. tanh.approx is one, and off by 2^-11 of
 * the result, which times a softcap of 50 is more than bfloat16 rounds away. */
__device__ inline float xt_tanh_approx(float x) {
    return fmaf(-2.0f, xt_reciprocal_approx(xt_exp2_approx(x * 2.8853900817779268f) + 1), 1.0f);
}
