/* bf16.c - attention of bfloat16 with the CPU's own instruction for products of pairs, vdpbf16ps.
 *
 *     forward, of a block of rows   for each strip of keys: S = Q K^T;  P = 2^(f S - max);  sums and out so far shrink where max grows;
 *                                   out += bfloat16(P) V
 *     backward, of a query head     for each strip of keys, each block of rows that sees it: S = Q K^T;  P = 2^(f S - lse);
 *                                   dP = dO V^T;  dS = P (dP - delta);  dV += bfloat16(P)^T dO;  dQ += bfloat16(dS) K;
 *                                   dK += bfloat16(dS)^T Q
 *
 * f = scale / ln 2. All sums are float32; P and dS are rounded to bfloat16 for their products, as PyTorch's flash attention on a CPU
 * does. Packed K and V have the layout of op(B) of cpu/gemm/bf16_tile.h; Q, dO, P and dS are read as its op(A). A tile whose scores nobody
 * sees is left out.
 *
 * How the work is cut for threads: bf16_shares.h.
 */
#include "bf16_block.h"
#include "cpu/gemm/gemm.h"

#ifdef XT_BF16_TILES

/* ---- forward ----------------------------------------------------------------------------------------------------------------- */

typedef struct Forward {
    uint32_t *k, *v; /* packed, all keys: [panels][pairs of D][64]; [panels of D][pairs][64] */
    float *s;        /* [STRIP / 64][ROWS][64] */
    uint16_t *p;     /* [ROWS][P_LD] */
    float *out;      /* [panels of D][ROWS][64] */
    float *max, *sum;
} Forward;

static size_t forward_room(Forward *f, char *base, int64_t skv, int64_t dim) {
    size_t used = 0;
    f->k = carve(base, &used, panels_of(skv) * ((dim + 1) / 2) * PANEL);
    f->v = carve(base, &used, panels_of(dim) * ((skv + 1) / 2) * PANEL);
    f->s = carve(base, &used, ROWS * STRIP);
    f->p = carve(base, &used, ROWS * P_LD / 2);
    f->out = carve(base, &used, panels_of(dim) * ROWS * PANEL);
    f->max = carve(base, &used, ROWS);
    f->sum = carve(base, &used, ROWS);
    return used;
}

/* s -> P = 2^(factor s - max) in bfloat16, zero where a row sees nothing; max and sum go on, out shrinks where max grows. */
PAIRS_FAST static void soften(const Block *block, float factor, int64_t dim, const Forward *f) {
    const __m512 by = _mm512_set1_ps(factor);
    const int64_t from = block->keys.begin / VECTOR_16, to = (block->keys.end + VECTOR_16 - 1) / VECTOR_16;
    for (int64_t i = 0; i < block->rows; i++) {
        const XtSeen seen = seen_by(block->sight, block->row + i, 1, block->first, STRIP);
        const int64_t begin = seen.begin / VECTOR_16, end = (seen.end + VECTOR_16 - 1) / VECTOR_16;
        uint16_t *p = f->p + i * P_LD;
        for (int64_t v = from; v < to; v++)
            if (v < begin || v >= end) _mm256_storeu_si256((__m256i *)(p + v * VECTOR_16), _mm256_setzero_si256());
        if (seen.end <= seen.begin) {
            for (int64_t v = begin; v < end; v++) _mm256_storeu_si256((__m256i *)(p + v * VECTOR_16), _mm256_setzero_si256());
            continue;
        }
        __m512 high = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        for (int64_t v = begin; v < end; v++) {
            const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(vector_at(f->s, i, v)), by);
            high = _mm512_mask_max_ps(high, mask_of(seen, v * VECTOR_16), x, high);
        }
        const float old = f->max[i], top = _mm512_reduce_max_ps(high), max = top > old ? top : old;
        const __m512 shift = _mm512_set1_ps(max == -INFINITY ? 0 : max); /* scores of -Inf alone: -Inf minus itself is NaN */
        for (int64_t v = begin; v < end; v++) {
            const __m512 x = _mm512_sub_ps(product_of(_mm512_loadu_ps(vector_at(f->s, i, v)), by), shift);
            const __m512 e = _mm512_maskz_mov_ps(mask_of(seen, v * VECTOR_16), exp2_of(x));
            total = _mm512_add_ps(total, e);
            _mm256_storeu_si256((__m256i *)(p + v * VECTOR_16), (__m256i)_mm512_cvtneps_pbh(e));
        }
        const __m512 shrink = exp2_of(_mm512_sub_ps(_mm512_set1_ps(old), shift));
        f->max[i] = max, f->sum[i] = f->sum[i] * _mm512_cvtss_f32(shrink) + _mm512_reduce_add_ps(total);
        if (max == old) continue;
        for (int64_t d = 0; d < dim; d += VECTOR_16) {
            float *out = f->out + (d / PANEL * ROWS + i) * PANEL + d % PANEL;
            _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), shrink));
        }
    }
}

