/* gemm_blas.c - the matrix product through OpenBLAS, one tile of C per thread at a time.
 *
 * OpenBLAS is told to run in the calling thread only, and we hand out the tiles: its own split depends on the number of threads,
 * and so would the bits of the result; its pool would compete with ours; and the tiles of a batch keep all threads busy where its
 * threads wait for each other in every small product.
 */
#include "gemm.h"

#include <pthread.h>
#include <stdlib.h>

void scipy_openblas_set_num_threads(int count);
void scipy_cblas_sgemv(int order, int trans, int rows, int cols, float alpha, const float *a, int lda, const float *x, int step_x,
                       float beta, float *y, int step_y);
void scipy_cblas_dgemv(int order, int trans, int rows, int cols, double alpha, const double *a, int lda, const double *x,
                       int step_x, double beta, double *y, int step_y);

static void one_thread(void) { scipy_openblas_set_num_threads(1); }

void xt_blas_prepare(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, one_thread);
}

/* ---- tiles --------------------------------------------------------------------------------------------------------------- */

/* C is cut into tiles, and a long K into parts whose sums are added up afterwards, as a function of M, N and K only. The model
 * below was fitted to measurements: whole 1024^3 225 GFLOP/s, tiles of 512 x 512 209, of 512 x 256 205, of 256 x 256 189
 * (AVX-512). */
#define PACKING 32  /* multiply-adds that copying one element of an operand tile into OpenBLAS' own layout is worth */
#define SUMMING 100 /* and those for one element of a part of K: written, read, added, in memory that is often fresh */
#define SMALL 4e6   /* below this many multiply-adds (some 40 us) nothing is cut */
#define K_PART 512  /* K is cut into parts of at least this */
#define K_BLOCK 256 /* of the low-precision path: as much of a tile's operands is converted at once */

typedef struct Plan {
    const XtGemm *p;
    int64_t tile_m, tile_n, tiles_m, tiles_n;
    int64_t part_k, parts; /* parts > 1: they go to `workspace` */
    int64_t first;         /* matrix of the batch that index 0 stands for */
    void *workspace;       /* [parts, M, N] in ACC */
} Plan;

static int64_t count(int64_t size, int64_t tile) { return (size - 1) / tile + 1; }

/* A size cut into equal tiles of at most `most`, in multiples of 32 (whole vectors in every kernel). */
static int64_t even_tile(int64_t size, int64_t most) {
    int64_t even = count(size, count(size, most)), rounded = count(even, 32) * 32;
    return rounded < size ? rounded : size;
}

static Plan cut(const XtGemm *p, int64_t most_m, int64_t most_n, int64_t parts) {
    Plan plan = {.p = p,
                 .tile_m = even_tile(p->m, most_m),
                 .tile_n = even_tile(p->n, most_n),
                 .part_k = even_tile(p->k, count(p->k, parts))};
    plan.tiles_m = count(p->m, plan.tile_m), plan.tiles_n = count(p->n, plan.tile_n), plan.parts = count(p->k, plan.part_k);
    return plan;
}

/* Expected time, in multiply-adds, times threads, summed over 1, 2, 4 and 8 threads: what is fast on one and still feeds eight. */
static double expected(const Plan *plan) {
    double m = (double)plan->tile_m, n = (double)plan->tile_n, k = (double)plan->part_k, sum = 0;
    double piece = m * n * k + PACKING * (m + n) * k + (plan->parts > 1 ? SUMMING * m * n : 0);
    int64_t pieces = plan->tiles_m * plan->tiles_n * plan->parts;
    for (int64_t threads = 1; threads <= 8; threads *= 2) sum += (double)(count(pieces, threads) * threads) * piece;
    return sum;
}

static Plan make_plan(const XtGemm *p) {
    Plan best = cut(p, p->m, p->n, 1);
    if ((double)p->m * (double)p->n * (double)p->k < SMALL) return best;
    double least = INFINITY;
    for (int64_t most_m = 1024; most_m >= 64; most_m /= 2) {
        if (most_m / 2 >= p->m && most_m > 64) continue; /* the next gives the same tile */
        for (int64_t most_n = 1024; most_n >= 64; most_n /= 2) {
            if (most_n / 2 >= p->n && most_n > 64) continue;
            for (int64_t parts = 1; parts <= 8 && (parts == 1 || p->k / parts >= K_PART); parts *= 2) {
                Plan plan = cut(p, most_m, most_n, parts);
                double time = expected(&plan);
                if (time < least) least = time, best = plan;
            }
        }
    }
    return best;
}

