/* fake_device.c - a libxtrain_cuda.so whose device is the host's memory and whose kernels are the CPU's, with graphs: a capture keeps the
 * calls with copies of their parameters, a replay makes them again. Linked by fake_library.py with the CPU's objects.
 *
 * It is stricter than a GPU where that finds mistakes: blocks that are released outside a capture are filled with NaN, and so is the region
 * of a graph before each replay, which must not read what it has not written.
 *
 * Token ids and targets out of range are as on a GPU: the kernel goes on without them, and the next wait raises what was reported first.
 * Documents that break their rule are refused at once, unlike there.
 *
 * FAKE_EPILOGUES: products have an implementation with epilogues.
 * FAKE_DEVICE_COUNT: how many devices; 0 makes it a machine without one. FAKE_DEVICE_UUID, FAKE_DEVICE_NAME: which GPU it is.
 * FAKE_DEVICE_BUSY: how often it is asked in vain whether it is idle; then it says so. FAKE_DEVICE_MOST: bytes above which an allocation fails. FAKE_DEVICE_BROKEN: the end of a capture fails. XTRAIN_CUDA_SYNC as in cuda/.
 */
#include "contract/attention.h"
#include "contract/backend.h"
#include "contract/conv.h"
#include "contract/elementwise.h"
#include "contract/gemm.h"
#include "contract/layers.h"
#include "contract/mhc.h"
#include "contract/optimizer.h"
#include "contract/reduce.h"
#include "core/arena.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef XtStatus (*Call)(const void *p);
typedef struct Recorded {
    const char *slot;
    Call call;
    void *parameters, *list; /* list: the host array that they point to */
} Recorded;
typedef struct Late {
    void *data;
    size_t nbytes;
} Late;
struct XtGraph {
    struct XtGraph *next;
    char *region; /* [nbytes] */
    size_t nbytes;
    XtArena arena;
    Recorded *calls;
    int64_t count, room;
    bool ended, dropped, spoiled;
    bool forked, unjoined; /* whether the stream beside is a part of it; with work that the stream has not waited for */
};

static XtHost host;
static XtGraph *capturing, *graphs;
static pthread_t capturer;
static XtDeviceCounters counts;
static bool planning;
static XtMemoryPlan plan;
static Late *late;
static int64_t late_count;

/* The CPU's kernels report through these in place of the core's functions. */
static _Thread_local char message[1024];
const char *xt_error_message(void) { return message; }
XtStatus xt_error(XtStatus status, const char *format, ...) {
    char text[sizeof message];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(message, text, sizeof message);
    return host.error(status, text);
}

static XtStatus refuse(const char *what) {
    return capturing ? xt_error(XT_RUNTIME_ERROR, "cuda.graph: a captured step must not %s", what) : XT_OK;
}

static char reported[sizeof message]; /* what the next wait raises; empty: nothing */
static XtStatus look_at_report(void) {
    char text[sizeof reported];
    if (!reported[0]) return XT_OK;
    memcpy(text, reported, sizeof text);
    reported[0] = 0;
    return xt_error(XT_INDEX_ERROR, "%s", text);
}

static XtStatus use(int index) {
    if (!capturing || pthread_equal(capturer, pthread_self())) return XT_OK;
    return xt_error(XT_RUNTIME_ERROR, "cuda.graph: another thread is capturing a step on cuda:%d; use the device when it has ended",
                    index);
}

/* ---- memory ------------------------------------------------------------------------------------------------------------------ */

