/* conv1d.c - a convolution in one dimension, y = bias + weight * x (contract/conv.h has the sum).
 *
 * Two algorithms compute the same sums. "products": columns of a few samples (conv1d_columns), and one GEMM a sample and group,
 *     y_b = W columns_b      dcolumns_b = W^T dy_b, folded into dx_b      dW = sum_b dy_b columns_b^T, sample after sample
 * with W [out / groups, in / groups kernel], columns_b [in / groups kernel, places]. A kernel of one tap that moves nothing needs no
 * columns. The bias lies in y before the product, which adds to it, so there is one rounding. "direct": a loop for each element, for
 * few taps, as in a depthwise convolution, whose products would have single rows or columns. The choice is a function of the shape.
 */
#include "contract/conv.h"
#include "contract/gemm.h"
#include "ops/ops.h"

#include <string.h>

enum { STRIDE = 3, FRONT, BEHIND, DILATION, GROUPS, ALGORITHM }; /* arguments */

/* Bytes of columns at once: more than a CPU's caches hold, and enough for every multiprocessor of a GPU. */
#define COLUMNS ((int64_t)64 << 20)
#define DIRECT_TERMS 16 /* most terms of a sum and outputs of a group for which the direct form is chosen */

static bool is_direct(const XtArg *arg, const XtConv1dShape *s) {
    if (arg[ALGORITHM].given) return strcmp(arg[ALGORITHM].s, "direct") == 0;
    return s->out / s->groups < 4 && s->in / s->groups * s->kernel <= DIRECT_TERMS;
}

/* Whether the columns are x itself. */
static bool moves_nothing(const XtConv1dShape *s) { return s->kernel == 1 && s->stride == 1 && s->length == s->places; }

/* The sizes of a call that has been checked; x, w: the shapes of its tensors. A backward asks, too. */
static XtConv1dShape shape_of(const XtArg *arg, const int64_t *x, const int64_t *w) {
    XtConv1dShape s = {.batch = x[0],
                       .in = x[1],
                       .length = x[2],
                       .out = w[0],
                       .kernel = w[2],
                       .stride = arg[STRIDE].i,
                       .padding = arg[FRONT].i,
                       .dilation = arg[DILATION].i,
                       .groups = arg[GROUPS].i};
    s.places = (s.length + s.padding + arg[BEHIND].i - s.dilation * (s.kernel - 1) - 1) / s.stride + 1;
    return s;
}

static XtStatus check(const XtCall *c) {
    const XtTensor *x = c->arg[0].tensor, *w = c->arg[1].tensor, *bias = c->arg[2].tensor;
    const XtArg *arg = c->arg;
    XT_CHECK(xt_check_float(c->op, "input", x));
    XT_CHECK(xt_check_ndim(c->op, "input", x, 3, 3));
    XT_CHECK(xt_check_ndim(c->op, "weight", w, 3, 3));
    XT_CHECK(xt_check_like(c->op, "input", x, "weight", w));
    static const struct {
        const char *name;
        int arg;
        int64_t least;
    } numbers[] = {
        {"stride", STRIDE, 1}, {"padding", FRONT, 0}, {"padding", BEHIND, 0}, {"dilation", DILATION, 1}, {"groups", GROUPS, 1}};
    const int64_t most = (int64_t)1 << 40; /* so that no size below overflows */
    for (int i = 0; i < 5; i++) {
        int64_t given = arg[numbers[i].arg].i;
        if (given < numbers[i].least || given > most)
            return xt_error(XT_VALUE_ERROR, "conv1d: %s must be %s, got %lld", numbers[i].name,
                            given > most            ? "at most 2^40"
                            : numbers[i].least == 1 ? "at least 1"
                                                    : "at least 0",
                            (long long)given);
    }
    int64_t groups = arg[GROUPS].i, in = x->shape[1], out = w->shape[0], kernel = w->shape[2];
    if (in % groups != 0)
        return xt_error(XT_VALUE_ERROR, "conv1d: groups must divide the channels of input, %lld, got %lld", (long long)in,
                        (long long)groups);
    if (out % groups != 0)
        return xt_error(XT_VALUE_ERROR, "conv1d: groups must divide the outputs of weight, %lld, got %lld", (long long)out,
                        (long long)groups);
    if (w->shape[1] != in / groups)
        return xt_error(XT_VALUE_ERROR,
                        "conv1d: weight must have %lld channels a group, input's %lld over groups %lld, got shape %s",
                        (long long)(in / groups), (long long)in, (long long)groups, xt_shape_text(3, w->shape));
    if (kernel < 1) return xt_error(XT_VALUE_ERROR, "conv1d: weight must have a tap, got shape %s", xt_shape_text(3, w->shape));
    if (bias) {
        XT_CHECK(xt_check_like(c->op, "input", x, "bias", bias));
        XT_CHECK(xt_check_shape(c->op, "bias", bias, 1, &out));
    }
    int64_t padded = x->shape[2] + arg[FRONT].i + arg[BEHIND].i;
    if (padded < 1 || (kernel > 1 && arg[DILATION].i > (padded - 1) / (kernel - 1)))
        return xt_error(XT_VALUE_ERROR, "conv1d: the kernel must fit into the padded row of %lld, got %lld taps with dilation %lld",
                        (long long)padded, (long long)kernel, (long long)arg[DILATION].i);
    if (arg[ALGORITHM].given && strcmp(arg[ALGORITHM].s, "direct") != 0 && strcmp(arg[ALGORITHM].s, "products") != 0)
        return xt_error(XT_VALUE_ERROR, "conv1d: algorithm must be 'direct' or 'products', got '%s'", arg[ALGORITHM].s);
    return XT_OK;
}

