/* data_in.c - xt.tensor(data): copies numbers, nested lists, arrays and tensors into new memory.
 *
 * Nested lists take three walks: down the first elements for the shape, over everything for raggedness and the kind of number, and
 * over everything again to store. Elements may run Python code that changes the lists, so the last walk trusts no length.
 */
#include "py/convert/convert.h"

typedef enum Kind { KIND_BOOL, KIND_INT, KIND_FLOAT } Kind;

typedef struct Nest {
    const char *op;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
    Kind kind;           /* of the numbers */
    Kind held;           /* what is stored of them: integers of an integer dtype asked for, so that they keep all digits */
    char *at;            /* where the next element goes */
    const XtDtype *into; /* the dtype asked for, or NULL: every number must fit */
} Nest;

/* *out = the elements of a nested level (new reference), or NULL when `object` is a leaf. */
static int children(PyObject *object, PyObject **out) {
    *out = NULL;
    if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) *out = Py_NewRef(object);
    else if (PyList_Check(object) || PyTuple_Check(object) || PyRange_Check(object)) *out = PySequence_Tuple(object);
    else if (PyArray_Check(object) && PyArray_NDIM((PyArrayObject *)object) > 0) *out = PyObject_CallMethod(object, "tolist", NULL);
    else if (py_is_tensor(object) && py_tensor(object)->ndim > 0) *out = PyObject_CallMethod(object, "tolist", NULL);
    else return 0;
    if (*out != NULL && !PyList_Check(*out) && !PyTuple_Check(*out)) { /* a subclass's tolist() may return anything */
        Py_CLEAR(*out);
        PyErr_SetString(PyExc_TypeError, "tensor: tolist() of an element must return a list");
    }
    return *out != NULL ? 0 : -1;
}

static int find_shape(Nest *nest, PyObject *data) {
    PyObject *level = Py_NewRef(data);
    for (;;) {
        PyObject *items;
        int result = children(level, &items);
        Py_DECREF(level);
        if (result < 0 || items == NULL) return result;
        if (nest->ndim == XT_MAX_DIMS) {
            Py_DECREF(items);
            PyErr_Format(PyExc_ValueError, "%s: data must be nested at most %d lists deep", nest->op, XT_MAX_DIMS);
            return -1;
        }
        Py_ssize_t size = PySequence_Fast_GET_SIZE(items);
        nest->shape[nest->ndim++] = size;
        level = size > 0 ? Py_NewRef(PySequence_Fast_GET_ITEM(items, 0)) : NULL;
        Py_DECREF(items);
        if (level == NULL) return 0;
    }
}

/* The number of a leaf: 1, or -1 with an exception. */
static int leaf(const Nest *nest, PyObject *object, XtScalar *value, Kind *kind) {
    if (PyFloat_CheckExact(object)) {
        *value = xt_scalar_float(PyFloat_AS_DOUBLE(object));
        *kind = KIND_FLOAT;
        return 1;
    }
    bool truth =
        PyBool_Check(object) || PyArray_IsScalar(object, Bool) || (py_is_tensor(object) && py_tensor(object)->dtype == XT_BOOL);
    int found = py_number(nest->op, "data", object, value);
    if (found == 0) py_refuse(nest->op, "data", "numbers, nested lists of numbers, an array or a Tensor", object);
    *kind = truth ? KIND_BOOL : value->is_int ? KIND_INT : KIND_FLOAT;
    return found == 1 ? 1 : -1;
}

static void store(Nest *nest, XtScalar value) {
    if (nest->held == KIND_FLOAT) {
        memcpy(nest->at, &value.d, sizeof value.d);
        nest->at += sizeof value.d;
    } else if (nest->held == KIND_INT) {
        const int64_t whole = value.is_int ? value.i : (int64_t)value.d; /* it fits: see walk() */
        memcpy(nest->at, &whole, sizeof whole);
        nest->at += sizeof whole;
    } else {
        *nest->at++ = value.i != 0;
    }
}

static int walk(Nest *nest, PyObject *object, int depth);

static int walk_items(Nest *nest, PyObject *items, int depth) {
    for (int64_t i = 0; i < nest->shape[depth]; i++) {
        if (PySequence_Fast_GET_SIZE(items) != nest->shape[depth]) {
            PyErr_Format(PyExc_ValueError, "%s: lists at depth %d must all have length %lld, got %zd", nest->op, depth,
                         (long long)nest->shape[depth], PySequence_Fast_GET_SIZE(items));
            return -1;
        }
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(items, i));
        int result = walk(nest, item, depth + 1);
        Py_DECREF(item);
        if (result < 0) return -1;
    }
    return 0;
}

