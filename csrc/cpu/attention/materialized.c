/* materialized.c - attention through matrix products over blocks of query rows: the fast one.
 *
 * A block of rows keeps its scores [rows, columns it can see] in this thread's scratch, so memory is a few hundred KB per thread
 * instead of B * H * S * S, and under a causal mask the columns that no row of the block sees are never computed.
 *
 *     forward   S = scale Q K^T;  P = exp(S - max);  out = (P V) / sum;  lse = max + log sum
 *     backward  P = exp(scale Q K^T - lse);  dP = dO V^T;  dS = P * (dP - delta);
 *               dV += P^T dO;  dQ = scale dS K;  dK += scale dS^T Q
 *
 * A piece of the forward is some blocks of rows. A piece of the backward is a kv head's blocks of the query heads that share it, all of
 * them or every n-th: dK and dV are sums over blocks, of a piece by one thread and in a fixed order, and then over the pieces of a kv
 * head. Few kv heads are cut into more pieces, which depends on the shape only. float32 and float64 are read and written in place,
 * bfloat16 and float16 go through float32 copies of the block and of one head's K and V.
 */
#ifndef T
#include "attention.h"
#include "cpu/gemm/gemm.h"
#define XT_TEMPLATE "cpu/attention/materialized.c"

#define BLOCK 64              /* query rows at once */
#define BLOCK_BYTES 1048576   /* of scores, where that leaves 16 rows or more: about the L2 cache */
#define PIECE_WORK 2000000    /* multiply-adds per piece of the forward */
#define PIECES 16             /* of the backward, where there are fewer kv heads in the batch */
#define PART_BLOCKS 8         /* of query rows at least, in a part of a kv head: adding parts up then costs some 3 % */
#define PART_BYTES (32 << 20) /* of dK and dV in parts */

/* A backward, and the parts that each kv head's blocks of query rows are cut into: block i of all is in part i % parts. */
typedef struct Backward {
    const XtAttentionBwd *p;
    int64_t rows, blocks; /* of a block; blocks of one kv head, those of each of its query heads one behind the other */
    int64_t parts;
    void *sums; /* [batch, kv_heads, parts, 2, skv, D] in ACC: dK and dV of each part, if there are several */
} Backward;

/* Rows per block, a function of the shape only. */
static int64_t block_rows(int64_t sq, int64_t skv) {
    int64_t rows = BLOCK_BYTES / (int64_t)sizeof(float) / (skv > 0 ? skv : 1);
    rows = rows < 16 ? 16 : rows > BLOCK ? BLOCK : rows;
    return rows < sq ? rows : sq > 0 ? sq : 1;
}

/* Leading dimension of a block of scores: rows start on cache lines, and not all in the same cache set. */
static int64_t padded(int64_t skv) { return (skv + 15) / 16 * 16 + 16; }

static int64_t at_most(int64_t x, int64_t most) { return x < most ? x : most; }

static Backward cut_backward(const XtAttentionBwd *p) {
    int64_t rows = block_rows(p->sq, p->skv), groups = p->batch * p->kv_heads;
    Backward cut = {.p = p, .rows = rows, .blocks = p->heads / p->kv_heads * ((p->sq + rows - 1) / rows), .parts = 1};
    double bytes = 2.0 * (double)groups * (double)p->skv * (double)p->dim * (double)xt_dtype_size(xt_dtype_accumulator(p->dtype));
    int64_t parts =
        groups > 0 ? at_most(at_most((PIECES + groups - 1) / groups, cut.blocks / PART_BLOCKS), (int64_t)(PART_BYTES / bytes)) : 1;
    if (parts > 1) cut.parts = parts;
    return cut;
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
    int64_t rows = block_rows(p->sq, p->skv), blocks = (p->sq + rows - 1) / rows;
    int64_t grain = xt_row_grain(2 * rows * p->skv * p->dim, PIECE_WORK);
    return xt_parallel(p->batch * p->heads * blocks, grain, XT_BY_FLOAT(p->dtype, forward_blocks), (void *)p);
}

const char *xt_attention_materialized_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device) {
    (void)device;
    bool rows = blas_rows(p->q_stride, p->dim) && blas_rows(p->k_stride, p->dim) && blas_rows(p->v_stride, p->dim) &&
                blas_rows(p->dout_stride, p->dim) && blas_rows(p->dq_stride, p->dim) && blas_rows(p->dk_stride, p->dim) &&
                blas_rows(p->dv_stride, p->dim);
    const char *sizes = unfit_sizes(p->skv, p->dim);
    return sizes || rows ? sizes : UNFIT_ROWS;
}

