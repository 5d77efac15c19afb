/* device.cu - devices, their streams, copies between host and device, and errors.
 *
 * A device has one compute stream; memory.cu allocates in its order. Copies from the host go through a ring of pinned pieces: they
 * are queued like kernels, and the caller may reuse its memory at once. Copies to the host wait for the stream, and then raise what
 * the device has reported: an index out of range, documents that break their rule, a failed kernel.
 */
#include "attention/attention.cuh"
#include "cublas.cuh"
#include "gemm/gemm.cuh"
#include "graph.cuh"
#include "memory.cuh"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const size_t PIECE = 256 << 10; /* bytes of a pinned piece */
static const int PIECES = 64;          /* in the ring: at most 16 MiB in flight */
static const int RECENT = 8;           /* slots kept for error messages */

typedef struct Slot {
    const char *name;
    int count;
    int64_t sizes[8];
} Slot;

typedef struct Device {
    bool ready;
    int index, multiprocessors;
    XtDeviceTraits traits;
    cudaStream_t stream, side; /* side: NULL before its first use */
    cudaEvent_t event;         /* to make streams wait for each other */
    XtIndexReport *report;     /* mapped host memory */
    char *pieces;              /* [PIECES][PIECE], pinned */
    cudaEvent_t piece_done[PIECES];
    unsigned next_piece;
    pthread_mutex_t transfer; /* guards pieces; held while a copy to the host waits */
    pthread_mutex_t ordering; /* guards event; held briefly, because callers may hold locks of their own */
    XtDeviceCounters counters;
    Slot recent[RECENT];
    unsigned recent_next;
} Device;

static Device devices[XT_MAX_DEVICES];
static int device_count;
bool xt_always_wait; /* XTRAIN_CUDA_SYNC=1: wait after every slot, and get every block from the driver */
static bool forked;
static pthread_mutex_t setup = PTHREAD_MUTEX_INITIALIZER;
static thread_local Device *current;

static XtHost host_copy;
const XtHost *xt_host = &host_copy;

static void count(int64_t *counter) { __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED); }

/* ---- errors -------------------------------------------------------------------------------------------------------------- */

XtStatus xt_error(XtStatus status, const char *format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return host_copy.error(status, text);
}

static void append_slot(char *text, size_t room, const Slot *slot) {
    size_t used = strlen(text);
    if (used + 1 >= room) return;
    used += (size_t)snprintf(text + used, room - used, "%s(", slot->name);
    for (int i = 0; i < slot->count && used < room; i++)
        used += (size_t)snprintf(text + used, room - used, i ? ", %lld" : "%lld", (long long)slot->sizes[i]);
    if (used < room) snprintf(text + used, room - used, ")");
}

/* A failed wait means that a kernel queued earlier failed: the message names the last slots. */
static XtStatus late_error(const Device *device, cudaError_t error) {
    char text[512] = "";
    for (int i = 0; i < RECENT; i++) {
        const Slot *slot = &device->recent[(device->recent_next + RECENT - 1 - i) % RECENT];
        if (!slot->name) continue;
        if (text[0]) strncat(text, ", ", sizeof text - strlen(text) - 1);
        append_slot(text, sizeof text, slot);
    }
    return xt_error(XT_CUDA_ERROR,
                    "cuda:%d: an earlier kernel failed: %s; queued last (newest first): %s; XTRAIN_CUDA_SYNC=1 tells which it was",
                    device->index, cudaGetErrorString(error), text);
}

XtStatus xt_cuda_error(const char *slot, cudaError_t error) {
    if (error == cudaSuccess) return XT_OK;
    cudaGetLastError(); /* clears an error that is not sticky */
    XtStatus status = error == cudaErrorMemoryAllocation ? XT_OUT_OF_MEMORY : XT_CUDA_ERROR;
    return xt_error(status, "%s: %s (%s)", slot, cudaGetErrorString(error), cudaGetErrorName(error));
}

