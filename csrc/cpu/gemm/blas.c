/* blas.c - the matrix product through OpenBLAS, one tile of C per thread at a time.
 *
 * OpenBLAS runs in the calling thread only, and we hand out the tiles, for three reasons. Its own split depends on the number of
 * threads, and so would the bits of the result. Its pool would compete with ours. And tiles of a batch keep all threads busy, where
 * its threads wait for each other in every small product.
 */
#include "gemm.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* ---- tiles --------------------------------------------------------------------------------------------------------------- */

/* Three things decide the bits of an element of C: how K is cut into sums, where its column lies in the columns of the call and, on
 * some CPUs, whether its row is among the last few of the call. So M, N and K alone decide the cuts of columns and of a long K,
 * whose parts are summed afterwards. Rows may be cut for the threads at hand (each cut packs the same columns of B again), if every
 * cut is at a multiple of ROWS and no call is so small that the library takes its kernels for small products, which do not cut K.
 * `same_bits` checks this. */
#define ROWS 24        /* a multiple of the rows that any kernel takes at a time */
#define MOST_ROWS 2016 /* of a call: beyond some 4000 rows the library chooses its own cuts */
#define LEAST_CALL 2e6 /* multiply-adds of a call; up to 1e6 may be a small product */
#define PACKING 32     /* multiply-adds that copying one element of an operand tile into OpenBLAS' own layout is worth */
#define SUMMING 100    /* and those for one element of a part of K: written, read, added, in memory that is often fresh */
#define SMALL 4e6      /* below this many multiply-adds (some 40 us) nothing is cut */
#define VECTOR 131072  /* numbers of the matrix in a piece of a product with a vector, 512 KiB: what memory gives in some 40 us */
#define MOST_VECTOR 64 /* pieces of such a product */
#define K_PART 512     /* K is cut into parts of at least this */
#define K_BLOCK 256    /* of the low-precision path: as much of a tile's operands is converted at once */

typedef struct Plan {
    const XtGemm *p;
    int64_t unit; /* of rows: tiles of them are multiples */
    int64_t tiles_m, tiles_n;
    int64_t part_k, parts; /* parts > 1: they go to `workspace` */
    int64_t first;         /* matrix of the batch that index 0 stands for */
    void *workspace;       /* [parts, M, N] in ACC */
} Plan;

static int64_t count(int64_t size, int64_t tile) { return (size - 1) / tile + 1; }

/* Where tile `index` of `tiles` begins: whole units, shared out evenly, and what remains goes with the last. */
static int64_t tile_begin(int64_t size, int64_t unit, int64_t tiles, int64_t index) {
    return index == tiles ? size : (size / unit * index + tiles - 1) / tiles * unit;
}
static int64_t tile_least(int64_t size, int64_t unit, int64_t tiles) { return tiles == 1 ? size : size / unit / tiles * unit; }
static int64_t tile_most(int64_t size, int64_t unit, int64_t tiles) {
    int64_t last = size / unit / tiles * unit + size % unit;
    return size / unit % tiles ? count(size / unit, tiles) * unit : last;
}

#define COLUMNS 32 /* whole vectors in every kernel */
static int64_t most_rows(const Plan *plan) { return tile_most(plan->p->m, plan->unit, plan->tiles_m); }
static int64_t most_columns(const Plan *plan) { return tile_most(plan->p->n, COLUMNS, plan->tiles_n); }

/* Expected multiply-adds of `threads` threads for a batch, waiting included. */
static double expected(const Plan *plan, int64_t matrices, int64_t threads) {
    double m = (double)most_rows(plan), n = (double)most_columns(plan), k = (double)plan->part_k;
    double piece = m * n * k + PACKING * (m + n) * k + (plan->parts > 1 ? SUMMING * m * n : 0);
    int64_t pieces = plan->tiles_m * plan->tiles_n * plan->parts * matrices;
    return (double)(count(pieces, threads) * threads) * piece;
}

