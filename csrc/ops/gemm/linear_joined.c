/* linear_joined.c - y = x [W_0; W_1; ...]^T + [b_0, b_1, ...]: the products of one input with several weights, side by side in one output.
 * x [..., in], weights [out_i, in], biases [out_i] or none, y [..., sum of out_i].
 *
 * Weights that lie one after the other in memory are read as one: one product forward, one for dx = dy [W_0; W_1; ...], which adds up
 * over all weights before it rounds, and one for dW = dy^T x, into gradients that lie together: new ones do, and so does a .grad that
 * came from here. Other weights are multiplied one by one, with the bits of separate layers: into the columns of y, and into dx from the
 * last to the first as the tape adds them up. Biases that lie so are one vector, which the joined product may add to its sums. The
 * gradients of all biases are parts of one sum of dy over its rows.
 */
#include "contract/elementwise.h"
#include "ops/ops.h"

enum { MOST = 8 }; /* weights: they are saved beside x, and a rule may add to as many sums at once */

/* Columns [start, start + count) of a matrix. */
static XtStatus columns(const XtTensor *matrix, int64_t start, int64_t count, XtTensor **out) {
    XtView view = matrix->view;
    view.shape[1] = count;
    if (view.data) view.data = (char *)view.data + (size_t)(start * view.strides[1]) * xt_dtype_size(view.dtype);
    return xt_tensor_from_view(matrix->storage, &view, out);
}

/* y[:, columns of weight i] = x W_i^T + b_i, if there is one */
static XtStatus forward_one(XtTensor *x, XtTensor *weight, const XtView *bias, int64_t start, XtTensor *y) {
    XtTensor *part = NULL, *transposed = NULL;
    XtStatus status = XT_OK;
    XT_TRY(columns(y, start, weight->shape[0], &part));
    XT_TRY(xt_transposed(weight, &transposed));
    if (bias) XT_TRY(xt_matmul_with_bias(x, transposed, *bias, part));
    else XT_TRY(xt_matmul_into(x, transposed, false, NULL, part));
done:
    xt_tensor_release(part);
    xt_tensor_release(transposed);
    return status;
}

/* Vectors that lie one after the other, as one of `length`; NULL for others. Borrows their memory. */
static bool join_vectors(int count, XtTensor *const *vectors, int64_t length, XtView *out) {
    *out = (XtView){.data = vectors[0]->data, .dtype = vectors[0]->dtype, .ndim = 1, .shape = {length}};
    xt_view_set_contiguous(out);
    bool together = xt_view_is_contiguous(&vectors[0]->view);
    for (int i = 1; i < count && together; i++) together = xt_adjoin(vectors[i - 1], vectors[i]);
    return together;
}

/* y[:, columns of weight i] += b_i, of biases that do not lie together */
static XtStatus add_biases(int count, XtTensor *const *biases, XtTensor *y) {
    XtTensor *part = NULL;
    XtStatus status = XT_OK;
    int64_t start = 0;
    for (int i = 0; i < count; start += biases[i++]->shape[0]) {
        XT_TRY(columns(y, start, biases[i]->shape[0], &part));
        XtView bias = xt_broadcast_view(biases[i], 2, part->shape);
        XT_TRY(xt_backend_of(y)->binary(&(XtBinary){.op = XT_ADD, .out = part->view, .a = part->view, .b = bias}));
        xt_tensor_release(part);
        part = NULL;
    }
done:
    xt_tensor_release(part);
    return status;
}

/* y = rows [W_0; W_1; ...]^T + [b_0, b_1, ...]; biases may be NULL */
static XtStatus joined_product(XtTensor *rows, int count, XtTensor *const *weights, XtTensor *const *biases, XtTensor *y) {
    XtTensor *joined = NULL;
    XtStatus status = XT_OK;
    int64_t start = 0;
    XT_TRY(xt_join_rows(count, weights, &joined));
    if (joined) {
        XtView all;
        bool together = biases && join_vectors(count, biases, y->shape[1], &all);
        XT_TRY(forward_one(rows, joined, together ? &all : NULL, 0, y));
        if (biases && !together) XT_TRY(add_biases(count, biases, y));
    }
    for (int i = 0; i < count && !joined; start += weights[i++]->shape[0])
        XT_TRY(forward_one(rows, weights[i], biases ? &biases[i]->view : NULL, start, y));
done:
    xt_tensor_release(joined);
    return status;
}
XtStatus xt_joined_product(XtTensor *rows, int count, XtTensor *const *weights, XtTensor *y) {
    return joined_product(rows, count, weights, NULL, y);
}

