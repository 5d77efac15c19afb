"""The binding: arguments, indexing, exchange with NumPy and DLPack, objects and their lifetimes."""

from __future__ import annotations

from faults.table import Fault

_P = "csrc/py/"
_RULES = "tests/core/test_binding_rules.py::"
_TENSOR = "tests/core/test_tensor.py::"

FAULTS = [
    Fault(
        "ints: a bool is 1", _P + "bind/numbers.c", "    if (PyBool_Check(object)) return 0;\n    PyObject *integer = NULL;", "    PyObject *integer = NULL;",
        "an int is no bool", _RULES + "test_bools_are_no_numbers_of_options",
    ),
    Fault(
        "ints: more than 64 bits", _P + "bind/numbers.c", "    if (overflow != 0) {\n", "    if (overflow > 8) {\n", "must fit in 64 bits",
        _RULES + "test_integers_beyond_64_bits",
    ),
    Fault(
        "text: NUL ends it", _P + "bind/args.c", "    if (strlen(text) != (size_t)length) {", "    if (strlen(text) > (size_t)length) {", "text must not contain NUL characters",
        _RULES + "test_text_with_nul",
    ),
    Fault(
        "args: twice", _P + "bind/args.c", "        if (bound->object[at] != NULL) {", "        if (bound->object[at] != NULL && at > 8) {", "an argument is given once",
        _RULES + "test_an_argument_is_given_once",
    ),
    Fault(
        "args: tensors of a list that changes", _P + "bind/args.c", "    PyObject *items = PySequence_Tuple(object);\n    if (items == NULL) return -1;\n    *keep = items;",
        "    PyObject *items = PySequence_Fast(object, \"\");\n    if (items == NULL) return -1;\n    Py_DECREF(items);\n    items = PySequence_Tuple(object);\n"
        "    if (items == NULL) return -1;\n    Py_DECREF(items);\n    *keep = Py_NewRef(object);",
        "a call owns the tensors of its list", _RULES + "test_a_list_may_change_during_a_call",
    ),
    Fault(
        "element: subnormals of float16", _P + "bind/element.c", "        double value = (double)fraction * 0x1p-24;", "        double value = (double)fraction * 0x1p-25;",
        "item() is exact", _RULES + "test_items_are_exact",
    ),
    Fault(
        "element: infinity of float16", _P + "bind/element.c", "(exponent == 31 ? (uint64_t)2047 : exponent + 1008)", "(exponent + 1008)", "item() is exact",
        _RULES + "test_items_are_exact",
    ),
    Fault(
        "item: of several elements", _P + "bind/element.c", "    if (xt_view_numel(&tensor->view) != 1) {", "    if (xt_view_numel(&tensor->view) < 1) {", "exactly one element",
        _TENSOR + "test_scalars",
    ),
    Fault(
        "errors: out of memory is a RuntimeError", _P + "bind/errors.c", "    case XT_OUT_OF_MEMORY: type = xt_py->out_of_memory_error; break;\n", "", "OutOfMemoryError says what was asked",
        "tests/core/test_hostile.py::test_out_of_memory_says_what_was_asked",
    ),
    Fault(
        "index: bools are ints", _P + "tensor/index.c", "PyTuple_Check(item) || PyBool_Check(item) || PyArray_IsScalar(item, Bool)) return true;", "PyTuple_Check(item)) return true;", "a bool is no index",
        _RULES + "test_a_bool_is_no_index",
    ),
    Fault(
        "index: an ellipsis counts None", _P + "tensor/index.c", "            dim += tensor->ndim - consumed;", "            dim += current->ndim - consumed;", "... stands for the dims that no other key takes",
        _RULES + "test_an_ellipsis_behind_none",
    ),
    Fault(
        "setitem: recorded", _P + "tensor/index.c", "    if (xt_grad_mode() && xt_requires_grad(tensor)) {", "    if (xt_grad_mode() && xt_requires_grad(tensor) && !xt_is_leaf(tensor)) {",
        "a tensor that requires a gradient is not changed while recording", "tests/core/test_autograd.py::test_in_place_is_refused_while_recording",
    ),
    Fault(
        "setitem: the mode after an error", _P + "tensor/index.c", "    xt_set_grad_mode(mode);\n    int result = out", "    if (out != NULL) xt_set_grad_mode(mode);\n    int result = out",
        "recording is as before", _RULES + "test_recording_is_as_before_a_failed_assignment",
    ),
    Fault(
        "setitem: the part leaks", _P + "tensor/index.c", "    xt_tensor_release(out);\n    xt_tensor_release(part);\n    return result;", "    xt_tensor_release(out);\n    return result;",
        "nothing leaks", "tests/core/test_hostile.py::test_reference_counts_are_flat " + _RULES + "test_assignments_leak_nothing",
    ),
    Fault(
        "grad: a tensor of its own", _P + "tensor/attributes.c", "    if (gradient == py_tensor(self)) {", "    if (gradient == NULL && py_tensor(self) == NULL) {", "a tensor is not its own gradient",
        _RULES + "test_a_tensor_is_not_its_own_gradient",
    ),
    Fault(
        "grad: a gradient with a graph", _P + "tensor/attributes.c", "XtStatus status = gradient != NULL ? xt_tensor_alias(gradient, &alias) : XT_OK;",
        "XtStatus status = gradient != NULL ? (xt_tensor_retain(gradient), alias = gradient, XT_OK) : XT_OK;", "a gradient that is set has no graph",
        _RULES + "test_a_gradient_that_is_set_keeps_no_graph",
    ),
    Fault(
        "numpy: expanded memory is writable", _P + "convert/numpy_out.c", "int flags = empty || repeats(tensor) ? 0 : NPY_ARRAY_WRITEABLE;", "int flags = empty ? 0 : NPY_ARRAY_WRITEABLE;",
        "elements that share memory are read-only in NumPy", _RULES + "test_expanded_memory_is_read_only",
    ),
    Fault(
        "numpy: an array does not keep its tensor", _P + "convert/numpy_out.c", "    if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(self)) < 0) Py_CLEAR(array);\n", "",
        "an array keeps its tensor alive", _RULES + "test_an_array_keeps_its_tensor",
    ),
    Fault(
        "buffer: readers of strided memory", _P + "convert/numpy_out.c", 'if ((flags & PyBUF_STRIDES) != PyBUF_STRIDES && !c) return "tensor has strides; call contiguous() first";', "",
        "a reader that knows no strides gets dense memory only", _RULES + "test_buffers_of_strided_memory",
    ),
    Fault(
        "from_numpy: read-only arrays", _P + "convert/numpy_in.c", "    if (!PyArray_ISWRITEABLE(array))\n        return refuse_array(PyExc_ValueError, op, \"be writable; pass array.copy() or use xt.tensor(array)\");\n", "",
        "a read-only array is refused", _TENSOR + "test_what_from_numpy_refuses",
    ),
    Fault(
        "from_numpy: misaligned arrays", _P + "convert/numpy_in.c", "(uintptr_t)PyArray_DATA(array) % (uintptr_t)itemsize != 0", "(uintptr_t)PyArray_DATA(array) % 1 != 0",
        "a misaligned array is refused", _RULES + "test_misaligned_arrays_are_copied_or_refused",
    ),
    Fault(
        "from_numpy: the array is not kept", _P + "convert/numpy_in.c", "        Py_INCREF(object); /* now the storage's */\n", "", "a tensor keeps its array alive",
        _RULES + "test_a_tensor_keeps_its_array",
    ),
    Fault(
        "dlpack: a capsule twice", _P + "convert/dlpack.c", "    if (PyCapsule_SetName(capsule, versioned ? \"used_dltensor_versioned\" : \"used_dltensor\") < 0) {", "    if (false) {",
        "a capsule is consumed once", _TENSOR + "test_dlpack_capsule_is_consumed_once",
    ),
    Fault(
        "dlpack: the deleter is not called", _P + "convert/dlpack.c", "    hand_back(storage);\n    PyGILState_STATE gil = PyGILState_Ensure();\n    versioned->deleter(versioned);",
        "    hand_back(storage);\n    PyGILState_STATE gil = PyGILState_Ensure();\n    (void)versioned;", "the consumer calls the deleter, once", _RULES + "test_borrowed_memory_is_given_back_once",
    ),
    Fault(
        "dlpack: read-only memory", _P + "convert/dlpack.c", "    if (versioned && (header->flags & DL_READ_ONLY))\n", "    if (versioned && (header->flags & 8))\n", "read-only data are refused",
        _RULES + "test_read_only_memory_is_refused",
    ),
    Fault(
        "dlpack: a recorded tensor", _P + "convert/dlpack.c", "    if (xt_requires_grad(tensor))\n        return PyErr_Format(PyExc_BufferError, \"__dlpack__: tensor must not",
        "    if (xt_requires_grad(tensor) && !xt_is_leaf(tensor))\n        return PyErr_Format(PyExc_BufferError, \"__dlpack__: tensor must not", "a tensor that requires a gradient is not lent",
        _RULES + "test_a_tensor_that_requires_a_gradient_is_not_lent",
    ),
    Fault(
        "dlpack: copy=True lends", _P + "convert/dlpack.c", "    } else if (copy_given && copy) {\n", "    } else if (copy_given && copy && to_host) {\n", "copy=True gives a copy",
        _RULES + "test_a_copy_through_dlpack_is_one",
    ),
    Fault(
        "tensor(): floats become float64", _P + "convert/data_in.c", "nest.kind == KIND_FLOAT ? XT_FLOAT32 : exact[nest.kind]);", "exact[nest.kind]);", "Python floats become float32",
        _TENSOR + "test_tensor_from_python_data",
    ),
    Fault(
        "tensor(): integers go through floats", _P + "convert/data_in.c", "nest.held = whole ? KIND_INT : nest.kind;", "nest.held = nest.kind;", "integers of an integer dtype keep all digits",
        _TENSOR + "test_tensor_from_python_data",
    ),
    Fault(
        "tensor(): a tensor is shared", _P + "convert/data_in.c", "XtTensor *copy = py_call_plain(cast ? &xt_op_cast : &xt_op_clone, args, cast ? 2 : 1);",
        "XtTensor *copy = py_call_plain(cast ? &xt_op_cast : &xt_op_contiguous, args, cast ? 2 : 1);", "copies data", _RULES + "test_tensor_of_a_tensor_is_a_copy",
    ),
    Fault(
        "from_bytes: fewer bytes", _P + "convert/bytes.c", "nbytes != (size_t)view.len)", "nbytes > (size_t)view.len)", "the size must be that of dtype and shape",
        _RULES + "test_bytes_have_the_size_of_their_shape",
    ),
    Fault(
        "to_bytes: strided memory", _P + "convert/bytes.c", "    if (!xt_view_is_contiguous(&tensor->view)) {", "    if (!xt_view_is_contiguous(&tensor->view) && tensor->ndim > 2) {", "the memory of a contiguous tensor",
        _RULES + "test_bytes_have_the_size_of_their_shape",
    ),
    Fault(
        "deepcopy: shared memory", _P + "tensor/methods.c", "    XtTensor *copy = cloned(self);\n    PyObject *result = py_wrap_as", "    XtTensor *copy = NULL;\n    if (xt_tensor_alias(self, &copy) != XT_OK) return NULL;\n    PyObject *result = py_wrap_as",
        "a copy has memory of its own", _RULES + "test_a_deep_copy_has_memory_of_its_own",
    ),
    Fault(
        "deepcopy: no gradient", _P + "tensor/methods.c", "        XtStatus status = xt_set_gradient(copy, copied);\n", "        XtStatus status = XT_OK;\n", "a copy has .grad of its own",
        _RULES + "test_a_deep_copy_has_a_gradient_of_its_own",
    ),
    Fault(
        "to: dtype twice", _P + "tensor/methods.c", "    if ((took_dtype && has_dtype) || (took_device && has_device))", "    if (took_device && has_device)", "dtype is given once",
        _RULES + "test_an_argument_is_given_once",
    ),
    Fault(
        "hooks: a handle keeps its hook", _P + "tensor/autograd.c", "    if (tensor != NULL) xt_remove_hook(py_tensor(tensor), self->id);\n", "", "remove() removes the hook",
        "tests/core/test_autograd.py::test_hooks_see_and_replace_gradients",
    ),
    Fault(
        "gc: cycles through hooks", _P + "tensor/autograd.c", "    int result = visit_hooks(grad->hooks, visit, arg);\n", "    int result = 0;\n", "a cycle through a hook is collected",
        "tests/core/test_function.py::test_cycle_through_a_hook_is_collected",
    ),
    Fault("py: complex scalar", "csrc/py/bind/numbers.c", "PyComplex_Check(object) || PyArray_IsScalar(object, ComplexFloating)", "PyComplex_Check(object)", "complex numbers of NumPy are no floats", "tests/core/test_binding_rules.py::test_scalars_of_numpy_are_what_they_are"),
    Fault("py: numpy bool", "csrc/py/bind/numbers.c", "if (truth >= 0) *out = xt_scalar_bool(truth != 0);", "if (truth >= 0) *out = xt_scalar_int(truth != 0);", "a bool of NumPy is a bool", "tests/core/test_binding_rules.py::test_scalars_of_numpy_are_what_they_are"),
    Fault("py: same object", "csrc/py/bind/call.c", "out != py_tensor(first)) return py_wrap(out);", "out != py_tensor(first) || out) return py_wrap(out);", "contiguous() of a dense tensor is itself", "tests/core/test_binding_rules.py::test_what_is_a_copy_and_what_is_not"),
    Fault("py: complex array", "csrc/py/convert/data_in.c", "PyTypeNum_ISNUMBER(PyArray_TYPE(array)) && !PyArray_ISCOMPLEX(array)", "PyTypeNum_ISNUMBER(PyArray_TYPE(array))", "complex arrays are refused with a dtype, too", "tests/core/test_binding_rules.py::test_what_is_a_copy_and_what_is_not"),
    Fault("py: array copy", "csrc/py/convert/numpy_out.c", "if (same && !(copy_given && copy)) {", "if (same) {", "copy=True copies", "tests/core/test_binding_rules.py::test_what_is_a_copy_and_what_is_not"),
    Fault("py: dlpack offset", "csrc/py/convert/dlpack.c", "(uintptr_t)dl->data, dl->byte_offset, &address)", "(uintptr_t)dl->data, dl->byte_offset & 63, &address)", "byte_offset", "tests/core/test_binding_rules.py::test_a_capsule_says_where_its_data_is"),
    Fault("py: dlpack misaligned", "csrc/py/convert/dlpack.c", "if (address % (uintptr_t)itemsize != 0) return refuse_dl", "if (address % 2 != 0 && itemsize > 1) return refuse_dl", "data aligned to the itemsize", "tests/core/test_binding_rules.py::test_a_capsule_says_where_its_data_is"),
    Fault("py: dlpack major", "csrc/py/convert/dlpack.c", "if (versioned && header->major != DL_MAJOR)", "if (versioned && header->major > DL_MAJOR + 1)", "another major version", "tests/core/test_binding_rules.py::test_a_capsule_says_where_its_data_is"),
    Fault("py: dlpack copied", "csrc/py/convert/dlpack.c", "copied ? DL_IS_COPIED : 0, out}", "0, out}", "a copy says so", "tests/core/test_binding_rules.py::test_a_capsule_says_that_it_is_a_copy"),
    Fault("py: dlpack cpu stream", "csrc/py/convert/dlpack.c", "if (stream != Py_None && tensor->storage->device.type == XT_CPU)", "if (stream == Py_Ellipsis && tensor->storage->device.type == XT_CPU)", "stream must be None on the CPU", "tests/core/test_binding_rules.py::test_a_capsule_says_that_it_is_a_copy"),
    Fault("py: repr 1000", "csrc/py/tensor/repr.c", ": count > SHOWN_ELEMENTS ? statistics_text", ": count >= SHOWN_ELEMENTS ? statistics_text", "values up to 1000", "tests/core/test_binding_rules.py::test_a_thousand_values_are_shown"),
    Fault("hooks: a bool is an int", "csrc/py/bind/hook.c", "    if (scalar->is_bool) return PyBool_FromLong(scalar->i != 0);", "    if (0) return NULL;", "arguments that make the same call", "tests/core/test_binding_rules.py::test_a_hook_sees_arguments_that_make_the_same_call"),
    Fault("py: deepcopy memo", "csrc/py/tensor/methods.c", "if (like_leaf(copy, self) < 0 || remember(memo, bound->object[0], result) < 0) goto fail;", "if (like_leaf(copy, self) < 0) goto fail;", "a second path finds the copy", "tests/core/test_binding_rules.py::test_a_deep_copy_of_a_cycle_is_a_cycle"),
    Fault("py: to copy", "csrc/py/tensor/methods.c", "    if (!copy) return Py_NewRef(self);\n", "    if (!copy || dtype == XT_INT64) return Py_NewRef(self);\n", "copy=True copies", "tests/core/test_binding_rules.py::test_what_is_a_copy_and_what_is_not"),
    Fault("bind: names made at run time", "csrc/py/bind/args.c", "        if (PyUnicode_Compare(signature->param[i].key, key) == 0) return i;\n", "        if (i < 0) return i;\n", "any equal name", "tests/core/test_binding_rules.py::test_a_name_that_was_made_at_run_time_is_a_name"),
    Fault("bind: entry None", "csrc/py/bind/args.c", "op, name,\n                         items[i] == Py_None ? \"None\" : Py_TYPE(items[i])->tp_name, i);", "op, name,\n                         Py_TYPE(items[i])->tp_name, i);", "None is called None", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("bind: entry number", "csrc/py/bind/args.c", 'param->name, item == Py_None ? "None" : Py_TYPE(item)->tp_name, i);', 'param->name, item == Py_None ? "None" : Py_TYPE(item)->tp_name, i + 1);', "entries count from 0", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("bind: spread", "csrc/py/bind/args.c", "bind_ints(op, param->name, args + last, nargs - last, arg)", "bind_ints(op, param->name, args + last, nargs - last - (nargs - last == 8), arg)", "sizes apart, as many as a tensor can have", "tests/core/test_binding_rules.py::test_dims_apart_and_in_one_tuple"),
    Fault("device: cuda:255", "csrc/py/bind/device.c", "type == XT_CUDA ? UINT8_MAX : 1;", "type == XT_CUDA ? UINT8_MAX - 1 : 1;", "GPUs 0 to 255", "tests/core/test_binding_rules.py::test_the_numbers_of_devices"),
    Fault("device: digits", "csrc/py/bind/device.c", "digits == 0 || digits > 3", "digits == 0 || digits > 19", "at most three digits", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("device: cpu index", "csrc/py/bind/device.c", "type == XT_CPU ? 0 : type", "type == XT_CPU ? 1 : type", "the CPU has no second one", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("device: meta index none", "csrc/py/bind/device.c", "if (device_of(self).type == XT_CPU) Py_RETURN_NONE;", "if (device_of(self).type != XT_CUDA) Py_RETURN_NONE;", "meta has an index", "tests/core/test_binding_rules.py::test_the_numbers_of_devices"),
    Fault("device: rule of index", "csrc/py/bind/device.c", 'py_refuse("device", "index", "an int or None", index);', 'py_refuse("device", "type", "an int or None", index);', "an error names the argument", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("device: negative index", "csrc/py/bind/device.c", "if (number < 0 || number > most_index(device.type)) {", "if (number > most_index(device.type)) {", "an index in [0, 255]", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("dtype: keywords", "csrc/py/bind/dtype.c", "kwargs != NULL && PyDict_GET_SIZE(kwargs) > 0", "kwargs != NULL && PyDict_GET_SIZE(kwargs) > 1", "one positional argument", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("errors: array without tensor", "csrc/py/bind/errors.c", 'array && tensor ? " (use xt.from_numpy)" : "");', 'array ? " (use xt.from_numpy)" : "");', "advice where a Tensor is wanted", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("errors: foreign without tensor", "csrc/py/bind/errors.c", 'tensor ? " (use xt.from_dlpack)" : "");', '" (use xt.from_dlpack)");', "advice where a Tensor is wanted", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("hook: one int of a tuple", "csrc/py/bind/hook.c", "if (arg->count == 1 && !arg->is_sequence) return", "if (arg->count == 1) return", "what a hook sees makes the same call", "tests/core/test_binding_rules.py::test_a_hook_sees_arguments_as_they_were_given"),
    Fault("hook: a float", "csrc/py/bind/hook.c", "case XT_ARG_FLOAT: return PyFloat_FromDouble(arg->f);", "case XT_ARG_FLOAT: return PyLong_FromDouble(arg->f);", "what a hook sees makes the same call", "tests/core/test_binding_rules.py::test_a_hook_sees_arguments_as_they_were_given"),
    Fault("hook: device", "csrc/py/bind/hook.c", "case XT_ARG_DEVICE: return py_device_object(arg->device);", "case XT_ARG_DEVICE: return py_device_object((XtDevice){0});", "what a hook sees makes the same call", "tests/core/test_binding_rules.py::test_a_hook_sees_arguments_as_they_were_given"),
    Fault("numbers: bool tensor is an int", "csrc/py/bind/numbers.c", "(py_tensor(object)->dtype == XT_BOOL || xt_dtype_is_float(py_tensor(object)->dtype))", "xt_dtype_is_float(py_tensor(object)->dtype)", "an error names the argument", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("numbers: surrogates", "csrc/py/bind/numbers.c", "PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)", "PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)", "an error names the argument", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("numbers: one element tensor", "csrc/py/bind/numbers.c", "if (py_tensor(object)->ndim != 0) return 0;", "if (xt_view_numel(&py_tensor(object)->view) != 1) return 0;", "a number has no dimension", "tests/core/test_binding_rules.py::test_a_sentence_names_the_argument_and_what_was_given"),
    Fault("callable: differentiable", "csrc/py/bind/callable.c", "return PyBool_FromLong(op != NULL && op->backward != NULL);", "return PyBool_FromLong(op != NULL);", "whether the op has a backward", "tests/core/test_binding_rules.py::test_what_an_op_says_of_itself"),
    Fault("callable: is_method", "csrc/py/bind/callable.c", "return PyBool_FromLong(op != NULL && op->method);", "return PyBool_FromLong(op != NULL);", "whether it is a method", "tests/core/test_binding_rules.py::test_what_an_op_says_of_itself"),
]  # fmt: skip
