/* py.c - the module's state, and what every room needs: a tensor as an object, sizes as a tuple, NumPy's C API. */
#define XT_IMPORT_ARRAY
#include "py/numpy_api.h"

PyState *xt_py;

int py_numpy_init(void) {
    import_array1(-1);
    return 0;
}

PyObject *py_wrap_as(PyTypeObject *type, XtTensor *tensor) {
    if (tensor == NULL) return NULL;
    PyTensor *self = (PyTensor *)type->tp_alloc(type, 0);
    if (self == NULL) xt_tensor_release(tensor);
    else self->tensor = tensor;
    return (PyObject *)self;
}

PyObject *py_wrap(XtTensor *tensor) { return py_wrap_as(xt_py->tensor_type, tensor); }

PyObject *py_wrap_borrowed(XtTensor *tensor) {
    xt_tensor_retain(tensor);
    return py_wrap(tensor);
}

PyObject *py_wrap_tuple(XtTensor *const *tensors, int count) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; i < count && tuple != NULL; i++) {
        PyObject *item = py_wrap_borrowed(tensors[i]);
        if (item == NULL) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, item);
    }
    return tuple;
}

PyObject *py_shape_tuple(int ndim, const int64_t *values) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; i < ndim && tuple != NULL; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}
