/* qk_norm_rope.c - RMSNorm of every head of q and k, then rotary embedding, in one pass over memory.
 *
 *   out = rope(rms_norm(x, weight, eps), theta)      dx, dweight = those of rms_norm for dy = rope^-1(dout)
 *
 * q [B, S, H, D] or [rows, H, D], k alike with its own number of heads, q_weight and k_weight [D]. The normalised tensor is not kept:
 * the backward needs the inputs and rstd alone. Inputs may be columns of a joined product: rows of any stride are read in place.
 */
#include "contract/layers.h"
#include "ops/ops.h"

enum { EPS = 4, THETA, POSITIONS };                          /* arguments; 0 to 3 are q, k and their weights */
enum { SAVED_WEIGHT = 2, SAVED_RSTD = 4, SAVED_PLACES = 6 }; /* what the node keeps: q, k, weights, rstd of both, positions */
static const char *const WEIGHT_OF[] = {"q_weight", "k_weight"};

static XtStatus check(const XtCall *c) {
    const XtTensor *q = c->arg[0].tensor, *k = c->arg[1].tensor;
    XT_CHECK(xt_check_float(c->op, "q", q));
    XT_CHECK(xt_check_ndim(c->op, "q", q, 3, 4));
    XT_CHECK(xt_check_like(c->op, "q", q, "k", k));
    int heads_at = q->ndim - 2;
    int64_t dim = q->shape[q->ndim - 1], shape[XT_MAX_DIMS];
    for (int d = 0; d < q->ndim; d++) shape[d] = d == heads_at && k->ndim == q->ndim ? k->shape[d] : q->shape[d];
    XT_CHECK(xt_check_shape(c->op, "k", k, q->ndim, shape));
    if (dim % 2)
        return xt_error(XT_VALUE_ERROR, "qk_norm_rope: the last dim of q must be even, got shape %s",
                        xt_shape_text(q->ndim, q->shape));
    for (int i = 0; i < 2; i++) {
        XT_CHECK(xt_check_shape(c->op, WEIGHT_OF[i], c->arg[2 + i].tensor, 1, &dim));
        XT_CHECK(xt_check_like(c->op, "q", q, WEIGHT_OF[i], c->arg[2 + i].tensor));
    }
    if (!(c->arg[EPS].f >= 0.0)) return xt_error(XT_VALUE_ERROR, "qk_norm_rope: eps must be at least 0, got %g", c->arg[EPS].f);
    return XT_OK;
}

static int64_t rows_of(const XtTensor *x) { return x->ndim == 4 ? x->shape[0] * x->shape[1] : x->shape[0]; }

/* Strides of a dense part. */
static void dense_strides(int64_t stride[2], const XtTensor *x) {
    int64_t dim = x->shape[x->ndim - 1];
    stride[0] = x->shape[x->ndim - 2] * dim, stride[1] = dim;
}

/* out and rstd of x, whose rows are even; new, all NULL before. The caller releases them after an error, too. */
static XtStatus compute(const XtArg *arg, XtTensor *const *x, XtTensor *const *weight, const XtTensor *positions, int64_t period,
                        XtTensor **out, XtTensor **rstd) {
    XtQkNormRopeFwd p = {.positions = xt_data(positions),
                         .dtype = x[0]->dtype,
                         .rows = rows_of(x[0]),
                         .dim = x[0]->shape[x[0]->ndim - 1],
                         .period = period,
                         .eps = arg[EPS].f,
                         .base = xt_rope_base(arg, THETA)};
    for (int i = 0; i < 2; i++) {
        int nd = x[i]->ndim;
        XT_CHECK(xt_empty_like(x[i], &out[i]));
        dense_strides(p.out_stride[i], x[i]);
        p.x_stride[i][0] = x[i]->strides[nd - 3], p.x_stride[i][1] = x[i]->strides[nd - 2];
        p.heads[i] = x[i]->shape[nd - 2];
        int64_t lines = p.rows * p.heads[i];
        XT_CHECK(xt_empty_shape(x[i], xt_dtype_accumulator(p.dtype), 1, &lines, &rstd[i]));
        p.out[i] = out[i]->data, p.rstd[i] = rstd[i]->data, p.x[i] = x[i]->data, p.weight[i] = weight[i]->data;
    }
    return xt_backend_of(x[0])->qk_norm_rope_fwd(&p);
}

