/* sm80.cuh - one function for each instruction that CUDA C++ does not name. All PTX of cuda/ is in arch/.
 *
 * The tensor cores, ldmatrix and cp.async need compute capability 8.0. Compiled for less, their functions are empty; launchers ask
 * xt_compute_capability first. The other instructions run on every GPU that the library supports.
 */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>
#include <type_traits>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define XT_PTX_80(text) text
#else
#define XT_PTX_80(text) ""
#endif

/* ---- tensor cores ----------------------------------------------------------------------------------------------------------- */

/* d += a b in float32: d [16, 8], a [16, 16], b [16, 8] of T, which is __nv_bfloat16 or __half. Lane 4 g + t has d of rows g (0, 1)
 * and g + 8 (2, 3), columns 2 t and 2 t + 1; a0 and a2 of row g, a1 and a3 of row g + 8, columns 2 t, + 1, and 8 more in a2 and a3;
 * b0 of rows 2 t, + 1, b1 of 8 rows more, column g. */
#define XT_MMA(type)                                                            \
    asm(XT_PTX_80("mma.sync.aligned.m16n8k16.row.col.f32." type "." type        \
                  ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};") \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                        \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
template <typename T>
__device__ inline void xt_mma_16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, __half>) XT_MMA("f16");
    else XT_MMA("bf16");
}
template <typename T> __device__ inline void xt_mma_16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    xt_mma_16<T>(d, a[0], a[1], a[2], a[3], b0, b1);
}
#undef XT_MMA

/* The same for a [16, 8] and b [8, 8]. */
#define XT_MMA(type)                                                                                                         \
    asm(XT_PTX_80("mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};") \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                     \
        : "r"(a0), "r"(a1), "r"(b0))
template <typename T> __device__ inline void xt_mma_8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) {
    if constexpr (std::is_same_v<T, __half>) XT_MMA("f16");
    else XT_MMA("bf16");
}
#undef XT_MMA

/* ---- shared memory ---------------------------------------------------------------------------------------------------------- */

/* The 32-bit address in shared memory that the instructions below take. */
__device__ inline uint32_t xt_shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* Four 8 x 8 matrices of 16-bit elements: lane 8 i + j has the address of row j of matrix i. m[i] gets elements 2 t and 2 t + 1
 * of row g of matrix i for lane 4 g + t; TRANSPOSED: of column g. */
template <bool TRANSPOSED> __device__ inline void xt_load_matrices(uint32_t (&m)[4], uint32_t row) {
    if constexpr (TRANSPOSED)
        asm volatile(XT_PTX_80("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];")
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile(XT_PTX_80("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];")
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                     : "r"(row)
                     : "memory");
}

/* Starts a copy of 16 bytes to shared memory. Unless `there`, it writes zeros and does not read `from`. One instruction, where
 * __pipeline_memcpy_async makes two. */
__device__ inline void xt_copy_async_at(uint32_t to, const void *from, bool there) {
    asm volatile(XT_PTX_80("cp.async.cg.shared.global [%0], [%1], 16, %2;")::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ inline void xt_copy_async(void *to, const void *from, bool there) {
    xt_copy_async_at(xt_shared_address(to), from, there);
}
/* The same for an element of 4, 8 or 16 bytes that is there. */
template <typename P> __device__ inline void xt_copy_own_async(P *to, const void *from) {
    asm volatile(XT_PTX_80("cp.async.ca.shared.global [%0], [%1], %2;")::"r"(xt_shared_address(to)), "l"(from), "n"(sizeof(P))
                 : "memory");
}
/* This thread arrives at a barrier (sm90.cuh) when all its copies until now have landed. */
__device__ inline void xt_copies_arrive(uint32_t barrier) {
    asm volatile(XT_PTX_80("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];")::"r"(barrier) : "memory");
}
/* Ends a group of this thread's copies. */
__device__ inline void xt_copy_commit() { asm volatile(XT_PTX_80("cp.async.commit_group;")::: "memory"); }
/* Waits for all but the last PENDING groups of this thread. */
template <int PENDING> __device__ inline void xt_copy_wait() {
    asm volatile(XT_PTX_80("cp.async.wait_group %0;")::"n"(PENDING) : "memory");
}

/* ---- global memory ---------------------------------------------------------------------------------------------------------- */

/* Reads 16 bytes without a place in the L1 cache. */
__device__ inline void xt_read_once(uint32_t (&word)[4], const void *p) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(p));
}
/* Reads 8 bytes where this stands: the compiler moves plain reads behind what does not need them. */
__device__ inline void xt_read_now(uint32_t (&word)[2], const void *p) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(p));
}

/* Messages between blocks: a word (of the two) is read and written as a whole. Orders no other access. */
__device__ inline unsigned long long xt_read_relaxed(const unsigned long long *from) {
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ inline void xt_write_relaxed(unsigned long long *to, unsigned long long word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ inline void xt_write_relaxed(unsigned long long *to, unsigned long long first, unsigned long long second) {
    asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}

/* ---- functions of one number ------------------------------------------------------------------------------------------------ */

/* 2^x with a relative error of 2^-22, and 1 / x within 1 ulp. Subnormal arguments and results are 0. */
__device__ inline float xt_exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float xt_reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#undef XT_PTX_80
