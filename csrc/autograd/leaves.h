/* leaves.h - what the leaves of a walk have gathered. */
#pragma once

#include "tape.h"

#include <stdlib.h>

/* A leaf's hooks get the whole gradient of a backward. So leaves gather it here and add it to .grad at the end of the walk. */
typedef struct Leaf {
    XtTensor *tensor, *gradient; /* both owned */
} Leaf;
typedef struct Leaves {
    Leaf *items;
    int64_t count, capacity;
    /* Open-addressing index from tensor to position + 1, size a power of two. */
    int64_t *slots, slot_count;
} Leaves;

static inline int64_t *leaf_slot(const Leaves *leaves, const XtTensor *tensor) {
    uint64_t hash = ((uint64_t)(uintptr_t)tensor >> 4) * 0x9E3779B97F4A7C15ull;
    for (int64_t i = (int64_t)(hash >> 20);; i++) {
        int64_t *slot = &leaves->slots[i & (leaves->slot_count - 1)];
        if (!*slot || leaves->items[*slot - 1].tensor == tensor) return slot;
    }
}

static inline XtStatus leaf_find(Leaves *leaves, XtTensor *tensor, Leaf **out) {
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
