/* tape.c - grad records, nodes and the walk back. See tape.h for the picture. */
#include "tape.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

XtTapeMath xt_tape_math;

static _Thread_local bool grad_mode = true;
static uint64_t next_sequence; /* atomic */

bool xt_grad_mode(void) { return grad_mode; }
void xt_set_grad_mode(bool on) { grad_mode = on; }

/* ---- hooks ------------------------------------------------------------------------------------------------------------- */

static void release_hooks(XtHooks *hooks) {
    for (int i = 0; i < hooks->count; i++) hooks->items[i].release(hooks->items[i].context);
    free(hooks->items);
    *hooks = (XtHooks){0};
}

/* Passes *gradient through the hooks in order, replacing it (and its reference) where a hook says so. */
XtStatus xt_run_hooks(const XtHooks *hooks, XtTensor **gradient) {
    for (int i = 0; i < hooks->count; i++) {
        XtTensor *replacement = NULL;
        XtStatus status = hooks->items[i].call(hooks->items[i].context, *gradient, &replacement);
        if (status != XT_OK) return status;
        if (!replacement) continue;
        if (replacement->grad) { /* recorded by the hook's own arithmetic: only its values count */
            XtTensor *plain = NULL;
            status = xt_tensor_alias(replacement, &plain);
            xt_tensor_release(replacement);
            if (status != XT_OK) return status;
            replacement = plain;
        }
        xt_tensor_release(*gradient);
        *gradient = replacement;
    }
    return XT_OK;
}

static XtHooks *hooks_of(XtTensor *tensor) {
    if (!tensor->grad) return NULL;
    return tensor->grad->node ? &tensor->grad->node->output[tensor->grad->output].hooks : &tensor->grad->hooks;
}

XtStatus xt_add_hook(XtTensor *tensor, const XtHook *hook, int64_t *id) {
    static int64_t next_id;
    XtHooks *hooks = xt_requires_grad(tensor) ? hooks_of(tensor) : NULL;
    if (!hooks) {
        hook->release(hook->context);
        return xt_error(XT_RUNTIME_ERROR, "register_hook: the tensor must require a gradient");
    }
    XtHook *grown = realloc(hooks->items, (size_t)(hooks->count + 1) * sizeof *grown);
    if (!grown) {
        hook->release(hook->context);
        return xt_error(XT_OUT_OF_MEMORY, "register_hook: out of memory");
    }
    hooks->items = grown;
    grown[hooks->count] = *hook;
    *id = grown[hooks->count].id = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED);
    hooks->count++;
    return XT_OK;
}

void xt_remove_hook(XtTensor *tensor, int64_t id) {
    XtHooks *hooks = hooks_of(tensor);
    if (!hooks) return;
    for (int i = 0; i < hooks->count; i++) {
        if (hooks->items[i].id != id) continue;
        XtHook gone = hooks->items[i];
        memmove(hooks->items + i, hooks->items + i + 1, (size_t)(hooks->count - i - 1) * sizeof gone);
        hooks->count--;
        gone.release(gone.context);
        return;
    }
}

/* ---- grad records ------------------------------------------------------------------------------------------------------ */

static void release_grad(XtGrad *grad) {
    if (grad->node && grad->retain) grad->node->output[grad->output].retain = NULL;
    xt_node_release(grad->node);
    xt_tensor_release(grad->gradient);
    release_hooks(&grad->hooks);
    free(grad);
}

__attribute__((constructor)) static void lend_release(void) { xt_grad_release = release_grad; }

static XtStatus grad_record(XtTensor *tensor) {
    if (tensor->grad) return XT_OK;
    tensor->grad = calloc(1, sizeof *tensor->grad);
    return tensor->grad ? XT_OK : xt_error(XT_OUT_OF_MEMORY, "out of memory: cannot allocate a gradient record");
}

bool xt_requires_grad(const XtTensor *tensor) { return tensor->grad && (tensor->grad->requires || tensor->grad->node); }
bool xt_is_leaf(const XtTensor *tensor) { return !tensor->grad || !tensor->grad->node; }

