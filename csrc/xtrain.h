/* xtrain.h - the core contract: tensors, storage, dtypes, devices, errors, threads, random numbers.
 *
 * A one-page tour
 * ---------------
 * A *storage* (XtStorage) is one reference-counted block of memory on one device. A *view* (XtView) says how to read a block:
 * pointer to the first element, dtype, shape and strides (in elements, never negative; 0 repeats an element). A *tensor*
 * (XtTensor) is a view, a reference to the storage that keeps the memory alive, and - when gradients are wanted - a grad record
 * that belongs to autograd. Slicing, transposing and expanding make new tensors over the same storage; nothing is copied.
 *
 *     user code -> csrc/py (parses, raises) -> csrc/ops (checks, allocates, calls a kernel) -> csrc/backend (which table?)
 *                                                    \-> csrc/autograd (records, walks back)          \-> csrc/cpu | cuda
 *
 * Kernels see views and sizes only (kernels.h); they know neither Python nor the tape. Everything that can fail returns an
 * XtStatus; the message waits in a per-thread buffer until csrc/py turns both into a Python exception. Nothing prints or exits.
 *
 * Ownership words in prototypes: *borrows* (caller keeps its reference), *retains* (callee takes one more), *returns new*
 * (caller owns one reference and must release it). Arguments are borrowed unless a line says otherwise.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define XT_MAX_DIMS 8

/* ---- errors ------------------------------------------------------------------------------------------------------------ */

typedef enum XtStatus {
    XT_OK = 0,
    XT_VALUE_ERROR,
    XT_TYPE_ERROR,
    XT_INDEX_ERROR,
    XT_OUT_OF_MEMORY,
    XT_RUNTIME_ERROR,
    XT_NOT_IMPLEMENTED,
    XT_CUDA_ERROR,
    XT_INTERRUPTED,  /* Ctrl-C arrived during a long computation */
    XT_PYTHON_ERROR, /* a Python callback has already set the exception */
} XtStatus;

#if defined(__GNUC__)
#define XT_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define XT_PRINTF(fmt, args)
#endif

/* Stores the message of this thread and returns `status`, so that a check reads `return xt_error(XT_VALUE_ERROR, ...)`. */
XtStatus xt_error(XtStatus status, const char *format, ...) XT_PRINTF(2, 3);
const char *xt_error_message(void);
/* Puts `name` before a message that names no op: those of lower layers (sizes, memory, kernels) do not know it. Returns `status`. */
XtStatus xt_error_named(XtStatus status, const char *name);

/* Returns a status that is not XT_OK from a function that has nothing to release. */
#define XT_CHECK(expression)                   \
    do {                                       \
        const XtStatus status_ = (expression); \
        if (status_ != XT_OK) return status_;  \
    } while (0)

/* Leaves for the one cleanup exit of a function that declares `XtStatus status = XT_OK;` and a label `done:`. */
#define XT_TRY(expression)              \
    do {                                \
        status = (expression);          \
        if (status != XT_OK) goto done; \
    } while (0)

/* ---- dtypes and devices ------------------------------------------------------------------------------------------------ */

typedef enum XtDtype {
    XT_FLOAT32,
    XT_FLOAT64,
    XT_BFLOAT16,
    XT_FLOAT16,
    XT_INT32,
    XT_INT64,
    XT_UINT8,
    XT_BOOL,
    XT_DTYPE_COUNT,
} XtDtype;

size_t xt_dtype_size(XtDtype dtype);
const char *xt_dtype_name(XtDtype dtype); /* "float32" */
bool xt_dtype_is_float(XtDtype dtype);
/* dtype in which sums and statistics of `dtype` are kept: float64 for float64, float32 for the other floats, int64 for the rest. */
XtDtype xt_dtype_accumulator(XtDtype dtype);
/* The dtype that holds the values of both, by PyTorch's lattice (bfloat16 + float16 -> float32, int + float -> the float). */
XtDtype xt_dtype_promote(XtDtype a, XtDtype b);

/* XT_META: shapes without elements, see backend/meta.c. */
typedef enum XtDeviceType { XT_CPU = 0, XT_CUDA = 1, XT_META = 2, XT_DEVICE_TYPE_COUNT } XtDeviceType;

