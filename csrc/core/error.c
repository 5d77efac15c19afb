/* error.c - one message per thread, set where the rule is broken and read where the exception is raised. */
#include "xtrain.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[1024];

XtStatus xt_error(XtStatus status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    /* In a second buffer, because an argument may point into the old message. */
    char text[sizeof message];
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (size_t i = 0; i < sizeof message; i++) {
        message[i] = text[i];
        if (!text[i]) break;
    }
    return status;
}

const char *xt_error_message(void) { return message; }

XtStatus xt_error_named(XtStatus status, const char *name) {
    if (status == XT_OK || status == XT_PYTHON_ERROR || status == XT_INTERRUPTED) return status;
    size_t word = strspn(message, "abcdefghijklmnopqrstuvwxyz_0123456789");
    return message[word] == ':' ? status : xt_error(status, "%s: %s", name, message);
}
