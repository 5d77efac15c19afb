/* args.c - binds the arguments of one call by a parsed signature. Error messages name function, argument, rule and value. */
#include "py/bind/bind.h"
#include "py/numpy_api.h"

/* ---- one argument ---------------------------------------------------------------------------------------------------- */

/* Fills arg->ints from `count` objects. */
static int bind_ints(const char *op, const char *name, PyObject *const *items, Py_ssize_t count, XtArg *arg) {
    if (count > XT_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must have at most %d entries, got %zd", op, name, XT_MAX_DIMS, count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        int found = py_int64(op, name, items[i], &arg->ints[i]);
        if (found < 0) return -1;
        if (found == 0) {
            PyErr_Format(PyExc_TypeError, "%s: argument '%s' must be an int or a tuple of ints, got %.100s as entry %zd", op, name,
                         items[i] == Py_None ? "None" : Py_TYPE(items[i])->tp_name, i);
            return -1;
        }
    }
    arg->count = (int)count;
    arg->is_sequence = true;
    return 0;
}

static int bind_ints_object(const char *op, const PyParam *param, PyObject *object, XtArg *arg) {
    if (PyTuple_Check(object) || PyList_Check(object)) {
        PyObject *items = PySequence_Tuple(object); /* a snapshot: __index__ of an entry may change the list */
        if (items == NULL) return -1;
        Py_ssize_t count = PyTuple_GET_SIZE(items);
        PyObject *const *first = count > 0 ? &PyTuple_GET_ITEM(items, 0) : NULL;
        int result = bind_ints(op, param->name, first, count, arg);
        Py_DECREF(items);
        return result;
    }
    int found = py_int64(op, param->name, object, &arg->ints[0]);
    if (found < 0) return -1;
    if (found == 0) return py_refuse(op, param->name, py_kind_rule(param->kind, param->optional), object);
    arg->count = 1; /* is_sequence stays false: split takes one int as "equal pieces" */
    return 0;
}

static int bind_tensors(const char *op, const PyParam *param, PyObject *object, XtArg *arg, PyObject **keep) {
    if (!PyTuple_Check(object) && !PyList_Check(object))
        return py_refuse(op, param->name, py_kind_rule(param->kind, param->optional), object);
    /* A snapshot that owns the tensors: another thread may change the list while the op runs without the GIL. */
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) return -1;
    *keep = items;
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    if (count > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must have fewer than 2^31 tensors, got %zd", op, param->name, count);
        return -1;
    }
    arg->tensors = PyMem_Malloc(sizeof(XtTensor *) * (size_t)(count > 0 ? count : 1));
    if (arg->tensors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(items, i);
        if (!py_is_tensor(item)) {
            PyErr_Format(PyExc_TypeError, "%s: argument '%s' must be a list or tuple of Tensors, got %.100s as entry %zd", op,
                         param->name, item == Py_None ? "None" : Py_TYPE(item)->tp_name, i);
            return -1;
        }
        arg->tensors[i] = py_tensor(item);
    }
    arg->count = (int)count;
    return 0;
}

/* The text of a str, refusing NUL bytes, which C would take for the end. */
static int bind_text(const char *op, const char *name, PyObject *object, const char **out) {
    Py_ssize_t length;
    const char *text = py_utf8(op, name, object, &length);
    if (text == NULL) return -1;
    if (strlen(text) != (size_t)length) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must not contain NUL characters", op, name);
        return -1;
    }
    *out = text;
    return 1;
}

static int bind_one(const char *op, const PyParam *param, PyObject *object, XtArg *arg, PyObject **keep) {
    int found = 0;
    XtDtype dtype;
    arg->given = true;
    switch (param->kind) {
    case XT_ARG_TENSOR:
        if (py_is_tensor(object)) {
            arg->tensor = py_tensor(object);
            return 0;
        }
        break;
    case XT_ARG_TENSORS: return bind_tensors(op, param, object, arg, keep);
    case XT_ARG_INTS: return bind_ints_object(op, param, object, arg);
    case XT_ARG_OPERAND: found = py_operand(op, param->name, object, arg); break;
    case XT_ARG_NUMBER: found = py_number(op, param->name, object, &arg->scalar); break;
    case XT_ARG_INT: found = py_int64(op, param->name, object, &arg->i); break;
    case XT_ARG_FLOAT: found = py_double(op, param->name, object, &arg->f); break;
    case XT_ARG_BOOL:
        if (PyBool_Check(object) || PyArray_IsScalar(object, Bool)) {
            int truth = PyObject_IsTrue(object);
            arg->b = truth == 1;
            found = truth < 0 ? -1 : 1;
        }
        break;
    case XT_ARG_STR:
        if (PyUnicode_Check(object)) found = bind_text(op, param->name, object, &arg->s);
        break;
    case XT_ARG_DTYPE:
        found = py_dtype(op, param->name, object, &dtype);
        if (found == 1) arg->i = (int64_t)dtype;
        break;
    case XT_ARG_DEVICE: found = py_device(op, param->name, object, &arg->device); break;
    case PY_ARG_OBJECT: arg->given = object != Py_None; return 0;
    default: break;
    }
    if (found < 0 && PyErr_ExceptionMatches(PyExc_TypeError) && py_is_foreign_tensor(object)) {
        PyErr_Clear(); /* no single number; its own words do not name the argument */
        found = 0;
    }
    if (found == 0) return py_refuse(op, param->name, py_kind_rule(param->kind, param->optional), object);
    return found < 0 ? -1 : 0;
}