typedef struct XtDevice {
    uint8_t type; /* XtDeviceType */
    uint8_t index;
} XtDevice;

bool xt_device_equal(XtDevice a, XtDevice b);
const char *xt_device_name(XtDevice device); /* "cpu", "cuda:0", "meta:0"; static text */

/* A number from Python, kept exact: integers stay integers. */
typedef struct XtScalar {
    bool is_int;
    bool is_bool; /* also is_int, with i = 0 or 1 */
    int64_t i;
    double d; /* always set */
} XtScalar;

XtScalar xt_scalar_int(int64_t value);
XtScalar xt_scalar_bool(bool value);
XtScalar xt_scalar_float(double value);

/* ---- storage ----------------------------------------------------------------------------------------------------------- */

typedef struct XtStorage {
    int64_t references; /* atomic */
    void *data;         /* NULL when nbytes == 0 */
    size_t nbytes;
    XtDevice device;
    uint64_t version;                    /* atomic; +1 for every in-place change; shared by all views */
    void (*release)(struct XtStorage *); /* gives the memory back to whoever made it */
    void *owner;                         /* the maker's word: a Python object, a DLPack tensor, a size class */
    struct XtStorage *next_free;         /* link of the iterative release */
    uint64_t producer; /* number of the node that can compute the contents again, or 0; with `produced` set before others see it */
    int produced;      /* as which output of that node; both belong to autograd/tape.h */
} XtStorage;

/* Returns new storage of uninitialised memory, 64-byte aligned. XT_OUT_OF_MEMORY names the size asked and the size held. */
XtStatus xt_storage_allocate(XtDevice device, size_t nbytes, XtStorage **out);
/* Returns new storage over foreign memory; `release` is called once, when the last view goes. */
XtStatus xt_storage_wrap(XtDevice device, void *data, size_t nbytes, void (*release)(XtStorage *), void *owner, XtStorage **out);
/* Returns new storage over bytes [offset, offset + nbytes) of `whole`, which it retains and which is no part itself. A part has its own
 * references and version, so tensors of different parts do not see each other. The caller vouches that parts of one storage do not
 * overlap. */
XtStatus xt_storage_part(XtStorage *whole, size_t offset, size_t nbytes, XtStorage **out);
XtStorage *xt_storage_whole(XtStorage *storage);  /* what it is a part of, else `storage` itself; borrowed */
bool xt_storage_is_own(const XtStorage *storage); /* allocated here, not wrapped: nobody outside knows the memory */
void xt_storage_retain(XtStorage *storage);
void xt_storage_release(XtStorage *storage); /* NULL is allowed */

typedef struct XtMemoryStats {
    int64_t allocated, peak, cached; /* bytes in live storages, their maximum, and bytes kept for reuse */
    int64_t live_storages, live_tensors;
} XtMemoryStats;

void xt_memory_stats(XtDevice device, XtMemoryStats *out);
void xt_memory_reset_peak(XtDevice device);
XtStatus
xt_memory_trim(XtDevice device); /* gives cached blocks back to the system; a GPU's work is waited for, and may have failed */

/* ---- views and tensors ------------------------------------------------------------------------------------------------- */

typedef struct XtView {
    void *data; /* first element */
    XtDtype dtype;
    int ndim;
    int64_t shape[XT_MAX_DIMS];
    int64_t strides[XT_MAX_DIMS]; /* in elements, >= 0 */
} XtView;

struct XtGrad; /* owned by autograd/tape.h */

typedef struct XtTensor {
    int64_t references; /* atomic */
    XtStorage *storage; /* owns one reference */
    union {
        XtView view; /* what kernels take */
        struct {     /* the same fields, for reading */
            void *data;
            XtDtype dtype;
            int ndim;
            int64_t shape[XT_MAX_DIMS];
            int64_t strides[XT_MAX_DIMS];
        };
    };
    struct XtGrad *grad; /* owned; NULL: no gradient is wanted and nothing is recorded */
} XtTensor;

/* Product of the sizes times the element size, refusing negative sizes and overflow. Every allocation, view and reader uses it. */
XtStatus xt_size_of(XtDtype dtype, int ndim, const int64_t *shape, int64_t *numel, size_t *nbytes);

