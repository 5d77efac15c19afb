/* call.c - an op run for Python: without the GIL, shown to the call hook, its outputs as objects. */
#include "py/bind/bind.h"

static XtStatus call_seen(const XtOp *op, const XtArg *args, int count, XtTensor **out, int *out_count) {
    XtStatus status = py_call_unseen(op, args, count, out, out_count);
    if (status != XT_OK || xt_py->hooks == 0 || py_call_seen(op, args, count, out, *out_count) == 0) return status;
    for (int i = 0; i < *out_count; i++) xt_tensor_release(out[i]);
    return XT_PYTHON_ERROR;
}

XtTensor *py_call_one(const XtOp *op, const XtArg *args, int count) {
    XtTensor *out[XT_MAX_OUTPUTS] = {NULL};
    int out_count;
    XtStatus status = call_seen(op, args, count, out, &out_count);
    return py_first_output(op, status, out, out_count);
}

/* contiguous() of a dense tensor and the like return their input: the caller gets the object it passed. */
static PyObject *wrap_output(const PyBound *bound, XtTensor *out) {
    PyObject *first = bound->object[0];
    if (bound->signature->param[0].kind != XT_ARG_TENSOR || out != py_tensor(first)) return py_wrap(out);
    xt_tensor_release(out);
    return Py_NewRef(first);
}

/* Takes over the references, also when it fails. */
static PyObject *wrap_outputs(XtTensor *const *out, int count) {
    PyObject *tuple = py_wrap_tuple(out, count);
    for (int i = 0; i < count; i++) xt_tensor_release(out[i]);
    return tuple;
}

PyObject *py_run_op(PyBound *bound) {
    const XtOp *op = bound->signature->function.op;
    XtTensor *out[XT_MAX_OUTPUTS] = {NULL};
    int count;
    XtStatus status = call_seen(op, bound->arg, bound->signature->count, out, &count);
    if (status != XT_OK) return py_raise(status);

    switch (bound->signature->result) {
    case PY_RESULT_TENSOR: return wrap_output(bound, py_first_output(op, status, out, count));
    case PY_RESULT_TUPLE: return wrap_outputs(out, count);
    default: break;
    }
    for (int i = 0; i < count; i++) xt_tensor_release(out[i]);
    /* copy_, add_, ...: the caller gets the object it passed, as identity matters in `x += 1`. */
    return Py_NewRef(bound->signature->result == PY_RESULT_SELF ? bound->object[0] : Py_None);
}
