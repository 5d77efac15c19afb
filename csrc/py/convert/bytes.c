/* bytes.c - a tensor's memory as bytes, for files: any dtype, no NumPy dtype needed. */
#include "py/convert/convert.h"

/* A uint8 array over the tensor's memory keeps the object alive; the memoryview keeps the array. */
static PyObject *run_to_bytes(PyBound *bound) {
    PyObject *self = bound->object[0];
    XtTensor *tensor = py_tensor(self);
    if (tensor->storage->device.type != XT_CPU) {
        PyErr_Format(PyExc_TypeError, "to_bytes: input must be on the CPU, got %s", xt_device_name(tensor->storage->device));
        return NULL;
    }
    if (!xt_view_is_contiguous(&tensor->view)) {
        PyErr_SetString(PyExc_ValueError, "to_bytes: input must be contiguous, got strides of a view; call contiguous() first");
        return NULL;
    }
    npy_intp size = (npy_intp)(xt_view_numel(&tensor->view) * (int64_t)xt_dtype_size(tensor->dtype));
    char empty;
    PyObject *array = PyArray_New(&PyArray_Type, 1, &size, NPY_UINT8, NULL, size ? tensor->data : &empty, 0, 0, NULL);
    if (array == NULL) return NULL;
    if (size == 0) { /* nothing to point at */
        Py_DECREF(array);
        array = PyArray_ZEROS(1, &size, NPY_UINT8, 0);
        if (array == NULL) return NULL;
    } else if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    PyObject *view = PyMemoryView_FromObject(array);
    Py_DECREF(array);
    return view;
}

static PyObject *run_from_bytes(PyBound *bound) {
    PyObject *buffer = bound->object[0];
    const XtArg *dtype = &bound->arg[1], *shape = &bound->arg[2];
    XtTensor *tensor = NULL;
    Py_buffer view;
    size_t nbytes;
    if (PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE) < 0) return NULL;
    XtStatus status = xt_size_of((XtDtype)dtype->i, shape->count, shape->ints, NULL, &nbytes);
    if (status == XT_OK && nbytes != (size_t)view.len)
        status = xt_error(XT_VALUE_ERROR, "from_bytes: buffer must hold %zu bytes for %s %s, got %zd", nbytes,
                          xt_dtype_name((XtDtype)dtype->i), xt_shape_text(shape->count, shape->ints), view.len);
    if (status == XT_OK) status = xt_tensor_empty((XtDevice){XT_CPU, 0}, (XtDtype)dtype->i, shape->count, shape->ints, &tensor);
    if (status == XT_OK && nbytes) {
        PyThreadState *saved = py_gil_leave();
        memcpy(tensor->data, view.buf, nbytes);
        py_gil_enter(saved);
    }
    PyBuffer_Release(&view);
    return status == XT_OK ? py_wrap(tensor) : py_raise(status);
}

const PyFunction py_bytes_functions[] = {
    {"to_bytes", "input: Tensor -> memoryview", run_to_bytes,
     "The memory of a contiguous CPU tensor of any dtype as uint8, without a copy.", 0, NULL},
    {"from_bytes", "buffer: object, dtype: dtype, shape: ints -> Tensor", run_from_bytes,
     "New tensor with a copy of the bytes of a C-contiguous buffer, whose size must be that of dtype and shape.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
