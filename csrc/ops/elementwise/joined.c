/* joined.c - tensors that lie one after the other in one block of memory, each a part with references and version of its own, and
 * matrices among them read as one: q, k and v of an attention are three parameters and one operand.
 */
#include "contract/elementwise.h"
#include "ops/ops.h"

#include <string.h>

XtStatus xt_empty_joined(int count, XtTensor *const *like, XtTensor **out) {
    XtStorage *whole = NULL, *part = NULL;
    XtStatus status = XT_OK;
    size_t total = 0, offset = 0, nbytes;
    XtDtype dtype = like[0]->dtype;
    memset(out, 0, (size_t)count * sizeof *out);
    for (int i = 0; i < count; i++) {
        XT_CHECK(xt_size_of(dtype, like[i]->ndim, like[i]->shape, NULL, &nbytes));
        if (__builtin_add_overflow(total, nbytes, &total))
            return xt_error(XT_VALUE_ERROR, "the sizes of %d tensors overflow", count);
    }
    XT_CHECK(xt_storage_allocate(like[0]->storage->device, total, &whole));
    for (int i = 0; i < count; i++, offset += nbytes) {
        XtView view = {.dtype = dtype, .ndim = like[i]->ndim};
        memcpy(view.shape, like[i]->shape, sizeof view.shape);
        xt_view_set_contiguous(&view);
        nbytes = (size_t)xt_view_numel(&view) * xt_dtype_size(dtype);
        XT_TRY(xt_storage_part(whole, offset, nbytes, &part));
        view.data = nbytes ? part->data : NULL;
        status = xt_tensor_from_view(part, &view, &out[i]);
        xt_storage_release(part);
        if (status != XT_OK) goto done;
    }
done:
    xt_storage_release(whole);
    for (int i = 0; i < count && status != XT_OK; i++) {
        xt_tensor_release(out[i]);
        out[i] = NULL;
    }
    return status;
}

bool xt_adjoin(const XtTensor *first, const XtTensor *second) {
    size_t nbytes = (size_t)xt_view_numel(&first->view) * xt_dtype_size(first->dtype);
    return first->data && first->dtype == second->dtype && xt_storage_whole(first->storage) == xt_storage_whole(second->storage) &&
           (char *)first->data + nbytes == second->data && xt_view_is_contiguous(&first->view) &&
           xt_view_is_contiguous(&second->view);
}

XtStatus xt_join_rows(int count, XtTensor *const *matrices, XtTensor **out) {
    XtView view = matrices[0]->view;
    *out = NULL;
    if (view.ndim != 2 || !xt_view_is_contiguous(&view)) return XT_OK;
    for (int i = 1; i < count; i++) {
        if (matrices[i]->ndim != 2 || matrices[i]->shape[1] != view.shape[1] || !xt_adjoin(matrices[i - 1], matrices[i]))
            return XT_OK;
        view.shape[0] += matrices[i]->shape[0];
    }
    xt_view_set_contiguous(&view);
    return xt_tensor_from_view(xt_storage_whole(matrices[0]->storage), &view, out);
}

/* Whether these [..., heads, D] are columns of one dense matrix that fills its block, no column twice: then which of its row. */
static bool are_columns(int count, XtTensor *const *list, XtColumns *out) {
    XtStorage *storage = list[0]->storage;
    int64_t *begin = out->begin, *end = out->end;
    if (count > XT_MAX_COLUMNS) return false;
    for (int i = 0; i < count; i++) {
        const XtTensor *t = list[i];
        int d = t->ndim - 1;
        if (t->storage != storage || t->ndim < 3 || xt_view_numel(&t->view) == 0) return false;
        int64_t dim = t->shape[d], width = t->shape[d - 1] * dim, size = (int64_t)xt_dtype_size(t->dtype);
        int64_t row = list[0]->strides[list[0]->ndim - 3], rows = xt_view_numel(&t->view) / width;
        bool even = t->strides[d] == 1 && (t->shape[d - 1] == 1 || t->strides[d - 1] == dim) && t->strides[d - 2] == row;
        for (int j = d - 3; even && j >= 0; j--) even = t->shape[j] == 1 || t->strides[j] == t->shape[j + 1] * t->strides[j + 1];
        begin[i] = ((const char *)t->data - (const char *)storage->data) / size;
        end[i] = begin[i] + width;
        if (!even || end[i] > row || (size_t)(rows * row * size) != storage->nbytes) return false;
        for (int j = 0; j < i; j++)
            if (begin[i] < end[j] && begin[j] < end[i]) return false;
    }
    out->of = storage, out->dtype = list[0]->dtype, out->row = list[0]->strides[list[0]->ndim - 3], out->count = count;
    return true;
}