XtStatus xt_launched_sizes(const char *slot, int size_count, const int64_t *sizes) {
    Device *device = current;
    cudaError_t error = cudaPeekAtLastError();
    Slot *last = &device->recent[device->recent_next++ % RECENT];
    last->name = slot;
    last->count = size_count < 8 ? size_count : 8;
    memcpy(last->sizes, sizes, (size_t)last->count * sizeof *sizes);
    if (error == cudaSuccess && xt_always_wait) error = cudaStreamSynchronize(device->stream);
    if (error == cudaSuccess)
        return __atomic_load_n(&xt_any_capture, __ATOMIC_RELAXED) ? xt_check_capture_of(device->index) : XT_OK;
    cudaGetLastError();
    char text[256] = "";
    append_slot(text, sizeof text, last);
    if (error == cudaErrorNoKernelImageForDevice)
        return xt_error(XT_CUDA_ERROR, "%s: this library has kernels for compute capability %s, and cuda:%d is %d.%d", text,
                        XT_CUDA_ARCHS, device->index, device->traits.capability / 10, device->traits.capability % 10);
    return xt_error(XT_CUDA_ERROR, "%s: %s (%s)", text, cudaGetErrorString(error), cudaGetErrorName(error));
}

/* Raises the index or the documents that a kernel has reported, if any. The caller has waited for the stream; another thread may have queued
 * more. */
static XtStatus look_at_report(Device *device) {
    volatile XtIndexReport *report = device->report;
    if (report->taken != 2) return XT_OK;
    long long position = report->position, value = report->value, limit = report->limit, row = report->row;
    int slot = report->slot;
    report->taken = 0;
    if (slot == XT_INDEX_EMBEDDING)
        return xt_error(XT_INDEX_ERROR, "embedding: id must be in [0, %lld), got %lld at position %lld", limit, value, position);
    if (slot == XT_DOCUMENTS)
        return xt_error(XT_VALUE_ERROR,
                        "scaled_dot_product_attention: documents must lie one behind the other and fill the row, got %lld to %lld "
                        "at token %lld of row %lld",
                        value, limit, position, row);
    if (slot >= XT_INDEX_GATHER) {
        static const char *const op[] = {"gather", "scatter", "scatter_add", "index", "index_put"};
        return xt_error(XT_INDEX_ERROR, "%s: index must be in [%lld, %lld), got %lld at position %lld", op[slot - XT_INDEX_GATHER],
                        slot >= XT_INDEX_WRAPPED ? -limit : 0, limit, value, position);
    }
    return xt_error(XT_INDEX_ERROR, "%s must be in [0, %lld) or ignore_index, got %lld at position %lld",
                    slot == XT_INDEX_LINEAR_CROSS_ENTROPY ? "linear_cross_entropy: targets" : "cross_entropy: target", limit, value,
                    position);
}

XtStatus xt_late_error(int index, cudaError_t error) {
    cudaGetLastError();
    return late_error(&devices[index], error);
}

XtStatus xt_drain(int index) {
    count(&devices[index].counters.synchronizations);
    cudaError_t error = cudaStreamSynchronize(devices[index].stream);
    return error ? xt_late_error(index, error) : XT_OK;
}

static XtStatus wait(Device *device) {
    XT_CHECK(xt_refuse_captured("wait for the device"));
    count(&device->counters.synchronizations);
    cudaError_t error = cudaStreamSynchronize(device->stream);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return late_error(device, error);
    }
    return look_at_report(device);
}

/* ---- devices --------------------------------------------------------------------------------------------------------------- */

static void in_child(void) { forked = true; }

/* Undoes a prepare() that failed part of the way, so that the next use starts over. */
static void give_up(Device *device) {
    if (device->report) cudaFreeHost(device->report);
    if (device->event) cudaEventDestroy(device->event);
    if (device->stream) cudaStreamDestroy(device->stream);
    device->report = NULL;
    device->event = NULL;
    device->stream = NULL;
    cudaGetLastError();
}

static bool has_cublaslt(void) { return xt_cublas_lt() != NULL; }
static bool has_cublas(void) { return xt_cublas() != NULL; }

