/* type.c - the heap type Tensor: creation, garbage collection, attributes. Methods come from tables in the other files.
 *
 * Ownership: a PyTensor owns one reference to an XtTensor. Several PyTensors may show one XtTensor (x.grad makes a new one each
 * time). Python objects hang below an XtTensor in four places, and cycles can run through each: hooks of leaves, hooks of node
 * outputs, the callable of an xt.Function node, and the array behind from_numpy (a subclass of ndarray may have attributes).
 * tensor_traverse shows them to the garbage collector when this object is their only owner.
 */
#include "contract/backend.h"
#include "py/py.h"

/* ---- life ------------------------------------------------------------------------------------------------------------ */

PyObject *py_wrap_as(PyTypeObject *type, XtTensor *tensor) {
    if (tensor == NULL) return NULL;
    PyTensor *self = (PyTensor *)type->tp_alloc(type, 0);
    if (self == NULL) xt_tensor_release(tensor);
    else self->tensor = tensor;
    return (PyObject *)self;
}

PyObject *py_wrap(XtTensor *tensor) { return py_wrap_as(xt_py->tensor_type, tensor); }

static PyObject *tensor_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    PyErr_Format(PyExc_TypeError, "%s: cannot be created directly; use xt.tensor(data), xt.from_numpy(array) or xt.empty(shape)",
                 type->tp_name);
    return NULL;
}

static void tensor_dealloc(PyObject *object) {
    PyTensor *self = (PyTensor *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs(object);
    xt_tensor_release(self->tensor);
    type->tp_free(object);
    Py_DECREF(type);
}

static int tensor_traverse(PyObject *object, visitproc visit, void *arg) {
    XtTensor *tensor = ((PyTensor *)object)->tensor;
    Py_VISIT(Py_TYPE(object));
    /* A call that runs without the GIL in another thread may take or drop references while the collector counts. Then everything
     * below counts as used from outside, and a later collection frees the cycle. */
    if (tensor == NULL || xt_py == NULL || xt_py->running > 0) return 0;
    if (__atomic_load_n(&tensor->references, __ATOMIC_ACQUIRE) != 1) return 0;
    if (__atomic_load_n(&tensor->storage->references, __ATOMIC_ACQUIRE) == 1) Py_VISIT(py_array_behind(tensor->storage));
    return py_traverse_grad(tensor, visit, arg);
}

static int tensor_clear(PyObject *object) {
    PyTensor *self = (PyTensor *)object;
    /* Other garbage may still use the object, and a buffer of it may still be read: it keeps a valid tensor. */
    if (self->exports > 0 || self->tensor == NULL || xt_py == NULL || xt_py->nothing == NULL) return 0;
    XtTensor *old = self->tensor;
    if (old == xt_py->nothing) return 0;
    xt_tensor_retain(xt_py->nothing);
    self->tensor = xt_py->nothing;
    xt_tensor_release(old);
    return 0;
}

static Py_hash_t tensor_hash(PyObject *self) { return PyBaseObject_Type.tp_hash(self); }

/* ---- attributes ------------------------------------------------------------------------------------------------------ */

PyObject *py_shape_tuple(int ndim, const int64_t *values) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; i < ndim && tuple != NULL; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

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
    const struct XtGrad *grad = py_tensor(self)->grad;
    if (grad == NULL || grad->node == NULL) Py_RETURN_NONE;
    return PyUnicode_FromString(grad->node->name);
}

GETTER(grad) {
    XtTensor *gradient = xt_gradient(py_tensor(self));
    if (gradient == NULL) Py_RETURN_NONE;
    xt_tensor_retain(gradient);
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
        PyErr_SetString(PyExc_TypeError, "requires_grad: must be a bool");
        return -1;
    }
    XtStatus status = xt_set_requires_grad(py_tensor(self), value == Py_True);
    if (status != XT_OK) py_raise(status);
    return status == XT_OK ? 0 : -1;
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
    if (status != XT_OK) py_raise(status);
    return status == XT_OK ? 0 : -1;
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

