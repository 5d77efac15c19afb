/* mhc_pre.c - the way out of the streams of hyper-connections (Xie et al. 2025, https://arxiv.org/abs/2512.24880).
 *
 *     forward    r = (mean v^2 + norm_eps)^-1/2,  u = phi (v gamma),  z = a r u + bias
 *                h_pre = sigmoid(z_pre) + hc_eps,  h_post = 2 sigmoid(z_post),  h_res = z_res,  h_in = sum_j h_pre_j x_j
 *     backward   delta = dz;  dq = a delta;  du = r dq;  kappa = -(dq . u) r^3 / K;  S = sum_t du_t v_t^T
 *                dx = gamma (phi^T du) + kappa v + h_pre_j dh_in + sum_i M_ij g_i,  dphi = S gamma,  dgamma = sum_j phi_j S_j
 *
 * v = x of a token as a vector [K], a = alpha by block of rows. gamma is put into a copy of phi before anything else: phi gamma
 * serves u and dx alike. The products with phi take four tokens and four of its rows at a time, in chunks of columns that are still
 * in the cache for the next tokens. dx is made by pieces of tokens. S is made by pieces of columns, each of which walks over all
 * tokens in order: no partial sums of the size of phi. dbias and dalpha are added up per piece of tokens, then over the pieces in
 * order.
 */
#ifndef T
#include "contract/mhc.h"
#include "cpu/kernel.h"

#include <stdlib.h>

#define TILE 16       /* tokens that use a chunk of phi while it is in the cache */
#define CHUNK 512     /* columns in a chunk */
#define S_COLS 128    /* columns in a piece of S */
#define TOGETHER 8    /* tokens added to S at a time */
#define STRETCH 256   /* tokens added up from zero */
#define MAX_STREAMS 8 /* of the contract */
#define MAX_ROWS 80   /* n^2 + 2n, already a multiple of 4 */

typedef struct MhcPreJob {
    const XtMhcPreFwd *fwd;
    const XtMhcPreBwd *bwd;
    const void *phi; /* [m, K] of ACC: phi gamma */
    void *du;        /* [T, m] of ACC: backward */
    double *sums;    /* [pieces, MAX_ROWS + 3]: dbias and dalpha of a piece; backward */
    int64_t grain;   /* tokens in a piece */
    int64_t m, k;
} MhcPreJob;

#define XT_TEMPLATE "cpu/mhc/mhc_pre.c"
#include "cpu/each_float.h"

/* Tokens in a piece: whole tiles, more of them when tokens are small. */
static int64_t token_grain(int64_t k) { return TILE * xt_row_grain(k, 512); }

/* job->phi, and room for what the backward keeps. */
static XtStatus prepare(MhcPreJob *job, const void *phi, const void *gamma, XtDtype dtype, int64_t tokens, bool backward,
                        void **scratch) {
    size_t item = xt_dtype_size(xt_dtype_accumulator(dtype)), pieces = (size_t)((tokens + job->grain - 1) / job->grain);
    size_t phi_items = gamma ? (size_t)(job->m * job->k) : 0, du_items = backward ? (size_t)(tokens * job->m) : 0;
    size_t sum_items = backward ? pieces * (MAX_ROWS + 3) : 0, nbytes = (phi_items + du_items) * item + sum_items * sizeof(double);
    *scratch = NULL;
    job->phi = phi;
    if (nbytes == 0) return XT_OK;
    XT_CHECK(xt_need_float("phi", dtype));
    double *room = *scratch = malloc(nbytes);
    if (!room) return xt_error(XT_OUT_OF_MEMORY, "mhc_pre: scratch of %zu bytes could not be allocated", nbytes);
    if (gamma) {
        XT_BY_FLOAT(dtype, mhc_fold)(room + sum_items, phi, gamma, job->m, job->k);
        job->phi = room + sum_items;
    }
    job->sums = room;
    job->du = (char *)(room + sum_items) + phi_items * item;
    return XT_OK;
}

