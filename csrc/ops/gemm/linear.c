/* linear.c - y = x W^T + bias, one GEMM for all rows.  dx = dy W,  dW = dy^T x,  dbias = sum of dy over rows.
 * x [..., in], weight [out, in], bias [out] or None, y [..., out]. x W^T is rounded to the dtype before the bias is added,
 * but by cuBLASLt, which adds it to the sums.
 */
#include "ops/ops.h"

#include <string.h>

/* y = x W^T + bias, if there is one */
static XtStatus multiply(XtTensor *x, XtTensor *wt, const XtTensor *bias, XtTensor *y) {
    return bias ? xt_matmul_with_bias(x, wt, bias->view, y) : xt_matmul_into(x, wt, false, NULL, y);
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *w = c->arg[1].tensor, *bias = c->arg[2].tensor, *wt = NULL, *y = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "input", x));
    XT_TRY(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    XT_TRY(xt_check_ndim(c->op, "weight", w, 2, 2));
    XT_TRY(xt_check_like(c->op, "input", x, "weight", w));
    int64_t in = x->shape[x->ndim - 1], out = w->shape[0], shape[XT_MAX_DIMS];
    if (w->shape[1] != in) { /* the message is about x: a layer has its weight, and is given x */
        status = xt_error(XT_VALUE_ERROR, "linear: the last dim of input must be %lld, as that of weight %s is, got shape %s",
                          (long long)w->shape[1], xt_shape_text(2, w->shape), xt_shape_text(x->ndim, x->shape));
        goto done;
    }
    if (bias) {
        XT_TRY(xt_check_like(c->op, "input", x, "bias", bias));
        XT_TRY(xt_check_shape(c->op, "bias", bias, 1, &out));
    }
    XT_TRY(xt_transposed(w, &wt));
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = out;
    int ndim = x->ndim;
    if (ndim == 1) { /* a vector is one row */
        int64_t row[2] = {1, in}, y_row[2] = {1, out};
        XtTensor *matrix;
        XT_TRY(xt_reshape(x, 2, row, &matrix));
        status = xt_empty_shape(x, x->dtype, 2, y_row, &y);
        if (status == XT_OK) status = multiply(matrix, wt, bias, y);
        xt_tensor_release(matrix);
        if (status != XT_OK) goto done;
    } else {
        XT_TRY(xt_empty_shape(x, x->dtype, ndim, shape, &y));
        XT_TRY(multiply(x, wt, bias, y));
    }
    XT_TRY(xt_save(c, x));
    XT_TRY(xt_save(c, w));
    if (ndim == 1) {
        XT_TRY(xt_reshape(y, 1, shape, &c->out[0]));
    } else {
        c->out[0] = y;
        y = NULL;
    }
    c->out_count = 1;
done:
    xt_tensor_release(wt);
    xt_tensor_release(y);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *w, *dy = NULL, *rows = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &w));
    XT_TRY(xt_as_rows(dout[0], &dy));
    if (xt_node_needs(n, 0)) XT_TRY(xt_rows_gradient(n, 0, dy, w, din));
    if (xt_node_needs(n, 1)) {
        XT_TRY(xt_as_rows(x, &rows));
        XT_TRY(xt_weight_gradient(n, 1, dy, rows, din));
    }
    if (xt_node_needs(n, 2)) XT_TRY(xt_sum_to(dy, 1, &dy->shape[1], &din[2]));
done:
    xt_tensor_release(dy);
    xt_tensor_release(rows);
    return status;
}

const XtOp xt_op_linear = {
    .name = "linear",
    .signature = "input: Tensor, weight: Tensor, bias: Tensor? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "input @ weight.T + bias. input [..., in], weight [out, in], bias [out]; all of one floating point dtype.",
};
