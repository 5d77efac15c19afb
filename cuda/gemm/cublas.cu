/* cublas.cu - C = alpha op(A) op(B) + beta C + bias through cuBLASLt: what "auto" picks.
 *
 * Row-major. cuBLAS counts down columns: it sees our row-major C [M, N] as C^T [N, M], and C^T = op(B)^T op(A)^T. So B is its
 * left operand and A its right one, each with its own transpose flag and leading dimension. No matrix is transposed in memory.
 *
 * Plans. Descriptors and the choice of the algorithm cost more than a small product, and are a function of the shape: they are kept
 * in a hash table per device. The choice is made among what the heuristic offers for pointers aligned as these are up to 16 bytes, and
 * from a table of products (cublas_choice.cuh). Nothing is timed, so every run makes the same choice.
 *
 * Deterministic and in ACC: a split along K adds its parts in a second pass, in float32 (float64), from the workspace. The other
 * schemes of cuBLAS add with atomics, or round the parts to the dtype. The workspace is one block per device, for the life of the
 * process. The lock is held while a product is queued, so that the products of two threads do not share it.
 *
 * Batches. Evenly spaced matrices are one call. Two batch dims that are not one even row of matrices go through cuBLAS with lists
 * of pointers, which a kernel writes: one more launch, whatever the batch. (Both split a batch above 32768: some of the libraries'
 * kernels put the batch in a grid's z, which ends at 65535.)
 *
 * Edges. With 50257 columns cuBLAS has no fast tensor core kernel, however the rows are aligned. So the last column is a product of
 * its own (cut_edges), and so is the last row where A is transposed, and the last term of a sum that long. If C has 16 bits, the
 * sum without that term stays in float32; a kernel adds the term and rounds once (gains: docs/worklog/train-step-gpu.md).
 *
 * Bias. One matrix whose bias starts at a multiple of 16 bytes: the epilogue adds it to the sums, before they are rounded.
 *
 * Not supported: another bias, sizes above int32, a vector beside a matrix of 2^31 elements, a problem for which the heuristic has no
 * algorithm, lists of pointers that are not 16-byte aligned (cuBLAS cannot see those, and its kernels of matrix units would fault).
 * What the library refuses after it has offered an algorithm is an error.
 */
#include "cublas_choice.cuh"
#include "gemm.cuh"

#include <new>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const int MAX_DEVICES = 256, MAX_PLANS = 1024, SLOTS = 2048, OFFERS = 8;
static const int64_t MAX_BATCH = 32768,
                     MAX_SUMS = (int64_t)1 << 26; /* elements of C that are kept in float32 for their last terms */

/* All that a plan depends on besides the device. Compared and hashed as bytes: no padding. */
typedef struct Key {
    int64_t m, n, k, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    int32_t dtype_a, dtype_b, dtype_c, tf32, trans, align_a, align_b, align_c; /* trans: 1 for A, 2 for B, 4 for a bias */
} Key;
static_assert(sizeof(Key) == 10 * 8 + 8 * 4, "padding in a key");

typedef struct Plan {
    bool taken, supported; /* supported: the heuristic has an algorithm */
    Key key;
    void *desc, *a, *b, *c; /* owned: the operation and three layouts */
    XtLtAlgo algo;
} Plan;

typedef struct Blas {
    void *lt, *blas;      /* handles, made by the first product that needs them */
    XtScratch *workspace; /* never freed */
    size_t workspace_nbytes;
    Plan *plans; /* [SLOTS], open addressing */
    Plan *last;  /* the last plan in use: a product needs it once to select and once to run */
    int plan_count;
} Blas;

