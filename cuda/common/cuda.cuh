/* cuda.cuh - what the CUDA kernels share: launching, scratch memory, dtypes, vectors, reductions, reports from the device.
 *
 * A file of this room holds one kernel: a comment with the formula and the plan, the __global__ functions (`..._kernel`), and the
 * slot, which only computes a grid and launches:
 *
 *     template <typename T> __global__ void silly_kernel(T *out, const T *x, int64_t n) { ... }   // out [n], x [n]
 *     XtStatus xt_cuda_silly(const XtSilly *p) {
 *         if (p->n == 0) return XT_OK;
 *         return xt_by_float(p->dtype, [&](auto zero) {
 *             using T = decltype(zero);
 *             xt_launch(silly_kernel<T>, xt_blocks(p->n, 256), 256, 0, (T *)p->out, (const T *)p->x, p->n);
 *             return xt_launched("silly", p->n);
 *         });
 *     }
 *
 * Everything runs on the one stream of the calling thread's device, in order, and nothing here waits for it: a slot returns when its
 * kernels are queued. Memory comes from a pool that follows the same stream, so a block may be given back while kernels that use it
 * are still queued. Only to_host, synchronize, stats and compare wait.
 *
 * Deterministic: sums have a fixed tree, which depends on the shape and on nothing that differs between two runs; some also depend on
 * pointers modulo 16 bytes or on what the device can run, as their files say. Float atomics are not used.
 */
#ifndef XT_CUDA_CUH
#define XT_CUDA_CUH

#include "kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

/* ---- the calling thread's device (runtime.cu) ----------------------------------------------------------------------------- */

cudaStream_t xt_stream(void);
int xt_device_index(void);
int xt_multiprocessors(void);
int xt_shared_limit(void);       /* bytes of shared memory that one block may ask for */
int xt_compute_capability(void); /* 90 for 9.0 */

/* Turns a CUDA status into an XtStatus with a message that names the slot; XT_OK for cudaSuccess. */
XtStatus xt_cuda_error(const char *slot, cudaError_t error);
/* After the launches of a slot: reports a failed launch with the slot's name and these sizes (at most 8). */
XtStatus xt_launched_sizes(const char *slot, int count, const int64_t *sizes);
template <typename... Sizes> inline XtStatus xt_launched(const char *slot, Sizes... sizes) {
    const int64_t list[] = {(int64_t)sizes..., 0};
    return xt_launched_sizes(slot, (int)sizeof...(sizes), list);
}
void xt_count_launch(void);

/* Queues kernel<<<grid, block, shared>>>(arguments) on the device's stream; arguments convert to the kernel's parameter types. */
template <typename... Parameters, typename... Arguments>
inline void xt_launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Arguments... arguments) {
    kernel<<<grid, block, shared, xt_stream()>>>((Parameters)arguments...);
    xt_count_launch();
}

/* Memory for the length of a slot, 256-byte aligned, given back in stream order when the variable goes out of scope. */
class XtScratch {
  public:
    XtScratch() = default;
    XtScratch(const XtScratch &) = delete;
    XtScratch &operator=(const XtScratch &) = delete;
    ~XtScratch();
    XtStatus allocate(size_t nbytes); /* once */
    void *data = nullptr;

  private:
    int index = 0;
    size_t nbytes = 0;
};

/* A few bytes of results for the host: queues the copy and waits. Counts as a synchronisation. */
XtStatus xt_read_back(void *host, const void *device, size_t nbytes);

/* Numbers of blocks for `items` with `per_block` each; at least 1, and no more than a grid's x takes (kernels stride over the rest). */
inline unsigned xt_blocks(int64_t items, int64_t per_block) {
    int64_t blocks = (items + per_block - 1) / per_block;
    return (unsigned)(blocks < 1 ? 1 : blocks > 0x7fffffff ? 0x7fffffff : blocks);
}
inline int64_t xt_divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- what only the data can show ------------------------------------------------------------------------------------------ */

/* An index out of range is written here by the kernel that meets it, and raised at the next synchronisation; the kernel then treats
 * the element as absent (zeros). */
typedef enum XtIndexSlot { XT_INDEX_EMBEDDING = 1, XT_INDEX_CROSS_ENTROPY = 2, XT_INDEX_LINEAR_CROSS_ENTROPY = 3 } XtIndexSlot;
typedef struct XtIndexReport {
    unsigned taken; /* 0: none yet, 1: being written, 2: there */
    int slot;       /* XtIndexSlot */
    long long position, value, limit;
} XtIndexReport;
XtIndexReport *xt_index_report(void); /* of this device: host memory that the device writes; hand it to the kernel */

