/* bf16_pairs.h - vectors of 16 that products of bfloat16 share: sums that become C, and operands packed as pairs along k.
 *
 * Two neighbours of 16 bits along k are one number of 32. A K that is odd ends in a pair with a zero.
 */
#pragma once

#include "bf16_work.h"
#include "cpu/kernel.h"

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 9 : defined(__GNUC__) && __GNUC__ >= 10)
#define XT_BF16_TILES 1
#include <immintrin.h>

#ifndef PAIRS_FAST
#define PAIRS_FAST __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#endif
#define PAIRS_INLINE PAIRS_FAST static inline __attribute__((always_inline))
#define VECTOR_16 16 /* numbers of float32 in a vector */

static inline __mmask16 first_of(int64_t count) { return (__mmask16)(count >= 16 ? 0xffff : (1 << (count > 0 ? count : 0)) - 1); }

/* What becomes of a sum. */
typedef struct Store {
    void *c; /* [rows, columns] */
    int64_t ldc;
    bool wide; /* C is float32 */
    float alpha, beta;
} Store;

/* C = alpha sum + beta C of one vector: the columns of `mask` at c, element `at`. */
PAIRS_INLINE void store_sums(const Store *t, __m512 sum, int64_t at, __mmask16 mask) {
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

/* ---- packing ----------------------------------------------------------------------------------------------------------------- */

/* Rows 2 pair and 2 pair + 1 of x [k, ld], `columns` (16 at most) of them, become pairs. A row beyond k is zeros. */
PAIRS_INLINE __m512i interleave(const uint16_t *x, int64_t ld, bool alone, __mmask16 columns) {
    __m512i even = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, x));
    if (alone) return even;
    __m512i odd = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(columns, x + ld));
    return _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
}

#define PACK_ROWS 8 /* of k at a time: rows a power of two apart share the 8 lines of a set of the L1 cache */

/* x [k, ld] -> panels of `width` (12, 32 or 64) of its columns, [pairs][width] pairs each, `step` pairs apart. Columns that are not there
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

/* x [columns, ld], pairs along its rows -> [pairs][width] pairs. */
PAIRS_INLINE void pack_width(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, const int width, uint32_t *out) {
    for (int64_t i = 0; i < k; i += 32) {
        int64_t left = k - i, pairs = left >= 32 ? 16 : (left + 1) / 2;
        __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
        for (int v = 0; v < width; v += VECTOR_16) {
            __m512i r[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++)
                r[j] = v + j < columns ? _mm512_maskz_loadu_epi16(mask, x + (v + j) * ld + i) : _mm512_setzero_si512();
            transpose_16(r);
            uint32_t *to = out + i / 2 * width + v;
            if (pairs == 16) {
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++) _mm512_storeu_si512(to + j * width, r[j]);
            } else {
#pragma GCC unroll 16
                for (int j = 0; j < 16; j++)
                    if (j < pairs) _mm512_storeu_si512(to + j * width, r[j]);
            }
        }
    }
}

#endif