XtStatus xt_set_requires_grad(XtTensor *tensor, bool on) {
    if (!xt_is_leaf(tensor)) {
        if (on) return XT_OK;
        return xt_error(XT_RUNTIME_ERROR,
                        "requires_grad: can be turned off for leaf tensors only; use detach() to cut '%s' off the graph",
                        tensor->grad->node->name);
    }
    if (!on) {
        if (tensor->grad) tensor->grad->requires = false;
        return XT_OK;
    }
    if (!xt_dtype_is_float(tensor->dtype))
        return xt_error(XT_RUNTIME_ERROR, "requires_grad: only floating point tensors can require gradients, got %s",
                        xt_dtype_name(tensor->dtype));
    XtStatus status = grad_record(tensor);
    if (status == XT_OK) tensor->grad->requires = true;
    return status;
}

XtStatus xt_retain_grad(XtTensor *tensor) {
    if (!xt_requires_grad(tensor)) return xt_error(XT_RUNTIME_ERROR, "retain_grad: the tensor must require a gradient");
    if (xt_is_leaf(tensor)) return XT_OK;
    tensor->grad->retain = true;
    tensor->grad->node->output[tensor->grad->output].retain = tensor;
    return XT_OK;
}

XtTensor *xt_gradient(const XtTensor *tensor) { return tensor->grad ? tensor->grad->gradient : NULL; }

XtStatus xt_set_gradient(XtTensor *tensor, XtTensor *gradient) {
    if (!gradient && !tensor->grad) return XT_OK;
    if (gradient) {
        if (!xt_same_shape(&tensor->view, &gradient->view))
            return xt_error(XT_RUNTIME_ERROR, "grad: must have shape %s, got %s", xt_shape_text(tensor->ndim, tensor->shape),
                            xt_shape_text(gradient->ndim, gradient->shape));
        if (tensor->dtype != gradient->dtype || !xt_device_equal(tensor->storage->device, gradient->storage->device))
            return xt_error(XT_RUNTIME_ERROR, "grad: must be %s on %s, got %s on %s", xt_dtype_name(tensor->dtype),
                            xt_device_name(tensor->storage->device), xt_dtype_name(gradient->dtype),
                            xt_device_name(gradient->storage->device));
        XT_CHECK(grad_record(tensor));
        xt_tensor_retain(gradient);
    }
    XtTensor *old = tensor->grad->gradient;
    tensor->grad->gradient = gradient;
    xt_tensor_release(old);
    return XT_OK;
}

XtStatus xt_begin_inplace(XtTensor *tensor, const char *op) {
    if (grad_mode && xt_requires_grad(tensor))
        return xt_error(XT_RUNTIME_ERROR,
                        "%s: a tensor that requires a gradient must not be changed in place while recording; use no_grad() or an "
                        "out-of-place operation",
                        op);
    __atomic_add_fetch(&tensor->storage->version, 1, __ATOMIC_RELAXED);
    return XT_OK;
}

/* ---- nodes ------------------------------------------------------------------------------------------------------------- */

XtStatus xt_node_new(const char *name, XtBackward backward, int inputs, XtTensor *const *input, int outputs, XtNode **out) {
    XtNode *node = calloc(1, sizeof *node);
    if (node) {
        node->edges = calloc((size_t)(inputs ? inputs : 1), sizeof *node->edges);
        node->output = calloc((size_t)(outputs ? outputs : 1), sizeof *node->output);
    }
    if (!node || !node->edges || !node->output) {
        if (node) free(node->edges), free(node->output);
        free(node);
        return xt_error(XT_OUT_OF_MEMORY, "%s: out of memory while recording", name);
    }
    node->references = 1;
    node->sequence = __atomic_add_fetch(&next_sequence, 1, __ATOMIC_RELAXED);
    node->name = name;
    node->backward = backward;
    node->inputs = inputs;
    node->outputs = outputs;
    for (int i = 0; i < inputs; i++) {
        XtTensor *t = input[i];
        if (!t || !xt_requires_grad(t)) continue;
        if (t->grad->node) {
            node->edges[i] = (XtEdge){.node = t->grad->node, .output = t->grad->output};
            __atomic_add_fetch(&t->grad->node->references, 1, __ATOMIC_RELAXED);
        } else {
            node->edges[i].leaf = t;
            xt_tensor_retain(t);
        }
    }
    *out = node;
    return XT_OK;
}