static Blas of_device[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the devices above, and the use of a workspace */

static XtStatus failed(const char *function, XtBlasStatus status, const XtGemm *p) {
    const XtCublasLt *lt = xt_cublas_lt();
    return xt_error(status == XT_BLAS_ALLOC_FAILED ? XT_OUT_OF_MEMORY : XT_CUDA_ERROR,
                    "gemm: %s failed with %s (%d) for %s, M %lld, N %lld, K %lld, batch (%lld, %lld)", function,
                    lt->status_name(status), status, xt_dtype_name(p->dtype_a), (long long)p->m, (long long)p->n, (long long)p->k,
                    (long long)p->batch[0], (long long)p->batch[1]);
}

/* ---- the problem, put in order ------------------------------------------------------------------------------------------- */

/* The leading dimension of stored rows of `cols` elements; a single row may come with any. */
static int64_t leading(int64_t rows, int64_t cols, int64_t ld) { return rows == 1 || ld < cols ? cols : ld; }

/* p with leading dimensions that are right for one row too, and, where that is possible, with its whole batch in batch[1]. */
static XtGemm normal_form(const XtGemm *p) {
    XtGemm q = *p;
    q.tf32 = p->tf32 && p->dtype_a == XT_FLOAT32;
    q.lda = p->trans_a ? leading(p->k, p->m, p->lda) : leading(p->m, p->k, p->lda);
    q.ldb = p->trans_b ? leading(p->n, p->k, p->ldb) : leading(p->k, p->n, p->ldb);
    q.ldc = leading(p->m, p->n, p->ldc);
    int64_t outer = p->batch[0], inner = p->batch[1];
    int64_t *strides[3] = {q.stride_a, q.stride_b, q.stride_c};
    bool even = true; /* the outer steps continue the inner ones */
    for (int i = 0; i < 3; i++) even = even && strides[i][0] == inner * strides[i][1];
    if (outer > 1 && inner > 1 && !even) return q;
    q.batch[0] = 1;
    q.batch[1] = outer * inner;
    for (int i = 0; i < 3; i++) {
        if (inner == 1) strides[i][1] = strides[i][0];
        if (outer * inner == 1) strides[i][1] = 0;
        strides[i][0] = 0;
    }
    return q;
}

static bool fits(const XtGemm *p) {
    const int64_t sizes[] = {p->m, p->n, p->k, p->lda, p->ldb, p->ldc};
    for (int i = 0; i < 6; i++)
        if (sizes[i] > INT32_MAX) return false;
    return true;
}

/* A product with a vector beside a matrix that offsets of 32 bits do not reach. A head of 65536 x 50257 logits in one piece, whose edges
 * are such products, met an illegal address with cuBLASLt 13.1; with this rule 43008 x 50257 is right. Which product it was is not known. */
static bool is_far_vector(const XtGemm *p) {
    const int64_t a = p->trans_a ? xt_matrix_span(p->k, p->m, p->lda) : xt_matrix_span(p->m, p->k, p->lda);
    const int64_t b = p->trans_b ? xt_matrix_span(p->n, p->k, p->ldb) : xt_matrix_span(p->k, p->n, p->ldb);
    const int64_t c = xt_matrix_span(p->m, p->n, p->ldc);
    return (p->m == 1 || p->n == 1) && (a > INT32_MAX || b > INT32_MAX || c > INT32_MAX);
}

/* Of every matrix of a batch that starts at x: a power of two, at most 16. */
static int alignment(const void *x, const XtGemm *p, const int64_t stride[2], XtDtype dtype) {
    uintptr_t bits = (uintptr_t)x | 16;
    for (int i = 0; i < 2; i++)
        if (p->batch[i] > 1) bits |= (uintptr_t)stride[i] * xt_dtype_size(dtype);
    return (int)(bits & (~bits + 1));
}

static int type_of(XtDtype dtype) {
    switch (dtype) {
    case XT_FLOAT32: return CUDA_R_32F;
    case XT_FLOAT64: return CUDA_R_64F;
    case XT_BFLOAT16: return CUDA_R_16BF;
    default: return CUDA_R_16F;
    }
}

static int compute_of(const XtGemm *p) {
    if (p->dtype_c == XT_FLOAT64) return XT_BLAS_COMPUTE_64F;
    return p->tf32 ? XT_BLAS_COMPUTE_32F_TF32 : XT_BLAS_COMPUTE_32F;
}

/* alpha and beta in ACC, as cuBLAS reads them. */
typedef struct Scalars {
    float f[2];
    double d[2];
    const void *alpha, *beta;
} Scalars;

static void set_scalars(const XtGemm *p, Scalars *s) {
    bool wide = p->dtype_c == XT_FLOAT64;
    s->f[0] = (float)p->alpha, s->f[1] = (float)p->beta;
    s->d[0] = p->alpha, s->d[1] = p->beta;
    s->alpha = wide ? (const void *)&s->d[0] : &s->f[0];
    s->beta = wide ? (const void *)&s->d[1] : &s->f[1];
}

/* ---- per device ---------------------------------------------------------------------------------------------------------- */

static XtStatus open_lt(Blas *device, const XtCublasLt *lt, const XtGemm *p) {
    if (device->lt && device->workspace) return XT_OK;
    XT_CHECK(xt_refuse_captured("be the first to use cuBLAS, whose memory would be the graph's"));
    if (!device->lt) {
        XtBlasStatus made = lt->create(&device->lt);
        if (made != XT_BLAS_SUCCESS) {
            device->lt = NULL;
            return failed("cublasLtCreate", made, p);
        }
    }
    size_t nbytes = (size_t)(xt_compute_capability() >= 90 ? 32 : 8) << 20;
    void *memory = calloc(1, sizeof(XtScratch));
    if (!memory) return xt_error(XT_OUT_OF_MEMORY, "gemm: no memory for the workspace of cuBLAS");
    XtScratch *workspace = new (memory) XtScratch; /* its destructor never runs */
    XtStatus status = workspace->allocate(nbytes);
    if (status != XT_OK) {
        free(memory);
        return status;
    }
    device->workspace = workspace;
    device->workspace_nbytes = nbytes;
    return XT_OK;
}

static XtStatus open_blas(Blas *device, const XtCublas *blas, const XtGemm *p) {
    if (device->blas) return XT_OK;
    XT_CHECK(xt_refuse_captured("be the first to use cuBLAS, whose memory would be the graph's"));
    void *handle = NULL;
    XtBlasStatus made = blas->create(&handle);
    if (made != XT_BLAS_SUCCESS) return failed("cublasCreate", made, p);
    made = blas->set_stream(handle, xt_stream()); /* first, because it replaces the workspace */
    if (!made) made = blas->set_workspace(handle, device->workspace->data, device->workspace_nbytes);
    if (!made) made = blas->set_math(handle, XT_BLAS_MATH_FULL_PRECISION_REDUCTION);
    if (made != XT_BLAS_SUCCESS) {
        blas->destroy(handle);
        return failed("cublasSetWorkspace", made, p);
    }
    device->blas = handle;
    return XT_OK;
}

/* ---- plans --------------------------------------------------------------------------------------------------------------- */

static Key key_of(const XtGemm *p) {
    Key key = {};
    key.m = p->m, key.n = p->n, key.k = p->k;
    key.lda = p->lda, key.ldb = p->ldb, key.ldc = p->ldc;
    key.batch = p->batch[1];
    key.stride_a = p->stride_a[1], key.stride_b = p->stride_b[1], key.stride_c = p->stride_c[1];
    key.dtype_a = p->dtype_a, key.dtype_b = p->dtype_b, key.dtype_c = p->dtype_c, key.tf32 = p->tf32;
    key.trans = (p->trans_a ? 1 : 0) | (p->trans_b ? 2 : 0) | (p->bias ? 4 : 0);
    key.align_a = alignment(p->a, p, p->stride_a, p->dtype_a);
    key.align_b = alignment(p->b, p, p->stride_b, p->dtype_b);
    key.align_c = alignment(p->c, p, p->stride_c, p->dtype_c);
    return key;
}

static unsigned hash(const Key *key) {
    uint64_t words[sizeof(Key) / 8], h = 0;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) h = (h ^ words[i] ^ h >> 29) * 0x9e3779b97f4a7c15u;
    return (unsigned)(h >> 40);
}

