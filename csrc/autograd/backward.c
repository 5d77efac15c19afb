/* backward.c - the walk: youngest reached node first, gradients added along the edges.
 *
 * Because every input is older than the node that uses it, a node's gradient is complete when it is the youngest one left, so a heap by
 * sequence number replaces the usual count of dependencies. The order of additions is the order of the graph: same bits every time.
 *
 * What a walk collects is its own: several threads may walk at once, also over one graph, and none waits for another's hooks. They meet
 * at a node's saved tensors, which a walk takes or copies in one step, and at the .grad of leaves (shared.h).
 */
#include "core/span.h"
#include "leaves.h"
#include "ready.h"
#include "recompute.h"
#include "shared.h"

#include <stdlib.h>
#include <string.h>

/* A node that has received a gradient; sums[first + o] of the walk is what its output o has collected. */
typedef struct Reached {
    XtNode *node; /* owned */
    int64_t first;
} Reached;

/* Entry of an open-addressing index. Nodes recorded one after the other have neighbouring places. */
typedef struct Place {
    uint64_t sequence; /* 0: empty */
    int64_t first;
} Place;

/* A .grad that the rule under way adds to: this thread is its adder until the rule has returned. */
typedef struct Adding {
    XtGrad *grad;       /* kept alive by the edge of the node */
    XtTensor *gradient; /* owned: another thread may clear .grad at any moment */
} Adding;

enum { FEW = 64, MAX_ADDING = 8 };

typedef struct Walk {
    struct Walk *outer; /* of this thread: a rule or a hook may walk a graph of its own (recomputation) */
    bool retain_graph;
    Reached *heap; /* [capacity]: max-heap by sequence number of the reached nodes that have not run */
    int64_t count, capacity;
    Place *places; /* [place_count], a power of two: the heap's nodes, and some that have run */
    int64_t place_count, placed;
    XtTensor **sums; /* [sum_capacity], owned or NULL */
    int64_t sum_count, sum_capacity;
    Leaves leaves;
    XtReady ready;
    AgainList again;
    XtColumns columns;
    /* Of the node whose rule runs. */
    XtSaved saved[XT_MAX_SAVED]; /* owned */
    bool handed_over;            /* one of them left through xt_node_take */
    bool starved;                /* a sum was asked for, and there was no memory to find it: going without would give other bits */
    Adding adding[MAX_ADDING];
    int adding_count;
    /* Small graphs need no allocation. */
    Reached few_reached[FEW];
    Place few_places[FEW];
    XtTensor *few_sums[FEW];
} Walk;

static _Thread_local Walk *walking;

/* ---- reached nodes ------------------------------------------------------------------------------------------------------- */

static Place *place_of(const Walk *walk, uint64_t sequence) {
    for (uint64_t i = sequence;; i++) {
        Place *place = &walk->places[i & (uint64_t)(walk->place_count - 1)];
        if (place->sequence == 0 || place->sequence == sequence) return place;
    }
}

/* Makes room for another node with `outputs` sums. Nodes that have run go from the index, and their empty sums with them: in a long chain
 * both stay as small as the heap. */
static XtStatus make_room(Walk *walk, int outputs) {
    if (walk->count == walk->capacity) {
        int64_t capacity = walk->capacity * 2;
        Reached *grown = malloc((size_t)capacity * sizeof *grown);
        if (!grown) return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
        memcpy(grown, walk->heap, (size_t)walk->count * sizeof *grown);
        if (walk->heap != walk->few_reached) free(walk->heap);
        walk->heap = grown;
        walk->capacity = capacity;
    }
    if (walk->placed * 2 < walk->place_count && walk->sum_count + outputs <= walk->sum_capacity) return XT_OK;

    int64_t places = FEW, sums = FEW + 2 * outputs;
    for (int64_t i = 0; i < walk->count; i++) sums += 2 * walk->heap[i].node->outputs;
    while (places < walk->count * 4 + 4) places *= 2;
    Place *index = calloc((size_t)places, sizeof *index);
    XtTensor **kept = index ? malloc((size_t)sums * sizeof(XtTensor *)) : NULL;
    if (!kept) {
        free(index);
        return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
    }
    if (walk->places != walk->few_places) free(walk->places);
    walk->places = index;
    walk->place_count = places;
    walk->placed = walk->count;
    walk->sum_count = 0;
    for (int64_t i = 0; i < walk->count; i++) {
        Reached *reached = &walk->heap[i];
        memcpy(kept + walk->sum_count, walk->sums + reached->first, (size_t)reached->node->outputs * sizeof(XtTensor *));
        reached->first = walk->sum_count;
        *place_of(walk, reached->node->sequence) = (Place){reached->node->sequence, reached->first};
        walk->sum_count += reached->node->outputs;
    }
    if (walk->sums != walk->few_sums) free(walk->sums);
    walk->sums = kept;
    walk->sum_capacity = sums;
    return XT_OK;
}

