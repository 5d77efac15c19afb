/* fake_cuda.c - a libxtrain_cuda.so whose one device is the host's memory and has no kernels but products of float32: what csrc/ does
 * with the library can be tested where there is no GPU. Compiled by fake_library.py, with the contract it claims; the environment chooses
 * failures and what the device is.
 */
#include "contract/backend.h"
#include "contract/gemm.h"
#include "kernels.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))

static XtHost host;

static XtStatus allocate(int index, size_t nbytes, void **out) {
    (void)index;
    *out = malloc(nbytes);
    return *out ? XT_OK : XT_OUT_OF_MEMORY;
}
static void release(int index, void *data, size_t nbytes) {
    (void)index, (void)nbytes;
    free(data);
}
static XtStatus to_host(int index, void *to, const void *from, size_t nbytes) {
    (void)index;
    memcpy(to, from, nbytes);
    return XT_OK;
}
static XtStatus from_host(int index, void *to, const void *from, size_t nbytes) { return to_host(index, to, from, nbytes); }
static XtStatus nothing(int index) {
    (void)index;
    return XT_OK;
}
static XtStatus trim(int index) {
    (void)index;
    return getenv("FAKE_CUDA_BROKEN") ? host.error(XT_CUDA_ERROR, "an earlier kernel failed") : XT_OK;
}

/* ---- products ---------------------------------------------------------------------------------------------------------------- */

/* FAKE_CUDA_SHOW: every element of C becomes the number of the row of the table that has computed it. */
static XtStatus multiply(const XtGemm *p, int64_t terms, float row) {
    for (int64_t i = 0; i < p->batch[0] * p->batch[1] * p->m * p->n; i++) {
        int64_t col = i % p->n, r = i / p->n % p->m, x = i / p->n / p->m / p->batch[1], y = i / p->n / p->m % p->batch[1];
        const float *a = (const float *)p->a + x * p->stride_a[0] + y * p->stride_a[1];
        const float *b = (const float *)p->b + x * p->stride_b[0] + y * p->stride_b[1];
        float sum = 0;
        for (int64_t k = 0; k < terms; k++)
            sum += a[p->trans_a ? k * p->lda + r : r * p->lda + k] * b[p->trans_b ? col * p->ldb + k : k * p->ldb + col];
        ((float *)p->c)[x * p->stride_c[0] + y * p->stride_c[1] + r * p->ldc + col] = getenv("FAKE_CUDA_SHOW") ? row : sum;
    }
    return XT_OK;
}

/* Sums two terms at a time. FAKE_CUDA_LIES: it claims what it cannot do. */
static const char *pairs_supports(const XtGemm *p, const XtDeviceTraits *device) {
    if (p->dtype_a != XT_FLOAT32) return "the dtype is not float32";
    if (!device->has_cublaslt()) return "the library was not found";
    return p->k % 2 && !getenv("FAKE_CUDA_LIES") ? "K is odd" : NULL;
}
static XtStatus pairs(const XtGemm *p) { return multiply(p, p->k / 2 * 2, 1); }

static const char *large_supports(const XtGemm *p, const XtDeviceTraits *device) {
    if (device->capability < 80) return "the compute capability is below 8.0";
    return p->dtype_a != XT_FLOAT32 || p->m < 32 ? "M is below 32" : NULL;
}
static XtStatus large(const XtGemm *p) { return multiply(p, p->k, 2); }

static const char *plain_supports(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    return p->dtype_a != XT_FLOAT32 ? "the dtype is not float32" : NULL;
}
static XtStatus plain(const XtGemm *p) { return multiply(p, p->k, 3); }

static bool has_library(void) { return !getenv("FAKE_CUDA_LACKS"); }
static XtStatus check_library(void) {
    return has_library() ? XT_OK : host.error(XT_NOT_IMPLEMENTED, "gemm: backend='fast' needs a library");
}

static const XtGemmBackend gemm[] = {
    {"fast", "pairs", check_library, pairs_supports, pairs},
    {"fast", "large", check_library, large_supports, large},
    {"plain", "plain", NULL, plain_supports, plain},
    {0},
};

static const XtDeviceTraits *traits(int index) {
    static XtDeviceTraits t = {.has_cublaslt = has_library, .has_cublas = has_library};
    t.capability = getenv("FAKE_CUDA_OLD") ? 75 : 90;
    return (void)index, &t;
}

static const XtAccelerator accelerator = {.device_count = 1, .use = nothing, .trim = trim, .traits = traits};
static const XtBackend table = {.name = "cuda",
                                .allocate = allocate,
                                .release = release,
                                .to_host = to_host,
                                .from_host = from_host,
                                .synchronize = nothing,
                                .gemm = gemm,
                                .accelerator = &accelerator};

EXPORTED const char *xt_cuda_contract(void) { return FAKE_CONTRACT; }

EXPORTED XtStatus xt_open_cuda(const XtHost *asked, const XtBackend **out) {
    host = *asked;
    if (getenv("FAKE_CUDA_WAITS")) { /* the first time: says that it is opening, until it may go on */
        int file = open("opening", O_CREAT | O_EXCL, 0600);
        while (file >= 0 && access("go", F_OK) != 0) usleep(1000);
    }
    *out = &table;
    return XT_OK;
}