static void drop(const XtCublasLt *lt, Plan *plan) {
    if (plan->desc) lt->desc_destroy(plan->desc);
    if (plan->a) lt->layout_destroy(plan->a);
    if (plan->b) lt->layout_destroy(plan->b);
    if (plan->c) lt->layout_destroy(plan->c);
    memset(plan, 0, sizeof *plan);
}

/* A stored matrix of rows x cols, row-major, to cuBLAS one of cols x rows. */
static XtBlasStatus make_layout(const XtCublasLt *lt, void **layout, const Key *key, int type, int64_t rows, int64_t cols,
                                int64_t ld, int64_t stride) {
    int32_t batch = (int32_t)key->batch;
    XtBlasStatus status = lt->layout_create(layout, type, (uint64_t)cols, (uint64_t)rows, ld);
    if (status || batch == 1) return status;
    status = lt->layout_set(*layout, XT_LT_LAYOUT_BATCH_COUNT, &batch, sizeof batch);
    return status ? status : lt->layout_set(*layout, XT_LT_LAYOUT_BATCH_STRIDE, &stride, sizeof stride);
}

static XtBlasStatus make_preference(const XtCublasLt *lt, void **preference, const Key *key, size_t workspace_nbytes) {
    uint64_t workspace = workspace_nbytes;
    uint32_t reduction = XT_LT_REDUCTION_IN_COMPUTE_TYPE;
    if (key->dtype_c == XT_FLOAT32 || key->dtype_c == XT_FLOAT64)
        reduction |= XT_LT_REDUCTION_IN_OUTPUT_TYPE; /* which is ACC here */
    uint32_t aligned[4] = {(uint32_t)key->align_b, (uint32_t)key->align_a, (uint32_t)key->align_c, (uint32_t)key->align_c};
    XtBlasStatus status = lt->preference_create(preference);
    if (!status) status = lt->preference_set(*preference, XT_LT_PREF_WORKSPACE, &workspace, sizeof workspace);
    if (!status) status = lt->preference_set(*preference, XT_LT_PREF_REDUCTION_MASK, &reduction, sizeof reduction);
    for (int i = 0; i < 4 && !status; i++) /* of cuBLAS' A, B, C, D */
        status = lt->preference_set(*preference, XT_LT_PREF_ALIGNMENT_A + i, &aligned[i], sizeof aligned[i]);
    return status;
}