XtStatus xt_cpu_mhc_pre_fwd(const XtMhcPreFwd *p) {
    int64_t n = p->streams, k = n * p->cols;
    MhcPreJob job = {.fwd = p, .grain = token_grain(k), .m = n * n + 2 * n, .k = k};
    void *scratch;
    XtStatus status = prepare(&job, p->phi, p->gamma, p->dtype, p->tokens, false, &scratch);
    if (status == XT_OK) status = xt_parallel(p->tokens, job.grain, XT_BY_FLOAT(p->dtype, mhc_pre_fwd), &job);
    free(scratch);
    return status;
}

XtStatus xt_cpu_mhc_pre_bwd(const XtMhcPreBwd *p) {
    int64_t n = p->streams, k = n * p->cols;
    MhcPreJob job = {.bwd = p, .grain = token_grain(k), .m = n * n + 2 * n, .k = k};
    void *scratch;
    XtStatus status = prepare(&job, p->phi, p->gamma, p->dtype, p->tokens, true, &scratch);
    if (status == XT_OK) status = xt_parallel(p->tokens, job.grain, XT_BY_FLOAT(p->dtype, mhc_pre_dx), &job);
    if (status == XT_OK) XT_BY_FLOAT(p->dtype, mhc_pre_sums)(&job);
    if (status == XT_OK && (p->dphi || p->dgamma)) status = xt_parallel(k, S_COLS, XT_BY_FLOAT(p->dtype, mhc_pre_dphi), &job);
    free(scratch);
    return status;
}

#else
#include "mhc.h"

/* out [m, k] = phi, each column times gamma [k]. */
XT_FAST static void NAME(mhc_fold)(void *out, const void *phi, const void *gamma, int64_t m, int64_t k) {
    const ACC *from = phi, *scale = gamma;
    ACC *to = out;
    for (int64_t r = 0; r < m; r++)
#pragma omp simd
        for (int64_t i = 0; i < k; i++) to[r * k + i] = from[r * k + i] * scale[i];
}

/* u [4, MAX_ROWS]: the first 4 of each row += v . rows of phi. v[4], p0 .. p3 [count]. Sixteen sums stay in AVX-512 registers:
 * twice as fast as eight; AVX2, with half the registers, spills and loses a seventh. */
XT_INLINE void NAME(mhc_mix_4x4)(ACC *u, const ACC *const v[4], const ACC *p0, const ACC *p1, const ACC *p2, const ACC *p3,
                                 int64_t count) {
    const ACC *v0 = v[0], *v1 = v[1], *v2 = v[2], *v3 = v[3];
    ACC a00 = 0, a01 = 0, a02 = 0, a03 = 0;
    ACC a10 = 0, a11 = 0, a12 = 0, a13 = 0;
    ACC a20 = 0, a21 = 0, a22 = 0, a23 = 0;
    ACC a30 = 0, a31 = 0, a32 = 0, a33 = 0;
#pragma omp simd reduction(+ : a00, a01, a02, a03, a10, a11, a12, a13, a20, a21, a22, a23, a30, a31, a32, a33)
    for (int64_t i = 0; i < count; i++) {
        a00 += v0[i] * p0[i], a01 += v0[i] * p1[i], a02 += v0[i] * p2[i], a03 += v0[i] * p3[i];
        a10 += v1[i] * p0[i], a11 += v1[i] * p1[i], a12 += v1[i] * p2[i], a13 += v1[i] * p3[i];
        a20 += v2[i] * p0[i], a21 += v2[i] * p1[i], a22 += v2[i] * p2[i], a23 += v2[i] * p3[i];
        a30 += v3[i] * p0[i], a31 += v3[i] * p1[i], a32 += v3[i] * p2[i], a33 += v3[i] * p3[i];
    }
    u[0 * MAX_ROWS] += a00, u[0 * MAX_ROWS + 1] += a01, u[0 * MAX_ROWS + 2] += a02, u[0 * MAX_ROWS + 3] += a03;
    u[1 * MAX_ROWS] += a10, u[1 * MAX_ROWS + 1] += a11, u[1 * MAX_ROWS + 2] += a12, u[1 * MAX_ROWS + 3] += a13;
    u[2 * MAX_ROWS] += a20, u[2 * MAX_ROWS + 1] += a21, u[2 * MAX_ROWS + 2] += a22, u[2 * MAX_ROWS + 3] += a23;
    u[3 * MAX_ROWS] += a30, u[3 * MAX_ROWS + 1] += a31, u[3 * MAX_ROWS + 2] += a32, u[3 * MAX_ROWS + 3] += a33;
}

