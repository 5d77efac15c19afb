/* sample.c - draws a token from each row of logits. No gradient. */
#include "contract/layers.h"
#include "core/draw.h"
#include "ops/ops.h"

static XtStatus check(const XtCall *c) {
    const XtTensor *x = c->arg[0].tensor, *random = c->arg[1].tensor;
    const double temperature = c->arg[2].f, top_p = c->arg[4].given ? c->arg[4].f : 1.0;
    XT_CHECK(xt_check_float(c->op, "logits", x));
    XT_CHECK(xt_check_ndim(c->op, "logits", x, 2, 2));
    if (x->shape[1] < 1 || x->shape[1] > XT_DRAW_MOST)
        return xt_error(XT_VALUE_ERROR, "sample: logits must have 1 to %d columns, got %lld", XT_DRAW_MOST, (long long)x->shape[1]);
    XT_CHECK(xt_check_dtype(c->op, "random", random, XT_INT64));
    XT_CHECK(xt_check_shape(c->op, "random", random, 1, (int64_t[]){2}));
    XT_CHECK(xt_check_device(c->op, "logits", x, "random", random));
    if (!(temperature >= 0.0 && temperature - temperature == 0.0))
        return xt_error(XT_VALUE_ERROR, "sample: temperature must be at least 0 and finite, got %g", temperature);
    if (c->arg[3].given && c->arg[3].i < 1)
        return xt_error(XT_VALUE_ERROR, "sample: top_k must be at least 1, got %lld", (long long)c->arg[3].i);
    if (!(top_p > 0.0 && top_p <= 1.0)) return xt_error(XT_VALUE_ERROR, "sample: top_p must be in (0, 1], got %g", top_p);
    return XT_OK;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = NULL, *random = NULL;
    XtStatus status = XT_OK;
    XT_TRY(check(c));
    XT_TRY(xt_dense(c->arg[0].tensor, &x));
    XT_TRY(xt_dense(c->arg[1].tensor, &random));
    XT_TRY(xt_empty_shape(x, XT_INT64, 1, x->shape, &c->out[0]));
    c->out_count = 1;
    XtSample p = {.out = c->out[0]->data,
                  .x = x->data,
                  .random = random->data,
                  .dtype = x->dtype,
                  .rows = x->shape[0],
                  .vocab = x->shape[1],
                  .top_k = c->arg[3].given && c->arg[3].i < x->shape[1] ? c->arg[3].i : x->shape[1],
                  .temperature = c->arg[2].f,
                  .top_p = c->arg[4].given ? c->arg[4].f : 1.0};
    XT_TRY(xt_backend_of(x)->sample(&p));
done:
    xt_tensor_release(x);
    xt_tensor_release(random);
    return status;
}

const XtOp xt_op_sample = {
    .name = "sample",
    .signature = "logits: Tensor, random: Tensor, temperature: float = 1.0, top_k: int? = None, top_p: float? = None -> Tensor",
    .forward = forward,
    .doc = "A token drawn from each row of logits [B, V]: int64 [B]; -1 for a row with a NaN or whose largest is not finite.\n"
           "random: int64 [2], seed and step of Philox4x32-10; the same tokens on every device. temperature 0: the most likely.",
};
