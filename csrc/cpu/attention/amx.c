/* amx.c - attention of bfloat16 in the tile registers of Intel's AMX, tdpbf16ps.
 *
 *     forward, of 32 queries        for each strip of keys: S = Q K^T and the largest score of each row;  sums and out so far shrink where
 *                                   it grew;  for each 32 keys: P = 2^(f S - max);  out += bfloat16(P) V
 *     backward, of a query head     for each strip of keys, each 32 queries that see some of it, each 32 keys: S^T = K Q^T;
 *                                   dP^T = V dO^T;  P^T = 2^(f S^T - lse);  dS^T = P^T (dP^T - delta);  dV += bfloat16(P^T) dO;
 *                                   dK += bfloat16(dS^T) Q;  dQ^T += K^T bfloat16(dS^T)
 *
 * f = scale / ln 2. Sums are float32 and P and dS are rounded, as in bf16.c; the bits differ from its, as tdpbf16ps adds in another order
 * (cpu/gemm/amx.c). The backward computes the transposes, so that P and dS come out as the left operands that dV and dK need; the right
 * one that dQ needs is dS in pairs of keys, two unpacks away, which leave the queries in another order until store_turned(). All operands
 * are packed, so that tails are zeros (amx_block.h), and a block of 32 x 32 that nobody sees is left out.
 *
 * Exponentials take longer than products: products of the block before and scores of the next one run beside them (Queue).
 */
#include "amx_block.h"
#include "cpu/gemm/gemm.h"

#ifdef XT_AMX_TILES

#define STRIP 8        /* groups of keys at once in the forward: 32 KiB of scores */
#define BACK_STRIP 2   /* in the backward: dK and dV of a strip stay in the L1 cache, and each 32 queries are read once */
#define BLOCK_ROWS 32  /* of the forward */
#define SHARE_ROWS 128 /* of a block of the backward: every n-th block is a share's */

/* ---- forward ----------------------------------------------------------------------------------------------------------------- */

typedef struct Forward {
    uint32_t *k, *v; /* right: [keys] of K^T, [D] of V */
    char *q, *p;     /* left: [32][D]; of two groups of keys in turn, [32][32] */
    float *s;        /* [STRIP][SUMS] */
    float *out;      /* [groups of D][SUMS] */
    float *high;     /* [32][16]: the largest scores of a strip */
    float *total;    /* [32][16]: its sums of P */
    float *max, *sum, *shift;
} Forward;

static size_t forward_room(Forward *f, char *base, int64_t skv, int64_t dim) {
    size_t used = 0;
    f->k = carve(base, &used, operand_size(skv, dim));
    f->v = carve(base, &used, operand_size(skv, dim));
    f->q = carve(base, &used, operand_size(GROUP, dim));
    f->p = carve(base, &used, 2 * operand_size(GROUP, GROUP));
    f->s = carve(base, &used, STRIP * SUMS);
    f->out = carve(base, &used, groups_of(dim) * SUMS);
    f->high = carve(base, &used, GROUP * 16);
    f->total = carve(base, &used, GROUP * 16);
    f->max = carve(base, &used, GROUP);
    f->sum = carve(base, &used, GROUP);
    f->shift = carve(base, &used, GROUP);
    return used;
}

/* 32 queries of one head, and the 32 keys from `key` on. */
typedef struct Block {
    const Sight *sight;
    int64_t row, rows, key;
} Block;

