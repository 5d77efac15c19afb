/* linear_cross_entropy.c - cross_entropy(x W^T, targets), for the head of a language model.
 *
 *   dlogits = (softmax(logits) - onehot(targets)) dloss,  dx = dlogits W,  dW = dlogits^T x
 *   x [rows, C], weight [V, C], targets [rows]
 *
 * The logits are the largest activation of a step and nobody sees them, so this op may do two things that linear and cross_entropy
 * one after the other cannot. Their rows begin at multiples of 16 bytes, also where V is odd (50257): matrix units and vector loads
 * ask for it. And the backward turns them into dlogits in place: one buffer [rows, V] instead of two. A second backward through the
 * same node (retain_graph) makes them again.
 */
#include "ops/ops.h"

enum { TARGETS = 2 };                      /* argument */
enum { X, WEIGHT, LOGITS, SAVED_BY_LOSS }; /* what the node keeps */
enum { ROW_UNIT = 8 };                     /* elements: 16 bytes of the shortest dtype */

static int64_t row_stride(int64_t vocab) { return (vocab + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT; }

/* *out = x W^T, [rows, V]. */
static XtStatus product(XtTensor *x, XtTensor *weight, XtTensor **out) {
    XtTensor *buffer = NULL, *wt = NULL, *logits = NULL;
    int64_t shape[2] = {x->shape[0], weight->shape[0]}, stride[2] = {row_stride(shape[1]), 1}, padded[2] = {shape[0], stride[0]};
    XtStatus status = XT_OK;
    XT_TRY(xt_empty_shape(x, x->dtype, 2, padded, &buffer));
    XT_TRY(xt_view_as(buffer, 2, shape, stride, &logits));
    XT_TRY(xt_transposed(weight, &wt));
    XT_TRY(xt_matmul_into(x, wt, false, NULL, logits));
    *out = logits;
    logits = NULL;
done:
    xt_tensor_release(buffer);
    xt_tensor_release(wt);
    xt_tensor_release(logits);
    return status;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *weight = c->arg[1].tensor, *logits = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "x", x));
    XT_TRY(xt_check_ndim(c->op, "x", x, 2, 2));
    XT_TRY(xt_check_ndim(c->op, "weight", weight, 2, 2));
    XT_TRY(xt_check_like(c->op, "x", x, "weight", weight));
    int64_t want[2] = {weight->shape[0], x->shape[1]};
    XT_TRY(xt_check_shape(c->op, "weight", weight, 2, want));
    XT_TRY(xt_check_targets(c, TARGETS, "x", x, "targets"));
    XT_TRY(product(x, weight, &logits));
    XT_TRY(xt_save(c, x));
    XT_TRY(xt_save(c, weight));
    XT_TRY(xt_save(c, logits));
    XT_TRY(xt_rows_loss(c, TARGETS, logits, row_stride(weight->shape[0])));
done:
    xt_tensor_release(logits);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *weight, *logits = NULL, *transposed = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, X, &x));
    XT_TRY(xt_node_saved(n, WEIGHT, &weight));
    XT_TRY(xt_node_take(n, LOGITS, &logits));
    if (!logits) XT_TRY(product(x, weight, &logits));
    XT_TRY(xt_rows_loss_gradient(n, TARGETS, SAVED_BY_LOSS, dout[0], logits, logits, row_stride(weight->shape[0])));
    if (xt_node_needs(n, 0)) XT_TRY(xt_matmul_gradient(n, 0, logits, weight, NULL, din)); /* dlogits by now */
    if (xt_node_needs(n, 1)) {
        XT_TRY(xt_transposed(logits, &transposed));
        XT_TRY(xt_matmul_gradient(n, 1, transposed, x, NULL, din));
    }
done:
    xt_tensor_release(logits);
    xt_tensor_release(transposed);
    return status;
}

const XtOp xt_op_linear_cross_entropy = {
    .name = "linear_cross_entropy",
    .signature = "x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = 'mean' -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "cross_entropy(x @ weight.T, targets). x [rows, C], weight [V, C], targets [rows] int64 or int32 in [0, V) or "
           "ignore_index.\n"
           "reduction 'mean' (over the rows that count), 'sum' or 'none'. The loss is float32 (float64 for float64). One buffer of "
           "logits serves forward and backward.",
};
