/* fake_cupti.c - a libcupti for the device of fake_device.c, which tells it what has run. Compiled by fake_library.py.
 *
 * Its clock is ahead of ours by an hour. It stops the process where it is not used as CUPTI must be: what is enabled without a subscriber or
 * buffers, detached with a subscriber or before its records were taken, or called while it is detached. Names go when it is detached.
 *
 * FAKE_CUPTI_VERSION: of its API. FAKE_CUPTI_FAILS: "Subscribe 39", the function that fails, and its error. FAKE_CUPTI_SPOILS: how many of
 * the first records of a session have no times or wrong ones. FAKE_CUPTI_DROPS: how many records of a session it has dropped.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define EXPORTED __attribute__((visibility("default")))
enum { INVALID = 7, LIMIT = 12, COPY = 1, FILL = 2, KERNEL = 10, FORCED = 1 };

typedef struct Kernel { /* CUpti_ActivityKernel10 */
    uint32_t kind;
    uint8_t cache, shared;
    uint16_t registers;
    uint32_t requested, executed;
    uint64_t start, end, completed;
    uint32_t device, context, stream;
    int32_t grid[3], block[3], fixed, dynamic;
    uint32_t local, local_total, correlation;
    int64_t grid_id;
    const char *name;
    char more[104];
} Kernel;
typedef struct Copy { /* CUpti_ActivityMemcpy6 */
    uint32_t kind;
    uint8_t direction, from, to, flags;
    uint64_t bytes, start, end;
    uint32_t device, context, stream;
    char more[60];
} Copy;

typedef void (*Request)(uint8_t **buffer, size_t *size, size_t *most);
typedef void (*Completed)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

static int subscribed, spoiled, sessions;
static bool enabled[64];
static Request request;
static Completed completed;
static uint8_t *buffer;
static size_t size, used, dropped;

static void misused(const char *what) {
    fprintf(stderr, "fake_cupti: %s\n", what);
    abort();
}

static int fails(const char *function) {
    const char *asked = getenv("FAKE_CUPTI_FAILS");
    const size_t length = strlen(function);
    return asked && strncmp(asked, function, length) == 0 && asked[length] == ' ' ? atoi(asked + length) : 0;
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)(time.tv_sec + 3600) * 1000000000 + (uint64_t)time.tv_nsec;
}

/* ---- what fake_device.c calls --------------------------------------------------------------------------------------------------- */

EXPORTED uint64_t fake_cupti_now(void) { return enabled[KERNEL] ? now() : 0; }

static void *room(size_t wanted) {
    size_t most = 0;
    if (used + wanted > size) {
        if (buffer) completed(NULL, 0, buffer, size, used);
        used = size = 0;
        request(&buffer, &size, &most);
        if (!buffer) return NULL;
    }
    void *place = memset(buffer + used, 0, wanted);
    used += wanted;
    return place;
}

static void spoil(uint64_t *start, uint64_t *end) {
    if (spoiled-- <= 0) return;
    if (spoiled % 2) *start = *end = 0;
    else *end = *start - 1;
}

static char *kept[256];           /* a string a kernel */
static char strings[1 << 14][64]; /* not of the heap, and elsewhere in each session */
static int strings_made;

/* name: a kernel's; "to host" and so on: a copy of so many bytes. */
EXPORTED void fake_cupti_ran(const char *name, uint64_t start, int device, size_t bytes) {
    static const char *const copies[] = {NULL, "to device", "to host"};
    int kind = KERNEL, direction = 0, known = 0;
    for (int i = 1; i < 3; i++)
        if (!strcmp(name, copies[i])) kind = COPY, direction = i;
    if (!strcmp(name, "fill")) kind = FILL;
    if (!enabled[kind]) return;
    if (kind != KERNEL) {
        Copy *record = room(sizeof *record);
        *record = (Copy){.kind = (uint32_t)kind, .direction = (uint8_t)direction, .bytes = bytes, .start = start, .end = now()};
        record->device = (uint32_t)device, record->stream = 13;
        spoil(&record->start, &record->end);
        return;
    }
    /* As nvcc would write `void SLOT_kernel<float, 4>(float*)`. */
    char mangled[64];
    snprintf(mangled, sizeof mangled, "_Z%zu%s_kernelIfLi4EEvPT_", strlen(name) + strlen("_kernel"), name);
    while (known < 255 && kept[known] && strcmp(kept[known], mangled)) known++;
    if (!kept[known]) {
        kept[known] = strings[strings_made++ % (1 << 14)];
        memcpy(kept[known], mangled, sizeof mangled);
    }
    Kernel *record = room(sizeof *record);
    *record = (Kernel){.kind = KERNEL, .start = start, .end = now(), .name = kept[known]};
    record->device = (uint32_t)device, record->stream = 13;
    spoil(&record->start, &record->end);
}

