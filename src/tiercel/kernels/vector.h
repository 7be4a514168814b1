/* What the C files of the kernels share: where tokens stand, vectors of the machine's width, and sums and
   functions in one order of operations. Each of them rounds alike in every file: -ffp-contract=off, fused where FMA or FMAF stands. */
#ifndef TIERCEL_VECTOR_H
#define TIERCEL_VECTOR_H
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AVX512F__)
#define LANES 16
#define FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__AVX__) && defined(__FMA__)
#define LANES 8
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define LANES 4
#define FMA(a, b, c) vfmaq_f32(c, a, b)
#else
#define LANES 4
#define FMA(a, b, c) ((a) * (b) + (c)) /* two roundings, everywhere on this machine */
#endif
#ifdef __FP_FAST_FMAF
#define FMAF __builtin_fmaf
#else
#define FMAF(a, b, c) ((a) * (b) + (c)) /* the C library computes it exactly in software, fifty times slower */
#endif
#define PANEL 16
#define PV (PANEL / LANES)
#define UNROLL _Pragma("GCC unroll 16") /* without it gcc 12 keeps accumulators in memory: half the speed */
#define INLINE static inline __attribute__((always_inline))
#define PARALLEL_WORK 2000000 /* multiply-adds that are worth a second thread: 0.1 ms; waking a thread takes 10 us or more */

typedef int64_t i64;
typedef float vec __attribute__((vector_size(4 * LANES)));
#define SPLAT(a) ((a) - (vec){0}) /* a in every lane; a - 0 is a, also for -0 */

/* Where each token of a call stands, and the pages of the texts, as in `entries.py`. */
typedef struct {
    const int32_t *position, *start, *first, *ring, *pages;
    i64 tokens, pages_each;
} flat;

INLINE const int32_t *pages_of(const flat *f, i64 token) { return f->pages + f->ring[token] * f->pages_each; }

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

/* exp to about 1 ulp, without a branch, so that the compiler can vectorize loops over it. */
INLINE float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504088896341f);
    float r = FMAF(n, -0.693359375f, x);
    r = FMAF(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = FMAF(p, r, 1.3981999507e-3f);
    p = FMAF(p, r, 8.3334519073e-3f);
    p = FMAF(p, r, 4.1665795894e-2f);
    p = FMAF(p, r, 1.6666665459e-1f);
    p = FMAF(p, r, 5.0000001201e-1f);
    p = FMAF(p * r, r, r) + 1.0f;
    union { int32_t i; float f; } two = {.i = ((int32_t)n + 127) << 23};
    return p * two.f;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

/* log(1 + exp(x)) to about 2 ulp. The C library's functions have other bits on CPUs without FMA. */
INLINE float softplus(float x) {
    float e = exp_of(x < 0.0f ? x : -x); /* log(1 + e) from here on, and x more if it is above 0 */
    float z = e > 0.41421356f ? 0.5f * e - 0.5f : e, whole = e > 0.41421356f ? 0.69314718f : 0.0f;
    float p = 7.0376836292e-2f;
    p = FMAF(p, z, -1.1514610310e-1f);
    p = FMAF(p, z, 1.1676998740e-1f);
    p = FMAF(p, z, -1.2420140846e-1f);
    p = FMAF(p, z, 1.4249322787e-1f);
    p = FMAF(p, z, -1.6668057665e-1f);
    p = FMAF(p, z, 2.0000714765e-1f);
    p = FMAF(p, z, -2.4999993993e-1f);
    p = FMAF(p, z, 3.3333331174e-1f);
    p = FMAF(p * z, z, -0.5f * z);
    return (x > 0.0f ? x : 0.0f) + (FMAF(p, z, z) + whole);
}

/* A sum in 16 interleaved parts. */
INLINE float sum_of(const float part[PANEL]) {
    float total = 0;
    for (int i = 0; i < PANEL; i++) total += part[i];
    return total;
}

INLINE float dot(const float *a, const float *b, i64 n) {
    float part[PANEL] = {0};
    i64 i = 0;
    for (; i + PANEL <= n; i += PANEL)
        for (int l = 0; l < PANEL; l++) part[l] = FMAF(a[i + l], b[i + l], part[l]);
    for (int l = 0; i < n; i++, l++) part[l] = FMAF(a[i], b[i], part[l]);
    return sum_of(part);
}

INLINE float inverse_rms(const float *x, i64 n, float eps) { return 1.0f / sqrtf(dot(x, x, n) / n + eps); }

#endif
