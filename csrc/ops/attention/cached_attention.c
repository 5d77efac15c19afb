/* cached_attention.c - a step of generation: the key and value of one more token are stored, and its query sees all that are. No gradient.
 *
 * The position lies on the device, so the same call serves each step of a captured graph. Formulas: contract/attention.h.
 */
#include "contract/attention.h"
#include "ops/ops.h"

#include <math.h>

static XtStatus dense_last(XtTensor *t, XtTensor **out) {
    if (t->strides[3] == 1 || t->shape[3] <= 1) return xt_share(t, out);
    return xt_copy_of(t, out);
}

static XtStatus check(const XtCall *c) {
    const XtTensor *q = c->arg[0].tensor, *k = c->arg[1].tensor, *keys = c->arg[3].tensor, *positions = c->arg[5].tensor;
    static const char *const names[] = {"query", "key", "value", "keys", "values"};
    XT_CHECK(xt_check_float(c->op, "query", q));
    for (int i = 0; i < 5; i++) {
        XT_CHECK(xt_check_ndim(c->op, names[i], c->arg[i].tensor, 4, 4));
        XT_CHECK(xt_check_like(c->op, "query", q, names[i], c->arg[i].tensor));
        if (xt_grad_mode() && xt_requires_grad(c->arg[i].tensor))
            return xt_error(XT_RUNTIME_ERROR, "cached_attention: %s must not require a gradient while recording: use no_grad()",
                            names[i]);
    }
    const int64_t batch = q->shape[0], heads = q->shape[1], dim = q->shape[3], kv_heads = keys->shape[1];
    XT_CHECK(xt_check_shape(c->op, "query", q, 4, (int64_t[]){batch, heads, 1, dim}));
    XT_CHECK(xt_check_shape(c->op, "keys", keys, 4, (int64_t[]){batch, kv_heads, keys->shape[2], dim}));
    XT_CHECK(xt_check_shape(c->op, "values", c->arg[4].tensor, 4, keys->shape));
    XT_CHECK(xt_check_shape(c->op, "key", k, 4, (int64_t[]){batch, kv_heads, 1, dim}));
    XT_CHECK(xt_check_shape(c->op, "value", c->arg[2].tensor, 4, k->shape));
    if (kv_heads ? heads % kv_heads : heads)
        return xt_error(XT_VALUE_ERROR, "cached_attention: query heads must be a multiple of key heads, got %lld and %lld",
                        (long long)heads, (long long)kv_heads);
    for (int i = 3; i < 5; i++)
        if (!xt_view_is_contiguous(&c->arg[i].tensor->view))
            return xt_error(XT_VALUE_ERROR, "cached_attention: %s must be contiguous, got strides of a view", names[i]);
    if (c->arg[8].given && c->arg[8].i < 1)
        return xt_error(XT_VALUE_ERROR, "cached_attention: window must be at least 1, got %lld", (long long)c->arg[8].i);
    XT_CHECK(xt_check_softcap(c->op, &c->arg[9]));
    XT_CHECK(xt_check_dtype(c->op, "positions", positions, XT_INT64));
    XT_CHECK(xt_check_shape(c->op, "positions", positions, 1, &batch));
    return xt_check_device(c->op, "query", q, "positions", positions);
}

static XtStatus forward(XtCall *c) {
    XtTensor *q = NULL, *k = NULL, *v = NULL, *positions = NULL, *keys = c->arg[3].tensor, *values = c->arg[4].tensor;
    XtStatus status = XT_OK;
    XT_TRY(check(c));
    XT_TRY(dense_last(c->arg[0].tensor, &q));
    XT_TRY(dense_last(c->arg[1].tensor, &k));
    XT_TRY(dense_last(c->arg[2].tensor, &v));
    XT_TRY(xt_dense(c->arg[5].tensor, &positions));
    XT_TRY(xt_begin_inplace(keys, c->op->name));
    XT_TRY(xt_begin_inplace(values, c->op->name));
    XT_TRY(xt_empty_shape(q, q->dtype, 4, q->shape, &c->out[0]));
    c->out_count = 1;
    XtCachedAttention p = {.out = c->out[0]->data,
                           .keys = keys->data,
                           .values = values->data,
                           .q = q->data,
                           .k = k->data,
                           .v = v->data,
                           .positions = positions->data,
                           .dtype = q->dtype,
                           .batch = q->shape[0],
                           .heads = q->shape[1],
                           .kv_heads = keys->shape[1],
                           .length = keys->shape[2],
                           .dim = q->shape[3],
                           .window = c->arg[8].given ? c->arg[8].i : 0,
                           .q_stride = {q->strides[0], q->strides[1]},
                           .k_stride = {k->strides[0], k->strides[1]},
                           .v_stride = {v->strides[0], v->strides[1]},
                           .scale = c->arg[6].given ? c->arg[6].f : 1.0 / sqrt((double)(q->shape[3] > 0 ? q->shape[3] : 1)),
                           .softcap = c->arg[9].given ? c->arg[9].f : 0,
                           .plain = c->arg[7].b};
    XT_TRY(xt_backend_of(q)->cached_attention(&p));
done:
    xt_tensor_release(q);
    xt_tensor_release(k);
    xt_tensor_release(v);
    xt_tensor_release(positions);
    return status;
}

const XtOp xt_op_cached_attention = {
    .name = "cached_attention",
    .signature =
        "query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float? = None, "
        "plain: bool = False, window: int? = None, softcap: float? = None -> Tensor",
    .forward = forward,
    .doc = "Stores key and value [B, K, 1, D] at positions [B] (int64) of keys and values [B, K, L, D], in place, and returns\n"
           "softmax(scale * query @ keys^T) @ values [B, H, 1, D] over positions 0 to that one, or over the `window`\n"
           "positions that end there, per head; NaN where it is not in [0, L), and nothing is stored. H is a multiple of K. scale "
           "defaults to 1/sqrt(D). plain: the simplest kernel. softcap: a score s is softcap * tanh(s / softcap).",
};
