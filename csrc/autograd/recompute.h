/* recompute.h - what a walk has computed again: outputs of producers (tape.h), until the producer's own rule runs. Several rules may ask
 * for one, and one run of an op may make what several slots name.
 */
#pragma once

#include "tape.h"

#include <stdlib.h>
#include <string.h>

typedef struct Again {
    uint64_t sequence;                /* of the producer, which the walk may have seen the last reference of */
    XtTensor *out[XT_MAX_RECOMPUTED]; /* owned or NULL */
} Again;
typedef struct AgainList {
    Again *items; /* [capacity], in no order */
    int64_t count, capacity;
} AgainList;

/* NULL when the producer has not run again. Valid until the next call. */
static inline const Again *again_find(const AgainList *list, uint64_t sequence) {
    for (int64_t i = 0; i < list->count; i++)
        if (list->items[i].sequence == sequence) return &list->items[i];
    return NULL;
}

/* Takes over the references, also when it fails. */
static inline XtStatus again_add(AgainList *list, const Again *entry) {
    if (list->count == list->capacity) {
        int64_t capacity = 2 * list->capacity + 8;
        Again *grown = realloc(list->items, (size_t)capacity * sizeof *grown);
        if (!grown) {
            for (int o = 0; o < XT_MAX_RECOMPUTED; o++) xt_tensor_release(entry->out[o]);
            return xt_error(XT_OUT_OF_MEMORY, "backward: out of memory");
        }
        list->items = grown;
        list->capacity = capacity;
    }
    list->items[list->count++] = *entry;
    return XT_OK;
}

static inline void again_drop(AgainList *list, int64_t at) {
    Again gone = list->items[at];
    list->items[at] = list->items[--list->count];
    for (int o = 0; o < XT_MAX_RECOMPUTED; o++) xt_tensor_release(gone.out[o]);
}

static inline void again_forget(AgainList *list, uint64_t sequence) {
    const Again *entry = again_find(list, sequence);
    if (entry) again_drop(list, entry - list->items);
}

static inline void again_end(AgainList *list) {
    while (list->count > 0) again_drop(list, list->count - 1);
    free(list->items);
}
