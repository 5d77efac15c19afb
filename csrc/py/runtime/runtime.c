/* runtime.c - process-wide state: random numbers, threads, the default device, memory, and a description of this build. */
#include "py/runtime/runtime.h"
#include "contract/backend.h"
#include "core/core.h"

#ifndef XT_VERSION
#define XT_VERSION "unknown"
#endif
#ifndef XT_BUILD_FLAGS
#define XT_BUILD_FLAGS ""
#endif

/* NULL unless the vendored OpenBLAS is linked in. */

/* ---- random numbers -------------------------------------------------------------------------------------------------- */

/* Any integer of 64 bits, signed or not. */
static int read_word(const char *op, const char *name, PyObject *object, uint64_t *out) {
    if (PyBool_Check(object) || !PyIndex_Check(object)) return py_refuse(op, name, "an int", object);
    PyObject *number = PyNumber_Index(object);
    if (number == NULL) return -1;
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    *out = overflow > 0 ? PyLong_AsUnsignedLongLong(number) : (uint64_t)value;
    Py_DECREF(number);
    bool failed = overflow != 0 && (overflow < 0 || PyErr_Occurred() != NULL);
    if (!failed) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, "%s: argument '%s' must fit in 64 bits, got a larger integer", op, name);
    return -1;
}

static PyObject *run_manual_seed(PyBound *bound) {
    uint64_t seed;
    if (read_word("manual_seed", "seed", bound->object[0], &seed) < 0) return NULL;
    xt_manual_seed(seed);
    Py_RETURN_NONE;
}

static PyObject *run_get_rng_state(PyBound *Py_UNUSED(bound)) {
    uint64_t seed, stream;
    xt_random_get_state(&seed, &stream);
    return Py_BuildValue("(KK)", (unsigned long long)seed, (unsigned long long)stream);
}

static PyObject *run_set_rng_state(PyBound *bound) {
    PyObject *state = bound->object[0];
    uint64_t words[2];
    if (!(PyTuple_Check(state) || PyList_Check(state)) || PySequence_Fast_GET_SIZE(state) != 2) {
        py_refuse("set_rng_state", "state", "a pair (seed, stream)", state);
        return NULL;
    }
    for (int i = 0; i < 2; i++) {
        PyObject *item = PySequence_GetItem(state, i); /* __index__ of the first may change a list */
        int result = item != NULL ? read_word("set_rng_state", "state", item, &words[i]) : -1;
        Py_XDECREF(item);
        if (result < 0) return NULL;
    }
    xt_random_set_state(words[0], words[1]);
    Py_RETURN_NONE;
}

/* ---- threads --------------------------------------------------------------------------------------------------------- */

static PyObject *run_get_num_threads(PyBound *Py_UNUSED(bound)) { return PyLong_FromLong(xt_num_threads()); }

static PyObject *run_set_num_threads(PyBound *bound) {
    int64_t count = bound->arg[0].i;
    return py_none(xt_set_num_threads(count < 0 ? -1 : count > INT32_MAX ? INT32_MAX : (int)count));
}

/* ---- the default device ----------------------------------------------------------------------------------------------- */

static PyObject *run_set_default_device(PyBound *bound) {
    return py_none(xt_set_default_device(bound->arg[0].given ? bound->arg[0].device : (XtDevice){.type = XT_CPU}));
}
static PyObject *run_get_default_device(PyBound *Py_UNUSED(bound)) { return py_device_object(xt_default_device()); }

/* ---- memory ---------------------------------------------------------------------------------------------------------- */

static PyObject *run_memory_stats(PyBound *bound) {
    XtMemoryStats s;
    xt_memory_stats(bound->arg[0].device, &s);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L}", "allocated", (long long)s.allocated, "peak", (long long)s.peak, "cached",
                         (long long)s.cached, "live_storages", (long long)s.live_storages, "live_tensors",
                         (long long)s.live_tensors);
}

static PyObject *run_end_threads(PyBound *Py_UNUSED(bound)) {
    py_end_threads();
    Py_RETURN_NONE;
}

static PyObject *run_memory_reset_peak(PyBound *bound) {
    xt_memory_reset_peak(bound->arg[0].device);
    Py_RETURN_NONE;
}

static PyObject *run_memory_trim(PyBound *bound) {
    PyThreadState *saved = py_gil_leave(); /* it waits for a GPU */
    XtStatus status = xt_memory_trim(bound->arg[0].device);
    py_gil_enter(saved);
    return py_none(status);
}

static PyObject *run_meta_plan(PyBound *Py_UNUSED(bound)) {
    xt_meta_plan();
    Py_RETURN_NONE;
}

static PyObject *run_meta_planned(PyBound *Py_UNUSED(bound)) { return PyLong_FromSize_t(xt_meta_planned()); }

static PyObject *run_meta_work(PyBound *bound) {
    XtMetaWork work;
    xt_meta_work(&work, bound->arg[0].b);
    return Py_BuildValue("{s:L,s:L}", "flops", (long long)work.flops, "bytes", (long long)work.bytes);
}

/* ---- this build ------------------------------------------------------------------------------------------------------ */

static PyObject *run_op_signatures(PyBound *Py_UNUSED(bound)) {
    PyObject *dict = PyDict_New();
    for (const XtOp *const *op = xt_ops; *op != NULL && dict != NULL; op++) {
        PyObject *text = PyUnicode_FromString((*op)->signature);
        if (text == NULL || PyDict_SetItemString(dict, (*op)->name, text) < 0) Py_CLEAR(dict);
        Py_XDECREF(text);
    }
    return dict;
}

