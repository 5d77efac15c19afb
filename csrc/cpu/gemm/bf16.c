/* bf16.c - the matrix product of bfloat16 with the CPU's own instruction for it, vdpbf16ps.
 *
 *     for each chunk of columns                  op(B) packed once, by all threads, into panels of 64 columns
 *       for each block of rows (a thread's)      op(A) is read where it lies; packed, if it is stored transposed
 *         for each panel, each block of k        64 KiB of op(B), that stay in the cache
 *           for each 6 rows                      6 x 64 sums in registers (bf16_tile.h)
 *
 * Each element of C is one chain of float32 sums over k, from 0 upwards by pairs, and rounded once. So no cut of the work changes a bit,
 * and rows, columns and K are cut to suit threads and caches. Subnormal numbers count as zero.
 */
#include "bf16_tile.h"
#include "gemm.h"

#define MOST_K (1 << 18) /* 32 MiB for a packed panel, where a single column has 512 KiB */

#ifdef XT_BF16_TILES

#define K_BLOCK 1024    /* elements of k that a panel of op(B) has in the cache: 64 KiB */
#define MOST_ROWS 192   /* of a piece */
#define CHUNK (8 << 20) /* bytes of packed op(B) at once */
#define PACK_K 128      /* elements of k in a piece of packing */
#define PACK_PANELS 4   /* panels in one */
#define ALONE 2000000   /* multiply-adds that are not worth a second thread, some 20 us */

typedef struct Product {
    const XtGemm *p;
    XtGemmOffsets at;
    uint32_t *b; /* [panels][pairs][64] of the columns from `column` on */
    int64_t column, columns, panels, pairs;
    int64_t rows, tiles_n; /* of a piece; pieces side by side */
} Product;

static int64_t divide_up(int64_t size, int64_t by) { return (size - 1) / by + 1; }

/* Piece i of packing: elements [k, k + depth) of panels [j, last). */
static void pack_piece(const Product *product, int64_t i) {
    const XtGemm *p = product->p;
    int64_t blocks = divide_up(p->k, PACK_K), k = i % blocks * PACK_K, depth = least(p->k - k, PACK_K);
    int64_t j = i / blocks * PACK_PANELS, last = least(product->panels, j + PACK_PANELS), step = product->pairs * PANEL;
    int64_t n = product->column + j * PANEL, columns = least(product->column + product->columns, n + PACK_PANELS * PANEL) - n;
    const uint16_t *b = (const uint16_t *)p->b + product->at.b;
    uint32_t *out = product->b + (j * product->pairs + k / 2) * PANEL;
    if (!p->trans_b) {
        pack_rows_b(b + k * p->ldb + n, p->ldb, depth, columns, out, step);
        return;
    }
    for (; j < last; j++, n += PANEL, out += step) pack_columns(b + n * p->ldb + k, p->ldb, depth, least(p->n - n, PANEL), out);
}

static XtStatus pack_pieces(void *context, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) pack_piece(context, i);
    return XT_OK;
}

/* Pairs from one packed panel of op(A) to the next. */
static int64_t a_step(const Product *product) { return product->pairs * A_PANEL + 16; }

/* Bytes of scratch for a piece: sums between blocks of k, and op(A) packed. */
static size_t piece_bytes(const Product *product) {
    const XtGemm *p = product->p;
    size_t sums = p->k > K_BLOCK ? (size_t)(product->rows * PANEL) * sizeof(float) : 0;
    return sums + (p->trans_a ? (size_t)(divide_up(product->rows, A_PANEL) * a_step(product)) * sizeof(uint32_t) : 0);
}

/* Rows [m, m + rows) and panels [first, last) of the chunk. */
static void multiply_block(const Product *product, int64_t m, int64_t rows, int64_t first, int64_t last, void *room) {
    const XtGemm *p = product->p;
    int64_t pairs = product->pairs, step = a_step(product);
    float *sums = room;                                                                   /* [rows][64] */
    uint32_t *a_room = (uint32_t *)(sums + (p->k > K_BLOCK ? product->rows * PANEL : 0)); /* panels of 12 rows, [pairs][12] */
    const uint16_t *a = (const uint16_t *)p->a + product->at.a;
    if (p->trans_a) pack_rows_a(a + m, p->lda, p->k, rows, a_room, step);
    size_t size = xt_dtype_size(p->dtype_c);
    Tile t = {.a_row = p->trans_a ? 4 : 2 * p->lda, .a_pair = p->trans_a ? 4 * A_PANEL : 4, .ldc = p->ldc};
    t.wide = p->dtype_c == XT_FLOAT32, t.alpha = (float)p->alpha, t.beta = (float)p->beta;
    for (int64_t j = first; j < last; j++) {
        int64_t n = product->column + j * PANEL, columns = least(p->n - n, PANEL), vectors = divide_up(columns, VECTOR_16);
        t.mask = first_of(columns - (vectors - 1) * VECTOR_16);
        for (int64_t k = 0; k < p->k; k += K_BLOCK) {
            int64_t depth = least(p->k - k, K_BLOCK);
            t.b = product->b + (j * pairs + k / 2) * PANEL;
            t.pairs = p->trans_a ? (depth + 1) / 2 : depth / 2;
            t.odd = !p->trans_a && depth % 2;
            t.first = k == 0, t.last = k + depth == p->k;
            for (int64_t i = 0; i < rows; i += TILE_ROWS) {
                const char *packed = (const char *)(a_room + i / A_PANEL * step + k / 2 * A_PANEL + i % A_PANEL);
                t.a = p->trans_a ? packed : (const char *)(a + (m + i) * p->lda + k);
                t.sums = sums + i * PANEL;
                t.c = (char *)p->c + (size_t)(product->at.c + (m + i) * p->ldc + n) * size;
                tile_functions[least(rows - i, TILE_ROWS) - 1][vectors - 1](&t);
            }
        }
    }
}

