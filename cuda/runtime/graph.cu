/* graph.cu - a step that is captured once and replayed with one launch.
 *
 * Capturing takes the device's one stream, in thread-local mode: a CUDA call of this thread that cannot be captured (an allocation from
 * the driver, a wait) is an error instead of a hole in the graph, while threads of other libraries may go on with theirs on other streams.
 * Work of our other threads would go to the same stream, and so into the graph: xt_check_capture_of() refuses it. An op in place, which
 * needs no memory, is noticed only when it is queued: it fails, and the capture with it.
 *
 * What was recorded is changed in one way: small memsets become kernels (fills).
 *
 * Nothing runs during a capture. A capture that fails leaves the stream as it was.
 *
 * A replay overwrites the blocks of its region in the order of the stream. The region lives as long as the graph, and then until the last
 * tensor in it is gone.
 */
#include "runtime/graph.cuh"

#include "common/cuda.cuh"
#include "runtime/memory.cuh"

#include <pthread.h>
#include <stdlib.h>

struct XtGraph {
    int index;
    XtRegion *region;
    cudaGraphExec_t replayable; /* NULL before the capture has ended */
};

typedef struct Capture {
    XtGraph *graph; /* atomic; NULL: none */
    pthread_t thread;
    bool spoiled; /* atomic: another thread has queued something, which is in the graph now */
} Capture;

static Capture captures[XT_MAX_DEVICES];
bool xt_any_capture;

static XtGraph *capture_of(int index) { return __atomic_load_n(&captures[index].graph, __ATOMIC_ACQUIRE); }

bool xt_capturing(void) { return __atomic_load_n(&xt_any_capture, __ATOMIC_RELAXED) && capture_of(xt_device_index()); }

XtStatus xt_refuse_captured(const char *what) {
    if (!xt_capturing()) return XT_OK;
    return xt_error(XT_RUNTIME_ERROR, "cuda.graph: a captured step must not %s", what);
}

/* Whether another thread captures on the device. */
static bool foreign(int index) { return capture_of(index) && !pthread_equal(captures[index].thread, pthread_self()); }

void xt_spoil_capture(int index) {
    if (foreign(index)) __atomic_store_n(&captures[index].spoiled, true, __ATOMIC_RELAXED);
}

XtStatus xt_check_capture_of(int index) {
    if (!foreign(index)) return XT_OK;
    return xt_error(XT_RUNTIME_ERROR, "cuda.graph: another thread is capturing a step on cuda:%d; use the device when it has ended",
                    index);
}

static void set_capture(int index, XtGraph *graph) {
    captures[index].thread = pthread_self();
    captures[index].spoiled = false;
    __atomic_store_n(&captures[index].graph, graph, __ATOMIC_RELEASE);
    bool any = false;
    for (int i = 0; i < XT_MAX_DEVICES; i++) any = any || capture_of(i);
    __atomic_store_n(&xt_any_capture, any, __ATOMIC_RELEASE);
}

/* ---- the plan ---------------------------------------------------------------------------------------------------------------- */

XtStatus xt_graph_plan(int index) {
    XT_CHECK(xt_use_device(index));
    XT_CHECK(xt_refuse_captured("plan another one"));
    xt_memory_plan(index);
    return XT_OK;
}

XtStatus xt_graph_planned(int index, size_t *nbytes) {
    XT_CHECK(xt_use_device(index));
    *nbytes = xt_memory_planned(index);
    return *nbytes ? XT_OK : xt_error(XT_OUT_OF_MEMORY, "cuda.graph: no host memory for the plan of a step's memory");
}

/* ---- fills ------------------------------------------------------------------------------------------------------------------- */

/* cuBLAS clears counters before most of its products. As a node of a graph such a memset costs the host 2 to 5 us of every launch, and a
 * kernel 0.1: so small ones become kernels. (Toolkits before 13 name the functions below otherwise: their graphs keep memsets.) */
#if CUDART_VERSION >= 13000
static const size_t SMALL_FILL = 1 << 16; /* bytes */
enum { FILL_THREADS = 256, FILL_EDGES = 8 };

