// The elementwise operations of a transformer layer and their gradients, in bf16 and fp32.
//
// Pointers and sizes are checked by the caller (layers.py). Sizes and strides count elements; the last axis of every tensor
// is contiguous. All arithmetic is fp32. A row is computed by one thread from beginning to end, and sums over rows are made
// of the sums of blocks of rows, so results do not depend on the number of threads.

#include "layers.h"

#include <vector>

constexpr i64 BLOCK = 64;      // Rows whose sums are one row of `partial`; layers.py knows it.
constexpr i64 MAX_DIM = 512;   // Of a head; layers.py knows it.

// Sums over the rows of a block, elements in the order in which `load` gives them.
struct Sums {
    std::vector<float> values;

    explicit Sums(i64 n) : values((n + STEP - 1) / STEP * STEP) {}
    __attribute__((always_inline)) void add(i64 i, Pair v) {
        Pair sum = load(&values[i]);
        store(&values[i], {sum.a + v.a, sum.b + v.b});
    }
    // In the order of the elements of T.
    template <class T> void write(float* out, i64 n) const {
        for (i64 i = 0; i < n; i++) {
            const i64 in_step = i % STEP;
            const i64 lane = sizeof(T) == 4 ? in_step : in_step % 2 * W + in_step / 2;
            out[i] = values[i - in_step + lane];
        }
    }
};

// f(row, sums) for all rows, and the sums of each block into its row of `partial` [blocks, n].
template <class T, class F> static void for_all_summing(i64 rows, i64 n, float* partial, i64 threads, F f) {
    for_all((rows + BLOCK - 1) / BLOCK, 1, threads, [&](i64 block) {
        Sums sums(n);
        for (i64 row = block * BLOCK, end = std::min(rows, row + BLOCK); row < end; row++) f(row, sums);
        sums.template write<T>(partial + block * n, n);
    });
}

// ---- RMS norm ------------------------------------------------------------------------------------------------------

// grad_h = rstd (c - normed mean(c normed)) + grad_summed with c = grad weight; `again` is null or gets the forward's output.
template <class T>
static void rms_norm_backward(const T* grad, i64 grad_row, const T* h, i64 h_row, const float* rstd, const T* weight,
                              const T* grad_summed, i64 grad_summed_row, T* grad_h, T* again, float* partial, i64 rows,
                              i64 n, i64 threads) {
    for_all_summing<T>(rows, n, partial, threads, [&](i64 row, Sums& sums) {
        const T *g_at = grad + row * grad_row, *h_at = h + row * h_row;
        const float scale = rstd[row];
        V shared_a{}, shared_b{};
        each_step(n, [&](i64 i, i64 count) __attribute__((always_inline)) {
            const Pair g = load(g_at + i, count), x = load(h_at + i, count), w = load(weight + i, count);
            shared_a = fma(g.a * w.a, x.a, shared_a);
            shared_b = fma(g.b * w.b, x.b, shared_b);
        });
        const float shared = sum(shared_a + shared_b) * scale / (float)n;
        each_step(n, [&](i64 i, i64 count) __attribute__((always_inline)) {
            const Pair g = load(g_at + i, count), x = load(h_at + i, count), w = load(weight + i, count);
            const V normed_a = x.a * scale, normed_b = x.b * scale;
            const V rounded_a = as<T>(normed_a), rounded_b = as<T>(normed_b);
            sums.add(i, {g.a * rounded_a, g.b * rounded_b});
            Pair d = {scale * (g.a * w.a - normed_a * shared), scale * (g.b * w.b - normed_b * shared)};
            if (grad_summed) {
                const Pair other = load(grad_summed + row * grad_summed_row + i, count);
                d = {d.a + other.a, d.b + other.b};
            }
            store(grad_h + row * n + i, count, d);
            if (again) store(again + row * n + i, count, {rounded_a * w.a, rounded_b * w.b});
        });
    });
}

// ---- silu(gate) * up -----------------------------------------------------------------------------------------------

// `grad` becomes the forward's output.
template <class T>
static void silu_mul_backward(T* grad, const T* gate_up, i64 gate_up_row, T* out, i64 rows, i64 n, i64 threads) {
    struct Gradient {
        V gate, up, product;
    };
    const auto of = [](V gate, V up, V g) __attribute__((always_inline)) {
        const V shut = 1.0f + exponential(-gate), open = 1.0f / shut, activated = as<T>(gate / shut);
        return Gradient{g * up * open * (1.0f + gate * (1.0f - open)), g * activated, activated * up};
    };
    for_all(rows, rows_of(4096, n), threads, [&](i64 row) {
        const T *gate = gate_up + row * gate_up_row, *up = gate + n;
        T *grad_gate = out + row * 2 * n, *grad_up = grad_gate + n, *product = grad + row * n;
        each_step(n, [&](i64 i, i64 count) __attribute__((always_inline)) {
            const Pair x = load(gate + i, count), u = load(up + i, count), g = load(product + i, count);
            const Gradient a = of(x.a, u.a, g.a), b = of(x.b, u.b, g.b);
            store(grad_gate + i, count, {a.gate, b.gate});
            store(grad_up + i, count, {a.up, b.up});
            store(product + i, count, {a.product, b.product});
        });
    });
}

