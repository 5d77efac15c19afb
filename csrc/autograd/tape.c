/* tape.c - grad records, nodes and the walk back. See tape.h for the picture. */
#include "shared.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

XtTapeMath xt_tape_math;

static _Thread_local bool grad_mode = true, recompute_mode;
static uint64_t next_sequence; /* atomic */

/* ---- the tape's lock --------------------------------------------------------------------------------------------------- */

pthread_mutex_t xt_tape_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t xt_tape_added = PTHREAD_COND_INITIALIZER;
static uint32_t generation = 1; /* forks between this process and the one that was started; changes while it has one thread */

uint64_t xt_tape_me(void) {
    static uint32_t threads;
    static _Thread_local uint32_t number;
    if (!number) number = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    return (uint64_t)generation << 32 | number;
}

bool xt_tape_taken(uint64_t adder) { return adder >> 32 == generation && adder != xt_tape_me(); }

/* The lock is free during a fork, so the child finds whole records. The parent's other threads do not exist in it: nobody waits, and
 * what they were adding to is taken by nobody. */
static void lock_before_fork(void) { xt_tape_lock(); }
static void unlock_in_parent(void) { xt_tape_unlock(); }
static void unlock_in_child(void) {
    pthread_cond_t fresh = PTHREAD_COND_INITIALIZER;
    xt_tape_added = fresh;
    generation++;
    xt_tape_unlock();
}
__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(lock_before_fork, unlock_in_parent, unlock_in_child); }

bool xt_grad_mode(void) { return grad_mode; }
bool xt_recompute_mode(void) { return recompute_mode; }
void xt_set_recompute_mode(bool on) { recompute_mode = on; }
void xt_set_grad_mode(bool on) { grad_mode = on; }

/* ---- hooks ------------------------------------------------------------------------------------------------------------- */

