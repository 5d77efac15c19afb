/* elementwise.c - arithmetic, comparisons and functions of one element: one family, because they share promotion and broadcasting.
 *
 * Dtypes follow PyTorch: tensors promote with each other; a number, or a tensor without dimensions, changes the dtype only when it is of
 * a higher kind (bool < integer < float). Shapes broadcast from the right. Gradients are summed back over what was broadcast.
 */
#include "arithmetic.h"

#include <math.h>
#include <string.h>

/* ---- two operands ------------------------------------------------------------------------------------------------------ */

static int kind_of(XtDtype dtype) { return dtype == XT_BOOL ? 0 : xt_dtype_is_float(dtype) ? 2 : 1; }

XtDtype xt_result_dtype(const XtArg *a, const XtArg *b) {
    XtDtype dtype[2] = {XT_BOOL, XT_BOOL};
    bool weak[2];
    const XtArg *args[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        const XtTensor *t = args[i]->tensor;
        weak[i] = !t || t->ndim == 0;
        dtype[i] = t ? t->dtype : args[i]->scalar.is_bool ? XT_BOOL : args[i]->scalar.is_int ? XT_INT64 : XT_FLOAT32;
    }
    if (a->tensor && b->tensor && weak[0] == weak[1]) return xt_dtype_promote(dtype[0], dtype[1]);
    /* A number is weaker than a scalar tensor, which is weaker than a tensor with dimensions. */
    int strong = !a->tensor ? 1 : !b->tensor ? 0 : weak[0] ? 1 : 0;
    if (kind_of(dtype[1 - strong]) > kind_of(dtype[strong])) return dtype[1 - strong];
    return dtype[strong];
}

/* Casts the tensor operands to the common dtype; *a, *b are new references, NULL for a number. */
static XtStatus promote(XtCall *c, XtDtype dtype, XtTensor **a, XtTensor **b) {
    if (c->arg[0].tensor) XT_CHECK(xt_tensor_or_cast(c->arg[0].tensor, dtype, a));
    if (c->arg[1].tensor) XT_CHECK(xt_tensor_or_cast(c->arg[1].tensor, dtype, b));
    return XT_OK;
}

XtStatus xt_check_combines(const XtOp *op, XtDtype dtype) {
    const int code = op->code;
    if (dtype != XT_BOOL || (code != XT_SUB && code != XT_POW && code != XT_FLOOR_DIVIDE && code != XT_REMAINDER)) return XT_OK;
    return xt_error(XT_TYPE_ERROR, "%s: bool tensors cannot be combined so; convert one with .to(xt.int64)", op->name);
}

static XtStatus binary_forward(XtCall *c) {
    const XtArg *l = &c->arg[0], *r = &c->arg[1];
    XtBinaryOp code = (XtBinaryOp)c->op->code;
    XtTensor *a = NULL, *b = NULL, *out = NULL;
    XtStatus status = XT_OK;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
    if (!l->tensor && !r->tensor)
        return xt_error(XT_TYPE_ERROR, "%s: one of input and other must be a Tensor, got two numbers", c->op->name);
    XtDtype dtype = xt_result_dtype(l, r);
    if (code == XT_DIV && !xt_dtype_is_float(dtype)) dtype = XT_FLOAT32;
    if (!l->tensor || !r->tensor) {
        const char *name = l->tensor ? "other" : "input";
        XtScalar number = l->tensor ? r->scalar : l->scalar;
        if (code >= XT_EQ && !xt_scalar_fits(number, dtype)) dtype = XT_INT64; /* uint8 == 256 is legal, and false */
        XT_TRY(xt_check_fits(c->op, name, number, dtype));
    }
    XT_TRY(xt_check_combines(c->op, dtype));
    XtTensor *like = l->tensor ? l->tensor : r->tensor;
    if (l->tensor && r->tensor) {
        XT_TRY(xt_check_device(c->op, "input", l->tensor, "other", r->tensor));
        XT_TRY(xt_broadcast_shape(c->op, l->tensor, r->tensor, &ndim, shape));
    } else {
        ndim = like->ndim;
        memcpy(shape, like->shape, sizeof shape);
    }
    XT_TRY(promote(c, dtype, &a, &b));
    XT_TRY(xt_empty_shape(like, code >= XT_EQ ? XT_BOOL : dtype, ndim, shape, &out));
    XtBinary p = {.op = code,
                  .out = out->view,
                  .constant = !a   ? 1
                              : !b ? 2
                                   : 0,
                  .value = !a   ? l->scalar
                           : !b ? r->scalar
                                : xt_scalar_int(0)};
    p.a = xt_broadcast_view(a ? a : b, ndim, shape);
    p.b = xt_broadcast_view(b ? b : a, ndim, shape);
    XT_TRY(xt_backend_of(like)->binary(&p));
    if (code != XT_ADD && code != XT_SUB) { /* the gradients of sums need no values */
        XT_TRY(xt_save(c, a));
        XT_TRY(xt_save(c, b));
    }
    c->out[c->out_count++] = out;
    out = NULL;
done:
    xt_tensor_release(a);
    xt_tensor_release(b);
    xt_tensor_release(out);
    return status;
}

