/* splitmix.h - a 64-bit number with all its bits mixed, for checksums of every device. C and CUDA.
 *
 * The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Its shifts and
 * factors are variant 13 of Stafford's "Better bit mixing", 2011, as in Vigna's program at prng.di.unimi.it. Each step can be undone, so
 * different numbers stay different; a changed bit changes each bit of the result in about half of all cases.
 */
#pragma once

#include "xtrain.h"

#ifdef __CUDACC__
#define XT_SPLITMIX_FN static __host__ __device__ __forceinline__
#else
#define XT_SPLITMIX_FN static inline __attribute__((always_inline)) /* into functions that are compiled for several CPUs */
#endif

/* 2^64 divided by the golden ratio, made odd: multiples of it lie far apart. */
#define XT_SPLITMIX_STEP UINT64_C(0x9e3779b97f4a7c15)

XT_SPLITMIX_FN uint64_t xt_splitmix(uint64_t z) {
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}
