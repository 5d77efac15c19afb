/* cross_entropy.c - softmax cross-entropy of rows of logits against class indices.
 *
 *     forward    lse = m + log sum_v exp(x_v - m),  m = max_v x_v;   loss = lse - x_target
 *     backward   d lse / dx_v = exp(x_v - lse), hence  dx_v = (exp(x_v - lse) - [v == target]) dloss scale
 *
 * z > 0 (the z-loss; Chowdhery et al. 2022, PaLM): loss += z lse^2, hence
 *     dx_v = (exp(x_v - lse) (1 + 2 z lse) - [v == target]) dloss scale
 *
 * softcap c > 0 (Gemma 2, arXiv 2408.00118): c tanh(x_v / c) stands for x_v, hence a factor 1 - tanh(x_v / c)^2 of dx_v. Rows without
 * one keep the loops that they have: `cap` is the constant 0 there.
 *
 * The probabilities are never stored: the backward makes them again from the logits and lse. Rows are ld elements apart. A forward
 * that is asked for dlogits makes each row's after its loss, while the row is in a cache.
 */
#ifndef T
#include "contract/layers.h"
#include "cpu/elementwise/unary_math.h"
#include "cpu/kernel.h"

#include <inttypes.h>

/* A large vocabulary is summed in blocks: 50000 terms added one by one would cost two digits of float32. */
enum { BLOCK = 1024 };

typedef struct Targets {
    const int64_t *at; /* [rows] */
    int64_t vocab, ignore_index, first;
    bool linear;
} Targets;

#define TARGETS(p, from) \
    (&(const Targets){   \
        .at = (p)->targets, .vocab = (p)->vocab, .ignore_index = (p)->ignore_index, .first = (from), .linear = (p)->linear})

static XtStatus wrong_target(const Targets *t, int64_t target, int64_t r) {
    return xt_error(
        XT_INDEX_ERROR, "%s must be in [0, %" PRId64 ") or ignore_index %" PRId64 ", got %" PRId64 " at position %" PRId64,
        t->linear ? "linear_cross_entropy: targets" : "cross_entropy: target", t->vocab, t->ignore_index, target, t->first + r);
}

/* *target = that of row r. */
XT_INLINE XtStatus read_target(const Targets *t, int64_t r, int64_t *target) {
    *target = XT_READ_ONCE(t->at + r);
    return (uint64_t)*target < (uint64_t)t->vocab || *target == t->ignore_index ? XT_OK : wrong_target(t, *target, r);
}

#define XT_TEMPLATE "cpu/layers/cross_entropy.c"
#include "cpu/each_float.h"

/* Before the pieces, so that the first wrong target is told. */
static XtStatus check_targets(const Targets *t, int64_t rows) {
    int64_t target;
    for (int64_t r = 0; r < rows; r++) XT_CHECK(read_target(t, r, &target));
    return XT_OK;
}

XtStatus xt_cpu_cross_entropy_fwd(const XtCrossEntropyFwd *p) {
    XT_CHECK(check_targets(TARGETS(p, p->first), p->rows));
    return xt_parallel(p->rows, xt_row_grain(p->vocab, 16384), XT_BY_FLOAT(p->dtype, cross_entropy_fwd), (void *)p);
}

XtStatus xt_cpu_cross_entropy_bwd(const XtCrossEntropyBwd *p) {
    XtStatus status = check_targets(TARGETS(p, 0), p->rows);
    if (status != XT_OK || p->vocab == 0) return status;
    return xt_parallel(p->rows, xt_row_grain(p->vocab, 16384), XT_BY_FLOAT(p->dtype, cross_entropy_bwd), (void *)p);
}

#else

/* 1 + 2 z lse; exactly 1 without a z-loss, also where lse is not finite. */
XT_INLINE ACC NAME(z_growth)(double z, ACC lse) { return z > 0 ? 1 + 2 * (ACC)z * lse : 1; }

XT_INLINE ACC NAME(tanh_of)(ACC x) { return IS_F64 ? (ACC)tanh((double)x) : (ACC)xt_tanhf((float)x); }

/* A logit with its softcap; x itself where cap is 0. */
XT_INLINE ACC NAME(capped)(ACC x, ACC cap) { return cap > 0 ? cap * NAME(tanh_of)(x / cap) : x; }