/* Gradient of one operand before it is summed and cast back: `raw` has the shape and dtype of dout. */
static XtStatus finish(XtNode *n, int input, XtTensor *raw, XtTensor **din) {
    const XtInput *in = xt_node_input(n, input);
    XtTensor *summed = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_sum_to(raw, in->ndim, in->shape, &summed));
    XT_TRY(xt_tensor_or_cast(summed, in->dtype, &din[input]));
done:
    xt_tensor_release(summed);
    return status;
}

/* d(a + b) = (dy, dy), d(a - b) = (dy, -dy). */
static XtStatus add_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtStatus status = XT_OK;
    XtTensor *negative = NULL;
    if (xt_node_needs(n, 0)) XT_TRY(finish(n, 0, dout[0], din));
    if (xt_node_needs(n, 1) && xt_node_op(n)->code == XT_ADD) XT_TRY(finish(n, 1, dout[0], din));
    if (xt_node_needs(n, 1) && xt_node_op(n)->code == XT_SUB) {
        XT_TRY(xt_unary(XT_NEG, dout[0], &negative));
        XT_TRY(finish(n, 1, negative, din));
    }
done:
    xt_tensor_release(negative);
    return status;
}

/* t op (the saved operand `slot`, or the number that stood there). */
static XtStatus with_operand(XtBinaryOp op, XtNode *n, XtTensor *t, int slot, XtTensor **out) {
    XtTensor *operand;
    XT_CHECK(xt_node_saved(n, slot, &operand));
    return operand ? xt_binary(op, t, operand, out) : xt_binary_scalar(op, t, xt_node_args(n)[slot].scalar.d, out);
}

/* d(a b) = (dy b, dy a). */
static XtStatus mul_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtStatus status = XT_OK;
    for (int i = 0; i < 2 && status == XT_OK; i++) {
        if (!xt_node_needs(n, i)) continue;
        XtTensor *raw = NULL;
        status = with_operand(XT_MUL, n, dout[0], 1 - i, &raw);
        if (status == XT_OK) status = finish(n, i, raw, din);
        xt_tensor_release(raw);
    }
    return status;
}

/* d(a / b) = (dy / b, -(dy / b) a / b). */
static XtStatus div_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtStatus status = XT_OK;
    XtTensor *t = NULL, *u = NULL, *v = NULL, *w = NULL;
    XT_TRY(with_operand(XT_DIV, n, dout[0], 1, &t));
    if (xt_node_needs(n, 0)) XT_TRY(finish(n, 0, t, din));
    if (xt_node_needs(n, 1)) {
        XT_TRY(with_operand(XT_MUL, n, t, 0, &u));
        XT_TRY(with_operand(XT_DIV, n, u, 1, &v));
        XT_TRY(xt_unary(XT_NEG, v, &w));
        XT_TRY(finish(n, 1, w, din));
    }
done:
    xt_tensor_release(t);
    xt_tensor_release(u);
    xt_tensor_release(v);
    xt_tensor_release(w);
    return status;
}

