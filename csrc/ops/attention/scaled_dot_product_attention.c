/* scaled_dot_product_attention.c - softmax(scale Q K^T + mask) V for every (batch, head) at once; the mask is causal, a window, documents.
 * Sinks are added after whichever kernel has run.
 *
 * query [B, H, S, D], key and value [B, K, T, D] with H a multiple of K (grouped-query attention: K/V are shared by stride, never copied).
 * Any strides with a dense last dim are taken as they are: the [B*S, H*D] output of a projection goes in as a view. The result lies in
 * memory as [B, S, H, D], so its way back to [B*S, H*D] is a view too. Formulas: contract/attention.h.
 */
#include "contract/attention.h"
#include "ops/ops.h"

#include <math.h>
#include <string.h>

static XtStatus dense_last(XtTensor *t, XtTensor **out) {
    if (t->strides[3] == 1 || t->shape[3] <= 1) return xt_share(t, out);
    return xt_copy_of(t, out);
}

/* [B, H, S, D] over memory laid out as [B, S, H, D]. */
static XtStatus empty_token_major(const XtTensor *like, const int64_t *shape, XtTensor **out) {
    int64_t memory[4] = {shape[0], shape[2], shape[1], shape[3]};
    XtTensor *t;
    XT_CHECK(xt_empty_shape(like, like->dtype, 4, memory, &t));
    int64_t strides[4] = {t->strides[0], t->strides[2], t->strides[1], t->strides[3]};
    XtStatus status = xt_view_as(t, 4, shape, strides, out);
    xt_tensor_release(t);
    return status;
}

/* A view with dims 1 and 2 swapped: [B, H, S, D] as [B, S, H, D], and back. */
static XtStatus turned(const XtTensor *t, XtTensor **out) {
    const int64_t shape[4] = {t->shape[0], t->shape[2], t->shape[1], t->shape[3]};
    const int64_t strides[4] = {t->strides[0], t->strides[2], t->strides[1], t->strides[3]};
    return xt_view_as(t, 4, shape, strides, out);
}

/* dq, dk and dv in memory as [B, S, H, D]: as columns of one block where q, k and v are columns of a product, which split() needs not
 * gather then; else each dense. */
static XtStatus empty_gradients(XtTensor *const inputs[3], XtTensor *din[3]) {
    XtTensor *tokens[3] = {NULL}, *made[3] = {NULL};
    XtStatus status = XT_OK;
    for (int i = 0; i < 3; i++) XT_TRY(turned(inputs[i], &tokens[i]));
    XT_TRY(xt_empty_like_columns(3, tokens, made));
    for (int i = 0; i < 3; i++) XT_TRY(turned(made[i], &din[i]));
done:
    for (int i = 0; i < 3; i++) {
        xt_tensor_release(tokens[i]);
        xt_tensor_release(made[i]);
    }
    return status;
}

static void set_strides(int64_t stride[3], const XtTensor *t) { memcpy(stride, t->strides, 3 * sizeof *stride); }

static double scale_of(const XtArg *arg, int64_t dim) { return arg->given ? arg->f : 1.0 / sqrt((double)(dim > 0 ? dim : 1)); }

