/*
 * Cross entropy with a smoothed label: the value and the gradient of every row in one call.
 *
 * A row holds K logits z. With u = z - max(z) and p = softmax(z), its label is
 *
 *     P_hat = (1 - alpha) onehot(y) + alpha P,        P_j = q_j / sum(q),
 *
 * where q is constant for every class that is not masked (label smoothing) or exp(u / tau) (LABO).
 * A masked class has the logit -inf; it gets q = 0, p = 0 and, unless it is the target, a gradient
 * of exactly 0. The class weights w are 1 if not given:
 *
 *     value    = -sum_j w_j P_hat_j log p_j  (+ w_y alpha tau KL(P || uniform) for LABO)
 *     gradient = (sum_k w_k P_hat_k) p - w P_hat
 *
 * Two rules hold in every backend. 0 * inf = 0: a masked target costs nothing if its share of the
 * label or its weight is 0, and infinity otherwise. And u is finite where z is: a difference that
 * overflows is the lowest finite number.
 *
 * A row is read three times: for its maximum, for the sums, for the gradient. Only the first
 * reading comes from memory, the others find the row in the cache. The bits of a row depend on
 * that row alone: not on its neighbours, nor on whether and where its gradient is written.
 *
 * All other losses are formulas of sums over a row (labo/fast/formula.py). They take two calls: one
 * gives the sums of every row, and the other writes a gradient that is linear in a few functions of
 * the logits, with coefficients that PyTorch has computed from the sums. The sums may be those of a
 * part of the columns: this is also how logits that are split over processes are done.
 *
 * The file is plain C11 and uses neither Python nor PyTorch. Its row loops are written once,
 * over a vector type `vec` of LANES floats and twelve operations on it. The file includes itself to
 * compile those loops for each instruction set, and selects one when it is loaded.
 */
#ifndef LANES

#if defined(__linux__) && !defined(_DEFAULT_SOURCE)
#define _DEFAULT_SOURCE /* for madvise and mincore */
#endif

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address, 0, 2) /* to the L2 cache */
#elif defined(_MSC_VER)
#define EXPORT __declspec(dllexport)
#define ALWAYS_INLINE static __forceinline
#else
#define EXPORT
#define ALWAYS_INLINE static inline
#endif
#ifndef PREFETCH
#define PREFETCH(address) ((void)(address))
#endif

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#endif

/* Not on Windows, where GCC does not align the stack for vectors of this size. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)
#define X86_VECTORS
#include <immintrin.h>
#endif

/* The modes are part of the interface. */
enum { CROSS_ENTROPY, LABEL_SMOOTHING, LABO_FIXED, LABO_ADAPTIVE };

/* Sums over the classes of a row, of products of u, e = exp(u), q and w. */
typedef struct {
    double e, ue, q, qu, wq, wqu, count;
} row_sums;

/* Where the masses q of a formula come from; part of the interface. */
enum { NO_MASSES, UNIFORM, TEMPERED, BEYOND_MARGIN, FROM_ROW, FROM_TABLE, FROM_TEACHER };

/* The sums that a formula asks for, beside that of e; part of the interface. */
enum {
    COUNT = 1, UE = 2, R = 4, QU = 8, QD = 16, WQU = 32, TOP = 64, OTHERS = 128, UR = 256,
    EMIX = 512, RD = 1024, QMIX = 2048
};

/*
 * The sums of a formula over the classes that are not masked, with u = z - top, e = exp(u),
 * r = exp(u / tau), masses q, class weights w and d = v / source_tau - u / tau, where
 * v = teacher's logit - source_top and source_tau is tau unless the rows have their own.
 * `top_at` is the first class with the logit `top`; `u_y` is u of the target. Sums that were not
 * asked for are 0. With OTHERS the target counts as masked.
 *
 * With x = u + shift, `mix` is the sum of log(1 + exp(x)) and `emix` that of e log(1 + exp(-x)). The
 * shift needs the sum of e: these two take a call of their own, which gives no other sum. So do the
 * sums of a mixture with a teacher: with x = d + shift, `rmix` is the sum of r log(1 + exp(x)), `qmix`
 * that of q log(1 + exp(-x)) and `qs` that of q / (1 + exp(x)). `rd` is the sum of r d, in which a
 * class that the teacher alone has masked counts as -inf, unless r is 0.
 */
typedef struct {
    double top, source_top, top_at, u_y, count, e, ue, r, ur, q, qu, qd, wq, wqu, rd, rmix,
        qmix, qs, mix, emix;
} formula_sums;

/*
 * The coefficients of a gradient: from_e e + from_ue u e + from_r r + (from_q + from_wq w) q, with UR
 * + from_one + from_u u, with EMIX + from_emix e log(1 + exp(-x)), with RD + from_rd r d, and with QMIX
 * + from_rmix r log(1 + exp(x)) + from_qs q / (1 + exp(x)). The entries of the target and of the class `top_at` (none if it is negative) are given whole.
 */
typedef struct {
    double top, source_top, from_e, from_ue, from_r, from_q, from_wq, from_one, from_u, from_emix,
        at_target, top_at, at_top, from_rd, from_rmix, from_qs;
} formula_gradient;

/* What training logs of a row beside its value; part of the interface (labo/metrics.py). */
typedef struct {
    double nll, entropy, correct, top, log_e;
} row_statistics;

/* The temperatures of a row: of its logits and of the teacher's. */
typedef struct {
    double tau, source_tau;
} temperatures;

/* The maximum of a row over all columns, the shift of x, and the maximum of the teacher. */
typedef struct {
    double top, shift, source_top;
} mixture;

/* The mean of a row, or 0, and the sum of its squared distances from that. */
typedef struct {
    double center, squares;
} row_moments;

/*
 * The arguments of labo_rows, labo_formula and labo_moments; part of the interface (native.py).
 * Strides count elements, pointers that are not needed are NULL. bf16 is the type of logits and grad.
 */
typedef struct {
    const void *logits;
    int64_t classes, stride, ignore_index;
    const int64_t *target;
    const float *weight; /* per class */
    void *grad;          /* NULL for values only; may be the logits */
    int64_t grad_stride;
    int32_t bf16;
    /* of labo_rows */
    int32_t mode;
    double alpha, tau, rho, scale, log_classes;
    const float *row_scale; /* per row */
    float *values;
    row_statistics *statistics; /* per row */
    /* of a formula: sums only, or from the coefficients the gradient only */
    int32_t asked, masses;
    double margin;
    const temperatures *row_tau; /* per row */
    const mixture *row_mixture;  /* per row */
    const void *source;          /* what the masses come from */
    int64_t source_stride;
    formula_sums *sums;
    const formula_gradient *coefficients;
    int32_t source_bf16;
    /* of moments */
    int32_t centered;
    row_moments *moments;
} batch;

/*
 * Memory that was never touched has no pages. To get them from Linux in pieces, just before they are
 * written, takes about half the time of one fault per page, and a piece is still in the cache when
 * it is written. A kernel before 5.14 refuses, and pages then come one by one as ever.
 */
typedef struct {
    char *next, *end; /* what is left without pages */
} fresh_memory;

enum { PIECE = 1 << 18 };

static fresh_memory fresh_part(const batch *b, int64_t first, int64_t last, int64_t size)
{
#ifdef __linux__
    char *start = (char *)b->grad + first * b->grad_stride * size;
    const int64_t bytes = ((last - first - 1) * b->grad_stride + b->classes) * size;
    if (b->grad && last > first && bytes >= 4 * PIECE) {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE);
        /* Whether the first page that is all ours has been touched tells it for the others. */
        char *whole = (char *)(((uintptr_t)start + page - 1) / page * page);
        unsigned char touched = 1;
        if (mincore(whole, page, &touched) == 0 && !(touched & 1))
            return (fresh_memory){whole, start + bytes};
    }
