/* amx.c - the matrix product of bfloat16 in the tile registers of Intel's AMX, tdpbf16ps.
 *
 *     for each block of rows (a thread's)        op(A) is read where it lies, by tiles of 16 rows and 32 k; packed, if it cannot be
 *       for each panel of 32 columns, each block of k      32 KiB of op(B), that stay in the L1 cache
 *         for each 32 rows                       four tiles of 16 x 16 sums, beside two of A and two of B: all eight registers
 *
 * tdpbf16ps adds to each float32 of C the products of 32 k: even = fma(a0, b0, even) over the even elements of their 16 pairs, from 0
 * upwards, odd alike, then C = C + (even + odd). Each step is rounded to nearest even, with subnormal inputs and results taken as zero
 * whatever MXCSR says (Intel's manual). K is cut at multiples of 32 alone, and zeros fill its end, which change no sum. So the bits of an
 * element follow from its operands: rows, columns and blocks of k are cut to suit threads and caches. They are not those of vdpbf16ps.
 *
 * Linux grants tile registers to a process that asks for them. Each of its signal frames is then 8 KiB larger, and Linux refuses where a
 * thread's stack for signals has no room for that. By Linux' documentation all threads have what the process has, also those that run
 * already, and so do children. A piece configures the tiles of its thread and releases them at its end, so that switching threads stays
 * as fast as before for what is not a product.
 */
#include "amx_tiles.h"
#include "bf16_work.h"

#ifdef XT_AMX_TILES

#include <cpuid.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PANEL 32                /* columns of C in registers: two tiles */
#define PANEL_BYTES (PANEL * 4) /* a row of a panel: its pairs, or its sums */
#define K_BLOCK 512             /* elements of k that a panel of op(B) has in the cache */
#define MOST_ROWS 256           /* of a piece */

/* ---- one block of C ------------------------------------------------------------------------------------------------------------ */

/* 16 rows of op(A): the tile of k [32 s, 32 s + 32) lies at a + s step, with `row` bytes from row to row. */
typedef struct Rows {
    const char *a;
    int64_t row, step;
} Rows;

/* sums [32][32] = what is there, unless this is the first block of k, and the products of `steps` tiles. b: [16 steps][32] pairs. two_*:
 * more than 16 rows, more than 16 columns; constants where it is inlined. */
TILES_INLINE void sum_tiles(const Rows *rows, const char *b, int64_t steps, float *sums, bool first, const bool two_rows,
                            const bool two_columns) {
    const char *a0 = rows[0].a, *a1 = two_rows ? rows[1].a : a0;
    const int64_t row0 = rows[0].row, step0 = rows[0].step, row1 = two_rows ? rows[1].row : 0, step1 = two_rows ? rows[1].step : 0;
    _tile_zero(0);
    if (two_columns) _tile_zero(1);
    if (two_rows) _tile_zero(2);
    if (two_rows && two_columns) _tile_zero(3);
    if (!first) {
        _tile_loadd(0, sums, PANEL_BYTES);
        if (two_columns) _tile_loadd(1, sums + 16, PANEL_BYTES);
        if (two_rows) _tile_loadd(2, sums + HEIGHT * PANEL, PANEL_BYTES);
        if (two_rows && two_columns) _tile_loadd(3, sums + HEIGHT * PANEL + 16, PANEL_BYTES);
    }
    for (int64_t s = 0; s < steps; s++, b += TILE_PAIRS * PANEL_BYTES, a0 += step0, a1 += step1) {
        _tile_loadd(6, b, PANEL_BYTES);
        _tile_loadd(4, a0, row0);
        _tile_dpbf16ps(0, 4, 6);
        if (two_columns) {
            _tile_loadd(7, b + 64, PANEL_BYTES);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, a1, row1);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (two_rows && two_columns) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, PANEL_BYTES);
    if (two_columns) _tile_stored(1, sums + 16, PANEL_BYTES);
    if (two_rows) _tile_stored(2, sums + HEIGHT * PANEL, PANEL_BYTES);
    if (two_rows && two_columns) _tile_stored(3, sums + HEIGHT * PANEL + 16, PANEL_BYTES);
}

