/* ops.h - what an op is, the list of all ops, and how one is called.
 *
 * An op is one record, XtOp, in the file of its name: signature text, forward, backward. The signature is the single source for
 * argument parsing, the Python text signature, type stubs and the op table of the tests. `xt_call` runs the forward and, when an
 * input requires a gradient, records a node whose backward is the op's.
 *
 * Signature grammar:  arguments -> result
 *
 *   Arguments, comma separated:  name: kind [= default]     a `*` alone makes the rest keyword-only
 *     Tensor  Tensor?  Tensors  Operand (Tensor or number)  int  int?  float  float?  bool  str?  dtype  dtype?  device?
 *     ints (a tuple, or the remaining positional arguments when it comes last)  ints? (an int or a tuple or None)  number
 *   Defaults: None, True, False, a number, a 'word', or () .
 *   Result of an op:  Tensor  (Tensor, Tensor) (a tuple)  (Tensor, ...) (a tuple of any length)  None
 *     self (the object given as the first argument)
 */
#pragma once

#include "autograd/tape.h"
#include "backend/backend.h"
#include "contract/backend.h"
#include "kernels.h"

#define XT_MAX_ARGS 14
#define XT_MAX_OUTPUTS 64

typedef enum XtArgKind {
    XT_ARG_TENSOR,
    XT_ARG_TENSORS,
    XT_ARG_OPERAND,
    XT_ARG_INT,
    XT_ARG_FLOAT,
    XT_ARG_BOOL,
    XT_ARG_STR,
    XT_ARG_DTYPE,
    XT_ARG_DEVICE,
    XT_ARG_INTS,
    XT_ARG_NUMBER,
} XtArgKind;

/* One argument of a call. `given` is false for None. Only the fields of the kind are set; inputs of the graph are numbered in argument
 * order, a list counting once per element. */
typedef struct XtArg {
    bool given;
    bool is_tensor;     /* Tensor, Tensor?, Operand: a possible input of the graph, even when absent or a number */
    XtTensor *tensor;   /* Tensor, Operand (NULL: see scalar); borrowed */
    XtTensor **tensors; /* Tensors; borrowed */
    int count;          /* Tensors, ints */
    bool is_sequence;   /* ints: a tuple or list was given, not one int */
    int64_t i;          /* int, dtype (as XtDtype) */
    double f;
    bool b;
    const char *s;
    XtDevice device;
    XtScalar scalar; /* number, Operand */
    int64_t ints[XT_MAX_DIMS];
} XtArg;

struct XtCall;

typedef struct XtOp {
    const char *name;
    const char *signature;
    XtStatus (*forward)(struct XtCall *call);
    XtBackward backward; /* NULL: no gradient */
    XtRecompute
        recompute; /* NULL: outputs are kept. Else cheap to run again: in recompute mode nobody keeps the outputs that it fills */
    unsigned recomputes; /* bit o: output o is one of them */
    int code;            /* which member of a family this is (XT_ADD, XT_REDUCE_SUM, ...) */
    bool method;         /* also a method of Tensor, the first argument being self */
    const char *doc;     /* one or more lines: formula, shapes, dtypes, errors */
} XtOp;

/* A call under way. The forward sets out[] (new references) and out_count, and may xt_save() what the backward reads. */
typedef struct XtCall {
    const XtOp *op;
    const XtArg *arg;
    int arg_count;
    bool record;     /* false: xt_save does nothing */
    bool recomputed; /* `recompute` may be asked for the outputs: it, too, must find what it needs saved */
    XtTensor *out[XT_MAX_OUTPUTS];
    int out_count;
    XtTensor *saved[XT_MAX_SAVED]; /* owned */
    int saved_count;
} XtCall;

XtStatus xt_save(XtCall *call, XtTensor *tensor); /* retains; NULL keeps its slot empty */

/* In a backward: the scalar arguments of the recorded call (tensor fields are NULL). */
const XtArg *xt_node_args(const XtNode *node);
const XtOp *xt_node_op(const XtNode *node);
/* In a backward: shape, dtype and device of input i. */
typedef struct XtInput {
    XtDevice device;
    XtDtype dtype;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
} XtInput;
const XtInput *xt_node_input(const XtNode *node, int input);

/* Runs op on args: grad mode, forward, recording. out[] receives new references. */
XtStatus xt_call(const XtOp *op, const XtArg *args, int arg_count, XtTensor **out, int *out_count);

/* ---- every op of XT_OPS (kernels.h) ----------------------------------------------------------------------------------------- */