static XtBlasStatus add_bias(const XtCublasLt *lt, void *desc, const XtGemm *p) {
    const int32_t epilogue = XT_LT_EPILOGUE_BIAS;
    XtBlasStatus status = lt->desc_set(desc, XT_LT_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    return status ? status : lt->desc_set(desc, XT_LT_DESC_BIAS, &p->bias, sizeof p->bias);
}

/* Fills an empty plan; *function names what failed. */
static XtBlasStatus make_plan(const XtCublasLt *lt, const Blas *device, const XtGemm *p, const Key *key, Plan *plan,
                              const char **function) {
    void *preference = NULL;
    int32_t trans_left = p->trans_b ? XT_BLAS_OP_T : XT_BLAS_OP_N, trans_right = p->trans_a ? XT_BLAS_OP_T : XT_BLAS_OP_N;
    int64_t a_rows = p->trans_a ? p->k : p->m, a_cols = p->trans_a ? p->m : p->k;
    int64_t b_rows = p->trans_b ? p->n : p->k, b_cols = p->trans_b ? p->k : p->n;
    XtLtChoice choices[OFFERS] = {};
    int found = 0;
    plan->key = *key;
    *function = "cublasLtMatmulDescCreate";
    XtBlasStatus status = lt->desc_create(&plan->desc, compute_of(p), p->dtype_c == XT_FLOAT64 ? CUDA_R_64F : CUDA_R_32F);
    if (!status) status = lt->desc_set(plan->desc, XT_LT_DESC_TRANS_A, &trans_left, sizeof trans_left);
    if (!status) status = lt->desc_set(plan->desc, XT_LT_DESC_TRANS_B, &trans_right, sizeof trans_right);
    if (!status && p->bias) status = add_bias(lt, plan->desc, p);
    if (!status) {
        *function = "cublasLtMatrixLayoutCreate";
        status = make_layout(lt, &plan->a, key, type_of(p->dtype_a), a_rows, a_cols, p->lda, p->stride_a[1]);
    }
    if (!status) status = make_layout(lt, &plan->b, key, type_of(p->dtype_b), b_rows, b_cols, p->ldb, p->stride_b[1]);
    if (!status) status = make_layout(lt, &plan->c, key, type_of(p->dtype_c), p->m, p->n, p->ldc, p->stride_c[1]);
    if (!status) {
        *function = "cublasLtMatmulPreferenceCreate";
        status = make_preference(lt, &preference, key, device->workspace_nbytes);
    }
    if (!status) {
        *function = "cublasLtMatmulAlgoGetHeuristic";
        status = lt->choose(device->lt, plan->desc, plan->b, plan->a, plan->c, plan->c, preference, OFFERS, choices, &found);
    }
    if (preference) lt->preference_destroy(preference);
    const XtLtChoice *choice = &choices[status || found == 0 ? 0 : pick_offer(lt, p, choices, found)];
    if (!status) status = found > 0 ? choice->status : XT_BLAS_NOT_SUPPORTED;
    plan->algo = choice->algo;
    if (!status) take_measured(lt, device->lt, plan->desc, plan->a, plan->b, plan->c, p, device->workspace_nbytes, &plan->algo);
    plan->supported = status == XT_BLAS_SUCCESS;
    if (status && status != XT_BLAS_NOT_SUPPORTED) {
        drop(lt, plan);
        return status;
    }
    plan->taken = true;
    return XT_BLAS_SUCCESS;
}

static XtStatus get_plan(const XtCublasLt *lt, Blas *device, const XtGemm *p, Plan **out) {
    if (!device->plans) device->plans = (Plan *)calloc(SLOTS, sizeof *device->plans);
    if (!device->plans) return xt_error(XT_OUT_OF_MEMORY, "gemm: no memory for the plans of cuBLAS");
    Key key = key_of(p);
    *out = device->last;
    if (*out && memcmp(&(*out)->key, &key, sizeof key) == 0) return XT_OK;
    unsigned slot = hash(&key) % SLOTS;
    for (; device->plans[slot].taken; slot = (slot + 1) % SLOTS)
        if (memcmp(&device->plans[slot].key, &key, sizeof key) == 0) {
            *out = device->last = &device->plans[slot];
            return XT_OK;
        }
    if (device->plan_count == MAX_PLANS) { /* too many shapes: start over */
        for (int i = 0; i < SLOTS; i++) drop(lt, &device->plans[i]);
        device->plan_count = 0;
        device->last = NULL;
        slot = hash(&key) % SLOTS;
    }
    XT_CHECK(xt_refuse_captured("have a product of other sizes than its planned run: algorithms are chosen before"));
    const char *function;
    XtBlasStatus status = make_plan(lt, device, p, &key, &device->plans[slot], &function);
    if (status != XT_BLAS_SUCCESS) return failed(function, status, p);
    device->plan_count++;
    *out = device->last = &device->plans[slot];
    return XT_OK;
}

/* ---- what a product is cut into ------------------------------------------------------------------------------------------ */

/* What an extent has beyond a multiple of 16 bytes, when that alone keeps a large product off the fast kernels: 50257 columns or
 * terms, though rows and pointers are aligned. 0: nothing is gained by a cut. */
static int64_t edge(const XtGemm *p, int64_t extent) {
    int64_t size = (int64_t)xt_dtype_size(p->dtype_a), width = 16 / size;
    bool units = p->tf32 || p->dtype_a == XT_BFLOAT16 || p->dtype_a == XT_FLOAT16; /* others need no alignment */
    bool aligned = p->lda % width == 0 && p->ldb % width == 0 && p->ldc % width == 0 &&
                   (((uintptr_t)p->a | (uintptr_t)p->b | (uintptr_t)p->c) & 15) == 0;
    bool large = extent >= 1024 && (double)p->m * (double)p->n * (double)p->k >= 1e9;
    return units && aligned && large && p->batch[0] == 1 && p->batch[1] == 1 ? extent % width : 0;
}

/* What is cut off: last columns of C, or last rows, or last terms of the sums. */
typedef struct Edges {
    int64_t columns, rows, terms;
} Edges;

static Edges edges_of(const XtGemm *p) {
    Edges e = {edge(p, p->n), 0, 0};
    if (!e.columns && p->trans_a) e.rows = edge(p, p->m);
    if (!e.columns && !e.rows) e.terms = edge(p, p->k);
    return e;
}

/* Terms only where C is float32: it holds the sum of the first part between the two products. */
static bool in_two_products(const XtGemm *p, Edges e) { return e.columns || e.rows || (e.terms && p->dtype_c == XT_FLOAT32); }

static void cut_edges(const XtGemm *p, Edges e, XtGemm part[2]) {
    part[0] = part[1] = *p;
    if (e.columns) {
        int64_t n = part[0].n = p->n - e.columns;
        part[1].n = e.columns;
        part[1].b = xt_moved(p->b, p->trans_b ? n * p->ldb : n, p->dtype_b);
        part[1].c = (void *)xt_moved(p->c, n, p->dtype_c);
    } else if (e.rows) {
        int64_t m = part[0].m = p->m - e.rows;
        part[1].m = e.rows;
        part[1].a = xt_moved(p->a, m, p->dtype_a);
        part[1].c = (void *)xt_moved(p->c, m * p->ldc, p->dtype_c);
    } else {
        int64_t k = part[0].k = p->k - e.terms;
        part[1].k = e.terms;
        part[1].a = xt_moved(p->a, p->trans_a ? k * p->lda : k, p->dtype_a);
        part[1].b = xt_moved(p->b, p->trans_b ? k : k * p->ldb, p->dtype_b);
        part[1].beta = 1;
    }
}

/* The first part of sums of 16 bits: float32, in `sums`. */
static XtGemm without_terms(const XtGemm *p, int64_t terms, void *sums) {
    XtGemm q = *p;
    q.k -= terms, q.beta = 0, q.ldc = (p->n + 3) / 4 * 4;
    q.c = sums, q.dtype_c = XT_FLOAT32;
    return q;
}

static bool in_pieces(const XtGemm *p) { return p->batch[0] == 1 && p->batch[1] > MAX_BATCH; }

/* Matrices first ... of an even batch, at most MAX_BATCH. */
static XtGemm piece_of(const XtGemm *p, int64_t first) {
    XtGemm q = *p;
    q.batch[1] = p->batch[1] - first < MAX_BATCH ? p->batch[1] - first : MAX_BATCH;
    q.a = xt_moved(p->a, first * p->stride_a[1], p->dtype_a);
    q.b = xt_moved(p->b, first * p->stride_b[1], p->dtype_b);
    q.c = (void *)xt_moved(p->c, first * p->stride_c[1], p->dtype_c);
    return q;
}

/* ---- what is supported --------------------------------------------------------------------------------------------------- */

static bool aligned_lists(const XtGemm *p) {
    if (!p->tf32 && (p->dtype_c == XT_FLOAT32 || p->dtype_c == XT_FLOAT64)) return true;
    return alignment(p->a, p, p->stride_a, p->dtype_a) == 16 && alignment(p->b, p, p->stride_b, p->dtype_b) == 16 &&
           alignment(p->c, p, p->stride_c, p->dtype_c) == 16;
}

/* Whether the heuristic has an algorithm for an even product. What fails on the way is not the answer: it fails in run_even,
 * too. */
static bool has_algorithm(const XtGemm *p) {
    const XtCublasLt *lt = xt_cublas_lt();
    Plan *plan = NULL;
    pthread_mutex_lock(&lock);
    Blas *device = &of_device[xt_device_index()];
    XtStatus status = open_lt(device, lt, p);
    if (status == XT_OK) status = get_plan(lt, device, p, &plan);
    bool found = status != XT_OK || plan->supported;
    pthread_mutex_unlock(&lock);
    return found;
}

/* Whether last terms are added to the rest of the sums in float32. */
static bool goes_through_float32(const XtGemm *p, Edges e) {
    if (!e.terms) return false;
    XtGemm q = without_terms(p, e.terms, NULL);
    return q.m <= MAX_SUMS / q.ldc && has_algorithm(&q);
}

const char *xt_cuda_gemm_cublas_supports(const XtGemm *p, const XtDeviceTraits *device) {
    XtGemm q = normal_form(p);
    q.bias = NULL; /* xt_gemm_plain speaks for those that add none */
    const char *reason = xt_gemm_plain(&q);
    if (reason) return reason;
    if (!device->has_cublaslt()) return "libcublasLt was not found";
    if (!xt_gemm_multiplies(p)) return p->bias ? "it has a bias, and no product" : NULL;
    Edges e = edges_of(&q);
    if (p->bias) {
        q.bias = p->bias;
        if (q.batch[0] > 1 || q.batch[1] > 1 || e.columns || e.rows || e.terms)
            return "it has a bias, and is more than one product";
        if (q.dtype_c != q.dtype_a || q.dtype_c == XT_FLOAT64) return "it has a bias, and is of float64 or of two dtypes";
        if ((uintptr_t)q.bias & 15) return "it has a bias that is not aligned to 16 bytes";
    }
    if (in_two_products(&q, e) || in_pieces(&q)) return NULL; /* each of them is selected on its own */
    if (!fits(&q)) return "a size or a leading dimension is above 2^31 - 1";
    if (is_far_vector(&q)) return "it has a vector, and a matrix of more than 2^31 - 1 elements";
    if (q.batch[0] > 1) {
        if (q.dtype_c != q.dtype_a) return "the batch is not evenly spaced, and C has a dtype of its own";
        if (!aligned_lists(&q)) return "the batch is not evenly spaced, and its matrices are not aligned to 16 bytes";
        return device->has_cublas() ? NULL : "the batch is not evenly spaced, and libcublas was not found";
    }
    return goes_through_float32(&q, e) || has_algorithm(&q) ? NULL : "cuBLASLt has no algorithm for it";
}

/* ---- products ------------------------------------------------------------------------------------------------------------ */

/* An even batch (all in batch[1], at most MAX_BATCH) through cuBLASLt. */
static XtStatus run_even(const XtGemm *p) {
    const XtCublasLt *lt = xt_cublas_lt();
    Plan *plan = NULL;
    Scalars s;
    set_scalars(p, &s);
    pthread_mutex_lock(&lock);
    Blas *device = &of_device[xt_device_index()];
    XtStatus status = open_lt(device, lt, p);
    if (status == XT_OK) status = get_plan(lt, device, p, &plan);
    if (status == XT_OK) {
        XtBlasStatus queued = p->bias ? add_bias(lt, plan->desc, p) : XT_BLAS_SUCCESS;
        if (!queued)
            queued = lt->matmul(device->lt, plan->desc, s.alpha, p->b, plan->b, p->a, plan->a, s.beta, p->c, plan->c, p->c, plan->c,
                                &plan->algo, device->workspace->data, device->workspace_nbytes, xt_stream());
        if (queued != XT_BLAS_SUCCESS) status = failed("cublasLtMatmul", queued, p);
        else xt_count_launch();
    }
    pthread_mutex_unlock(&lock);
    return status;
}

/* list [3][count]: where the matrices of A, B and C are. */
__global__ void gemm_pointers_kernel(XtGemm p, const char **list, int64_t count, int64_t size) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        XtGemmOffsets at = xt_gemm_offsets(&p, i);
        list[i] = (const char *)p.a + at.a * size;
        list[count + i] = (const char *)p.b + at.b * size;
        list[2 * count + i] = (const char *)p.c + at.c * size;
    }
}

