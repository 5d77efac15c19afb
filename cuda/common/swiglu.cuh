/* swiglu.cuh - the formulas of swiglu.cu for one element: kernels that compute them in the epilogue of a product get the same bits. */
#pragma once

#include "arch/sm80.cuh"
#include "common/pieces.cuh"

/* 1 / (1 + exp(-g)), to the precision that T can show. For 16-bit types the errors of both approximations together, |g| 2^-23 + 2^-22 + 1
 * ulp of float32, are a twentieth of float16's rounding. -g log2(e) from 128 on gives exp2 = Inf and 0; a sum above 2^126 gives 0, where
 * the sigmoid is below 1.2e-38. */
template <typename T> __device__ inline XtAcc<T> xt_sigmoid(XtAcc<T> g) {
    if constexpr (sizeof(T) == 2) return xt_reciprocal_approx(1 + xt_exp2_approx(g * -1.4426950408889634f));
    else return 1 / (1 + exp(-g));
}
/* silu(g) u */
template <typename T> __device__ inline XtAcc<T> xt_swiglu(XtAcc<T> g, XtAcc<T> u) {
    if constexpr (sizeof(T) == 2) return g * xt_sigmoid<T>(g) * u;
    else return g / (1 + exp(-g)) * u;
}
/* dgate and dup of d */
template <typename T> __device__ inline void xt_swiglu_bwd(XtAcc<T> d, XtAcc<T> g, XtAcc<T> u, XtAcc<T> &dgate, XtAcc<T> &dup) {
    XtAcc<T> s = xt_sigmoid<T>(g), ds = d * s;
    dgate = ds * u * (1 + g * (1 - s));
    dup = ds * g;
}
