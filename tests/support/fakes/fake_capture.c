/* fake_capture.c - a CUDA runtime that counts what must not be called during a capture, and a program that captures with cuda/runtime on it.
 * Compiled by tests/cuda/test_cuda_library.py where nvcc is; prints a line for every thing tried.
 */
#include "contract/backend.h"
#include "kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INVALIDATED = 901, OUT_OF_MEMORY = 2 };

static int live, illegal, capturing, mode, end_error, launched, executables, graphs, refuse_memory;
static char message[1024];

/* Called by the library in a capture: a real runtime would refuse it, or make it a node of the graph. */
static void must_not(const char *name) {
    if (capturing) printf("%s in a capture\n", name), illegal++;
}
static int make(void **out) { return *out = malloc(16), 0; }

int cudaGetDeviceCount(int *count) { return *count = 1, 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { return (void)attribute, (void)device, *value = 9, 0; }
int cudaStreamCreateWithFlags(void **out, unsigned flags) { return (void)flags, make(out); }
int cudaMemGetInfo(size_t *left, size_t *total) { return *left = *total = (size_t)1 << 34, 0; }
int cudaMemPoolCreate(void **out, const void *props) { return (void)props, make(out); }
int cudaMemPoolSetAttribute(void *pool, int attribute, void *value) { return (void)pool, (void)attribute, (void)value, 0; }
int cudaEventCreateWithFlags(void **out, unsigned flags) { return (void)flags, make(out); }
int cudaHostAlloc(void **out, size_t nbytes, unsigned flags) { return (void)flags, *out = malloc(nbytes), 0; }
static int last_error;
int cudaGetLastError(void) {
    const int error = last_error;
    return last_error = 0, error;
}
int cudaPeekAtLastError(void) { return last_error; }
int cudaSetDevice(int device) { return (void)device, 0; }
int cudaStreamSynchronize(void *stream) { return (void)stream, must_not("synchronize"), 0; }
int cudaMemPoolTrimTo(void *pool, size_t nbytes) { return (void)pool, (void)nbytes, must_not("trim"), 0; }
int cudaMallocFromPoolAsync(void **out, size_t nbytes, void *pool, void *stream) {
    (void)pool, (void)stream;
    must_not("allocation");
    if (refuse_memory) return OUT_OF_MEMORY;
    live++;
    *out = aligned_alloc(512, (nbytes + 511) / 512 * 512);
    return 0;
}
int cudaFreeAsync(void *data, void *stream) { return (void)stream, must_not("release"), live--, free(data), 0; }
const char *cudaGetErrorString(int error) { return error == OUT_OF_MEMORY ? "out of memory" : "capture invalidated"; }
const char *cudaGetErrorName(int error) { return error == OUT_OF_MEMORY ? "OutOfMemory" : "StreamCaptureInvalidated"; }
int cudaStreamBeginCapture(void *stream, int as) { return (void)stream, mode = as, capturing = 1, 0; }
int cudaStreamEndCapture(void *stream, void **graph) {
    return (void)stream, capturing = 0, graphs += !end_error, *graph = end_error ? NULL : message, end_error;
}

/* A graph is a chain of NODES nodes; node n is the pointer to chain[n]. Those with bytes are memsets. */
enum { MEMSET = 2, LOSSY = 402, NODES = 8 };
typedef struct Fill {
    unsigned value, size; /* of an element, in bytes */
    size_t count, rows;
} Fill;
static const Fill chain[NODES] = {{0, 0, 0, 0},     {0, 1, 4, 1},        {0xff, 1, 100, 1}, {0x1234, 2, 7, 1},
                                  {7, 4, 16384, 1}, {0xff, 1, 65537, 1}, {0, 1, 8, 2},      {0, 1, 16, 1}};
static const int not_plain = 7; /* the edge before it */
static int filling, nodes_there = NODES;

int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
    (void)graph;
    if (nodes && *count == 0) return 1; /* a real runtime takes no empty array */
    for (int i = 0; nodes && i < nodes_there; i++) nodes[i] = (void *)&chain[i];
    return *count = (size_t)nodes_there, 0;
}
int cudaGraphNodeGetType(const Fill *node, int *type) { return *type = node->size ? MEMSET : 0, 0; }
int cudaGraphMemsetNodeGetParams(const Fill *node, void *out) {
    const struct {
        void *data;
        size_t pitch;
        unsigned value, size;
        size_t width, height;
    } params = {message, 0, node->value, node->size, node->count, node->rows};
    return filling = (int)(node - chain), memcpy(out, &params, sizeof params), 0;
}
static int neighbour(const Fill *node, int by, const void **out, size_t *count) {
    const int place = (int)(node - chain) + by;
    if (out && node - chain == not_plain && by < 0) return last_error = LOSSY;
    if (out) out[0] = &chain[place];
    return *count = place >= 0 && place < NODES, 0;
}
int cudaGraphNodeGetDependencies(const Fill *node, const void **out, void *edges, size_t *count) {
    return (void)edges, neighbour(node, -1, out, count);
}
int cudaGraphNodeGetDependentNodes(const Fill *node, const void **out, void *edges, size_t *count) {
    return (void)edges, neighbour(node, 1, out, count);
}
int cudaGraphAddKernelNode(void **out, void *graph, const Fill **before, size_t count, const void *params) {
    struct {
        void *kernel;
        unsigned grid[3], block[3], shared;
        void **arguments;
    } launch;
    unsigned value = 0;
    (void)graph;
    memcpy(&launch, params, sizeof launch);
    memcpy(&value, launch.arguments[1], chain[filling].size);
    printf("a kernel behind node %d: %u threads, %d elements of %u, data %d\n", count ? (int)(*before - chain) : -1,
           launch.grid[0] * launch.block[0], *(int *)launch.arguments[2], value, *(void **)launch.arguments[0] == message);
    return *out = &launched, 0;
}
int cudaGraphAddDependencies(void *graph, void **from, const Fill **to, void *edges, size_t count) {
    (void)graph, (void)edges;
    return printf("and before node %d: %d\n", (int)(*to - chain), from[0] == &launched && count == 1), 0;
}
int cudaGraphDestroyNode(const Fill *node) { return printf("node %d goes\n", (int)(node - chain)), 0; }
int cudaGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) {
    return (void)graph, (void)flags, executables++, make(out);
}
int cudaGraphDestroy(void *graph) { return (void)graph, graphs--, 0; }
int cudaGraphExecDestroy(void *graph) { return executables--, free(graph), 0; }
int cudaGraphLaunch(void *graph, void *stream) { return (void)graph, (void)stream, must_not("launch of a graph"), launched++, 0; }
void **__cudaRegisterFatBinary(void *binary) { return (void)binary, (void **)message; }
void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
void __cudaUnregisterFatBinary(void **binary) { (void)binary; }
void __cudaRegisterFunction(void **binary) { (void)binary; } /* it has more arguments */
const char *xt_contract(void) { return "a test"; }