/* out = sums / sum in bfloat16 [rows, dim], lse = log sum exp. A row that sees nothing gets 0 and -Inf. */
PAIRS_FAST static void finish_rows(const Block *block, int64_t dim, const Forward *f, uint16_t *out, int64_t ld, float *lse) {
    for (int64_t i = 0; i < block->rows; i++) {
        const XtSeen seen = seen_by(block->sight, block->row + i, 1, 0, block->sight->skv);
        const bool sees = seen.end > seen.begin;
        if (sees) store_row(f->out + i * PANEL, ROWS * PANEL, dim, 1 / f->sum[i], out + i * ld);
        else memset(out + i * ld, 0, (size_t)dim * sizeof *out);
        lse[i] = sees ? (float)((double)f->max[i] * 0.693147180559945309 + log((double)f->sum[i])) : -INFINITY;
    }
}

/* Rows i ... of query head h. */
static void forward_block(const XtAttentionFwd *p, const XtPart *part, int64_t h, int64_t i, const Forward *f) {
    const Sight sight = {p->causal, p->window, part->sq, part->skv};
    const int64_t dim = p->dim;
    Block block = {.sight = &sight, .row = i, .rows = least(part->sq - i, ROWS)};
    const uint16_t *q = (const uint16_t *)p->q + xt_rows_at(p->q_stride, part, h) + i * p->q_stride[2]; /* [rows, D] */
    uint16_t *out = (uint16_t *)p->out + xt_rows_at(p->out_stride, part, h) + i * p->out_stride[2];     /* [rows, D] */
    const float factor = (float)(p->softcap > 0 ? p->softcap : p->scale) * LOG2_E;
    memset(f->out, 0, (size_t)(panels_of(dim) * ROWS * PANEL) * sizeof(float));
    for (int64_t r = 0; r < ROWS; r++) f->max[r] = -INFINITY, f->sum[r] = 0;
    const XtSeen all = seen_by(&sight, i, block.rows, 0, part->skv);
    for (block.first = all.begin / PANEL * PANEL; block.first < all.end; block.first += STRIP) {
        block.keys = seen_by(&sight, i, block.rows, block.first, STRIP);
        multiply_scores(&block, q, p->q_stride[2], dim, f->k, f->s);
        if (p->softcap > 0) cap_scores(&block, (float)(p->scale / p->softcap), f->s);
        soften(&block, factor, dim, f);
        add_values(&block, f->p, dim, f->v, (part->skv + 1) / 2, f->out);
    }
    finish_rows(&block, dim, f, out, p->out_stride[2], (float *)p->lse + (part->b * p->heads + h) * p->sq + part->first + i);
}

