/* open_blas.c - loads OpenBLAS from the folder that belongs to this build.
 *
 * By its whole path: the loader would look for a library that the extension is linked with in LD_LIBRARY_PATH first, where any file of
 * that name could take its place.
 */
#include "gemm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static XtBlas library; /* its own functions; xt_blas has those of this file */

/* ---- fork ---------------------------------------------------------------------------------------------------------------- */

/* OpenBLAS has locks of its own, around the buffers that each call takes and gives back, and does not free them in a forked child: one
 * that another thread held during the fork would stay held, and the child's first product would wait for ever. So a fork waits until
 * no thread is inside the library; what they do takes one tile's time and needs nothing of the thread that forks. */
static int users;   /* atomic: threads inside */
static int forking; /* atomic: threads in fork */
static int closed;  /* atomic: the process ends */

static _Thread_local bool inside;

static void enter(void) {
    inside = true;
    for (;;) {
        __atomic_add_fetch(&users, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&forking, __ATOMIC_SEQ_CST) && !__atomic_load_n(&closed, __ATOMIC_SEQ_CST)) return;
        __atomic_sub_fetch(&users, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&forking, __ATOMIC_ACQUIRE)) sched_yield();
        while (__atomic_load_n(&closed, __ATOMIC_ACQUIRE)) pause(); /* until the process has ended */
    }
}
static void leave(void) {
    __atomic_sub_fetch(&users, 1, __ATOMIC_SEQ_CST);
    inside = false;
}

static void before_fork(void) {
    __atomic_add_fetch(&forking, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&users, __ATOMIC_SEQ_CST) > 0) sched_yield();
}
static void in_parent(void) { __atomic_sub_fetch(&forking, 1, __ATOMIC_SEQ_CST); }
/* A thread of the parent may have counted itself in and not yet out again. */
static void in_child(void) {
    __atomic_store_n(&users, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&forking, 0, __ATOMIC_SEQ_CST);
}
/* Registered before threads.c's handlers, and so run after them: a worker that has a piece of the forking thread's own loop must come to
 * its end first. */
__attribute__((constructor(1000))) static void guard_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

/* ---- exit ---------------------------------------------------------------------------------------------------------------- */

#define LONGEST 10 /* seconds; a tile takes milliseconds */

/* OpenBLAS unmaps its buffers when the process exits, also those that a daemon thread of Python or a worker is using. So they come to the
 * end of their tiles, and none begins another. Not for ever: a thread that is inside and finds no memory calls exit, which waits for
 * this one. */
static void keep_out(void) {
    if (inside) return; /* this is that call */
    __atomic_store_n(&closed, 1, __ATOMIC_SEQ_CST);
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    do {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (__atomic_load_n(&users, __ATOMIC_SEQ_CST) > 0 && now.tv_sec - begun.tv_sec < LONGEST);
}

static void sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
                  int ldb, float beta, float *c, int ldc) {
    enter();
    library.sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    leave();
}
static void dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda, const double *b,
                  int ldb, double beta, double *c, int ldc) {
    enter();
    library.dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    leave();
}
static void sgemv(int order, int trans, int rows, int cols, float alpha, const float *a, int lda, const float *x, int step_x,
                  float beta, float *y, int step_y) {
    enter();
    library.sgemv(order, trans, rows, cols, alpha, a, lda, x, step_x, beta, y, step_y);
    leave();
}
static void dgemv(int order, int trans, int rows, int cols, double alpha, const double *a, int lda, const double *x, int step_x,
                  double beta, double *y, int step_y) {
    enter();
    library.dgemv(order, trans, rows, cols, alpha, a, lda, x, step_x, beta, y, step_y);
    leave();
}

const XtBlas xt_blas = {sgemm, dgemm, sgemv, dgemv};

/* ---- loading ------------------------------------------------------------------------------------------------------------- */

static char failure[1024]; /* "" once it is open */
static char *(*get_config)(void);

static bool find(void *handle, const char *name, void *function) {
    void *found = dlsym(handle, name);
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
    void *handle = xt_library_path(name, path, sizeof path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    const char *why = handle ? "a function is missing" : dlerror();
    if (!handle || !find(handle, "scipy_cblas_sgemm", &library.sgemm) || !find(handle, "scipy_cblas_dgemm", &library.dgemm) ||
        !find(handle, "scipy_cblas_sgemv", &library.sgemv) || !find(handle, "scipy_cblas_dgemv", &library.dgemv) ||
        !find(handle, "scipy_openblas_get_config", &get_config) ||
        !find(handle, "scipy_openblas_set_num_threads", &set_num_threads)) {
        snprintf(failure, sizeof failure, "the BLAS of this build cannot be loaded: %s", why ? why : "its folder is not known");
        return;
    }
    set_num_threads(1); /* of its own; from here on it runs in the calling thread only */
    atexit(keep_out);   /* exit calls it before what a library does when it is unloaded */
}

XtStatus xt_blas_open(const char **description) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_library);
    if (failure[0]) return xt_error(XT_RUNTIME_ERROR, "%s", failure);
    *description = get_config();
    return XT_OK;
}
