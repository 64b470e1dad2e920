// The elementwise operations of a transformer layer, forward, in bf16 and fp32.
//
// All arithmetic is fp32 and rounded to the tensor's type where Hugging Face's modules round.

#pragma once

#include "vectors.h"

#include <cmath>

// ---- RMS norm ------------------------------------------------------------------------------------------------------

INLINE float inverse_rms(V a, V b, i64 n, float eps) { return 1.0f / std::sqrt(sum(a + b) / (float)n + eps); }

template <class T>
static float norm_row(const T* x, const T* residual, const T* weight, T* h, T* out, i64 n, float eps, float offset) {
    V sum_a{}, sum_b{};
    each_step(n, [&](i64 i, i64 count) __attribute__((always_inline)) {
        Pair v = load(x + i, count);
        if (residual) {
            Pair r = load(residual + i, count);
            v = {as<T>(v.a + r.a), as<T>(v.b + r.b)};
            store(h + i, count, v);
        }
        sum_a = fma(v.a, v.a, sum_a);
        sum_b = fma(v.b, v.b, sum_b);
    });
    const float scale = inverse_rms(sum_a, sum_b, n, eps);
    const T* source = residual ? h : x;
    each_step(n, [&](i64 i, i64 count) __attribute__((always_inline)) {
        Pair v = load(source + i, count), w = load(weight + i, count);
        if (offset != 0)
            v = {v.a * scale * (w.a + offset), v.b * scale * (w.b + offset)};
        else
            v = {as<T>(v.a * scale) * w.a, as<T>(v.b * scale) * w.b};
        store(out + i, count, v);
    });
    return scale;
}

// h is written where there is a residual, and rstd, a factor a row, where it is not null.
template <class T>
static void rms_norm(const T* x, i64 x_row, const T* residual, i64 residual_row, const T* weight, T* h, T* out,
                     float* rstd, i64 rows, i64 n, float eps, float offset, i64 threads) {
    for_all(rows, rows_of(16384, n), threads, [&](i64 row) {
        const float scale = norm_row(x + row * x_row, residual ? residual + row * residual_row : nullptr, weight,
                                     h + row * n, out + row * n, n, eps, offset);
        if (rstd) rstd[row] = scale;
    });
}

// ---- silu(gate) * up -----------------------------------------------------------------------------------------------

template <class T> static void silu_mul(const T* gate_up, i64 row_stride, T* out, i64 rows, i64 n, i64 threads) {
    for_all(rows, rows_of(8192, n), threads, [&](i64 row) {
        const T *gate = gate_up + row * row_stride, *up = gate + n;
        T* target = out + row * n;
        each_step(n, [&](i64 i, i64 count) __attribute__((always_inline)) {
            Pair g = load(gate + i, count), u = load(up + i, count);
            V a = g.a / (1.0f + exponential(-g.a)), b = g.b / (1.0f + exponential(-g.b));
            store(target + i, count, {as<T>(a) * u.a, as<T>(b) * u.b});
        });
    });
}

// ---- Rotary embedding ----------------------------------------------------------------------------------------------

// `out` may be `head`; the halves of cos and sin are alike. Without a weight nothing is normed.
template <class T>
static void rotate_head(const T* head, T* out, const T* cos, const T* sin, i64 dim, const T* weight, float eps) {
    const i64 half = dim / 2;
    float scale = 1;
    if (weight) {
        V sum_a{}, sum_b{};
        each_step(dim, [&](i64 i, i64 count) __attribute__((always_inline)) {
            Pair v = load(head + i, count);
            sum_a = fma(v.a, v.a, sum_a);
            sum_b = fma(v.b, v.b, sum_b);
        });
        scale = inverse_rms(sum_a, sum_b, dim, eps);
    }
    auto normed = [&](i64 i, i64 count) __attribute__((always_inline)) {
        Pair v = load(head + i, count);
        if (!weight) return v;
        Pair w = load(weight + i, count);
        return Pair{as<T>(as<T>(v.a * scale) * w.a), as<T>(as<T>(v.b * scale) * w.b)};
    };
    // Every product is rounded before the sum.
    auto turn = [](V x, V cos, V y, V sin) __attribute__((always_inline)) { return as<T>(x * cos) + as<T>(y * sin); };
    each_step(half, [&](i64 i, i64 count) __attribute__((always_inline)) {
        Pair x = normed(i, count), y = normed(half + i, count), c = load(cos + i, count), s = load(sin + i, count);
        store(out + i, count, {turn(x.a, c.a, -y.a, s.a), turn(x.b, c.b, -y.b, s.b)});
        store(out + half + i, count, {turn(y.a, c.a, x.a, s.a), turn(y.b, c.b, x.b, s.b)});
    });
}
