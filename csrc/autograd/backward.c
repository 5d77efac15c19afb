/* backward.c - the walk: youngest reached node first, gradients added along the edges.
 *
 * Because every input is older than the node that uses it, a node's gradient is complete when it is the youngest one left, so a heap by
 * sequence number replaces the usual count of dependencies. The order of additions is the order of the graph: same bits every time.
 */
#include "tape.h"

#include <pthread.h>
#include <stdlib.h>

/* Max-heap by sequence number of the nodes that have received a gradient. The heap owns a reference to each. */
typedef struct Heap {
    XtNode **items;
    int64_t count, capacity;
} Heap;

static XtStatus heap_push(Heap *heap, XtNode *node) {
    if (node->in_heap) return XT_OK;
    if (heap->count == heap->capacity) {
        int64_t capacity = heap->capacity ? heap->capacity * 2 : 256;
        XtNode **grown = realloc(heap->items, (size_t)capacity * sizeof *grown);
        if (!grown) return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
        heap->items = grown;
        heap->capacity = capacity;
    }
    node->in_heap = true;
    __atomic_add_fetch(&node->references, 1, __ATOMIC_RELAXED);
    int64_t i = heap->count++;
    for (; i > 0 && heap->items[(i - 1) / 2]->sequence < node->sequence; i = (i - 1) / 2) heap->items[i] = heap->items[(i - 1) / 2];
    heap->items[i] = node;
    return XT_OK;
}

static XtNode *heap_pop(Heap *heap) {
    XtNode *top = heap->items[0], *last = heap->items[--heap->count];
    int64_t i = 0;
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= heap->count) break;
        if (child + 1 < heap->count && heap->items[child + 1]->sequence > heap->items[child]->sequence) child++;
        if (heap->items[child]->sequence <= last->sequence) break;
        heap->items[i] = heap->items[child];
        i = child;
    }
    heap->items[i] = last;
    top->in_heap = false;
    return top;
}

/* *sum += gradient, which is borrowed. The first one is kept as it is; later ones are added in place if nobody else sees the
 * sum. */
static XtStatus collect(XtTensor **sum, XtTensor *gradient, bool may_overwrite) {
    if (!*sum) {
        if (gradient->grad) return xt_tensor_alias(gradient, sum); /* a rule or hook from Python may return a recorded tensor */
        xt_tensor_retain(gradient);
        *sum = gradient;
        return XT_OK;
    }
    XtTensor *total;
    XT_CHECK(xt_tape_math.add(*sum, gradient, may_overwrite, &total));
    xt_tensor_release(*sum);
    *sum = total;
    return XT_OK;
}

/* Whether nobody but the holder of this one reference can see the tensor's memory. */
static bool only_ours(const XtTensor *tensor) {
    return xt_storage_is_own(tensor->storage) && __atomic_load_n(&tensor->references, __ATOMIC_RELAXED) == 1 &&
           __atomic_load_n(&tensor->storage->references, __ATOMIC_RELAXED) == 1;
}

/* A leaf's hooks get the whole gradient of a backward. So leaves gather it here and add it to .grad at the end of the walk. */
typedef struct Leaf {
    XtTensor *tensor, *gradient; /* both owned */
    XtTensor *grown;             /* owned: its .grad, once a rule of this walk has added to it */
} Leaf;
typedef struct Leaves {
    Leaf *items;
    int64_t count, capacity;
    /* Open-addressing index from tensor to position + 1, size a power of two. */
    int64_t *slots, slot_count;
} Leaves;

static int64_t *leaf_slot(const Leaves *leaves, const XtTensor *tensor) {
    uint64_t hash = ((uint64_t)(uintptr_t)tensor >> 4) * 0x9E3779B97F4A7C15ull;
    for (int64_t i = (int64_t)(hash >> 20);; i++) {
        int64_t *slot = &leaves->slots[i & (leaves->slot_count - 1)];
        if (!*slot || leaves->items[*slot - 1].tensor == tensor) return slot;
    }
}

static XtStatus leaf_find(Leaves *leaves, XtTensor *tensor, Leaf **out) {
    if (leaves->count * 2 >= leaves->slot_count) {
        int64_t slots = leaves->slot_count ? leaves->slot_count * 2 : 128, capacity = slots / 2 + 1;
        Leaf *items = realloc(leaves->items, (size_t)capacity * sizeof *items);
        if (items) leaves->items = items;
        int64_t *index = items ? calloc((size_t)slots, sizeof *index) : NULL;
        if (!index) return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
        free(leaves->slots);
        leaves->slots = index;
        leaves->slot_count = slots;
        for (int64_t i = 0; i < leaves->count; i++) *leaf_slot(leaves, leaves->items[i].tensor) = i + 1;
    }
    int64_t *slot = leaf_slot(leaves, tensor);
    if (!*slot) {
        xt_tensor_retain(tensor);
        leaves->items[leaves->count] = (Leaf){.tensor = tensor};
        *slot = ++leaves->count;
    }
    *out = &leaves->items[*slot - 1];
    return XT_OK;
}

