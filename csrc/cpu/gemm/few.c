/* few.c - C = alpha A B^T + beta C for A of at most 8 rows and B stored [N, K], float32 or bfloat16: the products of a step of generation.
 *
 * Such a product is as fast as B can be read. Four rows of B meet four rows of A in registers, so that B comes from memory once and an
 * element of A serves four rows of B. Memory is asked for B in the order in which it lies there, some KiB ahead: four rows are four short
 * streams, too short for the CPU to foresee. Nothing is packed but A, as float32.
 *
 * An element of C is eight sums over k, lane l of every eighth k from l on, that meet in a tree: ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)).
 * So the bits of a row depend on that row, on B and on K alone: not on the other rows, on N, or on how N is cut for threads.
 */
#include "gemm.h"

#define MOST_M 8
#define ROWS 4          /* of A in registers */
#define OUTS 4          /* rows of B in registers, columns of C */
#define LANES 8         /* sums of an element */
#define AHEAD 8192      /* bytes from where B is read to where it is asked for, into L2: worklog/generation.md */
#define PIECE (1 << 18) /* bytes of B in a piece of work: what a core reads in some 15 us */

typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef uint32_t Pairs __attribute__((vector_size(LANES * sizeof(float)))); /* neighbours in k: 8 float32, or 16 bfloat16 */

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t Order __attribute__((vector_size(LANES * sizeof(float))));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (Order){__VA_ARGS__})
#endif

typedef struct Few {
    const XtGemm *p;
    float *a;            /* [matrices][M][depth]; of bfloat16 the even k of each 16 before the odd ones */
    int64_t step, depth; /* k in a vector of B; K in whole vectors */
    int64_t tiles;       /* of OUTS columns in a matrix */
} Few;

/* out = the sums of four elements */
XT_INLINE void meet(const Lanes s[OUTS], float out[OUTS]) {
    Lanes a = PICK(s[0], s[1], 0, 8, 1, 9, 4, 12, 5, 13) + PICK(s[0], s[1], 2, 10, 3, 11, 6, 14, 7, 15);
    Lanes b = PICK(s[2], s[3], 0, 8, 1, 9, 4, 12, 5, 13) + PICK(s[2], s[3], 2, 10, 3, 11, 6, 14, 7, 15);
    Lanes c = PICK(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    c += PICK(c, c, 4, 5, 6, 7, 0, 1, 2, 3);
    memcpy(out, &c, OUTS * sizeof *out);
}

/* s += of one vector of each row of B, b [OUTS], and the same k of A, a [rows, depth] */
XT_INLINE void add_products(Lanes s[ROWS][OUTS], const Pairs b[OUTS], const float *a, int64_t depth, const int rows,
                            const bool low) {
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) {
        Lanes x, odd;
        memcpy(&x, a + i * depth, sizeof x);
#pragma GCC unroll 4
        for (int o = 0; o < OUTS; o++) s[i][o] += (low ? (Lanes)(b[o] << 16) : (Lanes)b[o]) * x;
        if (!low) continue;
        memcpy(&odd, a + i * depth + LANES, sizeof odd);
#pragma GCC unroll 4
        for (int o = 0; o < OUTS; o++) s[i][o] += (Lanes)(b[o] & 0xffff0000u) * odd;
    }
}

/* out [rows, OUTS]: the products of rows of A and four rows of B, k elements long. rows and low are constants where it is inlined. */
XT_INLINE void multiply(const char *const b[OUTS], const float *a, int64_t k, int64_t depth, float *out, const int rows,
                        const bool low) {
    const int64_t size = low ? 2 : 4, step = LANES * 4 / size, whole = k / step * step;
    Lanes s[ROWS][OUTS] = {{{0}}};
    Pairs v[OUTS];
    for (int64_t j = 0; j < whole; j += step) {
        __builtin_prefetch(b[0] + AHEAD + OUTS * j * size, 0, 2);
        __builtin_prefetch(b[0] + AHEAD + OUTS * j * size + 64, 0, 2);
#pragma GCC unroll 4
        for (int o = 0; o < OUTS; o++) memcpy(&v[o], b[o] + j * size, sizeof v[o]);
        add_products(s, v, a + j, depth, rows, low);
    }
    if (whole < k) {
        memset(v, 0, sizeof v);
        for (int o = 0; o < OUTS; o++) memcpy(&v[o], b[o] + whole * size, (size_t)((k - whole) * size));
        add_products(s, v, a + whole, depth, rows, low);
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++) meet(s[i], out + i * OUTS);
}

typedef void (*Multiply)(const char *const b[OUTS], const float *a, int64_t k, int64_t depth, float *out);
/* clang-format off */
#define MULTIPLY(rows, name, low) \
    XT_FAST static void name##_##rows(const char *const b[OUTS], const float *a, int64_t k, int64_t depth, float *out) { \
        multiply(b, a, k, depth, out, rows, low); \
    }