static XtStatus multiply_pieces(void *context, int64_t begin, int64_t end) {
    const Product *product = context;
    void *room;
    XT_CHECK(xt_scratch(piece_bytes(product), &room));
    for (int64_t i = begin; i < end; i++) {
        int64_t m = i / product->tiles_n * product->rows, tile = i % product->tiles_n;
        int64_t first = product->panels * tile / product->tiles_n, last = product->panels * (tile + 1) / product->tiles_n;
        multiply_block(product, m, least(product->p->m - m, product->rows), first, last, room);
    }
    return XT_OK;
}

/* One matrix of the batch: cut into pieces for all threads, or one piece. */
static XtStatus multiply_one(Product *product, int64_t threads) {
    const XtGemm *p = product->p;
    int64_t rounds = divide_up(p->m, MOST_ROWS * threads); /* of all threads */
    product->rows = divide_up(divide_up(p->m, rounds * threads), A_PANEL) * A_PANEL;
    int64_t chunk = CHUNK / (product->pairs * PANEL * (int64_t)sizeof(uint32_t));
    chunk = (chunk > 1 ? chunk : 1) * PANEL;
    for (product->column = 0; product->column < p->n; product->column += chunk) {
        product->columns = least(p->n - product->column, chunk), product->panels = divide_up(product->columns, PANEL);
        int64_t tiles_m = divide_up(p->m, product->rows);
        product->tiles_n = tiles_m < threads ? least(divide_up(threads, tiles_m), product->panels) : 1;
        int64_t pieces = tiles_m * product->tiles_n, packing = divide_up(product->panels, PACK_PANELS) * divide_up(p->k, PACK_K);
        XT_CHECK(xt_parallel(packing, divide_up(packing, threads == 1 ? 1 : 4 * threads), pack_pieces, product));
        XT_CHECK(xt_parallel(pieces, threads == 1 ? pieces : 1, multiply_pieces, product));
    }
    return XT_OK;
}

/* ---- a batch ----------------------------------------------------------------------------------------------------------------- */

static size_t packed_bytes(const XtGemm *p) {
    size_t panel = (size_t)(divide_up(p->k, 2) * PANEL) * sizeof(uint32_t), all = panel * (size_t)divide_up(p->n, PANEL);
    return all < CHUNK ? all : panel > CHUNK ? panel : CHUNK / panel * panel;
}

static XtStatus multiply_matrices(const XtGemm *p, int64_t begin, int64_t end, int64_t threads) {
    Product product = {.p = p, .pairs = divide_up(p->k, 2)};
    XtStatus status = XT_OK;
    XtWorkspace workspace;
    XT_CHECK(xt_take_workspace(packed_bytes(p), &workspace));
    product.b = workspace.data;
    for (int64_t i = begin; i < end && status == XT_OK; i++) {
        product.at = xt_gemm_offsets(p, i);
        status = multiply_one(&product, threads);
    }
    xt_give_workspace(&workspace);
    return status;
}

static XtStatus whole_matrices(void *context, int64_t begin, int64_t end) { return multiply_matrices(context, begin, end, 1); }

XtStatus xt_gemm_bf16(const XtGemm *p) {
    XtStatus status;
    if (xt_gemm_trivial(p, &status)) return status;
    int64_t matrices = p->batch[0] * p->batch[1], threads = xt_num_threads();
    double work = (double)p->m * (double)p->n * (double)p->k;
    if (matrices < threads || work > 8.0 * ALONE * (double)threads)
        return multiply_matrices(p, 0, matrices, work < ALONE ? 1 : threads);
    return xt_parallel(matrices, work < ALONE ? (int64_t)(ALONE / work) : 1, whole_matrices, (void *)p);
}

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
    if (p->dtype_a != XT_BFLOAT16) return "the dtype is not bfloat16";
    if (p->k > MOST_K) return "K is too long: all of a panel is packed, also for one column";
    return xt_has_bf16_pairs() ? xt_gemm_plain(p) : "this CPU has no AVX512-BF16 instructions";
}
