/* emulate.h - the instructions of amx.c and bf16.c of csrc/cpu/gemm and csrc/cpu/attention in plain C, after Intel's manual: included before those files, so that
 * their loops, packing and tails run on any CPU. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PAIRS_FAST
#define TILES_FAST

typedef union Vector {
    uint16_t h[32];
    uint32_t w[16];
    uint64_t q[8];
    float f[16];
    __m512i i;
    __m512 s;
    __m512bh b;
} Vector;
typedef union Half {
    uint16_t h[16];
    __m256i i;
    __m256bh b;
} Half;

/* No copy of a vector instruction in each place of an unrolled loop: compiling takes a third of the time. */
#define EMULATED static __attribute__((unused, noinline))
#define EMULATED_INLINE static inline __attribute__((unused, always_inline))

EMULATED Vector vector_of(__m512i x) { return (Vector){.i = x}; }
EMULATED Vector floats_of(__m512 x) { return (Vector){.s = x}; }

/* Subnormal numbers are zero. */
EMULATED_INLINE float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }
EMULATED_INLINE float wide(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return flush(out);
}
EMULATED_INLINE float step(float sum, uint16_t a, uint16_t b) { return flush(fmaf(wide(a), wide(b), sum)); }
EMULATED_INLINE uint16_t narrow(float x) {
    uint32_t u;
    x = flush(x);
    memcpy(&u, &x, sizeof u);
    return (uint16_t)((x != x ? u | 0x400000u : u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

/* ---- vectors ----------------------------------------------------------------------------------------------------------------- */

EMULATED __m512i e_zero(void) { return (Vector){{0}}.i; }
EMULATED __m512 e_zero_ps(void) { return (Vector){{0}}.s; }
EMULATED __m512i e_load(const void *x) {
    Vector v;
    memcpy(&v, x, 64);
    return v.i;
}
EMULATED void e_store(void *x, __m512i v) { memcpy(x, &v, 64); }
EMULATED __m512 e_load_ps(const void *x) { return vector_of(e_load(x)).s; }
EMULATED void e_store_ps(void *x, __m512 v) { memcpy(x, &v, 64); }
/* Elements of `size` bytes; those outside the mask are neither read nor written. */
EMULATED void masked(void *to, const void *from, uint32_t mask, int count, size_t size) {
    for (int i = 0; i < count; i++)
        if (mask >> i & 1) memcpy((char *)to + (size_t)i * size, (const char *)from + (size_t)i * size, size);
}
EMULATED __m256i e_half(uint32_t mask, const void *x) {
    Half v = {{0}};
    masked(&v, x, mask, 16, 2);
    return v.i;
}
EMULATED __m512i e_whole(uint32_t mask, const void *x) {
    Vector v = {{0}};
    masked(&v, x, mask, 32, 2);
    return v.i;
}
EMULATED __m512 e_floats(uint32_t mask, const void *x) {
    Vector v = {{0}};
    masked(&v, x, mask, 16, 4);
    return v.s;
}
EMULATED void e_store_half(void *x, uint32_t mask, __m256i v) { masked(x, &v, mask, 16, 2); }
EMULATED void e_store_floats(void *x, uint32_t mask, __m512 v) { masked(x, &v, mask, 16, 4); }
EMULATED __m512i e_widen(__m256i x) {
    Half h = {.i = x};
    Vector v;
    for (int i = 0; i < 16; i++) v.w[i] = h.h[i];
    return v.i;
}
EMULATED __m512i e_shift(__m512i x, int by) {
    Vector v = vector_of(x);
    for (int i = 0; i < 16; i++) v.w[i] <<= by;
    return v.i;
}
EMULATED __m512i e_or(__m512i x, __m512i y) { return x | y; }
EMULATED __m512i e_set1(int x) {
    Vector v;
    for (int i = 0; i < 16; i++) v.w[i] = (uint32_t)x;
    return v.i;
}
EMULATED __m512 e_set1_ps(float x) {
    Vector v;
    for (int i = 0; i < 16; i++) v.f[i] = x;
    return v.s;
}
EMULATED __m512 e_mul(__m512 x, __m512 y) { return x * y; }
EMULATED __m512 e_fma(__m512 x, __m512 y, __m512 z) {
    Vector a = floats_of(x), b = floats_of(y), c = floats_of(z);
    for (int i = 0; i < 16; i++) c.f[i] = fmaf(a.f[i], b.f[i], c.f[i]);
    return c.s;
}
/* Elements of 4 or 8 bytes of the lower or upper half of each 128 bits, of x and y in turn. */
EMULATED __m512i e_unpack(__m512i x, __m512i y, int size, int upper) {
    Vector a = vector_of(x), b = vector_of(y), v;
    int words = size / 4, half = upper ? 2 : 0;
    for (int lane = 0; lane < 16; lane += 4)
        for (int i = 0; i < 2 / words; i++)
            for (int w = 0; w < words; w++) {
                v.w[lane + 2 * i * words + w] = a.w[lane + half + i * words + w];
                v.w[lane + (2 * i + 1) * words + w] = b.w[lane + half + i * words + w];
            }
    return v.i;
}
EMULATED __m512i e_lanes(__m512i x, __m512i y, int order) {
    Vector a = vector_of(x), b = vector_of(y), v;
    for (int lane = 0; lane < 4; lane++) memcpy(v.w + 4 * lane, (lane < 2 ? a : b).w + (order >> 2 * lane & 3) * 4, 16);
    return v.i;
}
EMULATED __m256bh e_narrow(__m512 x) {
    Vector v = floats_of(x);
    Half h;
    for (int i = 0; i < 16; i++) h.h[i] = narrow(v.f[i]);
    return h.b;
}
EMULATED __m512bh e_narrow_two(__m512 upper, __m512 lower) {
    Vector a = floats_of(upper), b = floats_of(lower), v;
    for (int i = 0; i < 16; i++) v.h[i] = narrow(b.f[i]), v.h[16 + i] = narrow(a.f[i]);
    return v.b;
}
EMULATED __m512 e_pairs(__m512 sum, __m512bh x, __m512bh y) {
    Vector s = floats_of(sum), a = {.b = x}, b = {.b = y};
    for (int i = 0; i < 16; i++) {
        s.f[i] = step(s.f[i], a.h[2 * i + 1], b.h[2 * i + 1]);
        s.f[i] = step(s.f[i], a.h[2 * i], b.h[2 * i]);
    }
    return s.s;
}

EMULATED __m512 e_fms(__m512 x, __m512 y, __m512 z) { return e_fma(x, y, -z); }
EMULATED __m512 e_fnma(__m512 x, __m512 y, __m512 z) { return e_fma(-x, y, z); }
EMULATED __m512 e_add(__m512 x, __m512 y) { return x + y; }
EMULATED __m512 e_sub(__m512 x, __m512 y) { return x - y; }
/* The second operand, if one is NaN. */
EMULATED __m512 e_max(__m512 x, __m512 y) {
    Vector a = floats_of(x), b = floats_of(y);
    for (int i = 0; i < 16; i++) b.f[i] = a.f[i] > b.f[i] ? a.f[i] : b.f[i];
    return b.s;
}
EMULATED __m512 e_min(__m512 x, __m512 y) {
    Vector a = floats_of(x), b = floats_of(y);
    for (int i = 0; i < 16; i++) b.f[i] = a.f[i] < b.f[i] ? a.f[i] : b.f[i];
    return b.s;
}
EMULATED __m512 e_select(__m512 other, uint32_t mask, __m512 x) {
    masked(&other, &x, mask, 16, 4);
    return other;
}
EMULATED __m512 e_keep(uint32_t mask, __m512 x) { return e_select(e_zero_ps(), mask, x); }
EMULATED __m512 e_mask_max(__m512 other, uint32_t mask, __m512 x, __m512 y) { return e_select(other, mask, e_max(x, y)); }
EMULATED uint32_t e_compare(__m512 x, __m512 y, int how) {
    Vector a = floats_of(x), b = floats_of(y);
    uint32_t mask = 0;
    if (how != _CMP_EQ_OQ && how != _CMP_NEQ_UQ) abort();
    for (int i = 0; i < 16; i++) mask |= (uint32_t)((a.f[i] == b.f[i]) == (how == _CMP_EQ_OQ)) << i;
    return mask;
}
EMULATED __m512 e_round(__m512 x) {
    Vector v = floats_of(x);
    for (int i = 0; i < 16; i++) v.f[i] = rintf(v.f[i]);
    return v.s;
}
EMULATED __m512 e_scale(__m512 x, __m512 y) {
    Vector a = floats_of(x), b = floats_of(y);
    for (int i = 0; i < 16; i++) {
        float by = floorf(b.f[i]);
        a.f[i] = by != by ? by : ldexpf(a.f[i], (int)(by > 1000 ? 1000 : by < -1000 ? -1000 : by));
    }
    return a.s;
}
EMULATED float e_sum(__m512 x) { /* halves are added to each other */
    Vector v = floats_of(x);
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) v.f[i] += v.f[i + n];
    return v.f[0];
}
EMULATED float e_largest(__m512 x) {
    Vector v = floats_of(x);
    for (int i = 1; i < 16; i++) v.f[0] = v.f[0] > v.f[i] ? v.f[0] : v.f[i];
    return v.f[0];
}
EMULATED float e_first(__m512 x) { return floats_of(x).f[0]; }
/* Elements of 2 bytes of the lower or upper half of each 128 bits, of x and y in turn. */
EMULATED __m512i e_unpack_16(__m512i x, __m512i y, int upper) {
    Vector a = vector_of(x), b = vector_of(y), v;
    for (int i = 0; i < 16; i++) {
        int from = i / 4 * 8 + i % 4 + 4 * upper;
        v.h[2 * i] = a.h[from], v.h[2 * i + 1] = b.h[from];
    }
    return v.i;
}
EMULATED __m512i e_permute_16(__m512i order, __m512i x) {
    Vector a = vector_of(x), at = vector_of(order), v;
    for (int i = 0; i < 32; i++) v.h[i] = a.h[at.h[i] & 31];
    return v.i;
}
EMULATED __m512i e_set_16(const short *upwards) { /* the first is the last element */
    Vector v;
    for (int i = 0; i < 32; i++) v.h[i] = (uint16_t)upwards[31 - i];
    return v.i;
}
EMULATED void e_store_whole(void *x, uint32_t mask, __m512i v) { masked(x, &v, mask, 32, 2); }
EMULATED void e_store_256(void *x, __m256i v) { memcpy(x, &v, 32); }
EMULATED __m256i e_zero_256(void) { return (Half){{0}}.i; }
EMULATED __m256i e_lower(__m512i x) {
    Half h;
    memcpy(&h, &x, 32);
    return h.i;
}
EMULATED __m256i e_extract(__m512i x, int upper) {
    Half h;
    memcpy(&h, (const char *)&x + 32 * upper, 32);
    return h.i;
}

#define _mm512_add_ps e_add
#define _mm512_sub_ps e_sub
#define _mm512_fmsub_ps e_fms
#define _mm512_fnmadd_ps e_fnma
#define _mm512_max_ps e_max
#define _mm512_min_ps e_min
#define _mm512_mask_max_ps e_mask_max
#define _mm512_mask_mov_ps e_select
#define _mm512_maskz_mov_ps e_keep
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask e_compare
#undef _mm512_mul_round_ps
#define _mm512_mul_round_ps(x, y, how) e_mul(x, y)
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(x, how) e_round(x)
#define _mm512_scalef_ps e_scale
#define _mm512_reduce_add_ps e_sum
#define _mm512_reduce_max_ps e_largest
#define _mm512_cvtss_f32 e_first
#define _mm512_castps_si512(x) ((__m512i)(x))
#define _mm512_castsi512_si256 e_lower
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 e_extract
#define _mm512_unpacklo_epi16(x, y) e_unpack_16(x, y, 0)
#define _mm512_unpackhi_epi16(x, y) e_unpack_16(x, y, 1)
#define _mm512_permutexvar_epi16 e_permute_16
#define _mm512_set_epi16(...) e_set_16((const short[]){__VA_ARGS__})
#define _mm512_mask_storeu_epi16 e_store_whole
#define _mm256_storeu_si256 e_store_256
#define _mm256_setzero_si256 e_zero_256
#define _mm512_setzero_si512 e_zero
#define _mm512_setzero_ps e_zero_ps
#define _mm512_loadu_si512 e_load
#define _mm512_storeu_si512 e_store
#define _mm512_loadu_ps e_load_ps
#define _mm512_storeu_ps e_store_ps
#define _mm256_maskz_loadu_epi16 e_half
#define _mm512_maskz_loadu_epi16 e_whole
#define _mm512_maskz_loadu_ps e_floats
#define _mm256_mask_storeu_epi16 e_store_half
#define _mm512_mask_storeu_ps e_store_floats
#define _mm512_cvtepu16_epi32 e_widen
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 e_shift
#define _mm512_or_si512 e_or
#define _mm512_set1_epi32 e_set1
#define _mm512_set1_ps e_set1_ps
#define _mm512_castsi512_ps(x) ((__m512)(x))
#define _mm512_mul_ps e_mul
#define _mm512_fmadd_ps e_fma
#define _mm512_unpacklo_epi32(x, y) e_unpack(x, y, 4, 0)
#define _mm512_unpackhi_epi32(x, y) e_unpack(x, y, 4, 1)
#define _mm512_unpacklo_epi64(x, y) e_unpack(x, y, 8, 0)
#define _mm512_unpackhi_epi64(x, y) e_unpack(x, y, 8, 1)
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 e_lanes
#define _mm512_cvtneps_pbh e_narrow
#define _mm512_cvtne2ps_pbh e_narrow_two
#define _mm512_dpbf16_ps e_pairs

/* ---- tiles ------------------------------------------------------------------------------------------------------------------- */

/* Of a thread. An instruction without a configuration, or with an operand of another size, ends the process as the CPU would. */
static _Thread_local struct {
    uint8_t palette, start_row, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} shape;
static _Thread_local uint8_t tile[8][16][64];

__attribute__((weak)) int tiles_in_use; /* threads that have a configuration; one variable, though every source has this header */

EMULATED int rows_of(int t) {
    if (shape.palette != 1 || t > 7 || shape.rows[t] == 0 || shape.rows[t] > 16 || shape.bytes[t] > 64) abort();
    return shape.rows[t];
}
EMULATED void t_zero(int t) { memset(tile[t], 0, (size_t)rows_of(t) * 64); }
EMULATED void t_configure(const void *from) {
    if (!shape.palette) __atomic_add_fetch(&tiles_in_use, 1, __ATOMIC_RELAXED);
    memcpy(&shape, from, sizeof shape);
    memset(tile, 0, sizeof tile);
}
EMULATED void t_release(void) {
    if (shape.palette) __atomic_sub_fetch(&tiles_in_use, 1, __ATOMIC_RELAXED);
    memset(&shape, 0, sizeof shape);
}
EMULATED void t_load(int t, const void *from, int64_t stride) {
    memset(tile[t], 0, sizeof tile[t]);
    for (int i = 0; i < rows_of(t); i++) memcpy(tile[t][i], (const char *)from + i * stride, shape.bytes[t]);
}
EMULATED void t_store(int t, void *to, int64_t stride) {
    for (int i = 0; i < rows_of(t); i++) memcpy((char *)to + i * stride, tile[t][i], shape.bytes[t]);
}
EMULATED void t_multiply(int c, int a, int b) {
    int rows = rows_of(c), columns = shape.bytes[c] / 4, pairs = shape.bytes[a] / 4;
    if (rows_of(a) != rows || rows_of(b) != pairs || shape.bytes[b] != shape.bytes[c]) abort();
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < columns; j++) {
            float even = 0, odd = 0, sum;
            uint16_t x[2], y[2];
            for (int k = 0; k < pairs; k++) {
                memcpy(x, tile[a][i] + 4 * k, 4);
                memcpy(y, tile[b][k] + 4 * j, 4);
                even = step(even, x[0], y[0]);
                odd = step(odd, x[1], y[1]);
            }
            memcpy(&sum, tile[c][i] + 4 * j, 4);
            sum = flush(flush(sum) + flush(even + odd));
            memcpy(tile[c][i] + 4 * j, &sum, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig t_configure
#define _tile_release t_release
#define _tile_zero t_zero
#define _tile_loadd t_load
#define _tile_stored t_store
#define _tile_dpbf16ps t_multiply