/* high = the largest of itself and the scores that a row sees. */
TILES_INLINE void find_largest(const Block *block, float factor, float *s, float *high, const bool masked) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int64_t i = 0; i < GROUP; i++, high += 16) {
        const float *at = row_of(s, i);
        const __m512 x0 = _mm512_mul_ps(_mm512_loadu_ps(at), by), x1 = _mm512_mul_ps(_mm512_loadu_ps(at + TILE), by);
        __m512 most = _mm512_loadu_ps(high);
        if (masked) {
            const XtSeen seen = seen_by(block->sight, block->row + i, 1, block->key, GROUP);
            most = _mm512_mask_max_ps(most, mask_of(seen, 0), x0, most);
            most = _mm512_mask_max_ps(most, mask_of(seen, 16), x1, most);
        } else most = _mm512_max_ps(x1, _mm512_max_ps(x0, most)); /* the second operand, if one is NaN */
        _mm512_storeu_ps(high, most);
    }
}
TILES_FAST static void find_largest_of_all(const Block *block, float factor, float *s, float *high) {
    find_largest(block, factor, s, high, false);
}
TILES_FAST static void find_largest_seen(const Block *block, float factor, float *s, float *high) {
    find_largest(block, factor, s, high, true);
}

/* max becomes that of all strips so far; sum, and out behind the first strip, shrink where it grew. */
TILES_FAST static void shrink_rows(const Forward *f, int64_t dim, bool first) {
    for (int64_t half = 0; half < GROUP; half += HEIGHT) {
        float shrink[16];
        const __m512 old = _mm512_loadu_ps(f->max + half), lowest = _mm512_set1_ps(-INFINITY);
        const __m512 max = _mm512_max_ps(reduce_16(f->high + half * 16, true), old);
        /* scores of -Inf alone: -Inf minus itself is NaN */
        const __m512 shift = _mm512_mask_mov_ps(max, _mm512_cmp_ps_mask(max, lowest, _CMP_EQ_OQ), _mm512_setzero_ps());
        const __mmask16 grew = _mm512_cmp_ps_mask(max, old, _CMP_NEQ_UQ);
        const __m512 by = _mm512_mask_mov_ps(_mm512_set1_ps(1), grew, exp2_of(_mm512_sub_ps(old, shift)));
        _mm512_storeu_ps(f->max + half, max);
        _mm512_storeu_ps(f->shift + half, shift);
        _mm512_storeu_ps(f->sum + half, _mm512_mul_ps(_mm512_loadu_ps(f->sum + half), by));
        if (first || !grew) continue;
        _mm512_storeu_ps(shrink, by);
        for (int64_t i = 0; i < HEIGHT; i++)
            for (int64_t d = 0; d < groups_of(dim) && (grew >> i & 1); d++) {
                float *out = row_of(f->out + d * SUMS, half + i);
                _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_loadu_ps(out), _mm512_set1_ps(shrink[i])));
                _mm512_storeu_ps(out + TILE, _mm512_mul_ps(_mm512_loadu_ps(out + TILE), _mm512_set1_ps(shrink[i])));
            }
    }
}

/* s -> P = 2^(factor s - max) in bfloat16, zero where a row sees nothing; total has its sums. */
TILES_INLINE void weigh(const Block *block, float factor, float *s, const Forward *f, char *p, Queue *queue, const bool masked) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int64_t i = 0; i < GROUP; i++) {
        const float *at = row_of(s, i);
        const __m512 shift = _mm512_set1_ps(f->shift[i]);
        __m512 x0 = exp2_of(_mm512_sub_ps(product_of(_mm512_loadu_ps(at), by), shift));
        __m512 x1 = exp2_of(_mm512_sub_ps(product_of(_mm512_loadu_ps(at + TILE), by), shift));
        if (masked) {
            const XtSeen seen = seen_by(block->sight, block->row + i, 1, block->key, GROUP);
            x0 = _mm512_maskz_mov_ps(mask_of(seen, 0), x0), x1 = _mm512_maskz_mov_ps(mask_of(seen, 16), x1);
        }
        _mm512_storeu_ps(f->total + i * 16, _mm512_add_ps(_mm512_loadu_ps(f->total + i * 16), _mm512_add_ps(x0, x1)));
        _mm512_storeu_si512(p + i * 64, (__m512i)_mm512_cvtne2ps_pbh(x1, x0));
        run_part(queue, (int)i + 1, GROUP);
    }
}
TILES_FAST static void weigh_all(const Block *block, float factor, float *s, const Forward *f, char *p, Queue *queue) {
    weigh(block, factor, s, f, p, queue, false);
}
TILES_FAST static void weigh_seen(const Block *block, float factor, float *s, const Forward *f, char *p, Queue *queue) {
    weigh(block, factor, s, f, p, queue, true);
}

