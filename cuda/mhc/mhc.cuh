/* mhc.cuh - what the kernels of hyper-connections share. Loops over the n streams run to a compile-time S >= n: S = 4 if n is 4,
 * else 8, the contract's most, with a test for each stream. */
#pragma once

#include "common/cuda.cuh"

static constexpr int XT_MHC_STREAMS = 8; /* of the contract */
static constexpr int XT_MHC_ROWS = 80;   /* n^2 + 2n of it */

/* Whether i is one of the n streams. */
template <int S> __device__ inline bool xt_mhc_stream(int i, int n) { return S == 4 || i < n; }

/* Lane l gets the sum of value[l] over the 32 lanes. Lanes keep half of the values at each step and hand the other half over. */
template <int STEP = 16, typename A> __device__ inline A xt_mhc_warp_sums(A (&value)[32]) {
    bool high = threadIdx.x & (unsigned)STEP;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        A keep = high ? value[i + STEP] : value[i], give = high ? value[i] : value[i + STEP];
        value[i] = keep + __shfl_xor_sync(0xffffffffu, give, STEP);
    }
    if constexpr (STEP > 1) return xt_mhc_warp_sums<STEP / 2>(value);
    else return value[0];
}

/* Threads, in whole warps, of a block that walks over `pieces` in as few equal rounds as `most` threads allow. */
inline unsigned xt_mhc_threads(int64_t pieces, int64_t most) {
    int64_t rounds = xt_divide_up(pieces, most);
    return (unsigned)(xt_divide_up(xt_divide_up(pieces, rounds), 32) * 32);
}

/* Calls f(width, streams) with constants in their types: pieces of 16 bytes and S = 4, of 16 bytes and S = 8, or single elements. */
template <int VALUE> struct XtMhcConstant {
    static constexpr int value = VALUE;
};
template <typename T, typename F> inline void xt_mhc_plan(bool aligned, int64_t streams, F f) {
    if (!aligned) f(XtMhcConstant<1>(), XtMhcConstant<XT_MHC_STREAMS>());
    else if (streams == 4) f(XtMhcConstant<XT_WIDTH<T>>(), XtMhcConstant<4>());
    else f(XtMhcConstant<XT_WIDTH<T>>(), XtMhcConstant<XT_MHC_STREAMS>());
}