static XtStatus check(XtCall *c) {
    const XtTensor *q = c->arg[0].tensor, *k = c->arg[1].tensor, *v = c->arg[2].tensor;
    XT_CHECK(xt_check_float(c->op, "query", q));
    XT_CHECK(xt_check_ndim(c->op, "query", q, 4, 4));
    XT_CHECK(xt_check_ndim(c->op, "key", k, 4, 4));
    XT_CHECK(xt_check_ndim(c->op, "value", v, 4, 4));
    XT_CHECK(xt_check_like(c->op, "query", q, "key", k));
    XT_CHECK(xt_check_like(c->op, "query", q, "value", v));
    int64_t want[4] = {q->shape[0], k->shape[1], k->shape[2], q->shape[3]};
    XT_CHECK(xt_check_shape(c->op, "key", k, 4, want));
    XT_CHECK(xt_check_shape(c->op, "value", v, 4, want));
    int64_t heads = q->shape[1], kv_heads = k->shape[1];
    if (heads != kv_heads && !c->arg[5].b)
        return xt_error(XT_VALUE_ERROR,
                        "scaled_dot_product_attention: key must have the %lld heads of query unless enable_gqa=True, got %lld",
                        (long long)heads, (long long)kv_heads);
    if (kv_heads ? heads % kv_heads : heads)
        return xt_error(XT_VALUE_ERROR,
                        "scaled_dot_product_attention: query heads must be a multiple of key heads, got %lld and %lld",
                        (long long)heads, (long long)kv_heads);
    const XtTensor *documents = c->arg[7].tensor;
    if (documents) {
        if (q->shape[2] != k->shape[2])
            return xt_error(
                XT_VALUE_ERROR,
                "scaled_dot_product_attention: documents must be None where query and key differ in length, got %lld and "
                "%lld tokens",
                (long long)q->shape[2], (long long)k->shape[2]);
        XT_CHECK(xt_check_dtype(c->op, "documents", documents, XT_INT32));
        XT_CHECK(xt_check_shape(c->op, "documents", documents, 3, (int64_t[]){q->shape[0], 2, q->shape[2]}));
        XT_CHECK(xt_check_device(c->op, "query", q, "documents", documents));
    }
    if (c->arg[8].given && c->arg[8].i < 1)
        return xt_error(XT_VALUE_ERROR, "scaled_dot_product_attention: window must be at least 1, got %lld",
                        (long long)c->arg[8].i);
    if (c->arg[8].given && !c->arg[3].b)
        return xt_error(XT_VALUE_ERROR, "scaled_dot_product_attention: window must be None without is_causal, got %lld",
                        (long long)c->arg[8].i);
    const XtTensor *sinks = c->arg[9].tensor;
    if (sinks) {
        XT_CHECK(xt_check_like(c->op, "query", q, "sinks", sinks));
        XT_CHECK(xt_check_shape(c->op, "sinks", sinks, 1, &heads));
    }
    return xt_check_softcap(c->op, &c->arg[10]);
}

/* 0 where no window is given, and where it reaches over all keys. */
static int64_t window_of(const XtArg *arg, const XtTensor *k) { return arg->given && arg->i < k->shape[2] ? arg->i : 0; }

static double softcap_of(const XtArg *arg) { return arg->given ? arg->f : 0; }

static XtStatus add_sinks(const XtTensor *sinks, XtTensor *out, XtTensor *lse) {
    XtAttentionSinksFwd p = {.out = out->data,
                             .lse = lse->data,
                             .sinks = sinks->data,
                             .dtype = out->dtype,
                             .batch = out->shape[0],
                             .heads = out->shape[1],
                             .sq = out->shape[2],
                             .dim = out->shape[3]};
    set_strides(p.out_stride, out);
    return xt_backend_of(out)->attention_sinks_fwd(&p);
}

static XtStatus sinks_gradient(const XtTensor *sinks, const XtTensor *dout, const XtTensor *out, const XtTensor *lse,
                               XtTensor **dsinks) {
    XT_CHECK(xt_empty_like(sinks, dsinks));
    XtAttentionSinksBwd p = {.dsinks = (*dsinks)->data,
                             .dout = dout->data,
                             .out = out->data,
                             .lse = lse->data,
                             .sinks = sinks->data,
                             .dtype = out->dtype,
                             .batch = out->shape[0],
                             .heads = out->shape[1],
                             .sq = out->shape[2],
                             .dim = out->shape[3]};
    set_strides(p.dout_stride, dout);
    set_strides(p.out_stride, out);
    return xt_backend_of(out)->attention_sinks_bwd(&p);
}