XtStatus xt_attention_materialized_bwd(const XtAttentionBwd *p) {
    Backward cut = cut_backward(p);
    XtBody body = XT_BY_FLOAT(p->dtype, backward_parts);
    int64_t groups = p->batch * p->kv_heads;
    if (cut.parts == 1) return xt_parallel(groups, 1, body, &cut);

    size_t sums = (size_t)(groups * cut.parts * 2 * p->skv * p->dim) * xt_dtype_size(xt_dtype_accumulator(p->dtype));
    XtWorkspace workspace;
    XT_CHECK(xt_take_workspace(sums, &workspace));
    cut.sums = workspace.data;
    XtStatus status = xt_parallel(groups * cut.parts, 1, body, &cut);
    if (status == XT_OK)
        status = xt_parallel(groups * p->skv, xt_row_grain(2 * cut.parts * p->dim, 65536), XT_BY_FLOAT(p->dtype, add_parts), &cut);
    xt_give_workspace(&workspace);
    return status;
}
#else

#define LOW (sizeof(T) != sizeof(ACC)) /* needs float32 copies */
#if IS_F64
#define GEMM xt_blas.dgemm
#else
#define GEMM xt_blas.sgemm
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

/* s[i, :] becomes exp(s - max), zero from the row's last visible column on; its sum and max are kept. Row i sees seen0 + i. */
XT_FAST static void NAME(exponentiate)(ACC *s, int64_t lds, int64_t rows, int64_t cols, int64_t seen0, ACC *maxima, ACC *sums) {
    for (int64_t i = 0; i < rows; i++) {
        ACC *row = s + i * lds, max = -INFINITY, sum = 0;
        int64_t seen = seen0 + i < 0 ? 0 : seen0 + i < cols ? seen0 + i : cols;
#pragma omp simd reduction(max : max)
        for (int64_t j = 0; j < seen; j++) max = row[j] > max ? row[j] : max;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < seen; j++) {
            ACC e = EXP(row[j] - max);
            row[j] = e;
            sum += e;
        }
        for (int64_t j = seen; j < cols; j++) row[j] = 0;
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

/* Blocks of query rows [begin, end), counted through all heads of all the batch. */
static XtStatus NAME(forward_blocks)(void *context, int64_t begin, int64_t end) {
    const XtAttentionFwd *p = context;
    int64_t rows_max = block_rows(p->sq, p->skv), blocks = (p->sq + rows_max - 1) / rows_max, dim = p->dim, lds = padded(p->skv);
    void *scratch;
    size_t numbers = (size_t)(rows_max * (lds + 2) + (LOW ? (2 * rows_max + 2 * p->skv) * dim : 0));
    XT_CHECK(xt_scratch(numbers * sizeof(ACC), &scratch));
    ACC *s = scratch, *maxima = s + rows_max * lds, *sums = maxima + rows_max; /* [rows, lds], [rows], [rows] */
    ACC *q_room = sums + rows_max, *out_room = q_room + rows_max * dim;        /* [rows, D] each; LOW only */
    ACC *k_room = out_room + rows_max * dim, *v_room = k_room + p->skv * dim;  /* [skv, D] each; LOW only */
    NAME(Rows) k = {0}, v = {0};
    int64_t loaded = -1; /* the (batch, kv head) whose k and v these are */
    for (int64_t index = begin; index < end; index++) {
        int64_t bh = index / blocks, i = index % blocks * rows_max, rows = p->sq - i < rows_max ? p->sq - i : rows_max;
        int64_t b = bh / p->heads, h = bh % p->heads, g = h / (p->heads / p->kv_heads);
        const T *q_at = (const T *)p->q + b * p->q_stride[0] + h * p->q_stride[1] + i * p->q_stride[2]; /* [rows, D] */
        T *out_at = (T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + i * p->out_stride[2];   /* [rows, D] */
        if (loaded != b * p->kv_heads + g) {
            loaded = b * p->kv_heads + g;
            k = NAME(load)(p->dtype, (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1], p->k_stride[2], p->skv, dim,
                           k_room);
            v = NAME(load)(p->dtype, (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1], p->v_stride[2], p->skv, dim,
                           v_room);
        }
        NAME(Rows) q = NAME(load)(p->dtype, q_at, p->q_stride[2], rows, dim, q_room);
        NAME(Rows) out = NAME(target)(out_at, p->out_stride[2], dim, out_room);
        int64_t cols = xt_visible_columns(p->causal, i + rows - 1, p->sq, p->skv);
        int64_t seen0 = p->causal ? i + 1 + p->skv - p->sq : cols;
        if (cols > 0)
            GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_T, (int)rows, (int)cols, (int)dim, (ACC)p->scale, q.x, q.ld, k.x, k.ld, 0, s,
                 (int)lds);
        NAME(exponentiate)(s, lds, rows, cols, seen0, maxima, sums);
        if (cols > 0)
            GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_N, (int)rows, (int)dim, (int)cols, 1, s, (int)lds, v.x, v.ld, 0, out.x,
                 out.ld);
        else
            for (int64_t r = 0; r < rows; r++) memset(out.x + r * out.ld, 0, (size_t)dim * sizeof(ACC));
        NAME(normalise)(out.x, out.ld, rows, dim, maxima, sums, (ACC *)p->lse + bh * p->sq + i);
        NAME(store)(p->dtype, out, rows, dim, out_at, p->out_stride[2]);
    }
    return XT_OK;
}

