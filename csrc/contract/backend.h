/* backend.h - what a device offers: its table of kernels, its memory, and how a library of kernels is opened. */
#pragma once

#include "contract/traits.h"
#include "kernels.h"

/* Properties and counters of an accelerator, for users and tests. */
typedef struct XtDeviceInfo {
    char name[256];
    int major, minor, multiprocessors; /* compute capability */
    int driver, runtime;               /* 13000 is 13.0 */
    int64_t memory_total, memory_free; /* bytes, of the whole device */
    char built_for[128];               /* compute capabilities with kernels in this library, "80 86 90a ptx120" */
    char uuid[48];                     /* "GPU-..." as nvidia-smi shows it: which of the GPUs of all hosts */
    char blas[512];                    /* which cuBLASLt was loaded, and from where; "" before the first product */
} XtDeviceInfo;
typedef struct XtDeviceCounters {
    int64_t launches, synchronizations, to_host, from_host; /* since the library was opened */
    int64_t allocations, driver_allocations;                /* all blocks allocated, and those of them from the driver's pool */
    int64_t pool_used, pool_reserved, pool_peak;            /* bytes of the memory pool, scratch included */
} XtDeviceCounters;

/* A captured step: its calls in order, and the memory of its blocks. The library's own. */
typedef struct XtGraph XtGraph;

/* What an accelerator's table has besides kernels. */
typedef struct XtAccelerator {
    int device_count;
    XtStatus (*use)(int index); /* makes it the calling thread's device: where slots run and scratch comes from */
    XtStatus (*info)(int index, XtDeviceInfo *out);
    const XtDeviceTraits *(*traits)(int index); /* after the first `use` of that device */
    XtStatus (*counters)(int index, XtDeviceCounters *out);
    XtStatus (*trim)(int index); /* returns unused memory of the pool to the driver */
    void (*reset_peak)(int index);
    void *(*stream)(int index);                      /* the one stream of all its work */
    XtStatus (*idle)(int index, bool *out);          /* whether all of it is done; does not wait */
    XtStatus (*make_wait)(int index, void *foreign); /* later work on `foreign` waits for the work queued here so far */
    /* Our stream waits for the work queued so far on the legacy default stream or, with `every`, on all streams of the device. No stream
     * handle is passed: the call comes when lent memory is returned, and the borrower's stream may be destroyed by then. */
    XtStatus (*wait_for)(int index, bool every);
    /* A second stream of high priority, for what runs beside the kernels: what it is given after this call comes behind the work queued
     * here so far. `join` makes our stream wait for it. In a capture, which holds both, each `side` must be joined. */
    XtStatus (*side)(int index, void **out);
    XtStatus (*join)(int index);

    /* Graphs. Between `capture` and `end_capture` the calling thread's slots are recorded, not run; its blocks come from a region of the
     * graph's own; copies from and to the host, waits and random numbers of the host are errors, and so is everything of other threads. */
    bool waits;                                     /* the host waits after every kernel: nothing can be captured */
    XtStatus (*plan)(int index);                    /* from now on, follows what is allocated, and starts over if it did */
    XtStatus (*planned)(int index, size_t *nbytes); /* ends that: the region that the same allocations in the same order need */
    XtStatus (*capture)(int index, size_t nbytes,
                        XtGraph **out); /* where the region is large, waits and gives unused memory back before */
    XtStatus (*end_capture)(XtGraph *graph, bool keep,
                            int64_t *calls);              /* without keep: for a failed capture, never an error itself */
    XtStatus (*replay)(XtGraph *graph);                   /* queued like a kernel */
    bool (*owns)(const XtGraph *graph, const void *data); /* whether an address lies in its region */
    void (*drop)(XtGraph *graph); /* replays under way end first. The region goes when its last block is released */
} XtAccelerator;

/* The tables of named implementations: contract/gemm.h and contract/attention.h. */
typedef struct XtGemmBackend XtGemmBackend;
typedef struct XtAttentionBackend XtAttentionBackend;

/* What a device offers. NULL slots are missing kernels: the coverage test lists and fails them. */
typedef struct XtBackend {
    const char *name; /* "cpu", "cuda" */
    XtStatus (*allocate)(int device_index, size_t nbytes, void **out);
    void (*release)(int device_index, void *data, size_t nbytes);
    XtStatus (*to_host)(int device_index, void *host, const void *device, size_t nbytes);   /* returns when done */
    XtStatus (*from_host)(int device_index, void *device, const void *host, size_t nbytes); /* host may be reused on return */
    XtStatus (*synchronize)(int device_index);
#define XT_X(slot, Params) XtStatus (*slot)(const Params *p);
    XT_KERNELS(XT_X)
#undef XT_X
    const XtGemmBackend *gemm; /* the tables of implementations */
    const XtAttentionBackend *attention;
    const XtAccelerator *accelerator; /* NULL on the CPU */
    /* The CPU only: loads the BLAS library, at the first call, and describes it. Products must not run before. */
    XtStatus (*open)(const char **description);
} XtBackend;

/* A library with a backend exports two functions. xt_cuda_contract is called first and returns the xt_contract() it was built with: if
 * it differs from ours, the structs of this file may differ too. xt_open_cuda gets what the library needs from this process and
 * returns the table. */
typedef struct XtHost {
    XtStatus (*error)(XtStatus status, const char *message); /* xt_error */
    const char *const *folders;                              /* where Python packages lie; ends with NULL; outlives the library */
} XtHost;
typedef const char *(*XtBackendContract)(void);                               /* "xt_cuda_contract" */
typedef XtStatus (*XtOpenBackend)(const XtHost *host, const XtBackend **out); /* "xt_open_cuda" */

extern const XtBackend xt_cpu_backend;
