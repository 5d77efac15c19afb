/* softmax.c - p = exp(x - max) / sum exp(x - max) along one dim.  dx = p * (dy - sum(dy * p)). */
#include "contract/layers.h"
#include "ops/ops.h"

/* t with dim moved last, dense. */
static XtStatus rows_last(XtTensor *t, int dim, XtTensor **out) {
    XtView view = t->view;
    for (int i = dim; i + 1 < t->ndim; i++) {
        view.shape[i] = t->shape[i + 1];
        view.strides[i] = t->strides[i + 1];
    }
    view.shape[t->ndim - 1] = t->shape[dim];
    view.strides[t->ndim - 1] = t->strides[dim];
    XtTensor *moved;
    XT_CHECK(xt_tensor_from_view(t->storage, &view, &moved));
    XtStatus status = xt_dense(moved, out);
    xt_tensor_release(moved);
    return status;
}

/* The inverse: the last dim of t moved to `dim`, a view. */
static XtStatus rows_back(const XtTensor *t, int dim, XtTensor **out) {
    XtView view = t->view;
    for (int i = t->ndim - 1; i > dim; i--) {
        view.shape[i] = t->shape[i - 1];
        view.strides[i] = t->strides[i - 1];
    }
    view.shape[dim] = t->shape[t->ndim - 1];
    view.strides[dim] = t->strides[t->ndim - 1];
    return xt_tensor_from_view(t->storage, &view, out);
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *x = NULL, *p = NULL;
    XtStatus status = XT_OK;
    int dim;
    XT_TRY(xt_check_float(c->op, "input", given));
    XT_TRY(xt_check_ndim(c->op, "input", given, 1, XT_MAX_DIMS));
    XT_TRY(xt_check_dim(c->op, c->arg[1].i, given->ndim, &dim));
    XT_TRY(rows_last(given, dim, &x));
    XT_TRY(xt_empty_like(x, &p));
    int64_t cols = given->shape[dim], rows = cols ? xt_view_numel(&x->view) / cols : 0;
    XT_TRY(xt_backend_of(x)->softmax_fwd(
        &(XtSoftmaxFwd){.out = p->data, .x = x->data, .dtype = x->dtype, .rows = rows, .cols = cols}));
    XT_TRY(xt_save(c, p));
    XT_TRY(rows_back(p, dim, &c->out[0]));
    c->out_count = 1;
done:
    xt_tensor_release(x);
    xt_tensor_release(p);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *p, *dy = NULL, *dx = NULL;
    XtStatus status = XT_OK;
    int dim;
    XT_TRY(xt_node_saved(n, 0, &p));
    XT_TRY(xt_check_dim(xt_node_op(n), xt_node_args(n)[1].i, p->ndim, &dim));
    XT_TRY(rows_last(dout[0], dim, &dy));
    XT_TRY(xt_empty_like(p, &dx));
    int64_t cols = p->shape[p->ndim - 1], rows = cols ? xt_view_numel(&p->view) / cols : 0;
    XtSoftmaxBwd k = {.dx = dx->data, .dy = dy->data, .p = p->data, .dtype = p->dtype, .rows = rows, .cols = cols};
    XT_TRY(xt_backend_of(p)->softmax_bwd(&k));
    XT_TRY(rows_back(dx, dim, &din[0]));
done:
    xt_tensor_release(dy);
    xt_tensor_release(dx);
    return status;
}

const XtOp xt_op_softmax = {
    .name = "softmax",
    .signature = "input: Tensor, dim: int = -1 -> Tensor",
    .forward = forward,
    .backward = backward,
    .method = true,
    .doc = "exp(input - max) / sum along dim. Floating point; computed in float32 (float64 for float64).",
};