__device__ inline void xt_report_index(XtIndexReport *report, XtIndexSlot slot, int64_t position, int64_t value, int64_t limit) {
    if (atomicCAS(&report->taken, 0u, 1u) != 0u) return;
    report->slot = slot;
    report->position = position;
    report->value = value;
    report->limit = limit;
    __threadfence_system(); /* the host may be looking while this kernel runs */
    *(volatile unsigned *)&report->taken = 2;
}

/* ---- dtypes ---------------------------------------------------------------------------------------------------------------- */

typedef __nv_bfloat16 XtBf16;
typedef __half XtF16;

/* The dtype in which T is computed and summed (ACC in kernels.h). */
template <typename T> struct XtAccumulator {
    typedef float type;
};
template <> struct XtAccumulator<double> {
    typedef double type;
};
template <typename T> using XtAcc = typename XtAccumulator<T>::type;

/* A stored element as ACC, and back with rounding to nearest even. */
__host__ __device__ inline float xt_load(float x) { return x; }
__host__ __device__ inline double xt_load(double x) { return x; }
__host__ __device__ inline float xt_load(XtBf16 x) { return __bfloat162float(x); }
__host__ __device__ inline float xt_load(XtF16 x) { return __half2float(x); }
template <typename T> __host__ __device__ inline T xt_store(XtAcc<T> x);
template <> __host__ __device__ inline float xt_store<float>(float x) { return x; }
template <> __host__ __device__ inline double xt_store<double>(double x) { return x; }
template <> __host__ __device__ inline XtBf16 xt_store<XtBf16>(float x) { return __float2bfloat16_rn(x); }
template <> __host__ __device__ inline XtF16 xt_store<XtF16>(float x) { return __float2half_rn(x); }

/* Calls f(T()) for the C++ type of a float dtype. Ops have already refused the others. */
template <typename F> inline XtStatus xt_by_float(XtDtype dtype, F f) {
    switch (dtype) {
    case XT_FLOAT32: return f(float());
    case XT_FLOAT64: return f(double());
    case XT_BFLOAT16: return f(XtBf16());
    default: return f(XtF16());
    }
}

/* N elements side by side. */
template <typename T, int N> struct alignas(sizeof(T) * N) XtVector {
    T at[N];
};
/* The most elements of T that one access of 16 bytes takes. */
template <typename T> constexpr int XT_WIDTH = 16 / (int)sizeof(T);

/* Whether rows of `cols` elements, `ld` apart, can be read 16 bytes at a time from each of these pointers. */
template <typename T> inline bool xt_aligned(int64_t cols, int64_t ld) { return cols % XT_WIDTH<T> == 0 && ld % XT_WIDTH<T> == 0; }
template <typename T, typename... Pointers> inline bool xt_aligned(int64_t cols, int64_t ld, const void *first, Pointers... rest) {
    return (uintptr_t)first % 16 == 0 && xt_aligned<T>(cols, ld, rest...);
}

/* ---- pieces: elements that are read or written at once ---------------------------------------------------------------------- */

/* N elements as they lie in memory, in whole registers. An XtVector is for computing: assembled in registers and assigned to memory,
 * it may be stored element by element, and one that was loaded may take a register for every 16-bit element (nvcc 13.0). */
template <typename T, int N> struct XtPiece {
    static constexpr int BYTES = (int)sizeof(T) * N;
    uint32_t word[(BYTES + 3) / 4];
};

/* One access of 1, 2, 4, 8 or 16 bytes; p is aligned to that. */
template <typename T, int N> __device__ inline XtPiece<T, N> xt_read(const T *p) {
    constexpr int BYTES = XtPiece<T, N>::BYTES;
    XtPiece<T, N> piece;
    if constexpr (BYTES == 16) {
        uint4 q = *(const uint4 *)p;
        piece.word[0] = q.x, piece.word[1] = q.y, piece.word[2] = q.z, piece.word[3] = q.w;
    } else if constexpr (BYTES == 8) {
        uint2 q = *(const uint2 *)p;
        piece.word[0] = q.x, piece.word[1] = q.y;
    } else if constexpr (BYTES == 4) piece.word[0] = *(const uint32_t *)p;
    else if constexpr (BYTES == 2) piece.word[0] = *(const uint16_t *)p;
    else piece.word[0] = *(const uint8_t *)p;
    return piece;
}
/* __stwb is a plain store that the compiler leaves whole. */
template <typename T, int N> __device__ inline void xt_write(T *p, const XtPiece<T, N> &piece) {
    constexpr int BYTES = XtPiece<T, N>::BYTES;
    if constexpr (BYTES == 16) __stwb((uint4 *)p, make_uint4(piece.word[0], piece.word[1], piece.word[2], piece.word[3]));
    else if constexpr (BYTES == 8) __stwb((uint2 *)p, make_uint2(piece.word[0], piece.word[1]));
    else if constexpr (BYTES == 4) *(uint32_t *)p = piece.word[0];
    else if constexpr (BYTES == 2) *(uint16_t *)p = (uint16_t)piece.word[0];
    else *(uint8_t *)p = (uint8_t)piece.word[0];
}

