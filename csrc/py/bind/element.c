/* element.c - an element of a tensor as a Python number. */
#include "py/bind/bind.h"

XtTensor *py_on_host(XtTensor *tensor) {
    if (tensor->storage->device.type == XT_CPU) {
        xt_tensor_retain(tensor);
        return tensor;
    }
    XtArg args[2] = {py_arg_tensor(tensor), py_arg_device((XtDevice){.type = XT_CPU})};
    return py_call_plain(&xt_op_to_device, args, 2);
}

static double half_to_double(uint16_t bits) {
    uint64_t sign = (uint64_t)(bits >> 15) << 63, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent == 0) { /* zero and subnormals: fraction * 2^-24 */
        double value = (double)fraction * 0x1p-24;
        return sign ? -value : value;
    }
    uint64_t wide = sign | (exponent == 31 ? (uint64_t)2047 : exponent + 1008) << 52 | fraction << 42;
    double value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

PyObject *py_element(XtDtype dtype, const void *address) {
    union {
        float f32;
        double f64;
        uint16_t bits;
        uint32_t wide;
        int32_t i32;
        int64_t i64;
        uint8_t u8;
    } value = {0};
    memcpy(&value, address, xt_dtype_size(dtype));
    switch (dtype) {
    case XT_FLOAT32: return PyFloat_FromDouble((double)value.f32);
    case XT_FLOAT64: return PyFloat_FromDouble(value.f64);
    case XT_BFLOAT16: value.wide = (uint32_t)value.bits << 16; return PyFloat_FromDouble((double)value.f32);
    case XT_FLOAT16: return PyFloat_FromDouble(half_to_double(value.bits));
    case XT_INT32: return PyLong_FromLong(value.i32);
    case XT_INT64: return PyLong_FromLongLong(value.i64);
    case XT_UINT8: return PyLong_FromLong(value.u8);
    case XT_BOOL: return PyBool_FromLong(value.u8);
    case XT_DTYPE_COUNT: break;
    }
    PyErr_SetString(PyExc_SystemError, "unknown dtype");
    return NULL;
}

PyObject *py_item(const char *op, XtTensor *tensor) {
    if (xt_view_numel(&tensor->view) != 1) {
        PyErr_Format(PyExc_ValueError, "%s: tensor must have exactly one element, got shape %s", op,
                     xt_shape_text(tensor->ndim, tensor->shape));
        return NULL;
    }
    XtTensor *host = py_on_host(tensor);
    if (host == NULL) return NULL;
    PyObject *item = py_element(host->dtype, host->data);
    xt_tensor_release(host);
    return item;
}
