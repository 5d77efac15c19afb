/* linear_cross_entropy.c - cross_entropy(x W^T, targets), for the head of a language model.
 *
 *   dlogits = (softmax(logits) - onehot(targets)) dloss,  dx = dlogits W,  dW = dlogits^T x
 *   x [rows, C], weight [V, C], targets [rows]
 *
 * With a softcap c, c tanh(x / c) stands for a logit x (Gemma 2, arXiv 2408.00118).
 *
 * The logits are the largest activation of a step and nobody sees them, so this op may do what linear and cross_entropy one after the
 * other cannot. Their rows begin at multiples of 16 bytes, also where V is odd (50257): matrix units and vector loads ask for it.
 *
 * Afterwards, where the logits are few: the backward turns them into dlogits in place, one buffer [rows, V] instead of two. A second
 * backward through the same node (retain_graph) makes them again.
 *
 * Ahead, where they are many: in chunks of rows, so that all of them never exist; one chunk saves a pass over them. A loss is linear
 * in its upstream gradient, so the forward makes the gradients of x and W for an upstream gradient of 1 as it goes, in ACC:
 *
 *   for each chunk:  logits = x W^T;  losses, and dlogits in place of the logits;  dx = dlogits W;  dW += dlogits^T x
 *
 * and the backward multiplies them by dloss (for a mean, by dloss over the rows that count) and rounds once. Only scalars can be
 * multiplied in later, so gradients of losses of rows (reduction 'none') are made afterwards.
 */
#include "contract/layers.h"
#include "ops/ops.h"

enum { TARGETS = 2, Z_LOSS = 5, CHUNK_ROWS, SOFTCAP }; /* arguments */
enum { X, WEIGHT, LOGITS, SAVED_BY_LOSS };             /* what the node keeps for gradients afterwards */
enum { DX, DWEIGHT, COUNT };                           /* and of gradients ahead */
enum { ROW_UNIT = 8 };                                 /* elements: 16 bytes of the shortest dtype */
enum { CHUNK_UNIT = 256 };                             /* rows: whole tiles of a matrix product */
static const int64_t MOST_BYTES = (int64_t)1280 << 20; /* of logits at once: 4,096 rows of 152,000 in 16 bits */
static const int64_t MANY_BYTES = (int64_t)64 << 20;   /* of logits that caches do not hold */

