/* tree_sum.c - the sum of some tensors in one fixed tree, into a tensor that is there. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"
#include "ops/optimizer/lists.h"

#include <stdlib.h>

static XtStatus tree_sum_forward(XtCall *c) {
    XtTensor *out = c->arg[0].tensor, *squares = c->arg[2].tensor;
    const XtArg *parts = &c->arg[1];
    XtTensor *dense[XT_MOST_PARTS] = {NULL};
    XtTreeItem items[XT_MOST_PARTS];
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "out", out));
    XT_TRY(xt_check_dtype(c->op, "out", out, xt_dtype_accumulator(out->dtype)));
    if (parts->count < 1 || parts->count > XT_MOST_PARTS)
        XT_TRY(xt_error(XT_VALUE_ERROR, "tree_sum_: parts must hold 1 to %d tensors, got %d", XT_MOST_PARTS, parts->count));
    if (!xt_view_is_contiguous(&out->view))
        XT_TRY(xt_error(XT_VALUE_ERROR, "tree_sum_: out must be contiguous, got strides of a view"));
    const int64_t numel = xt_view_numel(&out->view), blocks = (numel + XT_TREE_BLOCK - 1) / XT_TREE_BLOCK;
    for (int i = 0; i < parts->count; i++) {
        XtTensor *part = parts->tensors[i];
        XT_TRY(xt_check_float(c->op, "every part", part));
        XT_TRY(xt_check_device(c->op, "out", out, "every part", part));
        XT_TRY(xt_check_shape(c->op, "every part", part, out->ndim, out->shape));
        if (xt_dtype_accumulator(part->dtype) != out->dtype)
            XT_TRY(xt_error(XT_TYPE_ERROR, "tree_sum_: out must have dtype %s, in which parts of %s are added, got %s",
                            xt_dtype_name(xt_dtype_accumulator(part->dtype)), xt_dtype_name(part->dtype),
                            xt_dtype_name(out->dtype)));
        XT_TRY(xt_dense(part, &dense[i]));
        if (xt_share_memory(out, dense[i]) && (dense[i]->data != out->data || part->dtype != out->dtype))
            XT_TRY(xt_error(XT_VALUE_ERROR, "tree_sum_: parts[%d] must be out or not overlap it, got common memory", i));
        items[i] = (XtTreeItem){.data = dense[i]->data, .numel = numel, .dtype = part->dtype};
    }
    if (squares) {
        XT_TRY(xt_check_dtype(c->op, "squares", squares, XT_FLOAT64));
        XT_TRY(xt_check_device(c->op, "out", out, "squares", squares));
        XT_TRY(xt_check_shape(c->op, "squares", squares, 1, &blocks));
        if (!xt_view_is_contiguous(&squares->view))
            XT_TRY(xt_error(XT_VALUE_ERROR, "tree_sum_: squares must be contiguous, got strides of a view"));
        for (int i = -1; i < parts->count; i++)
            if (xt_share_memory(squares, i < 0 ? out : dense[i]))
                XT_TRY(xt_error(XT_VALUE_ERROR, "tree_sum_: squares must not overlap out or a part, got common memory"));
        XT_TRY(xt_begin_inplace(squares, c->op->name));
    }
    XT_TRY(xt_begin_inplace(out, c->op->name));
    XT_TRY(xt_backend_of(out)->tree_sum(&(XtTreeSum){.out = out->data,
                                                     .items = items,
                                                     .count = parts->count,
                                                     .tensors = 1,
                                                     .numel = numel,
                                                     .dtype = out->dtype,
                                                     .squares = xt_data(squares)}));
    XT_TRY(xt_share(out, &c->out[0]));
    c->out_count = 1;
done:
    for (int i = 0; i < XT_MOST_PARTS; i++) xt_tensor_release(dense[i]);
    return status;
}

const XtOp xt_op_tree_sum_ = {
    .name = "tree_sum_",
    .signature = "out: Tensor, parts: Tensors, squares: Tensor? = None -> self",
    .forward = tree_sum_forward,
    .doc =
        "out = T(parts): T(x_0..x_{n-1}) = T(x_0..x_{p-1}) + T(x_p..x_{n-1}), p the largest power of two below n; T(x_0) = x_0.\n"
        "1 to 64 parts of out's shape, floats; out is float32 (float64 for float64), contiguous, and may be one of the parts;\n"
        "it overlaps no other. squares, float64 [numel / 8192, rounded up], gets the sum of out^2 of each block of 8192 elements,\n"
        "and overlaps nothing.",
};