/* The sums of `rows` rows, [rows][32], become C. */
TILES_INLINE void write_block(const Store *to, const float *sums, int64_t rows, int64_t columns) {
    if (columns == PANEL && !to->wide && to->alpha == 1.0f && to->beta == 0.0f) {
        for (int64_t i = 0; i < rows; i++, sums += PANEL) {
            __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(sums + 16), _mm512_loadu_ps(sums));
            _mm512_storeu_si512((uint16_t *)to->c + i * to->ldc, (__m512i)both);
        }
        return;
    }
    for (int64_t i = 0; i < rows; i++, sums += PANEL)
        for (int64_t v = 0; v < columns; v += VECTOR_16)
            store_sums(to, _mm512_loadu_ps(sums + v), i * to->ldc + v, first_of(columns - v));
}

/* Rows and columns of C: 1 to 32 of each. */
TILES_FAST static void multiply_one(const Rows *rows, const char *b, int64_t steps, float *sums, bool first, const Store *to,
                                    int64_t count, int64_t columns) {
    if (count > HEIGHT && columns > 16) sum_tiles(rows, b, steps, sums, first, true, true);
    else if (count > HEIGHT) sum_tiles(rows, b, steps, sums, first, true, false);
    else if (columns > 16) sum_tiles(rows, b, steps, sums, first, false, true);
    else sum_tiles(rows, b, steps, sums, first, false, false);
    if (to) write_block(to, sums, count, columns);
}

/* ---- packing ----------------------------------------------------------------------------------------------------------------- */

TILES_FAST static void pack_rows_b(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out, int64_t step) {
    pack_rows(x, ld, k, columns, PANEL, out, step);
}
TILES_FAST static void pack_columns_b(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out) {
    pack_width(x, ld, k, columns, PANEL, out);
}

/* ---- a piece ----------------------------------------------------------------------------------------------------------------- */

/* Whether op(A) does not lie in memory as tiles: a row ends in one, or is a column. */
static bool packs_a(const XtGemm *p) { return p->trans_a || p->k % K_STEP != 0; }

static int64_t steps_of(const XtBf16Work *work) { return work->pairs / TILE_PAIRS; }

/* Blocks of 32 x 32 sums that a piece keeps: of all its rows, where K has several blocks. */
static int64_t kept_blocks(const XtBf16Work *work) { return work->p->k > K_BLOCK ? xt_divide_up(work->rows, 2 * HEIGHT) : 1; }

static size_t piece_bytes(const XtBf16Work *work) {
    int64_t tiles = packs_a(work->p) ? xt_divide_up(work->rows, HEIGHT) : 1; /* or those of the last rows, fewer than 16 */
    return (size_t)(kept_blocks(work) * 4 * TILE_BYTES + tiles * steps_of(work) * TILE_BYTES);
}

/* Where 16 rows each of op(A), from row m on, are read. */
static void lay_rows(const XtBf16Work *work, int64_t m, int64_t rows, char *room, Rows *out) {
    const XtGemm *p = work->p;
    const uint16_t *a = (const uint16_t *)p->a + work->at.a;
    int64_t step = steps_of(work) * TILE_BYTES;
    if (p->trans_a) pack_transposed(a + m, p->lda, p->k, rows, room, step);
    for (int64_t i = 0; i < rows; i += HEIGHT, out++) {
        const uint16_t *from = a + (m + i) * p->lda;
        *out = (Rows){room, 64, TILE_BYTES};
        if (!p->trans_a) {
            if (!packs_a(p) && rows - i >= HEIGHT) {
                *out = (Rows){(const char *)from, 2 * p->lda, 64};
                continue;
            }
            pack_tiles(from, p->lda, p->k, least(rows - i, HEIGHT), room);
        }
        room += step;
    }
    __asm__ volatile("" ::: "memory"); /* gcc does not know what a tile is loaded from: it shall have been written */
}

