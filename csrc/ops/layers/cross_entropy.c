/* cross_entropy.c - loss of row r = log sum exp(logits[r]) - logits[r, target[r]].
 *
 *   dlogits[r, v] = (softmax(logits[r])[v] - [v == target[r]]) * dloss[r];   mean: dloss[r] = dloss / number of rows that count
 *
 * Losses are float32 for low precision logits (float64 for float64). A row whose target is ignore_index has no loss and no gradient;
 * if every row is ignored the mean is NaN, as in PyTorch. The number of counted rows stays on the device.
 */
#include "contract/layers.h"
#include "contract/reduce.h"
#include "ops/elementwise/arithmetic.h"

#include <math.h>
#include <string.h>

extern const XtOp xt_op_cross_entropy;

typedef enum Reduction { REDUCE_MEAN, REDUCE_SUM, REDUCE_NONE } Reduction;

/* xt_check_targets has checked it. */
static Reduction reduction_of(const XtArg *arg) {
    return !strcmp(arg->s, "mean") ? REDUCE_MEAN : !strcmp(arg->s, "sum") ? REDUCE_SUM : REDUCE_NONE;
}

/* The argument behind the reduction. */
static double z_of(const XtArg *arg, int first) { return arg[first + 3].f; }

XtStatus xt_check_targets(const XtCall *c, int first, const char *arg_x, const XtTensor *x, const char *arg_targets) {
    const XtTensor *targets = c->arg[first].tensor;
    const char *reduction = c->arg[first + 2].s;
    if (strcmp(reduction, "mean") && strcmp(reduction, "sum") && strcmp(reduction, "none"))
        return xt_error(XT_VALUE_ERROR, "%s: reduction must be 'mean', 'sum' or 'none', got '%s'", c->op->name, reduction);
    if (!(z_of(c->arg, first) >= 0 && z_of(c->arg, first) < INFINITY))
        return xt_error(XT_VALUE_ERROR, "%s: z_loss must be a finite number of at least 0, got %g", c->op->name,
                        z_of(c->arg, first));
    if (targets->dtype != XT_INT64 && targets->dtype != XT_INT32)
        return xt_error(XT_TYPE_ERROR, "%s: %s must be int64 or int32 class indices, got %s", c->op->name, arg_targets,
                        xt_dtype_name(targets->dtype));
    XT_CHECK(xt_check_shape(c->op, arg_targets, targets, 1, x->shape));
    return xt_check_device(c->op, arg_x, x, arg_targets, targets);
}

