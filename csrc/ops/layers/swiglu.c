/* swiglu.c - silu(gate) * up (Shazeer 2020), silu(g) = g s, s = 1 / (1 + exp(-g)).
 *   dgate = dy * up * s * (1 + gate * (1 - s))      dup = dy * silu(gate)
 * Two tensors of one shape, or one tensor whose last dim holds gate and up side by side.
 */
#include "contract/layers.h"
#include "ops/ops.h"

#include <string.h>

/* *out = silu(gate) * up, new; up NULL: gate holds both side by side. */
static XtStatus compute(XtTensor *gate, XtTensor *up, XtTensor **out) {
    int64_t shape[XT_MAX_DIMS], ld = gate->shape[gate->ndim - 1], cols = up ? ld : ld / 2;
    memcpy(shape, gate->shape, sizeof shape);
    shape[gate->ndim - 1] = cols;
    XT_CHECK(xt_empty_shape(gate, gate->dtype, gate->ndim, shape, out));
    XtSwigluFwd p = {.out = (*out)->data, .gate = gate->data, .dtype = gate->dtype, .cols = cols, .ld_in = ld};
    p.up = up ? up->data : (const char *)gate->data + (size_t)cols * xt_dtype_size(gate->dtype);
    p.rows = cols ? xt_view_numel(&(*out)->view) / cols : 0;
    return xt_or_release(xt_backend_of(gate)->swiglu_fwd(&p), out);
}

static XtStatus recompute(XtNode *n, XtTensor **out) {
    XtTensor *gate, *up;
    XT_CHECK(xt_node_saved(n, 0, &gate));
    XT_CHECK(xt_node_saved(n, 1, &up));
    return compute(gate, up, out);
}

static XtStatus forward(XtCall *c) {
    XtTensor *gate = NULL, *up = NULL, *given = c->arg[0].tensor, *other = c->arg[1].tensor;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "gate", given));
    XT_TRY(xt_check_ndim(c->op, "gate", given, 1, XT_MAX_DIMS));
    XT_TRY(xt_dense(given, &gate));
    if (other) {
        XT_TRY(xt_check_shape(c->op, "up", other, given->ndim, given->shape));
        XT_TRY(xt_check_like(c->op, "gate", given, "up", other));
        XT_TRY(xt_dense(other, &up));
    } else if (given->shape[given->ndim - 1] % 2) {
        XT_TRY(xt_error(XT_VALUE_ERROR, "swiglu: the last dim of a fused gate_up must be even, got shape %s",
                        xt_shape_text(given->ndim, given->shape)));
    }
    XT_TRY(compute(gate, up, &c->out[0]));
    c->out_count = 1;
    XT_TRY(xt_save(c, gate));
    XT_TRY(xt_save(c, up));
done:
    xt_tensor_release(gate);
    xt_tensor_release(up);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *gate, *up, *dy = NULL, *dgate = NULL, *dup = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &gate));
    XT_TRY(xt_node_saved(n, 1, &up));
    XT_TRY(xt_dense(dout[0], &dy));
    if (!up) XT_TRY(xt_node_take_last(n, 0, &dgate)); /* the gradient of a joined product takes its place */
    if (!dgate) XT_TRY(xt_empty_like(gate, &dgate));
    if (up) XT_TRY(xt_empty_like(up, &dup));
    int64_t cols = dy->shape[dy->ndim - 1];
    size_t half = (size_t)cols * xt_dtype_size(gate->dtype);
    XtSwigluBwd p = {.dgate = dgate->data,
                     .dy = dy->data,
                     .gate = gate->data,
                     .dtype = gate->dtype,
                     .cols = cols,
                     .rows = cols ? xt_view_numel(&dy->view) / cols : 0,
                     .ld_in = gate->shape[gate->ndim - 1]};
    p.dup = up ? dup->data : (char *)dgate->data + half;
    p.up = up ? up->data : (const char *)gate->data + half;
    XT_TRY(xt_backend_of(gate)->swiglu_bwd(&p));
    if (xt_node_needs(n, 0)) din[0] = dgate, dgate = NULL;
    if (up && xt_node_needs(n, 1)) din[1] = dup, dup = NULL;
done:
    xt_tensor_release(dy);
    xt_tensor_release(dgate);
    xt_tensor_release(dup);
    return status;
}

const XtOp xt_op_swiglu = {
    .name = "swiglu",
    .signature = "gate: Tensor, up: Tensor? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 1,
    .doc = "silu(gate) * up. gate and up [..., F]; or one tensor [..., 2F] whose halves they are.",
};
