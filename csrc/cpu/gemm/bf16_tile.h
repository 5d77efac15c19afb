/* bf16_tile.h - the inner loop of bf16.c and the layouts it reads, in AVX512-BF16 instructions.
 *
 * vdpbf16ps adds two products of bfloat16 to each float32 sum: sum = fma(a1, b1, sum), then sum = fma(a0, b0, sum), the odd element of
 * the pair first, each rounded to nearest even, with subnormal inputs and results taken as zero whatever MXCSR says. (Intel's manual,
 * and the same bits on an AMD Zen 4.) So an operand is read in pairs along k: two neighbours of 16 bits are one number of 32.
 *
 * Packed op(B) is panels of 64 columns, [pairs][64] pairs; a K that is odd ends in a pair with a zero. A tile of 16 of its columns is
 * also what an AMX unit loads.
 */
#pragma once

#include "cpu/kernel.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 9 : defined(__GNUC__) && __GNUC__ >= 10)
#define XT_BF16_TILES 1
#include <immintrin.h>

#define PAIRS_FAST __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define PAIRS_INLINE PAIRS_FAST static inline __attribute__((always_inline))

#define TILE_ROWS 6  /* of C in registers: 6 rows of 4 vectors, 24 of the 32 registers */
#define PANEL 64     /* columns of C in registers */
#define A_PANEL 12   /* rows of a packed panel of op(A): two tiles */
#define VECTOR_16 16 /* numbers of float32 in a vector */

typedef struct Tile {
    const char *a;         /* op(A)[row 0, first pair] */
    int64_t a_row, a_pair; /* bytes from row to row and from pair to pair */
    const uint32_t *b;     /* [pairs][64] */
    int64_t pairs;
    bool odd;         /* after them, one more element of k of A, whose neighbour in memory is not read */
    float *sums;      /* [rows][64]: sums of earlier pairs, and of these where more follow */
    bool first, last; /* whether no pairs came before; whether none come after */
    void *c;          /* [rows, columns] */
    int64_t ldc;
    bool wide; /* C is float32 */
    float alpha, beta;
    __mmask16 mask; /* columns of the last vector */
} Tile;

/* C = alpha sum + beta C of one vector: the columns of `mask` at c, element `at`. */
PAIRS_INLINE void store_sums(const Tile *t, __m512 sum, int64_t at, __mmask16 mask) {
    if (t->alpha != 1.0f) sum = _mm512_mul_ps(sum, _mm512_set1_ps(t->alpha));
    if (t->wide) {
        float *c = (float *)t->c + at;
        if (t->beta != 0.0f) sum = _mm512_fmadd_ps(_mm512_set1_ps(t->beta), _mm512_maskz_loadu_ps(mask, c), sum);
        _mm512_mask_storeu_ps(c, mask, sum);
        return;
    }
    uint16_t *c = (uint16_t *)t->c + at;
    if (t->beta != 0.0f) {
        __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, c)), 16);
        sum = _mm512_fmadd_ps(_mm512_set1_ps(t->beta), _mm512_castsi512_ps(bits), sum);
    }
    _mm256_mask_storeu_epi16(c, mask, (__m256i)_mm512_cvtneps_pbh(sum));
}

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
            if (t->last) store_sums(t, sum[i][v], i * t->ldc + v * VECTOR_16, v == vectors - 1 ? t->mask : 0xffff);
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

/* ---- packing ----------------------------------------------------------------------------------------------------------------- */

/* Rows 2 pair and 2 pair + 1 of x [k, ld], `columns` (16 at most) of them, become pairs. A row beyond k is zeros. */
PAIRS_INLINE __m512i interleave(const uint16_t *x, int64_t ld, bool alone, __mmask16 columns) {
    __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, x));
    if (alone) return even;
    __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, x + ld));
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline __mmask16 first_of(int64_t count) { return (__mmask16)(count >= 16 ? 0xffff : (1 << (count > 0 ? count : 0)) - 1); }

#define PACK_ROWS 8 /* of k at a time: rows a power of two apart share the 8 lines of a set of the L1 cache */

/* x [k, ld] -> panels of `width` (12 or 64) of its columns, [pairs][width] pairs each, `step` pairs apart. Columns that are not there
 * become zeros. Whole vectors are stored: of 12, the next pair covers what is too much, and 4 numbers behind the panel are lost. */
PAIRS_INLINE void pack_rows(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, const int width, uint32_t *out,
                            int64_t step) {
    for (int64_t i = 0; i < k; i += PACK_ROWS)
        for (int64_t c = 0; c < columns; c += width) {
            uint32_t *to = out + c / width * step + i / 2 * width;
            __mmask16 mask[4];
            for (int v = 0; v < width; v += VECTOR_16) mask[v / VECTOR_16] = first_of(least(columns - c, width) - v);
            for (int64_t row = i; row < k && row < i + PACK_ROWS; row += 2, to += width)
                for (int v = 0; v < width; v += VECTOR_16)
                    _mm512_storeu_si512(to + v, interleave(x + row * ld + c + v, ld, row + 1 == k, mask[v / VECTOR_16]));
        }
}
PAIRS_FAST static inline void pack_rows_a(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out, int64_t step) {
    pack_rows(x, ld, k, columns, A_PANEL, out, step);
}
PAIRS_FAST static inline void pack_rows_b(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out, int64_t step) {
    pack_rows(x, ld, k, columns, PANEL, out, step);
}

/* 16 rows of 16 numbers of 32 bits become their transpose. */
PAIRS_INLINE void transpose_16(__m512i r[16]) {
    __m512i s[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* r[i + j], in each lane of 128 bits: element j of the lane of rows i to i + 3 */
        r[i] = _mm512_unpacklo_epi64(s[i], s[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(s[i], s[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(s[i + 1], s[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(s[i + 1], s[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) { /* lanes of four registers: a transpose of 4 x 4 of them */
        __m512i low = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), high = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88), high2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
        s[j] = _mm512_shuffle_i32x4(low, low2, 0x88);
        s[4 + j] = _mm512_shuffle_i32x4(high, high2, 0x88);
        s[8 + j] = _mm512_shuffle_i32x4(low, low2, 0xdd);
        s[12 + j] = _mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = s[i];
}

/* x [columns, ld], pairs along its rows -> [pairs][64] pairs. */
PAIRS_FAST static inline void pack_columns(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out) {
    for (int64_t i = 0; i < k; i += 32) {
        int64_t left = k - i, pairs = left >= 32 ? 16 : (left + 1) / 2;
        __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
        for (int64_t v = 0; v < PANEL; v += VECTOR_16) {
            __m512i r[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++)
                r[j] = v + j < columns ? _mm512_maskz_loadu_epi16(mask, x + (v + j) * ld + i) : _mm512_setzero_si512();
            transpose_16(r);
            uint32_t *to = out + i / 2 * PANEL + v;
            if (pairs == 16) {
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) _mm512_storeu_si512(to + j * PANEL, r[j]);
            } else {
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++)
                    if (j < pairs) _mm512_storeu_si512(to + j * PANEL, r[j]);
            }
        }
    }
}

#endif
