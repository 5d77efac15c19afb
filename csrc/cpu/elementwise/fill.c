/* fill.c - one value everywhere. */
#include "contract/elementwise.h"
#include "cpu/strided.h"

#define XT_FILL(T)                                                                                  \
    XT_FAST static void fill_##T(void *out, const void *const *in, int64_t n, const void *params) { \
        (void)in;                                                                                   \
        T value, *to = out;                                                                         \
        memcpy(&value, params, sizeof value);                                                       \
        for (int64_t i = 0; i < n; i++) to[i] = value;                                              \
    }
XT_FILL(uint8_t)
XT_FILL(uint16_t)
XT_FILL(uint32_t)
XT_FILL(uint64_t)
#undef XT_FILL

XtStatus xt_cpu_fill(const XtFill *p) {
    _Alignas(8) char value[8];
    if (p->value.is_int) xt_convert(value, p->dst.dtype, &p->value.i, XT_INT64, 1);
    else xt_convert(value, p->dst.dtype, &p->value.d, XT_FLOAT64, 1);
    size_t size = xt_dtype_size(p->dst.dtype);
    XtDenseFn fn = size == 1 ? fill_uint8_t : size == 2 ? fill_uint16_t : size == 4 ? fill_uint32_t : fill_uint64_t;
    return xt_each(fn, value, false, 1, (const XtView *const[]){&p->dst});
}
