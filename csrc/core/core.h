/* core.h - what the files of core/ share with each other, and the hook through which backend/ lends a device's allocator. */
#pragma once

#include "xtrain.h"

typedef struct XtAllocator {
    XtStatus (*allocate)(int device_index, size_t nbytes, void **out);
    void (*release)(int device_index, void *data, size_t nbytes);
    XtStatus (*trim)(int device_index);
    void (*reset_peak)(int device_index);
} XtAllocator;

void xt_set_allocator(XtDeviceType type, const XtAllocator *allocator);

/* For tests. The storages number `first` to `last` that are asked for from now on, on any device, cannot be allocated; 0 is the next.
 * An empty range ends it. Returns how many have been asked for since the last call. */
int64_t xt_fail_storages(int64_t first, int64_t last);
/* From now on, follows what is allocated on meta, and starts over if it did; ends that: the region that a captured step would need for
 * it (arena.h), 0 without a plan. */
void xt_meta_plan(void);
size_t xt_meta_planned(void);
void xt_count_tensor(XtDevice device, int change);
bool xt_memory_was_used(XtDevice device); /* a storage has been on it; its peak may be 0 again */
