/* arena.h - places inside one region of memory, for the blocks of a captured step. C and CUDA.
 *
 * A replayed step uses the addresses of its capture, so its blocks lie in a region that nothing else uses. How large it must be is known
 * before: while the same step runs eagerly, a plan follows its allocations with an arena that has no end.
 *
 * A block gets the smallest hole that holds it, the lowest of equal ones, else the free end. The end counts as a hole only when no other
 * fits, so an arena of the planned size places the same sequence of allocations and releases as the plan did.
 */
#pragma once

#include "xtrain.h"

#include <stdlib.h>
#include <string.h>

#define XT_ARENA_UNIT \
    ((size_t)512) /* blocks begin at multiples of it: kernels and plans of products see the alignment of eager blocks */

typedef struct XtHole {
    size_t offset, nbytes;
} XtHole;
typedef struct XtArena {
    XtHole *holes; /* [count] below `top`, by offset; no two touch */
    int64_t count, room;
    size_t top, peak, limit; /* nothing lies at or above top; its highest value; and the value that it may have */
    int64_t blocks;          /* in use */
} XtArena;

static inline size_t xt_arena_round(size_t nbytes) { return (nbytes + XT_ARENA_UNIT - 1) / XT_ARENA_UNIT * XT_ARENA_UNIT; }

/* Whether there is a place; false also for want of host memory. limit - top must not overflow: at most SIZE_MAX / 2. */
static inline bool xt_arena_take(XtArena *arena, size_t nbytes, size_t *offset) {
    if (nbytes > SIZE_MAX / 4) return false;
    nbytes = xt_arena_round(nbytes);
    if (arena->blocks + 2 > arena->room) { /* releasing makes at most one hole a block: it never needs memory */
        int64_t room = 2 * arena->room + 64;
        XtHole *holes = (XtHole *)realloc(arena->holes, (size_t)room * sizeof *holes);
        if (!holes) return false;
        arena->holes = holes;
        arena->room = room;
    }
    int64_t best = -1;
    for (int64_t i = 0; i < arena->count; i++)
        if (arena->holes[i].nbytes >= nbytes && (best < 0 || arena->holes[i].nbytes < arena->holes[best].nbytes)) best = i;
    if (best < 0 && nbytes > arena->limit - arena->top) return false;
    if (best < 0) {
        *offset = arena->top;
        arena->top += nbytes;
        if (arena->top > arena->peak) arena->peak = arena->top;
    } else {
        XtHole *hole = &arena->holes[best];
        *offset = hole->offset;
        hole->offset += nbytes;
        hole->nbytes -= nbytes;
        if (hole->nbytes == 0) memmove(hole, hole + 1, (size_t)(--arena->count - best) * sizeof *hole);
    }
    arena->blocks++;
    return true;
}

/* A block that xt_arena_take has placed, with the size it was asked for. */
static inline void xt_arena_give(XtArena *arena, size_t offset, size_t nbytes) {
    nbytes = xt_arena_round(nbytes);
    arena->blocks--;
    int64_t at = 0, high = arena->count; /* becomes the first hole behind the block */
    while (at < high) {
        const int64_t middle = (at + high) / 2;
        if (arena->holes[middle].offset < offset) at = middle + 1;
        else high = middle;
    }
    const bool below = at > 0 && arena->holes[at - 1].offset + arena->holes[at - 1].nbytes == offset;
    const bool above = at < arena->count && offset + nbytes == arena->holes[at].offset;
    if (offset + nbytes == arena->top) {
        arena->top = below ? arena->holes[at - 1].offset : offset;
        if (below) arena->count--; /* the last hole */
    } else if (below) {
        arena->holes[at - 1].nbytes += nbytes;
        if (!above) return;
        arena->holes[at - 1].nbytes += arena->holes[at].nbytes;
        memmove(arena->holes + at, arena->holes + at + 1, (size_t)(--arena->count - at) * sizeof *arena->holes);
    } else if (above) {
        arena->holes[at].offset = offset;
        arena->holes[at].nbytes += nbytes;
    } else {
        memmove(arena->holes + at + 1, arena->holes + at, (size_t)(arena->count++ - at) * sizeof *arena->holes);
        arena->holes[at].offset = offset;
        arena->holes[at].nbytes = nbytes;
    }
}

/* ---- plans ------------------------------------------------------------------------------------------------------------------ */

typedef struct XtPlannedBlock {
    const void *data;
    size_t offset;
} XtPlannedBlock;
typedef struct XtMemoryPlan {
    XtArena arena;
    XtPlannedBlock *blocks; /* [arena.blocks], by address */
    int64_t room;
    bool failed; /* for want of host memory */
} XtMemoryPlan;

static inline void xt_plan_begin(XtMemoryPlan *plan) {
    memset(plan, 0, sizeof *plan);
    plan->arena.limit = SIZE_MAX / 2;
}

/* The first block at or above an address. */
static inline int64_t xt_plan_find(const XtMemoryPlan *plan, const void *data) {
    int64_t low = 0, high = plan->arena.blocks;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if ((uintptr_t)plan->blocks[middle].data < (uintptr_t)data) low = middle + 1;
        else high = middle;
    }
    return low;
}

static inline void xt_plan_took(XtMemoryPlan *plan, const void *data, size_t nbytes) {
    size_t offset;
    if (plan->failed) return;
    if (plan->arena.blocks == plan->room) {
        const int64_t room = 2 * plan->room + 64;
        XtPlannedBlock *blocks = (XtPlannedBlock *)realloc(plan->blocks, (size_t)room * sizeof *blocks);
        plan->failed = !blocks;
        if (!blocks) return;
        plan->blocks = blocks;
        plan->room = room;
    }
    const int64_t at = xt_plan_find(plan, data), behind = plan->arena.blocks - at;
    plan->failed = !xt_arena_take(&plan->arena, nbytes, &offset);
    if (plan->failed) return;
    memmove(plan->blocks + at + 1, plan->blocks + at, (size_t)behind * sizeof *plan->blocks);
    plan->blocks[at].data = data;
    plan->blocks[at].offset = offset;
}

/* A block from before the plan is none of its own. */
static inline void xt_plan_gave(XtMemoryPlan *plan, const void *data, size_t nbytes) {
    const int64_t at = plan->failed ? plan->arena.blocks : xt_plan_find(plan, data);
    if (at == plan->arena.blocks || plan->blocks[at].data != data) return;
    xt_arena_give(&plan->arena, plan->blocks[at].offset, nbytes);
    memmove(plan->blocks + at, plan->blocks + at + 1, (size_t)(plan->arena.blocks - at) * sizeof *plan->blocks);
}

/* The size of the region that the sequence needs, 0 if the plan failed, never 0 else. Frees the plan. */
static inline size_t xt_plan_end(XtMemoryPlan *plan) {
    const size_t least = plan->arena.peak > 0 ? plan->arena.peak : XT_ARENA_UNIT, peak = plan->failed ? 0 : least;
    free(plan->arena.holes);
    free(plan->blocks);
    memset(plan, 0, sizeof *plan);
    return peak;
}
