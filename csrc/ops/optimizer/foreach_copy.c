/* foreach_copy.c - many tensors from others of their dtype, in one call. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"
#include "ops/optimizer/lists.h"

#include <stdlib.h>

static XtStatus forward(XtCall *c) {
    const XtArg *tensors = &c->arg[0], *sources = &c->arg[1];
    XtStatus status = XT_OK;
    XtCopyItem *items = NULL;
    XtTensor **dense = NULL;
    if (tensors->count == 0) return xt_error(XT_VALUE_ERROR, "foreach_copy_: tensors must hold at least one tensor, got none");
    if (sources->count != tensors->count)
        return xt_error(XT_VALUE_ERROR, "foreach_copy_: sources must hold one for each tensor (%d), got %d", tensors->count,
                        sources->count);
    items = calloc((size_t)tensors->count, sizeof *items);
    dense = calloc((size_t)tensors->count, sizeof *dense);
    if (!items || !dense) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "foreach_copy_: out of memory"));
    for (int i = 0; i < tensors->count; i++) {
        XtTensor *to = tensors->tensors[i], *from = sources->tensors[i];
        const int64_t numel = xt_view_numel(&to->view);
        XT_TRY(xt_check_device(c->op, "tensors[0]", tensors->tensors[0], "every tensor", to));
        XT_TRY(xt_check_device(c->op, "tensors[0]", tensors->tensors[0], "every source", from));
        if (from->dtype != to->dtype || xt_view_numel(&from->view) != numel)
            XT_TRY(xt_error(XT_VALUE_ERROR, "foreach_copy_: sources[%d] must have %lld elements of %s, got %lld of %s", i,
                            (long long)numel, xt_dtype_name(to->dtype), (long long)xt_view_numel(&from->view),
                            xt_dtype_name(from->dtype)));
        if (!xt_view_is_contiguous(&to->view))
            XT_TRY(xt_error(XT_VALUE_ERROR, "foreach_copy_: tensors[%d] must be contiguous, got strides of a view", i));
        XT_TRY(xt_dense(from, &dense[i]));
        items[i] = (XtCopyItem){.to = to->data, .from = dense[i]->data, .nbytes = numel * (int64_t)xt_dtype_size(to->dtype)};
        if (xt_share_memory(to, dense[i]))
            XT_TRY(xt_error(XT_VALUE_ERROR, "foreach_copy_: sources[%d] must not overlap tensors[%d], got common memory", i, i));
    }
    for (int i = 0; i < tensors->count; i++) XT_TRY(xt_begin_inplace(tensors->tensors[i], c->op->name));
    XT_TRY(xt_backend_of(tensors->tensors[0])->foreach_copy(&(XtCopies){.items = items, .count = tensors->count}));
done:
    for (int i = 0; dense && i < tensors->count; i++) xt_tensor_release(dense[i]);
    free(dense);
    free(items);
    return status;
}

const XtOp xt_op_foreach_copy_ = {
    .name = "foreach_copy_",
    .signature = "tensors: Tensors, sources: Tensors -> None",
    .forward = forward,
    .doc = "The elements of each source into its tensor, which has as many of the same dtype; shapes may differ. A tensor is\n"
           "contiguous. Its source must not overlap it; that it overlaps no other tensor or source is not checked, and gives\n"
           "either value. All lie on one device.",
};
