/* sinkhorn.c - positive matrices scaled towards doubly stochastic ones (Sinkhorn & Knopp 1967), as hyper-connections use it.
 *
 *     form P     A = exp(Z - s), s the maxima of the columns; `iters` times: columns, then rows
 *     form D     A = softmax of the rows of Z, + eps; columns; `iters` - 1 times: rows, then columns
 *     a stage    Y = A / d, d = sum along an axis + eps, or 1 where that is no normal number
 *     backward   E = A dA = Y dY - Y sum(Y dY), from the last stage to the first; in P, dZ = E
 *
 * The backward carries E, the gradient of log A, because dA grows by 1 / d at every stage and overflows where A is small. It does
 * not keep the matrices between the stages but rebuilds them: A = Y d. An element that becomes subnormal loses digits; then the
 * rebuilt rows do not sum to 1, and E grows at every stage. This shows at the end of the walk, where the true start is known. Such
 * a matrix alone is computed again, with its stages kept.
 *
 * Shifts. Subtracting a constant from each column changes nothing if the first stage divides by column sums (P), from each row if
 * it divides by row sums (D). In P only eps breaks this: the maximum of the column gets the gradient of that.
 *
 * With eps = 0, a row (P) or column (D) whose entries all underflow in exp has d = 0, or a d whose inverse is infinite. It stays as
 * it is.
 *
 * LANES matrices are worked on side by side, so that the loops over them vectorise for any n: a [n * n][LANES].
 */
#ifndef T
#include "contract/mhc.h"
#include "cpu/kernel.h"

#include <float.h>
#include <stdlib.h>

#define LANES 16
#define MAX_SIZE 8 /* of the contract */

#define XT_TEMPLATE "cpu/mhc/sinkhorn.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_sinkhorn_fwd(const XtSinkhornFwd *p) {
    return xt_parallel(p->tokens, LANES * 8, XT_BY_FLOAT(p->dtype, sinkhorn_fwd), (void *)p);
}

XtStatus xt_cpu_sinkhorn_bwd(const XtSinkhornBwd *p) {
    return xt_parallel(p->tokens, LANES * 4, XT_BY_FLOAT(p->dtype, sinkhorn_bwd), (void *)p);
}

#else

/* a [n * n][LANES] = `lanes` matrices from `from`; unused lanes are copies of the last, so that they stay finite. */
XT_INLINE void NAME(sinkhorn_load)(ACC *a, const T *from, int64_t lanes, int64_t n, bool transpose) {
    for (int64_t l = 0; l < LANES; l++) {
        const T *z = from + (l < lanes ? l : lanes - 1) * n * n; /* [n, n] */
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) a[(i * n + j) * LANES + l] = LOAD(z[transpose ? j * n + i : i * n + j]);
    }
}
XT_INLINE void NAME(sinkhorn_store)(T *to, const ACC *a, int64_t lanes, int64_t n, bool transpose) {
    for (int64_t l = 0; l < lanes; l++)
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < n; j++) to[l * n * n + (transpose ? j * n + i : i * n + j)] = STORE(a[(i * n + j) * LANES + l]);
}

#define LEAST_DIVISOR (IS_F64 ? (ACC)DBL_MIN : (ACC)FLT_MIN)
#define UNIT (IS_F64 ? (ACC)DBL_EPSILON : (ACC)FLT_EPSILON)

/* One stage: a /= d, d [n][LANES] = sums + eps of the vectors whose elements are `step` apart and that start `next` apart. */
XT_INLINE void NAME(sinkhorn_stage)(ACC *a, ACC *d, int64_t n, int64_t next, int64_t step, ACC eps) {
    for (int64_t v = 0; v < n; v++) {
        ACC *first = a + v * next * LANES, sum[LANES], inverse[LANES]; /* [LANES] */
        for (int64_t l = 0; l < LANES; l++) sum[l] = eps;
        for (int64_t e = 0; e < n; e++)
            for (int64_t l = 0; l < LANES; l++) sum[l] += first[e * step * LANES + l];
        bool small = false; /* tested first: a branch in the loop below would prevent vector instructions */
        for (int64_t l = 0; l < LANES; l++) small |= sum[l] < LEAST_DIVISOR;
        for (int64_t l = 0; small && l < LANES; l++) sum[l] = sum[l] < LEAST_DIVISOR ? 1 : sum[l]; /* NaN stays */
        for (int64_t l = 0; l < LANES; l++) d[v * LANES + l] = sum[l], inverse[l] = 1 / sum[l];
        for (int64_t e = 0; e < n; e++)
            for (int64_t l = 0; l < LANES; l++) first[e * step * LANES + l] *= inverse[l];
    }
}

