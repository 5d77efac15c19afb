/* mhc_layer.c - a hyper-connection around a layer as two ops: mhc_open before it, mhc_close after it.
 *
 *   h_in, h_post, M, carry = mhc_open(x, ..)        M = sinkhorn(h_res)
 *   out = mhc_close(carry, F(h_in), h_post, M)      out_i = sum_j M_ij carry_j + h_post_i F(h_in)
 *
 * Their forward computes what mhc_pre, sinkhorn and mhc_post compute, bit for bit. Their backward does not store dx_j of mhc_post,
 * sum_i M_ij g_i, which is as large as x: `carry` is an alias of x, its gradient is g itself, and mhc_open adds the sum to dx.
 *
 * This is right only for the M of the same mhc_open. When carry requires a gradient, mhc_close therefore refuses parts of two calls,
 * and the backward of mhc_open refuses an M or h_post that was changed in place. carry must have no other user, whose gradient would
 * be wrong: only nn.HyperConnection calls these two ops, and its carry is private.
 */
#include "mhc.h"

enum { SAVED_LOGITS = XT_MHC_PRE_SAVED, SAVED_M, SAVED_H_POST };
enum { OUT_H_IN, OUT_H_POST, OUT_M, OUT_CARRY, OUT_COUNT };

static XtStatus open_forward(XtCall *c) {
    XtMhcPre pre = {0};
    XtTensor *m = NULL, *carry = NULL;
    XtSinkhornOptions options;
    XtStatus status = XT_OK;
    XT_TRY(xt_sinkhorn_options(c->op, c->arg + 7, &options));
    XT_TRY(xt_mhc_pre_forward(c, &pre));
    XT_TRY(xt_sinkhorn(pre.h_res, &options, &m));
    XT_TRY(xt_tensor_alias(pre.x, &carry));
    XT_TRY(xt_save(c, pre.h_res));
    XT_TRY(xt_save(c, m));
    XT_TRY(xt_save(c, pre.h_post));
    c->out[OUT_H_IN] = pre.h_in, c->out[OUT_H_POST] = pre.h_post, c->out[OUT_M] = m, c->out[OUT_CARRY] = carry;
    c->out_count = OUT_COUNT;
    pre.h_in = pre.h_post = m = carry = NULL;
done:
    xt_mhc_pre_release(&pre);
    xt_tensor_release(m);
    xt_tensor_release(carry);
    return status;
}

static XtStatus open_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *logits, *m, *h_post, *dlogits = NULL, *d[OUT_COUNT] = {NULL};
    XtSinkhornOptions options;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, SAVED_LOGITS, &logits));
    XT_TRY(xt_node_saved(n, SAVED_M, &m));
    XT_TRY(xt_node_saved(n, SAVED_H_POST, &h_post)); /* fails when h_post was changed in place: dh_post is for its old values */
    for (int i = 0; i < OUT_COUNT; i++) XT_TRY(xt_dense(dout[i], &d[i]));
    XT_TRY(xt_sinkhorn_options(xt_node_op(n), xt_node_args(n) + 7, &options));
    XT_TRY(xt_sinkhorn_gradient(logits, d[OUT_M], &options, &dlogits));
    XT_TRY(xt_mhc_pre_backward(n, d[OUT_H_IN], d[OUT_H_POST], dlogits, d[OUT_CARRY], m, din));
done:
    for (int i = 0; i < OUT_COUNT; i++) xt_tensor_release(d[i]);
    xt_tensor_release(dlogits);
    return status;
}

static const XtNode *maker(const XtTensor *t) { return xt_grad_of(t) ? xt_grad_of(t)->node : NULL; }
static bool made_by_open(const XtTensor *t) { return maker(t) && maker(t)->backward == open_backward; }

/* Describes t for an error message. `open`: the node that should have made it, or NULL. */
static const char *origin(const XtTensor *t, const XtNode *open) {
    if (!xt_requires_grad(t)) return "a tensor without a gradient";
    if (!maker(t)) return "a leaf";
    if (!open || !made_by_open(t)) return maker(t)->name;
    return maker(t) == open ? "another output of it" : "an output of another mhc_open";
}

/* Refuses an h_post or M that another mhc_open made than the one that made carry: the gradient of x would be wrong. */
static XtStatus check_one_open(const XtCall *c) {
    static const struct {
        const char *name;
        int arg, output;
    } part[] = {{"h_post", 2, OUT_H_POST}, {"h_res", 3, OUT_M}};
    const XtTensor *carry = c->arg[0].tensor;
    if (!c->record || !xt_requires_grad(carry)) return XT_OK;
    if (!made_by_open(carry) || xt_grad_of(carry)->output != OUT_CARRY)
        return xt_error(XT_RUNTIME_ERROR, "mhc_close: carry must be output %d of mhc_open when it requires a gradient, got %s",
                        OUT_CARRY, origin(carry, NULL));
    const XtNode *open = maker(carry);
    for (int i = 0; i < 2; i++) {
        const XtTensor *t = c->arg[part[i].arg].tensor;
        if (maker(t) == open && xt_grad_of(t)->output == part[i].output) continue;
        return xt_error(XT_RUNTIME_ERROR, "mhc_close: %s must be output %d of the mhc_open that made carry, got %s", part[i].name,
                        part[i].output, origin(t, open));
    }
    return XT_OK;
}

static XtStatus close_forward(XtCall *c) {
    XT_CHECK(check_one_open(c));
    return xt_mhc_post_forward(c);
}

static XtStatus close_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *g = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_dense(dout[0], &g));
    XT_TRY(xt_mhc_post_backward(n, g, false, din));
    if (xt_node_needs(n, 0)) din[0] = g, g = NULL;
done:
    xt_tensor_release(g);
    return status;
}

const XtOp xt_op_mhc_open = {
    .name = "mhc_open",
    .signature = "x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor? = None, norm_eps: float = 1e-6, "
                 "hc_eps: float = 1e-6, iters: int = 20, eps: float = 1e-6, form: str = 'P', transpose: bool = False -> (Tensor, "
                 "Tensor, Tensor, Tensor)",
    .forward = open_forward,
    .backward = open_backward,
    .doc = "mhc_pre and sinkhorn: (h_in, h_post, M, carry). carry is x, for mhc_close alone: its gradient is that of mhc_close's\n"
           "result. RuntimeError in backward when M or h_post was changed in place. See nn.HyperConnection.",
};

const XtOp xt_op_mhc_close = {
    .name = "mhc_close",
    .signature = "carry: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor -> Tensor",
    .forward = close_forward,
    .backward = close_backward,
    .doc = "mhc_post of the carry of mhc_open. RuntimeError when carry requires a gradient and carry, h_post and h_res are not\n"
           "outputs of one mhc_open. See nn.HyperConnection.",
};
