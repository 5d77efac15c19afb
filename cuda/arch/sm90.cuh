/* sm90.cuh - Hopper's own instructions, one function each: barriers in shared memory, the tensor copy engine, products of a
 * warpgroup, registers of a role. The host's part makes the tensor maps that the copy engine reads.
 *
 * They need machine code for compute capability 9.0 by its own instruction set (90a). A kernel that calls them has its body inside
 * #ifdef XT_SM90A, and XT_NO_SM90A() in the other branch. Launchers ask xt_built_for_sm90a() and the device first.
 */
#ifndef XT_ARCH_SM90_CUH
#define XT_ARCH_SM90_CUH

#include "arch/sm80.cuh"

#include <cuda.h>
#include <cuda_runtime.h>

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define XT_SM90A
#endif
#define XT_NO_SM90A() __trap() /* an empty kernel would give wrong results in silence */

/* Whether the library holds machine code for 90a: XT_CUDA_ARCHS lists what it was built for. */
inline bool xt_built_for_sm90a(void) {
#ifdef XT_CUDA_ARCHS
    const char *list = XT_CUDA_ARCHS;
    for (; *list; list++)
        if (list[0] == '9' && list[1] == '0' && list[2] == 'a') return true;
    return false;
#else
    return true;
#endif
}

/* ---- tensor maps (host) ------------------------------------------------------------------------------------------------------ */

/* Describes x [batch, heads, rows, dim] of 16-bit elements to the copy engine; strides (b, head, row) in elements, the last dim dense.
 * A copy moves a panel: `box_columns` elements, 64 or 32, of each of `box_rows` rows. In shared memory, a row of a panel is 128 or 64
 * bytes, and its pieces of 16 bytes are permuted: piece i of row r lies at place i ^ (r % 8), or i ^ (r / 2 % 4) in the narrow panel.
 * Rows and elements out of range are read as zeros and not written. The function of the driver comes from the runtime, so that nothing
 * links with libcuda. Never fails where x has rows of 16 bytes aligned: strides of dims of size 1 are replaced, as no address needs
 * them. */
inline cudaError_t xt_tensor_map(CUtensorMap *map, bool bfloat16, const void *x, int64_t batch, int64_t heads, int64_t rows,
                                 int64_t dim, const int64_t stride[3], int box_rows, int box_columns = 64) {
    typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                               const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode encode = NULL;
    if (!encode) {
        void *found = NULL;
        cudaDriverEntryPointQueryResult answer;
#if CUDART_VERSION >= 12050
        cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &answer);
#else
        cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &answer);
#endif
        if (error != cudaSuccess) return error;
        if (answer != cudaDriverEntryPointSuccess || !found) return cudaErrorSymbolNotFound;
        encode = (Encode)found;
    }
    const cuuint64_t shape[4] = {(cuuint64_t)dim, (cuuint64_t)rows, (cuuint64_t)heads, (cuuint64_t)batch};
    cuuint64_t bytes[3] = {2 * (cuuint64_t)stride[2], 2 * (cuuint64_t)stride[1], 2 * (cuuint64_t)stride[0]};
    for (int i = 0; i < 3; i++)
        if (shape[i + 1] == 1) bytes[i] = i == 0 ? 2 * (cuuint64_t)dim : bytes[i - 1];
    const cuuint32_t box[4] = {(cuuint32_t)box_columns, (cuuint32_t)box_rows, 1, 1}, step[4] = {1, 1, 1, 1};
    CUresult result =
        encode(map, bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, (void *)x, shape, bytes, box,
               step, CU_TENSOR_MAP_INTERLEAVE_NONE, box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/* ---- barriers in shared memory ------------------------------------------------------------------------------------------------ */

/* Orders this thread's writes to shared memory before what the tensor cores and the copy engine read of it later. */
__device__ inline void xt_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* A barrier has phases. A phase ends when `arrivals` threads have arrived and the bytes announced in it have landed; the next begins.
 * xt_barrier_wait returns once the phase of this parity has ended: parity 0 for the first, third, ... phase. On a fresh barrier a wait
 * for parity 1 returns at once. */
__device__ inline void xt_barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/* After the inits, before __syncthreads: the copy engine sees the barriers. */
__device__ inline void xt_barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    xt_async_fence();
}
__device__ inline void xt_barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/* Arrives and announces bytes that the copy engine will write. */
__device__ inline void xt_barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline bool xt_barrier_try(uint32_t barrier, int parity) {
    int done;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.s32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}