static int64_t row_stride(int64_t vocab) { return (vocab + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT; }

static int64_t at_least_one(int64_t n) { return n > 0 ? n : 1; }

/* Even shares of as few chunks as MOST_BYTES allow. */
int64_t xt_rows_of_chunk(int64_t rows, int64_t vocab, XtDtype dtype) {
    int64_t most = at_least_one(MOST_BYTES / (int64_t)xt_dtype_size(dtype) / at_least_one(row_stride(vocab)));
    if (rows <= most) return rows;
    if (most >= CHUNK_UNIT) most = most / CHUNK_UNIT * CHUNK_UNIT;
    int64_t chunks = (rows - 1) / most + 1, share = (rows - 1) / chunks + 1;
    int64_t whole = (share + CHUNK_UNIT - 1) / CHUNK_UNIT * CHUNK_UNIT;
    return whole < most ? whole : most;
}

/* 0 where none is given. */
static double softcap_of(const XtArg *arg) { return arg[SOFTCAP].given ? arg[SOFTCAP].f : 0; }

/* The number that the user gave, or that of the sizes. */
static int64_t rows_of_chunk(const XtArg *arg, int64_t rows, int64_t vocab, XtDtype dtype) {
    return arg[CHUNK_ROWS].given ? arg[CHUNK_ROWS].i : xt_rows_of_chunk(rows, vocab, dtype);
}

/* Gradients ahead save reading the logits once more, and cost writing and reading (rows + V) C sums of 4 bytes. */
bool xt_makes_gradients_ahead(int64_t rows, int64_t width, int64_t vocab, XtDtype dtype) {
    double logits = (double)rows * (double)vocab * (double)xt_dtype_size(dtype);
    if (rows > xt_rows_of_chunk(rows, vocab, dtype)) return true;
    return logits >= (double)MANY_BYTES && logits > ((double)rows + (double)vocab) * (double)width * 8;
}

/* Whether the call goes chunk by chunk, and makes gradients ahead if it needs some: a function of sizes, dtype and options. */
static bool in_chunks(const XtArg *arg, bool gradient, int64_t rows, int64_t width, int64_t vocab, XtDtype dtype) {
    if (gradient && arg[TARGETS + 2].s[0] == 'n') return false;
    if (arg[CHUNK_ROWS].given) return rows > arg[CHUNK_ROWS].i;
    return xt_makes_gradients_ahead(rows, width, vocab, dtype);
}

/* *out = x W^T, [rows, V]. */
static XtStatus product(XtTensor *x, XtTensor *weight, XtTensor **out) {
    XtTensor *buffer = NULL, *wt = NULL, *logits = NULL;
    int64_t shape[2] = {x->shape[0], weight->shape[0]}, stride[2] = {row_stride(shape[1]), 1}, padded[2] = {shape[0], stride[0]};
    XtStatus status = XT_OK;
    XT_TRY(xt_empty_shape(x, x->dtype, 2, padded, &buffer));
    XT_TRY(xt_view_as(buffer, 2, shape, stride, &logits));
    XT_TRY(xt_transposed(weight, &wt));
    XT_TRY(xt_matmul_into(x, wt, false, NULL, logits));
    *out = logits;
    logits = NULL;
done:
    xt_tensor_release(buffer);
    xt_tensor_release(wt);
    xt_tensor_release(logits);
    return status;
}

/* Rows [first, first + count) of a matrix. */
static XtStatus rows_from(const XtTensor *matrix, int64_t first, int64_t count, XtTensor **out) {
    XtView view = matrix->view;
    view.shape[0] = count;
    if (view.data) view.data = (char *)view.data + first * view.strides[0] * (int64_t)xt_dtype_size(view.dtype);
    return xt_tensor_from_view(matrix->storage, &view, out);
}

/* dlogits are made for this upstream gradient: probabilities of 1 / V are subnormal in float16. A power of two, so no bit is lost. */
static double chunk_scale(XtDtype dtype) { return dtype == XT_FLOAT16 ? 32768.0 : 1.0; }

/* One chunk: x [rows, C] and logits [rows, V], which become dlogits where a gradient is asked for; dx [rows, C] or NULL, dweight [V, C] or
 * NULL, of ACC. p has losses, lse, targets and rows. */
static XtStatus chunk(XtCrossEntropyFwd *p, XtTensor *x, XtTensor *weight, XtTensor *logits, XtTensor *dx, XtTensor *dweight) {
    XtTensor *turned = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_transposed(weight, &turned));
    XT_TRY(xt_matmul_into(x, turned, false, NULL, logits));
    p->logits = logits->data;
    p->dlogits = dx || dweight ? logits->data : NULL;
    XT_TRY(xt_backend_of(logits)->cross_entropy_fwd(p));
    if (dx) XT_TRY(xt_matmul_into(logits, weight, false, NULL, dx));
    xt_tensor_release(turned);
    turned = NULL;
    if (dweight) {
        XT_TRY(xt_transposed(logits, &turned));
        XT_TRY(xt_matmul_into(turned, x, p->first > 0, NULL, dweight));
    }
done:
    xt_tensor_release(turned);
    return status;
}