static XtStatus forward(XtCall *c) {
    XtTensor *x[2] = {NULL, NULL}, *weight[2] = {NULL, NULL}, *rstd[2] = {NULL, NULL}, *positions = NULL;
    XtStatus status = XT_OK;
    int64_t period, stride[2];
    XT_TRY(check(c));
    XT_TRY(xt_rope_places(c, THETA, "q", c->arg[0].tensor, &positions, &period));
    for (int i = 0; i < 2; i++) {
        XT_TRY(xt_even_rows(c->arg[i].tensor, &x[i], stride));
        XT_TRY(xt_dense(c->arg[2 + i].tensor, &weight[i]));
    }
    c->out_count = 2;
    XT_TRY(compute(c->arg, x, weight, positions, period, c->out, rstd));
    for (int i = 0; i < 2; i++) XT_TRY(xt_save(c, x[i]));
    for (int i = 0; i < 2; i++) XT_TRY(xt_save(c, weight[i]));
    for (int i = 0; i < 2; i++) XT_TRY(xt_save(c, rstd[i]));
    XT_TRY(xt_save(c, positions));
done:
    for (int i = 0; i < 2; i++) {
        xt_tensor_release(x[i]);
        xt_tensor_release(weight[i]);
        xt_tensor_release(rstd[i]);
    }
    xt_tensor_release(positions);
    return status;
}

static XtStatus recompute(XtNode *n, XtTensor **out) {
    const XtArg *arg = xt_node_args(n);
    XtTensor *x[2], *weight[2], *rstd[2] = {NULL, NULL}, *positions;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, SAVED_PLACES, &positions));
    for (int i = 0; i < 2; i++) {
        XT_TRY(xt_node_saved(n, i, &x[i]));
        XT_TRY(xt_node_saved(n, SAVED_WEIGHT + i, &weight[i]));
    }
    XT_TRY(compute(arg, x, weight, positions, xt_rope_period(arg, THETA, x[0]), out, rstd));
done:
    for (int i = 0; i < 2; i++) xt_tensor_release(rstd[i]);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtArg *arg = xt_node_args(n);
    XtTensor *x[2], *weight[2], *rstd[2], *positions, *dy[2] = {NULL, NULL}, *dx[2] = {NULL, NULL};
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, SAVED_PLACES, &positions));
    XtQkNormRopeBwd p = {.positions = xt_data(positions), .base = xt_rope_base(arg, THETA)};
    for (int i = 0; i < 2; i++) XT_TRY(xt_node_saved(n, i, &x[i]));
    XT_TRY(xt_empty_like_columns(2, x, dx)); /* also where only dweight is asked for */
    for (int i = 0; i < 2; i++) {
        XT_TRY(xt_node_saved(n, SAVED_WEIGHT + i, &weight[i]));
        XT_TRY(xt_node_saved(n, SAVED_RSTD + i, &rstd[i]));
        XT_TRY(xt_even_rows(dout[i], &dy[i], p.dout_stride[i]));
        XtTensor *sum = xt_node_needs(n, 2 + i) ? xt_node_accumulator(n, 2 + i) : NULL;
        if (xt_node_needs(n, 2 + i) && !sum) XT_TRY(xt_empty_like(weight[i], &din[2 + i]));
        int nd = x[i]->ndim;
        p.x_stride[i][0] = x[i]->strides[nd - 3], p.x_stride[i][1] = x[i]->strides[nd - 2];
        p.dx_stride[i][0] = dx[i]->strides[nd - 3], p.dx_stride[i][1] = dx[i]->strides[nd - 2];
        p.heads[i] = x[i]->shape[nd - 2];
        p.dx[i] = dx[i]->data, p.dweight[i] = xt_data(sum ? sum : din[2 + i]), p.accumulate[i] = sum != NULL;
        p.dout[i] = dy[i]->data, p.x[i] = x[i]->data, p.weight[i] = weight[i]->data, p.rstd[i] = rstd[i]->data;
    }
    p.dtype = x[0]->dtype;
    p.rows = rows_of(x[0]);
    p.dim = x[0]->shape[x[0]->ndim - 1];
    p.period = xt_rope_period(arg, THETA, x[0]);
    XT_TRY(xt_backend_of(x[0])->qk_norm_rope_bwd(&p));
    for (int i = 0; i < 2; i++)
        if (xt_node_needs(n, i)) XT_TRY(xt_share(dx[i], &din[i]));
done:
    for (int i = 0; i < 2; i++) {
        xt_tensor_release(dy[i]);
        xt_tensor_release(dx[i]);
    }
    return status;
}

const XtOp xt_op_qk_norm_rope = {
    .name = "qk_norm_rope",
    .signature = "q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float = 1e-6, theta: float = 10000.0, "
                 "positions: Tensor? = None, period: int? = None, " XT_ROPE_SCALING " -> (Tensor, Tensor)",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 3,
    .doc = "rope(rms_norm(x, weight, eps), theta, positions, period) of q and of k, in one pass. q [B, S, H, D] or [rows, H, D], k "
           "alike with heads of its own, weights [D], D even; all of one dtype.",
};