/* h_in [cols] = sum_j h_j x_j, x [n, cols]. */
XT_INLINE void NAME(mhc_h_in)(T *h_in, const ACC *h, const T *x, int64_t n, int64_t cols) {
#pragma omp simd
    for (int64_t c = 0; c < cols; c++) {
        ACC sum = 0;
        for (int64_t j = 0; j < n; j++) sum += h[j] * LOAD(x[j * cols + c]);
        h_in[c] = STORE(sum);
    }
}

/* From u [m] and sum v^2 of token t to its coefficients. */
XT_INLINE void NAME(mhc_coefficients)(const XtMhcPreFwd *p, const ACC *u, double squares, int64_t t) {
    int64_t n = p->streams, m = n * n + 2 * n;
    const ACC *alpha = p->alpha, *bias = p->bias;                             /* [3], [m] */
    ACC *h_pre = (ACC *)p->h_pre + t * n, *h_post = (ACC *)p->h_post + t * n; /* [n] */
    ACC *h_res = (ACC *)p->h_res + t * n * n, *mix = (ACC *)p->mix + t * m;   /* [n, n], [m] */
    ACC r = (ACC)(1 / sqrt(squares / (double)(n * p->cols) + p->norm_eps));
    ((ACC *)p->rstd)[t] = r;
    for (int64_t i = 0; i < m; i++) mix[i] = u[i];
    for (int64_t i = 0; i < n; i++) h_pre[i] = 1 / (1 + EXP(-(alpha[0] * (r * u[i]) + bias[i]))) + (ACC)p->hc_eps;
    for (int64_t i = 0; i < n; i++) h_post[i] = 2 / (1 + EXP(-(alpha[1] * (r * u[n + i]) + bias[n + i])));
    for (int64_t i = 2 * n; i < m; i++) h_res[i - 2 * n] = alpha[2] * (r * u[i]) + bias[i];
}

/* Tokens [t0, t0 + count), count <= TILE. */
XT_INLINE void NAME(mhc_pre_tile)(const MhcPreJob *job, int64_t t0, int64_t count) {
    const XtMhcPreFwd *p = job->fwd;
    int64_t n = p->streams, cols = p->cols, m = job->m, k = job->k;
    const ACC *phi = job->phi;             /* [m, k] */
    const T *x = (const T *)p->x + t0 * k; /* [count, k] */
    ACC u[TILE * MAX_ROWS], v[TILE * CHUNK];
    double squares[TILE] = {0};
    memset(u, 0, sizeof u);
    for (int64_t k0 = 0; k0 < k; k0 += CHUNK) {
        int64_t width = k - k0 < CHUNK ? k - k0 : CHUNK;
        for (int64_t t = 0; t < count; t++) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) v[t * CHUNK + i] = LOAD(x[t * k + k0 + i]);
            /* r multiplies everything: short sums in ACC, added up in double, keep it exact to the last place on any vectors. */
            for (int64_t i = 0; i < width; i += 64) {
                const ACC *part = v + t * CHUNK + i;
                int64_t many = width - i < 64 ? width - i : 64;
                ACC sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t e = 0; e < many; e++) sum += part[e] * part[e];
                squares[t] += sum;
            }
        }
        for (int64_t t = 0; t < count; t += 4) { /* tokens beyond count fill rows of u that nobody reads */
            const ACC *of[4];                    /* [width] */
            for (int i = 0; i < 4; i++) of[i] = v + (t + i < count ? t + i : t) * CHUNK;
            for (int64_t r = 0; r < m; r += 4) { /* rows beyond m repeat the last one */
                const ACC *p0 = phi + r * k + k0, *p1 = r + 1 < m ? p0 + k : p0;
                const ACC *p2 = r + 2 < m ? p1 + k : p1, *p3 = r + 3 < m ? p2 + k : p2;
                NAME(mhc_mix_4x4)(u + t * MAX_ROWS + r, of, p0, p1, p2, p3, width);
            }
        }
    }
    for (int64_t t = 0; t < count; t++) {
        T *h_in = (T *)p->h_in + (t0 + t) * cols;            /* [cols] */
        const ACC *h = (const ACC *)p->h_pre + (t0 + t) * n; /* [n] */
        NAME(mhc_coefficients)(p, u + t * MAX_ROWS, squares[t], t0 + t);
        if (n == 4) NAME(mhc_h_in)(h_in, h, x + t * k, 4, cols);
        else if (n == 2) NAME(mhc_h_in)(h_in, h, x + t * k, 2, cols);
        else NAME(mhc_h_in)(h_in, h, x + t * k, n, cols);
    }
}

