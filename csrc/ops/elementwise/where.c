/* where.c - out = condition ? input : other, elementwise with broadcasting. dinput = dout where the condition holds, else 0. */
#include "contract/elementwise.h"
#include "ops/ops.h"

#include <string.h>

/* A tensor in the result's dtype, or a number, exact in it, as a tensor of shape (). */
static XtStatus operand(const XtCall *c, int i, XtDtype dtype, XtTensor **out) {
    const XtArg *arg = &c->arg[i];
    if (arg->tensor) return xt_tensor_or_cast(arg->tensor, dtype, out);
    XT_CHECK(xt_check_fits(c->op, i == 1 ? "input" : "other", arg->scalar, dtype));
    XT_CHECK(xt_empty_shape(c->arg[0].tensor, dtype, 0, NULL, out));
    return xt_or_release(xt_backend_of(*out)->fill(&(XtFill){.dst = (*out)->view, .value = arg->scalar}), out);
}

static XtStatus forward(XtCall *c) {
    XtTensor *condition = c->arg[0].tensor, *a = NULL, *b = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_dtype(c->op, "condition", condition, XT_BOOL));
    XtDtype dtype = xt_result_dtype(&c->arg[1], &c->arg[2]);
    for (int i = 1; i < 3; i++) {
        const XtTensor *t = c->arg[i].tensor;
        if (t) XT_TRY(xt_check_device(c->op, "condition", condition, i == 1 ? "input" : "other", t));
    }
    XT_TRY(operand(c, 1, dtype, &a));
    XT_TRY(operand(c, 2, dtype, &b));
    int ndim, all;
    int64_t shape[XT_MAX_DIMS], whole[XT_MAX_DIMS];
    XT_TRY(xt_broadcast_shape(c->op, a, b, &ndim, shape));
    XtTensor both = {.ndim = ndim};
    memcpy(both.shape, shape, sizeof shape);
    XT_TRY(xt_broadcast_shape(c->op, condition, &both, &all, whole));
    XT_TRY(xt_empty_shape(condition, dtype, all, whole, &c->out[0]));
    c->out_count = 1;
    XtWhere p = {.out = c->out[0]->view,
                 .condition = xt_broadcast_view(condition, all, whole),
                 .a = xt_broadcast_view(a, all, whole),
                 .b = xt_broadcast_view(b, all, whole)};
    XT_TRY(xt_backend_of(condition)->where(&p));
    XT_TRY(xt_save(c, condition));
done:
    xt_tensor_release(a);
    xt_tensor_release(b);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *condition, *zero = NULL, *part = NULL, *summed = NULL;
    XtStatus status = XT_OK;
    const XtTensor *dy = dout[0];
    XT_TRY(xt_node_saved(n, 0, &condition));
    XT_TRY(xt_filled(dy, dy->dtype, 0, NULL, 0.0, &zero));
    XtView gate = xt_broadcast_view(condition, dy->ndim, dy->shape), none = xt_broadcast_view(zero, dy->ndim, dy->shape);
    for (int i = 1; i < 3; i++) {
        if (!xt_node_needs(n, i)) continue;
        const XtInput *in = xt_node_input(n, i);
        XT_TRY(xt_empty_like(dy, &part));
        XtWhere p = {.out = part->view, .condition = gate, .a = i == 1 ? dy->view : none, .b = i == 1 ? none : dy->view};
        XT_TRY(xt_backend_of(dy)->where(&p));
        XT_TRY(xt_sum_to(part, in->ndim, in->shape, &summed));
        XT_TRY(xt_tensor_or_cast(summed, in->dtype, &din[i]));
        xt_tensor_release(part), xt_tensor_release(summed);
        part = summed = NULL;
    }
done:
    xt_tensor_release(zero);
    xt_tensor_release(part);
    xt_tensor_release(summed);
    return status;
}

const XtOp xt_op_where = {
    .name = "where",
    .signature = "condition: Tensor, input: Operand, other: Operand -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "input where condition (bool) holds, else other. All three broadcast; dtypes promote.",
};