/* Back through a stage: y [n * n][LANES] becomes a, e = y dy becomes a da. total [n][LANES] = sum e. */
XT_INLINE void NAME(sinkhorn_back)(ACC *y, ACC *e, const ACC *d, ACC *total, int64_t n, int64_t next, int64_t step) {
    for (int64_t v = 0; v < n; v++) {
        ACC *y0 = y + v * next * LANES, *e0 = e + v * next * LANES, sum[LANES];
        const ACC *divisor = d + v * LANES; /* [LANES] */
        for (int64_t l = 0; l < LANES; l++) sum[l] = 0;
        for (int64_t i = 0; i < n; i++)
            for (int64_t l = 0; l < LANES; l++) sum[l] += e0[i * step * LANES + l];
        for (int64_t i = 0; i < n; i++)
            for (int64_t l = 0; l < LANES; l++) {
                e0[i * step * LANES + l] -= y0[i * step * LANES + l] * sum[l];
                y0[i * step * LANES + l] *= divisor[l];
            }
        for (int64_t l = 0; l < LANES; l++) total[v * LANES + l] = sum[l];
    }
}

/* a = exp(a - maximum) of the vectors described as above; the maximum is one element of each, which becomes exactly 1. */
XT_INLINE void NAME(sinkhorn_exp)(ACC *a, int64_t n, int64_t next, int64_t step) {
    for (int64_t v = 0; v < n; v++) {
        ACC *first = a + v * next * LANES, most[LANES];
        for (int64_t l = 0; l < LANES; l++) most[l] = first[l];
        for (int64_t e = 1; e < n; e++)
            for (int64_t l = 0; l < LANES; l++) {
                ACC z = first[e * step * LANES + l];
                most[l] = z > most[l] ? z : most[l];
            }
        for (int64_t e = 0; e < n; e++)
            for (int64_t l = 0; l < LANES; l++) first[e * step * LANES + l] = EXP(first[e * step * LANES + l] - most[l]);
    }
}

/* From logits in a to what the stages begin with; d is overwritten. start (or NULL) [n * n][LANES]: exp(Z - s) in P, the softmax in
 * D. */
XT_INLINE void NAME(sinkhorn_begin)(ACC *a, ACC *d, ACC *start, int64_t n, ACC eps, XtSinkhornForm form) {
    if (form == XT_SINKHORN_P) NAME(sinkhorn_exp)(a, n, 1, n);
    else {
        NAME(sinkhorn_exp)(a, n, n, 1);
        NAME(sinkhorn_stage)(a, d, n, n, 1, 0);
    }
    if (start) memcpy(start, a, (size_t)(n * n * LANES) * sizeof *a);
    if (form == XT_SINKHORN_D)
        for (int64_t e = 0; e < n * n * LANES; e++) a[e] += eps;
}

/* From logits in a to the result in a. d [stages][n][LANES], or one stage of it that is overwritten (`keep` false); start: see
 * sinkhorn_begin. */
XT_INLINE void NAME(sinkhorn_run)(ACC *a, ACC *d, bool keep, ACC *start, int64_t n, int64_t iters, ACC eps, XtSinkhornForm form) {
    int64_t ahead = keep ? n * LANES : 0;
    NAME(sinkhorn_begin)(a, d, start, n, eps, form);
    for (int64_t i = 0; i < iters; i++) { /* the same stages in both, D leaves out the last */
        NAME(sinkhorn_stage)(a, d, n, 1, n, eps);
        d += ahead;
        if (form == XT_SINKHORN_D && i == iters - 1) break;
        NAME(sinkhorn_stage)(a, d, n, n, 1, eps);
        d += ahead;
    }
}

