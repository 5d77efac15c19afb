/* copy.cu - dst[i] = (dst dtype) src[i], any pair of dtypes, any strides (src's may be 0).
 *
 * The first plan that fits:
 *   - one dtype, both dense: the driver's copy.
 *   - one dtype, dst dense along its last dimension and src along another: tiles in shared memory, so that global memory is read
 *     and written in whole lines. 16-bit elements move in pairs, as blocks of 2 x 2, where sizes and strides are even.
 *   - one dtype otherwise: strided.cuh on bits. Where possible, neighbours move together as one larger element.
 *   - two dtypes: strided.cuh's vectors with a kernel per pair. Where vectors do not fit, one kernel serves all pairs, with one
 *     element a thread.
 *
 * Bytes moved: dst and src once. No element depends on another.
 */
#include "common/strided.cuh"
#include "contract/elementwise.h"

/* ---- transposes --------------------------------------------------------------------------------------------------------- */

enum { TILE_THREADS = 256, LEAST_TILED = 16 };

/* dst[r * dst_row + c] = src[c * src_row + r] for r < rows, c < cols, at each outer position. Strides in elements. */
struct Tiles {
    char *dst;
    const char *src;
    int64_t rows, cols, dst_row, src_row;
    int64_t tiles_down, tiles_across; /* of rows, of cols */
    int ndim;                         /* of the outer dimensions */
    int64_t shape[XT_MAX_DIMS], dst_stride[XT_MAX_DIMS], src_stride[XT_MAX_DIMS];
};

/* The corner (*r, *c) of this block's tile, and its matrices. */
template <typename T>
static __device__ __forceinline__ void find_tile(const Tiles &t, int tile, int64_t *r, int64_t *c, T **dst, const T **src) {
    int64_t at = blockIdx.x, to = 0, from = 0;
    *c = at % t.tiles_across * tile;
    at /= t.tiles_across;
    *r = at % t.tiles_down * tile;
    at /= t.tiles_down;
#pragma unroll 1
    for (int d = t.ndim - 1; d >= 0; d--) {
        int64_t outer = at / t.shape[d], here = at - outer * t.shape[d];
        to += here * t.dst_stride[d];
        from += here * t.src_stride[d];
        at = outer;
    }
    *dst = (T *)t.dst + to;
    *src = (const T *)t.src + from;
}

/* The padding puts a column of the tile into 32 different banks, because rows are an odd number of words apart. (Of 8-byte
 * elements: an odd number of double words, and the two halves of a warp take turns.) */
template <typename T, int TILE> __global__ void __launch_bounds__(TILE_THREADS) transpose_kernel(const __grid_constant__ Tiles t) {
    constexpr int PAD = sizeof(T) < 4 ? 4 / sizeof(T) : 1, STEP = TILE_THREADS / TILE, COUNT = TILE / STEP;
    __shared__ T tile[TILE][TILE + PAD]; /* [c][r] */
    int64_t r0, c0;
    T *dst;
    const T *src;
    find_tile(t, TILE, &r0, &c0, &dst, &src);
    int fast = threadIdx.x % TILE, slow = threadIdx.x / TILE;
    T held[COUNT];
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        int64_t c = c0 + slow + j * STEP;
        held[j] = r0 + fast < t.rows && c < t.cols ? src[c * t.src_row + r0 + fast] : T(0);
    }
#pragma unroll
    for (int j = 0; j < COUNT; j++) tile[slow + j * STEP][fast] = held[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        int64_t r = r0 + slow + j * STEP;
        if (r < t.rows && c0 + fast < t.cols) dst[r * t.dst_row + c0 + fast] = tile[fast][slow + j * STEP];
    }
}

/* 16-bit elements, tiles of 64 x 64. Lane l reads rows 2l and 2l + 1 of columns 2p and 2p + 1 as two words. The tile holds words
 * of two columns, row r at [r % 2 * 32 + r / 2][p]: the lanes of a warp use 32 different banks in both directions. */
__global__ void __launch_bounds__(TILE_THREADS) transpose_pairs_kernel(const __grid_constant__ Tiles t) {
    constexpr int TILE = 64, HALF = TILE / 2, WARPS = TILE_THREADS / 32;
    __shared__ uint32_t tile[TILE][HALF + 1];
    int64_t r0, c0;
    uint16_t *dst;
    const uint16_t *src;
    find_tile(t, TILE, &r0, &c0, &dst, &src);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t held[HALF / WARPS][2];
#pragma unroll
    for (int j = 0; j < HALF / WARPS; j++) {
        int64_t r = r0 + 2 * lane, c = c0 + 2 * (warp + j * WARPS);
        bool inside = r < t.rows && c < t.cols; /* sizes are even: the neighbours are inside too */
        held[j][0] = inside ? *(const uint32_t *)(src + c * t.src_row + r) : 0;
        held[j][1] = inside ? *(const uint32_t *)(src + (c + 1) * t.src_row + r) : 0;
    }
#pragma unroll
    for (int j = 0; j < HALF / WARPS; j++) {
        tile[lane][warp + j * WARPS] = __byte_perm(held[j][0], held[j][1], 0x5410);        /* low halves */
        tile[HALF + lane][warp + j * WARPS] = __byte_perm(held[j][0], held[j][1], 0x7632); /* high halves */
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < TILE / WARPS; j++) {
        int row = warp + j * WARPS;
        int64_t r = r0 + row, c = c0 + 2 * lane;
        if (r < t.rows && c < t.cols) *(uint32_t *)(dst + r * t.dst_row + c) = tile[row % 2 * HALF + row / 2][lane];
    }
}

