/* optimizer.c - in-place updates of many tensors in one call: AdamW and clipping by the global norm. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>

static XtStatus check_list(const XtOp *op, const char *name, const XtArg *list, const XtArg *params,
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

static XtStatus adamw_forward(XtCall *c) {
    const XtArg *params = &c->arg[0], *grads = &c->arg[1], *m = &c->arg[2], *v = &c->arg[3], *masters = &c->arg[4];
    XtStatus status = XT_OK;
    XtAdamWItem *items = NULL;
    XtTensor **dense = NULL;
    if (params->count == 0) return XT_OK;
    for (int i = 0; i < params->count; i++) {
        XT_TRY(xt_check_float(c->op, "every parameter", params->tensors[i]));
        XT_TRY(xt_check_device(c->op, "params[0]", params->tensors[0], "every parameter", params->tensors[i]));
    }
    XT_TRY(check_list(c->op, "params", params, params, NULL));
    XT_TRY(check_list(c->op, "exp_avgs", m, params, xt_dtype_accumulator));
    XT_TRY(check_list(c->op, "exp_avg_sqs", v, params, xt_dtype_accumulator));
    if (masters->count) XT_TRY(check_list(c->op, "masters", masters, params, xt_dtype_accumulator));
    if (grads->count != params->count)
        return xt_error(XT_VALUE_ERROR, "adamw_: grads must hold one tensor per parameter (%d), got %d", params->count,
                        grads->count);
    if (c->arg[10].i < 1) return xt_error(XT_VALUE_ERROR, "adamw_: step must be at least 1, got %lld", (long long)c->arg[10].i);
    static const char *const names[] = {"lr", "beta1", "beta2", "eps", "weight_decay"};
    for (int i = 0; i < 5; i++) {
        double value = c->arg[5 + i].f, limit = i == 1 || i == 2 ? 1.0 : INFINITY;
        if (!(value >= 0 && value < limit))
            return xt_error(XT_VALUE_ERROR, "adamw_: %s must be in [0, %g), got %g", names[i], limit, value);
    }
    const XtTensor *guard = c->arg[11].tensor;
    if (guard) {
        XT_TRY(xt_check_device(c->op, "params[0]", params->tensors[0], "guard", guard));
        XT_TRY(xt_check_dtype(c->op, "guard", guard, XT_FLOAT32));
        XT_TRY(xt_check_ndim(c->op, "guard", guard, 0, 0));
    }
    XtTensor *missed = c->arg[12].tensor, *missed_after = c->arg[13].tensor;
    for (int i = 0; i < 2; i++) {
        const char *name = i == 0 ? "missed" : "missed_after";
        const XtTensor *count = i == 0 ? missed : missed_after;
        if (!count) continue;
        XT_TRY(xt_check_device(c->op, "params[0]", params->tensors[0], name, count));
        XT_TRY(xt_check_dtype(c->op, name, count, XT_INT64));
        XT_TRY(xt_check_ndim(c->op, name, count, 0, 0));
    }
    if (missed_after && (!missed || missed->data == missed_after->data))
        return xt_error(XT_VALUE_ERROR, "adamw_: missed_after must come with missed and be another tensor, got %s",
                        missed ? "the same" : "no missed");
    items = calloc((size_t)params->count, sizeof *items);
    dense = calloc((size_t)params->count, sizeof *dense);
    if (!items || !dense) {
        status = xt_error(XT_OUT_OF_MEMORY, "adamw_: out of memory");
        goto done;
    }
    for (int i = 0; i < params->count; i++) {
        XtTensor *p = params->tensors[i];
        XT_TRY(xt_check_shape(c->op, "the gradient", grads->tensors[i], p->ndim, p->shape));
        XT_TRY(xt_check_like(c->op, "the parameter", p, "its gradient", grads->tensors[i]));
        XT_TRY(xt_dense(grads->tensors[i], &dense[i]));
        items[i] = (XtAdamWItem){.p = p->data,
                                 .m = m->tensors[i]->data,
                                 .v = v->tensors[i]->data,
                                 .master = masters->count ? masters->tensors[i]->data : NULL,
                                 .g = dense[i]->data,
                                 .dtype = p->dtype,
                                 .numel = xt_view_numel(&p->view),
                                 .weight_decay = c->arg[9].f};
    }
    for (int i = 0; i < params->count; i++) {
        XT_TRY(xt_begin_inplace(params->tensors[i], c->op->name));
        XT_TRY(xt_begin_inplace(m->tensors[i], c->op->name));
        XT_TRY(xt_begin_inplace(v->tensors[i], c->op->name));
        if (masters->count) XT_TRY(xt_begin_inplace(masters->tensors[i], c->op->name));
    }
    if (missed_after) XT_TRY(xt_begin_inplace(missed_after, c->op->name));
    XtAdamW p = {.items = items,
                 .count = params->count,
                 .lr = c->arg[5].f,
                 .beta1 = c->arg[6].f,
                 .beta2 = c->arg[7].f,
                 .eps = c->arg[8].f,
                 .step = c->arg[10].i,
                 .guard = guard ? guard->data : NULL,
                 .missed = missed ? missed->data : NULL,
                 .missed_after = missed_after ? missed_after->data : NULL};
    XT_TRY(xt_backend_of(params->tensors[0])->adamw(&p));
done:
    for (int i = 0; dense && i < params->count; i++) xt_tensor_release(dense[i]);
    free(dense);
    free(items);
    return status;
}

const XtOp xt_op_adamw_ = {
    .name = "adamw_",
    .signature =
        "params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors, lr: float, beta1: float, "
        "beta2: float, eps: float, weight_decay: float, step: int, guard: Tensor? = None, "
        "missed: Tensor? = None, missed_after: Tensor? = None -> None",
    .forward = adamw_forward,
    .doc =
        "One AdamW step (Loshchilov & Hutter 2019) on every tensor, in place, in PyTorch's order of operations.\n"
        "Moments and masters are float32 (float64 for float64); masters is an empty list or holds the full-precision parameters.\n"
        "guard: a float32 scalar on the same device; when it is NaN or infinite, nothing is changed.\n"
        "missed: an int64 scalar there: how many of `step` steps a guard has stopped; missed_after, another, gets their number "
        "after this one.",
};

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
    if (!items) {
        status = xt_error(XT_OUT_OF_MEMORY, "clip_grad_norm_: out of memory");
        goto done;
    }
    for (int i = 0; i < grads->count; i++) {
        XtTensor *g = grads->tensors[i];
        XT_TRY(xt_check_float(c->op, "every gradient", g));
        XT_TRY(xt_check_device(c->op, "grads[0]", grads->tensors[0], "every gradient", g));
        if (!xt_view_is_contiguous(&g->view)) {
            status = xt_error(XT_VALUE_ERROR, "clip_grad_norm_: grads[%d] must be contiguous, got strides of a view", i);
            goto done;
        }
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
