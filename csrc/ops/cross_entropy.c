/* cross_entropy.c - loss of row r = log sum exp(logits[r]) - logits[r, target[r]].
 *
 *   dlogits[r, v] = (softmax(logits[r])[v] - [v == target[r]]) * dloss[r];   mean: dloss[r] = dloss / number of rows that count
 *
 * Losses are float32 for low precision logits (float64 for float64). A row whose target is ignore_index has no loss and no gradient;
 * when every row is ignored the mean is NaN, as in PyTorch. The number of counted rows stays on the device.
 */
#include "ops.h"

#include <string.h>

typedef enum Reduction { REDUCE_MEAN, REDUCE_SUM, REDUCE_NONE } Reduction;

static XtStatus reduction_of(const XtArg *arg, Reduction *out) {
    static const char *const names[] = {"mean", "sum", "none"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(arg->s, names[i])) continue;
        *out = (Reduction)i;
        return XT_OK;
    }
    return xt_error(XT_VALUE_ERROR, "cross_entropy: reduction must be 'mean', 'sum' or 'none', got '%s'", arg->s);
}

static XtStatus total(XtTensor *rows, XtTensor **out) {
    XtStatus status = xt_empty_shape(rows, rows->dtype, 0, NULL, out);
    if (status != XT_OK) return status;
    status = xt_backend_of(rows)->reduce(&(XtReduce){.op = XT_REDUCE_SUM, .out = (*out)->view, .x = rows->view});
    if (status != XT_OK) xt_tensor_release(*out), *out = NULL;
    return status;
}

/* Rows whose target is not ignored, as a scalar tensor of `dtype`. */
static XtStatus count_rows(XtTensor *targets, int64_t ignore_index, XtDtype dtype, XtTensor **out) {
    XtTensor *counts = NULL, *numbers = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_empty_shape(targets, XT_BOOL, 1, targets->shape, &counts));
    XtBinary p = {.op = XT_NE,
                  .out = counts->view,
                  .a = targets->view,
                  .b = targets->view,
                  .constant = 2,
                  .value = xt_scalar_int(ignore_index)};
    XT_TRY(xt_backend_of(targets)->binary(&p));
    XT_TRY(xt_cast(counts, dtype, &numbers));
    XT_TRY(total(numbers, out));
done:
    xt_tensor_release(counts);
    xt_tensor_release(numbers);
    return status;
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *labels = c->arg[1].tensor;
    XtTensor *logits = NULL, *targets = NULL, *losses = NULL, *lse = NULL, *sum = NULL, *count = NULL;
    Reduction reduction = REDUCE_MEAN;
    XtStatus status = XT_OK;
    XT_TRY(reduction_of(&c->arg[3], &reduction));
    XT_TRY(xt_check_float(c->op, "input", given));
    XT_TRY(xt_check_ndim(c->op, "input", given, 2, 2));
    if (labels->dtype != XT_INT64 && labels->dtype != XT_INT32)
        return xt_error(XT_TYPE_ERROR, "cross_entropy: target must be int64 or int32 class indices, got %s",
                        xt_dtype_name(labels->dtype));
    XT_TRY(xt_check_shape(c->op, "target", labels, 1, given->shape));
    XT_TRY(xt_check_device(c->op, "input", given, "target", labels));
    XT_TRY(xt_dense(given, &logits));
    XT_TRY(xt_cast(labels, XT_INT64, &targets));
    XtDtype acc = xt_dtype_accumulator(given->dtype);
    XT_TRY(xt_empty_shape(logits, acc, 1, given->shape, &losses));
    XT_TRY(xt_empty_shape(logits, acc, 1, given->shape, &lse));
    XtCrossEntropyFwd p = {.losses = losses->data,
                           .lse = lse->data,
                           .logits = logits->data,
                           .targets = targets->data,
                           .dtype = given->dtype,
                           .rows = given->shape[0],
                           .vocab = given->shape[1],
                           .ignore_index = c->arg[2].i};
    XT_TRY(xt_backend_of(logits)->cross_entropy_fwd(&p));
    if (reduction != REDUCE_NONE) XT_TRY(total(losses, &sum));
    if (reduction == REDUCE_MEAN) {
        XT_TRY(count_rows(targets, c->arg[2].i, acc, &count));
        XT_TRY(xt_binary(XT_DIV, sum, count, &c->out[0]));
    } else {
        c->out[0] = sum ? sum : losses;
        xt_tensor_retain(c->out[0]);
    }
    c->out_count = 1;
    XT_TRY(xt_save(c, logits));
    XT_TRY(xt_save(c, targets));
    XT_TRY(xt_save(c, lse));
    XT_TRY(xt_save(c, count));
done:
    xt_tensor_release(logits);
    xt_tensor_release(targets);
    xt_tensor_release(losses);
    xt_tensor_release(lse);
    xt_tensor_release(sum);
    xt_tensor_release(count);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *logits, *targets, *lse, *count, *dloss = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &logits));
    XT_TRY(xt_node_saved(n, 1, &targets));
    XT_TRY(xt_node_saved(n, 2, &lse));
    XT_TRY(xt_node_saved(n, 3, &count));
    if (count) XT_TRY(xt_binary(XT_DIV, dout[0], count, &dloss));
    else XT_TRY(xt_dense(dout[0], &dloss));
    XT_TRY(xt_empty_like(logits, &din[0]));
    XtCrossEntropyBwd p = {.dlogits = din[0]->data,
                           .logits = logits->data,
                           .lse = lse->data,
                           .dlosses = dloss->data,
                           .targets = targets->data,
                           .dtype = logits->dtype,
                           .rows = logits->shape[0],
                           .vocab = logits->shape[1],
                           .ignore_index = xt_node_args(n)[2].i,
                           .dloss_stride = dloss->ndim ? 1 : 0,
                           .scale = 1.0};
    XT_TRY(xt_backend_of(logits)->cross_entropy_bwd(&p));
done:
    xt_tensor_release(dloss);
    return status;
}

const XtOp xt_op_cross_entropy = {
    .name = "cross_entropy",
    .signature = "input: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = 'mean'",
    .forward = forward,
    .backward = backward,
    .doc = "-log softmax(input)[target] per row. input [rows, V] floating point, target [rows] int64 or int32 in [0, V) or "
           "ignore_index.\n"
           "reduction 'mean' (over the rows that count), 'sum' or 'none'. The loss is float32 (float64 for float64). IndexError "
           "names a bad label.",
};