/* out = sums / sum in bfloat16 [rows, dim], lse = log sum exp. A row that sees nothing gets 0 and -Inf. */
TILES_FAST static void finish_rows(const Block *block, int64_t dim, const Forward *f, uint16_t *out, int64_t ld, float *lse) {
    float logs[GROUP], factors[GROUP];
    for (int64_t i = 0; i < GROUP; i++) {
        logs[i] = (float)((double)f->max[i] * 0.693147180559945309 + (double)xt_logf(f->sum[i]));
        factors[i] = 1 / f->sum[i];
    }
    for (int64_t i = 0; i < block->rows; i++, out += ld) {
        const XtSeen seen = seen_by(block->sight, block->row + i, 1, 0, block->sight->skv);
        lse[i] = seen.end > seen.begin ? logs[i] : -INFINITY;
        if (seen.end > seen.begin) store_row(row_of(f->out, i), dim, factors[i], out);
        else memset(out, 0, (size_t)dim * sizeof *out);
    }
}

/* Rows i ... of query head h. */
TILES_FAST static void forward_block(const XtAttentionFwd *p, const XtPart *part, int64_t h, int64_t i, const Forward *f) {
    const Sight sight = {p->causal, p->window, part->sq, part->skv};
    const int64_t dim = p->dim, panels = groups_of(dim), groups = groups_of(part->skv);
    Block block = {.sight = &sight, .row = i, .rows = least(part->sq - i, GROUP)};
    const uint16_t *q = (const uint16_t *)p->q + xt_rows_at(p->q_stride, part, h) + i * p->q_stride[2]; /* [rows, D] */
    uint16_t *out = (uint16_t *)p->out + xt_rows_at(p->out_stride, part, h) + i * p->out_stride[2];     /* [rows, D] */
    const float factor = (float)(p->softcap > 0 ? p->softcap : p->scale) * LOG2_E;
    const XtSeen all = seen_by(&sight, i, block.rows, 0, part->skv);
    const int64_t begin = all.begin / GROUP, end = groups_of(all.end);
    Queue queue = {.count = 0};
    pack_left(q, p->q_stride[2], block.rows, dim, f->q);
    for (int64_t r = 0; r < GROUP; r++) f->max[r] = -INFINITY, f->sum[r] = 0;
    for (int64_t strip = begin; strip < end; strip += STRIP) {
        const int64_t last = least(strip + STRIP, end);
        for (int64_t r = 0; r < GROUP * 16; r++) f->high[r] = -INFINITY, f->total[r] = 0;
        for (int64_t g = strip; g <= last; g++) { /* the scores of a group run before what reads those of the group before it */
            if (g < last) {
                const char *k = (const char *)f->k + g * panels * RIGHT_BYTES;
                const Product scores = {f->q, k, panels * LEFT_BYTES, panels, f->s + (g - strip) * SUMS, true};
                multiply(&scores);
            }
            if (g == strip) continue;
            float *s = f->s + (g - 1 - strip) * SUMS;
            block.key = (g - 1) * GROUP;
            if (p->softcap > 0) cap_block((float)(p->scale / p->softcap), s);
            (sees_all(&sight, i, block.rows, block.key) ? find_largest_of_all : find_largest_seen)(&block, factor, s, f->high);
        }
        shrink_rows(f, dim, strip == begin);
        for (int64_t g = strip; g < last; g++) {
            char *left = f->p + g % 2 * 2 * LEFT_BYTES;
            block.key = g * GROUP;
            (sees_all(&sight, i, block.rows, block.key) ? weigh_all : weigh_seen)(&block, factor, f->s + (g - strip) * SUMS, f,
                                                                                  left, &queue);
            for (int64_t d = 0; d < panels; d++) {
                const char *v = (const char *)f->v + (d * groups + g) * RIGHT_BYTES;
                push(&queue, (Product){left, v, LEFT_BYTES, 1, f->out + d * SUMS, g == begin});
            }
        }
        run_all(&queue);
        for (int64_t r = 0; r < GROUP; r += HEIGHT)
            _mm512_storeu_ps(f->sum + r, _mm512_add_ps(_mm512_loadu_ps(f->sum + r), reduce_16(f->total + r * 16, false)));
    }
    finish_rows(&block, dim, f, out, p->out_stride[2], (float *)p->lse + (part->b * p->heads + h) * p->sq + part->first + i);
}

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
        pack_right_turned((const uint16_t *)p->k + xt_rows_at(p->k_stride, part, g), p->k_stride[2], skv, dim, f.k);
        pack_right((const uint16_t *)p->v + xt_rows_at(p->v_stride, part, g), p->v_stride[2], skv, dim, f.v);
        configure();
        for (int64_t i = n % part->shares; i < group * part->blocks; i += part->shares)
            forward_block(p, part, g * group + i / part->blocks, i % part->blocks * BLOCK_ROWS, &f);
        release();
    }
    return XT_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------------------- */