/* Finds the kind, or stores when nest->at is set. */
static int walk(Nest *nest, PyObject *object, int depth) {
    PyObject *items;
    if (depth == nest->ndim) {
        XtScalar value = {0};
        Kind kind;
        if (PyList_Check(object) || PyTuple_Check(object)) {
            PyErr_Format(PyExc_ValueError, "%s: element at depth %d must be a number like its neighbours, got a %s", nest->op,
                         depth, Py_TYPE(object)->tp_name);
            return -1;
        }
        if (leaf(nest, object, &value, &kind) < 0) return -1;
        if (nest->into != NULL && !xt_scalar_fits(value, *nest->into)) {
            PyErr_Format(PyExc_ValueError, "%s: data must fit into %s, got %.100R", nest->op, xt_dtype_name(*nest->into), object);
            return -1;
        }
        if (nest->at == NULL) {
            if (kind > nest->kind) nest->kind = kind;
        } else if (kind > nest->kind) {
            PyErr_Format(PyExc_ValueError, "%s: data changed while it was read", nest->op);
            return -1;
        } else {
            store(nest, value);
        }
        return 0;
    }
    if (children(object, &items) < 0) return -1;
    if (items == NULL) {
        PyErr_Format(PyExc_ValueError, "%s: element at depth %d must be a list of length %lld like its neighbours, got %.100s",
                     nest->op, depth, (long long)nest->shape[depth], Py_TYPE(object)->tp_name);
        return -1;
    }
    int result = PyErr_CheckSignals();
    if (result == 0 && PySequence_Fast_GET_SIZE(items) != nest->shape[depth]) {
        PyErr_Format(PyExc_ValueError, "%s: lists at depth %d must all have length %lld, got %zd", nest->op, depth,
                     (long long)nest->shape[depth], PySequence_Fast_GET_SIZE(items));
        result = -1;
    }
    if (result == 0) result = walk_items(nest, items, depth);
    Py_DECREF(items);
    return result;
}

/* Takes over `tensor`; returns it cast to dtype. */
static XtTensor *as_dtype(XtTensor *tensor, XtDtype dtype) {
    if (tensor == NULL || tensor->dtype == dtype) return tensor;
    XtArg args[2] = {py_arg_tensor(tensor), py_arg_dtype(dtype)};
    XtTensor *out = py_call_plain(&xt_op_cast, args, 2);
    xt_tensor_release(tensor);
    return out;
}

static XtTensor *new_tensor(XtDtype dtype, int ndim, const int64_t *shape) {
    XtTensor *tensor = NULL;
    XtStatus status = xt_tensor_empty((XtDevice){.type = XT_CPU}, dtype, ndim, shape, &tensor);
    if (status != XT_OK) py_raise(status);
    return status == XT_OK ? tensor : NULL;
}

static XtTensor *from_nest(const char *op, PyObject *data, const XtDtype *dtype) {
    static const XtDtype exact[] = {XT_BOOL, XT_INT64, XT_FLOAT64};
    Nest nest = {.op = op};
    if (find_shape(&nest, data) < 0) return NULL;
    /* Before a walk that may meet the same list a million times. */
    XtStatus status = xt_size_of(XT_FLOAT64, nest.ndim, nest.shape, NULL, NULL);
    if (status != XT_OK) {
        py_raise(status);
        return NULL;
    }
    if (walk(&nest, data, 0) < 0) return NULL;
    bool empty = false;
    for (int i = 0; i < nest.ndim; i++) empty = empty || nest.shape[i] == 0;
    if (empty) nest.kind = KIND_FLOAT;
    bool whole = dtype != NULL && *dtype != XT_BOOL && !xt_dtype_is_float(*dtype);
    nest.held = whole ? KIND_INT : nest.kind;

    XtTensor *tensor = new_tensor(exact[nest.held], nest.ndim, nest.shape);
    if (tensor == NULL) return NULL;
    nest.at = tensor->data;
    nest.into = dtype;
    if (nest.at != NULL && walk(&nest, data, 0) < 0) {
        xt_tensor_release(tensor);
        return NULL;
    }
    return as_dtype(tensor, dtype != NULL ? *dtype : nest.kind == KIND_FLOAT ? XT_FLOAT32 : exact[nest.kind]);
}

