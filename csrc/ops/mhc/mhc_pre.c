/* mhc_pre.c - from n residual streams to the input of a layer and the coefficients of its hyper-connection (Xie et al. 2025).
 *
 *   v = x as a vector [n C],  r = 1 / sqrt(mean(v^2) + norm_eps),  z = a (r phi (v gamma)) + bias,  a = alpha by block of rows
 *   h_pre = sigmoid(z_pre) + hc_eps,  h_post = 2 sigmoid(z_post),  h_res = z_res (logits),  h_in = sum_j h_pre_j x_j
 *
 * x [.., n, C], phi [n^2 + 2n, n C], alpha [3], bias [n^2 + 2n], gamma [n, C] or None
 *     -> h_in [.., C], h_post [.., n], h_res [.., n, n].
 * Gradients: contract/mhc.h, XtMhcPreBwd.
 */
#include "contract/mhc.h"
#include "mhc.h"

#include <string.h>

XtStatus xt_check_streams(const XtOp *op, const char *arg, const XtTensor *t, int64_t n) {
    if (n >= 1 && n <= 8) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: %s must have 1 to 8 streams, got %lld in shape %s", op->name, arg, (long long)n,
                    xt_shape_text(t->ndim, t->shape));
}

XtStatus xt_check_channels(const XtOp *op, const XtTensor *x) {
    if (x->shape[x->ndim - 1] > 0) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: x must have channels, got shape %s", op->name, xt_shape_text(x->ndim, x->shape));
}

static XtStatus check_eps(const XtOp *op, const char *arg, double eps) {
    if (eps >= 0.0 && eps <= 1.0) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: %s must be in [0, 1], got %g", op->name, arg, eps);
}

static XtStatus parameter(const XtOp *op, const XtTensor *x, const char *arg, XtTensor *given, int ndim, const int64_t *shape,
                          XtTensor **dense) {
    XtStatus status = xt_check_dtype(op, arg, given, xt_dtype_accumulator(x->dtype));
    if (status == XT_OK) status = xt_check_shape(op, arg, given, ndim, shape);
    if (status == XT_OK) status = xt_check_device(op, "x", x, arg, given);
    return status == XT_OK ? xt_dense(given, dense) : status;
}

XtStatus xt_mhc_pre_forward(XtCall *c, XtMhcPre *pre) {
    XtTensor *x = c->arg[0].tensor, *gamma = c->arg[4].tensor;
    double norm_eps = c->arg[5].f, hc_eps = c->arg[6].f;
    XT_CHECK(xt_check_float(c->op, "x", x));
    XT_CHECK(xt_check_ndim(c->op, "x", x, 2, XT_MAX_DIMS));
    int64_t shape[XT_MAX_DIMS], n = x->shape[x->ndim - 2], cols = x->shape[x->ndim - 1], rows = n * n + 2 * n;
    int64_t tokens = xt_matrices(x);
    XT_CHECK(xt_check_streams(c->op, "x", x, n));
    XT_CHECK(xt_check_channels(c->op, x));
    XT_CHECK(parameter(c->op, x, "phi", c->arg[1].tensor, 2, (int64_t[]){rows, n * cols}, &pre->phi));
    XT_CHECK(parameter(c->op, x, "alpha", c->arg[2].tensor, 1, (int64_t[]){3}, &pre->alpha));
    XT_CHECK(parameter(c->op, x, "bias", c->arg[3].tensor, 1, &rows, &pre->bias));
    if (gamma) XT_CHECK(parameter(c->op, x, "gamma", gamma, 2, (int64_t[]){n, cols}, &pre->gamma));
    XT_CHECK(check_eps(c->op, "norm_eps", norm_eps));
    XT_CHECK(check_eps(c->op, "hc_eps", hc_eps));
    XT_CHECK(xt_dense(x, &pre->x));
    x = pre->x;
    XtDtype acc = xt_dtype_accumulator(x->dtype);
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = n;
    XT_CHECK(xt_empty_shape(x, acc, x->ndim, shape, &pre->h_res));
    XT_CHECK(xt_empty_shape(x, acc, x->ndim - 1, shape, &pre->h_post));
    shape[x->ndim - 2] = cols;
    XT_CHECK(xt_empty_shape(x, x->dtype, x->ndim - 1, shape, &pre->h_in));
    XT_CHECK(xt_empty_shape(x, acc, 2, (int64_t[]){tokens, n}, &pre->h_pre));
    XT_CHECK(xt_empty_shape(x, acc, 2, (int64_t[]){tokens, rows}, &pre->mix));
    XT_CHECK(xt_empty_shape(x, acc, 1, &tokens, &pre->rstd));
    XtMhcPreFwd p = {.h_in = pre->h_in->data,
                     .h_post = pre->h_post->data,
                     .h_res = pre->h_res->data,
                     .h_pre = pre->h_pre->data,
                     .rstd = pre->rstd->data,
                     .mix = pre->mix->data,
                     .x = x->data,
                     .phi = pre->phi->data,
                     .alpha = pre->alpha->data,
                     .bias = pre->bias->data,
                     .gamma = xt_data(pre->gamma),
                     .dtype = x->dtype,
                     .tokens = tokens,
                     .streams = n,
                     .cols = cols,
                     .norm_eps = norm_eps,
                     .hc_eps = hc_eps,
                     .tf32 = xt_tf32()};
    XT_CHECK(xt_backend_of(x)->mhc_pre_fwd(&p));
    XtTensor *saved[XT_MHC_PRE_SAVED] = {
        [XT_MHC_X] = x,
        [XT_MHC_PHI] = pre->phi,
        [XT_MHC_ALPHA] = pre->alpha,
        [XT_MHC_GAMMA] = pre->gamma,
        [XT_MHC_H_PRE] = pre->h_pre,
        [XT_MHC_RSTD] = pre->rstd,
        [XT_MHC_MIX] = pre->mix,
        [XT_MHC_BIAS] = pre->bias,
    };
    for (int i = 0; i < XT_MHC_PRE_SAVED; i++) XT_CHECK(xt_save(c, saved[i]));
    return XT_OK;
}