static PyGetSetDef tensor_getset[] = {
    {"shape", get_shape, NULL, "Sizes of the dimensions, a tuple.", NULL},
    {"dtype", get_dtype, NULL, "Type of the elements.", NULL},
    {"device", get_device, NULL, "Where the memory is.", NULL},
    {"ndim", get_ndim, NULL, "Number of dimensions.", NULL},
    {"requires_grad", get_requires_grad, set_requires_grad, "Whether operations on this tensor are recorded. Settable on leaves.",
     NULL},
    {"grad", get_grad, set_grad, "The gradient that backward() gathered, or None.", NULL},
    {"is_leaf", get_is_leaf, NULL, "True when no recorded operation made this tensor.", NULL},
    {"grad_fn", get_grad_fn, NULL, "Name of the recorded operation that made this tensor, or None.", NULL},
    {"T", get_T, NULL, "View with the dimensions reversed.", NULL},
    {"mT", get_mT, NULL, "View with the last two dimensions swapped.", NULL},
    {"data", get_data, NULL, "The same memory as a tensor that is not recorded.", NULL},
    {"_version", get_version, NULL, "How often the memory was changed in place.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of all elements.", NULL},
    {"__cuda_array_interface__", get_cuda_array_interface, NULL, "The memory of a CUDA tensor, for Numba and CuPy.", NULL},
    {"itemsize", get_itemsize, NULL, "Bytes of one element.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef tensor_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(PyTensor, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define SLOT(name, function) {Py_##name, (void *)(function)}

static PyType_Slot tensor_slots[] = {
    SLOT(tp_new, tensor_new),
    SLOT(tp_dealloc, tensor_dealloc),
    SLOT(tp_traverse, tensor_traverse),
    SLOT(tp_clear, tensor_clear),
    SLOT(tp_hash, tensor_hash),
    SLOT(tp_richcompare, py_richcompare),
    SLOT(tp_repr, py_repr),
    SLOT(tp_iter, py_iterate),
    SLOT(mp_length, py_length),
    SLOT(mp_subscript, py_subscript),
    SLOT(mp_ass_subscript, py_assign_subscript),
    SLOT(sq_length, py_length),
    SLOT(sq_item, py_sequence_item),
    SLOT(nb_add, py_nb_add),
    SLOT(nb_subtract, py_nb_subtract),
    SLOT(nb_multiply, py_nb_multiply),
    SLOT(nb_true_divide, py_nb_divide),
    SLOT(nb_power, py_nb_power),
    SLOT(nb_matrix_multiply, py_nb_matmul),
    SLOT(nb_inplace_add, py_nb_add_inplace),
    SLOT(nb_inplace_subtract, py_nb_subtract_inplace),
    SLOT(nb_inplace_multiply, py_nb_multiply_inplace),
    SLOT(nb_inplace_true_divide, py_nb_divide_inplace),
    SLOT(nb_negative, py_nb_negative),
    SLOT(nb_positive, py_nb_positive),
    SLOT(nb_absolute, py_nb_absolute),
    SLOT(nb_bool, py_nb_bool),
    SLOT(nb_int, py_nb_int),
    SLOT(nb_float, py_nb_float),
    SLOT(nb_index, py_nb_index),
    SLOT(bf_getbuffer, py_getbuffer),
    SLOT(bf_releasebuffer, py_releasebuffer),
    SLOT(tp_getset, tensor_getset),
    SLOT(tp_members, tensor_members),
    SLOT(tp_doc, "A view of typed elements in memory, with strides, and its place in the graph of recorded operations."),
    {0, NULL},
};

static PyType_Spec tensor_spec = {
    .name = "xtrain.Tensor",
    .basicsize = sizeof(PyTensor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = tensor_slots,
};

int py_tensor_init(PyObject *module) {
    XtStatus status = xt_tensor_empty((XtDevice){0}, XT_FLOAT32, 1, (int64_t[]){0}, &xt_py->nothing);
    if (status != XT_OK) {
        py_raise(status);
        return -1;
    }
    PyObject *type = PyType_FromModuleAndSpec(module, &tensor_spec, NULL);
    if (type == NULL) return -1;
    xt_py->tensor_type = (PyTypeObject *)type;
    /* NumPy leaves `array + tensor` to us instead of converting the tensor element by element. */
    if (PyObject_SetAttrString(type, "__array_ufunc__", Py_None) < 0) return -1;
    PyObject *priority = PyLong_FromLong(1000);
    if (priority == NULL) return -1;
    int result = PyObject_SetAttrString(type, "__array_priority__", priority);
    Py_DECREF(priority);
    if (result < 0) return -1;
    return PyModule_AddObjectRef(module, "Tensor", type);
}
