/* convert.h - tensors from and to other containers: NumPy, DLPack, PEP 3118 buffers, bytes, nested lists. */
#pragma once

#include "py/bind/bind.h"
#include "py/numpy_api.h"

/* ---- numpy_in.c, numpy_out.c ----------------------------------------------------------------------------------------- */

PyObject *py_array_behind(const XtStorage *storage);      /* borrowed: the array that from_numpy keeps alive, or NULL */
XtTensor *py_from_array(const char *op, PyObject *array); /* zero copy, new */
PyObject *py_numpy_view(const char *op, PyObject *self);  /* ndarray over the same memory */

/* Returns false when no dtype of ours is that of `array`. bfloat16, a user dtype of NumPy, is known by its name. */
bool py_numpy_dtype(PyArrayObject *array, XtDtype *out);
/* New reference, or NULL with TypeError (bfloat16 without ml_dtypes). */
PyArray_Descr *py_numpy_descr(const char *op, XtDtype dtype);

int py_getbuffer(PyObject *self, Py_buffer *view, int flags);
void py_releasebuffer(PyObject *self, Py_buffer *view);

/* ---- functions and methods ------------------------------------------------------------------------------------------- */

extern const PyFunction py_data_functions[], py_dlpack_functions[], py_bytes_functions[];
extern const PyFunction py_numpy_methods[], py_dlpack_methods[];