/* One piece of work: C[m : m + rows, n : n + cols] summed over depth elements of K. */
typedef struct Tile {
    int64_t rows, cols, depth;
    int64_t a, b, c; /* offsets of op(A)[m, k], op(B)[k, n], and C[m, n] or the same place of the workspace */
    int64_t ldc;
} Tile;

static Tile get_tile(const Plan *plan, int64_t index) {
    const XtGemm *p = plan->p;
    int64_t tiles = plan->tiles_m * plan->tiles_n, part = index / tiles % plan->parts;
    XtGemmOffsets at = xt_gemm_offsets(p, plan->first + index / (tiles * plan->parts));
    int64_t m = index % tiles / plan->tiles_n * plan->tile_m, n = index % plan->tiles_n * plan->tile_n, k = part * plan->part_k;
    Tile t = {.rows = p->m - m < plan->tile_m ? p->m - m : plan->tile_m,
              .cols = p->n - n < plan->tile_n ? p->n - n : plan->tile_n,
              .depth = p->k - k < plan->part_k ? p->k - k : plan->part_k};
    t.a = at.a + (p->trans_a ? k * p->lda + m : m * p->lda + k);
    t.b = at.b + (p->trans_b ? n * p->ldb + k : k * p->ldb + n);
    t.ldc = plan->workspace ? p->n : p->ldc;
    t.c = (plan->workspace ? part * p->m * p->n : at.c) + m * t.ldc + n;
    return t;
}

static int blas_flag(bool transposed) { return transposed ? XT_BLAS_T : XT_BLAS_N; }

/* ---- float32 and float64 ------------------------------------------------------------------------------------------------- */

/* A row times a matrix or a matrix times a column is bound by memory: gemv reads the matrix once, without packing it. */
static void float_vector(const XtGemm *p, const Tile *t, void *c, double beta) {
    bool row = p->m == 1, transposed = row ? !p->trans_b : p->trans_a;
    int64_t outputs = row ? t->cols : t->rows;
    int rows = (int)(transposed ? t->depth : outputs), cols = (int)(transposed ? outputs : t->depth), flag = blas_flag(transposed);
    int ld = (int)(row ? p->ldb : p->lda), step_y = (int)(row ? 1 : t->ldc);
    int step_x = (int)(row ? (p->trans_a ? p->lda : 1) : (p->trans_b ? 1 : p->ldb));
    int64_t matrix = row ? t->b : t->a, x = row ? t->a : t->b;
    const void *matrices = row ? p->b : p->a, *vectors = row ? p->a : p->b;
    if (p->dtype == XT_FLOAT32)
        scipy_cblas_sgemv(XT_BLAS_ROW_MAJOR, flag, rows, cols, (float)p->alpha, (const float *)matrices + matrix, ld,
                          (const float *)vectors + x, step_x, (float)beta, (float *)c + t->c, step_y);
    else
        scipy_cblas_dgemv(XT_BLAS_ROW_MAJOR, flag, rows, cols, p->alpha, (const double *)matrices + matrix, ld,
                          (const double *)vectors + x, step_x, beta, (double *)c + t->c, step_y);
}

static XtStatus float_tiles(void *context, int64_t begin, int64_t end) {
    const Plan *plan = context;
    const XtGemm *p = plan->p;
    void *c = plan->workspace ? plan->workspace : p->c;
    double beta = plan->workspace ? 0 : p->beta;
    int ta = blas_flag(p->trans_a), tb = blas_flag(p->trans_b), lda = (int)p->lda, ldb = (int)p->ldb;
    for (int64_t index = begin; index < end; index++) {
        Tile t = get_tile(plan, index);
        int rows = (int)t.rows, cols = (int)t.cols, depth = (int)t.depth;
        if (p->m == 1 || p->n == 1) float_vector(p, &t, c, beta);
        else if (p->dtype == XT_FLOAT32)
            scipy_cblas_sgemm(XT_BLAS_ROW_MAJOR, ta, tb, rows, cols, depth, (float)p->alpha, (const float *)p->a + t.a, lda,
                              (const float *)p->b + t.b, ldb, (float)beta, (float *)c + t.c, (int)t.ldc);
        else
            scipy_cblas_dgemm(XT_BLAS_ROW_MAJOR, ta, tb, rows, cols, depth, p->alpha, (const double *)p->a + t.a, lda,
                              (const double *)p->b + t.b, ldb, beta, (double *)c + t.c, (int)t.ldc);
    }
    return XT_OK;
}