static XtStatus allocate(int index, size_t nbytes, void **out) {
    const char *most = getenv("FAKE_DEVICE_MOST");
    size_t offset;
    XT_CHECK(use(index));
    counts.allocations++;
    if (capturing) {
        if (!xt_arena_take(&capturing->arena, nbytes, &offset))
            return xt_error(XT_RUNTIME_ERROR,
                            "cuda.graph: the captured step must not need more memory than its planned run, which "
                            "had %.2f MiB at once; %.2f MiB more were asked",
                            (double)capturing->nbytes / 1048576, (double)nbytes / 1048576);
        *out = capturing->region + offset;
        return XT_OK;
    }
    if (most && nbytes > (size_t)atoll(most)) return XT_OUT_OF_MEMORY;
    *out = aligned_alloc(XT_ARENA_UNIT, xt_arena_round(nbytes));
    if (!*out) return XT_OUT_OF_MEMORY;
    counts.pool_used += (int64_t)nbytes;
    memset(*out, 0xff, nbytes);
    if (planning) xt_plan_took(&plan, *out, nbytes);
    return XT_OK;
}

static void put_back(void *data, size_t nbytes) {
    counts.pool_used -= (int64_t)nbytes;
    memset(data, 0xff, nbytes);
    free(data);
}

static void free_graph(XtGraph *graph) {
    XtGraph **at = &graphs;
    while (*at != graph) at = &(*at)->next;
    *at = graph->next;
    put_back(graph->region, graph->nbytes);
    for (int64_t i = 0; i < graph->count; i++) {
        free(graph->calls[i].parameters);
        free(graph->calls[i].list);
    }
    free(graph->calls);
    free(graph->arena.holes);
    free(graph);
}

static bool owns(const XtGraph *graph, const void *data) { return (uintptr_t)data - (uintptr_t)graph->region < graph->nbytes; }

static void release(int index, void *data, size_t nbytes) {
    XtGraph *graph = graphs;
    (void)index;
    while (graph && !owns(graph, data)) graph = graph->next;
    if (graph) {
        xt_arena_give(&graph->arena, (size_t)((char *)data - graph->region), nbytes);
        if (graph->dropped && graph->arena.blocks == 0) free_graph(graph);
    } else if (capturing) {
        late = realloc(late, (size_t)(late_count + 1) * sizeof *late);
        late[late_count++] = (Late){data, nbytes};
    } else {
        if (planning) xt_plan_gave(&plan, data, nbytes);
        put_back(data, nbytes);
    }
}

/* ---- what it tells fake_cupti.c, once the process has opened it ------------------------------------------------------------------ */

static uint64_t (*profiler_now)(void); /* 0 while nothing is recorded */
static void (*profiler_ran)(const char *name, uint64_t start, int device, size_t nbytes);
static uint64_t begins(void) {
    void *library = profiler_ran ? NULL : dlopen("libcupti.so.99", RTLD_NOW | RTLD_NOLOAD);
    if (library) {
        *(void **)&profiler_now = dlsym(library, "fake_cupti_now");
        *(void **)&profiler_ran = dlsym(library, "fake_cupti_ran");
    }
    return profiler_ran ? profiler_now() : 0;
}
static void ends(const char *name, uint64_t start, int device, size_t nbytes) {
    if (start) profiler_ran(name, start, device, nbytes);
}
static XtStatus run_call(const char *slot, Call call, const void *parameters) {
    const uint64_t start = begins();
    XtStatus status = call(parameters);
    ends(slot, start, 0, 0);
    return status;
}

static XtStatus to_host(int index, void *to, const void *from, size_t nbytes) {
    XT_CHECK(refuse("read values, which waits for the device (item, tolist, numpy, stats, repr, to the CPU)"));
    counts.to_host++;
    const uint64_t start = begins();
    memcpy(to, from, nbytes);
    ends("to host", start, index, nbytes);
    return look_at_report();
}
static XtStatus from_host(int index, void *to, const void *from, size_t nbytes) {
    XT_CHECK(refuse("copy from the host: pass tensors that change as arguments, and make the others before"));
    counts.from_host++;
    const uint64_t start = begins();
    memcpy(to, from, nbytes);
    ends("to device", start, index, nbytes);
    return XT_OK;
}
static XtStatus synchronize(int index) {
    (void)index;
    XT_CHECK(refuse("wait for the device"));
    counts.synchronizations++;
    return look_at_report();
}
/* The stream and the one beside it: kernels are done at once, exchanges of fake_nccl.c later. Those beside count for the stream once it
 * has joined them. */
