// Vectors, elements of bf16 and fp32, and threads: what the kernels of a CPU are written in.
//
// NaN and infinity pass through as in torch: the compiler must not be given -ffast-math, nor may it contract a product and
// a sum (-ffp-contract=off); `fma` says where it shall.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <limits>

using i64 = int64_t;
struct bf16 {
    uint16_t bits;
};

// ---- Vectors -------------------------------------------------------------------------------------------------------

#ifdef __AVX512F__
constexpr int W = 16;
#else
constexpr int W = 8;
#endif
typedef float V __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
#define INLINE static inline __attribute__((always_inline))

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr int STEP = 2 * W;

// STEP neighbouring elements. Of bf16 the even ones are in `a` and the odd ones in `b`, as they lie in 32-bit words, so
// that nothing is shuffled on the way in or out; of fp32 the first and the second half. Only sums and elementwise
// operations follow, for which the order does not matter.
struct Pair {
    V a, b;
};

INLINE V fma(V x, V y, V z) {
#ifdef __AVX512F__
    return (V)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#else
    return (V)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#endif
}

INLINE V all(float x) { return x - V{}; }
INLINE V larger(V x, V y) { return x > y ? x : y; }

INLINE float sum(V v) {
    float lanes[W];
    memcpy(lanes, &v, sizeof v);
#pragma GCC unroll 8
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

INLINE float largest(V v) {
    float lanes[W];
    memcpy(lanes, &v, sizeof v);
#pragma GCC unroll 8
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = std::max(lanes[i], lanes[i + half]);
    return lanes[0];
}

// e^x to 2 units in the last place; 0 where it would be subnormal.
INLINE V exponential(V x) {
    const V magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    V shifted = fma(x, all(1.44269504f), magic), n = shifted - magic;
    V r = fma(n, all(-0.693145752f), x);
    r = fma(n, all(-1.42860677e-6f), r);
    V p = all(1.0f / 5040);
    p = fma(p, r, all(1.0f / 720));
    p = fma(p, r, all(1.0f / 120));
    p = fma(p, r, all(1.0f / 24));
    p = fma(p, r, all(1.0f / 6));
    p = fma(p, r, all(0.5f));
    p = fma(p, r, all(1.0f));
    p = fma(p, r, all(1.0f));
    V result = (V)((I)p + ((I)shifted << 23));
    result = x < -87.3f ? V{} : result;
    result = x > 88.7f ? all(INF) : result;
    return x == x ? result : x;
}

// ---- Elements ------------------------------------------------------------------------------------------------------

// Round to nearest, ties to even, in the upper half of each word; a NaN stays one.
INLINE U rounded_bits(V v) {
    U x = (U)v, r = x + 0x7fff + ((x >> 16) & 1);
    return v == v ? r : x | 0x400000;
}

INLINE Pair load(const float* p) {
    Pair v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE Pair load(const bf16* p) {
    U x;
    memcpy(&x, p, sizeof x);
    return {(V)(x << 16), (V)(x & 0xffff0000u)};
}

INLINE void store(float* p, Pair v) { memcpy(p, &v, sizeof v); }

INLINE void store(bf16* p, Pair v) {
    U x = (rounded_bits(v.a) >> 16) | (rounded_bits(v.b) & 0xffff0000u);
    memcpy(p, &x, sizeof x);
}

// The first `count` of STEP elements; the others are zeros.
template <class T> INLINE Pair load(const T* p, i64 count) {
    if (count >= STEP) return load(p);
    T part[STEP] = {};
    memcpy(part, p, count * sizeof(T));
    return load(part);
}

template <class T> INLINE void store(T* p, i64 count, Pair v) {
    if (count >= STEP) return store(p, v);
    T part[STEP];
    store(part, v);
    memcpy(p, part, count * sizeof(T));
}

// v as T holds it.
template <class T> INLINE V as(V v) {
    if constexpr (sizeof(T) == 4) return v;
    return (V)(rounded_bits(v) & 0xffff0000u);
}

// f(start, count) for every STEP elements and the rest.
template <class F> INLINE void each_step(i64 n, F f) {
    i64 i = 0;
    for (; i + STEP <= n; i += STEP) f(i, (i64)STEP);
    if (i < n) f(i, n - i);
}

// ---- Threads -------------------------------------------------------------------------------------------------------

// OpenMP's entry of the library that torch itself uses: two pools of threads would fight for the cores.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
static Parallel gomp_parallel = nullptr;

extern "C" void set_parallel(void* function) { gomp_parallel = (Parallel)function; }

// f(i) for all i < n, `grain` of them at a time by whichever thread is free. Few of them are not worth waking threads;
// there are never fewer than all threads, since libgomp ends and later starts again those that a region leaves out.
template <class F> static void for_all(i64 n, i64 grain, i64 threads, F f) {
    if (threads < 2 || n <= grain || !gomp_parallel) {
        for (i64 i = 0; i < n; i++) f(i);
        return;
    }
    struct Work {
        F& f;
        i64 n, grain;
        std::atomic<i64> next;
    } work{f, n, grain, {0}};
    auto run = [](void* data) {
        Work& work = *(Work*)data;
        for (;;) {
            i64 start = work.next.fetch_add(work.grain, std::memory_order_relaxed);
            if (start >= work.n) return;
            for (i64 i = start, end = std::min(start + work.grain, work.n); i < end; i++) work.f(i);
        }
    };
    gomp_parallel(run, &work, (unsigned)threads, 0);
}

// So many rows that a thread has about 10 us to do.
static i64 rows_of(i64 elements, i64 row) { return std::max<i64>(1, elements / std::max<i64>(1, row)); }
