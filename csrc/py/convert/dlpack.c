/* dlpack.c - exchange of tensors with other libraries through DLPack capsules, both ways, legacy and versioned (1.x).
 *
 * A capsule named "dltensor" or "dltensor_versioned" owns a managed tensor until a consumer renames it to "used_...": from then on
 * the consumer calls the deleter, once. Data from outside is checked field by field before anything reads it.
 */
#include "contract/backend.h"
#include "py/convert/convert.h"

/* The structures of the DLPack specification, v1.1, as far as they are needed. */
typedef struct DlDevice {
    int32_t type, index;
} DlDevice;
typedef struct DlTensor {
    void *data;
    DlDevice device;
    int32_t ndim;
    uint8_t code, bits; /* of one element */
    uint16_t lanes;
    int64_t *shape, *strides; /* [ndim], in elements */
    uint64_t byte_offset;
} DlTensor;
typedef struct DlManaged {
    DlTensor tensor;
    void *context;
    void (*deleter)(struct DlManaged *self);
} DlManaged;
typedef struct DlVersioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct DlVersioned *self);
    uint64_t flags;
    DlTensor tensor;
} DlVersioned;

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };
enum { DL_READ_ONLY = 1, DL_IS_COPIED = 2 };
#define DL_MAJOR 1
#define DL_MINOR 1

static const struct {
    uint8_t code, bits;
} dl_types[XT_DTYPE_COUNT] = {
    [XT_FLOAT32] = {DL_FLOAT, 32}, [XT_FLOAT64] = {DL_FLOAT, 64}, [XT_BFLOAT16] = {DL_BFLOAT, 16}, [XT_FLOAT16] = {DL_FLOAT, 16},
    [XT_INT32] = {DL_INT, 32},     [XT_INT64] = {DL_INT, 64},     [XT_UINT8] = {DL_UINT, 8},       [XT_BOOL] = {DL_BOOL, 8},
};

static DlDevice dl_device(XtDevice device) {
    return (DlDevice){.type = device.type == XT_CPU ? DL_CPU : DL_CUDA, .index = device.index};
}

/* ---- out ------------------------------------------------------------------------------------------------------------- */

/* Who may still use lent memory of an accelerator when it comes back: nobody (the CPU, or a consumer that orders its work itself),
 * the legacy default stream, which always exists, or a stream of the consumer. The handle of that stream is not kept: when the
 * memory comes back the stream may have been destroyed, and its address may belong to another. */
typedef enum User { USED_BY_NOBODY, USED_BY_DEFAULT_STREAM, USED_BY_SOME_STREAM } User;
enum { LEGACY_STREAM = 1 }; /* its handle */

/* One allocation holds either kind of managed tensor with its shape and strides. */
typedef struct Export {
    union {
        DlManaged managed;
        DlVersioned versioned;
    };
    XtTensor *owner; /* owned alias */
    User user;
    int64_t shape[XT_MAX_DIMS], strides[XT_MAX_DIMS];
} Export;

/* The memory may be reused once the consumer's stream is done with it, even if that stream has been destroyed. */
static void free_export(Export *export) {
    const XtBackend *backend;
    XtDevice device = export->owner->storage->device;
    XtStatus status = XT_OK;
    if (export->user != USED_BY_NOBODY && xt_backend_for(device, &backend) == XT_OK)
        status = backend->accelerator->wait_for(device.index, export->user == USED_BY_SOME_STREAM);
    /* Memory whose last use cannot be awaited (the consumer's stream is being captured, say) is never reused. */
    if (status == XT_OK) xt_tensor_release(export->owner);
    free(export);
}

static void delete_managed(DlManaged *self) { free_export((Export *)self->context); }
static void delete_versioned(DlVersioned *self) { free_export((Export *)self->context); }

/* Destructors of unconsumed capsules. */
static void drop_managed(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    DlManaged *managed = PyCapsule_GetPointer(capsule, "dltensor");
    if (managed->deleter != NULL) managed->deleter(managed);
}
static void drop_versioned(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return;
    DlVersioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
    if (versioned->deleter != NULL) versioned->deleter(versioned);
}

