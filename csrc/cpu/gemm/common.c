/* common.c - what the named GEMMs share: the trivial cases, scratch memory and block conversions. */
#ifndef T
#include "gemm.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct Combine {
    const XtGemm *p;
    const void *parts; /* [count, M, N] in ACC */
    int64_t index, count;
} Combine;

#define XT_TEMPLATE "cpu/gemm/common.c"
#include "cpu/each_float.h"

bool xt_gemm_trivial(const XtGemm *p, XtStatus *status) {
    *status = XT_OK;
    if (p->m <= 0 || p->n <= 0 || p->batch[0] <= 0 || p->batch[1] <= 0) return true;
    if (p->k > 0 && p->alpha != 0.0) return false;
    *status =
        xt_parallel(p->batch[0] * p->batch[1] * p->m, xt_row_grain(p->n, 65536), XT_BY_FLOAT(p->dtype_c, scale_rows), (void *)p);
    return true;
}

XtStatus xt_gemm_combine(const XtGemm *p, int64_t index, const void *parts, int64_t count) {
    Combine combine = {p, parts, index, count};
    return xt_parallel(p->m, xt_row_grain(p->n * count, 65536), XT_BY_FLOAT(p->dtype_c, combine_rows), &combine);
}

void xt_block_load(XtDtype dtype, const void *src, int64_t ld, int64_t rows, int64_t cols, float *dst) {
    if (dtype == XT_BFLOAT16) load_block_bf16(src, ld, rows, cols, dst);
    else load_block_f16(src, ld, rows, cols, dst);
}

void xt_block_store(XtDtype dtype, const float *src, int64_t rows, int64_t cols, float beta, void *dst, int64_t ld) {
    if (dtype == XT_FLOAT32) store_block_f32(src, rows, cols, beta, dst, ld);
    else if (dtype == XT_BFLOAT16) store_block_bf16(src, rows, cols, beta, dst, ld);
    else store_block_f16(src, rows, cols, beta, dst, ld);
}

/* ---- scratch ------------------------------------------------------------------------------------------------------------- */

#define ALIGNMENT 64
#define KEEP ((size_t)32 << 20) /* a buffer above this is not kept for a caller who needs less */

/* Of a thread: what its kernel uses, and what waits for its next workspace. */
typedef struct Kept {
    XtWorkspace scratch, workspace;
} Kept;

static pthread_once_t kept_once = PTHREAD_ONCE_INIT;
static pthread_key_t kept_key;
static bool kept_ready;

static void free_kept(void *pointer) {
    Kept *kept = pointer;
    free(kept->scratch.data);
    free(kept->workspace.data);
    free(kept);
}
static void make_kept_key(void) { kept_ready = pthread_key_create(&kept_key, free_kept) == 0; }

static XtStatus get_kept(Kept **out) {
    pthread_once(&kept_once, make_kept_key);
    Kept *kept = kept_ready ? pthread_getspecific(kept_key) : NULL;
    if (!kept) {
        kept = calloc(1, sizeof *kept);
        if (!kept || !kept_ready || pthread_setspecific(kept_key, kept) != 0) {
            free(kept);
            return xt_error(XT_OUT_OF_MEMORY, "no memory for the scratch buffer of a thread");
        }
    }
    *out = kept;
    return XT_OK;
}

/* Replaces memory that is too small, or so large that it is not kept for a caller who needs less. */
static XtStatus fit(XtWorkspace *memory, size_t nbytes) {
    if (nbytes <= memory->nbytes && (memory->nbytes <= KEEP || nbytes >= memory->nbytes / 2)) return XT_OK;
    free(memory->data);
    memory->nbytes = 0;
    size_t rounded = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (posix_memalign(&memory->data, ALIGNMENT, rounded) != 0) {
        memory->data = NULL;
        return xt_error(XT_OUT_OF_MEMORY, "no memory for %zu bytes of scratch", nbytes);
    }
    memory->nbytes = rounded;
    return XT_OK;
}

XtStatus xt_scratch(size_t nbytes, void **out) {
    Kept *kept = NULL;
    XT_CHECK(get_kept(&kept));
    XT_CHECK(fit(&kept->scratch, nbytes));
    *out = kept->scratch.data;
    return XT_OK;
}

XtStatus xt_take_workspace(size_t nbytes, XtWorkspace *out) {
    Kept *kept = NULL;
    XT_CHECK(get_kept(&kept));
    *out = kept->workspace;
    kept->workspace = (XtWorkspace){0, NULL};
    return fit(out, nbytes);
}

void xt_give_workspace(XtWorkspace *workspace) {
    Kept *kept = NULL;
    if (get_kept(&kept) != XT_OK || kept->workspace.nbytes >= workspace->nbytes) {
        free(workspace->data);
        return;
    }
    free(kept->workspace.data);
    kept->workspace = *workspace;
}

#else

/* Rows [begin, end) of all the C of a batch: C *= beta, or zeros. */
XT_FAST static XtStatus NAME(scale_rows)(void *context, int64_t begin, int64_t end) {
    const XtGemm *p = context;
    ACC beta = (ACC)p->beta;
    for (int64_t row = begin; row < end; row++) {
        T *c = (T *)p->c + xt_gemm_offsets(p, row / p->m).c + row % p->m * p->ldc; /* [N] */
        if (beta == 0) memset(c, 0, (size_t)p->n * sizeof(T));
        else
            for (int64_t j = 0; j < p->n; j++) c[j] = STORE(beta * LOAD(c[j]));
    }
    return XT_OK;
}

XT_FAST static XtStatus NAME(combine_rows)(void *context, int64_t begin, int64_t end) {
    const Combine *combine = context;
    const XtGemm *p = combine->p;
    int64_t n = p->n, size = p->m * n, count = combine->count;
    ACC beta = (ACC)p->beta;
    for (int64_t row = begin; row < end; row++) {
        const ACC *part = (const ACC *)combine->parts + row * n;                /* [N], step M * N */
        T *c = (T *)p->c + xt_gemm_offsets(p, combine->index).c + row * p->ldc; /* [N] */
        for (int64_t j = 0; j < n; j++) {
            ACC sum = part[j];
            for (int64_t i = 1; i < count; i++) sum += part[i * size + j];
            c[j] = STORE(beta == 0 ? sum : sum + beta * LOAD(c[j]));
        }
    }
    return XT_OK;
}

#if !IS_F64
XT_FAST __attribute__((unused)) static void NAME(load_block)(const T *restrict src, int64_t ld, int64_t rows, int64_t cols,
                                                             float *restrict dst) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) dst[i * cols + j] = LOAD(src[i * ld + j]);
}
XT_FAST __attribute__((unused)) static void NAME(store_block)(const float *restrict src, int64_t rows, int64_t cols, float beta,
                                                              T *restrict dst, int64_t ld) {
    for (int64_t i = 0; i < rows; i++) {
        if (beta == 0)
            for (int64_t j = 0; j < cols; j++) dst[i * ld + j] = STORE(src[i * cols + j]);
        else
            for (int64_t j = 0; j < cols; j++) dst[i * ld + j] = STORE(src[i * cols + j] + beta * LOAD(dst[i * ld + j]));
    }
}
#endif

#endif
