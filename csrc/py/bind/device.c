/* device.c - the type `device`: small values, compared by content. */
#include "py/bind/bind.h"

typedef struct PyDevice {
    PyObject_HEAD XtDevice device;
} PyDevice;

static XtDevice device_of(PyObject *self) { return ((PyDevice *)self)->device; }
static int most_index(int type) { return type == XT_CPU ? 0 : type == XT_CUDA ? UINT8_MAX : 1; }

PyObject *py_device_object(XtDevice device) {
    PyDevice *self = (PyDevice *)xt_py->device_type->tp_alloc(xt_py->device_type, 0);
    if (self != NULL) self->device = device;
    return (PyObject *)self;
}

/* "cpu", "cpu:0", "cuda", "cuda:7", "meta", "meta:1" */
bool py_device_named(const char *text, XtDevice *out) {
    const char *colon = strchr(text, ':');
    size_t length = colon != NULL ? (size_t)(colon - text) : strlen(text);
    int index = 0;
    if (colon != NULL) {
        size_t digits = strlen(colon + 1);
        if (digits == 0 || digits > 3) return false;
        for (const char *at = colon + 1; *at != '\0'; at++) {
            if (*at < '0' || *at > '9') return false;
            index = index * 10 + (*at - '0');
        }
    }
    bool cpu = length == 3 && memcmp(text, "cpu", 3) == 0, cuda = length == 4 && memcmp(text, "cuda", 4) == 0;
    bool meta = length == 4 && memcmp(text, "meta", 4) == 0;
    if ((!cpu && !cuda && !meta) || index > most_index(cpu ? XT_CPU : cuda ? XT_CUDA : XT_META)) return false;
    *out = (XtDevice){.type = cpu ? XT_CPU : cuda ? XT_CUDA : XT_META, .index = (uint8_t)index};
    return true;
}

int py_device(const char *op, const char *name, PyObject *object, XtDevice *out) {
    if (Py_IS_TYPE(object, xt_py->device_type)) {
        *out = device_of(object);
        return 1;
    }
    if (!PyUnicode_Check(object)) return 0;
    const char *text = py_utf8(op, name, object, NULL);
    if (text == NULL) return -1;
    if (py_device_named(text, out)) return 1;
    PyErr_Format(PyExc_ValueError, "%s: argument '%s' must be 'cpu', 'cuda', 'cuda:<index>' or 'meta', got '%.100s'", op, name,
                 text);
    return -1;
}

static PyObject *device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *object, *index = Py_None;
    XtDevice device;
    (void)type;
    static char *names[] = {"type", "index", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:device", names, &object, &index)) return NULL;
    int found = py_device("device", "type", object, &device);
    if (found == 0) py_refuse("device", "type", py_kind_rule(XT_ARG_DEVICE, false), object);
    if (found != 1) return NULL;
    if (index != Py_None) {
        int64_t number;
        found = py_int64("device", "index", index, &number);
        if (found == 0) py_refuse("device", "index", "an int or None", index);
        if (found != 1) return NULL;
        if (number < 0 || number > most_index(device.type)) {
            PyErr_Format(PyExc_ValueError, "device: argument 'index' must be in [0, %d], got %lld", most_index(device.type),
                         (long long)number);
            return NULL;
        }
        device.index = (uint8_t)number;
    }
    return py_device_object(device);
}

static void device_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *device_type_name(PyObject *self, void *Py_UNUSED(closure)) {
    static const char *const names[] = {[XT_CPU] = "cpu", [XT_CUDA] = "cuda", [XT_META] = "meta"};
    return PyUnicode_FromString(names[device_of(self).type]);
}

static PyObject *device_index(PyObject *self, void *Py_UNUSED(closure)) {
    if (device_of(self).type == XT_CPU) Py_RETURN_NONE;
    return PyLong_FromLong(device_of(self).index);
}

static PyObject *device_str(PyObject *self) { return PyUnicode_FromString(xt_device_name(device_of(self))); }
static PyObject *device_repr(PyObject *self) { return PyUnicode_FromFormat("device('%s')", xt_device_name(device_of(self))); }
static Py_hash_t device_hash(PyObject *self) { return 7919 + 256 * device_of(self).type + device_of(self).index; }

static PyObject *device_compare(PyObject *a, PyObject *b, int operation) {
    if ((operation != Py_EQ && operation != Py_NE) || !Py_IS_TYPE(a, xt_py->device_type) || !Py_IS_TYPE(b, xt_py->device_type))
        Py_RETURN_NOTIMPLEMENTED;
    return PyBool_FromLong(xt_device_equal(device_of(a), device_of(b)) == (operation == Py_EQ));
}

static PyObject *device_reduce(PyObject *self, PyObject *Py_UNUSED(ignored)) {
    return Py_BuildValue("O(s)", (PyObject *)Py_TYPE(self), xt_device_name(device_of(self)));
}

static PyGetSetDef device_getset[] = {
    {"type", device_type_name, NULL, "str: \"cpu\", \"cuda\" or \"meta\".", NULL},
    {"index", device_index, NULL, "int?: Number of the GPU; None for the CPU. Of meta: 0 rounds sizes as the CPU, 1 as a GPU.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef device_methods[] = {
    {"__reduce__", device_reduce, METH_NOARGS, "For copy and pickle: the text."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_new, (void *)device_new},
    {Py_tp_dealloc, (void *)device_dealloc},
    {Py_tp_repr, (void *)device_repr},
    {Py_tp_str, (void *)device_str},
    {Py_tp_hash, (void *)device_hash},
    {Py_tp_richcompare, (void *)device_compare},
    {Py_tp_getset, device_getset},
    {Py_tp_methods, device_methods},
    {Py_tp_doc,
     "device(type, index=None)\n--\n\ntype: device, index: int? = None\n\nWhere a tensor lives: device('cpu'), "
     "device('cuda'), device('cuda:1'), device('cuda', 1). On device('meta') tensors have sizes and no values: what would "
     "compute counts memory (memory_stats) and work (meta_work)."},
    {0, NULL},
};

static PyType_Spec device_spec = {
    .name = "xtrain.device",
    .basicsize = sizeof(PyDevice),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = device_slots,
};

int py_device_init(PyObject *module) {
    xt_py->device_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &device_spec, NULL);
    return xt_py->device_type != NULL ? PyModule_AddObjectRef(module, "device", (PyObject *)xt_py->device_type) : -1;
}