/* Shares [begin, end), counted through the kv heads of all parts. */
static XtStatus forward_shares(void *context, int64_t begin, int64_t end) {
    const XtAttentionJob *job = context;
    const XtAttentionFwd *p = job->p;
    const int64_t group = p->heads / p->kv_heads, dim = p->dim;
    for (int64_t index = begin; index < end; index++) {
        const XtPart *part = job->parts + xt_part_at(job->parts, job->count, index);
        const int64_t n = index - part->index, g = n / part->shares, skv = part->skv;
        Forward f;
        void *scratch;
        XT_CHECK(xt_scratch(forward_room(&f, NULL, skv, dim), &scratch));
        forward_room(&f, scratch, skv, dim);
        const uint16_t *k = (const uint16_t *)p->k + xt_rows_at(p->k_stride, part, g);
        const uint16_t *v = (const uint16_t *)p->v + xt_rows_at(p->v_stride, part, g);
        pack_transposed(k, p->k_stride[2], skv, dim, f.k);
        pack_rows_b(v, p->v_stride[2], skv, dim, f.v, (skv + 1) / 2 * PANEL);
        for (int64_t i = n % part->shares; i < group * part->blocks; i += part->shares)
            forward_block(p, part, g * group + i / part->blocks, i % part->blocks * ROWS, &f);
    }
    return XT_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------------------- */

typedef struct Backward {
    uint32_t *k, *v;         /* packed, all keys: [panels][pairs of D][64] */
    uint32_t *k_rows;        /* the same keys by rows: [panels of D][pairs][64] */
    float *dk, *dv;          /* [panels of D][skv][64] */
    float *s, *dp;           /* [STRIP / 64][ROWS][64] */
    uint32_t *p_pairs;       /* [ROWS / 2][PAIRS_LD]: two rows of P */
    uint32_t *ds_pairs;      /* of dS */
    uint16_t *ds;            /* [ROWS][P_LD] */
    float *dq;               /* of each block of a head in the share, like what follows: [panels of D][ROWS][64] */
    uint32_t *q_rows, *dout; /* [panels of D][ROWS / 2][64] */
    float *lse, *delta;      /* [ROWS], lse / ln 2 */
} Backward;

/* Numbers of dK, or dV, of a share. */
static int64_t sums_of(int64_t skv, int64_t dim) { return panels_of(dim) * skv * PANEL; }

static size_t backward_room(Backward *r, char *base, const XtPart *part, int64_t dim) {
    const int64_t blocks = (part->blocks - 1) / part->shares + 1, panels = panels_of(dim), skv = part->skv;
    size_t used = 0;
    r->k = carve(base, &used, panels_of(skv) * ((dim + 1) / 2) * PANEL);
    r->v = carve(base, &used, panels_of(skv) * ((dim + 1) / 2) * PANEL);
    r->k_rows = carve(base, &used, panels * ((skv + 1) / 2) * PANEL);
    r->dk = carve(base, &used, part->shares > 1 ? 0 : 2 * sums_of(skv, dim));
    r->dv = base ? r->dk + sums_of(skv, dim) : NULL;
    r->s = carve(base, &used, ROWS * STRIP);
    r->dp = carve(base, &used, ROWS * STRIP);
    r->p_pairs = carve(base, &used, ROWS / 2 * PAIRS_LD);
    r->ds_pairs = carve(base, &used, ROWS / 2 * PAIRS_LD);
    r->ds = carve(base, &used, ROWS * P_LD / 2);
    r->dq = carve(base, &used, blocks * panels * ROWS * PANEL);
    r->q_rows = carve(base, &used, blocks * panels * ROWS / 2 * PANEL);
    r->dout = carve(base, &used, blocks * panels * ROWS / 2 * PANEL);
    r->lse = carve(base, &used, blocks * ROWS);
    r->delta = carve(base, &used, blocks * ROWS);
    return used;
}

/* Two rows of a strip of 16 keys in bfloat16: row 0 in the lower half, and as pairs of both rows. */
PAIRS_INLINE void store_two(__m512 x0, __m512 x1, uint32_t *pairs, uint16_t *rows) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(x1, x0);
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                           19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(order, both));
    if (!rows) return;
    _mm256_storeu_si256((__m256i *)rows, _mm512_castsi512_si256(both));
    _mm256_storeu_si256((__m256i *)(rows + P_LD), _mm512_extracti64x4_epi64(both, 1));
}

