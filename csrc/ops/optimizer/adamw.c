/* adamw.c - one AdamW step of many tensors, of all groups of an optimizer, in place, in one call. Never recorded. */
#include "contract/optimizer.h"
#include "ops/ops.h"
#include "ops/optimizer/lists.h"

#include <math.h>
#include <stdlib.h>

static int by_address(const void *a, const void *b) {
    uintptr_t x = (uintptr_t)*(int64_t *const *)a, y = (uintptr_t)*(int64_t *const *)b;
    return (x > y) - (x < y);
}

/* One int64 scalar per parameter. They are distinct: a kernel counts each of them up once. */
static XtStatus check_steps(const XtOp *op, const XtArg *steps, const XtArg *params) {
    XtStatus status = XT_OK;
    if (steps->count != params->count)
        return xt_error(XT_VALUE_ERROR, "%s: steps must hold one tensor per parameter (%d), got %d", op->name, params->count,
                        steps->count);
    int64_t **sorted = malloc((size_t)steps->count * sizeof *sorted);
    if (!sorted) return xt_error(XT_OUT_OF_MEMORY, "%s: out of memory", op->name);
    for (int i = 0; i < steps->count; i++) {
        const XtTensor *step = steps->tensors[i];
        XT_TRY(xt_check_device(op, "params[0]", params->tensors[0], "every step", step));
        XT_TRY(xt_check_dtype(op, "every step", step, XT_INT64));
        XT_TRY(xt_check_ndim(op, "every step", step, 0, 0));
        sorted[i] = step->data;
    }
    qsort(sorted, (size_t)steps->count, sizeof *sorted, by_address);
    for (int i = 1; i < steps->count; i++)
        if (sorted[i] == sorted[i - 1])
            XT_TRY(xt_error(XT_VALUE_ERROR, "%s: steps must be distinct tensors, got one twice", op->name));
done:
    free(sorted);
    return status;
}

enum { COUNT, BETA1, BETA2, EPS, WEIGHT_DECAY, NUMBERS }; /* the columns of `groups` */

/* *out: returns new, the dense form of `groups`, whose rows are right, and share the parameters out among them. */
static XtStatus check_groups(const XtOp *op, XtTensor *groups, const XtArg *lrs, const XtArg *params, XtTensor **out) {
    static const char *const names[] = {"count", "beta1", "beta2", "eps", "weight_decay"};
    XT_CHECK(xt_check_dtype(op, "groups", groups, XT_FLOAT64));
    XT_CHECK(xt_check_ndim(op, "groups", groups, 2, 2));
    if (groups->storage->device.type != XT_CPU || groups->shape[1] != NUMBERS)
        return xt_error(XT_VALUE_ERROR, "%s: groups must have %d columns, on the CPU, got shape %s on %s", op->name, NUMBERS,
                        xt_shape_text(groups->ndim, groups->shape), xt_device_name(groups->storage->device));
    if (lrs->count != groups->shape[0])
        return xt_error(XT_VALUE_ERROR, "%s: lrs must hold one tensor per row of groups (%lld), got %d", op->name,
                        (long long)groups->shape[0], lrs->count);
    XT_CHECK(xt_dense(groups, out));
    double rest = params->count;
    for (int g = 0; g < lrs->count; g++) {
        const double *row = (const double *)(*out)->data + (int64_t)g * NUMBERS;
        XT_CHECK(xt_check_scalar(op, "lr", lrs->tensors[g], params, XT_FLOAT64));
        for (int i = BETA1; i < NUMBERS; i++) {
            double limit = i == BETA1 || i == BETA2 ? 1.0 : INFINITY;
            if (!(row[i] >= 0 && row[i] < limit))
                return xt_error(XT_VALUE_ERROR, "%s: %s must be in [0, %g), got %g", op->name, names[i], limit, row[i]);
        }
        if (!(row[COUNT] >= 0 && row[COUNT] <= rest && row[COUNT] == floor(row[COUNT])))
            return xt_error(XT_VALUE_ERROR, "%s: count of groups[%d] must be an integer of at most %g, got %g", op->name, g, rest,
                            row[COUNT]);
        rest -= row[COUNT];
    }
    if (rest != 0)
        return xt_error(XT_VALUE_ERROR, "%s: the counts of groups must add up to the number of parameters (%d), got %g", op->name,
                        params->count, params->count - rest);
    return XT_OK;
}