/* Copies an array of any strides, byte order and alignment. An array of a dtype that xtrain lacks needs `dtype`, and is cast. */
static XtTensor *copy_array(const char *op, PyArrayObject *array, const XtDtype *dtype) {
    XtDtype held;
    XtTensor *tensor = NULL;
    PyArray_Descr *descr = NULL;
    if (PyArray_NDIM(array) > XT_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: array must have at most %d dimensions, got %d", op, XT_MAX_DIMS, PyArray_NDIM(array));
        return NULL;
    }
    if (py_numpy_dtype(array, &held)) {
        descr = PyArray_DescrFromType(PyArray_TYPE(array)); /* in native byte order */
    } else if (dtype != NULL && PyTypeNum_ISNUMBER(PyArray_TYPE(array)) && !PyArray_ISCOMPLEX(array)) {
        held = *dtype == XT_BFLOAT16 ? XT_FLOAT32 : *dtype;
        descr = py_numpy_descr(op, held);
    } else {
        PyErr_Format(PyExc_TypeError,
                     "%s: array must be float32, float64, float16, bfloat16, int32, int64, uint8 or bool%s, got %S", op,
                     PyTypeNum_ISINTEGER(PyArray_TYPE(array)) ? " (or pass dtype=)" : "", PyArray_DESCR(array));
    }
    if (descr == NULL) return NULL;
    int64_t shape[XT_MAX_DIMS];
    for (int i = 0; i < PyArray_NDIM(array); i++) shape[i] = PyArray_DIM(array, i);
    tensor = new_tensor(held, PyArray_NDIM(array), shape);
    if (tensor == NULL || tensor->data == NULL) {
        Py_DECREF(descr);
        return tensor != NULL && dtype != NULL ? as_dtype(tensor, *dtype) : tensor;
    }
    PyObject *target = PyArray_NewFromDescr(&PyArray_Type, descr, PyArray_NDIM(array), PyArray_DIMS(array), NULL, tensor->data,
                                            NPY_ARRAY_CARRAY, NULL); /* takes over descr */
    int result = target != NULL ? PyArray_CopyInto((PyArrayObject *)target, array) : -1;
    Py_XDECREF(target);
    if (result < 0) {
        xt_tensor_release(tensor);
        return NULL;
    }
    return dtype != NULL ? as_dtype(tensor, *dtype) : tensor;
}

static XtTensor *copy_tensor(XtTensor *source, const XtDtype *dtype) {
    XtTensor *host = py_on_host(source);
    if (host == NULL) return NULL;
    XtArg args[2] = {py_arg_tensor(host), py_arg_dtype(dtype != NULL ? *dtype : host->dtype)};
    bool cast = dtype != NULL && *dtype != host->dtype;
    XtTensor *copy = py_call_plain(cast ? &xt_op_cast : &xt_op_clone, args, cast ? 2 : 1);
    xt_tensor_release(host);
    return copy;
}

/* Whether NumPy reads it: an array or scalar of NumPy, an object with a buffer or __array__. */
static bool is_array_like(PyObject *object) {
    if (PyArray_Check(object) || PyArray_CheckScalar(object)) return true;
    if (PyBytes_Check(object) || PyUnicode_Check(object) || PyList_Check(object) || PyTuple_Check(object)) return false;
    return PyObject_CheckBuffer(object) || PyObject_HasAttrString(object, "__array__");
}

static XtTensor *from_data(const char *op, PyObject *data, const XtDtype *dtype) {
    if (py_is_tensor(data)) return copy_tensor(py_tensor(data), dtype);
    if (!is_array_like(data)) return from_nest(op, data, dtype);
    PyObject *array = PyArray_FromAny(data, NULL, 0, 0, 0, NULL);
    if (array == NULL) return NULL;
    XtTensor *tensor = copy_array(op, (PyArrayObject *)array, dtype);
    Py_DECREF(array);
    return tensor;
}

static PyObject *run_tensor(PyBound *bound) {
    XtDtype dtype = (XtDtype)bound->arg[1].i;
    XtTensor *tensor = from_data("tensor", bound->object[0], bound->arg[1].given ? &dtype : NULL);
    if (tensor == NULL) return NULL;
    XtDevice device = bound->arg[2].device;
    if (!bound->arg[2].given)
        device = py_is_tensor(bound->object[0]) ? py_tensor(bound->object[0])->storage->device : xt_default_device();
    if (!xt_device_equal(device, tensor->storage->device)) {
        XtArg args[2] = {py_arg_tensor(tensor), py_arg_device(device)};
        XtTensor *moved = py_call_plain(&xt_op_to_device, args, 2);
        xt_tensor_release(tensor);
        if (moved == NULL) return NULL;
        tensor = moved;
    }
    XtStatus status = bound->arg[3].b ? xt_set_requires_grad(tensor, true) : XT_OK;
    if (status == XT_OK) return py_wrap(tensor);
    xt_tensor_release(tensor);
    return py_raise(status);
}

static PyObject *run_from_numpy(PyBound *bound) {
    PyObject *array = bound->object[0];
    if (PyArray_Check(array)) return py_wrap(py_from_array("from_numpy", array));
    py_refuse("from_numpy", "array", "a NumPy array (xt.tensor takes anything else)", array);
    return NULL;
}

const PyFunction py_data_functions[] = {
    {"tensor", "data: object, dtype: dtype? = None, device: device? = None, requires_grad: bool = False -> Tensor", run_tensor,
     "Copies data: a number, nested lists, a NumPy array, a Tensor or anything with a buffer or __array__.\n"
     "Without dtype, Python floats become float32, ints int64, bools bool, and arrays keep theirs.",
     0, NULL},
    {"from_numpy", "array: object -> Tensor", run_from_numpy,
     "Tensor over the memory of a writable NumPy array, which it keeps alive; nothing is copied.\n"
     "Refuses negative strides, foreign byte order, misaligned or read-only arrays and dtypes without a counterpart.",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
