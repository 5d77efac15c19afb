/* causal_conv1d.cu - each channel convolved with the few taps before it (see csrc/cpu/conv/causal_conv1d.c).
 *
 *     forward    z[t] = bias + sum_k w[k] x[t - (K - 1) + k],  y = z or silu(z)
 *     backward   dz = dy or dy silu'(z);  dx[t - (K - 1)] = sum_k w[k] dz[t - k];  dw[k] = sum_bt dz[t] x[t - (K - 1) + k],  db = sum_bt dz
 *
 * x, y, dx, dy [batch, steps, channels], weight [channels, taps], state, next, dstate, dnext [batch, taps - 1, channels], dense.
 *
 * Plan: a thread has N neighbouring channels and a run of rows that it walks forward, with the last K - 1 rows in registers: each row is
 * read once, but for the K - 1 rows that two runs share, which the L2 cache has. Forward, pieces of 8 bytes; as soon as a row is summed, the
 * twelfth after it (float32: eighth) is read; in 16 bits the first twelve are asked for before the weights. Backward, 2 or 4 channels, for the
 * rows of dz and the sums of dw take registers, too; 4 rows of x and of dy are read together by way of shared memory, where rows are under way
 * without registers; the first are asked for before the weights. The threads of a block have the same rows, side by side, and runs are as
 * long as few waves of blocks allow. A row of dx is complete K - 1 rows after its own, so that a run of the backward computes dz of the
 * K - 1 rows behind it once more. Unaligned tensors, float64 and one tap: one element a piece and the taps at run time, the plain form.
 * Bytes moved: 2 elements an output forward, 3 backward.
 *
 * Order: the sum of an element starts from the bias, k ascending, whatever the run: the same bits wherever a sequence is cut. dw and db: a
 * thread adds up its run, and a second kernel the runs, slices of them in a fixed tree.
 * The runs follow from the shape, and from whether all pointers are aligned.
 */
#include "arch/overlap.cuh"
#include "arch/sm80.cuh"
#include "common/cuda.cuh"
#include "common/swiglu.cuh"
#include "contract/conv.h"

#include <type_traits>

static constexpr int THREADS = 256;  /* of a block of the backward: at most */
static constexpr int ROWS_BWD = 4;   /* that are read together */
static constexpr int AHEAD_BWD = 1;  /* groups of rows on their way to shared memory */
static constexpr int BLOCKS_BWD = 2; /* of THREADS, that a multiprocessor holds at once */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
static constexpr bool COPIES = true; /* cp.async is there */
#else
static constexpr bool COPIES = false;
#endif

/* Rows of a forward that are on their way; a run has twice as many. */
template <typename T> constexpr int ROWS_FWD = sizeof(T) == 2 ? 12 : 8;

/* Channels of a thread forward and backward: of more taps, or of float32, the registers hold fewer. The plain form has one. */
template <typename T> constexpr int WIDTH_FWD = XT_WIDTH<T> / 2;
template <typename T, int K> constexpr int WIDTH_BWD = K > 4 || sizeof(T) == 4 ? 2 : 4;

/* Row t of N channels, in ACC: of x, of the state before it, or zeros. x and state point at the sample's channels. */
template <typename T, int N>
__device__ inline XtVector<XtAcc<T>, N> row_of(const T *x, const T *state, int64_t t, int64_t channels, int taps) {
    if (t >= 0) return xt_load(xt_read<T, N>(x + t * channels));
    if (state) return xt_load(xt_read<T, N>(state + (t + taps - 1) * channels));
    return xt_load(xt_all<T, N>(xt_store<T>(0)));
}

/* The weights of N channels from c on, tap k behind the unused ones: w[K - taps + k]. Those of all N lie side by side. */
template <typename T, int N, int K>
__device__ inline void weights_of(XtAcc<T> (&w)[K][N], XtAcc<T> (&b)[N], const T *weight, const T *bias, int64_t c, int taps) {
    if constexpr (N > 1) { /* taps is K */
        XtVector<XtAcc<T>, N> part[K], of_bias = xt_load(bias ? xt_read<T, N>(bias + c) : xt_all<T, N>(xt_store<T>(0)));
#pragma unroll
        for (int k = 0; k < K; k++) part[k] = xt_load(xt_read<T, N>(weight + c * K + k * N));
#pragma unroll
        for (int e = 0; e < N; e++) {
            b[e] = of_bias.at[e];
#pragma unroll
            for (int k = 0; k < K; k++) w[k][e] = part[(e * K + k) / N].at[(e * K + k) % N];
        }
    } else {
        b[0] = bias ? xt_load(bias[c]) : XtAcc<T>(0);
#pragma unroll
        for (int k = 0; k < K; k++) w[k][0] = k >= K - taps ? xt_load(weight[c * taps + k - (K - taps)]) : XtAcc<T>(0);
    }
}