/* Sends one input's gradient along its edge. */
static XtStatus send(const XtEdge *edge, XtTensor *gradient, Heap *heap, Leaves *leaves) {
    XtTensor **sum;
    if (edge->node) {
        sum = &edge->node->output[edge->output].gradient;
        XtStatus status = heap_push(heap, edge->node);
        if (status != XT_OK) return status;
    } else {
        Leaf *leaf = NULL;
        XtStatus status = leaf_find(leaves, edge->leaf, &leaf);
        if (status != XT_OK) return status;
        sum = &leaf->gradient;
    }
    return collect(sum, gradient, *sum && only_ours(*sum));
}

/* The walk under way in this thread, for xt_node_accumulator. */
static _Thread_local Leaves *walking;

XtTensor *xt_node_accumulator(XtNode *node, int input) {
    const XtEdge *edge = &node->edges[input];
    XtTensor *sum = NULL;
    if (edge->node) {
        sum = edge->node->output[edge->output].gradient;
    } else if (edge->leaf && walking) {
        Leaf *leaf = NULL;
        if (leaf_find(walking, edge->leaf, &leaf) != XT_OK) return NULL;
        const XtGrad *grad = edge->leaf->grad;
        sum = leaf->gradient;
        /* .grad itself, unless somebody else holds it: it could then be what the rule reads (y.backward(w.grad)). The walk keeps it
         * alive, because another thread may clear .grad at any moment. */
        if (!sum && grad->hooks.count == 0 && grad->gradient && xt_view_is_contiguous(&grad->gradient->view) &&
            (leaf->grown ? leaf->grown == grad->gradient : only_ours(grad->gradient))) {
            if (!leaf->grown) {
                xt_tensor_retain(grad->gradient);
                leaf->grown = grad->gradient;
            }
            __atomic_add_fetch(&leaf->grown->storage->version, 1, __ATOMIC_RELAXED);
            return leaf->grown;
        }
    }
    return sum && only_ours(sum) && xt_view_is_contiguous(&sum->view) ? sum : NULL;
}

/* Runs one node: completes its output gradients, calls its rule, sends the results on. */
static XtStatus run_node(XtNode *node, bool retain_graph, Heap *heap, Leaves *leaves) {
    XtStatus status = XT_OK;
    XtTensor **din = calloc((size_t)(node->inputs + node->outputs + 1), sizeof *din), **dout = din ? din + node->inputs : NULL;
    if (!din) return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
    if (node->freed) {
        status =
            xt_error(XT_RUNTIME_ERROR,
                     "backward: the graph of '%s' was freed by an earlier backward; call that with retain_graph=True", node->name);
        goto done;
    }
    for (int i = 0; i < node->outputs; i++) {
        XtOutput *output = &node->output[i];
        dout[i] = output->gradient;
        output->gradient = NULL;
        if (!dout[i]) {
            XT_TRY(xt_tape_math.filled(output->device, output->dtype, output->ndim, output->shape, 0.0, &dout[i]));
        }
        XT_TRY(xt_run_hooks(&output->hooks, &dout[i]));
        if (output->retain) {
            XtTensor *kept;
            XT_TRY(xt_tensor_alias(dout[i], &kept));
            status = xt_set_gradient(output->retain, kept);
            xt_tensor_release(kept);
            if (status != XT_OK) goto done;
        }
    }
    XT_TRY(xt_error_named(node->backward(node, dout, din), node->name));
    for (int i = 0; i < node->inputs; i++) {
        if (!din[i] || !xt_node_needs(node, i)) continue;
        /* Give our reference away before adding, so that a sum that only this walk holds can be added to in place. */
        XtTensor *gradient = din[i];
        din[i] = NULL;
        status = send(&node->edges[i], gradient, heap, leaves);
        xt_tensor_release(gradient);
        if (status != XT_OK) goto done;
    }
    if (!retain_graph) {
        node->freed = true;
        for (int i = 0; i < node->saved_count; i++) {
            xt_tensor_release(node->saved[i].tensor);
            node->saved[i].tensor = NULL;
        }
    }
done:
    for (int i = 0; i < node->inputs + node->outputs; i++) xt_tensor_release(din[i]);
    free(din);
    return status;
}

/* Adds what a leaf gathered to its .grad. Two threads may finish at once. */
static pthread_mutex_t leaf_lock = PTHREAD_MUTEX_INITIALIZER;

