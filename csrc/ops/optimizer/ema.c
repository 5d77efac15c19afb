/* ema.c - exponential averages of many tensors, in place, in one call. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"
#include "ops/optimizer/lists.h"

#include <stdlib.h>

static XtStatus forward(XtCall *c) {
    const XtArg *averages = &c->arg[0], *tensors = &c->arg[1];
    XtTensor *step = c->arg[2].tensor;
    const XtTensor *guard = c->arg[4].tensor;
    const double decay = c->arg[3].f;
    XtStatus status = XT_OK;
    XtEmaItem *items = NULL;
    XtTensor **dense = NULL;
    if (!(decay >= 0 && decay < 1)) return xt_error(XT_VALUE_ERROR, "ema_: decay must be in [0, 1), got %g", decay);
    if (tensors->count == 0) return xt_error(XT_VALUE_ERROR, "ema_: tensors must hold at least one tensor, got none");
    for (int i = 0; i < tensors->count; i++) {
        XT_TRY(xt_check_float(c->op, "every tensor", tensors->tensors[i]));
        XT_TRY(xt_check_device(c->op, "tensors[0]", tensors->tensors[0], "every tensor", tensors->tensors[i]));
    }
    XT_TRY(xt_check_list(c->op, "averages", averages, tensors, xt_dtype_accumulator));
    XT_TRY(xt_check_device(c->op, "tensors[0]", tensors->tensors[0], "step", step));
    XT_TRY(xt_check_dtype(c->op, "step", step, XT_INT64));
    XT_TRY(xt_check_ndim(c->op, "step", step, 0, 0));
    if (guard) XT_TRY(xt_check_scalar(c->op, "guard", guard, tensors, XT_FLOAT32));
    items = calloc((size_t)tensors->count, sizeof *items);
    dense = calloc((size_t)tensors->count, sizeof *dense);
    if (!items || !dense) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "ema_: out of memory"));
    for (int i = 0; i < tensors->count; i++) {
        XT_TRY(xt_dense(tensors->tensors[i], &dense[i]));
        items[i] = (XtEmaItem){.average = averages->tensors[i]->data,
                               .x = dense[i]->data,
                               .dtype = dense[i]->dtype,
                               .numel = xt_view_numel(&dense[i]->view)};
    }
    for (int i = 0; i < tensors->count; i++) XT_TRY(xt_begin_inplace(averages->tensors[i], c->op->name));
    XT_TRY(xt_begin_inplace(step, c->op->name));
    XT_TRY(
        xt_backend_of(tensors->tensors[0])
            ->ema(&(XtEma){.items = items, .count = tensors->count, .step = step->data, .guard = xt_data(guard), .decay = decay}));
done:
    for (int i = 0; dense && i < tensors->count; i++) xt_tensor_release(dense[i]);
    free(dense);
    free(items);
    return status;
}

const XtOp xt_op_ema_ = {
    .name = "ema_",
    .signature = "averages: Tensors, tensors: Tensors, step: Tensor, decay: float, guard: Tensor? = None -> None",
    .forward = forward,
    .doc = "average += (x - average) (1 - decay) / (1 - decay^n), n = step + 1, for every tensor x, in place: the average of\n"
           "all x so far with weights decay^age. Averages are float32 (float64 for float64). step: an int64 scalar, counted up.\n"
           "guard: a float32 scalar; when it is NaN or infinite, nothing is changed. Both are on the tensors' device.",
};
