/* disk_shim.c - for disk.py: records what a process does to the files below one folder, and lets chosen calls fail. Loaded with LD_PRELOAD.
 *
 * A record is struct Record, then a name, then a second name or data. Files and folders are told by inode number. shim_start(folder, log)
 * begins; shim_mark(n) writes a mark; shim_fail(first, end, errno) lets the calls number first to end - 1 below the folder fail, -1 counts
 * only, and returns how many there were since the last call. One thread may change files at a time, as saving does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

typedef struct Record {
    char kind; /* C create, M mkdir, D delete, R rename, X exchange, W write, T truncate, S sync, ! mark */
    char unused[3];
    uint32_t name_bytes, data_bytes, padding;
    uint64_t a, b, c; /* a: inode of the folder, or of the file; b: the file, or the other folder; c: offset or number */
} Record;

static char root[PATH_MAX];
static size_t root_bytes;
static int out = -1, fail_with;
static int64_t asked, first, end;

static void raw_write(const void *data, size_t bytes) {
    while (bytes) {
        long done = syscall(SYS_write, out, data, bytes);
        if (done <= 0) _exit(99);
        data = (const char *)data + done, bytes -= (size_t)done;
    }
}

static void record(char kind, uint64_t a, uint64_t b, uint64_t c, const char *name, const void *data, size_t bytes) {
    if (out < 0) return;
    Record r = {.kind = kind, .name_bytes = (uint32_t)strlen(name), .data_bytes = (uint32_t)bytes, .a = a, .b = b, .c = c};
    raw_write(&r, sizeof r);
    raw_write(name, r.name_bytes);
    raw_write(data, bytes);
}

void shim_start(const char *folder, const char *log) {
    if (!realpath(folder, root)) _exit(98);
    root_bytes = strlen(root);
    out = log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
}
void shim_mark(int64_t number) { record('!', 0, 0, (uint64_t)number, "", NULL, 0); }
int64_t shim_fail(int64_t from, int64_t to, int code) {
    int64_t count = asked;
    asked = 0, first = from, end = to, fail_with = code;
    return count;
}

/* The real path of a file's folder, and its name; whether that is below the root. */
static int split(int folder, const char *path, char *parent, char *name) {
    if (!root_bytes || !path) return 0;
    int kept = errno;
    char whole[2 * PATH_MAX];
    if (path[0] != '/' && folder != AT_FDCWD) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        long bytes = readlink(link, whole, PATH_MAX);
        if (bytes < 0) return errno = kept, 0;
        snprintf(whole + bytes, sizeof whole - (size_t)bytes, "/%s", path);
    } else {
        snprintf(whole, sizeof whole, "%s", path);
    }
    size_t length = strlen(whole);
    while (length > 1 && whole[length - 1] == '/') whole[--length] = 0;
    char *slash = strrchr(whole, '/');
    const char *last = slash ? slash + 1 : whole;
    if (strlen(last) > NAME_MAX) return errno = kept, 0;
    memcpy(name, last, strlen(last) + 1);
    if (slash) *(slash == whole ? slash + 1 : slash) = 0;
    int inside = realpath(slash ? whole : ".", parent) && strncmp(parent, root, root_bytes) == 0 &&
                 (parent[root_bytes] == 0 || parent[root_bytes] == '/');
    errno = kept;
    return inside;
}

static int inside_fd(int fd) {
    if (!root_bytes) return 0;
    int kept = errno;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long bytes = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (bytes < 0) return 0;
    path[bytes] = 0;
    return strncmp(path, root, root_bytes) == 0 && (path[root_bytes] == 0 || path[root_bytes] == '/');
}

static uint64_t inode_of(const char *path) {
    struct stat about;
    int kept = errno;
    uint64_t found = lstat(path, &about) == 0 ? about.st_ino : 0;
    errno = kept;
    return found;
}
static uint64_t inode_at(const char *parent, const char *name) {
    char whole[2 * PATH_MAX];
    snprintf(whole, sizeof whole, "%s/%s", parent, name);
    return inode_of(whole);
}
static uint64_t inode_fd(int fd) {
    struct stat about;
    return fstat(fd, &about) == 0 ? about.st_ino : 0;
}

/* Counts a call below the root; whether it must fail. */
static int fails(void) {
    int64_t number = asked++;
    if (number < first || number >= end || !fail_with) return 0;
    errno = fail_with;
    return 1;
}

/* ---- files ----------------------------------------------------------------------------------------------------------------- */