static void drop_saved(XtNode *node) {
    for (int i = 0; i < node->saved_count; i++) {
        xt_tensor_release(node->saved[i].tensor);
        node->saved[i].tensor = NULL;
    }
}

/* Releasing a node releases the nodes it points at, which release theirs: a list takes the place of recursion. */
void xt_node_release(XtNode *node) {
    static _Thread_local XtNode *pending;
    static _Thread_local bool draining;
    if (!node || __atomic_sub_fetch(&node->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    node->next_free = pending;
    pending = node;
    if (draining) return;
    draining = true;
    while (pending) {
        node = pending;
        pending = node->next_free;
        drop_saved(node);
        for (int i = 0; i < node->inputs; i++) {
            xt_node_release(node->edges[i].node);
            xt_tensor_release(node->edges[i].leaf);
        }
        for (int i = 0; i < node->outputs; i++) {
            xt_tensor_release(node->output[i].gradient);
            release_hooks(&node->output[i].hooks);
        }
        if (node->release_context) node->release_context(node->context);
        free(node->edges);
        free(node->output);
        free(node);
    }
    draining = false;
}

XtStatus xt_node_save(XtNode *node, const XtTensor *tensor) {
    if (node->saved_count == XT_MAX_SAVED)
        return xt_error(XT_RUNTIME_ERROR, "%s: saves more than %d tensors", node->name, XT_MAX_SAVED);
    XtSaved *saved = &node->saved[node->saved_count];
    *saved = (XtSaved){0};
    if (tensor) {
        XT_CHECK(xt_tensor_alias(tensor, &saved->tensor));
        saved->version = __atomic_load_n(&tensor->storage->version, __ATOMIC_RELAXED);
    }
    node->saved_count++;
    return XT_OK;
}

XtStatus xt_node_saved(XtNode *node, int slot, XtTensor **out) {
    XtSaved *saved = &node->saved[slot];
    *out = saved->tensor;
    if (node->freed)
        return xt_error(XT_RUNTIME_ERROR,
                        "backward: the tensors saved by '%s' are gone; call the first backward with retain_graph=True", node->name);
    if (saved->tensor) {
        uint64_t now = __atomic_load_n(&saved->tensor->storage->version, __ATOMIC_RELAXED);
        if (now != saved->version)
            return xt_error(XT_RUNTIME_ERROR,
                            "backward: a tensor of shape %s saved by '%s' was changed in place (version %llu, now %llu)",
                            xt_shape_text(saved->tensor->ndim, saved->tensor->shape), node->name,
                            (unsigned long long)saved->version, (unsigned long long)now);
    }
    return XT_OK;
}

XtStatus xt_node_take(XtNode *node, int slot, XtTensor **out) {
    XtStatus status = xt_node_saved(node, slot, out);
    if (status != XT_OK) *out = NULL;
    else node->saved[slot].tensor = NULL;
    return status;
}

bool xt_node_needs(const XtNode *node, int input) { return node->edges[input].node || node->edges[input].leaf; }

XtStatus xt_node_attach(XtNode *node, int index, XtTensor *tensor) {
    XtOutput *output = &node->output[index];
    output->device = tensor->storage->device;
    output->dtype = tensor->dtype;
    output->ndim = tensor->ndim;
    memcpy(output->shape, tensor->shape, sizeof output->shape);
    if (!xt_dtype_is_float(tensor->dtype)) return XT_OK;
    XtStatus status = grad_record(tensor);
    if (status != XT_OK) return status;
    tensor->grad->node = node;
    tensor->grad->output = index;
    __atomic_add_fetch(&node->references, 1, __ATOMIC_RELAXED);
    return XT_OK;
}
