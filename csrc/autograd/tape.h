/* tape.h - reverse-mode differentiation: who made a tensor, and how gradients walk back.
 *
 * Each recorded call is a node: its definition, edges to whoever made its inputs, the tensors it saved, and a copy of its scalar
 * arguments. Nodes carry a growing sequence number, and an input is always older than the node that uses it, so `backward` is one
 * loop: take the youngest reached node from a heap, ask its definition for the gradients of its inputs, add them to the edges.
 *
 * Ownership: tensor -> grad record -> node -> edges -> older nodes and leaf tensors. Saved tensors are aliases without a grad record,
 * so a node never points at its own output and the graph is freed by counting alone (iteratively: a long chain must not
 * overflow the C stack).
 *
 * Recomputation: in recompute mode the outputs of ops that are cheap to run again are not kept. A slot that would keep one names its
 * producer instead, a node which the edges lead to anyway, and the walk runs that op again when a rule asks (backward.c). The output's
 * storage tells which node can do so (XtStorage.producer).
 *
 * Threads: ops record and backwards walk without the GIL, so each field that changes after its record is in place says what guards it.
 * Most are under *the tape's lock*, one mutex per process (shared.h). It is held for a few loads and stores only: never across a kernel,
 * a release, a hook or another lock, so nobody waits for it longer than that and it takes part in no deadlock. What a backward collects
 * lies in its own walk, not in the nodes: walks take turns for nothing, also where they share a graph.
 */
#pragma once

#include "xtrain.h"

#define XT_MAX_SAVED 11
#define XT_MAX_RECOMPUTED 2

struct XtNode;
struct XtCallArgs;

/* How to differentiate: fills din[i] (new references; NULL = no gradient) for every i with xt_node_needs(node, i).
 * dout[o] is never NULL: an output that nobody used arrives as zeros. */
typedef XtStatus (*XtBackward)(struct XtNode *node, XtTensor *const *dout, XtTensor **din);

/* Computes outputs again: fills out[o] (new references) for the outputs that its op recomputes, with the bits of the forward, from what
 * the node has saved. At most XT_MAX_RECOMPUTED outputs. */
typedef XtStatus (*XtRecompute)(struct XtNode *node, XtTensor **out);

/* What a slot keeps of a tensor that is computed again: a view of an output of `producer`. */
typedef struct XtRecomputed {
    int64_t references;      /* atomic */
    struct XtNode *producer; /* owned; older than the node that has the slot */
    int output;
    size_t offset; /* of the view's first element in the output's storage, in bytes */
    XtView view;   /* without data */
} XtRecomputed;

typedef struct XtSaved {
    XtTensor *tensor;   /* owned alias, or NULL */
    XtRecomputed *made; /* owned, or NULL: in place of a tensor */
    uint64_t version;   /* of its storage when saved */
} XtSaved;

typedef struct XtEdge {
    struct XtNode *node; /* owned; NULL for a leaf */
    int output;          /* which output of node */
    XtTensor *leaf;      /* owned; a tensor the user asked gradients for */
} XtEdge;                /* both NULL: this input needs no gradient */

/* A hook sees the gradient of a tensor once it is complete and may replace it: returns the (new) replacement, or NULL in *out. */
typedef struct XtHook {
    int64_t references; /* atomic: the lists that hold it */
    int64_t id;
    bool removed; /* atomic: a walk that has the list already does not call it */
    XtStatus (*call)(void *context, XtTensor *gradient, XtTensor **out);
    void (*release)(void *context);
    void *context;
} XtHook;
/* A list never changes: adding and removing put another one in its place. A walk keeps a reference to the list that it runs. */
typedef struct XtHooks {
    int64_t references; /* atomic */
    int count;
    XtHook *items[];
} XtHooks;

typedef struct XtOutput {
    XtHooks *hooks; /* owned, or NULL; under the tape's lock */
    XtTensor
        *retain; /* borrowed, under the tape's lock: the output tensor, when it asked to keep its .grad; cleared when it goes */
    XtDevice device;
    XtDtype dtype;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
} XtOutput;

