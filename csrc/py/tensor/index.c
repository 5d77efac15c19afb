/* index.c - x[...]: a chain of the ops select, slice and unsqueeze, so that it is differentiable and never copies. Keys with tensors, lists
 * or masks go to xtrain/tensors/indexing.py. */
#include "py/tensor/tensor.h"

/* Applies one op to *current, which is replaced. */
static int step(XtTensor **current, const XtOp *op, const XtArg *args, int count) {
    XtTensor *next = py_call_one(op, args, count);
    if (next == NULL) return -1;
    xt_tensor_release(*current);
    *current = next;
    return 0;
}

static int select_index(XtTensor **current, int dim, PyObject *item) {
    int64_t size = (*current)->shape[dim];
    Py_ssize_t index = PyNumber_AsSsize_t(item, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) return -1;
    if (index < -size || index >= size) {
        PyErr_Format(PyExc_IndexError, "index %lld is out of range for dimension %d of size %lld", (long long)index, dim,
                     (long long)size);
        return -1;
    }
    XtArg args[3] = {py_arg_tensor(*current), py_arg_int(dim), py_arg_int(index)};
    return step(current, &xt_op_select, args, 3);
}

static int slice_range(XtTensor **current, int dim, PyObject *item) {
    Py_ssize_t start, stop, stride, size = (*current)->shape[dim];
    PySliceObject *slice = (PySliceObject *)item;
    if (slice->step != Py_None) { /* before PySlice_Unpack, whose message for 0 is vaguer */
        PyObject *number = PyNumber_Index(slice->step);
        if (number == NULL) return -1;
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
        Py_DECREF(number);
        if (overflow < 0 || (overflow == 0 && value < 1)) {
            PyErr_Format(PyExc_ValueError, "slice: step must be at least 1 (reversing is not supported), got %R", slice->step);
            return -1;
        }
    }
    if (PySlice_Unpack(item, &start, &stop, &stride) < 0) return -1;
    PySlice_AdjustIndices(size, &start, &stop, stride);
    if (start == 0 && stop >= size && stride == 1) return 0;
    if (stop < start) stop = start;
    XtArg args[5] = {py_arg_tensor(*current), py_arg_int(dim), py_arg_int(start), py_arg_int(stop), py_arg_int(stride)};
    return step(current, &xt_op_slice, args, 5);
}

static int refuse_key(PyObject *item) {
    PyErr_Format(PyExc_TypeError,
                 "a tensor is indexed with ints, slices, None and ..., and tensors and lists of ints or bools, got %.100s",
                 Py_TYPE(item)->tp_name);
    return -1;
}

/* Whether `item`, which is no bool of Python or NumPy, stands for one int: ints of both and integer scalars of shape (). */
static bool is_int(PyObject *item) {
    if (PyLong_Check(item)) return true;
    if (py_is_tensor(item)) {
        XtTensor *t = py_tensor(item);
        return t->ndim == 0 && !xt_dtype_is_float(t->dtype) && t->dtype != XT_BOOL;
    }
    if (PyArray_Check(item) && !(PyArray_NDIM((PyArrayObject *)item) == 0 && PyArray_ISINTEGER((PyArrayObject *)item)))
        return false;
    return PyIndex_Check(item);
}

/* Whether `item` names several places, which takes more than views: a list, a bool, a tensor or an array that is not one int. */
static bool is_several(PyObject *item) {
    if (PyList_Check(item) || PyTuple_Check(item) || PyBool_Check(item) || PyArray_IsScalar(item, Bool)) return true;
    return (py_is_tensor(item) || PyArray_Check(item)) && !is_int(item);
}

static bool is_advanced(PyObject *key) {
    if (!PyTuple_Check(key)) return is_several(key);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); i++)
        if (is_several(PyTuple_GET_ITEM(key, i))) return true;
    return false;
}

/* Counts the dims that a key consumes; refuses other objects. */
static int check_key(XtTensor *tensor, PyObject *const *items, Py_ssize_t count, int *consumed) {
    int dims = 0, ellipses = 0, added = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (items[i] == Py_None) added++;
        else if (items[i] == Py_Ellipsis) ellipses++;
        else if (PySlice_Check(items[i]) || is_int(items[i])) dims++;
        else return refuse_key(items[i]);
        if (added > XT_MAX_DIMS || dims > XT_MAX_DIMS) break;
    }
    if (ellipses > 1) {
        PyErr_SetString(PyExc_IndexError, "an index can have only one ellipsis (...)");
        return -1;
    }
    if (dims > tensor->ndim) {
        PyErr_Format(PyExc_IndexError, "too many indices for a tensor of %d dimensions", tensor->ndim);
        return -1;
    }
    if (added > XT_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "an index can add at most %d dimensions", XT_MAX_DIMS);
        return -1;
    }
    *consumed = dims;
    return 0;
}

