/* call.c - an op run for Python: without the GIL, shown to the call hook, its outputs as objects. */
#include "py/bind/bind.h"

static XtStatus call_seen(const XtOp *op, const XtArg *args, int count, XtTensor **out, int *out_count) {
    XtStatus status = py_call_unseen(op, args, count, out, out_count);
    if (status != XT_OK || xt_py->call_hook == NULL || py_call_seen(op, args, count, out, *out_count) == 0) return status;
    for (int i = 0; i < *out_count; i++) xt_tensor_release(out[i]);
    return XT_PYTHON_ERROR;
}

XtTensor *py_call_one(const XtOp *op, const XtArg *args, int count) {
    XtTensor *out[XT_MAX_OUTPUTS] = {NULL};
    int out_count;
    XtStatus status = call_seen(op, args, count, out, &out_count);
    return py_first_output(op, status, out, out_count);
}

PyObject *py_run_op(PyBound *bound) {
    const XtOp *op = bound->signature->function.op;
    XtTensor *out[XT_MAX_OUTPUTS] = {NULL};
    int count;
    XtStatus status = call_seen(op, bound->arg, bound->signature->count, out, &count);
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