/* Rows [m, m + rows) and panels [first, last) of the chunk. */
static void multiply_block(const XtBf16Work *work, int64_t m, int64_t rows, int64_t first, int64_t last, void *room) {
    const XtGemm *p = work->p;
    float *sums = room; /* [rows][32], or of one block */
    int64_t blocks = kept_blocks(work);
    size_t size = xt_dtype_size(p->dtype_c);
    Rows tiles[MOST_ROWS / HEIGHT];
    Store to = {NULL, p->ldc, p->dtype_c == XT_FLOAT32, (float)p->alpha, (float)p->beta};
    lay_rows(work, m, rows, (char *)room + blocks * 4 * TILE_BYTES, tiles);
    configure();
    for (int64_t j = first; j < last; j++) {
        int64_t n = work->column + j * PANEL, columns = least(p->n - n, PANEL);
        for (int64_t k = 0; k < p->k; k += K_BLOCK) {
            int64_t depth = least(p->k - k, K_BLOCK);
            const char *b = (const char *)(work->b + (j * work->pairs + k / 2) * PANEL);
            for (int64_t i = 0; i < rows; i += 2 * HEIGHT) {
                Rows at[2];
                memcpy(at, tiles + i / HEIGHT, (rows - i > HEIGHT ? 2 : 1) * sizeof *at);
                for (int r = 0; r < 2; r++)
                    if (r == 0 || rows - i > HEIGHT) at[r].a += k / K_STEP * at[r].step;
                to.c = (char *)p->c + (size_t)(work->at.c + (m + i) * p->ldc + n) * size;
                multiply_one(at, b, xt_divide_up(depth, K_STEP), blocks > 1 ? sums + i * PANEL : sums, k == 0,
                             k + depth == p->k ? &to : NULL, least(rows - i, 2 * HEIGHT), columns);
            }
        }
    }
    release();
}

static const XtBf16Kernel kernel = {.panel = PANEL,
                                    .whole_k = K_STEP,
                                    .most_rows = MOST_ROWS,
                                    .step_rows = 2 * HEIGHT,
                                    .alone = 8000000,
                                    .pack_rows = pack_rows_b,
                                    .pack_columns = pack_columns_b,
                                    .room = piece_bytes,
                                    .multiply = multiply_block};

XtStatus xt_gemm_amx(const XtGemm *p) { return xt_bf16_multiply(p, &kernel); }

/* ---- whether there are tiles --------------------------------------------------------------------------------------------------- */

#ifndef ARCH_REQ_XCOMP_PERM
#define ARCH_REQ_XCOMP_PERM 0x1023
#endif
#define TILE_DATA 18 /* the number of this state; its configuration is 17 */

/* NULL once the process may use tiles, or why it may not. */
static const char *ask_for_tiles(void) {
    const char *wanted = getenv("XTRAIN_AMX");
    if (wanted && strcmp(wanted, "0") == 0) return "XTRAIN_AMX is 0";
    const char *none = "this CPU has no AMX for bfloat16";
    unsigned a, b, c, d, low, high;
    if (!xt_has_bf16_pairs() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return none;
    if (!(d >> 22 & 1) || !(d >> 24 & 1)) return none;                  /* AMX-BF16, AMX-TILE */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return none; /* OSXSAVE: xgetbv may be asked */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low >> 17 & 3) != 3) return "the kernel does not keep AMX tiles";
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) != 0) return "the kernel refuses AMX tiles to this process";
    return NULL;
}

/* Asks once: what came to be refused later must not change the choice. */
const char *xt_amx_refusal(void) {
    static const char *answer; /* atomic: NULL until it has been asked */
    static const char granted[] = "granted";
    const char *known = __atomic_load_n(&answer, __ATOMIC_ACQUIRE);
    if (!known) {
        const char *reason = ask_for_tiles(), *expected = NULL;
        known = reason ? reason : granted;
        if (!__atomic_compare_exchange_n(&answer, &expected, known, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) known = expected;
    }
    return known == granted ? NULL : known;
}
#else
XtStatus xt_gemm_amx(const XtGemm *p) {
    (void)p;
    return xt_error(XT_NOT_IMPLEMENTED, "matmul: amx is not built for this CPU");
}
const char *xt_amx_refusal(void) { return "amx is not built for this CPU"; }
#endif

const char *xt_gemm_amx_supports(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    const char *reason = xt_bf16_fits(p);
    if (!reason) reason = xt_gemm_plain(p);
    return reason ? reason : xt_amx_refusal();
}
