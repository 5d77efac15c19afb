/* graph.c - the capture of a step on a CUDA device, for xtrain/_graph.py, which keeps the order of these calls. */
#include "contract/backend.h"
#include "py/runtime/runtime.h"

static const char NAME[] = "xtrain.graph";

/* What the object of cuda_capture holds. */
typedef struct Captured {
    const XtAccelerator *accelerator;
    XtGraph *graph;
} Captured;

static void drop(PyObject *capsule) {
    Captured *captured = PyCapsule_GetPointer(capsule, NAME);
    if (captured == NULL) return;
    captured->accelerator->drop(captured->graph);
    free(captured);
}

static Captured *captured_of(const char *op, PyObject *object) {
    if (PyCapsule_IsValid(object, NAME)) return PyCapsule_GetPointer(object, NAME);
    py_refuse(op, "graph", "what cuda_capture has returned", object);
    return NULL;
}

static PyObject *run_waits(PyBound *bound) {
    const XtAccelerator *accelerator = py_accelerator(bound->arg[0].device);
    return accelerator != NULL ? PyBool_FromLong(accelerator->waits) : NULL;
}

static PyObject *run_plan(PyBound *bound) {
    const XtAccelerator *accelerator = py_accelerator(bound->arg[0].device);
    return accelerator != NULL ? py_none(accelerator->plan(bound->arg[0].device.index)) : NULL;
}

static PyObject *run_planned(PyBound *bound) {
    const XtAccelerator *accelerator = py_accelerator(bound->arg[0].device);
    if (accelerator == NULL) return NULL;
    size_t nbytes;
    XtStatus status = accelerator->planned(bound->arg[0].device.index, &nbytes);
    return status == XT_OK ? PyLong_FromSize_t(nbytes) : py_raise(status);
}

static PyObject *run_capture(PyBound *bound) {
    const XtAccelerator *accelerator = py_accelerator(bound->arg[0].device);
    if (accelerator == NULL) return NULL;
    if (bound->arg[1].i < 1) {
        PyErr_Format(PyExc_ValueError, "cuda_capture: nbytes must be at least 1, got %lld", (long long)bound->arg[1].i);
        return NULL;
    }
    Captured *captured = calloc(1, sizeof *captured);
    if (captured == NULL) return PyErr_NoMemory();
    captured->accelerator = accelerator;
    PyThreadState *saved = py_gil_leave(); /* it waits for the device */
    XtStatus status = accelerator->capture(bound->arg[0].device.index, (size_t)bound->arg[1].i, &captured->graph);
    py_gil_enter(saved);
    PyObject *capsule = status == XT_OK ? PyCapsule_New(captured, NAME, drop) : py_raise(status);
    if (capsule != NULL) return capsule;
    if (status == XT_OK) accelerator->drop(captured->graph);
    free(captured);
    return NULL;
}

static PyObject *run_end_capture(PyBound *bound) {
    Captured *captured = captured_of("cuda_end_capture", bound->object[0]);
    if (captured == NULL) return NULL;
    int64_t calls = 0;
    XtStatus status = captured->accelerator->end_capture(captured->graph, bound->arg[1].b, &calls);
    return status == XT_OK ? PyLong_FromLongLong(calls) : py_raise(status);
}

static PyObject *run_replay(PyBound *bound) {
    Captured *captured = captured_of("cuda_replay", bound->object[0]);
    if (captured == NULL) return NULL;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = captured->accelerator->replay(captured->graph);
    py_gil_enter(saved);
    return py_none(status);
}

static PyObject *run_owns(PyBound *bound) {
    Captured *captured = captured_of("cuda_graph_owns", bound->object[0]);
    if (captured == NULL) return NULL;
    const XtTensor *tensor = bound->arg[1].tensor;
    return PyBool_FromLong(tensor->storage->device.type == XT_CUDA &&
                           captured->accelerator->owns(captured->graph, tensor->storage->data));
}

const PyFunction py_graph_functions[] = {
    {"cuda_waits", "device: device = 'cuda' -> bool", run_waits,
     "Whether the host waits after every kernel (XTRAIN_CUDA_SYNC=1), so that nothing can be captured.", 0, NULL},
    {"cuda_plan", "device: device = 'cuda' -> None", run_plan, "Starts to follow what is allocated on a CUDA device.", 0, NULL},
    {"cuda_planned", "device: device = 'cuda' -> int", run_planned,
     "Ends cuda_plan: bytes of the region that the same allocations in the same order need.", 0, NULL},
    {"cuda_capture", "device: device, nbytes: int -> object", run_capture,
     "From now on the work of a CUDA device is recorded, not run, and its memory comes from a region of nbytes.", 0, NULL},
    {"cuda_end_capture", "graph: object, keep: bool -> int", run_end_capture,
     "Ends cuda_capture: the number of calls in the graph, which can be replayed if it is kept.", 0, NULL},
    {"cuda_replay", "graph: object -> None", run_replay, "Queues a captured graph.", 0, NULL},
    {"cuda_graph_owns", "graph: object, input: Tensor -> bool", run_owns, "Whether a tensor lies in the region of a graph.", 0,
     NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
