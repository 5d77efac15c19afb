/* py.h - the state of the module `xtrain._C`, and the Python object of a tensor.
 *
 * Everything callable, an XtOp as well as a function written here, is one record (PyFunction in bind/bind.h: name, signature, C
 * function, doc). At import each record becomes an object of type `_C.Op`, with its signature parsed. A call of that object turns
 * Python's arguments into XtArg[] or raises, so the C function gets checked arguments.
 *
 * Rooms, each with a header. A file calls its own room and the rooms above it in this list; no calls form a circle:
 *
 *     py.c      module state, wrapping a tensor
 *     bind/     errors, numbers, dtypes, signatures, arguments, calls of an op
 *     convert/  NumPy, DLPack, buffers, bytes, nested lists
 *     tensor/   the type Tensor: operators, indexing, methods, representation, autograd
 *     runtime/  functions about the process and its devices; the module itself
 *
 * Conventions: functions that return PyObject * return a new reference or NULL with an exception set; `int` functions return 0, or
 * -1 with an exception set. The GIL is held on entry to everything here except the callbacks marked "any thread".
 */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/ops.h"

typedef struct PyState {
    PyTypeObject *tensor_type, *dtype_type, *device_type, *op_type, *handle_type; /* owned */
    PyObject *dtype[XT_DTYPE_COUNT];                                              /* owned; the only instances of dtype_type */
    PyObject *out_of_memory_error, *cuda_error;                                   /* owned */
    PyObject *bfloat16;                                                           /* owned; numpy.dtype of ml_dtypes, or NULL */
    XtTensor *nothing;   /* owned; replaces the tensor of an object that the garbage collector has cleared */
    PyObject *call_hook; /* owned; the callable of set_call_hook for all threads, or NULL */
    int hooks;           /* callables of set_call_hook that are set: call_hook, and those of single threads */
    int running;         /* core calls running without the GIL, in all threads; see tensor_traverse */
    bool ending;         /* the process ends: see py_end_threads */
    int parked;          /* of those `running`, the calls of threads that py_park keeps in Python code that the core has called */
} PyState;

/* NULL before the module is initialised. One per process: the callbacks of the core carry no module. */
extern PyState *xt_py;

typedef struct PyTensor {
    PyObject_HEAD XtTensor *tensor; /* owned; NULL only between allocation and the end of py_wrap */
    PyObject *weakrefs;             /* managed by CPython */
    int64_t exports;                /* buffers given out and not yet released */
} PyTensor;

static inline bool py_is_tensor(PyObject *object) { return PyObject_TypeCheck(object, xt_py->tensor_type); }
static inline XtTensor *py_tensor(PyObject *object) { return ((PyTensor *)object)->tensor; }

/* Takes over the reference to `tensor` (NULL allowed: the exception is already set), also when it fails. */
PyObject *py_wrap(XtTensor *tensor);
PyObject *py_wrap_as(PyTypeObject *type, XtTensor *tensor);
PyObject *py_wrap_borrowed(XtTensor *tensor);                 /* takes a reference of its own */
PyObject *py_wrap_tuple(XtTensor *const *tensors, int count); /* of borrowed tensors */

PyObject *py_shape_tuple(int ndim, const int64_t *values);

int py_numpy_init(void); /* imports NumPy's C API */
