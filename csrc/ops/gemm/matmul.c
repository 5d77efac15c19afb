/* matmul.c - matrix products through the one GEMM slot. With C = A B:  dA = dC B^T,  dB = A^T dC.
 *
 * A transposed operand is a view whose last two strides are swapped; it reaches the kernel as a flag, so neither the forward nor the
 * backward ever moves an element to transpose it. Batch dims broadcast by stride 0. When B is one matrix, the batch of A is folded into
 * its rows: one GEMM for the whole batch.
 */
#include "contract/elementwise.h"
#include "contract/gemm.h"
#include "ops/ops.h"

#include <string.h>

/* One operand as the kernel wants it. */
typedef struct Operand {
    XtTensor *tensor; /* owned */
    XtView view;      /* batch dims of out, then two */
    bool trans;
    int64_t ld;
} Operand;

/* Whether stored rows of `cols` elements lie `stride` apart without overlapping. */
static bool rows_fit(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
    return (col_stride == 1 || cols <= 1) && (row_stride >= cols || rows <= 1);
}

static bool describe(Operand *o) {
    int i = o->view.ndim - 2;
    int64_t rows = o->view.shape[i], cols = o->view.shape[i + 1], s0 = o->view.strides[i], s1 = o->view.strides[i + 1];
    o->trans = false;
    if (rows_fit(rows, cols, s0, s1)) {
        o->ld = rows > 1 ? s0 : cols;
    } else if (rows_fit(cols, rows, s1, s0)) {
        o->trans = true;
        o->ld = cols > 1 ? s1 : rows;
    } else {
        return false;
    }
    if (o->ld < 1) o->ld = 1;
    return true;
}

/* t seen with the batch dims of out in front of its own two. */
static XtStatus prepare(XtTensor *t, const XtTensor *out, bool force_copy, Operand *o) {
    XtStatus status = XT_OK;
    int batch = out->ndim - 2;
    int64_t shape[XT_MAX_DIMS];
    memcpy(shape, out->shape, (size_t)batch * sizeof *shape);
    shape[batch] = t->shape[t->ndim - 2];
    shape[batch + 1] = t->shape[t->ndim - 1];
    xt_tensor_release(o->tensor);
    o->tensor = NULL;
    if (force_copy) {
        XtView wide = xt_broadcast_view(t, out->ndim, shape);
        XtTensor *view = NULL;
        XT_TRY(xt_tensor_from_view(t->storage, &wide, &view));
        status = xt_copy_of(view, &o->tensor);
        xt_tensor_release(view);
        if (status != XT_OK) goto done;
    } else {
        xt_tensor_retain(t);
        o->tensor = t;
    }
    o->view = xt_broadcast_view(o->tensor, out->ndim, shape);
    if (!describe(o)) {
        XtTensor *dense = NULL;
        XT_TRY(xt_copy_of(o->tensor, &dense));
        xt_tensor_release(o->tensor);
        o->tensor = dense;
        o->view = xt_broadcast_view(dense, out->ndim, shape);
        describe(o);
    }
done:
    return status;
}

/* Merges batch dims that advance together in a, b and c until at most two are left; false when more remain. */
static bool collapse_batch(const XtView *a, const XtView *b, const XtView *c, XtGemm *p) {
    int64_t shape[XT_MAX_DIMS], stride[3][XT_MAX_DIMS];
    int n = xt_merge_dims(3, (const XtView *const[]){a, b, c}, 0, c->ndim - 2, false, NULL, shape, stride);
    if (n > 2) return false;
    for (int i = 0; i < 2; i++) {
        int from = n - 2 + i;
        p->batch[i] = from < 0 ? 1 : shape[from];
        p->stride_a[i] = from < 0 ? 0 : stride[0][from];
        p->stride_b[i] = from < 0 ? 0 : stride[1][from];
        p->stride_c[i] = from < 0 ? 0 : stride[2][from];
    }
    return true;
}

/* Folds the batch of a (and c) into the rows when b is one matrix. */
static void fold_rows(XtGemm *p) {
    for (int i = 1; i >= 0; i--) {
        if (p->batch[i] == 1) continue;
        bool inner_done = i == 1 || p->batch[1] == 1;
        if (p->trans_a || !inner_done || p->stride_b[i] != 0 || p->stride_a[i] != p->m * p->lda || p->stride_c[i] != p->m * p->ldc)
            return;
        p->m *= p->batch[i];
        p->batch[i] = 1;
    }
}

