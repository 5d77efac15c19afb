/* pulse.c - a thread that sends one byte to each of some sockets, again and again: this process runs.
 *
 * It holds no GIL and takes no lock, so it beats while C code keeps the GIL for minutes. It stops with the process (SIGSTOP), which
 * is what xtrain/distributed/watch.py wants to know of the other ranks.
 */
#include "py/runtime/runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 /* all signals are blocked in the thread */
#endif

typedef struct Pulse {
    pthread_t thread;
    int *sockets, count, milliseconds;
    int stop[2]; /* a pipe: what is written to it ends the thread */
} Pulse;

static Pulse *current; /* under the GIL */

static void *beat(void *argument) {
    const Pulse *pulse = argument;
    struct pollfd stop = {.fd = pulse->stop[0], .events = POLLIN};
    int ready;
    do {
        /* A socket that is full or has ended takes no byte, and makes nobody wait. */
        for (int i = 0; i < pulse->count; i++) (void)!send(pulse->sockets[i], "", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
        ready = poll(&stop, 1, pulse->milliseconds);
    } while (ready == 0 || (ready < 0 && errno == EINTR));
    return NULL;
}

static void drop(Pulse *pulse) {
    close(pulse->stop[0]);
    close(pulse->stop[1]);
    free(pulse->sockets);
    free(pulse);
}

/* A forked child has no such thread. */
static void in_child(void) {
    if (current != NULL) drop(current);
    current = NULL;
}

__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(NULL, NULL, in_child); }

/* A new array of descriptors, or NULL with an exception. */
static int *read_sockets(PyObject *object, Py_ssize_t *count) {
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        py_refuse("pulse_start", "sockets", "a list of descriptors", object);
        return NULL;
    }
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) return NULL;
    *count = PyTuple_GET_SIZE(items);
    int *sockets = *count < INT32_MAX ? calloc((size_t)*count + 1, sizeof *sockets) : NULL;
    if (sockets == NULL) PyErr_NoMemory();
    for (Py_ssize_t i = 0; sockets != NULL && i < *count; i++) {
        int64_t value = -1;
        int found = py_int64("pulse_start", "sockets", PyTuple_GET_ITEM(items, i), &value), kind;
        socklen_t size = sizeof kind;
        bool fits = found > 0 && value >= 0 && value <= INT32_MAX;
        if (fits && getsockopt((int)value, SOL_SOCKET, SO_TYPE, &kind, &size) == 0) {
            sockets[i] = (int)value;
            continue;
        }
        if (found >= 0) py_refuse("pulse_start", "sockets", "a list of descriptors of open sockets", PyTuple_GET_ITEM(items, i));
        free(sockets);
        sockets = NULL;
    }
    Py_DECREF(items);
    return sockets;
}

static PyObject *run_start(PyBound *bound) {
    double seconds = bound->arg[1].f;
    if (!(seconds >= 0.001 && seconds <= 3600))
        return py_raise(xt_error(XT_VALUE_ERROR, "pulse_start: seconds must be in [0.001, 3600], got %g", seconds));
    Py_ssize_t count;
    int *sockets = read_sockets(bound->object[0], &count);
    if (sockets == NULL) return NULL;
    if (current != NULL) {
        free(sockets);
        PyErr_SetString(PyExc_RuntimeError, "pulse_start: pulse_stop must come before the next start");
        return NULL;
    }
    Pulse *pulse = calloc(1, sizeof *pulse);
    if (pulse == NULL || pipe(pulse->stop) != 0) {
        free(pulse);
        free(sockets);
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    for (int i = 0; i < 2; i++) fcntl(pulse->stop[i], F_SETFD, FD_CLOEXEC);
    pulse->sockets = sockets;
    pulse->count = (int)count;
    pulse->milliseconds = (int)(seconds * 1000);
    sigset_t all, before; /* signals are for the main thread, whose system calls they interrupt */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&pulse->thread, NULL, beat, pulse);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed == 0) {
        current = pulse;
        Py_RETURN_NONE;
    }
    drop(pulse);
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *run_stop(PyBound *Py_UNUSED(bound)) {
    Pulse *pulse = current;
    current = NULL;
    if (pulse == NULL) Py_RETURN_NONE;
    while (write(pulse->stop[1], "", 1) < 0 && errno == EINTR) continue;
    PyThreadState *saved = py_gil_leave();
    pthread_join(pulse->thread, NULL);
    py_gil_enter(saved);
    drop(pulse);
    Py_RETURN_NONE;
}

const PyFunction py_pulse_functions[] = {
    {"pulse_start", "sockets: object, seconds: float -> None", run_start,
     "From now on a thread without the GIL sends one byte to each of these descriptors every so many seconds. They must stay open\n"
     "until pulse_stop.",
     0, NULL},
    {"pulse_stop", "-> None", run_stop, "Ends that, and returns when nothing more is sent.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
