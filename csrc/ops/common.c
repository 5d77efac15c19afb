/* common.c - what ops share: checks with one wording, small allocations, broadcasting. */
#include "contract/reduce.h"
#include "ops/elementwise/arithmetic.h"

#include <math.h>
#include <string.h>

/* ---- checks ------------------------------------------------------------------------------------------------------------ */

XtStatus xt_check_float(const XtOp *op, const char *arg, const XtTensor *t) {
    if (xt_dtype_is_float(t->dtype)) return XT_OK;
    return xt_error(XT_TYPE_ERROR, "%s: %s must have a floating point dtype, got %s", op->name, arg, xt_dtype_name(t->dtype));
}

XtStatus xt_check_dtype(const XtOp *op, const char *arg, const XtTensor *t, XtDtype dtype) {
    if (t->dtype == dtype) return XT_OK;
    return xt_error(XT_TYPE_ERROR, "%s: %s must have dtype %s, got %s", op->name, arg, xt_dtype_name(dtype),
                    xt_dtype_name(t->dtype));
}

bool xt_scalar_fits(XtScalar value, XtDtype dtype) {
    static const double low[XT_DTYPE_COUNT] = {[XT_INT32] = -0x1p31, [XT_INT64] = -0x1p63},
                        high[XT_DTYPE_COUNT] = {[XT_INT32] = 0x1p31, [XT_INT64] = 0x1p63, [XT_UINT8] = 256};
    if (xt_dtype_is_float(dtype) || dtype == XT_BOOL) return true;
    if (value.is_int && dtype == XT_INT64) return true;
    return value.d > low[dtype] - 1 && value.d < high[dtype]; /* fractions are truncated; NaN never fits */
}

XtStatus xt_check_fits(const XtOp *op, const char *arg, XtScalar value, XtDtype dtype) {
    if (xt_scalar_fits(value, dtype)) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: %s must fit into %s, got %.17g", op->name, arg, xt_dtype_name(dtype), value.d);
}

XtStatus xt_check_ndim(const XtOp *op, const char *arg, const XtTensor *t, int minimum, int maximum) {
    if (t->ndim >= minimum && t->ndim <= maximum) return XT_OK;
    if (minimum == maximum)
        return xt_error(XT_VALUE_ERROR, "%s: %s must have %d dimensions, got shape %s", op->name, arg, minimum,
                        xt_shape_text(t->ndim, t->shape));
    return xt_error(XT_VALUE_ERROR, "%s: %s must have %d to %d dimensions, got shape %s", op->name, arg, minimum, maximum,
                    xt_shape_text(t->ndim, t->shape));
}

XtStatus xt_check_shape(const XtOp *op, const char *arg, const XtTensor *t, int ndim, const int64_t *shape) {
    bool same = t->ndim == ndim;
    for (int i = 0; same && i < ndim; i++) same = t->shape[i] == shape[i];
    if (same) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: %s must have shape %s, got %s", op->name, arg, xt_shape_text(ndim, shape),
                    xt_shape_text(t->ndim, t->shape));
}

XtStatus xt_check_softcap(const XtOp *op, const XtArg *arg) {
    if (!arg->given || ((float)arg->f > 0 && (float)arg->f < INFINITY)) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: softcap must be positive and finite in float32, got %g", op->name, arg->f);
}

XtStatus xt_check_device(const XtOp *op, const char *arg_a, const XtTensor *a, const char *arg_b, const XtTensor *b) {
    if (xt_device_equal(a->storage->device, b->storage->device)) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: %s must be on the device of %s, %s, got %s", op->name, arg_b, arg_a,
                    xt_device_name(a->storage->device), xt_device_name(b->storage->device));
}