/* The product a b into out, which may have more columns than b. l and r own the operands, also after an error. */
static XtStatus describe_product(XtTensor *a, XtTensor *b, XtTensor *out, Operand *l, Operand *r, XtGemm *p) {
    *p = (XtGemm){.c = out->data,
                  .dtype_a = a->dtype,
                  .dtype_b = b->dtype,
                  .dtype_c = out->dtype,
                  .tf32 = xt_tf32(),
                  .alpha = 1.0,
                  .m = out->shape[out->ndim - 2],
                  .n = b->shape[b->ndim - 1],
                  .k = a->shape[a->ndim - 1]};
    XT_CHECK(prepare(a, out, false, l));
    XT_CHECK(prepare(b, out, false, r));
    if (!collapse_batch(&l->view, &r->view, &out->view, p)) {
        XT_CHECK(prepare(a, out, true, l));
        XT_CHECK(prepare(b, out, true, r));
        collapse_batch(&l->view, &r->view, &out->view, p); /* all dense now: one batch dim */
    }
    int64_t columns = out->shape[out->ndim - 1];
    p->a = l->view.data;
    p->b = r->view.data;
    p->trans_a = l->trans;
    p->trans_b = r->trans;
    p->lda = l->ld;
    p->ldb = r->ld;
    p->ldc = columns > 0 ? columns : 1;
    if (p->m > 1 && out->strides[out->ndim - 2] > p->ldc) p->ldc = out->strides[out->ndim - 2];
    fold_rows(p);
    return XT_OK;
}

/* out = a b; *added: whether the bias, [columns] or NULL, is in it. Without a bias `added` may be NULL. */
static XtStatus multiply(XtTensor *a, XtTensor *b, const void *bias, bool accumulate, const char *backend, XtTensor *out,
                         bool *added) {
    Operand l = {0}, r = {0};
    XtStatus status = XT_OK;
    XtGemm p;
    XT_TRY(describe_product(a, b, out, &l, &r, &p));
    p.beta = accumulate ? 1.0 : 0.0;
    if (bias) {
        p.bias = bias;
        XT_TRY(xt_gemm_adds_bias(out->storage->device, backend, &p, added));
        if (!*added) p.bias = NULL;
    }
    XT_TRY(xt_gemm(out->storage->device, backend, &p));
done:
    xt_tensor_release(l.tensor);
    xt_tensor_release(r.tensor);
    return status;
}

XtStatus xt_matmul_into(XtTensor *a, XtTensor *b, bool accumulate, const char *backend, XtTensor *out) {
    return multiply(a, b, NULL, accumulate, backend, out, NULL);
}

XtStatus xt_matmul_with_bias(XtTensor *a, XtTensor *b, XtView bias, XtTensor *out) {
    bool added = false, dense = xt_view_is_contiguous(&bias) && bias.shape[0] > 0;
    XT_CHECK(multiply(a, b, dense ? bias.data : NULL, false, NULL, out, &added));
    if (added) return XT_OK;
    XtTensor vector = {.view = bias};
    XtBinary p = {.op = XT_ADD, .out = out->view, .a = out->view, .b = xt_broadcast_view(&vector, out->ndim, out->shape)};
    return xt_backend_of(out)->binary(&p);
}

XtStatus xt_matmul_epilogue(XtTensor *a, XtTensor *b, int epilogue, const XtTensor *bias, XtTensor *out, XtTensor *extra,
                            bool *done) {
    Operand l = {0}, r = {0};
    XtStatus status = XT_OK;
    XtGemm p;
    *done = false;
    XT_TRY(describe_product(a, b, out, &l, &r, &p));
    p.epilogue = (XtGemmEpilogue)epilogue;
    p.extra = xt_data(extra);
    p.bias = xt_data(bias);
    XT_TRY(xt_gemm_where_supported(out->storage->device, NULL, &p, done));
done:
    xt_tensor_release(l.tensor);
    xt_tensor_release(r.tensor);
    return status;
}

XtStatus xt_transposed(const XtTensor *t, XtTensor **out) {
    XtView view = t->view;
    int i = t->ndim - 2;
    view.shape[i] = t->shape[i + 1], view.shape[i + 1] = t->shape[i];
    view.strides[i] = t->strides[i + 1], view.strides[i + 1] = t->strides[i];
    return xt_tensor_from_view(t->storage, &view, out);
}

