/* memory.cu - device memory in the order of the stream.
 *
 * Blocks come from a memory pool of the driver (cudaMallocFromPoolAsync). All work of a device is queued on one stream, so a block
 * may be used again as soon as the host frees it, even while kernels that use it are queued: the next user is queued behind them.
 *
 * Freed small blocks stay here, in a free list for each size class, and are handed out again without a driver call. A driver call
 * costs the host as much as a launch, and a training step asks for more blocks than it launches kernels.
 *
 * Sizes up to LARGEST are rounded up to one of eight steps between powers of two, at most an eighth too much. Larger blocks return
 * to the pool, which can split and join them. At most `limit` bytes stay in the lists; above it, the class that was unused for
 * longest returns blocks to the pool. With a limit of 0 no block stays and no size is rounded, so that compute-sanitizer sees reads
 * past a block, of memory never written, and after a free.
 *
 * Regions. The blocks of a captured step come from a region of its own, one block of the pool (core/arena.h places them): a driver call
 * would become a node of the graph, and a block from the free lists would be handed to eager code as well. What is released during a
 * capture and lies outside goes to a list, and from there to the free lists or the pool when the capture has ended.
 */
#include "contract/backend.h"
#include "core/arena.h"
#include "memory.cuh"

#include <pthread.h>
#include <stdlib.h>

static const size_t SMALLEST = 512, LARGEST = (size_t)8 << 20, MOST_KEPT = (size_t)1 << 30;
static const int CLASSES = 1 + 8 * 14; /* 512 bytes, then 8 steps in each doubling up to 8 MiB */

typedef struct FreeList {
    void **blocks;
    int count, room;
    int64_t used; /* time (`now`) of the last allocation or free in this class */
} FreeList;
struct XtRegion {
    XtRegion *next; /* of its device */
    char *data;     /* [nbytes], of the pool */
    size_t nbytes;
    XtArena arena;
    bool abandoned;
};
typedef struct Late { /* a block that was released during a capture */
    void *data;
    size_t nbytes;
} Late;
typedef struct Memory {
    pthread_mutex_t lock; /* guards the fields below */
    cudaStream_t stream;
    cudaMemPool_t pool;
    FreeList lists[CLASSES];
    size_t kept, limit;   /* bytes in the lists, and their maximum */
    int64_t in_use, peak; /* bytes allocated */
    int64_t now;          /* number of allocations and frees so far */
    int64_t allocations, driver_allocations, waits;
    XtRegion *regions, *serving; /* all; the one that blocks come from, or NULL */
    bool planning;
    XtMemoryPlan plan;
    Late *late; /* [late_room] */
    int64_t late_count, late_room;
} Memory;

static Memory memories[XT_MAX_DEVICES];

/* The class of a size; rounds *nbytes up to the size of the class. -1: too large for a class, or no blocks are kept. */
static int class_of(const Memory *memory, size_t *nbytes) {
    if (memory->limit == 0) return -1;
    *nbytes = (*nbytes + SMALLEST - 1) / SMALLEST * SMALLEST; /* the granularity of the driver */
    if (*nbytes > LARGEST) return -1;
    if (*nbytes == SMALLEST) return 0;
    int doubling = 63 - __builtin_clzll(*nbytes - 1); /* 2^doubling < nbytes <= 2^(doubling + 1) */
    size_t base = (size_t)1 << doubling, step = base / 8, steps = (*nbytes - base + step - 1) / step;
    *nbytes = base + steps * step;
    return 8 * (doubling - 9) + (int)steps;
}
static size_t size_of(int of) {
    size_t base = SMALLEST << (of > 0 ? (of - 1) / 8 : 0);
    return of > 0 ? base + base / 8 * (size_t)((of - 1) % 8 + 1) : base;
}

XtStatus xt_memory_open(int index, cudaStream_t stream, bool keep_blocks) {
    Memory *memory = &memories[index];
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = index;
    uint64_t keep_all = UINT64_MAX;
    size_t free_bytes = 0, total = 0;
    cudaError_t error = cudaMemGetInfo(&free_bytes, &total);
    if (!error) error = cudaMemPoolCreate(&memory->pool, &props);
    if (error) return xt_cuda_error("opening the device", error);
    error = cudaMemPoolSetAttribute(memory->pool, cudaMemPoolAttrReleaseThreshold, &keep_all);
    if (error) {
        cudaMemPoolDestroy(memory->pool);
        return xt_cuda_error("opening the device", error);
    }
    memory->limit = !keep_blocks ? 0 : total / 16 < MOST_KEPT ? total / 16 : MOST_KEPT;
    memory->stream = stream;
    pthread_mutex_init(&memory->lock, NULL);
    return XT_OK;
}

/* The caller of this and of the following functions holds the lock. */
static void to_pool(Memory *memory, void *data) {
    if (cudaFreeAsync(data, memory->stream) != cudaSuccess) cudaGetLastError();
}

