/* numpy_in.c - xt.from_numpy: an array's memory as a tensor, without a copy, refusing what strides in elements cannot express. */
#include "py/convert/convert.h"

bool py_numpy_dtype(PyArrayObject *array, XtDtype *out) {
    int type = PyArray_TYPE(array);
    npy_intp size = PyArray_ITEMSIZE(array);
    switch (type) {
    case NPY_FLOAT: *out = XT_FLOAT32; return true;
    case NPY_DOUBLE: *out = XT_FLOAT64; return true;
    case NPY_HALF: *out = XT_FLOAT16; return true;
    case NPY_UBYTE: *out = XT_UINT8; return true;
    case NPY_BOOL: *out = XT_BOOL; return true;
    case NPY_INT:
    case NPY_LONG:
    case NPY_LONGLONG: *out = size == 4 ? XT_INT32 : XT_INT64; return size == 4 || size == 8;
    default: break;
    }
    /* ml_dtypes.bfloat16 is a user dtype: its number differs from process to process, its name does not. */
    if (!PyTypeNum_ISUSERDEF(type) || size != 2) return false;
    const char *name = PyArray_DESCR(array)->typeobj->tp_name, *dot = strrchr(name, '.');
    *out = XT_BFLOAT16;
    return strcmp(dot != NULL ? dot + 1 : name, "bfloat16") == 0;
}

/* Called when no tensor uses the memory any more. Any thread. */
static void release_array(XtStorage *storage) {
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)storage->owner);
    PyGILState_Release(gil);
}

PyObject *py_array_behind(const XtStorage *storage) { return storage->release == release_array ? storage->owner : NULL; }

/* Raises "op: array must <rule>". */
static int refuse_array(PyObject *type, const char *op, const char *rule) {
    PyErr_Format(type, "%s: array must %s", op, rule);
    return -1;
}

static int check_array(const char *op, PyArrayObject *array, XtDtype *dtype) {
    if (!PyArray_ISNOTSWAPPED(array))
        return refuse_array(PyExc_ValueError, op, "have native byte order; use xt.tensor(array), which copies");
    if (!py_numpy_dtype(array, dtype)) {
        PyErr_Format(PyExc_TypeError, "%s: array must be float32, float64, float16, bfloat16, int32, int64, uint8 or bool, got %S",
                     op, PyArray_DESCR(array));
        return -1;
    }
    if (!PyArray_ISWRITEABLE(array))
        return refuse_array(PyExc_ValueError, op, "be writable; pass array.copy() or use xt.tensor(array)");
    if (PyArray_NDIM(array) > XT_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: array must have at most %d dimensions, got %d", op, XT_MAX_DIMS, PyArray_NDIM(array));
        return -1;
    }
    return 0;
}

/* Fills shape and strides (in elements) of `view`, and the bytes from the first element to the end of the last. */
static int view_array(const char *op, PyArrayObject *array, XtView *view, size_t *nbytes) {
    npy_intp itemsize = PyArray_ITEMSIZE(array);
    int64_t span = itemsize;
    view->ndim = PyArray_NDIM(array);
    for (int i = 0; i < view->ndim; i++) view->shape[i] = PyArray_DIM(array, i);
    XtStatus status = xt_size_of(view->dtype, view->ndim, view->shape, NULL, nbytes);
    if (py_check(status) < 0) return -1;
    xt_view_set_contiguous(view); /* sizes 0 and 1 may have any strides in NumPy */
    if (*nbytes == 0) return 0;
    if ((uintptr_t)PyArray_DATA(array) % (uintptr_t)itemsize != 0)
        return refuse_array(PyExc_ValueError, op, "be aligned; pass array.copy() or use xt.tensor(array)");
    for (int i = 0; i < view->ndim; i++) {
        npy_intp stride = PyArray_STRIDE(array, i);
        if (view->shape[i] <= 1) continue;
        if (stride < 0)
            return refuse_array(PyExc_ValueError, op, "not have negative strides; pass array.copy() or use xt.tensor(array)");
        if (stride % itemsize != 0)
            return refuse_array(PyExc_ValueError, op, "have strides that are multiples of its itemsize; pass array.copy()");
        view->strides[i] = stride / itemsize;
        int64_t reach;
        if (__builtin_mul_overflow(view->shape[i] - 1, (int64_t)stride, &reach) || __builtin_add_overflow(span, reach, &span))
            return refuse_array(PyExc_ValueError, op, "span less than 2^63 bytes");
    }
    *nbytes = (size_t)span;
    return 0;
}

XtTensor *py_from_array(const char *op, PyObject *object) {
    PyArrayObject *array = (PyArrayObject *)object;
    XtStorage *storage = NULL;
    XtTensor *tensor = NULL;
    XtView view = {0};
    size_t nbytes;
    if (check_array(op, array, &view.dtype) < 0 || view_array(op, array, &view, &nbytes) < 0) return NULL;
    view.data = nbytes > 0 ? PyArray_DATA(array) : NULL;
    XtStatus status = xt_storage_wrap((XtDevice){.type = XT_CPU}, view.data, nbytes, release_array, object, &storage);
    if (status == XT_OK) {
        Py_INCREF(object); /* now the storage's */
        status = xt_tensor_from_view(storage, &view, &tensor);
        xt_storage_release(storage);
    }
    if (status != XT_OK) py_raise(status);
    return tensor;
}
