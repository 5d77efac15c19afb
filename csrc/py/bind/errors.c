/* errors.c - turns an XtStatus into a Python exception, and tells running kernels of Ctrl-C. */
#include "backend/backend.h"
#include "py/bind/bind.h"

#include <pthread.h>
#include <unistd.h>

PyObject *py_raise(XtStatus status) {
    PyObject *type = PyExc_RuntimeError;
    switch (status) {
    case XT_VALUE_ERROR: type = PyExc_ValueError; break;
    case XT_TYPE_ERROR: type = PyExc_TypeError; break;
    case XT_INDEX_ERROR: type = PyExc_IndexError; break;
    case XT_OUT_OF_MEMORY: type = xt_py->out_of_memory_error; break;
    case XT_NOT_IMPLEMENTED: type = PyExc_NotImplementedError; break;
    case XT_CUDA_ERROR: type = xt_py->cuda_error; break;
    case XT_INTERRUPTED:
        /* py_interrupt_check left the signal handler's exception in this thread. */
        if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
        return NULL;
    case XT_PYTHON_ERROR:
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_SystemError, "a Python callback failed without an exception");
        return NULL;
    case XT_OK: type = PyExc_SystemError; break;
    case XT_RUNTIME_ERROR: break;
    }
    const char *text = xt_error_message();
    /* A message may have been cut inside a UTF-8 sequence. */
    PyObject *message = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    if (message != NULL) PyErr_SetObject(type, message);
    Py_XDECREF(message);
    return NULL;
}

PyObject *py_none(XtStatus status) { return status == XT_OK ? Py_NewRef(Py_None) : py_raise(status); }

int py_check(XtStatus status) {
    if (status != XT_OK) py_raise(status);
    return status == XT_OK ? 0 : -1;
}

bool py_is_foreign_tensor(PyObject *object) {
    PyObject *type, *value, *traceback; /* of an exception that is set: the search would drop it */
    if (py_is_tensor(object)) return false;
    PyErr_Fetch(&type, &value, &traceback);
    bool found = PyObject_HasAttrString((PyObject *)Py_TYPE(object), "__dlpack__") == 1;
    PyErr_Restore(type, value, traceback);
    return found;
}

int py_refuse(const char *op, const char *name, const char *rule, PyObject *got) {
    const char *type = got == Py_None ? "None" : Py_TYPE(got)->tp_name;
    const bool array = strcmp(type, "numpy.ndarray") == 0, tensor = strstr(rule, "Tensor") != NULL;
    if (!array && py_is_foreign_tensor(got)) { /* its name alone may be Tensor, too */
        PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(got), "__module__");
        if (module == NULL) return -1;
        PyErr_Format(PyExc_TypeError, "%s: argument '%s' must be %s, got %.100S.%.100s%s", op, name, rule, module, type,
                     tensor ? " (use xt.from_dlpack)" : "");
        Py_DECREF(module);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "%s: argument '%s' must be %s, got %.100s%s", op, name, rule, type,
                 array && tensor ? " (use xt.from_numpy)" : "");
    return -1;
}

/* Handlers of signals run in one thread only, the one that Python calls main. No other thread may wait for the GIL here: before 3.14
 * Python ends a thread that waits for it while the interpreter shuts down, and the loop that the check interrupts lies on that
 * thread's stack, where workers still run its pieces. */
static unsigned long main_thread; /* its threading.get_ident() */

static void main_is_this_thread(void) { main_thread = PyThread_get_thread_ident(); } /* in a forked child, as Python says, too */

static int find_main_thread(void) {
    PyObject *threading = PyImport_ImportModule("threading"), *thread = NULL, *ident = NULL;
    if (threading != NULL) thread = PyObject_CallMethod(threading, "main_thread", NULL);
    if (thread != NULL) ident = PyObject_GetAttrString(thread, "ident");
    if (ident != NULL) main_thread = PyLong_AsUnsignedLong(ident);
    Py_XDECREF(ident);
    Py_XDECREF(thread);
    Py_XDECREF(threading);
    if (PyErr_Occurred()) return -1;
    pthread_atfork(NULL, NULL, main_is_this_thread);
    return 0;
}

bool py_interrupt_check(void) {
    if (PyThread_get_thread_ident() != main_thread || !Py_IsInitialized()) return false;
    PyGILState_STATE gil = PyGILState_Ensure();
    bool stop = PyErr_Occurred() != NULL || PyErr_CheckSignals() != 0; /* a handler's exception stays set in this thread */
    PyGILState_Release(gil);
    return stop;
}

#define LONGEST 5 /* seconds */

static _Thread_local int callers; /* calls into the core that wait for Python code of this thread */

PyGILState_STATE py_code_begins(void) {
    callers++;
    return PyGILState_Ensure();
}

void py_code_ends(PyGILState_STATE gil) {
    PyGILState_Release(gil);
    callers--;
}

void py_end_threads(void) {
    xt_py->ending = true;
    for (int ms = 0; xt_cuda_is_open() && xt_py->running > xt_py->parked && ms < 1000 * LONGEST; ms++) {
        PyThreadState *saved = PyEval_SaveThread(); /* they need the GIL to come out */
        usleep(1000);
        PyEval_RestoreThread(saved);
    }
}

void py_park(void) {
    if (PyThread_get_thread_ident() == main_thread) return;
    xt_py->parked += callers;
    PyEval_SaveThread();
    for (;;) pause();
}

int py_errors_init(PyObject *module) {
    if (find_main_thread() < 0) return -1;
    xt_py->out_of_memory_error = PyErr_NewExceptionWithDoc(
        "xtrain.OutOfMemoryError", "An allocation failed; the message says what was asked and what is held.", PyExc_MemoryError,
        NULL);
    if (xt_py->out_of_memory_error == NULL) return -1;
    xt_py->cuda_error =
        PyErr_NewExceptionWithDoc("xtrain.CudaError", "A CUDA call or the CUDA library failed.", PyExc_RuntimeError, NULL);
    if (xt_py->cuda_error == NULL) return -1;
    if (PyModule_AddObjectRef(module, "OutOfMemoryError", xt_py->out_of_memory_error) < 0) return -1;
    return PyModule_AddObjectRef(module, "CudaError", xt_py->cuda_error);
}
