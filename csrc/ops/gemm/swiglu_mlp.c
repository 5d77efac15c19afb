/* swiglu_mlp.c - the feed-forward layer of Llama and its successors: y = h D^T, h = silu(x G^T) (x U^T) (Shazeer 2020).
 *   dh = dy D,  dD = dy^T h,  dgate and dup from dh as in swiglu.c,  dx = dgate G + dup U,  dG = dgate^T x,  dU = dup^T x
 * x [..., C], gate G and up U [F, C], down D [K, F], y [..., K].
 *
 * One op, because two of its products have an implementation that computes SwiGLU or its gradient while a tile of the product is in
 * registers (XtGemmEpilogue): h is written beside gate and up, and dh not at all. Elsewhere they are products and the slots of swiglu,
 * with the bits of linear_joined, swiglu and linear, one after the other.
 *
 * Kept for the backward: x, gate and up in one [rows, 2 F], and h; in recompute mode h is computed again from gate and up, by the product
 * that turns these into their gradients where that has an epilogue and nobody else keeps them.
 */
#include "contract/gemm.h"
#include "contract/layers.h"
#include "ops/ops.h"

enum { X, GATE, UP, DOWN, GATE_UP, H }; /* saved; the first four are the inputs */

static void halves(const XtTensor *gate_up, const char **gate, const char **up, int64_t *cols) {
    *cols = gate_up->shape[1] / 2;
    *gate = gate_up->data;
    *up = *gate ? *gate + (size_t)*cols * xt_dtype_size(gate_up->dtype) : NULL;
}

static XtStatus activate(const XtTensor *gate_up, XtTensor *h) {
    XtSwigluFwd p = {.out = h->data, .dtype = h->dtype, .rows = h->shape[0], .ld_in = gate_up->shape[1]};
    const char *gate, *up;
    halves(gate_up, &gate, &up, &p.cols);
    p.gate = gate, p.up = up;
    return xt_backend_of(h)->swiglu_fwd(&p);
}

/* gate_up = rows [G; U]^T and h = silu(gate) up */
static XtStatus open_up(XtTensor *rows, XtTensor *const *weights, XtTensor *gate_up, XtTensor *h) {
    XtTensor *joined = NULL, *transposed = NULL;
    XtStatus status = XT_OK;
    bool done = false;
    XT_TRY(xt_join_rows(2, weights, &joined));
    if (joined) {
        XT_TRY(xt_transposed(joined, &transposed));
        XT_TRY(xt_matmul_epilogue(rows, transposed, XT_GEMM_SWIGLU, NULL, gate_up, h, &done));
    }
    if (!done) {
        XT_TRY(xt_joined_product(rows, 2, weights, gate_up));
        XT_TRY(activate(gate_up, h));
    }
done:
    xt_tensor_release(joined);
    xt_tensor_release(transposed);
    return status;
}

static XtStatus check(const XtCall *c) {
    XtTensor *x = c->arg[X].tensor, *gate = c->arg[GATE].tensor, *down = c->arg[DOWN].tensor;
    static const char *const names[] = {"input", "gate", "up", "down"};
    XT_CHECK(xt_check_float(c->op, "input", x));
    XT_CHECK(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    for (int i = GATE; i <= DOWN; i++) {
        XT_CHECK(xt_check_ndim(c->op, names[i], c->arg[i].tensor, 2, 2));
        XT_CHECK(xt_check_like(c->op, "input", x, names[i], c->arg[i].tensor));
    }
    if (x->shape[x->ndim - 1] != gate->shape[1])
        return xt_error(XT_VALUE_ERROR, "swiglu_mlp: the last dim of input must be %lld, as that of gate %s is, got shape %s",
                        (long long)gate->shape[1], xt_shape_text(2, gate->shape), xt_shape_text(x->ndim, x->shape));
    XT_CHECK(xt_check_shape(c->op, "up", c->arg[UP].tensor, 2, gate->shape));
    return xt_check_shape(c->op, "down", down, 2, (int64_t[]){down->shape[0], gate->shape[0]});
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[X].tensor, *down = c->arg[DOWN].tensor;
    XtTensor *weights[2] = {c->arg[GATE].tensor, c->arg[UP].tensor}, *rows = NULL, *gate_up = NULL, *h = NULL, *turned = NULL,
             *y = NULL;
    XtStatus status = XT_OK;
    XT_TRY(check(c));
    XT_TRY(xt_as_rows(x, &rows));
    int64_t count = rows->shape[0], cols = weights[0]->shape[0];
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){count, 2 * cols}, &gate_up));
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){count, cols}, &h));
    XT_TRY(open_up(rows, weights, gate_up, h));
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){count, down->shape[0]}, &y));
    XT_TRY(xt_transposed(down, &turned));
    XT_TRY(xt_matmul_into(h, turned, false, NULL, y));
    XT_TRY(xt_save(c, rows));
    for (int i = GATE; i <= DOWN; i++) XT_TRY(xt_save(c, c->arg[i].tensor));
    XT_TRY(xt_save(c, gate_up));
    XT_TRY(xt_save(c, xt_recompute_mode() ? NULL : h));
    XT_TRY(xt_rows_like(y, x, &c->out[0]));
    c->out_count = 1;
