/* reads.h - which leaves that require a gradient the ops of this thread read: for what is run again in backward. */
#ifndef XT_OPS_READS_H
#define XT_OPS_READS_H

#include "xtrain.h"

/* A list that is being made; it lies with who begins it. Lists nest: what an inner one gets, the outer ones get too. */
typedef struct XtReads {
    XtTensor **leaves; /* owned, each once, in the order of their first read */
    int count, room;
    struct XtReads *outer;
} XtReads;

/* From here on every op of this thread notes its leaves in `reads`, until xt_end_reads; the caller frees with xt_free_reads. */
void xt_begin_reads(XtReads *reads);
void xt_end_reads(XtReads *reads);
void xt_free_reads(XtReads *reads);

#endif