static XtStatus adamw_forward(XtCall *c) {
    const XtArg *params = &c->arg[0], *grads = &c->arg[1], *m = &c->arg[2], *v = &c->arg[3], *masters = &c->arg[4];
    const XtArg *steps = &c->arg[5], *lrs = &c->arg[6];
    const XtTensor *guard = c->arg[8].tensor, *scale = c->arg[9].tensor;
    XtStatus status = XT_OK;
    XtAdamWItem *items = NULL;
    XtAdamW *calls = NULL;
    XtTensor **dense = NULL, *groups = NULL;
    if (params->count == 0) return XT_OK;
    for (int i = 0; i < params->count; i++) {
        XT_TRY(xt_check_float(c->op, "every parameter", params->tensors[i]));
        XT_TRY(xt_check_device(c->op, "params[0]", params->tensors[0], "every parameter", params->tensors[i]));
    }
    XT_TRY(xt_check_list(c->op, "params", params, params, NULL));
    XT_TRY(xt_check_list(c->op, "exp_avgs", m, params, xt_dtype_accumulator));
    XT_TRY(xt_check_list(c->op, "exp_avg_sqs", v, params, xt_dtype_accumulator));
    if (masters->count) XT_TRY(xt_check_list(c->op, "masters", masters, params, xt_dtype_accumulator));
    if (grads->count != params->count)
        return xt_error(XT_VALUE_ERROR, "adamw_: grads must hold one tensor per parameter (%d), got %d", params->count,
                        grads->count);
    XT_TRY(check_steps(c->op, steps, params));
    XT_TRY(check_groups(c->op, c->arg[7].tensor, lrs, params, &groups));
    if (guard) XT_TRY(xt_check_scalar(c->op, "guard", guard, params, XT_FLOAT32));
    if (scale) XT_TRY(xt_check_scalar(c->op, "scale", scale, params, XT_FLOAT64));
    items = calloc((size_t)params->count, sizeof *items);
    dense = calloc((size_t)params->count, sizeof *dense);
    calls = calloc((size_t)lrs->count, sizeof *calls);
    if (!items || !dense || !calls) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "adamw_: out of memory"));
    for (int i = 0; i < params->count; i++) {
        XtTensor *p = params->tensors[i], *g = grads->tensors[i], *master = masters->count ? masters->tensors[i] : p;
        XT_TRY(xt_check_shape(c->op, "the gradient", g, p->ndim, p->shape));
        if (g->dtype == xt_dtype_accumulator(p->dtype)) XT_TRY(xt_check_device(c->op, "the parameter", p, "its gradient", g));
        else XT_TRY(xt_check_like(c->op, "the parameter", p, "its gradient", g));
        XT_TRY(xt_dense(g, &dense[i]));
        items[i] = (XtAdamWItem){.p = p->data,
                                 .m = m->tensors[i]->data,
                                 .v = v->tensors[i]->data,
                                 .master = master == p ? NULL : master->data,
                                 .g = dense[i]->data,
                                 .step = steps->tensors[i]->data,
                                 .dtype = p->dtype,
                                 .dtype_g = g->dtype,
                                 .numel = xt_view_numel(&p->view)};
    }
    const XtAdamWItem *at = items;
    for (int g = 0; g < lrs->count; g++) {
        const double *row = (const double *)groups->data + (int64_t)g * NUMBERS;
        calls[g] = (XtAdamW){.items = at,
                             .count = (int64_t)row[COUNT],
                             .beta1 = row[BETA1],
                             .beta2 = row[BETA2],
                             .eps = row[EPS],
                             .weight_decay = row[WEIGHT_DECAY],
                             .lr = lrs->tensors[g]->data,
                             .scale = xt_data(scale),
                             .guard = xt_data(guard),
                             .next = g + 1 < lrs->count ? &calls[g + 1] : NULL};
        at += calls[g].count;
    }
    for (int i = 0; i < params->count; i++) {
        XT_TRY(xt_begin_inplace(params->tensors[i], c->op->name));
        XT_TRY(xt_begin_inplace(m->tensors[i], c->op->name));
        XT_TRY(xt_begin_inplace(v->tensors[i], c->op->name));
        if (masters->count && masters->tensors[i] != params->tensors[i]) XT_TRY(xt_begin_inplace(masters->tensors[i], c->op->name));
        XT_TRY(xt_begin_inplace(steps->tensors[i], c->op->name));
    }
    XT_TRY(xt_backend_of(params->tensors[0])->adamw(calls));
done:
    for (int i = 0; dense && i < params->count; i++) xt_tensor_release(dense[i]);
    xt_tensor_release(groups);
    free(dense);
    free(calls);
    free(items);
    return status;
}

const XtOp xt_op_adamw_ = {
    .name = "adamw_",
    .signature =
        "params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, masters: Tensors, steps: Tensors, lrs: Tensors, "
        "groups: Tensor, guard: Tensor? = None, scale: Tensor? = None -> None",
    .forward = adamw_forward,
    .doc =
        "One AdamW step (Loshchilov & Hutter 2019) on every tensor, in place, in PyTorch's order of operations.\n"
        "Moments and masters are float32 (float64 for float64); masters is an empty list or holds the full-precision parameters,\n"
        "where a parameter that has none is its own. steps: an int64 scalar per parameter, how many steps it has taken; each is\n"
        "counted up. lrs: a float64 scalar per group. groups: float64 [groups, 5] on the CPU, a row a group: how many of the\n"
        "parameters, in their order, it has; beta1; beta2; eps; weight_decay. guard: a float32 scalar; when it is NaN or "
        "infinite,\n"
        "nothing is changed. scale: a float64 scalar, by which gradients are multiplied; they have the parameter's dtype or the\n"
        "moments'. These scalars are on the parameters' device. All memory is taken before the first tensor changes.",
};