#define MULTIPLIES(name, low) MULTIPLY(1, name, low) MULTIPLY(2, name, low) MULTIPLY(3, name, low) MULTIPLY(4, name, low)
MULTIPLIES(f32, false)
MULTIPLIES(bf16, true)
/* clang-format on */
static const Multiply functions[2][ROWS] = {{f32_1, f32_2, f32_3, f32_4}, {bf16_1, bf16_2, bf16_3, bf16_4}};

/* C[m, n] for the first `columns` of four: alpha out + beta C */
static void store(const XtGemm *p, int64_t at, const float *out, int64_t columns) {
    float alpha = (float)p->alpha, beta = (float)p->beta;
    for (int64_t n = at; n < at + columns; n++) {
        float sum = alpha * *out++;
        if (p->dtype_c == XT_FLOAT32) {
            float *c = (float *)p->c + n;
            *c = beta == 0 ? sum : sum + beta * *c;
        } else {
            XtBf16 *c = (XtBf16 *)p->c + n;
            *c = xt_float_to_bf16(beta == 0 ? sum : sum + beta * xt_bf16_to_float(*c));
        }
    }
}

/* Tiles [begin, end) of OUTS columns, of all matrices of the batch. */
static XtStatus multiply_tiles(void *context, int64_t begin, int64_t end) {
    const Few *few = context;
    const XtGemm *p = few->p;
    const bool low = p->dtype_a == XT_BFLOAT16;
    const int64_t row_bytes = p->ldb * (low ? 2 : 4);
    for (int64_t tile = begin; tile < end; tile++) {
        int64_t matrix = tile / few->tiles, n = tile % few->tiles * OUTS, columns = p->n - n < OUTS ? p->n - n : OUTS;
        XtGemmOffsets at = xt_gemm_offsets(p, matrix);
        const char *first = (const char *)p->b + at.b * (low ? 2 : 4) + n * row_bytes, *b[OUTS];
        for (int64_t o = 0; o < OUTS; o++)
            b[o] = first + (o < columns ? o : columns - 1) * row_bytes; /* beyond N: one that exists */
        for (int64_t m = 0; m < p->m; m += ROWS) {
            int64_t rows = p->m - m < ROWS ? p->m - m : ROWS;
            float out[ROWS * OUTS];
            functions[low][rows - 1](b, few->a + (matrix * p->m + m) * few->depth, p->k, few->depth, out);
            for (int64_t i = 0; i < rows; i++) store(p, at.c + (m + i) * p->ldc + n, out + i * OUTS, columns);
        }
    }
    return XT_OK;
}

/* Rows of A as float32, with zeros behind K. */
static void pack(const Few *few, int64_t matrices) {
    const XtGemm *p = few->p;
    for (int64_t row = 0; row < matrices * p->m; row++) {
        int64_t from = xt_gemm_offsets(p, row / p->m).a + row % p->m * p->lda;
        float *to = few->a + row * few->depth;
        memset(to + few->depth - few->step, 0, (size_t)few->step * sizeof *to);
        if (p->dtype_a == XT_FLOAT32) memcpy(to, (const float *)p->a + from, (size_t)p->k * sizeof *to);
        else
            for (int64_t k = 0; k < p->k; k++)
                to[k / few->step * few->step + k % 2 * LANES + k % few->step / 2] =
                    xt_bf16_to_float(((const XtBf16 *)p->a)[from + k]);
    }
}

XtStatus xt_gemm_few(const XtGemm *p) {
    XtStatus status;
    if (xt_gemm_trivial(p, &status)) return status;
    const int64_t size = p->dtype_a == XT_BFLOAT16 ? 2 : 4, step = LANES * 4 / size, matrices = p->batch[0] * p->batch[1];
    Few few = {.p = p, .step = step, .depth = (p->k - 1) / step * step + step, .tiles = (p->n - 1) / OUTS + 1};
    XtWorkspace workspace;
    XT_CHECK(xt_take_workspace((size_t)(matrices * p->m * few.depth) * sizeof(float), &workspace));
    few.a = workspace.data;
    pack(&few, matrices);
    status = xt_parallel(matrices * few.tiles, xt_row_grain(OUTS * p->k * size, PIECE), multiply_tiles, &few);
    xt_give_workspace(&workspace);
    return status;
}

const char *xt_gemm_few_supports(const XtGemm *p, const XtDeviceTraits *device) {
    (void)device;
    if (p->dtype_a != XT_FLOAT32 && p->dtype_a != XT_BFLOAT16) return "the dtype is neither float32 nor bfloat16";
    if (p->m > MOST_M) return "A has more than 8 rows";
    if (p->trans_a || !p->trans_b) return "A is stored transposed, or B is not";
    return xt_gemm_plain(p);
}
