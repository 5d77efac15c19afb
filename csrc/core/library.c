/* library.c - where the libraries lie that belong to this build. */
#define _GNU_SOURCE /* dladdr */
#include "xtrain.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

bool xt_library_path(const char *name, char *path, size_t room) {
    static const char here;
    Dl_info self;
    if (!dladdr(&here, &self) || !self.dli_fname) return false;
    const char *slash = strrchr(self.dli_fname, '/');
    int folder = slash ? (int)(slash - self.dli_fname) : 1;
    int length = snprintf(path, room, "%.*s/_lib/%s", folder, slash ? self.dli_fname : ".", name);
    return length >= 0 && (size_t)length < room;
}