static void release_hook(XtHook *hook) {
    if (__atomic_sub_fetch(&hook->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    hook->release(hook->context);
    free(hook);
}

/* Not under the tape's lock: the release of a hook's context takes the GIL. */
static void release_hooks(XtHooks *hooks) {
    if (!hooks || __atomic_sub_fetch(&hooks->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    for (int i = 0; i < hooks->count; i++) release_hook(hooks->items[i]);
    free(hooks);
}

static XtHooks *hooks_retain(XtHooks *const *place) {
    if (!__atomic_load_n(place, __ATOMIC_RELAXED)) return NULL; /* the usual case costs no lock */
    xt_tape_lock();
    XtHooks *hooks = *place;
    if (hooks) __atomic_add_fetch(&hooks->references, 1, __ATOMIC_RELAXED);
    xt_tape_unlock();
    return hooks;
}

static XtStatus run_hook(const XtHook *hook, XtTensor **gradient) {
    XtTensor *replacement = NULL;
    XtStatus status = hook->call(hook->context, *gradient, &replacement);
    if (status != XT_OK || !replacement) return status;
    if (replacement->grad) { /* recorded by the hook's own arithmetic: only its values count */
        XtTensor *plain = NULL;
        status = xt_tensor_alias(replacement, &plain);
        xt_tensor_release(replacement);
        if (status != XT_OK) return status;
        replacement = plain;
    }
    xt_tensor_release(*gradient);
    *gradient = replacement;
    return XT_OK;
}

XtStatus xt_run_hooks(XtHooks *const *place, XtTensor **gradient) {
    XtStatus status = XT_OK;
    XtHooks *hooks = hooks_retain(place);
    for (int i = 0; hooks && i < hooks->count && status == XT_OK; i++)
        if (!__atomic_load_n(&hooks->items[i]->removed, __ATOMIC_ACQUIRE)) status = run_hook(hooks->items[i], gradient);
    release_hooks(hooks);
    return status;
}

static XtHooks **hooks_of(const XtTensor *tensor) {
    XtGrad *grad = xt_grad_of(tensor);
    if (!grad) return NULL;
    return grad->node ? &grad->node->output[grad->output].hooks : &grad->hooks;
}

/* A copy of `old` without hook `without` (NULL: with all) and with room for one more; NULL when out of memory. */
static XtHooks *hooks_copy(const XtHooks *old, const XtHook *without) {
    int count = old ? old->count : 0;
    XtHooks *hooks = malloc(sizeof *hooks + (size_t)(count + 1) * sizeof hooks->items[0]);
    if (!hooks) return NULL;
    *hooks = (XtHooks){.references = 1};
    for (int i = 0; i < count; i++) {
        if (old->items[i] == without) continue;
        hooks->items[hooks->count++] = old->items[i];
        __atomic_add_fetch(&old->items[i]->references, 1, __ATOMIC_RELAXED);
    }
    return hooks;
}

XtStatus xt_add_hook(XtTensor *tensor, const XtHook *hook, int64_t *id) {
    static int64_t next_id;
    XtHooks **place = xt_requires_grad(tensor) ? hooks_of(tensor) : NULL;
    XtHook *added = place ? malloc(sizeof *added) : NULL;
    if (!added) {
        hook->release(hook->context);
        if (place) return xt_error(XT_OUT_OF_MEMORY, "register_hook: out of memory");
        return xt_error(XT_RUNTIME_ERROR, "register_hook: the tensor must require a gradient");
    }
    *added = *hook;
    added->references = 1;
    added->removed = false;
    *id = added->id = __atomic_add_fetch(&next_id, 1, __ATOMIC_RELAXED);

    xt_tape_lock();
    XtHooks *old = *place, *hooks = hooks_copy(old, NULL);
    if (hooks) {
        hooks->items[hooks->count++] = added;
        __atomic_store_n(place, hooks, __ATOMIC_RELAXED);
    }
    xt_tape_unlock();
    release_hooks(hooks ? old : NULL);
    if (hooks) return XT_OK;
    release_hook(added);
    return xt_error(XT_OUT_OF_MEMORY, "register_hook: out of memory");
}

void xt_remove_hook(XtTensor *tensor, int64_t id) {
    XtHooks **place = hooks_of(tensor), *old = NULL;
    if (!place) return;
    xt_tape_lock();
    for (int i = 0; *place && i < (*place)->count && !old; i++) {
        XtHook *gone = (*place)->items[i];
        if (gone->id != id) continue;
        __atomic_store_n(&gone->removed, true, __ATOMIC_RELEASE);
        XtHooks *hooks = hooks_copy(*place, gone);
        if (!hooks) break; /* out of memory: it stays in the list, and nobody calls it */
        old = *place;
        if (hooks->count == 0) free(hooks), hooks = NULL;
        __atomic_store_n(place, hooks, __ATOMIC_RELAXED);
    }
    xt_tape_unlock();
    release_hooks(old);
}

/* ---- grad records ------------------------------------------------------------------------------------------------------ */

/* The last reference to the tensor is gone: only a walk that reached its node may still look at `retain`. */
static void release_grad(XtGrad *grad) {
    if (grad->node && grad->retain) {
        xt_tape_lock();
        grad->node->output[grad->output].retain = NULL;
        xt_tape_unlock();
    }
    xt_node_release(grad->node);
    xt_tensor_release(grad->gradient);
    release_hooks(grad->hooks);
    free(grad);
}

__attribute__((constructor)) static void lend_release(void) { xt_grad_release = release_grad; }

/* The record of a tensor, made if need be: two threads may ask at once, and one record stays. `node` (borrowed) is for a new tensor. */
static XtStatus grad_record(XtTensor *tensor, XtNode *node, int output, XtGrad **out) {
    *out = xt_grad_of(tensor);
    if (*out) return XT_OK;
    XtGrad *made = calloc(1, sizeof *made);
    if (!made) return xt_error(XT_OUT_OF_MEMORY, "out of memory: cannot allocate a gradient record");
    made->node = node;
    made->output = output;
    if (__atomic_compare_exchange_n(&tensor->grad, out, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) *out = made;
    else free(made);
    return XT_OK;
}

bool xt_requires_grad(const XtTensor *tensor) {
    const XtGrad *grad = xt_grad_of(tensor);
    return grad && (grad->node || __atomic_load_n(&grad->requires, __ATOMIC_RELAXED));
}
bool xt_is_leaf(const XtTensor *tensor) {
    const XtGrad *grad = xt_grad_of(tensor);
    return !grad || !grad->node;
}

XtStatus xt_set_requires_grad(XtTensor *tensor, bool on) {
    XtGrad *grad = xt_grad_of(tensor);
    if (!xt_is_leaf(tensor)) {
        if (on) return XT_OK;
        return xt_error(XT_RUNTIME_ERROR,
                        "requires_grad: can be turned off for leaf tensors only; use detach() to cut '%s' off the graph",
                        grad->node->name);
    }
    if (!on) {
        if (grad) __atomic_store_n(&grad->requires, false, __ATOMIC_RELAXED);
        return XT_OK;
    }
    if (!xt_dtype_is_float(tensor->dtype))
        return xt_error(XT_RUNTIME_ERROR, "requires_grad: only floating point tensors can require gradients, got %s",
                        xt_dtype_name(tensor->dtype));
    XtStatus status = grad_record(tensor, NULL, 0, &grad);
    if (status == XT_OK) __atomic_store_n(&grad->requires, true, __ATOMIC_RELAXED);
    return status;
}

XtStatus xt_retain_grad(XtTensor *tensor) {
    if (!xt_requires_grad(tensor)) return xt_error(XT_RUNTIME_ERROR, "retain_grad: the tensor must require a gradient");
    if (xt_is_leaf(tensor)) return XT_OK;
    XtGrad *grad = xt_grad_of(tensor);
    xt_tape_lock();
    grad->retain = true;
    __atomic_store_n(&grad->node->output[grad->output].retain, tensor, __ATOMIC_RELAXED);
    xt_tape_unlock();
    return XT_OK;
}

XtTensor *xt_gradient(const XtTensor *tensor) {
    XtGrad *grad = xt_grad_of(tensor);
    if (!grad || !__atomic_load_n(&grad->gradient, __ATOMIC_RELAXED)) return NULL;
    xt_tape_lock();
    XtTensor *gradient = grad->gradient;
    if (gradient) xt_tensor_retain(gradient);
    xt_tape_unlock();
    return gradient;
}

XtStatus xt_set_gradient(XtTensor *tensor, XtTensor *gradient) {
    XtGrad *grad = xt_grad_of(tensor);
    if (!gradient && !grad) return XT_OK;
    if (gradient) {
        if (!xt_same_shape(&tensor->view, &gradient->view))
            return xt_error(XT_RUNTIME_ERROR, "grad: must have shape %s, got %s", xt_shape_text(tensor->ndim, tensor->shape),
                            xt_shape_text(gradient->ndim, gradient->shape));
        if (tensor->dtype != gradient->dtype || !xt_device_equal(tensor->storage->device, gradient->storage->device))
            return xt_error(XT_RUNTIME_ERROR, "grad: must be %s on %s, got %s on %s", xt_dtype_name(tensor->dtype),
                            xt_device_name(tensor->storage->device), xt_dtype_name(gradient->dtype),
                            xt_device_name(gradient->storage->device));
        XT_CHECK(grad_record(tensor, NULL, 0, &grad));
        xt_tensor_retain(gradient);
    }
    xt_tape_lock();
    XtTensor *old = grad->gradient;
    __atomic_store_n(&grad->gradient, gradient, __ATOMIC_RELAXED);
    xt_tape_unlock();
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
        const XtGrad *grad = xt_grad_of(t);
        if (grad->node) {
            node->edges[i] = (XtEdge){.node = grad->node, .output = grad->output};
            __atomic_add_fetch(&grad->node->references, 1, __ATOMIC_RELAXED);
        } else {
            node->edges[i].leaf = t;
            xt_tensor_retain(t);
        }
    }
    *out = node;
    return XT_OK;
}

void xt_saved_retain(XtSaved *saved) {
    if (saved->tensor) xt_tensor_retain(saved->tensor);
    if (saved->made) __atomic_add_fetch(&saved->made->references, 1, __ATOMIC_RELAXED);
}

void xt_saved_release(XtSaved *saved) {
    XtRecomputed *made = saved->made;
    xt_tensor_release(saved->tensor);
    saved->tensor = NULL;
    saved->made = NULL;
    if (!made || __atomic_sub_fetch(&made->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    xt_node_release(made->producer);
    free(made);
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
        for (int i = 0; i < node->saved_count; i++) xt_saved_release(&node->saved[i]);
        for (int i = 0; i < node->inputs; i++) {
            xt_node_release(node->edges[i].node);
            xt_tensor_release(node->edges[i].leaf);
        }
        for (int i = 0; i < node->outputs; i++) release_hooks(node->output[i].hooks);
        if (node->release_context) node->release_context(node->context);
        free(node->edges);
        free(node->output);
        free(node);
    }
    draining = false;
}

/* ---- recomputation ----------------------------------------------------------------------------------------------------- */

enum {
    MOST_VIEWS = 8, /* between a producer and a node that saves its output */
    MOST_DEPTH = 4, /* producers that need each other: computing again is a recursion */
};

void xt_node_recomputes(XtNode *node, int index, XtTensor *tensor) {
    tensor->storage->produced = index;
    tensor->storage->producer = node->sequence;
}

/* The node that can compute `tensor` again, borrowed; NULL when it is to be kept. The edges lead there, through views: without one
 * (a detached tensor) the node does not belong to this graph, and may be freed by a backward of another. Nothing computes again what
 * was changed in place. */
static XtNode *producer_of(const XtNode *node, const XtTensor *tensor) {
    const XtStorage *storage = tensor->storage;
    if (!storage->producer || __atomic_load_n(&storage->version, __ATOMIC_RELAXED)) return NULL;
    for (int i = 0; i < node->inputs; i++) {
        XtNode *from = node->edges[i].node;
        for (int view = 0; from && from->sequence > storage->producer && view < MOST_VIEWS; view++)
            from = from->inputs ? from->edges[0].node : NULL;
        if (from && from->sequence == storage->producer) return from->recompute_depth < MOST_DEPTH ? from : NULL;
    }
    return NULL;
}

static XtStatus save_producer(XtNode *node, XtNode *producer, const XtTensor *tensor, XtSaved *saved) {
    XtRecomputed *made = malloc(sizeof *made);
    if (!made) return xt_error(XT_OUT_OF_MEMORY, "%s: out of memory while recording", node->name);
    *made = (XtRecomputed){.references = 1, .producer = producer, .output = tensor->storage->produced, .view = tensor->view};
    if (tensor->data) made->offset = (size_t)((const char *)tensor->data - (const char *)tensor->storage->data);
    made->view.data = NULL;
    __atomic_add_fetch(&producer->references, 1, __ATOMIC_RELAXED);
    saved->made = made;
    if (node->recompute_depth <= producer->recompute_depth) node->recompute_depth = producer->recompute_depth + 1;
    return XT_OK;
}

XtStatus xt_node_save(XtNode *node, const XtTensor *tensor) {
    if (node->saved_count == XT_MAX_SAVED)
        return xt_error(XT_RUNTIME_ERROR, "%s: saves more than %d tensors", node->name, XT_MAX_SAVED);
    XtSaved *saved = &node->saved[node->saved_count];
    *saved = (XtSaved){0};
    XtNode *producer = tensor ? producer_of(node, tensor) : NULL;
    if (producer) {
        XT_CHECK(save_producer(node, producer, tensor, saved));
    } else if (tensor) {
        XT_CHECK(xt_tensor_alias(tensor, &saved->tensor));
        saved->version = __atomic_load_n(&tensor->storage->version, __ATOMIC_RELAXED);
    }
    node->saved_count++;
    return XT_OK;
}

bool xt_node_needs(const XtNode *node, int input) { return node->edges[input].node || node->edges[input].leaf; }

XtStatus xt_node_attach(XtNode *node, int index, XtTensor *tensor) {
    XtOutput *output = &node->output[index];
    output->device = tensor->storage->device;
    output->dtype = tensor->dtype;
    output->ndim = tensor->ndim;
    memcpy(output->shape, tensor->shape, sizeof output->shape);
    if (!xt_dtype_is_float(tensor->dtype)) return XT_OK;
    XtGrad *grad;
    XT_CHECK(grad_record(tensor, node, index, &grad));
    if (grad->node != node) return xt_error(XT_RUNTIME_ERROR, "%s: an output got a gradient in another thread", node->name);
    __atomic_add_fetch(&node->references, 1, __ATOMIC_RELAXED);
    return XT_OK;
}
