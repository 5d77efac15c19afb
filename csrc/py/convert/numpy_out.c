/* numpy_out.c - from Tensor to NumPy and to anything that reads PEP 3118 buffers: the same memory, never a copy. */
#include "py/convert/convert.h"

/* ---- dtypes ---------------------------------------------------------------------------------------------------------- */

static PyArray_Descr *bfloat16_descr(const char *op) {
    if (xt_py->bfloat16 == NULL) {
        PyObject *module = PyImport_ImportModule("ml_dtypes");
        if (module == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_ImportError)) return NULL;
            PyErr_Format(PyExc_TypeError, "%s: NumPy has no bfloat16; install the ml_dtypes package or call .float() first", op);
            return NULL;
        }
        PyObject *type = PyObject_GetAttrString(module, "bfloat16");
        Py_DECREF(module);
        PyArray_Descr *descr = NULL;
        int converted = type != NULL ? PyArray_DescrConverter(type, &descr) : NPY_FAIL;
        Py_XDECREF(type);
        if (converted != NPY_SUCCEED || descr == NULL) return NULL;
        xt_py->bfloat16 = (PyObject *)descr;
    }
    return (PyArray_Descr *)Py_NewRef(xt_py->bfloat16);
}

PyArray_Descr *py_numpy_descr(const char *op, XtDtype dtype) {
    switch (dtype) {
    case XT_FLOAT32: return PyArray_DescrFromType(NPY_FLOAT32);
    case XT_FLOAT64: return PyArray_DescrFromType(NPY_FLOAT64);
    case XT_FLOAT16: return PyArray_DescrFromType(NPY_FLOAT16);
    case XT_INT32: return PyArray_DescrFromType(NPY_INT32);
    case XT_INT64: return PyArray_DescrFromType(NPY_INT64);
    case XT_UINT8: return PyArray_DescrFromType(NPY_UINT8);
    case XT_BOOL: return PyArray_DescrFromType(NPY_BOOL);
    case XT_BFLOAT16: return bfloat16_descr(op);
    case XT_DTYPE_COUNT: break;
    }
    PyErr_SetString(PyExc_SystemError, "unknown dtype");
    return NULL;
}

/* ---- checks shared by arrays and buffers ----------------------------------------------------------------------------- */

/* Elements that share memory (expand) must not be written through a view that does not show it. */
static bool repeats(const XtTensor *tensor) {
    for (int i = 0; i < tensor->ndim; i++)
        if (tensor->strides[i] == 0 && tensor->shape[i] > 1) return true;
    return false;
}

static int check_exportable(const char *op, const XtTensor *tensor, PyObject *device_error, PyObject *grad_error) {
    if (tensor->storage->device.type != XT_CPU) {
        PyErr_Format(device_error, "%s: tensor must be on the CPU, got %s; call cpu() first", op,
                     xt_device_name(tensor->storage->device));
        return -1;
    }
    if (xt_requires_grad(tensor)) {
        PyErr_Format(grad_error, "%s: tensor must not require a gradient; call detach() first", op);
        return -1;
    }
    return 0;
}

/* ---- arrays ---------------------------------------------------------------------------------------------------------- */

PyObject *py_numpy_view(const char *op, PyObject *self) {
    const XtTensor *tensor = py_tensor(self);
    if (check_exportable(op, tensor, PyExc_TypeError, PyExc_RuntimeError) < 0) return NULL;
    PyArray_Descr *descr = py_numpy_descr(op, tensor->dtype);
    if (descr == NULL) return NULL;

    npy_intp shape[XT_MAX_DIMS], strides[XT_MAX_DIMS];
    for (int i = 0; i < tensor->ndim; i++) {
        shape[i] = tensor->shape[i];
        strides[i] = tensor->strides[i] * (int64_t)xt_dtype_size(tensor->dtype);
    }
    bool empty = tensor->data == NULL; /* NumPy then allocates its own */
    int flags = empty || repeats(tensor) ? 0 : NPY_ARRAY_WRITEABLE;
    PyObject *array =
        PyArray_NewFromDescr(&PyArray_Type, descr, tensor->ndim, shape, empty ? NULL : strides, tensor->data, flags, NULL);
    if (array == NULL || empty) return array;
    /* SetBaseObject takes over the reference, also when it fails. */
    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) < 0) Py_CLEAR(array);
    return array;
}

static PyObject *run_numpy(PyBound *bound) { return py_numpy_view("numpy", bound->object[0]); }

