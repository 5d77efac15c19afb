/* amx_block.h - blocks of 32 x 32 sums in AMX tiles, and their operands.
 *
 * Each product is sums [32][32] (+)= left [32][k] right [k][32], in steps of 32 k:
 *
 *     left     [tiles of 16 rows][steps][16][32]           numbers of 16 bits, a tile of 1 KiB after the other
 *     right    [panels of 32 columns][steps][16][32]       pairs along k
 *     sums     [2 of rows][2 of columns][16][16]           float32, the four tiles
 *
 * Zeros fill what rows, columns and k lack. A product takes 16 cycles of the tile unit for each of 4 tiles and step, in which the vector
 * units are free: products wait in a queue, and loops over vectors take them from there, a few at a time.
 */
#pragma once

#include "bf16_rows.h"
#include "cpu/gemm/amx_tiles.h"

#ifdef XT_AMX_TILES

#define GROUP 32         /* queries, or keys, or columns of D */
#define TILE 256         /* sums of a tile */
#define SUMS (4 * TILE)  /* of a block */
#define LEFT_BYTES 1024  /* of a tile */
#define RIGHT_BYTES 2048 /* of a step: a row of a panel is 128 bytes */
#define QUEUE 32

static int64_t groups_of(int64_t size) { return (size + GROUP - 1) / GROUP; }

/* Numbers of 32 bits of an operand that has `rows` rows, or columns, and k. */
static int64_t operand_size(int64_t rows, int64_t k) { return groups_of(rows) * groups_of(k) * RIGHT_BYTES / 4; }

/* ---- products ---------------------------------------------------------------------------------------------------------------- */

typedef struct Product {
    const char *left, *right;
    int64_t half; /* bytes from the tiles of rows 0-15 to those of rows 16-31 */
    int64_t steps;
    float *sums;
    bool first; /* nothing is there to be added to */
} Product;

/* gcc does not know what a tile is loaded from: it shall have been written. */
TILES_INLINE void multiply(const Product *p) {
    const char *a0 = p->left, *a1 = p->left + p->half, *b = p->right;
    float *sums = p->sums;
    __asm__ volatile("" ::: "memory");
    if (p->first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + TILE, 64);
        _tile_loadd(2, sums + 2 * TILE, 64);
        _tile_loadd(3, sums + 3 * TILE, 64);
    }
    for (int64_t s = 0; s < p->steps; s++, a0 += LEFT_BYTES, a1 += LEFT_BYTES, b += RIGHT_BYTES) {
        _tile_loadd(6, b, 128);
        _tile_loadd(4, a0, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    _tile_stored(2, sums + 2 * TILE, 64);
    _tile_stored(3, sums + 3 * TILE, 64);
    __asm__ volatile("" ::: "memory");
}

/* Products in the order in which they shall run. */
typedef struct Queue {
    Product list[QUEUE];
    int count, done;
} Queue;

/* Runs part / parts of the queue, as far as they have not run: all of it where part is parts, which empties it. */
TILES_INLINE void run_part(Queue *queue, int part, int parts) {
    for (; queue->done * parts < queue->count * part; queue->done++) multiply(queue->list + queue->done);
    if (part == parts) queue->count = queue->done = 0;
}
TILES_FAST static void run_all(Queue *queue) { run_part(queue, 1, 1); }

XT_INLINE void push(Queue *queue, Product product) {
    if (queue->count == QUEUE) run_all(queue);
    queue->list[queue->count++] = product;
}

/* Row i of a block of sums; columns 16 to 31 lie a tile further. */
XT_INLINE float *row_of(float *sums, int64_t i) { return sums + i / HEIGHT * 2 * TILE + i % HEIGHT * 16; }

/* ---- operands ---------------------------------------------------------------------------------------------------------------- */

/* x [rows, k] as left. */
TILES_FAST static void pack_left(const uint16_t *x, int64_t ld, int64_t rows, int64_t k, void *out) {
    char *to = out;
    for (int64_t i = 0; i < groups_of(rows) * GROUP; i += HEIGHT, to += groups_of(k) * LEFT_BYTES)
        pack_tiles(x + i * ld, ld, k, rows - i, to);
}

/* The transpose of x [k, rows] as left. */
TILES_FAST static void pack_left_turned(const uint16_t *x, int64_t ld, int64_t rows, int64_t k, void *out) {
    const int64_t step = groups_of(k) * LEFT_BYTES, tiles = (rows + HEIGHT - 1) / HEIGHT;
    pack_transposed(x, ld, k, rows, out, step);
    if (tiles % 2) memset((char *)out + tiles * step, 0, (size_t)step);
}

/* The transpose of x [columns, k] as right. */
TILES_FAST static void pack_right_turned(const uint16_t *x, int64_t ld, int64_t columns, int64_t k, uint32_t *out) {
    const int64_t size = groups_of(k) * RIGHT_BYTES / 4, used = (k + 1) / 2 * GROUP;
    for (int64_t i = 0; i < columns; i += GROUP, out += size) {
        pack_width(x + i * ld, ld, k, least(columns - i, GROUP), GROUP, out);
        memset(out + used, 0, (size_t)(size - used) * sizeof *out);
    }
}

/* x [k, columns] as right. */
TILES_FAST static void pack_right(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out) {
    const int64_t size = groups_of(k) * RIGHT_BYTES / 4, used = (k + 1) / 2 * GROUP;
    pack_rows(x, ld, k, columns, GROUP, out, size);
    for (int64_t i = 0; i < columns && used < size; i += GROUP, out += size)
        memset(out + used, 0, (size_t)(size - used) * sizeof *out);
}

/* ---- results ----------------------------------------------------------------------------------------------------------------- */

/* x [dim] = bfloat16(factor sums), a row of blocks that follow each other along D. */
TILES_INLINE void store_row(const float *sums, int64_t dim, float factor, uint16_t *x) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int64_t d = 0; d < dim; d += GROUP, sums += SUMS) {
        const __m512 y0 = _mm512_mul_ps(_mm512_loadu_ps(sums), by), y1 = _mm512_mul_ps(_mm512_loadu_ps(sums + TILE), by);
        _mm512_mask_storeu_epi16(x + d, first_of_32(dim - d), (__m512i)_mm512_cvtne2ps_pbh(y1, y0));
    }
}

