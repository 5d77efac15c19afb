/* ending.c - a thread that ends the process at a given time, whatever its other threads do.
 *
 * It needs no GIL: C code may keep that for ever, and while Python ends, its own threads stop one after the other. So a rank whose run is
 * over does not stay behind in a driver, a library's destructor or somebody's exit handler.
 */
#include "py/runtime/runtime.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

typedef struct Ending {
    double seconds;
    int status;
    unsigned number;
} Ending;

static unsigned current; /* atomic; a thread with another number has been called off */

static void *wait_and_end(void *argument) {
    Ending ending = *(Ending *)argument;
    free(argument);
    struct timespec left = {(time_t)ending.seconds, (long)((ending.seconds - (double)(time_t)ending.seconds) * 1e9)};
    while (nanosleep(&left, &left) != 0) continue; /* all signals are blocked; a stopped process goes on with the rest */
    if (__atomic_load_n(&current, __ATOMIC_ACQUIRE) == ending.number) _exit(ending.status);
    return NULL;
}

static PyObject *run_end_after(PyBound *bound) {
    double seconds = bound->arg[0].f;
    int64_t status = bound->arg[1].i;
    if (!(seconds >= 0 && seconds <= 1e6))
        return py_raise(xt_error(XT_VALUE_ERROR, "end_after: seconds must be in [0, 1e6], got %g", seconds));
    if (status < 0 || status > 255) {
        PyErr_Format(PyExc_ValueError, "end_after: status must be in [0, 255], got %lld", (long long)status);
        return NULL;
    }
    Ending *ending = malloc(sizeof *ending);
    if (ending == NULL) return PyErr_NoMemory();
    *ending = (Ending){seconds, (int)status, __atomic_add_fetch(&current, 1, __ATOMIC_ACQ_REL)};
    pthread_t thread;
    sigset_t all, before; /* signals are for the main thread, whose system calls they interrupt */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, NULL, wait_and_end, ending);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed == 0) {
        pthread_detach(thread);
        Py_RETURN_NONE;
    }
    free(ending);
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *run_call_off(PyBound *Py_UNUSED(bound)) {
    __atomic_add_fetch(&current, 1, __ATOMIC_ACQ_REL);
    Py_RETURN_NONE;
}

const PyFunction py_ending_functions[] = {
    {"end_after", "seconds: float, status: int -> None", run_end_after,
     "A thread without the GIL ends this process after so many seconds, unless call_off_end comes before, or another end_after.", 0,
     NULL},
    {"call_off_end", "-> None", run_call_off, "The process does not end by itself.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
