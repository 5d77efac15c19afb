/* causal_conv1d.c - each channel convolved with the few taps before it, the short convolution of Mamba (Gu & Dao 2023,
 * https://arxiv.org/abs/2312.00752) and of hybrid models after it.
 *
 *     forward    z[t] = bias + sum_k w[k] x[t - (K - 1) + k],  y = z or z sigmoid(z)
 *     backward   dz = dy or dy s (1 + z (1 - s)), s = sigmoid(z);  dx[t] = sum_k w[k] dz[t + K - 1 - k]
 *                dw[k] = sum_bt dz[t] x[t - (K - 1) + k],  db = sum_bt dz
 *
 * Vectors run over the channels, which lie side by side. A tile of rows is walked forward, a block of channels at a time, with the last K
 * rows of x and of dz in ACC in the first cache: each row of memory is read once and converted once. A row of dx is complete K - 1 rows
 * after its own, so a tile of the backward computes dz of the K - 1 rows behind it once more.
 * That is the plain form. With 2 to 4 taps, float32, and bfloat16 with an even number of channels, have a fast form. It computes several
 * rows at once, with the same bits.
 * Every piece of tiles sums dw and db of its own rows. The sums of the pieces are then added in order.
 */
#ifndef T
#include "contract/conv.h"
#include "cpu/kernel.h"

#include <stdlib.h>

enum { BLOCK = 256, TILE = 64 }; /* channels and rows */

/* Tiles of all samples, and how many make a piece. */
typedef struct CausalBwdJob {
    const XtCausalConv1dBwd *p;
    void *partial; /* [pieces, taps + 1, stride] of ACC: dweight, then dbias */
    int64_t stride, grain, pieces;
} CausalBwdJob;

/* Channels in a word of the fast form; 0: the dtype has no fast form. Shifts and masks take a word of two bfloat16 apart,
 * which needs no shuffle. */
#define PACK_f32 1
#define PACK_bf16 2
#define PACK_f16 0
#define PACK_f64 0

/* The fast form computes ROWS rows of WIDE channels at once. In arrays of ACC a row begins STRIDE elements after the one
 * before, 128 bytes more than a row takes, so that rows do not share sets of the first cache. */
enum { WIDE = 1024, STRIDE = WIDE + 32, ROWS = 4 };

#define XT_TEMPLATE "cpu/conv/causal_conv1d.c"
#include "cpu/each_float.h"

static int64_t tiles_of(int64_t steps) { return (steps + TILE - 1) / TILE; }

XtStatus xt_cpu_causal_conv1d_fwd(const XtCausalConv1dFwd *p) {
    XT_CHECK(xt_parallel(p->batch * tiles_of(p->steps), xt_row_grain(TILE * p->channels, 16384),
                         XT_BY_FLOAT(p->dtype, causal_conv1d_fwd), (void *)p));
    if (!p->next) return XT_OK;
    return xt_parallel(p->batch * (p->taps - 1), xt_row_grain(p->channels, 65536), XT_BY_FLOAT(p->dtype, causal_conv1d_next),
                       (void *)p);
}

XtStatus xt_cpu_causal_conv1d_bwd(const XtCausalConv1dBwd *p) {
    /* A tile without rows gives the gradients of the state. At most 64 pieces, so that the partial rows stay few. */
    int64_t tiles = p->batch * (p->steps > 0 ? tiles_of(p->steps) : 1), grain = xt_row_grain(TILE * p->channels, 16384);
    if (grain < (tiles + 63) / 64) grain = (tiles + 63) / 64;
    int64_t pieces = (tiles + grain - 1) / grain, most = pieces > 0 ? pieces : 1;
    /* Rows begin at multiples of 128 bytes, and have 128 bytes of padding. Without it, the backward of 1024 and 4096 channels took 5 %
     * more time on an EPYC, perhaps because rows that lie whole pages apart share sets of the first cache. */
    CausalBwdJob job = {p, NULL, (p->channels + 31) / 32 * 32 + 32, grain, pieces};
    size_t nbytes = (size_t)(most * (p->taps + 1) * job.stride) * xt_dtype_size(xt_dtype_accumulator(p->dtype));
    job.partial = aligned_alloc(128, (nbytes + 127) / 128 * 128);
    if (!job.partial) return xt_error(XT_OUT_OF_MEMORY, "causal_conv1d: scratch of %zu bytes could not be allocated", nbytes);
    memset(job.partial, 0, nbytes);
    XtStatus status = xt_parallel(tiles, grain, XT_BY_FLOAT(p->dtype, causal_conv1d_bwd), &job);
    if (status == XT_OK) status = xt_parallel(p->channels, 1024, XT_BY_FLOAT(p->dtype, causal_conv1d_sums), &job);
    free(job.partial);
    return status;
}

