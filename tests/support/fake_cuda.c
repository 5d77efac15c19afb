/* fake_cuda.c - a libxtrain_cuda.so whose one device is the host's memory and has no kernels: what csrc/ does with the library can be
 * tested where there is no GPU. Compiled by tests/cuda/test_cuda_library.py, with the contract it claims; the environment chooses failures.
 */
#include "contract/backend.h"
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

static const XtAccelerator accelerator = {.device_count = 1, .use = nothing, .trim = trim};
static const XtBackend table = {.name = "cuda",
                                .allocate = allocate,
                                .release = release,
                                .to_host = to_host,
                                .from_host = from_host,
                                .synchronize = nothing,
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
