/* spans.c - what xtrain.profiling needs: spans of ops, the clock and thread numbers that they have, and what ran on GPUs meanwhile. */
#include "backend/cupti.h"
#include "core/span.h"
#include "py/runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

static PyObject *run_start(PyBound *Py_UNUSED(bound)) { return PyBool_FromLong(xt_spans_start()); }

static PyObject *run_stop(PyBound *Py_UNUSED(bound)) {
    XtSpan *spans;
    int64_t count, lost;
    xt_spans_stop(&spans, &count, &lost);
    PyObject *list = PyList_New((Py_ssize_t)count), *result = NULL;
    for (int64_t i = 0; list != NULL && i < count; i++) {
        const XtSpan *span = &spans[i];
        PyObject *name = PyUnicode_DecodeUTF8(span->name, (Py_ssize_t)strlen(span->name), "replace");
        PyObject *row = name == NULL ? NULL
                                     : Py_BuildValue("(NOLLis)", name, span->backward ? Py_True : Py_False, (long long)span->begin,
                                                     (long long)span->end, span->thread, span->shapes);
        if (row == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, (Py_ssize_t)i, row);
    }
    free(spans);
    if (list != NULL) result = Py_BuildValue("(NL)", list, (long long)lost);
    return result;
}

static PyObject *run_clock(PyBound *Py_UNUSED(bound)) { return Py_BuildValue("(Li)", (long long)xt_clock(), xt_thread_number()); }

/* What a message says; it may name a path that is no UTF-8. */
static PyObject *why(XtStatus status) {
    const char *text = status == XT_OK ? "" : xt_error_message();
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *run_kernels_start(PyBound *Py_UNUSED(bound)) {
    PyThreadState *saved = py_gil_leave(); /* it waits for the device */
    XtStatus status = xt_kernels_start();
    py_gil_enter(saved);
    return status == XT_INTERRUPTED ? py_raise(status) : why(status);
}

static PyObject *run_kernels_stop(PyBound *Py_UNUSED(bound)) {
    XtKernel *kernels;
    int64_t count, lost;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_kernels_stop(&kernels, &count, &lost);
    py_gil_enter(saved);
    if (status == XT_INTERRUPTED) {
        free(kernels);
        return py_raise(status);
    }
    PyObject *text = why(status); /* before Python code of a collection changes it */
    PyObject *list = text == NULL ? NULL : PyList_New((Py_ssize_t)count), *result = NULL;
    for (int64_t i = 0; list != NULL && i < count; i++) {
        const XtKernel *kernel = &kernels[i];
        PyObject *name = PyUnicode_DecodeUTF8(kernel->name, (Py_ssize_t)strlen(kernel->name), "replace");
        PyObject *row = name == NULL ? NULL
                                     : Py_BuildValue("(NLLLii)", name, (long long)kernel->nbytes, (long long)kernel->begin,
                                                     (long long)kernel->end, kernel->device, kernel->stream);
        if (row == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, (Py_ssize_t)i, row);
    }
    free(kernels);
    if (list != NULL) result = Py_BuildValue("(OLO)", list, (long long)lost, text);
    Py_XDECREF(list);
    Py_XDECREF(text);
    return result;
}

const PyFunction py_span_functions[] = {
    {"spans_start", "-> bool", run_start, "From now on every op is recorded; False if that is so already.", 0, NULL},
    {"spans_stop", "-> ([(str, bool, int, int, int, str)], int)", run_stop,
     "Ends the recording: ([(name, whether it is the rule of the backward, begin and end in ns, number of the thread, shapes)],\n"
     "how many spans had no memory). In the order in which they ended.",
     0, NULL},
    {"kernels_start", "-> str", run_kernels_start,
     "From now on what runs on GPUs in use is recorded. Returns why it is not, or ''; nothing happens where no GPU is in use.", 0,
     NULL},
    {"kernels_stop", "-> ([(str, int, int, int, int, int)], int, str)", run_kernels_stop,
     "Waits for what was queued, and ends that: ([(name, bytes of a copy or fill or -1, begin and end in ns of the clock of spans, "
     "device,\n"
     "stream)], how many were lost, why nothing was recorded or '').",
     0, NULL},
    {"spans_clock", "-> (int, int)", run_clock, "(ns of the clock of spans, number of the calling thread).", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
