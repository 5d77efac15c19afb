/* muon.c - what a step of Muon does around its products, for a batch of matrices of one shape.
 *
 *     Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/); momentum as PyTorch writes it, an average:
 *         b = momentum b + (1 - momentum) g;   u = nesterov ? (1 - momentum) g + momentum b : b
 *         direction   x = u / max(|u|, eps)
 *         polynomial  out = coefficient_b gram + coefficient_a I
 *         update      p = p (1 - lr weight_decay) - lr ratio x, and b
 *
 * x may have another dtype than p, so elements pass through a chunk of ACC on the stack.
 */
#ifndef T
#include "contract/optimizer.h"
#include "cpu/kernel.h"
#include "cpu/optimizer/pieces.h"

#include <stdlib.h>

enum { CHUNK = 256 }; /* elements; 2 kB of float64 stay in the first cache */

/* Of a step, in float64; ranges cast them to ACC. */
typedef struct MuonNumbers {
    double momentum, rest, decay, step; /* rest = 1 - momentum, decay = 1 - lr weight_decay, step = lr ratio */
    bool nesterov;
} MuonNumbers;

typedef struct Run {
    const XtMuon *p;
    XtPieces pieces;
    MuonNumbers numbers;
    double *sums;  /* [pieces] */
    double *scale; /* [count]: 1 / max(|u|, eps) */
} Run;

#define XT_TEMPLATE "cpu/optimizer/muon.c"
#include "cpu/each_float.h"

static int64_t numel(const XtMuon *p) { return p->rows * p->cols; }

/* The numbers of a step but for those that lie on the device. */
static MuonNumbers numbers_of(const XtMuon *p) {
    return (MuonNumbers){.momentum = p->momentum, .rest = 1 - p->momentum, .nesterov = p->nesterov};
}

/* A piece of the batch: its matrix, where it begins there, and its elements. */
static int64_t locate(const Run *run, int64_t piece, int64_t *offset, int64_t *n) {
    const int64_t matrix = xt_pieces_tensor(&run->pieces, piece);
    *offset = xt_pieces_range(&run->pieces, matrix, piece, numel(run->p), n);
    return matrix;
}

static XtStatus squares_pieces(void *context, int64_t begin, int64_t end) {
    const Run *run = context;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t offset, n;
        const XtMuonItem *item = &run->p->items[locate(run, piece, &offset, &n)];
        run->sums[piece] = XT_BY_FLOAT(run->p->dtype, muon_squares)(item, &run->numbers, offset, n);
    }
    return XT_OK;
}

/* What is done with elements [i, i + n) of a matrix, n <= CHUNK; chunk has room for them in ACC. */
typedef void Work(const Run *run, int64_t matrix, int64_t i, int64_t n, void *chunk);

static void each_chunk(const Run *run, int64_t begin, int64_t end, Work *work) {
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t offset, n;
        const int64_t matrix = locate(run, piece, &offset, &n), last = offset + n;
        double chunk[CHUNK];
        for (int64_t i = offset; i < last; i += CHUNK) work(run, matrix, i, last - i < CHUNK ? last - i : CHUNK, chunk);
    }
}

static void direction_chunk(const Run *run, int64_t matrix, int64_t i, int64_t n, void *chunk) {
    const XtMuon *p = run->p;
    XT_BY_FLOAT(p->dtype, muon_average)(chunk, &p->items[matrix], &run->numbers, i, n);
    XT_BY_FLOAT(p->dtype_x, muon_scaled)(p->x, matrix * numel(p) + i, chunk, run->scale[matrix], n);
}

static void update_chunk(const Run *run, int64_t matrix, int64_t i, int64_t n, void *chunk) {
    const XtMuon *p = run->p;
    XT_BY_FLOAT(p->dtype_x, muon_widened)(chunk, p->x, matrix * numel(p) + i, n);
    XT_BY_FLOAT(p->dtype, muon_update_range)(&p->items[matrix], &run->numbers, chunk, i, n);
}

static XtStatus direction_pieces(void *context, int64_t begin, int64_t end) {
    each_chunk(context, begin, end, direction_chunk);
    return XT_OK;
}

static XtStatus update_pieces(void *context, int64_t begin, int64_t end) {
    each_chunk(context, begin, end, update_chunk);
    return XT_OK;
}

static XtStatus cut(Run *run) {
    const XtMuon *p = run->p;
    XT_CHECK(xt_need_float("every parameter", p->dtype));
    XT_CHECK(xt_need_float("the direction", p->dtype_x));
    XT_CHECK(xt_pieces_allocate(&run->pieces, "muon", p->count));
    for (int64_t i = 0; i < p->count; i++) xt_pieces_add(&run->pieces, i, numel(p));
    return XT_OK;
}

XtStatus xt_cpu_muon_direction(const XtMuon *p) {
    Run run = {.p = p, .numbers = numbers_of(p)};
    XtStatus status = XT_OK;
    if (p->count == 0 || numel(p) == 0) return XT_OK;
    XT_TRY(cut(&run));
    const int64_t pieces = run.pieces.first[p->count];
    run.sums = malloc((size_t)pieces * sizeof *run.sums);
    run.scale = malloc((size_t)p->count * sizeof *run.scale);
    if (!run.sums || !run.scale)
        XT_TRY(xt_error(XT_OUT_OF_MEMORY, "muon: scratch of %lld sums could not be allocated", (long long)pieces));
    XT_TRY(xt_parallel(pieces, 1, squares_pieces, &run));
    for (int64_t i = 0; i < p->count; i++) {
        double sum = 0;
        for (int64_t piece = run.pieces.first[i]; piece < run.pieces.first[i + 1]; piece++) sum += run.sums[piece];
        const double norm = sqrt(sum);
        run.scale[i] = 1 / (norm < p->eps ? p->eps : norm); /* NaN stays NaN */
    }
    XT_TRY(xt_parallel(pieces, 1, direction_pieces, &run));
done:
    free(run.sums);
    free(run.scale);
    free(run.pieces.first);
    return status;
}

