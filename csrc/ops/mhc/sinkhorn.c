/* sinkhorn.c - matrices of logits to nearly doubly stochastic ones, by a fixed number of normalisations (Sinkhorn & Knopp 1967).
 *
 *   form P   A = exp(Z - column maxima); iters times: A /= column sums + eps, A /= row sums + eps   (Xie et al. 2025, eq. 9)
 *   form D   A = softmax(rows of Z) + eps; A /= column sums + eps; iters - 1 times: rows, columns    (DeepSeek's kernels)
 *
 * The gradient is that of these steps, computed from the logits alone: contract/mhc.h, XtSinkhornBwd. `transpose` returns A^T.
 */
#include "contract/mhc.h"
#include "mhc.h"

#include <string.h>

XtStatus xt_sinkhorn_options(const XtOp *op, const XtArg *args, XtSinkhornOptions *out) {
    *out = (XtSinkhornOptions){.iters = args[0].i, .eps = args[1].f, .form = XT_SINKHORN_P, .transpose = args[3].b};
    if (out->iters < 1) return xt_error(XT_VALUE_ERROR, "%s: iters must be at least 1, got %lld", op->name, (long long)out->iters);
    if (out->iters > 100000)
        return xt_error(XT_VALUE_ERROR, "%s: iters must be at most 100000, got %lld", op->name, (long long)out->iters);
    if (!(out->eps >= 0.0 && out->eps <= 1.0))
        return xt_error(XT_VALUE_ERROR, "%s: eps must be in [0, 1], got %g", op->name, out->eps);
    if (!strcmp(args[2].s, "D")) out->form = XT_SINKHORN_D;
    else if (strcmp(args[2].s, "P")) return xt_error(XT_VALUE_ERROR, "%s: form must be 'P' or 'D', got '%s'", op->name, args[2].s);
    return XT_OK;
}

XtStatus xt_sinkhorn(const XtTensor *logits, const XtSinkhornOptions *options, XtTensor **out) {
    XT_CHECK(xt_empty_like(logits, out));
    XtSinkhornFwd p = {.out = (*out)->data,
                       .logits = logits->data,
                       .dtype = logits->dtype,
                       .tokens = xt_matrices(logits),
                       .streams = logits->shape[logits->ndim - 1],
                       .iters = options->iters,
                       .eps = options->eps,
                       .form = options->form,
                       .transpose = options->transpose};
    return xt_backend_of(logits)->sinkhorn_fwd(&p);
}

XtStatus xt_sinkhorn_gradient(const XtTensor *logits, const XtTensor *dout, const XtSinkhornOptions *options, XtTensor **dlogits) {
    XT_CHECK(xt_empty_like(logits, dlogits));
    XtSinkhornBwd p = {.dlogits = (*dlogits)->data,
                       .dout = dout->data,
                       .logits = logits->data,
                       .dtype = logits->dtype,
                       .tokens = xt_matrices(logits),
                       .streams = logits->shape[logits->ndim - 1],
                       .iters = options->iters,
                       .eps = options->eps,
                       .form = options->form,
                       .transpose = options->transpose};
    return xt_backend_of(logits)->sinkhorn_bwd(&p);
}

static XtStatus forward(XtCall *c) {
    XtTensor *given = c->arg[0].tensor, *logits = NULL;
    XtSinkhornOptions options;
    XtStatus status = XT_OK;
    if (given->dtype != XT_FLOAT32 && given->dtype != XT_FLOAT64)
        return xt_error(XT_TYPE_ERROR, "sinkhorn: logits must have dtype float32 or float64, got %s", xt_dtype_name(given->dtype));
    XT_TRY(xt_check_ndim(c->op, "logits", given, 2, XT_MAX_DIMS));
    int64_t n = given->shape[given->ndim - 1];
    if (given->shape[given->ndim - 2] != n)
        return xt_error(XT_VALUE_ERROR, "sinkhorn: logits must be square matrices, got shape %s",
                        xt_shape_text(given->ndim, given->shape));
    XT_TRY(xt_check_streams(c->op, "logits", given, n));
    XT_TRY(xt_sinkhorn_options(c->op, c->arg + 1, &options));
    XT_TRY(xt_dense(given, &logits));
    c->out_count = 1;
    XT_TRY(xt_sinkhorn(logits, &options, &c->out[0]));
    XT_TRY(xt_save(c, logits));
done:
    xt_tensor_release(logits);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *logits, *d = NULL;
    XtSinkhornOptions options;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &logits));
    XT_TRY(xt_dense(dout[0], &d));
    XT_TRY(xt_sinkhorn_options(xt_node_op(n), xt_node_args(n) + 1, &options));
    XT_TRY(xt_sinkhorn_gradient(logits, d, &options, &din[0]));
done:
    xt_tensor_release(d);
    return status;
}

const XtOp xt_op_sinkhorn = {
    .name = "sinkhorn",
    .signature = "logits: Tensor, *, iters: int = 20, eps: float = 1e-6, form: str = 'P', transpose: bool = False -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc =
        "Nearly doubly stochastic matrices of logits [.., n, n], n in 1..8, float32 or float64. form 'P' normalises columns first\n"
        "and rows last, 'D' rows first and columns last; transpose returns the transposes. See functional.sinkhorn.",
};
