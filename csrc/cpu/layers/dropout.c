/* dropout.c - zeroes elements at random and scales the others (Srivastava et al. 2014).
 *
 *     out = x m / (1 - p),  m = 0 with probability p, else 1;  hence dx = dy m / (1 - p): the same kernel
 *
 * m is a function of the generator and of the element's number, so that nothing of it is kept: the backward makes it again. The numbers
 * are those of uniform(), on every device.
 */
#ifndef T
#include "contract/layers.h"
#include "core/philox.h"
#include "cpu/kernel.h"

enum {
    BATCH = 64,   /* Philox blocks made at a time: 256 elements */
    GRAIN = 4096, /* Philox blocks of a parallel piece */
};

static XtPhilox generator(const XtDropout *p) {
    if (!p->random) return p->philox;
    return (XtPhilox){(uint64_t)p->random[0], (uint64_t)p->random[1] + p->philox.stream};
}

/* kept[4 b + w] = 1 where word w of block `first` + b keeps its element, else 0. */
XT_FAST static void make_mask(float *kept, XtPhilox philox, uint64_t first, float p) {
#pragma omp simd
    for (int b = 0; b < BATCH; b++) {
        XtWords words = xt_philox_block(philox, first + (uint64_t)b);
        for (int w = 0; w < 4; w++) kept[4 * b + w] = xt_uniform(words.w[w], 0.0f, 1.0f, 1.0f) < p ? 0.0f : 1.0f;
    }
}

#define XT_TEMPLATE "cpu/layers/dropout.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_dropout(const XtDropout *p) {
    return xt_parallel((p->count + 3) / 4, GRAIN, XT_BY_FLOAT(p->dtype, dropout), (void *)p);
}

#else

XT_FAST static XtStatus NAME(dropout)(void *context, int64_t begin, int64_t end) {
    const XtDropout *p = context;
    const XtPhilox philox = generator(p);
    const ACC scale = p->p < 1 ? (ACC)(1 / (1 - p->p)) : 0;
    float kept[4 * BATCH];
    for (int64_t block = begin; block < end; block += BATCH) {
        int64_t first = 4 * block, stop = 4 * (block + BATCH < end ? block + BATCH : end);
        int64_t n = (stop < p->count ? stop : p->count) - first;
        make_mask(kept, philox, (uint64_t)block, (float)p->p);
        const T *x = (const T *)p->x + first; /* [n] */
        T *out = (T *)p->out + first;         /* [n] */
#pragma omp simd
        for (int64_t i = 0; i < n; i++) out[i] = STORE(LOAD(x[i]) * ((ACC)kept[i] * scale));
    }
    return XT_OK;
}

#endif