static XtStatus total(XtTensor *rows, XtTensor **out) {
    XT_CHECK(xt_empty_shape(rows, rows->dtype, 0, NULL, out));
    return xt_or_release(xt_backend_of(rows)->reduce(&(XtReduce){.op = XT_REDUCE_SUM, .out = (*out)->view, .x = rows->view}), out);
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

XtStatus xt_reduce_losses(XtCall *c, int first, XtTensor *targets, XtTensor *losses, XtTensor **count) {
    Reduction reduction = reduction_of(&c->arg[first + 2]);
    XtTensor *sum = NULL;
    XtStatus status = XT_OK;
    if (reduction != REDUCE_NONE) XT_TRY(total(losses, &sum));
    if (reduction == REDUCE_MEAN) {
        XT_TRY(count_rows(targets, c->arg[first + 1].i, losses->dtype, count));
        XT_TRY(xt_binary(XT_DIV, sum, *count, &c->out[0]));
    } else {
        XT_TRY(xt_share(sum ? sum : losses, &c->out[0]));
    }
    c->out_count = 1;
done:
    xt_tensor_release(sum);
    return status;
}

XtStatus xt_rows_loss(XtCall *c, int first, const XtTensor *logits, int64_t ld, double softcap) {
    XtTensor *targets = NULL, *losses = NULL, *lse = NULL, *count = NULL;
    XtDtype acc = xt_dtype_accumulator(logits->dtype);
    XtStatus status = XT_OK;
    XT_TRY(xt_cast(c->arg[first].tensor, XT_INT64, &targets));
    XT_TRY(xt_empty_shape(logits, acc, 1, logits->shape, &losses));
    XT_TRY(xt_empty_shape(logits, acc, 1, logits->shape, &lse));
    XtCrossEntropyFwd p = {.losses = losses->data,
                           .lse = lse->data,
                           .logits = logits->data,
                           .targets = targets->data,
                           .dtype = logits->dtype,
                           .rows = logits->shape[0],
                           .vocab = logits->shape[1],
                           .ld = ld,
                           .ignore_index = c->arg[first + 1].i,
                           .z = z_of(c->arg, first),
                           .softcap = softcap,
                           .linear = c->op != &xt_op_cross_entropy};
    XT_TRY(xt_backend_of(logits)->cross_entropy_fwd(&p));
    XT_TRY(xt_reduce_losses(c, first, targets, losses, &count));
    XT_TRY(xt_save(c, targets));
    XT_TRY(xt_save(c, lse));
    XT_TRY(xt_save(c, count));
done:
    xt_tensor_release(targets);
    xt_tensor_release(losses);
    xt_tensor_release(lse);
    xt_tensor_release(count);
    return status;
}

XtStatus xt_rows_loss_gradient(XtNode *n, int first, int slot, XtTensor *dloss, const XtTensor *logits, const XtTensor *dlogits,
                               int64_t ld, double softcap) {
    XtTensor *targets, *lse, *count, *share = NULL; /* share: of each row, [rows] or one value */
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, slot, &targets));
    XT_TRY(xt_node_saved(n, slot + 1, &lse));
    XT_TRY(xt_node_saved(n, slot + 2, &count));
    if (count) XT_TRY(xt_binary(XT_DIV, dloss, count, &share));
    else XT_TRY(xt_dense(dloss, &share));
    XtCrossEntropyBwd p = {.dlogits = dlogits->data,
                           .logits = logits->data,
                           .lse = lse->data,
                           .dlosses = share->data,
                           .targets = targets->data,
                           .dtype = logits->dtype,
                           .rows = logits->shape[0],
                           .vocab = logits->shape[1],
                           .ld = ld,
                           .ignore_index = xt_node_args(n)[first + 1].i,
                           .dloss_stride = share->ndim ? 1 : 0,
                           .scale = 1.0,
                           .z = z_of(xt_node_args(n), first),
                           .softcap = softcap,
                           .linear = xt_node_op(n) != &xt_op_cross_entropy};
    XT_TRY(xt_backend_of(logits)->cross_entropy_bwd(&p));
done:
    xt_tensor_release(share);
    return status;
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *logits = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "input", given));
    XT_TRY(xt_check_ndim(c->op, "input", given, 2, 2));
    XT_TRY(xt_check_targets(c, 1, "input", given, "target"));
    XT_TRY(xt_dense(given, &logits));
    XT_TRY(xt_save(c, logits));
    XT_TRY(xt_rows_loss(c, 1, logits, logits->shape[1], 0));
done:
    xt_tensor_release(logits);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *logits;
    XT_CHECK(xt_node_saved(n, 0, &logits));
    XT_CHECK(xt_empty_like(logits, &din[0]));
    return xt_rows_loss_gradient(n, 1, 1, dout[0], logits, din[0], logits->shape[1], 0);
}

const XtOp xt_op_cross_entropy = {
    .name = "cross_entropy",
    .signature = "input: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = 'mean', z_loss: float = 0.0 -> "
                 "Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "-log softmax(input)[target] per row. input [rows, V] floating point, target [rows] int64 or int32 in [0, V) or "
           "ignore_index.\n"
           "reduction 'mean' (over the rows that count), 'sum' or 'none'. The loss is float32 (float64 for float64). IndexError "
           "names a bad label.\n"
           "z_loss: adds z_loss (log sum exp)^2 to the loss of a row that counts.",
};
