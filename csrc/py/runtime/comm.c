/* comm.c - NCCL's collectives for Python: what their arguments must be. xtrain/distributed/nccl.py keeps the order of these calls. */
#include "backend/nccl.h"
#include "py/runtime/runtime.h"

static const char NAME[] = "xtrain.comm";

static void drop(PyObject *capsule) { xt_comm_free(PyCapsule_GetPointer(capsule, NAME)); }

static XtComm *comm_of(const char *op, PyObject *object) {
    if (PyCapsule_IsValid(object, NAME)) return PyCapsule_GetPointer(object, NAME);
    py_refuse(op, "comm", "what nccl_open has returned", object);
    return NULL;
}

static PyObject *run_version(PyBound *Py_UNUSED(bound)) {
    int version;
    const char *path;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_nccl_version(&version, &path);
    py_gil_enter(saved);
    if (status != XT_OK) return py_raise(status);
    return Py_BuildValue("{s:i,s:s}", "version", version, "path", path);
}

/* The id as text: two hexadecimal digits a byte. */
static PyObject *run_unique_id(PyBound *Py_UNUSED(bound)) {
    unsigned char id[XT_COMM_ID];
    char text[2 * XT_COMM_ID + 1];
    XtStatus status = xt_comm_id(id);
    if (status != XT_OK) return py_raise(status);
    for (int i = 0; i < XT_COMM_ID; i++) snprintf(text + 2 * i, 3, "%02x", id[i]);
    return PyUnicode_FromString(text);
}

static bool read_id(const char *text, unsigned char id[XT_COMM_ID]) {
    if (strlen(text) != 2 * XT_COMM_ID || strspn(text, "0123456789abcdef") != 2 * XT_COMM_ID) return false;
    for (int i = 0; i < XT_COMM_ID; i++) {
        unsigned byte;
        sscanf(text + 2 * i, "%2x", &byte);
        id[i] = (unsigned char)byte;
    }
    return true;
}

static PyObject *run_open(PyBound *bound) {
    unsigned char id[XT_COMM_ID];
    int64_t rank = bound->arg[2].i, size = bound->arg[3].i;
    if (size < 1 || size > INT32_MAX || rank < 0 || rank >= size)
        return PyErr_Format(PyExc_ValueError, "nccl_open: rank must be in [0, size), got %lld of %lld", (long long)rank,
                            (long long)size);
    if (!read_id(bound->arg[1].s, id))
        return PyErr_Format(PyExc_ValueError, "nccl_open: id must be what nccl_unique_id has returned, got %.40s", bound->arg[1].s);
    XtComm *comm;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_comm_open(bound->arg[0].device, id, (int)rank, (int)size, &comm);
    py_gil_enter(saved);
    if (status != XT_OK) return py_raise(status);
    PyObject *capsule = PyCapsule_New(comm, NAME, drop);
    if (capsule == NULL) xt_comm_abort(comm), xt_comm_free(comm);
    return capsule;
}

/* A contiguous tensor of the communicator's device. */
static bool fits(const char *op, const char *name, const XtComm *comm, const XtTensor *tensor) {
    XtDevice device = xt_comm_device(comm), found = tensor->storage->device;
    if (found.type != device.type || found.index != device.index)
        PyErr_Format(PyExc_ValueError, "%s: %s must be on %s, got %s", op, name, xt_device_name(device), xt_device_name(found));
    else if (!xt_view_is_contiguous(&tensor->view))
        PyErr_Format(PyExc_ValueError, "%s: %s must be contiguous, got strides of a view", op, name);
    else return true;
    return false;
}
static size_t bytes_of(const XtTensor *tensor) { return (size_t)xt_view_numel(&tensor->view) * xt_dtype_size(tensor->dtype); }

/* What NCCL gets of `out` and `in`; false with an error. */
static bool pieces_of(const char *op, const XtComm *comm, const XtTensor *out, const XtTensor *in, bool gather, XtExchange *found) {
    if (!fits(op, gather ? "every out" : "out", comm, out) || !fits(op, gather ? "every input" : "input", comm, in)) return false;
    const size_t size = (size_t)xt_comm_size(comm), nbytes = bytes_of(out) / size;
    *found = (XtExchange){out->data, in->data, nbytes};
    if (bytes_of(out) % size == 0 && bytes_of(in) == (gather ? nbytes : bytes_of(out))) return true;
    PyErr_Format(PyExc_ValueError, "%s: %s must hold %s, got %zu and %zu bytes on %zu ranks", op, gather ? "every out" : "out",
                 gather ? "its input of every rank" : "as many bytes as input, in pieces of one size", bytes_of(out), bytes_of(in),
                 size);
    return false;
}

static PyObject *run_all_to_all(PyBound *bound) {
    static const char OP[] = "nccl_all_to_all";
    XtComm *comm = comm_of(OP, bound->object[0]);
    XtExchange pieces;
    if (comm == NULL || !pieces_of(OP, comm, bound->arg[1].tensor, bound->arg[2].tensor, false, &pieces)) return NULL;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_comm_all_to_all(comm, &pieces, bound->arg[3].b);
    py_gil_enter(saved);
    return py_none(status);
}