#else

/* `count` channels of row t of x in ACC: the row itself where T is ACC, else a copy in `room`. A row before the first is one of the state;
 * without a state, and past the last, it is zeros. */
XT_INLINE const ACC *NAME(causal_row)(const T *x, const T *state, int64_t t, int64_t steps, int64_t channels, int taps,
                                      int64_t count, ACC *room) {
    const T *row = t >= 0 ? x + t * channels : state + (t + taps - 1) * channels;
    if (t >= steps || (t < 0 && !state)) {
        for (int64_t j = 0; j < count; j++) room[j] = 0;
        return room;
    }
    if (sizeof(T) == sizeof(ACC)) return (const ACC *)row;
#pragma omp simd
    for (int64_t j = 0; j < count; j++) room[j] = LOAD(row[j]);
    return room;
}

#define SUM_OF(K)                                                        \
    _Pragma("omp simd") for (int64_t j = 0; j < count; j++) {            \
        ACC sum = start[j];                                              \
        for (int k = 0; k < K; k++) sum += w[k * BLOCK + j] * row[k][j]; \
        z[j] = sum;                                                      \
    }                                                                    \
    return;

/* z = start + sum_k w[k] row[k], k ascending; all [count], w [taps, BLOCK]. With a constant number of taps the sum stays in a register. */
XT_FAST static void NAME(causal_sums)(ACC *restrict z, const ACC *start, const ACC *w, const ACC *const *row, int64_t count,
                                      int taps) {
    switch (taps) {
    case 1: SUM_OF(1)
    case 2: SUM_OF(2)
    case 3: SUM_OF(3)
    case 4: SUM_OF(4)
    case 5: SUM_OF(5)
    case 6: SUM_OF(6)
    case 7: SUM_OF(7)
    default: SUM_OF(8)
    }
}
#undef SUM_OF

/* weight [channels, taps] and bias of `count` channels from c0 on: w [taps, BLOCK], b [BLOCK]. */
XT_INLINE void NAME(causal_weights)(const T *weight, const T *bias, int64_t c0, int64_t count, int taps, ACC *w, ACC *b) {
    for (int64_t j = 0; j < count; j++) {
        b[j] = bias ? LOAD(bias[c0 + j]) : 0;
        for (int k = 0; k < taps; k++) w[k * BLOCK + j] = LOAD(weight[(c0 + j) * taps + k]);
    }
}

#if NAME(PACK)
/* ---- the fast form: 2 to 4 taps, ROWS rows at once ----
 * A run of channels is long, because the CPU fetches ahead within a page only. ROWS rows share the taps, and the values of
 * x and the sums that are in registers. A row of an array of ACC has the first channel of each word in its first half, and
 * the second channel in its second half. Sums are added in the order of the plain form below, which takes the other dtypes
 * and numbers of taps, so the bits are the same. */

#if NAME(PACK) == 2
typedef uint32_t __attribute__((may_alias, aligned(2))) NAME(Word); /* the lower half first */
#define PART(v, h) xt_bits_float((h) ? (v) & 0xffff0000u : (v) << 16)
#define WORD(a, b) ((uint32_t)STORE(a) | (uint32_t)STORE(b) << 16)
#else
typedef T NAME(Word);
#define PART(v, h) (v)
#define WORD(a, b) (a)
#endif
#define WORD_T NAME(Word)
#define EACH_PART for (int h = 0; h < NAME(PACK); h++)
#define AT(array, k) array[(k) * STRIDE + h * (STRIDE / 2) + j]

XT_INLINE bool NAME(causal_is_fast)(int64_t channels, int taps) { return taps >= 2 && taps <= 4 && channels % NAME(PACK) == 0; }