/* Fills *t and returns true if src is dense along another dimension than dst, and both dimensions are long enough for tiles. */
static bool find_transpose(Tiles *t, const XtLoop<2> &loop) {
    int last = loop.ndim - 1, d = last - 1;
    if (last < 1 || loop.strides[0][last] != 1 || loop.strides[1][last] <= 1 || loop.shape[last] < LEAST_TILED) return false;
    while (d >= 0 && loop.strides[1][d] != 1) d--;
    if (d < 0 || loop.shape[d] < LEAST_TILED) return false;
    t->dst = loop.data[0];
    t->src = loop.data[1];
    t->rows = loop.shape[d];
    t->cols = loop.shape[last];
    t->dst_row = loop.strides[0][d];
    t->src_row = loop.strides[1][last];
    t->ndim = 0;
    for (int i = 0; i < last; i++) {
        if (i == d) continue;
        t->shape[t->ndim] = loop.shape[i];
        t->dst_stride[t->ndim] = loop.strides[0][i];
        t->src_stride[t->ndim++] = loop.strides[1][i];
    }
    return true;
}

static bool all_even(const Tiles *t) {
    bool even = (t->rows | t->cols | t->dst_row | t->src_row) % 2 == 0 && ((uintptr_t)t->dst | (uintptr_t)t->src) % 4 == 0;
    for (int d = 0; d < t->ndim; d++) even = even && (t->dst_stride[d] | t->src_stride[d]) % 2 == 0;
    return even;
}

static void transpose(Tiles *t, int64_t numel, int64_t size) {
    int64_t tile = size == 8 ? 32 : 64;
    t->tiles_down = xt_divide_up(t->rows, tile);
    t->tiles_across = xt_divide_up(t->cols, tile);
    unsigned blocks = xt_blocks(numel / (t->rows * t->cols) * t->tiles_down * t->tiles_across, 1);
    if (size == 8) xt_launch(transpose_kernel<uint64_t, 32>, blocks, TILE_THREADS, 0, *t);
    else if (size == 4) xt_launch(transpose_kernel<uint32_t, 64>, blocks, TILE_THREADS, 0, *t);
    else if (size == 1) xt_launch(transpose_kernel<uint8_t, 64>, blocks, TILE_THREADS, 0, *t);
    else if (all_even(t)) xt_launch(transpose_pairs_kernel, blocks, TILE_THREADS, 0, *t);
    else xt_launch(transpose_kernel<uint16_t, 64>, blocks, TILE_THREADS, 0, *t);
}

/* ---- one dtype ---------------------------------------------------------------------------------------------------------- */

template <typename T> struct XtBits {
    typedef T Out;
    typedef T A;
    typedef uint8_t B;
    typedef uint8_t C;
    static constexpr int INPUTS = 1, WIDTH = XT_WIDTH<T>, GROUP = 4;
    template <int N> __device__ XtPiece<T, N> run(XtPiece<T, N> x, XtPiece<uint8_t, N>, XtPiece<uint8_t, N>) const { return x; }
};

/* Joins two neighbours of the last dimension to one element of twice the size, as often as possible. */
static void widen(XtLoop<2> *loop) {
    for (;;) {
        int last = loop->ndim - 1;
        int64_t twice = 2 * loop->size[0];
        if (twice > 8 || loop->shape[last] % 2 != 0) return;
        for (int k = 0; k < 2; k++) {
            if (loop->strides[k][last] != 1 || (uintptr_t)loop->data[k] % (uintptr_t)twice != 0) return;
            for (int d = 0; d < last; d++)
                if (loop->strides[k][d] % 2 != 0) return;
        }
        loop->shape[last] /= 2;
        loop->numel /= 2;
        for (int k = 0; k < 2; k++) {
            loop->size[k] = twice;
            for (int d = 0; d < last; d++) loop->strides[k][d] /= 2;
        }
        if (loop->shape[last] == 1 && last > 0) loop->ndim--; /* the rest may be a transpose */
    }
}

static XtStatus copy_bits(const XtCopy *p, XtLoop<2> loop) {
    if (loop.ndim == 1 && loop.strides[0][0] == 1 && loop.strides[1][0] == 1) {
        if (loop.data[0] == loop.data[1]) return XT_OK;
        cudaError_t error =
            cudaMemcpyAsync(loop.data[0], loop.data[1], (size_t)(loop.numel * loop.size[0]), cudaMemcpyDeviceToDevice, xt_stream());
        xt_count_launch();
        return error ? xt_cuda_error("copy", error) : xt_launched_sizes("copy", p->dst.ndim, p->dst.shape);
    }
    widen(&loop);
    Tiles tiles;
    if (find_transpose(&tiles, loop)) transpose(&tiles, loop.numel, loop.size[0]);
    else
        xt_by_bits(loop.size[0], [&](auto zero) {
            xt_each_loop(XtBits<decltype(zero)>(), loop);
            return XT_OK;
        });
    return xt_launched_sizes("copy", p->dst.ndim, p->dst.shape);
}

