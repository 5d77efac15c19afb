/* paths.c - what the operating system does with paths and Python's `os` has no function for. */
#include "py/runtime/runtime.h"

#include <fcntl.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* By its number: the C library of an older system has no renameat2. */
static PyObject *run_exchange(PyBound *bound) {
    PyObject *first = NULL, *second = NULL;
    if (!PyUnicode_FSConverter(bound->object[0], &first)) return NULL;
    if (!PyUnicode_FSConverter(bound->object[1], &second)) {
        Py_DECREF(first);
        return NULL;
    }
    bool done = false;
#if defined(SYS_renameat2)
    const unsigned exchange = 2; /* RENAME_EXCHANGE, which older headers lack */
    PyThreadState *saved = py_gil_leave();
    done = syscall(SYS_renameat2, AT_FDCWD, PyBytes_AS_STRING(first), AT_FDCWD, PyBytes_AS_STRING(second), exchange) == 0;
    py_gil_enter(saved);
#endif
    Py_DECREF(first);
    Py_DECREF(second);
    return PyBool_FromLong(done);
}

const PyFunction py_path_functions[] = {
    {"exchange", "first: object, second: object -> bool", run_exchange,
     "Two paths of one file system change places in one step. False, and nothing has changed, where the system cannot do that\n"
     "or one of them does not exist.",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
