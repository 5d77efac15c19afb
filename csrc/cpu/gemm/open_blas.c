/* open_blas.c - loads OpenBLAS from the folder that belongs to this build.
 *
 * By its whole path: the loader would look for a library that the extension is linked with in LD_LIBRARY_PATH first, where any file of
 * that name could take its place.
 */
#include "gemm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

XtBlas xt_blas;

static char failure[1024]; /* "" once it is open */
static char *(*get_config)(void);

static bool find(void *library, const char *name, void *function) {
    void *found = dlsym(library, name);
    *(void **)function = found;
    return found != NULL;
}

static void open_library(void) {
#ifdef __APPLE__
    static const char name[] = "libxtrain_blas.dylib";
#else
    static const char name[] = "libxtrain_blas.so";
#endif
    char path[4096];
    void (*set_num_threads)(int count);
    void *library = xt_library_path(name, path, sizeof path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    const char *why = library ? "a function is missing" : dlerror();
    if (!library || !find(library, "scipy_cblas_sgemm", &xt_blas.sgemm) || !find(library, "scipy_cblas_dgemm", &xt_blas.dgemm) ||
        !find(library, "scipy_cblas_sgemv", &xt_blas.sgemv) || !find(library, "scipy_cblas_dgemv", &xt_blas.dgemv) ||
        !find(library, "scipy_openblas_get_config", &get_config) ||
        !find(library, "scipy_openblas_set_num_threads", &set_num_threads)) {
        snprintf(failure, sizeof failure, "the BLAS of this build cannot be loaded: %s", why ? why : "its folder is not known");
        return;
    }
    set_num_threads(1); /* of its own; from here on it runs in the calling thread only */
}

XtStatus xt_blas_open(const char **description) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_library);
    if (failure[0]) return xt_error(XT_RUNTIME_ERROR, "%s", failure);
    *description = get_config();
    return XT_OK;
}