/* Of the biases, one weight's each: the number and shapes. */
static XtStatus check_biases(const XtCall *c, const XtTensor *x) {
    XtTensor *const *weights = c->arg[1].tensors, *const *biases = c->arg[2].tensors;
    int count = c->arg[1].count;
    if (c->arg[2].count != count)
        return xt_error(XT_VALUE_ERROR, "linear_joined: biases must hold one tensor a weight, %d, or be None, got %d", count,
                        c->arg[2].count);
    for (int i = 0; i < count; i++) {
        XT_CHECK(xt_check_like(c->op, "input", x, "every bias", biases[i]));
        XT_CHECK(xt_check_shape(c->op, "every bias", biases[i], 1, weights[i]->shape));
    }
    return XT_OK;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *const *weights = c->arg[1].tensors, *rows = NULL, *y = NULL;
    int count = c->arg[1].count;
    XtStatus status = XT_OK;
    if (count < 1 || count > MOST)
        return xt_error(XT_VALUE_ERROR, "linear_joined: weights must hold 1 to %d tensors, got %d", MOST, count);
    XT_TRY(xt_check_float(c->op, "input", x));
    XT_TRY(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    int64_t in = x->shape[x->ndim - 1], out = 0;
    for (int i = 0; i < count; i++) {
        XT_TRY(xt_check_ndim(c->op, "every weight", weights[i], 2, 2));
        XT_TRY(xt_check_like(c->op, "input", x, "every weight", weights[i]));
        int64_t want[2] = {weights[i]->shape[0], in};
        XT_TRY(xt_check_shape(c->op, "every weight", weights[i], 2, want));
        out += weights[i]->shape[0];
    }
    if (c->arg[2].given) XT_TRY(check_biases(c, x));
    XT_TRY(xt_as_rows(x, &rows));
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){rows->shape[0], out}, &y));
    XT_TRY(joined_product(rows, count, weights, c->arg[2].given ? c->arg[2].tensors : NULL, y));
    XT_TRY(xt_save(c, rows));
    for (int i = 0; i < count; i++) XT_TRY(xt_save(c, weights[i]));
    XT_TRY(xt_rows_like(y, x, &c->out[0]));
    c->out_count = 1;
done:
    xt_tensor_release(rows);
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

/* din of the biases: parts of one sum, each with references and a version of its own. */
static XtStatus bias_gradients(XtNode *n, int count, XtTensor *const *weights, XtTensor *dy, XtTensor **din) {
    XtTensor *sum = NULL;
    XtStorage *part = NULL;
    XtStatus status = XT_OK;
    size_t offset = 0, nbytes;
    bool needed = false;
    for (int i = 0; i < count; i++) needed = needed || xt_node_needs(n, 1 + count + i);
    if (!needed) return XT_OK;
    XT_TRY(xt_sum_to(dy, 1, &dy->shape[1], &sum));
    for (int i = 0; i < count; i++, offset += nbytes) {
        XtView view = {.dtype = dy->dtype, .ndim = 1, .shape = {weights[i]->shape[0]}};
        xt_view_set_contiguous(&view);
        nbytes = (size_t)view.shape[0] * xt_dtype_size(view.dtype);
        if (!xt_node_needs(n, 1 + count + i)) continue;
        XT_TRY(xt_storage_part(sum->storage, offset, nbytes, &part));
        view.data = nbytes ? part->data : NULL;
        status = xt_tensor_from_view(part, &view, &din[1 + count + i]);
        xt_storage_release(part);
        if (status != XT_OK) goto done;
    }
done:
    xt_tensor_release(sum);
    return status;
}

XtStatus xt_joined_gradients(XtNode *n, int count, XtTensor *const *weights, XtTensor *rows, XtTensor *dy, XtTensor **din) {
    XtTensor *dyt = NULL, *part = NULL;
    XtStatus status = XT_OK;
    int64_t start = 0;
    bool needs_weights = false, all = false;
    for (int i = 0; i < count; i++) needs_weights = needs_weights || xt_node_needs(n, 1 + i);
    if (xt_node_needs(n, 0)) XT_TRY(input_gradient(n, count, weights, dy, din));
    if (!needs_weights) goto done;
    XT_TRY(xt_transposed(dy, &dyt));
    XT_TRY(joined_gradient(n, count, weights, dyt, rows, din, &all));
    for (int i = 0; i < count && !all; start += weights[i++]->shape[0]) {
        if (!xt_node_needs(n, 1 + i)) continue;
        XT_TRY(columns(dy, start, weights[i]->shape[0], &part));
        XT_TRY(xt_weight_gradient(n, 1 + i, part, rows, din));
        xt_tensor_release(part);
        part = NULL;
    }
done:
    xt_tensor_release(dyt);
    xt_tensor_release(part);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *rows, *weights[MOST], *dy = NULL;
    XtStatus status = XT_OK;
    int count = xt_node_args(n)[1].count;
    XT_TRY(xt_node_saved(n, 0, &rows));
    for (int i = 0; i < count; i++) XT_TRY(xt_node_saved(n, 1 + i, &weights[i]));
    XT_TRY(xt_as_rows(dout[0], &dy));
    if (xt_node_args(n)[2].given) XT_TRY(bias_gradients(n, count, weights, dy, din));
    XT_TRY(xt_joined_gradients(n, count, weights, rows, dy, din));
done:
    xt_tensor_release(dy);
    return status;
}

const XtOp xt_op_linear_joined = {
    .name = "linear_joined",
    .signature = "input: Tensor, weights: Tensors, biases: Tensors? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc =
        "The outputs of linear(input, weight, bias) for each weight, side by side in the last dim. input [..., in], 1 to 8 weights "
        "[out_i, in], as many biases [out_i] or None; all of one floating point dtype. Weights that lie one after the other in "
        "memory (see pack) are one product.",
};