#define XT_X(name) extern const XtOp xt_op_##name;
XT_OPS(XT_X)
#undef XT_X
extern const XtOp *const xt_ops[]; /* ends with NULL */

/* ---- helpers shared by ops (ops/common.c) ------------------------------------------------------------------------------------ */

/* Checks: the message names op, argument, rule and value. */
XtStatus xt_check_float(const XtOp *op, const char *arg, const XtTensor *t);
XtStatus xt_check_dtype(const XtOp *op, const char *arg, const XtTensor *t, XtDtype dtype);
/* Whether dtype can hold the number, fractions truncated; a float dtype holds every number. */
bool xt_scalar_fits(XtScalar value, XtDtype dtype);
XtStatus xt_check_fits(const XtOp *op, const char *arg, XtScalar value, XtDtype dtype);
XtStatus xt_check_ndim(const XtOp *op, const char *arg, const XtTensor *t, int minimum, int maximum);
XtStatus xt_check_shape(const XtOp *op, const char *arg, const XtTensor *t, int ndim, const int64_t *shape);
/* b must have a's device and dtype. */
XtStatus xt_check_like(const XtOp *op, const char *arg_a, const XtTensor *a, const char *arg_b, const XtTensor *b);
XtStatus xt_check_device(const XtOp *op, const char *arg_a, const XtTensor *a, const char *arg_b, const XtTensor *b);
/* Turns a possibly negative dim into 0..ndim-1. */
XtStatus xt_check_dim(const XtOp *op, int64_t dim, int ndim, int *out);
/* softcap is not given, or positive and finite in float32, in which kernels may divide by it. */
XtStatus xt_check_softcap(const XtOp *op, const XtArg *arg);

const XtBackend *xt_backend_of(const XtTensor *t);

/* *out = t, with a reference of its own; XT_OK. */
XtStatus xt_share(XtTensor *t, XtTensor **out);
/* Returns status. One that is not XT_OK releases *out and sets it to NULL. */
XtStatus xt_or_release(XtStatus status, XtTensor **out);

/* Whether the memory of two contiguous tensors has bytes in common. The data of a tensor without elements is the beginning of its storage,
 * which is inside no other tensor. */
static inline bool xt_share_memory(const XtTensor *a, const XtTensor *b) {
    const int64_t size_a = xt_view_numel(&a->view) * (int64_t)xt_dtype_size(a->dtype);
    const int64_t size_b = xt_view_numel(&b->view) * (int64_t)xt_dtype_size(b->dtype);
    const char *x = a->data, *y = b->data;
    return x < y + size_b && y < x + size_a;
}

/* The elements of t; NULL for NULL. */
static inline void *xt_data(const XtTensor *t) { return t ? t->data : NULL; }

/* All return new tensors. */
XtStatus xt_empty_like(const XtTensor *t, XtTensor **out); /* dense, same shape, dtype, device */
XtStatus xt_empty_shape(const XtTensor *like, XtDtype dtype, int ndim, const int64_t *shape, XtTensor **out);
XtStatus xt_dense(XtTensor *t, XtTensor **out);                         /* t itself when already dense, else a copy */
XtStatus xt_copy_of(XtTensor *t, XtTensor **out);                       /* dense, always a copy */
XtStatus xt_cast(XtTensor *t, XtDtype dtype, XtTensor **out);           /* dense or t itself */
XtStatus xt_tensor_or_cast(XtTensor *t, XtDtype dtype, XtTensor **out); /* t itself, strided or not, unless the dtype differs */
XtStatus xt_filled(const XtTensor *like, XtDtype dtype, int ndim, const int64_t *shape, double value, XtTensor **out);
XtStatus xt_view_as(const XtTensor *t, int ndim, const int64_t *shape, const int64_t *strides, XtTensor **out);
bool xt_reshape_strides(const XtTensor *t, int ndim, const int64_t *shape, int64_t *strides); /* false: it takes a copy */
XtStatus xt_reshape(XtTensor *t, int ndim, const int64_t *shape, XtTensor **out);             /* view when possible, else copy */
/* [..., cols] as [all rows, cols], for at least one dim. */
XtStatus xt_as_rows(XtTensor *t, XtTensor **out);
/* The reverse: [all rows, K] as [..., K], with the dims of x before its last one. */
XtStatus xt_rows_like(XtTensor *rows, const XtTensor *x, XtTensor **out);
/* The dtype of two operands (ops/elementwise/elementwise.c): a number or a 0-dim tensor counts only when it is of a higher kind. */
XtDtype xt_result_dtype(const XtArg *a, const XtArg *b);
XtStatus xt_broadcast_shape(const XtOp *op, const XtTensor *a, const XtTensor *b, int *ndim, int64_t *shape);
XtView xt_broadcast_view(const XtTensor *t, int ndim, const int64_t *shape);     /* strides 0 where repeated */
XtStatus xt_sum_to(XtTensor *t, int ndim, const int64_t *shape, XtTensor **out); /* undoes a broadcast */

