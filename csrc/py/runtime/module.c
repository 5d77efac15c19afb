/* module.c - `xtrain._C`: multi-phase initialisation and the life of the module state. */
#include "contract/optimizer.h"
#include "py/runtime/runtime.h"

/* The functions of csrc/py, and the methods of Tensor; ops come from xt_ops. */
static const PyFunction *const functions[] = {
    py_data_functions,    py_dlpack_functions, py_bytes_functions, py_autograd_functions, py_repr_functions,
    py_runtime_functions, py_select_functions, py_cuda_functions,  py_testing_functions,  py_path_functions,
    py_graph_functions,   py_span_functions,   py_pulse_functions, py_comm_functions,     py_ending_functions};
static const PyFunction *const methods[] = {py_tensor_methods, py_numpy_methods, py_dlpack_methods, py_autograd_methods};

static int add_callables(PyObject *module) {
    for (const XtOp *const *op = xt_ops; *op != NULL; op++) {
        PyFunction function = {(*op)->name, (*op)->signature, py_run_op, (*op)->doc, 0, *op};
        if (py_callable_add(module, &function, true, (*op)->method) < 0) return -1;
    }
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        for (const PyFunction *f = functions[i]; f->name != NULL; f++)
            if (py_callable_add(module, f, true, false) < 0) return -1;
    for (size_t i = 0; i < sizeof methods / sizeof methods[0]; i++)
        for (const PyFunction *f = methods[i]; f->name != NULL; f++)
            if (py_callable_add(module, f, false, true) < 0) return -1;
    return 0;
}

static int module_exec(PyObject *module) {
    if (xt_py != NULL) {
        PyErr_SetString(PyExc_ImportError, "xtrain._C cannot be loaded twice in one process");
        return -1;
    }
    const char *blas;
    if (py_open_blas(&blas) != XT_OK) { /* now, while xtrain/_load.py hides the variables of other copies from it */
        PyErr_SetString(PyExc_ImportError, xt_error_message());
        return -1;
    }
    xt_py = PyModule_GetState(module);
    if (py_numpy_init() < 0 || py_errors_init(module) < 0 || py_dtype_init(module) < 0 || py_device_init(module) < 0 ||
        py_tensor_init(module) < 0 || py_handle_init(module) < 0 || py_callable_init(module) < 0 || add_callables(module) < 0) {
        xt_py = NULL; /* module_free releases the parts that were made */
        return -1;
    }
    __atomic_store_n(&xt_interrupt_check, py_interrupt_check, __ATOMIC_RELAXED);
    if (PyModule_AddIntConstant(module, "MAX_DIMS", XT_MAX_DIMS) < 0) return -1;
    return PyModule_AddIntConstant(module, "MOST_STEPS", XT_MOST_STEPS);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    PyState *state = PyModule_GetState(module);
    if (state == NULL) return 0;
    Py_VISIT(state->tensor_type);
    Py_VISIT(state->dtype_type);
    Py_VISIT(state->device_type);
    Py_VISIT(state->op_type);
    Py_VISIT(state->handle_type);
    for (int i = 0; i < XT_DTYPE_COUNT; i++) Py_VISIT(state->dtype[i]);
    Py_VISIT(state->out_of_memory_error);
    Py_VISIT(state->cuda_error);
    Py_VISIT(state->bfloat16);
    Py_VISIT(state->call_hook);
    return 0;
}

/* Only at the end of the process: types hold the module, so it outlives every tensor. */
static int module_clear(PyObject *module) {
    PyState *state = PyModule_GetState(module);
    if (state == NULL) return 0;
    Py_CLEAR(state->tensor_type);
    Py_CLEAR(state->dtype_type);
    Py_CLEAR(state->device_type);
    Py_CLEAR(state->op_type);
    Py_CLEAR(state->handle_type);
    for (int i = 0; i < XT_DTYPE_COUNT; i++) Py_CLEAR(state->dtype[i]);
    Py_CLEAR(state->out_of_memory_error);
    Py_CLEAR(state->cuda_error);
    Py_CLEAR(state->bfloat16);
    Py_CLEAR(state->call_hook);
    return 0;
}

static void module_free(void *module) {
    PyState *state = PyModule_GetState((PyObject *)module);
    if (state == NULL) return;
    if (xt_py == state) {
        xt_py = NULL;
        __atomic_store_n(&xt_interrupt_check, NULL, __ATOMIC_RELAXED);
    }
    module_clear((PyObject *)module);
    xt_tensor_release(state->nothing);
    state->nothing = NULL;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "xtrain._C",
    .m_doc = "The C core of xtrain. Every op of csrc/ops/ops.h is a function here; `xtrain` gives them their public homes.",
    .m_size = sizeof(PyState),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void) { return PyModuleDef_Init(&module_def); }
