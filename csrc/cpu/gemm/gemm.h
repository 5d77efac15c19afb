/* gemm.h - what the matrix product and attention share: the named GEMMs, the BLAS, a scratch buffer per thread, block conversions.
 *
 * Every backend treats the edges alike: M, N or a batch of 0 does nothing; K == 0 or alpha == 0 scales C without reading A or B;
 * beta == 0 writes C without reading it. Every backend gives the same bits for any number of threads, and for a batch the same bits
 * as for its products one by one: what decides them is a function of M, N and K only.
 * In a template T is the dtype of A and B; C has it too, or is float32.
 */
#pragma once

#include "contract/gemm.h"
#include "cpu/kernel.h"

XtStatus xt_gemm_few(const XtGemm *p); /* at most 8 rows: as fast as B can be read */
const char *xt_gemm_few_supports(const XtGemm *p, const XtDeviceTraits *device);
XtStatus xt_gemm_naive(const XtGemm *p); /* three loops: the specification */
XtStatus xt_gemm_tiled(const XtGemm *p); /* 32 x 32 tiles in plain C: no library needed */
XtStatus xt_gemm_blas(const XtGemm *p);  /* OpenBLAS on tiles of C, one tile per thread at a time */
const char *xt_gemm_blas_supports(const XtGemm *p, const XtDeviceTraits *device);
XtStatus xt_gemm_amx(const XtGemm *p); /* bfloat16 in AMX tiles: subnormals count as zero */
const char *xt_gemm_amx_supports(const XtGemm *p, const XtDeviceTraits *device);
const char *xt_amx_refusal(void);       /* NULL once the process may use AMX tiles, or why it may not; Linux is asked once */
XtStatus xt_gemm_bf16(const XtGemm *p); /* bfloat16 in AVX512-BF16 instructions: subnormals count as zero */
const char *xt_gemm_bf16_supports(const XtGemm *p, const XtDeviceTraits *device);
bool xt_has_bf16_pairs(void); /* whether this build and this CPU have those instructions */

extern const XtGemmBackend xt_cpu_gemm_backends[]; /* few, amx, bf16, blas, tiled, naive */

/* True when there is nothing left to do: C is empty, or K == 0 or alpha == 0 and C has been scaled by beta. */
bool xt_gemm_trivial(const XtGemm *p, XtStatus *status);

/* C[index of the batch] = parts[0] + parts[1] + ... + beta C; parts [count, M, N] in ACC, dense. */
XtStatus xt_gemm_combine(const XtGemm *p, int64_t index, const void *parts, int64_t count);

/* One matrix of a batch: the flat batch index as offsets in elements. */
typedef struct XtGemmOffsets {
    int64_t a, b, c;
} XtGemmOffsets;
XT_INLINE XtGemmOffsets xt_gemm_offsets(const XtGemm *p, int64_t index) {
    int64_t i = index / p->batch[1], j = index % p->batch[1];
    XtGemmOffsets at = {i * p->stride_a[0] + j * p->stride_a[1], i * p->stride_b[0] + j * p->stride_b[1],
                        i * p->stride_c[0] + j * p->stride_c[1]};
    return at;
}

/* OpenBLAS as the scipy-openblas32 package builds it: 32-bit ints. Loaded by xt_blas_open, which the import of the extension waits for.
 * Each call runs in the calling thread only, and many threads may call. */
enum { XT_BLAS_ROW_MAJOR = 101, XT_BLAS_N = 111, XT_BLAS_T = 112 };
typedef struct XtBlas {
    void (*sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                  int ldb, float beta, float *c, int ldc);
    void (*dgemm)(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda, const double *b,
                  int ldb, double beta, double *c, int ldc);
    void (*sgemv)(int order, int trans, int rows, int cols, float alpha, const float *a, int lda, const float *x, int step_x,
                  float beta, float *y, int step_y);
    void (*dgemv)(int order, int trans, int rows, int cols, double alpha, const double *a, int lda, const double *x, int step_x,
                  double beta, double *y, int step_y);
} XtBlas;
extern const XtBlas xt_blas;
XtStatus xt_blas_open(const char **description);

/* This thread's scratch memory, 64-byte aligned, uninitialised, valid until the thread asks again. Kept for the next call, given
 * back when the thread ends. Only one user at a time: do not call a kernel that may use it while holding it. */
XtStatus xt_scratch(size_t nbytes, void **out);

/* Memory of the calling thread that the workers of its loops may use, too: 64-byte aligned, uninitialised, its own until it is given
 * back. Kept for the thread's next call; a signal handler that multiplies meanwhile gets other memory. */
typedef struct XtWorkspace {
    size_t nbytes;
    void *data;
} XtWorkspace;
XtStatus xt_take_workspace(size_t nbytes, XtWorkspace *out);
void xt_give_workspace(XtWorkspace *workspace);

/* bfloat16 or float16 rows (leading dimension ld) <-> dense float32 [rows, cols]. Store, also to float32: dst = src + beta * dst,
 * rounded once; beta == 0 does not read dst. */
void xt_block_load(XtDtype dtype, const void *src, int64_t ld, int64_t rows, int64_t cols, float *dst);
void xt_block_store(XtDtype dtype, const float *src, int64_t rows, int64_t cols, float beta, void *dst, int64_t ld);
