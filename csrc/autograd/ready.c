/* ready.c - in which order the gradients of some leaves become complete in a walk.
 *
 * A walk runs nodes from the youngest to the oldest. So a leaf's gradient is complete once the next node is older than all that use the
 * leaf. One pass over the graph before the walk finds the oldest of them. A node with a rule of a user's may run any backward inside, of
 * a graph that does not exist yet (recomputation): it counts as one that uses every leaf.
 */
#include "ready.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* What xt_set_ready has left for a backward of this thread: an XtReady of its own memory, or NULL. A key and not a _Thread_local, as a
 * thread that ends before its backward must give it back. */
static pthread_key_t pending;

void xt_ready_end(XtReady *ready) {
    for (int64_t i = 0; i < ready->count; i++) xt_tensor_release(ready->item[i].leaf);
    free(ready->item);
    if (ready->release) ready->release(ready->context);
    memset(ready, 0, sizeof *ready);
}

static void drop(void *ready) {
    if (ready) xt_ready_end(ready);
    free(ready);
}

__attribute__((constructor)) static void make_key(void) { pthread_key_create(&pending, drop); }

static int by_address(const void *a, const void *b) {
    const XtReadyLeaf *x = a, *y = b;
    if (x->leaf != y->leaf) return (uintptr_t)x->leaf < (uintptr_t)y->leaf ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

/* Leaves, each once. */
static XtStatus check_leaves(XtReady *ready) {
    for (int64_t i = 0; i < ready->count; i++) {
        const XtReadyLeaf *item = &ready->item[i];
        if (!xt_is_leaf(item->leaf))
            return xt_error(XT_VALUE_ERROR, "on_ready: leaves must be leaf tensors, got the result of %s at %d",
                            xt_grad_of(item->leaf)->node->name, item->index);
    }
    if (ready->count > 0) qsort(ready->item, (size_t)ready->count, sizeof *ready->item, by_address);
    for (int64_t i = 1; i < ready->count; i++) {
        const XtReadyLeaf *item = &ready->item[i];
        if (item[-1].leaf == item->leaf)
            return xt_error(XT_VALUE_ERROR, "on_ready: leaves must be distinct, got one at %d and at %d", item[-1].index,
                            item->index);
    }
    return XT_OK;
}

XtStatus xt_set_ready(int count, XtTensor *const *leaf, int64_t after, XtStatus (*call)(void *context, int index),
                      void (*release)(void *context), void *context) {
    XtReady *made = calloc(1, sizeof *made);
    XtStatus status = XT_OK;
    drop(pthread_getspecific(pending));
    pthread_setspecific(pending, NULL);
    if (made) *made = (XtReady){.after = after, .call = call, .release = release, .context = context};
    else if (release) release(context);
    if (!made || (count > 0 && !(made->item = calloc((size_t)count, sizeof *made->item))))
        XT_TRY(xt_error(XT_OUT_OF_MEMORY, "on_ready: out of memory"));
    for (int i = 0; i < count; i++) {
        xt_tensor_retain(leaf[i]);
        made->item[i] = (XtReadyLeaf){leaf[i], UINT64_MAX, i};
    }
    made->count = count;
    if (after < 0) XT_TRY(xt_error(XT_VALUE_ERROR, "on_ready: after must be at least 0, got %lld", (long long)after));
    XT_TRY(check_leaves(made));
    if (count && pthread_setspecific(pending, made) != 0) XT_TRY(xt_error(XT_OUT_OF_MEMORY, "on_ready: out of memory"));
    if (count) return XT_OK;
done:
    drop(made);
    return status;
}

void xt_ready_take(XtReady *ready) {
    XtReady *made = pthread_getspecific(pending);
    memset(ready, 0, sizeof *ready);
    if (!made || made->after-- > 0) return;
    pthread_setspecific(pending, NULL);
    *ready = *made;
    free(made);
}

/* ---- the pass over the graph ------------------------------------------------------------------------------------------------- */

/* Open-addressing sets: of sequence numbers that were seen, and from a leaf to its item + 1. Sizes are powers of two. */
typedef struct Pass {
    XtReady *ready;
    uint64_t *seen;
    int64_t seen_size, seen_count;
    int64_t *slot, slot_size;
    const XtNode **stack;
    int64_t depth, room;
    uint64_t hidden; /* sequence of the oldest node that may add to any leaf */
} Pass;

static uint64_t mixed(uint64_t value) { return (value * 0x9E3779B97F4A7C15ull) >> 20; }

static bool add_seen(Pass *pass, uint64_t sequence) {
    for (uint64_t i = mixed(sequence);; i++) {
        uint64_t *place = &pass->seen[i & (uint64_t)(pass->seen_size - 1)];
        if (*place == sequence) return false;
        if (*place) continue;
        *place = sequence;
        pass->seen_count++;
        return true;
    }
}

static XtStatus push(Pass *pass, const XtNode *node) {
    if (2 * pass->seen_count >= pass->seen_size) {
        uint64_t *old = pass->seen;
        int64_t size = pass->seen_size;
        pass->seen_size = size ? 2 * size : 1024;
        pass->seen = calloc((size_t)pass->seen_size, sizeof *pass->seen);
        if (!pass->seen) {
            pass->seen = old;
            pass->seen_size = size;
            return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
        }
        pass->seen_count = 0;
        for (int64_t i = 0; i < size; i++)
            if (old[i]) add_seen(pass, old[i]);
        free(old);
    }
    if (!add_seen(pass, node->sequence)) return XT_OK;
    if (pass->depth == pass->room) {
        const int64_t room = 2 * pass->room + 256;
        const XtNode **grown = realloc(pass->stack, (size_t)room * sizeof *grown);
        if (!grown) return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
        pass->stack = grown;
        pass->room = room;
    }
    pass->stack[pass->depth++] = node;
    return XT_OK;
}

static int64_t *slot_of(const Pass *pass, const XtTensor *leaf) {
    for (uint64_t i = mixed((uint64_t)(uintptr_t)leaf >> 4);; i++) {
        int64_t *slot = &pass->slot[i & (uint64_t)(pass->slot_size - 1)];
        if (!*slot || pass->ready->item[*slot - 1].leaf == leaf) return slot;
    }
}

static XtStatus visit(Pass *pass, const XtNode *node) {
    if (node->hides_leaves && node->sequence < pass->hidden) pass->hidden = node->sequence;
    for (int i = 0; i < node->inputs; i++) {
        const XtEdge *edge = &node->edges[i];
        if (edge->node) XT_CHECK(push(pass, edge->node));
        const int64_t at = edge->leaf ? *slot_of(pass, edge->leaf) : 0;
        if (at && node->sequence < pass->ready->item[at - 1].oldest) pass->ready->item[at - 1].oldest = node->sequence;
    }
    return XT_OK;
}

static int younger_first(const void *a, const void *b) {
    const XtReadyLeaf *x = a, *y = b;
    if (x->oldest != y->oldest) return x->oldest < y->oldest ? 1 : -1;
    return (x->index > y->index) - (x->index < y->index);
}

XtStatus xt_ready_order(XtReady *ready, int count, XtTensor *const *roots) {
    XtStatus status = XT_OK;
    Pass pass = {.ready = ready, .slot_size = 64, .hidden = UINT64_MAX};
    if (ready->count == 0) return XT_OK;
    while (pass.slot_size < 2 * ready->count) pass.slot_size *= 2;
    pass.slot = calloc((size_t)pass.slot_size, sizeof *pass.slot);
    if (!pass.slot) return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
    for (int64_t i = 0; i < ready->count; i++) *slot_of(&pass, ready->item[i].leaf) = i + 1;
    for (int i = 0; i < count; i++) {
        const XtGrad *grad = xt_grad_of(roots[i]);
        if (grad && grad->node) XT_TRY(push(&pass, grad->node));
    }
    while (pass.depth > 0) XT_TRY(visit(&pass, pass.stack[--pass.depth]));
    for (int64_t i = 0; i < ready->count; i++)
        if (pass.hidden < ready->item[i].oldest) ready->item[i].oldest = pass.hidden;
    qsort(ready->item, (size_t)ready->count, sizeof *ready->item, younger_first);
done:
    free(pass.seen);
    free(pass.slot);
    free(pass.stack);
    return status;
}
