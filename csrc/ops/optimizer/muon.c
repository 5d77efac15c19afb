/* muon.c - one step of Muon for matrices of one shape, dtype and device, in place, in one call. Never recorded.
 *
 * Newton-Schulz, `steps` times (Jordan et al. 2024):  A = X X^T;  X = (a I + b A + c A A) X
 *
 * The polynomial is a matrix of its own, so the last product writes X and reads nothing else that is large. Where X has more rows than
 * columns the same comes from the other side, X (a I + b A + c A A) with A = X^T X: nothing is transposed. The products of all matrices
 * are one batch of the GEMM slot.
 *
 * Everything but two kernels works on scratch. All of it, but for what products take themselves, is there before the first kernel, and only
 * the last kernel writes what the caller has given.
 */
#include "contract/gemm.h"
#include "contract/optimizer.h"
#include "ops/ops.h"
#include "ops/optimizer/lists.h"

#include <math.h>
#include <stdlib.h>

enum { PARAMS, GRADS, BUFFERS, MASTERS, LR, NUMBERS, NESTEROV, STEPS, DTYPE, GUARD }; /* arguments */
enum { MOMENTUM, WEIGHT_DECAY, A, B, C, EPS, RATIO, COLUMNS };                        /* of `numbers` */
enum { MOST_NS_STEPS = 99 };                                                          /* PyTorch's bound */

typedef struct Scratch {
    XtTensor *x, *next, *gram, *polynomial; /* [count, rows, cols] twice, [count, side, side] twice */
} Scratch;

/* C = alpha op(A) op(B) + beta C for every matrix of dense batches. */
static XtStatus multiply(const XtTensor *a, bool trans_a, const XtTensor *b, bool trans_b, double alpha, double beta, XtTensor *c) {
    const int64_t m = c->shape[1], n = c->shape[2], k = a->shape[trans_a ? 1 : 2];
    const XtGemm p = {.c = c->data,
                      .a = a->data,
                      .b = b->data,
                      .dtype_a = a->dtype,
                      .dtype_b = b->dtype,
                      .dtype_c = c->dtype,
                      .tf32 = xt_tf32(),
                      .m = m,
                      .n = n,
                      .k = k,
                      .trans_a = trans_a,
                      .trans_b = trans_b,
                      .lda = a->shape[2],
                      .ldb = b->shape[2],
                      .ldc = n,
                      .batch = {1, c->shape[0]},
                      .stride_a = {0, a->shape[1] * a->shape[2]},
                      .stride_b = {0, b->shape[1] * b->shape[2]},
                      .stride_c = {0, m * n},
                      .alpha = alpha,
                      .beta = beta};
    return xt_gemm(c->storage->device, NULL, &p);
}

/* s->x becomes its Newton-Schulz iterate; x and next may have changed places. */
static XtStatus newton_schulz(Scratch *s, const double *number, int64_t steps) {
    const bool tall = s->x->shape[1] > s->x->shape[2];
    const int64_t side = s->gram->shape[1];
    for (int64_t i = 0; i < steps; i++) {
        XtTensor *x = s->x;
        XT_CHECK(multiply(x, tall, x, !tall, 1, 0, s->gram));
        XT_CHECK(xt_backend_of(x)->muon_polynomial(&(XtMuonPolynomial){.out = s->polynomial->data,
                                                                       .gram = s->gram->data,
                                                                       .dtype = x->dtype,
                                                                       .count = x->shape[0],
                                                                       .side = side,
                                                                       .a = number[A],
                                                                       .b = number[B]}));
        XT_CHECK(multiply(s->gram, false, s->gram, false, number[C], 1, s->polynomial));
        if (tall) XT_CHECK(multiply(x, false, s->polynomial, false, 1, 0, s->next));
        else XT_CHECK(multiply(s->polynomial, false, x, false, 1, 0, s->next));
        s->x = s->next;
        s->next = x;
    }
    return XT_OK;
}

