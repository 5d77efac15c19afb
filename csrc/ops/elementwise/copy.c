/* copy.c - ops that move elements: clone, cast, cat, split, and changes in place. */
#include "arithmetic.h"

#include <string.h>

/* ---- clone, contiguous, cast, to_device ---------------------------------------------------------------------------------- */

static XtStatus pass_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    (void)n;
    return xt_share(dout[0], &din[0]);
}

static XtStatus clone_forward(XtCall *c) {
    c->out_count = 1;
    return xt_copy_of(c->arg[0].tensor, &c->out[0]);
}

const XtOp xt_op_clone = {.name = "clone",
                          .signature = "input: Tensor -> Tensor",
                          .forward = clone_forward,
                          .backward = pass_backward,
                          .method = true,
                          .doc = "A dense copy; gradients pass through."};

static XtStatus contiguous_forward(XtCall *c) {
    c->out_count = 1;
    return xt_dense(c->arg[0].tensor, &c->out[0]);
}

const XtOp xt_op_contiguous = {.name = "contiguous",
                               .signature = "input: Tensor -> Tensor",
                               .forward = contiguous_forward,
                               .backward = pass_backward,
                               .method = true,
                               .doc = "The tensor itself when it is row-major without gaps, else a dense copy."};

static XtStatus cast_forward(XtCall *c) {
    c->out_count = 1;
    return xt_tensor_or_cast(c->arg[0].tensor, (XtDtype)c->arg[1].i, &c->out[0]);
}

static XtStatus cast_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    if (!xt_dtype_is_float(dout[0]->dtype)) return XT_OK; /* integers have no gradient */
    return xt_tensor_or_cast(dout[0], xt_node_input(n, 0)->dtype, &din[0]);
}

const XtOp xt_op_cast = {
    .name = "cast",
    .signature = "input: Tensor, dtype: dtype -> Tensor",
    .forward = cast_forward,
    .backward = cast_backward,
    .doc = "The tensor in another dtype (itself when it has it). Floats round to nearest even, float64 to 16 bits\n"
           "by way of float32, as PyTorch does; float to integer truncates."};

/* Copies between devices go through dense memory; those between two accelerators through the host's. */
static XtStatus move(XtTensor *t, XtDevice to, XtTensor **out) {
    XtDevice from = t->storage->device;
    if (xt_device_equal(from, to)) return xt_share(t, out);
    const XtBackend *target;
    XtTensor *dense = NULL;
    XtStatus status = XT_OK;
    if (from.type != XT_CPU && to.type != XT_CPU) {
        XT_TRY(move(t, (XtDevice){.type = XT_CPU}, &dense));
        status = move(dense, to, out);
        goto done;
    }
    XT_TRY(xt_backend_for(to, &target));
    XT_TRY(xt_dense(t, &dense));
    XT_TRY(xt_tensor_empty(to, t->dtype, t->ndim, t->shape, out));
    size_t nbytes = (size_t)xt_view_numel(&t->view) * xt_dtype_size(t->dtype);
    if (nbytes && to.type == XT_CPU) status = xt_backend_of(t)->to_host(from.index, (*out)->data, dense->data, nbytes);
    else if (nbytes) status = target->from_host(to.index, (*out)->data, dense->data, nbytes);
    if (status != XT_OK) xt_tensor_release(*out), *out = NULL;
done:
    xt_tensor_release(dense);
    return status;
}

static XtStatus to_device_forward(XtCall *c) {
    c->out_count = 1;
    return move(c->arg[0].tensor, c->arg[1].device, &c->out[0]);
}

static XtStatus to_device_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    return move(dout[0], xt_node_input(n, 0)->device, &din[0]);
}

const XtOp xt_op_to_device = {.name = "to_device",
                              .signature = "input: Tensor, device: device -> Tensor",
                              .forward = to_device_forward,
                              .backward = to_device_backward,
                              .doc = "The tensor on another device (itself when it is there)."};

/* ---- cat, split ---------------------------------------------------------------------------------------------------------- */

/* The part [start, start + length) of t along dim. */
static XtView part_of(const XtTensor *t, int dim, int64_t start, int64_t length) {
    XtView view = t->view;
    if (length > 0 && xt_view_numel(&view) > 0) /* A number, as addresses of meta lie in no array. */
        view.data = (void *)((uintptr_t)t->data + (size_t)(start * t->strides[dim]) * xt_dtype_size(t->dtype));
    view.shape[dim] = length;
    return view;
}