__device__ inline void xt_barrier_wait(uint32_t barrier, int parity) {
#ifdef XT_BARRIER_LIMIT /* for the search of a deadlock: a wait that does not end stops the kernel */
    for (int tries = 0; !xt_barrier_try(barrier, parity); tries++)
        if (tries == XT_BARRIER_LIMIT) {
            printf("block %d thread %d: barrier %u parity %d\n", (int)blockIdx.x, (int)threadIdx.x, barrier, parity);
            __trap();
        }
#else
    while (!xt_barrier_try(barrier, parity)) {}
#endif
}

/* Barriers 1 to 15 of a block, among `threads` threads that call sync or arrive; arrive does not wait. */
__device__ inline void xt_named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ inline void xt_named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- clusters ------------------------------------------------------------------------------------------------------------------ */

/* The place of this block in its cluster. */
__device__ inline unsigned xt_cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* Waits for all threads of all blocks of the cluster. */
__device__ inline void xt_cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
/* Where block `rank` of the cluster has what lies at `address` here. */
__device__ inline uint32_t xt_shared_of(uint32_t address, unsigned rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
/* The same for a pointer, which then serves as any other. */
template <typename T> __device__ inline T *xt_shared_of(T *here, unsigned rank) {
    T *there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(rank));
    return there;
}
/* Writes a float there; its 4 bytes arrive at a barrier of the same block. Orders nothing else. */
__device__ inline void xt_put_shared_of(uint32_t to, float value, uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(__float_as_uint(value)),
                 "r"(barrier)
                 : "memory");
}

/* ---- copy engine --------------------------------------------------------------------------------------------------------------- */

__device__ inline void xt_prefetch_map(const CUtensorMap *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }
/* Starts the copy of a panel at (column, row, head, batch) to shared memory; its bytes arrive at the barrier. */
__device__ inline void xt_panel_load(uint32_t to, const CUtensorMap *map, int column, int row, int head, int batch,
                                     uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
            "r"(to),
        "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier)
        : "memory");
}
/* Starts the copy of a panel from shared memory to (column, row, head, batch), as one of this thread's stores. */
__device__ inline void xt_panel_store(const CUtensorMap *map, uint32_t from, int column, int row, int head, int batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(column),
                 "r"(row), "r"(head), "r"(batch), "r"(from)
                 : "memory");
}
/* Starts the copy of `bytes` (of 16), both addresses aligned to 16. */
__device__ inline void xt_bulk_load(uint32_t to, const void *from, int bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
/* Two floats rounded to T, the low one in the low half of the word. */
template <typename T> __device__ inline uint32_t xt_round_pair(float low, float high) {
    uint32_t word;
    if constexpr (std::is_same_v<T, __half>) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
/* A word of shared memory, for another role to read behind a barrier. */
__device__ inline void xt_put_shared(uint32_t to, int word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}
__device__ inline void xt_put_shared(uint32_t to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
__device__ inline void xt_put_words(uint32_t to, uint4 words) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}
__device__ inline uint4 xt_get_words(uint32_t from) {
    uint4 words;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(from)
                 : "memory");
    return words;
}
/* Writes 16 bytes of global memory at once. nvcc 13.0 made four stores of an assignment to uint4 of what xt_get_words had read. */
__device__ inline void xt_put_words(void *to, uint4 words) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
}
/* Four 8 x 8 matrices of 16-bit elements, the inverse of xt_load_matrices. */
__device__ inline void xt_put_matrices(uint32_t row, const uint32_t (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(m[0]), "r"(m[1]), "r"(m[2]),
                 "r"(m[3])
                 : "memory");
}
/* A word of global memory, read in the branch where it stands: the compiler does not make it a predicated load elsewhere. */
__device__ inline int xt_read_here(const int32_t *from) {
    int word;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}
