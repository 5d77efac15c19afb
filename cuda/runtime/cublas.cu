/* cublas.cu - finds and opens cuBLASLt and cuBLAS of the major version that the CUDA runtime has.
 *
 * It looks, in this order, at: libraries that the process has already opened (PyTorch's, for example; a second copy would cost half
 * a gigabyte), NVIDIA's Python packages in the folders that the host names, the places of the dynamic loader, the CUDA toolkit. The
 * first use decides for the process, so results do not change later.
 */
#include "contract/backend.h"
#include "cublas.cuh"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_OF(x) #x
#define NUMBER_TEXT(x) TEXT_OF(x)
#define MAJOR (CUDART_VERSION / 1000)

extern const XtHost *xt_host; /* device.cu */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the variables below */
static bool tried_lt, tried_blas, has_lt, has_blas;
static XtCublasLt lt;
static XtCublas blas;
static char origin[512], reason[512]; /* reason: why an existing file could not be opened */

static void file_name(char *text, size_t size, const char *stem) { snprintf(text, size, "lib%s.so.%d", stem, MAJOR); }

/* Returns NULL if there is no such file, or if it does not load. */
static void *open_in(const char *folder, const char *below, const char *name) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s%s/%s", folder, below, name) >= (int)sizeof path || access(path, R_OK) != 0) return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library && !reason[0]) {
        const char *text = dlerror();
        snprintf(reason, sizeof reason, "%.500s", text ? text : path);
    }
    return library;
}

static void *find_lt(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    char below[64];
    snprintf(below, sizeof below, "/nvidia/cu%d/lib", MAJOR);
    for (const char *const *folder = xt_host ? xt_host->folders : NULL; !library && folder && *folder; folder++) {
        library = open_in(*folder, below, name);
        if (!library) library = open_in(*folder, "/nvidia/cublas/lib", name);
    }
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) library = open_in("/usr/local/cuda", "/lib64", name);
    const char *home = getenv("CUDA_HOME");
    if (!library && home && *home) library = open_in(home, "/lib64", name);
    return library;
}

/* Whether the library has every function. Fills `functions`, an array of pointers in the order of the names. */
static bool take_symbols(void *library, const char *const *names, int count, void **functions) {
    for (int i = 0; i < count; i++) {
        functions[i] = dlsym(library, names[i]);
        if (!functions[i]) {
            if (!reason[0]) snprintf(reason, sizeof reason, "it has no function %s", names[i]);
            return false;
        }
    }
    return true;
}

#define XT_X(field, symbol, result, arguments) "cublasLt" #symbol,
static const char *const lt_names[] = {XT_LT_FUNCTIONS(XT_X)};
#undef XT_X
#define XT_X(field, symbol, result, arguments) "cublas" #symbol,
static const char *const blas_names[] = {XT_BLAS_FUNCTIONS(XT_X)};
#undef XT_X

static void open_lt(void) {
    char name[64];
    Dl_info info;
    file_name(name, sizeof name, "cublasLt");
    void *library = find_lt(name);
    void *functions[sizeof lt_names / sizeof *lt_names];
    static_assert(sizeof functions == sizeof lt, "one pointer a function");
    has_lt = library && take_symbols(library, lt_names, (int)(sizeof lt_names / sizeof *lt_names), functions);
    if (!has_lt) return;
    memcpy(&lt, functions, sizeof lt);
    size_t version = lt.version();
    bool known = dladdr(functions[0], &info) && info.dli_fname;
    snprintf(origin, sizeof origin, "cuBLASLt %zu.%zu.%zu, %s", version / 10000, version / 100 % 100, version % 100,
             known ? info.dli_fname : name);
}

/* cuBLAS calls cuBLASLt: the two must come from one folder. */
static void open_blas(void) {
    char name[64], folder[PATH_MAX];
    Dl_info info;
    file_name(name, sizeof name, "cublas");
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!library && dladdr((void *)lt.version, &info) && info.dli_fname) {
        snprintf(folder, sizeof folder, "%s", info.dli_fname);
        char *slash = strrchr(folder, '/');
        if (slash) {
            *slash = 0;
            library = open_in(folder, "", name);
        }
    }
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    void *functions[sizeof blas_names / sizeof *blas_names];
    static_assert(sizeof functions == sizeof blas, "one pointer a function");
    has_blas = library && take_symbols(library, blas_names, (int)(sizeof blas_names / sizeof *blas_names), functions);
    if (has_blas) memcpy(&blas, functions, sizeof blas);
}

const XtCublasLt *xt_cublas_lt(void) {
    static const XtCublasLt *opened; /* atomic; every product asks several times */
    const XtCublasLt *found = __atomic_load_n(&opened, __ATOMIC_ACQUIRE);
    if (found) return found;
    pthread_mutex_lock(&lock);
    if (!tried_lt) open_lt();
    tried_lt = true;
    found = has_lt ? &lt : NULL;
    __atomic_store_n(&opened, found, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return found;
}

const XtCublas *xt_cublas(void) {
    if (!xt_cublas_lt()) return NULL;
    pthread_mutex_lock(&lock);
    if (!tried_blas) open_blas();
    tried_blas = true;
    const XtCublas *found = has_blas ? &blas : NULL;
    pthread_mutex_unlock(&lock);
    return found;
}

XtStatus xt_cublas_check(void) {
    if (xt_cublas_lt()) return XT_OK;
    const char *first = xt_host && xt_host->folders && xt_host->folders[0] ? xt_host->folders[0] : "no folder";
    if (reason[0])
        return xt_error(
            XT_NOT_IMPLEMENTED,
            "gemm: backend='cublas' needs libcublasLt.so.%d, which could not be opened (%s); backend='tiled' works without it",
            MAJOR, reason);
    return xt_error(
        XT_NOT_IMPLEMENTED,
        "gemm: backend='cublas' needs libcublasLt.so.%d, which is neither among the Python packages (nvidia/cu%d/lib and "
        "nvidia/cublas/lib in %s and the folders after it), nor where the loader looks, nor in /usr/local/cuda/lib64 or "
        "$CUDA_HOME/lib64; backend='tiled' works without it",
        MAJOR, MAJOR, first);
}

void xt_cublas_origin(char *text, size_t size) {
    pthread_mutex_lock(&lock);
    snprintf(text, size, "%s", origin);
    pthread_mutex_unlock(&lock);
}
