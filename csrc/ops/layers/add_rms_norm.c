/* add_rms_norm.c - residual addition and RMSNorm in one pass over memory.
 *
 *   sum = input + residual        out = rms_norm(sum, weight, eps)
 *   dinput = dresidual = dsum + (the norm's gradient of sum),   dweight as in rms_norm
 *
 * The two kernels of rms_norm do it, with the bits of add and rms_norm one after the other, forward and backward. The sum is kept for
 * the backward; both inputs get the same gradient, one tensor.
 */
#include "contract/layers.h"
#include "ops/ops.h"

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *other = c->arg[1].tensor, *w = c->arg[2].tensor;
    XtTensor *x = NULL, *residual = NULL, *weight = NULL, *rstd = NULL;
    double eps = c->arg[3].f;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "input", given));
    XT_TRY(xt_check_ndim(c->op, "input", given, 1, XT_MAX_DIMS));
    XT_TRY(xt_check_shape(c->op, "residual", other, given->ndim, given->shape));
    XT_TRY(xt_check_like(c->op, "input", given, "residual", other));
    if (!(eps >= 0.0)) return xt_error(XT_VALUE_ERROR, "add_rms_norm: eps must be at least 0, got %g", eps);
    int64_t cols = given->shape[given->ndim - 1], rows = 1;
    for (int i = 0; i < given->ndim - 1; i++) rows *= given->shape[i];
    if (w) {
        XT_TRY(xt_check_shape(c->op, "weight", w, 1, &cols));
        XT_TRY(xt_check_like(c->op, "input", given, "weight", w));
        XT_TRY(xt_dense(w, &weight));
    }
    XT_TRY(xt_dense(given, &x));
    XT_TRY(xt_dense(other, &residual));
    XT_TRY(xt_empty_like(x, &c->out[0]));
    c->out_count = 1;
    XT_TRY(xt_empty_like(x, &c->out[1]));
    c->out_count = 2;
    XT_TRY(xt_empty_shape(x, xt_dtype_accumulator(x->dtype), 1, &rows, &rstd));
    XtRmsNormFwd p = {.out = c->out[1]->data,
                      .rstd = rstd->data,
                      .sum = c->out[0]->data,
                      .x = x->data,
                      .residual = residual->data,
                      .weight = xt_data(weight),
                      .dtype = x->dtype,
                      .rows = rows,
                      .cols = cols,
                      .eps = eps,
                      .plus_one = c->arg[4].b};
    XT_TRY(xt_backend_of(x)->rms_norm_fwd(&p));
    XT_TRY(xt_save(c, c->out[0]));
    XT_TRY(xt_save(c, weight));
    XT_TRY(xt_save(c, rstd));
done:
    xt_tensor_release(x);
    xt_tensor_release(residual);
    xt_tensor_release(weight);
    xt_tensor_release(rstd);
    return status;
}

/* The norm alone: the sum, which is the residual stream, is kept. */
static XtStatus recompute(XtNode *n, XtTensor **out) {
    const XtArg *arg = xt_node_args(n);
    return xt_rms_norm_again(n, arg[3].f, arg[4].b, &out[1]);
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *sum, *weight, *rstd, *dsum = NULL, *dy = NULL, *dx = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &sum));
    XT_TRY(xt_node_saved(n, 1, &weight));
    XT_TRY(xt_node_saved(n, 2, &rstd));
    XT_TRY(xt_dense(dout[0], &dsum));
    XT_TRY(xt_dense(dout[1], &dy));
    if (xt_node_needs(n, 0) || xt_node_needs(n, 1)) XT_TRY(xt_empty_like(sum, &dx));
    XtTensor *under_way = xt_node_needs(n, 2) ? xt_node_accumulator(n, 2) : NULL;
    if (xt_node_needs(n, 2) && !under_way) XT_TRY(xt_empty_like(weight, &din[2]));
    XtRmsNormBwd p = {.dx = xt_data(dx),
                      .dweight = xt_data(under_way ? under_way : din[2]),
                      .accumulate = under_way != NULL,
                      .plus_one = xt_node_args(n)[4].b,
                      .dy = dy->data,
                      .dsum = dsum->data,
                      .x = sum->data,
                      .weight = xt_data(weight),
                      .rstd = rstd->data,
                      .dtype = sum->dtype,
                      .rows = rstd->shape[0],
                      .cols = sum->shape[sum->ndim - 1]};
    XT_TRY(xt_backend_of(sum)->rms_norm_bwd(&p));
    if (xt_node_needs(n, 0)) XT_TRY(xt_share(dx, &din[0]));
    if (xt_node_needs(n, 1)) XT_TRY(xt_share(dx, &din[1]));
done:
    xt_tensor_release(dsum);
    xt_tensor_release(dy);
    xt_tensor_release(dx);
    return status;
}

const XtOp xt_op_add_rms_norm = {
    .name = "add_rms_norm",
    .signature = "input: Tensor, residual: Tensor, weight: Tensor? = None, eps: float = 1e-6, plus_one: bool = False -> "
                 "(Tensor, Tensor)",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 2,
    .doc = "(input + residual, rms_norm(input + residual, weight, eps)) in one pass. input, residual [..., C], weight [C], all of "
           "one dtype.\n"
           "Bits, forward and backward, as from the two ops: the sum is rounded to the dtype before the norm. plus_one: as of "
           "rms_norm.",
};
