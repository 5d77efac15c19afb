/* testing.c - what xtrain.testing needs from the core: comparing two tensors on their device, and a hook for every op call. */
#include "contract/backend.h"
#include "contract/reduce.h"
#include "core/core.h"
#include "py/runtime/runtime.h"

#include <math.h>

/* ---- compare --------------------------------------------------------------------------------------------------------- */

static bool check_compare(const XtTensor *out, const XtTensor *ref, double rtol, double atol) {
    if (!xt_same_shape(&out->view, &ref->view))
        PyErr_Format(PyExc_ValueError, "compare: other must have shape %s, got %s", xt_shape_text(out->ndim, out->shape),
                     xt_shape_text(ref->ndim, ref->shape));
    else if (!xt_device_equal(out->storage->device, ref->storage->device))
        PyErr_Format(PyExc_ValueError, "compare: other must be on %s, got %s", xt_device_name(out->storage->device),
                     xt_device_name(ref->storage->device));
    else if (xt_dtype_is_float(out->dtype) != xt_dtype_is_float(ref->dtype))
        PyErr_Format(PyExc_TypeError, "compare: other must be %s like input, got %s",
                     xt_dtype_is_float(out->dtype) ? "floating point" : "an integer dtype", xt_dtype_name(ref->dtype));
    else if (!(isfinite(rtol) && isfinite(atol) && rtol >= 0 && atol >= 0))
        py_raise(xt_error(XT_VALUE_ERROR, "compare: rtol and atol must be finite and not negative, got %g and %g", rtol, atol));
    return PyErr_Occurred() == NULL;
}

static PyObject *run_compare(PyBound *bound) {
    XtTensor *out = bound->arg[0].tensor, *ref = bound->arg[1].tensor;
    XtComparison r;
    XtCompare params = {.out = out->view, .ref = ref->view, .rtol = bound->arg[2].f, .atol = bound->arg[3].f, .result = &r};
    if (!check_compare(out, ref, params.rtol, params.atol)) return NULL;
    const XtBackend *backend;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_backend_for(out->storage->device, &backend);
    if (status == XT_OK) status = backend->compare(&params);
    py_gil_enter(saved);
    if (status != XT_OK) return py_raise(status);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:d,s:d,s:d,s:d}", "errors", (long long)r.errors, "worst", (long long)r.worst,
                         "out_nan", (long long)r.out_nan, "out_inf", (long long)r.out_inf, "ref_nan", (long long)r.ref_nan,
                         "ref_inf", (long long)r.ref_inf, "max_abs", r.max_abs, "max_rel", r.max_rel, "max_ref", r.max_ref,
                         "worst_ratio", r.worst_ratio);
}

/* ---- the call hook --------------------------------------------------------------------------------------------------- */

static PyObject *run_set_call_hook(PyBound *bound) {
    PyObject *hook = bound->object[0];
    if (hook != Py_None && !PyCallable_Check(hook)) {
        py_refuse("set_call_hook", "hook", "a callable or None", hook);
        return NULL;
    }
    return py_swap_hook(hook, bound->arg[1].b);
}

/* ---- memory that ends ------------------------------------------------------------------------------------------------ */

static PyObject *run_fail_storages(PyBound *bound) {
    return PyLong_FromLongLong(xt_fail_storages(bound->arg[0].i, bound->arg[1].i));
}

/* ---- a race for ThreadSanitizer -------------------------------------------------------------------------------------- */

#if defined(__SANITIZE_THREAD__)
#include <pthread.h>

static int planted; /* under no lock, on purpose */
static void *count_up(void *Py_UNUSED(unused)) {
    for (int i = 0; i < 1000; i++) planted++;
    return NULL;
}

static PyObject *run_planted_race(PyBound *Py_UNUSED(bound)) {
    pthread_t other;
    if (pthread_create(&other, NULL, count_up, NULL) != 0) return PyErr_NoMemory();
    count_up(NULL);
    pthread_join(other, NULL);
    return PyLong_FromLong(planted);
}
#endif

const PyFunction py_testing_functions[] = {
#if defined(__SANITIZE_THREAD__)
    {"planted_race", "-> int", run_planted_race, "Two threads count without a lock: ThreadSanitizer must report it.", 0, NULL},
#endif
    {"compare", "input: Tensor, other: Tensor, rtol: float, atol: float -> {number}", run_compare,
     "Compares input with other, the reference, on their device; returns the counts and maxima of XtComparison "
     "(csrc/contract/reduce.h).",
     0, NULL},
    {"fail_storages", "first: int, last: int -> int", run_fail_storages,
     "For tests: the storages number first to last that are asked for from now on, on any device, raise OutOfMemoryError.\n"
     "0 is the next; last < first: none fails. Returns how many were asked for since the call before, if that chose some.",
     0, NULL},
    {"set_call_hook", "hook: object, thread: bool = False -> object", run_set_call_hook,
     "hook(op, arguments, outputs) is called after every op of this process, except ops that a hook itself calls.\n"
     "op is `_C.<name>`, arguments a dict by parameter name, outputs a tuple of Tensors.\n"
     "thread: it sees the ops of this thread alone; that of the process stays, and is called after it.\n"
     "None removes the hook. Returns the previous hook, of the thread or of the process.",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
