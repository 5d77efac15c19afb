/* fill.cu - dst[i] = value, any strides.
 *
 * The host makes the bits of the value, so one kernel per element size is enough. Plan: strided.cuh without inputs. Bytes moved:
 * dst once.
 */
#include "common/strided.cuh"
#include "contract/elementwise.h"

#include <string.h>

template <typename T> struct XtFillBits {
    typedef T Out;
    typedef uint8_t A;
    typedef uint8_t B;
    typedef uint8_t C;
    static constexpr int INPUTS = 0, WIDTH = XT_WIDTH<T>, GROUP = 4;
    T value;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<uint8_t, N>, XtPiece<uint8_t, N>, XtPiece<uint8_t, N>) const {
        return xt_all<T, N>(value);
    }
};

XtStatus xt_cuda_fill(const XtFill *p) {
    uint64_t bits = 0;
    xt_by_dtype(p->dst.dtype, [&](auto zero) {
        auto value = xt_scalar_as<decltype(zero)>(p->value);
        memcpy(&bits, &value, sizeof value);
        return XT_OK;
    });
    return xt_by_bits((int64_t)xt_dtype_size(p->dst.dtype), [&](auto zero) {
        using T = decltype(zero);
        XtFillBits<T> f;
        memcpy(&f.value, &bits, sizeof f.value); /* little-endian: the low bytes */
        return xt_each("fill", f, {&p->dst});
    });
}
