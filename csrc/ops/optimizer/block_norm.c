/* block_norm.c - the norm of gradients from the squares of their blocks, and what clipping makes of it. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"

static XtStatus block_norm_forward(XtCall *c) {
    XtTensor *squares = c->arg[0].tensor, *dense = NULL, *made[3] = {NULL};
    const double most = c->arg[1].f;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_dtype(c->op, "squares", squares, XT_FLOAT64));
    XT_TRY(xt_check_ndim(c->op, "squares", squares, 1, 1));
    if (!(most > 0)) XT_TRY(xt_error(XT_VALUE_ERROR, "%s: most must be greater than 0, got %g", c->op->name, most));
    XT_TRY(xt_dense(squares, &dense));
    for (int i = 0; i < 3; i++)
        XT_TRY(xt_tensor_empty(squares->storage->device, i < 2 ? XT_FLOAT64 : XT_FLOAT32, 0, NULL, &made[i]));
    XT_TRY(xt_backend_of(squares)->block_norm(&(XtBlockNorm){.squares = dense->data,
                                                             .count = dense->shape[0],
                                                             .most = most,
                                                             .norm = made[0]->data,
                                                             .coefficient = made[1]->data,
                                                             .guard = made[2]->data}));
    for (; c->out_count < 3; c->out_count++) {
        c->out[c->out_count] = made[c->out_count];
        made[c->out_count] = NULL;
    }
done:
    for (int i = 0; i < 3; i++) xt_tensor_release(made[i]);
    xt_tensor_release(dense);
    return status;
}

const XtOp xt_op_block_norm = {
    .name = "block_norm",
    .signature = "squares: Tensor, most: float -> (Tensor, Tensor, Tensor)",
    .forward = block_norm_forward,
    .doc =
        "(norm, coefficient, guard) of float64 squares [K]: norm = sqrt(sum squares), coefficient = min(1, most / (norm + 1e-6)),\n"
        "float64 scalars; guard, a float32 scalar, is 0, or NaN where the norm is NaN or infinite. The order of the sum depends\n"
        "on K alone. most = inf: the coefficient is 1.",
};