// ---- Rotary embedding ----------------------------------------------------------------------------------------------

// Queries and keys of qkv [tokens, heads + 2 kv_heads, dim] into `out`, whose tokens lie out_token apart and which may be qkv.
template <class T>
static void rotate(const T* qkv, T* out, i64 out_token, const T* cos, const T* sin, const T* q_norm, const T* k_norm,
                   float eps, i64 tokens, i64 heads, i64 kv_heads, i64 dim, i64 threads) {
    const i64 width = (heads + 2 * kv_heads) * dim;
    for_all(tokens, rows_of(32768, width), threads, [&](i64 token) {
        for (i64 head = 0; head < heads + kv_heads; head++)
            rotate_head(qkv + token * width + head * dim, out + token * out_token + head * dim, cos + token * dim,
                        sin + token * dim, dim, head < heads ? q_norm : k_norm, eps);
    });
}

// One of the gradients: [tokens, heads, dim].
template <class T> struct Heads {
    const T* data;
    i64 token, head;
};

// The rotation back, into fp32.
template <class T> INLINE void turn_back(const T* grad, const T* cos, const T* sin, i64 half, Pair* first, Pair* second) {
    each_step(half, [&](i64 i, i64 count) __attribute__((always_inline)) {
        const Pair x = load(grad + i, count), y = load(grad + half + i, count), c = load(cos + i, count), s = load(sin + i, count);
        first[i / STEP] = {x.a * c.a + y.a * s.a, x.b * c.b + y.b * s.b};
        second[i / STEP] = {y.a * c.a - x.a * s.a, y.b * c.b - x.b * s.b};
    });
}

// Back through the norm of one head x, whose weights' gradients are added to `sums` from `at` on; each half has its own steps.
template <class T>
INLINE void norm_back(const T* x, const T* weight, i64 dim, float eps, Pair* first, Pair* second, Sums& sums, i64 at) {
    const i64 half = dim / 2, padded = (half + STEP - 1) / STEP * STEP;
    V squares_a{}, squares_b{};
    for (i64 start : {(i64)0, half})
        each_step(half, [&](i64 i, i64 count) __attribute__((always_inline)) {
            const Pair v = load(x + start + i, count);
            squares_a = fma(v.a, v.a, squares_a);
            squares_b = fma(v.b, v.b, squares_b);
        });
    const float scale = inverse_rms(squares_a, squares_b, dim, eps);
    V shared_a{}, shared_b{};
    for (i64 start : {(i64)0, half}) {
        Pair* grad = start ? second : first;
        each_step(half, [&](i64 i, i64 count) __attribute__((always_inline)) {
            const Pair v = load(x + start + i, count), w = load(weight + start + i, count);
            Pair& g = grad[i / STEP];
            sums.add(at + (start ? padded : 0) + i, {g.a * as<T>(v.a * scale), g.b * as<T>(v.b * scale)});
            g = {g.a * w.a, g.b * w.b};
            shared_a = fma(g.a, v.a * scale, shared_a);
            shared_b = fma(g.b, v.b * scale, shared_b);
        });
    }
    const float shared = sum(shared_a + shared_b) / (float)dim;
    for (i64 start : {(i64)0, half}) {
        Pair* grad = start ? second : first;
        each_step(half, [&](i64 i, i64 count) __attribute__((always_inline)) {
            const Pair v = load(x + start + i, count);
            Pair& g = grad[i / STEP];
            g = {scale * (g.a - v.a * scale * shared), scale * (g.b - v.b * scale * shared)};
        });
    }
}