#else
    (void)b, (void)first, (void)last, (void)size;
#endif
    return (fresh_memory){NULL, NULL};
}

/* Get the pages of a stretch that ends at `until`. */
static void get_pages(fresh_memory *fresh, const char *until)
{
#ifdef __linux__
    while (fresh->next < fresh->end && fresh->next < until) {
        const size_t left = (size_t)(fresh->end - fresh->next), most = left < PIECE ? left : PIECE;
        if (madvise(fresh->next, most, MADV_POPULATE_WRITE) != 0)
            fresh->end = NULL;
        fresh->next += most;
    }
#else
    (void)fresh, (void)until;
#endif
}

/* At the target. */
typedef struct {
    double u, e, q;
} target_entry;

/* Where j is not the target, gradient_j = from_e e_j - from_q w_j q_j. */
typedef struct {
    double value;
    float from_e, from_q, at_target;
} row_result;

/* log2(e) / temperature, as the sum of two floats. */
typedef struct {
    float high, low;
} rate;

static rate rate_of(double temperature)
{
    const double exact = 1.4426950408889634 / temperature;
    const float high = (float)exact;
    return (rate){high, (float)(exact - high)};
}

/*
 * A stretch of whole vectors. A row is two of them: what it has of whole vectors, and a copy of
 * the classes left over, filled up to one vector with masked classes of weight 0. If a formula
 * leaves the target out, the first is cut into three: before the vector with the target, a copy of
 * that vector in which the target is masked, and after it.
 */
typedef struct {
    const void *logits, *source;
    const float *weight;
    void *grad;
    float *kept_e, *kept_q; /* from the sums to the gradient, or NULL to compute them again */
    const void *next, *next_source; /* the same span of the next row, to prefetch it */
    int64_t classes;
} span;

/* The classes of a span from `at` on. */
static span after(span s, int64_t at, int64_t size, int64_t source_size)
{
    s.logits = (const char *)s.logits + at * size;
    s.source = s.source ? (const char *)s.source + at * source_size : NULL;
    s.weight = s.weight ? s.weight + at : NULL;
    s.grad = s.grad ? (char *)s.grad + at * size : NULL;
    s.next = (const char *)s.next + at * size;
    s.next_source = s.source ? (const char *)s.next_source + at * source_size : NULL;
    s.classes -= at;
    return s;
}

enum { PARTS = 4 };

typedef struct {
    span parts[PARTS];
    float top, source_top; /* the largest logit, of a formula also that of the teacher */
    float beyond;          /* the lowest number above the margin of a formula */
    bool measured;         /* the sum of u e is needed also if the loss does not need it */
    rate over_one, over_tau;
    rate over_half_tau, over_source_tau; /* of a formula, as the next two */
    float per_half_tau, per_source_tau;
    float shift, exp_shift; /* of a mixture */
} row_view;

static void set_tau(row_view *row, double tau, double source_tau)
{
    row->over_tau = rate_of(tau);
    row->over_half_tau = rate_of(tau / 2);
    row->over_source_tau = rate_of(source_tau);
    row->per_half_tau = (float)(2 / tau);
    row->per_source_tau = (float)(1 / source_tau);
}

static void set_mixture(row_view *row, const mixture *m)
{
    row->shift = (float)m->shift;
    row->exp_shift = (float)exp(m->shift);
}

/* What the row loops are compiled for: a constant wherever a loop sees it. */
typedef struct {
    int mode;
    bool weighted, bf16;
} variant;

/*
 * Up to this many classes the gradient finds the exponentials that the sums have computed: with the
 * logits they take 768 KiB, which fit the L2 cache of a server. In place, where the time does not go
 * into writing to memory, this saves a quarter of the time of LABO.
 */
enum { KEPT = 65536, CACHE_LINE = 64 };

/*
 * The error of a float sum grows with its length: after this many vectors the sums of a row are
 * moved to double. A power of two.
 */
enum { STRETCH = 64 };

/* The unit of the masses of a formula: a sum of q u over a stretch of a row does not overflow. */
#define MASS (1.0f / (2 * STRETCH))

static float bf16_to_float(uint16_t x)
{
    const uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

/* Round to the nearest, ties to even; a NaN is made quiet, so that rounding cannot make it inf. */
static uint16_t bf16_from_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

ALWAYS_INLINE double within_float(double x)
{
    return x < -FLT_MAX ? -FLT_MAX : x > FLT_MAX ? FLT_MAX : x;
}

ALWAYS_INLINE const char *element(const void *row, int64_t at, bool bf16)
{
    return (const char *)row + at * (bf16 ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float));
}

ALWAYS_INLINE float get(const void *row, int64_t at, bool bf16)
{
    return bf16 ? bf16_to_float(((const uint16_t *)row)[at]) : ((const float *)row)[at];
}

ALWAYS_INLINE void put(void *row, int64_t at, float x, bool bf16)
{
    if (bf16)
        ((uint16_t *)row)[at] = bf16_from_float(x);
    else
        ((float *)row)[at] = x;
}

/* From the sums of row i to its value and the coefficients of its gradient. */
static row_result finish_row(const batch *b, int64_t i, const target_entry *y, const row_sums *s)
{
    const bool labo = b->mode == LABO_FIXED || b->mode == LABO_ADAPTIVE;
    const double log_e = log(s->e), per_e = 1.0 / s->e;
    const double log_count = s->count == b->classes ? b->log_classes : log(s->count);

    double onehot_share = 1.0 - (b->mode == CROSS_ENTROPY ? 0.0 : b->alpha);
    if (b->mode == LABO_ADAPTIVE) {
        const double entropy = log_e - s->ue * per_e;
        const double largest = s->count <= 1.0 ? 1.0 : log_count;
        onehot_share = b->rho * (entropy < 0.0 ? 0.0 : entropy) / largest;
    }
    const double alpha = 1.0 - onehot_share;

    /* Means under P. LABO without weights has no sum `qu`: it would cancel in the value. */
    const double w_target = b->weight ? b->weight[b->target[i]] : 1.0;
    double per_q = 0.0, mean_u = 0.0, mean_w = 1.0, mean_wu = 0.0;
    if (b->mode != CROSS_ENTROPY) {
        per_q = 1.0 / s->q;
        mean_u = s->qu * per_q;
        mean_w = b->weight ? s->wq * per_q : 1.0;
        mean_wu = b->weight ? s->wqu * per_q : mean_u;
    }

    const double onehot_part = w_target * onehot_share;
    const bool masked = y->u == -INFINITY;
    const bool no_share = w_target == 0.0 || (float)alpha == 1.0f; /* 0 in float, as elsewhere */
    double value = masked && no_share ? 0.0 : onehot_part * (log_e - y->u);
    value += alpha * (mean_w * log_e - mean_wu);
    if (labo)
        value += w_target * alpha * (b->tau * (log_count - log(s->q)) + mean_u);
    row_result result = {.value = value};
    if (!b->grad)
        return result;

    const double factor = b->scale * (b->row_scale ? b->row_scale[i] : 1.0);
    const double p_target = y->e * per_e;
    double at_target = onehot_part * (p_target - 1.0);
    if (b->mode != CROSS_ENTROPY) {
        at_target += alpha * (mean_w * p_target - w_target * y->q * per_q);
        result.from_q = (float)(factor * alpha * per_q);
    }
    result.from_e = (float)(factor * (onehot_part + alpha * mean_w) * per_e);
    result.at_target = (float)(factor * at_target);
    return result;
}