/* Two floats of shared memory. */
__device__ inline float2 xt_read_shared(uint32_t from) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
    return pair;
}
/* a + b as the copy engine adds: subnormal terms and sums are zeros. */
__device__ inline float xt_add_flushed(float a, float b) {
    float sum;
    asm("add.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
/* Starts the copy of `bytes` (of 16) from shared memory to global memory; add: adds float32 values to those there. */
__device__ inline void xt_bulk_store(float *to, uint32_t from, int bytes, bool add) {
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                     : "memory");
    else asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
/* Waits until this thread's stores have landed, not only read shared memory. */
__device__ inline void xt_store_land() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/* Orders this thread's accesses to memory by ordinary instructions and by the copy engine, in both directions. */
__device__ inline void xt_async_fence_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
/* A number in global memory that blocks hand on: what a block wrote before it put the number is seen by who has waited for it. */
__device__ inline unsigned xt_read_released(const unsigned *from) {
    unsigned number;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(number) : "l"(from) : "memory");
    return number;
}
__device__ inline void xt_wait_released(const unsigned *from, unsigned wanted) {
    for (int tries = 0;; tries++) {
        const unsigned number = xt_read_released(from);
        if (number == wanted) return;
#ifdef XT_BARRIER_LIMIT
        if (tries == XT_BARRIER_LIMIT) {
            printf("block %d thread %d: number %u, wanted %u\n", (int)blockIdx.x, (int)threadIdx.x, number, wanted);
            __trap();
        }
#endif
    }
}
__device__ inline void xt_put_released(unsigned *to, unsigned number) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}
/* Adds to it; what others added before, and wrote before they did, is seen, too. */
__device__ inline void xt_add_released(unsigned *to, unsigned number) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}
/* Ends a group of this thread's stores; waits until all groups have read shared memory. */
__device__ inline void xt_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/* PENDING: all but the last so many. */
template <int PENDING = 0> __device__ inline void xt_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* ---- registers of a role ------------------------------------------------------------------------------------------------------- */

/* Called by all four warps of a warpgroup. */
template <int COUNT> __device__ inline void xt_registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT> __device__ inline void xt_registers_less() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- products of a warpgroup ----------------------------------------------------------------------------------------------------- */

/* Describes panels of 16-bit elements in shared memory, as the copy engine writes them, to the tensor cores. The address of the first
 * panel is a multiple of 1024 bytes; add offsets in units of 16 bytes. `pitch`: bytes from one panel to the next, for an operand whose
 * rows are the summed index (then 64 columns lie in a panel); other operands ignore it. */
__device__ inline uint64_t xt_panel_operand(uint32_t address, int pitch) {
    constexpr uint64_t SWIZZLE_128 = (uint64_t)1 << 62, EIGHT_ROWS = (uint64_t)(1024 >> 4) << 32;
    return SWIZZLE_128 | EIGHT_ROWS | (uint64_t)(pitch >> 4) << 16 | (address & 0x3ffff) >> 4;
}

