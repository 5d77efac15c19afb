/* rope.c - rotary position embedding (Su et al. 2021), half-split form.
 *
 *   a = x[..., :D/2], b = x[..., D/2:], angle_i = position * theta^(-2i/D):    y = (a cos - b sin, b cos + a sin)
 *
 * The map is a rotation, so the backward is the same kernel turned by -angle. x [rows, H, D] or [B, S, H, D]; the position of a row is
 * its index in its own sequence: row % period, where the period is S (all rows for a 3-D x) unless given, or positions[row].
 * The backward does not read x. It is saved to compute y again, and where it is columns of a product: dx is then made as columns, too,
 * which split() need not copy. Other views are not kept.
 */
#include "contract/layers.h"
#include "ops/ops.h"

#include <string.h>

XtStatus xt_even_rows(XtTensor *x, XtTensor **out, int64_t stride[2]) {
    int d = x->ndim - 1;
    bool even = (x->strides[d] == 1 || x->shape[d] <= 1) &&
                (x->ndim == 3 || x->shape[0] <= 1 || x->strides[0] == x->shape[1] * x->strides[1]);
    XT_CHECK(even ? xt_share(x, out) : xt_copy_of(x, out));
    stride[0] = (*out)->strides[d - 2];
    stride[1] = (*out)->strides[d - 1];
    return XT_OK;
}

/* out is new: dense, or columns as `like` is, if that is given. */
static XtStatus rotate(XtTensor *given, const XtTensor *positions, int64_t period, XtRopeBase base, bool inverse, XtTensor *like,
                       XtTensor **out) {
    XtTensor *x = NULL;
    XtStatus status = XT_OK;
    XtRope p = {.positions = xt_data(positions), .dtype = given->dtype, .period = period, .base = base, .inverse = inverse};
    int d = given->ndim - 1;
    XT_TRY(xt_even_rows(given, &x, p.x_stride));
    if (like) XT_TRY(xt_empty_like_columns(1, &like, out));
    else XT_TRY(xt_empty_like(x, out));
    p.out = (*out)->data;
    p.x = x->data;
    p.rows = given->ndim == 4 ? given->shape[0] * given->shape[1] : given->shape[0];
    p.heads = given->shape[d - 1];
    p.dim = given->shape[d];
    p.out_stride[0] = (*out)->strides[d - 2];
    p.out_stride[1] = (*out)->strides[d - 1];
    status = xt_backend_of(x)->rope(&p);
    if (status != XT_OK) xt_tensor_release(*out), *out = NULL;
done:
    xt_tensor_release(x);
    return status;
}

/* positions as one dense int64 per row; [S] serves every sequence of a 4-D x. */
static XtStatus row_positions(const XtOp *op, const char *arg_x, const XtTensor *x, XtTensor *given, XtTensor **out) {
    XtTensor *wide = NULL;
    XtStatus status = XT_OK;
    if (given->dtype != XT_INT64 && given->dtype != XT_INT32)
        return xt_error(XT_TYPE_ERROR, "%s: positions must be int64 or int32, got %s", op->name, xt_dtype_name(given->dtype));
    XT_TRY(xt_check_device(op, arg_x, x, "positions", given));
    int64_t rows = x->ndim == 4 ? x->shape[0] * x->shape[1] : x->shape[0], n = xt_view_numel(&given->view);
    bool per_sequence = x->ndim == 4 && given->ndim == 1 && n == x->shape[1];
    bool per_row = (given->ndim == 1 && n == rows) ||
                   (x->ndim == 4 && given->ndim == 2 && given->shape[0] == x->shape[0] && given->shape[1] == x->shape[1]);
    if (!per_sequence && !per_row)
        return xt_error(XT_VALUE_ERROR, "%s: positions must have one entry per row of %s, shape (%lld,)%s, got %s", op->name, arg_x,
                        (long long)rows, x->ndim == 4 ? ", (B, S) or (S,)" : "", xt_shape_text(given->ndim, given->shape));
    if (per_row) {
        status = xt_cast(given, XT_INT64, out);
    } else {
        XtView view = xt_broadcast_view(given, 2, x->shape);
        XT_TRY(xt_tensor_from_view(given->storage, &view, &wide));
        status = xt_cast(wide, XT_INT64, out);
    }
done:
    xt_tensor_release(wide);
    return status;
}