static XtStatus finish_leaf(Leaf *leaf) {
    if (!leaf->gradient) return XT_OK; /* its rules added to .grad themselves */
    XtStatus status = xt_run_hooks(&leaf->tensor->grad->hooks, &leaf->gradient);
    if (status != XT_OK) return status;
    pthread_mutex_lock(&leaf_lock);
    XtGrad *grad = leaf->tensor->grad;
    XtTensor *gradient = leaf->gradient;
    if (!grad->gradient && !(only_ours(gradient) && xt_view_is_contiguous(&gradient->view))) {
        /* Somebody else may change that memory, or it repeats elements: .grad gets a dense copy of its own. */
        status = xt_tape_math.copy(gradient, &grad->gradient);
    } else if (!grad->gradient) {
        grad->gradient = gradient;
        leaf->gradient = NULL;
    } else if (gradient->storage != grad->gradient->storage) {
        status = collect(&grad->gradient, gradient, true);
    } else { /* another view of .grad: adding in place would read what it has written */
        XtTensor *apart = NULL;
        status = xt_tape_math.copy(gradient, &apart);
        if (status == XT_OK) status = collect(&grad->gradient, apart, true);
        xt_tensor_release(apart);
    }
    pthread_mutex_unlock(&leaf_lock);
    return status;
}

static XtStatus seed(XtTensor *root, XtTensor *gradient, XtTensor **out) {
    if (!xt_requires_grad(root)) return xt_error(XT_RUNTIME_ERROR, "backward: the tensor does not require a gradient");
    if (!gradient) {
        if (xt_view_numel(&root->view) != 1)
            return xt_error(XT_RUNTIME_ERROR, "backward: a gradient must be given unless the tensor has one element, got shape %s",
                            xt_shape_text(root->ndim, root->shape));
        return xt_tape_math.filled(root->storage->device, root->dtype, root->ndim, root->shape, 1.0, out);
    }
    if (!xt_same_shape(&root->view, &gradient->view) || root->dtype != gradient->dtype ||
        !xt_device_equal(root->storage->device, gradient->storage->device))
        return xt_error(XT_RUNTIME_ERROR, "backward: gradient must be %s %s on %s like the tensor, got %s %s on %s",
                        xt_dtype_name(root->dtype), xt_shape_text(root->ndim, root->shape), xt_device_name(root->storage->device),
                        xt_dtype_name(gradient->dtype), xt_shape_text(gradient->ndim, gradient->shape),
                        xt_device_name(gradient->storage->device));
    return xt_tensor_alias(gradient, out);
}

/* One walk at a time: two threads may share a graph. Recursive, because a node may walk a graph of its own (recomputation). */
static pthread_mutex_t walk_lock;
__attribute__((constructor)) static void make_walk_lock(void) {
    pthread_mutexattr_t recursive;
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&walk_lock, &recursive);
    pthread_mutexattr_destroy(&recursive);
}
/* A forked child has one thread: walks of the parent's other threads do not exist in it. */
static void renew_locks(void) {
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    leaf_lock = fresh;
    make_walk_lock();
}
__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(NULL, NULL, renew_locks); }

XtStatus xt_backward(int count, XtTensor *const *roots, XtTensor *const *gradients, bool retain_graph) {
    XtStatus status = XT_OK;
    pthread_mutex_lock(&walk_lock);
    Heap heap = {0};
    Leaves leaves = {0};
    Leaves *outer = walking;
    walking = &leaves;
    bool mode = xt_grad_mode();
    xt_set_grad_mode(false); /* gradients of gradients are not recorded */

    for (int i = 0; i < count; i++) {
        XtTensor *gradient = NULL;
        XT_TRY(seed(roots[i], gradients ? gradients[i] : NULL, &gradient));
        XtGrad *grad = roots[i]->grad;
        XtEdge edge = {.node = grad->node, .output = grad->output, .leaf = grad->node ? NULL : roots[i]};
        status = send(&edge, gradient, &heap, &leaves);
        xt_tensor_release(gradient);
        if (status != XT_OK) goto done;
    }
    while (heap.count > 0) {
        XtNode *node = heap_pop(&heap);
        status = run_node(node, retain_graph, &heap, &leaves);
        xt_node_release(node);
        if (status != XT_OK) goto done;
        if (xt_interrupted()) {
            status = XT_INTERRUPTED;
            goto done;
        }
    }
    for (int64_t i = 0; i < leaves.count; i++) XT_TRY(finish_leaf(&leaves.items[i]));
done:
    while (heap.count > 0) { /* after an error: what is still under way is dropped */
        XtNode *node = heap_pop(&heap);
        for (int i = 0; i < node->outputs; i++) {
            xt_tensor_release(node->output[i].gradient);
            node->output[i].gradient = NULL;
        }
        xt_node_release(node);
    }
    for (int64_t i = 0; i < leaves.count; i++) {
        xt_tensor_release(leaves.items[i].tensor);
        xt_tensor_release(leaves.items[i].gradient);
        xt_tensor_release(leaves.items[i].grown);
    }
    free(leaves.items);
    free(leaves.slots);
    free(heap.items);
    xt_set_grad_mode(mode);
    walking = outer;
    pthread_mutex_unlock(&walk_lock);
    return status;
}
