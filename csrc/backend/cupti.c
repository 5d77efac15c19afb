/* cupti.c - finds and opens CUPTI, and keeps what it records.
 *
 * It looks at: a library that the process has opened, NVIDIA's Python packages, the places of the dynamic loader, the CUDA toolkit. A build
 * needs no header of CUPTI: the functions and the beginnings of the records in use are declared here, by the ABI of CUPTI 12 and 13.
 *
 * It subscribes before it records, although it asks for no callback: a process has one subscriber, so two profilers never take each other's
 * records. Between profiles CUPTI is detached and costs nothing.
 *
 * CUPTI has a clock of its own, CLOCK_REALTIME on Linux. What it differs from xt_clock is measured once a profile. A callback that gives
 * CUPTI our clock would not need that, but records of an earlier callback's clock come through when it is registered again.
 */
#define _GNU_SOURCE /* RTLD_NOLOAD, dladdr */
#include "backend/cupti.h"
#include "backend/backend.h"
#include "core/core.h"
#include "core/span.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NO_PRIVILEGE = 35, SECOND_SUBSCRIBER = 39 }; /* CUptiResult */
enum { COPY = 1, FILL = 2, KERNEL = 3, CONCURRENT_KERNEL = 10 }; /* CUpti_ActivityKind */
enum { OLDEST = 19, DETACHES = 24 }; /* 12.0; 12.6: before, detaching could crash a process with graphs */
enum {
    FORCED = 1,
    BUFFER = 4 << 20,
    CLOCK_READINGS = 9,
    NAP = 50
}; /* flush all; bytes; of which the closest counts; microseconds */

/* CUpti_ActivityKernel4 to 10, CUpti_ActivityMemcpy to 6 and CUpti_ActivityMemset to 4: a newer one has more fields at its end. */
typedef struct Record {
    uint32_t kind;
} Record;
typedef struct KernelRecord {
    uint32_t kind;
    char configuration[12];
    uint64_t begin, end, completed;
    uint32_t device, context, stream;
    char launch[52];
    const char *name;
} KernelRecord;
typedef struct CopyRecord { /* of a fill, too: in place of the directions it has the value */
    uint32_t kind;
    uint8_t direction, from, to, flags;
    uint64_t nbytes, begin, end;
    uint32_t device, context, stream;
} CopyRecord;

typedef void (*Request)(uint8_t **buffer, size_t *nbytes, size_t *most);
typedef void (*Completed)(void *context, uint32_t stream, uint8_t *buffer, size_t nbytes, size_t valid);
typedef void (*Callback)(void *user, int domain, uint32_t id, const void *data);

/* X(field, symbol without "cupti", arguments); each returns a CUptiResult. */
/* clang-format off */
#define FUNCTIONS(X) \
    X(version, GetVersion, (uint32_t *version)) \
    X(error_name, GetResultString, (int result, const char **text)) \
    X(subscribe, Subscribe, (void **subscriber, Callback callback, void *user)) \
    X(unsubscribe, Unsubscribe, (void *subscriber)) \
    X(set_buffers, ActivityRegisterCallbacks, (Request request, Completed completed)) \
    X(enable, ActivityEnable, (int kind)) \
    X(disable, ActivityDisable, (int kind)) \
    X(flush, ActivityFlushAll, (uint32_t flags)) \
    X(next, ActivityGetNextRecord, (uint8_t *buffer, size_t valid, Record **record)) \
    X(dropped, ActivityGetNumDroppedRecords, (void *context, uint32_t stream, size_t *count)) \
    X(clock, GetTimestamp, (uint64_t *now)) \
    X(detach, Finalize, (void))
/* clang-format on */

#define XT_X(field, symbol, arguments) int(*field) arguments;
static struct {
    FUNCTIONS(XT_X)
} cupti;
#undef XT_X

static uint32_t version;    /* of the open library; 0: none */
static char path[PATH_MAX]; /* where it was found */
static char *(*demangle)(const char *name, char *out, size_t *length, int *status);

static void *subscriber;
static const int kinds[] = {CONCURRENT_KERNEL, COPY, FILL};

/* CUPTI returns its buffers in threads of its own: the lock guards what they fill. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool running; /* false: what CUPTI still returns is of no profile */
static XtKernel *kernels;
static int64_t kernel_count, kernel_room, lost, offset; /* offset: xt_clock less CUPTI's clock, ns */