/* z of a row: `last` has the K - 1 rows before v. Unused taps add nothing: 0 times an infinity would. */
template <typename A, int N, int K>
__device__ inline void sums_of(A (&z)[N], const A (&w)[K][N], const A (&b)[N], const XtVector<A, N> (&last)[K],
                               const XtVector<A, N> &v, int taps) {
#pragma unroll
    for (int e = 0; e < N; e++) {
        z[e] = b[e];
#pragma unroll
        for (int k = 0; k < K; k++)
            if (k >= K - taps) z[e] = fma(w[k][e], k < K - 1 ? last[k].at[e] : v.at[e], z[e]);
    }
}

/* last [k] is row t - (K - 1) + k; its entry K - 1 is not used. */
template <typename A, int N, int K> __device__ inline void advance(XtVector<A, N> (&last)[K], const XtVector<A, N> &v) {
#pragma unroll
    for (int k = 0; k + 2 < K; k++) last[k] = last[k + 1];
    if constexpr (K > 1) last[K - 2] = v;
}

/* ---- forward ------------------------------------------------------------------------------------------------------------------ */

/* Thread -> (sample, run, piece of the channels), the pieces of a row side by side. EXACT: p.taps is K, and p.silu is SILU, for code that
 * decides it in the loop has no registers for the next rows. */
template <typename T, int N, int K, bool EXACT, bool SILU>
__global__ void __launch_bounds__(THREADS, !EXACT  ? 1
                                           : K > 4 ? 2
                                                   : 3)
    causal_conv1d_fwd_kernel(const __grid_constant__ XtCausalConv1dFwd p, int64_t runs, int run) {
    using A = XtAcc<T>;
    constexpr int ROWS = ROWS_FWD<T>;
    constexpr bool EARLY = EXACT && sizeof(T) == 2; /* the first rows are asked for before the weights */
    const int taps = EXACT ? K : p.taps;
    const bool silu = EXACT ? SILU : p.silu;
    const int64_t channels = p.channels, pieces = channels / N;
    int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i >= p.batch * runs * pieces) return;
    int64_t c = i % pieces * N, b = i / pieces / runs, t0 = i / pieces % runs * run;
    int64_t t1 = t0 + run < p.steps ? t0 + run : p.steps;
    const T *x = (const T *)p.x + b * p.steps * channels + c;
    const T *state = p.state ? (const T *)p.state + b * (taps - 1) * channels + c : nullptr;
    if (p.next && t1 == p.steps) { /* first, so that its addresses need no registers in the loop */
        T *next = (T *)p.next + b * (taps - 1) * channels + c;
        for (int k = 0; k < taps - 1; k++) { /* from memory: `last` has the rows in ACC */
            int64_t row = p.steps - (taps - 1) + k;
            XtPiece<T, N> piece = xt_all<T, N>(xt_store<T>(0));
            if (row >= 0) piece = xt_read<T, N>(x + row * channels);
            else if (state) piece = xt_read<T, N>(state + (row + taps - 1) * channels);
            xt_write(next + k * channels, piece);
        }
    }
    const T *from;
    XtPiece<T, N> in[ROWS];
    if constexpr (EARLY) {
        from = x + t0 * channels;
        if (t1 - t0 >= ROWS) {
#pragma unroll
            for (int r = 0; r < ROWS; r++, from += channels) xt_read_now(in[r].word, from);
        }
    }
    A w[K][N], bias[N];
    XtVector<A, N> last[K];
    weights_of<T, N, K>(w, bias, (const T *)p.weight, (const T *)p.bias, c, taps);
