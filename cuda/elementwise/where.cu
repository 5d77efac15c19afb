/* where.cu - out[i] = condition[i] ? a[i] : b[i], any strides.
 *
 * Only bits move, so one kernel per element size is enough. Plan: strided.cuh with three inputs. Bytes moved: all four once.
 */
#include "common/strided.cuh"
#include "contract/elementwise.h"

template <typename T> struct XtChoose {
    typedef T Out;
    typedef uint8_t A; /* condition */
    typedef T B;
    typedef T C;
    static constexpr int INPUTS = 3, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    template <int N>
    __device__ XtPiece<T, N> run(XtPiece<uint8_t, N> from_condition, XtPiece<T, N> from_a, XtPiece<T, N> from_b) const {
        XtVector<uint8_t, N> condition = xt_elements(from_condition);
        XtVector<T, N> a = xt_elements(from_a), b = xt_elements(from_b);
#pragma unroll
        for (int j = 0; j < N; j++) a.at[j] = condition.at[j] ? a.at[j] : b.at[j];
        return xt_piece(a);
    }
};

XtStatus xt_cuda_where(const XtWhere *p) {
    return xt_by_bits((int64_t)xt_dtype_size(p->out.dtype), [&](auto zero) {
        return xt_each("where", XtChoose<decltype(zero)>(), {&p->out, &p->condition, &p->a, &p->b});
    });
}