XtStatus xt_cpu_muon_update(const XtMuon *p) {
    Run run = {.p = p, .numbers = numbers_of(p)};
    if (p->count == 0 || numel(p) == 0 || (p->guard && !isfinite(*p->guard))) return XT_OK;
    run.numbers.decay = 1 - fma(*p->lr, p->weight_decay, 0.0); /* rounded before the subtraction, as in adamw.c */
    run.numbers.step = *p->lr * p->ratio;
    XtStatus status = cut(&run);
    if (status == XT_OK) status = xt_parallel(run.pieces.first[p->count], 1, update_pieces, &run);
    free(run.pieces.first);
    return status;
}

XtStatus xt_cpu_muon_polynomial(const XtMuonPolynomial *p) {
    return xt_parallel(p->count * p->side, xt_row_grain(p->side, 16384), XT_BY_FLOAT(p->dtype, muon_polynomial), (void *)p);
}

#else

/* u [n] of the elements [offset, offset + n) of a matrix; *next becomes the new b. */
XT_INLINE ACC NAME(muon_element)(ACC g, ACC b, ACC momentum, ACC rest, bool nesterov, ACC *next) {
    *next = momentum * b + rest * g;
    return nesterov ? rest * g + momentum * *next : *next;
}

XT_FAST static double NAME(muon_squares)(const XtMuonItem *item, const MuonNumbers *number, int64_t offset, int64_t n) {
    const T *g = (const T *)item->g + offset;     /* [n] */
    const ACC *b = (const ACC *)item->b + offset; /* [n] */
    const ACC momentum = (ACC)number->momentum, rest = (ACC)number->rest;
    const bool nesterov = number->nesterov;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        ACC next;
        double u = (double)NAME(muon_element)(LOAD(g[i]), b[i], momentum, rest, nesterov, &next);
        sum += u * u;
    }
    return sum;
}

XT_FAST static void NAME(muon_average)(void *chunk, const XtMuonItem *item, const MuonNumbers *number, int64_t offset, int64_t n) {
    const T *g = (const T *)item->g + offset;     /* [n] */
    const ACC *b = (const ACC *)item->b + offset; /* [n] */
    ACC *u = chunk;                               /* [n] */
    const ACC momentum = (ACC)number->momentum, rest = (ACC)number->rest;
    const bool nesterov = number->nesterov;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        ACC next;
        u[i] = NAME(muon_element)(LOAD(g[i]), b[i], momentum, rest, nesterov, &next);
    }
}

/* Elements [offset, offset + n) of x = chunk * scale. T is the dtype of x. */
XT_FAST static void NAME(muon_scaled)(void *data, int64_t offset, const void *chunk, double scale, int64_t n) {
    const ACC *u = chunk, factor = (ACC)scale; /* [n] */
    T *x = (T *)data + offset;                 /* [n] */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] = STORE(u[i] * factor);
}

XT_FAST static void NAME(muon_widened)(void *chunk, const void *data, int64_t offset, int64_t n) {
    const T *x = (const T *)data + offset; /* [n] */
    ACC *wide = chunk;                     /* [n] */
#pragma omp simd
    for (int64_t i = 0; i < n; i++) wide[i] = LOAD(x[i]);
}

/* Elements [offset, offset + n) of a matrix. Inlined once with and once without `master`, so that the loop does not branch. */
XT_INLINE void NAME(muon_loop)(T *p, const T *g, ACC *b, ACC *master, const ACC *x, const MuonNumbers *number, int64_t n) {
    const ACC momentum = (ACC)number->momentum, rest = (ACC)number->rest, decay = (ACC)number->decay, step = (ACC)number->step;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const ACC gi = LOAD(g[i]), w = (master ? master[i] : LOAD(p[i])) * decay - step * x[i];
        b[i] = momentum * b[i] + rest * gi;
        if (master) master[i] = w;
        p[i] = STORE(w);
    }
}

XT_FAST static void NAME(muon_update_range)(const XtMuonItem *item, const MuonNumbers *number, const void *chunk, int64_t offset,
                                            int64_t n) {
    T *p = (T *)item->p + offset;
    const T *g = (const T *)item->g + offset;
    ACC *b = (ACC *)item->b + offset;
    if (item->master) NAME(muon_loop)(p, g, b, (ACC *)item->master + offset, chunk, number, n);
    else NAME(muon_loop)(p, g, b, NULL, chunk, number, n);
}

/* Rows of all matrices, numbered through. */
XT_FAST static XtStatus NAME(muon_polynomial)(void *context, int64_t begin, int64_t end) {
    const XtMuonPolynomial *p = context;
    const ACC a = (ACC)p->a, b = (ACC)p->b;
    for (int64_t row = begin; row < end; row++) {
        const T *gram = (const T *)p->gram + row * p->side; /* [side] */
        T *out = (T *)p->out + row * p->side;               /* [side] */
        const int64_t diagonal = row % p->side;
        const ACC at_diagonal = b * LOAD(gram[diagonal]) + a;
#pragma omp simd
        for (int64_t i = 0; i < p->side; i++) out[i] = STORE(b * LOAD(gram[i]));
        out[diagonal] = STORE(at_diagonal);
    }
    return XT_OK;
}

#endif