/* Any two batch dims through cuBLAS. The lock is held. */
static XtStatus run_lists(Blas *device, const XtGemm *p) {
    const XtCublas *blas = xt_cublas();
    int64_t count = p->batch[0] * p->batch[1];
    int trans_a = p->trans_a ? XT_BLAS_OP_T : XT_BLAS_OP_N, trans_b = p->trans_b ? XT_BLAS_OP_T : XT_BLAS_OP_N;
    XtScratch scratch;
    Scalars s;
    XtStatus status = open_lt(device, xt_cublas_lt(), p); /* for the workspace */
    if (status == XT_OK) status = open_blas(device, blas, p);
    if (status == XT_OK) status = scratch.allocate((size_t)count * 3 * sizeof(void *));
    if (status != XT_OK) return status;
    const char **list = (const char **)scratch.data;
    xt_launch(gemm_pointers_kernel, xt_blocks(count, 256), 256, 0, *p, list, count, (int64_t)xt_dtype_size(p->dtype_c));
    set_scalars(p, &s);
    for (int64_t first = 0; first < count; first += MAX_BATCH) {
        int batch = (int)(count - first < MAX_BATCH ? count - first : MAX_BATCH);
        const void *const *a = (const void *const *)(list + first), *const *b = (const void *const *)(list + count + first);
        void *const *c = (void *const *)(list + 2 * count + first);
        XtBlasStatus queued = blas->gemm_batched(device->blas, trans_b, trans_a, (int)p->n, (int)p->m, (int)p->k, s.alpha, b,
                                                 type_of(p->dtype_b), (int)p->ldb, a, type_of(p->dtype_a), (int)p->lda, s.beta, c,
                                                 type_of(p->dtype_c), (int)p->ldc, batch, compute_of(p), XT_BLAS_GEMM_DEFAULT);
        if (queued != XT_BLAS_SUCCESS) return failed("cublasGemmBatchedEx", queued, p);
        xt_count_launch();
    }
    return XT_OK;
}

