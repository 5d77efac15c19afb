/* view.c - views of the same memory: no element moves, except in a reshape that no strides can express. The gradient of a view is
 * the inverse view of dy; that of a part is dy inside zeros.
 */
#include "contract/elementwise.h"
#include "ops/ops.h"

#include <string.h>

/* ---- reshape, view ----------------------------------------------------------------------------------------------------- */

/* Resolves one -1 and checks that the number of elements stays. */
static XtStatus target_shape(const XtOp *op, const XtTensor *x, const XtArg *arg, int64_t *shape) {
    int64_t known = 1, total = xt_view_numel(&x->view);
    int wild = -1;
    bool fits = true;
    for (int i = 0; i < arg->count; i++) {
        shape[i] = arg->ints[i];
        if (shape[i] == -1 && wild < 0) wild = i;
        else if (shape[i] < 0 || __builtin_mul_overflow(known, shape[i], &known)) fits = false;
    }
    if (fits && wild >= 0) {
        fits = known > 0 && total % known == 0;
        if (fits) shape[wild] = total / known;
    } else if (known != total) {
        fits = false;
    }
    if (fits)
        return xt_size_of(x->dtype, arg->count, shape, NULL, NULL); /* (0, 2^62, 2^62) has no elements, but no strides either */
    return xt_error(XT_VALUE_ERROR,
                    "%s: shape must have %lld elements in all (one size may be -1), got %s for a tensor of shape %s", op->name,
                    (long long)total, xt_shape_text(arg->count, arg->ints), xt_shape_text(x->ndim, x->shape));
}

static XtStatus reshape_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    int64_t shape[XT_MAX_DIMS], strides[XT_MAX_DIMS];
    XtStatus status = XT_OK;
    XT_TRY(target_shape(c->op, x, &c->arg[1], shape));
    if (c->op == &xt_op_view && !xt_reshape_strides(x, c->arg[1].count, shape, strides)) {
        status = xt_error(XT_VALUE_ERROR, "view: shape %s would need a copy of the strided tensor of shape %s; use reshape()",
                          xt_shape_text(c->arg[1].count, shape), xt_shape_text(x->ndim, x->shape));
        goto done;
    }
    XT_TRY(xt_reshape(x, c->arg[1].count, shape, &c->out[0]));
    c->out_count = 1;
done:
    return status;
}

static XtStatus reshape_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    return xt_reshape(dout[0], in->ndim, in->shape, &din[0]);
}

const XtOp xt_op_reshape = {
    .name = "reshape",
    .signature = "input: Tensor, shape: ints -> Tensor",
    .forward = reshape_forward,
    .backward = reshape_backward,
    .method = true,
    .doc = "Same elements in another shape; one size may be -1. A view when strides allow, else a copy.",
};
const XtOp xt_op_view = {
    .name = "view",
    .signature = "input: Tensor, shape: ints -> Tensor",
    .forward = reshape_forward,
    .backward = reshape_backward,
    .method = true,
    .doc = "Like reshape, but never copies: ValueError when the strides do not allow it.",
};

/* ---- transpose, permute -------------------------------------------------------------------------------------------------- */

static XtStatus permuted(const XtTensor *x, const int *order, XtTensor **out) {
    XtView view = {.data = x->data, .dtype = x->dtype, .ndim = x->ndim};
    for (int i = 0; i < x->ndim; i++) {
        view.shape[i] = x->shape[order[i]];
        view.strides[i] = x->strides[order[i]];
    }
    return xt_tensor_from_view(x->storage, &view, out);
}

static XtStatus transpose_order(const XtOp *op, const XtArg *arg, int ndim, int *order) {
    int a, b;
    XT_CHECK(xt_check_dim(op, arg[1].i, ndim, &a));
    XT_CHECK(xt_check_dim(op, arg[2].i, ndim, &b));
    for (int i = 0; i < ndim; i++) order[i] = i;
    if (ndim > 0) order[a] = b, order[b] = a;
    return XT_OK;
}

