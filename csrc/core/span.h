/* span.h - what ran when: spans of time, recorded while somebody profiles. Any thread may record. */
#pragma once

#include "xtrain.h"

typedef struct XtSpan {
    int64_t begin, end; /* ns of xt_clock */
    int thread;         /* xt_thread_number */
    bool backward;      /* the rule of an op, not its forward */
    char name[48];      /* cut */
    char shapes[80];    /* of tensors, "[4,8] [8]"; "..." for those that have no room */
} XtSpan;

/* A clock that only goes forward, in ns; never 0. */
int64_t xt_clock(void);
/* A number of the calling thread: 1 for the first that asks, and so on. */
int xt_thread_number(void);

/* From now on spans are recorded, from none; false, and nothing has changed, if they were already. */
bool xt_spans_start(void);
/* Ends that. The caller frees *out, [*count]; *lost were without memory. */
void xt_spans_stop(XtSpan **out, int64_t *count, int64_t *lost);

/* The time while spans are recorded, else 0. */
int64_t xt_span_begin(void);
/* Records a span that began at `begin`, unless that is 0, and ends now. tensors: [count], of which NULLs are left out. */
void xt_span_end(int64_t begin, const char *name, bool backward, XtTensor *const *tensors, int count);