static XtStatus prepare(Device *device, int index) {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, index);
    if (!error) error = cudaDeviceGetAttribute(&device->traits.shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    if (!error) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    if (!error) error = cudaStreamCreateWithFlags(&device->stream, cudaStreamNonBlocking);
    if (!error) error = cudaEventCreateWithFlags(&device->event, cudaEventDisableTiming);
    if (!error) error = cudaHostAlloc((void **)&device->report, sizeof *device->report, cudaHostAllocMapped);
    XtStatus status = xt_cuda_error("opening the device", error);
    if (status == XT_OK) status = xt_memory_open(index, device->stream, !xt_always_wait);
    if (status != XT_OK) {
        give_up(device);
        return status;
    }
    memset(device->report, 0, sizeof *device->report);
    device->index = index;
    device->traits.capability = major * 10 + minor;
    device->traits.has_cublaslt = has_cublaslt;
    device->traits.has_cublas = has_cublas;
    pthread_mutex_init(&device->transfer, NULL);
    pthread_mutex_init(&device->ordering, NULL);
    __atomic_store_n(&device->ready, true, __ATOMIC_RELEASE);
    return XT_OK;
}

XtStatus xt_use_device(int index) {
    if (current && current->index == index && device_count == 1 && !forked) return XT_OK;
    if (forked)
        return xt_error(XT_RUNTIME_ERROR, "CUDA cannot be used in a process forked after its first use: start workers with "
                                          "multiprocessing's 'spawn' method");
    if (index < 0 || index >= device_count)
        return xt_error(XT_RUNTIME_ERROR, "device cuda:%d is not available: there %s %d CUDA device%s", index,
                        device_count == 1 ? "is" : "are", device_count, device_count == 1 ? "" : "s");
    cudaError_t error = cudaSetDevice(index);
    if (error) return xt_cuda_error("choosing the device", error);
    Device *device = &devices[index];
    XtStatus status = XT_OK;
    if (!__atomic_load_n(&device->ready, __ATOMIC_ACQUIRE)) {
        pthread_mutex_lock(&setup);
        if (!device->ready) status = prepare(device, index);
        pthread_mutex_unlock(&setup);
    }
    if (status == XT_OK) current = device;
    return status;
}

static XtStatus use(int index) {
    XT_CHECK(xt_use_device(index));
    return __atomic_load_n(&xt_any_capture, __ATOMIC_RELAXED) ? xt_check_capture_of(index) : XT_OK;
}

cudaStream_t xt_stream(void) {
    if (__atomic_load_n(&xt_any_capture, __ATOMIC_RELAXED)) xt_spoil_capture(current->index);
    return current->stream;
}
int xt_multiprocessors(void) { return current->multiprocessors; }
const XtDeviceTraits *xt_traits(void) { return &current->traits; }
int xt_shared_limit(void) { return current->traits.shared_limit; }
int xt_compute_capability(void) { return current->traits.capability; }
int xt_device_index(void) { return current->index; }
XtIndexReport *xt_index_report(void) { return current->report; }
void xt_count_launch(void) {
    if (!xt_capturing()) count(&current->counters.launches); /* a captured kernel is not launched: the replays of its graph are */
}

/* ---- memory ------------------------------------------------------------------------------------------------------------------ */

static XtStatus allocate(int index, size_t nbytes, void **out) {
    XtStatus status = use(index);
    return status == XT_OK ? xt_memory_allocate(index, nbytes, out) : status;
}

/* Also called while the process ends and the driver is gone, so it reports no error; and while another thread captures. */
static void release(int index, void *data, size_t nbytes) {
    if (!forked && xt_use_device(index) == XT_OK) xt_memory_release(index, data, nbytes);
}

XtStatus XtScratch::allocate(size_t bytes) {
    index = current->index;
    if (bytes == 0) return XT_OK;
    XtStatus status = xt_memory_allocate(index, bytes, &data);
    nbytes = bytes;
    if (status == XT_OUT_OF_MEMORY)
        return xt_error(status, "out of memory on cuda:%d: %.2f MiB of working memory asked", index, (double)bytes / 1048576);
    return status;
}
XtScratch::~XtScratch() {
    if (data) release(index, data, nbytes);
}