/* The most tiles that the rows may be cut into: all calls stay above LEAST_CALL. */
static int64_t most_tiles_m(const Plan *plan) {
    const XtGemm *p = plan->p;
    int64_t depth = p->k - (plan->parts - 1) * plan->part_k;
    double row = (double)tile_least(p->n, COLUMNS, plan->tiles_n) * (double)depth; /* of the smallest column tile and part */
    int64_t units = (int64_t)(LEAST_CALL / ROWS / row) + 1;                        /* that a call needs */
    return p->m / ROWS / units > 0 ? p->m / ROWS / units : 1;
}

/* Cuts the rows for this many threads, and returns the expected time. */
static double cut_rows(Plan *plan, int64_t matrices, int64_t threads) {
    int64_t low = count(plan->p->m, MOST_ROWS), most = most_tiles_m(plan), others = plan->tiles_n * plan->parts * matrices;
    Plan best = *plan;
    double least = INFINITY;
    for (int64_t rounds = 1; rounds <= 4; rounds++) { /* as many pieces as that many rounds of all threads have room for */
        int64_t tiles = rounds * threads / others;
        tiles = tiles < low ? low : tiles;
        plan->tiles_m = tiles > most ? most : tiles;
        double time = expected(plan, matrices, threads);
        if (time < least) least = time, best = *plan;
    }
    *plan = best;
    return least;
}

static int64_t at_most(int64_t x, int64_t most) { return x < most ? x : most > 1 ? most : 1; }

/* Cuts columns and K: what is fast on one thread and still feeds eight. `threads`: for how many the rows will be cut; 0: as a function
 * of M, N and K, too. */
static Plan make_plan(const XtGemm *p, int64_t matrices, int64_t threads) {
    int64_t unit = threads ? ROWS : 32;
    Plan best = {.p = p, .unit = unit, .tiles_m = 1, .tiles_n = 1, .part_k = p->k, .parts = 1};
    if ((double)p->m * (double)p->n * (double)p->k < SMALL) return best;
    double least = INFINITY;
    for (int64_t most_m = 1024; most_m >= (threads ? 1024 : 64); most_m /= 2) {
        if (most_m / 2 >= p->m && most_m > 64 && !threads) continue; /* the next gives the same tile */
        for (int64_t most_n = 1024; most_n >= 64; most_n /= 2) {
            if (most_n / 2 >= p->n && most_n > 64) continue;
            for (int64_t parts = 1; parts <= 8 && (parts == 1 || p->k / parts >= K_PART); parts *= 2) {
                Plan plan = {.p = p, .unit = unit, .part_k = at_most(count(count(p->k, parts), 32) * 32, p->k)};
                plan.tiles_m = at_most(count(p->m, most_m), p->m / unit);
                plan.tiles_n = at_most(count(p->n, most_n), p->n / COLUMNS);
                plan.parts = count(p->k, plan.part_k);
                double time = 0;
                for (int64_t t = 1; t <= 8; t *= 2) time += threads ? cut_rows(&plan, 1, t) : expected(&plan, 1, t);
                if (time < least) least = time, best = plan;
            }
        }
    }
    if (threads) cut_rows(&best, matrices, threads);
    return best;
}

/* A product of floats with a vector is bound by memory, which gives a core a fraction of what it gives all of them: pieces by the numbers
 * of the matrix, in whole units of 32 outputs. K stays whole. */