/* s, dp -> P and dS in bfloat16, zero where a row sees nothing. */
PAIRS_INLINE void differentiate(const Block *block, float factor, const float *lse, const float *delta, const Backward *r,
                                const bool capped) {
    const __m512 by = _mm512_set1_ps(factor), zero = _mm512_setzero_ps();
    const int64_t from = block->keys.begin / VECTOR_16, to = (block->keys.end + VECTOR_16 - 1) / VECTOR_16;
    for (int64_t i = 0; i < block->rows; i += 2) {
        const bool two = i + 1 < block->rows;
        const XtSeen first = seen_by(block->sight, block->row + i, 1, block->first, STRIP);
        const XtSeen second = two ? seen_by(block->sight, block->row + i + 1, 1, block->first, STRIP) : (XtSeen){0, 0};
        uint32_t *p_pairs = r->p_pairs + i / 2 * PAIRS_LD, *ds_pairs = r->ds_pairs + i / 2 * PAIRS_LD;
        for (int64_t v = from; v < to; v++) {
            const __mmask16 mask0 = mask_of(first, v * VECTOR_16), mask1 = mask_of(second, v * VECTOR_16);
            __m512 p0 = zero, p1 = zero, ds0 = zero, ds1 = zero;
            if (mask0) {
                p0 = _mm512_loadu_ps(vector_at(r->s, i, v));
                ds0 = slope_of(&p0, _mm512_loadu_ps(vector_at(r->dp, i, v)), by, _mm512_set1_ps(lse[i]), _mm512_set1_ps(delta[i]),
                               mask0, true, capped);
            }
            if (mask1) {
                p1 = _mm512_loadu_ps(vector_at(r->s, i + 1, v));
                ds1 = slope_of(&p1, _mm512_loadu_ps(vector_at(r->dp, i + 1, v)), by, _mm512_set1_ps(lse[i + 1]),
                               _mm512_set1_ps(delta[i + 1]), mask1, true, capped);
            }
            store_two(p0, p1, p_pairs + v * VECTOR_16, NULL);
            store_two(ds0, ds1, ds_pairs + v * VECTOR_16, r->ds + i * P_LD + v * VECTOR_16);
        }
    }
}
PAIRS_FAST static void differentiate_plain(const Block *block, float factor, const float *lse, const float *delta,
                                           const Backward *r) {
    differentiate(block, factor, lse, delta, r, false);
}
PAIRS_FAST static void differentiate_capped(const Block *block, float factor, const float *lse, const float *delta,
                                            const Backward *r) {
    differentiate(block, factor, lse, delta, r, true);
}

/* delta_i = dout_i . out_i */
PAIRS_FAST static void sum_products(const uint16_t *dout, int64_t dout_ld, const uint16_t *out, int64_t out_ld, int64_t rows,
                                    int64_t dim, float *delta) {
    for (int64_t i = 0; i < rows; i++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += VECTOR_16) {
            const __mmask16 mask = first_of(dim - d);
            sum = _mm512_fmadd_ps(load_16(dout + i * dout_ld + d, mask), load_16(out + i * out_ld + d, mask), sum);
        }
        delta[i] = _mm512_reduce_add_ps(sum);
    }
}

PAIRS_FAST static void store_rows(const float *sums, int64_t step, int64_t rows, int64_t dim, float factor, uint16_t *x,
                                  int64_t ld) {
    for (int64_t i = 0; i < rows; i++) store_row(sums + i * PANEL, step, dim, factor, x + i * ld);
}

