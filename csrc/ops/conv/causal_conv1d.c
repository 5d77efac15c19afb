/* causal_conv1d.c - each channel convolved with the few taps before it, and silu after it (contract/conv.h has the sum).
 *
 * x is [B, S, C], as the layers around it have it; weight is [C, K] or, as Conv1d keeps it, [C, 1, K]. The backward computes the sums
 * before silu again from x. That takes K multiplications an element, while memory is the limit.
 */
#include "contract/conv.h"
#include "ops/ops.h"

#include <string.h>

/* Arguments of both ops: input, weight, then state where there is one, bias, activation. */
typedef struct Causal {
    XtTensor *x, *w, *bias, *state; /* dense, owned; bias and state may be NULL */
    int taps;
    bool silu;
} Causal;

static bool has_state(const XtOp *op) { return op->code != 0; }
static int bias_argument(const XtOp *op) { return has_state(op) ? 3 : 2; }

static XtStatus check(const XtCall *c) {
    const XtArg *arg = c->arg;
    int at = bias_argument(c->op);
    const XtTensor *x = arg[0].tensor, *w = arg[1].tensor, *bias = arg[at].tensor;
    const char *name = c->op->name;
    XT_CHECK(xt_check_float(c->op, "input", x));
    XT_CHECK(xt_check_ndim(c->op, "input", x, 3, 3));
    XT_CHECK(xt_check_ndim(c->op, "weight", w, 2, 3));
    XT_CHECK(xt_check_like(c->op, "input", x, "weight", w));
    int64_t channels = x->shape[2], taps = w->shape[w->ndim - 1];
    if (w->shape[0] != channels || (w->ndim == 3 && w->shape[1] != 1))
        return xt_error(XT_VALUE_ERROR, "%s: weight must have shape (%lld, K) or (%lld, 1, K), as input has %lld channels, got %s",
                        name, (long long)channels, (long long)channels, (long long)channels, xt_shape_text(w->ndim, w->shape));
    if (taps < 1 || taps > XT_CONV_TAPS)
        return xt_error(XT_VALUE_ERROR, "%s: weight must have 1 to %d taps (conv1d takes more), got %lld", name, XT_CONV_TAPS,
                        (long long)taps);
    if (bias) {
        XT_CHECK(xt_check_like(c->op, "input", x, "bias", bias));
        XT_CHECK(xt_check_shape(c->op, "bias", bias, 1, &channels));
    }
    if (arg[at + 1].given && strcmp(arg[at + 1].s, "silu") != 0)
        return xt_error(XT_VALUE_ERROR, "%s: activation must be None or 'silu', got '%s'", name, arg[at + 1].s);
    if (!has_state(c->op)) return XT_OK;
    int64_t shape[3] = {x->shape[0], taps - 1, channels};
    XT_CHECK(xt_check_like(c->op, "input", x, "state", arg[2].tensor));
    return xt_check_shape(c->op, "state", arg[2].tensor, 3, shape);
}

static XtStatus forward(XtCall *c) {
    Causal t = {0};
    XtStatus status = XT_OK;
    int at = bias_argument(c->op);
    XT_TRY(check(c));
    XT_TRY(xt_dense(c->arg[0].tensor, &t.x));
    XT_TRY(xt_dense(c->arg[1].tensor, &t.w));
    if (c->arg[at].tensor) XT_TRY(xt_dense(c->arg[at].tensor, &t.bias));
    if (has_state(c->op)) XT_TRY(xt_dense(c->arg[2].tensor, &t.state));
    XT_TRY(xt_empty_like(t.x, &c->out[0]));
    c->out_count = 1;
    if (t.state) {
        XT_TRY(xt_empty_like(t.state, &c->out[1]));
        c->out_count = 2;
    }
    XtCausalConv1dFwd p = {.y = c->out[0]->data,
                           .next = xt_data(c->out[1]),
                           .x = t.x->data,
                           .weight = t.w->data,
                           .bias = xt_data(t.bias),
                           .state = xt_data(t.state),
                           .dtype = t.x->dtype,
                           .batch = t.x->shape[0],
                           .steps = t.x->shape[1],
                           .channels = t.x->shape[2],
                           .taps = (int)t.w->shape[t.w->ndim - 1],
                           .silu = c->arg[at + 1].given};
    XT_TRY(xt_backend_of(t.x)->causal_conv1d_fwd(&p));
    XT_TRY(xt_save(c, t.x));
    XT_TRY(xt_save(c, t.w));
    XT_TRY(xt_save(c, t.bias));
    XT_TRY(xt_save(c, t.state));
done:
    xt_tensor_release(t.x);
    xt_tensor_release(t.w);
    xt_tensor_release(t.bias);
    xt_tensor_release(t.state);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *w, *bias, *state, *dy = NULL, *dnext = NULL;
    XtStatus status = XT_OK;
    const XtOp *op = xt_node_op(n);
    int at = bias_argument(op);
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &w));
    XT_TRY(xt_node_saved(n, 2, &bias));
    XT_TRY(xt_node_saved(n, 3, &state));
    XT_TRY(xt_dense(dout[0], &dy));
    if (state) XT_TRY(xt_dense(dout[1], &dnext));
    if (xt_node_needs(n, 0)) XT_TRY(xt_empty_like(x, &din[0]));
    if (xt_node_needs(n, 1)) XT_TRY(xt_empty_like(w, &din[1]));
    if (bias && xt_node_needs(n, at)) XT_TRY(xt_empty_like(bias, &din[at]));
    if (state && xt_node_needs(n, 2)) XT_TRY(xt_empty_like(state, &din[2]));
    XtCausalConv1dBwd p = {.dx = xt_data(din[0]),
                           .dweight = xt_data(din[1]),
                           .dbias = bias ? xt_data(din[at]) : NULL,
                           .dstate = state ? xt_data(din[2]) : NULL,
                           .dy = dy->data,
                           .dnext = xt_data(dnext),
                           .x = x->data,
                           .weight = w->data,
                           .bias = xt_data(bias),
                           .state = xt_data(state),
                           .dtype = x->dtype,
                           .batch = x->shape[0],
                           .steps = x->shape[1],
                           .channels = x->shape[2],
                           .taps = (int)w->shape[w->ndim - 1],
                           .silu = xt_node_args(n)[at + 1].given};
    XT_TRY(xt_backend_of(x)->causal_conv1d_bwd(&p));
done:
    xt_tensor_release(dy);
    xt_tensor_release(dnext);
    return status;
}

const XtOp xt_op_causal_conv1d = {
    .name = "causal_conv1d",
    .signature = "input: Tensor, weight: Tensor, bias: Tensor? = None, activation: str? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "y[b, t, c] = bias[c] + sum_k weight[c, k] input[b, t - (K - 1) + k, c], zeros in front; activation 'silu' or None.\n"
           "input [B, S, C], weight [C, K] or [C, 1, K] with K <= 8, bias [C], all of one float dtype -> [B, S, C].",
};

const XtOp xt_op_causal_conv1d_step = {
    .name = "causal_conv1d_step",
    .signature = "input: Tensor, weight: Tensor, state: Tensor, bias: Tensor? = None, activation: str? = None -> (Tensor, Tensor)",
    .forward = forward,
    .backward = backward,
    .code = 1,
    .doc = "causal_conv1d after the inputs state [B, K - 1, C]; -> output and the state for what follows, the last K - 1 inputs.\n"
           "A row in pieces has the bits of the whole row.",
};
