/* dropout.c - input * mask / (1 - p) (Srivastava et al. 2014). Nothing of the mask is kept but the generator: dinput is dout through the
 * same kernel.
 *
 * The generator is `key`, a seed and the number of a fill; or the next one of the process; or `random`, a seed and a number on the device,
 * which a captured graph reads at each replay, its number counted up by `offset`.
 */
#include "contract/layers.h"
#include "ops/ops.h"

static XtStatus run(XtTensor *x, const XtTensor *random, const XtTensor *key, uint64_t offset, double p, XtTensor **out) {
    XtDropout k = {.x = x->data, .dtype = x->dtype, .count = xt_view_numel(&x->view), .p = p};
    if (random) {
        k.random = random->data;
        k.philox.stream = offset;
    } else {
        const int64_t *words = key->data;
        k.philox = (XtPhilox){(uint64_t)words[0], (uint64_t)words[1]};
    }
    XT_CHECK(xt_empty_like(x, out));
    k.out = (*out)->data;
    return xt_or_release(xt_backend_of(x)->dropout(&k), out);
}

static XtStatus check(const XtCall *c) {
    const XtTensor *x = c->arg[0].tensor, *random = c->arg[3].tensor;
    const XtArg *key = &c->arg[2];
    double p = c->arg[1].f;
    XT_CHECK(xt_check_float(c->op, "input", x));
    if (!(p >= 0.0 && p <= 1.0)) return xt_error(XT_VALUE_ERROR, "dropout: p must be in [0, 1], got %g", p);
    if (key->given && key->count != 2)
        return xt_error(XT_VALUE_ERROR, "dropout: key must be a seed and the number of a fill, got %d numbers", key->count);
    if (!random) return XT_OK;
    if (key->given) return xt_error(XT_VALUE_ERROR, "dropout: key must be left out with random, got %d numbers", key->count);
    XT_CHECK(xt_check_dtype(c->op, "random", random, XT_INT64));
    XT_CHECK(xt_check_shape(c->op, "random", random, 1, (int64_t[]){2}));
    if (c->arg[4].i < 0) return xt_error(XT_VALUE_ERROR, "dropout: offset must be at least 0, got %lld", (long long)c->arg[4].i);
    return xt_check_device(c->op, "input", x, "random", random);
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = NULL, *key = NULL, *random = NULL;
    XtStatus status = XT_OK;
    XT_TRY(check(c));
    XT_TRY(xt_dense(c->arg[0].tensor, &x));
    if (c->arg[3].tensor) {
        XT_TRY(xt_dense(c->arg[3].tensor, &random));
    } else {
        const XtArg *given = &c->arg[2];
        XT_TRY(xt_tensor_empty((XtDevice){XT_CPU, 0}, XT_INT64, 1, (int64_t[]){2}, &key));
        XtPhilox drawn = given->given ? (XtPhilox){(uint64_t)given->ints[0], (uint64_t)given->ints[1]} : xt_random_next();
        ((int64_t *)key->data)[0] = (int64_t)drawn.seed;
        ((int64_t *)key->data)[1] = (int64_t)drawn.stream;
    }
    XT_TRY(run(x, random, key, (uint64_t)c->arg[4].i, c->arg[1].f, &c->out[0]));
    c->out_count = 1;
    XT_TRY(xt_save(c, random));
    XT_TRY(xt_save(c, key));
done:
    xt_tensor_release(x);
    xt_tensor_release(key);
    xt_tensor_release(random);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *random, *key, *dy = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &random));
    XT_TRY(xt_node_saved(n, 1, &key));
    XT_TRY(xt_dense(dout[0], &dy));
    XT_TRY(run(dy, random, key, (uint64_t)xt_node_args(n)[4].i, xt_node_args(n)[1].f, &din[0]));
done:
    xt_tensor_release(dy);
    return status;
}

const XtOp xt_op_dropout = {
    .name = "dropout",
    .signature = "input: Tensor, p: float = 0.5, *, key: ints? = None, random: Tensor? = None, offset: int = 0 -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc =
        "input * mask / (1 - p), mask 0 with probability p: element i where number i of uniform() with the same generator is below "
        "p.\n"
        "key: seed and number of the fill; None draws the next of the process. random: int64 [2], seed and number on the device, "
        "offset\nadded to the number, which a captured graph reads when it is replayed.",
};
