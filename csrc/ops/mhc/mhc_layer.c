/* mhc_layer.c - a hyper-connection around a layer as two ops: mhc_open before it, mhc_close after it.
 *
 *   h_in, h_post, M, carry = mhc_open(x, ..)        M = sinkhorn(h_res)
 *   out = mhc_close(carry, F(h_in), h_post, M)      out_i = sum_j M_ij carry_j + h_post_i F(h_in)
 *
 * They compute what mhc_pre, sinkhorn and mhc_post do, bit for bit. One thing differs in the backward: dx_j of mhc_post, sum_i M_ij
 * g_i, is as large as x and would be written only to be read again. So `carry`, which is x under another name, gets the gradient g
 * of `out` instead, and mhc_open, which knows M, adds the sum where it makes dx. Nothing else may use carry, so only
 * nn.HyperConnection calls these two.
 */
#include "mhc.h"

enum { SAVED_LOGITS = XT_MHC_PRE_SAVED, SAVED_M };

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
    c->out[0] = pre.h_in, c->out[1] = pre.h_post, c->out[2] = m, c->out[3] = carry;
    c->out_count = 4;
    pre.h_in = pre.h_post = m = carry = NULL;
done:
    xt_mhc_pre_release(&pre);
    xt_tensor_release(m);
    xt_tensor_release(carry);
    return status;
}

static XtStatus open_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *logits, *m, *dlogits = NULL, *d[4] = {NULL};
    XtSinkhornOptions options;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, SAVED_LOGITS, &logits));
    XT_TRY(xt_node_saved(n, SAVED_M, &m));
    for (int i = 0; i < 4; i++) XT_TRY(xt_dense(dout[i], &d[i]));
    XT_TRY(xt_sinkhorn_options(xt_node_op(n), xt_node_args(n) + 7, &options));
    XT_TRY(xt_sinkhorn_gradient(logits, d[2], &options, &dlogits));
    XT_TRY(xt_mhc_pre_backward(n, d[0], d[1], dlogits, d[3], m, din));
done:
    for (int i = 0; i < 4; i++) xt_tensor_release(d[i]);
    xt_tensor_release(dlogits);
    return status;
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
    .doc = "mhc_pre and sinkhorn: (h_in, h_post, M, carry). carry is x for mhc_close and nothing else: its gradient is that of\n"
           "mhc_close's result. See nn.HyperConnection.",
};

const XtOp xt_op_mhc_close = {
    .name = "mhc_close",
    .signature = "carry: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor -> Tensor",
    .forward = xt_mhc_post_forward,
    .backward = close_backward,
    .doc = "mhc_post of the carry of mhc_open. See nn.HyperConnection.",
};