/* w [K + 1, WIDE]: the taps, then the bias. */
XT_INLINE void NAME(causal_fast_weights)(ACC *w, const T *weight, const T *bias, int64_t words, const int K) {
    for (int64_t j = 0; j < words; j++) EACH_PART {
            for (int k = 0; k < K; k++) AT(w, k) = LOAD(weight[(j * NAME(PACK) + h) * K + k]);
            AT(w, K) = bias ? LOAD(bias[j * NAME(PACK) + h]) : 0;
        }
}

/* to[r] = the sums of x[r .. r + K - 1], in words. */
XT_INLINE void NAME(causal_rows_fwd)(T *const *to, const T *const *x, const ACC *w, int64_t words, const int K, const bool silu) {
#pragma omp simd
    for (int64_t j = 0; j < words; j++) {
        ACC y[ROWS][2];
#pragma GCC unroll 2
        EACH_PART {
            ACC v[3 + ROWS];
#pragma GCC unroll 16
            for (int i = 0; i < K - 1 + ROWS; i++) v[i] = PART(((const WORD_T *)x[i])[j], h);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                ACC z = AT(w, K);
#pragma GCC unroll 4
                for (int k = 0; k < K; k++) z += AT(w, k) * v[r + k];
                y[r][h] = silu ? z / (1 + EXP(-z)) : z;
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) ((WORD_T *)to[r])[j] = WORD(y[r][0], y[r][1]);
    }
}

/* Row t of x, of the state, or zeros. */
XT_INLINE const T *NAME(causal_at)(const T *x, const T *state, const T *zeros, int64_t t, int64_t end, int64_t channels, int K) {
    if (t >= end || (t < 0 && !state)) return zeros;
    return t >= 0 ? x + t * channels : state + (t + K - 1) * channels;
}

XT_INLINE void NAME(causal_fast_fwd)(const XtCausalConv1dFwd *p, int64_t begin, int64_t end, const int K, const bool silu) {
    const int64_t channels = p->channels, steps = p->steps, tiles = (steps + TILE - 1) / TILE;
    ACC w[5 * STRIDE];
    T zeros[WIDE] = {0}, unused[WIDE]; /* in place of rows past the last */
    for (int64_t c0 = 0; c0 < channels; c0 += WIDE) {
        int64_t words = (channels - c0 < WIDE ? channels - c0 : WIDE) / NAME(PACK);
        NAME(causal_fast_weights)(w, (const T *)p->weight + c0 * K, p->bias ? (const T *)p->bias + c0 : NULL, words, K);
        for (int64_t tile = begin; tile < end; tile++) {
            int64_t b = tile / tiles, t0 = tile % tiles * TILE, t1 = t0 + TILE < steps ? t0 + TILE : steps;
            const T *x = (const T *)p->x + b * steps * channels + c0; /* [steps, channels] from here on */
            const T *state = p->state ? (const T *)p->state + b * (K - 1) * channels + c0 : NULL;
            T *y = (T *)p->y + b * steps * channels + c0;
            for (int64_t t = t0; t < t1; t += ROWS) {
                const T *from[3 + ROWS];
                T *to[ROWS];
                for (int i = 0; i < K - 1 + ROWS; i++) from[i] = NAME(causal_at)(x, state, zeros, t - (K - 1) + i, t1, channels, K);
                for (int r = 0; r < ROWS; r++) to[r] = t + r < t1 ? y + (t + r) * channels : unused;
                NAME(causal_rows_fwd)(to, from, w, words, K, silu);
            }
        }
    }
}

/* Computes dz of `rows` rows from dy and x, adds their part of dw and db to sums [K + 1, WIDE], and writes the rows of dx
 * that lie K - 1 rows before them. slopes [K - 1, WIDE]: dz of the rows before these; on return, dz of the last of these. */