/* Takes over `tensor`. */
static PyObject *new_capsule(XtTensor *tensor, User user, bool versioned, bool copied) {
    Export *export = calloc(1, sizeof *export);
    if (export == NULL) {
        xt_tensor_release(tensor);
        return PyErr_NoMemory();
    }
    export->owner = tensor;
    export->user = user;
    for (int i = 0; i < tensor->ndim; i++) {
        export->shape[i] = tensor->shape[i];
        export->strides[i] = tensor->strides[i];
    }
    DlTensor out = {.data = tensor->data,
                    .device = dl_device(tensor->storage->device),
                    .ndim = tensor->ndim,
                    .code = dl_types[tensor->dtype].code,
                    .bits = dl_types[tensor->dtype].bits,
                    .lanes = 1,
                    .shape = export->shape,
                    .strides = export->strides};
    PyObject *capsule;
    if (versioned) {
        export->versioned = (DlVersioned){DL_MAJOR, DL_MINOR, export, delete_versioned, copied ? DL_IS_COPIED : 0, out};
        capsule = PyCapsule_New(&export->versioned, "dltensor_versioned", drop_versioned);
    } else {
        export->managed = (DlManaged){out, export, delete_managed};
        capsule = PyCapsule_New(&export->managed, "dltensor", drop_managed);
    }
    if (capsule == NULL) free_export(export);
    return capsule;
}

/* Reads a pair of small ints such as max_version or dl_device. */
static int read_pair(const char *name, PyObject *object, int64_t pair[2]) {
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 2)
        return py_refuse("__dlpack__", name, "a tuple of two ints or None", object);
    for (int i = 0; i < 2; i++) {
        PyObject *number = PyNumber_Index(PyTuple_GET_ITEM(object, i)); /* NumPy and PyTorch pass enums */
        if (number == NULL) return -1;
        int found = py_int64("__dlpack__", name, number, &pair[i]);
        Py_DECREF(number);
        if (found != 1) return -1;
    }
    return 0;
}

/* Makes the consumer's stream wait for what is queued here. None is the legacy default stream (handle 1), -1 asks for nothing. */
static int order_after(const XtTensor *tensor, PyObject *stream, User *user) {
    int64_t handle = LEGACY_STREAM;
    if (stream != Py_None && py_int64("__dlpack__", "stream", stream, &handle) != 1) {
        if (PyErr_Occurred() == NULL) py_refuse("__dlpack__", "stream", "an int or None", stream);
        return -1;
    }
    *user = USED_BY_NOBODY;
    if (handle == -1) return 0;
    if (handle == 0 || handle < -1) {
        PyErr_Format(PyExc_BufferError, "__dlpack__: argument 'stream' must be -1, 1, 2 or a stream's address, got %lld",
                     (long long)handle);
        return -1;
    }
    const XtBackend *backend;
    XtDevice device = tensor->storage->device;
    void *consumer = (void *)(intptr_t)handle;
    XtStatus status = xt_backend_for(device, &backend);
    if (status == XT_OK && consumer == backend->accelerator->stream(device.index)) return 0; /* ours is in order already */
    if (status == XT_OK) status = backend->accelerator->make_wait(device.index, consumer);
    if (py_check(status) < 0) return -1;
    *user = handle == LEGACY_STREAM ? USED_BY_DEFAULT_STREAM : USED_BY_SOME_STREAM; /* 2 depends on the thread that asks */
    return 0;
}

static int refuse_meta(const char *op, const XtTensor *tensor) {
    if (tensor->storage->device.type != XT_META) return 0;
    PyErr_Format(PyExc_BufferError, "%s: tensor must have values, got one on meta", op);
    return -1;
}