bool xt_is_columns(XtTensor *t) {
    XtColumns place;
    return are_columns(1, &t, &place) && place.end[0] - place.begin[0] < place.row;
}

/* Whether `more` are other columns of what is begun. */
static bool are_left(const XtColumns *begun, const XtColumns *more) {
    if (begun->of != more->of || begun->storage->nbytes != more->of->nbytes || begun->dtype != more->dtype ||
        begun->row != more->row || begun->count + more->count > XT_MAX_COLUMNS)
        return false;
    for (int i = 0; i < begun->count; i++)
        for (int j = 0; j < more->count; j++)
            if (begun->begin[i] < more->end[j] && more->begin[j] < begun->end[i]) return false;
    return true;
}

bool xt_columns_pay(XtTensor *t) {
    XtColumns place;
    if (!are_columns(1, &t, &place)) return false;
    return are_left(xt_walk_columns(), &place) || 2 * (place.end[0] - place.begin[0]) >= place.row;
}

/* The block for the gradients of these columns, new; it is begun as long as columns are left. */
static XtStatus block_of(const XtColumns *like, const XtTensor *first, XtStorage **block) {
    XtColumns *begun = xt_walk_columns();
    bool left = are_left(begun, like);
    if (left) xt_storage_retain(*block = begun->storage);
    else XT_CHECK(xt_storage_allocate(first->storage->device, first->storage->nbytes, block));
    int64_t width = left ? begun->width : 0;
    for (int i = 0; i < like->count; i++) width += like->end[i] - like->begin[i];
    if (width == like->row) { /* none is left */
        if (left) xt_forget_columns(begun);
        return XT_OK;
    }
    if (!left) {
        xt_forget_columns(begun);
        *begun = *like;
        xt_storage_retain(begun->of);
        xt_storage_retain(begun->storage = *block);
        begun->count = 0;
    }
    begun->width = width;
    for (int i = 0; i < like->count; i++) {
        begun->begin[begun->count] = like->begin[i], begun->end[begun->count] = like->end[i];
        begun->count++;
    }
    return XT_OK;
}

XtStatus xt_empty_like_columns(int count, XtTensor *const *like, XtTensor **out) {
    XtStorage *block = NULL;
    XtColumns places = {.of = NULL};
    XtStatus status = XT_OK;
    memset(out, 0, (size_t)count * sizeof *out);
    bool columns = are_columns(count, like, &places);
    if (columns) XT_TRY(block_of(&places, like[0], &block));
    for (int i = 0; i < count; i++) {
        if (columns) {
            XtView view = like[i]->view;
            view.data = (char *)block->data + ((char *)view.data - (char *)like[0]->storage->data);
            XT_TRY(xt_tensor_from_view(block, &view, &out[i]));
        } else if (count > 1) {
            XT_TRY(xt_empty_like_columns(1, &like[i], &out[i]));
        } else {
            XT_TRY(xt_empty_like(like[i], &out[i]));
        }
    }
done:
    xt_storage_release(block);
    for (int i = 0; i < count && status != XT_OK; i++) {
        xt_tensor_release(out[i]);
        out[i] = NULL;
    }
    return status;
}

/* ---- pack ------------------------------------------------------------------------------------------------------------------ */

static XtStatus pack_forward(XtCall *c) {
    XtTensor *const *list = c->arg[0].tensors;
    int count = c->arg[0].count;
    if (count < 1 || count > XT_MAX_OUTPUTS)
        return xt_error(XT_VALUE_ERROR, "pack: tensors must hold 1 to %d tensors, got %d", XT_MAX_OUTPUTS, count);
    for (int i = 1; i < count; i++) XT_CHECK(xt_check_like(c->op, "tensors[0]", list[0], "every tensor", list[i]));
    XT_CHECK(xt_empty_joined(count, list, c->out));
    c->out_count = count;
    for (int i = 0; i < count; i++) XT_CHECK(xt_backend_of(list[0])->copy(&(XtCopy){.dst = c->out[i]->view, .src = list[i]->view}));
    return XT_OK;
}

static XtStatus pack_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    for (int i = 0; i < n->outputs; i++) XT_CHECK(xt_share(dout[i], &din[i]));
    return XT_OK;
}

const XtOp xt_op_pack = {
    .name = "pack",
    .signature = "tensors: Tensors -> (Tensor, ...)",
    .forward = pack_forward,
    .backward = pack_backward,
    .doc =
        "Dense copies of tensors of one dtype and device, whose memory lies one after the other in one block: linear_joined reads "
        "such weights as one. Each copy has a version of its own.",
};
