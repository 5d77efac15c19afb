/* fake_cudart.c - a CUDA runtime that counts what is made and fails when asked, and a program that tries cuda/runtime/device.cu with it.
 * Compiled by tests/cuda/test_cuda_library.py where nvcc is; prints a line for every thing tried.
 */
#include "contract/backend.h"
#include "kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OUT_OF_MEMORY = 2, LAUNCH_FAILURE = 719 };

static int live, calls, fail_at = -1, sync_error, trim_error, trims;
static char message[1024];

static int step(void) { return calls++ == fail_at ? OUT_OF_MEMORY : 0; }
static int make(void **out) {
    if (step()) return OUT_OF_MEMORY;
    live++;
    *out = malloc(4096);
    return 0;
}
static int drop(void *made) {
    live--;
    free(made);
    return 0;
}

int cudaGetDeviceCount(int *count) { return *count = 1, 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { return (void)attribute, (void)device, *value = 9, step(); }
int cudaStreamCreateWithFlags(void **out, unsigned flags) { return (void)flags, make(out); }
int cudaMemGetInfo(size_t *left, size_t *total) { return *left = *total = 1 << 30, step(); }
int cudaMemPoolCreate(void **out, const void *props) { return (void)props, make(out); }
int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) { return (void)pool, (void)attribute, (void)value, step(); }
int cudaEventCreateWithFlags(void **out, unsigned flags) { return (void)flags, make(out); }
int cudaHostAlloc(void **out, size_t nbytes, unsigned flags) { return (void)nbytes, (void)flags, make(out); }
int cudaStreamDestroy(void *made) { return drop(made); }
int cudaMemPoolDestroy(void *made) { return drop(made); }
int cudaEventDestroy(void *made) { return drop(made); }
int cudaFreeHost(void *made) { return drop(made); }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaSetDevice(int device) { return (void)device, 0; }
int cudaStreamSynchronize(void *stream) { return (void)stream, sync_error; }
int cudaMemPoolTrimTo(void *pool, size_t nbytes) { return (void)pool, (void)nbytes, trims++, trim_error; }
const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "launch failure"; }
const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "OutOfMemory" : "LaunchFailure"; }
void **__cudaRegisterFatBinary(void *binary) { return (void)binary, (void **)message; }
void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
void __cudaUnregisterFatBinary(void **binary) { (void)binary; }
void __cudaRegisterFunction(void **binary) { (void)binary; } /* it has more arguments */
const char *xt_contract(void) { return "a test"; }

XtStatus xt_open_cuda(const XtHost *host, const XtBackend **out);
static XtStatus keep(XtStatus status, const char *text) { return snprintf(message, sizeof message, "%s", text), status; }

int main(void) {
    static const char *const folders[] = {NULL};
    XtHost host = {.error = keep, .folders = folders};
    const XtBackend *table;
    if (xt_open_cuda(&host, &table) != XT_OK) return 1;
    for (fail_at = 0; calls = 0, table->accelerator->use(0) != XT_OK; fail_at++) printf("fails: %s, %d left\n", message, live);
    printf("opened, %d made\n", live);

    printf("trim: %d, ", table->accelerator->trim(0));
    printf("%d trims\n", trims);
    trim_error = OUT_OF_MEMORY;
    printf("trim: %d, ", table->accelerator->trim(0));
    printf("%s\n", message);
    sync_error = LAUNCH_FAILURE;
    printf("trim: %d, ", table->accelerator->trim(0));
    printf("%s\n", message);

    fflush(stdout);
    if (fork() == 0) {
        printf("child: %d, ", table->accelerator->use(0));
        printf("%s\n", message);
        table->release(0, NULL, 0);
        fflush(stdout);
        _exit(0);
    }
    wait(NULL);
    return 0;
}
