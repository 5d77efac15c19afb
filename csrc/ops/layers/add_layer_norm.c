/* add_layer_norm.c - residual addition and LayerNorm in one pass over memory.
 *
 *   sum = input + residual        out = layer_norm(sum, weight, bias, eps)
 *   dinput = dresidual = dsum + (the norm's gradient of sum),   dweight and dbias as in layer_norm
 *
 * The kernels of layer_norm do it, with the bits of add and layer_norm one after the other, forward and backward. The sum is kept for the
 * backward; both inputs get the same gradient, one tensor.
 */
#include "ops/ops.h"

enum { WEIGHT = 2 }; /* the argument; the bias follows, then eps */

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *other = c->arg[1].tensor;
    XtTensor *x = NULL, *residual = NULL, *mean = NULL, *rstd = NULL, *vector[2] = {NULL, NULL};
    XtStatus status = XT_OK;
    XT_TRY(xt_layer_norm_check(c, WEIGHT, vector));
    XT_TRY(xt_check_shape(c->op, "residual", other, given->ndim, given->shape));
    XT_TRY(xt_check_like(c->op, "input", given, "residual", other));
    XT_TRY(xt_dense(given, &x));
    XT_TRY(xt_dense(other, &residual));
    c->out_count = 2;
    XT_TRY(xt_layer_norm_of(x, residual, vector, c->arg[WEIGHT + 2].f, &c->out[0], &c->out[1], &mean, &rstd));
    XT_TRY(xt_layer_norm_save(c, c->out[0], vector, mean, rstd));
done:
    xt_tensor_release(x);
    xt_tensor_release(residual);
    xt_tensor_release(vector[0]);
    xt_tensor_release(vector[1]);
    xt_tensor_release(mean);
    xt_tensor_release(rstd);
    return status;
}

/* The norm alone: the sum, which is the residual stream, is kept. */
static XtStatus recompute(XtNode *n, XtTensor **out) { return xt_layer_norm_again(n, xt_node_args(n)[WEIGHT + 2].f, &out[1]); }

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *dsum = NULL, *dx = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_dense(dout[0], &dsum));
    XT_TRY(xt_layer_norm_gradient(n, WEIGHT, dout[1], dsum, xt_node_needs(n, 0) || xt_node_needs(n, 1), &dx, din));
    if (xt_node_needs(n, 0)) XT_TRY(xt_share(dx, &din[0]));
    if (xt_node_needs(n, 1)) XT_TRY(xt_share(dx, &din[1]));
done:
    xt_tensor_release(dsum);
    xt_tensor_release(dx);
    return status;
}

const XtOp xt_op_add_layer_norm = {
    .name = "add_layer_norm",
    .signature =
        "input: Tensor, residual: Tensor, weight: Tensor? = None, bias: Tensor? = None, eps: float = 1e-5 -> (Tensor, Tensor)",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 2,
    .doc = "(input + residual, layer_norm(input + residual, weight, bias, eps)) in one pass. input, residual [..., C], weight\n"
           "and bias [C], all of one dtype.\n"
           "Bits, forward and backward, as from the two ops: the sum is rounded to the dtype before the norm.",
};
