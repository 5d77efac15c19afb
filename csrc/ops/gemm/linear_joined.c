/* linear_joined.c - y = x [W_0; W_1; ...]^T: the products of one input with several weights, side by side in one output.
 * x [..., in], weights [out_i, in], y [..., sum of out_i].
 *
 * Weights that lie one after the other in memory are read as one: one product forward, one for dx = dy [W_0; W_1; ...], which adds up
 * over all weights before it rounds, and one for dW = dy^T x, into gradients that lie together: new ones do, and so does a .grad that
 * came from here. Other weights are multiplied one by one, with the bits of separate layers: into the columns of y, and into dx from the
 * last to the first as the tape adds them up.
 */
#include "ops/ops.h"

#include <string.h>

enum { MOST = 8 }; /* weights: they are saved beside x, and a rule may add to as many sums at once */

/* Columns [start, start + count) of a matrix. */
static XtStatus columns(const XtTensor *matrix, int64_t start, int64_t count, XtTensor **out) {
    XtView view = matrix->view;
    view.shape[1] = count;
    if (view.data) view.data = (char *)view.data + (size_t)(start * view.strides[1]) * xt_dtype_size(view.dtype);
    return xt_tensor_from_view(matrix->storage, &view, out);
}

/* y[:, columns of weight i] = x W_i^T */
static XtStatus forward_one(XtTensor *x, XtTensor *weight, int64_t start, XtTensor *y) {
    XtTensor *part = NULL, *transposed = NULL;
    XtStatus status = XT_OK;
    XT_TRY(columns(y, start, weight->shape[0], &part));
    XT_TRY(xt_transposed(weight, &transposed));
    XT_TRY(xt_matmul_into(x, transposed, false, NULL, part));
done:
    xt_tensor_release(part);
    xt_tensor_release(transposed);
    return status;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *const *weights = c->arg[1].tensors, *rows = NULL, *joined = NULL, *y = NULL;
    int count = c->arg[1].count;
    XtStatus status = XT_OK;
    if (count < 1 || count > MOST)
        return xt_error(XT_VALUE_ERROR, "linear_joined: weights must hold 1 to %d tensors, got %d", MOST, count);
    XT_TRY(xt_check_float(c->op, "input", x));
    XT_TRY(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    int64_t in = x->shape[x->ndim - 1], out = 0, start = 0, shape[XT_MAX_DIMS];
    for (int i = 0; i < count; i++) {
        XT_TRY(xt_check_ndim(c->op, "every weight", weights[i], 2, 2));
        XT_TRY(xt_check_like(c->op, "input", x, "every weight", weights[i]));
        int64_t want[2] = {weights[i]->shape[0], in};
        XT_TRY(xt_check_shape(c->op, "every weight", weights[i], 2, want));
        out += weights[i]->shape[0];
    }
    XT_TRY(xt_as_rows(x, &rows));
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){rows->shape[0], out}, &y));
    XT_TRY(xt_join_rows(count, weights, &joined));
    if (joined) XT_TRY(forward_one(rows, joined, 0, y));
    for (int i = 0; i < count && !joined; i++) {
        XT_TRY(forward_one(rows, weights[i], start, y));
        start += weights[i]->shape[0];
    }
    XT_TRY(xt_save(c, rows));
    for (int i = 0; i < count; i++) XT_TRY(xt_save(c, weights[i]));
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = out;
    XT_TRY(xt_reshape(y, x->ndim, shape, &c->out[0]));
    c->out_count = 1;
done:
    xt_tensor_release(rows);
    xt_tensor_release(joined);
    xt_tensor_release(y);
    return status;
}