/* C = sums + alpha times the terms of op(A) op(B) from `first` on + beta C, rounded once. sums [M, ld]. */
template <typename T> __global__ void gemm_last_terms_kernel(XtGemm p, const float *sums, int64_t ld, int64_t first) {
    const T *a = (const T *)p.a, *b = (const T *)p.b;
    T *c = (T *)p.c;
    for (int64_t row = blockIdx.x; row < p.m; row += gridDim.x)
        for (int64_t col = threadIdx.x; col < p.n; col += blockDim.x) {
            float last = 0;
            for (int64_t k = first; k < p.k; k++) {
                int64_t of_a = p.trans_a ? k * p.lda + row : row * p.lda + k, of_b = p.trans_b ? col * p.ldb + k : k * p.ldb + col;
                last += xt_load(a[of_a]) * xt_load(b[of_b]);
            }
            float sum = sums[row * ld + col] + (float)p.alpha * last;
            if (p.beta != 0) sum += (float)p.beta * xt_load(c[row * p.ldc + col]);
            c[row * p.ldc + col] = xt_store<T>(sum);
        }
}

static XtStatus run_pointers(const XtGemm *p) {
    pthread_mutex_lock(&lock);
    XtStatus status = run_lists(&of_device[xt_device_index()], p);
    pthread_mutex_unlock(&lock);
    return status;
}

