/* cuda.c - finds and opens the CUDA library, once, when the first CUDA device is asked for.
 *
 * libxtrain_cuda.so lies in _lib/ beside the extension. It is absent from builds without nvcc, and present on machines that have no
 * GPU or too old a driver: each case has an error of its own, and the CPU goes on working.
 */
#define _GNU_SOURCE /* dladdr */
#include "backend.h"

#include "../core/core.h"

#ifndef XT_VERSION
#define XT_VERSION "unknown"
#endif

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const XtBackend *opened; /* atomic */
static const char *const *package_folders;

void xt_set_package_folders(const char *const *folders) { package_folders = folders; }

static XtStatus raise(XtStatus status, const char *message) { return xt_error(status, "%s", message); }

/* <folder of this extension>/_lib/libxtrain_cuda.so */
static XtStatus library_path(char *path, size_t room) {
    Dl_info self;
    if (!dladdr((void *)&lock, &self) || !self.dli_fname)
        return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: the extension's own folder could not be found");
    const char *slash = strrchr(self.dli_fname, '/');
    int folder = slash ? (int)(slash - self.dli_fname) : 0;
    int length = snprintf(path, room, "%.*s%s_lib/libxtrain_cuda.so", folder, self.dli_fname, slash ? "/" : "");
    if (length < 0 || (size_t)length >= room)
        return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: the path of the extension is too long");
    return XT_OK;
}

static XtStatus open_library(const XtBackend **out) {
    char path[4096];
    static const char *const none[] = {NULL};
    XtStatus status = library_path(path, sizeof path);
    if (status != XT_OK) return status;
    FILE *file = fopen(path, "rb");
    if (!file)
        return xt_error(XT_RUNTIME_ERROR,
                        "CUDA is not available: this build of xtrain has no CUDA library (it is built when nvcc is "
                        "found; XTRAIN_CUDA=1 insists); use device='cpu'");
    fclose(file);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: %s", dlerror());
    XtOpenBackend open;
    *(void **)&open = dlsym(library, "xt_open_cuda");
    if (!open) {
        dlclose(library);
        return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: %s is not of this version of xtrain; build it again", path);
    }
    XtHost host = {.version = XT_VERSION,
                   .table_size = sizeof(XtBackend),
                   .error = raise,
                   .folders = package_folders ? package_folders : none};
    status = open(&host, out);
    if (status != XT_OK) dlclose(library);
    return status;
}

XtStatus xt_cuda_table(const XtBackend **out) {
    *out = __atomic_load_n(&opened, __ATOMIC_ACQUIRE);
    if (*out) return XT_OK;
    pthread_mutex_lock(&lock);
    XtStatus status = XT_OK;
    *out = opened;
    if (!*out) {
        status = open_library(out);
        if (status == XT_OK) {
            xt_set_allocator(XT_CUDA, &(XtAllocator){.allocate = (*out)->allocate,
                                                     .release = (*out)->release,
                                                     .trim = (*out)->accelerator->trim,
                                                     .reset_peak = (*out)->accelerator->reset_peak});
            __atomic_store_n(&opened, *out, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&lock);
    return status;
}
