/* span.c - a list that grows under a lock: ops are recorded one by one, and only while somebody profiles. */
#include "core/span.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool recording; /* written under the lock, read without */
static XtSpan *spans;
static int64_t span_count, span_capacity, spans_lost;

int64_t xt_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec + 1;
}

int xt_thread_number(void) {
    static int last;
    static _Thread_local int mine;
    if (mine == 0) mine = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return mine;
}

bool xt_spans_start(void) {
    pthread_mutex_lock(&mutex);
    bool was = recording;
    __atomic_store_n(&recording, true, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&mutex);
    return !was;
}

void xt_spans_stop(XtSpan **out, int64_t *count, int64_t *lost) {
    pthread_mutex_lock(&mutex);
    __atomic_store_n(&recording, false, __ATOMIC_RELAXED);
    *out = spans;
    *count = span_count;
    *lost = spans_lost;
    spans = NULL;
    span_count = span_capacity = spans_lost = 0;
    pthread_mutex_unlock(&mutex);
}

int64_t xt_span_begin(void) { return __atomic_load_n(&recording, __ATOMIC_RELAXED) ? xt_clock() : 0; }

/* Whole shapes, as many as there is room for, and "..." where there was none for the next. */
static void write_shapes(char *text, size_t size, XtTensor *const *tensors, int count) {
    char one[XT_MAX_DIMS * 21 + 4]; /* a size of 20 digits and its comma; a space and the brackets */
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < count; i++) {
        if (!tensors[i]) continue;
        size_t length = (size_t)snprintf(one, sizeof one, "%s[", used ? " " : "");
        for (int d = 0; d < tensors[i]->ndim; d++)
            length += (size_t)snprintf(one + length, sizeof one - length, "%s%lld", d ? "," : "", (long long)tensors[i]->shape[d]);
        length += (size_t)snprintf(one + length, sizeof one - length, "]");
        if (used + length + sizeof " ..." > size) {
            snprintf(text + used, size - used, "%s...", used ? " " : "");
            return;
        }
        memcpy(text + used, one, length + 1);
        used += length;
    }
}

void xt_span_end(int64_t begin, const char *name, bool backward, XtTensor *const *tensors, int count) {
    if (begin == 0) return;
    XtSpan span = {.begin = begin, .end = xt_clock(), .thread = xt_thread_number(), .backward = backward};
    snprintf(span.name, sizeof span.name, "%s", name);
    write_shapes(span.shapes, sizeof span.shapes, tensors, count);
    pthread_mutex_lock(&mutex);
    if (recording) {
        if (span_count == span_capacity) {
            int64_t capacity = span_capacity ? 2 * span_capacity : 1024;
            XtSpan *grown = realloc(spans, (size_t)capacity * sizeof *grown);
            if (grown) spans = grown, span_capacity = capacity;
        }
        if (span_count < span_capacity) spans[span_count++] = span;
        else spans_lost++;
    }
    pthread_mutex_unlock(&mutex);
}
