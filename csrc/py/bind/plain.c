/* plain.c - calls of ops that csrc/py makes on its own behalf: not recorded, not shown to the call hook. */
#include "py/bind/bind.h"

XtTensor *py_first_output(const XtOp *op, XtStatus status, XtTensor *const *out, int out_count) {
    if (status != XT_OK) {
        py_raise(status);
        return NULL;
    }
    for (int i = 1; i < out_count; i++) xt_tensor_release(out[i]);
    if (out_count == 0) PyErr_Format(PyExc_SystemError, "%s: gave no output", op->name);
    return out_count > 0 ? out[0] : NULL;
}

XtTensor *py_call_plain(const XtOp *op, const XtArg *args, int count) {
    XtTensor *out[XT_MAX_OUTPUTS] = {NULL};
    int out_count;
    bool mode = xt_grad_mode();
    xt_set_grad_mode(false);
    XtStatus status = py_call_unseen(op, args, count, out, &out_count);
    xt_set_grad_mode(mode);
    return py_first_output(op, status, out, out_count);
}