static void empty_lists(Memory *memory) {
    for (int i = 0; i < CLASSES; i++)
        while (memory->lists[i].count > 0) to_pool(memory, memory->lists[i].blocks[--memory->lists[i].count]);
    memory->kept = 0;
}

/* Returns blocks to the pool until `nbytes` more may be kept; nbytes <= limit. */
static void make_room(Memory *memory, size_t nbytes) {
    while (memory->kept + nbytes > memory->limit) {
        int oldest = -1;
        for (int i = 0; i < CLASSES; i++)
            if (memory->lists[i].count > 0 && (oldest < 0 || memory->lists[i].used < memory->lists[oldest].used)) oldest = i;
        FreeList *list = &memory->lists[oldest];
        to_pool(memory, list->blocks[--list->count]);
        memory->kept -= size_of(oldest);
    }
}

/* Allocates from the driver. If that fails, tries again after returning all free blocks, and again after the stream has drained. */
static XtStatus from_pool(int index, size_t nbytes, void **out) {
    Memory *memory = &memories[index];
    memory->driver_allocations++;
    cudaError_t error = cudaMallocFromPoolAsync(out, nbytes, memory->pool, memory->stream);
    if (error == cudaErrorMemoryAllocation && memory->kept > 0) {
        cudaGetLastError();
        empty_lists(memory);
        error = cudaMallocFromPoolAsync(out, nbytes, memory->pool, memory->stream);
    }
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        memory->waits++;
        error = cudaStreamSynchronize(memory->stream);
        if (error) return xt_late_error(index, error);
        error = cudaMemPoolTrimTo(memory->pool, 0);
        if (!error) error = cudaMallocFromPoolAsync(out, nbytes, memory->pool, memory->stream);
    }
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return XT_OUT_OF_MEMORY;
    }
    return xt_cuda_error("allocating memory", error);
}

static XtStatus from_region(XtRegion *region, size_t nbytes, void **out) {
    size_t offset;
    if (!xt_arena_take(&region->arena, nbytes, &offset))
        return xt_error(XT_RUNTIME_ERROR,
                        "cuda.graph: the captured step must not need more memory than its planned run, which had %.2f MiB at once; "
                        "%.2f MiB more were asked",
                        (double)region->nbytes / 1048576, (double)nbytes / 1048576);
    *out = region->data + offset;
    return XT_OK;
}

XtStatus xt_memory_allocate(int index, size_t nbytes, void **out) {
    Memory *memory = &memories[index];
    XtStatus status = XT_OK;
    const size_t asked = nbytes;
    int of = class_of(memory, &nbytes);
    pthread_mutex_lock(&memory->lock);
    if (memory->serving) {
        status = from_region(memory->serving, asked, out);
        if (status == XT_OK) memory->allocations++;
        pthread_mutex_unlock(&memory->lock);
        return status;
    }
    if (of >= 0 && memory->lists[of].count > 0) {
        *out = memory->lists[of].blocks[--memory->lists[of].count];
        memory->kept -= nbytes;
        memory->lists[of].used = ++memory->now;
    } else {
        status = from_pool(index, nbytes, out);
    }
    if (status == XT_OK) {
        memory->allocations++;
        memory->in_use += (int64_t)nbytes;
        if (memory->in_use > memory->peak) memory->peak = memory->in_use;
        if (memory->planning) xt_plan_took(&memory->plan, *out, asked);
    }
    pthread_mutex_unlock(&memory->lock);
    return status;
}

static bool grow(FreeList *list) {
    if (list->count < list->room) return true;
    int room = list->room ? 2 * list->room : 16;
    void **blocks = (void **)realloc(list->blocks, (size_t)room * sizeof *blocks);
    if (!blocks) return false;
    list->blocks = blocks;
    list->room = room;
    return true;
}

/* A block of the pool to its free list, or to the pool. The lock is held. */
static void put_back(Memory *memory, void *data, size_t nbytes) {
    int of = class_of(memory, &nbytes);
    memory->in_use -= (int64_t)nbytes;
    if (of >= 0 && nbytes <= memory->limit && grow(&memory->lists[of])) {
        FreeList *list = &memory->lists[of];
        make_room(memory, nbytes);
        list->blocks[list->count++] = data;
        list->used = ++memory->now;
        memory->kept += nbytes;
    } else {
        to_pool(memory, data);
    }
}

/* Whether the block waits for the end of the capture. Without host memory for the list it stays allocated for good. */
static void put_late(Memory *memory, void *data, size_t nbytes) {
    if (memory->late_count == memory->late_room) {
        int64_t room = 2 * memory->late_room + 64;
        Late *late = (Late *)realloc(memory->late, (size_t)room * sizeof *late);
        if (!late) return;
        memory->late = late;
        memory->late_room = room;
    }
    memory->late[memory->late_count].data = data;
    memory->late[memory->late_count++].nbytes = nbytes;
}

