/* clip_grad_norm.c - scales many gradients in place by their common norm, in one call. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>

static XtStatus clip_forward(XtCall *c) {
    const XtArg *grads = &c->arg[0];
    double max_norm = c->arg[1].f;
    XtTensor *norm = NULL;
    XtView *items = NULL;
    XtStatus status = XT_OK;
    if (!(max_norm >= 0.0)) return xt_error(XT_VALUE_ERROR, "clip_grad_norm_: max_norm must be at least 0, got %g", max_norm);
    XtDevice device = xt_default_device();
    if (grads->count) device = grads->tensors[0]->storage->device;
    XT_TRY(xt_tensor_empty(device, XT_FLOAT32, 0, NULL, &norm));
    items = malloc(sizeof *items * (size_t)(grads->count ? grads->count : 1));
    if (!items) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "clip_grad_norm_: out of memory"));
    for (int i = 0; i < grads->count; i++) {
        XtTensor *g = grads->tensors[i];
        XT_TRY(xt_check_float(c->op, "every gradient", g));
        XT_TRY(xt_check_device(c->op, "grads[0]", grads->tensors[0], "every gradient", g));
        if (!xt_view_is_contiguous(&g->view))
            XT_TRY(xt_error(XT_VALUE_ERROR, "clip_grad_norm_: grads[%d] must be contiguous, got strides of a view", i));
        items[i] = g->view;
    }
    const XtBackend *backend = xt_backend_of(norm);
    XT_TRY(backend->grad_norm(&(XtGradNorm){.norm = norm->data, .items = items, .count = grads->count}));
    if (max_norm < INFINITY && grads->count) {
        for (int i = 0; i < grads->count; i++) XT_TRY(xt_begin_inplace(grads->tensors[i], c->op->name));
        XT_TRY(backend->clip(&(XtClip){.norm = norm->data, .items = items, .count = grads->count, .max_norm = max_norm}));
    }
    c->out[c->out_count++] = norm;
    norm = NULL;
done:
    free(items);
    xt_tensor_release(norm);
    return status;
}

const XtOp xt_op_clip_grad_norm_ = {
    .name = "clip_grad_norm_",
    .signature = "grads: Tensors, max_norm: float -> Tensor",
    .forward = clip_forward,
    .doc = "Scales all tensors in place by min(1, max_norm / (norm + 1e-6)); returns their common 2-norm before that (float32 "
           "scalar).\n"
           "max_norm = inf only measures.",
};
