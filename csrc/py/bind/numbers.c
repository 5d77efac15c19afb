/* numbers.c - Python numbers and text as C values. */
#include "py/bind/bind.h"
#include "py/numpy_api.h"

int py_int64(const char *op, const char *name, PyObject *object, int64_t *out) {
    if (PyBool_Check(object)) return 0;
    PyObject *integer = NULL;
    if (PyLong_Check(object)) {
        integer = Py_NewRef(object);
    } else {
        bool array = PyArray_Check(object) && PyArray_NDIM((PyArrayObject *)object) > 0;
        if (array || !PyIndex_Check(object)) return 0;
        if (py_is_tensor(object) && (py_tensor(object)->dtype == XT_BOOL || xt_dtype_is_float(py_tensor(object)->dtype))) return 0;
        integer = PyNumber_Index(object);
        if (integer == NULL) return -1;
    }
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(integer, &overflow);
    Py_DECREF(integer);
    if (overflow != 0) {
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must fit in 64 bits, got a larger integer", op, name);
        return -1;
    }
    if (value == -1 && PyErr_Occurred()) return -1;
    *out = value;
    return 1;
}

/* A Python float from anything that has __float__ or __index__, except text, complex numbers and arrays of several elements. */
int py_double(const char *op, const char *name, PyObject *object, double *out) {
    if (PyFloat_Check(object)) {
        *out = PyFloat_AS_DOUBLE(object);
        return 1;
    }
    if (PyBool_Check(object) || PyComplex_Check(object) || PyArray_IsScalar(object, ComplexFloating)) return 0;
    if (PyUnicode_Check(object) || PyBytes_Check(object) || PyArray_IsScalar(object, Bool)) return 0;
    if (PyArray_Check(object) && PyArray_NDIM((PyArrayObject *)object) > 0) return 0;
    const PyNumberMethods *number = Py_TYPE(object)->tp_as_number;
    if (number == NULL || (number->nb_float == NULL && number->nb_index == NULL)) return 0;
    PyObject *value = PyNumber_Float(object);
    if (value == NULL && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must fit in a float, got a larger integer", op, name);
    }
    if (value == NULL) return -1;
    *out = PyFloat_AS_DOUBLE(value);
    Py_DECREF(value);
    return 1;
}

int py_number(const char *op, const char *name, PyObject *object, XtScalar *out) {
    if (PyBool_Check(object)) {
        *out = xt_scalar_bool(object == Py_True);
        return 1;
    }
    if (!PyFloat_Check(object) && !PyLong_Check(object)) {
        if (py_is_tensor(object) || (PyArray_Check(object) && PyArray_NDIM((PyArrayObject *)object) == 0)) {
            PyObject *item;
            if (py_is_tensor(object)) {
                if (py_tensor(object)->ndim != 0) return 0;
                item = py_item(op, py_tensor(object));
            } else {
                item = PyArray_ToScalar(PyArray_DATA((PyArrayObject *)object), (PyArrayObject *)object);
            }
            if (item == NULL) return -1;
            /* An object array may hold another array: one level is enough. */
            int found = PyArray_Check(item) ? 0 : py_number(op, name, item, out);
            Py_DECREF(item);
            return found;
        }
        if (PyArray_IsScalar(object, Bool)) {
            int truth = PyObject_IsTrue(object);
            if (truth >= 0) *out = xt_scalar_bool(truth != 0);
            return truth < 0 ? -1 : 1;
        }
    }
    if (PyLong_Check(object) || (!PyFloat_Check(object) && PyIndex_Check(object))) {
        int64_t value;
        int found = py_int64(op, name, object, &value);
        if (found == 1) *out = xt_scalar_int(value);
        if (found != 0) return found;
    }
    double value;
    int found = py_double(op, name, object, &value);
    if (found == 1) *out = xt_scalar_float(value);
    return found;
}

int py_operand(const char *op, const char *name, PyObject *object, XtArg *out) {
    out->given = out->is_tensor = true;
    out->tensor = NULL;
    if (py_is_tensor(object)) {
        out->tensor = py_tensor(object);
        return 1;
    }
    return py_number(op, name, object, &out->scalar);
}

const char *py_utf8(const char *op, const char *name, PyObject *object, Py_ssize_t *length) {
    const char *text = PyUnicode_AsUTF8AndSize(object, length);
    if (text == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: argument '%s' must be text without lone surrogates, got %.100R", op, name, object);
    }
    return text;
}
