/* random.c - uniform, normal and integer fills. What a word becomes is in core/philox.h; here blocks become dense stretches of
 * dst. */
#include "contract/elementwise.h"
#include "core/philox.h"
#include "cpu/strided.h"

enum {
    BATCH = 64,   /* Philox blocks made at a time: 256 words */
    GRAIN = 4096, /* Philox blocks of a parallel piece */
};

typedef struct Fill {
    const XtRandom *p;
    int64_t numel;
    float top;
} Fill;

XT_FAST static void uniform_batch(float *out, XtPhilox philox, uint64_t block, float low, float span, float top) {
#pragma omp simd
    for (int b = 0; b < BATCH; b++) {
        XtWords words = xt_philox_block(philox, block + (uint64_t)b);
        out[4 * b] = xt_uniform(words.w[0], low, span, top);
        out[4 * b + 1] = xt_uniform(words.w[1], low, span, top);
        out[4 * b + 2] = xt_uniform(words.w[2], low, span, top);
        out[4 * b + 3] = xt_uniform(words.w[3], low, span, top);
    }
}

XT_FAST static void normal_batch(float *out, XtPhilox philox, uint64_t block, float mean, float deviation) {
#pragma omp simd
    for (int b = 0; b < BATCH; b++) {
        XtWords words = xt_philox_block(philox, block + (uint64_t)b);
        float z0, z1, z2, z3;
        xt_box_muller(words.w[0], words.w[1], &z0, &z1);
        xt_box_muller(words.w[2], words.w[3], &z2, &z3);
        out[4 * b] = xt_normal(z0, mean, deviation);
        out[4 * b + 1] = xt_normal(z1, mean, deviation);
        out[4 * b + 2] = xt_normal(z2, mean, deviation);
        out[4 * b + 3] = xt_normal(z3, mean, deviation);
    }
}

static void randint_batch(int64_t *out, XtPhilox philox, uint64_t block, int64_t low, uint64_t range) {
    for (int b = 0; b < BATCH; b++) {
        XtWords words = xt_philox_block(philox, block + (uint64_t)b);
        out[2 * b] = xt_randint(words.w[0], words.w[1], low, range);
        out[2 * b + 1] = xt_randint(words.w[2], words.w[3], low, range);
    }
}

static XtStatus random_piece(void *context, int64_t begin, int64_t end) {
    const Fill *f = context;
    const XtRandom *p = f->p;
    const int64_t per_block = p->kind == XT_RANDINT ? 2 : 4; /* elements of a Philox block */
    const size_t size = xt_dtype_size(p->dst.dtype);
    union {
        float f[BATCH * 4];
        int64_t i[BATCH * 2];
    } made;
    for (int64_t block = begin; block < end; block += BATCH) {
        int64_t first = block * per_block, stop = (block + BATCH < end ? block + BATCH : end) * per_block;
        int64_t n = (stop < f->numel ? stop : f->numel) - first;
        if (p->kind == XT_UNIFORM)
            uniform_batch(made.f, p->philox, (uint64_t)block, (float)p->low, (float)(p->high - p->low), f->top);
        else if (p->kind == XT_NORMAL) normal_batch(made.f, p->philox, (uint64_t)block, (float)p->low, (float)p->high);
        else
            randint_batch(made.i, p->philox, (uint64_t)block, (int64_t)p->low,
                          (uint64_t)(int64_t)p->high - (uint64_t)(int64_t)p->low);
        xt_convert((char *)p->dst.data + (size_t)first * size, p->dst.dtype, &made, p->kind == XT_RANDINT ? XT_INT64 : XT_FLOAT32,
                   n);
    }
    return XT_OK;
}

XtStatus xt_cpu_random(const XtRandom *p) {
    Fill f = {.p = p, .numel = 1};
    for (int d = 0; d < p->dst.ndim; d++) f.numel *= p->dst.shape[d];
    if (p->kind == XT_UNIFORM) f.top = xt_uniform_top(p->dst.dtype, p->low, p->high);
    int64_t per_block = p->kind == XT_RANDINT ? 2 : 4;
    return xt_parallel((f.numel + per_block - 1) / per_block, GRAIN, random_piece, &f);
}
