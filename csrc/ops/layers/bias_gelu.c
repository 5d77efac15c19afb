/* bias_gelu.c - gelu(input + bias) in one pass, the activation behind a linear layer whose bias it adds. input [..., C], bias [C].
 *   dinput = dout gelu'(input + bias)      dbias = the sum of dinput over rows
 */
#include "contract/layers.h"
#include "ops/ops.h"

#include <string.h>

static int64_t rows_of(const XtTensor *x) { return x->shape[x->ndim - 1] ? xt_view_numel(&x->view) / x->shape[x->ndim - 1] : 0; }

static XtStatus compute(XtTensor *x, XtTensor *bias, bool tanh, XtTensor **out) {
    XT_CHECK(xt_empty_like(x, out));
    XtBiasGeluFwd p = {.out = (*out)->data, .x = x->data, .bias = bias->data, .dtype = x->dtype, .tanh = tanh};
    p.rows = rows_of(x);
    p.cols = x->shape[x->ndim - 1];
    return xt_or_release(xt_backend_of(x)->bias_gelu_fwd(&p), out);
}

static XtStatus recompute(XtNode *n, XtTensor **out) {
    XtTensor *x, *bias;
    XT_CHECK(xt_node_saved(n, 0, &x));
    XT_CHECK(xt_node_saved(n, 1, &bias));
    return compute(x, bias, xt_node_args(n)[2].s[0] == 't', out);
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *x = NULL, *bias = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "input", given));
    XT_TRY(xt_check_ndim(c->op, "input", given, 1, XT_MAX_DIMS));
    XT_TRY(xt_check_like(c->op, "input", given, "bias", c->arg[1].tensor));
    XT_TRY(xt_check_shape(c->op, "bias", c->arg[1].tensor, 1, &given->shape[given->ndim - 1]));
    if (strcmp(c->arg[2].s, "none") && strcmp(c->arg[2].s, "tanh")) {
        status = xt_error(XT_VALUE_ERROR, "bias_gelu: approximate must be 'none' or 'tanh', got '%s'", c->arg[2].s);
        goto done;
    }
    XT_TRY(xt_dense(given, &x));
    XT_TRY(xt_dense(c->arg[1].tensor, &bias));
    XT_TRY(compute(x, bias, c->arg[2].s[0] == 't', &c->out[0]));
    c->out_count = 1;
    XT_TRY(xt_save(c, x));
    XT_TRY(xt_save(c, bias));
done:
    xt_tensor_release(x);
    xt_tensor_release(bias);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *bias, *dy = NULL, *dx = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &bias));
    XT_TRY(xt_dense(dout[0], &dy));
    XT_TRY(xt_node_take_last(n, 0, &dx)); /* the gradient of a product takes its place */
    if (!dx) XT_TRY(xt_empty_like(x, &dx));
    XtBiasGeluBwd p = {.dx = dx->data, .dy = dy->data, .x = x->data, .bias = bias->data, .dtype = x->dtype};
    p.rows = rows_of(x);
    p.cols = x->shape[x->ndim - 1];
    p.tanh = xt_node_args(n)[2].s[0] == 't';
    XT_TRY(xt_backend_of(x)->bias_gelu_bwd(&p));
    if (xt_node_needs(n, 1)) XT_TRY(xt_sum_to(dx, 1, bias->shape, &din[1]));
    if (xt_node_needs(n, 0)) din[0] = dx, dx = NULL;
done:
    xt_tensor_release(dy);
    xt_tensor_release(dx);
    return status;
}

const XtOp xt_op_bias_gelu = {
    .name = "bias_gelu",
    .signature = "input: Tensor, bias: Tensor, approximate: str = 'none' -> Tensor",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 1,
    .doc = "gelu(input + bias, approximate) in one pass; input [..., C], bias [C]. The sum is not rounded to a 16-bit dtype.",
};
