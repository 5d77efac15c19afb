/* materialized.c - attention through matrix products over blocks of query rows: the fast one.
 *
 * A block of rows keeps its scores [rows, columns it can see] in this thread's scratch, so memory is a few hundred KB per thread
 * instead of B * H * S * S, and the columns that no row of the block sees are never computed. A document is a problem of its own, with
 * blocks of its own: its bits are those that it has alone, whatever else lies in the row.
 *
 *     forward   S = scale Q K^T;  P = exp(S - max);  out = (P V) / sum;  lse = max + log sum
 *     backward  P = exp(scale Q K^T - lse);  dP = dO V^T;  dS = P * (dP - delta);
 *               dV += P^T dO;  dQ = scale dS K;  dK += scale dS^T Q
 *     softcap   t = tanh(scale Q K^T / c);  S = c t;  dS has the factor 1 - t^2
 *
 * A piece of the forward is a block of rows. A piece of the backward is a share of the blocks of a document and a kv head, over the query
 * heads that share it: all of them, or every n-th. dK and dV are sums over blocks, of a share by one thread and in a fixed order, and then
 * over shares. Few kv heads are cut into more shares, which depends on the shape only. float32 and float64 are read and written in place,
 * bfloat16 and float16 go through float32 copies of the block and of one head's K and V.
 */
#ifndef T
#include "attention.h"
#include "cpu/elementwise/unary_math.h"
#include "cpu/gemm/gemm.h"

#include <stdlib.h>
#define XT_TEMPLATE "cpu/attention/materialized.c"

#define BLOCK 64            /* query rows at once */
#define BLOCK_BYTES 1048576 /* of scores, where that leaves 16 rows or more: about the L2 cache */
#define PIECE_WORK 2000000  /* multiply-adds that a thread takes at once in the forward, or more */
#define PIECES 16           /* of the backward, where there are fewer kv heads */
#define SHARE_BLOCKS 8      /* of query rows at least, in a share: adding shares up then costs 2 to 5 %, short documents 10 to 30 */

/* Rows per block, a function of the shape only. */
static int64_t block_rows(int64_t sq, int64_t width) {
    int64_t rows = BLOCK_BYTES / (int64_t)sizeof(float) / (width > 0 ? width : 1);
    rows = rows < 16 ? 16 : rows > BLOCK ? BLOCK : rows;
    return rows < sq ? rows : sq > 0 ? sq : 1;
}

/* All parts, in memory that the caller frees; job->p is its own. */
static XtStatus make_parts(XtAttentionJob *job, const int32_t *documents, int64_t batch, int64_t sq, int64_t skv, int64_t window) {
    XT_CHECK(xt_attention_parts(documents, batch, sq, skv, &job->parts, &job->count));
    for (int64_t n = 0; n < job->count; n++) {
        XtPart *part = job->parts + n;
        part->width = window > 0 && window + BLOCK < part->skv ? window + BLOCK : part->skv;
        part->rows = block_rows(part->sq, part->width);
        part->blocks = (part->sq + part->rows - 1) / part->rows;
    }
    return XT_OK;
}

/* Leading dimension of a block of scores: rows start on cache lines, and not all in the same cache set. */
static int64_t padded(int64_t skv) { return (skv + 15) / 16 * 16 + 16; }

/* The columns of a block of scores: keys first ... first + count - 1. Row i sees those from seen - window + i to seen + i, within. */
typedef struct Columns {
    int64_t first, count, seen, window;
} Columns;

XT_INLINE int64_t columns_from(Columns c, int64_t i) {
    return c.window <= 0 || c.seen + i - c.window < 0 ? 0 : c.seen + i - c.window;
}
XT_INLINE int64_t columns_to(Columns c, int64_t i) { return c.seen + i < 0 ? 0 : c.seen + i < c.count ? c.seen + i : c.count; }

/* Those that rows i ... i + rows - 1 of a part see. */
static Columns columns_of(const XtPart *part, bool causal, int64_t window, int64_t i, int64_t rows) {
    int64_t first = xt_seen(causal, window, i, part->sq, part->skv, 0, part->skv).begin;
    int64_t end = xt_seen(causal, window, i + rows - 1, part->sq, part->skv, 0, part->skv).end;
    int64_t count = end > first ? end - first : 0;
    return (Columns){first, count, causal ? i + 1 + part->skv - part->sq - first : count, window};
}

