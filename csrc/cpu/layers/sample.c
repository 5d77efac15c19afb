/* sample.c - draws a token from each row of logits: temperature, top-k, top-p (contract/layers.h, core/draw.h).
 *
 * Nothing of the size of the vocabulary is sorted:
 *
 *   top-k          blocks whose maximum is not above the k-th best so far are skipped; the others go to a list of 2 k, from which the
 *                  best k are selected when it is full. The rest works on these k
 *   top-p alone    weights are added up in bins of 1/64 octave; only the bin in which the limit lies is sorted
 *   neither        one pass adds the weights of blocks, the next finds the block and walks through it
 *
 * A piece is a row. It is read several times, and another thread may change it meanwhile: then any token of it is drawn, or none (-1).
 */
#ifndef T
#include "contract/layers.h"
#include "core/draw.h"
#include "cpu/kernel.h"

#include <stdlib.h>

enum {
    BLOCK = 256,  /* elements that are looked at together */
    OCTAVE = 64,  /* bins */
    BINS = 2048,  /* the last one has all the rest */
    SPARE = 1024, /* room of a list beyond 2 k */
};

/* A token that may be drawn. */
typedef struct Item {
    uint64_t key, weight;
    int64_t index;
} Item;

/* Whether a comes before b in the order of logits. */
static bool is_before(const Item *a, const Item *b) { return a->key > b->key || (a->key == b->key && a->index < b->index); }
static int by_logit(const void *a, const void *b) { return is_before(a, b) ? -1 : 1; }
static int by_index(const void *a, const void *b) { return ((const Item *)a)->index < ((const Item *)b)->index ? -1 : 1; }

/* Puts the first k of items[0..count) in the order of logits in front, the k-th at k - 1. Hoare's selection; 1 <= k <= count. */
static void select_first(Item *items, int64_t count, int64_t k) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        Item a = items[low], b = items[(low + high) / 2], c = items[high];
        Item pivot = is_before(&a, &b) ? (is_before(&b, &c)   ? b
                                          : is_before(&a, &c) ? c
                                                              : a)
                                       : (is_before(&a, &c)   ? a
                                          : is_before(&b, &c) ? c
                                                              : b);
        int64_t i = low, j = high;
        while (i <= j) {
            while (is_before(&items[i], &pivot)) i++;
            while (is_before(&pivot, &items[j])) j--;
            if (i <= j) {
                Item swapped = items[i];
                items[i++] = items[j];
                items[j--] = swapped;
            }
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

/* The bin of a logit that is `below` the largest one; of a NaN the last. */
XT_INLINE int bin_of(float below, float factor) {
    float bin = XT_MUL(below, factor * OCTAVE);
    bin = bin < BINS - 1 ? bin : BINS - 1;
    return bin > 0 ? (int)bin : 0;
}

/* How many of items, in the order of logits, belong to the nucleus of `limit` when `before` is the weight before them; adds to before. */
static int64_t nucleus(const Item *items, int64_t count, uint64_t limit, uint64_t *before) {
    int64_t kept = 0;
    while (kept < count && *before < limit) *before += items[kept++].weight;
    return kept;
}

/* The token that the row draws among items. */
static int64_t draw_item(Item *items, int64_t count, const XtSample *p, int64_t row) {
    uint64_t total = 0, before = 0;
    for (int64_t i = 0; i < count; i++) total += items[i].weight;
    if (p->top_p < 1.0) {
        qsort(items, (size_t)count, sizeof *items, by_logit);
        count = nucleus(items, count, xt_draw_limit(p->top_p, total), &before);
        total = before;
    }
    qsort(items, (size_t)count, sizeof *items, by_index);
    uint64_t number = xt_draw_number((XtPhilox){(uint64_t)p->random[0], (uint64_t)p->random[1]}, (uint64_t)row, total), sum = 0;
    int64_t i = 0;
    while (i < count - 1 && (sum += items[i].weight) <= number) i++;
    return items[i].index;
}

#define XT_TEMPLATE "cpu/layers/sample.c"
#include "cpu/each_float.h"

XtStatus xt_cpu_sample(const XtSample *p) { return xt_parallel(p->rows, 1, XT_BY_FLOAT(p->dtype, sample), (void *)p); }

#else

#if IS_F64
#define KEY(v) xt_sort_key_f64(v)
#else
#define KEY(v) (uint64_t)xt_sort_key_f32(v)
#endif

/* The largest element; NaN where there is one. */
XT_FAST static ACC NAME(largest)(const T *x, int64_t count) { /* [count] */
    ACC max = -INFINITY;
    int nans = 0;
#pragma omp simd reduction(max : max) reduction(+ : nans)
    for (int64_t j = 0; j < count; j++) {
        ACC v = LOAD(x[j]);
        max = v > max ? v : max;
        nans += v != v;
    }
    return nans ? (ACC)NAN : max;
}

/* The first of count elements that is `value`, or -1. */
XT_FAST static int64_t NAME(first_of)(const T *x, int64_t count, ACC value) {
    for (int64_t first = 0; first < count; first += BLOCK) {
        int64_t end = first + BLOCK < count ? first + BLOCK : count;
        int found = 0;
#pragma omp simd reduction(+ : found)
        for (int64_t j = first; j < end; j++) found += LOAD(x[j]) == value;
        for (int64_t j = first; found && j < end; j++)
            if (LOAD(x[j]) == value) return j;
    }
    return -1;
}

/* weights[j] of x[0..count), count <= BLOCK */
XT_FAST static void NAME(weigh)(uint64_t *weights, const T *x, int64_t count, ACC max, float factor) {
#pragma omp simd
    for (int64_t j = 0; j < count; j++) weights[j] = xt_draw_weight((float)(LOAD(x[j]) - max), factor);
}

/* Sum of the weights of a block whose first element is `first`: of tokens above `least`, and of those equal to it up to index `last`. */
XT_FAST static uint64_t NAME(sum_block)(const T *x, int64_t count, int64_t first, ACC max, float factor, ACC least, int64_t last) {
    uint64_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < count; j++) {
        ACC v = LOAD(x[j]);
        uint64_t weight = xt_draw_weight((float)(v - max), factor);
        sum += (v > least) | ((v == least) & (first + j <= last)) ? weight : 0;
    }
    return sum;
}

