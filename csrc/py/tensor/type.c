/* type.c - the heap type Tensor: creation, garbage collection, slots. Attributes, operators and methods are in the other files.
 *
 * Ownership: a PyTensor owns one reference to an XtTensor. Several PyTensors may share one XtTensor (x.grad makes a new one each
 * time). An XtTensor owns Python objects in four places, and reference cycles can run through each: hooks of leaves, hooks of node
 * outputs, the callable of an xt.Function node, and the array behind from_numpy (a subclass of ndarray may have attributes).
 * tensor_traverse visits them for the garbage collector when this object is their only owner.
 */
#include "py/tensor/tensor.h"

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
    SLOT(nb_floor_divide, py_nb_floor_divide),
    SLOT(nb_remainder, py_nb_remainder),
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
    SLOT(tp_getset, py_tensor_attributes),
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
    if (py_check(status) < 0) return -1;
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