static XtStatus check_numbers(const XtCall *c, XtTensor **out) {
    static const char *const names[] = {"momentum", "weight_decay", "a", "b", "c", "eps", "ratio"};
    const int64_t want = COLUMNS;
    XtTensor *numbers = c->arg[NUMBERS].tensor;
    XT_CHECK(xt_check_dtype(c->op, "numbers", numbers, XT_FLOAT64));
    XT_CHECK(xt_check_shape(c->op, "numbers", numbers, 1, &want));
    if (numbers->storage->device.type != XT_CPU)
        return xt_error(XT_VALUE_ERROR, "muon_: numbers must be on the CPU, got %s", xt_device_name(numbers->storage->device));
    XT_CHECK(xt_dense(numbers, out));
    const double *number = (*out)->data;
    for (int i = 0; i < COLUMNS; i++) {
        const double low = i == A || i == B || i == C ? -INFINITY : 0, high = i == MOMENTUM ? 1 : INFINITY;
        if (!(number[i] >= low && number[i] < high && isfinite(number[i])))
            return xt_error(XT_VALUE_ERROR, "muon_: %s must be in [%g, %g), got %g", names[i], low, high, number[i]);
    }
    if (c->arg[STEPS].i < 0 || c->arg[STEPS].i > MOST_NS_STEPS)
        return xt_error(XT_VALUE_ERROR, "muon_: ns_steps must be in [0, %d], got %lld", MOST_NS_STEPS, (long long)c->arg[STEPS].i);
    return XT_OK;
}

static XtStatus check(const XtCall *c) {
    const XtArg *params = &c->arg[PARAMS];
    const XtTensor *first = params->tensors[0];
    const XtDtype x = (XtDtype)c->arg[DTYPE].i;
    XT_CHECK(xt_check_float(c->op, "every parameter", first));
    if (first->ndim != 2)
        return xt_error(XT_VALUE_ERROR, "muon_: every parameter must be a matrix, got shape %s",
                        xt_shape_text(first->ndim, first->shape));
    for (int i = 0; i < params->count; i++) {
        XT_CHECK(xt_check_like(c->op, "params[0]", first, "every parameter", params->tensors[i]));
        XT_CHECK(xt_check_shape(c->op, "every parameter", params->tensors[i], 2, first->shape));
    }
    if (!xt_dtype_is_float(x) || xt_dtype_accumulator(x) != xt_dtype_accumulator(first->dtype))
        return xt_error(XT_TYPE_ERROR, "muon_: ns_dtype must be %s for %s parameters, got %s",
                        first->dtype == XT_FLOAT64 ? "float64" : "float32, bfloat16 or float16", xt_dtype_name(first->dtype),
                        xt_dtype_name(x));
    XT_CHECK(xt_check_list(c->op, "params", params, params, NULL));
    XT_CHECK(xt_check_list(c->op, "buffers", &c->arg[BUFFERS], params, xt_dtype_accumulator));
    if (c->arg[MASTERS].count) XT_CHECK(xt_check_list(c->op, "masters", &c->arg[MASTERS], params, xt_dtype_accumulator));
    if (c->arg[GRADS].count != params->count)
        return xt_error(XT_VALUE_ERROR, "muon_: grads must hold one tensor per parameter (%d), got %d", params->count,
                        c->arg[GRADS].count);
    for (int i = 0; i < params->count; i++) {
        XT_CHECK(xt_check_shape(c->op, "the gradient", c->arg[GRADS].tensors[i], 2, first->shape));
        XT_CHECK(xt_check_like(c->op, "the parameter", first, "its gradient", c->arg[GRADS].tensors[i]));
    }
    XT_CHECK(xt_check_scalar(c->op, "lr", c->arg[LR].tensor, params, XT_FLOAT64));
    if (c->arg[GUARD].tensor) XT_CHECK(xt_check_scalar(c->op, "guard", c->arg[GUARD].tensor, params, XT_FLOAT32));
    return XT_OK;
}

static XtStatus allocate(const XtTensor *first, int64_t count, XtDtype dtype, Scratch *s) {
    const int64_t rows = first->shape[0], cols = first->shape[1], side = rows < cols ? rows : cols;
    XT_CHECK(xt_empty_shape(first, dtype, 3, (int64_t[]){count, rows, cols}, &s->x));
    XT_CHECK(xt_empty_shape(first, dtype, 3, (int64_t[]){count, rows, cols}, &s->next));
    XT_CHECK(xt_empty_shape(first, dtype, 3, (int64_t[]){count, side, side}, &s->gram));
    return xt_empty_shape(first, dtype, 3, (int64_t[]){count, side, side}, &s->polynomial);
}

