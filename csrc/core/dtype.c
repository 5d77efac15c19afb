/* dtype.c - element types, devices and scalars. */
#include "xtrain.h"

#include <stdio.h>

static const struct {
    const char *name;
    size_t size;
    XtDtype accumulator;
} dtypes[XT_DTYPE_COUNT] = {
    [XT_FLOAT32] = {"float32", 4, XT_FLOAT32},   [XT_FLOAT64] = {"float64", 8, XT_FLOAT64},
    [XT_BFLOAT16] = {"bfloat16", 2, XT_FLOAT32}, [XT_FLOAT16] = {"float16", 2, XT_FLOAT32},
    [XT_INT32] = {"int32", 4, XT_INT64},         [XT_INT64] = {"int64", 8, XT_INT64},
    [XT_UINT8] = {"uint8", 1, XT_INT64},         [XT_BOOL] = {"bool", 1, XT_INT64},
};

size_t xt_dtype_size(XtDtype dtype) { return dtypes[dtype].size; }
const char *xt_dtype_name(XtDtype dtype) { return dtypes[dtype].name; }
bool xt_dtype_is_float(XtDtype dtype) { return dtype <= XT_FLOAT16; }
XtDtype xt_dtype_accumulator(XtDtype dtype) { return dtypes[dtype].accumulator; }

XtDtype xt_dtype_promote(XtDtype a, XtDtype b) {
    if (a == b) return a;
    bool fa = xt_dtype_is_float(a), fb = xt_dtype_is_float(b);
    if (fa && !fb) return a;
    if (fb && !fa) return b;
    if (fa && fb) {
        if (a == XT_FLOAT64 || b == XT_FLOAT64) return XT_FLOAT64;
        return XT_FLOAT32; /* float32 with a 16-bit float, or bfloat16 with float16 */
    }
    /* bool < uint8 < int32 < int64 */
    static const int rank[XT_DTYPE_COUNT] = {[XT_BOOL] = 0, [XT_UINT8] = 1, [XT_INT32] = 2, [XT_INT64] = 3};
    return rank[a] > rank[b] ? a : b;
}

bool xt_device_equal(XtDevice a, XtDevice b) { return a.type == b.type && a.index == b.index; }

const char *xt_device_name(XtDevice device) {
    if (device.type == XT_CPU) return "cpu";
    static _Thread_local char names[4][16];
    static _Thread_local unsigned turn;
    char *name = names[turn++ % 4];
    snprintf(name, sizeof names[0], "%s:%u", device.type == XT_CUDA ? "cuda" : "meta", (unsigned)device.index);
    return name;
}

XtScalar xt_scalar_int(int64_t value) { return (XtScalar){.is_int = true, .i = value, .d = (double)value}; }
XtScalar xt_scalar_bool(bool value) { return (XtScalar){.is_int = true, .is_bool = true, .i = value, .d = value}; }
XtScalar xt_scalar_float(double value) { return (XtScalar){.d = value}; }
