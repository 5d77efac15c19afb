/* gelu_mlp.c - the feed-forward layer of GPT-2: y = h D^T + e, h = gelu(x W^T + b) (Radford et al. 2019).
 *   dh = dy D,  dD = dy^T h,  de = the sum of dy over rows,  dv = dh gelu'(v),  dx = dv W,  dW = dv^T x,  db = the sum of dv over rows
 * x [..., C], W [F, C], b [F], D [K, F], e [K], y [..., K]; v = x W^T + b.
 *
 * One op, because two of its products have an implementation that computes GELU or its gradient while a tile of the product is in
 * registers (XtGemmEpilogue): h is written beside x W^T, and dh not at all. Elsewhere they are products and the slots of bias_gelu, with
 * the bits of linear, bias_gelu and linear, one after the other.
 *
 * Kept for the backward: x, x W^T and h, which recompute mode computes again from x W^T.
 */
#include "contract/gemm.h"
#include "contract/layers.h"
#include "ops/ops.h"

#include <string.h>

enum { X, WEIGHT, BIAS, DOWN, DOWN_BIAS, APPROXIMATE }; /* arguments; saved are the first four, and */
enum { PRODUCT = 4, H };

static bool by_tanh(const XtArg *args) { return args[APPROXIMATE].s[0] == 't'; }

static XtStatus activate(const XtTensor *product, const XtTensor *bias, bool tanh, XtTensor *h) {
    XtBiasGeluFwd p = {.out = h->data, .x = product->data, .bias = bias->data, .dtype = h->dtype, .tanh = tanh};
    p.rows = h->shape[0];
    p.cols = h->shape[1];
    return xt_backend_of(h)->bias_gelu_fwd(&p);
}

static XtStatus check(const XtCall *c) {
    XtTensor *x = c->arg[X].tensor, *w = c->arg[WEIGHT].tensor, *down = c->arg[DOWN].tensor;
    static const char *const names[] = {"input", "weight", "bias", "down", "down_bias"};
    XT_CHECK(xt_check_float(c->op, "input", x));
    XT_CHECK(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    XT_CHECK(xt_check_ndim(c->op, "weight", w, 2, 2));
    XT_CHECK(xt_check_ndim(c->op, "down", down, 2, 2));
    for (int i = WEIGHT; i <= DOWN_BIAS; i++) XT_CHECK(xt_check_like(c->op, "input", x, names[i], c->arg[i].tensor));
    if (x->shape[x->ndim - 1] != w->shape[1])
        return xt_error(XT_VALUE_ERROR, "gelu_mlp: the last dim of input must be %lld, as that of weight %s is, got shape %s",
                        (long long)w->shape[1], xt_shape_text(2, w->shape), xt_shape_text(x->ndim, x->shape));
    XT_CHECK(xt_check_shape(c->op, "bias", c->arg[BIAS].tensor, 1, &w->shape[0]));
    XT_CHECK(xt_check_shape(c->op, "down", down, 2, (int64_t[]){down->shape[0], w->shape[0]}));
    XT_CHECK(xt_check_shape(c->op, "down_bias", c->arg[DOWN_BIAS].tensor, 1, &down->shape[0]));
    const char *form = c->arg[APPROXIMATE].s;
    if (strcmp(form, "none") && strcmp(form, "tanh"))
        return xt_error(XT_VALUE_ERROR, "gelu_mlp: approximate must be 'none' or 'tanh', got '%s'", form);
    return XT_OK;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[X].tensor, *w = c->arg[WEIGHT].tensor, *down = c->arg[DOWN].tensor, *rows = NULL, *bias = NULL, *wt = NULL,
             *product = NULL, *h = NULL, *turned = NULL, *y = NULL;
    XtStatus status = XT_OK;
    bool tanh = by_tanh(c->arg), done = false;
    XT_TRY(check(c));
    XT_TRY(xt_as_rows(x, &rows));
    XT_TRY(xt_dense(c->arg[BIAS].tensor, &bias));
    int64_t count = rows->shape[0];
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){count, w->shape[0]}, &product));
    XT_TRY(xt_empty_like(product, &h));
    XT_TRY(xt_transposed(w, &wt));
    if (tanh) XT_TRY(xt_matmul_epilogue(rows, wt, XT_GEMM_GELU, bias, product, h, &done));
    if (!done) {
        XT_TRY(xt_matmul_into(rows, wt, false, NULL, product));
        XT_TRY(activate(product, bias, tanh, h));
    }
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){count, down->shape[0]}, &y));
    XT_TRY(xt_transposed(down, &turned));
    XT_TRY(xt_matmul_with_bias(h, turned, c->arg[DOWN_BIAS].tensor->view, y));
    XT_TRY(xt_save(c, rows));
    XT_TRY(xt_save(c, w));
    XT_TRY(xt_save(c, bias));
    XT_TRY(xt_save(c, down));
    XT_TRY(xt_save(c, product));
    XT_TRY(xt_save(c, xt_recompute_mode() ? NULL : h));
    XT_TRY(xt_rows_like(y, x, &c->out[0]));
    c->out_count = 1;