/* Blocks first, first + shares, ... of query head h, which a share has. Adds to dK and dV, writes dQ. */
static void backward_head(const XtAttentionBwd *p, const XtPart *part, int64_t h, int64_t first, const Backward *r) {
    const Sight sight = {p->causal, p->window, part->sq, part->skv};
    const int64_t dim = p->dim, skv = part->skv, step = part->shares * ROWS, panels = panels_of(dim);
    const uint16_t *q = (const uint16_t *)p->q + xt_rows_at(p->q_stride, part, h);
    const uint16_t *dout = (const uint16_t *)p->dout + xt_rows_at(p->dout_stride, part, h);
    const uint16_t *out = (const uint16_t *)p->out + xt_rows_at(p->out_stride, part, h);
    uint16_t *dq = (uint16_t *)p->dq + xt_rows_at(p->dq_stride, part, h);                      /* [sq, D] each */
    const float *lse = (const float *)p->lse + (part->b * p->heads + h) * p->sq + part->first; /* [sq] */
    const int64_t sums = panels * ROWS * PANEL, packed = sums / 2, ld_q = p->q_stride[2], ld_dout = p->dout_stride[2];
    const float factor = (float)(p->softcap > 0 ? p->softcap : p->scale) * LOG2_E;
    for (int64_t i = first * ROWS, n = 0; i < part->sq; i += step, n++) {
        const int64_t rows = least(part->sq - i, ROWS);
        pack_rows_b(q + i * ld_q, ld_q, rows, dim, r->q_rows + n * packed, ROWS / 2 * PANEL);
        pack_rows_b(dout + i * ld_dout, ld_dout, rows, dim, r->dout + n * packed, ROWS / 2 * PANEL);
        sum_products(dout + i * ld_dout, ld_dout, out + i * p->out_stride[2], p->out_stride[2], rows, dim, r->delta + n * ROWS);
        for (int64_t j = 0; j < rows; j++) r->lse[n * ROWS + j] = lse[i + j] * LOG2_E;
        memset(r->dq + n * sums, 0, (size_t)sums * sizeof(float));
    }
    for (int64_t key = 0; key < skv; key += STRIP)
        for (int64_t i = first * ROWS, n = 0; i < part->sq; i += step, n++) {
            Block block = {&sight, i, least(part->sq - i, ROWS), key, {0, 0}};
            block.keys = seen_by(&sight, i, block.rows, key, least(skv - key, STRIP));
            if (block.keys.end <= block.keys.begin) continue;
            multiply_scores(&block, q + i * ld_q, ld_q, dim, r->k, r->s);
            multiply_scores(&block, dout + i * ld_dout, ld_dout, dim, r->v, r->dp);
            if (p->softcap > 0) {
                cap_scores(&block, (float)(p->scale / p->softcap), r->s);
                differentiate_capped(&block, factor, r->lse + n * ROWS, r->delta + n * ROWS, r);
            } else differentiate_plain(&block, factor, r->lse + n * ROWS, r->delta + n * ROWS, r);
            add_transposed(&block, r->p_pairs, dim, r->dout + n * packed, r->dv);
            add_transposed(&block, r->ds_pairs, dim, r->q_rows + n * packed, r->dk);
            add_values(&block, r->ds, dim, r->k_rows, (skv + 1) / 2, r->dq + n * sums);
        }
    for (int64_t i = first * ROWS, n = 0; i < part->sq; i += step, n++)
        store_rows(r->dq + n * sums, ROWS * PANEL, least(part->sq - i, ROWS), dim, (float)p->scale, dq + i * p->dq_stride[2],
                   p->dq_stride[2]);
}

/* Shares [begin, end), counted through the kv heads of all parts. */
static XtStatus backward_shares(void *context, int64_t begin, int64_t end) {
    const XtAttentionJob *job = context;
    const XtAttentionBwd *p = job->p;
    const int64_t group = p->heads / p->kv_heads, dim = p->dim;
    for (int64_t index = begin; index < end; index++) {
        const XtPart *part = job->parts + xt_part_at(job->parts, job->count, index);
        const int64_t n = index - part->index, g = n / part->shares, skv = part->skv, sums = sums_of(skv, dim);
        Backward r;
        void *scratch;
        XT_CHECK(xt_scratch(backward_room(&r, NULL, part, dim), &scratch));
        backward_room(&r, scratch, part, dim);
        if (part->shares > 1) r.dk = (float *)job->sums + part->sums + n * 2 * sums, r.dv = r.dk + sums;
        const uint16_t *k = (const uint16_t *)p->k + xt_rows_at(p->k_stride, part, g);
        const uint16_t *v = (const uint16_t *)p->v + xt_rows_at(p->v_stride, part, g);
        pack_transposed(k, p->k_stride[2], skv, dim, r.k);
        pack_transposed(v, p->v_stride[2], skv, dim, r.v);
        pack_rows_b(k, p->k_stride[2], skv, dim, r.k_rows, (skv + 1) / 2 * PANEL);
        memset(r.dk, 0, (size_t)(2 * sums) * sizeof(float));
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            const int64_t first = (n + h) % part->shares; /* long rows go round */
            if (first < part->blocks) backward_head(p, part, h, first, &r);
        }
        if (part->shares > 1) continue;
        store_rows(r.dk, skv * PANEL, skv, dim, (float)p->scale, (uint16_t *)p->dk + xt_rows_at(p->dk_stride, part, g),
                   p->dk_stride[2]);
        store_rows(r.dv, skv * PANEL, skv, dim, 1, (uint16_t *)p->dv + xt_rows_at(p->dv_stride, part, g), p->dv_stride[2]);
    }
    return XT_OK;
}

