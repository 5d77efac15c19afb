/* callable.c - `_C.Op`: what an op or a function of this module is in Python. One object serves as `_C.rms_norm` and, in the
 * dict of the Tensor type, as a method: __get__ binds it like a plain function. */
#include "py/py.h"

typedef struct PyOp {
    PyObject_HEAD vectorcallfunc vectorcall;
    PySignature *signature; /* owned */
} PyOp;

PyObject *py_run_op(PyBound *bound) {
    const XtOp *op = bound->signature->function.op;
    XtTensor *out[XT_MAX_OUTPUTS] = {NULL};
    int count;
    XtStatus status = py_call(op, bound->arg, bound->signature->count, out, &count);
    if (status != XT_OK) return py_raise(status);

    /* copy_, add_, ...: the caller gets the object it passed, as identity matters in `x += 1`. */
    size_t length = strlen(op->name);
    bool in_place = op->name[length - 1] == '_' && bound->signature->param[0].kind == XT_ARG_TENSOR;
    if (in_place || count == 0) {
        for (int i = 0; i < count; i++) xt_tensor_release(out[i]);
        return Py_NewRef(in_place ? bound->object[0] : Py_None);
    }
    if (count == 1 && op != &xt_op_split) {
        /* contiguous() of a dense tensor and the like return their input: then the same object comes back. */
        PyObject *first = bound->object[0];
        if (bound->signature->param[0].kind != XT_ARG_TENSOR || out[0] != py_tensor(first)) return py_wrap(out[0]);
        xt_tensor_release(out[0]);
        return Py_NewRef(first);
    }

    PyObject *list = PyList_New(count);
    for (int i = 0; i < count; i++) {
        if (list == NULL) {
            xt_tensor_release(out[i]);
            continue;
        }
        PyObject *tensor = py_wrap(out[i]);
        if (tensor == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, tensor);
    }
    return list;
}

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

static PyObject *op_repr(PyObject *self) {
    return PyUnicode_FromFormat("<op %s(%s)>", function_of(self)->name, function_of(self)->signature);
}

static PyObject *op_name(PyObject *self, void *Py_UNUSED(closure)) { return PyUnicode_FromString(function_of(self)->name); }

static PyObject *op_signature(PyObject *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(function_of(self)->signature);
}

static PyObject *op_text_signature(PyObject *self, void *Py_UNUSED(closure)) { return Py_NewRef(((PyOp *)self)->signature->text); }

static PyObject *op_doc(PyObject *self, void *Py_UNUSED(closure)) {
    const PyFunction *function = function_of(self);
    return PyUnicode_FromFormat("%s(%s)\n\n%s", function->name, function->signature, function->doc != NULL ? function->doc : "");
}

static PyObject *op_differentiable(PyObject *self, void *Py_UNUSED(closure)) {
    const XtOp *op = function_of(self)->op;
    return PyBool_FromLong(op != NULL && op->backward != NULL);
}

static PyObject *op_is_method(PyObject *self, void *Py_UNUSED(closure)) {
    const XtOp *op = function_of(self)->op;
    return PyBool_FromLong(op != NULL && op->method);
}

/* copy and pickle take a string as "find me under this name". */
static PyObject *op_reduce(PyObject *self, PyObject *Py_UNUSED(ignored)) { return op_name(self, NULL); }

static PyGetSetDef op_getset[] = {
    {"__name__", op_name, NULL, NULL, NULL},
    {"__qualname__", op_name, NULL, NULL, NULL},
    {"__doc__", op_doc, NULL, NULL, NULL},
    {"__text_signature__", op_text_signature, NULL, NULL, NULL},
    {"signature", op_signature, NULL, "The signature in the grammar of csrc/ops/ops.h: names, kinds, defaults.", NULL},
    {"differentiable", op_differentiable, NULL, "True when the op has a backward.", NULL},
    {"is_method", op_is_method, NULL, "True when the op is also a method of Tensor.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef op_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(PyOp, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef op_methods[] = {
    {"__reduce__", op_reduce, METH_NOARGS, "Copied and pickled by name."},
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

/* Puts `function` into the module, the Tensor type, or both. */
static int add(PyObject *module, const PyFunction *function, bool in_module, bool in_type) {
    PyObject *op = op_new(function);
    if (op == NULL) return -1;
    int result = in_module ? PyModule_AddObjectRef(module, function->name, op) : 0;
    if (result == 0 && in_type) result = PyObject_SetAttrString((PyObject *)xt_py->tensor_type, function->name, op);
    Py_DECREF(op);
    return result;
}

int py_callables_init(PyObject *module) {
    xt_py->op_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &op_spec, NULL);
    if (xt_py->op_type == NULL || PyModule_AddObjectRef(module, "Op", (PyObject *)xt_py->op_type) < 0) return -1;

    for (const XtOp *const *op = xt_ops; *op != NULL; op++) {
        PyFunction function = {(*op)->name, (*op)->signature, py_run_op, (*op)->doc, 0, *op};
        if (add(module, &function, true, (*op)->method) < 0) return -1;
    }
    const PyFunction *const functions[] = {py_convert_functions, py_dlpack_functions, py_autograd_functions, py_runtime_functions,
                                           py_repr_functions,    py_bytes_functions,  py_testing_functions,  py_cuda_functions};
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        for (const PyFunction *f = functions[i]; f->name != NULL; f++)
            if (add(module, f, true, false) < 0) return -1;
    const PyFunction *const methods[] = {py_tensor_methods, py_convert_methods, py_dlpack_methods, py_autograd_methods};
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++)
        for (const PyFunction *f = methods[i]; f->name != NULL; f++)
            if (add(module, f, false, true) < 0) return -1;
    return 0;
}
