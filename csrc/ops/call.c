/* call.c - runs an op: forward, then a node on the tape when an input requires a gradient. */
#include "ops.h"

#include "core/span.h"
#include "reads.h"

#include <stdlib.h>
#include <string.h>

const XtOp *const xt_ops[] = {
#define XT_X(name) &xt_op_##name,
    XT_OPS(XT_X)
#undef XT_X
        NULL,
};

XtStatus xt_save(XtCall *call, XtTensor *tensor) {
    if (!call->record) return XT_OK;
    if (call->saved_count == XT_MAX_SAVED)
        return xt_error(XT_RUNTIME_ERROR, "%s: saves more than %d tensors", call->op->name, XT_MAX_SAVED);
    if (tensor) xt_tensor_retain(tensor);
    call->saved[call->saved_count++] = tensor;
    return XT_OK;
}

/* What the backward needs of a call besides saved tensors: scalar arguments, and shape, dtype and device of each input. */
typedef struct Record {
    const XtOp *op;
    XtArg args[XT_MAX_ARGS];
    char text[64]; /* copies of string arguments, whose Python objects may be freed */
    XtInput input[];
} Record;

const XtArg *xt_node_args(const XtNode *node) { return ((const Record *)node->context)->args; }
const XtOp *xt_node_op(const XtNode *node) { return ((const Record *)node->context)->op; }
const XtInput *xt_node_input(const XtNode *node, int input) { return &((const Record *)node->context)->input[input]; }

/* Counts the tensors among the arguments and, unless `inputs` is NULL, lists them in order. An absent optional tensor is a NULL. */
static int gather_inputs(const XtArg *args, int arg_count, XtTensor **inputs) {
    int n = 0;
    for (int i = 0; i < arg_count; i++) {
        if (args[i].tensors) {
            for (int j = 0; j < args[i].count; j++, n++)
                if (inputs) inputs[n] = args[i].tensors[j];
        } else if (args[i].is_tensor) {
            if (inputs) inputs[n] = args[i].tensor;
            n++;
        }
    }
    return n;
}

static XtStatus record(XtCall *call, XtTensor **inputs, int input_count) {
    XtNode *node = NULL;
    XtStatus status = XT_OK;
    XT_TRY(xt_node_new(call->op->name, call->op->backward, input_count, inputs, call->out_count, &node));
    Record *kept = calloc(1, sizeof *kept + (size_t)input_count * sizeof kept->input[0]);
    if (!kept) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "%s: out of memory while recording", call->op->name));
    node->context = kept;
    node->release_context = free;
    if (call->recomputed) node->recompute = call->op->recompute;
    kept->op = call->op;
    size_t used = 0;
    for (int i = 0; i < input_count; i++) {
        if (!inputs[i]) continue;
        kept->input[i].device = inputs[i]->storage->device;
        kept->input[i].dtype = inputs[i]->dtype;
        kept->input[i].ndim = inputs[i]->ndim;
        memcpy(kept->input[i].shape, inputs[i]->shape, sizeof inputs[i]->shape);
    }
    for (int i = 0; i < call->arg_count; i++) {
        kept->args[i] = call->arg[i];
        kept->args[i].tensor = NULL;
        kept->args[i].tensors = NULL;
        if (!call->arg[i].s) continue;
        size_t length = strlen(call->arg[i].s) + 1;
        if (used + length > sizeof kept->text) {
            status =
                xt_error(XT_VALUE_ERROR, "%s: text arguments must have fewer than %zu letters", call->op->name, sizeof kept->text);
            goto done;
        }
        kept->args[i].s = memcpy(kept->text + used, call->arg[i].s, length);
        used += length;
    }
    for (int i = 0; i < call->saved_count; i++) XT_TRY(xt_node_save(node, call->saved[i]));
    for (int i = 0; i < call->out_count; i++) {
        if (xt_grad_of(call->out[i])) { /* the op returned its input, which keeps its own history: the output becomes an alias */
            XtTensor *alias;
            XT_TRY(xt_tensor_alias(call->out[i], &alias));
            xt_tensor_release(call->out[i]);
            call->out[i] = alias;
        }
        XT_TRY(xt_node_attach(node, i, call->out[i]));
        if (call->recomputed && (call->op->recomputes >> i & 1)) xt_node_recomputes(node, i, call->out[i]);
    }
