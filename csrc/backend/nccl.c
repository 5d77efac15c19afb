/* nccl.c - finds and opens NCCL, and calls it.
 *
 * It looks at: a library that the process has opened (PyTorch's), nvidia/nccl/lib in the folders of Python packages, the places of the
 * dynamic loader. A build needs no header of NCCL: the functions in use are declared here, by the ABI of 2.18 and newer.
 *
 * One lock a communicator guards its handle: abort comes from another thread, and frees it. A collective only queues work, so the lock is
 * held briefly. Should NCCL wait in one all the same, abort goes on after a second without the lock.
 */
#define _GNU_SOURCE /* RTLD_NOLOAD, dladdr */
#include "backend/nccl.h"
#include "backend/backend.h"
#include "core/core.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char NAME[] = "libnccl.so.2";
enum { OLDEST = 21800, SUCCESS = 0, INT8 = 0 }; /* the first with this Config; ncclSuccess, ncclInt8 */

typedef struct Id { /* ncclUniqueId, passed by value */
    char bytes[XT_COMM_ID];
} Id;
typedef struct Config { /* ncclConfig_t of 2.18: fields are only ever appended, and a library fills what is missing */
    size_t size;
    unsigned magic, version;
    int blocking, cluster, fewest_blocks, most_blocks;
    const char *net;
    int split_share;
} Config;

/* X(field, symbol without "nccl", result, arguments); handles and streams are opaque. */
/* clang-format off */
#define FUNCTIONS(X) \
    X(version, GetVersion, int, (int *version)) \
    X(unique_id, GetUniqueId, int, (Id *id)) \
    X(open, CommInitRankConfig, int, (void **comm, int size, Id id, int rank, Config *config)) \
    X(destroy, CommDestroy, int, (void *comm)) \
    X(give_up, CommAbort, int, (void *comm)) \
    X(async_error, CommGetAsyncError, int, (void *comm, int *error)) \
    X(error_text, GetErrorString, const char *, (int error)) \
    X(last_error, GetLastError, const char *, (void *comm)) \
    X(group_start, GroupStart, int, (void)) \
    X(group_end, GroupEnd, int, (void)) \
    X(send, Send, int, (const void *data, size_t count, int dtype, int peer, void *comm, void *stream)) \
    X(receive, Recv, int, (void *data, size_t count, int dtype, int peer, void *comm, void *stream)) \
    X(all_gather, AllGather, int, (const void *in, void *out, size_t count, int dtype, void *comm, void *stream)) \
    X(broadcast, Broadcast, int, (const void *in, void *out, size_t count, int dtype, int root, void *comm, void *stream))
/* clang-format on */

#define XT_X(field, symbol, result, arguments) result(*field) arguments;
static struct {
    FUNCTIONS(XT_X)
} nccl;
#undef XT_X

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; /* guards the variables below */
static bool tried;
static int version;
static char path[PATH_MAX], reason[PATH_MAX + 300]; /* reason: why there is none */

struct XtComm {
    pthread_mutex_t lock;
    void *handle; /* NULL once it is closed or aborted */
    const XtAccelerator *accelerator;
    XtDevice device;
    int size;
};

/* ---- the library --------------------------------------------------------------------------------------------------------------- */