XT_FAST static XtStatus NAME(mhc_pre_fwd)(void *context, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t += TILE) NAME(mhc_pre_tile)(context, t, end - t < TILE ? end - t : TILE);
    return XT_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------------------- */

/* Of token t: du [m], *kappa, and what it adds to sums = dbias [m], then dalpha [3] from MAX_ROWS on. */
XT_INLINE void NAME(mhc_deltas)(const XtMhcPreBwd *p, int64_t t, ACC *du, ACC *kappa, double *sums) {
    int64_t n = p->streams, cols = p->cols, m = n * n + 2 * n, k = n * cols;
    const T *dh_in = (const T *)p->dh_in + t * cols, *x = (const T *)p->x + t * k;                      /* [cols], [n, cols] */
    const ACC *alpha = p->alpha, *u = (const ACC *)p->mix + t * m, r = ((const ACC *)p->rstd)[t];       /* [3], [m] */
    const ACC *dh_post = (const ACC *)p->dh_post + t * n, *dh_res = (const ACC *)p->dh_res + t * n * n; /* [n], [n, n] */
    const ACC *bias = p->bias;                                                                          /* [m] */
    ACC dh_pre[MAX_STREAMS] = {0}, dot = 0;
    for (int64_t c = 0; c < cols; c += CHUNK)
        NAME(mhc_dots)(dh_pre, dh_in + c, x + c, n, cols, cols - c < CHUNK ? cols - c : CHUNK);
    for (int64_t i = 0; i < m; i++) { /* delta, dq and du of all three blocks in one place */
        int block = i < n ? 0 : i < 2 * n ? 1 : 2;
        ACC delta = block == 0 ? dh_pre[i] : block == 1 ? 2 * dh_post[i - n] : dh_res[i - 2 * n];
        if (block < 2) { /* s (1 - s) from z: from s it would lose the digits of 1 - s where s is almost 1 */
            ACC z = alpha[block] * (r * u[i]) + bias[i], e = EXP(z < 0 ? z : -z);
            delta *= e / ((1 + e) * (1 + e));
        }
        ACC dq = alpha[block] * delta;
        sums[i] += delta;
        sums[MAX_ROWS + block] += (double)delta * (r * u[i]);
        dot += dq * u[i];
        du[i] = r * dq;
    }
    *kappa = -dot * r * r * r / (ACC)k;
}

/* w0[i] = sum_r du0_r phi_r,i, w1 alike: width columns from k0 on. */
XT_INLINE void NAME(mhc_unmix)(ACC *w0, ACC *w1, const ACC *du0, const ACC *du1, const ACC *phi, int64_t m, int64_t k,
                               int64_t width) {
    int64_t r = 0;
    for (int64_t i = 0; i < width; i++) w0[i] = w1[i] = 0;
    for (; r + 4 <= m; r += 4) {
        const ACC *p0 = phi + r * k, *p1 = p0 + k, *p2 = p1 + k, *p3 = p2 + k; /* [width] */
        ACC a0 = du0[r], a1 = du0[r + 1], a2 = du0[r + 2], a3 = du0[r + 3];
        ACC b0 = du1[r], b1 = du1[r + 1], b2 = du1[r + 2], b3 = du1[r + 3];
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            w0[i] += a0 * p0[i] + a1 * p1[i] + (a2 * p2[i] + a3 * p3[i]);
            w1[i] += b0 * p0[i] + b1 * p1[i] + (b2 * p2[i] + b3 * p3[i]);
        }
    }
    for (; r < m; r++) {
        const ACC *p0 = phi + r * k; /* [width] */
        ACC a0 = du0[r], b0 = du1[r];
#pragma omp simd
        for (int64_t i = 0; i < width; i++) w0[i] += a0 * p0[i], w1[i] += b0 * p0[i];
    }
}