#include "cpu/each_float.h"

/* Whether cblas takes it as a matrix in place: rows that do not overlap, a leading dimension of 32 bits. */
static bool blas_rows(const int64_t stride[3], int64_t dim) { return stride[2] >= dim && stride[2] <= INT32_MAX; }

static const char *unfit_sizes(int64_t skv, int64_t dim) {
    if (dim <= 0 || skv <= 0) return "there is nothing to multiply";
    return skv >= INT32_MAX - 32 || dim > INT32_MAX ? "the keys or the head dim are not counted in 32 bits" : NULL;
}
#define UNFIT_ROWS "rows of a tensor lie closer than the head dim, or 2^31 elements apart"

const char *xt_attention_materialized_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device) {
    (void)device;
    bool rows = blas_rows(p->q_stride, p->dim) && blas_rows(p->k_stride, p->dim) && blas_rows(p->v_stride, p->dim) &&
                blas_rows(p->out_stride, p->dim);
    const char *sizes = unfit_sizes(p->skv, p->dim);
    return sizes || rows ? sizes : UNFIT_ROWS;
}

XtStatus xt_attention_materialized_fwd(const XtAttentionFwd *p) {
    XtAttentionJob job = {.p = p};
    XT_CHECK(make_parts(&job, p->documents, p->batch, p->sq, p->skv, p->window));
    int64_t work = 0;
    for (int64_t n = 0; n < job.count; n++) {
        XtPart *part = job.parts + n;
        int64_t each = part->rows * part->width;
        work = each > work ? each : work;
        part->index = job.pieces;
        job.pieces += p->heads * part->blocks;
    }
    XtStatus status =
        xt_parallel(job.pieces, xt_row_grain(2 * work * p->dim, PIECE_WORK), XT_BY_FLOAT(p->dtype, forward_blocks), &job);
    free(job.parts);
    return status;
}

const char *xt_attention_materialized_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device) {
    (void)device;
    bool rows = blas_rows(p->q_stride, p->dim) && blas_rows(p->k_stride, p->dim) && blas_rows(p->v_stride, p->dim) &&
                blas_rows(p->dout_stride, p->dim) && blas_rows(p->dq_stride, p->dim) && blas_rows(p->dk_stride, p->dim) &&
                blas_rows(p->dv_stride, p->dim);
    const char *sizes = unfit_sizes(p->skv, p->dim);
    return sizes || rows ? sizes : UNFIT_ROWS;
}

/* How many shares each kv head of a part is cut into. A document is cut as if it were alone, for its bits. */
static int64_t shares_of(const XtPart *part, const XtAttentionBwd *p, int64_t size) {
    if (p->kv_heads == 0) return 1;
    const int64_t groups = p->kv_heads * (p->documents ? 1 : p->batch), blocks = p->heads / p->kv_heads * part->blocks;
    const int64_t fit = (int64_t)(XT_ATTENTION_SUMS / (2.0 * (double)groups * (double)part->skv * (double)p->dim * (double)size));
    int64_t shares = (PIECES + groups - 1) / groups;
    shares = shares < blocks / SHARE_BLOCKS ? shares : blocks / SHARE_BLOCKS;
    shares = shares < fit ? shares : fit;
    return shares > 1 ? shares : 1;
}

XtStatus xt_attention_materialized_bwd(const XtAttentionBwd *p) {
    XtAttentionJob job = {.p = p};
    XT_CHECK(make_parts(&job, p->documents, p->batch, p->sq, p->skv, p->window));
    const size_t size = xt_dtype_size(xt_dtype_accumulator(p->dtype));
    for (int64_t n = 0; n < job.count; n++) {
        XtPart *part = job.parts + n;
        part->shares = shares_of(part, p, (int64_t)size);
        part->numbers = 2 * part->skv * p->dim; /* [2, skv, D] in ACC */
    }
    XtStatus status = xt_attention_shares(p, job.parts, job.count, size, XT_BY_FLOAT(p->dtype, backward_shares),
                                          XT_BY_FLOAT(p->dtype, add_shares));
    free(job.parts);
    return status;
}
#else