#pragma unroll
    for (int k = 0; k < K - 1; k++)
        if (k >= K - taps) last[k] = row_of<T, N>(x, state, t0 - (K - 1) + k, channels, taps);
    if constexpr (!EARLY) from = x + t0 * channels;
    T *to = (T *)p.y + (b * p.steps + t0) * channels + c;
    auto step = [&](const XtPiece<T, N> &piece) {
        XtVector<A, N> v = xt_load(piece), out;
        A z[N];
        sums_of<A, N, K>(z, w, bias, last, v, taps);
#pragma unroll
        for (int e = 0; e < N; e++) out.at[e] = silu ? xt_swiglu<T>(z[e], 1) : z[e];
        xt_write(to, xt_store<T>(out));
        to += channels;
        advance<A, N, K>(last, v);
    };
    auto next_piece = [&] {
        XtPiece<T, N> piece = xt_read<T, N>(from);
        from += channels;
        return piece;
    };
    int left = (int)(t1 - t0);
    if (left >= ROWS) {
        if constexpr (!EARLY) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) in[r] = next_piece();
        }
#pragma unroll 1
        for (; left >= ROWS; left -= ROWS) {
            const bool more = left >= 2 * ROWS;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                step(in[r]);
                if (more) in[r] = next_piece();
            }
        }
    }
#pragma unroll 1
    for (; left > 0; left--) step(next_piece());
}

/* ---- backward ----------------------------------------------------------------------------------------------------------------- */

/* The row as it lies in memory, so that nothing waits for it before all rows are asked for. */
template <typename T, int N>
__device__ inline XtPiece<T, N> piece_of(const T *x, const T *state, int64_t t, int64_t channels, int taps) {
    const T *from = t >= 0 ? x + t * channels : state ? state + (t + taps - 1) * channels : nullptr;
    XtPiece<T, N> piece = xt_all<T, N>(xt_store<T>(0));
    if (from) piece = xt_read<T, N>(from);
    return piece;
}

/* Block -> (run of a sample, slab of channels), the threads side by side in the slab. share [runs of all samples, K + 1, channels],
 * zeros for unused taps, or NULL. */