static XtStatus forward_in_chunks(XtCall *c, int64_t most) {
    XtTensor *x = c->arg[0].tensor, *weight = c->arg[1].tensor;
    XtTensor *targets = NULL, *losses = NULL, *lse = NULL, *buffer = NULL, *dx = NULL, *dweight = NULL, *count = NULL;
    XtTensor *of_x = NULL, *of_dx = NULL, *logits = NULL;
    int64_t rows = x->shape[0], vocab = weight->shape[0], ld = row_stride(vocab), stride[2] = {ld, 1};
    XtDtype acc = xt_dtype_accumulator(x->dtype);
    XtStatus status = XT_OK;
    XT_TRY(xt_cast(c->arg[TARGETS].tensor, XT_INT64, &targets));
    XT_TRY(xt_empty_shape(x, acc, 1, &rows, &losses));
    XT_TRY(xt_empty_shape(x, acc, 1, &most, &lse));
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (int64_t[]){most, ld}, &buffer));
    if (c->record && xt_requires_grad(x)) XT_TRY(xt_empty_shape(x, acc, 2, x->shape, &dx));
    if (c->record && xt_requires_grad(weight)) XT_TRY(xt_empty_shape(x, acc, 2, weight->shape, &dweight));
    XtCrossEntropyFwd p = {.lse = lse->data,
                           .dtype = x->dtype,
                           .vocab = vocab,
                           .ld = ld,
                           .ignore_index = c->arg[TARGETS + 1].i,
                           .scale = chunk_scale(x->dtype),
                           .z = c->arg[Z_LOSS].f,
                           .softcap = softcap_of(c->arg),
                           .linear = true};
    for (; p.first < rows; p.first += most) {
        p.rows = rows - p.first < most ? rows - p.first : most;
        p.losses = (char *)losses->data + p.first * (int64_t)xt_dtype_size(acc);
        p.targets = (const int64_t *)targets->data + p.first;
        XT_TRY(rows_from(x, p.first, p.rows, &of_x));
        XT_TRY(xt_view_as(buffer, 2, (int64_t[]){p.rows, vocab}, stride, &logits));
        if (dx) XT_TRY(rows_from(dx, p.first, p.rows, &of_dx));
        XT_TRY(chunk(&p, of_x, weight, logits, of_dx, dweight));
        xt_tensor_release(of_x);
        xt_tensor_release(of_dx);
        xt_tensor_release(logits);
        of_x = of_dx = logits = NULL;
    }
    XT_TRY(xt_reduce_losses(c, TARGETS, targets, losses, &count));
    XT_TRY(xt_save(c, dx));
    XT_TRY(xt_save(c, dweight));
    XT_TRY(xt_save(c, count));
done:
    xt_tensor_release(targets);
    xt_tensor_release(losses);
    xt_tensor_release(lse);
    xt_tensor_release(buffer);
    xt_tensor_release(dx);
    xt_tensor_release(dweight);
    xt_tensor_release(count);
    xt_tensor_release(of_x);
    xt_tensor_release(of_dx);
    xt_tensor_release(logits);
    return status;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *weight = c->arg[1].tensor, *logits = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "x", x));
    XT_TRY(xt_check_ndim(c->op, "x", x, 2, 2));
    XT_TRY(xt_check_ndim(c->op, "weight", weight, 2, 2));
    XT_TRY(xt_check_like(c->op, "x", x, "weight", weight));
    int64_t want[2] = {weight->shape[0], x->shape[1]};
    XT_TRY(xt_check_shape(c->op, "weight", weight, 2, want));
    XT_TRY(xt_check_targets(c, TARGETS, "x", x, "targets"));
    XT_TRY(xt_check_softcap(c->op, &c->arg[SOFTCAP]));
    if (c->arg[CHUNK_ROWS].given && c->arg[CHUNK_ROWS].i < 1)
        return xt_error(XT_VALUE_ERROR, "linear_cross_entropy: chunk_rows must be at least 1, got %lld",
                        (long long)c->arg[CHUNK_ROWS].i);
    if (in_chunks(c->arg, c->record, x->shape[0], x->shape[1], weight->shape[0], x->dtype))
        return forward_in_chunks(c, rows_of_chunk(c->arg, x->shape[0], weight->shape[0], x->dtype));
    XT_TRY(product(x, weight, &logits));
    XT_TRY(xt_save(c, x));
    XT_TRY(xt_save(c, weight));
    XT_TRY(xt_save(c, logits));
    XT_TRY(xt_rows_loss(c, TARGETS, logits, row_stride(weight->shape[0]), softcap_of(c->arg)));
