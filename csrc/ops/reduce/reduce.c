/* reduce.c - sum, mean, amax, amin, argmax over any set of dims.
 *
 * The kernel wants the kept dims first and the reduced ones last, which is a permutation of strides; nothing is copied.
 * Gradients: sum repeats dy over the reduced dims, mean repeats dy / count, amax and amin give dy to the elements that reached the
 * extremum, in equal shares.
 */
#include "contract/reduce.h"
#include "ops/elementwise/arithmetic.h"

#include <string.h>

/* Marks the dims to reduce; None or () means all of them. */
static XtStatus reduced_dims(const XtOp *op, const XtArg *dims, int ndim, bool *reduced) {
    bool all = !dims->given || dims->count == 0;
    for (int i = 0; i < XT_MAX_DIMS; i++) reduced[i] = all && i < ndim;
    for (int i = 0; i < dims->count && !all; i++) {
        int dim;
        XT_CHECK(xt_check_dim(op, dims->ints[i], ndim, &dim));
        if (reduced[dim]) return xt_error(XT_VALUE_ERROR, "%s: dim must not name dimension %d twice", op->name, dim);
        reduced[dim] = true;
    }
    return XT_OK;
}

/* Splits x into kept dims (first) and reduced dims of one view; out gets the kept shape, with ones when keepdim. */
static void arrange(const XtView *x, const bool *reduced, bool keepdim, XtView *arranged, int *kept, int *out_ndim,
                    int64_t *out_shape) {
    *arranged = (XtView){.data = x->data, .dtype = x->dtype};
    *kept = *out_ndim = 0;
    for (int i = 0; i < x->ndim; i++) {
        if (!reduced[i]) {
            arranged->shape[arranged->ndim] = x->shape[i];
            arranged->strides[arranged->ndim++] = x->strides[i];
            (*kept)++;
        }
        if (!reduced[i] || keepdim) out_shape[(*out_ndim)++] = reduced[i] ? 1 : x->shape[i];
    }
    for (int i = 0; i < x->ndim; i++) {
        if (!reduced[i]) continue;
        arranged->shape[arranged->ndim] = x->shape[i];
        arranged->strides[arranged->ndim++] = x->strides[i];
    }
}

static XtStatus run(XtCall *c, const bool *reduced, bool keepdim) {
    XtTensor *x = c->arg[0].tensor, *out = NULL;
    XtReduceOp code = (XtReduceOp)c->op->code;
    XtStatus status = XT_OK;
    XtView arranged;
    int kept, out_ndim;
    int64_t out_shape[XT_MAX_DIMS];
    arrange(&x->view, reduced, keepdim, &arranged, &kept, &out_ndim, out_shape);
    XtDtype dtype = x->dtype;
    if (code == XT_REDUCE_ARGMAX || (code == XT_REDUCE_SUM && !xt_dtype_is_float(dtype))) dtype = XT_INT64;
    XT_TRY(xt_empty_shape(x, dtype, out_ndim, out_shape, &out));
    XtView flat = {.data = out->data, .dtype = dtype, .ndim = kept};
    memcpy(flat.shape, arranged.shape, sizeof flat.shape);
    xt_view_set_contiguous(&flat);
    if (code != XT_REDUCE_SUM && code != XT_REDUCE_MEAN && xt_view_numel(&flat) > 0 && xt_view_numel(&arranged) == 0)
        XT_TRY(xt_error(XT_VALUE_ERROR, "%s: input must have elements along the reduced dimensions, got shape %s", c->op->name,
                        xt_shape_text(x->ndim, x->shape)));
    XT_TRY(xt_backend_of(x)->reduce(&(XtReduce){.op = code, .out = flat, .x = arranged}));
    if (code == XT_REDUCE_MAX || code == XT_REDUCE_MIN) {
        XT_TRY(xt_save(c, x));
        XT_TRY(xt_save(c, out));
    }
    c->out[c->out_count++] = out;
    out = NULL;
done:
    xt_tensor_release(out);
    return status;
}

static XtStatus forward(XtCall *c) {
    const XtTensor *x = c->arg[0].tensor;
    bool reduced[XT_MAX_DIMS];
    if (c->op->code == XT_REDUCE_MEAN) {
        XtStatus status = xt_check_float(c->op, "input", x);
        if (status != XT_OK) return status;
    }
    XtStatus status = reduced_dims(c->op, &c->arg[1], x->ndim, reduced);
    return status == XT_OK ? run(c, reduced, c->arg[2].b) : status;
}

/* t, with ones put back where dims were reduced, seen with the input's shape. */
static XtView spread(XtNode *n, const XtTensor *t) {
    const XtInput *in = xt_node_input(n, 0);
    bool reduced[XT_MAX_DIMS];
    reduced_dims(xt_node_op(n), &xt_node_args(n)[1], in->ndim, reduced); /* passed in the forward */
    bool keepdim = xt_node_args(n)[2].b;
    XtView view = {.data = t->data, .dtype = t->dtype, .ndim = in->ndim};
    for (int i = 0, d = 0; i < in->ndim; i++) {
        view.shape[i] = in->shape[i];
        view.strides[i] = reduced[i] ? 0 : t->strides[d];
        if (!reduced[i] || keepdim) d++;
    }
    return view;
}