typedef struct Backward {
    char *k, *v;               /* left: [keys][D] */
    char *k_turned;            /* left: [D][keys] */
    float *dk, *dv;            /* [groups of keys][groups of D][SUMS] */
    float *s, *dp;             /* of two blocks in turn, like what follows: [SUMS] */
    char *p, *ds;              /* left: [32 keys][32 queries] */
    uint32_t *ds_pairs;        /* right: [32 queries] */
    float *dq;                 /* of each 32 queries of a head in the share, like what follows: [groups of D][SUMS], transposed */
    uint32_t *q, *dout;        /* right: [32 queries] of Q^T, dO^T */
    uint32_t *q_rows, *d_rows; /* right: [D] of Q, dO */
    float *lse, *delta;        /* [32], lse / ln 2 */
} Backward;

/* Numbers of dK, or dV, of a share. */
static int64_t sums_of(int64_t skv, int64_t dim) { return groups_of(skv) * groups_of(dim) * SUMS; }

static size_t backward_room(Backward *r, char *base, const XtPart *part, int64_t dim) {
    const int64_t rows = ((part->blocks - 1) / part->shares + 1) * SHARE_ROWS, groups = rows / GROUP, skv = part->skv;
    size_t used = 0;
    r->k = carve(base, &used, operand_size(skv, dim));
    r->v = carve(base, &used, operand_size(skv, dim));
    r->k_turned = carve(base, &used, operand_size(skv, dim));
    r->dk = carve(base, &used, part->shares > 1 ? 0 : 2 * sums_of(skv, dim));
    r->dv = base ? r->dk + sums_of(skv, dim) : NULL;
    r->s = carve(base, &used, 2 * SUMS);
    r->dp = carve(base, &used, 2 * SUMS);
    r->p = carve(base, &used, 2 * operand_size(GROUP, GROUP));
    r->ds = carve(base, &used, 2 * operand_size(GROUP, GROUP));
    r->ds_pairs = carve(base, &used, 2 * operand_size(GROUP, GROUP));
    r->dq = carve(base, &used, groups * groups_of(dim) * SUMS);
    r->q = carve(base, &used, operand_size(rows, dim));
    r->dout = carve(base, &used, operand_size(rows, dim));
    r->q_rows = carve(base, &used, operand_size(rows, dim));
    r->d_rows = carve(base, &used, operand_size(rows, dim));
    r->lse = carve(base, &used, groups * GROUP);
    r->delta = carve(base, &used, groups * GROUP);
    return used;
}

/* s, dp -> P^T and dS^T in bfloat16, zero where a query does not see a key, though not behind the last key, where K is zero and dK and dV
 * are lost. turn: which of two blocks; l: which 32 queries. */