XT_FAST static XtStatus NAME(sinkhorn_fwd)(void *context, int64_t begin, int64_t end) {
    const XtSinkhornFwd *p = context;
    int64_t n = p->streams;
    ACC a[MAX_SIZE * MAX_SIZE * LANES], d[MAX_SIZE * LANES];
    for (int64_t t = begin; t < end; t += LANES) {
        int64_t lanes = end - t < LANES ? end - t : LANES;
        NAME(sinkhorn_load)(a, (const T *)p->logits + t * n * n, lanes, n, false);
        if (n == 4) NAME(sinkhorn_run)(a, d, false, NULL, 4, p->iters, (ACC)p->eps, p->form);
        else NAME(sinkhorn_run)(a, d, false, NULL, n, p->iters, (ACC)p->eps, p->form);
        NAME(sinkhorn_store)((T *)p->out + t * n * n, a, lanes, n, p->transpose);
    }
    return XT_OK;
}

/* What s, the first maximum of each column of P, gets because eps is not shifted with the rest. dz, start [n * n][LANES]. */
XT_INLINE void NAME(sinkhorn_shift)(ACC *dz, const ACC *start, const ACC *d, const ACC *total, int64_t n, ACC eps) {
    for (int64_t j = 0; j < n; j++)
        for (int64_t l = 0; l < LANES; l++)
            for (int64_t i = 0; i < n; i++) {
                if (start[(i * n + j) * LANES + l] != 1) continue;
                dz[(i * n + j) * LANES + l] -= total[j * LANES + l] * eps / d[j * LANES + l];
                break;
            }
}

/* Form D: e = A dA of A = P + eps becomes dZ of P = softmax of the rows of Z; p [n * n][LANES]. */
XT_INLINE void NAME(sinkhorn_softmax_back)(ACC *e, const ACC *p, int64_t n, ACC eps) {
    for (int64_t i = 0; i < n; i++) {
        ACC sum[LANES] = {0};
        for (int64_t j = 0; j < n; j++)
            for (int64_t l = 0; l < LANES; l++) {
                int64_t at = (i * n + j) * LANES + l;
                e[at] *= p[at] == 0 ? 0 : p[at] / (p[at] + eps); /* P dA */
                sum[l] += e[at];
            }
        for (int64_t j = 0; j < n; j++)
            for (int64_t l = 0; l < LANES; l++) e[(i * n + j) * LANES + l] -= p[(i * n + j) * LANES + l] * sum[l];
    }
}

/* Matrices on their way back: y a stage's result, e = y dy, start as above. */
typedef struct NAME(Sinkhorn) {
    ACC y[MAX_SIZE * MAX_SIZE * LANES], e[MAX_SIZE * MAX_SIZE * LANES], start[MAX_SIZE * MAX_SIZE * LANES];
    ACC first[MAX_SIZE * LANES], total[MAX_SIZE * LANES]; /* of the first stage */
} NAME(Sinkhorn);

XT_INLINE void NAME(sinkhorn_load_both)(NAME(Sinkhorn) * m, const XtSinkhornBwd *p, int64_t t, int64_t lanes, int64_t n) {
    NAME(sinkhorn_load)(m->y, (const T *)p->logits + t * n * n, lanes, n, false);
    NAME(sinkhorn_load)(m->e, (const T *)p->dout + t * n * n, lanes, n, p->transpose);
}
XT_INLINE void NAME(sinkhorn_store_grad)(NAME(Sinkhorn) * m, const XtSinkhornBwd *p, int64_t t, int64_t lanes, int64_t n) {
    if (p->form == XT_SINKHORN_P) NAME(sinkhorn_shift)(m->e, m->start, m->first, m->total, n, (ACC)p->eps);
    else NAME(sinkhorn_softmax_back)(m->e, m->start, n, (ACC)p->eps);
    NAME(sinkhorn_store)((T *)p->dlogits + t * n * n, m->e, lanes, n, false);
}