done:
    xt_tensor_release(logits);
    return status;
}

/* The gradient of input i from the forward's: added to the sum under way, or in its own place where nobody else reads it and the dtype
 * allows, or new. */
static XtStatus scaled(XtNode *n, int i, const XtTensor *dloss, const XtTensor *count, XtTensor **din) {
    const XtInput *in = xt_node_input(n, i);
    XtTensor *kept, *own = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, DX + i, &kept));
    if (!kept) return xt_error(XT_RUNTIME_ERROR, "linear_cross_entropy: an input began to require a gradient during the call");
    XtTensor *sum = xt_node_accumulator(n, i);
    if (!sum && in->dtype == kept->dtype) XT_TRY(xt_node_take_last(n, DX + i, &own));
    XtLinearCrossEntropyBwd p = {.x = own ? own->data : kept->data,
                                 .dloss = dloss->data,
                                 .total = xt_data(count),
                                 .dtype = in->dtype,
                                 .count = in->shape[0] * in->shape[1],
                                 .scale = 1.0 / chunk_scale(in->dtype),
                                 .accumulate = sum != NULL};
    if (!sum && !own) XT_TRY(xt_empty_shape(dloss, in->dtype, 2, in->shape, &own));
    p.out = (sum ? sum : own)->data;
    XT_TRY(xt_backend_of(dloss)->linear_cross_entropy_bwd(&p));
    if (!sum) XT_TRY(xt_share(own, &din[i]));
done:
    xt_tensor_release(own);
    return status;
}

static XtStatus backward_of_chunks(XtNode *n, XtTensor *dout, XtTensor **din) {
    XtTensor *dloss = NULL, *count;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, COUNT, &count));
    XT_TRY(xt_dense(dout, &dloss));
    for (int i = 0; i < 2; i++)
        if (xt_node_needs(n, i)) XT_TRY(scaled(n, i, dloss, count, din));
done:
    xt_tensor_release(dloss);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *weight, *logits = NULL;
    const XtInput *of_x = xt_node_input(n, 0);
    XtStatus status = XT_OK;
    if (in_chunks(xt_node_args(n), true, of_x->shape[0], of_x->shape[1], xt_node_input(n, 1)->shape[0], of_x->dtype))
        return backward_of_chunks(n, dout[0], din);
    XT_TRY(xt_node_saved(n, X, &x));
    XT_TRY(xt_node_saved(n, WEIGHT, &weight));
    XT_TRY(xt_node_take(n, LOGITS, &logits));
    if (!logits) XT_TRY(product(x, weight, &logits));
    XT_TRY(xt_rows_loss_gradient(n, TARGETS, SAVED_BY_LOSS, dout[0], logits, logits, row_stride(weight->shape[0]),
                                 softcap_of(xt_node_args(n))));
    if (xt_node_needs(n, 0)) XT_TRY(xt_matmul_gradient(n, 0, logits, weight, NULL, din)); /* dlogits by now */
    if (xt_node_needs(n, 1)) XT_TRY(xt_weight_gradient(n, 1, logits, x, din));
done:
    xt_tensor_release(logits);
    return status;
}

const XtOp xt_op_linear_cross_entropy = {
    .name = "linear_cross_entropy",
    .signature = "x: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = 'mean', z_loss: "
                 "float = 0.0, chunk_rows: int? = None, softcap: float? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "cross_entropy(x @ weight.T, targets). x [rows, C], weight [V, C], targets [rows] int64 or int32 in [0, V) or "
           "ignore_index.\n"
           "reduction 'mean' (over the rows that count), 'sum' or 'none'. The loss is float32 (float64 for float64). Large logits "
           "are made chunk_rows rows at a time (None: by their size) together with the gradients. z_loss: adds z_loss (log sum "
           "exp)^2\n"
           "to the loss of a row that counts. softcap: a logit x is softcap * tanh(x / softcap).",
};
