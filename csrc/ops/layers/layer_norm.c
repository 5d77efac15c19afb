/* layer_norm.c - LayerNorm over the last dim (Ba, Kiros & Hinton 2016).
 *
 *   mean = mean(x),  rstd = 1 / sqrt(mean((x - mean)^2) + eps),  xh = (x - mean) * rstd      y = xh * weight + bias
 *   g = dy * weight:      dx = rstd * (g - mean(g) - xh * mean(g * xh))      dweight, dbias = sums over rows of dy * xh, dy
 *
 * x [..., C], weight and bias [C] or None; mean and rstd [rows] are kept for the backward, the bias for a recomputation.
 */
#include "contract/layers.h"
#include "ops/ops.h"

static XtStatus normalise(XtTensor *x, XtTensor *weight, XtTensor *bias, double eps, XtTensor **y, XtTensor **mean,
                          XtTensor **rstd) {
    int64_t cols = x->shape[x->ndim - 1], rows = 1;
    XtDtype acc = xt_dtype_accumulator(x->dtype);
    XtStatus status = XT_OK;
    for (int i = 0; i < x->ndim - 1; i++) rows *= x->shape[i];
    XT_TRY(xt_empty_like(x, y));
    XT_TRY(xt_empty_shape(x, acc, 1, &rows, mean));
    XT_TRY(xt_empty_shape(x, acc, 1, &rows, rstd));
    XtLayerNormFwd p = {.out = (*y)->data,
                        .mean = (*mean)->data,
                        .rstd = (*rstd)->data,
                        .x = x->data,
                        .weight = xt_data(weight),
                        .bias = xt_data(bias),
                        .dtype = x->dtype,
                        .rows = rows,
                        .cols = cols,
                        .eps = eps};
    XT_TRY(xt_backend_of(x)->layer_norm_fwd(&p));
done:
    return status;
}

static XtStatus recompute(XtNode *n, XtTensor **out) {
    XtTensor *x, *weight, *bias, *mean = NULL, *rstd = NULL;
    XT_CHECK(xt_node_saved(n, 0, &x));
    XT_CHECK(xt_node_saved(n, 1, &weight));
    XT_CHECK(xt_node_saved(n, 4, &bias));
    XtStatus status = normalise(x, weight, bias, xt_node_args(n)[3].f, &out[0], &mean, &rstd);
    xt_tensor_release(mean);
    xt_tensor_release(rstd);
    return xt_or_release(status, &out[0]);
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *x = NULL, *y = NULL, *mean = NULL, *rstd = NULL, *vector[2] = {NULL, NULL};
    double eps = c->arg[3].f;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "input", given));
    XT_TRY(xt_check_ndim(c->op, "input", given, 1, XT_MAX_DIMS));
    if (!(eps >= 0.0)) return xt_error(XT_VALUE_ERROR, "layer_norm: eps must be at least 0, got %g", eps);
    int64_t cols = given->shape[given->ndim - 1];
    for (int i = 0; i < 2; i++) {
        XtTensor *v = c->arg[1 + i].tensor;
        const char *name = i == 0 ? "weight" : "bias";
        if (!v) continue;
        XT_TRY(xt_check_shape(c->op, name, v, 1, &cols));
        XT_TRY(xt_check_like(c->op, "input", given, name, v));
        XT_TRY(xt_dense(v, &vector[i]));
    }
    XT_TRY(xt_dense(given, &x));
    XT_TRY(normalise(x, vector[0], vector[1], eps, &y, &mean, &rstd));
    XT_TRY(xt_save(c, x));
    XT_TRY(xt_save(c, vector[0]));
    XT_TRY(xt_save(c, mean));
    XT_TRY(xt_save(c, rstd));
    XT_TRY(xt_save(c, vector[1]));
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

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *weight, *mean, *rstd, *dy = NULL, *sum[3] = {NULL, NULL, NULL};
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &weight));
    XT_TRY(xt_node_saved(n, 2, &mean));
    XT_TRY(xt_node_saved(n, 3, &rstd));
    XT_TRY(xt_dense(dout[0], &dy));
    if (xt_node_needs(n, 0)) XT_TRY(xt_empty_like(x, &din[0]));
    int64_t cols = x->shape[x->ndim - 1];
    for (int i = 1; i < 3; i++) { /* weight, bias */
        if (!xt_node_needs(n, i)) continue;
        sum[i] = xt_node_accumulator(n, i);
        if (i == 2 && sum[2] == sum[1]) sum[2] = NULL; /* one tensor for both: the kernel adds to it once */
        if (!sum[i]) XT_TRY(xt_empty_shape(x, x->dtype, 1, &cols, &din[i]));
    }
    XtLayerNormBwd p = {.dx = xt_data(din[0]),
                        .dweight = xt_data(sum[1] ? sum[1] : din[1]),
                        .dbias = xt_data(sum[2] ? sum[2] : din[2]),
                        .accumulate_weight = sum[1] != NULL,
                        .accumulate_bias = sum[2] != NULL,
                        .dy = dy->data,
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
