/* cuda.c - finds and opens the CUDA library, once, when the first CUDA device is asked for.
 *
 * libxtrain_cuda.so lies in _lib/ beside the extension. It is absent from builds without nvcc, and present on machines that have no
 * GPU or too old a driver: each case has an error of its own, and the CPU goes on working.
 */
#include "backend.h"
#include "contract/backend.h"

#include "core/core.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const XtBackend *opened; /* atomic */
static bool opening, forked;    /* under the lock; the second: a parent process has used CUDA, or was about to */
static const char *const *package_folders;

void xt_set_package_folders(const char *const *folders) { package_folders = folders; }
const char *const *xt_package_folders(void) {
    static const char *const none[] = {NULL};
    return package_folders ? package_folders : none;
}

static XtStatus raise(XtStatus status, const char *message) { return xt_error(status, "%s", message); }

static XtStatus open_library(const XtBackend **out) {
    char path[4096];
    if (!xt_library_path("libxtrain_cuda.so", path, sizeof path))
        return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: the extension's own folder is not known, or its path too long");
    XT_CHECK(xt_check_library(path));
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: %s", dlerror());
    XtBackendContract contract;
    XtOpenBackend open;
    *(void **)&contract = dlsym(library, "xt_cuda_contract");
    *(void **)&open = dlsym(library, "xt_open_cuda");
    const char *theirs = contract ? contract() : "an older one";
    if (!open || strcmp(theirs, xt_contract()) != 0) {
        XtStatus status = xt_error(
            XT_RUNTIME_ERROR, "CUDA is not available: %s was built from other sources (%s) than this extension (%s)" XT_BUILD_AGAIN,
            path, theirs, xt_contract());
        dlclose(library);
        return status;
    }
    XtHost host = {.error = raise, .folders = xt_package_folders()};
    XtStatus status = open(&host, out);
    if (status != XT_OK) dlclose(library);
    return status;
}

/* The driver does not survive a fork, and a thread that the child lacks may hold the lock. The library's release ignores tensors
 * that a child drops. */
static void in_child(void) {
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    lock = fresh;
    forked = forked || opening || opened;
    opened = NULL;
}
__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(NULL, NULL, in_child); }

XtStatus xt_cuda_table(const XtBackend **out) {
    *out = __atomic_load_n(&opened, __ATOMIC_ACQUIRE);
    if (*out) return XT_OK;
    pthread_mutex_lock(&lock);
    XtStatus status = XT_OK;
    *out = opened;
    if (forked) {
        status = xt_error(XT_RUNTIME_ERROR, "CUDA is not available: this process was forked after CUDA's first use; start workers "
                                            "with multiprocessing's 'spawn' method, or use device='cpu' in them");
    } else if (!*out) {
        opening = true;
        status = open_library(out);
        if (status == XT_OK) {
            xt_set_allocator(XT_CUDA, &(XtAllocator){.allocate = (*out)->allocate,
                                                     .release = (*out)->release,
                                                     .trim = (*out)->accelerator->trim,
                                                     .reset_peak = (*out)->accelerator->reset_peak});
            __atomic_store_n(&opened, *out, __ATOMIC_RELEASE);
        }
        opening = false;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

bool xt_cuda_is_open(void) { return __atomic_load_n(&opened, __ATOMIC_ACQUIRE) != NULL; }
