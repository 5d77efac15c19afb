/* memory.cu - device memory in the order of the stream.
 *
 * Blocks come from a memory pool of the driver (cudaMallocFromPoolAsync). All work of a device is queued on one stream, so a block may
 * be used again as soon as the host gives it back, while kernels that use it are still queued: whoever gets it next is queued behind
 * them. Small blocks are therefore kept here, by size, and handed out again without a call of the driver, which costs the host as much
 * as a launch: a training step asks for more blocks than it launches kernels.
 *
 * Sizes up to LARGEST are rounded up to one of eight steps between powers of two (at most an eighth too much); larger ones go to the
 * pool and back, which can cut and join them. No more than `limit` bytes are kept: when that is exceeded, sizes have changed, and all
 * go back to the pool.
 */
#include "memory.cuh"

#include <pthread.h>
#include <stdlib.h>

static const size_t SMALLEST = 512, LARGEST = (size_t)8 << 20, MOST_KEPT = (size_t)1 << 30;
static const int CLASSES = 1 + 8 * 14; /* 512 bytes, then 8 steps in each of the doublings up to 8 MiB */

typedef struct Shelf {
    void **blocks;
    int count, room;
} Shelf;
typedef struct Memory {
    pthread_mutex_t lock; /* guards what follows */
    cudaStream_t stream;
    cudaMemPool_t pool;
    Shelf shelves[CLASSES];
    size_t kept, limit;   /* bytes on the shelves, and at most */
    int64_t in_use, peak; /* bytes given out */
    int64_t allocations, waits;
} Memory;

static Memory memories[XT_MAX_DEVICES];

/* The class of a size, which is rounded up to the class's own; -1: too large for a class. */
static int class_of(size_t *nbytes) {
    if (*nbytes > LARGEST) return -1;
    if (*nbytes <= SMALLEST) {
        *nbytes = SMALLEST;
        return 0;
    }
    int doubling = 63 - __builtin_clzll(*nbytes - 1); /* 2^doubling < nbytes <= 2^(doubling + 1) */
    size_t base = (size_t)1 << doubling, step = base / 8, steps = (*nbytes - base + step - 1) / step;
    *nbytes = base + steps * step;
    return 8 * (doubling - 9) + (int)steps;
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
    if (error) return xt_cuda_error("opening the device's memory", error);
    error = cudaMemPoolSetAttribute(memory->pool, cudaMemPoolAttrReleaseThreshold, &keep_all);
    if (error) {
        cudaMemPoolDestroy(memory->pool);
        return xt_cuda_error("opening the device's memory", error);
    }
    memory->limit = !keep_blocks ? 0 : total / 16 < MOST_KEPT ? total / 16 : MOST_KEPT;
    memory->stream = stream;
    pthread_mutex_init(&memory->lock, NULL);
    return XT_OK;
}

/* The caller holds the lock. */
static void empty_shelves(Memory *memory) {
    for (int i = 0; i < CLASSES; i++) {
        Shelf *shelf = &memory->shelves[i];
        while (shelf->count)
            if (cudaFreeAsync(shelf->blocks[--shelf->count], memory->stream) != cudaSuccess) cudaGetLastError();
    }
    memory->kept = 0;
}

/* The caller holds the lock. */
static cudaError_t from_pool(Memory *memory, size_t nbytes, void **out) {
    cudaError_t error = cudaMallocFromPoolAsync(out, nbytes, memory->pool, memory->stream);
    if (error != cudaErrorMemoryAllocation) return error;
    cudaGetLastError(); /* what is free may be on the shelves, in pieces, or not yet free */
    empty_shelves(memory);
    error = cudaStreamSynchronize(memory->stream);
    memory->waits++;
    if (!error) error = cudaMemPoolTrimTo(memory->pool, 0);
    if (!error) error = cudaMallocFromPoolAsync(out, nbytes, memory->pool, memory->stream);
    return error;
}

XtStatus xt_memory_allocate(int index, size_t nbytes, void **out) {
    Memory *memory = &memories[index];
    cudaError_t error = cudaSuccess;
    int of = class_of(&nbytes);
    pthread_mutex_lock(&memory->lock);
    if (of >= 0 && memory->shelves[of].count > 0) {
        *out = memory->shelves[of].blocks[--memory->shelves[of].count];
        memory->kept -= nbytes;
    } else {
        error = from_pool(memory, nbytes, out);
    }
    if (!error) {
        memory->allocations++;
        memory->in_use += (int64_t)nbytes;
        if (memory->in_use > memory->peak) memory->peak = memory->in_use;
    }
    pthread_mutex_unlock(&memory->lock);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return XT_OUT_OF_MEMORY;
    }
    return xt_cuda_error("allocating memory", error);
}

/* Whether there is room for one more; the caller holds the lock. */
static bool grow(Shelf *shelf) {
    if (shelf->count < shelf->room) return true;
    int room = shelf->room ? 2 * shelf->room : 16;
    void **blocks = (void **)realloc(shelf->blocks, (size_t)room * sizeof *blocks);
    if (!blocks) return false;
    shelf->blocks = blocks;
    shelf->room = room;
    return true;
}

void xt_memory_release(int index, void *data, size_t nbytes) {
    Memory *memory = &memories[index];
    int of = class_of(&nbytes);
    pthread_mutex_lock(&memory->lock);
    memory->in_use -= (int64_t)nbytes;
    if (of >= 0 && memory->kept + nbytes > memory->limit) empty_shelves(memory);
    if (of >= 0 && nbytes <= memory->limit && grow(&memory->shelves[of])) {
        memory->shelves[of].blocks[memory->shelves[of].count++] = data;
        memory->kept += nbytes;
    } else if (cudaFreeAsync(data, memory->stream) != cudaSuccess) {
        cudaGetLastError();
    }
    pthread_mutex_unlock(&memory->lock);
}

XtStatus xt_memory_trim(int index) {
    Memory *memory = &memories[index];
    pthread_mutex_lock(&memory->lock);
    empty_shelves(memory);
    cudaError_t error = cudaStreamSynchronize(memory->stream);
    memory->waits++;
    if (!error) error = cudaMemPoolTrimTo(memory->pool, 0);
    pthread_mutex_unlock(&memory->lock);
    return xt_cuda_error("giving memory back", error);
}

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
    out->synchronizations += memory->waits;
    out->pool_used = memory->in_use;
    out->pool_peak = memory->peak;
    out->pool_reserved = (int64_t)reserved;
    pthread_mutex_unlock(&memory->lock);
    return xt_cuda_error("asking about memory", error);
}