typedef struct XtNode {
    int64_t references;
    uint64_t sequence;
    const char *name;
    XtBackward backward;
    XtRecompute recompute; /* NULL: what this node computed is kept */
    int recompute_depth;   /* how many producers must run one after the other before all its slots are there */
    void (*release_context)(void *context);
    void *context; /* the recorded call's arguments (ops), or a Python object (xt.Function) */
    int inputs, outputs, saved_count;
    XtEdge *edges;    /* [inputs] */
    XtOutput *output; /* [outputs] */
    XtSaved
        saved[XT_MAX_SAVED];  /* under the tape's lock once recorded; a walk that runs the node takes or copies them all at once */
    bool hides_leaves;        /* its rule may add to any leaf: it is a user's */
    bool freed;               /* atomic, changed under the tape's lock: a backward has consumed it */
    struct XtNode *next_free; /* link of the iterative release */
} XtNode;

/* The grad record of a tensor. Leaf: node == NULL and requires is true. XtTensor.grad is set once, atomically, and stays until the
 * tensor is freed. */
typedef struct XtGrad {
    bool
        requires; /* atomic */
    XtNode *node; /* owned; node and output are set before the record is in place */
    int output;
    XtTensor *gradient; /* owned, under the tape's lock: .grad */
    uint64_t adder;     /* under the tape's lock: the thread whose walk is adding to .grad, or 0; see shared.h */
    XtHooks *hooks;     /* owned, under the tape's lock: of leaves; those of other tensors live in the node's output */
    bool retain;        /* under the tape's lock */
} XtGrad;

/* The record, or NULL. Any thread. */
static inline XtGrad *xt_grad_of(const XtTensor *tensor) { return __atomic_load_n(&tensor->grad, __ATOMIC_ACQUIRE); }

bool xt_grad_mode(void); /* per thread; true at the start */
void xt_set_grad_mode(bool on);

/* Recompute mode, per thread; false at the start: whether ops that can be run again let others compute their outputs again. */
bool xt_recompute_mode(void);
void xt_set_recompute_mode(bool on);

bool xt_requires_grad(const XtTensor *tensor);
/* Leaves only; floating dtypes only. */
XtStatus xt_set_requires_grad(XtTensor *tensor, bool on);
bool xt_is_leaf(const XtTensor *tensor);
XtStatus xt_retain_grad(XtTensor *tensor);
XtTensor *xt_gradient(const XtTensor *tensor);                           /* new, or NULL: another thread may clear .grad at once */
XtStatus xt_set_gradient(XtTensor *tensor, XtTensor *gradient);          /* retains gradient; NULL clears */
XtStatus xt_add_hook(XtTensor *tensor, const XtHook *hook, int64_t *id); /* copies *hook, takes over hook->context */
void xt_remove_hook(XtTensor *tensor, int64_t id);
/* Passes *gradient (owned) through the hooks of that place in order, replacing it where a hook says so. A hook that is added meanwhile
 * is not run, and one that is removed is not run any more. */
XtStatus xt_run_hooks(XtHooks *const *hooks, XtTensor **gradient);

/* Returns a new node with edges to `inputs` (entries may be NULL), sequence number set. */
XtStatus xt_node_new(const char *name, XtBackward backward, int inputs, XtTensor *const *input, int outputs, XtNode **out);
void xt_node_release(XtNode *node);
/* Keeps an alias of `tensor` (NULL allowed) in the next slot, or what computes it again. */
XtStatus xt_node_save(XtNode *node, const XtTensor *tensor);
void xt_saved_retain(XtSaved *saved);
void xt_saved_release(XtSaved *saved); /* and empties it */
/* Before anybody else sees `tensor`, output `index` of node: whoever saves it lets the node compute it again. */
void xt_node_recomputes(XtNode *node, int index, XtTensor *tensor);
/* In a backward, of the node whose rule runs: the saved tensor of a slot, borrowed; XT_RUNTIME_ERROR when it, or what it is computed
 * again from, was changed in place since. */
