/* mhc.h - what the ops of hyper-connections share. mhc_pre and sinkhorn are ops; mhc_open runs one after the other. */
#pragma once

#include "contract/mhc.h"
#include "ops/ops.h"

/* ops/mhc/mhc_pre.c. Arguments 0 .. 6 of both ops: x, phi, alpha, bias, gamma, norm_eps, hc_eps; slots 0 .. 8 of both nodes. */
typedef struct XtMhcPre {
    XtTensor *x, *phi, *alpha, *bias, *gamma;             /* dense; gamma may be NULL */
    XtTensor *h_in, *h_post, *h_res, *h_pre, *rstd, *mix; /* new */
} XtMhcPre;                                               /* all owned */
/* What both nodes keep, in this order; mhc_open keeps more after it. */
enum { XT_MHC_X, XT_MHC_PHI, XT_MHC_ALPHA, XT_MHC_GAMMA, XT_MHC_H_PRE, XT_MHC_RSTD, XT_MHC_MIX, XT_MHC_BIAS, XT_MHC_PRE_SAVED };
/* Checks, runs and saves. Release `pre` whatever the status. */
XtStatus xt_mhc_pre_forward(XtCall *c, XtMhcPre *pre);
void xt_mhc_pre_release(XtMhcPre *pre);
/* Sets din[0 .. 4]. dh_in, dh_post and dh_res are dense; dout and m_res are as in XtMhcPreBwd, dense or NULL. */
XtStatus xt_mhc_pre_backward(XtNode *n, const XtTensor *dh_in, const XtTensor *dh_post, const XtTensor *dh_res,
                             const XtTensor *dout, const XtTensor *m_res, XtTensor **din);

/* ops/mhc/sinkhorn.c. args: iters, eps, form, transpose, in this order. */
typedef struct XtSinkhornOptions {
    int64_t iters;
    double eps;
    XtSinkhornForm form;
    bool transpose;
} XtSinkhornOptions;
XtStatus xt_sinkhorn_options(const XtOp *op, const XtArg *args, XtSinkhornOptions *out);
/* logits [.., n, n] dense, n in 1..8. Returns new. */
XtStatus xt_sinkhorn(const XtTensor *logits, const XtSinkhornOptions *options, XtTensor **out);
XtStatus xt_sinkhorn_gradient(const XtTensor *logits, const XtTensor *dout, const XtSinkhornOptions *options, XtTensor **dlogits);

/* ops/mhc/mhc_post.c. Slots 0 .. 3 hold x, y, h_post and m_res; din[0 .. 3] are their gradients, without din[0] unless `keep_x`. */
XtStatus xt_mhc_post_forward(XtCall *c);
XtStatus xt_mhc_post_backward(XtNode *n, const XtTensor *dout, bool keep_x, XtTensor **din);

/* The number of matrices in t [.., a, b]. */
static inline int64_t xt_matrices(const XtTensor *t) {
    int64_t count = 1;
    for (int i = 0; i < t->ndim - 2; i++) count *= t->shape[i];
    return count;
}

/* Refuses n, a dim of t, outside 1..8. */
XtStatus xt_check_streams(const XtOp *op, const char *arg, const XtTensor *t, int64_t n);
/* Refuses an x whose last dim is 0. */
XtStatus xt_check_channels(const XtOp *op, const XtTensor *x);
