/* gather.c - elements and rows picked by tensors of indices, and put back: gather, scatter, scatter_add, index and index_put.
 *
 * Each makes the places of what the indices name, in the input as a dense table [places, cols], and keeps them for the backward.
 * Picking and its gradient are the kernels of embedding: picked[r] = table[place[r]], and dtable[v] = sum of dpicked[r] over the rows
 * with place[r] == v, in a fixed order. Putting: of several rows for one place the last counts, and takes the gradient. */
#include "contract/elementwise.h"
#include "contract/layers.h"
#include "ops/ops.h"

#include <string.h>

/* What a call names: rows of cols elements, out of a table of `places` rows. */
typedef struct Named {
    XtTensor *place; /* int64 [rows]; owned */
    int64_t rows, cols, places;
    int ndim; /* of what is picked, and its shape */
    int64_t shape[XT_MAX_DIMS];
} Named;

static XtStatus check_index(const XtOp *op, const char *name, const XtTensor *index, const XtTensor *input) {
    if (index->dtype != XT_INT64 && index->dtype != XT_INT32)
        return xt_error(XT_TYPE_ERROR, "%s: %s must be int64 or int32, got %s", op->name, name, xt_dtype_name(index->dtype));
    return xt_check_device(op, name, index, "input", input);
}

static XtStatus find(const XtTensor *input, XtPositions *p, Named *out) {
    XtView shape = {.ndim = p->ndim};
    memcpy(shape.shape, p->shape, sizeof shape.shape);
    out->rows = xt_view_numel(&shape);
    XT_CHECK(xt_empty_shape(input, XT_INT64, 1, &out->rows, &out->place));
    p->out = out->place->data;
    return xt_backend_of(input)->positions(p);
}

/* Arguments 0 to 2: input, dim, index. One element for each of index: the place is its own, but along dim. */
static XtStatus along(XtCall *c, Named *out) {
    XtTensor *input = c->arg[0].tensor, *given = c->arg[2].tensor, *index = NULL;
    XtStatus status = XT_OK;
    int dim;
    XT_TRY(check_index(c->op, "index", given, input));
    XT_TRY(xt_check_ndim(c->op, "input", input, 1, XT_MAX_DIMS));
    XT_TRY(xt_check_ndim(c->op, "index", given, input->ndim, input->ndim));
    XT_TRY(xt_check_dim(c->op, c->arg[1].i, input->ndim, &dim));
    XtPositions p = {.ndim = input->ndim, .count = 1, .op = c->op->name};
    int64_t stride = 1;
    for (int d = input->ndim - 1; d >= 0; d--) {
        p.shape[d] = given->shape[d];
        if (d == dim) p.size[0] = input->shape[d], p.stride[0] = stride;
        else p.step[d] = stride;
        stride *= input->shape[d];
        if (d != dim && given->shape[d] > input->shape[d])
            XT_TRY(xt_error(XT_VALUE_ERROR, "%s: index must have at most the sizes of input %s but along dim %d, got %s",
                            c->op->name, xt_shape_text(input->ndim, input->shape), dim, xt_shape_text(given->ndim, given->shape)));
    }
    XT_TRY(xt_tensor_or_cast(given, XT_INT64, &index));
    p.index[0] = index->view;
    out->cols = 1;
    out->places = stride;
    out->ndim = index->ndim;
    memcpy(out->shape, index->shape, sizeof out->shape);
    XT_TRY(find(input, &p, out));
done:
    xt_tensor_release(index);
    return status;
}

