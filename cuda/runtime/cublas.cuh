/* cublas.cuh - the part of NVIDIA's cuBLAS that gemm/cublas.cu calls, found and opened at run time.
 *
 * A build needs neither its headers nor its libraries: the functions, constants and structures in use are declared here, by the ABI
 * of cuBLAS 12 and 13. Handles and descriptors are opaque pointers, enumerations are int.
 */
#pragma once

#include "common/cuda.cuh"

#include <library_types.h>

typedef int XtBlasStatus; /* cublasStatus_t */
enum { XT_BLAS_SUCCESS = 0, XT_BLAS_ALLOC_FAILED = 3, XT_BLAS_NOT_SUPPORTED = 15 };

enum { XT_BLAS_OP_N = 0, XT_BLAS_OP_T = 1 };                                                /* cublasOperation_t */
enum { XT_BLAS_COMPUTE_32F = 68, XT_BLAS_COMPUTE_64F = 70, XT_BLAS_COMPUTE_32F_TF32 = 77 }; /* cublasComputeType_t */
enum { XT_BLAS_GEMM_DEFAULT = -1 };                                                         /* cublasGemmAlgo_t */
enum { XT_BLAS_MATH_FULL_PRECISION_REDUCTION = 16 }; /* cublasMath_t: default, but partial sums keep the compute type */
enum { XT_LT_LAYOUT_BATCH_COUNT = 5, XT_LT_LAYOUT_BATCH_STRIDE = 6 }; /* int32_t, int64_t in elements */
enum {
    XT_LT_DESC_TRANS_A = 3,
    XT_LT_DESC_TRANS_B = 4,
    XT_LT_DESC_EPILOGUE = 7,
    XT_LT_DESC_BIAS = 8
}; /* int32_t; BIAS: a pointer */
enum { XT_LT_EPILOGUE_BIAS = 4 };
enum { XT_LT_REDUCTION_IN_COMPUTE_TYPE = 2, XT_LT_REDUCTION_IN_OUTPUT_TYPE = 4 }; /* bits of a mask; "none" is always allowed */
enum {
    XT_LT_PREF_WORKSPACE = 1,      /* uint64_t */
    XT_LT_PREF_REDUCTION_MASK = 3, /* uint32_t */
    XT_LT_PREF_ALIGNMENT_A = 5,    /* uint32_t, and B, C, D follow */
    XT_LT_PREF_ALIGNMENT_B = 6,
    XT_LT_PREF_ALIGNMENT_C = 7,
    XT_LT_PREF_ALIGNMENT_D = 8,
};
enum {
    XT_LT_ALGO_ID = 0,
    XT_LT_ALGO_TILE = 1,
    XT_LT_ALGO_SPLITS_OF_K = 2,
    XT_LT_ALGO_REDUCTION = 3,
    XT_LT_ALGO_CUSTOM_OPTION = 5,
    XT_LT_ALGO_CLUSTER = 8
}; /* of 32 bits, CLUSTER of 16 */

typedef struct XtLtAlgo {
    uint64_t data[8];
} XtLtAlgo;
typedef struct XtLtChoice { /* cublasLtMatmulHeuristicResult_t */
    XtLtAlgo algo;
    size_t workspace;
    XtBlasStatus status;
    float waves;
    int reserved[4];
} XtLtChoice;

/* cuBLASLt. X(field, symbol without "cublasLt", result, arguments) */
/* clang-format off */
#define XT_LT_FUNCTIONS(X) \
    X(version, GetVersion, size_t, (void)) \
    X(status_name, GetStatusName, const char *, (XtBlasStatus status)) \
    X(create, Create, XtBlasStatus, (void **handle)) \
    X(desc_create, MatmulDescCreate, XtBlasStatus, (void **desc, int compute, int scale_type)) \
    X(desc_set, MatmulDescSetAttribute, XtBlasStatus, (void *desc, int attribute, const void *value, size_t nbytes)) \
    X(desc_destroy, MatmulDescDestroy, XtBlasStatus, (void *desc)) \
    X(layout_create, MatrixLayoutCreate, XtBlasStatus, (void **layout, int type, uint64_t rows, uint64_t cols, int64_t ld)) \
    X(layout_set, MatrixLayoutSetAttribute, XtBlasStatus, (void *layout, int attribute, const void *value, size_t nbytes)) \
    X(layout_destroy, MatrixLayoutDestroy, XtBlasStatus, (void *layout)) \
    X(preference_create, MatmulPreferenceCreate, XtBlasStatus, (void **preference)) \
    X(preference_set, MatmulPreferenceSetAttribute, XtBlasStatus, \
      (void *preference, int attribute, const void *value, size_t nbytes)) \
    X(preference_destroy, MatmulPreferenceDestroy, XtBlasStatus, (void *preference)) \
    X(choose, MatmulAlgoGetHeuristic, XtBlasStatus, \
      (void *handle, void *desc, void *a, void *b, void *c, void *d, void *preference, int wanted, XtLtChoice *choices, \
       int *found)) \
    X(algo_get, MatmulAlgoConfigGetAttribute, XtBlasStatus, \
      (const XtLtAlgo *algo, int attribute, void *value, size_t nbytes, size_t *written)) \
    X(algo_set, MatmulAlgoConfigSetAttribute, XtBlasStatus, (XtLtAlgo *algo, int attribute, const void *value, size_t nbytes)) \
    X(algo_check, MatmulAlgoCheck, XtBlasStatus, \
      (void *handle, void *desc, void *a, void *b, void *c, void *d, const XtLtAlgo *algo, XtLtChoice *result)) \
    X(matmul, Matmul, XtBlasStatus, \
      (void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b, void *b_layout, \
       const void *beta, const void *c, void *c_layout, void *d, void *d_layout, const XtLtAlgo *algo, void *workspace, \
       size_t workspace_nbytes, cudaStream_t stream))

/* cuBLAS, for batches of matrices that are not evenly spaced. */
#define XT_BLAS_FUNCTIONS(X) \
    X(create, Create_v2, XtBlasStatus, (void **handle)) \
    X(destroy, Destroy_v2, XtBlasStatus, (void *handle)) \
    X(set_stream, SetStream_v2, XtBlasStatus, (void *handle, cudaStream_t stream)) \
    X(set_workspace, SetWorkspace_v2, XtBlasStatus, (void *handle, void *workspace, size_t nbytes)) \
    X(set_math, SetMathMode, XtBlasStatus, (void *handle, int mode)) \
    X(gemm_batched, GemmBatchedEx, XtBlasStatus, \
      (void *handle, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *const *a, int a_type, int lda, \
       const void *const *b, int b_type, int ldb, const void *beta, void *const *c, int c_type, int ldc, int batch, int compute, \
       int algo))
/* clang-format on */

#define XT_X(field, symbol, result, arguments) result(*field) arguments;
typedef struct XtCublasLt {
    XT_LT_FUNCTIONS(XT_X)
} XtCublasLt;
typedef struct XtCublas {
    XT_BLAS_FUNCTIONS(XT_X)
} XtCublas;
#undef XT_X

/* The libraries. The first call opens them; if it finds none, every call of the process returns NULL. Any thread. */
const XtCublasLt *xt_cublas_lt(void);
const XtCublas *xt_cublas(void); /* from the same folder as cuBLASLt */

/* XT_OK, or the error of a missing cuBLASLt. It names the file, the places that were searched, and what works without it. */
XtStatus xt_cublas_check(void);

/* The version and path of the cuBLASLt in use, for display; "" before the first use or if there is none. */
void xt_cublas_origin(char *text, size_t size);
