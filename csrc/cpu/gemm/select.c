/* select.c - the table of named GEMMs, the default first. */
#include "gemm.h"

const XtGemmBackend xt_cpu_gemm_backends[] = {
    {"blas", xt_gemm_blas, NULL},
    {"tiled", xt_gemm_tiled, NULL},
    {"naive", xt_gemm_naive, NULL},
    {NULL, NULL, NULL},
};