TILES_INLINE void differentiate_turned(const Block *block, float factor, const Backward *r, int64_t turn, int64_t l, Queue *queue,
                                       const bool masked, const bool capped) {
    const __m512 by = _mm512_set1_ps(factor);
    const __m512 lse0 = _mm512_loadu_ps(r->lse + l * GROUP), lse1 = _mm512_loadu_ps(r->lse + l * GROUP + 16);
    const __m512 delta0 = _mm512_loadu_ps(r->delta + l * GROUP), delta1 = _mm512_loadu_ps(r->delta + l * GROUP + 16);
    float *s = r->s + turn * SUMS, *dp = r->dp + turn * SUMS;
    char *p = r->p + turn * 2 * LEFT_BYTES, *ds = r->ds + turn * 2 * LEFT_BYTES;
    uint32_t *pairs = r->ds_pairs + turn * RIGHT_BYTES / 4;
    for (int64_t j = 0; j < GROUP; j += 2, pairs += GROUP) {
        __m512i both[2];
#pragma GCC unroll 2
        for (int64_t i = j; i < j + 2; i++) {
            const float *at = row_of(s, i), *dp_at = row_of(dp, i);
            __mmask16 mask0 = 0xffff, mask1 = 0xffff;
            if (masked) {
                const XtSeen rows = seeing(block->sight, block->key + i, 1, block->row, block->rows);
                mask0 = mask_of(rows, 0), mask1 = mask_of(rows, 16);
            }
            __m512 p0 = _mm512_loadu_ps(at), p1 = _mm512_loadu_ps(at + TILE);
            const __m512 ds0 = slope_of(&p0, _mm512_loadu_ps(dp_at), by, lse0, delta0, mask0, masked, capped);
            const __m512 ds1 = slope_of(&p1, _mm512_loadu_ps(dp_at + TILE), by, lse1, delta1, mask1, masked, capped);
            _mm512_storeu_si512(p + i * 64, (__m512i)_mm512_cvtne2ps_pbh(p1, p0));
            both[i - j] = (__m512i)_mm512_cvtne2ps_pbh(ds1, ds0);
            _mm512_storeu_si512(ds + i * 64, both[i - j]);
        }
        _mm512_storeu_si512(pairs, _mm512_unpacklo_epi16(both[0], both[1]));
        _mm512_storeu_si512(pairs + 16, _mm512_unpackhi_epi16(both[0], both[1]));
        run_part(queue, (int)j + 2, GROUP);
    }
}

typedef void (*Differentiate)(const Block *block, float factor, const Backward *r, int64_t turn, int64_t l, Queue *queue);
/* clang-format off */
#define DIFFERENTIATE(name, masked, capped)                                                                                       \
    TILES_FAST static void name(const Block *block, float factor, const Backward *r, int64_t turn, int64_t l, Queue *queue) {     \
        differentiate_turned(block, factor, r, turn, l, queue, masked, capped);                                                          \
    }
/* clang-format on */
DIFFERENTIATE(differentiate_all, false, false)
DIFFERENTIATE(differentiate_seen, true, false)
DIFFERENTIATE(differentiate_all_capped, false, true)
DIFFERENTIATE(differentiate_seen_capped, true, true)
static const Differentiate differentiate_functions[2][2] = {{differentiate_seen, differentiate_seen_capped},
                                                            {differentiate_all, differentiate_all_capped}};

/* What a share has of a query head: blocks first, first + shares, ... */
typedef struct Walk {
    const Sight *sight;
    int64_t first, shares, groups; /* groups of 32 queries in all of them */
} Walk;

/* 32 queries and 32 keys: the next ones, within `end`, belong to the same strip and queries. */
typedef struct Place {
    int64_t strip, l, g, end;
} Place;

static int64_t query_of(const Walk *walk, int64_t l) {
    const int64_t each = SHARE_ROWS / GROUP;
    return (walk->first + l / each * walk->shares) * SHARE_ROWS + l % each * GROUP;
}

