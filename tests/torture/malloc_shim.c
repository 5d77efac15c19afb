/* malloc_shim.c - for oom.py: allocations of one shared object fail, by number. Loaded with LD_PRELOAD.
 *
 * A call counts when its return address lies in the text of the object that shim_arm names, so Python's and NumPy's own memory
 * never fails. malloc, calloc, realloc and posix_memalign are looked at: what the C core calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uintptr_t low, high;
static int64_t asked, first, end;

static int find(struct dl_phdr_info *info, size_t size, void *name) {
    (void)size;
    if (!info->dlpi_name || !strstr(info->dlpi_name, name)) return 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &info->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_X)) continue;
        low = info->dlpi_addr + part->p_vaddr;
        high = low + part->p_memsz;
    }
    return 1;
}

/* The allocations number `from` to `to` - 1 of the object fail from now on; returns how many there were since the last call. */
int64_t shim_arm(const char *object, int64_t from, int64_t to) {
    __atomic_store_n(&end, 0, __ATOMIC_SEQ_CST);
    if (!low) dl_iterate_phdr(find, (void *)object);
    if (!low) return -1;
    first = from;
    int64_t count = __atomic_exchange_n(&asked, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&end, to, __ATOMIC_SEQ_CST);
    return count;
}

static int must_fail(void *caller) {
    int64_t stop = __atomic_load_n(&end, __ATOMIC_ACQUIRE);
    if (stop == 0 || (uintptr_t)caller < low || (uintptr_t)caller >= high) return 0;
    int64_t number = __atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED);
    return number >= first && number < stop;
}

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *old, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);

void *malloc(size_t size) {
    if (must_fail(__builtin_return_address(0))) return errno = ENOMEM, NULL;
    return __libc_malloc(size);
}
void *calloc(size_t count, size_t size) {
    if (must_fail(__builtin_return_address(0))) return errno = ENOMEM, NULL;
    return __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
    if (must_fail(__builtin_return_address(0))) return errno = ENOMEM, NULL;
    return __libc_realloc(old, size);
}
int posix_memalign(void **out, size_t alignment, size_t size) {
    if (must_fail(__builtin_return_address(0))) return ENOMEM;
    *out = __libc_memalign(alignment, size);
    return *out ? 0 : ENOMEM;
}
