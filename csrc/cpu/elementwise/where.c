/* where.c - a choice per element. Only bits move, so element sizes are all that counts. */
#include "contract/elementwise.h"
#include "cpu/strided.h"

#define XT_WHERE(T)                                                                                  \
    XT_FAST static void where_##T(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)params;                                                                                \
        const uint8_t *condition = in[0];                                                            \
        const T *a = in[1], *b = in[2];                                                              \
        T *to = out;                                                                                 \
        _Pragma("omp simd") for (int64_t i = 0; i < n; i++) {                                        \
            T yes = a[i], no = b[i];                                                                 \
            to[i] = condition[i] ? yes : no;                                                         \
        }                                                                                            \
    }
XT_WHERE(uint8_t)
XT_WHERE(uint16_t)
XT_WHERE(uint32_t)
XT_WHERE(uint64_t)
#undef XT_WHERE

XtStatus xt_cpu_where(const XtWhere *p) {
    size_t size = xt_dtype_size(p->out.dtype);
    XtDenseFn fn = size == 1 ? where_uint8_t : size == 2 ? where_uint16_t : size == 4 ? where_uint32_t : where_uint64_t;
    return xt_each(fn, NULL, false, 4, (const XtView *const[]){&p->out, &p->condition, &p->a, &p->b});
}
