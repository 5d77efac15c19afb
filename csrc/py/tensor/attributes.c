/* attributes.c - the attributes of Tensor: shape, dtype, device, gradient and so on. */
#include "contract/backend.h"
#include "py/tensor/tensor.h"

#define GETTER(name) static PyObject *get_##name(PyObject *self, void *Py_UNUSED(closure))

GETTER(shape) { return py_shape_tuple(py_tensor(self)->ndim, py_tensor(self)->shape); }
GETTER(dtype) { return py_dtype_object(py_tensor(self)->dtype); }
GETTER(device) { return py_device_object(py_tensor(self)->storage->device); }
GETTER(ndim) { return PyLong_FromLong(py_tensor(self)->ndim); }
GETTER(requires_grad) { return PyBool_FromLong(xt_requires_grad(py_tensor(self))); }
GETTER(is_leaf) { return PyBool_FromLong(xt_is_leaf(py_tensor(self))); }
GETTER(itemsize) { return PyLong_FromSize_t(xt_dtype_size(py_tensor(self)->dtype)); }
GETTER(nbytes) { return PyLong_FromSize_t((size_t)xt_view_numel(&py_tensor(self)->view) * xt_dtype_size(py_tensor(self)->dtype)); }
GETTER(version) { return PyLong_FromUnsignedLongLong(__atomic_load_n(&py_tensor(self)->storage->version, __ATOMIC_RELAXED)); }

GETTER(grad_fn) {
    const XtGrad *grad = xt_grad_of(py_tensor(self));
    if (grad == NULL || grad->node == NULL) Py_RETURN_NONE;
    return PyUnicode_FromString(grad->node->name);
}

GETTER(grad) {
    XtTensor *gradient = xt_gradient(py_tensor(self));
    if (gradient == NULL) Py_RETURN_NONE;
    return py_wrap(gradient);
}

GETTER(data) {
    XtTensor *alias = NULL;
    XtStatus status = xt_tensor_alias(py_tensor(self), &alias);
    return status == XT_OK ? py_wrap(alias) : py_raise(status);
}

static PyObject *transposed(PyObject *self, int64_t dim0, int64_t dim1) {
    XtArg args[3] = {py_arg_tensor(py_tensor(self)), py_arg_int(dim0), py_arg_int(dim1)};
    return py_wrap(py_call_one(&xt_op_transpose, args, 3));
}

GETTER(mT) {
    if (py_tensor(self)->ndim >= 2) return transposed(self, -2, -1);
    PyErr_Format(PyExc_ValueError, "mT: tensor must have at least 2 dimensions, got shape %s",
                 xt_shape_text(py_tensor(self)->ndim, py_tensor(self)->shape));
    return NULL;
}

GETTER(T) {
    int ndim = py_tensor(self)->ndim;
    if (ndim == 2) return transposed(self, 0, 1);
    XtArg args[2] = {py_arg_tensor(py_tensor(self)), {.given = true, .is_sequence = true, .count = ndim}};
    for (int i = 0; i < ndim; i++) args[1].ints[i] = ndim - 1 - i;
    return py_wrap(py_call_one(&xt_op_permute, args, 2));
}

static int set_requires_grad(PyObject *self, PyObject *value, void *Py_UNUSED(closure)) {
    if (value == NULL || !PyBool_Check(value)) {
        PyErr_Format(PyExc_TypeError, "requires_grad: must be a bool, got %s", value == NULL ? "del" : Py_TYPE(value)->tp_name);
        return -1;
    }
    XtStatus status = xt_set_requires_grad(py_tensor(self), value == Py_True);
    return py_check(status);
}

static int set_grad(PyObject *self, PyObject *value, void *Py_UNUSED(closure)) {
    if (value != NULL && value != Py_None && !py_is_tensor(value)) return py_refuse("grad", "value", "a Tensor or None", value);
    XtTensor *gradient = value == NULL || value == Py_None ? NULL : py_tensor(value);
    if (gradient == py_tensor(self)) {
        PyErr_SetString(PyExc_RuntimeError, "grad: a tensor cannot be its own gradient");
        return -1;
    }
    XtTensor *alias = NULL; /* without a grad record: a gradient with a graph could point back at this tensor and keep it forever */
    XtStatus status = gradient != NULL ? xt_tensor_alias(gradient, &alias) : XT_OK;
    if (status == XT_OK) status = xt_set_gradient(py_tensor(self), alias);
    xt_tensor_release(alias);
    return py_check(status);
}