XtStatus xt_check_like(const XtOp *op, const char *arg_a, const XtTensor *a, const char *arg_b, const XtTensor *b) {
    XT_CHECK(xt_check_device(op, arg_a, a, arg_b, b));
    if (a->dtype == b->dtype) return XT_OK;
    return xt_error(XT_TYPE_ERROR, "%s: %s must have the dtype of %s, %s, got %s", op->name, arg_b, arg_a, xt_dtype_name(a->dtype),
                    xt_dtype_name(b->dtype));
}

XtStatus xt_check_dim(const XtOp *op, int64_t dim, int ndim, int *out) {
    int range = ndim > 0 ? ndim : 1; /* a scalar accepts dim 0 and -1, as in PyTorch */
    if (dim < -range || dim >= range)
        return xt_error(XT_INDEX_ERROR, "%s: dim must be in [%d, %d], got %lld", op->name, -range, range - 1, (long long)dim);
    *out = (int)(dim < 0 ? dim + range : dim);
    return XT_OK;
}

const XtBackend *xt_backend_of(const XtTensor *t) {
    const XtBackend *backend = NULL;
    xt_backend_for(t->storage->device, &backend); /* a tensor exists, so its device's table does */
    return backend;
}

/* ---- new tensors ------------------------------------------------------------------------------------------------------- */

XtStatus xt_empty_shape(const XtTensor *like, XtDtype dtype, int ndim, const int64_t *shape, XtTensor **out) {
    return xt_tensor_empty(like->storage->device, dtype, ndim, shape, out);
}

XtStatus xt_empty_like(const XtTensor *t, XtTensor **out) { return xt_empty_shape(t, t->dtype, t->ndim, t->shape, out); }

XtStatus xt_share(XtTensor *t, XtTensor **out) {
    xt_tensor_retain(t);
    *out = t;
    return XT_OK;
}

XtStatus xt_or_release(XtStatus status, XtTensor **out) {
    if (status != XT_OK) xt_tensor_release(*out), *out = NULL;
    return status;
}

static XtStatus copy_as(XtTensor *t, XtDtype dtype, XtTensor **out) {
    XT_CHECK(xt_empty_shape(t, dtype, t->ndim, t->shape, out));
    return xt_or_release(xt_backend_of(t)->copy(&(XtCopy){.dst = (*out)->view, .src = t->view}), out);
}

XtStatus xt_dense(XtTensor *t, XtTensor **out) { return xt_cast(t, t->dtype, out); }

XtStatus xt_cast(XtTensor *t, XtDtype dtype, XtTensor **out) {
    if (t->dtype == dtype && xt_view_is_contiguous(&t->view)) return xt_share(t, out);
    return copy_as(t, dtype, out);
}

XtStatus xt_tensor_or_cast(XtTensor *t, XtDtype dtype, XtTensor **out) {
    if (t->dtype != dtype) return copy_as(t, dtype, out);
    return xt_share(t, out);
}

XtStatus xt_copy_of(XtTensor *t, XtTensor **out) { return copy_as(t, t->dtype, out); }

XtStatus xt_filled(const XtTensor *like, XtDtype dtype, int ndim, const int64_t *shape, double value, XtTensor **out) {
    return xt_tape_math.filled(like->storage->device, dtype, ndim, shape, value, out);
}

XtStatus xt_view_as(const XtTensor *t, int ndim, const int64_t *shape, const int64_t *strides, XtTensor **out) {
    XtView view = {.data = t->data, .dtype = t->dtype, .ndim = ndim};
    for (int i = 0; i < ndim; i++) {
        view.shape[i] = shape[i];
        if (strides) view.strides[i] = strides[i];
    }
    if (!strides) xt_view_set_contiguous(&view);
    return xt_tensor_from_view(t->storage, &view, out);
}