/* data [count] = value */
template <typename T> __global__ void __launch_bounds__(FILL_THREADS) graph_fill_kernel(T *data, T value, int count) {
    const int i = (int)(blockIdx.x * FILL_THREADS + threadIdx.x);
    if (i < count) data[i] = value;
}

/* Puts a kernel into the place of `fill` in graph. */
template <typename T> static cudaError_t replace_fill(cudaGraph_t graph, cudaGraphNode_t fill, const cudaMemsetParams *p) {
    cudaGraphNode_t before[FILL_EDGES], after[FILL_EDGES], node;
    size_t befores = 0, afters = 0;
    cudaError_t error = cudaGraphNodeGetDependencies(fill, NULL, NULL, &befores);
    if (!error) error = cudaGraphNodeGetDependentNodes(fill, NULL, NULL, &afters);
    if (error || befores > FILL_EDGES || afters > FILL_EDGES) return error;
    error = cudaGraphNodeGetDependencies(fill, before, NULL, &befores);
    if (!error) error = cudaGraphNodeGetDependentNodes(fill, after, NULL, &afters);
    if (error) return error;
    T *data = (T *)p->dst, value = (T)p->value;
    int count = (int)p->width;
    void *arguments[] = {&data, &value, &count};
    cudaKernelNodeParams kernel = {};
    kernel.func = (void *)graph_fill_kernel<T>;
    kernel.gridDim = dim3((unsigned)xt_divide_up(count, FILL_THREADS));
    kernel.blockDim = dim3(FILL_THREADS);
    kernel.kernelParams = arguments;
    error = cudaGraphAddKernelNode(&node, graph, before, befores, &kernel);
    for (size_t i = 0; !error && i < afters; i++) error = cudaGraphAddDependencies(graph, &node, &after[i], NULL, 1);
    return error ? error : cudaGraphDestroyNode(fill);
}

static cudaError_t replace_fills(cudaGraph_t graph, size_t count) {
    if (count == 0) return cudaSuccess; /* a step that queues nothing: CUDA refuses an empty array */
    cudaGraphNode_t *nodes = (cudaGraphNode_t *)malloc(count * sizeof *nodes);
    if (!nodes) return cudaSuccess; /* memsets are slower, not wrong */
    cudaError_t error = cudaGraphGetNodes(graph, nodes, &count);
    for (size_t i = 0; !error && i < count; i++) {
        cudaGraphNodeType type;
        cudaMemsetParams p;
        error = cudaGraphNodeGetType(nodes[i], &type);
        if (error || type != cudaGraphNodeTypeMemset) continue;
        error = cudaGraphMemsetNodeGetParams(nodes[i], &p);
        if (error || p.height != 1 || p.width * p.elementSize > SMALL_FILL) continue;
        if (p.elementSize == 4) error = replace_fill<uint32_t>(graph, nodes[i], &p);
        else if (p.elementSize == 2) error = replace_fill<uint16_t>(graph, nodes[i], &p);
        else error = replace_fill<uint8_t>(graph, nodes[i], &p);
        if (error != cudaErrorLossyQuery) continue;
        cudaGetLastError(); /* an edge that is no plain one: this memset stays, and the next launch finds no error */
        error = cudaSuccess;
    }
    free(nodes);
    return error;
}
#else
static cudaError_t replace_fills(cudaGraph_t, size_t) { return cudaSuccess; }
#endif

/* ---- the capture ------------------------------------------------------------------------------------------------------------- */

static void forget(XtGraph *graph) {
    if (graph->replayable && cudaGraphExecDestroy(graph->replayable) != cudaSuccess) cudaGetLastError();
    if (graph->region) xt_memory_abandon(graph->index, graph->region);
    free(graph);
}

#define SMALL_REGION ((size_t)16 << 20)

/* The memory that the eager step has left unused goes first: the region takes its place. Beside a small region it stays: to give it back
 * waits for the stream, and what comes next maps it again, some 1 ms of a call of `generate`. */