/* A 1-D left operand is a row, a 1-D right operand a column, as in PyTorch. */
static XtStatus as_matrix(const XtTensor *t, bool left, XtTensor **out) {
    if (t->ndim >= 2) return xt_tensor_alias(t, out);
    int64_t shape[2] = {left ? 1 : t->shape[0], left ? t->shape[0] : 1};
    int64_t strides[2] = {left ? 1 : t->strides[0], left ? t->strides[0] : 1};
    return xt_view_as(t, 2, shape, strides, out);
}

static XtStatus forward(XtCall *c) {
    XtTensor *x = c->arg[0].tensor, *y = c->arg[1].tensor, *a = NULL, *b = NULL, *out = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_check_ndim(c->op, "input", x, 1, XT_MAX_DIMS));
    XT_TRY(xt_check_ndim(c->op, "other", y, 1, XT_MAX_DIMS));
    XT_TRY(xt_check_float(c->op, "input", x));
    XT_TRY(xt_check_like(c->op, "input", x, "other", y));
    XT_TRY(as_matrix(x, true, &a));
    XT_TRY(as_matrix(y, false, &b));
    int64_t k = a->shape[a->ndim - 1];
    if (b->shape[b->ndim - 2] != k)
        XT_TRY(xt_error(XT_VALUE_ERROR, "matmul: the last dim of input must equal the %s dim of other, got shapes %s and %s",
                        y->ndim > 1 ? "second last" : "only", xt_shape_text(x->ndim, x->shape), xt_shape_text(y->ndim, y->shape)));
    XtTensor batch_a = {.ndim = a->ndim - 2}, batch_b = {.ndim = b->ndim - 2};
    memcpy(batch_a.shape, a->shape, sizeof a->shape);
    memcpy(batch_b.shape, b->shape, sizeof b->shape);
    int batch;
    int64_t shape[XT_MAX_DIMS];
    XT_TRY(xt_broadcast_shape(c->op, &batch_a, &batch_b, &batch, shape));
    shape[batch] = a->shape[a->ndim - 2];
    shape[batch + 1] = b->shape[b->ndim - 1];
    XT_TRY(xt_empty_shape(x, x->dtype, batch + 2, shape, &out));
    XT_TRY(xt_matmul_into(a, b, false, c->arg[2].given ? c->arg[2].s : NULL, out));
    XT_TRY(xt_save(c, a));
    XT_TRY(xt_save(c, b));
    if (x->ndim >= 2 && y->ndim >= 2) {
        c->out[c->out_count++] = out;
        out = NULL;
    } else { /* drop the dim that a vector did not have */
        int ndim = batch;
        if (x->ndim >= 2) shape[ndim++] = a->shape[a->ndim - 2];
        if (y->ndim >= 2) shape[ndim++] = b->shape[b->ndim - 1];
        XT_TRY(xt_reshape(out, ndim, shape, &c->out[0]));
        c->out_count = 1;
    }
done:
    xt_tensor_release(a);
    xt_tensor_release(b);
    xt_tensor_release(out);
    return status;
}

static bool has_shape(const XtTensor *t, int ndim, const int64_t *shape) {
    if (t->ndim != ndim) return false;
    for (int i = 0; i < ndim; i++)
        if (t->shape[i] != shape[i]) return false;
    return true;
}

XtStatus xt_matmul_gradient(XtNode *n, int input, XtTensor *a, XtTensor *b, const char *backend, XtTensor **din) {
    const XtInput *in = xt_node_input(n, input);
    XtTensor *sum = xt_node_accumulator(n, input), *wide = NULL, *summed = NULL;
    XtStatus status = XT_OK;
    int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    int64_t shape[XT_MAX_DIMS];
    for (int i = 0; i < ndim - 2; i++) {
        int ia = i - (ndim - a->ndim), ib = i - (ndim - b->ndim);
        int64_t na = ia < 0 ? 1 : a->shape[ia], nb = ib < 0 ? 1 : b->shape[ib];
        shape[i] = na == 1 ? nb : na;
    }
    shape[ndim - 2] = a->shape[a->ndim - 2];
    shape[ndim - 1] = b->shape[b->ndim - 1];
    if (sum && has_shape(sum, ndim, shape) && has_shape(sum, in->ndim, in->shape)) return xt_matmul_into(a, b, true, backend, sum);
    XT_TRY(xt_empty_shape(a, a->dtype, ndim, shape, &wide));
    XT_TRY(xt_matmul_into(a, b, false, backend, wide));
    /* Sum over broadcast batches, then give vectors their one dim back. */
    if (in->ndim >= 2) {
        XT_TRY(xt_sum_to(wide, in->ndim, in->shape, &din[input]));
    } else {
        int64_t matrix[2] = {wide->shape[ndim - 2], wide->shape[ndim - 1]};
        XT_TRY(xt_sum_to(wide, 2, matrix, &summed));
        XT_TRY(xt_reshape(summed, 1, in->shape, &din[input]));
    }
done:
    xt_tensor_release(wide);
    xt_tensor_release(summed);
    return status;
}

