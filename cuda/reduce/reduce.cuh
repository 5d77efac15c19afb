/* reduce.cuh - loops over views of any strides, for the kernels that read a whole tensor: reduce, stats, compare. */
#pragma once

#include "common/cuda.cuh"

/* Dimensions shared by one or two views, from xt_merge_dims. Strides in elements; those of a missing second view are 0. */
struct XtWalk {
    int ndim;
    int64_t numel;
    int64_t shape[XT_MAX_DIMS];
    int64_t strides[2][XT_MAX_DIMS];
};

/* The walk over dimensions [first, first + ndim) of views of equal shape there; b may be NULL; `sort`: see xt_merge_dims. */
inline void xt_walk_init(XtWalk *w, const XtView *a, const XtView *b, int first, int ndim, bool sort) {
    const XtView *views[2] = {a, b};
    *w = {};
    w->ndim = xt_merge_dims(b ? 2 : 1, views, first, ndim, sort, &w->numel, w->shape, w->strides);
}

/* Sizes and strides of the innermost dimension; a walk of one element has size 1. */
inline int64_t xt_walk_row(const XtWalk *w) { return w->ndim > 0 ? w->shape[w->ndim - 1] : 1; }
inline int64_t xt_walk_step(const XtWalk *w, int view) { return w->ndim > 0 ? w->strides[view][w->ndim - 1] : 0; }

/* Whether all dimensions of a view but the innermost start at a multiple of `width` elements. */
inline bool xt_walk_outer_multiple(const XtWalk *w, int view, int64_t width) {
    for (int d = 0; d + 1 < w->ndim; d++)
        if (w->strides[view][d] % width != 0) return false;
    return true;
}

/* Offsets of the element with row-major number `index`. Not inlined, because kernels unroll loops around it. A 64-bit division
 * costs several times a 32-bit one. */
static __device__ __noinline__ longlong2 xt_walk_offsets(const XtWalk *w, int64_t index) {
    longlong2 at = {0, 0};
    int d = w->ndim - 1;
    if (w->numel <= 0xffffffffll) {
        unsigned left = (unsigned)index;
        for (; d > 0; d--) {
            unsigned size = (unsigned)w->shape[d], rest = left / size, here = left - rest * size;
            at.x += here * w->strides[0][d];
            at.y += here * w->strides[1][d];
            left = rest;
        }
        index = left;
    } else {
        for (; d > 0; d--) {
            int64_t rest = index / w->shape[d], here = index - rest * w->shape[d];
            at.x += here * w->strides[0][d];
            at.y += here * w->strides[1][d];
            index = rest;
        }
    }
    if (d == 0) {
        at.x += index * w->strides[0][0];
        at.y += index * w->strides[1][0];
    }
    return at;
}
template <int VIEW> __device__ inline int64_t xt_walk_offset(const XtWalk &w, int64_t index) {
    if (w.ndim == 1) return index * w.strides[VIEW][0];
    longlong2 at = xt_walk_offsets(&w, index);
    return VIEW == 0 ? at.x : at.y;
}

/* ---- elements by class ------------------------------------------------------------------------------------------------------- */

/* A kernel is compiled for a class C of dtypes; `format` says at run time which dtype it is:
 *
 *     float, double   themselves
 *     uint16_t        bfloat16 (format 0), float16 (1)
 *     int64_t         every integer dtype; format: bytes of an element. bool is stored as bytes 0 and 1
 *
 * Values are compared in XtClassValue<C>. XT_GROUP: elements in 16 bytes, or four integers; they are read at once where aligned. */
template <typename C> constexpr bool XT_IS_INTEGER = false;
template <> inline constexpr bool XT_IS_INTEGER<int64_t> = true;
template <typename C> constexpr int XT_GROUP = XT_IS_INTEGER<C> ? 4 : 16 / (int)sizeof(C);

template <typename C> struct XtClass {
    typedef C Value;
};
template <> struct XtClass<uint16_t> {
    typedef float Value;
};
template <typename C> using XtClassValue = typename XtClass<C>::Value;

template <typename C> __device__ inline const char *xt_element(const void *x, int64_t offset, int format) {
    return (const char *)x + offset * (XT_IS_INTEGER<C> ? format : (int)sizeof(C));
}
/* Reads N neighbours, N = 1 or XT_GROUP<C>. A group is aligned to its size, or to 16 bytes. */
template <typename C, int N> __device__ inline XtPiece<C, N> xt_fetch(const char *x, int format) {
    XtPiece<C, N> v;
    if constexpr (!XT_IS_INTEGER<C>) {
        v = xt_read<C, N>((const C *)x);
    } else if constexpr (N == 1) {
        if (format == 8) v = xt_read<C, N>((const C *)x);
        else if (format == 4) v.word[0] = *(const uint32_t *)x;
        else v.word[0] = *(const uint8_t *)x;
    } else {
        static_assert(N == 4, "a group");
        if (format == 1) {
            v.word[0] = *(const uint32_t *)x;
        } else {
            const uint4 q = *(const uint4 *)x;
            v.word[0] = q.x, v.word[1] = q.y, v.word[2] = q.z, v.word[3] = q.w;
        }
        if (format == 8) {
            const uint4 q = *(const uint4 *)(x + 16);
            v.word[4] = q.x, v.word[5] = q.y, v.word[6] = q.z, v.word[7] = q.w;
        }
    }
    return v;
}
/* Element e of v; the compiler knows e. Unpack an element where it is used: unpacked 16-bit elements take a register each. */
template <typename C, int N> __device__ inline XtClassValue<C> xt_unpack(const XtPiece<C, N> &v, int e, int format) {
    if constexpr (XT_IS_INTEGER<C>) {
        if (format == 8) return (int64_t)((uint64_t)v.word[2 * e + 1] << 32 | v.word[2 * e]);
        if (format == 4) return (int32_t)v.word[e];
        return v.word[0] >> 8 * e & 0xffu;
    } else if constexpr (sizeof(C) == 8) {
        return __longlong_as_double((long long)((uint64_t)v.word[2 * e + 1] << 32 | v.word[2 * e]));
    } else if constexpr (sizeof(C) == 4) {
        return __uint_as_float(v.word[e]);
    } else {
        const uint32_t bits = v.word[e / 2] >> 16 * (e % 2);
        return format ? __half2float(__ushort_as_half((unsigned short)bits)) : __uint_as_float(bits << 16);
    }
}

/* Calls f(C(), format) for the class of a dtype. */
template <typename F> inline XtStatus xt_by_class(XtDtype dtype, F f) {
    switch (dtype) {
    case XT_FLOAT32: return f(float(), 0);
    case XT_FLOAT64: return f(double(), 0);
    case XT_BFLOAT16: return f(uint16_t(), 0);
    case XT_FLOAT16: return f(uint16_t(), 1);
    case XT_INT32: return f(int64_t(), 4);
    case XT_INT64: return f(int64_t(), 8);
    default: return f(int64_t(), 1);
    }
}
