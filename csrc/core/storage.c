/* storage.c - blocks of memory, counted, with a small cache in front of the system allocator.
 *
 * A training step asks for the same few hundred sizes again and again. The system allocator would map, zero and unmap the large ones
 * every time; keeping them costs nothing and saves a page fault per 4 KiB. Blocks of at least CACHE_MIN bytes are rounded up to a size
 * class (eight per power of two, so at most 1/8 is wasted) and freed into a list per class, up to CACHE_LIMIT bytes in all.
 */
#include "arena.h"
#include "core.h"
#include "xtrain.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Under AddressSanitizer nobody may touch a block that waits in the cache, nor what rounding added behind a block in use. */
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define FORBID(data, nbytes) ASAN_POISON_MEMORY_REGION(data, nbytes)
#define ALLOW(data, nbytes) ASAN_UNPOISON_MEMORY_REGION(data, nbytes)
#else
#define FORBID(data, nbytes) ((void)(data), (void)(nbytes))
#define ALLOW(data, nbytes) ((void)(data), (void)(nbytes))
#endif

#define ALIGNMENT 64
#define CACHE_MIN 4096u
#define CACHE_CLASSES 512
#define CACHE_LIMIT ((int64_t)2 << 30)

typedef struct Block {
    struct Block *next;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block *cache[CACHE_CLASSES];
#define INDICES 256                          /* of devices of one type: XtDevice.index is a byte */
static XtMemoryStats stats[1 + 2 * INDICES]; /* the CPU, then CUDA's devices, then meta's */
static bool used[1 + 2 * INDICES];           /* the same devices */
static XtAllocator allocators[XT_DEVICE_TYPE_COUNT];

static XtMemoryStats *stats_of(XtDevice device) {
    return &stats[device.type == XT_CPU ? 0 : device.type == XT_CUDA ? 1 + device.index : 1 + INDICES + device.index];
}

void xt_set_allocator(XtDeviceType type, const XtAllocator *allocator) { allocators[type] = *allocator; }

/* Another thread may hold the lock during a fork: the child starts with a free lock. */
static void lock_before_fork(void) { pthread_mutex_lock(&lock); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void guard_forks(void) {
    pthread_atfork(lock_before_fork, unlock_after_fork, unlock_after_fork);
}

/* The class of a size >= CACHE_MIN, and the size that the class really has. */
static int class_of(size_t nbytes, size_t *rounded) {
    int log = 63 - __builtin_clzll(nbytes - 1); /* 2^log <= nbytes - 1 < 2^(log + 1) */
    size_t step = (size_t)1 << (log - 3);
    *rounded = (nbytes + step - 1) / step * step;
    return (log - 11) * 8 + (int)((*rounded >> (log - 3)) - 8);
}

/* The inverse: what blocks of a class have. */
static size_t size_of_class(int class) { return (size_t)(class % 8 + 8) << (class / 8 + 8); }

static size_t cpu_rounded(size_t nbytes) {
    size_t rounded;
    if (nbytes < CACHE_MIN) return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    class_of(nbytes, &rounded);
    return rounded;
}

static bool planning; /* with `plan` under the lock */
static XtMemoryPlan plan;

void xt_meta_plan(void) {
    pthread_mutex_lock(&lock);
    if (planning) xt_plan_end(&plan);
    xt_plan_begin(&plan);
    planning = true;
    pthread_mutex_unlock(&lock);
}

size_t xt_meta_planned(void) {
    pthread_mutex_lock(&lock);
    size_t nbytes = planning ? xt_plan_end(&plan) : 0;
    planning = false;
    pthread_mutex_unlock(&lock);
    return nbytes;
}

static void meta_release(const void *data, size_t nbytes) {
    pthread_mutex_lock(&lock);
    if (planning) xt_plan_gave(&plan, data, nbytes);
    pthread_mutex_unlock(&lock);
}

/* A place for elements that are not there: addresses that no other tensor has, as nothing is ever at them. meta:1 rounds as
 * cuda/runtime/memory.cu does. */
static void *meta_allocate(int index, size_t nbytes, size_t *rounded) {
    static uint64_t next = (uint64_t)1 << 48; /* atomic */
    const size_t unit = 512, largest = (size_t)8 << 20;
    if (nbytes > SIZE_MAX / 4) return NULL;
    size_t units = (nbytes + unit - 1) / unit * unit;
    *rounded = index == 0 ? cpu_rounded(nbytes) : units > largest || units < CACHE_MIN ? units : cpu_rounded(units);
    void *data = (void *)(uintptr_t)__atomic_fetch_add(&next, units, __ATOMIC_RELAXED);
    pthread_mutex_lock(&lock);
    if (planning) xt_plan_took(&plan, data, nbytes);
    pthread_mutex_unlock(&lock);
    return data;
}

static void *cpu_allocate(size_t nbytes, size_t *rounded) {
    void *data = NULL;
    if (nbytes > SIZE_MAX / 2) return NULL;
    if (nbytes < CACHE_MIN) {
        *rounded = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    } else {
        int class = class_of(nbytes, rounded);
        if (class < CACHE_CLASSES) {
            pthread_mutex_lock(&lock);
            if (cache[class]) {
                data = cache[class];
                ALLOW(data, *rounded);
                cache[class] = cache[class]->next;
                stats[XT_CPU].cached -= (int64_t)*rounded;
            }
            pthread_mutex_unlock(&lock);
            if (data) {
                FORBID((char *)data + nbytes, *rounded - nbytes);
                return data;
            }
        }
    }
    if (posix_memalign(&data, ALIGNMENT, *rounded)) return NULL;
    FORBID((char *)data + nbytes, *rounded - nbytes);
    return data;
}

static void cpu_release(void *data, size_t rounded) {
    ALLOW(data, rounded);
    if (rounded >= CACHE_MIN) {
        size_t same;
        int class = class_of(rounded, &same);
        pthread_mutex_lock(&lock);
        if (class < CACHE_CLASSES && stats[XT_CPU].cached + (int64_t)rounded <= CACHE_LIMIT) {
            Block *block = data;
            block->next = cache[class];
            cache[class] = block;
            FORBID(block, rounded);
            stats[XT_CPU].cached += (int64_t)rounded;
            data = NULL;
        }
        pthread_mutex_unlock(&lock);
    }
    free(data);
}

static void count(XtDevice device, int64_t bytes, int blocks) {
    pthread_mutex_lock(&lock);
    XtMemoryStats *s = stats_of(device);
    s->allocated += bytes;
    s->live_storages += blocks;
    if (s->allocated > s->peak) s->peak = s->allocated;
    used[s - stats] = true;
    pthread_mutex_unlock(&lock);
}

bool xt_memory_was_used(XtDevice device) {
    pthread_mutex_lock(&lock);
    const bool was = used[stats_of(device) - stats];
    pthread_mutex_unlock(&lock);
    return was;
}

void xt_count_tensor(XtDevice device, int change) { __atomic_add_fetch(&stats_of(device)->live_tensors, change, __ATOMIC_RELAXED); }

static void release_own(XtStorage *storage) {
    size_t rounded = (size_t)(uintptr_t)storage->owner;
    if (storage->data) {
        if (storage->device.type == XT_META) meta_release(storage->data, storage->nbytes);
        else if (storage->device.type == XT_CPU) cpu_release(storage->data, rounded);
        else allocators[storage->device.type].release(storage->device.index, storage->data, rounded);
    }
    count(storage->device, -(int64_t)rounded, -1);
}

static XtStatus new_storage(XtDevice device, void *data, size_t nbytes, void (*release)(XtStorage *), void *owner,
                            XtStorage **out) {
    XtStorage *storage = malloc(sizeof *storage);
    if (!storage) return xt_error(XT_OUT_OF_MEMORY, "out of memory: cannot allocate a storage record");
    *storage = (XtStorage){.references = 1, .data = data, .nbytes = nbytes, .device = device, .release = release, .owner = owner};
    *out = storage;
    return XT_OK;
}

static XtStatus out_of_memory(XtDevice device, size_t nbytes) {
    XtMemoryStats held;
    xt_memory_stats(device, &held);
    return xt_error(XT_OUT_OF_MEMORY,
                    "out of memory on %s: %.2f MiB asked, %.2f MiB held by %lld tensors' storages (peak %.2f MiB), %.2f MiB cached",
                    xt_device_name(device), (double)nbytes / 1048576, (double)held.allocated / 1048576,
                    (long long)held.live_storages, (double)held.peak / 1048576, (double)held.cached / 1048576);
}

/* Of xt_fail_storages: how many were asked for, and which fail. Without it one load and one comparison a storage. */
static int64_t asked, fail_first, fail_end;

int64_t xt_fail_storages(int64_t first, int64_t last) {
    __atomic_store_n(&fail_end, 0, __ATOMIC_SEQ_CST);
    fail_first = first;
    int64_t count = __atomic_exchange_n(&asked, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&fail_end, last < first ? 0 : last + 1, __ATOMIC_SEQ_CST);
    return count;
}

static bool must_fail(void) {
    int64_t end = __atomic_load_n(&fail_end, __ATOMIC_ACQUIRE);
    if (end == 0) return false;
    int64_t number = __atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED);
    return number >= fail_first && number < end;
}

XtStatus xt_storage_allocate(XtDevice device, size_t nbytes, XtStorage **out) {
    void *data = NULL;
    size_t rounded = 0;
    if (must_fail()) return out_of_memory(device, nbytes);
    if (nbytes > 0 && device.type == XT_CPU) {
        data = cpu_allocate(nbytes, &rounded);
        if (!data) {                      /* the cache may hold enough in other sizes */
            (void)xt_memory_trim(device); /* never fails on the CPU */
            data = cpu_allocate(nbytes, &rounded);
        }
        if (!data) return out_of_memory(device, nbytes);
    } else if (nbytes > 0 && device.type == XT_META) {
        data = meta_allocate(device.index, nbytes, &rounded);
        if (!data) return out_of_memory(device, nbytes);
    } else if (nbytes > 0) {
        rounded = nbytes;
        XtStatus status = allocators[device.type].allocate(device.index, nbytes, &data);
        if (status == XT_OUT_OF_MEMORY) return out_of_memory(device, nbytes);
        if (status != XT_OK) return status;
    }
    XtStatus status = new_storage(device, data, nbytes, release_own, (void *)(uintptr_t)rounded, out);
    if (status != XT_OK) {
        if (data && device.type == XT_CPU) cpu_release(data, rounded);
        else if (data && device.type == XT_META) meta_release(data, nbytes);
        else if (data) allocators[device.type].release(device.index, data, rounded);
        return status;
    }
    count(device, (int64_t)rounded, 1);
    return XT_OK;
}

XtStatus xt_storage_wrap(XtDevice device, void *data, size_t nbytes, void (*release)(XtStorage *), void *owner, XtStorage **out) {
    return new_storage(device, data, nbytes, release, owner, out);
}

static void release_part(XtStorage *part) { xt_storage_release(part->owner); }

XtStatus xt_storage_part(XtStorage *whole, size_t offset, size_t nbytes, XtStorage **out) {
    XT_CHECK(new_storage(whole->device, whole->data ? (char *)whole->data + offset : NULL, nbytes, release_part, whole, out));
    xt_storage_retain(whole);
    return XT_OK;
}

XtStorage *xt_storage_whole(XtStorage *storage) { return storage->release == release_part ? storage->owner : storage; }

bool xt_storage_is_own(const XtStorage *storage) {
    return storage->release == release_own ||
           (storage->release == release_part && ((const XtStorage *)storage->owner)->release == release_own);
}

void xt_storage_retain(XtStorage *storage) { __atomic_add_fetch(&storage->references, 1, __ATOMIC_RELAXED); }

/* Giving foreign memory back may release another storage of ours, which may be foreign again (a chain of from_dlpack): a list takes the
 * place of recursion. */
static void release_foreign(XtStorage *storage) {
    static _Thread_local XtStorage *pending;
    static _Thread_local bool draining;
    storage->next_free = pending;
    pending = storage;
    if (draining) return;
    draining = true;
    while ((storage = pending)) {
        pending = storage->next_free;
        if (storage->release) storage->release(storage);
        free(storage);
    }
    draining = false;
}

void xt_storage_release(XtStorage *storage) {
    if (!storage || __atomic_sub_fetch(&storage->references, 1, __ATOMIC_ACQ_REL) > 0) return;
    if (storage->release != release_own) {
        release_foreign(storage);
        return;
    }
    release_own(storage);
    free(storage);
}

void xt_memory_stats(XtDevice device, XtMemoryStats *out) {
    const XtMemoryStats *s = stats_of(device);
    pthread_mutex_lock(&lock);
    *out = (XtMemoryStats){.allocated = s->allocated, .peak = s->peak, .cached = s->cached, .live_storages = s->live_storages};
    pthread_mutex_unlock(&lock);
    out->live_tensors = __atomic_load_n(&s->live_tensors, __ATOMIC_RELAXED); /* counted without the lock */
}

void xt_memory_reset_peak(XtDevice device) {
    pthread_mutex_lock(&lock);
    stats_of(device)->peak = stats_of(device)->allocated;
    pthread_mutex_unlock(&lock);
    if (allocators[device.type].reset_peak) allocators[device.type].reset_peak(device.index);
}

XtStatus xt_memory_trim(XtDevice device) {
    if (device.type != XT_CPU) {
        return allocators[device.type].trim ? allocators[device.type].trim(device.index)
                                            : XT_OK; /* never opened: it keeps nothing */
    }
    pthread_mutex_lock(&lock);
    for (int class = 0; class < CACHE_CLASSES; class++) {
        while (cache[class]) {
            Block *block = cache[class];
            ALLOW(block, size_of_class(class));
            cache[class] = block->next;
            free(block);
        }
    }
    stats[XT_CPU].cached = 0;
    pthread_mutex_unlock(&lock);
    return XT_OK;
}
