/* numpy_api.h - NumPy's C API, imported once (py.c defines XT_IMPORT_ARRAY) and shared by every file that needs it. */
#pragma once

#include "py/py.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL xt_numpy_api
#ifndef XT_IMPORT_ARRAY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

_Static_assert(sizeof(npy_intp) == sizeof(int64_t), "xtrain needs a 64-bit machine");
