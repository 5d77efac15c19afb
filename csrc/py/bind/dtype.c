/* dtype.c - the type `dtype`: eight constants, compared by identity. */
#include "py/bind/bind.h"

typedef struct PyDtype {
    PyObject_HEAD XtDtype dtype;
} PyDtype;

static XtDtype dtype_of(PyObject *self) { return ((PyDtype *)self)->dtype; }

PyObject *py_dtype_object(XtDtype dtype) { return Py_NewRef(xt_py->dtype[dtype]); }

bool py_dtype_named(const char *text, XtDtype *out) {
    for (int i = 0; i < XT_DTYPE_COUNT; i++) {
        if (strcmp(xt_dtype_name((XtDtype)i), text) != 0) continue;
        *out = (XtDtype)i;
        return true;
    }
    return false;
}

int py_dtype(const char *op, const char *name, PyObject *object, XtDtype *out) {
    if (Py_IS_TYPE(object, xt_py->dtype_type)) {
        *out = dtype_of(object);
        return 1;
    }
    if (!PyUnicode_Check(object)) return 0;
    const char *text = py_utf8(op, name, object, NULL);
    if (text == NULL) return -1;
    if (py_dtype_named(text, out)) return 1;
    PyErr_Format(PyExc_ValueError, "%s: argument '%s' must be a dtype such as 'float32' or 'bfloat16', got '%.100s'", op, name,
                 text);
    return -1;
}

static PyObject *dtype_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *object;
    XtDtype dtype;
    (void)type;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0) {
        PyErr_SetString(PyExc_TypeError, "dtype: takes one positional argument, a dtype or its name");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O:dtype", &object)) return NULL;
    int found = py_dtype("dtype", "name", object, &dtype);
    if (found == 0) py_refuse("dtype", "name", py_kind_rule(XT_ARG_DTYPE, false), object);
    return found == 1 ? py_dtype_object(dtype) : NULL;
}

static void dtype_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *dtype_name(PyObject *self, void *Py_UNUSED(closure)) {
    return PyUnicode_FromString(xt_dtype_name(dtype_of(self)));
}
static PyObject *dtype_itemsize(PyObject *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(xt_dtype_size(dtype_of(self)));
}
static PyObject *dtype_is_float(PyObject *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(xt_dtype_is_float(dtype_of(self)));
}
static PyObject *dtype_repr(PyObject *self) { return PyUnicode_FromFormat("xtrain.%s", xt_dtype_name(dtype_of(self))); }
static PyObject *dtype_reduce(PyObject *self, PyObject *Py_UNUSED(ignored)) { return dtype_name(self, NULL); }

static PyGetSetDef dtype_getset[] = {
    {"name", dtype_name, NULL, "str: \"float32\" and so on.", NULL},
    {"itemsize", dtype_itemsize, NULL, "int: Bytes of one element.", NULL},
    {"is_floating_point", dtype_is_float, NULL, "bool: Whether it is float64, float32, bfloat16 or float16.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef dtype_methods[] = {
    {"__reduce__", dtype_reduce, METH_NOARGS, "For copy and pickle: the name."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot dtype_slots[] = {
    {Py_tp_new, (void *)dtype_new},
    {Py_tp_dealloc, (void *)dtype_dealloc},
    {Py_tp_repr, (void *)dtype_repr},
    {Py_tp_getset, dtype_getset},
    {Py_tp_methods, dtype_methods},
    {Py_tp_doc,
     "dtype(name)\n--\n\nname: dtype\n\nThe type of a tensor's elements. There is one object per dtype; compare with `is` or ==."},
    {0, NULL},
};

static PyType_Spec dtype_spec = {
    .name = "xtrain.dtype",
    .basicsize = sizeof(PyDtype),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = dtype_slots,
};

int py_dtype_init(PyObject *module) {
    xt_py->dtype_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &dtype_spec, NULL);
    if (xt_py->dtype_type == NULL || PyModule_AddObjectRef(module, "dtype", (PyObject *)xt_py->dtype_type) < 0) return -1;
    for (int i = 0; i < XT_DTYPE_COUNT; i++) {
        PyDtype *dtype = (PyDtype *)xt_py->dtype_type->tp_alloc(xt_py->dtype_type, 0);
        if (dtype == NULL) return -1;
        dtype->dtype = (XtDtype)i;
        xt_py->dtype[i] = (PyObject *)dtype;
        if (PyModule_AddObjectRef(module, xt_dtype_name((XtDtype)i), (PyObject *)dtype) < 0) return -1;
    }
    return 0;
}