static row_statistics measure_row(float top, const target_entry *y, const row_sums *s)
{
    const double log_e = log(s->e), entropy = log_e - s->ue / s->e;
    return (row_statistics){.nll = log_e - y->u, .entropy = entropy < 0.0 ? 0.0 : entropy,
                            .correct = y->u >= 0.0 && !isnan(s->e), .top = top, .log_e = log_e};
}

/*
 * The names below mean another type or function for each instruction set. An instruction set
 * defines ISA, LANES, TARGET and the operations; then the file includes itself.
 */
#define INLINE ALWAYS_INLINE TARGET
#define JOIN_EXPANDED(name, isa) name##_##isa
#define JOIN(name, isa) JOIN_EXPANDED(name, isa)
#define vec JOIN(vec, ISA)
#define vec_sums JOIN(vec_sums, ISA)
#define vec_buffer JOIN(vec_buffer, ISA)
#define splat JOIN(splat, ISA)
#define mul_add JOIN(mul_add, ISA)
#define maximum JOIN(maximum, ISA)
#define nearest JOIN(nearest, ISA)
#define fraction JOIN(fraction, ISA)
#define scale_by_power JOIN(scale_by_power, ISA)
#define zero_below JOIN(zero_below, ISA)
#define lowest_below JOIN(lowest_below, ISA)
#define load JOIN(load, ISA)
#define store JOIN(store, ISA)
#define highest JOIN(highest, ISA)
#define total JOIN(total, ISA)
#define first JOIN(first, ISA)
#define finite JOIN(finite, ISA)
#define add_totals JOIN(add_totals, ISA)
#define row_max JOIN(row_max, ISA)
#define exp_of JOIN(exp_of, ISA)
#define q_of JOIN(q_of, ISA)
#define sum_stretch JOIN(sum_stretch, ISA)
#define sum_row JOIN(sum_row, ISA)
#define write_gradient JOIN(write_gradient, ISA)
#define find_target JOIN(find_target, ISA)
#define run_variant JOIN(run_variant, ISA)
#define choose_weighted JOIN(choose_weighted, ISA)
#define choose_mode JOIN(choose_mode, ISA)
#define run_batch JOIN(run_batch, ISA)
#define vec_formula_sums JOIN(vec_formula_sums, ISA)
#define source_max JOIN(source_max, ISA)
#define find_top JOIN(find_top, ISA)
#define source_at JOIN(source_at, ISA)
#define masses_at JOIN(masses_at, ISA)
#define half_of JOIN(half_of, ISA)
#define difference JOIN(difference, ISA)
#define log_of_mixture JOIN(log_of_mixture, ISA)
#define sum_mixture JOIN(sum_mixture, ISA)
#define taught_entry JOIN(taught_entry, ISA)
#define taught_at JOIN(taught_at, ISA)
#define r_times_d JOIN(r_times_d, ISA)
#define share_of JOIN(share_of, ISA)
#define sum_teacher_mixture JOIN(sum_teacher_mixture, ISA)
#define sum_formula_stretch JOIN(sum_formula_stretch, ISA)
#define sum_formula JOIN(sum_formula, ISA)
#define write_formula_gradient JOIN(write_formula_gradient, ISA)
#define cut_at_target JOIN(cut_at_target, ISA)
#define run_formula JOIN(run_formula, ISA)
#define moments_about JOIN(moments_about, ISA)
#define run_moments JOIN(run_moments, ISA)

/* ---- portable: vectors as GCC and clang have them on any CPU, single floats elsewhere ---- */

#define ISA portable
#define TARGET
#ifdef __GNUC__
#define LANES 4
typedef float vec __attribute__((vector_size(16)));
typedef uint32_t vec_bits __attribute__((vector_size(16)));
#define MASK(condition) ((vec_bits)(condition))
#else
#define LANES 1
typedef float vec;
typedef uint32_t vec_bits;
#define MASK(condition) ((vec_bits)0 - (vec_bits)(condition))
#endif