/* *t := *t where mask else 0. */
static XtStatus zero_unless(XtTensor *mask, XtTensor **t) {
    XtTensor *out = NULL, *zero = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_filled(*t, (*t)->dtype, 0, NULL, 0.0, &zero));
    XT_TRY(xt_empty_like(*t, &out));
    XtWhere p = {.out = out->view,
                 .condition = xt_broadcast_view(mask, out->ndim, out->shape),
                 .a = (*t)->view,
                 .b = xt_broadcast_view(zero, out->ndim, out->shape)};
    XT_TRY(xt_backend_of(out)->where(&p));
    xt_tensor_release(*t);
    *t = out;
    out = NULL;
done:
    xt_tensor_release(zero);
    xt_tensor_release(out);
    return status;
}

/* d(a^b) = (dy b a^(b-1), dy a^b ln a); 0 where b == 0, and for the exponent 0 where a == 0 and b >= 0, as the limits are. */
static XtStatus pow_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtStatus status = XT_OK;
    XtTensor *a, *b, *t = NULL, *u = NULL, *v = NULL, *mask = NULL, *nonzero = NULL, *negative = NULL;
    XT_TRY(xt_node_saved(n, 0, &a));
    XT_TRY(xt_node_saved(n, 1, &b));
    const XtArg *args = xt_node_args(n);
    if (xt_node_needs(n, 0)) {
        if (b) {
            XT_TRY(xt_binary_scalar(XT_SUB, b, 1.0, &t));
            XT_TRY(xt_binary(XT_POW, a, t, &u));
        } else {
            XT_TRY(xt_binary_scalar(XT_POW, a, args[1].scalar.d - 1.0, &u));
        }
        XT_TRY(with_operand(XT_MUL, n, u, 1, &v));
        if (b) {
            XT_TRY(xt_binary_scalar(XT_NE, b, 0.0, &mask));
            XT_TRY(zero_unless(mask, &v));
        } else if (args[1].scalar.d == 0.0) {
            xt_tensor_release(v);
            v = NULL;
            XT_TRY(xt_filled(a, a->dtype, a->ndim, a->shape, 0.0, &v));
        }
        xt_tensor_release(t);
        t = NULL;
        XT_TRY(xt_binary(XT_MUL, dout[0], v, &t));
        XT_TRY(finish(n, 0, t, din));
    }
    if (xt_node_needs(n, 1)) { /* b is a tensor */
        xt_tensor_release(t), xt_tensor_release(u), xt_tensor_release(v), xt_tensor_release(mask);
        t = u = v = mask = NULL;
        if (a) {
            XT_TRY(xt_binary(XT_POW, a, b, &t));
            XT_TRY(xt_unary(XT_LOG, a, &u));
        } else {
            XT_TRY(xt_filled(b, b->dtype, b->ndim, b->shape, args[0].scalar.d, &v));
            XT_TRY(xt_binary(XT_POW, v, b, &t));
            XT_TRY(xt_unary(XT_LOG, v, &u));
            xt_tensor_release(v);
            v = NULL;
        }
        XT_TRY(xt_binary(XT_MUL, t, u, &v));
        XT_TRY(xt_binary_scalar(XT_NE, u, -INFINITY, &nonzero));
        XT_TRY(xt_binary_scalar(XT_LT, b, 0.0, &negative));
        XT_TRY(xt_binary(XT_MAXIMUM, nonzero, negative, &mask)); /* a != 0 or b < 0 */
        XT_TRY(zero_unless(mask, &v));
        xt_tensor_release(t);
        t = NULL;
        XT_TRY(xt_binary(XT_MUL, dout[0], v, &t));
        XT_TRY(finish(n, 1, t, din));
    }
done:
    xt_tensor_release(t);
    xt_tensor_release(u);
    xt_tensor_release(v);
    xt_tensor_release(mask);
    xt_tensor_release(nonzero);
    xt_tensor_release(negative);
    return status;
}

