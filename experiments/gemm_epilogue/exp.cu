// Variants of the product, by number; nothing else than a launch.
#include <cstdio>
#define XT_BARRIER_LIMIT 1000000 // a wait that does not end stops the kernel
#define printf(...) return // no trap: with one, ptxas spills
#include <type_traits>
#include "gemm/hopper.cuh"

template <typename T, typename P, HopperKind KIND>
static int go(void *c, void *h, const void *a, const void *b, const void *d, long M, long N, long K, int group, cudaStream_t stream) {
    // N: columns of the tile space: F for SWIGLU and its backward
    bool bf = std::is_same_v<T, XtBf16>;
    constexpr bool BY_ROWS = KIND == HOPPER_SWIGLU_BWD || KIND == HOPPER_ROWS, HALVES = KIND == HOPPER_SWIGLU, TWO = HALVES || KIND == HOPPER_SWIGLU_BWD;
    HopperMaps maps;
    long sa[3] = {M * K, M * K, K};
    int e = xt_tensor_map(&maps.a, bf, a, 1, 1, M, K, sa, P::ROWS);
    if (e) return 1000 + e;
    if (BY_ROWS) { long s[3] = {K * N, K * N, N}; e = xt_tensor_map(&maps.b, bf, b, 1, 1, K, N, s, P::CLUSTER > 1 ? 32 : 64); }
    else if (HALVES) { long s[3] = {2 * N * K, N * K, K}; e = xt_tensor_map(&maps.b, bf, b, 1, 2, N, K, s, P::COLUMNS / 2); }
    else { long s[3] = {N * K, N * K, K}; e = xt_tensor_map(&maps.b, bf, b, 1, 1, N, K, s, P::COLUMNS / 2); }
    if (e) return 2000 + e;
    if (TWO) { long s[3] = {2 * M * N, N, 2 * N}; e = xt_tensor_map(&maps.c, bf, c, 1, 2, M, N, s, 64, 32); }
    else { long s[3] = {M * N, M * N, N}; e = xt_tensor_map(&maps.c, bf, c, 1, 1, M, N, s, 64, 32); }
    if (e) return 3000 + e;
    maps.d = maps.c;
    if (h || d) { long s[3] = {M * N, M * N, N}; e = xt_tensor_map(&maps.d, bf, h ? h : d, 1, 1, M, N, s, 64, 32); }
    if (e) return 4000 + e;
    int cols = HALVES ? P::COLUMNS / 2 : P::COLUMNS, rows = P::ROWS * P::CLUSTER;
    HopperCall call;
    call.down = (M + rows - 1) / rows, call.across = (N + cols - 1) / cols, call.tiles = call.down * call.across;
    call.group = group, call.steps = (K + 63) / 64;
    auto kernel = gemm_hopper_kernel<T, P, KIND>;
    static bool allowed = false;
    if (!allowed) { e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::BYTES); if (e) return 5000 + e; allowed = true; }
    int sms = 132, clusters = sms / P::CLUSTER;
    if (clusters > call.tiles) clusters = call.tiles;
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeClusterDimension;
    attr.val.clusterDim.x = P::CLUSTER, attr.val.clusterDim.y = 1, attr.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = clusters * P::CLUSTER, config.blockDim = P::THREADS, config.dynamicSmemBytes = P::BYTES, config.stream = stream;
    config.attrs = &attr, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, maps, call);
}

using P192x2 = HopperTiles<128, 192, true, 4, 2, 8>;
using P192x1 = HopperTiles<128, 192, true, 4, 1, 8>;
using P128x2 = HopperTiles<128, 128, true, 5, 2, 8>;
using C256x2 = HopperTiles<64, 256, false, 4, 2, 4>;
using C256x1 = HopperTiles<64, 256, false, 4, 1, 4>;
using P192x2g = HopperTiles<128, 192, true, 4, 2, 6>;
using P256x2 = HopperTiles<64, 256, true, 4, 2, 8>;

template <typename T, typename P>
static int by_kind(int kind, void *c, void *h, const void *a, const void *b, const void *d, long M, long N, long K, int group, cudaStream_t stream) {
    switch (kind) {
    case HOPPER_PLAIN: return go<T, P, HOPPER_PLAIN>(c, h, a, b, d, M, N, K, group, stream);
    case HOPPER_SWIGLU: if constexpr (P::PIECES >= 3) return go<T, P, HOPPER_SWIGLU>(c, h, a, b, d, M, N, K, group, stream); break;
    case HOPPER_SWIGLU_BWD: return go<T, P, HOPPER_SWIGLU_BWD>(c, h, a, b, d, M, N, K, group, stream);
#ifdef MORE
    case HOPPER_ADD: return go<T, P, HOPPER_ADD>(c, h, a, b, d, M, N, K, group, stream);
    case HOPPER_ROWS: return go<T, P, HOPPER_ROWS>(c, h, a, b, d, M, N, K, group, stream);
#endif
    }
    return -1;
}
#ifndef ONLY
#define ONLY P192x2
#define NAME P192x2
#endif
extern "C" __attribute__((visibility("default"))) int product(int half, int kind, void *c, void *h, const void *a, const void *b, const void *d, long M, long N, long K, int group, void *stream) {
#ifdef HALF
    if (half) return by_kind<XtF16, ONLY>(kind, c, h, a, b, d, M, N, K, group, (cudaStream_t)stream);
#endif
    if (half) return -2;
    return by_kind<XtBf16, ONLY>(kind, c, h, a, b, d, M, N, K, group, (cudaStream_t)stream);
}
extern "C" __attribute__((visibility("default"))) int columns() { return ONLY::COLUMNS; }

// SwiGLU's own kernels, on the stream that the caller names.
#ifdef MORE
static cudaStream_t our_stream;
cudaStream_t xt_stream(void) { return our_stream; }
int xt_compute_capability(void) { return 90; }
void xt_count_launch(void) {}
XtStatus xt_launched_sizes(const char *, int, const int64_t *) { return cudaGetLastError() == cudaSuccess ? XT_OK : XT_CUDA_ERROR; }
XtStatus xt_error(XtStatus status, const char *, ...) { return status; }
const char *xt_dtype_name(XtDtype) { return ""; }
#include "layers/swiglu.cu"
extern "C" __attribute__((visibility("default"))) int swiglu(int half, int bwd, void *out, const void *gate_up, const void *dy, long M, long F, void *stream) {
    our_stream = (cudaStream_t)stream;
    XtDtype t = half ? XT_FLOAT16 : XT_BFLOAT16;
    if (!bwd) { XtSwigluFwd p = {out, gate_up, (const char *)gate_up + 2 * F, t, M, F, 2 * F}; return xt_cuda_swiglu_fwd(&p); }
    XtSwigluBwd p = {out, (char *)out + 2 * F, dy, gate_up, (const char *)gate_up + 2 * F, t, M, F, 2 * F};
    return xt_cuda_swiglu_bwd(&p);
}
#endif