static XtStatus trim(int index) {
    XT_CHECK(use(index));
    XT_CHECK(xt_refuse_captured("give memory back"));
    xt_memory_empty_lists(index);
    XtStatus status = wait(&devices[index]); /* after an index out of range the memory is returned all the same */
    cudaError_t error = xt_memory_trim(index);
    if (status == XT_OK) return xt_cuda_error("giving memory back", error);
    cudaGetLastError(); /* the error of the wait came first */
    return status;
}

static void reset_peak(int index) {
    if (use(index) == XT_OK) xt_memory_reset_peak(index);
}

/* ---- to and from the host --------------------------------------------------------------------------------------------------- */

static XtStatus make_pieces(Device *device) {
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < PIECES && !error; i++)
        if (!device->piece_done[i]) error = cudaEventCreateWithFlags(&device->piece_done[i], cudaEventDisableTiming);
    if (!error) error = cudaHostAlloc((void **)&device->pieces, PIECES * PIECE, cudaHostAllocDefault);
    return xt_cuda_error("pinning memory for transfers", error);
}

/* The next free piece of the ring. Waits only if all pieces are in flight. */
static cudaError_t take_piece(Device *device, unsigned *out) {
    *out = device->next_piece++ % PIECES;
    cudaError_t state = cudaEventQuery(device->piece_done[*out]);
    if (state != cudaErrorNotReady) return state;
    cudaGetLastError();
    count(&device->counters.synchronizations);
    return cudaEventSynchronize(device->piece_done[*out]);
}

static XtStatus from_host(int index, void *to, const void *from, size_t nbytes) {
    XtStatus status = use(index);
    if (status != XT_OK) return status;
    XT_CHECK(xt_refuse_captured("copy from the host: pass tensors that change as arguments, and make the others before"));
    Device *device = &devices[index];
    count(&device->counters.from_host);
    pthread_mutex_lock(&device->transfer);
    if (!device->pieces) status = make_pieces(device);
    for (size_t done = 0; status == XT_OK && done < nbytes;) {
        size_t n = nbytes - done < PIECE ? nbytes - done : PIECE;
        unsigned piece;
        cudaError_t error = take_piece(device, &piece);
        if (!error) {
            char *pinned = device->pieces + piece * PIECE;
            memcpy(pinned, (const char *)from + done, n);
            error = cudaMemcpyAsync((char *)to + done, pinned, n, cudaMemcpyHostToDevice, device->stream);
        }
        if (!error) error = cudaEventRecord(device->piece_done[piece], device->stream);
        if (error) {
            cudaGetLastError();
            status = late_error(device, error);
        }
        done += n;
    }
    pthread_mutex_unlock(&device->transfer);
    return status;
}

/* Through the pinned pieces too, at most a whole ring at a time. */
static XtStatus to_host(int index, void *to, const void *from, size_t nbytes) {
    XtStatus status = use(index);
    if (status != XT_OK) return status;
    XT_CHECK(xt_refuse_captured("read values, which waits for the device (item, tolist, numpy, stats, repr, to the CPU)"));
    Device *device = &devices[index];
    count(&device->counters.to_host);
    pthread_mutex_lock(&device->transfer);
    if (!device->pieces) status = make_pieces(device);
    for (size_t done = 0; status == XT_OK && done < nbytes;) {
        const size_t ring = PIECES * PIECE;
        size_t n = nbytes - done < ring ? nbytes - done : ring;
        cudaError_t error = cudaMemcpyAsync(device->pieces, (const char *)from + done, n, cudaMemcpyDeviceToHost, device->stream);
        if (error) {
            cudaGetLastError();
            status = late_error(device, error);
        } else {
            status = wait(device);
        }
        if (status == XT_OK) memcpy((char *)to + done, device->pieces, n);
        done += n;
    }
    pthread_mutex_unlock(&device->transfer);
    return status;
}

XtStatus xt_read_back(void *host, const void *device, size_t nbytes) { return to_host(current->index, host, device, nbytes); }

static XtStatus synchronize(int index) {
    XtStatus status = use(index);
    return status == XT_OK ? wait(&devices[index]) : status;
}

/* ---- other libraries' streams and memory ------------------------------------------------------------------------------------ */

