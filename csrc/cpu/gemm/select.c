/* select.c - the table of GEMM implementations, the preferred first. */
#include "gemm.h"

static const char *any_dtypes(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    return xt_gemm_plain(p);
}

/* clang-format off */
const XtGemmBackend xt_cpu_gemm_backends[] = {
    {"few", "few", NULL, xt_gemm_few_supports, xt_gemm_few},
    {"amx", "amx", NULL, xt_gemm_amx_supports, xt_gemm_amx},
    {"bf16", "bf16", NULL, xt_gemm_bf16_supports, xt_gemm_bf16},
    {"blas", "blas", NULL, xt_gemm_blas_supports, xt_gemm_blas},
    {"tiled", "tiled", NULL, any_dtypes, xt_gemm_tiled},
    {"naive", "naive", NULL, any_dtypes, xt_gemm_naive},
    {0},
};
/* clang-format on */