static int opened(int folder, const char *path, int flags, mode_t mode) {
    char parent[PATH_MAX], name[NAME_MAX + 1];
    int below = split(folder, path, parent, name), writes = flags & (O_CREAT | O_TRUNC);
    int is_new = below && (flags & O_CREAT) && !inode_at(parent, name);
    if (below && (writes || (flags & O_ACCMODE) != O_RDONLY) && fails()) return -1;
    int fd = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (fd >= 0 && is_new) record('C', inode_of(parent), inode_fd(fd), 0, name, NULL, 0);
    else if (fd >= 0 && below && (flags & O_TRUNC)) record('T', inode_fd(fd), 0, 0, "", NULL, 0);
    return fd;
}
#define MODE(flags)                            \
    mode_t mode = 0;                           \
    if ((flags) & (O_CREAT | __O_TMPFILE)) {   \
        va_list rest;                          \
        va_start(rest, flags);                 \
        mode = (mode_t)va_arg(rest, unsigned); \
        va_end(rest);                          \
    }
int open(const char *path, int flags, ...) {
    MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    return opened(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return opened(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return opened(folder, path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t bytes) {
    int below = fd != out && inside_fd(fd);
    if (below && fails()) return -1;
    ssize_t done = syscall(SYS_write, fd, data, bytes);
    if (below && done > 0) {
        int kept = errno;
        off_t at = lseek(fd, 0, SEEK_CUR);
        record('W', inode_fd(fd), 0, (uint64_t)(at - done), "", data, (size_t)done);
        errno = kept;
    }
    return done;
}
static int cut(int fd, off_t length) {
    int below = inside_fd(fd);
    if (below && fails()) return -1;
    int done = (int)syscall(SYS_ftruncate, fd, length);
    if (below && done == 0) record('T', inode_fd(fd), 0, (uint64_t)length, "", NULL, 0);
    return done;
}
int ftruncate(int fd, off_t length) { return cut(fd, length); }
int ftruncate64(int fd, off64_t length) { return cut(fd, length); }
static int synced(int fd, long number) {
    int below = inside_fd(fd);
    if (below && fails()) return -1;
    int done = out >= 0 && below ? 0 : (int)syscall(number, fd); /* a recording needs no disk */
    if (below && done == 0) record('S', inode_fd(fd), 0, 0, "", NULL, 0);
    return done;
}
int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* ---- names ----------------------------------------------------------------------------------------------------------------- */

static __thread int renaming; /* the wrapper of syscall below leaves this file's own alone */

static int renamed(int from, const char *old, int to, const char *new, unsigned flags) {
    char parent[2][PATH_MAX], name[2][NAME_MAX + 1];
    int below = split(from, old, parent[0], name[0]) && split(to, new, parent[1], name[1]);
    if (below && fails()) return -1;
    renaming = 1;
    int done = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    renaming = 0;
    if (below && done == 0)
        record(flags & 2 ? 'X' : 'R', inode_of(parent[0]), inode_of(parent[1]), 0, name[0], name[1], strlen(name[1]));
    return done;
}
int rename(const char *old, const char *new) { return renamed(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renamed(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return renamed(from, old, to, new, flags); }

static int removed(int folder, const char *path, int flags) {
    char parent[PATH_MAX], name[NAME_MAX + 1];
    int below = split(folder, path, parent, name);
    if (below && fails()) return -1;
    int done = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (below && done == 0) record('D', inode_of(parent), 0, 0, name, NULL, 0);
    return done;
}
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int unlinkat(int folder, const char *path, int flags) { return removed(folder, path, flags); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }

static int made(int folder, const char *path, mode_t mode) {
    char parent[PATH_MAX], name[NAME_MAX + 1];
    int below = split(folder, path, parent, name);
    if (below && fails()) return -1;
    int done = (int)syscall(SYS_mkdirat, folder, path, mode);
    if (below && done == 0) record('M', inode_of(parent), inode_at(parent, name), 0, name, NULL, 0);
    return done;
}
int mkdir(const char *path, mode_t mode) { return made(AT_FDCWD, path, mode); }
int mkdirat(int folder, const char *path, mode_t mode) { return made(folder, path, mode); }

/* What this shim does not know would leave a hole in the recording. */
static int unknown(const char *text) {
    syscall(SYS_write, 2, text, strlen(text));
    _exit(97);
}
int link(const char *old, const char *new) {
    (void)old, (void)new;
    return unknown("disk_shim: link is not recorded\n");
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    (void)from, (void)old, (void)to, (void)new, (void)flags;
    return unknown("disk_shim: linkat is not recorded\n");
}

/* The exchange of two directories goes by its number. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    if (number != SYS_renameat2 || renaming) return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    return renamed((int)a[0], (const char *)a[1], (int)a[2], (const char *)a[3], (unsigned)a[4]);
}