static void *find(void) {
    void *library = dlopen(NAME, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    for (const char *const *folder = xt_package_folders(); !library && *folder; folder++) {
        char file[PATH_MAX];
        if (snprintf(file, sizeof file, "%s/nvidia/nccl/lib/%s", *folder, NAME) >= (int)sizeof file || access(file, R_OK) != 0)
            continue;
        library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            const char *text = dlerror();
            snprintf(reason, sizeof reason, "%.*s", (int)sizeof reason - 1, text ? text : file);
            return NULL;
        }
    }
    if (!library) library = dlopen(NAME, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        snprintf(reason, sizeof reason, "it is neither among the Python packages (nvidia/nccl/lib) nor where the loader looks");
    return library;
}

static bool take_functions(void *library) {
#define XT_X(field, symbol, result, arguments)                                       \
    *(void **)&nccl.field = dlsym(library, "nccl" #symbol);                          \
    if (!nccl.field) {                                                               \
        snprintf(reason, sizeof reason, "%s has no function nccl%s", path, #symbol); \
        return false;                                                                \
    }
    FUNCTIONS(XT_X)
#undef XT_X
    return true;
}

static void open_library(void) {
    void *library = find();
    if (!library) return;
    void *symbol = dlsym(library, "ncclGetVersion");
    Dl_info info;
    snprintf(path, sizeof path, "%s", symbol && dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : NAME);
    if (!take_functions(library)) return;
    if (nccl.version(&version) != SUCCESS || version < OLDEST) {
        snprintf(reason, sizeof reason, "%s is version %d.%d.%d, and 2.18 is the oldest that is known", path, version / 10000,
                 version / 100 % 100, version % 100);
        version = 0;
    }
}

static XtStatus ready(void) {
    pthread_mutex_lock(&opening);
    if (!tried) open_library();
    tried = true;
    pthread_mutex_unlock(&opening);
    if (version) return XT_OK;
    return xt_error(XT_RUNTIME_ERROR, "distributed: ranks on GPUs need NCCL (%s): %s; XTRAIN_PLANE=host works without it", NAME,
                    reason);
}

XtStatus xt_nccl_version(int *out, const char **where) {
    XT_CHECK(ready());
    *out = version;
    *where = path;
    return XT_OK;
}

static XtStatus failed(const char *function, int error, void *handle) {
    const char *more = handle ? nccl.last_error(handle) : NULL;
    return xt_error(XT_CUDA_ERROR, "distributed: nccl%s failed: %s%s%s", function, nccl.error_text(error),
                    more && *more ? ": " : "", more ? more : "");
}

/* ---- a communicator ------------------------------------------------------------------------------------------------------------- */

XtStatus xt_comm_id(unsigned char id[XT_COMM_ID]) {
    Id made;
    XT_CHECK(ready());
    int error = nccl.unique_id(&made);
    if (error != SUCCESS) return failed("GetUniqueId", error, NULL);
    memcpy(id, made.bytes, sizeof made.bytes);
    return XT_OK;
}

XtStatus xt_comm_open(XtDevice device, const unsigned char id[XT_COMM_ID], int rank, int size, XtComm **out) {
    const XtBackend *backend;
    Id shared;
    Config config = {sizeof config, 0xcafebeef, OLDEST, 1, INT_MIN, INT_MIN, INT_MIN, NULL, INT_MIN};
    XT_CHECK(ready());
    XT_CHECK(xt_backend_for(device, &backend));
    if (!backend->accelerator)
        return xt_error(XT_VALUE_ERROR, "nccl_open: device must be a CUDA device, got %s", xt_device_name(device));
    XT_CHECK(backend->accelerator->use(device.index));
    XtComm *comm = calloc(1, sizeof *comm);
    if (!comm) return xt_error(XT_OUT_OF_MEMORY, "nccl_open: no host memory for a communicator");
    pthread_mutex_init(&comm->lock, NULL);
    comm->accelerator = backend->accelerator;
    comm->device = device;
    comm->size = size;
    memcpy(shared.bytes, id, sizeof shared.bytes);
    int error = nccl.open(&comm->handle, size, shared, rank, &config);
    if (error == SUCCESS) {
        *out = comm;
        return XT_OK;
    }
    xt_comm_free(comm);
    return failed("CommInitRankConfig", error, NULL);
}

int xt_comm_size(const XtComm *comm) { return comm->size; }
XtDevice xt_comm_device(const XtComm *comm) { return comm->device; }

void xt_comm_free(XtComm *comm) {
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

/* Takes the lock and makes the device the thread's; the caller gives the lock back where this returns XT_OK. */
static XtStatus begin(XtComm *comm, void **stream) {
    XT_CHECK(comm->accelerator->use(comm->device.index));
    *stream = comm->accelerator->stream(comm->device.index);
    pthread_mutex_lock(&comm->lock);
    if (comm->handle) return XT_OK;
    pthread_mutex_unlock(&comm->lock);
    return xt_error(XT_RUNTIME_ERROR, "distributed: NCCL's communicator has been closed");
}

static XtStatus end(XtComm *comm, const char *function, int error) {
    XtStatus status = error == SUCCESS ? XT_OK : failed(function, error, comm->handle);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

/* begin, with the stream beside the kernels where that is wanted. */
static XtStatus begin_on(XtComm *comm, bool beside, void **stream) {
    void *side = NULL;
    if (beside) XT_CHECK(comm->accelerator->side(comm->device.index, &side));
    XT_CHECK(begin(comm, stream));
    if (beside) *stream = side;
    return XT_OK;
}

XtStatus xt_comm_all_to_all(XtComm *comm, const XtExchange *pieces, bool beside) {
    void *stream;
    XT_CHECK(begin_on(comm, beside, &stream));
    int error = nccl.group_start();
    for (int peer = 0; peer < comm->size && error == SUCCESS; peer++) {
        const size_t nbytes = pieces->nbytes, at = (size_t)peer * nbytes;
        error = nccl.send((const char *)pieces->in + at, nbytes, INT8, peer, comm->handle, stream);
        if (error == SUCCESS) error = nccl.receive((char *)pieces->out + at, nbytes, INT8, peer, comm->handle, stream);
    }
    int ended = nccl.group_end(); /* also after an error: a group that was begun must end */
    return end(comm, "Send, Recv", error != SUCCESS ? error : ended);
}

XtStatus xt_comm_all_gather(XtComm *comm, const XtExchange *each, int count, bool beside) {
    void *stream;
    XT_CHECK(begin_on(comm, beside, &stream));
    int error = nccl.group_start();
    for (int i = 0; i < count && error == SUCCESS; i++)
        error = nccl.all_gather(each[i].in, each[i].out, each[i].nbytes, INT8, comm->handle, stream);
    int ended = nccl.group_end();
    return end(comm, "AllGather", error != SUCCESS ? error : ended);
}

XtStatus xt_comm_join(XtComm *comm) { return comm->accelerator->join(comm->device.index); }

XtStatus xt_comm_broadcast(XtComm *comm, void *data, size_t nbytes, int source) {
    void *stream;
    XT_CHECK(begin(comm, &stream));
    return end(comm, "Broadcast", nccl.broadcast(data, data, nbytes, INT8, source, comm->handle, stream));
}

static int64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

XtStatus xt_comm_idle(XtComm *comm, int64_t microseconds, bool *out) {
    const int64_t until = microseconds > 0 ? now_us() + microseconds : 0;
    void *stream;
    int error = SUCCESS;
    *out = false;
    XT_CHECK(begin(comm, &stream));
    int asked = nccl.async_error(comm->handle, &error);
    XT_CHECK(end(comm, "CommGetAsyncError", asked != SUCCESS ? asked : error));
    for (;;) {
        XT_CHECK(comm->accelerator->idle(comm->device.index, out));
        if (*out || now_us() >= until) return XT_OK;
        sched_yield();
    }
}

void xt_comm_abort(XtComm *comm) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    bool locked = pthread_mutex_timedlock(&comm->lock, &until) == 0;
    void *handle = __atomic_exchange_n(&comm->handle, NULL, __ATOMIC_ACQ_REL);
    if (locked) pthread_mutex_unlock(&comm->lock);
    if (handle && comm->accelerator->use(comm->device.index) == XT_OK) nccl.give_up(handle);
}

void xt_comm_close(XtComm *comm) {
    pthread_mutex_lock(&comm->lock);
    void *handle = comm->handle;
    comm->handle = NULL;
    pthread_mutex_unlock(&comm->lock);
    if (handle && comm->accelerator->use(comm->device.index) == XT_OK) nccl.destroy(handle);
}