static XtStatus forward(XtCall *c) {
    XtTensor *q = NULL, *k = NULL, *v = NULL, *out = NULL, *lse = NULL, *documents = NULL, *sinks = NULL;
    XtStatus status = XT_OK;
    XT_TRY(check(c));
    XT_TRY(dense_last(c->arg[0].tensor, &q));
    XT_TRY(dense_last(c->arg[1].tensor, &k));
    XT_TRY(dense_last(c->arg[2].tensor, &v));
    if (c->arg[7].tensor) XT_TRY(xt_dense(c->arg[7].tensor, &documents));
    if (c->arg[9].tensor) XT_TRY(xt_dense(c->arg[9].tensor, &sinks));
    XT_TRY(empty_token_major(q, q->shape, &out));
    XT_TRY(xt_empty_shape(q, xt_dtype_accumulator(q->dtype), 3, q->shape, &lse));
    XtAttentionFwd p = {.out = out->data,
                        .lse = lse->data,
                        .q = q->data,
                        .k = k->data,
                        .v = v->data,
                        .documents = documents ? documents->data : NULL,
                        .dtype = q->dtype,
                        .batch = q->shape[0],
                        .heads = q->shape[1],
                        .kv_heads = k->shape[1],
                        .sq = q->shape[2],
                        .skv = k->shape[2],
                        .dim = q->shape[3],
                        .window = window_of(&c->arg[8], k),
                        .scale = scale_of(&c->arg[4], q->shape[3]),
                        .softcap = softcap_of(&c->arg[10]),
                        .causal = c->arg[3].b,
                        .tf32 = xt_tf32()};
    set_strides(p.out_stride, out);
    set_strides(p.q_stride, q);
    set_strides(p.k_stride, k);
    set_strides(p.v_stride, v);
    XT_TRY(xt_attention_fwd(q->storage->device, c->arg[6].given ? c->arg[6].s : NULL, &p));
    if (sinks) XT_TRY(add_sinks(sinks, out, lse));
    XT_TRY(xt_save(c, q));
    XT_TRY(xt_save(c, k));
    XT_TRY(xt_save(c, v));
    XT_TRY(xt_save(c, out));
    XT_TRY(xt_save(c, lse));
    XT_TRY(xt_save(c, documents));
    XT_TRY(xt_save(c, sinks));
    c->out[c->out_count++] = out;
    out = NULL;
done:
    xt_tensor_release(q);
    xt_tensor_release(k);
    xt_tensor_release(v);
    xt_tensor_release(out);
    xt_tensor_release(lse);
    xt_tensor_release(documents);
    xt_tensor_release(sinks);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *saved[7], *dy = NULL;
    const XtArg *arg = xt_node_args(n);
    XtStatus status = XT_OK;
    for (int i = 0; i < 7; i++) XT_TRY(xt_node_saved(n, i, &saved[i]));
    XtTensor *q = saved[0], *k = saved[1], *v = saved[2], *out = saved[3], *lse = saved[4];
    XT_TRY(dense_last(dout[0], &dy));
    XT_TRY(empty_gradients(saved, din));
    XtAttentionBwd p = {.dq = din[0]->data,
                        .dk = din[1]->data,
                        .dv = din[2]->data,
                        .dout = dy->data,
                        .q = q->data,
                        .k = k->data,
                        .v = v->data,
                        .out = out->data,
                        .lse = lse->data,
                        .documents = saved[5] ? saved[5]->data : NULL,
                        .dtype = q->dtype,
                        .batch = q->shape[0],
                        .heads = q->shape[1],
                        .kv_heads = k->shape[1],
                        .sq = q->shape[2],
                        .skv = k->shape[2],
                        .dim = q->shape[3],
                        .window = window_of(&arg[8], k),
                        .scale = scale_of(&arg[4], q->shape[3]),
                        .softcap = softcap_of(&arg[10]),
                        .causal = arg[3].b,
                        .tf32 = xt_tf32()};
    set_strides(p.dq_stride, din[0]);
    set_strides(p.dk_stride, din[1]);
    set_strides(p.dv_stride, din[2]);
    set_strides(p.dout_stride, dy);
    set_strides(p.q_stride, q);
    set_strides(p.k_stride, k);
    set_strides(p.v_stride, v);
    set_strides(p.out_stride, out);
    XT_TRY(xt_attention_bwd(q->storage->device, arg[6].given ? arg[6].s : NULL, &p));
    if (saved[6] && xt_node_needs(n, 4)) XT_TRY(sinks_gradient(saved[6], dy, out, lse, &din[4]));
done:
    xt_tensor_release(dy);
    return status;
}

const XtOp xt_op_scaled_dot_product_attention = {
    .name = "scaled_dot_product_attention",
    .signature =
        "query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, scale: float? = None, enable_gqa: bool = False, "
        "backend: str? = None, documents: Tensor? = None, window: int? = None, sinks: Tensor? = None, "
        "softcap: float? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "softmax(scale * query @ key^T) @ value per head. query [B, H, S, D], key and value [B, K, T, D]; scale defaults to "
           "1/sqrt(D).\n"
           "is_causal: query i sees keys j <= i + (T - S). backend: a name of attention_backends(device).\n"
           "documents: int32 [B, 2, S], for each token the first of its document and the one behind its last: it sees no other\n"
           "document. window, with is_causal: a query sees this many keys, itself included.\n"
           "sinks [H], of query's dtype: one more logit of each head in the denominator. softcap: a score s is\n"
           "softcap * tanh(s / softcap).",
};
