/* testing.c - what xtrain.testing needs from the core: comparing two tensors on their device, and a hook for every op call. */
#include "contract/backend.h"
#include "contract/reduce.h"
#include "py/py.h"

#include <math.h>

/* ---- compare --------------------------------------------------------------------------------------------------------- */

static bool check_compare(const XtTensor *out, const XtTensor *ref, double rtol, double atol) {
    if (!xt_same_shape(&out->view, &ref->view))
        PyErr_Format(PyExc_ValueError, "compare: other must have shape %s, got %s", xt_shape_text(out->ndim, out->shape),
                     xt_shape_text(ref->ndim, ref->shape));
    else if (!xt_device_equal(out->storage->device, ref->storage->device))
        PyErr_Format(PyExc_ValueError, "compare: other must be on %s, got %s", xt_device_name(out->storage->device),
                     xt_device_name(ref->storage->device));
    else if (xt_dtype_is_float(out->dtype) != xt_dtype_is_float(ref->dtype))
        PyErr_Format(PyExc_TypeError, "compare: other must be %s like input, got %s",
                     xt_dtype_is_float(out->dtype) ? "floating point" : "an integer dtype", xt_dtype_name(ref->dtype));
    else if (!(isfinite(rtol) && isfinite(atol) && rtol >= 0 && atol >= 0))
        PyErr_SetString(PyExc_ValueError, "compare: rtol and atol must be finite and not negative");
    return PyErr_Occurred() == NULL;
}

static PyObject *run_compare(PyBound *bound) {
    XtTensor *out = bound->arg[0].tensor, *ref = bound->arg[1].tensor;
    XtComparison r;
    XtCompare params = {.out = out->view, .ref = ref->view, .rtol = bound->arg[2].f, .atol = bound->arg[3].f, .result = &r};
    if (!check_compare(out, ref, params.rtol, params.atol)) return NULL;
    const XtBackend *backend;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_backend_for(out->storage->device, &backend);
    if (status == XT_OK) status = backend->compare(&params);
    py_gil_enter(saved);
    if (status != XT_OK) return py_raise(status);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:d,s:d,s:d,s:d}", "errors", (long long)r.errors, "worst", (long long)r.worst,
                         "out_nan", (long long)r.out_nan, "out_inf", (long long)r.out_inf, "ref_nan", (long long)r.ref_nan,
                         "ref_inf", (long long)r.ref_inf, "max_abs", r.max_abs, "max_rel", r.max_rel, "max_ref", r.max_ref,
                         "worst_ratio", r.worst_ratio);
}

/* ---- the call hook --------------------------------------------------------------------------------------------------- */

static PyObject *wrap_borrowed(XtTensor *tensor) {
    xt_tensor_retain(tensor);
    return py_wrap(tensor);
}

static PyObject *wrap_all(XtTensor *const *tensors, int count) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; i < count && tuple != NULL; i++) {
        PyObject *item = wrap_borrowed(tensors[i]);
        if (item == NULL) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, item);
    }
    return tuple;
}

static PyObject *scalar_object(const XtScalar *scalar) {
    return scalar->is_int ? PyLong_FromLongLong(scalar->i) : PyFloat_FromDouble(scalar->d);
}

/* The Python object that args.c would turn into `arg`. */
static PyObject *argument_object(const PyParam *param, const XtArg *arg) {
    switch (param->kind) {
    case XT_ARG_TENSOR:
        if (arg->tensor == NULL) Py_RETURN_NONE;
        return wrap_borrowed(arg->tensor);
    case XT_ARG_OPERAND: return arg->tensor != NULL ? wrap_borrowed(arg->tensor) : scalar_object(&arg->scalar);
    case XT_ARG_TENSORS: return wrap_all(arg->tensors, arg->count);
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
    static _Thread_local bool telling; /* the hook does not see the ops it calls itself */
    if (telling) return 0;
    telling = true;
    PyObject *hook = Py_NewRef(xt_py->call_hook); /* it may remove itself */
    PyObject *arguments = PyDict_New(), *outputs = NULL, *result = NULL, *module, *callable = NULL;
    if (arguments == NULL || (module = PyType_GetModule(xt_py->op_type)) == NULL) goto done;
    if ((callable = PyObject_GetAttrString(module, op->name)) == NULL) goto done;
    const PySignature *signature = py_signature_of(callable);
    /* Operators and indexing leave out what has a default. */
    for (int i = 0; i < signature->count && i < count; i++) {
        PyObject *value = argument_object(&signature->param[i], &args[i]);
        int stored = value != NULL ? PyDict_SetItem(arguments, signature->param[i].key, value) : -1;
        Py_XDECREF(value);
        if (stored < 0) goto done;
    }
    if ((outputs = wrap_all(out, out_count)) == NULL) goto done;
    result = PyObject_CallFunctionObjArgs(hook, callable, arguments, outputs, NULL);
done:
    telling = false;
    Py_DECREF(hook);
    Py_XDECREF(arguments);
    Py_XDECREF(outputs);
    Py_XDECREF(callable);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

static PyObject *run_set_call_hook(PyBound *bound) {
    PyObject *hook = bound->object[0], *before = xt_py->call_hook;
    if (hook != Py_None && !PyCallable_Check(hook)) {
        py_refuse("set_call_hook", "hook", "a callable or None", hook);
        return NULL;
    }
    xt_py->call_hook = hook != Py_None ? Py_NewRef(hook) : NULL;
    return before != NULL ? before : Py_NewRef(Py_None);
}

const PyFunction py_testing_functions[] = {
    {"compare", "input: Tensor, other: Tensor, rtol: float, atol: float", run_compare,
     "Compares input with other, the reference, on their device; only the counts and maxima of XtComparison (csrc/kernels.h) come "
     "back, as a dict.",
     0, NULL},
    {"set_call_hook", "hook: object", run_set_call_hook,
     "hook(op, arguments, outputs) is called after every op of this process that it does not call itself: op is `_C.<name>`, "
     "arguments a dict by parameter name, "
     "outputs\n"
     "a tuple of Tensors. None ends it. Returns the hook before.",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
