/* cublas_choice.cuh - which of cuBLASLt's algorithms a product takes. Included by cublas.cu alone.
 *
 * The rule picks among the heuristic's offers, for any size. A table has products of models whose steps were measured: there a kernel
 * that the heuristic does not offer, or ranks lower, made the step 0.2 to 1.0 % shorter. The table was chosen by the step's time: a
 * third or less of what kernels gain alone was left there (docs/worklog/gemm-cuda.md, "A table by shape").
 */
#pragma once

#include "contract/gemm.h"
#include "runtime/cublas.cuh"

static int32_t attribute_of(const XtCublasLt *lt, const XtLtAlgo *algo, int attribute) {
    int32_t value = -1;
    size_t written;
    return lt->algo_get(algo, attribute, &value, sizeof value, &written) == XT_BLAS_SUCCESS ? value : -1;
}

static const int32_t HOPPER_ALGORITHM = 66; /* cuBLAS' kernels for Hopper */

/* Which of the heuristic's offers, best first, the product takes: the first, with one exception.
 *
 * A sum of 1,024 terms ends so soon that the end of a tile, where C is written, costs a tenth of its time. Of cuBLAS' Hopper kernels
 * those hide it whose two warpgroups work on tiles of their own in turns (custom options below 4); the heuristic ranks them behind
 * kernels whose warpgroups share a larger tile. So the first of them is taken where sums are short and C is large: up to 22 % less
 * time, with the first offer's bits, as neither splits a sum. parity/bench/gpu_algorithms.py measures it (docs/worklog/gemm-cuda.md). */
static int pick_offer(const XtCublasLt *lt, const XtGemm *p, const XtLtChoice *choices, int found) {
    const int64_t longest = 6144, elements = (int64_t)1 << 22; /* terms of a sum; of C: 128 large tiles */
    const bool half = p->dtype_a == XT_BFLOAT16 || p->dtype_a == XT_FLOAT16;
    if (!half || xt_compute_capability() != 90 || p->batch[1] != 1 || p->k > longest || p->m * p->n < elements) return 0;
    for (int i = 0; i < found; i++) {
        const XtLtAlgo *algo = &choices[i].algo;
        if (choices[i].status != XT_BLAS_SUCCESS || attribute_of(lt, algo, XT_LT_ALGO_ID) != HOPPER_ALGORITHM) continue;
        if (attribute_of(lt, algo, XT_LT_ALGO_SPLITS_OF_K) != 1)
            return 0; /* sums in another order than those of offers behind it */
        const int32_t option = attribute_of(lt, algo, XT_LT_ALGO_CUSTOM_OPTION);
        if (option >= 0 && option < 4) return i;
    }
    return 0;
}

/* Tile, custom option and cluster shape of a product of bfloat16 that does not split its sums, by cuBLASLt's numbers. */
typedef struct Measured {
    int32_t m, n, k; /* 0: any size from `enough` on, rows of tokens */
    bool trans_a, trans_b;
    XtDtype dtype_c;
    int32_t tile, option;
    uint16_t cluster;
} Measured;

