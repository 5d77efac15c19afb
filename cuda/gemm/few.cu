/* few.cu - C = alpha A B^T + beta C for A [M, K] of at most 16 rows and B [N, K], both of 16 bits: the products of a step of
 * generation. B, the weight, is read once, and that is what the time goes to.
 *
 * Plan: a block has TILES * 8 columns of C, rows of B. Its 8 warps share K: warp w has the chunks w, w + 8, ... of CHUNK terms, and
 * all of a warp's pieces of one or two chunks, 8 or 16 of 16 bytes a lane, are under way before the first product. Lane 4 g + t has the
 * elements 8 t ... 8 t + 7 of each 32 of row g: those are not the ones that the matrix unit's layout names, but a sum may take its
 * terms in any order that both operands share. Rows of A beyond M are zeros. The warps' sums are added in their order.
 *
 * Deterministic: the order of a sum depends on K alone, so a row has the same bits whatever M, N and the device are. The weight is
 * fetched into L2 before the kernel that makes A has ended.
 */
#include "arch/overlap.cuh"
#include "arch/sm80.cuh"
#include "gemm.cuh"

enum {
    ROWS = 16, /* of A, the most: those of the matrix unit */
    WARPS = 8,
    STEP = 32, /* terms of two instructions: 8 of each lane */
    STEPS = 4, /* of a chunk */
    CHUNK = STEPS * STEP,
};

/* MANY: M is above 8. */
template <typename T, typename TC, int TILES, bool MANY>
__global__ void __launch_bounds__(WARPS * 32, 2) few_rows_kernel(XtGemm p) {
    constexpr int COLS = TILES * 8,
                  CHUNKS = TILES == 1 || (TILES == 2 && !MANY) ? 2 : 1; /* of a warp, in flight: what registers hold */
    __shared__ float sums[WARPS][MANY ? ROWS : 8][COLS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int m = (int)p.m, n = (int)p.n, k = (int)p.k, n0 = (int)blockIdx.x * COLS;
    const T *a = (const T *)p.a, *b = (const T *)p.b; // a [M, K], b [N, K]
    if (threadIdx.x == 0 && p.ldb == p.k)
        xt_prefetch(b + (int64_t)n0 * k, (uint32_t)((n - n0 < COLS ? n - n0 : COLS) * k) * (uint32_t)sizeof(T));
    xt_wait_for_previous();
    xt_let_next_begin();
    const T *of_b[TILES], *of_a[2] = {a + g * p.lda + 8 * t, a + (g + 8) * p.lda + 8 * t};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int row = n0 + 8 * i + g;
        of_b[i] = b + (row < n ? row : n - 1) * p.ldb + 8 * t;
    }
    float d[TILES][4] = {};
    for (int first = warp * CHUNK; first < k; first += WARPS * CHUNK * CHUNKS) {
        uint32_t w[CHUNKS][STEPS][TILES][4];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const int at = first + c * WARPS * CHUNK + s * STEP;
                const bool here = at + 8 * t < k;
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    if (here) xt_read_once(w[c][s][i], of_b[i] + at);
                    else w[c][s][i][0] = w[c][s][i][1] = w[c][s][i][2] = w[c][s][i][3] = 0;
                }
            }
        XtPiece<T, 8> x[CHUNKS][STEPS][2];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const int at = first + c * WARPS * CHUNK + s * STEP;
                const bool here = at + 8 * t < k;
                x[c][s][0] = x[c][s][1] = xt_all<T, 8>(xt_store<T>(0));
                if (here && g < m) x[c][s][0] = xt_read<T, 8>(of_a[0] + at);
                if (MANY && here && g + 8 < m) x[c][s][1] = xt_read<T, 8>(of_a[1] + at);
            }
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    const uint32_t *y = w[c][s][i], *u = x[c][s][0].word, *v = x[c][s][1].word;
                    xt_mma_16<T>(d[i], u[0], v[0], u[1], v[1], y[0], y[1]);
                    xt_mma_16<T>(d[i], u[2], v[2], u[3], v[3], y[2], y[3]);
                }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < (MANY ? 2 : 1); half++)
            *(float2 *)&sums[warp][g + 8 * half][8 * i + 2 * t] = make_float2(d[i][2 * half], d[i][2 * half + 1]);
    __syncthreads();
    for (int e = threadIdx.x; e < m * COLS; e += WARPS * 32) {
        const int row = e / COLS, col = e % COLS;
        if (n0 + col >= n) continue;
        float sum = sums[0][row][col];
#pragma unroll
        for (int i = 1; i < WARPS; i++) sum += sums[i][row][col];
        TC *c = (TC *)p.c + row * p.ldc + n0 + col; // c [M, N]
        sum *= (float)p.alpha;
        if (p.beta != 0) sum += (float)p.beta * xt_load(*c);
        *c = xt_store<TC>(sum);
    }
}

template <typename T, typename TC, int TILES> static void launch(const XtGemm *p) {
    const unsigned blocks = xt_blocks(p->n, TILES * 8);
    if (p->m > 8) xt_launch_early(few_rows_kernel<T, TC, TILES, true>, blocks, WARPS * 32, 0, *p);
    else xt_launch_early(few_rows_kernel<T, TC, TILES, false>, blocks, WARPS * 32, 0, *p);
}

/* The tiles that the busiest multiprocessor gets, if a block has `tiles`. */
static int64_t most_tiles(const XtGemm *p, int tiles) {
    return xt_divide_up(xt_divide_up(p->n, 8 * tiles), XT_PLAN_MULTIPROCESSORS) * tiles;
}

const char *xt_cuda_gemm_few_supports(const XtGemm *p, const XtDeviceTraits *device) {
    const char *reason = xt_gemm_plain(p);
    if (reason) return reason;
    if (xt_dtype_size(p->dtype_a) != 2) return "A and B have more than 16 bits";
    if (device->capability < 80) return "the compute capability is below 8.0";
    if (p->m > ROWS) return "M is above 16";
    if (p->trans_a || !p->trans_b) return "A is transposed, or B is not";
    if (p->batch[0] != 1 || p->batch[1] != 1) return "it is a batch";
    if (p->n > INT32_MAX / 64 || p->k > 32768) return "N is above 2^25, or K above 32768";
    const bool even = p->k % 8 == 0 && (p->m <= 1 || p->lda % 8 == 0) && (p->n <= 1 || p->ldb % 8 == 0);
    if (!even || (uintptr_t)p->a % 16 || (uintptr_t)p->b % 16) return "rows of A or B are not aligned to 16 bytes";
    return NULL;
}

XtStatus xt_cuda_gemm_few(const XtGemm *p) {
    XtStatus status;
    if (xt_cuda_gemm_trivial(p, &status)) return status;
    return xt_by_gemm_dtypes(p, [&](auto of_a, auto of_c) {
        using T = decltype(of_a);
        using TC = decltype(of_c);
        if constexpr (sizeof(T) == 2) {
            const int64_t one = most_tiles(p, 1), two = most_tiles(p, 2), four = most_tiles(p, 4);
            if (four <= two && four <= one) launch<T, TC, 4>(p);
            else if (two <= one) launch<T, TC, 2>(p);
            else launch<T, TC, 1>(p);
        }
        return xt_launched("gemm", p->batch[0], p->batch[1], p->m, p->n, p->k);
    });
}