static bool is_vector(const XtGemm *p) { return (p->m == 1 || p->n == 1) && xt_dtype_size(p->dtype_a) >= 4; }
static Plan make_vector_plan(const XtGemm *p) {
    Plan plan = {.p = p, .unit = 32, .tiles_m = 1, .tiles_n = 1, .part_k = p->k, .parts = 1};
    int64_t outputs = p->m == 1 ? p->n : p->m, pieces = (int64_t)((double)outputs * (double)p->k / VECTOR);
    pieces = at_most(pieces < 1 ? 1 : pieces, at_most(outputs / 32, MOST_VECTOR));
    *(p->m == 1 ? &plan.tiles_n : &plan.tiles_m) = pieces;
    return plan;
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
    int64_t tile_m = index % tiles / plan->tiles_n, tile_n = index % plan->tiles_n;
    XtGemmOffsets at = xt_gemm_offsets(p, plan->first + index / (tiles * plan->parts));
    int64_t m = tile_begin(p->m, plan->unit, plan->tiles_m, tile_m), n = tile_begin(p->n, COLUMNS, plan->tiles_n, tile_n);
    int64_t k = part * plan->part_k;
    Tile t = {.rows = tile_begin(p->m, plan->unit, plan->tiles_m, tile_m + 1) - m,
              .cols = tile_begin(p->n, COLUMNS, plan->tiles_n, tile_n + 1) - n,
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
    if (p->dtype_c == XT_FLOAT32)
        xt_blas.sgemv(XT_BLAS_ROW_MAJOR, flag, rows, cols, (float)p->alpha, (const float *)matrices + matrix, ld,
                      (const float *)vectors + x, step_x, (float)beta, (float *)c + t->c, step_y);
    else
        xt_blas.dgemv(XT_BLAS_ROW_MAJOR, flag, rows, cols, p->alpha, (const double *)matrices + matrix, ld,
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
        else if (p->dtype_c == XT_FLOAT32)
            xt_blas.sgemm(XT_BLAS_ROW_MAJOR, ta, tb, rows, cols, depth, (float)p->alpha, (const float *)p->a + t.a, lda,
                          (const float *)p->b + t.b, ldb, (float)beta, (float *)c + t.c, (int)t.ldc);
        else
            xt_blas.dgemm(XT_BLAS_ROW_MAJOR, ta, tb, rows, cols, depth, p->alpha, (const double *)p->a + t.a, lda,
                          (const double *)p->b + t.b, ldb, beta, (double *)c + t.c, (int)t.ldc);
    }
    return XT_OK;
}

/* ---- may rows be cut anywhere? ------------------------------------------------------------------------------------------- */

/* Multiplies numbers without structure in one call and in four, with every combination of transposes: true for equal bits. Two blocks
 * of K, a last row tile and a last column tile of the kernels that are not full, calls above LEAST_CALL. Some milliseconds. */
static bool cut_changes_nothing(XtDtype dtype) {
    enum { M = 9 * ROWS + 7, N = 75, K = 601, TILES = 4 }; /* cut at 3, 5 and 7 times ROWS */
    size_t size = xt_dtype_size(dtype);
    char *a = malloc(size * (M * K + K * N + 2 * M * N)), *b = a + size * M * K, *c = b + size * K * N;
    bool same = a != NULL;
    uint32_t state = 1;
    for (int64_t i = 0; same && i < M * K + K * N; i++) {
        state = state * 1664525u + 1013904223u;
        double value = (double)(state >> 8) / (1 << 23) - 1;
        if (dtype == XT_FLOAT32) ((float *)a)[i] = (float)value;
        else ((double *)a)[i] = value / 3;
    }
    for (int layout = 0; same && layout < 4; layout++) {
        XtGemm p = {.m = M, .n = N, .k = K, .a = a, .b = b, .c = c, .alpha = 1, .batch = {1, 1}};
        p.dtype_a = p.dtype_b = p.dtype_c = dtype;
        p.trans_a = layout & 1, p.trans_b = layout & 2;
        p.lda = p.trans_a ? M : K, p.ldb = p.trans_b ? K : N, p.ldc = N;
        Plan whole = {.p = &p, .unit = ROWS, .tiles_m = 1, .tiles_n = 1, .part_k = K, .parts = 1}, cut = whole;
        cut.tiles_m = TILES;
        float_tiles(&whole, 0, 1);
        p.c = c + size * M * N;
        float_tiles(&cut, 0, TILES);
        same = memcmp(c, p.c, size * M * N) == 0;
    }
    free(a);
    return same;
}

static bool float_is_free, double_is_free;
static void ask_library(void) {
    float_is_free = cut_changes_nothing(XT_FLOAT32);
    double_is_free = cut_changes_nothing(XT_FLOAT64);
}

/* True when cuts of the rows at multiples of ROWS leave every bit as it is: the same answer all through a process. */
static bool same_bits(XtDtype dtype) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, ask_library);
    return dtype == XT_FLOAT32 ? float_is_free : double_is_free;
}

/* ---- bfloat16 and float16 ------------------------------------------------------------------------------------------------ */