#define LOW (sizeof(T) != sizeof(ACC)) /* needs float32 copies */
#if IS_F64
#define GEMM xt_blas.dgemm
#define TANH(v) tanh(v)
#else
#define GEMM xt_blas.sgemm
#define TANH(v) xt_tanhf(v)
#endif

/* A matrix in ACC: where it lies already, or a copy in `room` (dense). */
typedef struct NAME(Rows) {
    ACC *x; /* [rows, dim] */
    int ld;
} NAME(Rows);

static NAME(Rows) NAME(load)(XtDtype dtype, const T *x, int64_t ld, int64_t rows, int64_t dim, void *room) {
    if (!LOW) return (NAME(Rows)){(ACC *)x, (int)ld};
    xt_block_load(dtype, x, ld, rows, dim, room);
    return (NAME(Rows)){room, (int)dim};
}
/* Where a result is to be computed: in place, or in `room`, from where `store` rounds it. */
static NAME(Rows) NAME(target)(T *x, int64_t ld, int64_t dim, void *room) {
    if (!LOW) return (NAME(Rows)){(ACC *)x, (int)ld};
    return (NAME(Rows)){room, (int)dim};
}
static void NAME(store)(XtDtype dtype, NAME(Rows) from, int64_t rows, int64_t dim, T *x, int64_t ld) {
    if (LOW) xt_block_store(dtype, (float *)from.x, rows, dim, 0, x, ld);
}

/* s[i, :] becomes exp(s - max), zero outside the columns that the row sees; its sum and max are kept. cap: softcap, or 0. */
XT_FAST static void NAME(exponentiate)(ACC *s, int64_t lds, int64_t rows, Columns seen, ACC cap, ACC *maxima, ACC *sums) {
    for (int64_t i = 0; i < rows; i++) {
        ACC *row = s + i * lds, max = -INFINITY, sum = 0;
        const int64_t from = columns_from(seen, i), to = columns_to(seen, i);
        for (int64_t j = 0; j < from; j++) row[j] = 0;
        if (cap > 0) {
#pragma omp simd
            for (int64_t j = from; j < to; j++) row[j] = cap * TANH(row[j] / cap);
        }
#pragma omp simd reduction(max : max)
        for (int64_t j = from; j < to; j++) max = row[j] > max ? row[j] : max;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = from; j < to; j++) {
            ACC e = EXP(row[j] - max);
            row[j] = e;
            sum += e;
        }
        for (int64_t j = to; j < seen.count; j++) row[j] = 0;
        maxima[i] = max, sums[i] = sum;
    }
}

/* out[i, :] /= sums[i], lse[i] = max + log sum; a row that sees nothing gets 0 and -inf. */
XT_FAST static void NAME(normalise)(ACC *out, int64_t ld, int64_t rows, int64_t dim, const ACC *maxima, const ACC *sums, ACC *lse) {
    for (int64_t i = 0; i < rows; i++) {
        ACC factor = sums[i] == 0 ? 0 : 1 / sums[i];
        for (int64_t d = 0; d < dim; d++) out[i * ld + d] *= factor;
        lse[i] = sums[i] == 0 ? -(ACC)INFINITY : maxima[i] + (ACC)log((double)sums[i]);
    }
}

