/* methods.c - methods of Tensor: questions, other dtypes and devices, copies of the object. */
#include "py/tensor/tensor.h"

/* ---- questions ------------------------------------------------------------------------------------------------------- */

static XtTensor *self_of(const PyBound *bound) { return bound->arg[0].tensor; }

/* stride(dim) and size(dim); `values` is strides or shape. */
static PyObject *per_dim(const PyBound *bound, const int64_t *values) {
    const XtTensor *tensor = self_of(bound);
    if (!bound->arg[1].given) return py_shape_tuple(tensor->ndim, values);
    int64_t dim = bound->arg[1].i;
    if (dim >= -tensor->ndim && dim < tensor->ndim) return PyLong_FromLongLong(values[dim < 0 ? dim + tensor->ndim : dim]);
    return PyErr_Format(PyExc_IndexError, "%s: dim must be in [%d, %d), got %lld", bound->signature->function.name, -tensor->ndim,
                        tensor->ndim, (long long)dim);
}

static PyObject *run_stride(PyBound *bound) { return per_dim(bound, self_of(bound)->strides); }
static PyObject *run_size(PyBound *bound) { return per_dim(bound, self_of(bound)->shape); }
static PyObject *run_numel(PyBound *bound) { return PyLong_FromLongLong(xt_view_numel(&self_of(bound)->view)); }
static PyObject *run_dim(PyBound *bound) { return PyLong_FromLong(self_of(bound)->ndim); }
static PyObject *run_is_contiguous(PyBound *bound) { return PyBool_FromLong(xt_view_is_contiguous(&self_of(bound)->view)); }
static PyObject *run_data_ptr(PyBound *bound) { return PyLong_FromVoidPtr(self_of(bound)->data); }
static PyObject *run_adjoins(PyBound *bound) { return PyBool_FromLong(xt_adjoin(self_of(bound), bound->arg[1].tensor)); }
static PyObject *run_element_size(PyBound *bound) { return PyLong_FromSize_t(xt_dtype_size(self_of(bound)->dtype)); }
static PyObject *run_item(PyBound *bound) { return py_item("item", self_of(bound)); }

