/* decoder_step.c - all layers of a decoder for one new token a row, over keys and values that are kept. No gradient.
 *
 * One kernel does what a step would launch hundreds for. Positions lie on the device, so the same call serves each step of a captured
 * graph. Formulas: contract/layers.h.
 */
#include "contract/layers.h"
#include "ops/ops.h"

#include <math.h>
#include <stdlib.h>

enum { X, POSITIONS, WEIGHTS, CACHES, EPS, THETA, SCALING, PLAIN = SCALING + 4, LAST_NORM, HEAD }; /* arguments */
enum { NORM, Q, K, V, Q_NORM, K_NORM, O, MLP_NORM, GATE, UP, DOWN, PER_LAYER };                    /* weights of a layer */
static const char *const NAMES[PER_LAYER] = {"norm", "q", "k", "v", "q_norm", "k_norm", "o", "mlp_norm", "gate", "up", "down"};

/* Where weight `which` stands among those of a layer: without norms of queries and keys those behind move up. */
static int place_of(int which, bool qk_norm) { return which - (!qk_norm && which > Q_NORM ? 2 : 0); }

typedef struct Sizes {
    int64_t layers, batch, channels, heads, kv_heads, dim, inner, length, vocab;
    bool qk_norm;
} Sizes;

static XtStatus check_unrecorded(const char *name, const XtTensor *t) {
    if (!xt_grad_mode() || !xt_requires_grad(t)) return XT_OK;
    return xt_error(XT_RUNTIME_ERROR, "decoder_step: %s must not require a gradient while recording: use no_grad()", name);
}

static XtStatus check_one(const XtCall *c, const char *name, const XtTensor *t, int ndim, const int64_t *shape) {
    XT_CHECK(xt_check_like(c->op, "x", c->arg[X].tensor, name, t));
    XT_CHECK(xt_check_shape(c->op, name, t, ndim, shape));
    if (!xt_view_is_contiguous(&t->view))
        return xt_error(XT_VALUE_ERROR, "decoder_step: %s must be contiguous, got strides of a view", name);
    return check_unrecorded(name, t);
}

static XtRopeBase rope_base(const XtArg *arg) {
    const XtArg *scale = arg + SCALING;
    return (XtRopeBase){arg[THETA].f, scale[0].f, scale[1].f, scale[2].f, scale[3].f};
}