static XtStatus transpose_forward(XtCall *c) {
    int order[XT_MAX_DIMS];
    XT_CHECK(transpose_order(c->op, c->arg, c->arg[0].tensor->ndim, order));
    XT_CHECK(permuted(c->arg[0].tensor, order, &c->out[0]));
    c->out_count = 1;
    return XT_OK;
}

static XtStatus transpose_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    int order[XT_MAX_DIMS];
    XtStatus status = transpose_order(xt_node_op(n), xt_node_args(n), dout[0]->ndim, order);
    return status == XT_OK ? permuted(dout[0], order, &din[0]) : status;
}

const XtOp xt_op_transpose = {
    .name = "transpose",
    .signature = "input: Tensor, dim0: int, dim1: int -> Tensor",
    .forward = transpose_forward,
    .backward = transpose_backward,
    .method = true,
    .doc = "View with two dims swapped.",
};

static XtStatus permute_order(const XtOp *op, const XtArg *dims, int ndim, int *order) {
    bool seen[XT_MAX_DIMS] = {false};
    if (dims->count != ndim)
        return xt_error(XT_VALUE_ERROR, "%s: dims must name each of the %d dimensions once, got %s", op->name, ndim,
                        xt_shape_text(dims->count, dims->ints));
    for (int i = 0; i < ndim; i++) {
        XT_CHECK(xt_check_dim(op, dims->ints[i], ndim, &order[i]));
        if (seen[order[i]])
            return xt_error(XT_VALUE_ERROR, "%s: dims must name each dimension once, got %s", op->name,
                            xt_shape_text(dims->count, dims->ints));
        seen[order[i]] = true;
    }
    return XT_OK;
}

static XtStatus permute_forward(XtCall *c) {
    int order[XT_MAX_DIMS];
    XT_CHECK(permute_order(c->op, &c->arg[1], c->arg[0].tensor->ndim, order));
    XT_CHECK(permuted(c->arg[0].tensor, order, &c->out[0]));
    c->out_count = 1;
    return XT_OK;
}

static XtStatus permute_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    int order[XT_MAX_DIMS], inverse[XT_MAX_DIMS];
    XT_CHECK(permute_order(xt_node_op(n), &xt_node_args(n)[1], dout[0]->ndim, order));
    for (int i = 0; i < dout[0]->ndim; i++) inverse[order[i]] = i;
    return permuted(dout[0], inverse, &din[0]);
}

const XtOp xt_op_permute = {
    .name = "permute",
    .signature = "input: Tensor, dims: ints -> Tensor",
    .forward = permute_forward,
    .backward = permute_backward,
    .method = true,
    .doc = "View with the dims in another order.",
};

/* ---- expand ------------------------------------------------------------------------------------------------------------ */

static XtStatus expand_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    const XtArg *arg = &c->arg[1];
    int64_t shape[XT_MAX_DIMS];
    int lead = arg->count - x->ndim;
    bool fits = lead >= 0;
    for (int i = 0; fits && i < arg->count; i++) {
        int64_t own = i < lead ? 1 : x->shape[i - lead];
        shape[i] = arg->ints[i] == -1 && i >= lead ? own : arg->ints[i];
        fits = shape[i] >= 0 && (own == shape[i] || own == 1);
    }
    if (!fits)
        return xt_error(XT_VALUE_ERROR, "expand: shape must extend %s (only sizes of 1 can grow), got %s",
                        xt_shape_text(x->ndim, x->shape), xt_shape_text(arg->count, arg->ints));
    XT_CHECK(xt_size_of(x->dtype, arg->count, shape, NULL, NULL));
    XtView view = xt_broadcast_view(x, arg->count, shape);
    XT_CHECK(xt_tensor_from_view(x->storage, &view, &c->out[0]));
    c->out_count = 1;
    return XT_OK;
}

static XtStatus expand_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    return xt_sum_to(dout[0], in->ndim, in->shape, &din[0]);
}