static PyObject *run_all_gather(PyBound *bound) {
    static const char OP[] = "nccl_all_gather";
    XtComm *comm = comm_of(OP, bound->object[0]);
    const XtArg *outs = &bound->arg[1], *inputs = &bound->arg[2];
    if (comm == NULL) return NULL;
    if (outs->count != inputs->count || inputs->count < 1)
        return PyErr_Format(PyExc_ValueError, "%s: outs must be one for each input, at least 1, got %d and %d", OP, outs->count,
                            inputs->count);
    XtExchange *each = malloc((size_t)inputs->count * sizeof *each);
    if (each == NULL) return PyErr_NoMemory();
    for (int i = 0; i < inputs->count; i++) {
        if (!pieces_of(OP, comm, outs->tensors[i], inputs->tensors[i], true, &each[i])) {
            free(each);
            return NULL;
        }
    }
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_comm_all_gather(comm, each, inputs->count, bound->arg[3].b);
    py_gil_enter(saved);
    free(each);
    return py_none(status);
}

static PyObject *run_join(PyBound *bound) {
    XtComm *comm = comm_of("nccl_join", bound->object[0]);
    return comm == NULL ? NULL : py_none(xt_comm_join(comm));
}

static PyObject *run_broadcast(PyBound *bound) {
    XtComm *comm = comm_of("nccl_broadcast", bound->object[0]);
    if (comm == NULL) return NULL;
    const XtTensor *tensor = bound->arg[1].tensor;
    int64_t source = bound->arg[2].i;
    if (!fits("nccl_broadcast", "input", comm, tensor)) return NULL;
    if (source < 0 || source >= xt_comm_size(comm))
        return PyErr_Format(PyExc_ValueError, "nccl_broadcast: src must be a rank in [0, %d), got %lld", xt_comm_size(comm),
                            (long long)source);
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_comm_broadcast(comm, tensor->data, bytes_of(tensor), (int)source);
    py_gil_enter(saved);
    return py_none(status);
}

static PyObject *run_idle(PyBound *bound) {
    XtComm *comm = comm_of("nccl_idle", bound->object[0]);
    if (comm == NULL) return NULL;
    int64_t wait = bound->arg[1].i;
    if (wait < 0 || wait > 1000000)
        return PyErr_Format(PyExc_ValueError, "nccl_idle: wait must be in [0, 1000000] microseconds, got %lld", (long long)wait);
    bool idle;
    PyThreadState *saved = py_gil_leave();
    XtStatus status = xt_comm_idle(comm, wait, &idle);
    py_gil_enter(saved);
    return status == XT_OK ? PyBool_FromLong(idle) : py_raise(status);
}

static PyObject *run_close(PyBound *bound) {
    XtComm *comm = comm_of("nccl_close", bound->object[0]);
    if (comm == NULL) return NULL;
    bool in_order = bound->arg[1].b;
    PyThreadState *saved = py_gil_leave();
    in_order ? xt_comm_close(comm) : xt_comm_abort(comm);
    py_gil_enter(saved);
    Py_RETURN_NONE;
}

const PyFunction py_comm_functions[] = {
    {"nccl_version", "-> {object}", run_version, "Opens NCCL: its version (22809 is 2.28.9) and path. RuntimeError without it.", 0,
     NULL},
    {"nccl_unique_id", "-> str", run_unique_id, "What all ranks of one communicator give to nccl_open, made by one of them.", 0,
     NULL},
    {"nccl_open", "device: device, id: str, rank: int, size: int -> object", run_open,
     "A communicator of this device with those of other processes; returns when all have called it.", 0, NULL},
    {"nccl_all_to_all", "comm: object, out: Tensor, input: Tensor, beside: bool = False -> None", run_all_to_all,
     "Queues: piece j of input goes to rank j. Both tensors must stay until nccl_idle. beside: later kernels do not wait for it.",
     0, NULL},
    {"nccl_join", "comm: object -> None", run_join, "What is queued from now on waits for the exchanges beside the kernels.", 0,
     NULL},
    {"nccl_all_gather", "comm: object, outs: Tensors, inputs: Tensors, beside: bool = False -> None", run_all_gather,
     "Queues: each out gets its input of every rank, by rank. All must stay until nccl_idle. beside: as in nccl_all_to_all.", 0,
     NULL},
    {"nccl_broadcast", "comm: object, input: Tensor, src: int -> None", run_broadcast,
     "Queues: input becomes that of rank src. It must stay until nccl_idle.", 0, NULL},
    {"nccl_idle", "comm: object, wait: int = 0 -> bool", run_idle,
     "Whether all that the device was asked for is done, by now or within `wait` microseconds, without the GIL. CudaError for "
     "what\n"
     "NCCL has met meanwhile.",
     0, NULL},
    {"nccl_close", "comm: object, in_order: bool -> None", run_close,
     "Ends the communicator. in_order: all ranks call it, and nothing is under way; else from any thread, whatever is.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