/* Returns new: the part of `tensor` that `key` names. Always a tensor record of its own. */
static XtTensor *indexed(XtTensor *tensor, PyObject *key) {
    bool tuple = PyTuple_Check(key);
    PyObject *const *items = !tuple ? &key : PyTuple_GET_SIZE(key) > 0 ? &PyTuple_GET_ITEM(key, 0) : NULL;
    Py_ssize_t count = tuple ? PyTuple_GET_SIZE(key) : 1;
    int consumed, dim = 0, result = 0;
    if (check_key(tensor, items, count, &consumed) < 0) return NULL;

    XtTensor *current = tensor;
    xt_tensor_retain(current);
    for (Py_ssize_t i = 0; i < count && result == 0; i++) {
        PyObject *item = items[i];
        if (item == Py_None) continue;
        if (item == Py_Ellipsis) dim += tensor->ndim - consumed;
        else if (PySlice_Check(item)) result = slice_range(&current, dim++, item);
        else result = select_index(&current, dim, item);
    }
    dim = 0; /* new dimensions last: a result of XT_MAX_DIMS has no view of more on its way */
    for (Py_ssize_t i = 0; i < count && result == 0; i++) {
        PyObject *item = items[i];
        if (item == Py_None) {
            XtArg args[2] = {py_arg_tensor(current), py_arg_int(dim++)};
            result = step(&current, &xt_op_unsqueeze, args, 2);
        } else if (item == Py_Ellipsis) {
            dim += tensor->ndim - consumed;
        } else if (PySlice_Check(item)) {
            dim++;
        }
    }
    if (result == 0 && current == tensor) { /* x[:], x[...]: all elements, as another tensor */
        XtArg args[2] = {py_arg_tensor(current), {.given = true, .is_sequence = true, .count = current->ndim}};
        memcpy(args[1].ints, current->shape, sizeof args[1].ints);
        result = step(&current, &xt_op_view, args, 2);
    }
    if (result == 0) return current;
    xt_tensor_release(current);
    return NULL;
}

PyObject *py_subscript(PyObject *self, PyObject *key) {
    if (is_advanced(key)) return PyObject_CallMethod(self, "_advanced_get", "(O)", key);
    return py_wrap(indexed(py_tensor(self), key));
}

int py_assign_subscript(PyObject *self, PyObject *key, PyObject *value) {
    XtTensor *tensor = py_tensor(self);
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "elements of a tensor cannot be deleted");
        return -1;
    }
    XtArg args[2] = {{0}};
    int found = py_operand("setitem", "value", value, &args[1]);
    if (found == 0) py_refuse("setitem", "value", py_kind_rule(XT_ARG_OPERAND, false), value);
    if (found != 1) return -1;
    if (xt_grad_mode() && args[1].tensor != NULL && xt_requires_grad(args[1].tensor)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "setitem: a value that requires a gradient cannot be recorded in place; use cat() or where()");
        return -1;
    }
    /* The part below is not recorded, so copy_ cannot check this. */
    if (xt_grad_mode() && xt_requires_grad(tensor)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "setitem: a tensor that requires a gradient must not be changed in place while recording; "
                        "use no_grad() or an out-of-place operation");
        return -1;
    }
    bool mode = xt_grad_mode();
    xt_set_grad_mode(false);
    if (is_advanced(key)) {
        PyObject *done = PyObject_CallMethod(self, "_advanced_set", "OO", key, value);
        xt_set_grad_mode(mode);
        Py_XDECREF(done);
        return done != NULL ? 0 : -1;
    }
    XtTensor *part = indexed(tensor, key), *out = NULL;
    if (part != NULL) {
        args[0] = py_arg_tensor(part);
        out = py_call_one(&xt_op_copy_, args, 2);
    }
    xt_set_grad_mode(mode);
    int result = out != NULL ? 0 : -1;
    xt_tensor_release(out);
    xt_tensor_release(part);
    return result;
}

/* ---- sequences ------------------------------------------------------------------------------------------------------- */

Py_ssize_t py_length(PyObject *self) {
    if (py_tensor(self)->ndim > 0) return py_tensor(self)->shape[0];
    PyErr_SetString(PyExc_TypeError, "len() of a tensor of shape ()");
    return -1;
}

PyObject *py_sequence_item(PyObject *self, Py_ssize_t index) {
    PyObject *key = PyLong_FromSsize_t(index);
    if (key == NULL) return NULL;
    PyObject *item = py_subscript(self, key);
    Py_DECREF(key);
    return item;
}

PyObject *py_iterate(PyObject *self) {
    if (py_tensor(self)->ndim > 0) return PySeqIter_New(self);
    PyErr_SetString(PyExc_TypeError, "cannot iterate over a tensor of shape ()");
    return NULL;
}