/* Blocks of query rows [begin, end), counted through all heads of all parts. */
static XtStatus NAME(forward_blocks)(void *context, int64_t begin, int64_t end) {
    const XtAttentionJob *job = context;
    const XtAttentionFwd *p = job->p;
    const XtPart *part = job->parts + xt_part_at(job->parts, job->count, begin);
    const int64_t dim = p->dim;
    ACC *s = NULL, *maxima = NULL, *sums = NULL;                          /* [rows, lds], [rows], [rows] */
    ACC *q_room = NULL, *out_room = NULL, *k_room = NULL, *v_room = NULL; /* [rows, D] twice, [skv, D] twice; LOW only */
    NAME(Rows) k = {0}, v = {0};
    int64_t lds = 0, loaded = -1; /* the kv head whose k and v these are; -1 before the first of a part */
    for (int64_t index = begin; index < end; index++) {
        while (index >= part->index + p->heads * part->blocks) part++, loaded = -1;
        int64_t h = (index - part->index) / part->blocks, i = (index - part->index) % part->blocks * part->rows;
        int64_t rows = part->sq - i < part->rows ? part->sq - i : part->rows;
        int64_t b = part->b, g = h / (p->heads / p->kv_heads), at = part->first + i;
        const T *q_at = (const T *)p->q + b * p->q_stride[0] + h * p->q_stride[1] + at * p->q_stride[2]; /* [rows, D] */
        T *out_at = (T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + at * p->out_stride[2];   /* [rows, D] */
        if (loaded < 0) {
            void *scratch;
            lds = padded(part->width);
            size_t numbers = (size_t)(part->rows * (lds + 2) + (LOW ? (2 * part->rows + 2 * part->skv) * dim : 0));
            XT_CHECK(xt_scratch(numbers * sizeof(ACC), &scratch));
            s = scratch, maxima = s + part->rows * lds, sums = maxima + part->rows;
            q_room = sums + part->rows, out_room = q_room + part->rows * dim;
            k_room = out_room + part->rows * dim, v_room = k_room + part->skv * dim;
        }
        if (loaded != g) {
            const T *k_at = (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1] + part->first * p->k_stride[2]; /* [skv, D] */
            const T *v_at = (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1] + part->first * p->v_stride[2]; /* [skv, D] */
            loaded = g;
            k = NAME(load)(p->dtype, k_at, p->k_stride[2], part->skv, dim, k_room);
            v = NAME(load)(p->dtype, v_at, p->v_stride[2], part->skv, dim, v_room);
        }
        NAME(Rows) q = NAME(load)(p->dtype, q_at, p->q_stride[2], rows, dim, q_room);
        NAME(Rows) out = NAME(target)(out_at, p->out_stride[2], dim, out_room);
        const Columns seen = columns_of(part, p->causal, p->window, i, rows);
        const int m = (int)rows, n = (int)seen.count, d = (int)dim;
        if (n > 0)
            GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_T, m, n, d, (ACC)p->scale, q.x, q.ld, k.x + seen.first * k.ld, k.ld, 0, s,
                 (int)lds);
        NAME(exponentiate)(s, lds, rows, seen, (ACC)p->softcap, maxima, sums);
        if (n > 0)
            GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_N, m, d, n, 1, s, (int)lds, v.x + seen.first * v.ld, v.ld, 0, out.x, out.ld);
        else
            for (int64_t r = 0; r < rows; r++) memset(out.x + r * out.ld, 0, (size_t)dim * sizeof(ACC));
        NAME(normalise)(out.x, out.ld, rows, dim, maxima, sums, (ACC *)p->lse + (b * p->heads + h) * p->sq + at);
        NAME(store)(p->dtype, out, rows, dim, out_at, p->out_stride[2]);
    }
    return XT_OK;
}

/* s -> P = exp(s - lse), zero outside the columns that the row sees; dp -> dS = P (dp - delta), delta_i = dout_i . out_i.
 * cap: softcap, or 0. */
XT_FAST static void NAME(differentiate)(ACC *s, ACC *dp, int64_t lds, int64_t rows, Columns seen, ACC cap, int64_t dim,
                                        const ACC *lse, const T *dout, int64_t dout_ld, const T *out, int64_t out_ld) {
    for (int64_t i = 0; i < rows; i++) {
        ACC *row = s + i * lds, *drow = dp + i * lds, delta = 0;
        const int64_t from = columns_from(seen, i), to = columns_to(seen, i);
#pragma omp simd reduction(+ : delta)
        for (int64_t d = 0; d < dim; d++) delta += LOAD(dout[i * dout_ld + d]) * LOAD(out[i * out_ld + d]);
        ACC shift = lse[i];
        for (int64_t j = 0; j < from; j++) row[j] = drow[j] = 0;
        if (cap > 0) {
#pragma omp simd
            for (int64_t j = from; j < to; j++) {
                ACC t = TANH(row[j] / cap), e = EXP(cap * t - shift);
                row[j] = e;
                drow[j] = e * (drow[j] - delta) * (1 - t * t);
            }
        } else {
            for (int64_t j = from; j < to; j++) {
                ACC e = EXP(row[j] - shift);
                row[j] = e;
                drow[j] = e * (drow[j] - delta);
            }
        }
        for (int64_t j = to; j < seen.count; j++) row[j] = drow[j] = 0;
    }
}

