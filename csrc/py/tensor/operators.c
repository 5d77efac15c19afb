/* operators.c - the operators of Tensor, and its conversion to one Python number. */
#include "py/tensor/tensor.h"

/* ---- operators ------------------------------------------------------------------------------------------------------- */

/* Converts one side of an operator. 0: leave it to the other type. Arrays and tensors of others are refused here: NumPy refuses too
 * (`__array_ufunc__ = None`), and Python's own message would not say what to do. */
static int side(const XtOp *op, const char *name, PyObject *object, XtArg *out) {
    int found = py_operand(op->name, name, object, out);
    if (found == 1 || !py_is_foreign_tensor(object)) return found; /* an array is one, too */
    if (found < 0 && !PyErr_ExceptionMatches(PyExc_TypeError)) return found;
    PyErr_Clear(); /* no single number; its own words do not name the argument */
    return py_refuse(op->name, name, py_kind_rule(XT_ARG_OPERAND, false), object);
}

static PyObject *binary(const XtOp *op, PyObject *a, PyObject *b) {
    XtArg args[3] = {{0}}; /* the third is matmul's backend */
    int found = side(op, "input", a, &args[0]);
    if (found == 1) found = side(op, "other", b, &args[1]);
    if (found < 0) return NULL;
    if (found == 0) Py_RETURN_NOTIMPLEMENTED;
    return py_wrap(py_call_one(op, args, op == &xt_op_matmul ? 3 : 2));
}

PyObject *py_nb_add(PyObject *a, PyObject *b) { return binary(&xt_op_add, a, b); }
PyObject *py_nb_subtract(PyObject *a, PyObject *b) { return binary(&xt_op_sub, a, b); }
PyObject *py_nb_multiply(PyObject *a, PyObject *b) { return binary(&xt_op_mul, a, b); }
PyObject *py_nb_divide(PyObject *a, PyObject *b) { return binary(&xt_op_div, a, b); }

PyObject *py_nb_floor_divide(PyObject *a, PyObject *b) { return binary(&xt_op_floor_divide, a, b); }
PyObject *py_nb_remainder(PyObject *a, PyObject *b) { return binary(&xt_op_remainder, a, b); }

PyObject *py_nb_power(PyObject *a, PyObject *b, PyObject *modulus) {
    if (modulus != Py_None) Py_RETURN_NOTIMPLEMENTED;
    return binary(&xt_op_pow, a, b);
}

PyObject *py_nb_matmul(PyObject *a, PyObject *b) {
    if (py_is_tensor(a) && py_is_tensor(b)) return binary(&xt_op_matmul, a, b);
    PyObject *other = py_is_tensor(a) ? b : a;
    if (!py_is_foreign_tensor(other)) Py_RETURN_NOTIMPLEMENTED;
    py_refuse("matmul", py_is_tensor(a) ? "other" : "input", "a Tensor", other);
    return NULL;
}

static PyObject *in_place(const XtOp *op, PyObject *self, PyObject *other) {
    XtArg args[2] = {py_arg_tensor(py_tensor(self))};
    int found = side(op, "other", other, &args[1]);
    if (found < 0) return NULL;
    if (found == 0) Py_RETURN_NOTIMPLEMENTED;
    XtTensor *out = py_call_one(op, args, 2);
    if (out == NULL) return NULL;
    xt_tensor_release(out);
    return Py_NewRef(self);
}

PyObject *py_nb_add_inplace(PyObject *a, PyObject *b) { return in_place(&xt_op_add_, a, b); }
PyObject *py_nb_subtract_inplace(PyObject *a, PyObject *b) { return in_place(&xt_op_sub_, a, b); }
PyObject *py_nb_multiply_inplace(PyObject *a, PyObject *b) { return in_place(&xt_op_mul_, a, b); }
PyObject *py_nb_divide_inplace(PyObject *a, PyObject *b) { return in_place(&xt_op_div_, a, b); }

static PyObject *unary(const XtOp *op, PyObject *self) {
    XtArg arg = py_arg_tensor(py_tensor(self));
    return py_wrap(py_call_one(op, &arg, 1));
}

PyObject *py_nb_negative(PyObject *self) { return unary(&xt_op_neg, self); }
PyObject *py_nb_absolute(PyObject *self) { return unary(&xt_op_abs, self); }
PyObject *py_nb_positive(PyObject *self) { return Py_NewRef(self); }

PyObject *py_richcompare(PyObject *a, PyObject *b, int operation) {
    const XtOp *op = NULL;
    switch (operation) {
    case Py_EQ: op = &xt_op_eq; break;
    case Py_NE: op = &xt_op_ne; break;
    case Py_LT: op = &xt_op_lt; break;
    case Py_LE: op = &xt_op_le; break;
    case Py_GT: op = &xt_op_gt; break;
    case Py_GE: op = &xt_op_ge; break;
    default: Py_RETURN_NOTIMPLEMENTED;
    }
    return binary(op, a, b);
}

/* ---- one element ----------------------------------------------------------------------------------------------------- */

int py_nb_bool(PyObject *self) {
    PyObject *item = py_item("bool", py_tensor(self));
    if (item == NULL) return -1;
    int truth = PyObject_IsTrue(item);
    Py_DECREF(item);
    return truth;
}

/* Applies int() or float() to the element. */
static PyObject *converted(const char *op, PyObject *self, PyObject *(*convert)(PyObject *)) {
    PyObject *item = py_item(op, py_tensor(self));
    if (item == NULL) return NULL;
    PyObject *result = convert(item);
    Py_DECREF(item);
    return result;
}

PyObject *py_nb_int(PyObject *self) { return converted("int", self, PyNumber_Long); }
PyObject *py_nb_float(PyObject *self) { return converted("float", self, PyNumber_Float); }

PyObject *py_nb_index(PyObject *self) {
    XtDtype dtype = py_tensor(self)->dtype;
    if (xt_dtype_is_float(dtype) || dtype == XT_BOOL || py_tensor(self)->ndim != 0) {
        PyErr_Format(PyExc_TypeError, "index: only a tensor of shape () with an integer dtype can be an index, got %s of shape %s",
                     xt_dtype_name(dtype), xt_shape_text(py_tensor(self)->ndim, py_tensor(self)->shape));
        return NULL;
    }
    return converted("index", self, PyNumber_Index);
}