/* The rest of dx, for `width` channels from c0 on of stream j of token t; w [width] is gamma phi^T du of them. */
XT_INLINE void NAME(mhc_dx)(const XtMhcPreBwd *p, ACC *w, ACC kappa, int64_t t, int64_t j, int64_t c0, int64_t width) {
    int64_t n = p->streams, cols = p->cols, at = (t * n + j) * cols + c0;
    const T *x = (const T *)p->x + at, *dh_in = (const T *)p->dh_in + t * cols + c0; /* [width] */
    const T *more = p->dx_add ? (const T *)p->dx_add + at : NULL;                    /* [width], may be dx */
    T *dx = (T *)p->dx + at;                                                         /* [width] */
    ACC h = ((const ACC *)p->h_pre)[t * n + j];
    if (p->dout) {
        const T *g = (const T *)p->dout + t * n * cols + c0;  /* [n, cols] from c0 */
        const ACC *m_res = (const ACC *)p->m_res + t * n * n; /* [n, n] */
        if (n == 4) NAME(mhc_add_rows)(w, m_res + j, 4, g, 4, cols, width);
        else NAME(mhc_add_rows)(w, m_res + j, n, g, n, cols, width);
    }
    if (more)
#pragma omp simd
        for (int64_t i = 0; i < width; i++) w[i] += LOAD(more[i]);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) dx[i] = STORE(w[i] + kappa * LOAD(x[i]) + h * LOAD(dh_in[i]));
}

XT_FAST static XtStatus NAME(mhc_pre_dx)(void *context, int64_t begin, int64_t end) {
    const MhcPreJob *job = context;
    const XtMhcPreBwd *p = job->bwd;
    int64_t n = p->streams, cols = p->cols, m = job->m, k = job->k;
    ACC *du = (ACC *)job->du + begin * m;
    double *sums = job->sums + begin / job->grain * (MAX_ROWS + 3);
    ACC kappa[TILE], w[2 * CHUNK];
    memset(sums, 0, (MAX_ROWS + 3) * sizeof *sums);
    for (int64_t t0 = begin; t0 < end; t0 += TILE, du += TILE * m) {
        int64_t count = end - t0 < TILE ? end - t0 : TILE;
        for (int64_t t = 0; t < count; t++) NAME(mhc_deltas)(p, t0 + t, du + t * m, kappa + t, sums);
        for (int64_t j = 0; p->dx && j < n; j++)
            for (int64_t c0 = 0; c0 < cols; c0 += CHUNK) {
                int64_t width = cols - c0 < CHUNK ? cols - c0 : CHUNK;
                const ACC *phi = (const ACC *)job->phi + j * cols + c0; /* [m, k] from there */
                for (int64_t t = 0; t < count; t += 2) {
                    int64_t next = t + 1 < count ? t + 1 : t;
                    NAME(mhc_unmix)(w, w + CHUNK, du + t * m, du + next * m, phi, m, k, width);
                    NAME(mhc_dx)(p, w, kappa[t], t0 + t, j, c0, width);
                    if (next > t) NAME(mhc_dx)(p, w + CHUNK, kappa[next], t0 + next, j, c0, width);
                }
            }
    }
    return XT_OK;
}

/* dbias [m] and dalpha [3]: the pieces in order. */
static void NAME(mhc_pre_sums)(const MhcPreJob *job) {
    const XtMhcPreBwd *p = job->bwd;
    double sum[MAX_ROWS + 3] = {0};
    for (int64_t piece = 0; piece * job->grain < p->tokens; piece++)
        for (int64_t i = 0; i < MAX_ROWS + 3; i++) sum[i] += job->sums[piece * (MAX_ROWS + 3) + i];
    for (int64_t i = 0; p->dbias && i < job->m; i++) ((ACC *)p->dbias)[i] = (ACC)sum[i];
    for (int64_t i = 0; p->dalpha && i < 3; i++) ((ACC *)p->dalpha)[i] = (ACC)sum[MAX_ROWS + i];
}

