/* bank_sum.c - the sum of some banks in the tree of tree_sum.c, where a bank is a list of tensors at places in a row. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"
#include "ops/optimizer/lists.h"

#include <stdlib.h>

enum { MOST = XT_MOST_PARTS / 4 };

/* *out: returns new, the dense form of `offsets`. Tensors begin at multiples of XT_TREE_ALIGN, apart, and end within numel. */
static XtStatus check_places(const XtOp *op, XtTensor *offsets, const XtArg *parts, int64_t numel, XtTensor **out) {
    XT_CHECK(xt_check_dtype(op, "offsets", offsets, XT_INT64));
    XT_CHECK(xt_check_ndim(op, "offsets", offsets, 1, 1));
    if (offsets->storage->device.type != XT_CPU)
        return xt_error(XT_VALUE_ERROR, "%s: offsets must be on the CPU, got %s", op->name,
                        xt_device_name(offsets->storage->device));
    const int64_t tensors = offsets->shape[0];
    if (tensors < 1 || parts->count % tensors != 0 || parts->count < tensors || parts->count > MOST * tensors)
        return xt_error(XT_VALUE_ERROR, "%s: parts must hold 1 to %d times as many tensors as offsets (%lld), got %d", op->name,
                        MOST, (long long)tensors, parts->count);
    XT_CHECK(xt_dense(offsets, out));
    const int64_t *at = (*out)->data;
    for (int64_t t = 0, end = 0; t < tensors; t++) {
        if (at[t] % XT_TREE_ALIGN != 0 || at[t] < end)
            return xt_error(XT_VALUE_ERROR, "%s: offsets[%lld] must be a multiple of %d behind the tensor before, got %lld",
                            op->name, (long long)t, XT_TREE_ALIGN, (long long)at[t]);
        const int64_t count = xt_view_numel(&parts->tensors[t]->view);
        if (at[t] > numel - count) /* the end may be beyond int64 */
            return xt_error(XT_VALUE_ERROR, "%s: parts[%lld] must end within the %lld elements of out, got an end at %llu",
                            op->name, (long long)t, (long long)numel, (unsigned long long)at[t] + (unsigned long long)count);
        end = at[t] + count;
    }
    return XT_OK;
}