XT_INLINE void NAME(causal_rows_bwd)(T *const *to, const T *const *x, const T *const *dy, const ACC *w, ACC *sums, ACC *slopes,
                                     int64_t words, const int K, const int rows, const bool silu) {
#pragma omp simd
    for (int64_t j = 0; j < words; j++) {
        ACC dx[ROWS][2];
#pragma GCC unroll 2
        EACH_PART {
            ACC v[3 + ROWS], g[3 + ROWS], dw[4], db = AT(sums, K);
#pragma GCC unroll 4
            for (int k = 0; k < K; k++) dw[k] = AT(sums, k);
#pragma GCC unroll 4
            for (int k = 0; k < K - 1; k++) v[k] = PART(((const WORD_T *)x[k])[j], h), g[k] = AT(slopes, k);
#pragma GCC unroll 16
            for (int r = 0; r < rows; r++) {
                ACC d = PART(((const WORD_T *)dy[r])[j], h), sum = 0;
                v[K - 1 + r] = PART(((const WORD_T *)x[K - 1 + r])[j], h);
                if (silu) {
                    ACC z = AT(w, K);
#pragma GCC unroll 4
                    for (int k = 0; k < K; k++) z += AT(w, k) * v[r + k];
                    ACC s = 1 / (1 + EXP(-z));
                    d = d * (s * (1 + z * (1 - s)));
                }
                g[K - 1 + r] = d;
#pragma GCC unroll 4
                for (int k = 0; k < K; k++) dw[k] += d * v[r + k];
                db += d;
#pragma GCC unroll 4
                for (int k = 0; k < K; k++) sum += AT(w, k) * g[K - 1 + r - k];
                dx[r][h] = sum;
            }
#pragma GCC unroll 4
            for (int k = 0; k < K; k++) AT(sums, k) = dw[k];
            AT(sums, K) = db;
#pragma GCC unroll 4
            for (int k = 0; k < K - 1; k++) AT(slopes, k) = g[rows + k];
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) ((WORD_T *)to[r])[j] = WORD(dx[r][0], dx[r][1]);
    }
}

/* A row of dx or dstate whose last taps lie past the end, where dz is zero. `more`, its row of dnext or NULL, is added. */
XT_INLINE void NAME(causal_last_row)(T *to, const T *more, const ACC *w, ACC *slopes, int64_t words, const int K) {
    for (int64_t j = 0; j < words; j++) EACH_PART {
            ACC sum = AT(w, 0) * 0 + 0; /* NaN where the tap is Inf */
            for (int k = 1; k < K; k++) sum += AT(w, k) * AT(slopes, K - 1 - k);
            int64_t c = j * NAME(PACK) + h;
            to[c] = more ? STORE(sum + LOAD(more[c])) : STORE(sum);
            for (int k = 0; k + 2 < K; k++) AT(slopes, k) = AT(slopes, k + 1);
            AT(slopes, K - 2) = 0;
        }
}

