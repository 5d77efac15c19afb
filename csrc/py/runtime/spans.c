/* spans.c - what xtrain.profiling needs: spans of ops, and the clock and thread numbers that they have. */
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

const PyFunction py_span_functions[] = {
    {"spans_start", "-> bool", run_start, "From now on every op is recorded; False if that is so already.", 0, NULL},
    {"spans_stop", "-> ([(str, bool, int, int, int, str)], int)", run_stop,
     "Ends the recording: ([(name, whether it is the rule of the backward, begin and end in ns, number of the thread, shapes)],\n"
     "how many spans had no memory). In the order in which they ended.",
     0, NULL},
    {"spans_clock", "-> (int, int)", run_clock, "(ns of the clock of spans, number of the calling thread).", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