static PyObject *nested_list(const XtTensor *tensor, int dim, const char *at) {
    if (dim == tensor->ndim) return py_element(tensor->dtype, at);
    PyObject *list = PyList_New(tensor->shape[dim]);
    int64_t stride = tensor->strides[dim] * (int64_t)xt_dtype_size(tensor->dtype);
    for (int64_t i = 0; i < tensor->shape[dim] && list != NULL; i++) {
        PyObject *item = nested_list(tensor, dim + 1, xt_view_numel(&tensor->view) > 0 ? at + i * stride : at);
        if (item == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static PyObject *run_tolist(PyBound *bound) {
    XtTensor *host = py_on_host(self_of(bound));
    if (host == NULL) return NULL;
    PyObject *list = nested_list(host, 0, host->data);
    xt_tensor_release(host);
    return list;
}

/* f"{loss:.4f}" of a tensor with shape () formats its number. */
static PyObject *run_format(PyBound *bound) {
    PyObject *self = bound->object[0], *item = NULL, *result = NULL;
    PyObject *text = PyUnicode_FromString(bound->arg[1].s);
    if (text == NULL) return NULL;
    if (self_of(bound)->ndim > 0 || bound->arg[1].s[0] == '\0') {
        result = PyObject_CallMethod((PyObject *)&PyBaseObject_Type, "__format__", "OO", self, text);
    } else {
        item = py_item("format", self_of(bound));
        if (item != NULL) result = PyObject_Format(item, text);
    }
    Py_XDECREF(item);
    Py_DECREF(text);
    return result;
}

/* ---- dtype and device ------------------------------------------------------------------------------------------------ */

static PyObject *moved(PyObject *self, XtDtype dtype, XtDevice device, bool copy) {
    XtTensor *current = py_tensor(self);
    xt_tensor_retain(current);
    if (!xt_device_equal(device, current->storage->device)) {
        XtArg args[2] = {py_arg_tensor(current), py_arg_device(device)};
        XtTensor *next = py_call_one(&xt_op_to_device, args, 2);
        xt_tensor_release(current);
        if (next == NULL) return NULL;
        current = next;
    }
    if (dtype != current->dtype) {
        XtArg args[2] = {py_arg_tensor(current), py_arg_dtype(dtype)};
        XtTensor *next = py_call_one(&xt_op_cast, args, 2);
        xt_tensor_release(current);
        if (next == NULL) return NULL;
        current = next;
    }
    if (current != py_tensor(self)) return py_wrap(current);
    xt_tensor_release(current);
    if (!copy) return Py_NewRef(self);
    XtArg arg = py_arg_tensor(py_tensor(self));
    return py_wrap(py_call_one(&xt_op_clone, &arg, 1));
}

/* to(dtype), to(device), to(device, dtype), to(tensor), and by keyword. A str is a dtype's name or else a device. */
static PyObject *run_to(PyBound *bound) {
    PyObject *target = bound->object[1];
    XtDtype dtype = self_of(bound)->dtype;
    XtDevice device = self_of(bound)->storage->device;
    bool has_dtype = bound->arg[2].given, has_device = bound->arg[3].given, took_dtype = false, took_device = false;
    if (has_dtype) dtype = (XtDtype)bound->arg[2].i;
    if (has_device) device = bound->arg[3].device;
    if (target != Py_None && py_is_tensor(target)) {
        dtype = py_tensor(target)->dtype;
        device = py_tensor(target)->storage->device;
        took_dtype = took_device = true;
    } else if (target != Py_None) {
        const char *text = PyUnicode_Check(target) ? py_utf8("to", "target", target, NULL) : NULL;
        if (PyUnicode_Check(target) && text == NULL) return NULL;
        int found = 0;
        if (text == NULL || py_dtype_named(text, &dtype)) found = took_dtype = py_dtype("to", "target", target, &dtype) == 1;
        if (!took_dtype) {
            found = py_device("to", "target", target, &device);
            took_device = found == 1;
        }
        if (found == 0) py_refuse("to", "target", "a dtype, a device, one of their names, or a Tensor", target);
        if (found != 1) return NULL;
    }
    if ((took_dtype && has_dtype) || (took_device && has_device))
        return PyErr_Format(PyExc_TypeError, "to: %s was given twice", took_dtype && has_dtype ? "dtype" : "device");
    return moved(bound->object[0], dtype, device, bound->arg[4].b);
}

static PyObject *run_to_dtype(PyBound *bound) {
    return moved(bound->object[0], (XtDtype)bound->signature->function.tag, self_of(bound)->storage->device, false);
}

static PyObject *run_cpu(PyBound *bound) {
    return moved(bound->object[0], self_of(bound)->dtype, (XtDevice){.type = XT_CPU}, false);
}

static PyObject *run_cuda(PyBound *bound) {
    XtDevice device = bound->arg[1].given ? bound->arg[1].device : (XtDevice){.type = XT_CUDA};
    if (device.type == XT_CUDA) return moved(bound->object[0], self_of(bound)->dtype, device, false);
    return PyErr_Format(PyExc_ValueError, "cuda: argument 'device' must be a CUDA device, got %s", xt_device_name(device));
}

/* ---- copies of the object -------------------------------------------------------------------------------------------- */

/* The attributes of a subclass instance, or NULL without an exception. */
static int attributes(PyObject *self, PyObject **out) {
    *out = PyObject_GetAttrString(self, "__dict__");
    if (*out != NULL) return 0;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    return 0;
}

static int check_leaf(const char *op, const XtTensor *tensor) {
    if (xt_is_leaf(tensor)) return 0;
    PyErr_Format(PyExc_RuntimeError, "%s: only leaf tensors can be copied; use detach() or clone() on the result of '%s'", op,
                 xt_grad_of(tensor)->node->name);
    return -1;
}

static XtTensor *cloned(XtTensor *tensor) {
    XtArg arg = py_arg_tensor(tensor);
    return py_call_plain(&xt_op_clone, &arg, 1);
}

/* Gives `copy` the requires_grad flag of `tensor`. */
static int like_leaf(XtTensor *copy, const XtTensor *tensor) {
    XtStatus status = xt_set_requires_grad(copy, xt_requires_grad(tensor));
    return py_check(status);
}

static PyObject *run_copy(PyBound *bound) {
    XtTensor *alias = NULL;
    PyObject *result = NULL, *own = NULL, *given = NULL;
    if (check_leaf("copy", self_of(bound)) < 0) return NULL;
    XtStatus status = xt_tensor_alias(self_of(bound), &alias);
    if (status != XT_OK) return py_raise(status);
    result = py_wrap_as(Py_TYPE(bound->object[0]), alias);
    if (result == NULL || like_leaf(alias, self_of(bound)) < 0) goto fail;
    if (attributes(bound->object[0], &own) < 0) goto fail;
    if (own != NULL) {
        if (attributes(result, &given) < 0 || given == NULL || PyDict_Update(given, own) < 0) goto fail;
    }
    Py_XDECREF(own);
    Py_XDECREF(given);
    return result;
fail:
    Py_XDECREF(own);
    Py_XDECREF(given);
    Py_XDECREF(result);
    return NULL;
}

/* memo[id(self)] = copy, so that a second path to self finds it. */
static int remember(PyObject *memo, PyObject *self, PyObject *copy) {
    PyObject *key = PyLong_FromVoidPtr(self);
    if (key == NULL) return -1;
    int result = PyObject_SetItem(memo, key, copy);
    Py_DECREF(key);
    return result;
}

static int deepcopy_attributes(PyObject *self, PyObject *copy, PyObject *memo) {
    PyObject *own = NULL, *module = NULL, *copied = NULL, *given = NULL;
    int result = -1;
    if (attributes(self, &own) < 0) return -1;
    if (own == NULL) return 0;
    module = PyImport_ImportModule("copy");
    if (module == NULL) goto done;
    copied = PyObject_CallMethod(module, "deepcopy", "OO", own, memo);
    if (copied == NULL) goto done;
    if (attributes(copy, &given) == 0 && given != NULL) result = PyDict_Update(given, copied);
done:
    Py_XDECREF(own);
    Py_XDECREF(module);
    Py_XDECREF(copied);
    Py_XDECREF(given);
    return result;
}

static PyObject *run_deepcopy(PyBound *bound) {
    XtTensor *self = self_of(bound);
    PyObject *memo = bound->object[1];
    if (check_leaf("deepcopy", self) < 0) return NULL;
    XtTensor *copy = cloned(self);
    PyObject *result = py_wrap_as(Py_TYPE(bound->object[0]), copy);
    if (result == NULL) return NULL;
    if (like_leaf(copy, self) < 0 || remember(memo, bound->object[0], result) < 0) goto fail;
    XtTensor *gradient = xt_gradient(self);
    if (gradient != NULL) {
        XtTensor *copied = cloned(gradient);
        xt_tensor_release(gradient);
        if (copied == NULL) goto fail;
        XtStatus status = xt_set_gradient(copy, copied);
        xt_tensor_release(copied);
        if (status != XT_OK) {
            py_raise(status);
            goto fail;
        }
    }
    if (deepcopy_attributes(bound->object[0], result, memo) == 0) return result;
fail:
    Py_DECREF(result);
    return NULL;
}

static PyObject *run_reduce(PyBound *Py_UNUSED(bound)) {
    PyErr_SetString(PyExc_TypeError, "pickle: tensors cannot be pickled; save them as safetensors, or pickle tensor.numpy()");
    return NULL;
}

#define TO_DTYPE(name, dtype) \
    {#name, "input: Tensor -> Tensor", run_to_dtype, "The same values in another dtype; self when that is its dtype.", dtype, NULL}

const PyFunction py_tensor_methods[] = {
    {"stride", "input: Tensor, dim: int? = None -> object", run_stride,
     "Distance between neighbours along each dimension, in elements.", 0, NULL},
    {"size", "input: Tensor, dim: int? = None -> object", run_size, "The shape, or one of its sizes.", 0, NULL},
    {"numel", "input: Tensor -> int", run_numel, "Number of elements.", 0, NULL},
    {"dim", "input: Tensor -> int", run_dim, "Number of dimensions.", 0, NULL},
    {"is_contiguous", "input: Tensor -> bool", run_is_contiguous, "Whether the elements lie in row-major order without gaps.", 0,
     NULL},
    {"data_ptr", "input: Tensor -> int", run_data_ptr, "Address of the first element.", 0, NULL},
    {"adjoins", "input: Tensor, other: Tensor -> bool", run_adjoins,
     "Whether both are dense, of one dtype and in one block of memory, where other begins where input ends (see pack).", 0, NULL},
    {"element_size", "input: Tensor -> int", run_element_size, "Bytes of one element.", 0, NULL},
    {"item", "input: Tensor -> number", run_item, "The only element as a Python number.", 0, NULL},
    {"tolist", "input: Tensor -> object", run_tolist, "The elements as nested lists of Python numbers.", 0, NULL},
    {"to", "input: Tensor, target: object = None, dtype: dtype? = None, *, device: device? = None, copy: bool = False -> Tensor",
     run_to,
     "The same values with another dtype, on another device, or both; `target` is a dtype, a device or a tensor to be like.\n"
     "Returns self when nothing changes, unless copy is true. Differentiable.",
     0, NULL},
    TO_DTYPE(float, XT_FLOAT32),
    TO_DTYPE(double, XT_FLOAT64),
    TO_DTYPE(bfloat16, XT_BFLOAT16),
    TO_DTYPE(half, XT_FLOAT16),
    TO_DTYPE(int, XT_INT32),
    TO_DTYPE(long, XT_INT64),
    TO_DTYPE(bool, XT_BOOL),
    {"cpu", "input: Tensor -> Tensor", run_cpu, "The same values in host memory; self when they are there.", 0, NULL},
    {"cuda", "input: Tensor, device: device? = None -> Tensor", run_cuda, "The same values on a GPU, the first one by default.", 0,
     NULL},
    {"__format__", "input: Tensor, format_spec: str = '' -> str", run_format, "A tensor of shape () formats like its number.", 0,
     NULL},
    {"__copy__", "input: Tensor -> self", run_copy, "Another object over the same memory; leaves only.", 0, NULL},
    {"__deepcopy__", "input: Tensor, memo: object -> self", run_deepcopy,
     "A copy with memory, .grad and attributes of its own; leaves only.", 0, NULL},
    {"__reduce_ex__", "input: Tensor, protocol: object -> object", run_reduce, "Raises TypeError.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