/* Where `node`'s output collects its gradient; the node is in the heap from then on. Valid until the next call. */
static XtStatus reach(Walk *walk, XtNode *node, int output, XtTensor ***out) {
    Place *place = place_of(walk, node->sequence);
    if (place->sequence == 0) {
        XT_CHECK(make_room(walk, node->outputs));
        place = place_of(walk, node->sequence);
        *place = (Place){node->sequence, walk->sum_count};
        walk->placed++;
        memset(walk->sums + walk->sum_count, 0, (size_t)node->outputs * sizeof(XtTensor *));
        walk->sum_count += node->outputs;
        __atomic_add_fetch(&node->references, 1, __ATOMIC_RELAXED);
        Reached *heap = walk->heap;
        int64_t i = walk->count++;
        for (; i > 0 && heap[(i - 1) / 2].node->sequence < node->sequence; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
        heap[i] = (Reached){node, place->first};
    }
    *out = &walk->sums[place->first + output];
    return XT_OK;
}

static Reached pop(Walk *walk) {
    Reached *heap = walk->heap, top = heap[0], last = heap[--walk->count];
    int64_t i = 0;
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= walk->count) break;
        if (child + 1 < walk->count && heap[child + 1].node->sequence > heap[child].node->sequence) child++;
        if (heap[child].node->sequence <= last.node->sequence) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* ---- sums ------------------------------------------------------------------------------------------------------------------ */

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

/* Whether nobody but the holder of this one reference can see the tensor's memory. What others read of it before they let it go has
 * been read. */
static bool only_ours(const XtTensor *tensor) {
    return xt_storage_is_own(tensor->storage) && __atomic_load_n(&tensor->references, __ATOMIC_ACQUIRE) == 1 &&
           __atomic_load_n(&tensor->storage->references, __ATOMIC_ACQUIRE) == 1;
}

/* Sends one input's gradient along its edge. */
static XtStatus send(Walk *walk, const XtEdge *edge, XtTensor *gradient) {
    XtTensor **sum;
    if (edge->node) {
        XT_CHECK(reach(walk, edge->node, edge->output, &sum));
    } else {
        Leaf *leaf = NULL;
        XT_CHECK(leaf_find(&walk->leaves, edge->leaf, &leaf));
        sum = &leaf->gradient;
    }
    return collect(sum, gradient, *sum && only_ours(*sum));
}

/* ---- what a rule asks ------------------------------------------------------------------------------------------------------ */

/* Makes this thread the adder of a leaf's .grad, if that exists and nobody else sees or adds to it: somebody else could be what the rule
 * reads (y.backward(w.grad)). */
static XtTensor *add_to_grad(Walk *walk, XtGrad *grad) {
    for (int i = 0; i < walk->adding_count; i++)
        if (walk->adding[i].grad == grad) return walk->adding[i].gradient;
    if (walk->adding_count == MAX_ADDING) return NULL;
    if (__atomic_load_n(&grad->hooks, __ATOMIC_RELAXED) || !__atomic_load_n(&grad->gradient, __ATOMIC_RELAXED)) return NULL;
    xt_tape_lock();
    XtTensor *gradient = grad->adder == 0 || !xt_tape_taken(grad->adder) ? grad->gradient : NULL;
    if (gradient && (!xt_view_is_contiguous(&gradient->view) || !only_ours(gradient))) gradient = NULL;
    if (gradient) {
        grad->adder = xt_tape_me();
        xt_tensor_retain(gradient);
        walk->adding[walk->adding_count++] = (Adding){grad, gradient};
    }
    xt_tape_unlock();
    if (gradient) __atomic_add_fetch(&gradient->storage->version, 1, __ATOMIC_RELAXED);
    return gradient;
}

static void end_adding(Walk *walk) {
    if (walk->adding_count == 0) return;
    xt_tape_lock();
    for (int i = 0; i < walk->adding_count; i++) walk->adding[i].grad->adder = 0;
    pthread_cond_broadcast(&xt_tape_added);
    xt_tape_unlock();
    for (int i = 0; i < walk->adding_count; i++) xt_tensor_release(walk->adding[i].gradient);
    walk->adding_count = 0;
}

XtTensor *xt_node_accumulator(XtNode *node, int input) {
    const XtEdge *edge = &node->edges[input];
    XtTensor *sum = NULL;
    if (edge->node) {
        const Place *place = place_of(walking, edge->node->sequence);
        if (place->sequence) sum = walking->sums[place->first + edge->output];
    } else if (edge->leaf) {
        Leaf *leaf = NULL;
        if (leaf_find(&walking->leaves, edge->leaf, &leaf) != XT_OK) {
            walking->starved = true;
            return NULL;
        }
        sum = leaf->gradient;
        if (!sum && (sum = add_to_grad(walking, xt_grad_of(edge->leaf)))) return sum;
    }
    return sum && only_ours(sum) && xt_view_is_contiguous(&sum->view) ? sum : NULL;
}

XtColumns *xt_walk_columns(void) { return &walking->columns; }

static XtStatus refuse_freed(const XtNode *node) {
    return xt_error(XT_RUNTIME_ERROR,
                    "backward: the graph of '%s' was freed by an earlier backward; call that with retain_graph=True", node->name);
}

/* Fills walk->saved from a node, which is consumed by that, or with references of its own. One step under the lock, because another walk
 * may run the same node. */
static XtStatus take_saved(Walk *walk, XtNode *node, bool consume) {
    xt_tape_lock();
    bool freed = node->freed;
    for (int i = 0; i < node->saved_count && !freed; i++) {
        XtSaved *saved = &node->saved[i];
        walk->saved[i] = *saved;
        if (consume) saved->tensor = NULL, saved->made = NULL;
        else xt_saved_retain(saved);
    }
    if (consume) __atomic_store_n(&node->freed, true, __ATOMIC_RELAXED);
    xt_tape_unlock();
    return freed ? refuse_freed(node) : XT_OK;
}

/* Runs a producer again, with its slots in place of those of the rule that asks. */
static XtStatus run_again(Walk *walk, XtNode *producer) {
    XtSaved asking[XT_MAX_SAVED];
    Again made = {.sequence = producer->sequence};
    memcpy(asking, walk->saved, sizeof asking);
    XtStatus status = take_saved(walk, producer, false);
    if (status == XT_OK) {
        status = xt_error_named(producer->recompute(producer, made.out), producer->name);
        for (int i = 0; i < producer->saved_count; i++) xt_saved_release(&walk->saved[i]);
    }
    memcpy(walk->saved, asking, sizeof asking);
    if (status == XT_OK) return again_add(&walk->again, &made);
    for (int o = 0; o < XT_MAX_RECOMPUTED; o++) xt_tensor_release(made.out[o]);
    return status;
}

/* Fills a slot that names a producer. */
static XtStatus compute_again(Walk *walk, XtSaved *saved) {
    const XtRecomputed *made = saved->made;
    uint64_t sequence = made->producer->sequence;
    if (!again_find(&walk->again, sequence)) XT_CHECK(run_again(walk, made->producer));
    XtStorage *storage = again_find(&walk->again, sequence)->out[made->output]->storage;
    XtView view = made->view;
    if (storage->data) view.data = (char *)storage->data + made->offset;
    saved->version = storage->version;
    return xt_tensor_from_view(storage, &view, &saved->tensor);
}

XtStatus xt_node_saved(XtNode *node, int slot, XtTensor **out) {
    XtSaved *saved = &walking->saved[slot];
    *out = NULL;
    if (!saved->tensor && saved->made) XT_CHECK(compute_again(walking, saved));
    *out = saved->tensor;
    if (!saved->tensor) return XT_OK;
    uint64_t now = __atomic_load_n(&saved->tensor->storage->version, __ATOMIC_RELAXED);
    if (now == saved->version) return XT_OK;
    return xt_error(XT_RUNTIME_ERROR, "backward: a tensor of shape %s saved by '%s' was changed in place (version %llu, now %llu)",
                    xt_shape_text(saved->tensor->ndim, saved->tensor->shape), node->name, (unsigned long long)saved->version,
                    (unsigned long long)now);
}

XtTensor *xt_node_place(int slot) { return walking->saved[slot].tensor; }

XtStatus xt_node_take(XtNode *node, int slot, XtTensor **out) {
    XtStatus status = xt_node_saved(node, slot, out);
    if (status != XT_OK) *out = NULL;
    if (*out && walking->saved[slot].made) *out = NULL; /* others may ask for it, too */
    if (!*out) return status;
    xt_tape_lock();
    XtTensor *tensor = *out, **kept = &node->saved[slot].tensor; /* with retain_graph the node has a reference, too */
    bool both = *kept == tensor;
    if (__atomic_load_n(&tensor->references, __ATOMIC_ACQUIRE) == (both ? 2 : 1)) {
        if (both) {
            *kept = NULL;
            __atomic_sub_fetch(&tensor->references, 1, __ATOMIC_RELAXED);
        }
        walking->saved[slot].tensor = NULL;
        walking->handed_over = true;
    } else {
        *out = NULL;
    }
    xt_tape_unlock();
    return XT_OK;
}

XtStatus xt_node_take_last(XtNode *node, int slot, XtTensor **out) {
    XT_CHECK(xt_node_saved(node, slot, out));
    bool last = *out && only_ours(*out); /* never while the node keeps it, too, for another backward */
    *out = NULL;
    return last ? xt_node_take(node, slot, out) : XT_OK;
}

/* ---- running a node -------------------------------------------------------------------------------------------------------- */

static XtStatus begin_rule(Walk *walk, XtNode *node) {
    walk->handed_over = false;
    return take_saved(walk, node, !walk->retain_graph);
}

/* A rule that failed leaves its node as it was, so that the backward can be tried again; not if it has written over what it saved. */
static void end_rule(Walk *walk, XtNode *node, XtStatus status) {
    bool undo = status != XT_OK && !walk->retain_graph && !walk->handed_over;
    if (undo) {
        xt_tape_lock();
        for (int i = 0; i < node->saved_count; i++) {
            XtSaved *saved = &walk->saved[i];
            node->saved[i].made = saved->made;
            if (!saved->made) node->saved[i].tensor = saved->tensor, saved->tensor = NULL;
            saved->made = NULL;
        }
        __atomic_store_n(&node->freed, false, __ATOMIC_RELAXED);
        xt_tape_unlock();
    }
    for (int i = 0; i < node->saved_count; i++) xt_saved_release(&walk->saved[i]);
}

/* A reference to the tensor that keeps this output's gradient; NULL where there is none, or its last reference has gone meanwhile. */
static XtTensor *keeper_of(const XtOutput *output) {
    if (!__atomic_load_n(&output->retain, __ATOMIC_RELAXED)) return NULL;
    xt_tape_lock();
    XtTensor *keeper = output->retain;
    int64_t references = keeper ? __atomic_load_n(&keeper->references, __ATOMIC_RELAXED) : 0;
    while (references > 0 && !__atomic_compare_exchange_n(&keeper->references, &references, references + 1, true, __ATOMIC_ACQUIRE,
                                                          __ATOMIC_RELAXED)) {}
    xt_tape_unlock();
    return references > 0 ? keeper : NULL;
}

static XtStatus keep_gradient(const XtOutput *output, XtTensor *gradient) {
    XtTensor *keeper = keeper_of(output), *kept = NULL;
    if (!keeper) return XT_OK;
    XtStatus status = xt_tensor_alias(gradient, &kept);
    if (status == XT_OK) status = xt_set_gradient(keeper, kept);
    xt_tensor_release(kept);
    xt_tensor_release(keeper);
    return status;
}

/* Runs one node: completes its output gradients, calls its rule, sends the results on. */
static XtStatus run_node(Walk *walk, Reached reached) {
    XtNode *node = reached.node;
    XtStatus status = XT_OK;
    XtTensor *few[FEW / 4], **din = few, **dout;
    int count = node->inputs + node->outputs;
    if (count > FEW / 4 && !(din = malloc((size_t)count * sizeof(XtTensor *)))) {
        for (int i = 0; i < node->outputs; i++) xt_tensor_release(walk->sums[reached.first + i]);
        return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
    }
    memset(din, 0, (size_t)node->inputs * sizeof(XtTensor *));
    dout = din + node->inputs;
    memcpy(dout, walk->sums + reached.first, (size_t)node->outputs * sizeof(XtTensor *));
    memset(walk->sums + reached.first, 0, (size_t)node->outputs * sizeof(XtTensor *));
    if (__atomic_load_n(&node->freed, __ATOMIC_RELAXED)) XT_TRY(refuse_freed(node)); /* before its hooks run */
    for (int i = 0; i < node->outputs; i++) {
        XtOutput *output = &node->output[i];
        if (!dout[i]) {
            XT_TRY(xt_tape_math.filled(output->device, output->dtype, output->ndim, output->shape, 0.0, &dout[i]));
        }
        XT_TRY(xt_run_hooks(&output->hooks, &dout[i]));
        XT_TRY(keep_gradient(output, dout[i]));
    }
    if (node->recompute) again_forget(&walk->again, node->sequence);
    XT_TRY(begin_rule(walk, node));
    int64_t begun = xt_span_begin();
    status = xt_error_named(node->backward(node, dout, din), node->name);
    xt_span_end(begun, node->name, true, dout, node->outputs);
    if (status == XT_OK && walk->starved) status = xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
    end_adding(walk);
    end_rule(walk, node, status);
    if (status != XT_OK) goto done;
    for (int i = 0; i < node->inputs; i++) {
        if (!din[i] || !xt_node_needs(node, i)) continue;
        /* Give our reference away before adding, so that a sum that only this walk holds can be added to in place. */
        XtTensor *gradient = din[i];
        din[i] = NULL;
        status = send(walk, &node->edges[i], gradient);
        xt_tensor_release(gradient);
        if (status != XT_OK) goto done;
    }
done:
    for (int i = 0; i < count; i++) xt_tensor_release(din[i]);
    if (din != few) free(din);
    return status;
}

/* ---- leaves ---------------------------------------------------------------------------------------------------------------- */

/* *sum := old + gradient, new or `old` itself changed in place; `old` may be NULL. */
static XtStatus add_up(XtTensor *old, XtTensor *gradient, XtTensor **sum) {
    if (!old) {
        /* Somebody else may change that memory, or it repeats elements: .grad gets a dense copy of its own. */
        if (!only_ours(gradient) || !xt_view_is_contiguous(&gradient->view)) return xt_tape_math.copy(gradient, sum);
        xt_tensor_retain(gradient);
        *sum = gradient;
        return XT_OK;
    }
    if (gradient->storage != old->storage) return xt_tape_math.add(old, gradient, true, sum);
    XtTensor *apart = NULL; /* another view of .grad: adding in place would read what it has written */
    XtStatus status = xt_tape_math.copy(gradient, &apart);
    if (status == XT_OK) status = xt_tape_math.add(old, apart, true, sum);
    xt_tensor_release(apart);
    return status;
}

/* Adds what a leaf gathered to its .grad. */
static XtStatus finish_leaf(const Leaf *leaf, XtTensor *gradient) {
    XtGrad *grad = xt_grad_of(leaf->tensor);
    XtTensor *sum = NULL;
    xt_tape_lock();
    while (grad->adder && xt_tape_taken(grad->adder)) pthread_cond_wait(&xt_tape_added, &xt_tape_mutex);
    uint64_t before = grad->adder; /* 0, or this thread, where a signal handler walks in the middle of a rule */
    grad->adder = xt_tape_me();
    XtTensor *old = grad->gradient;
    if (old) xt_tensor_retain(old);
    xt_tape_unlock();

    XtStatus status = add_up(old, gradient, &sum);

    xt_tape_lock();
    XtTensor *gone = sum; /* where somebody has replaced .grad meanwhile, as if it had been after the addition */
    if (status == XT_OK && grad->gradient == old) {
        gone = old;
        __atomic_store_n(&grad->gradient, sum, __ATOMIC_RELAXED);
    }
    grad->adder = before;
    pthread_cond_broadcast(&xt_tape_added);
    xt_tape_unlock();
    xt_tensor_release(gone);
    xt_tensor_release(old);
    return status;
}

static XtStatus finish(Leaf *leaf) {
    if (!leaf->gradient) return XT_OK; /* its rules added to .grad themselves */
    XT_CHECK(xt_run_hooks(&xt_grad_of(leaf->tensor)->hooks, &leaf->gradient));
    XT_CHECK(finish_leaf(leaf, leaf->gradient));
    xt_tensor_release(leaf->gradient);
    leaf->gradient = NULL;
    return XT_OK;
}

static XtStatus finish_leaves(Walk *walk) {
    for (int64_t i = 0; i < walk->leaves.count; i++) XT_CHECK(finish(&walk->leaves.items[i]));
    return XT_OK;
}

/* Tells of the leaves whose gradients are complete when nodes from `sequence` on have not run. */
static XtStatus tell_ready(Walk *walk, uint64_t sequence) {
    XtReady *ready = &walk->ready;
    for (; ready->told < ready->count && ready->item[ready->told].oldest > sequence; ready->told++) {
        const XtReadyLeaf *next = &ready->item[ready->told];
        Leaf *leaf = NULL;
        XT_CHECK(leaf_find(&walk->leaves, next->leaf, &leaf));
        XT_CHECK(finish(leaf));
        XT_CHECK(ready->call(ready->context, next->index));
    }
    return XT_OK;
}

/* ---- the walk -------------------------------------------------------------------------------------------------------------- */

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

static XtStatus walk_from(Walk *walk, int count, XtTensor *const *roots, XtTensor *const *gradients) {
    XtStatus status = XT_OK;
    for (int i = 0; i < count; i++) {
        XtTensor *gradient = NULL;
        XT_CHECK(seed(roots[i], gradients ? gradients[i] : NULL, &gradient));
        const XtGrad *grad = xt_grad_of(roots[i]);
        XtEdge edge = {.node = grad->node, .output = grad->output, .leaf = grad->node ? NULL : roots[i]};
        status = send(walk, &edge, gradient);
        xt_tensor_release(gradient);
        if (status != XT_OK) return status;
    }
    XT_CHECK(xt_ready_order(&walk->ready, count, roots));
    while (walk->count > 0) {
        XT_CHECK(tell_ready(walk, walk->heap[0].node->sequence));
        Reached reached = pop(walk);
        status = run_node(walk, reached);
        xt_node_release(reached.node);
        if (status != XT_OK) return status;
        if (xt_interrupted()) return XT_INTERRUPTED;
    }
    XT_CHECK(finish_leaves(walk));
    return tell_ready(walk, 0);
}

/* After an error, what is still under way is dropped. */
static void end_walk(Walk *walk) {
    for (int64_t i = 0; i < walk->count; i++) {
        for (int o = 0; o < walk->heap[i].node->outputs; o++) xt_tensor_release(walk->sums[walk->heap[i].first + o]);
        xt_node_release(walk->heap[i].node);
    }
    for (int64_t i = 0; i < walk->leaves.count; i++) {
        xt_tensor_release(walk->leaves.items[i].tensor);
        xt_tensor_release(walk->leaves.items[i].gradient);
    }
    xt_ready_end(&walk->ready);
    again_end(&walk->again);
    xt_forget_columns(&walk->columns);
    free(walk->leaves.items);
    free(walk->leaves.slots);
    if (walk->heap != walk->few_reached) free(walk->heap);
    if (walk->places != walk->few_places) free(walk->places);
    if (walk->sums != walk->few_sums) free(walk->sums);
}

XtStatus xt_backward(int count, XtTensor *const *roots, XtTensor *const *gradients, bool retain_graph) {
    Walk walk;
    memset(&walk, 0, offsetof(Walk, few_reached));
    memset(walk.few_places, 0, sizeof walk.few_places);
    walk.outer = walking;
    if (!walking) xt_ready_take(&walk.ready);
    walk.retain_graph = retain_graph;
    walk.heap = walk.few_reached, walk.capacity = FEW;
    walk.places = walk.few_places, walk.place_count = FEW;
    walk.sums = walk.few_sums, walk.sum_capacity = FEW;
    walking = &walk;
    bool mode = xt_grad_mode();
    xt_set_grad_mode(false); /* gradients of gradients are not recorded */
    XtStatus status = walk_from(&walk, count, roots, gradients);
    end_walk(&walk);
    xt_set_grad_mode(mode);
    walking = walk.outer;
    return status;
}
