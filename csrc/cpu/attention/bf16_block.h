/* bf16_block.h - a block of rows of one head beside a strip of keys: the three kinds of products, and vectors of 16.
 *
 * A product has tiles of 6 rows and 64 columns, of bf16_tile.h. Each leaves out what nobody sees: a tile of scores, keys before the
 * first and behind the last that 6 rows see, rows before the first that sees one of 6 keys.
 */
#pragma once

#include "bf16_rows.h"
#include "cpu/gemm/bf16_tile.h"

#ifdef XT_BF16_TILES

#define ROWS 96               /* of a block; even, so that pairs of rows stay in it */
#define STRIP 256             /* keys at once: 64 KiB of scores */
#define P_LD (STRIP + 32)     /* numbers of 16 bits from row to row: an odd number of cache lines */
#define PAIRS_LD (STRIP + 16) /* numbers of 32 bits */

static int64_t panels_of(int64_t size) { return (size + PANEL - 1) / PANEL; }

/* A block of rows of one query head, and a strip of keys. */
typedef struct Block {
    const Sight *sight;
    int64_t row, rows; /* of the part */
    int64_t first;     /* key of the strip, a multiple of 64 */
    XtSeen keys;       /* of the strip, that some row sees, counted from its first */
} Block;

/* ---- products ---------------------------------------------------------------------------------------------------------------- */

/* The lines of x [rows, dim] as panels of 64 columns of its transpose: [panels][(dim + 1) / 2][64] pairs. */
static void pack_transposed(const uint16_t *x, int64_t ld, int64_t rows, int64_t dim, uint32_t *out) {
    for (int64_t j = 0; j < rows; j += PANEL, out += (dim + 1) / 2 * PANEL)
        pack_columns(x + j * ld, ld, dim, least(rows - j, PANEL), out);
}

/* s [panels][ROWS][64] = x y^T for the strip, where somebody sees it; x [rows, dim], y all keys, packed by pack_transposed. */
static void multiply_scores(const Block *block, const uint16_t *x, int64_t ld, int64_t dim, const uint32_t *y, float *s) {
    Tile t = {.a_row = 2 * ld, .a_pair = 4, .pairs = dim / 2, .odd = dim % 2, .first = true};
    for (int64_t c = block->keys.begin / PANEL * PANEL; c < block->keys.end; c += PANEL) {
        const int64_t vectors = (least(block->keys.end - c, PANEL) + VECTOR_16 - 1) / VECTOR_16;
        t.b = y + (block->first + c) / PANEL * ((dim + 1) / 2 * PANEL);
        for (int64_t r = 0; r < block->rows; r += TILE_ROWS) {
            const int64_t rows = least(block->rows - r, TILE_ROWS);
            const XtSeen keys = seen_by(block->sight, block->row + r, rows, block->first, STRIP);
            if (keys.end <= c || keys.begin >= c + PANEL) continue;
            t.a = (const char *)(x + r * ld);
            t.sums = s + (c / PANEL * ROWS + r) * PANEL;
            tile_functions[rows - 1][vectors - 1](&t);
        }
    }
}

/* sums [panels of D][ROWS][64] += p y for the keys of the strip; p [rows][P_LD], y [panels of D][pairs][64]: rows of keys. */
static void add_values(const Block *block, const uint16_t *p, int64_t dim, const uint32_t *y, int64_t pairs, float *sums) {
    Tile t = {.a_row = 2 * P_LD, .a_pair = 4};
    for (int64_t d = 0; d < dim; d += PANEL, y += pairs * PANEL, sums += ROWS * PANEL) {
        const int64_t vectors = (least(dim - d, PANEL) + VECTOR_16 - 1) / VECTOR_16;
        for (int64_t r = 0; r < block->rows; r += TILE_ROWS) {
            const int64_t rows = least(block->rows - r, TILE_ROWS);
            const XtSeen keys = seen_by(block->sight, block->row + r, rows, block->first, STRIP);
            const int64_t begin = keys.begin / 2 * 2;
            if (keys.end <= keys.begin) continue;
            t.pairs = (keys.end - begin + 1) / 2;
            t.a = (const char *)(p + r * P_LD + begin);
            t.b = y + (block->first + begin) / 2 * PANEL;
            t.sums = sums + r * PANEL;
            tile_functions[rows - 1][vectors - 1](&t);
        }
    }
}

/* sums [panels of D][skv][64] += p^T x for the keys of the strip; p [pairs of rows][PAIRS_LD], x [panels of D][ROWS / 2][64]. */
static void add_transposed(const Block *block, const uint32_t *p, int64_t dim, const uint32_t *x, float *sums) {
    Tile t = {.a_row = 4, .a_pair = 4 * PAIRS_LD};
    for (int64_t d = 0; d < dim; d += PANEL, x += ROWS / 2 * PANEL, sums += block->sight->skv * PANEL) {
        const int64_t vectors = (least(dim - d, PANEL) + VECTOR_16 - 1) / VECTOR_16;
        for (int64_t c = block->keys.begin; c < block->keys.end; c += TILE_ROWS) {
            const int64_t keys = least(block->keys.end - c, TILE_ROWS);
            const XtSeen rows = seeing(block->sight, block->first + c, keys, block->row, block->rows);
            if (rows.end <= rows.begin) continue;
            t.pairs = (rows.end + 1) / 2 - rows.begin / 2;
            t.a = (const char *)(p + rows.begin / 2 * PAIRS_LD + c);
            t.b = x + rows.begin / 2 * PANEL;
            t.sums = sums + (block->first + c) * PANEL;
            tile_functions[keys - 1][vectors - 1](&t);
        }
    }
}

/* ---- vectors ----------------------------------------------------------------------------------------------------------------- */

/* 16 scores of row i of a block, from key 16 v of the strip on. */
PAIRS_INLINE float *vector_at(float *s, int64_t i, int64_t v) { return s + (v / 4 * ROWS + i) * PANEL + v % 4 * VECTOR_16; }

/* The scores of a row become tanh(factor s). */
PAIRS_FAST static void cap_scores(const Block *block, float factor, float *s) {
    for (int64_t i = 0; i < block->rows; i++) {
        const XtSeen seen = seen_by(block->sight, block->row + i, 1, block->first, STRIP);
        for (int64_t v = seen.begin / VECTOR_16; v * VECTOR_16 < seen.end; v++) {
            float *x = vector_at(s, i, v);
            for (int j = 0; j < VECTOR_16; j++) x[j] = xt_tanhf(factor * x[j]);
        }
    }
}

/* x [rows, dim] = bfloat16(factor sums), a row; sums in panels that lie `step` numbers apart. */
PAIRS_INLINE void store_row(const float *sums, int64_t step, int64_t dim, float factor, uint16_t *x) {
    for (int64_t d = 0; d < dim; d += VECTOR_16) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(sums + d / PANEL * step + d % PANEL), _mm512_set1_ps(factor));
        _mm256_mask_storeu_epi16(x + d, first_of(dim - d), (__m256i)_mm512_cvtneps_pbh(y));
    }
}

PAIRS_INLINE __m512 load_16(const uint16_t *x, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

#endif