/* ---- products ------------------------------------------------------------------------------------------------------------- */

/* How many samples have their columns made at once; size: bytes of an element. */
static int64_t samples_of(const XtConv1dShape *s, size_t size) {
    double each = (double)s->in * (double)s->kernel * (double)s->places * (double)size; /* may be more than memory has */
    if (each * (double)s->batch <= COLUMNS) return s->batch > 0 ? s->batch : 1;
    return each < COLUMNS ? (int64_t)(COLUMNS / each) : 1;
}

/* Samples [from, from + shape.batch) of a tensor [batch, rows, cols]. */
static char *sample(const XtTensor *t, int64_t from, int64_t rows, int64_t cols) {
    return (char *)t->data + from * rows * cols * (int64_t)xt_dtype_size(t->dtype);
}

/* *out = columns of the samples from `from` on: x itself where nothing moves, else `room`, which is made at the first call. */
static XtStatus columns_of(const XtTensor *x, int64_t from, const XtConv1dShape *s, XtTensor **room, const void **out) {
    *out = sample(x, from, s->in, s->length);
    if (moves_nothing(s)) return XT_OK;
    int64_t shape[3] = {s->batch, s->in * s->kernel, s->places};
    if (!*room) XT_CHECK(xt_empty_shape(x, x->dtype, 3, shape, room));
    XtConv1dColumns p = {.columns = (*room)->data, .x = *out, .dtype = x->dtype, .shape = *s};
    *out = (*room)->data;
    return xt_backend_of(x)->conv1d_columns(&p);
}

/* y (with the bias in it, if there is one) += W columns. */
static XtStatus forward_products(const XtTensor *x, const XtTensor *w, bool has_bias, const XtConv1dShape *s, XtTensor *y) {
    int64_t width = s->in / s->groups * s->kernel, rows = s->out / s->groups, samples = samples_of(s, xt_dtype_size(x->dtype));
    XtTensor *room = NULL;
    XtStatus status = XT_OK;
    for (int64_t from = 0; from < s->batch; from += samples) {
        XtConv1dShape part = *s;
        const void *columns;
        part.batch = s->batch - from < samples ? s->batch - from : samples;
        XT_TRY(columns_of(x, from, &part, &room, &columns));
        XtGemm p = {.c = sample(y, from, s->out, s->places),
                    .a = w->data,
                    .b = columns,
                    .dtype_a = x->dtype,
                    .dtype_b = x->dtype,
                    .dtype_c = x->dtype,
                    .tf32 = xt_tf32(),
                    .m = rows,
                    .n = s->places,
                    .k = width,
                    .lda = width > 0 ? width : 1,
                    .ldb = s->places,
                    .ldc = s->places,
                    .batch = {part.batch, s->groups},
                    .stride_a = {0, rows * width},
                    .stride_b = {s->in * s->kernel * s->places, width * s->places},
                    .stride_c = {s->out * s->places, rows * s->places},
                    .alpha = 1.0,
                    .beta = has_bias ? 1.0 : 0.0};
        XT_TRY(xt_gemm(x->storage->device, NULL, &p));
    }
done:
    xt_tensor_release(room);
    return status;
}