/* Arguments 0 and 1: input and indices, which broadcast and name places in the first dims of input; negative ones count from the end. */
static XtStatus among(XtCall *c, Named *out) {
    XtTensor *input = c->arg[0].tensor, *index[XT_MAX_DIMS] = {NULL};
    const XtArg *indices = &c->arg[1];
    XtStatus status = XT_OK;
    XtPositions p = {.count = indices->count, .wrap = true, .op = c->op->name};
    XtTensor all = {.ndim = 0};
    if (indices->count < 1 || indices->count > input->ndim)
        XT_TRY(xt_error(XT_VALUE_ERROR, "%s: indices must be 1 to %d tensors for input of shape %s, got %d", c->op->name,
                        input->ndim, xt_shape_text(input->ndim, input->shape), indices->count));
    for (int k = 0; k < indices->count; k++) {
        XT_TRY(check_index(c->op, "indices", indices->tensors[k], input));
        XT_TRY(xt_broadcast_shape(c->op, &all, indices->tensors[k], &p.ndim, p.shape));
        all.ndim = p.ndim;
        memcpy(all.shape, p.shape, sizeof all.shape);
    }
    out->places = out->cols = 1;
    for (int d = input->ndim - 1; d >= 0; d--) {
        if (d < indices->count) {
            p.size[d] = input->shape[d];
            p.stride[d] = out->places;
            out->places *= input->shape[d];
        } else {
            out->cols *= input->shape[d];
        }
    }
    out->ndim = p.ndim + input->ndim - indices->count;
    if (out->ndim > XT_MAX_DIMS)
        XT_TRY(xt_error(XT_VALUE_ERROR, "%s: the result must have at most %d dimensions, got %d", c->op->name, XT_MAX_DIMS,
                        out->ndim));
    memcpy(out->shape, p.shape, sizeof out->shape);
    for (int d = indices->count; d < input->ndim; d++) out->shape[p.ndim + d - indices->count] = input->shape[d];
    for (int k = 0; k < indices->count; k++) {
        XT_TRY(xt_tensor_or_cast(indices->tensors[k], XT_INT64, &index[k]));
        p.index[k] = xt_broadcast_view(index[k], p.ndim, p.shape);
    }
    XT_TRY(find(input, &p, out));
done:
    for (int k = 0; k < XT_MAX_DIMS; k++) xt_tensor_release(index[k]);
    return status;
}

/* ---- picking ------------------------------------------------------------------------------------------------------------- */

/* to [rows, cols] = the named rows of table. */
static XtStatus pick(const Named *named, const XtTensor *table, XtTensor *to) {
    XtEmbeddingFwd p = {.out = to->data,
                        .weight = table->data,
                        .ids = named->place->data,
                        .dtype = table->dtype,
                        .rows = named->rows,
                        .cols = named->cols,
                        .vocab = named->places};
    return xt_backend_of(table)->embedding_fwd(&p);
}

/* table (+)= the sums of rows [rows, cols] by place. */
static XtStatus add_up(const Named *named, const XtTensor *rows, XtTensor *table, bool accumulate) {
    XtEmbeddingBwd p = {.dweight = table->data,
                        .dy = rows->data,
                        .ids = named->place->data,
                        .dtype = rows->dtype,
                        .rows = named->rows,
                        .cols = named->cols,
                        .vocab = named->places,
                        .accumulate = accumulate};
    return xt_backend_of(rows)->embedding_bwd(&p);
}

static XtStatus pick_forward(XtCall *c) {
    XtTensor *table = NULL;
    Named named = {0};
    XtStatus status = XT_OK;
    XT_TRY(c->op == &xt_op_gather ? along(c, &named) : among(c, &named));
    XT_TRY(xt_dense(c->arg[0].tensor, &table));
    XT_TRY(xt_empty_shape(table, table->dtype, named.ndim, named.shape, &c->out[0]));
    c->out_count = 1;
    XT_TRY(pick(&named, table, c->out[0]));
    XT_TRY(xt_save(c, named.place));
done:
    xt_tensor_release(named.place);
    xt_tensor_release(table);
    return status;
}

