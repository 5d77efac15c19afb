/* bind.h - from a Python call to XtArg[], and from an XtStatus to an exception.
 *
 * The files from the bottom up; each calls only those before it:
 *
 *     errors.c               a status becomes an exception
 *     plain.c                calls of ops on our own behalf
 *     element.c              an element of a tensor as a Python number
 *     numbers.c, kinds.c     Python numbers and text as C values; the kinds of arguments
 *     dtype.c, device.c      the types `dtype` and `device`
 *     signature.c, args.c    the signature text, and the arguments of one call bound by it
 *     callable.c             `_C.Op`, the type of everything callable
 *     hook.c, call.c         an op run for Python, and shown to the call hook
 */
#pragma once

#include "py/py.h"

/* ---- errors.c -------------------------------------------------------------------------------------------------------- */

/* Raises the exception of a failed status with this thread's message; returns NULL. */
PyObject *py_raise(XtStatus status);
/* The same where XT_OK is possible: None or NULL, 0 or -1. */
PyObject *py_none(XtStatus status);
int py_check(XtStatus status);
/* Refuses an object: "op: argument 'name' must be <rule>, got <type>"; returns -1. */
int py_refuse(const char *op, const char *name, const char *rule, PyObject *got);
/* Whether it has `__dlpack__` and is none of ours: of PyTorch, CuPy, JAX, or a NumPy array. */
bool py_is_foreign_tensor(PyObject *object);
bool py_interrupt_check(void); /* any thread; false in all but Python's main thread */
int py_errors_init(PyObject *module);

/* ---- calls into the core, plain.c ------------------------------------------------------------------------------------ */

/* At the end of the process: from now on Python's main thread alone calls the core, and others stay where they enter it, for ever. A GPU's
 * driver does not bear calls while it is torn down, so where there is one, those that are inside are waited for. */
void py_end_threads(void);
void py_park(void); /* returns in the main thread only; the GIL is held */

/* Around every call into the core that may take time: other Python threads run meanwhile. Inline, as every op passes here. */
static inline PyThreadState *py_gil_leave(void) {
    if (xt_py->ending) py_park();
    xt_py->running++;
    return PyEval_SaveThread();
}
static inline void py_gil_enter(PyThreadState *saved) {
    PyEval_RestoreThread(saved);
    xt_py->running--;
}

/* Around Python code that a call into the core calls, such as a hook: where it calls the core again at the end of the process, its thread
 * stays there for ever, and is not waited for. */
PyGILState_STATE py_code_begins(void);
void py_code_ends(PyGILState_STATE gil);

/* xt_call without the GIL, not shown to the call hook. */
static inline XtStatus py_call_unseen(const XtOp *op, const XtArg *args, int count, XtTensor **out, int *out_count) {
    *out_count = 0;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_call(op, args, count, out, out_count);
    py_gil_enter(saved);
    return status;
}

/* The first output of a call that ended with `status`, the rest released; or NULL with an exception. */
XtTensor *py_first_output(const XtOp *op, XtStatus status, XtTensor *const *out, int out_count);
/* The first output of an op, neither recorded nor shown to the call hook. Returns new, or NULL with an exception. */
XtTensor *py_call_plain(const XtOp *op, const XtArg *args, int count);

static inline XtArg py_arg_tensor(XtTensor *tensor) {
    return (XtArg){.given = tensor != NULL, .is_tensor = true, .tensor = tensor};
}
static inline XtArg py_arg_int(int64_t value) { return (XtArg){.given = true, .i = value}; }
static inline XtArg py_arg_dtype(XtDtype dtype) { return (XtArg){.given = true, .i = (int64_t)dtype}; }
static inline XtArg py_arg_device(XtDevice device) { return (XtArg){.given = true, .device = device}; }

/* ---- element.c ------------------------------------------------------------------------------------------------------- */

XtTensor *py_on_host(XtTensor *tensor);                   /* new: itself, or an unrecorded copy on the CPU */
PyObject *py_element(XtDtype dtype, const void *address); /* the Python number at a host address */
PyObject *py_item(const char *op, XtTensor *tensor);      /* of a tensor with one element */

/* ---- numbers.c: 1: converted, 0: not of that kind (nothing raised), -1: raised --------------------------------------- */

int py_int64(const char *op, const char *name, PyObject *object, int64_t *out);
int py_double(const char *op, const char *name, PyObject *object, double *out);
int py_number(const char *op, const char *name, PyObject *object, XtScalar *out);
int py_operand(const char *op, const char *name, PyObject *object, XtArg *out);
/* The text of a str, or NULL with an exception that names the argument. length: NULL, or where the bytes are counted. */
const char *py_utf8(const char *op, const char *name, PyObject *object, Py_ssize_t *length);