/* ---- the library --------------------------------------------------------------------------------------------------------------- */

static void *open_in(const char *folder, const char *below, const char *name) {
    char file[PATH_MAX];
    if (snprintf(file, sizeof file, "%s%s/%s", folder, below, name) >= (int)sizeof file || access(file, R_OK) != 0) return NULL;
    return dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

static void *find(const char *name, int major) {
    char below[64];
    snprintf(below, sizeof below, "/nvidia/cu%d/lib", major);
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    for (const char *const *folder = xt_package_folders(); !library && *folder; folder++) {
        library = open_in(*folder, below, name);
        if (!library) library = open_in(*folder, "/nvidia/cuda_cupti/lib", name);
    }
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    const char *const homes[] = {"/usr/local/cuda", getenv("CUDA_HOME")};
    for (int i = 0; !library && i < 2; i++) {
        if (!homes[i] || !*homes[i]) continue;
        library = open_in(homes[i], "/lib64", name);
        if (!library) library = open_in(homes[i], "/extras/CUPTI/lib64", name);
    }
    return library;
}

static XtStatus take_functions(void *library) {
#define XT_X(field, symbol, arguments)                        \
    *(void **)&cupti.field = dlsym(library, "cupti" #symbol); \
    if (!cupti.field) return xt_error(XT_RUNTIME_ERROR, "%s has no function cupti%s", path, #symbol);
    FUNCTIONS(XT_X)
#undef XT_X
    return XT_OK;
}

/* The CUDA library is linked with libstdc++, which has the function that reads C++ names; without it they stay as they are. */
static void find_demangle(void) {
    void *library = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_LOCAL);
    if (library) *(void **)&demangle = dlsym(library, "__cxa_demangle");
}

/* Opens the library of the CUDA runtime's major version, unless it is open. */
static XtStatus ready(const XtAccelerator *accelerator, int device) {
    XtDeviceInfo about;
    char name[64];
    Dl_info origin;
    uint32_t found = 0;
    if (version) return XT_OK;
    XT_CHECK(accelerator->info(device, &about));
    const int major = about.runtime / 1000;
    snprintf(name, sizeof name, "libcupti.so.%d", major);
    void *library = find(name, major);
    if (!library)
        return xt_error(XT_RUNTIME_ERROR,
                        "%s opens neither among the Python packages (nvidia/cu%d/lib, nvidia/cuda_cupti/lib), nor where the loader "
                        "looks, nor in lib64 or extras/CUPTI/lib64 of /usr/local/cuda or $CUDA_HOME; pip install "
                        "'nvidia-cuda-cupti%s==%d.*'",
                        name, major, major == 12 ? "-cu12" : "", major);
    void *symbol = dlsym(library, "cuptiGetVersion");
    snprintf(path, sizeof path, "%s", symbol && dladdr(symbol, &origin) && origin.dli_fname ? origin.dli_fname : name);
    XT_CHECK(take_functions(library));
    if (cupti.version(&found) != SUCCESS || found < OLDEST)
        return xt_error(XT_RUNTIME_ERROR, "%s has version %u of CUPTI's API, and %d, of CUDA 12.0, is the oldest that is known",
                        path, found, OLDEST);
    find_demangle();
    version = found;
    return XT_OK;
}

static XtStatus refused(const char *function, int error) {
    const char *name = NULL, *why = "";
    if (cupti.error_name(error, &name) != SUCCESS || !name) name = "an unknown error";
    if (error == SECOND_SUBSCRIBER) why = ": another profiler is attached to this process";
    if (error == NO_PRIVILEGE) why = ": the driver lets administrators alone profile, or this container";
    return xt_error(XT_RUNTIME_ERROR, "CUPTI refuses cupti%s with %s%s", function, name, why);
}

/* ---- records -------------------------------------------------------------------------------------------------------------------- */

/* The names of kernels so far. Records of one kernel share a string of CUPTI's, which may go when it is detached; then the next profile has
 * another. */
typedef struct Name {
    const char *theirs;
    char *mangled, *shown;
} Name;
static Name *names;
static int name_count, name_room;

static const char *name_of(const char *theirs) {
    static const char none[] = "a kernel";
    int status = 0;
    if (!theirs) return none;
    for (int i = 0; i < name_count; i++)
        if (names[i].theirs == theirs && strcmp(names[i].mangled, theirs) == 0) return names[i].shown;
    for (int i = 0; i < name_count; i++)
        if (strcmp(names[i].mangled, theirs) == 0) {
            names[i].theirs = theirs;
            return names[i].shown;
        }
    if (name_count == name_room) {
        Name *grown = realloc(names, (size_t)(2 * name_room + 64) * sizeof *grown);
        if (!grown) return none;
        names = grown, name_room = 2 * name_room + 64;
    }
    Name made = {theirs, strdup(theirs), NULL};
    if (!made.mangled) return none;
    if (demangle) made.shown = demangle(made.mangled, NULL, NULL, &status);
    if (!made.shown) made.shown = made.mangled;
    names[name_count++] = made;
    return made.shown;
}

static const char *direction_of(const CopyRecord *copy) {
    static const char *const texts[] = {[1] = "memcpy host to device", [2] = "memcpy device to host", [8] = "memcpy on the device"};
    const int known = (int)(sizeof texts / sizeof *texts);
    if (copy->kind == FILL) return "memset";
    return copy->direction < known && texts[copy->direction] ? texts[copy->direction] : "memcpy";
}

/* A record without times, or with the wrong ones, is one that the GPU had no memory for. */
static void keep(uint64_t begin, uint64_t end, XtKernel kernel) {
    if (begin == 0 || end < begin) {
        lost++;
        return;
    }
    if (kernel_count == kernel_room) {
        int64_t room = kernel_room ? 2 * kernel_room : 4096;
        XtKernel *grown = realloc(kernels, (size_t)room * sizeof *grown);
        if (grown) kernels = grown, kernel_room = room;
    }
    kernel.begin = (int64_t)begin + offset, kernel.end = (int64_t)end + offset;
    if (kernel_count < kernel_room) kernels[kernel_count++] = kernel;
    else lost++;
}

static void read_record(const Record *record) {
    if (record->kind == KERNEL || record->kind == CONCURRENT_KERNEL) {
        const KernelRecord *r = (const KernelRecord *)record;
        keep(r->begin, r->end,
             (XtKernel){.name = name_of(r->name), .nbytes = -1, .device = (int)r->device, .stream = (int)r->stream});
    } else if (record->kind == COPY || record->kind == FILL) {
        const CopyRecord *r = (const CopyRecord *)record;
        keep(r->begin, r->end,
             (XtKernel){.name = direction_of(r), .nbytes = (int64_t)r->nbytes, .device = (int)r->device, .stream = (int)r->stream});
    }
}

static void give_buffer(uint8_t **buffer, size_t *nbytes, size_t *most) {
    *buffer = malloc(BUFFER); /* NULL: CUPTI counts the records that it drops */
    *nbytes = *buffer ? BUFFER : 0;
    *most = 0;
}

static void take_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t nbytes, size_t valid) {
    Record *record = NULL;
    size_t dropped = 0;
    (void)nbytes;
    pthread_mutex_lock(&lock);
    while (running && valid && cupti.next(buffer, valid, &record) == SUCCESS) read_record(record);
    if (cupti.dropped(context, stream, &dropped) == SUCCESS && running) lost += (int64_t)dropped;
    pthread_mutex_unlock(&lock);
    free(buffer);
}

static void no_callback(void *user, int domain, uint32_t id, const void *data) { (void)user, (void)domain, (void)id, (void)data; }

/* Records are kept, or not, from now on: none so far. */
static void keep_records(bool wanted) {
    pthread_mutex_lock(&lock);
    running = wanted;
    kernel_count = lost = 0;
    pthread_mutex_unlock(&lock);
}

/* A thread of CUPTI may hold the lock, or be changing the list. The child has neither CUDA nor a profile. */
static void in_child(void) {
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    lock = fresh;
    running = false;
    kernels = NULL;
    kernel_count = kernel_room = lost = 0;
}
__attribute__((constructor)) static void guard_forks(void) { pthread_atfork(NULL, NULL, in_child); }

/* ---- a profile ------------------------------------------------------------------------------------------------------------------- */

/* The first GPU in use from `from` on, or -1. To ask the others would open them. */
static int next_in_use(const XtAccelerator *accelerator, int from) {
    const XtDevice here = xt_default_device();
    for (int i = from; i < accelerator->device_count; i++) {
        if (xt_memory_was_used((XtDevice){XT_CUDA, i}) || (here.type == XT_CUDA && here.index == i)) return i;
    }
    return -1;
}

/* NULL where no GPU is in use, as in a child of a process that has used one. */
static const XtAccelerator *accelerator_in_use(void) {
    const XtBackend *backend;
    if (!xt_cuda_is_open() || xt_cuda_table(&backend) != XT_OK) return NULL;
    return next_in_use(backend->accelerator, 0) >= 0 ? backend->accelerator : NULL;
}

/* Until all that was queued is done. Unlike `synchronize` it leaves what kernels have reported, such as an index out of range, to those
 * who wait for results. Ctrl-C ends it: another thread may launch more than the device can do. */
static XtStatus wait_for_all(const XtAccelerator *accelerator) {
    for (int i = next_in_use(accelerator, 0); i >= 0; i = next_in_use(accelerator, i + 1)) {
        bool idle = false;
        XT_CHECK(accelerator->idle(i, &idle));
        while (!idle) {
            if (xt_interrupted()) return XT_INTERRUPTED;
            usleep(NAP);
            XT_CHECK(accelerator->idle(i, &idle));
        }
    }
    return XT_OK;
}

/* Of several readings the one between the closest two of ours, whose middle it is taken for. */
static int measure_offset(void) {
    int64_t closest = INT64_MAX;
    for (int i = 0; i < CLOCK_READINGS; i++) {
        uint64_t theirs = 0;
        const int64_t before = xt_clock();
        const int error = cupti.clock(&theirs);
        const int64_t apart = xt_clock() - before;
        if (error != SUCCESS) return error;
        if (apart < closest) closest = apart, offset = before + apart / 2 - (int64_t)theirs;
    }
    return SUCCESS;
}

static void end_session(int enabled) {
    for (int i = 0; i < enabled; i++) cupti.disable(kinds[i]);
    cupti.flush(FORCED);
    cupti.unsubscribe(subscriber);
    if (version >= DETACHES) cupti.detach();
}

XtStatus xt_kernels_start(void) {
    const XtAccelerator *accelerator = accelerator_in_use();
    const char *function = "ActivityRegisterCallbacks";
    int error, enabled = 0;
    if (!accelerator) return XT_OK;
    XT_CHECK(ready(accelerator, next_in_use(accelerator, 0)));
    XT_CHECK(wait_for_all(accelerator));
    error = cupti.subscribe(&subscriber, no_callback, NULL);
    if (error != SUCCESS) return refused("Subscribe", error);
    error = cupti.set_buffers(give_buffer, take_buffer);
    if (error == SUCCESS) function = "GetTimestamp", error = measure_offset();
    keep_records(error == SUCCESS);
    while (error == SUCCESS && enabled < (int)(sizeof kinds / sizeof *kinds)) {
        function = "ActivityEnable", error = cupti.enable(kinds[enabled]);
        if (error == SUCCESS) enabled++;
    }
    if (error == SUCCESS) return XT_OK;
    end_session(enabled);
    keep_records(false);
    return refused(function, error);
}

XtStatus xt_kernels_stop(XtKernel **out, int64_t *count, int64_t *lost_count) {
    const XtAccelerator *accelerator = accelerator_in_use();
    const bool recorded = running;
    XtStatus waited = XT_OK;
    if (recorded) {
        waited = wait_for_all(accelerator); /* an error of a kernel comes again, to those who wait for results */
        end_session((int)(sizeof kinds / sizeof *kinds));
    }
    pthread_mutex_lock(&lock);
    running = false;
    *out = kernels;
    *count = kernel_count;
    *lost_count = lost;
    kernels = NULL;
    kernel_count = kernel_room = lost = 0;
    pthread_mutex_unlock(&lock);
    if (recorded || !accelerator) return waited == XT_INTERRUPTED ? waited : XT_OK;
    return xt_error(XT_RUNTIME_ERROR, "no GPU was in use when the profile began");
}
