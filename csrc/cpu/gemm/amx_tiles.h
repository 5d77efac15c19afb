/* amx_tiles.h - what kernels in Intel's AMX tiles share: their configuration, and operands packed as tiles.
 *
 * A tile is 16 rows of 64 bytes: of a left operand 16 rows of 32 elements of k; of a right one 16 pairs along k of 16 columns; of sums
 * 16 rows of 16. Tiles 0 to 3 are sums, 4 and 5 left, 6 and 7 right operands.
 */
#pragma once

#include "bf16_pairs.h"

#if defined(XT_BF16_TILES) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define XT_AMX_TILES 1

#ifndef TILES_FAST
#define TILES_FAST __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))
#endif
#define TILES_INLINE TILES_FAST static inline __attribute__((always_inline))

#define K_STEP 32     /* elements of k in a tile */
#define TILE_PAIRS 16 /* of k, in a row of a tile: 64 bytes */
#define HEIGHT 16     /* rows of a tile */
#define TILE_BYTES 1024

/* The shape is a constant: gcc takes the instruction to read 8 bytes alone, and would not write the rest of a variable. */
TILES_FAST static void configure(void) {
    static const struct {
        uint8_t palette, start_row, unused[14];
        uint16_t bytes[16]; /* of a row */
        uint8_t rows[16];
    } shape = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shape);
}

TILES_FAST static void release(void) { _tile_release(); }

/* ---- packing ----------------------------------------------------------------------------------------------------------------- */

static __mmask32 first_of_32(int64_t count) { return count >= 32 ? 0xffffffffu : (1u << count) - 1; }

/* x [rows, ld] -> tiles [k / 32][16][32]; rows that are not there, and what is behind k, become zeros. */
TILES_FAST static void pack_tiles(const uint16_t *x, int64_t ld, int64_t k, int64_t rows, char *out) {
    for (int64_t i = 0; i < k; i += K_STEP) {
        __mmask32 mask = first_of_32(k - i);
        for (int64_t row = 0; row < HEIGHT; row++, out += 64)
            _mm512_storeu_si512(out, row < rows ? _mm512_maskz_loadu_epi16(mask, x + row * ld + i) : _mm512_setzero_si512());
    }
}

/* x [k, ld], its columns being rows of op(A) -> as many times 16 rows as hold them, `step` bytes apart, as tiles like those. */
TILES_FAST static void pack_transposed(const uint16_t *x, int64_t ld, int64_t k, int64_t rows, char *out, int64_t step) {
    for (int64_t i = 0; i < k; i += K_STEP)
        for (int64_t m = 0; m < rows; m += HEIGHT) {
            char *to = out + m / HEIGHT * step + i / K_STEP * TILE_BYTES;
            __mmask16 mask = first_of(rows - m);
            __m512i r[16];
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                int64_t at = i + 2 * j;
                r[j] = at < k ? interleave(x + at * ld + m, ld, at + 1 == k, mask) : _mm512_setzero_si512();
            }
            transpose_16(r);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) _mm512_storeu_si512(to + j * 64, r[j]);
        }
}

#endif