/* The larger (smaller) operand takes the gradient; on a tie both take half, as in PyTorch. */
static XtStatus extremum_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtStatus status = XT_OK;
    XtTensor *saved[2], *whole = NULL, *tie = NULL, *sum = NULL, *weight = NULL, *raw = NULL, *parts[2] = {NULL, NULL};
    XT_TRY(xt_node_saved(n, 0, &saved[0]));
    XT_TRY(xt_node_saved(n, 1, &saved[1]));
    for (int i = 0; i < 2; i++) {
        if (!xt_node_needs(n, i)) continue;
        bool larger = (xt_node_op(n)->code == XT_MAXIMUM);
        /* weight = ([x > y] + [x >= y]) / 2 */
        XT_TRY(with_operand(larger ? XT_GT : XT_LT, n, saved[i], 1 - i, &whole));
        XT_TRY(with_operand(larger ? XT_GE : XT_LE, n, saved[i], 1 - i, &tie));
        XT_TRY(xt_cast(whole, dout[0]->dtype, &parts[0]));
        XT_TRY(xt_cast(tie, dout[0]->dtype, &parts[1]));
        XT_TRY(xt_binary(XT_ADD, parts[0], parts[1], &sum));
        XT_TRY(xt_binary_scalar(XT_MUL, sum, 0.5, &weight));
        XT_TRY(xt_binary(XT_MUL, dout[0], weight, &raw));
        XT_TRY(finish(n, i, raw, din));
        XtTensor **temporary[] = {&whole, &tie, &sum, &weight, &raw, &parts[0], &parts[1]};
        for (int j = 0; j < 7; j++) xt_tensor_release(*temporary[j]), *temporary[j] = NULL;
    }
done:
    xt_tensor_release(whole);
    xt_tensor_release(tie);
    xt_tensor_release(sum);
    xt_tensor_release(weight);
    xt_tensor_release(raw);
    xt_tensor_release(parts[0]);
    xt_tensor_release(parts[1]);
    return status;
}

/* d(a // b) = (0, 0); d(a % b) = (dy, -dy (a // b)). */
static XtStatus division_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtStatus status = XT_OK;
    XtTensor *a, *b, *quotient = NULL, *product = NULL, *negative = NULL, *whole = NULL;
    bool remainder = xt_node_op(n)->code == XT_REMAINDER;
    XT_TRY(xt_node_saved(n, 0, &a));
    XT_TRY(xt_node_saved(n, 1, &b));
    for (int i = 0; i < 2; i++) {
        const XtInput *in = xt_node_input(n, i);
        if (xt_node_needs(n, i) && !remainder) XT_TRY(xt_filled(dout[0], in->dtype, in->ndim, in->shape, 0.0, &din[i]));
    }
    if (xt_node_needs(n, 0) && remainder) XT_TRY(finish(n, 0, dout[0], din));
    if (xt_node_needs(n, 1) && remainder) { /* b is a tensor */
        if (!a) XT_TRY(xt_filled(b, b->dtype, b->ndim, b->shape, xt_node_args(n)[0].scalar.d, &whole));
        XT_TRY(xt_binary(XT_FLOOR_DIVIDE, a ? a : whole, b, &quotient));
        XT_TRY(xt_binary(XT_MUL, dout[0], quotient, &product));
        XT_TRY(xt_unary(XT_NEG, product, &negative));
        XT_TRY(finish(n, 1, negative, din));
    }
done:
    xt_tensor_release(whole);
    xt_tensor_release(quotient);
    xt_tensor_release(product);
    xt_tensor_release(negative);
    return status;
}

#define BINARY(stem, which, gradient, text)                                             \
    const XtOp xt_op_##stem = {.name = #stem,                                           \
                               .signature = "input: Operand, other: Operand -> Tensor", \
                               .forward = binary_forward,                               \
                               .backward = gradient,                                    \
                               .code = which,                                           \
                               .method = true,                                          \
                               .doc = text " Shapes broadcast, dtypes promote."};
BINARY(add, XT_ADD, add_backward, "input + other.")
BINARY(sub, XT_SUB, add_backward, "input - other.")
BINARY(mul, XT_MUL, mul_backward, "input * other.")
BINARY(div, XT_DIV, div_backward, "input / other; integers become float32.")
BINARY(pow, XT_POW, pow_backward, "input ** other.")
BINARY(maximum, XT_MAXIMUM, extremum_backward, "The larger of both; NaN when either is.")
BINARY(minimum, XT_MINIMUM, extremum_backward, "The smaller of both; NaN when either is.")
BINARY(floor_divide, XT_FLOOR_DIVIDE, division_backward, "input // other, rounded down; integers by 0 give 0.")
BINARY(remainder, XT_REMAINDER, division_backward, "input % other, with the sign of other; integers by 0 give 0.")
BINARY(eq, XT_EQ, NULL, "input == other, as bool.")
BINARY(ne, XT_NE, NULL, "input != other, as bool.")
BINARY(lt, XT_LT, NULL, "input < other, as bool.")
BINARY(le, XT_LE, NULL, "input <= other, as bool.")
BINARY(gt, XT_GT, NULL, "input > other, as bool.")
BINARY(ge, XT_GE, NULL, "input >= other, as bool.")