static PyObject *run_dlpack(PyBound *bound) {
    XtTensor *tensor = bound->arg[0].tensor;
    PyObject *stream = bound->object[1], *max_version = bound->object[2], *device = bound->object[3];
    bool copy_given = bound->arg[4].given, copy = bound->arg[4].b, versioned = false;
    if (xt_requires_grad(tensor))
        return PyErr_Format(PyExc_BufferError, "__dlpack__: tensor must not require a gradient; call detach() first");
    if (refuse_meta("__dlpack__", tensor) < 0) return NULL;
    if (stream != Py_None && tensor->storage->device.type == XT_CPU)
        return PyErr_Format(PyExc_BufferError, "__dlpack__: argument 'stream' must be None for a tensor on the CPU, got %R",
                            stream);
    if (max_version != Py_None) {
        int64_t version[2];
        if (read_pair("max_version", max_version, version) < 0) return NULL;
        versioned = version[0] >= DL_MAJOR;
    }
    bool to_host = false;
    if (device != Py_None) {
        int64_t wanted[2];
        DlDevice own = dl_device(tensor->storage->device);
        if (read_pair("dl_device", device, wanted) < 0) return NULL;
        bool same = wanted[0] == own.type && wanted[1] == own.index;
        to_host = !same && wanted[0] == DL_CPU;
        if (!same && (!to_host || (copy_given && !copy)))
            return PyErr_Format(PyExc_BufferError, "__dlpack__: tensor on %s cannot be given to DLPack device %R%s",
                                xt_device_name(tensor->storage->device), device, to_host ? " with copy=False" : "");
    }
    XtTensor *out = NULL;
    XtArg arg = py_arg_tensor(tensor);
    if (to_host) {
        out = py_on_host(tensor);
    } else if (copy_given && copy) {
        out = py_call_plain(&xt_op_clone, &arg, 1);
    } else {
        XtStatus status = xt_tensor_alias(tensor, &out);
        if (status != XT_OK) return py_raise(status);
    }
    User user = USED_BY_NOBODY; /* last, because it also waits for a copy */
    if (out != NULL && out->storage->device.type != XT_CPU && order_after(out, stream, &user) < 0) {
        xt_tensor_release(out);
        return NULL;
    }
    return out != NULL ? new_capsule(out, user, versioned, to_host || (copy_given && copy)) : NULL;
}

static PyObject *run_dlpack_device(PyBound *bound) {
    if (refuse_meta("__dlpack_device__", bound->arg[0].tensor) < 0) return NULL;
    DlDevice device = dl_device(bound->arg[0].tensor->storage->device);
    return Py_BuildValue("(ii)", (int)device.type, (int)device.index);
}

/* ---- in -------------------------------------------------------------------------------------------------------------- */

/* The producer may reuse the memory as soon as it is returned: its default stream waits for the work queued here. */
static void hand_back(const XtStorage *storage) {
    const XtBackend *backend;
    XtDevice device = storage->device;
    if (device.type == XT_CPU || xt_backend_for(device, &backend) != XT_OK) return;
    backend->accelerator->make_wait(device.index, (void *)LEGACY_STREAM);
}

/* Called when no tensor uses the foreign memory any more. Any thread; deleters of Python libraries may expect the GIL. */
static void release_managed(XtStorage *storage) {
    DlManaged *managed = storage->owner;
    if (managed->deleter == NULL || !Py_IsInitialized()) return;
    hand_back(storage);
    PyGILState_STATE gil = PyGILState_Ensure();
    managed->deleter(managed);
    PyGILState_Release(gil);
}
static void release_versioned(XtStorage *storage) {
    DlVersioned *versioned = storage->owner;
    if (versioned->deleter == NULL || !Py_IsInitialized()) return;
    hand_back(storage);
    PyGILState_STATE gil = PyGILState_Ensure();
    versioned->deleter(versioned);
    PyGILState_Release(gil);
}

static int refuse_dl(const char *format, long long got) {
    char text[160];
    snprintf(text, sizeof text, format, got);
    PyErr_Format(PyExc_BufferError, "from_dlpack: %s", text);
    return -1;
}

static int check_device(const DlTensor *dl, XtDevice *out) {
    *out = (XtDevice){.type = XT_CPU};
    if (dl->device.type == DL_CPU || dl->device.type == DL_CUDA_HOST) return 0;
    if (dl->device.type != DL_CUDA || dl->device.index < 0 || dl->device.index > UINT8_MAX)
        return refuse_dl("device type must be CPU (1) or CUDA (2), got %lld", dl->device.type);
    *out = (XtDevice){.type = XT_CUDA, .index = (uint8_t)dl->device.index};
    const XtBackend *backend;
    XtStatus status = xt_backend_for(*out, &backend);
    return py_check(status);
}