/* s -> P = exp(s - lse), zero beyond the visible columns; dp -> dS = P (dp - delta), delta_i = dout_i . out_i. */
XT_FAST static void NAME(differentiate)(ACC *s, ACC *dp, int64_t lds, int64_t rows, int64_t cols, int64_t seen0, int64_t dim,
                                        const ACC *lse, const T *dout, int64_t dout_ld, const T *out, int64_t out_ld) {
    for (int64_t i = 0; i < rows; i++) {
        ACC *row = s + i * lds, *drow = dp + i * lds, delta = 0;
        int64_t seen = seen0 + i < 0 ? 0 : seen0 + i < cols ? seen0 + i : cols;
#pragma omp simd reduction(+ : delta)
        for (int64_t d = 0; d < dim; d++) delta += LOAD(dout[i * dout_ld + d]) * LOAD(out[i * out_ld + d]);
        ACC shift = lse[i];
        for (int64_t j = 0; j < seen; j++) {
            ACC e = EXP(row[j] - shift);
            row[j] = e;
            drow[j] = e * (drow[j] - delta);
        }
        for (int64_t j = seen; j < cols; j++) row[j] = drow[j] = 0;
    }
}

/* Adds what rows [i, i + rows) of one query head contribute to dK and dV of its kv head, and writes their dQ. */
static void NAME(backward_block)(const XtAttentionBwd *p, int64_t b, int64_t h, int64_t i, int64_t rows_max, NAME(Rows) k,
                                 NAME(Rows) v, NAME(Rows) dk, NAME(Rows) dv, ACC *room) {
    int64_t dim = p->dim, lds = padded(p->skv), rows = p->sq - i < rows_max ? p->sq - i : rows_max;
    ACC *s = room, *dp = s + rows_max * lds, *q_room = dp + rows_max * lds; /* [rows, lds] twice; then [rows, D] thrice, LOW only */
    ACC *dq_room = q_room + rows_max * dim, *dout_room = dq_room + rows_max * dim;
    const T *q_at = (const T *)p->q + b * p->q_stride[0] + h * p->q_stride[1] + i * p->q_stride[2];                /* [rows, D] */
    const T *dout_at = (const T *)p->dout + b * p->dout_stride[0] + h * p->dout_stride[1] + i * p->dout_stride[2]; /* [rows, D] */
    const T *out_at = (const T *)p->out + b * p->out_stride[0] + h * p->out_stride[1] + i * p->out_stride[2];      /* [rows, D] */
    T *dq_at = (T *)p->dq + b * p->dq_stride[0] + h * p->dq_stride[1] + i * p->dq_stride[2];                       /* [rows, D] */
    const ACC *lse = (const ACC *)p->lse + (b * p->heads + h) * p->sq + i;                                         /* [rows] */
    int m = (int)rows, d = (int)dim, n = (int)xt_visible_columns(p->causal, i + rows - 1, p->sq, p->skv);
    int64_t seen0 = p->causal ? i + 1 + p->skv - p->sq : n;
    if (n == 0) {
        for (int64_t r = 0; r < rows; r++) memset(dq_at + r * p->dq_stride[2], 0, (size_t)dim * sizeof(T));
        return;
    }
    NAME(Rows) q = NAME(load)(p->dtype, q_at, p->q_stride[2], rows, dim, q_room);
    NAME(Rows) dout = NAME(load)(p->dtype, dout_at, p->dout_stride[2], rows, dim, dout_room);
    NAME(Rows) dq = NAME(target)(dq_at, p->dq_stride[2], dim, dq_room);
    ACC scale = (ACC)p->scale;
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_T, m, n, d, scale, q.x, q.ld, k.x, k.ld, 0, s, (int)lds);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_T, m, n, d, 1, dout.x, dout.ld, v.x, v.ld, 0, dp, (int)lds);
    NAME(differentiate)(s, dp, lds, rows, n, seen0, dim, lse, dout_at, p->dout_stride[2], out_at, p->out_stride[2]);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_T, XT_BLAS_N, n, d, m, 1, s, (int)lds, dout.x, dout.ld, 1, dv.x, dv.ld);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_N, XT_BLAS_N, m, d, n, scale, dp, (int)lds, k.x, k.ld, 0, dq.x, dq.ld);
    GEMM(XT_BLAS_ROW_MAJOR, XT_BLAS_T, XT_BLAS_N, n, d, m, scale, dp, (int)lds, q.x, q.ld, 1, dk.x, dk.ld);
    NAME(store)(p->dtype, dq, rows, dim, dq_at, p->dq_stride[2]);
}