/* The first token where the sum of weights exceeds `number`, or -1; *sum: of what was walked through. */
static int64_t NAME(walk)(const T *x, int64_t vocab, ACC max, float factor, ACC least, int64_t last, uint64_t number,
                          uint64_t *sum) {
    *sum = 0;
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        int64_t count = vocab - first < BLOCK ? vocab - first : BLOCK;
        uint64_t block = NAME(sum_block)(x + first, count, first, max, factor, least, last);
        if (*sum + block > number) {
            for (int64_t j = 0; j < count; j++) {
                *sum += NAME(sum_block)(x + first + j, 1, first + j, max, factor, least, last);
                if (*sum > number) return first + j;
            }
        }
        *sum += block;
    }
    return -1;
}

/* The first k of the row in the order of logits, to items, which has room for `room` >= k of them; in no order. */
static void NAME(first_k)(Item *items, int64_t room, const T *x, int64_t vocab, int64_t k) {
    int64_t count = 0;
    bool full = false; /* `least` is the k-th best so far */
    ACC least = -INFINITY;
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        int64_t end = first + BLOCK < vocab ? first + BLOCK : vocab;
        if (full && !(NAME(largest)(x + first, end - first) > least)) continue;
        for (int64_t j = first; j < end; j++) {
            ACC v = LOAD(x[j]);
            if (full && !(v > least)) continue;
            items[count++] = (Item){.key = KEY(v), .index = j};
            if (count == room && room > k) {
                select_first(items, count, k);
                count = k;
                least = LOAD(x[items[k - 1].index]);
                full = true;
            }
        }
    }
    if (count > k) select_first(items, count, k);
}