/* Fills `view` and the bytes it spans from a foreign description. */
static int check_tensor(const DlTensor *dl, bool strides_required, XtView *view, size_t *nbytes) {
    if (dl->ndim < 0 || dl->ndim > XT_MAX_DIMS) return refuse_dl("ndim must be in [0, 8], got %lld", dl->ndim);
    if (dl->lanes != 1) return refuse_dl("dtype must have 1 lane, got %lld", dl->lanes);
    view->dtype = XT_DTYPE_COUNT;
    for (int i = 0; i < XT_DTYPE_COUNT; i++)
        if (dl_types[i].code == dl->code && dl_types[i].bits == dl->bits) view->dtype = (XtDtype)i;
    if (view->dtype == XT_DTYPE_COUNT) {
        PyErr_Format(PyExc_BufferError, "from_dlpack: dtype with code %d and %d bits has no counterpart", (int)dl->code,
                     (int)dl->bits);
        return -1;
    }
    if (dl->ndim > 0 && dl->shape == NULL) return refuse_dl("shape must not be NULL for ndim %lld", dl->ndim);
    if (dl->ndim > 0 && dl->strides == NULL && strides_required)
        return refuse_dl("strides must not be NULL for ndim %lld", dl->ndim);
    view->ndim = dl->ndim;
    for (int i = 0; i < dl->ndim; i++) {
        if (dl->shape[i] < 0) return refuse_dl("sizes must not be negative, got %lld", (long long)dl->shape[i]);
        view->shape[i] = dl->shape[i];
    }
    XtStatus status = xt_size_of(view->dtype, view->ndim, view->shape, NULL, nbytes);
    if (status != XT_OK) {
        PyErr_Format(PyExc_BufferError, "from_dlpack: %s", xt_error_message());
        return -1;
    }
    xt_view_set_contiguous(view);
    if (*nbytes == 0) return 0;
    if (dl->data == NULL) return refuse_dl("data must not be NULL for %lld bytes", (long long)*nbytes);
    int64_t itemsize = (int64_t)xt_dtype_size(view->dtype), span = itemsize;
    uintptr_t address;
    if (__builtin_add_overflow((uintptr_t)dl->data, dl->byte_offset, &address)) return refuse_dl("byte_offset is out of range", 0);
    if (address % (uintptr_t)itemsize != 0) return refuse_dl("data must be aligned to %lld bytes", (long long)itemsize);
    for (int i = 0; i < dl->ndim && dl->strides != NULL; i++) {
        int64_t reach, stride = dl->strides[i];
        if (view->shape[i] == 1) continue;
        if (stride < 0) return refuse_dl("strides must not be negative, got %lld", (long long)stride);
        if (__builtin_mul_overflow(view->shape[i] - 1, stride, &reach) || __builtin_mul_overflow(reach, itemsize, &reach) ||
            __builtin_add_overflow(span, reach, &span))
            return refuse_dl("stride %lld reaches beyond the address space", (long long)stride);
        view->strides[i] = stride;
    }
    if (dl->strides != NULL) *nbytes = (size_t)span;
    if (address > UINTPTR_MAX - *nbytes)
        return refuse_dl("data of %lld bytes reaches beyond the address space", (long long)*nbytes);
    view->data = (void *)address;
    return 0;
}

static PyObject *from_capsule(PyObject *capsule) {
    bool versioned = PyCapsule_IsValid(capsule, "dltensor_versioned");
    if (!versioned && !PyCapsule_IsValid(capsule, "dltensor")) {
        const char *name = PyCapsule_GetName(capsule);
        if (name == NULL) PyErr_Clear();
        return PyErr_Format(
            PyExc_BufferError, "from_dlpack: capsule must be named 'dltensor' or 'dltensor_versioned', got '%.100s'%s",
            name != NULL ? name : "", name != NULL && strncmp(name, "used_", 5) == 0 ? " (it was consumed before)" : "");
    }
    void *managed = PyCapsule_GetPointer(capsule, versioned ? "dltensor_versioned" : "dltensor");
    const DlVersioned *header = managed;
    if (versioned && header->major != DL_MAJOR) /* another major version has other fields */
        return PyErr_Format(PyExc_BufferError, "from_dlpack: DLPack major version must be %d, got %u", DL_MAJOR,
                            (unsigned)header->major);
    if (versioned && (header->flags & DL_READ_ONLY))
        return PyErr_Format(PyExc_BufferError, "from_dlpack: data must be writable; pass a copy");
    const DlTensor *dl = versioned ? &header->tensor : &((DlManaged *)managed)->tensor;
    XtDevice device;
    XtView view = {0};
    size_t nbytes;
    if (check_device(dl, &device) < 0 || check_tensor(dl, versioned && header->minor >= 2, &view, &nbytes) < 0) return NULL;

    XtStorage *storage = NULL;
    XtTensor *tensor = NULL;
    XtStatus status =
        xt_storage_wrap(device, view.data, nbytes, versioned ? release_versioned : release_managed, managed, &storage);
    if (status != XT_OK) return py_raise(status);
    if (PyCapsule_SetName(capsule, versioned ? "used_dltensor_versioned" : "used_dltensor") < 0) {
        storage->release = NULL; /* still the capsule's */
        xt_storage_release(storage);
        return NULL;
    }
    status = xt_tensor_from_view(storage, &view, &tensor);
    xt_storage_release(storage);
    return status == XT_OK ? py_wrap(tensor) : py_raise(status);
}