/* d [stages][n][LANES]. */
XT_INLINE void NAME(sinkhorn_there_and_back)(NAME(Sinkhorn) * m, ACC *d, const XtSinkhornBwd *p, int64_t stages, int64_t n) {
    NAME(sinkhorn_run)(m->y, d, true, m->start, n, p->iters, (ACC)p->eps, p->form);
    for (int64_t i = 0; i < n * n * LANES; i++) m->e[i] *= m->y[i];
    for (int64_t s = stages; s-- > 0;) /* even stages are those of columns */
        NAME(sinkhorn_back)(m->y, m->e, d + s * n * LANES, m->total, n, s % 2 ? n : 1, s % 2 ? 1 : n);
    memcpy(m->first, d, (size_t)(n * LANES) * sizeof *d);
}

/* The same for matrix t alone, whose stages are kept: kept [stages][n * n]. */
XT_INLINE void NAME(sinkhorn_alone)(NAME(Sinkhorn) * m, ACC *kept, const XtSinkhornBwd *p, int64_t t, int64_t stages, int64_t n) {
    ACC d[MAX_SIZE * LANES];
    int64_t size = n * n;
    NAME(sinkhorn_load_both)(m, p, t, 1, n);
    NAME(sinkhorn_begin)(m->y, d, m->start, n, (ACC)p->eps, p->form);
    for (int64_t s = 0; s < stages; s++) {
        NAME(sinkhorn_stage)(m->y, s ? d : m->first, n, s % 2 ? n : 1, s % 2 ? 1 : n, (ACC)p->eps);
        for (int64_t i = 0; i < size; i++) kept[s * size + i] = m->y[i * LANES];
    }
    for (int64_t i = 0; i < size * LANES; i++) m->e[i] *= m->y[i];
    for (int64_t s = stages; s-- > 0;) {
        for (int64_t i = 0; i < size * LANES; i++) m->y[i] = kept[s * size + i / LANES];
        NAME(sinkhorn_back)(m->y, m->e, m->first, m->total, n, s % 2 ? n : 1, s % 2 ? 1 : n);
    }
    NAME(sinkhorn_store_grad)(m, p, t, 1, n);
}

XT_FAST static XtStatus NAME(sinkhorn_bwd)(void *context, int64_t begin, int64_t end) {
    const XtSinkhornBwd *p = context;
    int64_t n = p->streams, stages = 2 * p->iters - (p->form == XT_SINKHORN_D);
    ACC added = p->form == XT_SINKHORN_D ? (ACC)p->eps : 0, off = 2 * UNIT * (ACC)stages; /* for four roundings a stage */
    NAME(Sinkhorn) m;
    size_t nbytes = (size_t)(stages * n * LANES) * sizeof(ACC);
    ACC *d = malloc(nbytes); /* [stages][n][LANES], or [stages][n * n] of one matrix, which is less */
    if (!d) return xt_error(XT_OUT_OF_MEMORY, "sinkhorn: scratch of %zu bytes could not be allocated", nbytes);
    for (int64_t t = begin; t < end; t += LANES) {
        int64_t lanes = end - t < LANES ? end - t : LANES;
        NAME(sinkhorn_load_both)(&m, p, t, lanes, n);
        if (n == 4) NAME(sinkhorn_there_and_back)(&m, d, p, stages, 4);
        else NAME(sinkhorn_there_and_back)(&m, d, p, stages, n);
        ACC wrong[LANES] = {0};
        for (int64_t i = 0; i < n * n; i++)
            for (int64_t l = 0; l < LANES; l++) {
                ACC right = m.start[i * LANES + l] + added, error = m.y[i * LANES + l] - right;
                wrong[l] += (error < 0 ? -error : error) > off * right ? 1 : 0;
            }
        NAME(sinkhorn_store_grad)(&m, p, t, lanes, n);
        for (int64_t l = 0; l < lanes; l++)
            if (wrong[l] > 0) NAME(sinkhorn_alone)(&m, d, p, t + l, stages, n);
    }
    free(d);
    return XT_OK;
}

#undef UNIT
#undef LEAST_DIVISOR
#endif
