/* divide.cuh - division by multiplication: 3 instructions instead of some 20 (32 bits) or 70 (64 bits). */
#pragma once

#include <stdint.h>

/* n / divisor = (n * magic / 2^32 + n) >> shift for n < 2^31 (Granlund & Montgomery 1994). */
struct XtDivider {
    uint32_t divisor, magic, shift;
};

inline XtDivider xt_divider(uint32_t divisor) {
    uint32_t shift = 0;
    while (shift < 31 && (1u << shift) < divisor) shift++;
    uint64_t magic = ((uint64_t)1 << 32) * (((uint64_t)1 << shift) - divisor) / divisor + 1;
    return {divisor, (uint32_t)magic, shift};
}

__device__ inline uint32_t xt_quotient(uint32_t n, XtDivider by) { return (__umulhi(n, by.magic) + n) >> by.shift; }
