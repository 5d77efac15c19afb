/* rms_norm.c - RMSNorm over the last dim (Zhang & Sennrich 2019).
 *
 *   rstd = 1 / sqrt(mean(x^2) + eps)      y = weight * (x * rstd)
 *   g = dy * weight,  xh = x * rstd:      dx = rstd * (g - xh * mean(g * xh))      dweight = sum over rows of dy * xh
 *
 * plus_one: 1 + weight stands for weight, and y is rounded once. x [..., C], weight [C] or None, rstd [rows] is kept for the backward. QK-norm is this op on [B*S*H, D] rows.
 */
#include "contract/layers.h"
#include "ops/ops.h"

XtStatus xt_rms_norm(XtTensor *x, XtTensor *weight, double eps, bool plus_one, XtTensor **y, XtTensor **rstd) {
    int64_t cols = x->shape[x->ndim - 1], rows = 1;
    XtStatus status = XT_OK;
    for (int i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    XT_TRY(xt_empty_like(x, y));
    XT_TRY(xt_empty_shape(x, xt_dtype_accumulator(x->dtype), 1, &rows, rstd));
    XtRmsNormFwd p = {.out = (*y)->data,
                      .rstd = (*rstd)->data,
                      .x = x->data,
                      .weight = xt_data(weight),
                      .dtype = x->dtype,
                      .rows = rows,
                      .cols = cols,
                      .eps = eps,
                      .plus_one = plus_one};
    XT_TRY(xt_backend_of(x)->rms_norm_fwd(&p));
done:
    if (status != XT_OK) {
        xt_tensor_release(*y), *y = NULL;
        xt_tensor_release(*rstd), *rstd = NULL;
    }
    return status;
}

XtStatus xt_rms_norm_again(XtNode *n, double eps, bool plus_one, XtTensor **y) {
    XtTensor *x, *weight, *rstd = NULL;
    XT_CHECK(xt_node_saved(n, 0, &x));
    XT_CHECK(xt_node_saved(n, 1, &weight));
    XT_CHECK(xt_rms_norm(x, weight, eps, plus_one, y, &rstd));
    xt_tensor_release(rstd);
    return XT_OK;
}

static XtStatus recompute(XtNode *n, XtTensor **out) {
    const XtArg *arg = xt_node_args(n);
    return xt_rms_norm_again(n, arg[2].f, arg[3].b, &out[0]);
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *w = c->arg[1].tensor, *x = NULL, *weight = NULL, *y = NULL, *rstd = NULL;
    double eps = c->arg[2].f;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "input", given));
    XT_TRY(xt_check_ndim(c->op, "input", given, 1, XT_MAX_DIMS));
    if (!(eps >= 0.0)) return xt_error(XT_VALUE_ERROR, "rms_norm: eps must be at least 0, got %g", eps);
    int64_t cols = given->shape[given->ndim - 1];
    if (w) {
        XT_TRY(xt_check_shape(c->op, "weight", w, 1, &cols));
        XT_TRY(xt_check_like(c->op, "input", given, "weight", w));
        XT_TRY(xt_dense(w, &weight));
    }
    XT_TRY(xt_dense(given, &x));
    XT_TRY(xt_rms_norm(x, weight, eps, c->arg[3].b, &y, &rstd));
    XT_TRY(xt_save(c, x));
    XT_TRY(xt_save(c, weight));
    XT_TRY(xt_save(c, rstd));
    c->out[c->out_count++] = y;
    y = NULL;
done:
    xt_tensor_release(x);
    xt_tensor_release(weight);
    xt_tensor_release(y);
    xt_tensor_release(rstd);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *weight, *rstd, *dy = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &weight));
    XT_TRY(xt_node_saved(n, 2, &rstd));
    XT_TRY(xt_dense(dout[0], &dy));
    if (xt_node_needs(n, 0)) XT_TRY(xt_empty_like(x, &din[0]));
    XtTensor *sum = xt_node_needs(n, 1) ? xt_node_accumulator(n, 1) : NULL;
    if (xt_node_needs(n, 1) && !sum) XT_TRY(xt_empty_like(weight, &din[1]));
    XtRmsNormBwd p = {.dx = xt_data(din[0]),
                      .dweight = xt_data(sum ? sum : din[1]),
                      .accumulate = sum != NULL,
                      .plus_one = xt_node_args(n)[3].b,
                      .dy = dy->data,
                      .x = x->data,
                      .weight = xt_data(weight),
                      .rstd = rstd->data,
                      .dtype = x->dtype,
                      .rows = rstd->shape[0],
                      .cols = x->shape[x->ndim - 1]};
    XT_TRY(xt_backend_of(x)->rms_norm_bwd(&p));
done:
    xt_tensor_release(dy);
    return status;
}

const XtOp xt_op_rms_norm = {
    .name = "rms_norm",
    .signature = "input: Tensor, weight: Tensor? = None, eps: float = 1e-6, plus_one: bool = False -> Tensor",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 1,
    .doc = "weight * input / sqrt(mean(input^2, last dim) + eps). input [..., C], weight [C] of the same dtype.\n"
           "Statistics in float32 (float64 for float64), rounded to the dtype before the weight, as Hugging Face models do.\n"
           "plus_one: (1 + weight), rounded once, as Gemma does.",
};
