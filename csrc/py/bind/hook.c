/* hook.c - the callables of set_call_hook see every op that is called from Python. */
#include "py/bind/bind.h"

#define OWN "xtrain.set_call_hook" /* the key of own in the dictionary of its thread */

/* A capsule of the callable of set_call_hook for this thread, or NULL. Borrowed: the dictionary that Python has for the thread owns it,
 * so that a thread that ends leaves nothing behind. */
static _Thread_local PyObject *own;

/* Python may clear the dictionary of another thread: in a forked child, and when it ends, behind this module. */
static void forget(PyObject *capsule) {
    if (own == capsule) own = NULL;
    if (xt_py != NULL) xt_py->hooks--;
    Py_DECREF((PyObject *)PyCapsule_GetPointer(capsule, OWN));
}

static PyObject *own_hook(void) { return own != NULL ? PyCapsule_GetPointer(own, OWN) : NULL; }

static PyObject *swap_own(PyObject *hook) {
    PyObject *before = own_hook() != NULL ? own_hook() : Py_None, *threads = PyThreadState_GetDict(), *capsule = NULL;
    Py_INCREF(before);
    if (threads == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    if (hook != Py_None) {
        if ((capsule = PyCapsule_New(hook, OWN, forget)) == NULL) goto fail;
        Py_INCREF(hook);
        xt_py->hooks++;
    }
    if (capsule != NULL && PyDict_SetItemString(threads, OWN, capsule) < 0) goto fail;
    if (capsule == NULL && own != NULL && PyDict_DelItemString(threads, OWN) < 0) goto fail;
    own = capsule;
    Py_XDECREF(capsule);
    return before;
fail:
    Py_XDECREF(capsule);
    Py_DECREF(before);
    return NULL;
}

PyObject *py_swap_hook(PyObject *hook, bool thread) {
    if (thread) return swap_own(hook);
    PyObject *before = xt_py->call_hook;
    xt_py->hooks += (hook != Py_None) - (before != NULL);
    xt_py->call_hook = hook != Py_None ? Py_NewRef(hook) : NULL;
    return before != NULL ? before : Py_NewRef(Py_None);
}

static PyObject *scalar_object(const XtScalar *scalar) {
    if (scalar->is_bool) return PyBool_FromLong(scalar->i != 0); /* an int would promote a bool tensor beside it */
    return scalar->is_int ? PyLong_FromLongLong(scalar->i) : PyFloat_FromDouble(scalar->d);
}

/* The inverse of args.c: a Python object that binds to `arg`. */
static PyObject *argument_object(const PyParam *param, const XtArg *arg) {
    switch (param->kind) {
    case XT_ARG_TENSOR:
        if (arg->tensor == NULL) Py_RETURN_NONE;
        return py_wrap_borrowed(arg->tensor);
    case XT_ARG_OPERAND: return arg->tensor != NULL ? py_wrap_borrowed(arg->tensor) : scalar_object(&arg->scalar);
    case XT_ARG_TENSORS:
        if (!arg->given) Py_RETURN_NONE;
        return py_wrap_tuple(arg->tensors, arg->count);
    case XT_ARG_INTS:
        if (!arg->given && arg->count == 0) Py_RETURN_NONE;
        if (arg->count == 1 && !arg->is_sequence) return PyLong_FromLongLong(arg->ints[0]);
        return py_shape_tuple(arg->count, arg->ints);
    default: break;
    }
    if (!arg->given) Py_RETURN_NONE;
    switch (param->kind) {
    case XT_ARG_NUMBER: return scalar_object(&arg->scalar);
    case XT_ARG_INT: return PyLong_FromLongLong(arg->i);
    case XT_ARG_FLOAT: return PyFloat_FromDouble(arg->f);
    case XT_ARG_BOOL: return PyBool_FromLong(arg->b);
    case XT_ARG_STR: return PyUnicode_FromString(arg->s);
    case XT_ARG_DTYPE: return py_dtype_object((XtDtype)arg->i);
    case XT_ARG_DEVICE: return py_device_object(arg->device);
    default: Py_RETURN_NONE;
    }
}

int py_call_seen(const XtOp *op, const XtArg *args, int count, XtTensor *const *out, int out_count) {
    static _Thread_local bool telling; /* hooks do not see the ops they call themselves */
    PyObject *hooks[2] = {own_hook(), xt_py->call_hook};
    if (telling || (hooks[0] == NULL && hooks[1] == NULL)) return 0;
    telling = true;
    for (int i = 0; i < 2; i++) Py_XINCREF(hooks[i]); /* it may remove itself */
    PyObject *arguments = PyDict_New(), *outputs = NULL, *result = NULL, *module, *callable = NULL;
    if (arguments == NULL || (module = PyType_GetModule(xt_py->op_type)) == NULL) goto done;
    if ((callable = PyObject_GetAttrString(module, op->name)) == NULL) goto done;
    if (!Py_IS_TYPE(callable, xt_py->op_type)) { /* somebody has put another object into its place */
        PyErr_Format(PyExc_TypeError, "set_call_hook: _C.%s must be the op itself while calls are seen, got %s", op->name,
                     Py_TYPE(callable)->tp_name);
        goto done;
    }
    const PySignature *signature = py_signature_of(callable);
    /* Operators and indexing leave out arguments that have a default. */
    for (int i = 0; i < signature->count && i < count; i++) {
        PyObject *value = argument_object(&signature->param[i], &args[i]);
        int stored = value != NULL ? PyDict_SetItem(arguments, signature->param[i].key, value) : -1;
        Py_XDECREF(value);
        if (stored < 0) goto done;
    }
    if ((outputs = py_wrap_tuple(out, out_count)) == NULL) goto done;
    for (int i = 0; i < 2; i++) {
        if (hooks[i] == NULL) continue;
        Py_XDECREF(result);
        if ((result = PyObject_CallFunctionObjArgs(hooks[i], callable, arguments, outputs, NULL)) == NULL) goto done;
    }
done:
    telling = false;
    for (int i = 0; i < 2; i++) Py_XDECREF(hooks[i]);
    Py_XDECREF(arguments);
    Py_XDECREF(outputs);
    Py_XDECREF(callable);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}
