/* tensor.h - the type Tensor: type.c fills its slots from the other files of this room. */
#pragma once

#include "py/convert/convert.h"

/* ---- operators.c ----------------------------------------------------------------------------------------------------- */

PyObject *py_nb_add(PyObject *a, PyObject *b);
PyObject *py_nb_subtract(PyObject *a, PyObject *b);
PyObject *py_nb_multiply(PyObject *a, PyObject *b);
PyObject *py_nb_divide(PyObject *a, PyObject *b);
PyObject *py_nb_floor_divide(PyObject *a, PyObject *b);
PyObject *py_nb_remainder(PyObject *a, PyObject *b);
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

/* ---- index.c --------------------------------------------------------------------------------------------------------- */

Py_ssize_t py_length(PyObject *self);
PyObject *py_sequence_item(PyObject *self, Py_ssize_t index);
PyObject *py_iterate(PyObject *self);
PyObject *py_subscript(PyObject *self, PyObject *key);
int py_assign_subscript(PyObject *self, PyObject *key, PyObject *value);

/* ---- repr.c, autograd.c, attributes.c -------------------------------------------------------------------------------- */

PyObject *py_repr(PyObject *self);
/* Shows the garbage collector the Python objects that the graph record of `tensor` alone keeps alive. */
int py_traverse_grad(XtTensor *tensor, visitproc visit, void *arg);
extern PyGetSetDef py_tensor_attributes[];

/* ---- types, functions and methods ------------------------------------------------------------------------------------ */

int py_tensor_init(PyObject *module);
int py_handle_init(PyObject *module);

extern const PyFunction py_tensor_methods[], py_autograd_methods[];
extern const PyFunction py_autograd_functions[], py_repr_functions[];