/* ---- kinds.c --------------------------------------------------------------------------------------------------------- */

#define PY_ARG_OBJECT 100 /* continues XtArgKind */

int py_kind_named(const char *word);               /* -1: no such kind */
const char *py_kind_rule(int kind, bool optional); /* "a Tensor or None", for messages */

/* ---- dtype.c, device.c ----------------------------------------------------------------------------------------------- */

int py_dtype_init(PyObject *module);
int py_device_init(PyObject *module);
PyObject *py_dtype_object(XtDtype dtype); /* new reference */
PyObject *py_device_object(XtDevice device);
/* As py_number. Both take the object or its name; an unknown name raises ValueError. */
int py_dtype(const char *op, const char *name, PyObject *object, XtDtype *out);
int py_device(const char *op, const char *name, PyObject *object, XtDevice *out);
bool py_dtype_named(const char *text, XtDtype *out);
bool py_device_named(const char *text, XtDevice *out);

/* ---- signature.c ----------------------------------------------------------------------------------------------------- */

struct PyBound;

/* Functions of csrc/py extend the grammar of ops.h. Arguments: the kind `object` (anything, unconverted). Results: every kind,
 * (kind, kind), [kind] for a list, {kind} for a dict by name, the classes ndarray, memoryview and Handle; `self` is a Tensor of the
 * class of the first argument. */
typedef struct PyFunction {
    const char *name; /* NULL ends a table */
    const char *signature;
    PyObject *(*run)(struct PyBound *bound);
    const char *doc;
    int tag;        /* for functions that share `run` */
    const XtOp *op; /* the op behind it, or NULL */
} PyFunction;

typedef struct PyParam {
    char name[32];
    char text[32]; /* of the default, */
    char word[32]; /* and without its quotes */
    PyObject *key; /* owned, interned name */
    int kind;      /* XtArgKind or PY_ARG_OBJECT */
    bool optional; /* None is accepted */
    bool has_default;
    XtArg value; /* the default */
} PyParam;

/* What an op's outputs become; functions make their own objects. */
typedef enum PyResult { PY_RESULT_OWN, PY_RESULT_NONE, PY_RESULT_SELF, PY_RESULT_TENSOR, PY_RESULT_TUPLE } PyResult;

typedef struct PySignature {
    PyFunction function;
    PyObject *text; /* owned; "(input, dim=-1, *, out=None)", for __text_signature__ */
    PyObject *full; /* owned; "softmax(input: Tensor, dim: int = -1) -> Tensor", for people */
    PyResult result;
    int arrow;      /* where `->` begins in the signature */
    int count;      /* parameters */
    int positional; /* number of those that may be given by position */
    PyParam param[XT_MAX_ARGS];
} PySignature;

/* Returns new, or NULL with SystemError: a signature that does not parse is a bug. */
PySignature *py_signature_new(const PyFunction *function);
void py_signature_free(PySignature *signature);

/* ---- args.c ---------------------------------------------------------------------------------------------------------- */

/* The arguments of one call. */
typedef struct PyBound {
    const PySignature *signature;
    XtArg arg[XT_MAX_ARGS];
    PyObject *object[XT_MAX_ARGS]; /* borrowed from the caller; None where a default is None; NULL for other defaults */
    PyObject *keep[XT_MAX_ARGS];   /* owned; the tuple behind a Tensors argument */
} PyBound;

int py_bind(const PySignature *signature, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyBound *bound);
void py_bound_clear(PyBound *bound);

/* ---- callable.c ------------------------------------------------------------------------------------------------------ */

int py_callable_init(PyObject *module);
/* Puts `function` into the module, the Tensor type, or both. */
int py_callable_add(PyObject *module, const PyFunction *function, bool in_module, bool in_type);
const PySignature *py_signature_of(PyObject *op); /* borrowed from the Op object */

/* ---- hook.c, call.c -------------------------------------------------------------------------------------------------- */

/* Sets set_call_hook's callable, or None, of this thread or of all. Returns new, the one before or None; NULL with an exception. */
PyObject *py_swap_hook(PyObject *hook, bool thread);
/* Tells the callables of set_call_hook for this thread and for all, if they are set, about a call that succeeded. */
int py_call_seen(const XtOp *op, const XtArg *args, int count, XtTensor *const *out, int out_count);

/* An op with one output: returns new, or NULL with an exception. */
XtTensor *py_call_one(const XtOp *op, const XtArg *args, int count);
/* What the Op object of an XtOp runs. */
PyObject *py_run_op(PyBound *bound);