XT_INLINE void NAME(causal_fast_bwd)(const CausalBwdJob *job, int64_t begin, int64_t end, const int K, const bool silu) {
    const XtCausalConv1dBwd *p = job->p;
    const int64_t channels = p->channels, steps = p->steps, tiles = steps > 0 ? (steps + TILE - 1) / TILE : 1;
    ACC w[5 * STRIDE], sums[5 * STRIDE], slopes[3 * STRIDE];
    ACC others[5 * STRIDE] = {0}; /* sums of rows that belong to another tile: not used */
    T zeros[WIDE] = {0}, unused[WIDE];
    for (int64_t c0 = 0; c0 < channels; c0 += WIDE) {
        int64_t words = (channels - c0 < WIDE ? channels - c0 : WIDE) / NAME(PACK);
        NAME(causal_fast_weights)(w, (const T *)p->weight + c0 * K, p->bias ? (const T *)p->bias + c0 : NULL, words, K);
        memset(sums, 0, sizeof sums);
        for (int64_t tile = begin; tile < end; tile++) {
            int64_t b = tile / tiles, t0 = tile % tiles * TILE, t1 = t0 + TILE < steps ? t0 + TILE : steps;
            int64_t before = b * steps * channels + c0, kept = b * (K - 1) * channels + c0;
            const T *x = (const T *)p->x + before, *dy = (const T *)p->dy + before,
                    *state = p->state ? (const T *)p->state + kept : NULL;
            memset(slopes, 0, sizeof slopes);
            for (int64_t t = t0; t < t1 + K - 1;) {
                const int rows = t + ROWS <= t1 ? ROWS : 1;
                const T *from[3 + ROWS], *slope[ROWS];
                T *to[ROWS];
                for (int r = 0; r < rows; r++) {
                    int64_t done = t + r - (K - 1); /* the row of dx, or of dstate when negative */
                    to[r] = unused;
                    if (done >= t0 && p->dx) to[r] = (T *)p->dx + before + done * channels;
                    if (done < 0 && p->dstate) to[r] = (T *)p->dstate + kept + (done + K - 1) * channels;
                }
                if (t >= steps) {
                    const T *more = p->dnext ? (const T *)p->dnext + kept + (t - steps) * channels : NULL;
                    NAME(causal_last_row)(to[0], more, w, slopes, words, K);
                    t++;
                    continue;
                }
                for (int i = 0; i < K - 1 + rows; i++)
                    from[i] = NAME(causal_at)(x, state, zeros, t - (K - 1) + i, steps, channels, K);
                for (int r = 0; r < rows; r++) slope[r] = dy + (t + r) * channels;
                if (rows == ROWS) NAME(causal_rows_bwd)(to, from, slope, w, sums, slopes, words, K, ROWS, silu);
                else NAME(causal_rows_bwd)(to, from, slope, w, t < t1 ? sums : others, slopes, words, K, 1, silu);
                t += rows;
            }
        }
        ACC *part = (ACC *)job->partial + begin / job->grain * (K + 1) * job->stride + c0;
        for (int64_t k = 0; k <= K; k++)
            for (int64_t j = 0; j < words; j++) EACH_PART part[k * job->stride + j * NAME(PACK) + h] = AT(sums, k);
    }
}

#define BY_TAPS(K, function, p, ...)                         \
    case K:                                                  \
        if ((p)->silu) NAME(function)(__VA_ARGS__, K, true); \
        else NAME(function)(__VA_ARGS__, K, false);          \
        break;

XT_FAST static XtStatus NAME(causal_fwd_fast)(const XtCausalConv1dFwd *p, int64_t begin, int64_t end) {
    switch (p->taps) {
        BY_TAPS(2, causal_fast_fwd, p, p, begin, end)
        BY_TAPS(3, causal_fast_fwd, p, p, begin, end)
        BY_TAPS(4, causal_fast_fwd, p, p, begin, end)
    }
    return XT_OK;
}
XT_FAST static XtStatus NAME(causal_bwd_fast)(const CausalBwdJob *job, int64_t begin, int64_t end) {
    switch (job->p->taps) {
        BY_TAPS(2, causal_fast_bwd, job->p, job, begin, end)
        BY_TAPS(3, causal_fast_bwd, job->p, job, begin, end)
        BY_TAPS(4, causal_fast_bwd, job->p, job, begin, end)
    }
    return XT_OK;
}
#undef BY_TAPS
#undef PART
#undef WORD
#undef WORD_T
#undef EACH_PART
#undef AT
#endif

/* Tiles [begin, end) of all samples. */
XT_FAST static XtStatus NAME(causal_conv1d_fwd)(void *context, int64_t begin, int64_t end) {
    const XtCausalConv1dFwd *p = context;
#if NAME(PACK)
    if (NAME(causal_is_fast)(p->channels, p->taps)) return NAME(causal_fwd_fast)(p, begin, end);
#endif
    int64_t channels = p->channels, steps = p->steps, tiles = (steps + TILE - 1) / TILE;
    int taps = p->taps;
    ACC w[XT_CONV_TAPS * BLOCK], bias[BLOCK], room[XT_CONV_TAPS][BLOCK], z[BLOCK];
    const ACC *row[XT_CONV_TAPS]; /* the last `taps` rows, the oldest first */
    for (int64_t c0 = 0; c0 < channels; c0 += BLOCK) {
        int64_t count = channels - c0 < BLOCK ? channels - c0 : BLOCK;
        NAME(causal_weights)(p->weight, p->bias, c0, count, taps, w, bias);
        for (int64_t tile = begin; tile < end; tile++) {
            int64_t b = tile / tiles, t0 = tile % tiles * TILE, t1 = t0 + TILE < steps ? t0 + TILE : steps;
            const T *x = (const T *)p->x + b * steps * channels + c0; /* [steps, channels] from here on */
            const T *state = p->state ? (const T *)p->state + b * (taps - 1) * channels + c0 : NULL;
            T *y = (T *)p->y + b * steps * channels + c0;
            for (int k = 1; k < taps; k++)
                row[k] = NAME(causal_row)(x, state, t0 - taps + k, steps, channels, taps, count, room[k]);
            int slot = 0; /* the row of `room` that the next row of x may take */
            for (int64_t t = t0; t < t1; t++) {
                for (int k = 0; k + 1 < taps; k++) row[k] = row[k + 1];
                row[taps - 1] = NAME(causal_row)(x, state, t, steps, channels, taps, count, room[slot]);
                slot = slot + 1 < taps ? slot + 1 : 0;
                NAME(causal_sums)(z, bias, w, row, count, taps);
                T *to = y + t * channels;
                if (p->silu) {
#pragma omp simd
                    for (int64_t j = 0; j < count; j++) to[j] = STORE(z[j] / (1 + EXP(-z[j])));
                } else {
#pragma omp simd
                    for (int64_t j = 0; j < count; j++) to[j] = STORE(z[j]);
                }
            }
        }
    }
    return XT_OK;
}

