/* rope.cu - rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), half-split form.
 *
 *     a = x[:D/2], b = x[D/2:], angle_i = pos theta^(-2i/D):   out = (a cos - b sin,  b cos + a sin)
 *
 * x and out [rows, heads, D] with strides (row, head, 1). A rotation is orthogonal, so the backward turns dy by -angle: `inverse`.
 *
 * Plan: a thread owns 16 bytes of a (so 8 pairs in bfloat16) of one row and the matching 16 bytes of b, makes the cosines and sines
 * of its pairs once, in registers, and turns all heads of the row with them, HEADS at a time: 2 HEADS loads in flight. The loads of
 * the first heads are on their way while the angles are made. When rows are few, the heads are spread over several blocks.
 * A block is (pairs of a row) x (rows). Moved: every element once in and once out; no table, no scratch, one launch.
 *
 * Frequencies theta^(-2i/D) are made by the host, with the same calls as on the CPU, and travel as a kernel argument: at position
 * 1e6 one ulp of a frequency is 0.06 in the angle, so they have to be the same bits. Positions and angles are rounded to ACC, as
 * there.
 */
#include "cuda.cuh"

#include <math.h>

static constexpr int THREADS = 256;
static constexpr int HEADS = 4;   /* in flight together */
static constexpr int PAIRS = 256; /* of one launch: all of them up to D = 512 */

template <typename A> struct RopeFrequencies {
    A at[PAIRS];
};

/* Rounded before the cosine sees it: not to be contracted into its first step. */
__device__ inline float angle_of(float pos, float frequency) { return __fmul_rn(pos, frequency); }
__device__ inline double angle_of(double pos, double frequency) { return __dmul_rn(pos, frequency); }
__device__ inline void sine_cosine(float angle, float *s, float *c) { sincosf(angle, s, c); }
__device__ inline void sine_cosine(double angle, double *s, double *c) { sincos(angle, s, c); }

/* out, x [rows, heads, D]; pairs [first, first + count) of D/2 = half; N of them a thread. blockIdx.y takes heads_each heads. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS, 3)
    rope_kernel(T *out, const T *x, const int64_t *positions, int64_t rows, int64_t heads, int64_t half, int64_t first, int count,
                int64_t heads_each, int64_t out_row, int64_t out_head, int64_t x_row, int64_t x_head, int64_t period, bool inverse,
                const __grid_constant__ RopeFrequencies<XtAcc<T>> frequency) {
    using A = XtAcc<T>;
    int64_t head = blockIdx.y * heads_each, end = head + heads_each < heads ? head + heads_each : heads;
    for (int64_t r = (int64_t)blockIdx.x * blockDim.y + threadIdx.y; r < rows; r += (int64_t)gridDim.x * blockDim.y) {
        for (int i = threadIdx.x * N; i < count; i += blockDim.x * N) {
            const T *from = x + r * x_row + first + i; /* [heads], x_head apart */
            T *to = out + r * out_row + first + i;     /* [heads], out_head apart */
            A c[N], s[N];
            for (int64_t h = head; h < end; h += HEADS) {
                XtPiece<T, N> a[HEADS], b[HEADS];
#pragma unroll
                for (int k = 0; k < HEADS; k++) {
                    if (h + k >= end) continue;
                    a[k] = xt_read<T, N>(from + (h + k) * x_head);
                    b[k] = xt_read<T, N>(from + (h + k) * x_head + half);
                }
                if (h == head) {
                    A pos = (A)(positions ? positions[r] : (int64_t)((uint64_t)r % (uint64_t)period));
#pragma unroll
                    for (int e = 0; e < N; e++) {
                        A sine, cosine;
                        sine_cosine(angle_of(pos, frequency.at[i + e]), &sine, &cosine);
                        c[e] = xt_load(xt_store<T>(cosine));
                        s[e] = xt_load(xt_store<T>(sine));
                        if (inverse) s[e] = -s[e];
                    }
                }
#pragma unroll
                for (int k = 0; k < HEADS; k++) {
                    if (h + k >= end) continue;
                    XtVector<A, N> turned_a, turned_b, of_a = xt_load(a[k]), of_b = xt_load(b[k]);
#pragma unroll
                    for (int e = 0; e < N; e++) {
                        turned_a.at[e] = of_a.at[e] * c[e] - of_b.at[e] * s[e];
                        turned_b.at[e] = of_b.at[e] * c[e] + of_a.at[e] * s[e];
                    }
                    xt_write(to + (h + k) * out_head, xt_store<T>(turned_a));
                    xt_write(to + (h + k) * out_head + half, xt_store<T>(turned_b));
                }
            }
        }
    }
}

static float power(float base, float exponent) { return powf(base, exponent); }
static double power(double base, double exponent) { return pow(base, exponent); }

template <typename T, int N> static void launch(const XtRope *p) {
    using A = XtAcc<T>;
    int64_t half = p->dim / 2;
    for (int64_t first = 0; first < half; first += PAIRS) {
        int count = (int)(half - first < PAIRS ? half - first : PAIRS);
        RopeFrequencies<A> frequency = {};
        for (int i = 0; i < count; i++) frequency.at[i] = 1 / power((A)p->theta, (A)(2 * (first + i)) / (A)p->dim);
        int across = count / N, down = THREADS / across; /* N divides count, and count / N <= THREADS */
        /* Spreading heads over blocks makes the angles again in each: only as far as the device has idle threads. */
        int64_t threads = p->rows * across, spread = (int64_t)xt_multiprocessors() * 1024 / threads;
        if (spread > p->heads) spread = p->heads;
        if (spread > 65535) spread = 65535;
        int64_t heads_each = spread > 1 ? xt_divide_up(p->heads, spread) : p->heads;
        dim3 grid(xt_blocks(p->rows, down), (unsigned)xt_divide_up(p->heads, heads_each)), block(across, down);
        xt_launch(rope_kernel<T, N>, grid, block, 0, (T *)p->out, (const T *)p->x, p->positions, p->rows, p->heads, half, first,
                  count, heads_each, p->out_stride[0], p->out_stride[1], p->x_stride[0], p->x_stride[1], p->period, p->inverse,
                  frequency);
    }
}

XtStatus xt_cuda_rope(const XtRope *p) {
    if (p->rows == 0 || p->heads == 0 || p->dim == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = XT_WIDTH<T>;
        int64_t half = p->dim / 2;
        bool aligned = xt_aligned<T>(half, p->x_stride[0], p->x, p->out) && xt_aligned<T>(p->x_stride[1], p->out_stride[0]) &&
                       p->out_stride[1] % N == 0;
        if (aligned) launch<T, N>(p);
        else launch<T, 1>(p);
        return xt_launched("rope", p->rows, p->heads, p->dim);
    });
}