static XtStatus reserve(int index, size_t nbytes, XtGraph *graph) {
    if (nbytes > SMALL_REGION) {
        xt_memory_empty_lists(index);
        XT_CHECK(xt_drain(index));
        XT_CHECK(xt_cuda_error("cuda.graph", xt_memory_trim(index)));
    }
    XtStatus status = xt_memory_reserve(index, nbytes, &graph->region);
    if (status != XT_OUT_OF_MEMORY) return status;
    return xt_error(status, "out of memory on cuda:%d: %.2f MiB asked for the memory of a captured step", index,
                    (double)nbytes / 1048576);
}

XtStatus xt_graph_capture(int index, size_t nbytes, XtGraph **out) {
    XT_CHECK(xt_use_device(index));
    XT_CHECK(xt_check_capture_of(index));
    XT_CHECK(xt_refuse_captured("capture another one"));
    if (xt_always_wait)
        return xt_error(XT_RUNTIME_ERROR, "cuda.graph: nothing can be captured while XTRAIN_CUDA_SYNC=1 waits after every kernel");
    XtGraph *graph = (XtGraph *)calloc(1, sizeof *graph);
    if (!graph) return xt_error(XT_OUT_OF_MEMORY, "cuda.graph: no host memory for a graph");
    graph->index = index;
    XtStatus status = reserve(index, nbytes, graph);
    if (status == XT_OK) {
        set_capture(index, graph); /* first: from here on no other thread queues anything */
        status = xt_cuda_error("cuda.graph", cudaStreamBeginCapture(xt_stream(), cudaStreamCaptureModeThreadLocal));
        if (status == XT_OK) xt_memory_serve(index, graph->region);
        else set_capture(index, NULL);
    }
    if (status != XT_OK) {
        forget(graph);
        return status;
    }
    *out = graph;
    return XT_OK;
}

XtStatus xt_graph_end(XtGraph *graph, bool keep, int64_t *calls) {
    const int index = graph->index;
    XT_CHECK(xt_use_device(index));
    if (capture_of(index) != graph) return XT_OK; /* it has ended before */
    XT_CHECK(xt_check_capture_of(index));
    cudaGraph_t recorded = NULL;
    size_t count = 0;
    cudaError_t error = cudaStreamEndCapture(xt_stream(), &recorded);
    const bool spoiled = __atomic_load_n(&captures[index].spoiled, __ATOMIC_RELAXED);
    xt_memory_serve(index, NULL);
    set_capture(index, NULL);
    if (keep && !error && !spoiled) error = cudaGraphGetNodes(recorded, NULL, &count);
    if (keep && !error && !spoiled) error = replace_fills(recorded, count);
    if (keep && !error && !spoiled) error = cudaGraphInstantiateWithFlags(&graph->replayable, recorded, 0);
    if (recorded && cudaGraphDestroy(recorded) != cudaSuccess) cudaGetLastError();
    if (error) cudaGetLastError();
    *calls = (int64_t)count;
    if (keep && !error && spoiled)
        return xt_error(XT_RUNTIME_ERROR, "cuda.graph: another thread has used cuda:%d during the capture", index);
    return keep ? xt_cuda_error("cuda.graph", error) : XT_OK;
}

/* ---- the graph --------------------------------------------------------------------------------------------------------------- */

XtStatus xt_graph_replay(XtGraph *graph) {
    XT_CHECK(xt_use_device(graph->index));
    XT_CHECK(xt_check_capture_of(graph->index));
    XT_CHECK(xt_refuse_captured("replay another one"));
    if (!graph->replayable) return xt_error(XT_RUNTIME_ERROR, "cuda.graph: this graph's capture has not succeeded");
    cudaError_t error = cudaGraphLaunch(graph->replayable, xt_stream());
    xt_count_launch();
    return error ? xt_cuda_error("cuda.graph", error) : xt_launched("graph");
}

bool xt_graph_owns(const XtGraph *graph, const void *data) { return xt_region_holds(graph->region, data); }

/* Also while the process ends and the driver is gone. A graph that is executing is freed by the driver once it has run. */
void xt_graph_drop(XtGraph *graph) {
    int64_t calls;
    if (xt_use_device(graph->index) != XT_OK) return; /* a forked child */
    xt_graph_end(graph, false, &calls);
    forget(graph);
}