/* Rows [begin, end) of next [batch * (taps - 1), channels]. */
static XtStatus NAME(causal_conv1d_next)(void *context, int64_t begin, int64_t end) {
    const XtCausalConv1dFwd *p = context;
    int64_t kept = p->taps - 1, channels = p->channels;
    for (int64_t row = begin; row < end; row++) {
        int64_t b = row / kept, t = row % kept + p->steps - kept; /* the row of x, or of the state when negative */
        T *to = (T *)p->next + row * channels;
        const T *from = NULL; /* stays NULL before the first row where there is no state: zeros */
        if (t >= 0) from = (const T *)p->x + (b * p->steps + t) * channels;
        else if (p->state) from = (const T *)p->state + (b * kept + t + kept) * channels;
        if (from) memcpy(to, from, (size_t)channels * sizeof(T));
        else memset(to, 0, (size_t)channels * sizeof(T));
    }
    return XT_OK;
}

/* One tile, row by row: row t gives dz[t], adds to dw and db if t < t1, and completes row t - (K - 1) of dx. part [K + 1, stride]. */
XT_INLINE void NAME(causal_tile_bwd)(const CausalBwdJob *job, int64_t b, int64_t c0, int64_t t0, int64_t t1, int64_t count,
                                     const ACC *bias, const ACC *w, ACC *part) {
    const XtCausalConv1dBwd *p = job->p;
    const int K = p->taps;
    int64_t channels = p->channels, steps = p->steps, before = b * steps * channels + c0, kept = b * (K - 1) * channels + c0;
    const T *x = (const T *)p->x + before, *dy = (const T *)p->dy + before; /* [steps, channels] from here on */
    const T *state = p->state ? (const T *)p->state + kept : NULL;          /* [K - 1, channels] */
    ACC room[XT_CONV_TAPS][BLOCK], slopes[XT_CONV_TAPS][BLOCK] = {{0}}, z[BLOCK], zeros[BLOCK] = {0};
    const ACC *row[XT_CONV_TAPS],
        *dz[XT_CONV_TAPS]; /* the last K: of x, the oldest first; of dz, the newest first, which tap 0 meets */
    for (int k = 0; k < K; k++) dz[k] = slopes[K - 1 - k];
    for (int k = 1; k < K; k++) row[k] = NAME(causal_row)(x, state, t0 - K + k, steps, channels, K, count, room[k]);
    int slot = 0;
    for (int64_t t = t0; t < t1 + K - 1; t++) {
        ACC *g = slopes[slot];
        for (int k = 0; k + 1 < K; k++) row[k] = row[k + 1], dz[K - 1 - k] = dz[K - 2 - k];
        row[K - 1] = NAME(causal_row)(x, state, t, steps, channels, K, count, room[slot]);
        dz[0] = g;
        slot = slot + 1 < K ? slot + 1 : 0;
        if (t >= steps) {
            for (int64_t j = 0; j < count; j++) g[j] = 0;
        } else if (p->silu) {
            const T *d = dy + t * channels;
            NAME(causal_sums)(z, bias, w, row, count, K);
#pragma omp simd
            for (int64_t j = 0; j < count; j++) {
                ACC s = 1 / (1 + EXP(-z[j]));
                g[j] = LOAD(d[j]) * (s * (1 + z[j] * (1 - s)));
            }
        } else {
            const T *d = dy + t * channels;
#pragma omp simd
            for (int64_t j = 0; j < count; j++) g[j] = LOAD(d[j]);
        }
        if (t < t1) {
            ACC *db = part + K * job->stride;
            for (int k = 0; k < K; k++) {
                ACC *dw = part + k * job->stride;
                const ACC *r = row[k];
#pragma omp simd
                for (int64_t j = 0; j < count; j++) dw[j] += g[j] * r[j];
            }
#pragma omp simd
            for (int64_t j = 0; j < count; j++) db[j] += g[j];
        }
        int64_t done = t - (K - 1); /* the row of dx, or of dstate when negative */
        if (done < t0 && t0 > 0) continue;
        T *to = done >= 0 && p->dx ? (T *)p->dx + before + done * channels : NULL;
        if (done < 0 && p->dstate) to = (T *)p->dstate + kept + (done + K - 1) * channels;
        if (!to) continue;
        int64_t place = done - steps + K - 1; /* in next */
        const T *more = p->dnext && place >= 0 ? (const T *)p->dnext + kept + place * channels : NULL;
        NAME(causal_sums)(z, zeros, w, dz, count, K);
        if (more) {
#pragma omp simd
            for (int64_t j = 0; j < count; j++) to[j] = STORE(z[j] + LOAD(more[j]));
        } else {
#pragma omp simd
            for (int64_t j = 0; j < count; j++) to[j] = STORE(z[j]);
        }
    }
}