/* Two neighbours in one word, the first in its low half: an instruction each to widen, one to round both. */
__device__ inline float2 xt_load_two(uint32_t bits, XtBf16) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ inline float2 xt_load_two(uint32_t bits, XtF16) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof pair);
    return __half22float2(pair);
}
__device__ inline __nv_bfloat162 xt_store_two(float low, float high, XtBf16) { return __floats2bfloat162_rn(low, high); }
__device__ inline __half2 xt_store_two(float low, float high, XtF16) { return __floats2half2_rn(low, high); }

/* The elements of a piece, and a piece of these elements; any type. */
template <typename T, int N> __device__ inline XtVector<T, N> xt_elements(const XtPiece<T, N> &piece) {
    XtVector<T, N> v;
    memcpy(&v, piece.word, sizeof(T) * N);
    return v;
}
template <typename T, int N> __device__ inline XtPiece<T, N> xt_piece(const XtVector<T, N> &v) {
    XtPiece<T, N> piece;
    if constexpr (sizeof(T) * N < sizeof(uint32_t)) piece.word[0] = 0;
    memcpy(piece.word, &v, sizeof(T) * N);
    return piece;
}
/* The same of a float dtype as ACC, and back with rounding to nearest even. */
template <typename T, int N> __device__ inline XtVector<XtAcc<T>, N> xt_load(const XtPiece<T, N> &piece) {
    XtVector<XtAcc<T>, N> to;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            float2 pair = xt_load_two(piece.word[j], T());
            to.at[2 * j] = pair.x;
            to.at[2 * j + 1] = pair.y;
        }
    } else {
        XtVector<T, N> from = xt_elements(piece);
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = xt_load(from.at[j]);
    }
    return to;
}
template <typename T, int N> __device__ inline XtPiece<T, N> xt_store(const XtVector<XtAcc<T>, N> &from) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        XtPiece<T, N> to;
#pragma unroll
        for (int j = 0; j < N / 2; j++) {
            auto pair = xt_store_two(from.at[2 * j], from.at[2 * j + 1], T());
            memcpy(&to.word[j], &pair, sizeof pair);
        }
        return to;
    } else {
        XtVector<T, N> to;
#pragma unroll
        for (int j = 0; j < N; j++) to.at[j] = xt_store<T>(from.at[j]);
        return xt_piece(to);
    }
}
/* N times the same. */
template <typename T, int N> __device__ inline XtPiece<T, N> xt_all(T value) {
    XtVector<T, N> v;
#pragma unroll
    for (int j = 0; j < N; j++) v.at[j] = value;
    return xt_piece(v);
}

/* ---- reductions with a fixed tree ------------------------------------------------------------------------------------------- */

struct XtSum {
    template <typename A> __device__ A operator()(A a, A b) const { return a + b; }
};
struct XtMax {
    template <typename A> __device__ A operator()(A a, A b) const { return a > b ? a : b; }
};

/* All 32 lanes get the result. */
template <typename A, typename Combine> __device__ inline A xt_warp_reduce(A value, Combine combine) {
    for (int step = 16; step > 0; step /= 2) value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}
template <typename A> __device__ inline A xt_warp_sum(A value) { return xt_warp_reduce(value, XtSum()); }
template <typename A> __device__ inline A xt_warp_max(A value) { return xt_warp_reduce(value, XtMax()); }

/* All threads of a block of whole warps (at most 1024 threads, 1-D) get the result; ends with the block in step, so that it may be
 * called again at once. */
template <typename A, typename Combine> __device__ inline A xt_block_reduce(A value, A neutral, Combine combine) {
    __shared__ A of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    value = xt_warp_reduce(value, combine);
    if (warps == 1) return value;
    __syncthreads();
    if (lane == 0) of_warp[warp] = value;
    __syncthreads();
    return xt_warp_reduce(lane < warps ? of_warp[lane] : neutral, combine);
}
template <typename A> __device__ inline A xt_block_sum(A value) { return xt_block_reduce(value, A(0), XtSum()); }

/* ---- slots ------------------------------------------------------------------------------------------------------------------- */

#define XT_X(slot, Params) XtStatus xt_cuda_##slot(const Params *p);
XT_KERNELS(XT_X)
#undef XT_X

#endif