static XtStatus check(const XtCall *c, Sizes *s) {
    const XtTensor *x = c->arg[X].tensor, *positions = c->arg[POSITIONS].tensor;
    XtTensor *const *weights = c->arg[WEIGHTS].tensors, *const *caches = c->arg[CACHES].tensors;
    const int count = c->arg[WEIGHTS].count, kept = c->arg[CACHES].count;
    XT_CHECK(xt_check_float(c->op, "x", x));
    XT_CHECK(xt_check_ndim(c->op, "x", x, 2, 2));
    XT_CHECK(check_unrecorded("x", x));
    if (kept < 2 || kept % 2)
        return xt_error(XT_VALUE_ERROR, "decoder_step: caches must hold keys and values of each layer, got %d tensors", kept);
    s->layers = kept / 2;
    s->qk_norm = count == s->layers * PER_LAYER;
    if (!s->qk_norm && count != s->layers * (PER_LAYER - 2))
        return xt_error(XT_VALUE_ERROR,
                        "decoder_step: weights must hold 11 tensors a layer, or 9 without q_norm and k_norm, of %d layers, "
                        "got %d",
                        (int)s->layers, count);
    XT_CHECK(xt_check_ndim(c->op, "keys", caches[0], 4, 4));
    XT_CHECK(xt_check_ndim(c->op, "q", weights[Q], 2, 2));
    XT_CHECK(xt_check_ndim(c->op, "gate", weights[place_of(GATE, s->qk_norm)], 2, 2));
    s->batch = x->shape[0], s->channels = x->shape[1];
    s->kv_heads = caches[0]->shape[1], s->length = caches[0]->shape[2], s->dim = caches[0]->shape[3];
    if (s->dim < 2 || s->dim % 2 || s->kv_heads < 1)
        return xt_error(XT_VALUE_ERROR, "decoder_step: keys must have at least one head and an even last dim, got shape %s",
                        xt_shape_text(4, caches[0]->shape));
    s->heads = weights[Q]->shape[0] / s->dim, s->inner = weights[place_of(GATE, s->qk_norm)]->shape[0];
    if (s->heads % s->kv_heads)
        return xt_error(XT_VALUE_ERROR, "decoder_step: query heads must be a multiple of key heads, got %lld and %lld",
                        (long long)s->heads, (long long)s->kv_heads);
    const int64_t channels = s->channels, queries = s->heads * s->dim, keys = s->kv_heads * s->dim, inner = s->inner;
    const int64_t shapes[PER_LAYER][2] = {
        {channels},          {queries, channels}, {keys, channels},  {keys, channels},  {s->dim},         {s->dim},
        {channels, queries}, {channels},          {inner, channels}, {inner, channels}, {channels, inner}};
    const int64_t kept_shape[4] = {s->batch, s->kv_heads, s->length, s->dim};
    for (int64_t l = 0; l < s->layers; l++) {
        XtTensor *const *layer = weights + l * (count / s->layers);
        for (int i = 0; i < PER_LAYER; i++)
            if (s->qk_norm || (i != Q_NORM && i != K_NORM))
                XT_CHECK(check_one(c, NAMES[i], layer[place_of(i, s->qk_norm)],
                                   i == NORM || i == Q_NORM || i == K_NORM || i == MLP_NORM ? 1 : 2, shapes[i]));
        XT_CHECK(check_one(c, "keys", caches[2 * l], 4, kept_shape));
        XT_CHECK(check_one(c, "values", caches[2 * l + 1], 4, kept_shape));
    }
    const XtTensor *last_norm = c->arg[LAST_NORM].tensor, *head = c->arg[HEAD].tensor;
    if (!last_norm != !head)
        return xt_error(XT_VALUE_ERROR, "decoder_step: last_norm and head must be given together, got %s alone",
                        head ? "head" : "last_norm");
    if (head) {
        XT_CHECK(check_one(c, "last_norm", last_norm, 1, &channels));
        XT_CHECK(xt_check_ndim(c->op, "head", head, 2, 2));
        s->vocab = head->shape[0];
        XT_CHECK(check_one(c, "head", head, 2, (const int64_t[]){s->vocab, channels}));
    }
    if (!(c->arg[EPS].f >= 0.0)) return xt_error(XT_VALUE_ERROR, "decoder_step: eps must be at least 0, got %g", c->arg[EPS].f);
    const XtRopeBase base = rope_base(c->arg);
    XT_CHECK(xt_check_rope_base(c->op, &base));
    XT_CHECK(xt_check_dtype(c->op, "positions", positions, XT_INT64));
    XT_CHECK(xt_check_shape(c->op, "positions", positions, 1, &s->batch));
    return xt_check_device(c->op, "x", x, "positions", positions);
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = NULL, *positions = NULL, *const *weights = c->arg[WEIGHTS].tensors, *const *caches = c->arg[CACHES].tensors;
    XtDecoderLayer *layers = NULL;
    XtStatus status = XT_OK;
    Sizes s = {0};
    XT_TRY(check(c, &s));
    XT_TRY(xt_dense(c->arg[X].tensor, &x));
    XT_TRY(xt_dense(c->arg[POSITIONS].tensor, &positions));
    for (int i = 0; i < c->arg[CACHES].count; i++) XT_TRY(xt_begin_inplace(caches[i], c->op->name));
    const XtTensor *last_norm = c->arg[LAST_NORM].tensor, *head = c->arg[HEAD].tensor;
    XT_TRY(xt_empty_shape(x, x->dtype, 2, (const int64_t[]){s.batch, head ? s.vocab : s.channels}, &c->out[0]));
    c->out_count = 1;
    layers = malloc((size_t)s.layers * sizeof *layers);
    if (!layers) {
        status = xt_error(XT_OUT_OF_MEMORY, "decoder_step: a list of %lld layers could not be allocated", (long long)s.layers);
        goto done;
    }
    for (int64_t l = 0; l < s.layers; l++) {
        XtTensor *const *w = weights + l * (c->arg[WEIGHTS].count / s.layers);
        const int moved = s.qk_norm ? 0 : 2;
        layers[l] = (XtDecoderLayer){.norm = w[NORM]->data,
                                     .q = w[Q]->data,
                                     .k = w[K]->data,
                                     .v = w[V]->data,
                                     .q_norm = s.qk_norm ? w[Q_NORM]->data : NULL,
                                     .k_norm = s.qk_norm ? w[K_NORM]->data : NULL,
                                     .o = w[O - moved]->data,
                                     .mlp_norm = w[MLP_NORM - moved]->data,
                                     .gate = w[GATE - moved]->data,
                                     .up = w[UP - moved]->data,
                                     .down = w[DOWN - moved]->data,
                                     .keys = caches[2 * l]->data,
                                     .values = caches[2 * l + 1]->data};
    }
    XtDecoderStep p = {.out = c->out[0]->data,
                       .x = x->data,
                       .positions = positions->data,
                       .layer = layers,
                       .last_norm = head ? last_norm->data : NULL,
                       .head = head ? head->data : NULL,
                       .dtype = x->dtype,
                       .layers = s.layers,
                       .batch = s.batch,
                       .channels = s.channels,
                       .heads = s.heads,
                       .kv_heads = s.kv_heads,
                       .dim = s.dim,
                       .inner = s.inner,
                       .length = s.length,
                       .vocab = s.vocab,
                       .eps = c->arg[EPS].f,
                       .scale = 1.0 / sqrt((double)s.dim),
                       .base = rope_base(c->arg),
                       .plain = c->arg[PLAIN].b};
    XT_TRY(xt_backend_of(x)->decoder_step(&p));
done:
    free(layers);
    xt_tensor_release(x);
    xt_tensor_release(positions);
    return status;
}

const XtOp xt_op_decoder_step = {
    .name = "decoder_step",
    .signature = "x: Tensor, positions: Tensor, weights: Tensors, caches: Tensors, eps: float = 1e-6, theta: float = "
                 "10000.0, " XT_ROPE_SCALING ", plain: bool = True, last_norm: Tensor? = None, head: Tensor? = None -> Tensor",
    .forward = forward,
    .doc =
        "All layers of a pre-norm decoder (RMSNorm, RoPE, grouped queries, SwiGLU) for one new token a row: x [B, C] -> [B, C].\n"
        "positions [B] (int64): where each row stands. weights, for each layer in order: norm [C], q [H D, C], k and v [K D, C],\n"
        "q_norm and k_norm [D] (in all layers or none), o [C, H D], mlp_norm [C], gate and up [F, C], down [C, F]. caches, for "
        "each\n"
        "layer: keys and values [B, K, L, D], where the new ones are stored in place. A row outside [0, L) becomes NaN and stores\n"
        "nothing. last_norm [C] and head [V, C]: the logits [B, V] of what the layers give, instead. Rounded as the ops of its "
        "parts\n"
        "one after the other. plain: the kernels of its parts, one after the other; else one launch, where a GPU has it.",
};