/* dx = fold(W^T dy) */
static XtStatus input_products(const XtTensor *dy, const XtTensor *w, const XtConv1dShape *s, XtTensor *dx) {
    bool direct = moves_nothing(s); /* the columns are dx */
    XtDtype dtype = direct ? dx->dtype : xt_dtype_accumulator(dx->dtype);
    int64_t width = s->in / s->groups * s->kernel, rows = s->out / s->groups, samples = samples_of(s, xt_dtype_size(dtype));
    XtTensor *room = NULL;
    XtStatus status = XT_OK;
    for (int64_t from = 0; from < s->batch; from += samples) {
        XtConv1dShape part = *s;
        void *to = sample(dx, from, s->in, s->length);
        part.batch = s->batch - from < samples ? s->batch - from : samples;
        int64_t shape[3] = {part.batch, s->in * s->kernel, s->places};
        if (!direct && !room) XT_TRY(xt_empty_shape(dx, dtype, 3, shape, &room));
        XtGemm p = {.c = direct ? to : room->data,
                    .a = w->data,
                    .b = sample(dy, from, s->out, s->places),
                    .dtype_a = dx->dtype,
                    .dtype_b = dx->dtype,
                    .dtype_c = dtype,
                    .tf32 = xt_tf32(),
                    .trans_a = true,
                    .m = width,
                    .n = s->places,
                    .k = rows,
                    .lda = width > 0 ? width : 1,
                    .ldb = s->places,
                    .ldc = s->places,
                    .batch = {part.batch, s->groups},
                    .stride_a = {0, rows * width},
                    .stride_b = {s->out * s->places, rows * s->places},
                    .stride_c = {s->in * s->kernel * s->places, width * s->places},
                    .alpha = 1.0};
        XT_TRY(xt_gemm(dx->storage->device, NULL, &p));
        if (direct) continue;
        XtConv1dFold fold = {.dx = to, .columns = room->data, .dtype = dx->dtype, .shape = part};
        XT_TRY(xt_backend_of(dx)->conv1d_fold(&fold));
    }
done:
    xt_tensor_release(room);
    return status;
}

/* *dw = sum over the samples, in order, of dy columns^T. 16-bit dtypes are summed in float32 and rounded once. */
static XtStatus weight_products(const XtTensor *dy, const XtTensor *x, const XtTensor *w, const XtConv1dShape *s, XtTensor **dw) {
    int64_t width = s->in / s->groups * s->kernel, rows = s->out / s->groups, samples = samples_of(s, xt_dtype_size(x->dtype));
    XtTensor *room = NULL, *sum = NULL;
    XtStatus status = XT_OK;
    XT_TRY(s->batch > 0 ? xt_empty_shape(w, xt_dtype_accumulator(w->dtype), 3, w->shape, &sum)
                        : xt_filled(w, w->dtype, 3, w->shape, 0, &sum));
    for (int64_t from = 0; from < s->batch; from += samples) {
        XtConv1dShape part = *s;
        const void *columns;
        part.batch = s->batch - from < samples ? s->batch - from : samples;
        XT_TRY(columns_of(x, from, &part, &room, &columns));
        for (int64_t b = 0; b < part.batch; b++) {
            XtGemm p = {.c = sum->data,
                        .a = sample(dy, from + b, s->out, s->places),
                        .b = (const char *)columns + b * s->in * s->kernel * s->places * (int64_t)xt_dtype_size(x->dtype),
                        .dtype_a = x->dtype,
                        .dtype_b = x->dtype,
                        .dtype_c = sum->dtype,
                        .tf32 = xt_tf32(),
                        .trans_b = true,
                        .m = rows,
                        .n = width,
                        .k = s->places,
                        .lda = s->places,
                        .ldb = s->places,
                        .ldc = width > 0 ? width : 1,
                        .batch = {1, s->groups},
                        .stride_a = {0, rows * s->places},
                        .stride_b = {0, width * s->places},
                        .stride_c = {0, rows * width},
                        .alpha = 1.0,
                        .beta = from + b > 0 ? 1.0 : 0.0};
            XT_TRY(xt_gemm(x->storage->device, NULL, &p));
        }
    }
    XT_TRY(xt_cast(sum, w->dtype, dw));
done:
    xt_tensor_release(room);
    xt_tensor_release(sum);
    return status;
}