/* Adds what rows i ... of a block of one query head contribute to dK and dV of its kv head, and writes their dQ. */
static void NAME(backward_block)(const XtAttentionBwd *p, const XtPart *part, int64_t h, int64_t i, NAME(Rows) k, NAME(Rows) v,
                                 NAME(Rows) dk, NAME(Rows) dv, ACC *room) {
    int64_t dim = p->dim, lds = padded(part->width), b = part->b;
    ACC *s = room, *dp = s + part->rows * lds,
        *q_room = dp + part->rows * lds; /* [rows, lds] twice; then [rows, D] three times, LOW only */
    ACC *dq_room = q_room + part->rows * dim, *dout_room = dq_room + part->rows * dim;
    int64_t rows = part->sq - i < part->rows ? part->sq - i : part->rows, at = part->first + i;
    const T *q_at = (const T *)p->q + b * p->q_stride[0] + h * p->q_stride[1] + at * p->q_stride[2];                /* [rows, D] */
    const T *dout_at = (const T *)p->dout + b * p->dout_stride[0] + h * p->dout_stride[1] + at * p->dout_stride[2]; /* [rows, D] */
    const T *out_at = (const T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + at * p->out_stride[2];      /* [rows, D] */
    T *dq_at = (T *)p->dq + b * p->dq_stride[0] + h * p->dq_stride[1] + at * p->dq_stride[2];                       /* [rows, D] */
    const ACC *lse = (const ACC *)p->lse + (b * p->heads + h) * p->sq + at;                                         /* [rows] */
    const Columns seen = columns_of(part, p->causal, p->window, i, rows);
    int m = (int)rows, d = (int)dim, n = (int)seen.count;
    if (n == 0) {
        for (int64_t r = 0; r < rows; r++) memset(dq_at + r * p->dq_stride[2], 0, (size_t)dim * sizeof(T));
        return;
    }
    NAME(Rows) q = NAME(load)(p->dtype, q_at, p->q_stride[2], rows, dim, q_room);
    NAME(Rows) dout = NAME(load)(p->dtype, dout_at, p->dout_stride[2], rows, dim, dout_room);
    NAME(Rows) dq = NAME(target)(dq_at, p->dq_stride[2], dim, dq_room);
    ACC scale = (ACC)p->scale, *k_x = k.x + seen.first * k.ld, *v_x = v.x + seen.first * v.ld; /* [n, D] each */
    ACC *dk_x = dk.x + seen.first * dk.ld, *dv_x = dv.x + seen.first * dv.ld;                  /* [n, D] each */
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_T, m, n, d, scale, q.x, q.ld, k_x, k.ld, 0, s, (int)lds);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_T, m, n, d, 1, dout.x, dout.ld, v_x, v.ld, 0, dp, (int)lds);
    NAME(differentiate)(s, dp, lds, rows, seen, (ACC)p->softcap, dim, lse, dout_at, p->dout_stride[2], out_at, p->out_stride[2]);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_T, XT_BLAS_N, n, d, m, 1, s, (int)lds, dout.x, dout.ld, 1, dv_x, dv.ld);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_N, m, d, n, scale, dp, (int)lds, k_x, k.ld, 0, dq.x, dq.ld);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_T, XT_BLAS_N, n, d, m, scale, dp, (int)lds, q.x, q.ld, 1, dk_x, dk.ld);
    NAME(store)(p->dtype, dq, rows, dim, dq_at, p->dq_stride[2]);
}