/* s [m, S_COLS] += du^T v over `tokens` tokens, `width` columns; du [tokens, m], x [tokens, k] from the first column on. */
XT_INLINE void NAME(mhc_outer)(ACC *s, const ACC *du, const T *x, int64_t tokens, int64_t m, int64_t k, int64_t width) {
    ACC v[TOGETHER * S_COLS];
    int64_t t = 0;
    for (; t + TOGETHER <= tokens; t += TOGETHER) {
        for (int64_t i = 0; i < TOGETHER; i++)
#pragma omp simd
            for (int64_t c = 0; c < width; c++) v[i * S_COLS + c] = LOAD(x[(t + i) * k + c]);
        const ACC *v0 = v, *v1 = v + S_COLS, *v2 = v1 + S_COLS, *v3 = v2 + S_COLS;
        const ACC *v4 = v3 + S_COLS, *v5 = v4 + S_COLS, *v6 = v5 + S_COLS, *v7 = v6 + S_COLS;
        for (int64_t r = 0; r < m; r++) {
            ACC *to = s + r * S_COLS;
            const ACC *d = du + t * m + r;
            ACC d0 = d[0], d1 = d[m], d2 = d[2 * m], d3 = d[3 * m], d4 = d[4 * m], d5 = d[5 * m], d6 = d[6 * m], d7 = d[7 * m];
#pragma omp simd
            for (int64_t c = 0; c < width; c++)
                to[c] += ((d0 * v0[c] + d1 * v1[c]) + (d2 * v2[c] + d3 * v3[c])) +
                         ((d4 * v4[c] + d5 * v5[c]) + (d6 * v6[c] + d7 * v7[c]));
        }
    }
    for (; t < tokens; t++)
        for (int64_t r = 0; r < m; r++) {
            ACC d = du[t * m + r];
#pragma omp simd
            for (int64_t c = 0; c < width; c++) s[r * S_COLS + c] += d * LOAD(x[t * k + c]);
        }
}

/* Columns [begin, end) of S, at most S_COLS, then of dphi and dgamma. S is added up in stretches of tokens, which keeps the
 * rounding of long sums small; dgamma, a short sum of large terms that cancel, in double. */
XT_FAST static XtStatus NAME(mhc_pre_dphi)(void *context, int64_t begin, int64_t end) {
    const MhcPreJob *job = context;
    const XtMhcPreBwd *p = job->bwd;
    int64_t m = job->m, k = job->k, width = end - begin;
    const T *x = (const T *)p->x + begin;                               /* [T, k] from there */
    const ACC *du = job->du;                                            /* [T, m] */
    const ACC *gamma = p->gamma ? (const ACC *)p->gamma + begin : NULL; /* [width] */
    const ACC *phi = (const ACC *)p->phi + begin;                       /* [m, k] from there */
    ACC s[MAX_ROWS * S_COLS], part[MAX_ROWS * S_COLS];                  /* [m, S_COLS] */
    memset(s, 0, (size_t)m * S_COLS * sizeof *s);
    NAME(mhc_outer)(s, du, x, p->tokens < STRETCH ? p->tokens : STRETCH, m, k, width);
    for (int64_t t = STRETCH; t < p->tokens; t += STRETCH) {
        memset(part, 0, (size_t)m * S_COLS * sizeof *part);
        NAME(mhc_outer)(part, du + t * m, x + t * k, p->tokens - t < STRETCH ? p->tokens - t : STRETCH, m, k, width);
        for (int64_t i = 0; i < m * S_COLS; i++) s[i] += part[i];
    }
    if (p->dgamma) {
        double sum[S_COLS] = {0};
        for (int64_t r = 0; r < m; r++)
#pragma omp simd
            for (int64_t c = 0; c < width; c++) sum[c] += (double)phi[r * k + c] * s[r * S_COLS + c];
        for (int64_t c = 0; c < width; c++) ((ACC *)p->dgamma)[begin + c] = (ACC)sum[c];
    }
    for (int64_t r = 0; p->dphi && r < m; r++) {
        ACC *dphi = (ACC *)p->dphi + r * k + begin; /* [width] */
        for (int64_t c = 0; c < width; c++) dphi[c] = s[r * S_COLS + c] * (gamma ? gamma[c] : 1);
    }
    return XT_OK;
}

#endif