static XtStatus cat_forward(XtCall *c) {
    XtTensor *const *list = c->arg[0].tensors, *first;
    int count = c->arg[0].count, dim;
    if (count == 0) return xt_error(XT_VALUE_ERROR, "cat: tensors must hold at least one tensor, got none");
    first = list[0];
    XT_CHECK(xt_check_ndim(c->op, "tensors[0]", first, 1, XT_MAX_DIMS));
    XT_CHECK(xt_check_dim(c->op, c->arg[1].i, first->ndim, &dim));
    int64_t shape[XT_MAX_DIMS];
    memcpy(shape, first->shape, sizeof shape);
    for (int i = 1; i < count; i++) {
        XT_CHECK(xt_check_like(c->op, "tensors[0]", first, "every tensor", list[i]));
        bool same = list[i]->ndim == first->ndim;
        for (int d = 0; same && d < first->ndim; d++) same = d == dim || list[i]->shape[d] == first->shape[d];
        if (!same)
            return xt_error(XT_VALUE_ERROR, "cat: tensors[%d] must match %s except in dimension %d, got %s", i,
                            xt_shape_text(first->ndim, first->shape), dim, xt_shape_text(list[i]->ndim, list[i]->shape));
        if (__builtin_add_overflow(shape[dim], list[i]->shape[dim], &shape[dim]))
            return xt_error(XT_VALUE_ERROR, "cat: the sizes along dimension %d overflow", dim);
    }
    XT_CHECK(xt_empty_shape(first, first->dtype, first->ndim, shape, &c->out[0]));
    c->out_count = 1;
    int64_t start = 0;
    for (int i = 0; i < count; i++) {
        XT_CHECK(xt_backend_of(first)->copy(
            &(XtCopy){.dst = part_of(c->out[0], dim, start, list[i]->shape[dim]), .src = list[i]->view}));
        start += list[i]->shape[dim];
    }
    return XT_OK;
}

static XtStatus cat_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    int dim;
    XtStatus status = xt_check_dim(xt_node_op(n), xt_node_args(n)[1].i, dout[0]->ndim, &dim);
    int64_t start = 0;
    for (int i = 0; i < n->inputs && status == XT_OK; i++) {
        int64_t length = xt_node_input(n, i)->shape[dim];
        if (xt_node_needs(n, i)) {
            XtView view = part_of(dout[0], dim, start, length);
            status = xt_tensor_from_view(dout[0]->storage, &view, &din[i]);
        }
        start += length;
    }
    return status;
}

const XtOp xt_op_cat = {.name = "cat",
                        .signature = "tensors: Tensors, dim: int = 0 -> Tensor",
                        .forward = cat_forward,
                        .backward = cat_backward,
                        .doc = "Joins tensors of one dtype along an existing dim; the other sizes must agree."};

static XtStatus split_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    const XtArg *sizes = &c->arg[1];
    int dim;
    XT_CHECK(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    XT_CHECK(xt_check_dim(c->op, c->arg[2].i, x->ndim, &dim));
    int64_t size = x->shape[dim], total = 0, each = sizes->ints[0];
    bool equal = !sizes->is_sequence;
    int64_t pieces = sizes->count;
    if (equal) {
        if (each < 1) return xt_error(XT_VALUE_ERROR, "split: split_size must be at least 1, got %lld", (long long)each);
        pieces = size ? (size - 1) / each + 1 : 1;
    } else {
        for (int i = 0; i < sizes->count; i++)
            if (total < 0 || sizes->ints[i] < 0 || __builtin_add_overflow(total, sizes->ints[i], &total)) total = -1;
        if (total != size)
            return xt_error(XT_VALUE_ERROR, "split: split_size must add up to %lld along dimension %d, got %s", (long long)size,
                            dim, xt_shape_text(sizes->count, sizes->ints));
    }
    if (pieces > XT_MAX_OUTPUTS)
        return xt_error(XT_VALUE_ERROR, "split: at most %d pieces, got %lld", XT_MAX_OUTPUTS, (long long)pieces);
    int64_t start = 0;
    for (int i = 0; i < pieces; i++) {
        int64_t length = equal ? (each < size - start ? each : size - start) : sizes->ints[i];
        XtView view = part_of(x, dim, start, length);
        XT_CHECK(xt_tensor_from_view(x->storage, &view, &c->out[i]));
        c->out_count++;
        start += length;
    }
    return XT_OK;
}

