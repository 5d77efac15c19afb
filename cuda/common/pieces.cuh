/* pieces.cuh - dtypes on the device, and pieces: the elements that one memory access reads or writes. */
#pragma once

#include "xtrain.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* ---- dtypes ---------------------------------------------------------------------------------------------------------------- */

typedef __nv_bfloat16 XtBf16;
typedef __half XtF16;

/* The dtype in which T is computed and summed (ACC in kernels.h). */
template <typename T> struct XtAccumulator {
    typedef float type;
};
template <> struct XtAccumulator<double> {
    typedef double type;
};
template <typename T> using XtAcc = typename XtAccumulator<T>::type;

/* A stored element as ACC, and back with rounding to nearest even. */
__host__ __device__ inline float xt_load(float x) { return x; }
__host__ __device__ inline double xt_load(double x) { return x; }
__host__ __device__ inline float xt_load(XtBf16 x) { return __bfloat162float(x); }
__host__ __device__ inline float xt_load(XtF16 x) { return __half2float(x); }
template <typename T> __host__ __device__ inline T xt_store(XtAcc<T> x);
template <> __host__ __device__ inline float xt_store<float>(float x) { return x; }
template <> __host__ __device__ inline double xt_store<double>(double x) { return x; }
template <> __host__ __device__ inline XtBf16 xt_store<XtBf16>(float x) { return __float2bfloat16_rn(x); }
template <> __host__ __device__ inline XtF16 xt_store<XtF16>(float x) { return __float2half_rn(x); }

/* exp as precise as the rounding to T can show. 16-bit types use __expf: its error of 2 + 1.2 |x| ulp of float32 is at most
 * 1.3e-5 of the value, a twentieth of float16's rounding. 0, Inf and NaN come out as from expf. */
template <typename T> __device__ inline XtAcc<T> xt_exp_for(XtAcc<T> x) {
    if constexpr (sizeof(T) == 2) return __expf(x);
    else return exp(x);
}

/* Calls f(T()) for the C++ type of a float dtype. Ops have already rejected the others: one that slipped through is an error. */
template <typename F> inline XtStatus xt_by_float(XtDtype dtype, F f) {
    switch (dtype) {
    case XT_FLOAT32: return f(float());
    case XT_FLOAT64: return f(double());
    case XT_BFLOAT16: return f(XtBf16());
    case XT_FLOAT16: return f(XtF16());
    default: return xt_error(XT_TYPE_ERROR, "its tensors must have a floating point dtype, got %s", xt_dtype_name(dtype));
    }
}

/* N elements side by side. */
template <typename T, int N> struct alignas(sizeof(T) * N) XtVector {
    T at[N];
};
/* The most elements of T that one access of 16 bytes takes. */
template <typename T> constexpr int XT_WIDTH = 16 / (int)sizeof(T);

/* Whether rows of `cols` elements, `ld` apart, can be read 16 bytes at a time from each of these pointers. */
template <typename T> inline bool xt_aligned(int64_t cols, int64_t ld) { return cols % XT_WIDTH<T> == 0 && ld % XT_WIDTH<T> == 0; }
template <typename T, typename... Pointers> inline bool xt_aligned(int64_t cols, int64_t ld, const void *first, Pointers... rest) {
    return (uintptr_t)first % 16 == 0 && xt_aligned<T>(cols, ld, rest...);
}

/* ---- pieces: elements that are read or written at once ---------------------------------------------------------------------- */

/* N elements as they lie in memory, in whole registers. An XtVector is for computing. The compiler (nvcc 13.0) may store an
 * XtVector element by element, and may spend a register on each 16-bit element of one that was loaded. */
template <typename T, int N> struct XtPiece {
    static constexpr int BYTES = (int)sizeof(T) * N;
    uint32_t word[(BYTES + 3) / 4];
};