static XtStatus forward(XtCall *c) {
    const XtArg *params = &c->arg[PARAMS], *grads = &c->arg[GRADS], *buffers = &c->arg[BUFFERS], *masters = &c->arg[MASTERS];
    XtStatus status = XT_OK;
    XtMuonItem *items = NULL;
    XtTensor **dense = NULL, *numbers = NULL;
    Scratch s = {0};
    XT_TRY(check_numbers(c, &numbers));
    if (params->count == 0) goto done;
    XT_TRY(check(c));
    XtTensor *first = params->tensors[0];
    const double *number = numbers->data;
    items = calloc((size_t)params->count, sizeof *items);
    dense = calloc((size_t)params->count, sizeof *dense);
    if (!items || !dense) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "muon_: out of memory"));
    XT_TRY(allocate(first, params->count, (XtDtype)c->arg[DTYPE].i, &s));
    for (int i = 0; i < params->count; i++) {
        XtTensor *p = params->tensors[i], *master = masters->count ? masters->tensors[i] : p;
        XT_TRY(xt_dense(grads->tensors[i], &dense[i]));
        items[i] = (XtMuonItem){
            .p = p->data, .b = buffers->tensors[i]->data, .master = master == p ? NULL : master->data, .g = dense[i]->data};
    }
    XtMuon p = {.items = items,
                .count = params->count,
                .rows = first->shape[0],
                .cols = first->shape[1],
                .dtype = first->dtype,
                .dtype_x = s.x->dtype,
                .x = s.x->data,
                .momentum = number[MOMENTUM],
                .weight_decay = number[WEIGHT_DECAY],
                .ratio = number[RATIO],
                .eps = number[EPS],
                .nesterov = c->arg[NESTEROV].b,
                .lr = c->arg[LR].tensor->data,
                .guard = xt_data(c->arg[GUARD].tensor)};
    XT_TRY(xt_backend_of(first)->muon_direction(&p));
    XT_TRY(newton_schulz(&s, number, c->arg[STEPS].i));
    p.x = s.x->data;
    for (int i = 0; i < params->count; i++) {
        XT_TRY(xt_begin_inplace(params->tensors[i], c->op->name));
        XT_TRY(xt_begin_inplace(buffers->tensors[i], c->op->name));
        if (items[i].master) XT_TRY(xt_begin_inplace(masters->tensors[i], c->op->name));
    }
    XT_TRY(xt_backend_of(first)->muon_update(&p));
done:
    for (int i = 0; dense && i < params->count; i++) xt_tensor_release(dense[i]);
    xt_tensor_release(numbers);
    xt_tensor_release(s.x);
    xt_tensor_release(s.next);
    xt_tensor_release(s.gram);
    xt_tensor_release(s.polynomial);
    free(dense);
    free(items);
    return status;
}

const XtOp xt_op_muon_ = {
    .name = "muon_",
    .signature =
        "params: Tensors, grads: Tensors, buffers: Tensors, masters: Tensors, lr: Tensor, numbers: Tensor, nesterov: bool, "
        "ns_steps: int, ns_dtype: dtype, guard: Tensor? = None -> None",
    .forward = forward,
    .doc =
        "One step of Muon (Jordan et al. 2024) for matrices of one shape and dtype, in place:\n"
        "b = momentum b + (1 - momentum) g; u = (1 - momentum) g + momentum b if nesterov else b; x = u / max(|u|, eps);\n"
        "ns_steps times A = x x^T, x = (a I + b A + c A A) x in ns_dtype; p = p (1 - lr weight_decay) - lr ratio x.\n"
        "Buffers and masters are float32 (float64 for float64); masters is an empty list or holds the full-precision parameters,\n"
        "one for each parameter. numbers: float64 [7] on the CPU: momentum, weight_decay, a, b, c, eps, ratio.\n"
        "lr: a float64 scalar; guard: a float32 scalar; when it is NaN or infinite, nothing is changed. Both are on the\n"
        "parameters' device.",
};
