/* ready.h - in which order the gradients of leaves become complete in a walk, for the walk alone. */
#pragma once

#include "tape.h"

typedef struct XtReadyLeaf {
    XtTensor *leaf;  /* owned */
    uint64_t oldest; /* sequence of the oldest node of the graph that may add to it; UINT64_MAX: none does */
    int index;       /* in the list of xt_set_ready */
} XtReadyLeaf;
typedef struct XtReady {
    XtReadyLeaf *item;          /* [count], owned; in the order in which they become complete */
    int64_t count, told, after; /* after: backwards that come before the one it is for */
    XtStatus (*call)(void *context, int index);
    void (*release)(void *context);
    void *context;
} XtReady;

/* A backward begins: gives what xt_set_ready has left for it, once; else nothing. */
void xt_ready_take(XtReady *ready);
/* Finds the oldest node of each leaf in the graph of the roots, and sorts. */
XtStatus xt_ready_order(XtReady *ready, int count, XtTensor *const *roots);
void xt_ready_end(XtReady *ready);