/* The places of the forward. rows of cols elements were picked out of input 0, or put there. */
static XtStatus named_again(XtNode *n, Named *out) {
    const XtInput *in = xt_node_input(n, 0);
    XT_CHECK(xt_node_saved(n, 0, &out->place));
    bool rows = xt_node_op(n) == &xt_op_index || xt_node_op(n) == &xt_op_index_put;
    out->rows = out->place->shape[0];
    out->cols = out->places = 1;
    for (int d = 0; d < in->ndim; d++) *(rows && d >= xt_node_args(n)[1].count ? &out->cols : &out->places) *= in->shape[d];
    return XT_OK;
}

static XtStatus pick_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    const XtInput *in = xt_node_input(n, 0);
    XtTensor *dy = NULL;
    Named named;
    XtStatus status = XT_OK;
    XT_TRY(named_again(n, &named));
    XT_TRY(xt_dense(dout[0], &dy));
    XtTensor *sum = xt_node_accumulator(n, 0);
    if (!sum) XT_TRY(xt_empty_shape(dy, in->dtype, in->ndim, in->shape, &din[0]));
    XT_TRY(add_up(&named, dy, sum ? sum : din[0], sum != NULL));
done:
    xt_tensor_release(dy);
    return status;
}

/* ---- putting ------------------------------------------------------------------------------------------------------------- */

/* Arguments input, dim, index, src; or input, indices, values, accumulate. */
static XtStatus put_forward(XtCall *c) {
    bool rows = c->op == &xt_op_index_put, add = c->op == &xt_op_scatter_add || (rows && c->arg[3].b);
    const char *name = rows ? "values" : "src";
    XtTensor *input = c->arg[0].tensor, *given = c->arg[rows ? 2 : 3].tensor, *values = NULL, *last = NULL;
    Named named = {0};
    XtStatus status = XT_OK;
    if (add) XT_TRY(xt_check_float(c->op, "input", input));
    XT_TRY(xt_check_like(c->op, "input", input, name, given));
    XT_TRY(rows ? among(c, &named) : along(c, &named));
    XT_TRY(xt_check_shape(c->op, name, given, named.ndim, named.shape));
    XT_TRY(xt_dense(given, &values));
    XT_TRY(xt_copy_of(input, &c->out[0]));
    c->out_count = 1;
    if (add) {
        XT_TRY(add_up(&named, values, c->out[0], true));
    } else {
        if (c->record && xt_requires_grad(given)) XT_TRY(xt_empty_shape(input, XT_BOOL, 2, (int64_t[]){named.rows, 1}, &last));
        XtScatter p = {.table = c->out[0]->data,
                       .last = xt_data(last),
                       .rows = values->data,
                       .ids = named.place->data,
                       .dtype = values->dtype,
                       .count = named.rows,
                       .cols = named.cols,
                       .places = named.places};
        XT_TRY(xt_backend_of(input)->scatter(&p));
    }
    XT_TRY(xt_save(c, named.place));
    XT_TRY(xt_save(c, last));
done:
    xt_tensor_release(named.place);
    xt_tensor_release(values);
    xt_tensor_release(last);
    return status;
}

/* *din = dy with zeros in the named rows. */
static XtStatus without(const Named *named, XtTensor *dy, XtTensor **din) {
    XtTensor *zeros = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_filled(dy, dy->dtype, 2, (int64_t[]){named->rows, named->cols}, 0.0, &zeros));
    XT_TRY(xt_copy_of(dy, din));
    XtScatter p = {.table = (*din)->data,
                   .rows = zeros->data,
                   .ids = named->place->data,
                   .dtype = dy->dtype,
                   .count = named->rows,
                   .cols = named->cols,
                   .places = named->places};
    XT_TRY(xt_backend_of(dy)->scatter(&p));
done:
    xt_tensor_release(zeros);
    return status;
}