static void *stream_of(int index) { return use(index) == XT_OK ? devices[index].stream : NULL; }

static XtStatus idle(int index, bool *out) {
    *out = false;
    XT_CHECK(use(index));
    XT_CHECK(xt_refuse_captured("ask whether the device is done"));
    cudaError_t error = cudaStreamQuery(devices[index].stream);
    *out = error == cudaSuccess;
    if (*out || error == cudaErrorNotReady) {
        cudaGetLastError(); /* "not ready" is kept as an error, which the next launch would find */
        return XT_OK;
    }
    return xt_late_error(index, error);
}

/* The driver's event of a whole context (CUDA 12.5 and newer) covers the work of all its streams, also of streams that were
 * destroyed with work in flight. The library does not link to the driver, so it looks up the function's address. */
static int (*context_current)(void **context);
static int (*context_record)(void *context, cudaEvent_t event);

static void find_context_events(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY); /* the runtime has opened it; never closed here */
    if (!driver) return;
    *(void **)&context_current = dlsym(driver, "cuCtxGetCurrent");
    *(void **)&context_record = dlsym(driver, "cuCtxRecordEvent");
}

/* Records all work of the calling thread's device. False if the driver is too old, or if a stream is being captured. */
static bool record_device(cudaEvent_t event) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    void *context = NULL;
    pthread_once(&once, find_context_events);
    return context_current && context_record && context_current(&context) == 0 && context && context_record(context, event) == 0;
}

static XtStatus make_wait(int index, void *foreign) {
    XT_CHECK(use(index));
    XT_CHECK(xt_refuse_captured("hand its tensors to another library"));
    Device *device = &devices[index];
    pthread_mutex_lock(&device->ordering);
    cudaError_t error = cudaEventRecord(device->event, device->stream);
    if (!error) error = cudaStreamWaitEvent((cudaStream_t)foreign, device->event, 0);
    pthread_mutex_unlock(&device->ordering);
    return xt_cuda_error("making another stream wait", error);
}
static XtStatus side(int index, void **out) {
    XT_CHECK(use(index));
    Device *device = &devices[index];
    cudaError_t error = cudaSuccess;
    int lowest, highest;
    pthread_mutex_lock(&device->ordering);
    if (!device->side) {
        error = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
        if (!error) error = cudaStreamCreateWithPriority(&device->side, cudaStreamNonBlocking, highest);
    }
    if (!error) error = cudaEventRecord(device->event, device->stream);
    if (!error) error = cudaStreamWaitEvent(device->side, device->event, 0);
    pthread_mutex_unlock(&device->ordering);
    *out = device->side;
    return xt_cuda_error("queueing beside the kernels", error);
}

static XtStatus join(int index) {
    XT_CHECK(use(index));
    Device *device = &devices[index];
    if (!device->side) return XT_OK;
    pthread_mutex_lock(&device->ordering);
    cudaError_t error = cudaEventRecord(device->event, device->side);
    if (!error) error = cudaStreamWaitEvent(device->stream, device->event, 0);
    pthread_mutex_unlock(&device->ordering);
    return xt_cuda_error("waiting for what is beside the kernels", error);
}

static XtStatus wait_for(int index, bool every) {
    XT_CHECK(use(index));
    XT_CHECK(xt_refuse_captured("wait for another library"));
    Device *device = &devices[index];
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&device->ordering);
    const bool recorded = !every || record_device(device->event);
    if (!every) error = cudaEventRecord(device->event, cudaStreamLegacy);
    if (recorded && !error) error = cudaStreamWaitEvent(device->stream, device->event, 0);
    pthread_mutex_unlock(&device->ordering);
    if (!recorded) { /* the host waits instead; while a stream is being captured that fails too, and its error is the result */
        count(&device->counters.synchronizations);
        error = cudaDeviceSynchronize();
    }
    return xt_cuda_error("waiting for other streams", error);
}

/* ---- what people ask -------------------------------------------------------------------------------------------------------- */