static XtStatus bank_sum_forward(XtCall *c) {
    XtTensor *out = c->arg[0].tensor, *squares = c->arg[3].tensor, *offsets = NULL, **dense = NULL;
    const XtArg *parts = &c->arg[1];
    XtTreeItem *items = NULL;
    XtStatus status = XT_OK;
    if (parts->count < 1 || (!out && !squares))
        return xt_error(XT_VALUE_ERROR, "%s: parts must not be empty, and out or squares be given, got %d parts", c->op->name,
                        parts->count);
    XtTensor *first = parts->tensors[0];
    XT_TRY(xt_check_float(c->op, "parts[0]", first));
    const XtDtype wide = xt_dtype_accumulator(first->dtype);
    if (squares) {
        XT_TRY(xt_check_dtype(c->op, "squares", squares, XT_FLOAT64));
        XT_TRY(xt_check_ndim(c->op, "squares", squares, 1, 1));
        XT_TRY(xt_check_device(c->op, "parts[0]", first, "squares", squares));
    }
    const int64_t numel = out ? xt_view_numel(&out->view) : squares->shape[0] * XT_TREE_BLOCK;
    if (squares && squares->shape[0] != (numel + XT_TREE_BLOCK - 1) / XT_TREE_BLOCK)
        XT_TRY(xt_error(XT_VALUE_ERROR, "%s: squares must have %lld elements, one a block of %d, got %lld", c->op->name,
                        (long long)((numel + XT_TREE_BLOCK - 1) / XT_TREE_BLOCK), XT_TREE_BLOCK, (long long)squares->shape[0]));
    XT_TRY(check_places(c->op, c->arg[2].tensor, parts, numel, &offsets));
    const int64_t tensors = offsets->shape[0];
    if (out) {
        XT_TRY(xt_check_device(c->op, "parts[0]", first, "out", out));
        if (out->dtype != wide && (out->dtype != first->dtype || parts->count > tensors))
            XT_TRY(xt_error(XT_TYPE_ERROR, "%s: out must have dtype %s, in which parts of %s are added, got %s", c->op->name,
                            xt_dtype_name(wide), xt_dtype_name(first->dtype), xt_dtype_name(out->dtype)));
    }
    for (int i = 0; i < 2; i++) {
        const XtTensor *written = i == 0 ? out : squares;
        if (written && !xt_view_is_contiguous(&written->view))
            XT_TRY(
                xt_error(XT_VALUE_ERROR, "%s: %s must be contiguous, got strides of a view", c->op->name, i ? "squares" : "out"));
    }
    if (out && squares && xt_share_memory(out, squares))
        XT_TRY(xt_error(XT_VALUE_ERROR, "%s: squares must not overlap out, got common memory", c->op->name));
    items = malloc((size_t)parts->count * sizeof *items);
    dense = calloc((size_t)parts->count, sizeof *dense);
    if (!items || !dense) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "%s: out of memory", c->op->name));
    for (int i = 0; i < parts->count; i++) {
        XtTensor *part = parts->tensors[i];
        const int64_t t = i % tensors, count = xt_view_numel(&part->view);
        XT_TRY(xt_check_like(c->op, "parts[0]", first, "every part", part));
        if (count != xt_view_numel(&parts->tensors[t]->view))
            XT_TRY(xt_error(XT_VALUE_ERROR, "%s: parts[%d] must have %lld elements as in the first bank, got %lld", c->op->name, i,
                            (long long)xt_view_numel(&parts->tensors[t]->view), (long long)count));
        XT_TRY(xt_dense(part, &dense[i]));
        if ((out && xt_share_memory(out, dense[i])) || (squares && xt_share_memory(squares, dense[i])))
            XT_TRY(xt_error(XT_VALUE_ERROR, "%s: parts[%d] must not overlap out or squares, got common memory", c->op->name, i));
        items[i] =
            (XtTreeItem){.data = dense[i]->data, .begin = ((int64_t *)offsets->data)[t], .numel = count, .dtype = part->dtype};
    }
    if (out) XT_TRY(xt_begin_inplace(out, c->op->name));
    if (squares) XT_TRY(xt_begin_inplace(squares, c->op->name));
    XT_TRY(xt_backend_of(first)->tree_sum(&(XtTreeSum){.out = xt_data(out),
                                                       .items = items,
                                                       .count = parts->count / tensors,
                                                       .tensors = tensors,
                                                       .numel = numel,
                                                       .dtype = out ? out->dtype : wide,
                                                       .squares = xt_data(squares)}));
done:
    for (int i = 0; dense && i < parts->count; i++) xt_tensor_release(dense[i]);
    xt_tensor_release(offsets);
    free(dense);
    free(items);
    return status;
}

const XtOp xt_op_bank_sum_ = {
    .name = "bank_sum_",
    .signature = "out: Tensor?, parts: Tensors, offsets: Tensor, squares: Tensor? = None -> None",
    .forward = bank_sum_forward,
    .doc =
        "out = T(banks), see tree_sum_. A bank is a row of elements in which tensor t begins at offsets[t], int64 on the CPU, and\n"
        "the rest is 0; parts holds the tensors of each bank, bank after bank: up to 16 of them, floats of one dtype. Offsets\n"
        "are multiples of 128. out is float32 (float64 for float64), or of the tensors' dtype where there is one bank, or None.\n"
        "squares, float64 [numel / 8192, rounded up], gets the sum of out^2 of each block of 8192 elements. Neither overlaps\n"
        "another tensor of the call.",
};
