/* bf16.c - the matrix product of bfloat16 with the CPU's own instruction for it, vdpbf16ps.
 *
 *     for each block of rows (a thread's)        op(A) is read where it lies; packed, if it is stored transposed
 *       for each panel, each block of k          128 KiB of op(B), that stay in the cache
 *         for each 6 rows                        6 x 64 sums in registers (bf16_tile.h)
 *
 * Each element of C is one chain of float32 sums over k, from 0 upwards by pairs, and rounded once. So no cut of the work changes a bit,
 * and rows, columns and K are cut to suit threads and caches. Subnormal numbers count as zero.
 */
#include "bf16_tile.h"
#include "bf16_work.h"

#ifdef XT_BF16_TILES

#define K_BLOCK 1024 /* elements of k that a panel of op(B) has in the cache */

/* Pairs from one packed panel of op(A) to the next. */
static int64_t a_step(const XtBf16Work *work) { return work->pairs * A_PANEL + 16; }

/* Bytes of scratch for a piece: sums between blocks of k, and op(A) packed. */
static size_t piece_bytes(const XtBf16Work *work) {
    const XtGemm *p = work->p;
    size_t sums = p->k > K_BLOCK ? (size_t)(work->rows * PANEL) * sizeof(float) : 0;
    return sums + (p->trans_a ? (size_t)(xt_divide_up(work->rows, A_PANEL) * a_step(work)) * sizeof(uint32_t) : 0);
}

/* Rows [m, m + rows) and panels [first, last) of the chunk. */
static void multiply_block(const XtBf16Work *work, int64_t m, int64_t rows, int64_t first, int64_t last, void *room) {
    const XtGemm *p = work->p;
    int64_t pairs = work->pairs, step = a_step(work);
    float *sums = room;                                                                /* [rows][64] */
    uint32_t *a_room = (uint32_t *)(sums + (p->k > K_BLOCK ? work->rows * PANEL : 0)); /* panels of 12 rows, [pairs][12] */
    const uint16_t *a = (const uint16_t *)p->a + work->at.a;
    if (p->trans_a) pack_rows_a(a + m, p->lda, p->k, rows, a_room, step);
    size_t size = xt_dtype_size(p->dtype_c);
    Tile t = {.a_row = p->trans_a ? 4 : 2 * p->lda,
              .a_pair = p->trans_a ? 4 * A_PANEL : 4,
              .store = {NULL, p->ldc, p->dtype_c == XT_FLOAT32, (float)p->alpha, (float)p->beta}};
    for (int64_t j = first; j < last; j++) {
        int64_t n = work->column + j * PANEL, columns = least(p->n - n, PANEL), vectors = xt_divide_up(columns, VECTOR_16);
        t.mask = first_of(columns - (vectors - 1) * VECTOR_16);
        for (int64_t k = 0; k < p->k; k += K_BLOCK) {
            int64_t depth = least(p->k - k, K_BLOCK);
            t.b = work->b + (j * pairs + k / 2) * PANEL;
            t.pairs = p->trans_a ? (depth + 1) / 2 : depth / 2;
            t.odd = !p->trans_a && depth % 2;
            t.first = k == 0, t.last = k + depth == p->k;
            for (int64_t i = 0; i < rows; i += TILE_ROWS) {
                const char *packed = (const char *)(a_room + i / A_PANEL * step + k / 2 * A_PANEL + i % A_PANEL);
                t.a = p->trans_a ? packed : (const char *)(a + (m + i) * p->lda + k);
                t.sums = sums + i * PANEL;
                t.store.c = (char *)p->c + (size_t)(work->at.c + (m + i) * p->ldc + n) * size;
                tile_functions[least(rows - i, TILE_ROWS) - 1][vectors - 1](&t);
            }
        }
    }
}

static const XtBf16Kernel kernel = {.panel = PANEL,
                                    .whole_k = 2,
                                    .most_rows = 192,
                                    .step_rows = A_PANEL,
                                    .alone = 2000000,
                                    .pack_rows = pack_rows_b,
                                    .pack_columns = pack_columns,
                                    .room = piece_bytes,
                                    .multiply = multiply_block};

XtStatus xt_gemm_bf16(const XtGemm *p) { return xt_bf16_multiply(p, &kernel); }

bool xt_has_bf16_pairs(void) {
    static int answer; /* atomic: 0 until it has been asked */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known) return known == 1;
    __builtin_cpu_init();
    bool whole = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    known = whole && __builtin_cpu_supports("avx512bf16") ? 1 : 2;
    __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    return known == 1;
}
#else
XtStatus xt_gemm_bf16(const XtGemm *p) {
    (void)p;
    return xt_error(XT_NOT_IMPLEMENTED, "matmul: bf16 is not built for this CPU");
}
bool xt_has_bf16_pairs(void) { return false; }
#endif

const char *xt_gemm_bf16_supports(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    const char *reason = xt_bf16_fits(p);
    if (reason) return reason;
    return xt_has_bf16_pairs() ? xt_gemm_plain(p) : "this CPU has no AVX512-BF16 instructions";
}