/* Returns new, contiguous, uninitialised. */
XtStatus xt_tensor_empty(XtDevice device, XtDtype dtype, int ndim, const int64_t *shape, XtTensor **out);
/* Returns new tensor over `storage` (retains it). The caller vouches that the view lies inside. */
XtStatus xt_tensor_from_view(XtStorage *storage, const XtView *view, XtTensor **out);
/* Returns new tensor over the same memory, without a grad record. */
XtStatus xt_tensor_alias(const XtTensor *tensor, XtTensor **out);
void xt_tensor_retain(XtTensor *tensor);
void xt_tensor_release(XtTensor *tensor); /* NULL is allowed */

int64_t xt_view_numel(const XtView *view);
bool xt_view_is_contiguous(const XtView *view); /* row-major without gaps; sizes 0 and 1 have free strides */
void xt_view_set_contiguous(XtView *view);      /* row-major strides from the shape */
bool xt_same_shape(const XtView *a, const XtView *b);
/* The dimensions of a loop over `count` views of equal shape: dimensions [first, first + ndim) of theirs without those of size 1,
 * and with neighbours merged into one where every view allows it, outer stride = inner stride * inner size. The elements keep their
 * row-major order, unless `sort` puts the larger stride of views[0] outside (where it is equal, of views[1], and so on; where all are
 * equal the order stays): right when every element is on its own, wrong when the order of the elements matters.
 * Writes sizes to shape, strides in elements to strides [count], and the product of the sizes to numel, which may be NULL. Returns
 * how many dimensions are left: 0 for a single element. */
int xt_merge_dims(int count, const XtView *const *views, int first, int ndim, bool sort, int64_t *numel, int64_t *shape,
                  int64_t (*strides)[XT_MAX_DIMS]);
/* "(2, 3)" in one of a few rotating per-thread buffers, for messages. */
const char *xt_shape_text(int ndim, const int64_t *shape);

/* autograd fills this in; core calls it when a tensor that has a grad record is freed. */
extern void (*xt_grad_release)(struct XtGrad *grad);

/* ---- threads ----------------------------------------------------------------------------------------------------------- */

/* Calls body(context, begin, end) over [0, count) in pieces of `grain` (the last may be shorter). The pieces depend on count and
 * grain only, never on the number of threads, so results do not either. Nested calls run in the calling thread. After an error
 * no piece begins on a thread that has seen it. Returns the caller's error, else the first of the workers with its message, or
 * XT_INTERRUPTED when the interrupt check said so between two pieces. A body of NULL, where no kernel exists for a dtype, is
 * XT_TYPE_ERROR. */
typedef XtStatus (*XtBody)(void *context, int64_t begin, int64_t end);
XtStatus xt_parallel(int64_t count, int64_t grain, XtBody body, void *context);

int xt_num_threads(void);
XtStatus xt_set_num_threads(int count);

/* Set by csrc/py: returns true when the user pressed Ctrl-C. Asked at most every 50 ms, on the calling thread only. */
extern bool (*xt_interrupt_check)(void);
bool xt_interrupted(void); /* asks, rate-limited */

/* ---- random numbers ---------------------------------------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Counter = element index / 4,
 * key = (seed, stream): element i of a fill is word i % 4 of block i / 4, the same on every device and for every partition. */
typedef struct XtPhilox {
    uint64_t seed;   /* key */
    uint64_t stream; /* counter words 2 and 3: one number per fill, so that no two fills overlap */
} XtPhilox;

/* The default generator of the process: manual_seed sets (seed, stream 0); each fill takes the next stream. Thread-safe. */
void xt_manual_seed(uint64_t seed);
XtPhilox xt_random_next(void);
void xt_random_get_state(uint64_t *seed, uint64_t *stream);
void xt_random_set_state(uint64_t seed, uint64_t stream);

/* ---- this build --------------------------------------------------------------------------------------------------------- */

/* The version, and a hash of every source that the extension and a backend in a library of its own are both made from. */
const char *xt_contract(void);
/* Writes <folder of this extension>/_lib/<name>; false when that is not known or does not fit. */
bool xt_library_path(const char *name, char *path, size_t room);

#ifdef __cplusplus
}
#endif