// Into out [tokens, heads + 2 kv_heads, dim]. With norms (x is what was rotated) also the gradients of their weights, first and
// second half of the query's and of the key's, each filled up to whole steps: partial [blocks, 4 * padded half].
template <class T>
static void rotate_backward(Heads<T> query, Heads<T> key, Heads<T> value, const T* cos, const T* sin, const T* x,
                            const T* q_norm, const T* k_norm, float eps, T* out, float* partial, i64 tokens, i64 heads,
                            i64 kv_heads, i64 dim, i64 threads) {
    const i64 all_heads = heads + 2 * kv_heads, half = dim / 2, padded = (half + STEP - 1) / STEP * STEP;
    const auto one = [&](i64 token, Sums* sums) {
        T* target = out + token * all_heads * dim;
        for (i64 head = 0; head < heads + kv_heads; head++) {
            const bool is_query = head < heads;
            const Heads<T>& from = is_query ? query : key;
            const T* grad = from.data + token * from.token + (is_query ? head : head - heads) * from.head;
            Pair first[MAX_DIM / 2 / STEP + 1], second[MAX_DIM / 2 / STEP + 1];
            turn_back(grad, cos + token * dim, sin + token * dim, half, first, second);
            if (sums)
                norm_back(x + (token * all_heads + head) * dim, is_query ? q_norm : k_norm, dim, eps, first, second,
                          *sums, is_query ? 0 : 2 * padded);
            each_step(half, [&](i64 i, i64 count) __attribute__((always_inline)) {
                store(target + head * dim + i, count, first[i / STEP]);
                store(target + head * dim + half + i, count, second[i / STEP]);
            });
        }
        for (i64 head = 0; head < kv_heads; head++)
            memcpy(target + (heads + kv_heads + head) * dim, value.data + token * value.token + head * value.head,
                   dim * sizeof(T));
    };
    if (x)
        for_all_summing<T>(tokens, 4 * padded, partial, threads, [&](i64 token, Sums& sums) { one(token, &sums); });
    else
        for_all(tokens, rows_of(32768, all_heads * dim), threads, [&](i64 token) { one(token, nullptr); });
}

// ---- What ctypes calls ---------------------------------------------------------------------------------------------

#define FOR_TYPE(T, NAME)                                                                                              \
    extern "C" void rms_norm_##NAME(const T* x, i64 x_row, const T* residual, i64 residual_row, const T* weight, T* h, \
                                    T* out, float* rstd, i64 rows, i64 n, double eps, double offset, i64 threads) {    \
        rms_norm(x, x_row, residual, residual_row, weight, h, out, rstd, rows, n, (float)eps, (float)offset, threads); \
    }                                                                                                                  \
    extern "C" void rms_norm_backward_##NAME(                                                                          \
        const T* grad, i64 grad_row, const T* h, i64 h_row, const float* rstd, const T* weight, const T* grad_summed,  \
        i64 grad_summed_row, T* grad_h, T* again, float* partial, i64 rows, i64 n, i64 threads) {                      \
        rms_norm_backward(grad, grad_row, h, h_row, rstd, weight, grad_summed, grad_summed_row, grad_h, again,         \
                          partial, rows, n, threads);                                                                  \
    }                                                                                                                  \
    extern "C" void silu_mul_##NAME(const T* gate_up, i64 row, T* out, i64 rows, i64 n, i64 threads) {                 \
        silu_mul(gate_up, row, out, rows, n, threads);                                                                 \
    }                                                                                                                  \
    extern "C" void silu_mul_backward_##NAME(T* grad, const T* gate_up, i64 row, T* out, i64 rows, i64 n,              \
                                             i64 threads) {                                                            \
        silu_mul_backward(grad, gate_up, row, out, rows, n, threads);                                                  \
    }                                                                                                                  \
    extern "C" void rotate_##NAME(const T* qkv, T* out, i64 out_token, const T* cos, const T* sin, const T* q_norm,    \
                                  const T* k_norm, double eps, i64 tokens, i64 heads, i64 kv_heads, i64 dim,           \
                                  i64 threads) {                                                                       \
        rotate(qkv, out, out_token, cos, sin, q_norm, k_norm, (float)eps, tokens, heads, kv_heads, dim, threads);      \
    }                                                                                                                  \
    extern "C" void rotate_backward_##NAME(                                                                            \
        const T* query, i64 query_token, i64 query_head, const T* key, i64 key_token, i64 key_head, const T* value,    \
        i64 value_token, i64 value_head, const T* cos, const T* sin, const T* x, const T* q_norm, const T* k_norm,     \
        double eps, T* out, float* partial, i64 tokens, i64 heads, i64 kv_heads, i64 dim, i64 threads) {               \
        rotate_backward<T>({query, query_token, query_head}, {key, key_token, key_head},                               \
                           {value, value_token, value_head}, cos, sin, x, q_norm, k_norm, (float)eps, out, partial,    \
                           tokens, heads, kv_heads, dim, threads);                                                     \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(bf16, bf16)

extern "C" i64 step() { return STEP; }