/* The stream for obj.__dlpack__, on which the producer makes its data ready: ours for a CUDA device, else None. */
static PyObject *stream_for(PyObject *object) {
    PyObject *pair = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    int64_t numbers[2] = {DL_CPU, 0};
    if (pair == NULL) PyErr_Clear(); /* then __dlpack__ decides */
    else if (read_pair("__dlpack_device__", pair, numbers) < 0) PyErr_Clear();
    Py_XDECREF(pair);
    const XtBackend *backend;
    if (numbers[0] != DL_CUDA || numbers[1] < 0 || numbers[1] > UINT8_MAX) Py_RETURN_NONE;
    XtDevice device = {.type = XT_CUDA, .index = (uint8_t)numbers[1]};
    XtStatus status = xt_backend_for(device, &backend);
    return status == XT_OK ? PyLong_FromVoidPtr(backend->accelerator->stream(device.index)) : py_raise(status);
}

/* obj.__dlpack__(stream=ours, max_version=(1, 1)), or without max_version for producers that know only the first protocol. */
static PyObject *ask_for_capsule(PyObject *object) {
    PyObject *capsule = NULL, *empty = NULL, *kwargs = NULL, *stream = NULL;
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    if (method == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            py_refuse("from_dlpack", "x", "a DLPack capsule or an object with __dlpack__", object);
        }
        return NULL;
    }
    empty = PyTuple_New(0);
    stream = stream_for(object);
    if (empty == NULL || stream == NULL) goto done;
    kwargs = Py_BuildValue("{s:(ii)}", "max_version", DL_MAJOR, DL_MINOR);
    if (kwargs == NULL || (stream != Py_None && PyDict_SetItemString(kwargs, "stream", stream) < 0)) goto done;
    capsule = PyObject_Call(method, empty, kwargs);
    if (capsule == NULL && PyErr_ExceptionMatches(PyExc_TypeError) && PyDict_DelItemString(kwargs, "max_version") == 0) {
        PyErr_Clear();
        capsule = PyObject_Call(method, empty, kwargs);
    }
    if (capsule != NULL && !PyCapsule_CheckExact(capsule)) {
        PyErr_Format(PyExc_BufferError, "from_dlpack: __dlpack__ must return a capsule, got %.100s", Py_TYPE(capsule)->tp_name);
        Py_CLEAR(capsule);
    }
done:
    Py_DECREF(method);
    Py_XDECREF(empty);
    Py_XDECREF(kwargs);
    Py_XDECREF(stream);
    return capsule;
}

static PyObject *run_from_dlpack(PyBound *bound) {
    if (PyCapsule_CheckExact(bound->object[0])) return from_capsule(bound->object[0]);
    PyObject *capsule = ask_for_capsule(bound->object[0]);
    if (capsule == NULL) return NULL;
    PyObject *tensor = from_capsule(capsule);
    Py_DECREF(capsule);
    return tensor;
}

const PyFunction py_dlpack_methods[] = {
    {"__dlpack__",
     "input: Tensor, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool? = None -> object",
     run_dlpack, "Capsule over the same memory for another library. BufferError when that cannot be.", 0, NULL},
    {"__dlpack_device__", "input: Tensor -> (int, int)", run_dlpack_device,
     "(device type, index) in DLPack's numbers: 1 is the CPU, 2 CUDA.", 0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};

const PyFunction py_dlpack_functions[] = {
    {"from_dlpack", "x: object -> Tensor", run_from_dlpack,
     "Tensor over the memory of a DLPack capsule or of an object with __dlpack__; nothing is copied.\n"
     "BufferError for data that are read-only, on an unknown device, or of a dtype without a counterpart.",
     0, NULL},
    {NULL, NULL, NULL, NULL, 0, NULL},
};