/* ---- the op --------------------------------------------------------------------------------------------------------------- */

/* *out = a new tensor of `shape` with bias [out] at every place. */
static XtStatus spread(const XtTensor *bias, const int64_t *shape, XtTensor **out) {
    const int64_t strides[3] = {0, 1, 0};
    XtTensor *view = NULL;
    XT_CHECK(xt_view_as(bias, 3, shape, strides, &view));
    XtStatus status = xt_copy_of(view, out);
    xt_tensor_release(view);
    return status;
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = NULL, *w = NULL, *bias = NULL, *y = NULL;
    XtStatus status = XT_OK;
    XT_TRY(check(c));
    XT_TRY(xt_dense(c->arg[0].tensor, &x));
    XT_TRY(xt_dense(c->arg[1].tensor, &w));
    if (c->arg[2].tensor) XT_TRY(xt_dense(c->arg[2].tensor, &bias));
    XtConv1dShape s = shape_of(c->arg, x->shape, w->shape);
    int64_t shape[3] = {s.batch, s.out, s.places};
    bool direct = is_direct(c->arg, &s);
    XT_TRY(bias && !direct ? spread(bias, shape, &y) : xt_empty_shape(x, x->dtype, 3, shape, &y));
    if (direct) {
        XtConv1dFwd p = {.y = y->data, .x = x->data, .weight = w->data, .bias = xt_data(bias), .dtype = x->dtype, .shape = s};
        XT_TRY(xt_backend_of(x)->conv1d_fwd(&p));
    } else {
        XT_TRY(forward_products(x, w, bias != NULL, &s, y));
    }
    XT_TRY(xt_save(c, x));
    XT_TRY(xt_save(c, w));
    c->out[c->out_count++] = y;
    y = NULL;
done:
    xt_tensor_release(x);
    xt_tensor_release(w);
    xt_tensor_release(bias);
    xt_tensor_release(y);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x, *w, *dy = NULL, *sum = NULL;
    XtStatus status = XT_OK;
    const XtArg *arg = xt_node_args(n);
    bool needs_x = xt_node_needs(n, 0), needs_w = xt_node_needs(n, 1);
    XT_TRY(xt_node_saved(n, 0, &x));
    XT_TRY(xt_node_saved(n, 1, &w));
    XT_TRY(xt_dense(dout[0], &dy));
    XtConv1dShape s = shape_of(arg, x->shape, w->shape);
    if (needs_x) XT_TRY(xt_empty_like(x, &din[0]));
    if (is_direct(arg, &s)) {
        if (needs_w) XT_TRY(xt_empty_like(w, &din[1]));
        XtConv1dBwd p = {.dx = xt_data(din[0]),
                         .dweight = xt_data(din[1]),
                         .dy = dy->data,
                         .x = x->data,
                         .weight = w->data,
                         .dtype = x->dtype,
                         .shape = s};
        XT_TRY(xt_backend_of(x)->conv1d_bwd(&p));
    } else {
        if (needs_x) XT_TRY(input_products(dy, w, &s, din[0]));
        if (needs_w) XT_TRY(weight_products(dy, x, w, &s, &din[1]));
    }
    if (xt_node_needs(n, 2)) {
        int64_t column[2] = {s.out, 1};
        XT_TRY(xt_sum_to(dy, 2, column, &sum));
        XT_TRY(xt_reshape(sum, 1, column, &din[2]));
    }
done:
    xt_tensor_release(dy);
    xt_tensor_release(sum);
    return status;
}

const XtOp xt_op_conv1d = {
    .name = "conv1d",
    .signature = "input: Tensor, weight: Tensor, bias: Tensor? = None, stride: int = 1, padding: int = 0, padding_behind: int = 0, "
                 "dilation: int = 1, groups: int = 1, *, algorithm: str? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .doc = "Cross-correlation of input [B, in, L], zeros in front and behind, with weight [out, in / groups, K], plus bias [out].\n"
           "-> [B, out, (L + padding + padding_behind - dilation (K - 1) - 1) / stride + 1]. algorithm: 'direct', 'products' or "
           "None,\n"
           "which chooses by the shape. Float dtypes, sums in float32 (float64). See functional.conv1d.",
};
