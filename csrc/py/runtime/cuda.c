/* cuda.c - CUDA devices for Python: properties, counters, synchronisation. */
#include "contract/backend.h"
#include "py/runtime/runtime.h"

const XtAccelerator *py_accelerator(XtDevice device) {
    const XtBackend *backend;
    if (device.type != XT_CUDA) {
        PyErr_Format(PyExc_ValueError, "argument 'device' must be a CUDA device, got %s", xt_device_name(device));
        return NULL;
    }
    XtStatus status = xt_backend_for(device, &backend);
    if (status == XT_OK) return backend->accelerator;
    py_raise(status);
    return NULL;
}

static PyObject *run_device_count(PyBound *Py_UNUSED(bound)) {
    const XtBackend *table;
    XtStatus status = xt_cuda_table(&table);
    return status == XT_OK ? PyLong_FromLong(table->accelerator->device_count) : py_raise(status);
}

static PyObject *run_info(PyBound *bound) {
    const XtAccelerator *accelerator = py_accelerator(bound->arg[0].device);
    if (accelerator == NULL) return NULL;
    XtDeviceInfo info;
    XtStatus status = accelerator->info(bound->arg[0].device.index, &info);
    if (status != XT_OK) return py_raise(status);
    return Py_BuildValue("{s:s,s:(ii),s:i,s:i,s:i,s:L,s:L,s:s,s:s,s:s}", "name", info.name, "capability", info.major, info.minor,
                         "multiprocessors", info.multiprocessors, "driver", info.driver, "runtime", info.runtime, "memory_total",
                         (long long)info.memory_total, "memory_free", (long long)info.memory_free, "built_for", info.built_for,
                         "uuid", info.uuid, "blas", info.blas);
}

static PyObject *run_counters(PyBound *bound) {
    const XtAccelerator *accelerator = py_accelerator(bound->arg[0].device);
    if (accelerator == NULL) return NULL;
    XtDeviceCounters c;
    XtStatus status = accelerator->counters(bound->arg[0].device.index, &c);
    if (status != XT_OK) return py_raise(status);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L,s:L}", "launches", (long long)c.launches, "synchronizations",
                         (long long)c.synchronizations, "to_host", (long long)c.to_host, "from_host", (long long)c.from_host,
                         "allocations", (long long)c.allocations, "driver_allocations", (long long)c.driver_allocations,
                         "pool_used", (long long)c.pool_used, "pool_reserved", (long long)c.pool_reserved, "pool_peak",
                         (long long)c.pool_peak);
}

static PyObject *run_synchronize(PyBound *bound) {
    XtDevice device = bound->arg[0].device;
    const XtBackend *backend;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_backend_for(device, &backend);
    if (status == XT_OK) status = backend->synchronize(device.index);
    py_gil_enter(saved);
    return py_none(status);
}

static PyObject *run_stream(PyBound *bound) {
    const XtAccelerator *accelerator = py_accelerator(bound->arg[0].device);
    return accelerator != NULL ? PyLong_FromVoidPtr(accelerator->stream(bound->arg[0].device.index)) : NULL;
}

/* The list is never freed: a CUDA library may be opened at any time after this call. */
static PyObject *run_set_package_folders(PyBound *bound) {
    PyObject *list = PySequence_List(bound->object[0]);
    if (list == NULL) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(list);
    const char **folders = calloc((size_t)count + 1, sizeof *folders);
    for (Py_ssize_t i = 0; i < count && folders != NULL; i++) {
        PyObject *bytes = NULL; /* a path may hold bytes that are not valid text */
        if (PyUnicode_FSConverter(PyList_GET_ITEM(list, i), &bytes)) folders[i] = strdup(PyBytes_AS_STRING(bytes));
        Py_XDECREF(bytes);
        if (folders[i] != NULL) continue;
        while (i-- > 0) free((char *)folders[i]);
        free(folders);
        folders = NULL;
    }
    Py_DECREF(list);
    if (folders == NULL) return PyErr_Occurred() != NULL ? NULL : PyErr_NoMemory();
    xt_set_package_folders(folders);
    Py_RETURN_NONE;
}

static PyObject *run_allow_tf32(PyBound *bound) {
    xt_allow_tf32(bound->arg[0].b);
    Py_RETURN_NONE;
}
static PyObject *run_tf32(PyBound *Py_UNUSED(bound)) { return PyBool_FromLong(xt_tf32()); }

const PyFunction py_cuda_functions[] = {
    {"cuda_device_count", "-> int", run_device_count, "Number of CUDA devices. RuntimeError gives the reason if there are none.", 0,
     NULL},
    {"cuda_info", "device: device = 'cuda' -> {object}", run_info,
     "Name, capability, memory and versions of a CUDA device, and the architectures that the CUDA library was built for.", 0, NULL},
    {"cuda_counters", "device: device = 'cuda' -> {int}", run_counters,
     "Kernel launches, synchronisations, copies and allocations so far, and bytes of the memory pool.", 0, NULL},
    {"cuda_stream", "device: device = 'cuda' -> int", run_stream,
     "Address of the stream on which all work of a CUDA device is queued.", 0, NULL},
    {"synchronize", "device: device = 'cuda' -> None", run_synchronize, "Waits for the work queued on a device.", 0, NULL},
    {"set_package_folders", "folders: object -> None", run_set_package_folders,
     "Sets the folders in which NVIDIA's Python packages are looked for.", 0, NULL},
    {"allow_tf32", "allow: bool -> None", run_allow_tf32, "Sets whether float32 products may use TF32 units.", 0, NULL},
    {"tf32", "-> bool", run_tf32, "Whether float32 products may use TF32 units.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