template <typename T, int N, int K, bool EXACT, bool SILU>
__global__ void __launch_bounds__(THREADS, EXACT ? BLOCKS_BWD : 1)
    causal_conv1d_bwd_kernel(const __grid_constant__ XtCausalConv1dBwd p, XtAcc<T> *share, int64_t runs, int run, unsigned slabs) {
    using A = XtAcc<T>;
    const int taps = EXACT ? K : p.taps;
    const bool silu = EXACT ? SILU : p.silu;
    const int64_t channels = p.channels, steps = p.steps;
    constexpr bool RING = COPIES && EXACT;
    __shared__ XtPiece<T, N> rows[RING ? AHEAD_BWD + 1 : 1][RING ? ROWS_BWD : 1][2][THREADS]; /* of x and dy, each thread's own */
    xt_let_next_begin(); /* the kernel of the sums, which waits for this one */
    const int64_t block = blockIdx.x / slabs, c = ((int64_t)(blockIdx.x % slabs) * blockDim.x + threadIdx.x) * N;
    const int64_t b = block / runs, t0 = block % runs * run, t1 = t0 + run < steps ? t0 + run : steps;
    if (c >= channels) return;
    /* Rows from t0 on. mine: of the run. count: with the taps - 1 behind it, whose dz the last rows of dx need. there: those of count that exist. */
    const int mine = (int)(t1 - t0), count = mine + taps - 1, there = (int)(steps - t0 < count ? steps - t0 : count);
    const int64_t before = b * steps * channels + c;
    const T *x = (const T *)p.x, *dy = (const T *)p.dy;
    int64_t next = before + t0 * channels; /* where the next row to be read lies */
    /* The rows from row i on, AHEAD_BWD groups before their turn. */
    [[maybe_unused]] auto ask = [&](int i, int slot) {
#pragma unroll
        for (int r = 0; r < ROWS_BWD; r++, next += channels) {
            if (i + r < there) {
                xt_copy_own_async(&rows[slot][r][0][threadIdx.x], x + next);
                xt_copy_own_async(&rows[slot][r][1][threadIdx.x], dy + next);
            }
        }
        xt_copy_commit();
    };
    if constexpr (RING) { /* before anything that is waited for */
#pragma unroll
        for (int g = 0; g < AHEAD_BWD; g++) ask(g * ROWS_BWD, g);
    }
    const int64_t kept = b * (taps - 1) * channels + c;
    const T *state = p.state ? (const T *)p.state + kept : nullptr;
    XtPiece<T, N> first[K];
#pragma unroll
    for (int k = 0; k < K - 1; k++)
        if (k >= K - taps) first[k] = piece_of<T, N>(x + before, state, t0 - (K - 1) + k, channels, taps);
    A dw[K][N], db[N];
#pragma unroll
    for (int e = 0; e < N; e++) {
        db[e] = 0;
#pragma unroll
        for (int k = 0; k < K; k++) dw[k][e] = 0;
    }
    A w[K][N], bias[N];
    XtVector<A, N> last[K], dz[K]; /* dz[k]: of row t - (K - 1) + k before row t is there */
    weights_of<T, N, K>(w, bias, (const T *)p.weight, (const T *)p.bias, c, taps);
#pragma unroll
    for (int k = 0; k < K - 1; k++) {
        if (k >= K - taps) last[k] = xt_load(first[k]);
#pragma unroll
        for (int e = 0; e < N; e++) dz[k].at[e] = 0;
    }
    int64_t done = before + (t0 - (taps - 1)) * channels; /* where the row of dx lies that the next row completes */
    /* INSIDE: row i of those from t0 on is one of the run, and the row of dx that it completes is, too; then dnext adds nothing. */
    auto step = [&](auto inside, int i, const XtPiece<T, N> &of_x, const XtPiece<T, N> &of_dy) {
        constexpr bool INSIDE = inside.value;
        XtVector<A, N> v = xt_load(of_x), g = xt_load(of_dy);
        if (silu) {
            A z[N];
            sums_of<A, N, K>(z, w, bias, last, v, taps);
#pragma unroll
            for (int e = 0; e < N; e++) {
                A s = xt_sigmoid<T>(z[e]);
                g.at[e] *= s * (1 + z[e] * (1 - s));
            }
        }
        if (!INSIDE && i >= there) { /* 0 times a slope that is not finite would be NaN */
#pragma unroll
            for (int e = 0; e < N; e++) g.at[e] = 0;
        }
        if (INSIDE || i < mine) {
#pragma unroll
            for (int e = 0; e < N; e++) {
                db[e] += g.at[e];
#pragma unroll
                for (int k = 0; k < K; k++)
                    if (k >= K - taps) dw[k][e] = fma(g.at[e], k < K - 1 ? last[k].at[e] : v.at[e], dw[k][e]);
            }
        }
        XtVector<A, N> sum; /* also where nobody wants it: a branch here would part the rows that are computed side by side */
#pragma unroll
        for (int e = 0; e < N; e++) { /* tap 0 meets the newest dz */
            sum.at[e] = 0;
#pragma unroll
            for (int k = 0; k < K; k++)
                if (k >= K - taps) {
                    A d = g.at[e];
#pragma unroll
                    for (int j = 0; j < K - 1; j++) /* no run-time index: it would put dz into local memory */
                        if (j == K - 1 - (k - (K - taps))) d = dz[j].at[e];
                    sum.at[e] = fma(w[k][e], d, sum.at[e]);
                }
        }
        if (INSIDE) {
            if (p.dx) xt_write((T *)p.dx + done, xt_store<T>(sum));
        } else {
            T *to = nullptr; /* a row of dx, or of dstate before the first */
            if (i >= taps - 1) to = p.dx ? (T *)p.dx + done : nullptr;
            else if (t0 == 0 && p.dstate) to = (T *)p.dstate + kept + i * channels;
            if (to) {
                int64_t place = t0 + i - steps; /* in next */
                if (p.dnext && place >= 0) {
                    XtVector<A, N> more = xt_load(xt_read<T, N>((const T *)p.dnext + kept + place * channels));
#pragma unroll
                    for (int e = 0; e < N; e++) sum.at[e] += more.at[e];
                }
                xt_write(to, xt_store<T>(sum));
            }
        }
        done += channels;
        advance<A, N, K>(last, v);
        advance<A, N, K>(dz, g);
    };
    int slot = 0; /* of group g: g % (AHEAD_BWD + 1) */
    const XtPiece<T, N> nothing = xt_all<T, N>(xt_store<T>(0));
#pragma unroll 1
    for (int i = 0; i < count; i += ROWS_BWD) {
        if constexpr (RING) {
            ask(i + AHEAD_BWD * ROWS_BWD, slot == 0 ? AHEAD_BWD : slot - 1);
            xt_copy_wait<AHEAD_BWD>();
        }
        auto read = [&](bool is, XtPiece<T, N> &of_x, XtPiece<T, N> &of_dy, int r) {
            of_x = of_dy = nothing;
            if (!is) return;
            of_x = xt_read<T, N>(RING ? (const T *)&rows[slot][r][0][threadIdx.x] : x + next);
            of_dy = xt_read<T, N>(RING ? (const T *)&rows[slot][r][1][threadIdx.x] : dy + next);
            if constexpr (!RING) next += channels;
        };
        XtPiece<T, N> of_x[ROWS_BWD], of_dy[ROWS_BWD];
        if (i >= taps - 1 && i + ROWS_BWD <= mine) {
#pragma unroll
            for (int r = 0; r < ROWS_BWD; r++) read(true, of_x[r], of_dy[r], r);
#pragma unroll
            for (int r = 0; r < ROWS_BWD; r++) step(std::true_type(), i + r, of_x[r], of_dy[r]);
        } else {
#pragma unroll
            for (int r = 0; r < ROWS_BWD; r++) read(i + r < there, of_x[r], of_dy[r], r);
#pragma unroll
            for (int r = 0; r < ROWS_BWD; r++)
                if (i + r < count) step(std::false_type(), i + r, of_x[r], of_dy[r]);
        }
        slot = slot == AHEAD_BWD ? 0 : slot + 1;
    }
    if (!share) return;
    share += block * (K + 1) * channels + c;
#pragma unroll
    for (int k = 0; k <= K; k++) {
        XtVector<A, N> sum;
#pragma unroll
        for (int e = 0; e < N; e++) sum.at[e] = k < K ? dw[k][e] : db[e];
        xt_write(share + k * channels, xt_piece<A, N>(sum)); /* in one access */
    }
}