/* Strides of `shape` over t's memory, when its dims can be split and merged without moving anything. */
bool xt_reshape_strides(const XtTensor *t, int ndim, const int64_t *shape, int64_t *strides) {
    if (xt_view_numel(&t->view) == 0 || xt_view_is_contiguous(&t->view)) {
        XtView view = {.ndim = ndim};
        memcpy(view.shape, shape, (size_t)ndim * sizeof *shape);
        xt_view_set_contiguous(&view);
        memcpy(strides, view.strides, (size_t)ndim * sizeof *strides);
        return true;
    }
    int64_t old_shape[XT_MAX_DIMS], old_strides[XT_MAX_DIMS];
    int old_ndim = 0;
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] == 1) continue;
        old_shape[old_ndim] = t->shape[i];
        old_strides[old_ndim++] = t->strides[i];
    }
    /* From the right, in groups of equal product: the old dims of a group must follow each other in memory. */
    int j = ndim; /* new dims [j, ndim) are done */
    for (int i = old_ndim - 1; i >= 0; i--) {
        int64_t stride = old_strides[i], old_size = old_shape[i], new_size = 1;
        while (new_size != old_size) {
            if (new_size < old_size) {
                if (j == 0) return false;
                strides[--j] = stride * new_size;
                new_size *= shape[j];
            } else {
                if (i == 0 || old_strides[i - 1] != old_shape[i] * old_strides[i]) return false;
                old_size *= old_shape[--i];
            }
        }
    }
    while (j > 0) strides[--j] = 1; /* what is left are ones */
    return true;
}

XtStatus xt_reshape(XtTensor *t, int ndim, const int64_t *shape, XtTensor **out) {
    int64_t strides[XT_MAX_DIMS];
    if (xt_reshape_strides(t, ndim, shape, strides)) return xt_view_as(t, ndim, shape, strides, out);
    XtTensor *dense;
    XT_CHECK(xt_dense(t, &dense));
    XtStatus status = xt_view_as(dense, ndim, shape, NULL, out);
    xt_tensor_release(dense);
    return status;
}

XtStatus xt_as_rows(XtTensor *t, XtTensor **out) {
    int64_t cols = t->shape[t->ndim - 1], shape[2] = {1, cols};
    for (int i = 0; i < t->ndim - 1; i++) shape[0] *= t->shape[i];
    return xt_reshape(t, 2, shape, out);
}

XtStatus xt_rows_like(XtTensor *rows, const XtTensor *x, XtTensor **out) {
    int64_t shape[XT_MAX_DIMS];
    memcpy(shape, x->shape, sizeof shape);
    shape[x->ndim - 1] = rows->shape[1];
    return xt_reshape(rows, x->ndim, shape, out);
}

/* ---- broadcasting ------------------------------------------------------------------------------------------------------ */

XtStatus xt_broadcast_shape(const XtOp *op, const XtTensor *a, const XtTensor *b, int *ndim, int64_t *shape) {
    *ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int i = 1; i <= *ndim; i++) {
        int64_t na = i <= a->ndim ? a->shape[a->ndim - i] : 1, nb = i <= b->ndim ? b->shape[b->ndim - i] : 1;
        if (na != nb && na != 1 && nb != 1)
            return xt_error(XT_VALUE_ERROR, "%s: shapes must broadcast, got %s and %s", op->name, xt_shape_text(a->ndim, a->shape),
                            xt_shape_text(b->ndim, b->shape));
        shape[*ndim - i] = na == 1 ? nb : na;
    }
    return XT_OK;
}

XtView xt_broadcast_view(const XtTensor *t, int ndim, const int64_t *shape) {
    XtView view = {.data = t->data, .dtype = t->dtype, .ndim = ndim};
    for (int i = 0; i < ndim; i++) {
        int d = i - (ndim - t->ndim);
        view.shape[i] = shape[i];
        view.strides[i] = d < 0 || (t->shape[d] == 1 && shape[i] != 1) ? 0 : t->strides[d];
    }
    return view;
}