XtStatus xt_rows_gradient(XtNode *n, int input, XtTensor *dy, XtTensor *weight, XtTensor **din) {
    const XtInput *in = xt_node_input(n, input);
    XtTensor *dx = NULL;
    XtStatus status = XT_OK;
    if (in->ndim == 2) return xt_matmul_gradient(n, input, dy, weight, NULL, din);
    XT_TRY(xt_empty_shape(dy, dy->dtype, 2, (int64_t[]){dy->shape[0], weight->shape[1]}, &dx));
    XT_TRY(xt_matmul_into(dy, weight, false, NULL, dx));
    XT_TRY(xt_reshape(dx, in->ndim, in->shape, &din[input]));
done:
    xt_tensor_release(dx);
    return status;
}

XtStatus xt_weight_gradient(XtNode *n, int input, XtTensor *dy, XtTensor *x, XtTensor **din) {
    XtTensor *turned = NULL;
    XT_CHECK(xt_transposed(dy, &turned));
    XtStatus status = xt_matmul_gradient(n, input, turned, x, NULL, din);
    xt_tensor_release(turned);
    return status;
}

static XtStatus backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    XtTensor *a, *b, *dy = NULL, *bt = NULL, *at = NULL, *rows = NULL, *dy_rows = NULL;
    const char *backend = xt_node_args(n)[2].given ? xt_node_args(n)[2].s : NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_saved(n, 0, &a));
    XT_TRY(xt_node_saved(n, 1, &b));
    /* dC with both matrix dims, also when an operand was a vector. */
    int ndim = a->ndim > b->ndim ? a->ndim : b->ndim, own = 0;
    int64_t shape[XT_MAX_DIMS];
    for (int i = 0; i < ndim - 2; i++) shape[i] = dout[0]->shape[own++];
    shape[ndim - 2] = a->shape[a->ndim - 2];
    shape[ndim - 1] = b->shape[b->ndim - 1];
    XT_TRY(xt_reshape(dout[0], ndim, shape, &dy));
    if (xt_node_needs(n, 0)) {
        XT_TRY(xt_transposed(b, &bt));
        XT_TRY(xt_matmul_gradient(n, 0, dy, bt, backend, din));
    }
    if (xt_node_needs(n, 1)) {
        if (b->ndim == 2 && a->ndim > 2) { /* one matrix for the whole batch: its gradient is one product over all rows */
            XT_TRY(xt_as_rows(a, &rows));
            XT_TRY(xt_as_rows(dy, &dy_rows));
            XT_TRY(xt_transposed(rows, &at));
            XT_TRY(xt_matmul_gradient(n, 1, at, dy_rows, backend, din));
        } else {
            XT_TRY(xt_transposed(a, &at));
            XT_TRY(xt_matmul_gradient(n, 1, at, dy, backend, din));
        }
    }
done:
    xt_tensor_release(dy);
    xt_tensor_release(bt);
    xt_tensor_release(at);
    xt_tensor_release(rows);
    xt_tensor_release(dy_rows);
    return status;
}

const XtOp xt_op_matmul = {
    .name = "matmul",
    .signature = "input: Tensor, other: Tensor, *, backend: str? = None -> Tensor",
    .forward = forward,
    .backward = backward,
    .method = true,
    .doc = "Matrix product [..., M, K] @ [..., K, N] -> [..., M, N]; batch dims broadcast, vectors are rows or columns.\n"
           "Floating point, both of one dtype; low precision accumulates in float32. backend: a name of gemm_backends(device).",
};
