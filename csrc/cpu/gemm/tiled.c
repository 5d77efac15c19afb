/* tiled.c - the matrix product in 32 x 32 tiles, written to be read.
 *
 * Why tiles: three plain loops read a row of A and a column of B from memory for every element of C. A tile of A and a tile of B
 * copied into small arrays (4 KB each: both stay in the L1 cache) are used 32 times per element instead of once. The copy also
 * straightens transposes and converts bfloat16 and float16 to float32, so one inner loop serves every case.
 *
 * Each element of C is still summed over k from 0 upwards.
 */
#ifndef T
#include "gemm.h"
#define XT_TEMPLATE "cpu/gemm/tiled.c"
#define TILE 32
#include "cpu/each_float.h"

XtStatus xt_gemm_tiled(const XtGemm *p) {
    XtStatus status;
    if (xt_gemm_trivial(p, &status)) return status;
    int64_t tiles = ((p->m - 1) / TILE + 1) * ((p->n - 1) / TILE + 1);
    return xt_parallel(p->batch[0] * p->batch[1] * tiles, xt_row_grain(p->k, 2048), XT_BY_FLOAT(p->dtype_a, tiled_tiles),
                       (void *)p);
}
#else

/* tile[i][j] = x[i * step_i + j * step_j] for i < rows, j < cols; zeros beyond the last column, so that full rows can be used. */
XT_INLINE void NAME(load_tile)(ACC (*tile)[TILE], const T *x, int64_t rows, int64_t cols, int64_t step_i, int64_t step_j) {
    for (int64_t i = 0; i < rows; i++) {
        if (step_j == 1)
            for (int64_t j = 0; j < cols; j++) tile[i][j] = LOAD(x[i * step_i + j]);
        else
            for (int64_t j = 0; j < cols; j++) tile[i][j] = LOAD(x[i * step_i + j * step_j]);
        for (int64_t j = cols; j < TILE; j++) tile[i][j] = 0;
    }
}

/* c += a b over a depth of k, four rows of c at a time: a row of b is loaded once for the four, and stays in registers with them.
 * Rows beyond the matrix (up to three) are computed and never stored. */
XT_INLINE void NAME(multiply_tile)(ACC (*restrict c)[TILE], ACC (*restrict a)[TILE], ACC (*restrict b)[TILE], int64_t rows,
                                   int64_t k) {
    for (int64_t i = 0; i < rows; i += 4) {
        ACC *c0 = c[i], *c1 = c[i + 1], *c2 = c[i + 2], *c3 = c[i + 3];
        for (int64_t l = 0; l < k; l++) {
            ACC a0 = a[i][l], a1 = a[i + 1][l], a2 = a[i + 2][l], a3 = a[i + 3][l];
            for (int j = 0; j < TILE; j++) {
                ACC bj = b[l][j];
                c0[j] += a0 * bj, c1[j] += a1 * bj, c2[j] += a2 * bj, c3[j] += a3 * bj;
            }
        }
    }
}

XT_FAST static XtStatus NAME(tiled_tiles)(void *context, int64_t begin, int64_t end) {
    const XtGemm *p = context;
    int64_t a_m = p->trans_a ? 1 : p->lda, a_k = p->trans_a ? p->lda : 1; /* steps in A along m and k */
    int64_t b_k = p->trans_b ? 1 : p->ldb, b_n = p->trans_b ? p->ldb : 1;
    int64_t tiles_m = (p->m - 1) / TILE + 1, tiles_n = (p->n - 1) / TILE + 1;
    ACC alpha = (ACC)p->alpha, beta = (ACC)p->beta;
    _Alignas(64) ACC a_tile[TILE][TILE] = {{0}}, b_tile[TILE][TILE], c_tile[TILE][TILE];
    for (int64_t tile = begin; tile < end; tile++) {
        XtGemmOffsets at = xt_gemm_offsets(p, tile / (tiles_m * tiles_n));
        int64_t m = tile / tiles_n % tiles_m * TILE, n = tile % tiles_n * TILE;
        int64_t rows = p->m - m < TILE ? p->m - m : TILE, cols = p->n - n < TILE ? p->n - n : TILE;
        memset(c_tile, 0, sizeof c_tile);
        for (int64_t k = 0; k < p->k; k += TILE) {
            int64_t depth = p->k - k < TILE ? p->k - k : TILE;
            NAME(load_tile)(a_tile, (const T *)p->a + at.a + m * a_m + k * a_k, rows, depth, a_m, a_k);
            NAME(load_tile)(b_tile, (const T *)p->b + at.b + k * b_k + n * b_n, depth, cols, b_k, b_n);
            NAME(multiply_tile)(c_tile, a_tile, b_tile, rows, depth);
        }
        for (int64_t i = 0; i < rows; i++) {
            int64_t first = at.c + (m + i) * p->ldc + n;
            if (p->dtype_c == p->dtype_a) {
                T *c = (T *)p->c + first; /* [cols] */
                for (int64_t j = 0; j < cols; j++)
                    c[j] = STORE(beta == 0 ? alpha * c_tile[i][j] : alpha * c_tile[i][j] + beta * LOAD(c[j]));
            } else {
                float *c = (float *)p->c + first; /* [cols] */
                for (int64_t j = 0; j < cols; j++)
                    c[j] = (float)(beta == 0 ? alpha * c_tile[i][j] : alpha * c_tile[i][j] + beta * c[j]);
            }
        }
    }
    return XT_OK;
}

#endif