/* Parts [begin, end), counted through the kv heads of all the batch. */
static XtStatus NAME(backward_parts)(void *context, int64_t begin, int64_t end) {
    const Backward *cut = context;
    const XtAttentionBwd *p = cut->p;
    int64_t group = p->heads / p->kv_heads, dim = p->dim, kv = p->skv * dim, of_head = cut->blocks / group;
    void *scratch;
    size_t numbers = (size_t)(cut->rows * 2 * padded(p->skv) + (LOW ? 3 * cut->rows * dim + 4 * kv : 0));
    XT_CHECK(xt_scratch(numbers * sizeof(ACC), &scratch));
    ACC *room = (ACC *)scratch + (LOW ? 4 * kv : 0), *kv_room = scratch; /* K, V, dK, dV: [skv, D] each; LOW only */
    for (int64_t index = begin; index < end; index++) {
        int64_t bg = index / cut->parts, b = bg / p->kv_heads, g = bg % p->kv_heads;
        const T *k_at = (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1]; /* [skv, D] */
        const T *v_at = (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1]; /* [skv, D] */
        T *dk_at = (T *)p->dk + b * p->dk_stride[0] + g * p->dk_stride[1];         /* [skv, D] */
        T *dv_at = (T *)p->dv + b * p->dv_stride[0] + g * p->dv_stride[1];         /* [skv, D] */
        NAME(Rows) k = NAME(load)(p->dtype, k_at, p->k_stride[2], p->skv, dim, kv_room);
        NAME(Rows) v = NAME(load)(p->dtype, v_at, p->v_stride[2], p->skv, dim, kv_room + kv);
        NAME(Rows) dk = NAME(target)(dk_at, p->dk_stride[2], dim, kv_room + 2 * kv);
        NAME(Rows) dv = NAME(target)(dv_at, p->dv_stride[2], dim, kv_room + 3 * kv);
        if (cut->sums) {
            dk = (NAME(Rows)){(ACC *)cut->sums + index * 2 * kv, (int)dim};
            dv = (NAME(Rows)){dk.x + kv, (int)dim};
        }
        for (int64_t j = 0; j < p->skv; j++) {
            memset(dk.x + j * dk.ld, 0, (size_t)dim * sizeof(ACC));
            memset(dv.x + j * dv.ld, 0, (size_t)dim * sizeof(ACC));
        }
        for (int64_t i = index % cut->parts; i < cut->blocks; i += cut->parts)
            NAME(backward_block)(p, b, g * group + i / of_head, i % of_head * cut->rows, cut->rows, k, v, dk, dv, room);
        if (cut->sums) continue;
        NAME(store)(p->dtype, dk, p->skv, dim, dk_at, p->dk_stride[2]);
        NAME(store)(p->dtype, dv, p->skv, dim, dv_at, p->dv_stride[2]);
    }
    return XT_OK;
}

/* Rows [begin, end) of dK and dV, counted through the kv heads of all the batch: the sum of the parts, from the first on. */
XT_FAST static XtStatus NAME(add_parts)(void *context, int64_t begin, int64_t end) {
    const Backward *cut = context;
    const XtAttentionBwd *p = cut->p;
    int64_t dim = p->dim, kv = p->skv * dim;
    for (int64_t row = begin; row < end; row++) {
        int64_t bg = row / p->skv, j = row % p->skv, b = bg / p->kv_heads, g = bg % p->kv_heads;
        const ACC *part = (const ACC *)cut->sums + bg * cut->parts * 2 * kv + j * dim;        /* [D], steps 2 kv and kv */
        T *dk = (T *)p->dk + b * p->dk_stride[0] + g * p->dk_stride[1] + j * p->dk_stride[2]; /* [D] */
        T *dv = (T *)p->dv + b * p->dv_stride[0] + g * p->dv_stride[1] + j * p->dv_stride[2]; /* [D] */
        for (int64_t d = 0; d < dim; d++) {
            ACC sum_k = part[d], sum_v = part[kv + d];
            for (int64_t i = 1; i < cut->parts; i++) sum_k += part[2 * i * kv + d], sum_v += part[(2 * i + 1) * kv + d];
            dk[d] = STORE(sum_k), dv[d] = STORE(sum_v);
        }
    }
    return XT_OK;
}

#undef LOW
#undef GEMM
#endif
