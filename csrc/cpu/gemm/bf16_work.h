/* bf16_work.h - what the products of bfloat16 by pairs along k share: op(B) packed into panels of columns, and the work cut for threads.
 *
 *     for each chunk of columns                  op(B) packed once, by all threads, into panels
 *       for each block of rows (a thread's)      multiply() of the kernel, for all panels or some
 *
 * The cut decides no bit where each element of C is one chain over k, whose order follows from K alone: rows and columns are cut to suit
 * threads and caches.
 */
#pragma once

#include "gemm.h"

typedef struct XtBf16Work XtBf16Work;

/* What differs between the kernels. A pair is two neighbours in k, 16 bits each; packed op(B) is [panels][pairs][panel] pairs. */
typedef struct XtBf16Kernel {
    int64_t panel;     /* columns of a panel */
    int64_t whole_k;   /* behind K, zeros fill its panels up to a multiple of this, which is even */
    int64_t most_rows; /* of a piece */
    int64_t step_rows; /* a piece has a multiple of this many rows, or ends with M */
    int64_t alone;     /* multiply-adds that are not worth a second thread, some 20 us */
    /* x [k, ld], `columns` of it -> panels that lie `step` pairs apart; an odd k ends in pairs with zero. */
    void (*pack_rows)(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out, int64_t step);
    /* x [columns, ld], pairs along its rows -> one panel */
    void (*pack_columns)(const uint16_t *x, int64_t ld, int64_t k, int64_t columns, uint32_t *out);
    size_t (*room)(const XtBf16Work *work); /* bytes of scratch for a piece */
    /* rows [m, m + rows) and panels [first, last) of the chunk */
    void (*multiply)(const XtBf16Work *work, int64_t m, int64_t rows, int64_t first, int64_t last, void *room);
} XtBf16Kernel;

struct XtBf16Work {
    const XtBf16Kernel *kernel;
    const XtGemm *p;
    XtGemmOffsets at;
    uint32_t *b; /* packed op(B): the columns from `column` on */
    int64_t column, columns, panels, pairs;
    int64_t rows, tiles_n; /* of a piece; pieces side by side */
};

XtStatus xt_bf16_multiply(const XtGemm *p, const XtBf16Kernel *kernel);

/* 32 MiB for a packed panel of 64 columns, where a single column has 512 KiB. NULL, or why neither kernel computes p. */
#define XT_BF16_MOST_K (1 << 18)
const char *xt_bf16_fits(const XtGemm *p);

XT_INLINE int64_t xt_divide_up(int64_t size, int64_t by) { return (size - 1) / by + 1; }
XT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