static XtStatus sum_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    XtTensor *dy = dout[0], *scaled = NULL;
    XtStatus status = XT_OK;
    XtView view;
    if (xt_node_op(n)->code == XT_REDUCE_MEAN) {
        XtView whole = {.ndim = in->ndim};
        memcpy(whole.shape, in->shape, sizeof whole.shape);
        int64_t outputs = xt_view_numel(&dy->view), count = outputs ? xt_view_numel(&whole) / outputs : 1;
        XT_TRY(xt_binary_scalar(XT_DIV, dy, (double)(count ? count : 1), &scaled));
        dy = scaled;
    }
    view = spread(n, dy);
    XT_TRY(xt_tensor_from_view(dy->storage, &view, &din[0])); /* repeated by stride 0 */
done:
    xt_tensor_release(scaled);
    return status;
}

static XtStatus extremum_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *y, *hit = NULL, *hits = NULL, *count = NULL, *dy = NULL, *quotient = NULL, *share = NULL, *weight = NULL;
    XtTensor *y_spread = NULL, *share_spread = NULL;
    XtStatus status = XT_OK;
    XtView view;
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &y));
    view = spread(n, y);
    XT_TRY(xt_tensor_from_view(y->storage, &view, &y_spread));
    XT_TRY(xt_binary(XT_EQ, x, y_spread, &hit));
    /* number of hits per output, in the output's shape */
    bool reduced[XT_MAX_DIMS];
    XT_TRY(reduced_dims(xt_node_op(n), &xt_node_args(n)[1], x->ndim, reduced));
    XtView arranged;
    int kept, ndim;
    int64_t shape[XT_MAX_DIMS];
    arrange(&hit->view, reduced, xt_node_args(n)[2].b, &arranged, &kept, &ndim, shape);
    XT_TRY(xt_empty_shape(x, XT_INT64, ndim, shape, &hits));
    XtView flat = {.data = hits->data, .dtype = XT_INT64, .ndim = kept};
    memcpy(flat.shape, arranged.shape, sizeof flat.shape);
    xt_view_set_contiguous(&flat);
    XT_TRY(xt_backend_of(x)->reduce(&(XtReduce){.op = XT_REDUCE_SUM, .out = flat, .x = arranged}));
    /* 16 bits do not hold every number of hits: a share is divided in ACC, and rounded once */
    XtDtype wide = xt_dtype_accumulator(x->dtype);
    XT_TRY(xt_cast(hits, wide, &count));
    XT_TRY(xt_tensor_or_cast(dout[0], wide, &dy));
    XT_TRY(xt_binary(XT_DIV, dy, count, &quotient));
    XT_TRY(xt_tensor_or_cast(quotient, x->dtype, &share));
    view = spread(n, share);
    XT_TRY(xt_tensor_from_view(share->storage, &view, &share_spread));
    XT_TRY(xt_cast(hit, x->dtype, &weight));
    XT_TRY(xt_binary(XT_MUL, weight, share_spread, &din[0]));
done:
    xt_tensor_release(hit);
    xt_tensor_release(hits);
    xt_tensor_release(count);
    xt_tensor_release(dy);
    xt_tensor_release(quotient);
    xt_tensor_release(share);
    xt_tensor_release(weight);
    xt_tensor_release(y_spread);
    xt_tensor_release(share_spread);
    return status;
}

static XtStatus argmax_forward(XtCall *c) {
    const XtArg *dim = &c->arg[1];
    XtArg dims = {.given = dim->given, .count = dim->given ? 1 : 0, .ints = {dim->i}};
    bool reduced[XT_MAX_DIMS];
    XtStatus status = reduced_dims(c->op, &dims, c->arg[0].tensor->ndim, reduced);
    return status == XT_OK ? run(c, reduced, c->arg[2].b) : status;
}

#define REDUCE(stem, which, gradient, text)                                                                      \
    const XtOp xt_op_##stem = {.name = #stem,                                                                    \
                               .signature = "input: Tensor, dim: ints? = None, keepdim: bool = False -> Tensor", \
                               .forward = forward,                                                               \
                               .backward = gradient,                                                             \
                               .code = which,                                                                    \
                               .method = true,                                                                   \
                               .doc = text};
REDUCE(sum, XT_REDUCE_SUM, sum_backward, "Sum over dim (all when None). Integers and bool give int64.")
REDUCE(mean, XT_REDUCE_MEAN, sum_backward, "Mean over dim (all when None). Floating point only; the mean of nothing is NaN.")
REDUCE(amax, XT_REDUCE_MAX, extremum_backward, "Largest value over dim (all when None). Ties share the gradient equally.")
REDUCE(amin, XT_REDUCE_MIN, extremum_backward, "Smallest value over dim (all when None). Ties share the gradient equally.")
const XtOp xt_op_argmax = {
    .name = "argmax",
    .signature = "input: Tensor, dim: int? = None, keepdim: bool = False -> Tensor",
    .forward = argmax_forward,
    .code = XT_REDUCE_ARGMAX,
    .method = true,
    .doc = "int64 index of the largest value along dim (into the flattened tensor when None); the first one on ties.",
};