/* Numba's and CuPy's protocol, version 3: an attribute that only CUDA tensors of a dtype known to NumPy have. */
static PyObject *get_cuda_array_interface(PyObject *self, void *Py_UNUSED(closure)) {
    static const char *const types[XT_DTYPE_COUNT] = {[XT_FLOAT32] = "<f4", [XT_FLOAT64] = "<f8", [XT_FLOAT16] = "<f2",
                                                      [XT_INT32] = "<i4",   [XT_INT64] = "<i8",   [XT_UINT8] = "|u1",
                                                      [XT_BOOL] = "|b1"};
    XtTensor *tensor = py_tensor(self);
    XtDevice device = tensor->storage->device;
    const XtBackend *backend;
    if (device.type != XT_CUDA || types[tensor->dtype] == NULL)
        return PyErr_Format(PyExc_AttributeError,
                            "__cuda_array_interface__: tensor must be on CUDA with a dtype of NumPy, got %s on %s",
                            xt_dtype_name(tensor->dtype), xt_device_name(device));
    if (xt_requires_grad(tensor))
        return PyErr_Format(PyExc_RuntimeError,
                            "__cuda_array_interface__: tensor must not require a gradient; call detach() first");
    XtStatus status = xt_backend_for(device, &backend);
    if (status != XT_OK) return py_raise(status);
    int64_t bytes[XT_MAX_DIMS];
    for (int i = 0; i < tensor->ndim; i++) bytes[i] = tensor->strides[i] * (int64_t)xt_dtype_size(tensor->dtype);
    return Py_BuildValue("{s:N,s:N,s:s,s:(NO),s:i,s:N}", "shape", py_shape_tuple(tensor->ndim, tensor->shape), "strides",
                         py_shape_tuple(tensor->ndim, bytes), "typestr", types[tensor->dtype], "data",
                         PyLong_FromVoidPtr(tensor->data), Py_False, "version", 3, "stream",
                         PyLong_FromVoidPtr(backend->accelerator->stream(device.index)));
}

/* Each text begins with the type, in the grammar of results; tests/support/make_stubs.py reads it. */
PyGetSetDef py_tensor_attributes[] = {
    {"shape", get_shape, NULL, "(int, ...): Sizes of the dimensions.", NULL},
    {"dtype", get_dtype, NULL, "dtype: Type of the elements.", NULL},
    {"device", get_device, NULL, "device: Where the memory is.", NULL},
    {"ndim", get_ndim, NULL, "int: Number of dimensions.", NULL},
    {"requires_grad", get_requires_grad, set_requires_grad,
     "bool: Whether operations on this tensor are recorded. Can be set on leaves.", NULL},
    {"grad", get_grad, set_grad, "Tensor?: The gradient that backward() accumulated, or None.", NULL},
    {"is_leaf", get_is_leaf, NULL, "bool: Whether no recorded operation made this tensor.", NULL},
    {"grad_fn", get_grad_fn, NULL, "str?: Name of the recorded operation that made this tensor, or None.", NULL},
    {"T", get_T, NULL, "Tensor: View with the dimensions reversed.", NULL},
    {"mT", get_mT, NULL, "Tensor: View with the last two dimensions swapped.", NULL},
    {"data", get_data, NULL, "Tensor: The same memory as a tensor that is not recorded.", NULL},
    {"_version", get_version, NULL, "int: Number of changes of the memory in place.", NULL},
    {"nbytes", get_nbytes, NULL, "int: Bytes of all elements.", NULL},
    {"__cuda_array_interface__", get_cuda_array_interface, NULL, "{object}: The memory of a CUDA tensor, for Numba and CuPy.",
     NULL},
    {"itemsize", get_itemsize, NULL, "int: Bytes of one element.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