XtStatus xt_node_saved(XtNode *node, int slot, XtTensor **out);
/* The tensor of a slot, borrowed, for its place in memory alone: its elements may have changed since. NULL where the slot is empty, or
 * would be computed again. */
XtTensor *xt_node_place(int slot);
/* The tensor of a slot, handed over: the slot is empty from now on, so that a backward may write into what only its node kept. Returns
 * new, or NULL where the slot is empty, another walk reads it, or it was computed again. */
XtStatus xt_node_take(XtNode *node, int slot, XtTensor **out);
/* The same where the backward frees the graph and nobody else has a tensor over that memory: it may be written over, as this rule is its
 * last reader. Else NULL, and the slot is as it was. */
XtStatus xt_node_take_last(XtNode *node, int slot, XtTensor **out);
bool xt_node_needs(const XtNode *node, int input);
/* Makes `tensor` output `index` of node. One that is no float never requires a gradient: its rule gets zeros for it. */
XtStatus xt_node_attach(XtNode *node, int index, XtTensor *tensor);

/* In a backward: the sum that input's gradient will be added to, when one exists and may be written (dense, seen by nobody else, no hook
 * that must see the parts): a rule may add to it itself, e.g. a GEMM with beta = 1, and leave din[input] NULL. Else NULL. Borrowed. */
XtTensor *xt_node_accumulator(XtNode *node, int input);

/* Memory for the gradient of a tensor, begun by a rule that had gradients of some of its columns to leave there: rules that run later
 * leave theirs in others, and split() finds all of them in place. */
#define XT_MAX_COLUMNS 8
typedef struct XtColumns {
    XtStorage *of;      /* owned: of the tensor, so that no other comes to lie at its address meanwhile; NULL: nothing is begun */
    XtStorage *storage; /* owned */
    XtDtype dtype;
    int64_t row, width; /* elements of a row, and those that are given away */
    int count;
    int64_t begin[XT_MAX_COLUMNS], end[XT_MAX_COLUMNS];
} XtColumns;
/* Of the backward that runs the calling rule: one at a time. */
XtColumns *xt_walk_columns(void);
static inline void xt_forget_columns(XtColumns *columns) {
    xt_storage_release(columns->storage);
    xt_storage_release(columns->of);
    columns->of = NULL, columns->storage = NULL, columns->count = 0;
}

/* In-place change of `tensor`: refused while recording when it requires a gradient; bumps the version. */
XtStatus xt_begin_inplace(XtTensor *tensor, const char *op);

/* d(sum_i roots[i] . gradients[i]) to every leaf's .grad. gradients[i] NULL: ones, roots[i] must have one element. */
XtStatus xt_backward(int count, XtTensor *const *roots, XtTensor *const *gradients, bool retain_graph);

/* For the next backward but `after` that this thread begins outside of another one: call(context, i) once the .grad of leaf[i] is what
 * that backward makes of it, as soon as the walk knows. All leaves are told of, in an order that the graph decides. release(context) at its
 * end, or at that of the thread. Takes the place of an earlier call; with count 0 of nothing but that. XT_VALUE_ERROR for a tensor that is
 * no leaf, one that comes twice, and a negative `after`. Takes the context over, also when it fails. */
XtStatus xt_set_ready(int count, XtTensor *const *leaf, int64_t after, XtStatus (*call)(void *context, int index),
                      void (*release)(void *context), void *context);

/* The three things the tape computes itself, set by csrc/ops: a + b (new, or a itself changed in place when it may be), a dense copy,
 * and zeros or ones of a given shape. */
typedef struct XtTapeMath {
    XtStatus (*add)(XtTensor *a, XtTensor *b, bool may_overwrite_a, XtTensor **out);
    XtStatus (*copy)(XtTensor *a, XtTensor **out);
    XtStatus (*filled)(XtDevice device, XtDtype dtype, int ndim, const int64_t *shape, double value, XtTensor **out);
} XtTapeMath;
extern XtTapeMath xt_tape_math;