/* Before the first product of a group: registers written so far, and shared memory, are ready for it. */
__device__ inline void xt_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/* Ends a group of products. */
__device__ inline void xt_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/* Waits for all but the last PENDING groups, and keeps what reads `d` behind the wait. */
template <int PENDING> __device__ inline void xt_wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING, int SIZE> __device__ inline void xt_wgmma_wait(float (&d)[SIZE]) {
    xt_wgmma_wait<PENDING>();
#pragma unroll
    for (int i = 0; i < SIZE; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* d = a b, or d += a b, in float32: d [64, N], a [64, 16], b [16, N] of T, which is __nv_bfloat16 or __half. Thread 32 w + 4 g + t of
 * the warpgroup has of d rows 16 w + g (elements 4 n, 4 n + 1) and 8 more (4 n + 2, + 3), columns 8 n + 2 t, + 1. a: a descriptor of
 * rows of a, with b one of rows of b^T; or registers, a0 and a2 of row 16 w + g, a1 and a3 of 8 more, columns 2 t, + 1, and 8 more in
 * a2 and a3, with b a descriptor of rows of b itself. Runs beside other instructions: d and a stay untouched until the wait. */
#define XT_R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define XT_R1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define XT_R2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define XT_R3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define XT_R4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define XT_R5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define XT_R6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define XT_R7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define XT_R8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define XT_R9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define XT_R10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define XT_R11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define XT_R12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define XT_R13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define XT_R14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define XT_R15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define XT_R_32 XT_R0 "," XT_R1
#define XT_R_64 XT_R_32 "," XT_R2 "," XT_R3
#define XT_R_80 XT_R_64 "," XT_R4
#define XT_R_96 XT_R_80 "," XT_R5
#define XT_R_128 XT_R_96 "," XT_R6 "," XT_R7
#define XT_R_192 XT_R_128 "," XT_R8 "," XT_R9 "," XT_R10 "," XT_R11
#define XT_R_256 XT_R_192 "," XT_R12 "," XT_R13 "," XT_R14 "," XT_R15
#define XT_D(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define XT_D_32 XT_D(0), XT_D(8)
#define XT_D_64 XT_D_32, XT_D(16), XT_D(24)
#define XT_D_80 XT_D_64, XT_D(32)
#define XT_D_96 XT_D_80, XT_D(40)
#define XT_D_128 XT_D_96, XT_D(48), XT_D(56)
#define XT_D_192 XT_D_128, XT_D(64), XT_D(72), XT_D(80), XT_D(88)
#define XT_D_256 XT_D_192, XT_D(96), XT_D(104), XT_D(112), XT_D(120)
#define XT_WGMMA(n, type, left, right, flag, turn, ...)                                                                \
    asm volatile("{.reg .pred p;\n"                                                                                    \
                 "setp.ne.b32 p, " flag ", 0;\n"                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" XT_R_##n "}, " left ", " right   \
                                                                                               ", p, 1, 1, " turn ";}" \
                 : XT_D_##n                                                                                            \
                 : __VA_ARGS__, "l"(b), "r"((int)add))
#define XT_WGMMA_TYPES(n, left, right, flag, turn, ...)                                                    \
    {                                                                                                      \
        if constexpr (std::is_same_v<T, __half>) XT_WGMMA(n, "f16", left, right, flag, turn, __VA_ARGS__); \
        else XT_WGMMA(n, "bf16", left, right, flag, turn, __VA_ARGS__);                                    \
    }
#define XT_WGMMA_S(n, left, right, flag) XT_WGMMA_TYPES(n, left, right, flag, "0, 0", "l"(a))
#define XT_WGMMA_R(n, left, right, flag) XT_WGMMA_TYPES(n, left, right, flag, "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))

template <typename T, int N> __device__ inline void xt_wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 32 || N == 64 || N == 80 || N == 96 || N == 128 || N == 192 || N == 256, "one of the sizes below");
    if constexpr (N == 32) XT_WGMMA_S(32, "%16", "%17", "%18");
    if constexpr (N == 64) XT_WGMMA_S(64, "%32", "%33", "%34");
    if constexpr (N == 80) XT_WGMMA_S(80, "%40", "%41", "%42");
    if constexpr (N == 192) XT_WGMMA_S(192, "%96", "%97", "%98");
    if constexpr (N == 256) XT_WGMMA_S(256, "%128", "%129", "%130");
    if constexpr (N == 96) XT_WGMMA_S(96, "%48", "%49", "%50");
    if constexpr (N == 128) XT_WGMMA_S(128, "%64", "%65", "%66");
}
template <typename T, int N> __device__ inline void xt_wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool add) {
    static_assert(N == 64 || N == 80 || N == 96 || N == 128 || N == 192 || N == 256, "one of the sizes below");
    if constexpr (N == 64) XT_WGMMA_R(64, "{%32,%33,%34,%35}", "%36", "%37");
    if constexpr (N == 80) XT_WGMMA_R(80, "{%40,%41,%42,%43}", "%44", "%45");
    if constexpr (N == 192) XT_WGMMA_R(192, "{%96,%97,%98,%99}", "%100", "%101");
    if constexpr (N == 256) XT_WGMMA_R(256, "{%128,%129,%130,%131}", "%132", "%133");
    if constexpr (N == 96) XT_WGMMA_R(96, "{%48,%49,%50,%51}", "%52", "%53");
    if constexpr (N == 128) XT_WGMMA_R(128, "{%64,%65,%66,%67}", "%68", "%69");
}
/* d = a b with a given by its rows and b by its own rows, both in shared memory. */
template <typename T, int N> __device__ inline void xt_wgmma_rows(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 192, "the only size so far");
    XT_WGMMA_TYPES(192, "%96", "%97", "%98", "0, 1", "l"(a));
}
/* d = a b with a given by rows of a^T and b by its own rows, both in shared memory. */
template <typename T, int N> __device__ inline void xt_wgmma_turned(float (&d)[N / 2], uint64_t a, uint64_t b, bool add) {
    static_assert(N == 64, "the only size so far");
    if constexpr (std::is_same_v<T, __half>) XT_WGMMA(64, "f16", "%32", "%33", "%34", "1, 1", "l"(a));
    else XT_WGMMA(64, "bf16", "%32", "%33", "%34", "1, 1", "l"(a));
}
#undef XT_WGMMA_R
#undef XT_WGMMA_S
#undef XT_WGMMA_TYPES
#undef XT_WGMMA

#endif