/* ---- all arguments --------------------------------------------------------------------------------------------------- */

static int find_param(const PySignature *signature, PyObject *key) {
    for (int i = 0; i < signature->count; i++) /* names in source code are interned, like our keys */
        if (signature->param[i].key == key) return i;
    for (int i = 0; i < signature->count; i++)
        if (PyUnicode_Compare(signature->param[i].key, key) == 0) return i;
    return -1;
}

static int place_keywords(const PySignature *signature, PyObject *const *values, PyObject *kwnames, PyBound *bound) {
    const char *op = signature->function.name;
    Py_ssize_t count = kwnames != NULL ? PyTuple_GET_SIZE(kwnames) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = PyTuple_GET_ITEM(kwnames, i);
        int at = find_param(signature, key);
        if (at < 0) {
            PyErr_Format(PyExc_TypeError, "%s: unexpected keyword argument '%.100U', the signature is %s%U", op, key, op,
                         signature->text);
            return -1;
        }
        if (bound->object[at] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s: argument '%s' was given twice", op, signature->param[at].name);
            return -1;
        }
        bound->object[at] = values[i];
    }
    return 0;
}

int py_bind(const PySignature *signature, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyBound *bound) {
    const char *op = signature->function.name;
    int last = signature->positional - 1;
    /* x.reshape(2, 3): the remaining positional arguments of a last `ints`. */
    bool spread = nargs > signature->positional && last >= 0 && signature->param[last].kind == XT_ARG_INTS;
    bound->signature = signature;
    memset(bound->arg, 0, sizeof bound->arg[0] * (size_t)signature->count);
    memset(bound->object, 0, sizeof bound->object[0] * (size_t)signature->count);
    memset(bound->keep, 0, sizeof bound->keep[0] * (size_t)signature->count);
    if (nargs > signature->positional && !spread) {
        PyErr_Format(PyExc_TypeError, "%s: takes at most %d positional arguments, got %zd", op, signature->positional, nargs);
        return -1;
    }
    for (int i = 0; i < signature->positional && i < nargs; i++) bound->object[i] = args[i];
    if (place_keywords(signature, args + nargs, kwnames, bound) < 0) return -1;

    for (int i = 0; i < signature->count; i++) {
        const PyParam *param = &signature->param[i];
        PyObject *object = bound->object[i];
        XtArg *arg = &bound->arg[i];
        arg->is_tensor = param->kind == XT_ARG_TENSOR || param->kind == XT_ARG_OPERAND;
        if (object == NULL) {
            if (!param->has_default) {
                PyErr_Format(PyExc_TypeError, "%s: missing argument '%s', the signature is %s%U", op, param->name, op,
                             signature->text);
                goto fail;
            }
            *arg = param->value;
            if (!arg->given) bound->object[i] = Py_None;
        } else if (spread && i == last) {
            arg->given = true;
            if (bind_ints(op, param->name, args + last, nargs - last, arg) < 0) goto fail;
        } else if (!(object == Py_None && param->optional)) {
            if (bind_one(op, param, object, arg, &bound->keep[i]) < 0) goto fail;
        }
    }
    return 0;
fail:
    py_bound_clear(bound);
    return -1;
}

void py_bound_clear(PyBound *bound) {
    for (int i = 0; i < bound->signature->count; i++) {
        if (bound->signature->param[i].kind != XT_ARG_TENSORS) continue;
        PyMem_Free(bound->arg[i].tensors);
        bound->arg[i].tensors = NULL;
        Py_CLEAR(bound->keep[i]);
    }
}