typedef struct Stream {
    int pending; /* exchanges that are queued and not done */
    int (*record)(void (*call)(void *), void *argument);
} Stream;
static Stream under_way, beside;
static bool joined;
static void *stream(int index) { return (void)index, &under_way; }
static bool done(const Stream *stream) { return __atomic_load_n(&stream->pending, __ATOMIC_ACQUIRE) == 0; }
static XtStatus idle(int index, bool *out) {
    const char *busy = getenv("FAKE_DEVICE_BUSY");
    static int asked;
    (void)index;
    *out = done(&under_way) && (!joined || done(&beside));
    if (busy && ++asked % (atoi(busy) + 1)) *out = false;
    else if (busy) fprintf(stderr, "idle\n");
    return refuse("ask whether the device is done");
}
static XtStatus side(int index, void **out) {
    (void)index;
    if (capturing) capturing->forked = capturing->unjoined = true;
    else joined = false;
    *out = &beside;
    return XT_OK;
}
static XtStatus keep_call(const char *slot, Call call, const void *parameters, size_t nbytes, const void *list, size_t list_nbytes,
                          size_t where);
static XtStatus do_join(const void *p) {
    (void)p;
    while (!done(&beside)) usleep(100);
    return XT_OK;
}
static XtStatus join(int index) {
    (void)index;
    if (!capturing) joined = true;
    else if (!capturing->forked) return xt_error(XT_CUDA_ERROR, "waiting for what is beside the kernels: it is of no capture");
    else {
        capturing->unjoined = false;
        return keep_call("join", do_join, "", 1, NULL, 0, 0);
    }
    return XT_OK;
}
static XtStatus trim(int index) { return (void)index, refuse("give memory back"); }
static void reset_peak(int index) { (void)index; }

/* ---- graphs ------------------------------------------------------------------------------------------------------------------ */

static XtStatus start_plan(int index) {
    (void)index;
    XT_CHECK(refuse("plan another one"));
    if (planning) xt_plan_end(&plan);
    xt_plan_begin(&plan);
    planning = true;
    return XT_OK;
}
static XtStatus planned(int index, size_t *nbytes) {
    (void)index;
    *nbytes = planning ? xt_plan_end(&plan) : 0;
    planning = false;
    return *nbytes ? XT_OK : xt_error(XT_OUT_OF_MEMORY, "cuda.graph: no host memory for the plan of a step's memory");
}

/* An exchange in a capture: a replay waits for it, as the kernels behind it would; for one beside them at the next join. */
typedef struct Foreign {
    void (*call)(void *);
    void *argument;
} Foreign;
static XtStatus do_foreign(const void *p) {
    const Foreign *foreign = p;
    foreign->call(foreign->argument);
    while (!done(&under_way)) usleep(100);
    return XT_OK;
}
static int record(void (*call)(void *), void *argument) {
    const Foreign foreign = {call, argument};
    return keep_call("exchange", do_foreign, &foreign, sizeof foreign, NULL, 0, 0) != XT_OK;
}

static XtStatus capture(int index, size_t nbytes, XtGraph **out) {
    void *region;
    XT_CHECK(refuse("capture another one"));
    if (allocate(index, nbytes, &region) != XT_OK)
        return xt_error(XT_OUT_OF_MEMORY, "out of memory on cuda:%d: %.2f MiB asked for the memory of a captured step", index,
                        (double)nbytes / 1048576);
    XtGraph *graph = calloc(1, sizeof *graph);
    *graph = (XtGraph){.next = graphs, .region = region, .nbytes = nbytes, .arena.limit = nbytes};
    *out = capturing = graphs = graph;
    under_way.record = beside.record = record;
    capturer = pthread_self();
    return XT_OK;
}