/* ---- CUPTI ----------------------------------------------------------------------------------------------------------------------- */

EXPORTED int cuptiGetVersion(uint32_t *version) {
    const char *asked = getenv("FAKE_CUPTI_VERSION");
    *version = asked ? (uint32_t)atoi(asked) : 130001;
    return fails("GetVersion");
}
EXPORTED int cuptiGetResultString(int result, const char **text) {
    *text = result == 39 ? "MULTIPLE_SUBSCRIBERS" : result == 35 ? "NO_PRIVILEGE" : "SOMETHING";
    return 0;
}
EXPORTED int cuptiSubscribe(void **subscriber, void (*callback)(void), void *user) {
    (void)user;
    if (!callback) misused("a subscriber without a callback");
    if (fails("Subscribe")) return fails("Subscribe");
    if (subscribed) return 39;
    const char *spoils = getenv("FAKE_CUPTI_SPOILS"), *drops = getenv("FAKE_CUPTI_DROPS");
    subscribed = 1, sessions++;
    spoiled = spoils ? atoi(spoils) : 0;
    dropped = drops ? (size_t)atoi(drops) : 0;
    *subscriber = &subscribed;
    return 0;
}
EXPORTED int cuptiUnsubscribe(void *subscriber) {
    if (subscriber != &subscribed || !subscribed) misused("another's subscription was ended");
    subscribed = 0;
    return 0;
}
EXPORTED int cuptiActivityRegisterCallbacks(Request asks, Completed ends) {
    if (!subscribed) misused("buffers without a subscriber");
    if (fails("ActivityRegisterCallbacks")) return fails("ActivityRegisterCallbacks");
    request = asks, completed = ends;
    return 0;
}
EXPORTED int cuptiActivityEnable(int kind) {
    if (!subscribed || !request) misused("enabled without a subscriber or buffers");
    if (kind == FILL && fails("ActivityEnable")) { /* the last one; another thread has launched a kernel by then */
        fake_cupti_ran("early", now(), 0, 0);
        return fails("ActivityEnable");
    }
    enabled[kind] = true;
    return 0;
}
EXPORTED int cuptiActivityDisable(int kind) {
    if (!enabled[kind]) misused("disabled what was not enabled");
    enabled[kind] = false;
    return 0;
}
EXPORTED int cuptiActivityFlushAll(uint32_t flags) {
    if (flags != FORCED) misused("records that are not complete would stay");
    if (!request) return INVALID;
    if (buffer) completed(NULL, 0, buffer, size, used);
    buffer = NULL;
    size = used = 0;
    return 0;
}
EXPORTED int cuptiActivityGetNextRecord(uint8_t *data, size_t valid, uint8_t **record) {
    const uint8_t *end = data + valid;
    uint8_t *next = data;
    if (*record) next = *record + (*(const uint32_t *)(const void *)*record == KERNEL ? sizeof(Kernel) : sizeof(Copy));
    if (next >= end) return LIMIT;
    *record = next;
    return 0;
}
EXPORTED int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count) {
    (void)context, (void)stream;
    *count = dropped;
    dropped = 0;
    return 0;
}
EXPORTED int cuptiGetTimestamp(uint64_t *time) {
    *time = now();
    return fails("GetTimestamp");
}
EXPORTED int cuptiFinalize(void) {
    if (subscribed || buffer || enabled[KERNEL] || enabled[COPY] || enabled[FILL]) misused("detached while it is in use");
    request = NULL, completed = NULL;
    for (int i = 0; i < 256 && kept[i]; i++) {
        memset(kept[i], '?', strlen(kept[i]));
        kept[i] = NULL;
    }
    fprintf(stderr, "detached %d\n", sessions);
    return 0;
}
