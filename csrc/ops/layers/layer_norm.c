/* layer_norm.c - LayerNorm over the last dim (Ba, Kiros & Hinton 2016).
 *
 *   mean = mean(x),  rstd = 1 / sqrt(mean((x - mean)^2) + eps),  xh = (x - mean) * rstd      y = xh * weight + bias
 *   g = dy * weight:      dx = rstd * (g - mean(g) - xh * mean(g * xh))      dweight, dbias = sums over rows of dy * xh, dy
 *
 * x [..., C], weight and bias [C] or None; mean and rstd [rows] are kept for the backward, the bias for a recomputation.
 */
#include "contract/layers.h"
#include "ops/ops.h"

XtStatus xt_layer_norm_check(const XtCall *c, int first, XtTensor *vector[2]) {
    const XtTensor *x = c->arg[0].tensor;
    double eps = c->arg[first + 2].f;
    XT_CHECK(xt_check_float(c->op, "input", x));
    XT_CHECK(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    if (!(eps >= 0.0)) return xt_error(XT_VALUE_ERROR, "%s: eps must be at least 0, got %g", c->op->name, eps);
    int64_t cols = x->shape[x->ndim - 1];
    for (int i = 0; i < 2; i++) {
        XtTensor *v = c->arg[first + i].tensor;
        const char *name = i == 0 ? "weight" : "bias";
        if (!v) continue;
        XT_CHECK(xt_check_shape(c->op, name, v, 1, &cols));
        XT_CHECK(xt_check_like(c->op, "input", x, name, v));
        XT_CHECK(xt_dense(v, &vector[i]));
    }
    return XT_OK;
}

XtStatus xt_layer_norm_of(XtTensor *x, XtTensor *residual, XtTensor *const vector[2], double eps, XtTensor **sum, XtTensor **y,
                          XtTensor **mean, XtTensor **rstd) {
    int64_t cols = x->shape[x->ndim - 1], rows = 1;
    XtDtype acc = xt_dtype_accumulator(x->dtype);
    XtStatus status = XT_OK;
    for (int i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    if (residual) XT_TRY(xt_empty_like(x, sum));
    XT_TRY(xt_empty_like(x, y));
    XT_TRY(xt_empty_shape(x, acc, 1, &rows, mean));
    XT_TRY(xt_empty_shape(x, acc, 1, &rows, rstd));
    XtLayerNormFwd p = {.out = (*y)->data,
                        .mean = (*mean)->data,
                        .rstd = (*rstd)->data,
                        .sum = residual ? (*sum)->data : NULL,
                        .x = x->data,
                        .residual = xt_data(residual),
                        .weight = xt_data(vector[0]),
                        .bias = xt_data(vector[1]),
                        .dtype = x->dtype,
                        .rows = rows,
                        .cols = cols,
                        .eps = eps};
    XT_TRY(xt_backend_of(x)->layer_norm_fwd(&p));
done:
    return status;
}

XtStatus xt_layer_norm_save(XtCall *c, XtTensor *x, XtTensor *const vector[2], XtTensor *mean, XtTensor *rstd) {
    XT_CHECK(xt_save(c, x));
    XT_CHECK(xt_save(c, vector[0]));
    XT_CHECK(xt_save(c, mean));
    XT_CHECK(xt_save(c, rstd));
    return xt_save(c, vector[1]);
}

XtStatus xt_layer_norm_again(XtNode *n, double eps, XtTensor **out) {
    XtTensor *x, *vector[2], *mean = NULL, *rstd = NULL;
    XT_CHECK(xt_node_saved(n, 0, &x));
    XT_CHECK(xt_node_saved(n, 1, &vector[0]));
    XT_CHECK(xt_node_saved(n, 4, &vector[1]));
    XtStatus status = xt_layer_norm_of(x, NULL, vector, eps, NULL, out, &mean, &rstd);
    xt_tensor_release(mean);
    xt_tensor_release(rstd);
    return xt_or_release(status, out);
}

XtStatus xt_layer_norm_gradient(XtNode *n, int first, XtTensor *dout, const XtTensor *dsum, bool needs_dx, XtTensor **dx,
                                XtTensor **din) {
    XtTensor *x, *weight, *mean, *rstd, *dy = NULL, *total[2] = {NULL, NULL};
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &weight));
    XT_TRY(xt_node_saved(n, 2, &mean));
    XT_TRY(xt_node_saved(n, 3, &rstd));
    XT_TRY(xt_dense(dout, &dy));
    if (needs_dx) XT_TRY(xt_empty_like(x, dx));
    int64_t cols = x->shape[x->ndim - 1];
    for (int i = 0; i < 2; i++) { /* weight, bias */
        if (!xt_node_needs(n, first + i)) continue;
        total[i] = xt_node_accumulator(n, first + i);
        if (i == 1 && total[1] == total[0]) total[1] = NULL; /* one tensor for both: the kernel adds to it once */
        if (!total[i]) XT_TRY(xt_empty_shape(x, x->dtype, 1, &cols, &din[first + i]));
    }
    XtLayerNormBwd p = {.dx = xt_data(*dx),
                        .dweight = xt_data(total[0] ? total[0] : din[first]),
                        .dbias = xt_data(total[1] ? total[1] : din[first + 1]),
                        .accumulate_weight = total[0] != NULL,
                        .accumulate_bias = total[1] != NULL,
                        .dy = dy->data,
                        .dsum = dsum ? dsum->data : NULL,
                        .x = x->data,
                        .weight = xt_data(weight),
                        .mean = mean->data,
                        .rstd = rstd->data,
                        .dtype = x->dtype,
                        .rows = rstd->shape[0],
                        .cols = cols};
    XT_TRY(xt_backend_of(x)->layer_norm_bwd(&p));
done:
    xt_tensor_release(dy);
    return status;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = NULL, *y = NULL, *mean = NULL, *rstd = NULL, *vector[2] = {NULL, NULL};
    XtStatus status = XT_OK;
    XT_TRY(xt_layer_norm_check(c, 1, vector));
    XT_TRY(xt_dense(c->arg[0].tensor, &x));
    XT_TRY(xt_layer_norm_of(x, NULL, vector, c->arg[3].f, NULL, &y, &mean, &rstd));
    XT_TRY(xt_layer_norm_save(c, x, vector, mean, rstd));
    c->out[c->out_count++] = y;
    y = NULL;
done:
    xt_tensor_release(x);
    xt_tensor_release(vector[0]);
    xt_tensor_release(vector[1]);
    xt_tensor_release(y);
    xt_tensor_release(mean);
    xt_tensor_release(rstd);
    return status;
}

static XtStatus recompute(XtNode *n, XtTensor **out) { return xt_layer_norm_again(n, xt_node_args(n)[3].f, &out[0]); }

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    return xt_layer_norm_gradient(n, 1, dout[0], NULL, xt_node_needs(n, 0), &din[0], din);
}

const XtOp xt_op_layer_norm = {
    .name = "layer_norm",
    .signature = "input: Tensor, weight: Tensor? = None, bias: Tensor? = None, eps: float = 1e-5 -> Tensor",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 1,
    .doc = "(input - mean) / sqrt(variance + eps) * weight + bias over the last dim, the variance divided by C. input [..., C], "
           "weight\n"
           "and bias [C] of the same dtype. Statistics and sums in float32 (float64 for float64), rounded once.",
};