/* dx, which may be added to the sum under way. */
static XtStatus input_gradient(XtNode *n, int count, XtTensor *const *weights, XtTensor *dy, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    XtTensor *sum = in->ndim == 2 ? xt_node_accumulator(n, 0) : NULL, *joined = NULL, *dx = NULL, *part = NULL;
    XtStatus status = XT_OK;
    int64_t end = dy->shape[1];
    XT_TRY(xt_join_rows(count, weights, &joined));
    if (!sum) XT_TRY(xt_empty_shape(dy, dy->dtype, 2, (int64_t[]){dy->shape[0], weights[0]->shape[1]}, &dx));
    XtTensor *into = sum ? sum : dx;
    if (joined) XT_TRY(xt_matmul_into(dy, joined, sum != NULL, NULL, into));
    for (int i = count - 1; i >= 0 && !joined; i--) {
        end -= weights[i]->shape[0];
        XT_TRY(columns(dy, end, weights[i]->shape[0], &part));
        XT_TRY(xt_matmul_into(part, weights[i], sum != NULL || i < count - 1, NULL, into));
        xt_tensor_release(part);
        part = NULL;
    }
    if (!sum) XT_TRY(xt_reshape(dx, in->ndim, in->shape, &din[0]));
done:
    xt_tensor_release(joined);
    xt_tensor_release(dx);
    xt_tensor_release(part);
    return status;
}

/* All of dW in one product: into the sums under way where all exist and lie together, into new gradients where none exists. *done is
 * false for anything else. */
static XtStatus joined_gradient(XtNode *n, int count, XtTensor *const *weights, XtTensor *dyt, XtTensor *rows, XtTensor **din,
                                bool *done) {
    XtTensor *sums[MOST], *joined = NULL;
    XtStatus status = XT_OK;
    int present = 0;
    *done = false;
    XT_TRY(xt_join_rows(count, weights, &joined));
    if (!joined) goto done;
    xt_tensor_release(joined);
    joined = NULL;
    for (int i = 0; i < count; i++) {
        if (!xt_node_needs(n, 1 + i)) goto done;
        sums[i] = xt_node_accumulator(n, 1 + i);
        present += sums[i] != NULL;
    }
    if (present != 0 && present != count) goto done;
    if (present == 0) {
        XT_TRY(xt_empty_joined(count, weights, sums));
        for (int i = 0; i < count; i++) din[1 + i] = sums[i];
    }
    XT_TRY(xt_join_rows(count, sums, &joined));
    if (joined) XT_TRY(xt_matmul_into(dyt, rows, present != 0, NULL, joined));
    *done = joined != NULL; /* a tied weight has the same sum twice */
done:
    xt_tensor_release(joined);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *rows, *weights[MOST], *dy = NULL, *dyt = NULL, *part = NULL, *transposed = NULL;
    XtStatus status = XT_OK;
    int count = n->inputs - 1;
    int64_t start = 0;
    bool needs_weights = false, all = false;
    XT_TRY(xt_node_saved(n, 0, &rows));
    for (int i = 0; i < count; i++) {
        XT_TRY(xt_node_saved(n, 1 + i, &weights[i]));
        needs_weights = needs_weights || xt_node_needs(n, 1 + i);
    }
    XT_TRY(xt_as_rows(dout[0], &dy));
    if (xt_node_needs(n, 0)) XT_TRY(input_gradient(n, count, weights, dy, din));
    if (!needs_weights) goto done;
    XT_TRY(xt_transposed(dy, &dyt));
    XT_TRY(joined_gradient(n, count, weights, dyt, rows, din, &all));
    for (int i = 0; i < count && !all; start += weights[i++]->shape[0]) {
        if (!xt_node_needs(n, 1 + i)) continue;
        XT_TRY(columns(dy, start, weights[i]->shape[0], &part));
        XT_TRY(xt_transposed(part, &transposed));
        XT_TRY(xt_matmul_gradient(n, 1 + i, transposed, rows, NULL, din));
        xt_tensor_release(part);
        xt_tensor_release(transposed);
        part = transposed = NULL;
    }
done:
    xt_tensor_release(dy);
    xt_tensor_release(dyt);
    xt_tensor_release(part);
    xt_tensor_release(transposed);
    return status;
}

const XtOp xt_op_linear_joined = {
    .name = "linear_joined",
    .signature = "input: Tensor, weights: Tensors -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc =
        "The outputs of linear(input, weight) for each weight, side by side in the last dim. input [..., in], 1 to 8 weights "
        "[out_i, in]; all of one floating point dtype. Weights that lie one after the other in memory (see pack) are one product.",
};