/* On to the next queries and keys of which some see some, or false. */
static bool go_on(const Walk *walk, Place *at) {
    const Sight *sight = walk->sight;
    if (++at->g < at->end) return true;
    for (;;) {
        if (++at->l == walk->groups) at->l = 0, at->strip += BACK_STRIP;
        const int64_t key = at->strip * GROUP, row = query_of(walk, at->l);
        if (key >= sight->skv) return false;
        const XtSeen keys = seen_by(sight, row, least(sight->sq - row, GROUP), key, least(sight->skv - key, BACK_STRIP * GROUP));
        if (keys.end <= keys.begin) continue;
        at->g = at->strip + keys.begin / GROUP, at->end = at->strip + groups_of(keys.end);
        return true;
    }
}

static void push_scores(Queue *queue, const Backward *r, const Place *at, int64_t turn, int64_t panels) {
    const int64_t left = at->g * 2 * panels * LEFT_BYTES, right = at->l * panels * RIGHT_BYTES, half = panels * LEFT_BYTES;
    push(queue, (Product){r->k + left, (const char *)r->q + right, half, panels, r->s + turn * SUMS, true});
    push(queue, (Product){r->v + left, (const char *)r->dout + right, half, panels, r->dp + turn * SUMS, true});
}

static void push_gradients(Queue *queue, const Backward *r, const Place *at, int64_t turn, int64_t panels, int64_t groups) {
    const char *p = r->p + turn * 2 * LEFT_BYTES, *ds = r->ds + turn * 2 * LEFT_BYTES;
    const char *pairs = (const char *)r->ds_pairs + turn * RIGHT_BYTES;
    for (int64_t d = 0; d < panels; d++) {
        const int64_t right = (at->l * panels + d) * RIGHT_BYTES, sums = (at->g * panels + d) * SUMS;
        push(queue, (Product){p, (const char *)r->d_rows + right, LEFT_BYTES, 1, r->dv + sums, false});
        push(queue, (Product){ds, (const char *)r->q_rows + right, LEFT_BYTES, 1, r->dk + sums, false});
        push(queue, (Product){r->k_turned + (2 * d * groups + at->g) * LEFT_BYTES, pairs, groups * LEFT_BYTES, 1,
                              r->dq + (at->l * panels + d) * SUMS, false});
    }
}

/* delta_i = dout_i . out_i, zero behind `rows` of 32 */
TILES_FAST static void sum_products(const uint16_t *dout, int64_t dout_ld, const uint16_t *out, int64_t out_ld, int64_t rows,
                                    int64_t dim, float *delta) {
    float sums[GROUP][16];
    for (int64_t i = 0; i < GROUP; i++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim && i < rows; d += GROUP) {
            const __mmask32 mask = first_of_32(dim - d);
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_maskz_loadu_epi16(mask, dout + i * dout_ld + d),
                                   (__m512bh)_mm512_maskz_loadu_epi16(mask, out + i * out_ld + d));
        }
        _mm512_storeu_ps(sums[i], sum);
    }
    for (int64_t i = 0; i < GROUP; i += HEIGHT) _mm512_storeu_ps(delta + i, reduce_16(sums[i], false));
}