const XtOp xt_op_expand = {
    .name = "expand",
    .signature = "input: Tensor, shape: ints -> Tensor",
    .forward = expand_forward,
    .backward = expand_backward,
    .method = true,
    .doc = "View that repeats dims of size 1 (and new leading dims) without copying; -1 keeps a size.",
};

/* ---- slice, select ------------------------------------------------------------------------------------------------------- */

/* Bounds as in Python: negative counts from the end, out of range is clamped. */
static XtStatus slice_bounds(const XtOp *op, const XtArg *arg, const int64_t *shape, int ndim, int *dim, int64_t *start,
                             int64_t *length) {
    if (ndim == 0) return xt_error(XT_INDEX_ERROR, "%s: input must have at least one dimension, got a scalar", op->name);
    XT_CHECK(xt_check_dim(op, arg[1].i, ndim, dim));
    int64_t size = shape[*dim], stop = arg[3].i, step = arg[4].i;
    *start = arg[2].i;
    if (step < 1) return xt_error(XT_VALUE_ERROR, "%s: step must be at least 1, got %lld", op->name, (long long)step);
    if (*start < 0) *start += size;
    if (stop < 0) stop += size;
    *start = *start < 0 ? 0 : *start > size ? size : *start;
    stop = stop < *start ? *start : stop > size ? size : stop;
    *length = stop > *start ? (stop - *start - 1) / step + 1 : 0;
    return XT_OK;
}

static XtView sliced(const XtTensor *x, int dim, int64_t start, int64_t length, int64_t step) {
    XtView view = x->view;
    if (length > 0 && x->data) /* NULL when there are no elements */
        /* A number, as addresses of meta lie in no array. */
        view.data = (void *)((uintptr_t)x->data + (size_t)(start * x->strides[dim]) * xt_dtype_size(x->dtype));
    view.shape[dim] = length;
    if (length > 1) view.strides[dim] = x->strides[dim] * step;
    return view;
}

/* dx = zeros with dy written into the part that `view` shows. */
static XtStatus scatter(const XtTensor *dx, XtView view, const XtTensor *dy) {
    return xt_backend_of(dx)->copy(&(XtCopy){.dst = view, .src = dy->view});
}

static XtStatus slice_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    int dim;
    int64_t start = 0, length = 0;
    XT_CHECK(slice_bounds(c->op, c->arg, x->shape, x->ndim, &dim, &start, &length));
    XtView view = sliced(x, dim, start, length, c->arg[4].i);
    XT_CHECK(xt_tensor_from_view(x->storage, &view, &c->out[0]));
    c->out_count = 1;
    return XT_OK;
}

static XtStatus slice_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    const XtArg *arg = xt_node_args(n);
    int dim;
    int64_t start = 0, length = 0;
    XT_CHECK(slice_bounds(xt_node_op(n), arg, in->shape, in->ndim, &dim, &start, &length));
    XT_CHECK(xt_filled(dout[0], in->dtype, in->ndim, in->shape, 0.0, &din[0]));
    return scatter(din[0], sliced(din[0], dim, start, length, arg[4].i), dout[0]);
}

const XtOp xt_op_slice = {
    .name = "slice",
    .signature = "input: Tensor, dim: int, start: int, stop: int, step: int = 1 -> Tensor",
    .forward = slice_forward,
    .backward = slice_backward,
    .doc = "View of input[start:stop:step] along dim, with Python's rules for negative and large bounds; step >= 1.",
};

static XtStatus select_index(const XtOp *op, const XtArg *arg, const int64_t *shape, int ndim, int *dim, int64_t *index) {
    if (ndim == 0) return xt_error(XT_INDEX_ERROR, "%s: input must have at least one dimension, got a scalar", op->name);
    XT_CHECK(xt_check_dim(op, arg[1].i, ndim, dim));
    int64_t size = shape[*dim];
    *index = arg[2].i < 0 ? arg[2].i + size : arg[2].i;
    if (*index < 0 || *index >= size)
        return xt_error(XT_INDEX_ERROR, "%s: index must be in [%lld, %lld) for dimension %d, got %lld", op->name, (long long)-size,
                        (long long)size, *dim, (long long)arg[2].i);
    return XT_OK;
}

