/* optimizer.h - optimizer kernels: a list of dense tensors in one call. The rules for all kernels are in kernels.h. */
#pragma once

#include "xtrain.h"

/* AdamW (Loshchilov & Hutter 2019), PyTorch's order of operations, for each tensor, n being the number of this step:
 *   p *= 1 - lr * weight_decay;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
 *   p -= lr / (1 - beta1^n) * m / (sqrt(v / (1 - beta2^n)) + eps)
 * p has `dtype`, g that or ACC; m, v and master (or NULL: p is the master) have ACC. Computed in ACC; p is the rounded master when given.
 * beta^n is xt_power's (core/power.h), the same on every device.
 *
 * What changes from step to step lies on the device, so the same call made again, or replayed by a graph, is the next step:
 *   step   one int64 a tensor, no two the same: the steps taken so far, less than XT_MOST_STEPS. n = step + 1; step becomes n.
 *   lr     one float64.
 *   scale  one float64, or NULL. g is multiplied by it first, rounded to ACC.
 *   guard  one float32, or NULL. When it is NaN or Inf the step is not taken: no tensor is written, and no step.
 * A call takes all the memory that it needs, for itself and for those behind `next`, before it changes the first tensor. */
#define XT_MOST_STEPS ((int64_t)1 << 40)
typedef struct XtAdamWItem {
    void *p, *m, *v, *master;
    const void *g;
    int64_t *step; /* on the device */
    XtDtype dtype, dtype_g;
    int64_t numel;
} XtAdamWItem;
typedef struct XtAdamW {
    const XtAdamWItem *items; /* [count], host memory */
    int64_t count;
    double beta1, beta2, eps, weight_decay;
    const double *lr;           /* on the device */
    const double *scale;        /* on the device */
    const float *guard;         /* on the device */
    const struct XtAdamW *next; /* another group of tensors, with numbers of its own, or NULL */
} XtAdamW;

/* Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for `count` matrices of one shape and dtype:
 *   b = momentum b + (1 - momentum) g;   u = nesterov ? (1 - momentum) g + momentum b : b;   x = u / max(|u|, eps)
 *   x = Newton-Schulz of x, products of the GEMM slot between the two kernels
 *   p = p (1 - lr weight_decay) - lr ratio x
 * direction computes x alone; update, behind it, writes b, master and p: so a step that fails before has changed nothing.
 * p and g have `dtype`; b and master (or NULL: p is the master) have its ACC, and so has every computation. x has `dtype_x`, of the same
 * ACC: [count, rows, cols]. |u| is the root of a float64 sum of squares, in pieces of a fixed size: a matrix has the same bits whatever
 * others are in the call. lr and guard: as AdamW's, and with a bad guard update writes nothing. */
typedef struct XtMuonItem { /* all [rows, cols] */
    void *p, *b, *master;
    const void *g;
} XtMuonItem;
typedef struct XtMuon {
    const XtMuonItem *items; /* [count], host memory */
    int64_t count, rows, cols;
    XtDtype dtype, dtype_x;
    void *x;
    double momentum, weight_decay, ratio, eps;
    bool nesterov;
    const double *lr;   /* on the device */
    const float *guard; /* on the device */
} XtMuon;

/* out[k, i, j] = b gram[k, i, j] + (i == j ? a : 0), computed in ACC. out and gram [count, side, side]. */
typedef struct XtMuonPolynomial {
    void *out;
    const void *gram;
    XtDtype dtype;
    int64_t count, side;
    double a, b;
} XtMuonPolynomial;

/* average = average + (x - average) (1 - decay) / (1 - decay^n) for each tensor, n = step + 1; step becomes n. So the average is that of
 * all x so far with weights decay^age, which add up to 1, and the first x itself after one call.
 * average has ACC of x's dtype; computed in ACC, the factor in float64. step: one int64 less than XT_MOST_STEPS; guard: as AdamW's. Both
 * lie on the device. */
typedef struct XtEmaItem {
    void *average;
    const void *x;
    XtDtype dtype; /* of x */
    int64_t numel;
} XtEmaItem;
typedef struct XtEma {
    const XtEmaItem *items; /* [count], host memory */
    int64_t count;
    int64_t *step;      /* on the device */
    const float *guard; /* on the device */
    double decay;
} XtEma;