done:
    xt_tensor_release(rows);
    xt_tensor_release(gate_up);
    xt_tensor_release(h);
    xt_tensor_release(turned);
    xt_tensor_release(y);
    return status;
}

/* dD = dy^T h */
static XtStatus down_gradient(XtNode *n, XtTensor *dy, const XtTensor *gate_up, XtTensor **din) {
    XtTensor *kept, *h = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, H, &kept));
    if (!kept) {
        XT_TRY(xt_empty_shape(dy, dy->dtype, 2, (int64_t[]){dy->shape[0], gate_up->shape[1] / 2}, &h));
        XT_TRY(activate(gate_up, h));
    }
    XT_TRY(xt_weight_gradient(n, DOWN, dy, kept ? kept : h, din));
done:
    xt_tensor_release(h);
    return status;
}

/* *out = gate and up where this is their last reader, else NULL. *done: the product has turned gate and up into their gradients, and written h
 * where h is not NULL. */
static XtStatus gradient_inside(XtNode *n, XtTensor *dy, XtTensor *down, XtTensor *h, XtTensor **out, bool *done) {
    XT_CHECK(xt_node_take_last(n, GATE_UP, out));
    return *out ? xt_matmul_epilogue(dy, down, XT_GEMM_SWIGLU_BWD, NULL, *out, h, done) : XT_OK;
}

/* *out = dgate and dup side by side, in its place or new. */
static XtStatus gradient_apart(XtTensor *dy, XtTensor *down, XtTensor *gate_up, XtTensor **out) {
    XtTensor *dh = NULL;
    XtStatus status = XT_OK;
    if (!*out) XT_TRY(xt_empty_like(gate_up, out));
    XT_TRY(xt_empty_shape(dy, dy->dtype, 2, (int64_t[]){dy->shape[0], down->shape[1]}, &dh));
    XT_TRY(xt_matmul_into(dy, down, false, NULL, dh));
    XtSwigluBwd p = {.dy = dh->data, .dtype = dh->dtype, .rows = dh->shape[0], .ld_in = gate_up->shape[1]};
    const char *gate, *up, *dgate, *dup;
    halves(gate_up, &gate, &up, &p.cols);
    halves(*out, &dgate, &dup, &p.cols);
    p.gate = gate, p.up = up, p.dgate = (void *)dgate, p.dup = (void *)dup;
    XT_TRY(xt_backend_of(dh)->swiglu_bwd(&p));
done:
    xt_tensor_release(dh);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *rows, *weights[2], *down, *gate_up, *kept, *h = NULL, *dy = NULL, *gradient = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, X, &rows));
    XT_TRY(xt_node_saved(n, GATE, &weights[0]));
    XT_TRY(xt_node_saved(n, UP, &weights[1]));
    XT_TRY(xt_node_saved(n, DOWN, &down));
    XT_TRY(xt_node_saved(n, GATE_UP, &gate_up));
    XT_TRY(xt_as_rows(dout[0], &dy));
    XT_TRY(xt_node_saved(n, H, &kept));
    const bool inner = xt_node_needs(n, X) || xt_node_needs(n, GATE) || xt_node_needs(n, UP);
    const bool again = xt_node_needs(n, DOWN) && !kept && inner; /* h may come with the gradients of gate and up */
    bool done = false;
    if (xt_node_needs(n, DOWN) && !again) XT_TRY(down_gradient(n, dy, gate_up, din));
    if (again) XT_TRY(xt_empty_shape(dy, dy->dtype, 2, (int64_t[]){dy->shape[0], down->shape[1]}, &h));
    if (inner) XT_TRY(gradient_inside(n, dy, down, h, &gradient, &done));
    if (again && !done) XT_TRY(activate(gate_up, h));
    if (again) XT_TRY(xt_weight_gradient(n, DOWN, dy, h, din));
    xt_tensor_release(h);
    h = NULL;
    if (inner && !done) XT_TRY(gradient_apart(dy, down, gate_up, &gradient));
    if (inner) XT_TRY(xt_joined_gradients(n, 2, weights, rows, gradient, din));
done:
    xt_tensor_release(h);
    xt_tensor_release(dy);
    xt_tensor_release(gradient);
    return status;
}

const XtOp xt_op_swiglu_mlp = {
    .name = "swiglu_mlp",
    .signature = "input: Tensor, gate: Tensor, up: Tensor, down: Tensor -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "linear(swiglu(linear(input, gate), linear(input, up)), down). input [..., C], gate and up [F, C], down [K, F]\n"
           "-> [..., K]; all of one floating point dtype. gate and up that lie one after the other in memory (see pack) are one\n"
           "product.",
};