done:
    xt_node_release(node);
    return status;
}

/* Only floats carry a gradient. Without one among the outputs nothing is recorded, and the saved tensors go. */
static bool any_float(const XtCall *call) {
    for (int i = 0; i < call->out_count; i++)
        if (xt_dtype_is_float(call->out[i]->dtype)) return true;
    return false;
}

/* For a profile: the shapes are those of the first tensor arguments. */
static void end_span(int64_t begin, const XtOp *op, const XtArg *args, int arg_count) {
    XtTensor *seen[4];
    int count = 0;
    for (int i = 0; i < arg_count; i++)
        for (int j = 0; j < (args[i].tensors ? args[i].count : args[i].is_tensor); j++)
            if (count < (int)(sizeof seen / sizeof *seen)) seen[count++] = args[i].tensors ? args[i].tensors[j] : args[i].tensor;
    xt_span_end(begin, op->name, false, seen, count);
}

/* ---- reads ------------------------------------------------------------------------------------------------------------- */

static _Thread_local XtReads *reads; /* the innermost list of this thread */

void xt_begin_reads(XtReads *list) {
    *list = (XtReads){.outer = reads};
    reads = list;
}

void xt_end_reads(XtReads *list) { reads = list->outer; }

void xt_free_reads(XtReads *list) {
    for (int i = 0; i < list->count; i++) xt_tensor_release(list->leaves[i]);
    free(list->leaves);
}

static XtStatus note(XtReads *list, XtTensor *leaf, const char *name) {
    for (int i = list->count; i-- > 0;)
        if (list->leaves[i] == leaf) return XT_OK;
    if (list->count == list->room) {
        int room = list->room ? 2 * list->room : 16;
        XtTensor **grown = realloc(list->leaves, (size_t)room * sizeof(XtTensor *));
        if (!grown) return xt_error(XT_OUT_OF_MEMORY, "%s: out of memory", name);
        list->leaves = grown;
        list->room = room;
    }
    xt_tensor_retain(leaf);
    list->leaves[list->count++] = leaf;
    return XT_OK;
}

static XtStatus note_reads(const XtOp *op, const XtArg *args, int arg_count) {
    for (int i = 0; i < arg_count; i++) {
        for (int j = 0; j < (args[i].tensors ? args[i].count : args[i].is_tensor); j++) {
            XtTensor *tensor = args[i].tensors ? args[i].tensors[j] : args[i].tensor;
            if (!tensor || !xt_requires_grad(tensor) || !xt_is_leaf(tensor)) continue;
            for (XtReads *list = reads; list; list = list->outer) XT_CHECK(note(list, tensor, op->name));
        }
    }
    return XT_OK;
}

XtStatus xt_call(const XtOp *op, const XtArg *args, int arg_count, XtTensor **out, int *out_count) {
    XtCall call = {.op = op, .arg = args, .arg_count = arg_count};
    XtTensor *few[64], **inputs = few;
    XtStatus status = XT_OK;
    int input_count = 0;
    if (reads) XT_CHECK(note_reads(op, args, arg_count));
    if (op->backward && xt_grad_mode()) {
        input_count = gather_inputs(args, arg_count, NULL);
        if (input_count > (int)(sizeof few / sizeof *few)) {
            inputs = malloc((size_t)input_count * sizeof *inputs);
            if (!inputs) return xt_error(XT_OUT_OF_MEMORY, "%s: out of memory", op->name);
        }
        gather_inputs(args, arg_count, inputs);
        for (int i = 0; i < input_count; i++)
            if (inputs[i] && xt_requires_grad(inputs[i])) call.record = true;
        call.recomputed = call.record && op->recompute && xt_recompute_mode();
    }
    int64_t begun = xt_span_begin();
    XT_TRY(xt_error_named(op->forward(&call), op->name));
    if (begun) end_span(begun, op, args, arg_count);
    if (call.record && any_float(&call)) XT_TRY(record(&call, inputs, input_count));
    for (int i = 0; i < call.out_count; i++) {
        out[i] = call.out[i];
        call.out[i] = NULL;
    }
    *out_count = call.out_count;
done:
    for (int i = 0; i < call.out_count; i++) xt_tensor_release(call.out[i]);
    for (int i = 0; i < call.saved_count; i++) xt_tensor_release(call.saved[i]);
    if (inputs != few) free(inputs);
    return status;
}
