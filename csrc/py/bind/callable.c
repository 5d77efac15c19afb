/* callable.c - `_C.Op`, the type of every op and function of this module. One object is `_C.softmax` and, in the dict of the
 * Tensor type, the method: __get__ binds it like a plain function. */
#include "py/bind/bind.h"

typedef struct PyOp {
    PyObject_HEAD vectorcallfunc vectorcall;
    PySignature *signature; /* owned */
} PyOp;

static PyObject *op_call(PyObject *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    const PySignature *signature = ((PyOp *)self)->signature;
    PyBound bound;
    if (py_bind(signature, args, PyVectorcall_NARGS(nargsf), kwnames, &bound) < 0) return NULL;
    PyObject *result = signature->function.run(&bound);
    py_bound_clear(&bound);
    return result;
}

static PyObject *op_new(const PyFunction *function) {
    PySignature *signature = py_signature_new(function);
    if (signature == NULL) return NULL;
    PyOp *self = (PyOp *)xt_py->op_type->tp_alloc(xt_py->op_type, 0);
    if (self == NULL) {
        py_signature_free(signature);
        return NULL;
    }
    self->vectorcall = op_call;
    self->signature = signature;
    return (PyObject *)self;
}

static void op_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    py_signature_free(((PyOp *)self)->signature);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *op_bind(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(type)) {
    if (instance == NULL || instance == Py_None) return Py_NewRef(self);
    return PyMethod_New(self, instance);
}

const PySignature *py_signature_of(PyObject *op) { return ((PyOp *)op)->signature; }

static const PyFunction *function_of(PyObject *self) { return &((PyOp *)self)->signature->function; }

static PyObject *op_repr(PyObject *self) { return PyUnicode_FromFormat("<op %U>", ((PyOp *)self)->signature->full); }

static PyObject *op_name(PyObject *self, void *Py_UNUSED(closure)) { return PyUnicode_FromString(function_of(self)->name); }

static PyObject *op_signature(PyObject *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(function_of(self)->signature);
}

static PyObject *op_text_signature(PyObject *self, void *Py_UNUSED(closure)) { return Py_NewRef(((PyOp *)self)->signature->text); }

static PyObject *op_doc(PyObject *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromFormat("%U\n\n%s", ((PyOp *)self)->signature->full, function_of(self)->doc);
}

static PyObject *op_differentiable(PyObject *self, void *Py_UNUSED(closure)) {
    const XtOp *op = function_of(self)->op;
    return PyBool_FromLong(op != NULL && op->backward != NULL);
}

static PyObject *op_is_method(PyObject *self, void *Py_UNUSED(closure)) {
    const XtOp *op = function_of(self)->op;
    return PyBool_FromLong(op != NULL && op->method);
}

/* copy and pickle look up a string as a name in the module. */
static PyObject *op_reduce(PyObject *self, PyObject *Py_UNUSED(ignored)) { return op_name(self, NULL); }

static PyGetSetDef op_getset[] = {
    {"__name__", op_name, NULL, NULL, NULL},
    {"__qualname__", op_name, NULL, NULL, NULL},
    {"__doc__", op_doc, NULL, NULL, NULL},
    {"__text_signature__", op_text_signature, NULL, NULL, NULL},
    {"signature", op_signature, NULL, "str: The signature in the grammar of csrc/ops/ops.h: arguments and result.", NULL},
    {"differentiable", op_differentiable, NULL, "bool: Whether the op has a backward.", NULL},
    {"is_method", op_is_method, NULL, "bool: Whether the op is also a method of Tensor.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef op_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyOp, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef op_methods[] = {
    {"__reduce__", op_reduce, METH_NOARGS, "For copy and pickle: the name."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot op_slots[] = {
    {Py_tp_dealloc, (void *)op_dealloc}, {Py_tp_call, (void *)PyVectorcall_Call},
    {Py_tp_descr_get, (void *)op_bind},  {Py_tp_repr, (void *)op_repr},
    {Py_tp_getset, op_getset},           {Py_tp_members, op_members},
    {Py_tp_methods, op_methods},         {0, NULL},
};

static PyType_Spec op_spec = {
    .name = "xtrain._C.Op",
    .basicsize = sizeof(PyOp),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = op_slots,
};

int py_callable_add(PyObject *module, const PyFunction *function, bool in_module, bool in_type) {
    PyObject *op = op_new(function);
    if (op == NULL) return -1;
    int result = in_module ? PyModule_AddObjectRef(module, function->name, op) : 0;
    if (result == 0 && in_type) result = PyObject_SetAttrString((PyObject *)xt_py->tensor_type, function->name, op);
    Py_DECREF(op);
    return result;
}

int py_callable_init(PyObject *module) {
    xt_py->op_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &op_spec, NULL);
    return xt_py->op_type != NULL ? PyModule_AddObjectRef(module, "Op", (PyObject *)xt_py->op_type) : -1;
}