static PyObject *run_kernels(PyBound *bound) {
    const XtBackend *backend;
    XtStatus status = xt_backend_for(bound->arg[0].device, &backend);
    if (status != XT_OK) return py_raise(status);
    const struct {
        const char *name;
        bool present;
    } slots[] = {
#define XT_X(slot, Params) {#slot, backend->slot != NULL},
        XT_KERNELS(XT_X)
#undef XT_X
    };
    PyObject *dict = PyDict_New();
    for (size_t i = 0; i < sizeof slots / sizeof slots[0] && dict != NULL; i++)
        if (PyDict_SetItemString(dict, slots[i].name, slots[i].present ? Py_True : Py_False) < 0) Py_CLEAR(dict);
    return dict;
}

static int append_name(PyObject *list, const char *name) {
    PyObject *text = PyUnicode_FromString(name);
    if (text == NULL) return -1;
    int result = PyList_Append(list, text);
    Py_DECREF(text);
    return result;
}

static PyObject *run_cpu_features(PyBound *Py_UNUSED(bound)) {
    PyObject *list = PyList_New(0);
    if (list == NULL) return NULL;
    int result = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
#define FEATURE(name) \
    if (result == 0 && __builtin_cpu_supports(name)) result = append_name(list, name)
    FEATURE("sse4.2");
    FEATURE("avx");
    FEATURE("avx2");
    FEATURE("fma");
    FEATURE("avx512f");
    FEATURE("avx512bw");
    FEATURE("avx512dq");
    FEATURE("avx512vl");
    FEATURE("avx512vnni");
    FEATURE("avx512bf16");
#undef FEATURE
#elif defined(__aarch64__)
    result = append_name(list, "neon");
#endif
    if (result < 0) Py_CLEAR(list);
    return list;
}

XtStatus py_open_blas(const char **description) {
    const XtBackend *cpu;
    XT_CHECK(xt_backend_for((XtDevice){.type = XT_CPU}, &cpu));
    return cpu->open(description);
}

static PyObject *run_build_info(PyBound *Py_UNUSED(bound)) {
    const char *blas;
    XtStatus status = py_open_blas(&blas);
    if (status != XT_OK) return py_raise(status);
    return Py_BuildValue("{s:s,s:s,s:s,s:s,s:s}", "version", XT_VERSION, "contract", xt_contract(), "compiler",
#if defined(__clang__)
                         "clang " __clang_version__,
#else
                         "gcc " __VERSION__,
#endif
                         "flags", XT_BUILD_FLAGS, "blas", blas);
}

const PyFunction py_runtime_functions[] = {
    {"manual_seed", "seed: object -> None", run_manual_seed, "Restarts the random numbers from a 64-bit seed.", 0, NULL},
    {"get_rng_state", "-> (int, int)", run_get_rng_state, "(seed, stream), the whole state of the generator.", 0, NULL},
    {"set_rng_state", "state: object -> None", run_set_rng_state, "Sets the state to a pair that get_rng_state returned.", 0, NULL},
    {"end_threads", "-> None", run_end_threads, "Keeps all threads but the main one out of the core from now on: the process ends.",
     0, NULL},
    {"get_num_threads", "-> int", run_get_num_threads, "Number of threads of CPU kernels.", 0, NULL},
    {"set_num_threads", "count: int -> None", run_set_num_threads,
     "Sets the number of threads of CPU kernels; results do not depend on it.", 0, NULL},
    {"set_default_device", "device: device? -> None", run_set_default_device,
     "Sets the device of new tensors of this thread when a call names none; None is the CPU. from_numpy and from_dlpack keep the "
     "device of their data.",
     0, NULL},
    {"get_default_device", "-> device", run_get_default_device, "The device of new tensors of this thread when a call names none.",
     0, NULL},
    {"memory_stats", "device: device = 'cpu' -> {int}", run_memory_stats,
     "Bytes allocated, their peak, bytes cached, live storages and tensors.", 0, NULL},
    {"memory_reset_peak", "device: device = 'cpu' -> None", run_memory_reset_peak, "Sets the peak to the bytes allocated now.", 0,
     NULL},
    {"memory_trim", "device: device = 'cpu' -> None", run_memory_trim, "Returns cached blocks to the system.", 0, NULL},
    {"meta_plan", "-> None", run_meta_plan, "Follows what is allocated on meta from now on; starts over if it did.", 0, NULL},
    {"meta_planned", "-> int", run_meta_planned,
     "Ends that: bytes of the region that a captured step with these allocations would have; 0 without a plan.", 0, NULL},
    {"meta_work", "reset: bool = False -> {int}", run_meta_work,
     "What kernels on meta would have done: flops of products and attention, bytes that the others would have read and written.", 0,
     NULL},
    {"op_signatures", "-> {str}", run_op_signatures, "Name -> signature of every op, in the grammar of csrc/ops/ops.h.", 0, NULL},
    {"kernels", "device: device = 'cpu' -> {bool}", run_kernels,
     "Slot -> whether the device has it, for every kernel of csrc/kernels.h.", 0, NULL},
    {"cpu_features", "-> [str]", run_cpu_features, "Vector instruction sets of this CPU.", 0, NULL},
    {"build_info", "-> {str}", run_build_info, "Version, contract of kernels, compiler, flags and BLAS of this build.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
