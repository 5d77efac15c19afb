/* nccl.h - collectives between the devices of several processes, by NVIDIA's NCCL. They move bytes and never add. */
#pragma once

#include "contract/backend.h"

enum { XT_COMM_ID = 128 }; /* bytes of what the processes of one communicator share */

/* The communicator of one device with those of other processes. Its collectives are queued on the device's one stream, in order with its
 * kernels, and return at once; all processes must call the same ones in one order, with the same sizes. */
typedef struct XtComm XtComm;

/* Opens the library, at the first call, and says which it is: 22809 is 2.28.9. Static text. */
XtStatus xt_nccl_version(int *version, const char **path);
XtStatus xt_comm_id(unsigned char id[XT_COMM_ID]);
/* Waits until all `size` processes have called it with one id. */
XtStatus xt_comm_open(XtDevice device, const unsigned char id[XT_COMM_ID], int rank, int size, XtComm **out);
int xt_comm_size(const XtComm *comm);
XtDevice xt_comm_device(const XtComm *comm);
typedef struct XtExchange {
    void *out;      /* `size` pieces, by rank; none overlaps `in` */
    const void *in; /* all-to-all: `size` pieces; all-gather: one */
    size_t nbytes;  /* of a piece */
} XtExchange;
/* beside: beside the kernels queued from now on, after those before; xt_comm_join makes what is queued after it wait. */
XtStatus xt_comm_all_to_all(XtComm *comm, const XtExchange *pieces, bool beside);
XtStatus xt_comm_all_gather(XtComm *comm, const XtExchange *each, int count, bool beside); /* all in one group */
XtStatus xt_comm_join(XtComm *comm);
XtStatus xt_comm_broadcast(XtComm *comm, void *data, size_t nbytes, int source);
/* Whether all that the device was asked for is done, or the error of NCCL's own threads. Asks again for so many microseconds. */
XtStatus xt_comm_idle(XtComm *comm, int64_t microseconds, bool *out);
/* Any thread. Ends what is under way, also where another process never comes; every later call is an error. */
void xt_comm_abort(XtComm *comm);
void xt_comm_close(XtComm *comm); /* the same in order, once all is done; it may wait for the other processes */
void xt_comm_free(XtComm *comm);  /* its memory alone: a communicator that was not closed ends with the process */