/* Whether the two views have the same elements in the same place. */
static bool same_place(const XtView *a, const XtView *b) {
    bool same = a->data == b->data && xt_same_shape(a, b);
    for (int i = 0; same && i < a->ndim; i++) same = a->strides[i] == b->strides[i] || a->shape[i] == 1;
    return same;
}

/* Some rules leave the gradients of several parts where they belong in that of the whole, and the rest of its memory unwritten. Returns
 * the whole when dout[first], and all that share its memory, lie so and nobody else sees that memory; NULL otherwise. */
static XtStatus whole_of(XtTensor *const *dout, int count, int first, int dim, const XtInput *in, XtTensor **out) {
    XtStorage *storage = dout[first]->storage;
    XtView view = {.data = storage->data, .dtype = in->dtype, .ndim = in->ndim};
    int64_t start = 0, holders = 0;
    memcpy(view.shape, in->shape, sizeof view.shape);
    xt_view_set_contiguous(&view);
    *out = NULL;
    if (!xt_storage_is_own(storage) || storage->nbytes != (size_t)xt_view_numel(&view) * xt_dtype_size(in->dtype)) return XT_OK;
    XtTensor whole = {.storage = storage, .view = view};
    for (int i = 0; i < count; start += dout[i++]->shape[dim]) {
        if (dout[i]->storage != storage) continue;
        XtView part = part_of(&whole, dim, start, dout[i]->shape[dim]);
        if (!same_place(&part, &dout[i]->view)) return XT_OK;
        holders++;
    }
    bool seen = __atomic_load_n(&storage->references, __ATOMIC_ACQUIRE) != holders;
    return seen ? XT_OK : xt_tensor_from_view(storage, &view, out);
}

/* dx = cat(dout), in place of those that lie there already */
static XtStatus split_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    int dim;
    int64_t start = 0;
    XT_CHECK(xt_check_dim(xt_node_op(n), xt_node_args(n)[2].i, in->ndim, &dim));
    xt_forget_columns(xt_walk_columns()); /* all that will lie there does, and only dout refers to it */
    for (int i = 0; i < n->outputs && !din[0]; i++)
        if (xt_view_numel(&dout[i]->view)) XT_CHECK(whole_of(dout, n->outputs, i, dim, in, &din[0]));
    if (!din[0]) XT_CHECK(xt_empty_shape(dout[0], in->dtype, in->ndim, in->shape, &din[0]));
    for (int i = 0; i < n->outputs; i++) {
        XtView part = part_of(din[0], dim, start, dout[i]->shape[dim]);
        if (!same_place(&part, &dout[i]->view)) XT_CHECK(xt_backend_of(din[0])->copy(&(XtCopy){.dst = part, .src = dout[i]->view}));
        start += dout[i]->shape[dim];
    }
    return XT_OK;
}

const XtOp xt_op_split = {
    .name = "split",
    .signature = "input: Tensor, split_size: ints, dim: int = 0 -> (Tensor, ...)",
    .forward = split_forward,
    .backward = split_backward,
    .method = true,
    .doc = "Views of consecutive parts along dim: equal ones of split_size (the last may be shorter), or one per size in\n"
           "a tuple. Returns a list."};

/* ---- in place ------------------------------------------------------------------------------------------------------------ */

static XtStatus self_as_output(XtCall *c) {
    c->out_count = 1;
    return xt_share(c->arg[0].tensor, &c->out[0]);
}

static XtStatus check_operand(XtCall *c) {
    const XtTensor *x = c->arg[0].tensor, *other = c->arg[1].tensor;
    if (!other) return XT_OK;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
    if (c->op != &xt_op_copy_) XT_CHECK(xt_check_device(c->op, "input", x, "other", other));
    XT_CHECK(xt_broadcast_shape(c->op, x, other, &ndim, shape));
    return xt_check_shape(c->op, "the result's place, input,", x, ndim, shape);
}

/* Whether the two may overlap in memory without being the same elements. Two storages may hold the same memory: one of them, or both,
 * borrow it through DLPack or NumPy. */
static bool overlaps(const XtTensor *a, const XtTensor *b) {
    const XtStorage *s = a->storage, *t = b->storage;
    uintptr_t start = (uintptr_t)s->data, other = (uintptr_t)t->data;
    if (s != t && (start >= other + t->nbytes || other >= start + s->nbytes)) return false;
    return a->dtype != b->dtype || !same_place(&a->view, &b->view);
}