/* ---- tensors whose memory lies together (ops/elementwise/joined.c) ----------------------------------------------------------- */

/* out[i] = new, dense, uninitialised, with the shape of like[i], one after the other in one block: parts of one storage. All have dtype
 * and device of like[0]. After an error nothing is kept. */
XtStatus xt_empty_joined(int count, XtTensor *const *like, XtTensor **out);
/* The matrices as one [all rows, cols], new; NULL unless each begins where the one before ends, in one block, with as many columns. */
XtStatus xt_join_rows(int count, XtTensor *const *matrices, XtTensor **out);
/* out[i] = new, uninitialised, with the shape of like[i] [..., heads, D]. Where all like[i] are columns of one product that fills its
 * block, they are columns of another block as like[i] are of theirs, and the rest of it is unwritten, or has columns that an earlier rule
 * of this backward left there: what split() gathers in place. Else each alone, where it is such columns; others are dense. For rules. */
XtStatus xt_empty_like_columns(int count, XtTensor *const *like, XtTensor **out);
/* Whether t [..., heads, D] is such columns, and not all of them. */
bool xt_is_columns(XtTensor *t);
/* In a backward: whether t is such columns, and their gradient belongs among columns: others are there already, or it is half of the block
 * or more, which it may have to hold alone. */
bool xt_columns_pay(XtTensor *t);
bool xt_adjoin(const XtTensor *first,
               const XtTensor *second); /* dense, of one dtype and block, the second right behind the first */

/* ---- matrix products (ops/gemm/matmul.c) ------------------------------------------------------------------------------------------ */

/* out = a b + (accumulate ? out : 0) over the last two dims, batch dims broadcasting to out's; all of one dtype, at least 2-D.
 * out is dense, or a matrix whose rows lie further apart.
 * Transposes are read from the strides; operands are copied only when no leading dimension can describe them. */
XtStatus xt_matmul_into(XtTensor *a, XtTensor *b, bool accumulate, const char *backend, XtTensor *out);
/* out = a b + bias, a vector of the last dim of out. The bias joins the unrounded sums where the product's implementation adds it
 * (cuBLASLt), and the rounded ones elsewhere. */
XtStatus xt_matmul_with_bias(XtTensor *a, XtTensor *b, XtView bias, XtTensor *out);
/* The product of two matrices with an XtGemmEpilogue of contract/gemm.h, into its C and extra; bias dense, or NULL. *done is false, and
 * nothing was written, where no implementation in force has it. */
XtStatus xt_matmul_epilogue(XtTensor *a, XtTensor *b, int epilogue, const XtTensor *bias, XtTensor *out, XtTensor *extra,
                            bool *done);
/* din[input] = a b with the input's shape, added straight to the sum under way where the tape allows. */
XtStatus xt_matmul_gradient(XtNode *n, int input, XtTensor *a, XtTensor *b, const char *backend, XtTensor **din);
/* The same of y = x W^T, from the rows of dy and x: din[input] = dy W, in the shape [..., C] of x, and din[input] = dy^T x. */
XtStatus xt_rows_gradient(XtNode *n, int input, XtTensor *dy, XtTensor *weight, XtTensor **din);
XtStatus xt_weight_gradient(XtNode *n, int input, XtTensor *dy, XtTensor *x, XtTensor **din);
/* y [rows, all columns] = rows [W_0; W_1; ...]^T, one product where the weights lie together (ops/gemm/linear_joined.c). */
XtStatus xt_joined_product(XtTensor *rows, int count, XtTensor *const *weights, XtTensor *y);
/* The gradients of an op whose input 0 is the input and whose inputs 1 to count are these weights, from dy [rows, all columns]. */
XtStatus xt_joined_gradients(XtNode *n, int count, XtTensor *const *weights, XtTensor *rows, XtTensor *dy, XtTensor **din);
/* View with the last two dims swapped. */
XtStatus xt_transposed(const XtTensor *t, XtTensor **out);

/* ---- LayerNorm (ops/layers/layer_norm.c), also after an addition: `first` is the argument weight, bias and eps follow ---------------- */