/* Blocks first, first + shares, ... of query head h, which a share has. Adds to dK and dV, writes dQ. */
TILES_FAST static void backward_head(const XtAttentionBwd *p, const XtPart *part, int64_t h, int64_t first, const Backward *r) {
    const Sight sight = {p->causal, p->window, part->sq, part->skv};
    const int64_t dim = p->dim, panels = groups_of(dim), packed = panels * RIGHT_BYTES / 4, groups = groups_of(part->skv);
    const uint16_t *q = (const uint16_t *)p->q + xt_rows_at(p->q_stride, part, h);
    const uint16_t *dout = (const uint16_t *)p->dout + xt_rows_at(p->dout_stride, part, h);
    const uint16_t *out = (const uint16_t *)p->out + xt_rows_at(p->out_stride, part, h);
    uint16_t *dq = (uint16_t *)p->dq + xt_rows_at(p->dq_stride, part, h);                      /* [sq, D] each */
    const float *lse = (const float *)p->lse + (part->b * p->heads + h) * p->sq + part->first; /* [sq] */
    const int64_t ld_q = p->q_stride[2], ld_dout = p->dout_stride[2], ld_out = p->out_stride[2];
    const float factor = (float)(p->softcap > 0 ? p->softcap : p->scale) * LOG2_E;
    Walk walk = {&sight, first, part->shares, 0};
    for (int64_t l = 0, i; (i = query_of(&walk, l)) < part->sq; l++) {
        const int64_t rows = least(part->sq - i, GROUP);
        pack_right_turned(q + i * ld_q, ld_q, rows, dim, r->q + l * packed);
        pack_right_turned(dout + i * ld_dout, ld_dout, rows, dim, r->dout + l * packed);
        pack_right(q + i * ld_q, ld_q, rows, dim, r->q_rows + l * packed);
        pack_right(dout + i * ld_dout, ld_dout, rows, dim, r->d_rows + l * packed);
        sum_products(dout + i * ld_dout, ld_dout, out + i * ld_out, ld_out, rows, dim, r->delta + l * GROUP);
        for (int64_t j = 0; j < GROUP; j++) r->lse[l * GROUP + j] = j < rows ? lse[i + j] * LOG2_E : 0;
        walk.groups = l + 1;
    }
    memset(r->dq, 0, (size_t)(walk.groups * panels * SUMS) * sizeof(float));
    Queue queue = {.count = 0};
    Place at = {.l = -1}, next;
    bool more = go_on(&walk, &at);
    if (more) push_scores(&queue, r, &at, 0, panels);
    run_all(&queue);
    for (int64_t turn = 0; more; turn ^= 1, at = next) {
        const int64_t row = query_of(&walk, at.l);
        const Block block = {&sight, row, least(part->sq - row, GROUP), at.g * GROUP};
        const bool all = block.rows == GROUP && sees_all(&sight, row, GROUP, block.key);
        next = at;
        more = go_on(&walk, &next);
        if (more) push_scores(&queue, r, &next, turn ^ 1, panels);
        if (p->softcap > 0) cap_block((float)(p->scale / p->softcap), r->s + turn * SUMS);
        differentiate_functions[all][p->softcap > 0](&block, factor, r, turn, at.l, &queue);
        push_gradients(&queue, r, &at, turn, panels, groups);
    }
    run_all(&queue);
    for (int64_t l = 0; l < walk.groups; l++) {
        const int64_t i = query_of(&walk, l);
        store_turned(r->dq + l * panels * SUMS, least(part->sq - i, GROUP), dim, (float)p->scale, dq + i * p->dq_stride[2],
                     p->dq_stride[2]);
    }
}

/* x [rows, dim] = bfloat16(factor sums), of groups of 32 rows. */
TILES_FAST static void store_rows(float *sums, int64_t rows, int64_t dim, float factor, uint16_t *x, int64_t ld) {
    for (int64_t i = 0; i < rows; i++)
        store_row(row_of(sums + i / GROUP * groups_of(dim) * SUMS, i % GROUP), dim, factor, x + i * ld);
}

/* Rows [from, from + rows) of dK and dV of kv head g, whose sums begin with row `from`. */
static void store_keys(const XtAttentionBwd *p, const XtPart *part, int64_t g, int64_t from, int64_t rows, float *dk, float *dv) {
    uint16_t *dk_at = (uint16_t *)p->dk + xt_rows_at(p->dk_stride, part, g) + from * p->dk_stride[2];
    uint16_t *dv_at = (uint16_t *)p->dv + xt_rows_at(p->dv_stride, part, g) + from * p->dv_stride[2];
    store_rows(dk, rows, p->dim, (float)p->scale, dk_at, p->dk_stride[2]);
    store_rows(dv, rows, p->dim, 1, dv_at, p->dv_stride[2]);
}

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
        pack_left(k, p->k_stride[2], skv, dim, r.k);
        pack_left(v, p->v_stride[2], skv, dim, r.v);
        pack_left_turned(k, p->k_stride[2], dim, skv, r.k_turned);
        memset(r.dk, 0, (size_t)(2 * sums) * sizeof(float));
        configure();
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            const int64_t first = (n + h) % part->shares; /* long rows go round */
            if (first < part->blocks) backward_head(p, part, h, first, &r);
        }
        release();
        if (part->shares == 1) store_keys(p, part, g, 0, skv, r.dk, r.dv);
    }
    return XT_OK;
}

