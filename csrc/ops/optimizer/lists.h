/* lists.h - what the ops of optimizers check of their lists of tensors. */
#pragma once

#include "ops/ops.h"

/* One contiguous tensor a parameter, of its shape and device, and of its dtype or the one that dtype_for makes of it. */
static inline XtStatus xt_check_list(const XtOp *op, const char *name, const XtArg *list, const XtArg *params,
                                     XtDtype (*dtype_for)(XtDtype)) {
    if (list->count != params->count)
        return xt_error(XT_VALUE_ERROR, "%s: %s must hold one tensor per parameter (%d), got %d", op->name, name, params->count,
                        list->count);
    for (int i = 0; i < list->count; i++) {
        const XtTensor *p = params->tensors[i], *t = list->tensors[i];
        XtDtype want = dtype_for ? dtype_for(p->dtype) : p->dtype;
        if (!xt_same_shape(&p->view, &t->view) || t->dtype != want || !xt_device_equal(p->storage->device, t->storage->device))
            return xt_error(XT_VALUE_ERROR, "%s: %s[%d] must be %s %s on %s, got %s %s on %s", op->name, name, i,
                            xt_dtype_name(want), xt_shape_text(p->ndim, p->shape), xt_device_name(p->storage->device),
                            xt_dtype_name(t->dtype), xt_shape_text(t->ndim, t->shape), xt_device_name(t->storage->device));
        if (!xt_view_is_contiguous(&t->view))
            return xt_error(XT_VALUE_ERROR, "%s: %s[%d] must be contiguous, got strides of a view", op->name, name, i);
    }
    return XT_OK;
}

/* A scalar on the parameters' device, whose value is not looked at: reading it would wait for that device. */
static inline XtStatus xt_check_scalar(const XtOp *op, const char *name, const XtTensor *scalar, const XtArg *params,
                                       XtDtype dtype) {
    XT_CHECK(xt_check_device(op, "params[0]", params->tensors[0], name, scalar));
    XT_CHECK(xt_check_dtype(op, name, scalar, dtype));
    return xt_check_ndim(op, name, scalar, 0, 0);
}