XtStatus xt_open_cuda(const XtHost *host, const XtBackend **out);
static XtStatus keep(XtStatus status, const char *text) { return snprintf(message, sizeof message, "%s", text), status; }

static const XtBackend *table;
static const XtAccelerator *device;

static void *block(size_t nbytes) {
    void *data = NULL;
    XtStatus status = table->allocate(0, nbytes, &data);
    if (status != XT_OK) printf("allocate: %d, %s\n", status, message);
    return data;
}
static void tell(const char *what, XtStatus status) {
    printf("%s: %d%s%s\n", what, status, status ? ", " : "", status ? message : "");
}

static void *elsewhere(void *unused) {
    void *data = NULL;
    tell("another thread", table->allocate(0, 8, &data));
    return unused;
}

/* The same blocks in the same order each time: 20 MiB at most, of which 12 at the end. */
static void step(void **kept) {
    void *a = block(12 << 20), *b = block(100);
    kept[0] = block(8 << 20);
    table->release(0, a, 12 << 20);
    kept[1] = block(4 << 20);
    table->release(0, b, 100);
}
static void drop(void **kept) {
    table->release(0, kept[0], 8 << 20);
    table->release(0, kept[1], 4 << 20);
}

int main(void) {
    static const char *const folders[] = {NULL};
    XtHost host = {.error = keep, .folders = folders};
    XtGraph *graph = NULL, *other = NULL;
    void *eager[2], *captured[2], *small, *large;
    pthread_t thread;
    size_t nbytes = 0;
    int64_t calls = 0;
    if (xt_open_cuda(&host, &table) != XT_OK) return 1;
    device = table->accelerator;
    device->use(0);

    tell("no plan", device->planned(0, &nbytes));
    small = block(3000), large = block(9 << 20); /* from before the plan */
    device->plan(0);
    step(eager);
    table->release(0, small, 3000);
    small = block(3000);
    table->release(0, small, 3000);
    tell("planned", device->planned(0, &nbytes));
    printf("%zu units\n", nbytes / 512);
    drop(eager);

    small = block(3000);
    tell("capture", device->capture(0, nbytes, &graph));
    printf("mode %d, %d blocks of the driver\n", mode, live);
    step(captured);
    printf("owned: %d %d, not: %d %d\n", device->owns(graph, captured[0]), device->owns(graph, captured[1]),
           device->owns(graph, small), device->owns(graph, large));
    table->release(0, small, 3000);
    table->release(0, large, 9 << 20);
    void *inside = block(3000);
    printf("handed out again: %d\n", inside == small);
    table->release(0, inside, 3000);
    block((size_t)21 << 20);
    tell("wait", table->synchronize(0));
    tell("to the host", table->to_host(0, message, captured[0], 8));
    tell("from the host", table->from_host(0, captured[0], message, 8));
    tell("trim", device->trim(0));
    tell("another capture", device->capture(0, nbytes, &other));
    tell("a plan", device->plan(0));
    tell("a replay", device->replay(graph));
    pthread_create(&thread, NULL, elsewhere, NULL);
    pthread_join(thread, NULL);
    tell("end", device->end_capture(graph, true, &calls));
    printf("%d calls, %d illegal, %d blocks of the driver\n", (int)calls, illegal, live);
    void *again = block(3000);
    printf("handed out again: %d\n", again == small);
    table->release(0, again, 3000);

    tell("replay", device->replay(graph));
    printf("%d launched\n", launched);
    table->release(0, captured[1], 4 << 20); /* comes back to the region, which goes with its last block */
    device->drop(graph);
    printf("dropped: %d graphs, %d executables, %d blocks of the driver\n", graphs, executables, live);
    table->release(0, captured[0], 8 << 20);
    printf("its last block: %d blocks of the driver\n", live);

    end_error = INVALIDATED;
    tell("capture", device->capture(0, nbytes, &graph));
    tell("end", device->end_capture(graph, true, &calls));
    tell("replay", device->replay(graph));
    device->drop(graph);
    end_error = 0;
    refuse_memory = 1;
    tell("capture", device->capture(0, nbytes, &graph));
    refuse_memory = 0;
    tell("capture", device->capture(0, nbytes, &graph));
    device->drop(graph); /* while it is under way */
    printf("%d capturing, %d graphs, %d executables, %d blocks of the driver\n", capturing, graphs, executables, live);

    small = block(3000);
    table->release(0, small, 3000); /* unused, and kept */
    tell("capture", device->capture(0, 1 << 20, &graph));
    printf("beside a small region: %d blocks of the driver\n", live);
    nodes_there = 0;
    tell("end of nothing", device->end_capture(graph, true, &calls));
    tell("replay", device->replay(graph));
    device->drop(graph);
    return 0;
}