XtStatus xt_sum_to(XtTensor *t, int ndim, const int64_t *shape, XtTensor **out) {
    XtView wanted = {.ndim = ndim};
    memcpy(wanted.shape, shape, (size_t)ndim * sizeof *shape);
    if (xt_same_shape(&t->view, &wanted)) return xt_share(t, out);
    XT_CHECK(xt_empty_shape(t, t->dtype, ndim, shape, out));
    /* Kept dims first, then the reduced ones. */
    XtView x = {.data = t->data, .dtype = t->dtype}, kept = {.data = (*out)->data, .dtype = t->dtype};
    int lead = t->ndim - ndim;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < t->ndim; i++) {
            bool reduced = i < lead || (shape[i - lead] == 1 && t->shape[i] != 1);
            if (reduced != (pass == 1)) continue;
            x.shape[x.ndim] = t->shape[i];
            x.strides[x.ndim++] = t->strides[i];
            if (!reduced) {
                kept.shape[kept.ndim] = t->shape[i];
                kept.strides[kept.ndim++] = (*out)->strides[i - lead];
            }
        }
    }
    return xt_or_release(xt_backend_of(t)->reduce(&(XtReduce){.op = XT_REDUCE_SUM, .out = kept, .x = x}), out);
}

/* ---- arithmetic without recording, for backwards ------------------------------------------------------------------------- */

static const XtOp inner = {.name = "backward"};

XtStatus xt_binary(XtBinaryOp op, XtTensor *a, XtTensor *b, XtTensor **out) {
    int ndim;
    int64_t shape[XT_MAX_DIMS];
    XT_CHECK(xt_broadcast_shape(&inner, a, b, &ndim, shape));
    XT_CHECK(xt_empty_shape(a, op >= XT_EQ ? XT_BOOL : a->dtype, ndim, shape, out));
    XtBinary p = {.op = op, .out = (*out)->view, .a = xt_broadcast_view(a, ndim, shape), .b = xt_broadcast_view(b, ndim, shape)};
    return xt_or_release(xt_backend_of(a)->binary(&p), out);
}

XtStatus xt_binary_scalar(XtBinaryOp op, XtTensor *a, double value, XtTensor **out) {
    XT_CHECK(xt_empty_shape(a, op >= XT_EQ ? XT_BOOL : a->dtype, a->ndim, a->shape, out));
    XtBinary p = {.op = op, .out = (*out)->view, .a = a->view, .b = a->view, .constant = 2, .value = xt_scalar_float(value)};
    return xt_or_release(xt_backend_of(a)->binary(&p), out);
}

XtStatus xt_unary(XtUnaryOp op, XtTensor *x, XtTensor **out) {
    XT_CHECK(xt_empty_like(x, out));
    return xt_or_release(xt_backend_of(x)->unary(&(XtUnary){.op = op, .out = (*out)->view, .x = x->view}), out);
}

/* ---- what the tape needs ------------------------------------------------------------------------------------------------- */

static XtStatus tape_add(XtTensor *a, XtTensor *b, bool may_overwrite_a, XtTensor **out) {
    if (!may_overwrite_a || !xt_view_is_contiguous(&a->view)) return xt_binary(XT_ADD, a, b, out);
    __atomic_add_fetch(&a->storage->version, 1, __ATOMIC_RELAXED);
    XT_CHECK(xt_backend_of(a)->binary(&(XtBinary){.op = XT_ADD, .out = a->view, .a = a->view, .b = b->view}));
    return xt_share(a, out);
}

static XtStatus tape_filled(XtDevice device, XtDtype dtype, int ndim, const int64_t *shape, double value, XtTensor **out) {
    XT_CHECK(xt_tensor_empty(device, dtype, ndim, shape, out));
    return xt_or_release(xt_backend_of(*out)->fill(&(XtFill){.dst = (*out)->view, .value = xt_scalar_float(value)}), out);
}

__attribute__((constructor)) static void lend_math(void) {
    xt_tape_math = (XtTapeMath){.add = tape_add, .copy = xt_copy_of, .filled = tape_filled};
}
