/* advance.c - the end of a step of generation, in one launch: its tokens are fed and kept, positions and counts go on. No gradient. */
#include "contract/layers.h"
#include "ops/ops.h"

static const char *const NAMES[] = {"ids", "state", "made", "tokens"};

static XtStatus check(const XtCall *c) {
    const XtTensor *tokens = c->arg[3].tensor, *made = c->arg[2].tensor;
    XT_CHECK(xt_check_ndim(c->op, "tokens", tokens, 1, 1));
    XT_CHECK(xt_check_ndim(c->op, "made", made, 2, 2));
    const int64_t rows = tokens->shape[0], shapes[][2] = {{rows, 1}, {rows + 3}, {made->shape[0], rows}, {rows}};
    for (int i = 0; i < 4; i++) {
        const XtTensor *t = c->arg[i].tensor;
        XT_CHECK(xt_check_dtype(c->op, NAMES[i], t, XT_INT64));
        XT_CHECK(xt_check_shape(c->op, NAMES[i], t, i % 2 ? 1 : 2, shapes[i]));
        XT_CHECK(xt_check_device(c->op, "tokens", tokens, NAMES[i], t));
        if (i < 3 && !xt_view_is_contiguous(&t->view))
            return xt_error(XT_VALUE_ERROR, "advance_: %s must be contiguous, got strides of a view", NAMES[i]);
    }
    return XT_OK;
}

static XtStatus forward(XtCall *c) {
    XtTensor *ids = c->arg[0].tensor, *state = c->arg[1].tensor, *made = c->arg[2].tensor, *tokens = NULL;
    XtStatus status = XT_OK;
    XT_TRY(check(c));
    XT_TRY(xt_dense(c->arg[3].tensor, &tokens));
    const XtTensor *const all[] = {ids, state, made, tokens};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++)
            if (xt_share_memory(all[i], all[j]))
                XT_TRY(xt_error(XT_VALUE_ERROR, "advance_: %s must not overlap %s, got common memory", NAMES[i], NAMES[j]));
    for (int i = 0; i < 3; i++) XT_TRY(xt_begin_inplace(c->arg[i].tensor, c->op->name));
    XtAdvance p = {.ids = ids->data,
                   .state = state->data,
                   .made = made->data,
                   .tokens = tokens->data,
                   .rows = tokens->shape[0],
                   .slots = made->shape[0]};
    XT_TRY(xt_backend_of(tokens)->advance(&p));
done:
    xt_tensor_release(tokens);
    return status;
}

const XtOp xt_op_advance_ = {
    .name = "advance_",
    .signature = "ids: Tensor, state: Tensor, made: Tensor, tokens: Tensor -> None",
    .forward = forward,
    .doc = "The end of a step of generation that drew tokens [B], in place, all int64: ids [B, 1] become the tokens, 0 for a\n"
           "negative one; row `slot` of made [N, B] the tokens as they are. state [B + 3] has positions [B], seed, step and slot:\n"
           "positions and step go up by one, slot to the next of [0, N), and to 0 from the last. A slot outside keeps nothing,\n"
           "and goes to 0. None of them may overlap another.",
};