/* One H200, cuBLASLt 13.1. */
static const Measured measured[] = {
    /* Qwen2.5-0.5B: q, k and v; gate and up; down; the head */
    {0, 1152, 896, false, true, XT_BFLOAT16, 29, 3, 2},
    {0, 896, 1152, false, false, XT_BFLOAT16, 409, 3, 2},
    {1152, 896, 0, true, false, XT_BFLOAT16, 18, 3, 5},
    {0, 896, 9728, false, false, XT_BFLOAT16, 29, 3, 5},
    {896, 4864, 0, true, false, XT_BFLOAT16, 209, 7, 2},
    {0, 151936, 896, false, true, XT_BFLOAT16, 189, 0, 2},
    {0, 896, 151936, false, false, XT_FLOAT32, 403, 7, 2},
    {151936, 896, 0, true, false, XT_FLOAT32, 20, 3, 5},
    /* Qwen3-0.6B: q, k and v; o; gate and up; down; the head */
    {0, 1024, 4096, false, false, XT_BFLOAT16, 404, 3, 2},
    {0, 1024, 2048, false, true, XT_BFLOAT16, 20, 1, 2},
    {1024, 2048, 0, true, false, XT_BFLOAT16, 20, 3, 5},
    {0, 1024, 6144, false, false, XT_BFLOAT16, 20, 1, 3},
    {6144, 1024, 0, true, false, XT_BFLOAT16, 20, 3, 5},
    {0, 1024, 3072, false, true, XT_BFLOAT16, 20, 2, 5},
    {1024, 3072, 0, true, false, XT_BFLOAT16, 31, 4, 2},
    {151936, 1024, 0, true, false, XT_FLOAT32, 20, 3, 5},
    /* GPT-2: projections; the feed-forward layer; the head but for its last column */
    {0, 768, 768, false, false, XT_BFLOAT16, 409, 3, 2},
    {0, 768, 3072, false, true, XT_BFLOAT16, 408, 3, 3},
    {768, 3072, 0, true, false, XT_BFLOAT16, 458, 1, 5},
    {0, 50256, 768, false, true, XT_BFLOAT16, 30, 0, 2},
    {0, 768, 50256, false, false, XT_FLOAT32, 424, 7, 2},
    {50256, 768, 0, true, false, XT_FLOAT32, 209, 7, 3},
};

static bool is_size(int64_t size, int32_t wanted) {
    const int64_t enough = 4096;
    return wanted ? size == wanted : size >= enough;
}

static const Measured *find_measured(const XtCublasLt *lt, const XtGemm *p) {
    const size_t version = lt->version();
    if (version / 100 != 1301 || xt_compute_capability() != 90 || p->batch[1] != 1 || p->dtype_a != XT_BFLOAT16) return NULL;
    /* The copy engine reads matrices from multiples of 16 bytes on. Leading dimensions need no condition: algo_check sees them. */
    if (((uintptr_t)p->a | (uintptr_t)p->b | (uintptr_t)p->c) & 15) return NULL;
    for (const Measured *one = measured; one != measured + sizeof measured / sizeof *measured; one++)
        if (is_size(p->m, one->m) && is_size(p->n, one->n) && is_size(p->k, one->k) && p->trans_a == one->trans_a &&
            p->trans_b == one->trans_b && p->dtype_c == one->dtype_c)
            return one;
    return NULL;
}

/* *algo, an offer for p, becomes what the table says, where it says something that this library takes, with at most `workspace` bytes of
 * memory; a, b, c: layouts of A, B and C. */
static void take_measured(const XtCublasLt *lt, void *handle, void *desc, void *a, void *b, void *c, const XtGemm *p,
                          size_t workspace, XtLtAlgo *algo) {
    const Measured *one = find_measured(lt, p);
    if (!one || attribute_of(lt, algo, XT_LT_ALGO_ID) != HOPPER_ALGORITHM) return;
    XtLtAlgo other = *algo;
    XtLtChoice result = {};
    const int32_t splits = 1, reduction = 0;
    XtBlasStatus status = lt->algo_set(&other, XT_LT_ALGO_TILE, &one->tile, sizeof one->tile);
    if (!status) status = lt->algo_set(&other, XT_LT_ALGO_CLUSTER, &one->cluster, sizeof one->cluster);
    if (!status) status = lt->algo_set(&other, XT_LT_ALGO_CUSTOM_OPTION, &one->option, sizeof one->option);
    if (!status) status = lt->algo_set(&other, XT_LT_ALGO_SPLITS_OF_K, &splits, sizeof splits);
    if (!status) status = lt->algo_set(&other, XT_LT_ALGO_REDUCTION, &reduction, sizeof reduction);
    if (!status) status = lt->algo_check(handle, desc, b, a, c, c, &other, &result); /* cuBLAS' A is B */
    if (!status && result.workspace <= workspace) *algo = other; /* the check knows of no limit, as the heuristic does */
}
