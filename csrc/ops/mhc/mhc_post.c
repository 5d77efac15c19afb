/* mhc_post.c - out_i = sum_j M_ij x_j + h_post_i y: the streams mixed, and a layer's output written to all of them
 * (Xie et al. 2025).
 *
 *   dx_j = sum_i M_ij g_i     dy = sum_i h_post_i g_i     dh_post_i = g_i . y     dM_ij = g_i . x_j
 *
 * x [.., n, C] and y [.., C] of one dtype, h_post [.., n] and h_res = M [.., n, n] of float32 (float64 for float64) -> [.., n, C].
 */
#include "contract/mhc.h"
#include "mhc.h"

#include <string.h>

XtStatus xt_mhc_post_forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *d[4] = {NULL};
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "x", given));
    XT_TRY(xt_check_ndim(c->op, "x", given, 2, XT_MAX_DIMS));
    int ndim = given->ndim;
    int64_t shape[XT_MAX_DIMS], n = given->shape[ndim - 2], cols = given->shape[ndim - 1];
    XT_TRY(xt_check_channels(c->op, given));
    XT_TRY(xt_check_streams(c->op, "x", given, n));
    memcpy(shape, given->shape, sizeof shape);
    shape[ndim - 2] = cols;
    XT_TRY(xt_check_like(c->op, "x", given, "y", c->arg[1].tensor));
    XT_TRY(xt_check_shape(c->op, "y", c->arg[1].tensor, ndim - 1, shape));
    shape[ndim - 2] = shape[ndim - 1] = n;
    static const char *const names[] = {"x", "y", "h_post", "h_res"};
    for (int i = 2; i < 4; i++) {
        XT_TRY(xt_check_dtype(c->op, names[i], c->arg[i].tensor, xt_dtype_accumulator(given->dtype)));
        XT_TRY(xt_check_shape(c->op, names[i], c->arg[i].tensor, ndim - 3 + i, shape));
        XT_TRY(xt_check_device(c->op, "x", given, names[i], c->arg[i].tensor));
    }
    for (int i = 0; i < 4; i++) XT_TRY(xt_dense(c->arg[i].tensor, &d[i]));
    c->out_count = 1;
    XT_TRY(xt_empty_like(d[0], &c->out[0]));
    XtMhcPostFwd p = {.out = c->out[0]->data,
                      .x = d[0]->data,
                      .y = d[1]->data,
                      .h_post = d[2]->data,
                      .m_res = d[3]->data,
                      .dtype = given->dtype,
                      .tokens = xt_matrices(given),
                      .streams = n,
                      .cols = cols};
    XT_TRY(xt_backend_of(given)->mhc_post_fwd(&p));
    for (int i = 0; i < 4; i++) XT_TRY(xt_save(c, d[i]));
done:
    for (int i = 0; i < 4; i++) xt_tensor_release(d[i]);
    return status;
}

XtStatus xt_mhc_post_backward(XtNode *n, const XtTensor *dout, bool keep_x, XtTensor **din) {
    XtTensor *saved[4], *sum = NULL;
    for (int i = 0; i < 4; i++) XT_CHECK(xt_node_saved(n, i, &saved[i]));
    bool wants_x = keep_x && xt_node_needs(n, 0);
    if (wants_x) sum = xt_node_accumulator(n, 0);
    for (int i = 0; i < 4; i++)
        if (i ? xt_node_needs(n, i) : wants_x && !sum) XT_CHECK(xt_empty_like(saved[i], &din[i]));
    const XtTensor *x = saved[0];
    XtMhcPostBwd p = {.dx = xt_data(sum ? sum : din[0]),
                      .dy = xt_data(din[1]),
                      .dh_post = xt_data(din[2]),
                      .dm_res = xt_data(din[3]),
                      .dout = dout->data,
                      .x = x->data,
                      .y = saved[1]->data,
                      .h_post = saved[2]->data,
                      .m_res = saved[3]->data,
                      .dx_add = xt_data(sum),
                      .dtype = x->dtype,
                      .tokens = xt_matrices(x),
                      .streams = x->shape[x->ndim - 2],
                      .cols = x->shape[x->ndim - 1]};
    return xt_backend_of(x)->mhc_post_bwd(&p);
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *g = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_dense(dout[0], &g));
    XT_TRY(xt_mhc_post_backward(n, g, true, din));
done:
    xt_tensor_release(g);
    return status;
}

const XtOp xt_op_mhc_post = {
    .name = "mhc_post",
    .signature = "x: Tensor, y: Tensor, h_post: Tensor, h_res: Tensor -> Tensor",
    .forward = xt_mhc_post_forward,
    .backward = backward,
    .doc = "out_i = sum_j h_res_ij x_j + h_post_i y. x [.., n, C], y [.., C], h_post [.., n], h_res [.., n, n] -> [.., n, C].\n"
           "h_res is the mixing matrix itself (what sinkhorn returns), not logits. See functional.mhc_post.",
};
