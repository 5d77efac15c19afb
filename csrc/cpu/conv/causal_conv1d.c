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
 * dw and db: every piece of tiles adds up rows of its own; then these are added in order.
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
    /* Rows begin at multiples of 128 bytes, and are 128 bytes longer than that takes: without, the backward of 1024 and 4096 channels took
     * 5 % more time on an EPYC, perhaps since rows lay whole pages apart, in the same sets of the first cache. */
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

/* `count` channels of row t of x, which may lie in the state or before it, in ACC: the row itself where that is its type, else in `room`. */
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

/* Tiles [begin, end) of all samples. */
XT_FAST static XtStatus NAME(causal_conv1d_fwd)(void *context, int64_t begin, int64_t end) {
    const XtCausalConv1dFwd *p = context;
    int64_t channels = p->channels, steps = p->steps, tiles = (steps + TILE - 1) / TILE;
    int taps = p->taps;
    ACC w[XT_CONV_TAPS * BLOCK], bias[BLOCK], room[XT_CONV_TAPS][BLOCK], z[BLOCK];
    const ACC *row[XT_CONV_TAPS]; /* the last `taps`, the oldest first */
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
        const T *from = NULL; /* before the first row without a state: zeros */
        if (t >= 0) from = (const T *)p->x + (b * p->steps + t) * channels;
        else if (p->state) from = (const T *)p->state + (b * kept + t + kept) * channels;
        if (from) memcpy(to, from, (size_t)channels * sizeof(T));
        else memset(to, 0, (size_t)channels * sizeof(T));
    }
    return XT_OK;
}

/* Steps of one tile: row t gives dz[t], for t < t1 its share of dw and db, and completes row t - (K - 1) of dx. part [K + 1, stride]. */
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

/* dweight and dbias of channels [begin, end), the pieces in order. */
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