INLINE vec_bits to_bits(vec x)
{
    vec_bits bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

INLINE vec from_bits(vec_bits bits)
{
    vec x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec mul_add(vec a, vec b, vec c) { return a * b + c; }

/* b if either is NaN, as the instructions of x86 have it. */
INLINE vec maximum(vec a, vec b)
{
    const vec_bits first = MASK(a > b);
    return from_bits((first & to_bits(a)) | (~first & to_bits(b)));
}

/* Adding 1.5 * 2^23 leaves no bits for a fraction. */
INLINE vec nearest(vec x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

/* The leading 12 bits: the product of two such numbers is exact. */
INLINE vec shortened(vec x) { return from_bits(to_bits(x) & 0xfffff000u); }

/* u * r - n, which is small: the large product must not be rounded before n is subtracted. */
INLINE vec fraction(vec u, rate r, vec n)
{
    const vec u_top = shortened(u), r_top = shortened(splat(r.high));
    const vec r_rest = (r.high - r_top) + r.low;
    return (u_top * r_top - n) + ((u - u_top) * r_top + u * r_rest);
}

/* x * 2^n, where n is whole; its low bits are those of n + 1.5 * 2^23. */
INLINE vec scale_by_power(vec x, vec n)
{
    return x * from_bits((to_bits(n + 0x1.8p23f) + 127) << 23);
}

/* 0 where x < low, else the value: also where x is NaN. */
INLINE vec zero_below(vec x, float low, vec value)
{
    return from_bits(~MASK(x < low) & to_bits(value));
}

/* -inf where x < low, else the value. */
INLINE vec lowest_below(vec x, float low, vec value)
{
    const vec_bits below = MASK(x < low);
    return from_bits((below & to_bits(splat(-INFINITY))) | (~below & to_bits(value)));
}

INLINE vec load(const void *row, int64_t at, bool bf16)
{
    float lanes[LANES];
    vec x;
    for (int k = 0; k < LANES; k++)
        lanes[k] = get(row, at + k, bf16);
    memcpy(&x, lanes, sizeof x);
    return x;
}

INLINE void store(void *row, int64_t at, vec x, bool bf16)
{
    float lanes[LANES];
    memcpy(lanes, &x, sizeof x);
    for (int k = 0; k < LANES; k++)
        put(row, at + k, lanes[k], bf16);
}

INLINE float highest(vec x)
{
    float lanes[LANES];
    memcpy(lanes, &x, sizeof x);
    for (int k = 1; k < LANES; k++)
        lanes[0] = lanes[k] > lanes[0] ? lanes[k] : lanes[0];
    return lanes[0];
}

/* In double: next to the 1 of the largest logit, small sums of other lanes would be lost. */
INLINE double total(vec x)
{
    float lanes[LANES];
    double sum = 0.0;
    memcpy(lanes, &x, sizeof x);
    for (int k = 0; k < LANES; k++)
        sum += lanes[k];
    return sum;
}

#include "native.c"

#ifdef X86_VECTORS

/* ---- AVX2 and FMA ---- */

#undef ISA
#undef LANES
#undef TARGET
#define ISA avx2
#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
typedef __m256 vec;

INLINE vec splat(float x) { return _mm256_set1_ps(x); }
INLINE vec mul_add(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec maximum(vec a, vec b) { return _mm256_max_ps(a, b); }

INLINE vec nearest(vec x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec fraction(vec u, rate r, vec n)
{
    return mul_add(u, splat(r.low), _mm256_fmsub_ps(u, splat(r.high), n));
}

INLINE vec scale_by_power(vec x, vec n)
{
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return x * _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

INLINE vec zero_below(vec x, float low, vec value)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(x, splat(low), _CMP_LT_OQ), value);
}

INLINE vec lowest_below(vec x, float low, vec value)
{
    const vec below = _mm256_cmp_ps(x, splat(low), _CMP_LT_OQ);
    return _mm256_blendv_ps(value, splat(-INFINITY), below);
}

INLINE vec load(const void *row, int64_t at, bool bf16)
{
    if (!bf16)
        return _mm256_loadu_ps((const float *)row + at);
    const __m128i narrow = _mm_loadu_si128((const void *)((const uint16_t *)row + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

INLINE void store(void *row, int64_t at, vec x, bool bf16)
{
    if (!bf16) {
        _mm256_storeu_ps((float *)row + at, x);
        return;
    }
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i result = _mm256_blendv_epi8(rounded, quiet, is_nan);
    const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(result),
                                            _mm256_extracti128_si256(result, 1));
    _mm_storeu_si128((void *)((uint16_t *)row + at), narrow);
}

INLINE float highest(vec x)
{
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE double total(vec x)
{
    const __m256d four = _mm256_cvtps_pd(_mm256_castps256_ps128(x))
                         + _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
    return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

#include "native.c"

/* ---- AVX-512 ---- */

#undef ISA
#undef LANES
#undef TARGET
#define ISA avx512
#define LANES 16
#define TARGET __attribute__((target("avx512f")))
typedef __m512 vec;

INLINE vec splat(float x) { return _mm512_set1_ps(x); }
INLINE vec mul_add(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec maximum(vec a, vec b) { return _mm512_max_ps(a, b); }

INLINE vec nearest(vec x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec fraction(vec u, rate r, vec n)
{
    return mul_add(u, splat(r.low), _mm512_fmsub_ps(u, splat(r.high), n));
}

INLINE vec scale_by_power(vec x, vec n) { return _mm512_scalef_ps(x, n); }

INLINE vec zero_below(vec x, float low, vec value)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(low), _CMP_NLT_UQ), value);
}

INLINE vec lowest_below(vec x, float low, vec value)
{
    const __mmask16 below = _mm512_cmp_ps_mask(x, splat(low), _CMP_LT_OQ);
    return _mm512_mask_blend_ps(below, value, splat(-INFINITY));
}

INLINE vec load(const void *row, int64_t at, bool bf16)
{
    if (!bf16)
        return _mm512_loadu_ps((const float *)row + at);
    const __m256i narrow = _mm256_loadu_si256((const void *)((const uint16_t *)row + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

INLINE void store(void *row, int64_t at, vec x, bool bf16)
{
    if (!bf16) {
        _mm512_storeu_ps((float *)row + at, x);
        return;
    }
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40));
    _mm256_storeu_si256((void *)((uint16_t *)row + at), _mm512_cvtepi32_epi16(result));
}

INLINE float highest(vec x) { return _mm512_reduce_max_ps(x); }

INLINE double total(vec x)
{
    const __m256d upper = _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1);
    return _mm512_reduce_add_pd(_mm512_cvtps_pd(_mm512_castps512_ps256(x))
                                + _mm512_cvtps_pd(_mm256_castpd_ps(upper)));
}

#include "native.c"
#endif

/* ---- the interface ---- */

typedef struct {
    const char *name;
    void (*run)(const batch *b, int64_t first, int64_t last);
    void (*run_formula)(const batch *b, int64_t first, int64_t last);
    void (*run_moments)(const batch *b, int64_t first, int64_t last);
} instruction_set;

static const instruction_set portable = {"portable", run_batch_portable, run_formula_portable,
                                         run_moments_portable};
static const instruction_set *active = &portable;

#ifdef X86_VECTORS
static const instruction_set avx2 = {"avx2", run_batch_avx2, run_formula_avx2, run_moments_avx2};
static const instruction_set avx512 = {"avx512", run_batch_avx512, run_formula_avx512,
                                       run_moments_avx512};

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void) { return __builtin_cpu_supports("avx512f"); }

/* Runs when the library is loaded, before any thread can call it. */
__attribute__((constructor)) static void choose(void)
{
    __builtin_cpu_init();
    active = has_avx512() ? &avx512 : has_avx2() ? &avx2 : &portable;
}
#endif

/* The instruction set in use. */
EXPORT const char *labo_native_isa(void) { return active->name; }

/* For tests, while no other thread calls: select an instruction set. 0 if that is not possible. */
EXPORT int labo_native_select(const char *isa)
{
    const instruction_set *wanted = NULL;
    if (!strcmp(isa, "portable"))
        wanted = &portable;
#ifdef X86_VECTORS
    if (!strcmp(isa, "avx2") && has_avx2())
        wanted = &avx2;
    if (!strcmp(isa, "avx512") && has_avx512())
        wanted = &avx512;
#endif
    if (!wanted)
        return 0;
    active = wanted;
    return 1;
}

/* The first row whose target is neither a class nor ignored, or -1; the sum of the weights. */
EXPORT int64_t labo_check_targets(const int64_t *target, int64_t rows, int64_t classes,
                                  int64_t ignore_index, const double *weight, double *denominator)
{
    *denominator = 0.0;
    for (int64_t i = 0; i < rows; i++) {
        if (target[i] == ignore_index)
            continue;
        if (target[i] < 0 || target[i] >= classes)
            return i;
        *denominator += weight ? weight[target[i]] : 1.0;
    }
    return -1;
}

/* In double and in order: the bits do not depend on how the rows were split over threads. */
EXPORT double labo_sum(const float *values, int64_t rows)
{
    double sum = 0.0;
    for (int64_t i = 0; i < rows; i++)
        sum += values[i];
    return sum;
}

EXPORT void labo_rows(const batch *b, int64_t first, int64_t last)
{
    active->run(b, first, last);
}

/*
 * The sums of a formula for every row, with `row_mixture` those of the mixture alone; or, with
 * `coefficients`, the gradient. A target that is not a class belongs to columns that are elsewhere.
 * The source has a row for each row of logits (with a stride of 0, the same one), or, for FROM_TABLE,
 * one for each class.
 */
EXPORT void labo_formula(const batch *b, int64_t first, int64_t last)
{
    active->run_formula(b, first, last);
}

/* The moments of every row. They are not finite if it has masked classes. */
EXPORT void labo_moments(const batch *b, int64_t first, int64_t last)
{
    active->run_moments(b, first, last);
}

#else /* LANES is defined: the row loops, for one instruction set */

typedef struct {
    vec e, ue, q, qu, wq, wqu, count;
} vec_sums;

/* One vector in the type of the logits. */
typedef union {
    float f32[LANES];
    uint16_t bf16[LANES];
} vec_buffer;

/* Move sums to double. */
INLINE void add_totals(row_sums *all, const vec_sums *s)
{
    all->e += total(s->e);
    all->ue += total(s->ue);
    all->q += total(s->q);
    all->qu += total(s->qu);
    all->wq += total(s->wq);
    all->wqu += total(s->wqu);
    all->count += total(s->count);
}

/* The lowest finite number for -inf; NaN for NaN. */
INLINE vec finite(vec u) { return maximum(splat(-FLT_MAX), u); }

INLINE float first(vec x)
{
    float lanes[LANES];
    store(lanes, 0, x, false);
    return lanes[0];
}

/* May miss a NaN, which the sums then meet. */
TARGET static float row_max(const row_view *row, bool bf16)
{
    vec top = splat(-INFINITY);
    for (int part = 0; part < PARTS; part++) {
        const span s = row->parts[part];
        for (int64_t at = 0; at < s.classes; at += LANES)
            top = maximum(top, load(s.logits, at, bf16));
    }
    return highest(top);
}

/*
 * exp(u / temperature) for u <= 0 to within 2 ulp; 0 if that is no normal number; NaN for NaN.
 * The polynomial is the one of its degree nearest to 2^f on [-1/2, 1/2] that has 2^0 = 1.
 */
INLINE vec exp_of(vec u, rate r)
{
    const vec exponent = u * splat(r.high);
    const vec n = nearest(exponent);
    const vec f = fraction(u, r, n);
    vec power = splat(0.00132647273f);
    power = mul_add(power, f, splat(0.00967151299f));
    power = mul_add(power, f, splat(0.0555073358f));
    power = mul_add(power, f, splat(0.240222424f));
    power = mul_add(power, f, splat(0.693147004f));
    power = mul_add(power, f, splat(1.0f));
    return zero_below(exponent, -126.0f, scale_by_power(power, n));
}

/*
 * The q of the comment at the top of this file. For label smoothing any constant will do: with this
 * one, a sum of q u over a stretch of a row does not overflow.
 */
INLINE vec q_of(vec z, vec u, rate over_tau, variant v)
{
    if (v.mode == LABEL_SMOOTHING)
        return zero_below(z, -FLT_MAX, splat(1.0f / (2 * STRETCH)));
    return exp_of(u, over_tau);
}

/* The sums, continued over the classes from `at` to `end`. */
INLINE vec_sums sum_stretch(vec_sums sums, const row_view *row, span s, int64_t at, int64_t end,
                            variant v)
{
    const vec top = splat(row->top);
    const rate over_one = row->over_one, over_tau = row->over_tau;
    for (; at < end; at += LANES) {
        const vec z = load(s.logits, at, v.bf16);
        PREFETCH(element(s.next, at, v.bf16));
        /* Finite for a masked class too, so that 0 * u is 0. */
        const vec u = finite(z - top);
        const vec e = exp_of(u, over_one);
        sums.e += e;
        if (s.kept_e)
            store(s.kept_e, at, e, false);
        if (v.mode == LABO_ADAPTIVE || row->measured)
            sums.ue = mul_add(u, e, sums.ue);
        if (v.mode == CROSS_ENTROPY)
            continue;
        const vec q = q_of(z, u, over_tau, v);
        sums.q += q;
        if (s.kept_q)
            store(s.kept_q, at, q, false);
        if (v.mode == LABEL_SMOOTHING || v.weighted)
            sums.qu = mul_add(u, q, sums.qu);
        if (v.mode != LABEL_SMOOTHING)
            sums.count += zero_below(z, -FLT_MAX, splat(1.0f));
        if (v.weighted) {
            const vec wq = load(s.weight, at, false) * q;
            sums.wq += wq;
            sums.wqu = mul_add(u, wq, sums.wqu);
        }
    }
    return sums;
}

INLINE row_sums sum_row(const row_view *row, variant v)
{
    const int64_t stretch = STRETCH * LANES;
    const vec none = splat(0.0f);
    const vec_sums start = {none, none, none, none, none, none, none};
    const span whole = row->parts[0], tail = row->parts[1];
    row_sums all = {0};
    int64_t at = 0;
    for (; whole.classes - at > stretch; at += stretch) {
        const vec_sums sums = sum_stretch(start, row, whole, at, at + stretch, v);
        add_totals(&all, &sums);
    }
    const vec_sums most = sum_stretch(start, row, whole, at, whole.classes, v);
    const vec_sums last = sum_stretch(most, row, tail, 0, tail.classes, v);
    add_totals(&all, &last);
    return all;
}

INLINE void write_gradient(const row_view *row, const row_result *result, variant v)
{
    const vec top = splat(row->top);
    const vec from_e = splat(result->from_e), from_q = splat(-result->from_q);
    const rate over_one = row->over_one, over_tau = row->over_tau;
    for (int part = 0; part < 2; part++) {
        const span s = row->parts[part];
        for (int64_t at = 0; at < s.classes; at += LANES) {
            const vec z = load(s.logits, at, v.bf16);
            const vec u = z - top;
            const vec e = s.kept_e ? load(s.kept_e, at, false) : exp_of(u, over_one);
            vec gradient = e * from_e;
            if (v.mode != CROSS_ENTROPY) {
                vec q = s.kept_q ? load(s.kept_q, at, false) : q_of(z, u, over_tau, v);
                if (v.weighted)
                    q *= load(s.weight, at, false);
                gradient = mul_add(q, from_q, gradient);
            }
            store(s.grad, at, gradient, v.bf16);
        }
    }
}

INLINE target_entry find_target(const batch *b, int64_t i, const row_view *row, variant v)
{
    const int64_t y = b->target[i];
    const span s = row->parts[0]; /* what is kept of both parts is in one piece */
    const float z_y = get(s.logits, y, v.bf16);
    const vec z = splat(z_y), u = z - splat(row->top);
    target_entry entry = {.u = z_y == -INFINITY ? -INFINITY : first(finite(u))};
    if (!b->grad)
        return entry;
    entry.e = s.kept_e ? s.kept_e[y] : first(exp_of(u, row->over_one));
    if (v.mode != CROSS_ENTROPY)
        entry.q = s.kept_q ? s.kept_q[y] : first(q_of(z, u, row->over_tau, v));
    return entry;
}

INLINE row_result run_variant(const batch *b, int64_t i, const row_view *row, variant v)
{
    const row_sums sums = sum_row(row, v);
    const target_entry y = find_target(b, i, row, v);
    const row_result result = finish_row(b, i, &y, &sums);
    if (b->statistics)
        b->statistics[i] = measure_row(row->top, &y, &sums);
    if (b->grad)
        write_gradient(row, &result, v);
    return result;
}

/* Run-time choices become constants here. The cross entropy sums no weights. */
INLINE row_result choose_weighted(const batch *b, int64_t i, const row_view *row, int mode,
                                  bool bf16)
{
    if (b->weight && mode != CROSS_ENTROPY)
        return run_variant(b, i, row, (variant){mode, true, bf16});
    return run_variant(b, i, row, (variant){mode, false, bf16});
}

INLINE row_result choose_mode(const batch *b, int64_t i, const row_view *row, bool bf16)
{
    switch (b->mode) {
    case CROSS_ENTROPY:
        return choose_weighted(b, i, row, CROSS_ENTROPY, bf16);
    case LABEL_SMOOTHING:
        return choose_weighted(b, i, row, LABEL_SMOOTHING, bf16);
    case LABO_FIXED:
        return choose_weighted(b, i, row, LABO_FIXED, bf16);
    default:
        return choose_weighted(b, i, row, LABO_ADAPTIVE, bf16);
    }
}

TARGET static void run_batch(const batch *b, int64_t first, int64_t last)
{
    const bool bf16 = b->bf16;
    const int64_t size = bf16 ? sizeof(uint16_t) : sizeof(float);
    const int64_t rest = b->classes % LANES, whole = b->classes - rest;
    float tail_weight[LANES] = {0};
    vec_buffer tail_logits, tail_grad;
    for (int k = 0; k < LANES; k++)
        put(&tail_logits, k, -INFINITY, bf16);
    if (b->weight)
        memcpy(tail_weight, b->weight + whole, (size_t)rest * sizeof(float));

    row_view row = {.over_one = rate_of(1.0), .over_tau = rate_of(b->tau),
                    .measured = b->statistics != NULL};
    row.parts[0] = (span){.weight = b->weight, .classes = whole};
    row.parts[1] = (span){.logits = &tail_logits, .weight = tail_weight, .grad = &tail_grad,
                          .next = &tail_logits, .classes = rest ? LANES : 0};
    char *kept = NULL;
    if (b->grad && b->classes <= KEPT)
        kept = malloc(2 * (size_t)(whole + LANES) * sizeof(float) + CACHE_LINE);
    if (kept) { /* else the exponentials are computed again */
        float *e = (float *)(kept + CACHE_LINE - (uintptr_t)kept % CACHE_LINE);
        for (int part = 0; part < 2; part++) {
            row.parts[part].kept_e = e + part * whole;
            row.parts[part].kept_q = e + whole + LANES + part * whole;
        }
    }

    fresh_memory fresh = fresh_part(b, first, last, size);
    for (int64_t i = first; i < last; i++) {
        const int64_t y = b->target[i];
        const char *logits = (const char *)b->logits + i * b->stride * size;
        char *grad = b->grad ? (char *)b->grad + i * b->grad_stride * size : NULL;
        if (grad)
            get_pages(&fresh, grad + b->classes * size);
        if (y == b->ignore_index || y < 0 || y >= b->classes) {
            b->values[i] = y == b->ignore_index ? 0.0f : NAN;
            if (b->statistics)
                b->statistics[i] = (row_statistics){0};
            if (grad)
                memset(grad, 0, (size_t)(b->classes * size));
            continue;
        }
        memcpy(&tail_logits, logits + whole * size, (size_t)(rest * size));
        row.parts[0].logits = logits;
        row.parts[0].next = logits + (i + 1 < last ? b->stride * size : 0);
        row.parts[0].grad = grad;
        row.top = row_max(&row, bf16);
        const row_result result = bf16 ? choose_mode(b, i, &row, true)
                                       : choose_mode(b, i, &row, false);
        b->values[i] = (float)result.value;
        if (grad) {
            memcpy(grad + whole * size, &tail_grad, (size_t)(rest * size));
            put(grad, y, result.at_target, bf16);
        }
    }
    free(kept);
}

/* ---- formulas ---- */

typedef struct {
    vec count, e, ue, r, ur, q, qu, qd, wq, wqu, rd;
} vec_formula_sums;

/* Of a class: r, the teacher's mass q in units of MASS, and d; 0 if the class is masked. */
typedef struct {
    vec r, q, d;
} taught_entry;

/* The largest logit of a teacher among the classes that the student has not masked. */
TARGET static float source_max(const batch *b, const row_view *row, bool bf16)
{
    vec top = splat(-INFINITY);
    for (int part = 0; part < PARTS; part++) {
        const span s = row->parts[part];
        for (int64_t at = 0; at < s.classes; at += LANES) {
            const vec v = load(s.source, at, b->source_bf16);
            top = maximum(top, lowest_below(load(s.logits, at, bf16), -FLT_MAX, v));
        }
    }
    return highest(top);
}

/* The first class with the largest logit. */
TARGET static int64_t find_top(const batch *b, const void *logits, float largest, bool bf16)
{
    const int64_t stretch = STRETCH * LANES;
    int64_t at = 0;
    for (; at + stretch <= b->classes; at += stretch) { /* stretches without it are left out */
        vec top = splat(-INFINITY);
        for (int64_t k = at; k < at + stretch; k += LANES)
            top = maximum(top, load(logits, k, bf16));
        if (highest(top) == largest)
            break;
    }
    while (at + 1 < b->classes && get(logits, at, bf16) != largest)
        at++;
    return at;
}

/* v = teacher's logit - source_top, finite; 0 for masked classes. */
INLINE vec source_at(const batch *b, const row_view *row, span s, int64_t at, vec z)
{
    const vec v = load(s.source, at, b->source_bf16) - splat(row->source_top);
    return zero_below(z, -FLT_MAX, finite(v));
}

/* The masses q in units of MASS; 0 for masked classes. */
INLINE vec masses_at(const batch *b, const row_view *row, span s, int64_t at, vec z, vec u, vec v)
{
    vec q = splat(1.0f);
    if (b->masses == TEMPERED)
        q = exp_of(u, row->over_tau);
    else if (b->masses == FROM_TEACHER)
        q = exp_of(v, row->over_source_tau);
    else if (b->masses == FROM_ROW || b->masses == FROM_TABLE)
        q = load(s.source, at, b->source_bf16);
    else if (b->masses == BEYOND_MARGIN)
        q = zero_below(splat(0.0f) - u, row->beyond, q);
    return zero_below(z, -FLT_MAX, q * splat(MASS));
}

/* u / 2: unlike u, it does not overflow. */
INLINE vec half_of(const row_view *row, vec z)
{
    return mul_add(z, splat(0.5f), splat(-0.5f * row->top));
}

/* v / source_tau - u / tau, finite. */
INLINE vec difference(const row_view *row, vec z, vec v)
{
    const vec tempered = half_of(row, z) * splat(row->per_half_tau);
    return finite(v * splat(row->per_source_tau)) - finite(tempered);
}

/*
 * log(1 + exp(-|x|)), where a = exp(x). With w = exp(-|x|) = min(a, 1 / a) it is 2 artanh(t),
 * t = w / (2 + w) <= 1/3. The rest of the series is below 2e-8.
 */
INLINE vec log_of_mixture(vec a)
{
    const vec zero = splat(0.0f), one = splat(1.0f);
    const vec t = (zero - maximum(zero - a, zero - one)) / (a + maximum(a, one) + one);
    const vec square = t * t;
    vec series = splat(2.0f / 13);
    series = mul_add(series, square, splat(2.0f / 11));
    series = mul_add(series, square, splat(2.0f / 9));
    series = mul_add(series, square, splat(2.0f / 7));
    series = mul_add(series, square, splat(2.0f / 5));
    series = mul_add(series, square, splat(2.0f / 3));
    series = mul_add(series, square, splat(2.0f));
    return series * t;
}

INLINE void sum_mixture(formula_sums *all, const row_view *row, bool bf16)
{
    const int64_t stretch = STRETCH * LANES;
    const vec top = splat(row->top), shift = splat(row->shift), zero = splat(0.0f);
    const vec exp_shift = splat(row->exp_shift);
    for (int part = 0; part < PARTS; part++) {
        const span s = row->parts[part];
        for (int64_t start = 0; start < s.classes; start += stretch) {
            const int64_t end = start + stretch < s.classes ? start + stretch : s.classes;
            vec mix = zero, emix = zero;
            for (int64_t at = start; at < end; at += LANES) {
                const vec u = finite(load(s.logits, at, bf16) - top);
                PREFETCH(element(s.next, at, bf16));
                const vec e = exp_of(u, row->over_one);
                const vec x = u + shift, log_part = log_of_mixture(e * exp_shift);
                mix += maximum(zero, x) + log_part;
                emix = mul_add(e, maximum(zero, zero - x) + log_part, emix);
            }
            all->mix += total(mix);
            all->emix += total(emix);
        }
    }
}

INLINE taught_entry taught_at(const batch *b, const row_view *row, span s, int64_t at, vec z)
{
    const vec half = half_of(row, z);
    taught_entry x = {.r = exp_of(half, row->over_half_tau)};
    const vec v = load(s.source, at, b->source_bf16) - splat(row->source_top);
    x.q = zero_below(z, -FLT_MAX, exp_of(finite(v), row->over_source_tau) * splat(MASS));
    const vec d = v * splat(row->per_source_tau) - half * splat(row->per_half_tau);
    x.d = zero_below(z, -FLT_MAX, d);
    return x;
}

/* r d in units of MASS; 0 where r is, also if d is infinite. */
INLINE vec r_times_d(taught_entry x)
{
    return zero_below(x.r, FLT_MIN, x.r * (x.d * splat(MASS)));
}

/* 1 / (1 + exp(x)), where w = exp(-|x|): w / (1 + w) for x > 0, else 1 / (1 + w). */
INLINE vec share_of(vec x, vec w)
{
    const vec zero = splat(0.0f), one = splat(1.0f);
    return maximum(w, zero_below(zero - x, 0.0f, one)) / (one + w);
}

INLINE void sum_teacher_mixture(formula_sums *all, const batch *b, const row_view *row, bool bf16)
{
    const int64_t stretch = STRETCH * LANES;
    const vec zero = splat(0.0f), shift = splat(row->shift);
    for (int part = 0; part < PARTS; part++) {
        const span s = row->parts[part];
        for (int64_t start = 0; start < s.classes; start += stretch) {
            const int64_t end = start + stretch < s.classes ? start + stretch : s.classes;
            vec rmix = zero, qmix = zero, qs = zero;
            for (int64_t at = start; at < end; at += LANES) {
                const vec z = load(s.logits, at, bf16);
                PREFETCH(element(s.next, at, bf16));
                PREFETCH(element(s.next_source, at, b->source_bf16));
                const taught_entry y = taught_at(b, row, s, at, z);
                const vec x = finite(y.d + shift);
                const vec w = exp_of(zero - maximum(x, zero - x), row->over_one);
                const vec log_part = log_of_mixture(w);
                rmix = mul_add(y.r * splat(MASS), maximum(zero, x) + log_part, rmix);
                qmix = mul_add(y.q, maximum(zero, zero - x) + log_part, qmix);
                qs = mul_add(y.q, share_of(x, w), qs);
            }
            all->rmix += total(rmix) / MASS;
            all->qmix += total(qmix) / MASS;
            all->qs += total(qs) / MASS;
        }
    }
}

/* The sums, continued over the classes from `at` to `end`. */
INLINE vec_formula_sums sum_formula_stretch(vec_formula_sums sums, const batch *b,
                                            const row_view *row, span s, int64_t at, int64_t end,
                                            bool bf16)
{
    const vec top = splat(row->top);
    const int asked = b->asked;
    taught_entry y = {top, top, top};
    for (; at < end; at += LANES) {
        const vec z = load(s.logits, at, bf16);
        PREFETCH(element(s.next, at, bf16));
        const vec u = finite(z - top);
        const vec e = exp_of(u, row->over_one);
        sums.e += e;
        if (asked & COUNT)
            sums.count += zero_below(z, -FLT_MAX, splat(1.0f));
        if (asked & UE)
            sums.ue = mul_add(u, e, sums.ue);
        if (asked & RD) {
            y = taught_at(b, row, s, at, z);
            sums.rd += r_times_d(y);
        }
        if (asked & R) {
            const vec r = asked & RD ? y.r : exp_of(half_of(row, z), row->over_half_tau);
            sums.r += r;
            if (asked & UR)
                sums.ur = mul_add(u * splat(MASS), r, sums.ur);
        }
        if (b->masses == NO_MASSES)
            continue;
        if (b->masses == FROM_TEACHER)
            PREFETCH(element(s.next_source, at, b->source_bf16));
        const vec v = b->masses == FROM_TEACHER ? source_at(b, row, s, at, z) : u;
        const vec q = asked & RD ? y.q : masses_at(b, row, s, at, z, u, v);
        sums.q += q;
        if (asked & QU)
            sums.qu = mul_add(u, q, sums.qu);
        if (asked & QD)
            sums.qd = mul_add(difference(row, z, v), q, sums.qd);
        if (asked & WQU) {
            const vec wq = load(s.weight, at, false) * q;
            sums.wq += wq;
            sums.wqu = mul_add(u, wq, sums.wqu);
        }
    }
    return sums;
}

INLINE void sum_formula(formula_sums *all, const batch *b, const row_view *row, bool bf16)
{
    const int64_t stretch = STRETCH * LANES;
    const vec none = splat(0.0f);
    const vec_formula_sums start = {none, none, none, none, none, none,
                                    none, none, none, none, none};
    for (int part = 0; part < PARTS; part++) {
        const span s = row->parts[part];
        for (int64_t at = 0; at < s.classes; at += stretch) {
            const int64_t end = at + stretch < s.classes ? at + stretch : s.classes;
            const vec_formula_sums sums = sum_formula_stretch(start, b, row, s, at, end, bf16);
            all->count += total(sums.count);
            all->e += total(sums.e);
            all->ue += total(sums.ue);
            all->r += total(sums.r);
            all->ur += total(sums.ur) / MASS;
            all->q += total(sums.q) / MASS;
            all->qu += total(sums.qu) / MASS;
            all->qd += total(sums.qd) / MASS;
            all->wq += total(sums.wq) / MASS;
            all->wqu += total(sums.wqu) / MASS;
            all->rd += total(sums.rd) / MASS;
        }
    }
}

INLINE void write_formula_gradient(const batch *b, const row_view *row, const formula_gradient *c,
                                   bool bf16)
{
    const vec top = splat(row->top);
    const vec from_e = splat((float)c->from_e), from_ue = splat((float)c->from_ue);
    const vec from_r = splat((float)c->from_r), from_q = splat((float)(c->from_q / MASS));
    const vec from_wq = splat((float)(c->from_wq / MASS));
    const vec from_one = splat((float)c->from_one), from_u = splat((float)c->from_u);
    const vec from_emix = splat((float)c->from_emix), none = splat(0.0f);
    const vec from_rd = splat((float)(c->from_rd / MASS)), from_rmix = splat((float)c->from_rmix);
    const vec from_qs = splat((float)(c->from_qs / MASS));
    for (int part = 0; part < PARTS; part++) {
        const span s = row->parts[part];
        for (int64_t at = 0; at < s.classes; at += LANES) {
            const vec z = load(s.logits, at, bf16);
            PREFETCH(element(s.next, at, bf16));
            const vec u = finite(z - top);
            const vec e = exp_of(u, row->over_one);
            vec gradient = b->asked & UE ? e * mul_add(u, from_ue, from_e) : e * from_e;
            if (b->asked & R && !(b->asked & (RD | QMIX)))
                gradient = mul_add(exp_of(half_of(row, z), row->over_half_tau), from_r, gradient);
            if (b->asked & EMIX) {
                const vec x = u + splat(row->shift), a = e * splat(row->exp_shift);
                const vec rest = maximum(none, none - x) + log_of_mixture(a);
                gradient = mul_add(e * from_emix, rest, gradient);
            }
            if (b->asked & (RD | QMIX)) {
                const taught_entry y = taught_at(b, row, s, at, z);
                gradient = mul_add(y.r, from_r, gradient);
                if (b->asked & RD)
                    gradient = mul_add(r_times_d(y), from_rd, gradient);
                if (b->asked & QMIX) {
                    const vec x = finite(y.d + splat(row->shift));
                    const vec w = exp_of(none - maximum(x, none - x), row->over_one);
                    const vec above = maximum(none, x) + log_of_mixture(w);
                    gradient = mul_add(y.r * from_rmix, above, gradient);
                    gradient = mul_add(y.q * from_qs, share_of(x, w), gradient);
                }
            }
            if (b->asked & UR)
                gradient += zero_below(z, -FLT_MAX, mul_add(u, from_u, from_one));
            if (b->masses != NO_MASSES && b->asked & (QU | QD | WQU)) {
                const vec v = b->masses == FROM_TEACHER ? source_at(b, row, s, at, z) : u;
                const vec q = masses_at(b, row, s, at, z, u, v);
                vec of_q = from_q;
                if (b->asked & WQU)
                    of_q = mul_add(load(s.weight, at, false), from_wq, of_q);
                gradient = mul_add(q, of_q, gradient);
            }
            store(s.grad, at, gradient, bf16);
        }
    }
}

/* Cut the first part of a row around the vector with the target, of which `copy` masks it. */
INLINE void cut_at_target(row_view *row, int64_t y, vec_buffer *copy, int64_t source_size,
                          bool bf16)
{
    const int64_t size = bf16 ? sizeof(uint16_t) : sizeof(float), at = y - y % LANES;
    span *before = &row->parts[0], *around = &row->parts[2], *rest = &row->parts[3];
    *around = after(*before, at, size, source_size);
    *rest = after(*around, LANES, size, source_size);
    memcpy(copy, around->logits, (size_t)(LANES * size));
    put(copy, y - at, -INFINITY, bf16);
    around->logits = copy;
    around->classes = LANES;
    before->classes = at;
}

TARGET static void run_formula(const batch *b, int64_t first, int64_t last)
{
    const bool bf16 = b->bf16;
    const int64_t size = bf16 ? sizeof(uint16_t) : sizeof(float);
    const int64_t source_size = b->source_bf16 ? sizeof(uint16_t) : sizeof(float);
    const int64_t rest = b->classes % LANES, whole = b->classes - rest;
    float tail_weight[LANES] = {0};
    vec_buffer tail_logits, tail_grad, with_target, tail_source = {0};
    for (int k = 0; k < LANES; k++)
        put(&tail_logits, k, -INFINITY, bf16);
    if (b->weight)
        memcpy(tail_weight, b->weight + whole, (size_t)rest * sizeof(float));

    row_view row = {.over_one = rate_of(1.0), .beyond = nextafterf((float)b->margin, INFINITY)};
    set_tau(&row, b->tau, b->tau);
    row.parts[0].weight = b->weight;
    row.parts[1] = (span){.logits = &tail_logits, .source = &tail_source, .weight = tail_weight,
                          .grad = &tail_grad, .next = &tail_logits, .next_source = &tail_source,
                          .classes = rest ? LANES : 0};

    fresh_memory fresh = fresh_part(b, first, last, size);
    for (int64_t i = first; i < last; i++) {
        const int64_t y = b->target[i];
        const char *logits = (const char *)b->logits + i * b->stride * size;
        char *grad = b->grad ? (char *)b->grad + i * b->grad_stride * size : NULL;
        if (grad)
            get_pages(&fresh, grad + b->classes * size);
        const bool more = i + 1 < last;
        const bool here = y >= 0 && y < b->classes; /* else ignored, or among other columns */
        if (y == b->ignore_index || (b->masses == FROM_TABLE && !here)) {
            if (b->sums)
                b->sums[i] = (formula_sums){0};
            if (grad)
                memset(grad, 0, (size_t)(b->classes * size));
            continue;
        }
        memcpy(&tail_logits, logits + whole * size, (size_t)(rest * size));
        row.parts[0].logits = logits;
        row.parts[0].next = logits + (more ? b->stride * size : 0);
        row.parts[0].grad = grad;
        row.parts[0].classes = whole;
        if (b->source) {
            const int64_t at = b->masses == FROM_TABLE ? y : i;
            const char *source = (const char *)b->source + at * b->source_stride * source_size;
            memcpy(&tail_source, source + whole * source_size, (size_t)(rest * source_size));
            row.parts[0].source = source;
            row.parts[0].next_source = source + (more ? b->source_stride * source_size : 0);
        }
        row.parts[2].classes = row.parts[3].classes = 0;
        if (b->row_tau)
            set_tau(&row, b->row_tau[i].tau, b->row_tau[i].source_tau);
        if (b->row_mixture)
            set_mixture(&row, &b->row_mixture[i]);
        if (b->asked & OTHERS && here) {
            if (y >= whole)
                put(&tail_logits, y - whole, -INFINITY, bf16);
            else
                cut_at_target(&row, y, &with_target, source_size, bf16);
        }
        if (b->sums && b->row_mixture) {
            const double top = b->row_mixture[i].top;
            row.top = top == -INFINITY ? 0.0f : (float)top;
            row.source_top = (float)b->row_mixture[i].source_top;
            b->sums[i] = (formula_sums){0};
            if (b->asked & QMIX && bf16)
                sum_teacher_mixture(&b->sums[i], b, &row, true);
            else if (b->asked & QMIX)
                sum_teacher_mixture(&b->sums[i], b, &row, false);
            else if (bf16)
                sum_mixture(&b->sums[i], &row, true);
            else
                sum_mixture(&b->sums[i], &row, false);
            continue;
        }
        if (b->sums) {
            formula_sums *sums = &b->sums[i];
            row.top = row_max(&row, bf16);
            row.source_top = b->masses == FROM_TEACHER ? source_max(b, &row, bf16) : 0.0f;
            *sums = (formula_sums){.top = row.top, .source_top = row.source_top};
            if (b->asked & TOP)
                sums->top_at = (double)find_top(b, logits, row.top, bf16);
            /* All that is here is masked: any finite number serves, and the sums are 0. */
            row.top = row.top == -INFINITY ? 0.0f : row.top;
            row.source_top = row.source_top == -INFINITY ? 0.0f : row.source_top;
            const double u_y = here ? (double)get(logits, y, bf16) - row.top : 0.0;
            sums->u_y = b->row_tau || isinf(u_y) ? u_y : within_float(u_y);
            if (bf16)
                sum_formula(sums, b, &row, true);
            else
                sum_formula(sums, b, &row, false);
            continue;
        }
        const formula_gradient *c = &b->coefficients[i];
        const int64_t top_at = b->asked & TOP ? (int64_t)c->top_at : -1;
        row.top = (float)c->top;
        row.source_top = (float)c->source_top;
        if (bf16)
            write_formula_gradient(b, &row, c, true);
        else
            write_formula_gradient(b, &row, c, false);
        memcpy(grad + whole * size, &tail_grad, (size_t)(rest * size));
        if (top_at >= 0 && top_at < b->classes)
            put(grad, top_at, (float)c->at_top, bf16);
        if (here)
            put(grad, y, (float)c->at_target, bf16);
    }
}

/* ---- moments ---- */

/* The mean of x = z - center, and the sum of x^2. */
INLINE row_moments moments_about(float center, const batch *b, const void *logits, bool bf16)
{
    const int64_t stretch = STRETCH * LANES, whole = b->classes - b->classes % LANES;
    double sum = 0.0, squares = 0.0;
    for (int64_t start = 0; start < whole; start += stretch) {
        const int64_t end = start + stretch < whole ? start + stretch : whole;
        vec part = splat(0.0f), part_squares = splat(0.0f);
        for (int64_t at = start; at < end; at += LANES) {
            const vec x = load(logits, at, bf16) - splat(center);
            part += x;
            part_squares = mul_add(x, x, part_squares);
        }
        sum += total(part);
        squares += total(part_squares);
    }
    for (int64_t at = whole; at < b->classes; at++) {
        const double x = (double)get(logits, at, bf16) - center;
        sum += x;
        squares += x * x;
    }
    return (row_moments){sum / (double)b->classes, squares};
}

TARGET static void run_moments(const batch *b, int64_t first, int64_t last)
{
    const bool bf16 = b->bf16;
    for (int64_t i = first; i < last; i++) {
        const void *row = element(b->logits, i * b->stride, bf16);
        const row_moments raw = moments_about(0.0f, b, row, bf16);
        if (!b->centered) {
            b->moments[i] = (row_moments){0.0, raw.squares};
            continue;
        }
        /* About a number near the mean, which need not be the mean itself. */
        const float near = (float)raw.center;
        const row_moments m = moments_about(near, b, row, bf16);
        const double squares = m.squares - (double)b->classes * m.center * m.center;
        b->moments[i] = (row_moments){near + m.center, squares < 0.0 ? 0.0 : squares};
    }
}

#endif