/* Shares [begin, end), counted through the kv heads of all parts. */
static XtStatus NAME(backward_shares)(void *context, int64_t begin, int64_t end) {
    const XtAttentionJob *job = context;
    const XtAttentionBwd *p = job->p;
    const int64_t group = p->heads / p->kv_heads, dim = p->dim;
    const XtPart *part = job->parts + xt_part_at(job->parts, job->count, begin);
    for (int64_t index = begin; index < end; index++) {
        if (index >= part->index + p->kv_heads * part->shares) part++;
        int64_t n = index - part->index, b = part->b, g = n / part->shares, skv = part->skv, kv = skv * dim;
        void *scratch;
        size_t numbers = (size_t)(part->rows * 2 * padded(part->width) + (LOW ? 3 * part->rows * dim + 4 * kv : 0));
        XT_CHECK(xt_scratch(numbers * sizeof(ACC), &scratch));
        ACC *room = (ACC *)scratch + (LOW ? 4 * kv : 0), *kv_room = scratch; /* K, V, dK, dV: [skv, D] each; LOW only */
        const T *k_at = (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1] + part->first * p->k_stride[2]; /* [skv, D] */
        const T *v_at = (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1] + part->first * p->v_stride[2]; /* [skv, D] */
        T *dk_at = (T *)p->dk + b * p->dk_stride[0] + g * p->dk_stride[1] + part->first * p->dk_stride[2];        /* [skv, D] */
        T *dv_at = (T *)p->dv + b * p->dv_stride[0] + g * p->dv_stride[1] + part->first * p->dv_stride[2];        /* [skv, D] */
        NAME(Rows) k = NAME(load)(p->dtype, k_at, p->k_stride[2], skv, dim, kv_room);
        NAME(Rows) v = NAME(load)(p->dtype, v_at, p->v_stride[2], skv, dim, kv_room + kv);
        NAME(Rows) dk = NAME(target)(dk_at, p->dk_stride[2], dim, kv_room + 2 * kv);
        NAME(Rows) dv = NAME(target)(dv_at, p->dv_stride[2], dim, kv_room + 3 * kv);
        if (part->shares > 1) {
            dk = (NAME(Rows)){(ACC *)job->sums + part->sums + n * 2 * kv, (int)dim};
            dv = (NAME(Rows)){dk.x + kv, (int)dim};
        }
        for (int64_t j = 0; j < skv; j++) {
            memset(dk.x + j * dk.ld, 0, (size_t)dim * sizeof(ACC));
            memset(dv.x + j * dv.ld, 0, (size_t)dim * sizeof(ACC));
        }
        for (int64_t i = n % part->shares; i < group * part->blocks; i += part->shares)
            NAME(backward_block)(p, part, g * group + i / part->blocks, i % part->blocks * part->rows, k, v, dk, dv, room);
        if (part->shares > 1) continue;
        NAME(store)(p->dtype, dk, skv, dim, dk_at, p->dk_stride[2]);
        NAME(store)(p->dtype, dv, skv, dim, dv_at, p->dv_stride[2]);
    }
    return XT_OK;
}

/* The sums over shares, from the first on: share i of n of a kv head stands for rows skv i / n ... skv (i + 1) / n of its dK and dV. */
XT_FAST static XtStatus NAME(add_shares)(void *context, int64_t begin, int64_t end) {
    const XtAttentionJob *job = context;
    const XtAttentionBwd *p = job->p;
    const int64_t dim = p->dim;
    const XtPart *part = job->parts + xt_part_at(job->parts, job->count, begin);
    for (int64_t index = begin; index < end; index++) {
        if (index >= part->index + p->kv_heads * part->shares) part++;
        const int64_t shares = part->shares, n = index - part->index, b = part->b, g = n / shares, i = n % shares,
                      kv = part->skv * dim;
        if (shares == 1) continue;
        for (int64_t j = part->skv * i / shares; j < part->skv * (i + 1) / shares; j++) {
            const ACC *sums = (const ACC *)job->sums + part->sums + g * shares * 2 * kv + j * dim; /* [D], steps 2 kv and kv */
            T *dk = (T *)p->dk + b * p->dk_stride[0] + g * p->dk_stride[1] + (part->first + j) * p->dk_stride[2]; /* [D] */
            T *dv = (T *)p->dv + b * p->dv_stride[0] + g * p->dv_stride[1] + (part->first + j) * p->dv_stride[2]; /* [D] */
            for (int64_t d = 0; d < dim; d++) {
                ACC sum_k = sums[d], sum_v = sums[kv + d];
                for (int64_t r = 1; r < shares; r++) sum_k += sums[2 * r * kv + d], sum_v += sums[(2 * r + 1) * kv + d];
                dk[d] = STORE(sum_k), dv[d] = STORE(sum_v);
            }
        }
    }
    return XT_OK;
}

#undef LOW
#undef GEMM
#undef TANH
#endif
