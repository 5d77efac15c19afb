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
/* din[0 .. 4] from the gradients of h_in, h_post and h_res (dense); dout and m_res as in XtMhcPreBwd, dense or NULL. */
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

/* ops/mhc/mhc_post.c: din[0 .. 3] of x, y, h_post, m_res; `keep_x` false: din[0] is not made. Slots 0 .. 3 hold the inputs. */
XtStatus xt_mhc_post_forward(XtCall *c);
XtStatus xt_mhc_post_backward(XtNode *n, const XtTensor *dout, bool keep_x, XtTensor **din);

/* Of [.., a, b]: how many matrices [a, b]. */
static inline int64_t xt_matrices(const XtTensor *t) {
    int64_t count = 1;
    for (int i = 0; i < t->ndim - 2; i++) count *= t->shape[i];
    return count;
}

/* "op: arg must have 1 to 8 streams ..." unless the dim has. */
XtStatus xt_check_streams(const XtOp *op, const char *arg, const XtTensor *t, int64_t n);
/* "op: x must have channels ..." unless its last dim has. */
XtStatus xt_check_channels(const XtOp *op, const XtTensor *x);