/* Tiles [begin, end) of all samples: one piece. */
XT_FAST static XtStatus NAME(causal_conv1d_bwd)(void *context, int64_t begin, int64_t end) {
    const CausalBwdJob *job = context;
    const XtCausalConv1dBwd *p = job->p;
#if NAME(PACK)
    if (NAME(causal_is_fast)(p->channels, p->taps)) return NAME(causal_bwd_fast)(job, begin, end);
#endif
    int64_t channels = p->channels, tiles = p->steps > 0 ? (p->steps + TILE - 1) / TILE : 1;
    ACC w[XT_CONV_TAPS * BLOCK], bias[BLOCK];
    for (int64_t c0 = 0; c0 < channels; c0 += BLOCK) {
        int64_t count = channels - c0 < BLOCK ? channels - c0 : BLOCK;
        ACC *part = (ACC *)job->partial + begin / job->grain * (p->taps + 1) * job->stride + c0;
        NAME(causal_weights)(p->weight, p->bias, c0, count, p->taps, w, bias);
        for (int64_t tile = begin; tile < end; tile++) {
            int64_t b = tile / tiles, t0 = tile % tiles * TILE, t1 = t0 + TILE < p->steps ? t0 + TILE : p->steps;
            NAME(causal_tile_bwd)(job, b, c0, t0, t1, count, bias, w, part);
        }
    }
    return XT_OK;
}

/* dweight and dbias of channels [begin, end): the sums of the pieces, added in order. */
XT_FAST static XtStatus NAME(causal_conv1d_sums)(void *context, int64_t begin, int64_t end) {
    const CausalBwdJob *job = context;
    const XtCausalConv1dBwd *p = job->p;
    for (int k = 0; k <= p->taps; k++) {
        ACC *first = (ACC *)job->partial + k * job->stride;
        for (int64_t i = 1; i < job->pieces; i++) {
            const ACC *part = first + i * (p->taps + 1) * job->stride;
#pragma omp simd
            for (int64_t c = begin; c < end; c++) first[c] += part[c];
        }
        for (int64_t c = begin; c < end; c++) {
            if (k < p->taps && p->dweight) ((T *)p->dweight)[c * p->taps + k] = STORE(first[c]);
            if (k == p->taps && p->dbias) ((T *)p->dbias)[c] = STORE(first[c]);
        }
    }
    return XT_OK;
}

#endif