static XtStatus end_capture(XtGraph *graph, bool keep, int64_t *calls) {
    if (capturing != graph) return XT_OK;
    capturing = NULL;
    under_way.record = beside.record = NULL;
    for (int64_t i = 0; i < late_count; i++) put_back(late[i].data, late[i].nbytes);
    late_count = 0;
    *calls = graph->count;
    if (keep && graph->spoiled)
        return xt_error(XT_RUNTIME_ERROR, "cuda.graph: another thread has used cuda:%d during the capture", 0);
    if (keep && graph->unjoined) return xt_error(XT_CUDA_ERROR, "cuda.graph: what is beside the kernels was not joined");
    if (keep && getenv("FAKE_DEVICE_BROKEN")) return xt_error(XT_CUDA_ERROR, "cuda.graph: the capture is broken");
    graph->ended = keep;
    return XT_OK;
}

static XtStatus replay(XtGraph *graph) {
    XT_CHECK(refuse("replay another one"));
    if (!graph->ended) return xt_error(XT_RUNTIME_ERROR, "cuda.graph: this graph's capture has not succeeded");
    memset(graph->region, 0xff, graph->nbytes);
    counts.launches++;
    for (int64_t i = 0; i < graph->count; i++)
        XT_CHECK(run_call(graph->calls[i].slot, graph->calls[i].call, graph->calls[i].parameters));
    return XT_OK;
}

static void drop(XtGraph *graph) {
    int64_t calls;
    end_capture(graph, false, &calls);
    graph->dropped = true;
    if (graph->arena.blocks == 0) free_graph(graph);
}

/* Runs a call, or keeps it with a copy of its parameters; `list`, if any, is copied, and *where in them points to it. */
static XtStatus keep_call(const char *slot, Call call, const void *parameters, size_t nbytes, const void *list, size_t list_nbytes,
                          size_t where) {
    XtGraph *graph = capturing;
    if (graph->count == graph->room) {
        graph->room = 2 * graph->room + 64;
        graph->calls = realloc(graph->calls, (size_t)graph->room * sizeof *graph->calls);
    }
    Recorded kept = {slot, call, malloc(nbytes), list ? malloc(list_nbytes + 1) : NULL};
    memcpy(kept.parameters, parameters, nbytes);
    if (list) {
        memcpy(kept.list, list, list_nbytes);
        memcpy((char *)kept.parameters + where, &kept.list, sizeof kept.list);
    }
    graph->calls[graph->count++] = kept;
    return XT_OK;
}