/* ---- bfloat16 and float16 ------------------------------------------------------------------------------------------------ */

/* Blocks of A and B become float32 in scratch, C is summed there and rounded once. */
static XtStatus low_tiles(void *context, int64_t begin, int64_t end) {
    const Plan *plan = context;
    const XtGemm *p = plan->p;
    const uint16_t *a = p->a, *b = p->b; /* bit patterns */
    int64_t depth_max = plan->part_k < K_BLOCK ? plan->part_k : K_BLOCK;
    void *scratch;
    size_t floats = (size_t)((plan->tile_m + plan->tile_n) * depth_max + plan->tile_m * plan->tile_n);
    XtStatus status = xt_scratch(floats * sizeof(float), &scratch);
    if (status != XT_OK) return status;
    float *a_block = scratch;                            /* [rows, depth] or [depth, rows] */
    float *b_block = a_block + plan->tile_m * depth_max; /* [depth, cols] or [cols, depth] */
    float *c_block = b_block + plan->tile_n * depth_max; /* [rows, cols] */
    for (int64_t index = begin; index < end; index++) {
        Tile t = get_tile(plan, index);
        float *c = plan->workspace ? (float *)plan->workspace + t.c : c_block;
        int ldc = (int)(plan->workspace ? t.ldc : t.cols);
        for (int64_t k = 0; k < t.depth; k += K_BLOCK) {
            int64_t depth = t.depth - k < K_BLOCK ? t.depth - k : K_BLOCK;
            int64_t a_cols = p->trans_a ? t.rows : depth, b_cols = p->trans_b ? depth : t.cols;
            xt_block_load(p->dtype, a + t.a + k * (p->trans_a ? p->lda : 1), p->lda, p->trans_a ? depth : t.rows, a_cols, a_block);
            xt_block_load(p->dtype, b + t.b + k * (p->trans_b ? 1 : p->ldb), p->ldb, p->trans_b ? t.cols : depth, b_cols, b_block);
            scipy_cblas_sgemm(XT_BLAS_ROW_MAJOR, blas_flag(p->trans_a), blas_flag(p->trans_b), (int)t.rows, (int)t.cols, (int)depth,
                              (float)p->alpha, a_block, (int)a_cols, b_block, (int)b_cols, k ? 1.0f : 0.0f, c, ldc);
        }
        if (!plan->workspace) xt_block_store(p->dtype, c_block, t.rows, t.cols, (float)p->beta, (uint16_t *)p->c + t.c, p->ldc);
    }
    return XT_OK;
}

/* ---- the whole ----------------------------------------------------------------------------------------------------------- */

XtStatus xt_gemm_blas(const XtGemm *p) {
    XtStatus status;
    if (xt_gemm_trivial(p, &status)) return status;
    bool low = p->dtype == XT_BFLOAT16 || p->dtype == XT_FLOAT16;
    bool fits = p->n <= INT32_MAX && p->k <= INT32_MAX && p->lda <= INT32_MAX && p->ldb <= INT32_MAX && p->ldc <= INT32_MAX;
    if (!fits) return xt_gemm_tiled(p);
    xt_blas_prepare();
    Plan plan = make_plan(p);
    XtBody body = low ? low_tiles : float_tiles;
    int64_t pieces = plan.tiles_m * plan.tiles_n * plan.parts, matrices = p->batch[0] * p->batch[1];
    int64_t grain = xt_row_grain(plan.tile_m * plan.tile_n * plan.part_k, (int64_t)SMALL);
    if (plan.parts == 1) return xt_parallel(matrices * pieces, grain, body, &plan);

    size_t nbytes = (size_t)(plan.parts * p->m * p->n) * xt_dtype_size(xt_dtype_accumulator(p->dtype));
    plan.workspace = malloc(nbytes);
    if (!plan.workspace) return xt_error(XT_OUT_OF_MEMORY, "matmul: no memory for %zu bytes of partial sums", nbytes);
    for (plan.first = 0; plan.first < matrices; plan.first++) {
        XT_TRY(xt_parallel(pieces, 1, body, &plan));
        XT_TRY(xt_gemm_combine(p, plan.first, plan.workspace, plan.parts));
    }
done:
    free(plan.workspace);
    return status;
}