static XtStatus info(int index, XtDeviceInfo *out) {
    XT_CHECK(use(index));
    memset(out, 0, sizeof *out);
    cudaDeviceProp properties;
    size_t free_bytes = 0, total = 0;
    cudaError_t error = cudaGetDeviceProperties(&properties, index);
    if (!error) error = cudaMemGetInfo(&free_bytes, &total);
    if (!error) error = cudaDriverGetVersion(&out->driver);
    if (!error) error = cudaRuntimeGetVersion(&out->runtime);
    if (error) return xt_cuda_error("asking about the device", error);
    snprintf(out->name, sizeof out->name, "%s", properties.name);
    out->major = properties.major;
    out->minor = properties.minor;
    out->multiprocessors = properties.multiProcessorCount;
    out->memory_total = (int64_t)total;
    out->memory_free = (int64_t)free_bytes;
    snprintf(out->built_for, sizeof out->built_for, "%s", XT_CUDA_ARCHS);
    const unsigned char *id = (const unsigned char *)properties.uuid.bytes;
    size_t used = (size_t)snprintf(out->uuid, sizeof out->uuid, "GPU");
    for (int i = 0; i < 16; i++) /* a dash before bytes 0, 4, 6, 8 and 10 */
        used +=
            (size_t)snprintf(out->uuid + used, sizeof out->uuid - used, i % 2 == 0 && i <= 10 && i != 2 ? "-%02x" : "%02x", id[i]);
    xt_cublas_origin(out->blas, sizeof out->blas);
    return XT_OK;
}

static const XtDeviceTraits *traits_of(int index) { return &devices[index].traits; }

static XtStatus counters(int index, XtDeviceCounters *out) {
    XT_CHECK(use(index));
    *out = devices[index].counters;
    return xt_memory_counters(index, out);
}

/* ---- the table -------------------------------------------------------------------------------------------------------------- */

static XtAccelerator accelerator = {
    0,
    use,
    info,
    traits_of,
    counters,
    trim,
    reset_peak,
    stream_of,
    idle,
    make_wait,
    wait_for,
    side,
    join,
    false,
    xt_graph_plan,
    xt_graph_planned,
    xt_graph_capture,
    xt_graph_end,
    xt_graph_replay,
    xt_graph_owns,
    xt_graph_drop,
};

static XtBackend table;

/* The reason why there is no usable device, as a sentence. */
static XtStatus refuse(cudaError_t error) {
    int driver = 0;
    void *library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: no NVIDIA driver (libcuda.so.1) is installed");
    dlclose(library);
    cudaDriverGetVersion(&driver);
    if (error == cudaErrorInsufficientDriver)
        return xt_error(XT_RUNTIME_ERROR,
                        "CUDA is not available: the NVIDIA driver supports CUDA %d.%d and this library needs %d.%d or newer",
                        driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: %s",
                    error == cudaSuccess || error == cudaErrorNoDevice ? "no NVIDIA GPU is visible" : cudaGetErrorString(error));
}

extern "C" __attribute__((visibility("default"))) const char *xt_cuda_contract(void) { return xt_contract(); }

extern "C" __attribute__((visibility("default"))) XtStatus xt_open_cuda(const XtHost *host, const XtBackend **out) {
    host_copy = *host;
    cudaError_t error = cudaGetDeviceCount(&device_count);
    if (error != cudaSuccess || device_count == 0) {
        cudaGetLastError();
        return refuse(error);
    }
    if (device_count > XT_MAX_DEVICES) device_count = XT_MAX_DEVICES;
    const char *sync = getenv("XTRAIN_CUDA_SYNC");
    xt_always_wait = sync && sync[0] && strcmp(sync, "0") != 0;
    pthread_atfork(NULL, NULL, in_child);
    accelerator.device_count = device_count;
    accelerator.waits = xt_always_wait;
    table.name = "cuda";
    table.allocate = allocate;
    table.release = release;
    table.to_host = to_host;
    table.from_host = from_host;
    table.synchronize = synchronize;
#define XT_X(slot, Params) table.slot = xt_cuda_##slot;
    XT_KERNELS(XT_X)
#undef XT_X
    table.gemm = xt_cuda_gemm;
    table.attention = xt_cuda_attention;
    table.accelerator = &accelerator;
    *out = &table;
    return XT_OK;
}