static XtStatus in_place_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *other = c->arg[1].tensor, *b = NULL, *apart = NULL;
    bool copying = c->op == &xt_op_copy_;
    XtStatus status = XT_OK;
    for (int i = 0; i < x->ndim; i++) {
        if (x->strides[i] == 0 && x->shape[i] > 1)
            return xt_error(XT_VALUE_ERROR, "%s: input must not repeat elements (it was expanded); call contiguous() first",
                            c->op->name);
    }
    XT_TRY(check_operand(c));
    if (other && xt_grad_mode() && xt_requires_grad(other)) {
        status = xt_error(XT_RUNTIME_ERROR,
                          "%s: other must not require a gradient while recording, because an in-place operation would lose it; "
                          "use no_grad(), detach() or an out-of-place operation",
                          c->op->name);
        goto done;
    }
    if (!copying && !xt_dtype_is_float(x->dtype) &&
        (c->op->code == XT_DIV || (other ? xt_dtype_is_float(other->dtype) : !c->arg[1].scalar.is_int))) {
        status =
            xt_error(XT_TYPE_ERROR, "%s: a floating point result cannot be stored in %s", c->op->name, xt_dtype_name(x->dtype));
        goto done;
    }
    if (!copying && x->dtype == XT_BOOL && (other ? other->dtype != XT_BOOL : !c->arg[1].scalar.is_bool))
        XT_TRY(xt_error(XT_TYPE_ERROR, "%s: a number cannot be stored in bool", c->op->name));
    XT_TRY(xt_check_combines(c->op, x->dtype));
    if (!other) XT_TRY(xt_check_fits(c->op, "other", c->arg[1].scalar, x->dtype));
    XT_TRY(xt_begin_inplace(x, c->op->name));
    if (!other && copying) {
        XT_TRY(xt_backend_of(x)->fill(&(XtFill){.dst = x->view, .value = c->arg[1].scalar}));
    } else {
        if (other && !xt_device_equal(x->storage->device, other->storage->device)) XT_TRY(move(other, x->storage->device, &apart));
        else if (other && overlaps(x, other)) XT_TRY(xt_copy_of(other, &apart));
        if (other && !copying) XT_TRY(xt_tensor_or_cast(apart ? apart : other, x->dtype, &b));
        if (copying) {
            XtView src = xt_broadcast_view(apart ? apart : other, x->ndim, x->shape);
            XT_TRY(xt_backend_of(x)->copy(&(XtCopy){.dst = x->view, .src = src}));
        } else {
            XtBinary p = {
                .op = (XtBinaryOp)c->op->code, .out = x->view, .a = x->view, .constant = b ? 0 : 2, .value = c->arg[1].scalar};
            p.b = b ? xt_broadcast_view(b, x->ndim, x->shape) : x->view;
            XT_TRY(xt_backend_of(x)->binary(&p));
        }
    }
    status = self_as_output(c);
done:
    xt_tensor_release(b);
    xt_tensor_release(apart);
    return status;
}

static XtStatus fill_forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor;
    XT_CHECK(xt_check_fits(c->op, "value", c->arg[1].scalar, x->dtype));
    XT_CHECK(xt_begin_inplace(x, c->op->name));
    XT_CHECK(xt_backend_of(x)->fill(&(XtFill){.dst = x->view, .value = c->arg[1].scalar}));
    return self_as_output(c);
}

#define IN_PLACE(stem, which, text)                                                  \
    const XtOp xt_op_##stem = {.name = #stem,                                        \
                               .signature = "input: Tensor, other: Operand -> self", \
                               .forward = in_place_forward,                          \
                               .code = which,                                        \
                               .method = true,                                       \
                               .doc = text " Returns input. Refused while recording when input requires a gradient."};
IN_PLACE(copy_, -1, "Overwrites input with other, which broadcasts and is cast to input's dtype.")
IN_PLACE(add_, XT_ADD, "input += other, in input's dtype.")
IN_PLACE(sub_, XT_SUB, "input -= other, in input's dtype.")
IN_PLACE(mul_, XT_MUL, "input *= other, in input's dtype.")
IN_PLACE(div_, XT_DIV, "input /= other, in input's dtype.")
const XtOp xt_op_fill_ = {
    .name = "fill_",
    .signature = "input: Tensor, value: number -> self",
    .forward = fill_forward,
    .method = true,
    .doc = "Sets every element to value. Returns input. Refused while recording when input requires a gradient."};