XtStatus xt_check_rope_base(const XtOp *op, const XtRopeBase *base) {
    const char *name = op->name;
    if (!(base->theta > 0.0)) return xt_error(XT_VALUE_ERROR, "%s: theta must be positive, got %g", name, base->theta);
    if (!(base->factor > 0.0)) return xt_error(XT_VALUE_ERROR, "%s: factor must be positive, got %g", name, base->factor);
    if (base->theta < XT_ROPE_LEAST) return xt_error(XT_VALUE_ERROR, "%s: theta must be at least 1e-9, got %g", name, base->theta);
    if (base->factor < XT_ROPE_LEAST)
        return xt_error(XT_VALUE_ERROR, "%s: factor must be at least 1e-9, got %g", name, base->factor);
    if (!(base->original_length >= 0.0))
        return xt_error(XT_VALUE_ERROR, "%s: original_length must be at least 0, got %g", name, base->original_length);
    if (base->original_length > 0.0 && !(0.0 < base->low_freq_factor && base->low_freq_factor < base->high_freq_factor))
        return xt_error(XT_VALUE_ERROR, "%s: low_freq_factor must be positive and below high_freq_factor %g, got %g", name,
                        base->high_freq_factor, base->low_freq_factor);
    return XT_OK;
}

XtStatus xt_rope_places(const XtCall *c, int first, const char *arg_x, const XtTensor *x, XtTensor **positions, int64_t *period) {
    const XtArg *given = &c->arg[first + 1], *turn = &c->arg[first + 2];
    const XtRopeBase base = xt_rope_base(c->arg, first);
    const char *op = c->op->name;
    XT_CHECK(xt_check_rope_base(c->op, &base));
    if (given->given && turn->given) return xt_error(XT_VALUE_ERROR, "%s: give positions or period, not both", op);
    if (turn->given && turn->i < 1)
        return xt_error(XT_VALUE_ERROR, "%s: period must be at least 1, got %lld", op, (long long)turn->i);
    if (given->given) XT_CHECK(row_positions(c->op, arg_x, x, given->tensor, positions));
    *period = xt_rope_period(c->arg, first, x);
    return XT_OK;
}

XtRopeBase xt_rope_base(const XtArg *arg, int first) {
    const XtArg *scale = &arg[first + 3];
    return (XtRopeBase){arg[first].f, scale[0].f, scale[1].f, scale[2].f, scale[3].f};
}

int64_t xt_rope_period(const XtArg *arg, int first, const XtTensor *x) {
    const XtArg *turn = &arg[first + 2];
    int64_t period = turn->given ? turn->i : x->ndim == 4 ? x->shape[1] : x->shape[0];
    return period > 0 ? period : 1;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *positions = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_float(c->op, "x", x));
    XT_TRY(xt_check_ndim(c->op, "x", x, 3, 4));
    int64_t dim = x->shape[x->ndim - 1], period;
    if (dim % 2)
        return xt_error(XT_VALUE_ERROR, "rope: the last dim of x must be even, got shape %s", xt_shape_text(x->ndim, x->shape));
    XT_TRY(xt_rope_places(c, 1, "x", x, &positions, &period));
    XT_TRY(rotate(x, positions, period, xt_rope_base(c->arg, 1), false, NULL, &c->out[0]));
    c->out_count = 1;
    XT_TRY(xt_save(c, positions));
    XT_TRY(xt_save(c, c->recomputed || xt_is_columns(x) ? x : NULL));
done:
    xt_tensor_release(positions);
    return status;
}

static XtStatus recompute(XtNode *n, XtTensor **out) {
    const XtArg *arg = xt_node_args(n);
    XtTensor *positions, *x;
    XT_CHECK(xt_node_saved(n, 0, &positions));
    XT_CHECK(xt_node_saved(n, 1, &x));
    return rotate(x, positions, xt_rope_period(arg, 1, x), xt_rope_base(arg, 1), false, NULL, &out[0]);
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtArg *arg = xt_node_args(n);
    const XtTensor *dy = dout[0];
    XtTensor *positions, *place = xt_node_place(1);
    XT_CHECK(xt_node_saved(n, 0, &positions));
    if (place && !xt_columns_pay(place)) place = NULL;
    return rotate(dout[0], positions, xt_rope_period(arg, 1, dy), xt_rope_base(arg, 1), true, place, &din[0]);
}

const XtOp xt_op_rope = {
    .name = "rope",
    .signature = "x: Tensor, theta: float = 10000.0, positions: Tensor? = None, period: int? = None, " XT_ROPE_SCALING " -> Tensor",
    .forward = forward,
    .backward = backward,
    .recompute = recompute,
    .recomputes = 1,
    .doc = "Rotary position embedding, half-split form. x [rows, H, D] or [B, S, H, D], D even.\n"
           "Position of a row: row % period (period: S, or all rows of a 3-D x, unless given), or positions[row].",
};
