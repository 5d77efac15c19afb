/* unary.cu - out = f(x) and dx = dy f'(x), any strides; every f and f' is one line in unary_math.cuh.
 *
 * Plan: strided.cuh with one or two inputs. The operation is chosen in the kernel, by a switch that all threads take alike; the
 * loop over a thread's elements is inside each case and not unrolled, for 16 unrolled functions would be 100 KB of code.
 * Registers cannot be indexed at run time, so the loop works on the first four bytes and moves the others up.
 * Bytes moved: each operand once. 16-bit floats compute in float.
 */
#include "strided.cuh"
#include "unary_math.cuh"

#include <string.h>

/* out[j] = f(a[j], b[j]), one element or a pair of 16-bit elements at a time; all [N]. */
template <int N, typename T, typename G> static __device__ __forceinline__ void in_steps(T *out, const T *a, const T *b, G f) {
    constexpr int STEP = sizeof(T) == 2 ? 2 : 1, STEPS = N / STEP;
    typedef XtVector<T, STEP> Word;
    Word from_a[STEPS], from_b[STEPS], to[STEPS];
    memcpy(from_a, a, sizeof from_a);
    memcpy(from_b, b, sizeof from_b);
    memcpy(to, a, sizeof to);
#pragma unroll 1
    for (int s = 0; s < STEPS; s++) {
        Word made;
#pragma unroll
        for (int j = 0; j < STEP; j++) made.at[j] = xt_store<T>(f(xt_load(from_a[0].at[j]), xt_load(from_b[0].at[j])));
#pragma unroll
        for (int k = 0; k + 1 < STEPS; k++) {
            from_a[k] = from_a[k + 1];
            from_b[k] = from_b[k + 1];
            to[k] = to[k + 1];
        }
        to[STEPS - 1] = made;
    }
    memcpy(out, to, sizeof to);
}

template <typename T> struct XtUnaryFn {
    typedef T Out;
    typedef T A; /* x */
    typedef uint8_t B;
    typedef uint8_t C;
    static constexpr int INPUTS = 1, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    XtUnaryOp op;
    template <int N> __device__ void run(T *out, const T *xs, const uint8_t *, const uint8_t *) const {
        using W = XtAcc<T>;
        switch (op) {
#define XT_X(name, ...)                              \
    case XT_##name:                                  \
        return in_steps<N>(out, xs, xs, [](W x, W) { \
            W y;                                     \
            __VA_ARGS__;                             \
            return y;                                \
        });
            XT_UNARY_TABLE(XT_X)
#undef XT_X
        default: return;
        }
    }
};

template <typename T> struct XtUnaryBwdFn {
    typedef T Out;
    typedef T A; /* dy */
    typedef T B; /* x */
    typedef uint8_t C;
    static constexpr int INPUTS = 2, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    XtUnaryOp op;
    template <int N> __device__ void run(T *out, const T *dys, const T *xs, const uint8_t *) const {
        using W = XtAcc<T>;
        switch (op) {
#define XT_X(name, ...)                                  \
    case XT_##name:                                      \
        return in_steps<N>(out, dys, xs, [](W dy, W x) { \
            W dx = x;                                    \
            __VA_ARGS__;                                 \
            return dx;                                   \
        });
            XT_UNARY_BWD_TABLE(XT_X)
#undef XT_X
        default: return;
        }
    }
};

/* NEG and ABS of an integer dtype by its unsigned twin U; the smallest integer is its own negative. */
template <typename T, typename U> struct XtIntegerUnary {
    typedef T Out;
    typedef T A;
    typedef uint8_t B;
    typedef uint8_t C;
    static constexpr int INPUTS = 1, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    bool negate_all;
    template <int N> __device__ void run(T *out, const T *x, const uint8_t *, const uint8_t *) const {
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = negate_all || (int64_t)x[j] < 0 ? (T)(U)(U(0) - (U)x[j]) : x[j];
    }
};

XtStatus xt_cuda_unary(const XtUnary *p) {
    bool negate = p->op == XT_NEG;
    switch (p->x.dtype) {
    case XT_INT32: return xt_each("unary", XtIntegerUnary<int32_t, uint32_t>{negate}, {&p->out, &p->x});
    case XT_INT64: return xt_each("unary", XtIntegerUnary<int64_t, uint64_t>{negate}, {&p->out, &p->x});
    case XT_UINT8: return xt_each("unary", XtIntegerUnary<uint8_t, uint8_t>{negate}, {&p->out, &p->x});
    case XT_BOOL: return xt_each("unary", XtIntegerUnary<uint8_t, uint8_t>{false}, {&p->out, &p->x});
    default:
        return xt_by_float(p->x.dtype,
                           [&](auto zero) { return xt_each("unary", XtUnaryFn<decltype(zero)>{p->op}, {&p->out, &p->x}); });
    }
}

XtStatus xt_cuda_unary_bwd(const XtUnaryBwd *p) {
    return xt_by_float(
        p->x.dtype, [&](auto zero) { return xt_each("unary_bwd", XtUnaryBwdFn<decltype(zero)>{p->op}, {&p->dx, &p->dy, &p->x}); });
}