/* The first of `shares` sums, `step` numbers apart, becomes the sum of all of them. */
TILES_FAST static void add_up(float *sums, int64_t shares, int64_t step, int64_t size) {
    for (int64_t i = 0; i < size; i += VECTOR_16) {
        __m512 sum = _mm512_loadu_ps(sums + i);
        for (int64_t n = 1; n < shares; n++) sum = _mm512_add_ps(sum, _mm512_loadu_ps(sums + n * step + i));
        _mm512_storeu_ps(sums + i, sum);
    }
}

/* Share i of n of a kv head stands for groups G i / n ... G (i + 1) / n of its keys. */
static XtStatus add_shares(void *context, int64_t begin, int64_t end) {
    const XtAttentionJob *job = context;
    const XtAttentionBwd *p = job->p;
    for (int64_t index = begin; index < end; index++) {
        const XtPart *part = job->parts + xt_part_at(job->parts, job->count, index);
        const int64_t shares = part->shares, n = index - part->index, g = n / shares, i = n % shares, groups = groups_of(part->skv);
        const int64_t from = groups * i / shares, until = groups * (i + 1) / shares;
        const int64_t sums = sums_of(part->skv, p->dim), each = groups_of(p->dim) * SUMS;
        if (shares == 1) continue;
        float *dk = (float *)job->sums + part->sums + g * shares * 2 * sums + from * each, *dv = dk + sums;
        add_up(dk, shares, 2 * sums, (until - from) * each);
        add_up(dv, shares, 2 * sums, (until - from) * each);
        store_keys(p, part, g, from * GROUP, least(part->skv, until * GROUP) - from * GROUP, dk, dv);
    }
    return XT_OK;
}

static const XtBf16Attention forward_kernel = {.rows = BLOCK_ROWS, .alone = 4000000, .forward = forward_shares};
static const XtBf16Attention backward_kernel = {
    .rows = SHARE_ROWS, .share_blocks = 4, .sums = sums_of, .backward = backward_shares, .add = add_shares};

XtStatus xt_attention_amx_fwd(const XtAttentionFwd *p) { return xt_attention_bf16_forward(p, &forward_kernel); }
XtStatus xt_attention_amx_bwd(const XtAttentionBwd *p) { return xt_attention_bf16_backward(p, &backward_kernel); }

#else
XtStatus xt_attention_amx_fwd(const XtAttentionFwd *p) {
    (void)p;
    return xt_error(XT_NOT_IMPLEMENTED, "attention: amx is not built for this CPU");
}
XtStatus xt_attention_amx_bwd(const XtAttentionBwd *p) {
    (void)p;
    return xt_error(XT_NOT_IMPLEMENTED, "attention: amx is not built for this CPU");
}
#endif

#define FEWEST_ROWS 16 /* a tile of queries */

static const char *unfit(XtDtype dtype, int64_t sq, int64_t skv, int64_t dim) {
    const char *reason = xt_attention_bf16_fits(dtype, skv, dim);
    /* as many keys: a short document, which these tiles compute in a row of documents, has the same bits alone */
    if (!reason && sq < FEWEST_ROWS && sq != skv) reason = "there are fewer than 16 queries, and another number of keys";
    return reason ? reason : xt_amx_refusal();
}

const char *xt_attention_amx_supports_fwd(const XtAttentionFwd *p, const XtDeviceTraits *device) {
    (void)device;
    return unfit(p->dtype, p->sq, p->skv, p->dim);
}
const char *xt_attention_amx_supports_bwd(const XtAttentionBwd *p, const XtDeviceTraits *device) {
    (void)device;
    return unfit(p->dtype, p->sq, p->skv, p->dim);
}
