/* py.h - how Python meets the core: the one struct of module state, the tensor object, and the argument binder.
 *
 * Everything callable, an XtOp as well as a function written here, is one record (PyFunction: name, signature, doc, C function).
 * signature.c parses the signature once at import, callable.c makes an object of type `_C.Op` from it that binds like a method, and
 * args.c turns the positional and keyword arguments of a call into XtArg[] or raises. So the run functions below get checked
 * arguments.
 *
 * Conventions: functions that return PyObject * return a new reference or NULL with an exception set; `int` functions return 0, or
 * -1 with an exception set. The GIL is held on entry to everything here except the callbacks marked "any thread".
 */
#ifndef XT_PY_H
#define XT_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops/ops.h"

/* ---- state ----------------------------------------------------------------------------------------------------------- */

typedef struct PyState {
    PyTypeObject *tensor_type, *dtype_type, *device_type, *op_type, *handle_type; /* owned */
    PyObject *dtype[XT_DTYPE_COUNT];                                              /* owned; the only instances of dtype_type */
    PyObject *out_of_memory_error, *cuda_error;                                   /* owned */
    PyObject *bfloat16;                                                           /* owned; numpy.dtype of ml_dtypes, or NULL */
    XtTensor *nothing;   /* owned; stands in for the tensor of an object that the garbage collector has cleared */
    PyObject *call_hook; /* owned; the callable of set_call_hook, or NULL */
    int running;         /* core calls running without the GIL, in all threads; see tensor_traverse */
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

/* ---- errors and the GIL ---------------------------------------------------------------------------------------------- */

/* Raises the exception of a failed status with this thread's message; returns NULL. */
PyObject *py_raise(XtStatus status);
/* The one sentence of a refused object: "op: argument 'name' must be <rule>, got <type>"; returns -1. */
int py_refuse(const char *op, const char *name, const char *rule, PyObject *got);
bool py_interrupt_check(void); /* any thread */
int py_errors_init(PyObject *module);

/* Around every call into the core that may take time. */
PyThreadState *py_gil_leave(void);
void py_gil_enter(PyThreadState *saved);

/* Tells the hook of set_call_hook, which must be set, about a call that succeeded: testing.c. */
int py_call_seen(const XtOp *op, const XtArg *args, int count, XtTensor *const *out, int out_count);

/* xt_call without the GIL. */
XtStatus py_call(const XtOp *op, const XtArg *args, int count, XtTensor **out, int *out_count);
/* The same for ops with one output: returns new, or NULL with an exception. */
XtTensor *py_call_one(const XtOp *op, const XtArg *args, int count);
/* The same with recording switched off, and not shown to the call hook: what this folder needs for itself. */
XtTensor *py_call_plain(const XtOp *op, const XtArg *args, int count);

static inline XtArg py_arg_tensor(XtTensor *tensor) {
    return (XtArg){.given = tensor != NULL, .is_tensor = true, .tensor = tensor};
}
static inline XtArg py_arg_int(int64_t value) { return (XtArg){.given = true, .i = value}; }
static inline XtArg py_arg_dtype(XtDtype dtype) { return (XtArg){.given = true, .i = (int64_t)dtype}; }
static inline XtArg py_arg_device(XtDevice device) { return (XtArg){.given = true, .device = device}; }

/* ---- functions, signatures, arguments -------------------------------------------------------------------------------- */

struct PyBound;

typedef struct PyFunction {
    const char *name;      /* NULL ends a table */
    const char *signature; /* the grammar of ops.h, and the kind `object`: anything, unconverted */
    PyObject *(*run)(struct PyBound *bound);
    const char *doc;
    int tag;        /* for functions that share `run` */
    const XtOp *op; /* the op behind it, or NULL */
} PyFunction;

#define PY_ARG_OBJECT 100 /* continues XtArgKind */

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

typedef struct PySignature {
    PyFunction function;
    PyObject *text; /* owned; "(input, dim=-1, *, out=None)", as __text_signature__ wants it */
    int count;      /* parameters */
    int positional; /* the first so many may be given by position */
    PyParam param[XT_MAX_ARGS];
} PySignature;

/* Returns new, or NULL with SystemError: a signature that does not parse is a bug. */
PySignature *py_signature_new(const PyFunction *function);
void py_signature_free(PySignature *signature);
const char *py_kind_rule(int kind, bool optional); /* "a Tensor or None", for messages */

/* The arguments of one call. */
typedef struct PyBound {
    const PySignature *signature;
    XtArg arg[XT_MAX_ARGS];
    PyObject *object[XT_MAX_ARGS]; /* borrowed from the caller; None where a default is None; NULL for other defaults */
    PyObject *keep[XT_MAX_ARGS];   /* owned; the tuple behind a Tensors argument */
} PyBound;

int py_bind(const PySignature *signature, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyBound *bound);
void py_bound_clear(PyBound *bound);

/* 1: converted, 0: not of that kind (nothing raised), -1: raised. */
int py_number(const char *op, const char *name, PyObject *object, XtScalar *out);
int py_operand(const char *op, const char *name, PyObject *object, XtArg *out);
int py_int64(const char *op, const char *name, PyObject *object, int64_t *out);

int py_callables_init(PyObject *module);
const PySignature *py_signature_of(PyObject *op); /* borrowed from the Op object */
PyObject *py_run_op(PyBound *bound);

/* Tables of the functions written in this folder. */
extern const PyFunction py_tensor_methods[], py_convert_methods[], py_dlpack_methods[], py_autograd_methods[];
extern const PyFunction py_convert_functions[], py_dlpack_functions[], py_autograd_functions[], py_runtime_functions[],
    py_repr_functions[], py_bytes_functions[], py_testing_functions[], py_cuda_functions[];

/* ---- dtypes, devices ------------------------------------------------------------------------------------------------- */

int py_dtypes_init(PyObject *module);
PyObject *py_dtype_object(XtDtype dtype); /* new reference */
PyObject *py_device_object(XtDevice device);
/* The text of a str, or NULL with an exception that names the argument. length: NULL, or where the bytes are counted. */
const char *py_utf8(const char *op, const char *name, PyObject *object, Py_ssize_t *length);
/* As py_number. Both take the object or its name; an unknown name raises ValueError. */
int py_dtype(const char *op, const char *name, PyObject *object, XtDtype *out);
int py_device(const char *op, const char *name, PyObject *object, XtDevice *out);
bool py_dtype_named(const char *text, XtDtype *out);
bool py_device_named(const char *text, XtDevice *out);

/* ---- the tensor type ------------------------------------------------------------------------------------------------- */

int py_tensor_init(PyObject *module);
int py_handle_init(PyObject *module);

PyObject *py_shape_tuple(int ndim, const int64_t *values);
PyObject *py_element(XtDtype dtype, const void *address); /* the Python number at a host address */
PyObject *py_item(const char *op, XtTensor *tensor);      /* of a tensor with one element */
XtTensor *py_on_host(XtTensor *tensor);                   /* new: itself, or a copy on the CPU; no recording */
int py_stats(XtTensor *tensor, double out[5]);            /* as XtStats */

/* numbers: tensor/number.c */
PyObject *py_nb_add(PyObject *a, PyObject *b);
PyObject *py_nb_subtract(PyObject *a, PyObject *b);
PyObject *py_nb_multiply(PyObject *a, PyObject *b);
PyObject *py_nb_divide(PyObject *a, PyObject *b);
PyObject *py_nb_power(PyObject *a, PyObject *b, PyObject *modulus);
PyObject *py_nb_matmul(PyObject *a, PyObject *b);
PyObject *py_nb_add_inplace(PyObject *a, PyObject *b);
PyObject *py_nb_subtract_inplace(PyObject *a, PyObject *b);
PyObject *py_nb_multiply_inplace(PyObject *a, PyObject *b);
PyObject *py_nb_divide_inplace(PyObject *a, PyObject *b);
PyObject *py_nb_negative(PyObject *self);
PyObject *py_nb_positive(PyObject *self);
PyObject *py_nb_absolute(PyObject *self);
int py_nb_bool(PyObject *self);
PyObject *py_nb_int(PyObject *self);
PyObject *py_nb_float(PyObject *self);
PyObject *py_nb_index(PyObject *self);
PyObject *py_richcompare(PyObject *a, PyObject *b, int operation);

/* indexing: tensor/index.c */
Py_ssize_t py_length(PyObject *self);
PyObject *py_sequence_item(PyObject *self, Py_ssize_t index);
PyObject *py_iterate(PyObject *self);
PyObject *py_subscript(PyObject *self, PyObject *key);
int py_assign_subscript(PyObject *self, PyObject *key, PyObject *value);

/* representation, buffers, autograd */
PyObject *py_repr(PyObject *self);
int py_getbuffer(PyObject *self, Py_buffer *view, int flags);
void py_releasebuffer(PyObject *self, Py_buffer *view);
PyObject *py_array_behind(const XtStorage *storage); /* borrowed: the array that from_numpy keeps alive, or NULL */
int py_traverse_grad(XtTensor *tensor, visitproc visit, void *arg);
PyObject *py_numpy_view(const char *op, PyObject *self);                      /* ndarray over the same memory */
XtTensor *py_from_array(const char *op, PyObject *array);                     /* zero copy, new */
XtTensor *py_from_data(const char *op, PyObject *data, const XtDtype *dtype); /* copies; on the CPU; NULL dtype: by the data */
int py_numpy_init(void);

#endif