static constexpr int SUM_COLS = 16, SLICES = THREADS / SUM_COLS; /* of a block */

/* dweight [channels, taps] and dbias [channels], or NULL, from share [count, taps_of_share + 1, channels]. */
template <typename T>
__global__ void __launch_bounds__(THREADS) causal_conv1d_sums_kernel(T *dweight, T *dbias, const XtAcc<T> *share, int64_t count,
                                                                     int64_t channels, int taps, int taps_of_share) {
    using A = XtAcc<T>;
    __shared__ A tree[THREADS]; /* [slice, column] */
    xt_wait_for_previous();
    int slice = threadIdx.x / SUM_COLS, k = blockIdx.y + taps_of_share - taps; /* of the share */
    int64_t c = blockIdx.x * (int64_t)SUM_COLS + threadIdx.x % SUM_COLS;
    A sum = 0;
    if (c < channels) {
#pragma unroll 8
        for (int64_t i = slice; i < count; i += SLICES) sum += share[(i * (taps_of_share + 1) + k) * channels + c];
    }
    tree[threadIdx.x] = sum;
    for (int apart = THREADS / 2; apart >= SUM_COLS; apart /= 2) {
        __syncthreads();
        if (threadIdx.x < apart) tree[threadIdx.x] += tree[threadIdx.x + apart];
    }
    if (threadIdx.x >= SUM_COLS || c >= channels) return; /* entry t has the sum of column t, which thread t alone touched last */
    int tap = blockIdx.y;
    if (tap < taps && dweight) dweight[c * taps + tap] = xt_store<T>(tree[threadIdx.x]);
    if (tap == taps && dbias) dbias[c] = xt_store<T>(tree[threadIdx.x]);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------------- */

/* f(the number of taps, as a constant). */
template <typename F> static XtStatus by_taps(int taps, F f) {
    switch (taps) {
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    case 6: return f(std::integral_constant<int, 6>());
    case 7: return f(std::integral_constant<int, 7>());
    default: return f(std::integral_constant<int, 8>());
    }
}

template <typename T, int N, int K, bool EXACT> static XtStatus forward(const XtCausalConv1dFwd *p) {
    /* Runs of 24 rows (float32: 16) where they fill the device, else shorter ones. */
    int64_t pieces = p->channels / N, fill = (int64_t)XT_PLAN_MULTIPROCESSORS * 2048;
    int run = 2 * ROWS_FWD<T>;
    while (run > ROWS_FWD<T> / 2 && p->batch * xt_divide_up(p->steps, run) * pieces < fill) run /= 2;
    int64_t runs = p->steps > 0 ? xt_divide_up(p->steps, run) : 1;
    auto kernel = causal_conv1d_fwd_kernel<T, N, K, EXACT, false>;
    if constexpr (EXACT)
        if (p->silu) kernel = causal_conv1d_fwd_kernel<T, N, K, EXACT, true>;
    xt_launch(kernel, xt_blocks(p->batch * runs * pieces, THREADS), THREADS, 0, *p, runs, run);
    return xt_launched("causal_conv1d_fwd", p->batch, p->steps, p->channels, p->taps);
}

template <typename T, int N, int K, bool EXACT> static XtStatus backward(const XtCausalConv1dBwd *p) {
    using A = XtAcc<T>;
    XtScratch scratch;
    /* Slabs of equal width, and runs of 8 to 512 rows whose waves of blocks take the fewest rows, in which a block's start counts 16. */
    int64_t slabs = xt_divide_up(p->channels, THREADS * N), threads = xt_divide_up(xt_divide_up(p->channels, slabs * N), 32) * 32;
    int64_t columns = p->batch * slabs, resident = XT_PLAN_MULTIPROCESSORS * (threads > THREADS / 2 ? BLOCKS_BWD : 2 * BLOCKS_BWD);
    int64_t least = INT64_MAX, run = 0;
    for (int64_t waves = 1; waves <= 8; waves++) {
        int64_t fit = waves * resident / columns, rows = xt_divide_up(p->steps, fit < 1 ? 1 : fit);
        rows = rows < 8 ? 8 : rows > 512 ? 512 : xt_divide_up(rows, ROWS_BWD) * ROWS_BWD;
        int64_t time = xt_divide_up(columns * xt_divide_up(p->steps, rows), resident) * (rows + 16);
        if (time < least) least = time, run = rows;
    }
    int64_t runs = p->steps > 0 ? xt_divide_up(p->steps, run) : 1, shares = p->batch * runs;
    bool sums = p->dweight || p->dbias;
    if (sums) XT_CHECK(scratch.allocate((size_t)(shares * (K + 1) * p->channels) * sizeof(A)));
    auto kernel = causal_conv1d_bwd_kernel<T, N, K, EXACT, false>;
    if constexpr (EXACT)
        if (p->silu) kernel = causal_conv1d_bwd_kernel<T, N, K, EXACT, true>;
    xt_launch(kernel, xt_blocks(shares * slabs, 1), (unsigned)threads, 0, *p, (A *)scratch.data, runs, (int)run, (unsigned)slabs);
    if (sums)
        xt_launch_early(causal_conv1d_sums_kernel<T>, dim3(xt_blocks(p->channels, SUM_COLS), p->taps + 1), THREADS, 0,
                        (T *)p->dweight, (T *)p->dbias, (const A *)scratch.data, shares, p->channels, p->taps, K);
    return xt_launched("causal_conv1d_bwd", p->batch, p->steps, p->channels, p->taps);
}

XtStatus xt_cuda_causal_conv1d_fwd(const XtCausalConv1dFwd *p) {
    if (p->batch == 0 || p->channels == 0) return XT_OK;
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) < 8)
            if (p->taps > 1 && xt_aligned<T>(p->channels, 0, p->y, p->next, p->x, p->state, p->weight, p->bias))
                return by_taps(p->taps, [&](auto taps) { return forward<T, WIDTH_FWD<T>, taps.value, true>(p); });
        return forward<T, 1, XT_CONV_TAPS, false>(p);
    });
}

XtStatus xt_cuda_causal_conv1d_bwd(const XtCausalConv1dBwd *p) {
    if (p->batch == 0 || p->channels == 0) { /* sums of nothing */
        size_t size = xt_dtype_size(p->dtype) * (size_t)p->channels;
        if (p->dweight && size)
            XT_CHECK(xt_cuda_error("causal_conv1d_bwd", cudaMemsetAsync(p->dweight, 0, size * p->taps, xt_stream())));
        if (p->dbias && size) XT_CHECK(xt_cuda_error("causal_conv1d_bwd", cudaMemsetAsync(p->dbias, 0, size, xt_stream())));
        return XT_OK;
    }
    return xt_by_float(p->dtype, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (sizeof(T) < 8)
            if (p->taps > 1 && xt_aligned<T>(p->channels, 0, p->dx, p->dstate, p->dy, p->dnext, p->x, p->state, p->weight, p->bias))
                return by_taps(p->taps, [&](auto taps) { return backward<T, WIDTH_BWD<T, taps.value>, taps.value, true>(p); });
        return backward<T, 1, XT_CONV_TAPS, false>(p);
    });
}