/* The first share of a kv head's sums of dK or dV, from row `first` on, becomes the sum of all of them. */
PAIRS_FAST static void add_up(float *sums, int64_t shares, int64_t step, int64_t panels, int64_t panel, int64_t rows) {
    for (int64_t d = 0; d < panels; d++, sums += panel)
        for (int64_t i = 0; i < rows * PANEL; i += VECTOR_16) {
            __m512 sum = _mm512_loadu_ps(sums + i);
            for (int64_t n = 1; n < shares; n++) sum = _mm512_add_ps(sum, _mm512_loadu_ps(sums + n * step + i));
            _mm512_storeu_ps(sums + i, sum);
        }
}

/* The sums over shares, from the first on: share i of n of a kv head stands for rows skv i / n ... skv (i + 1) / n of its dK and dV. */
static XtStatus add_shares(void *context, int64_t begin, int64_t end) {
    const XtAttentionJob *job = context;
    const XtAttentionBwd *p = job->p;
    const int64_t dim = p->dim;
    for (int64_t index = begin; index < end; index++) {
        const XtPart *part = job->parts + xt_part_at(job->parts, job->count, index);
        const int64_t shares = part->shares, n = index - part->index, g = n / shares, i = n % shares, skv = part->skv;
        const int64_t sums = sums_of(skv, dim), from = skv * i / shares, rows = skv * (i + 1) / shares - from;
        if (shares == 1) continue;
        float *dk = (float *)job->sums + part->sums + g * shares * 2 * sums + from * PANEL, *dv = dk + sums;
        add_up(dk, shares, 2 * sums, panels_of(dim), skv * PANEL, rows);
        add_up(dv, shares, 2 * sums, panels_of(dim), skv * PANEL, rows);
        store_rows(dk, skv * PANEL, rows, dim, (float)p->scale,
                   (uint16_t *)p->dk + xt_rows_at(p->dk_stride, part, g) + from * p->dk_stride[2], p->dk_stride[2]);
        store_rows(dv, skv * PANEL, rows, dim, 1, (uint16_t *)p->dv + xt_rows_at(p->dv_stride, part, g) + from * p->dv_stride[2],
                   p->dv_stride[2]);
    }
    return XT_OK;
}

static const XtBf16Attention kernel = {.rows = ROWS,
                                       .share_blocks = 6,
                                       .alone = 2000000,
                                       .sums = sums_of,
                                       .forward = forward_shares,
                                       .backward = backward_shares,
                                       .add = add_shares};

XtStatus xt_attention_bf16_fwd(const XtAttentionFwd *p) { return xt_attention_bf16_forward(p, &kernel); }
XtStatus xt_attention_bf16_bwd(const XtAttentionBwd *p) { return xt_attention_bf16_backward(p, &kernel); }

#else
XtStatus xt_attention_bf16_fwd(const XtAttentionFwd *p) {
    (void)p;
    return xt_error(XT_NOT_IMPLEMENTED, "attention: bf16 is not built for this CPU");
}
XtStatus xt_attention_bf16_bwd(const XtAttentionBwd *p) {
    (void)p;
    return xt_error(XT_NOT_IMPLEMENTED, "attention: bf16 is not built for this CPU");
}
#endif

static const char *unfit(XtDtype dtype, int64_t skv, int64_t dim) {
    const char *reason = xt_attention_bf16_fits(dtype, skv, dim);
    return reason || xt_has_bf16_pairs() ? reason : "this CPU has no AVX512-BF16 instructions";
}

const char *xt_attention_bf16_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device) {
    (void)device;
    return unfit(p->dtype, p->skv, p->dim);
}
const char *xt_attention_bf16_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device) {
    (void)device;
    return unfit(p->dtype, p->skv, p->dim);
}