/* Blocks of A and B become float32 in scratch, C is summed there and rounded once, or not at all where it is float32. */
static XtStatus low_tiles(void *context, int64_t begin, int64_t end) {
    const Plan *plan = context;
    const XtGemm *p = plan->p;
    const uint16_t *a = p->a, *b = p->b; /* bit patterns */
    int64_t depth_max = plan->part_k < K_BLOCK ? plan->part_k : K_BLOCK;
    void *scratch;
    int64_t tile_m = most_rows(plan), tile_n = most_columns(plan);
    size_t floats = (size_t)((tile_m + tile_n) * depth_max + tile_m * tile_n);
    XT_CHECK(xt_scratch(floats * sizeof(float), &scratch));
    float *a_block = scratch;                      /* [rows, depth] or [depth, rows] */
    float *b_block = a_block + tile_m * depth_max; /* [depth, cols] or [cols, depth] */
    float *c_block = b_block + tile_n * depth_max; /* [rows, cols] */
    for (int64_t index = begin; index < end; index++) {
        Tile t = get_tile(plan, index);
        float *c = plan->workspace ? (float *)plan->workspace + t.c : c_block;
        int ldc = (int)(plan->workspace ? t.ldc : t.cols);
        for (int64_t k = 0; k < t.depth; k += K_BLOCK) {
            int64_t depth = t.depth - k < K_BLOCK ? t.depth - k : K_BLOCK;
            int64_t a_cols = p->trans_a ? t.rows : depth, b_cols = p->trans_b ? depth : t.cols;
            xt_block_load(p->dtype_a, a + t.a + k * (p->trans_a ? p->lda : 1), p->lda, p->trans_a ? depth : t.rows, a_cols,
                          a_block);
            xt_block_load(p->dtype_b, b + t.b + k * (p->trans_b ? 1 : p->ldb), p->ldb, p->trans_b ? t.cols : depth, b_cols,
                          b_block);
            xt_blas.sgemm(XT_BLAS_ROW_MAJOR, blas_flag(p->trans_a), blas_flag(p->trans_b), (int)t.rows, (int)t.cols, (int)depth,
                          (float)p->alpha, a_block, (int)a_cols, b_block, (int)b_cols, k ? 1.0f : 0.0f, c, ldc);
        }
        if (plan->workspace) continue;
        char *to = (char *)p->c + t.c * (int64_t)xt_dtype_size(p->dtype_c);
        xt_block_store(p->dtype_c, c_block, t.rows, t.cols, (float)p->beta, to, p->ldc);
    }
    return XT_OK;
}

/* ---- the whole ----------------------------------------------------------------------------------------------------------- */

/* Any M: rows are cut. */
const char *xt_gemm_blas_supports(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    bool fits = p->n <= INT32_MAX && p->k <= INT32_MAX && p->lda <= INT32_MAX && p->ldb <= INT32_MAX && p->ldc <= INT32_MAX;
    return fits ? xt_gemm_plain(p) : "N, K or a leading dimension is above 2^31 - 1";
}

XtStatus xt_gemm_blas(const XtGemm *p) {
    XtStatus status;
    if (xt_gemm_trivial(p, &status)) return status;
    bool low = p->dtype_a == XT_BFLOAT16 || p->dtype_a == XT_FLOAT16;
    int64_t matrices = p->batch[0] * p->batch[1];
    bool any_rows = !low && p->m > 1 && p->n > 1 && same_bits(p->dtype_c);
    Plan plan = is_vector(p) ? make_vector_plan(p) : make_plan(p, matrices, any_rows ? xt_num_threads() : 0);
    XtBody body = low ? low_tiles : float_tiles;
    int64_t pieces = plan.tiles_m * plan.tiles_n * plan.parts;
    int64_t target = is_vector(p) ? VECTOR : (int64_t)SMALL;
    int64_t grain = xt_row_grain(most_rows(&plan) * most_columns(&plan) * plan.part_k, target);
    if (plan.parts == 1) return xt_parallel(matrices * pieces, grain, body, &plan);

    size_t nbytes = (size_t)(plan.parts * p->m * p->n) * xt_dtype_size(xt_dtype_accumulator(p->dtype_c));
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