done:
    xt_tensor_release(rows);
    xt_tensor_release(bias);
    xt_tensor_release(wt);
    xt_tensor_release(product);
    xt_tensor_release(h);
    xt_tensor_release(turned);
    xt_tensor_release(y);
    return status;
}

/* dD = dy^T h */
static XtStatus down_gradient(XtNode *n, XtTensor *dy, const XtTensor *product, const XtTensor *bias, XtTensor **din) {
    XtTensor *kept, *h = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, H, &kept));
    if (!kept) {
        XT_TRY(xt_empty_like(product, &h));
        XT_TRY(activate(product, bias, by_tanh(xt_node_args(n)), h));
    }
    XT_TRY(xt_weight_gradient(n, DOWN, dy, kept ? kept : h, din));
done:
    xt_tensor_release(h);
    return status;
}

/* db from dv, or from sums of its rows */
static XtStatus bias_gradient(XtTensor *dv, XtTensor *sums, XtTensor **din) {
    XtTensor *wide = NULL;
    if (!sums) return xt_sum_to(dv, 1, &dv->shape[1], &din[BIAS]);
    XT_CHECK(xt_sum_to(sums, 1, &dv->shape[1], &wide));
    XtStatus status = xt_cast(wide, dv->dtype, &din[BIAS]);
    xt_tensor_release(wide);
    return status;
}

/* *dv = dy D gelu'(v), in the place of x W^T where this is its last reader, and din of the bias. */
static XtStatus inner_gradient(XtNode *n, XtTensor *dy, XtTensor *down, XtTensor *product, XtTensor *bias, XtTensor **dv,
                               XtTensor **din) {
    XtTensor *dh = NULL, *sums = NULL;
    XtStatus status = XT_OK;
    bool tanh = by_tanh(xt_node_args(n)), done = false;
    XT_TRY(xt_node_take_last(n, PRODUCT, dv));
    if (*dv && tanh) {
        int64_t shape[2] = {(dy->shape[0] + XT_GEMM_SUMMED - 1) / XT_GEMM_SUMMED * XT_GEMM_SUMS, down->shape[1]};
        if (xt_node_needs(n, BIAS)) XT_TRY(xt_empty_shape(dy, XT_FLOAT32, 2, shape, &sums));
        XT_TRY(xt_matmul_epilogue(dy, down, XT_GEMM_GELU_BWD, bias, *dv, sums, &done));
    }
    if (!*dv) XT_TRY(xt_empty_like(product, dv));
    if (!done) {
        xt_tensor_release(sums);
        sums = NULL;
        XT_TRY(xt_empty_like(product, &dh));
        XT_TRY(xt_matmul_into(dy, down, false, NULL, dh));
        XtBiasGeluBwd p = {.dx = (*dv)->data, .dy = dh->data, .x = product->data, .bias = bias->data, .dtype = dh->dtype};
        p.rows = dh->shape[0];
        p.cols = dh->shape[1];
        p.tanh = tanh;
        XT_TRY(xt_backend_of(dh)->bias_gelu_bwd(&p));
    }
    if (xt_node_needs(n, BIAS)) XT_TRY(bias_gradient(*dv, sums, din));
done:
    xt_tensor_release(dh);
    xt_tensor_release(sums);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *rows, *w, *bias, *down, *product, *dy = NULL, *dv = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, X, &rows));
    XT_TRY(xt_node_saved(n, WEIGHT, &w));
    XT_TRY(xt_node_saved(n, BIAS, &bias));
    XT_TRY(xt_node_saved(n, DOWN, &down));
    XT_TRY(xt_node_saved(n, PRODUCT, &product));
    XT_TRY(xt_as_rows(dout[0], &dy));
    if (xt_node_needs(n, DOWN_BIAS)) XT_TRY(xt_sum_to(dy, 1, &dy->shape[1], &din[DOWN_BIAS]));
    if (xt_node_needs(n, DOWN)) XT_TRY(down_gradient(n, dy, product, bias, din));
    if (!xt_node_needs(n, X) && !xt_node_needs(n, WEIGHT) && !xt_node_needs(n, BIAS)) goto done;
    XT_TRY(inner_gradient(n, dy, down, product, bias, &dv, din));
    if (xt_node_needs(n, X)) XT_TRY(xt_rows_gradient(n, X, dv, w, din));
    if (xt_node_needs(n, WEIGHT)) XT_TRY(xt_weight_gradient(n, WEIGHT, dv, rows, din));
done:
    xt_tensor_release(dy);
    xt_tensor_release(dv);
    return status;
}

const XtOp xt_op_gelu_mlp = {
    .name = "gelu_mlp",
    .signature =
        "input: Tensor, weight: Tensor, bias: Tensor, down: Tensor, down_bias: Tensor, approximate: str = 'none' -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "linear(bias_gelu(linear(input, weight), bias, approximate), down, down_bias). input [..., C], weight [F, C], bias [F], "
           "down [K, F], down_bias [K] -> [..., K]; all of one floating point dtype.",
};