/* dinput is dy, without the rows that were replaced; a row of values takes dy of its place if it is there. */
static XtStatus put_backward(XtNode *n, XtTensor *const *dout, XtTensor **din) {
    bool rows = xt_node_op(n) == &xt_op_index_put, add = xt_node_op(n) == &xt_op_scatter_add || (rows && xt_node_args(n)[3].b);
    int values = rows ? 1 + xt_node_args(n)[1].count : 2;
    XtTensor *dy = NULL, *last = NULL, *picked = NULL, *zero = NULL;
    Named named;
    XtStatus status = XT_OK;
    XT_TRY(named_again(n, &named));
    XT_TRY(xt_dense(dout[0], &dy));
    if (xt_node_needs(n, 0) && add) XT_TRY(xt_share(dy, &din[0]));
    if (xt_node_needs(n, 0) && !add) XT_TRY(without(&named, dy, &din[0]));
    if (xt_node_needs(n, values)) {
        const XtInput *in = xt_node_input(n, values);
        XT_TRY(xt_empty_shape(dy, dy->dtype, in->ndim, in->shape, &picked));
        XT_TRY(pick(&named, dy, picked));
        if (!add) {
            XT_TRY(xt_node_saved(n, 1, &last));
            XT_TRY(xt_filled(dy, dy->dtype, 0, NULL, 0.0, &zero));
            XtView to = picked->view; /* as [rows, cols] */
            to.ndim = 2, to.shape[0] = named.rows, to.shape[1] = named.cols;
            xt_view_set_contiguous(&to);
            XtWhere p = {
                .out = to, .condition = xt_broadcast_view(last, 2, to.shape), .a = to, .b = xt_broadcast_view(zero, 2, to.shape)};
            XT_TRY(xt_backend_of(dy)->where(&p));
        }
        din[values] = picked;
        picked = NULL;
    }
done:
    xt_tensor_release(dy);
    xt_tensor_release(picked);
    xt_tensor_release(zero);
    return status;
}

const XtOp xt_op_gather = {
    .name = "gather",
    .signature = "input: Tensor, dim: int, index: Tensor -> Tensor",
    .forward = pick_forward,
    .backward = pick_backward,
    .method = true,
    .doc = "Elements of input along dim: out[i, j, k] = input[index[i, j, k], j, k] for dim 0. index: int64 or int32, of as many "
           "dims, "
           "no larger than input but along dim. Any dtype. IndexError for an index outside [0, size of dim).",
};
const XtOp xt_op_index = {
    .name = "index",
    .signature = "input: Tensor, indices: Tensors -> Tensor",
    .forward = pick_forward,
    .backward = pick_backward,
    .doc =
        "Rows of input: indices (int64 or int32), broadcast, name places in its first dims -> [*their shape, *the other dims]. Any "
        "dtype. Negative indices count from the end; IndexError for one outside.",
};
const XtOp xt_op_scatter = {
    .name = "scatter",
    .signature = "input: Tensor, dim: int, index: Tensor, src: Tensor -> Tensor",
    .forward = put_forward,
    .backward = put_backward,
    .doc = "input with elements of src in the places that gather(input, dim, index) reads. src: of index's shape and input's "
           "dtype. Of "
           "several elements for one place the last counts.",
};
const XtOp xt_op_scatter_add = {
    .name = "scatter_add",
    .signature = "input: Tensor, dim: int, index: Tensor, src: Tensor -> Tensor",
    .forward = put_forward,
    .backward = put_backward,
    .doc = "input with elements of src added in the places that gather(input, dim, index) reads, in a fixed order, in float32 "
           "(float64). "
           "Float dtypes.",
};
const XtOp xt_op_index_put = {
    .name = "index_put",
    .signature = "input: Tensor, indices: Tensors, values: Tensor, accumulate: bool = False -> Tensor",
    .forward = put_forward,
    .backward = put_backward,
    .doc = "input with the rows that index(input, indices) reads replaced by values, which have the shape of its result; of "
           "several for "
           "one place the last counts. accumulate: added, for float dtypes.",
};
