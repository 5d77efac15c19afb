/* elf.c - refuses a truncated library before dlopen opens it.
 *
 * dlopen maps the ranges that the program headers name. In a truncated file (an interrupted copy, a full disk) a range ends behind the
 * end of the file, and reading it there kills the process with SIGBUS. Other faults (another machine's code, a missing symbol) are
 * left to dlopen, which returns an error.
 */
#include "backend.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The 64-bit file header and program header of the ELF specification, in this machine's byte order. */
typedef struct FileHeader {
    unsigned char ident[16];
    uint16_t type, machine;
    uint32_t version;
    uint64_t entry, program_headers, section_headers;
    uint32_t flags;
    uint16_t size, program_header_size, program_header_count, section_header_size, section_header_count, section_names;
} FileHeader;
typedef struct ProgramHeader {
    uint32_t type, flags;
    uint64_t offset, address, physical_address, size, memory_size, alignment;
} ProgramHeader;
enum { IS_64_BIT = 2, LITTLE_ENDIAN_DATA = 1, BIG_ENDIAN_DATA = 2, LOADED = 1 };

static XtStatus refuse(const char *path, const char *what) {
    return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: %s %s", path, what);
}

static bool native_order(unsigned char data) {
    const uint16_t one = 1;
    return data == (*(const unsigned char *)&one ? LITTLE_ENDIAN_DATA : BIG_ENDIAN_DATA);
}

/* Reads exactly n bytes at `offset`; false when the file is too short or cannot be read. */
static bool read_at(int file, void *out, size_t n, uint64_t offset) {
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(file, (char *)out + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

/* Whether [offset, offset + n) lies in a file of `size` bytes. */
static bool inside(uint64_t offset, uint64_t n, uint64_t size) { return offset <= size && n <= size - offset; }

/* offset + n, or the largest number where that is more. */
static uint64_t end_of(uint64_t offset, uint64_t n) { return n <= UINT64_MAX - offset ? offset + n : UINT64_MAX; }

static XtStatus check_content(int file, const char *path, uint64_t size) {
    FileHeader header;
    unsigned char magic[4];
    char what[128];
    if (size == 0) return refuse(path, "is empty" XT_BUILD_AGAIN);
    if (!read_at(file, magic, sizeof magic, 0) || memcmp(magic, "\177ELF", 4) != 0)
        return refuse(path, "is not an ELF library" XT_BUILD_AGAIN);
    bool whole = read_at(file, &header, sizeof header, 0);
    if (whole &&
        (header.ident[4] != IS_64_BIT || !native_order(header.ident[5]) || header.program_header_size != sizeof(ProgramHeader)))
        return XT_OK; /* another machine's library: dlopen refuses it before it maps anything */
    uint64_t needed = sizeof header;
    for (uint64_t i = 0; whole && i < header.program_header_count; i++) {
        ProgramHeader segment;
        uint64_t offset = header.program_headers + i * sizeof segment;
        needed = end_of(offset, sizeof segment);
        whole = inside(offset, sizeof segment, size) && read_at(file, &segment, sizeof segment, offset);
        if (!whole || segment.type != LOADED) continue;
        needed = end_of(segment.offset, segment.size);
        whole = inside(segment.offset, segment.size, size);
    }
    if (whole) return XT_OK;
    snprintf(what, sizeof what, "is truncated: it has %llu bytes and needs %llu" XT_BUILD_AGAIN, (unsigned long long)size,
             (unsigned long long)needed);
    return refuse(path, what);
}

XtStatus xt_check_library(const char *path) {
    struct stat found;
    char what[512], target[400] = "";
    if (lstat(path, &found) != 0 && (errno == ENOENT || errno == ENOTDIR))
        return xt_error(XT_RUNTIME_ERROR,
                        "CUDA is not available: this build of xtrain has no CUDA library (it is built where nvcc and a GPU "
                        "are; XTRAIN_CUDA=1 insists); use device='cpu'");
    if (stat(path, &found) != 0) {
        int problem = errno;
        ssize_t length = readlink(path, target, sizeof target - 1);
        target[length > 0 ? length : 0] = '\0';
        if (length > 0) snprintf(what, sizeof what, "is a symbolic link to %s: %s" XT_BUILD_AGAIN, target, strerror(problem));
        else snprintf(what, sizeof what, "cannot be read: %s", strerror(problem));
        return refuse(path, what);
    }
    if (!S_ISREG(found.st_mode)) return refuse(path, S_ISDIR(found.st_mode) ? "is a directory and no library" : "is not a file");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) {
        snprintf(what, sizeof what, "cannot be read: %s", strerror(errno));
        return refuse(path, what);
    }
    XtStatus status = check_content(file, path, (uint64_t)found.st_size);
    close(file);
    return status;
}