/* The bytes of each `from` into its `to`. No `to` overlaps any other range. */
typedef struct XtCopyItem {
    void *to;
    const void *from;
    int64_t nbytes;
} XtCopyItem;
typedef struct XtCopies {
    const XtCopyItem *items; /* [count], host memory */
    int64_t count;
} XtCopies;

/* A checksum of each tensor, modulo 2^64, in integers: no order of the additions changes it.
 *   sums[t] = nbytes + sum over its words i = 0, 1, .. of mix(word_i + (i + 1) XT_SPLITMIX_STEP)
 * word_i is the little-endian number of bytes 8 i .. 8 i + 7; bytes from nbytes on count as 0. mix is xt_splitmix (core/splitmix.h), a
 * bijection: a change within one word always changes the sum, any other change does so except with a chance of about 2^-64. */
typedef struct XtChecksumItem {
    const void *data; /* [nbytes], of any alignment */
    int64_t nbytes;
} XtChecksumItem;
typedef struct XtChecksums {
    int64_t *sums;               /* [count], on the device */
    const XtChecksumItem *items; /* [count], host memory */
    int64_t count;
} XtChecksums;

/* norm[0] (float32, on the device) = sqrt(sum over all tensors of x^2), in float64 partial sums of fixed size. */
typedef struct XtGradNorm {
    float *norm;
    const XtView *items; /* [count] dense views, host memory */
    int64_t count;
} XtGradNorm;

/* Every item *= min(1, max_norm / (norm[0] + 1e-6)), as torch.nn.utils.clip_grad_norm_. A coefficient of exactly 1 writes nothing.
 * A norm that is NaN or Inf multiplies as it comes: the caller looks at the norm. */
typedef struct XtClip {
    const float *norm;
    const XtView *items; /* [count] dense views, host memory */
    int64_t count;
    double max_norm;
} XtClip;

/* A bank is a row of elements, of which tensors have pieces and the rest is 0. A part is a bank: `tensors` tensors of one dtype that
 * begin at `begin`, ascending and apart; with more than one, each begins at a multiple of XT_TREE_ALIGN.
 * out[e] = T(part_0[e] .. part_{n-1}[e]) for each e in [0, numel), where
 *   T(x_0) = x_0;  T(x_0..x_{n-1}) = T(x_0..x_{p-1}) + T(x_p..x_{n-1}),  p the largest power of two below n,
 * and + is one addition in ACC of values converted exactly. For n = a 2^k, T of the sums of 2^k neighbours is T of all: so a sum over
 * processes does not depend on how many there are.
 * out has ACC of every part, or, of one part, its dtype; NULL: only the squares are wanted. Parts may have different dtypes, and the
 * same tensors. out may be exactly one of the parts. 1 <= count <= XT_MOST_PARTS, XT_MOST_PARTS / 4 of several tensors.
 * squares[b] (float64, or NULL) = sum of out[e]^2 over the block [XT_TREE_BLOCK b, XT_TREE_BLOCK (b + 1)), in an order that depends on
 * the place in the block alone, and not on how the block is cut into tensors. */
#define XT_MOST_PARTS 64
#define XT_TREE_BLOCK 8192
#define XT_TREE_ALIGN 128
typedef struct XtTreeItem {
    const void *data; /* [numel] */
    int64_t begin, numel;
    XtDtype dtype;
} XtTreeItem;
typedef struct XtTreeSum {
    void *out;
    const XtTreeItem *items; /* [count, tensors], host memory */
    int64_t count, tensors;
    int64_t numel;
    XtDtype dtype; /* of out; ACC where that is NULL */
    double *squares;
} XtTreeSum;

/* norm = sqrt(sum of squares[i]), in an order that depends on count alone;
 * coefficient = min(1, most / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; guard = 0, or NaN where the norm is NaN or Inf. */
typedef struct XtBlockNorm {
    const double *squares; /* [count] */
    int64_t count;
    double most; /* Inf: the coefficient is 1 */
    double *norm, *coefficient;
    float *guard;
} XtBlockNorm;