/* One matrix of 16 bits whose sums are kept in float32 for their last terms. */
static XtStatus run_in_float32(const XtGemm *p, int64_t terms) {
    XtScratch sums;
    XtGemm q = without_terms(p, terms, NULL);
    XT_CHECK(sums.allocate((size_t)(p->m * q.ldc) * sizeof(float)));
    q.c = sums.data;
    XT_CHECK(run_even(&q));
    unsigned blocks = xt_blocks(p->m, 1);
    const float *from = (const float *)sums.data;
    if (p->dtype_c == XT_BFLOAT16) xt_launch(gemm_last_terms_kernel<XtBf16>, blocks, 128, 0, *p, from, q.ldc, q.k);
    else xt_launch(gemm_last_terms_kernel<XtF16>, blocks, 128, 0, *p, from, q.ldc, q.k);
    return XT_OK;
}

XtStatus xt_cuda_gemm_cublas(const XtGemm *p) {
    XtStatus status;
    if (xt_cuda_gemm_trivial(p, &status)) return status;
    XtGemm q = normal_form(p);
    Edges e = edges_of(&q);
    if (in_two_products(&q, e)) {
        XtGemm part[2];
        cut_edges(&q, e, part);
        status = xt_cuda_multiply(&part[0]);
        return status == XT_OK ? xt_cuda_multiply(&part[1]) : status;
    }
    if (in_pieces(&q)) {
        for (int64_t first = 0; first < q.batch[1] && status == XT_OK; first += MAX_BATCH) {
            XtGemm piece = piece_of(&q, first);
            status = xt_cuda_multiply(&piece);
        }
        return status;
    }
    if (q.batch[0] > 1) status = run_pointers(&q);
    else if (goes_through_float32(&q, e)) status = run_in_float32(&q, e.terms);
    else status = run_even(&q);
    return status == XT_OK ? xt_launched("gemm", p->batch[0], p->batch[1], p->m, p->n, p->k) : status;
}
