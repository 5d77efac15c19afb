/* cumsum.c - out[.., i, ..] = sum of input[.., j, ..] over j <= i along dim; dinput is the sum of dout from the other end. */
#include "contract/reduce.h"
#include "ops/ops.h"

static XtStatus scan(const XtTensor *x, int dim, bool reverse, XtTensor *out) {
    XtCumsum p = {.out = out->data, .x = x->data, .dtype = x->dtype, .rows = 1, .count = 1, .inner = 1, .reverse = reverse};
    for (int d = 0; d < x->ndim; d++) *(d < dim ? &p.rows : d == dim ? &p.count : &p.inner) *= x->shape[d];
    return xt_backend_of(x)->cumsum(&p);
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *x = NULL, *dense = NULL;
    XtStatus status = XT_OK;
    int dim = 0;
    XT_TRY(xt_check_dim(c->op, c->arg[1].i, given->ndim, &dim));
    XT_TRY(xt_tensor_or_cast(given, xt_dtype_is_float(given->dtype) ? given->dtype : XT_INT64, &x));
    XT_TRY(xt_dense(x, &dense));
    XT_TRY(xt_empty_like(dense, &c->out[0]));
    c->out_count = 1;
    XT_TRY(scan(dense, dim, false, c->out[0]));
done:
    xt_tensor_release(x);
    xt_tensor_release(dense);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *dy = NULL;
    XtStatus status = XT_OK;
    int64_t dim = xt_node_args(n)[1].i;
    XT_TRY(xt_dense(dout[0], &dy));
    XT_TRY(xt_empty_like(dy, &din[0]));
    XT_TRY(scan(dy, (int)(dim < 0 ? dim + dy->ndim : dim), true, din[0]));
done:
    xt_tensor_release(dy);
    return status;
}

const XtOp xt_op_cumsum = {
    .name = "cumsum",
    .signature = "input: Tensor, dim: int -> Tensor",
    .forward = forward,
    .backward = backward,
    .method = true,
    .doc = "Sums of the elements up to each one along dim, in float32 (float64), rounded once. Integers and bool give int64.",
};