/* The inputs of a call: vector[] = dense weight and bias, new, or NULL. */
XtStatus xt_layer_norm_check(const XtCall *c, int first, XtTensor *vector[2]);
/* New y, mean and rstd of x; with a residual of x + residual, which is *sum, new too. */
XtStatus xt_layer_norm_of(XtTensor *x, XtTensor *residual, XtTensor *const vector[2], double eps, XtTensor **sum, XtTensor **y,
                          XtTensor **mean, XtTensor **rstd);
/* Saves what the next two read; x is what was normalised. */
XtStatus xt_layer_norm_save(XtCall *c, XtTensor *x, XtTensor *const vector[2], XtTensor *mean, XtTensor *rstd);
/* *out: returns new, y computed again, with the bits of the forward. */
XtStatus xt_layer_norm_again(XtNode *n, double eps, XtTensor **out);
/* din of weight and bias, and *dx, new, where it is needed; dsum is added to it. */
XtStatus xt_layer_norm_gradient(XtNode *n, int first, XtTensor *dout, const XtTensor *dsum, bool needs_dx, XtTensor **dx,
                                XtTensor **din);

/* ---- norms (ops/layers/rms_norm.c) ------------------------------------------------------------------------------------------------- */

/* y = rms_norm(x, weight, eps), and the rstd of its rows; x and weight (or NULL) dense. After an error nothing is kept. */
XtStatus xt_rms_norm(XtTensor *x, XtTensor *weight, double eps, bool plus_one, XtTensor **y, XtTensor **rstd);
/* XtRecompute of one output: the norm of saved tensor 0 with weight, saved tensor 1. */
XtStatus xt_rms_norm_again(XtNode *n, double eps, bool plus_one, XtTensor **y);

/* ---- cross entropy of rows of logits (ops/layers/cross_entropy.c) --------------------------------------------------------------------
 * Ops whose arguments `first`, first + 1 and first + 2 are targets, ignore_index and reduction. Logits are [rows, V], rows ld apart. */

/* Checks the three: targets must be class indices, one for each row of x, on its device. */
XtStatus xt_check_targets(const XtCall *c, int first, const char *arg_x, const XtTensor *x, const char *arg_targets);
/* Sets out[0] to the reduction of losses [rows]; targets int64. *count: the number of rows that count, for a mean only. */
XtStatus xt_reduce_losses(XtCall *c, int first, XtTensor *targets, XtTensor *losses, XtTensor **count);
/* Sets out[0] to the reduced loss and saves three tensors: int64 targets, lse [rows], the number of rows that count or NULL. */
XtStatus xt_rows_loss(XtCall *c, int first, const XtTensor *logits, int64_t ld, double softcap);
/* dlogits from logits, which it may be, and from the three tensors saved from slot `slot` on. */
XtStatus xt_rows_loss_gradient(XtNode *n, int first, int slot, XtTensor *dloss, const XtTensor *logits, const XtTensor *dlogits,
                               int64_t ld, double softcap);

/* Rows of logits [rows, vocab] that linear_cross_entropy makes at once (ops/layers/linear_cross_entropy.c), at most `rows`, and whether its
 * forward makes the gradients, which it does where that is fewer than all: functions of their arguments alone. */
int64_t xt_rows_of_chunk(int64_t rows, int64_t vocab, XtDtype dtype);
bool xt_makes_gradients_ahead(int64_t rows, int64_t width, int64_t vocab, XtDtype dtype);

/* ---- rows of heads that are turned by their position (ops/layers/rope.c) --------------------------------------------------------------
 * Ops whose arguments from `first` on are theta, positions, period and XT_ROPE_SCALING; x is [rows, H, D] or [B, S, H, D]. */
#define XT_ROPE_SCALING \
    "factor: float = 1.0, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0, original_length: float = 0.0"

/* x itself when its rows lie evenly, else a dense copy; stride: of rows and of heads. */
XtStatus xt_even_rows(XtTensor *x, XtTensor **out, int64_t stride[2]);
/* Checks them. *positions: one dense int64 a row, or NULL; the position of a row is then row % *period. */
XtStatus xt_rope_places(const XtCall *c, int first, const char *arg_x, const XtTensor *x, XtTensor **positions, int64_t *period);
/* The period alone, in a backward: x has the shape of the forward's. */
int64_t xt_rope_period(const XtArg *arg, int first, const XtTensor *x);
/* theta and scaling, and what they must be. */
struct XtRopeBase xt_rope_base(const XtArg *arg, int first);
XtStatus xt_check_rope_base(const XtOp *op, const struct XtRopeBase *base);