static XtStatus pass(const char *slot, Call call, const void *parameters, size_t nbytes) {
    if (!strcmp(slot, "random"))
        XT_CHECK(refuse("draw random numbers, which each replay would repeat: draw them before, and pass them as arguments"));
    if (!strcmp(slot, "dropout") && !((const XtDropout *)parameters)->random)
        XT_CHECK(refuse("draw random numbers of the host, which each replay would repeat"));
    if (!strcmp(slot, "stats") || !strcmp(slot, "compare"))
        XT_CHECK(refuse("read values, which waits for the device (item, tolist, numpy, stats, repr, to the CPU)"));
    if (use(0) != XT_OK) {
        capturing->spoiled = true;
        return use(0);
    }
    if (!capturing) {
        counts.launches++;
        XT_CHECK(run_call(slot, call, parameters));
        return !strcmp(slot, "stats") || !strcmp(slot, "compare") ? look_at_report() : XT_OK;
    }
#define LISTED(name, Params, list, length)                                                                                \
    if (!strcmp(slot, #name)) {                                                                                           \
        const Params *p = parameters;                                                                                     \
        return keep_call(slot, call, p, sizeof *p, p->list, (size_t)p->length * sizeof *p->list, offsetof(Params, list)); \
    }
    if (!strcmp(slot, "adamw")) {
        for (const XtAdamW *p = parameters; p; p = p->next) {
            XtAdamW alone = *p;
            alone.next = NULL;
            XT_CHECK(keep_call(slot, call, &alone, sizeof alone, p->items, (size_t)p->count * sizeof *p->items,
                               offsetof(XtAdamW, items)));
        }
        return XT_OK;
    }
    LISTED(grad_norm, XtGradNorm, items, count)
    LISTED(clip, XtClip, items, count)
    LISTED(tree_sum, XtTreeSum, items, count * p->tensors)
    LISTED(decoder_step, XtDecoderStep, layer, layers)
    LISTED(muon_direction, XtMuon, items, count)
    LISTED(muon_update, XtMuon, items, count)
    LISTED(ema, XtEma, items, count)
    LISTED(foreach_copy, XtCopies, items, count)
    LISTED(checksums, XtChecksums, items, count)
#undef LISTED
    return keep_call(slot, call, parameters, nbytes, NULL, 0, 0);
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------------ */

/* [rows]: `rest` in place of ids outside [0, vocab), which are reported; those that are `rest` are right. */
static int64_t *known_ids(const int64_t *ids, int64_t rows, int64_t vocab, int64_t rest) {
    int64_t *known = malloc((size_t)rows * sizeof *known + 1);
    for (int64_t r = 0; r < rows; r++) known[r] = ids[r] >= 0 && ids[r] < vocab ? ids[r] : rest;
    if (!reported[0]) memcpy(reported, message, sizeof reported); /* of the kernel that has refused them */
    return known;
}

/* Calls a kernel of the CPU; one that refuses an id is called again without it. */
static XtStatus tolerant_embedding_fwd(const XtEmbeddingFwd *p) {
    XtStatus status = xt_cpu_backend.embedding_fwd(p);
    if (status != XT_INDEX_ERROR) return status;
    XtEmbeddingFwd again = *p;
    const size_t nbytes = (size_t)p->cols * xt_dtype_size(p->dtype);
    int64_t *ids = known_ids(p->ids, p->rows, p->vocab, 0);
    again.ids = ids;
    status = xt_cpu_backend.embedding_fwd(&again);
    for (int64_t r = 0; r < p->rows; r++)
        if (ids[r] != p->ids[r]) memset((char *)p->out + (size_t)r * nbytes, 0, nbytes);
    free(ids);
    return status;
}
static XtStatus tolerant_embedding_bwd(const XtEmbeddingBwd *p) {
    XtStatus status = xt_cpu_backend.embedding_bwd(p);
    if (status != XT_INDEX_ERROR) return status;
    XtEmbeddingBwd again = *p;
    const size_t nbytes = (size_t)p->cols * xt_dtype_size(p->dtype);
    int64_t *ids = known_ids(p->ids, p->rows, p->vocab, -1);
    char *dy = malloc((size_t)p->rows * nbytes + 1); /* of the rows that are left */
    again.ids = ids, again.dy = dy, again.rows = 0;
    for (int64_t r = 0; r < p->rows; r++) {
        if (ids[r] < 0) continue;
        memcpy(dy + (size_t)again.rows * nbytes, (const char *)p->dy + (size_t)r * nbytes, nbytes);
        ids[again.rows++] = ids[r];
    }
    status = xt_cpu_backend.embedding_bwd(&again);
    free(ids), free(dy);
    return status;
}
#define TOLERANT(slot, Params)                                                        \
    static XtStatus tolerant_##slot(const Params *p) {                                \
        XtStatus status = xt_cpu_backend.slot(p);                                     \
        if (status != XT_INDEX_ERROR) return status;                                  \
        Params again = *p;                                                            \
        int64_t *targets = known_ids(p->targets, p->rows, p->vocab, p->ignore_index); \
        again.targets = targets;                                                      \
        status = xt_cpu_backend.slot(&again);                                         \
        free(targets);                                                                \
        return status;                                                                \
    }
TOLERANT(cross_entropy_fwd, XtCrossEntropyFwd)
TOLERANT(cross_entropy_bwd, XtCrossEntropyBwd)

static XtBackend kernels; /* the CPU's, but for those above */
static void set_kernels(void) {
    kernels = xt_cpu_backend;
    kernels.embedding_fwd = tolerant_embedding_fwd;
    kernels.embedding_bwd = tolerant_embedding_bwd;
    kernels.cross_entropy_fwd = tolerant_cross_entropy_fwd;
    kernels.cross_entropy_bwd = tolerant_cross_entropy_bwd;
}

#define XT_X(slot, Params)                                               \
    static XtStatus do_##slot(const void *p) { return kernels.slot(p); } \
    static XtStatus fake_##slot(const Params *p) { return pass(#slot, do_##slot, p, sizeof *p); }
XT_KERNELS(XT_X)
#undef XT_X

static const XtGemmBackend *row(const char *name) {
    const XtGemmBackend *found = xt_cpu_backend.gemm;
    while (strcmp(found->name, name)) found++;
    return found;
}
static const XtAttentionBackend *reference(void) {
    const XtAttentionBackend *found = xt_cpu_backend.attention;
    while (strcmp(found->name, "reference")) found++;
    return found;
}
static XtStatus do_gemm(const void *p) { return row("tiled")->run(p); }
static XtStatus fake_gemm(const XtGemm *p) { return pass("gemm", do_gemm, p, sizeof *p); }
static const char *supports_gemm(const XtGemm *p, const XtDeviceTraits *traits) { return row("tiled")->supports(p, traits); }
static XtStatus do_forward(const void *p) { return reference()->forward(p); }
static XtStatus do_backward(const void *p) { return reference()->backward(p); }
static XtStatus fake_forward(const XtAttentionFwd *p) { return pass("forward", do_forward, p, sizeof *p); }
static XtStatus fake_backward(const XtAttentionBwd *p) { return pass("backward", do_backward, p, sizeof *p); }

/* With FAKE_EPILOGUES, products with an epilogue: in two steps, and one call. */
static const char *supports_epilogue(const XtGemm *p, const XtDeviceTraits *traits) {
    (void)traits;
    return p->epilogue && getenv("FAKE_EPILOGUES") ? NULL : "it has no epilogue";
}
/* Of bfloat16; one of the sums of a group has them all. */
static void sum_rows(const XtGemm *p) {
    const int64_t groups = (p->m + XT_GEMM_SUMMED - 1) / XT_GEMM_SUMMED;
    float *sums = p->extra;
    memset(sums, 0, (size_t)(groups * XT_GEMM_SUMS * p->n) * sizeof *sums);
    for (int64_t i = 0; i < p->m * p->n; i++) {
        uint32_t word = (uint32_t)((const uint16_t *)p->c)[i / p->n * p->ldc + i % p->n] << 16;
        float value;
        memcpy(&value, &word, sizeof value);
        sums[i / p->n / XT_GEMM_SUMMED * XT_GEMM_SUMS * p->n + i % p->n] += value;
    }
}
static XtStatus do_epilogue(const void *parameters) {
    const XtGemm *p = parameters;
    XtGemm product = *p;
    product.epilogue = XT_GEMM_PRODUCT;
    size_t size = xt_dtype_size(p->dtype_c);
    char *c = p->c;
    if (p->epilogue == XT_GEMM_SWIGLU) {
        XtSwigluFwd s = {p->extra, c, c + p->n / 2 * (int64_t)size, p->dtype_c, p->m, p->n / 2, p->ldc};
        XtStatus status = row("tiled")->run(&product);
        return status == XT_OK ? xt_cpu_backend.swiglu_fwd(&s) : status;
    }
    if (p->epilogue == XT_GEMM_GELU) {
        XtBiasGeluFwd s = {p->extra, c, p->bias, p->dtype_c, p->m, p->n, true};
        product.bias = NULL;
        XtStatus status = row("tiled")->run(&product);
        return status == XT_OK ? xt_cpu_backend.bias_gelu_fwd(&s) : status;
    }
    product.c = malloc((size_t)(p->m * p->n) * size + 1), product.ldc = p->n;
    product.bias = NULL;
    char *up = c + p->n * (int64_t)size;
    XtSwigluBwd s = {c, up, product.c, c, up, p->dtype_c, p->m, p->n, p->ldc};
    XtBiasGeluBwd g = {c, product.c, c, p->bias, p->dtype_c, p->m, p->n, true};
    XtStatus status = row("tiled")->run(&product);
    if (status == XT_OK)
        status = p->epilogue == XT_GEMM_GELU_BWD ? xt_cpu_backend.bias_gelu_bwd(&g) : xt_cpu_backend.swiglu_bwd(&s);
    free(product.c);
    if (status == XT_OK && p->epilogue == XT_GEMM_GELU_BWD && p->extra) sum_rows(p);
    return status;
}
static XtStatus fake_epilogue(const XtGemm *p) { return pass("gemm", do_epilogue, p, sizeof *p); }

static const XtGemmBackend gemm[] = {
    {"epilogue", "epilogue", NULL, supports_epilogue, fake_epilogue}, {"tiled", "tiled", NULL, supports_gemm, fake_gemm}, {0}};
static const XtAttentionBackend attention[] = {{"reference", "reference", NULL, fake_forward, NULL, fake_backward}, {0}};

/* ---- the table ---------------------------------------------------------------------------------------------------------------- */

static bool no_library(void) { return false; }
static const XtDeviceTraits *traits(int index) {
    static const XtDeviceTraits t = {.capability = 90, .has_cublaslt = no_library, .has_cublas = no_library};
    return (void)index, &t;
}
static XtStatus info(int index, XtDeviceInfo *out) {
    const char *uuid = getenv("FAKE_DEVICE_UUID"), *name = getenv("FAKE_DEVICE_NAME");
    *out = (XtDeviceInfo){.major = 9, .runtime = 99000, .memory_total = (int64_t)1 << 40, .memory_free = (int64_t)1 << 40};
    snprintf(out->name, sizeof out->name, "%s", name ? name : "fake");
    snprintf(out->uuid, sizeof out->uuid, "%s-%d", uuid ? uuid : "GPU-fake", index);
    return XT_OK;
}
static XtStatus counters(int index, XtDeviceCounters *out) {
    (void)index;
    *out = counts;
    return XT_OK;
}

static XtAccelerator accelerator = {.device_count = 1,
                                    .use = use,
                                    .info = info,
                                    .traits = traits,
                                    .counters = counters,
                                    .trim = trim,
                                    .reset_peak = reset_peak,
                                    .stream = stream,
                                    .idle = idle,
                                    .side = side,
                                    .join = join,
                                    .plan = start_plan,
                                    .planned = planned,
                                    .capture = capture,
                                    .end_capture = end_capture,
                                    .replay = replay,
                                    .owns = owns,
                                    .drop = drop};
static const XtBackend table = {.name = "cuda",
                                .allocate = allocate,
                                .release = release,
                                .to_host = to_host,
                                .from_host = from_host,
                                .synchronize = synchronize,
#define XT_X(slot, Params) .slot = fake_##slot,
                                XT_KERNELS(XT_X)
#undef XT_X
                                    .gemm = gemm,
                                .attention = attention,
                                .accelerator = &accelerator};

#define EXPORTED __attribute__((visibility("default")))
EXPORTED const char *xt_cuda_contract(void) { return FAKE_CONTRACT; }
EXPORTED XtStatus xt_open_cuda(const XtHost *asked, const XtBackend **out) {
    const char *sync = getenv("XTRAIN_CUDA_SYNC");
    host = *asked;
    set_kernels();
    const char *count = getenv("FAKE_DEVICE_COUNT");
    accelerator.device_count = count ? atoi(count) : 1;
    if (accelerator.device_count == 0) return xt_error(XT_RUNTIME_ERROR, "CUDA is not available: no NVIDIA GPU is visible");
    accelerator.waits = sync && strcmp(sync, "0") != 0;
    *out = &table;
    return XT_OK;
}
