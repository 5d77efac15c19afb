/* where.cu - out[i] = condition[i] ? a[i] : b[i], any strides.
 *
 * Only bits move, so a kernel per element size is enough. Plan: strided.cuh with three inputs. Bytes: all four once.
 */
#include "strided.cuh"

template <typename T> struct XtChoose {
    typedef T Out;
    typedef uint8_t A; /* condition */
    typedef T B;
    typedef T C;
    static constexpr int INPUTS = 3, WIDTH = XT_EACH_WIDTH<T>, GROUP = 4;
    template <int N> __device__ void run(T *out, const uint8_t *condition, const T *a, const T *b) const {
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = condition[j] ? a[j] : b[j];
    }
};

XtStatus xt_cuda_where(const XtWhere *p) {
    return xt_by_bits(xt_element_size(p->out.dtype), [&](auto zero) {
        return xt_each("where", XtChoose<decltype(zero)>(), {&p->out, &p->condition, &p->a, &p->b});
    });
}
