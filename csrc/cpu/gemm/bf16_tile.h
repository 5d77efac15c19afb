/* bf16_tile.h - the inner loop of bf16.c and the layouts it reads, in AVX512-BF16 instructions.
 *
 * vdpbf16ps adds two products of bfloat16 to each float32 sum: sum = fma(a1, b1, sum), then sum = fma(a0, b0, sum), the odd element of
 * the pair first, each rounded to nearest even, with subnormal inputs and results taken as zero whatever MXCSR says. (Intel's manual,
 * and the same bits on an AMD Zen 4.) So an operand is read in pairs along k: two neighbours of 16 bits are one number of 32.
 *
 * Packed op(B) is panels of 64 columns, [pairs][64] pairs; a K that is odd ends in a pair with a zero.
 */
#pragma once

#include "bf16_pairs.h"

#ifdef XT_BF16_TILES

#define TILE_ROWS 6 /* of C in registers: 6 rows of 4 vectors, 24 of the 32 registers */
#define PANEL 64    /* columns of C in registers */
#define A_PANEL 12  /* rows of a packed panel of op(A): two tiles */

typedef struct Tile {
    const char *a;         /* op(A)[row 0, first pair] */
    int64_t a_row, a_pair; /* bytes from row to row and from pair to pair */
    const uint32_t *b;     /* [pairs][64] */
    int64_t pairs;
    bool odd;         /* after them, one more element of k of A, whose neighbour in memory is not read */
    float *sums;      /* [rows][64]: sums of earlier pairs, and of these where more follow */
    bool first, last; /* whether no pairs came before; whether none come after */
    Store store;
    __mmask16 mask; /* columns of the last vector */
} Tile;

/* A tile of C over `pairs` pairs of k. rows and vectors are constants where it is inlined: the sums stay in registers. */
PAIRS_INLINE void multiply(const Tile *t, const int rows, const int vectors) {
    __m512 sum[TILE_ROWS][4];
    const char *a = t->a;
    const uint32_t *b = t->b;
    int64_t a_row = t->a_row, a_pair = t->a_pair;
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            sum[i][v] = t->first ? _mm512_setzero_ps() : _mm512_loadu_ps(t->sums + i * PANEL + v * VECTOR_16);
    for (int64_t pair = 0; pair < t->pairs; pair++, a += a_pair, b += PANEL) {
        __m512bh column[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) column[v] = (__m512bh)_mm512_loadu_si512(b + v * VECTOR_16);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            int32_t both;
            memcpy(&both, a + i * a_row, sizeof both);
            __m512bh row = (__m512bh)_mm512_set1_epi32(both);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], row, column[v]);
        }
    }
    if (t->odd) {
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            uint16_t one;
            memcpy(&one, a + i * a_row, sizeof one);
            __m512bh row = (__m512bh)_mm512_set1_epi32(one);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[i][v] = _mm512_dpbf16_ps(sum[i][v], row, (__m512bh)_mm512_loadu_si512(b + v * VECTOR_16));
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            if (t->last) store_sums(&t->store, sum[i][v], i * t->store.ldc + v * VECTOR_16, v == vectors - 1 ? t->mask : 0xffff);
            else _mm512_storeu_ps(t->sums + i * PANEL + v * VECTOR_16, sum[i][v]);
        }
}

typedef void (*TileFunction)(const Tile *);
/* clang-format off */
#define TILE(rows, vectors) PAIRS_FAST static void tile_##rows##_##vectors(const Tile *t) { multiply(t, rows, vectors); }
#define TILES(rows) TILE(rows, 1) TILE(rows, 2) TILE(rows, 3) TILE(rows, 4)
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
#define NAMES(rows) {tile_##rows##_1, tile_##rows##_2, tile_##rows##_3, tile_##rows##_4}
static const TileFunction tile_functions[TILE_ROWS][4] = {NAMES(1), NAMES(2), NAMES(3), NAMES(4), NAMES(5), NAMES(6)};
/* clang-format on */

PAIRS_FAST static inline void pack_rows_a(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out, int64_t step) {
    pack_rows(x, ld, k, columns, A_PANEL, out, step);
}
PAIRS_FAST static inline void pack_rows_b(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out, int64_t step) {
    pack_rows(x, ld, k, columns, PANEL, out, step);
}
PAIRS_FAST static inline void pack_columns(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out) {
    pack_width(x, ld, k, columns, PANEL, out);
}

#endif
