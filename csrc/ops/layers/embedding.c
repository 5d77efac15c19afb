/* embedding.c - out[r] = weight[ids[r]].  dweight[v] = sum of dy[r] over the rows with ids[r] == v, in row order. */
#include "contract/layers.h"
#include "ops/ops.h"

#include <string.h>

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *w = c->arg[1].tensor, *ids = NULL, *weight = NULL, *out = NULL;
    XtStatus status = XT_OK;
    if (given->dtype != XT_INT64 && given->dtype != XT_INT32)
        return xt_error(XT_TYPE_ERROR, "embedding: input must be int64 or int32 ids, got %s", xt_dtype_name(given->dtype));
    XT_TRY(xt_check_ndim(c->op, "input", given, 0, XT_MAX_DIMS - 1));
    XT_TRY(xt_check_ndim(c->op, "weight", w, 2, 2));
    XT_TRY(xt_check_float(c->op, "weight", w));
    XT_TRY(xt_check_device(c->op, "weight", w, "input", given));
    XT_TRY(xt_cast(given, XT_INT64, &ids));
    XT_TRY(xt_dense(w, &weight));
    int64_t shape[XT_MAX_DIMS], rows = xt_view_numel(&ids->view);
    memcpy(shape, ids->shape, sizeof shape);
    shape[ids->ndim] = w->shape[1];
    XT_TRY(xt_empty_shape(w, w->dtype, ids->ndim + 1, shape, &out));
    XtEmbeddingFwd p = {.out = out->data,
                        .weight = weight->data,
                        .ids = ids->data,
                        .dtype = w->dtype,
                        .rows = rows,
                        .cols = w->shape[1],
                        .vocab = w->shape[0]};
    XT_TRY(xt_backend_of(w)->embedding_fwd(&p));
    XT_TRY(xt_save(c, ids));
    c->out[c->out_count++] = out;
    out = NULL;
done:
    xt_tensor_release(ids);
    xt_tensor_release(weight);
    xt_tensor_release(out);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *ids, *dy = NULL;
    const XtInput *w = xt_node_input(n, 1);
    XtStatus status = XT_OK;
    if (!xt_node_needs(n, 1)) return XT_OK;
    XT_TRY(xt_node_saved(n, 0, &ids));
    XT_TRY(xt_dense(dout[0], &dy));
    XtTensor *sum = xt_node_accumulator(n, 1);
    if (!sum) XT_TRY(xt_empty_shape(dy, w->dtype, 2, w->shape, &din[1]));
    XtEmbeddingBwd p = {.dweight = sum ? sum->data : din[1]->data,
                        .dy = dy->data,
                        .ids = ids->data,
                        .dtype = w->dtype,
                        .rows = xt_view_numel(&ids->view),
                        .cols = w->shape[1],
                        .vocab = w->shape[0],
                        .accumulate = sum != NULL};
    XT_TRY(xt_backend_of(dy)->embedding_bwd(&p));
done:
    xt_tensor_release(dy);
    return status;
}

const XtOp xt_op_embedding = {
    .name = "embedding",
    .signature = "input: Tensor, weight: Tensor -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "Rows of weight [V, C] picked by ids (int64 or int32, any shape) -> [*ids.shape, C]. IndexError names an id outside [0, "
           "V).",
};