/* Two vectors of bfloat16, x[0] x[1] ... y[0] y[1] ..., become x[0] y[0] x[1] y[1] ... */
TILES_INLINE __m512i pairs_of(__m512i both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                           19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both);
}

/* x [rows, dim] = bfloat16(factor sums^T) of blocks [32 of D][32 rows] that follow each other along D. Rows 0-3 are columns 0-3, rows 4-7
 * columns 16-19, rows 8-11 columns 4-7, and so on: the order in which differentiate_turned() of amx.c leaves them. */
TILES_FAST static void store_turned(float *sums, int64_t rows, int64_t dim, float factor, uint16_t *x, int64_t ld) {
    const __m512 by = _mm512_set1_ps(factor);
    for (int64_t d = 0; d < dim; d += GROUP, sums += SUMS)
        for (int half = 0; half < 2; half++) {
            __m512i r[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const float *from = row_of(sums, 2 * i) + half * TILE;
                const __m512 y0 = _mm512_mul_ps(_mm512_loadu_ps(from), by), y1 = _mm512_mul_ps(_mm512_loadu_ps(from + 16), by);
                r[i] = pairs_of((__m512i)_mm512_cvtne2ps_pbh(y1, y0));
            }
            transpose_16(r);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                const int64_t row = i / 4 * 8 + i % 4 + 4 * half;
                if (row < rows) _mm512_mask_storeu_epi16(x + row * ld + d, first_of_32(dim - d), r[i]);
            }
        }
}

/* ---- vectors ----------------------------------------------------------------------------------------------------------------- */

TILES_INLINE __m512 combine(__m512i a, __m512i b, const bool largest) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return largest ? _mm512_max_ps(x, y) : _mm512_add_ps(x, y);
}

/* The largest number, or the sum, of each of 16 rows of 16. */
TILES_INLINE __m512 reduce_16(const float *rows, const bool largest) {
    __m512i x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) x[i] = _mm512_castps_si512(_mm512_loadu_ps(rows + 16 * i));
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) /* of four neighbours: two of one row, beside two of the next */
        x[i] = _mm512_castps_si512(
            combine(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]), largest));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) /* a lane has one number of each of four rows */
        x[i] = _mm512_castps_si512(
            combine(_mm512_unpacklo_epi64(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_epi64(x[2 * i], x[2 * i + 1]), largest));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) /* two lanes of four rows, two of the next four */
        x[i] = _mm512_castps_si512(combine(_mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0x88),
                                           _mm512_shuffle_i32x4(x[2 * i], x[2 * i + 1], 0xdd), largest));
    return combine(_mm512_shuffle_i32x4(x[0], x[1], 0x88), _mm512_shuffle_i32x4(x[0], x[1], 0xdd), largest);
}

/* A block of scores becomes tanh(factor s). */
TILES_FAST static void cap_block(float factor, float *s) {
    for (int64_t i = 0; i < SUMS; i++) s[i] = xt_tanhf(factor * s[i]);
}

/* Whether each of rows row ... row + rows - 1 sees each of the 32 keys from `key` on: the ends of what a row sees never fall. */
static bool sees_all(const Sight *sight, int64_t row, int64_t rows, int64_t key) {
    return seen_by(sight, row, 1, key, GROUP).end == GROUP && seen_by(sight, row + rows - 1, 1, key, GROUP).begin == 0;
}

#endif