/* ---- one operand ------------------------------------------------------------------------------------------------------- */

static XtStatus unary_code(const XtOp *op, const XtArg *arg, XtUnaryOp *code) {
    *code = (XtUnaryOp)op->code;
    if (op != &xt_op_gelu || !strcmp(arg[1].s, "none")) return XT_OK;
    if (strcmp(arg[1].s, "tanh")) return xt_error(XT_VALUE_ERROR, "gelu: approximate must be 'none' or 'tanh', got '%s'", arg[1].s);
    *code = XT_GELU_TANH;
    return XT_OK;
}

static XtStatus unary_forward(XtCall *c) {
    XtTensor *x = NULL, *given = c->arg[0].tensor;
    XtUnaryOp code;
    XtStatus status = XT_OK;
    XT_TRY(unary_code(c->op, c->arg, &code));
    bool integers_too = code == XT_NEG || code == XT_ABS;
    if (integers_too && given->dtype == XT_BOOL)
        return xt_error(XT_TYPE_ERROR, "%s: input must be a number tensor, got bool; convert it with .to(xt.int64)", c->op->name);
    XtDtype dtype = integers_too || xt_dtype_is_float(given->dtype) ? given->dtype : XT_FLOAT32;
    XT_TRY(xt_tensor_or_cast(given, dtype, &x));
    XT_TRY(xt_unary(code, x, &c->out[0]));
    c->out_count = 1;
    XT_TRY(xt_save(c, x));
done:
    xt_tensor_release(x);
    return status;
}

/* dx = dy f'(x); the kernel has the table of f'. */
static XtStatus unary_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *x;
    XtUnaryOp code;
    XT_CHECK(xt_node_saved(n, 0, &x));
    XT_CHECK(unary_code(xt_node_op(n), xt_node_args(n), &code));
    XT_CHECK(xt_empty_like(x, &din[0]));
    return xt_backend_of(x)->unary_bwd(&(XtUnaryBwd){.op = code, .dx = din[0]->view, .dy = dout[0]->view, .x = x->view});
}

#define UNARY(stem, which, text)                                       \
    const XtOp xt_op_##stem = {.name = #stem,                          \
                               .signature = "input: Tensor -> Tensor", \
                               .forward = unary_forward,               \
                               .backward = unary_backward,             \
                               .code = which,                          \
                               .method = true,                         \
                               .doc = text};
UNARY(neg, XT_NEG, "-input.")
UNARY(abs, XT_ABS, "|input|; gradient 0 at 0.")
UNARY(exp, XT_EXP, "e ** input.")
UNARY(log, XT_LOG, "Natural logarithm.")
UNARY(sqrt, XT_SQRT, "Square root.")
UNARY(rsqrt, XT_RSQRT, "1 / sqrt(input).")
UNARY(reciprocal, XT_RECIPROCAL, "1 / input.")
UNARY(sin, XT_SIN, "Sine of radians.")
UNARY(cos, XT_COS, "Cosine of radians.")
UNARY(tanh, XT_TANH, "Hyperbolic tangent.")
UNARY(sigmoid, XT_SIGMOID, "1 / (1 + exp(-input)).")
UNARY(relu, XT_RELU, "max(input, 0).")
UNARY(erf, XT_ERF, "Error function, 2 / sqrt(pi) times the integral of exp(-t^2) from 0 to input.")
UNARY(silu, XT_SILU, "input * sigmoid(input).")
const XtOp xt_op_gelu = {
    .name = "gelu",
    .signature = "input: Tensor, approximate: str = 'none' -> Tensor",
    .forward = unary_forward,
    .backward = unary_backward,
    .code = XT_GELU,
    .method = true,
    .doc = "Gaussian error linear unit (Hendrycks & Gimpel 2016): input * Phi(input); approximate='tanh' is\n"
           "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).",
};
