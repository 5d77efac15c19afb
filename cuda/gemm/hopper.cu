/* hopper.cu - C = A B, and what becomes of it, on Hopper's tensor cores: see hopper.cuh. For products with an epilogue; cuBLASLt, which has
 * none of them, does the others.
 */
#include "gemm.cuh"
#include "hopper.cuh"

typedef HopperTiles Tiles; /* measured: docs/worklog/gemm-cuda.md */

static constexpr int64_t LEAST_TILES =
    2 * XT_PLAN_MULTIPROCESSORS; /* of both warpgroups of all blocks: below, the first and last ones count too much */

/* Rows of 16-bit elements that the copy engine can address. */
static bool addressable(const void *x, int64_t rows, int64_t ld) {
    return (uintptr_t)x % 16 == 0 && (rows <= 1 || ld % 8 == 0) && ld < (int64_t)1 << 38;
}

const char *xt_cuda_gemm_hopper_supports(const XtGemm *p, const XtDeviceTraits *device) {
    if (!p->epilogue) return "it has no epilogue";
    if (!xt_built_for_sm90a()) return "the library is not built for compute capability 9.0a";
    if (device->capability != 90) return "the compute capability is not 9.0";
    const bool gelu = p->epilogue == XT_GEMM_GELU || p->epilogue == XT_GEMM_GELU_BWD;
    if (!gelu && p->bias) return "it has a bias";
    if (gelu && (!p->bias || (uintptr_t)p->bias % 4)) return "its bias is not aligned to 4 bytes";
    if (p->dtype_a != XT_BFLOAT16 || p->dtype_b != XT_BFLOAT16 || p->dtype_c != XT_BFLOAT16)
        return "A, B and C are not of bfloat16";
    if (device->shared_limit < Tiles::BYTES) return "a block cannot have so much shared memory";
    if (p->batch[0] != 1 || p->batch[1] != 1) return "it is a batch";
    if (p->alpha != 1 || p->beta != 0) return "alpha is not 1, or beta not 0";
    if (p->trans_a) return "A is transposed";
    if (p->epilogue == XT_GEMM_SWIGLU && (!p->trans_b || p->n % 16)) return "B is not transposed, or half of N no multiple of 8";
    if ((p->epilogue == XT_GEMM_SWIGLU_BWD || p->epilogue == XT_GEMM_GELU) && p->trans_b) return "B is transposed";
    if (p->epilogue == XT_GEMM_GELU_BWD && !p->trans_b) return "B is not transposed";
    if (p->m > INT32_MAX / 2 || p->n > INT32_MAX / 2 || p->k > INT32_MAX / 2) return "a size is above 2^30";
    if (!xt_gemm_multiplies(p)) return "there is no sum";
    if (p->m < 1 || p->n % 8 || !addressable(p->a, p->m, p->lda) || !addressable(p->c, p->m, p->ldc) ||
        !addressable(p->b, 2, p->ldb) || (uintptr_t)p->extra % 16)
        return "rows of A, B or C are not aligned to 16 bytes";
    if (xt_divide_up(p->m, Tiles::ROWS) * xt_divide_up(p->n, Tiles::COLUMNS) < LEAST_TILES) return "it has few tiles";
    return NULL;
}

/* Of a matrix [rows, heads columns], a head being some of its columns, or of [heads rows, columns], a head being some of its rows. */
static cudaError_t map_of(CUtensorMap *map, const XtGemm *p, const void *x, int64_t heads, int64_t rows, int64_t columns,
                          int64_t ld, int64_t head, int box_rows, int box_columns = 64) {
    const int64_t stride[3] = {heads * head, head, ld};
    return xt_tensor_map(map, p->dtype_a == XT_BFLOAT16, x, 1, heads, rows, columns, stride, box_rows, box_columns);
}

template <HopperKind KIND> static XtStatus run(const XtGemm *p) {
    constexpr bool FORWARD = KIND == HOPPER_SWIGLU || KIND == HOPPER_GELU, HALVES = KIND == HOPPER_SWIGLU,
                   PAIR = KIND != HOPPER_GELU && KIND != HOPPER_GELU_BWD; // c holds two matrices side by side
    constexpr int HALF = Tiles::COLUMNS / 2;
    const int64_t n = HALVES ? p->n / 2 : p->n;
    HopperMaps maps;
    cudaError_t error = map_of(&maps.a, p, p->a, 1, p->m, p->k, p->lda, p->m * p->lda, Tiles::ROWS);
    if (!error)
        error = HALVES       ? map_of(&maps.b, p, p->b, 2, n, p->k, p->ldb, n * p->ldb, HALF)
                : p->trans_b ? map_of(&maps.b, p, p->b, 1, n, p->k, p->ldb, n * p->ldb, Tiles::COLUMNS)
                             : map_of(&maps.b, p, p->b, 1, p->k, n, p->ldb, p->k * p->ldb, 64);
    if (!error) error = map_of(&maps.c, p, p->c, PAIR ? 2 : 1, p->m, n, p->ldc, PAIR ? n : p->m * p->ldc, 64, 32);
    maps.d = maps.c;
    if (!error && FORWARD) error = map_of(&maps.d, p, p->extra, 1, p->m, n, n, p->m * n, 64, 32);
    if (error) return xt_cuda_error("gemm", error);
    const int down = (int)xt_divide_up(p->m, Tiles::ROWS), across = (int)xt_divide_up(n, HALVES ? HALF : Tiles::COLUMNS);
    HopperCall call = {.tiles = down * across,
                       .down = down,
                       .across = across,
                       .group = 4,
                       .steps = (int)xt_divide_up(p->k, 64),
                       .rows = (int)p->m,
                       .columns = (int)n,
                       .c = p->c,
                       .ld = p->ldc,
                       .out = KIND == HOPPER_SWIGLU_BOTH ? p->extra : NULL,
                       .bias = p->bias,
                       .sums = KIND == HOPPER_GELU_BWD ? (float *)p->extra : NULL};
    XT_CHECK(xt_allow_shared("gemm", gemm_hopper_kernel<XtBf16, KIND>, Tiles::BYTES));
    const int blocks = xt_multiprocessors() < call.tiles ? xt_multiprocessors() : call.tiles;
    xt_launch(gemm_hopper_kernel<XtBf16, KIND>, (unsigned)blocks, Tiles::THREADS, Tiles::BYTES, maps, call);
    return xt_launched("gemm", p->batch[0], p->batch[1], p->m, p->n, p->k);
}

XtStatus xt_cuda_gemm_hopper(const XtGemm *p) {
    switch (p->epilogue) {
    case XT_GEMM_SWIGLU: return run<HOPPER_SWIGLU>(p);
    case XT_GEMM_SWIGLU_BWD: return p->extra ? run<HOPPER_SWIGLU_BOTH>(p) : run<HOPPER_SWIGLU_BWD>(p);
    case XT_GEMM_GELU: return run<HOPPER_GELU>(p);
    default: return run<HOPPER_GELU_BWD>(p);
    }
}