/* (e^(x - lse) growth - at_target) factor, by x before its softcap. */
XT_INLINE T NAME(gradient_of)(ACC x, ACC cap, ACC lse, ACC growth, ACC at_target, ACC factor) {
    if (cap > 0) {
        ACC t = NAME(tanh_of)(x / cap);
        return STORE((EXP(cap * t - lse) * growth - at_target) * factor * (1 - t * t));
    }
    return STORE((EXP(x - lse) * growth - at_target) * factor);
}

/* dx may be x. growth: of the probabilities. */
XT_INLINE void NAME(gradient_row)(T *dx, const T *x, int64_t vocab, int64_t target, bool ignored, ACC cap, ACC lse, ACC growth,
                                  ACC factor) {
    if (ignored) { /* even where the logits are not finite */
        memset(dx, 0, (size_t)vocab * sizeof(T));
        return;
    }
    T at_target = NAME(gradient_of)(LOAD(x[target]), cap, lse, growth, 1, factor);
#pragma omp simd
    for (int64_t v = 0; v < vocab; v++) dx[v] = NAME(gradient_of)(LOAD(x[v]), cap, lse, growth, 0, factor);
    dx[target] = at_target;
}

XT_INLINE void NAME(forward_row)(const XtCrossEntropyFwd *p, int64_t r, int64_t target, ACC cap) {
    const T *x = (const T *)p->logits + r * p->ld; /* [vocab] */
    ACC max = -INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
    for (int64_t v = 0; v < p->vocab; v++) {
        ACC value = LOAD(x[v]);
        max = value > max ? value : max;
    }
    max = NAME(capped)(max, cap); /* tanh keeps the order */
    for (int64_t block = 0; block < p->vocab; block += BLOCK) {
        int64_t last = block + BLOCK < p->vocab ? block + BLOCK : p->vocab;
        ACC part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t v = block; v < last; v++) part += EXP(NAME(capped)(LOAD(x[v]), cap) - max);
        sum += part;
    }
    ACC log_sum = (ACC)log((double)sum), lse = max + log_sum;
    ((ACC *)p->lse)[r] = lse;
    /* Not lse - x: for large logits that would lose the digits that lse has already rounded away. */
    ((ACC *)p->losses)[r] = target == p->ignore_index ? 0 : (max - NAME(capped)(LOAD(x[target]), cap)) + log_sum;
    if (p->z > 0 && target != p->ignore_index) ((ACC *)p->losses)[r] += (ACC)p->z * lse * lse;
    if (p->dlogits)
        NAME(gradient_row)((T *)p->dlogits + r * p->ld, x, p->vocab, target, target == p->ignore_index, cap, lse,
                           NAME(z_growth)(p->z, lse), (ACC)p->scale);
}

XT_FAST static XtStatus NAME(cross_entropy_fwd)(void *context, int64_t begin, int64_t end) {
    const XtCrossEntropyFwd *p = context;
    const Targets *targets = TARGETS(p, p->first);
    for (int64_t r = begin, target; r < end; r++) {
        XT_CHECK(read_target(targets, r, &target));
        if (p->softcap > 0) NAME(forward_row)(p, r, target, (ACC)p->softcap);
        else NAME(forward_row)(p, r, target, 0);
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(cross_entropy_bwd)(void *context, int64_t begin, int64_t end) {
    const XtCrossEntropyBwd *p = context;
    const Targets *targets = TARGETS(p, 0);
    for (int64_t r = begin, target; r < end; r++) {
        XT_CHECK(read_target(targets, r, &target));
        const T *x = (const T *)p->logits + r * p->ld; /* [vocab] */
        T *dx = (T *)p->dlogits + r * p->ld;           /* [vocab] */
        ACC factor = ((const ACC *)p->dlosses)[r * p->dloss_stride] * (ACC)p->scale;
        ACC lse = ((const ACC *)p->lse)[r], growth = NAME(z_growth)(p->z, lse);
        bool ignored = target == p->ignore_index;
        if (p->softcap > 0) NAME(gradient_row)(dx, x, p->vocab, target, ignored, (ACC)p->softcap, lse, growth, factor);
        else NAME(gradient_row)(dx, x, p->vocab, target, ignored, 0, lse, growth, factor);
    }
    return XT_OK;
}

#endif