/* One access of 1, 2, 4, 8 or 16 bytes; p is aligned to its size. */
template <typename T, int N> __device__ inline XtPiece<T, N> xt_read(const T *p) {
    constexpr int BYTES = XtPiece<T, N>::BYTES;
    XtPiece<T, N> piece;
    if constexpr (BYTES == 16) {
        uint4 q = *(const uint4 *)p;
        piece.word[0] = q.x, piece.word[1] = q.y, piece.word[2] = q.z, piece.word[3] = q.w;
    } else if constexpr (BYTES == 8) {
        uint2 q = *(const uint2 *)p;
        piece.word[0] = q.x, piece.word[1] = q.y;
    } else if constexpr (BYTES == 4) piece.word[0] = *(const uint32_t *)p;
    else if constexpr (BYTES == 2) piece.word[0] = *(const uint16_t *)p;
    else {
        static_assert(BYTES == 1, "1, 2, 4, 8 or 16 bytes");
        piece.word[0] = *(const uint8_t *)p;
    }
    return piece;
}
/* __stwb is a plain store that the compiler does not split. */
template <typename T, int N> __device__ inline void xt_write(T *p, const XtPiece<T, N> &piece) {
    constexpr int BYTES = XtPiece<T, N>::BYTES;
    if constexpr (BYTES == 16) __stwb((uint4 *)p, make_uint4(piece.word[0], piece.word[1], piece.word[2], piece.word[3]));
    else if constexpr (BYTES == 8) __stwb((uint2 *)p, make_uint2(piece.word[0], piece.word[1]));
    else if constexpr (BYTES == 4) *(uint32_t *)p = piece.word[0];
    else if constexpr (BYTES == 2) *(uint16_t *)p = (uint16_t)piece.word[0];
    else {
        static_assert(BYTES == 1, "1, 2, 4, 8 or 16 bytes");
        *(uint8_t *)p = (uint8_t)piece.word[0];
    }
}

/* Two neighbours in one word, the first in the low half, and the same bits as the pair type of CUDA's functions. */
__device__ inline __nv_bfloat162 xt_pair(uint32_t word, XtBf16) {
    __nv_bfloat162 pair;
    memcpy(&pair, &word, sizeof pair);
    return pair;
}
__device__ inline __half2 xt_pair(uint32_t word, XtF16) {
    __half2 pair;
    memcpy(&pair, &word, sizeof pair);
    return pair;
}
template <typename Pair> __device__ inline uint32_t xt_word(Pair pair) {
    uint32_t word;
    memcpy(&word, &pair, sizeof word);
    return word;
}
/* Widening takes one instruction an element, rounding one for both. */
__device__ inline float2 xt_load_two(uint32_t word, XtBf16) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
__device__ inline float2 xt_load_two(uint32_t word, XtF16) { return __half22float2(xt_pair(word, XtF16())); }
__device__ inline __nv_bfloat162 xt_store_two(float low, float high, XtBf16) { return __floats2bfloat162_rn(low, high); }
__device__ inline __half2 xt_store_two(float low, float high, XtF16) { return __floats2half2_rn(low, high); }

/* From a piece to its elements and back, for any type. */
template <typename T, int N> __device__ inline XtVector<T, N> xt_elements(const XtPiece<T, N> &piece) {
    XtVector<T, N> v;
    memcpy(&v, piece.word, sizeof(T) * N);
    return v;
}
template <typename T, int N> __device__ inline XtPiece<T, N> xt_piece(const XtVector<T, N> &v) {
    XtPiece<T, N> piece;
    if constexpr (sizeof(T) * N < sizeof(uint32_t)) piece.word[0] = 0;
    memcpy(piece.word, &v, sizeof(T) * N);
    return piece;
}
/* From a piece of a float dtype to elements in ACC, and back with rounding to nearest even. */
template <typename T, int N> __device__ inline XtVector<XtAcc<T>, N> xt_load(const XtPiece<T, N> &piece) {
    XtVector<XtAcc<T>, N> to;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            float2 pair = xt_load_two(piece.word[j], T());
            to.at[2 * j] = pair.x;
            to.at[2 * j + 1] = pair.y;
        }
    } else {
        XtVector<T, N> from = xt_elements(piece);
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = xt_load(from.at[j]);
    }
    return to;
}
template <typename T, int N> __device__ inline XtPiece<T, N> xt_store(const XtVector<XtAcc<T>, N> &from) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        XtPiece<T, N> to;
#pragma unroll
        for (int j = 0; j < N / 2; j++) { /* memcpy, not xt_word: fewer instructions in the backward of rms_norm (nvcc 13.0) */
            auto pair = xt_store_two(from.at[2 * j], from.at[2 * j + 1], T());
            memcpy(&to.word[j], &pair, sizeof pair);
        }
        return to;
    } else {
        XtVector<T, N> to;
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = xt_store<T>(from.at[j]);
        return xt_piece(to);
    }
}
/* A piece of N equal elements. */
template <typename T, int N> __device__ inline XtPiece<T, N> xt_all(T value) {
    XtVector<T, N> v;
#pragma unroll
    for (int j = 0; j < N; j++) v.at[j] = value;
    return xt_piece(v);
}