static XtView selected(const XtTensor *x, int dim, int64_t index) {
    XtView view = sliced(x, dim, index, 1, 1);
    for (int i = dim; i + 1 < view.ndim; i++) {
        view.shape[i] = view.shape[i + 1];
        view.strides[i] = view.strides[i + 1];
    }
    view.ndim--;
    return view;
}

static XtStatus select_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    int dim;
    int64_t index = 0;
    XT_CHECK(select_index(c->op, c->arg, x->shape, x->ndim, &dim, &index));
    XtView view = selected(x, dim, index);
    XT_CHECK(xt_tensor_from_view(x->storage, &view, &c->out[0]));
    c->out_count = 1;
    return XT_OK;
}

static XtStatus select_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    int dim;
    int64_t index = 0;
    XT_CHECK(select_index(xt_node_op(n), xt_node_args(n), in->shape, in->ndim, &dim, &index));
    XT_CHECK(xt_filled(dout[0], in->dtype, in->ndim, in->shape, 0.0, &din[0]));
    return scatter(din[0], selected(din[0], dim, index), dout[0]);
}

const XtOp xt_op_select = {
    .name = "select",
    .signature = "input: Tensor, dim: int, index: int -> Tensor",
    .forward = select_forward,
    .backward = select_backward,
    .method = true,
    .doc = "View of one index along dim, which disappears.",
};

/* ---- unsqueeze, squeeze, detach ------------------------------------------------------------------------------------------ */

static XtStatus unsqueeze_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    if (x->ndim == XT_MAX_DIMS)
        return xt_error(XT_VALUE_ERROR, "unsqueeze: input must have fewer than %d dimensions, got shape %s", XT_MAX_DIMS,
                        xt_shape_text(x->ndim, x->shape));
    int dim;
    XT_CHECK(xt_check_dim(c->op, c->arg[1].i, x->ndim + 1, &dim));
    XtView view = x->view;
    for (int i = x->ndim; i > dim; i--) {
        view.shape[i] = view.shape[i - 1];
        view.strides[i] = view.strides[i - 1];
    }
    view.shape[dim] = 1;
    view.strides[dim] = dim < x->ndim ? x->shape[dim] * x->strides[dim] : 1;
    view.ndim++;
    c->out_count = 1;
    return xt_tensor_from_view(x->storage, &view, &c->out[0]);
}

const XtOp xt_op_unsqueeze = {
    .name = "unsqueeze",
    .signature = "input: Tensor, dim: int -> Tensor",
    .forward = unsqueeze_forward,
    .backward = reshape_backward,
    .method = true,
    .doc = "View with a new dim of size 1.",
};

static XtStatus squeeze_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    int only = -1;
    if (c->arg[1].given) {
        XT_CHECK(xt_check_dim(c->op, c->arg[1].i, x->ndim, &only));
    }
    XtView view = {.data = x->data, .dtype = x->dtype};
    for (int i = 0; i < x->ndim; i++) {
        if (x->shape[i] == 1 && (only < 0 || only == i)) continue;
        view.shape[view.ndim] = x->shape[i];
        view.strides[view.ndim++] = x->strides[i];
    }
    c->out_count = 1;
    return xt_tensor_from_view(x->storage, &view, &c->out[0]);
}

const XtOp xt_op_squeeze = {
    .name = "squeeze",
    .signature = "input: Tensor, dim: int? = None -> Tensor",
    .forward = squeeze_forward,
    .backward = reshape_backward,
    .method = true,
    .doc = "View without the dims of size 1 (or without the one given, when its size is 1).",
};

static XtStatus detach_forward(XtCall *c) {
    c->out_count = 1;
    return xt_tensor_alias(c->arg[0].tensor, &c->out[0]);
}

const XtOp xt_op_detach = {
    .name = "detach",
    .signature = "input: Tensor -> Tensor",
    .forward = detach_forward,
    .method = true,
    .doc = "The same memory without a history: gradients stop here.",
};