/* __array__(dtype=None, copy=None), by NumPy 2's rules: copy=False means "or fail". */
static PyObject *run_array(PyBound *bound) {
    PyArray_Descr *wanted = NULL;
    bool copy_given = bound->arg[2].given, copy = bound->arg[2].b;
    if (PyArray_DescrConverter2(bound->object[1], &wanted) != NPY_SUCCEED) {
        if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError))
            PyErr_Format(PyExc_TypeError, "__array__: dtype must be one of NumPy's, got %.200R", bound->object[1]);
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)py_numpy_view("__array__", bound->object[0]);
    if (array == NULL) goto fail;
    bool same = wanted == NULL || PyArray_EquivTypes(wanted, PyArray_DESCR(array));
    if (same && !(copy_given && copy)) {
        Py_XDECREF(wanted);
        return (PyObject *)array;
    }
    if (!same && copy_given && !copy) {
        PyErr_SetString(PyExc_ValueError, "__array__: another dtype needs a copy, which copy=False forbids");
        goto fail;
    }
    PyObject *result;
    if (same) {
        result = PyArray_NewCopy(array, NPY_CORDER);
        Py_XDECREF(wanted);
    } else {
        result = PyArray_CastToType(array, wanted, 0); /* takes over `wanted` */
    }
    Py_DECREF(array);
    return result;
fail:
    Py_XDECREF(wanted);
    Py_XDECREF(array);
    return NULL;
}

const PyFunction py_numpy_methods[] = {
    {"numpy", "input: Tensor -> ndarray", run_numpy,
     "NumPy array over the same memory, which it keeps alive. TypeError on a GPU, RuntimeError when a gradient is required.\n"
     "bfloat16 needs the ml_dtypes package. Expanded tensors give read-only arrays.",
     0, NULL},
    {"__array__", "input: Tensor, dtype: object = None, copy: bool? = None -> ndarray", run_array, "NumPy's conversion protocol.",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};

/* ---- buffers --------------------------------------------------------------------------------------------------------- */

typedef struct Layout {
    Py_ssize_t shape[XT_MAX_DIMS], strides[XT_MAX_DIMS];
} Layout;

static const char *format_of(XtDtype dtype) {
    switch (dtype) {
    case XT_FLOAT32: return "f";
    case XT_FLOAT64: return "d";
    case XT_FLOAT16: return "e";
    case XT_INT32: return "i";
    case XT_INT64: return "q";
    case XT_UINT8: return "B";
    case XT_BOOL: return "?";
    case XT_BFLOAT16:
    case XT_DTYPE_COUNT: break;
    }
    return NULL;
}

static bool is_fortran(const XtTensor *tensor) {
    int64_t expected = 1;
    for (int i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] != 1 && tensor->strides[i] != expected) return false;
        expected *= tensor->shape[i];
    }
    return true;
}

/* The rule that a request breaks, or NULL. */
static const char *buffer_objection(const XtTensor *tensor, int flags) {
    bool c = xt_view_is_contiguous(&tensor->view), f = is_fortran(tensor) || xt_view_numel(&tensor->view) == 0;
    if (format_of(tensor->dtype) == NULL) return "bfloat16 has no buffer format; use DLPack or call .float() first";
    if ((flags & PyBUF_WRITABLE) && repeats(tensor)) return "an expanded tensor is read-only; call contiguous() first";
    if ((flags & PyBUF_C_CONTIGUOUS) == PyBUF_C_CONTIGUOUS && !c) return "tensor is not contiguous; call contiguous() first";
    if ((flags & PyBUF_F_CONTIGUOUS) == PyBUF_F_CONTIGUOUS && !f) return "tensor is not in Fortran order";
    if ((flags & PyBUF_ANY_CONTIGUOUS) == PyBUF_ANY_CONTIGUOUS && !c && !f)
        return "tensor is not contiguous; call contiguous() first";
    if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES && !c) return "tensor has strides; call contiguous() first";
    return NULL;
}

int py_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    const XtTensor *tensor = py_tensor(self);
    view->obj = NULL;
    if (check_exportable("buffer", tensor, PyExc_BufferError, PyExc_BufferError) < 0) return -1;
    const char *objection = buffer_objection(tensor, flags);
    if (objection != NULL) {
        PyErr_Format(PyExc_BufferError, "buffer: %s", objection);
        return -1;
    }
    Layout *layout = PyMem_Malloc(sizeof *layout);
    if (layout == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t itemsize = xt_dtype_size(tensor->dtype);
    for (int i = 0; i < tensor->ndim; i++) {
        layout->shape[i] = tensor->shape[i];
        layout->strides[i] = tensor->strides[i] * (Py_ssize_t)itemsize;
    }
    view->internal = layout;
    view->buf = tensor->data != NULL ? tensor->data : (void *)layout; /* readers take NULL for failure */
    view->len = (Py_ssize_t)(itemsize * (size_t)xt_view_numel(&tensor->view));
    view->itemsize = (Py_ssize_t)itemsize;
    view->readonly = repeats(tensor);
    view->ndim = (flags & PyBUF_ND) ? tensor->ndim : 1; /* without a shape, memoryview takes it for a row */
    view->format = (flags & PyBUF_FORMAT) ? (char *)format_of(tensor->dtype) : NULL;
    view->shape = (flags & PyBUF_ND) ? layout->shape : NULL;
    view->strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? layout->strides : NULL;
    view->suboffsets = NULL;
    view->obj = Py_NewRef(self);
    ((PyTensor *)self)->exports++;
    return 0;
}

void py_releasebuffer(PyObject *self, Py_buffer *view) {
    PyMem_Free(view->internal);
    ((PyTensor *)self)->exports--;
}