void xt_mhc_pre_release(XtMhcPre *pre) {
    XtTensor *all[] = {pre->x,      pre->phi,   pre->alpha, pre->bias, pre->gamma, pre->h_in,
                       pre->h_post, pre->h_res, pre->h_pre, pre->rstd, pre->mix};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) xt_tensor_release(all[i]);
}

XtStatus xt_mhc_pre_backward(XtNode *n, const XtTensor *dh_in, const XtTensor *dh_post, const XtTensor *dh_res,
                             const XtTensor *dout, const XtTensor *m_res, XtTensor **din) {
    XtTensor *saved[XT_MHC_PRE_SAVED], *sum = NULL;
    for (int i = 0; i < XT_MHC_PRE_SAVED; i++) XT_CHECK(xt_node_saved(n, i, &saved[i]));
    XtTensor *x = saved[XT_MHC_X], *phi = saved[XT_MHC_PHI], *alpha = saved[XT_MHC_ALPHA], *gamma = saved[XT_MHC_GAMMA];
    int64_t rows = phi->shape[0];
    /* Where the tape lends the gradient that x has so far (usually from mhc_post), the kernel adds to it and writes no dx of its own. */
    if (xt_node_needs(n, 0) && !(sum = xt_node_accumulator(n, 0))) XT_CHECK(xt_empty_like(x, &din[0]));
    if (xt_node_needs(n, 1)) XT_CHECK(xt_empty_like(phi, &din[1]));
    if (xt_node_needs(n, 2)) XT_CHECK(xt_empty_like(alpha, &din[2]));
    if (xt_node_needs(n, 3)) XT_CHECK(xt_empty_shape(x, phi->dtype, 1, &rows, &din[3]));
    if (gamma && xt_node_needs(n, 4)) XT_CHECK(xt_empty_like(gamma, &din[4]));
    XtMhcPreBwd p = {.dx = xt_data(sum ? sum : din[0]),
                     .dphi = xt_data(din[1]),
                     .dalpha = xt_data(din[2]),
                     .dbias = xt_data(din[3]),
                     .dgamma = xt_data(din[4]),
                     .dh_in = dh_in->data,
                     .dh_post = dh_post->data,
                     .dh_res = dh_res->data,
                     .x = x->data,
                     .phi = phi->data,
                     .alpha = alpha->data,
                     .bias = saved[XT_MHC_BIAS]->data,
                     .gamma = xt_data(gamma),
                     .h_pre = saved[XT_MHC_H_PRE]->data,
                     .rstd = saved[XT_MHC_RSTD]->data,
                     .mix = saved[XT_MHC_MIX]->data,
                     .dout = xt_data(dout),
                     .m_res = xt_data(m_res),
                     .dx_add = xt_data(sum),
                     .dtype = x->dtype,
                     .tokens = saved[XT_MHC_RSTD]->shape[0],
                     .streams = x->shape[x->ndim - 2],
                     .cols = x->shape[x->ndim - 1],
                     .tf32 = xt_tf32()};
    return xt_backend_of(x)->mhc_pre_bwd(&p);
}

static XtStatus forward(XtCall *c) {
    XtMhcPre pre = {0};
    XtStatus status = xt_mhc_pre_forward(c, &pre);
    if (status == XT_OK) {
        c->out[0] = pre.h_in, c->out[1] = pre.h_post, c->out[2] = pre.h_res;
        c->out_count = 3;
        pre.h_in = pre.h_post = pre.h_res = NULL;
    }
    xt_mhc_pre_release(&pre);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *d[3] = {NULL};
    XtStatus status = XT_OK;
    for (int i = 0; i < 3; i++) XT_TRY(xt_dense(dout[i], &d[i]));
    XT_TRY(xt_mhc_pre_backward(n, d[0], d[1], d[2], NULL, NULL, din));
done:
    for (int i = 0; i < 3; i++) xt_tensor_release(d[i]);
    return status;
}

const XtOp xt_op_mhc_pre = {
    .name = "mhc_pre",
    .signature = "x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor? = None, *, norm_eps: float = 1e-6, "
                 "hc_eps: float = 1e-6 -> (Tensor, Tensor, Tensor)",
    .forward = forward,
    .backward = backward,
    .doc = "Input of a layer and coefficients of its hyper-connection: (h_in [.., C], h_post [.., n], h_res [.., n, n]).\n"
           "x [.., n, C] of a float dtype, n in 1..8; phi [n*n + 2n, n*C], alpha [3], bias [n*n + 2n], gamma [n, C] of float32\n"
           "(float64 for float64 streams), as are h_post and h_res. See functional.mhc_pre.",
};