/* The nucleus of the row: *least and *last are its last token in the order of logits, *total its weight. */
static XtStatus NAME(find_nucleus)(const T *x, int64_t vocab, ACC max, float factor, double top_p, ACC *least, int64_t *last,
                                   uint64_t *total) {
    uint64_t sums[BINS] = {0}, weights[BLOCK], all = 0, before = 0;
    uint32_t counts[BINS] = {0};
    XtStatus status = XT_OK;
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        int64_t count = vocab - first < BLOCK ? vocab - first : BLOCK;
        NAME(weigh)(weights, x + first, count, max, factor);
        for (int64_t j = 0; j < count; j++) {
            int bin = bin_of((float)(max - LOAD(x[first + j])), factor);
            sums[bin] += weights[j];
            counts[bin]++;
        }
    }
    for (int b = 0; b < BINS; b++) all += sums[b];
    const uint64_t limit = xt_draw_limit(top_p, all);
    int bin = 0;
    while (bin < BINS - 1 && before + sums[bin] < limit) before += sums[bin++];
    Item *items = malloc(counts[bin] * sizeof *items);
    if (!items)
        return xt_error(XT_OUT_OF_MEMORY, "sample: scratch of %zu bytes could not be allocated", counts[bin] * sizeof *items);
    int64_t count = 0;
    for (int64_t j = 0; j < vocab && count < counts[bin]; j++) {
        ACC v = LOAD(x[j]);
        if (bin_of((float)(max - v), factor) != bin) continue;
        items[count++] = (Item){.key = KEY(v), .weight = xt_draw_weight((float)(v - max), factor), .index = j};
    }
    qsort(items, (size_t)count, sizeof *items, by_logit);
    count = nucleus(items, count, limit, &before);
    *last = count > 0 ? items[count - 1].index : -1;
    *least = count > 0 ? LOAD(x[*last]) : INFINITY;
    *total = before;
    free(items);
    return status;
}

static XtStatus NAME(sample_row)(const XtSample *p, int64_t row, const T *x, Item *items, int64_t room) { /* x [vocab] */
    const int64_t vocab = p->vocab;
    const ACC max = NAME(largest)(x, vocab);
    int64_t *out = p->out + row;
    *out = -1;
    if (!(max - max == 0)) return XT_OK;
    if (p->temperature == 0.0) {
        *out = NAME(first_of)(x, vocab, max);
        return XT_OK;
    }
    const float factor = xt_draw_factor(p->temperature);
    if (p->top_k < vocab) {
        NAME(first_k)(items, room, x, vocab, p->top_k);
        for (int64_t i = 0; i < p->top_k; i++) items[i].weight = xt_draw_weight((float)(LOAD(x[items[i].index]) - max), factor);
        *out = draw_item(items, p->top_k, p, row);
        return XT_OK;
    }
    ACC least = -INFINITY;
    int64_t last = vocab;
    uint64_t total, sum;
    if (p->top_p < 1.0) XT_CHECK(NAME(find_nucleus)(x, vocab, max, factor, p->top_p, &least, &last, &total));
    else NAME(walk)(x, vocab, max, factor, least, last, UINT64_MAX, &total);
    const XtPhilox philox = {(uint64_t)p->random[0], (uint64_t)p->random[1]};
    *out = NAME(walk)(x, vocab, max, factor, least, last, xt_draw_number(philox, (uint64_t)row, total), &sum);
    return XT_OK;
}

static XtStatus NAME(sample)(void *context, int64_t begin, int64_t end) {
    const XtSample *p = context;
    Item *items = NULL;
    int64_t room = 2 * p->top_k + SPARE < p->vocab ? 2 * p->top_k + SPARE : p->vocab;
    XtStatus status = XT_OK;
    if (p->top_k < p->vocab && p->temperature != 0.0) {
        items = malloc((size_t)room * sizeof *items);
        if (!items)
            return xt_error(XT_OUT_OF_MEMORY, "sample: scratch of %zu bytes could not be allocated", (size_t)room * sizeof *items);
    }
    for (int64_t r = begin; r < end && status == XT_OK; r++)
        status = NAME(sample_row)(p, r, (const T *)p->x + r * p->vocab, items, room);
    free(items);
    return status;
}

#undef KEY
#endif