/* The region goes from the list, and its memory to the pool. */
static void free_region(Memory *memory, XtRegion *region) {
    XtRegion **at = &memory->regions;
    while (*at != region) at = &(*at)->next;
    *at = region->next;
    if (memory->serving) put_late(memory, region->data, region->nbytes);
    else put_back(memory, region->data, region->nbytes);
    free(region->arena.holes);
    free(region);
}

void xt_memory_release(int index, void *data, size_t nbytes) {
    Memory *memory = &memories[index];
    pthread_mutex_lock(&memory->lock);
    XtRegion *region = memory->regions;
    while (region && !xt_region_holds(region, data)) region = region->next;
    if (region) {
        xt_arena_give(&region->arena, (size_t)((char *)data - region->data), nbytes);
        if (region->abandoned && region->arena.blocks == 0) free_region(memory, region);
    } else if (memory->serving) {
        put_late(memory, data, nbytes);
    } else {
        if (memory->planning) xt_plan_gave(&memory->plan, data, nbytes);
        put_back(memory, data, nbytes);
    }
    pthread_mutex_unlock(&memory->lock);
}

/* ---- graphs ---------------------------------------------------------------------------------------------------------------- */

void xt_memory_plan(int index) {
    Memory *memory = &memories[index];
    pthread_mutex_lock(&memory->lock);
    if (memory->planning) xt_plan_end(&memory->plan);
    xt_plan_begin(&memory->plan);
    memory->planning = true;
    pthread_mutex_unlock(&memory->lock);
}

size_t xt_memory_planned(int index) {
    Memory *memory = &memories[index];
    pthread_mutex_lock(&memory->lock);
    const size_t nbytes = memory->planning ? xt_plan_end(&memory->plan) : 0;
    memory->planning = false;
    pthread_mutex_unlock(&memory->lock);
    return nbytes;
}

XtStatus xt_memory_reserve(int index, size_t nbytes, XtRegion **out) {
    XtRegion *region = (XtRegion *)calloc(1, sizeof *region);
    void *data = NULL;
    XtStatus status = region ? xt_memory_allocate(index, nbytes, &data) : XT_OUT_OF_MEMORY;
    if (status != XT_OK) {
        free(region);
        return status;
    }
    Memory *memory = &memories[index];
    region->data = (char *)data;
    region->nbytes = region->arena.limit = nbytes;
    pthread_mutex_lock(&memory->lock);
    region->next = memory->regions;
    memory->regions = region;
    pthread_mutex_unlock(&memory->lock);
    *out = region;
    return XT_OK;
}

void xt_memory_serve(int index, XtRegion *region) {
    Memory *memory = &memories[index];
    pthread_mutex_lock(&memory->lock);
    memory->serving = region;
    for (; !region && memory->late_count > 0; memory->late_count--) {
        const Late *late = &memory->late[memory->late_count - 1];
        put_back(memory, late->data, late->nbytes);
    }
    pthread_mutex_unlock(&memory->lock);
}

bool xt_region_holds(const XtRegion *region, const void *data) {
    return (uintptr_t)data - (uintptr_t)region->data < region->nbytes;
}

void xt_memory_abandon(int index, XtRegion *region) {
    Memory *memory = &memories[index];
    pthread_mutex_lock(&memory->lock);
    region->abandoned = true;
    if (region->arena.blocks == 0) free_region(memory, region);
    pthread_mutex_unlock(&memory->lock);
}

/* ---- what people ask --------------------------------------------------------------------------------------------------------- */

void xt_memory_empty_lists(int index) {
    pthread_mutex_lock(&memories[index].lock);
    empty_lists(&memories[index]);
    pthread_mutex_unlock(&memories[index].lock);
}
cudaError_t xt_memory_trim(int index) { return cudaMemPoolTrimTo(memories[index].pool, 0); }

void xt_memory_reset_peak(int index) {
    pthread_mutex_lock(&memories[index].lock);
    memories[index].peak = memories[index].in_use;
    pthread_mutex_unlock(&memories[index].lock);
}

XtStatus xt_memory_counters(int index, XtDeviceCounters *out) {
    Memory *memory = &memories[index];
    uint64_t reserved = 0;
    cudaError_t error = cudaMemPoolGetAttribute(memory->pool, cudaMemPoolAttrReservedMemCurrent, &reserved);
    pthread_mutex_lock(&memory->lock);
    out->allocations = memory->allocations;
    out->driver_allocations = memory->driver_allocations;
    out->synchronizations += memory->waits;
    out->pool_used = memory->in_use;
    out->pool_peak = memory->peak;
    out->pool_reserved = (int64_t)reserved;
    pthread_mutex_unlock(&memory->lock);
    return xt_cuda_error("asking about memory", error);
}