/* ---- two dtypes --------------------------------------------------------------------------------------------------------- */

/* Whether the wide form of T is float. */
template <typename T> constexpr bool XT_IS_FLOAT = xt_same<decltype(xt_widen(T())), float>;

template <typename Dst, typename Src> struct XtConvert {
    typedef Dst Out;
    typedef Src A;
    typedef uint8_t B;
    typedef uint8_t C;
    static constexpr int INPUTS = 1, WIDTH = XT_WIDTH<Dst> < XT_WIDTH<Src> ? XT_WIDTH<Dst> : XT_WIDTH<Src>;
    template <int N> __device__ XtPiece<Dst, N> run(XtPiece<Src, N> from, XtPiece<uint8_t, N>, XtPiece<uint8_t, N>) const {
        if constexpr (XT_IS_FLOAT<Dst> && XT_IS_FLOAT<Src>) return xt_store<Dst>(xt_load(from)); /* in pairs */
        XtVector<Src, N> x = xt_elements(from);
        XtVector<Dst, N> out;
#pragma unroll
        for (int j = 0; j < N; j++) out.at[j] = xt_cast_to<Dst>(x.at[j]);
        return xt_piece(out);
    }
};

template <typename W> static __device__ __forceinline__ void put_as(XtDtype dtype, char *to, W x) {
    switch (dtype) {
    case XT_FLOAT32: return xt_narrow(x, (float *)to);
    case XT_FLOAT64: return xt_narrow(x, (double *)to);
    case XT_BFLOAT16: return xt_narrow(x, (XtBf16 *)to);
    case XT_FLOAT16: return xt_narrow(x, (XtF16 *)to);
    case XT_INT32: return xt_narrow(x, (int32_t *)to);
    case XT_INT64: return xt_narrow(x, (int64_t *)to);
    case XT_UINT8: return xt_narrow(x, (uint8_t *)to);
    default: return xt_narrow(x, (XtBool *)to);
    }
}

__global__ void __launch_bounds__(XT_EACH_THREADS)
    convert_kernel(XtDtype dst, XtDtype src, const __grid_constant__ XtEachWalk<2> walk) {
    uint32_t item = blockIdx.x * (uint32_t)XT_EACH_THREADS + threadIdx.x;
    if (item >= walk.items) return;
    int64_t offset[2];
    xt_each_walk_to(walk, item, offset);
    char *to = walk.data[0] + offset[0];
    const char *from = walk.data[1] + offset[1];
    switch (src) {
    case XT_FLOAT64: return put_as(dst, to, *(const double *)from);
    case XT_FLOAT32: return put_as(dst, to, *(const float *)from);
    case XT_BFLOAT16: return put_as(dst, to, xt_widen(*(const XtBf16 *)from));
    case XT_FLOAT16: return put_as(dst, to, xt_widen(*(const XtF16 *)from));
    case XT_INT32: return put_as(dst, to, xt_widen(*(const int32_t *)from));
    case XT_INT64: return put_as(dst, to, *(const int64_t *)from);
    default: return put_as(dst, to, xt_widen(*(const uint8_t *)from));
    }
}

/* dst and src differ. src is not bool: its caller reads bool as uint8. */
static void convert(XtDtype dst, XtDtype src, const XtLoop<2> &loop) {
    if (loop.numel > XT_EACH_MOST) {
        XtLoop<2> first, second;
        xt_loop_split(loop, &first, &second);
        convert(dst, src, first);
        convert(dst, src, second);
        return;
    }
    if (xt_loop_has_vectors(loop, 16 / (loop.size[0] > loop.size[1] ? loop.size[0] : loop.size[1]))) {
        xt_by_dtype(dst, [&](auto to) {
            return xt_by_dtype(src, [&](auto from) {
                using Dst = decltype(to);
                using Src = decltype(from);
                if constexpr (!xt_same<Dst, Src> && !xt_same<Src, XtBool>) xt_launch_vectors(XtConvert<Dst, Src>(), loop);
                return XT_OK;
            });
        });
        return;
    }
    auto walk = xt_each_walk(loop, 1);
    xt_launch(convert_kernel, xt_blocks(walk.items, XT_EACH_THREADS), XT_EACH_THREADS, 0, dst, src, walk);
}

XtStatus xt_cuda_copy(const XtCopy *p) {
    XtLoop<2> loop = xt_loop<2>({&p->dst, &p->src});
    XtDtype dst = p->dst.dtype, src = p->src.dtype;
    if (loop.numel == 0) return XT_OK;
    if (src == XT_BOOL && dst != XT_BOOL) src = XT_UINT8;
    if (dst == src) return copy_bits(p, loop);
    convert(dst, src, loop);
    return xt_launched_sizes("copy", p->dst.ndim, p->dst.shape);
}
