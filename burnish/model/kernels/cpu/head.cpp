// Softmax statistics of rows of logits, and the gradient written over them, in bf16 and fp32.
//
// Pointers and sizes are checked by the caller (compiled.py). z = outer * (x + bias), or outer * tanh(inner * (x + bias)).
// A row is computed by one thread from beginning to end, in fp32 with sums of sums in fp64, so results depend neither on
// the number of threads nor on other rows.

#include "vectors.h"

#include <cmath>
#include <type_traits>

// Less than any logit, and finite, so that no infinity is subtracted from another.
constexpr float LOWEST = -1e30f;
// Elements added up in fp32.
constexpr i64 SEGMENT = 4096;

INLINE V tanh_of(V x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

template <class T, bool CAP> struct Softmax {
    const T* bias;
    float inner, outer;

    // z, and beside it how much the soft-cap bends it there.
    __attribute__((always_inline)) Pair z(const T* row, i64 i, i64 count, Pair* bend = nullptr) const {
        Pair v = load(row + i, count);
        if (bias) {
            const Pair b = load(bias + i, count);
            v = {v.a + b.a, v.b + b.b};
        }
        if constexpr (!CAP) return {v.a * outer, v.b * outer};
        const Pair t = {tanh_of(v.a * inner), tanh_of(v.b * inner)};
        if (bend) *bend = {1.0f - t.a * t.a, 1.0f - t.b * t.b};
        return {t.a * outer, t.b * outer};
    }

    // As above, and the lowest number beyond `count`.
    __attribute__((always_inline)) Pair padded_z(const T* row, i64 i, i64 count) const {
        const Pair v = z(row, i, count);
        if (count >= STEP) return v;
        T flags[STEP] = {};
        store(flags, count, {all(1.0f), all(1.0f)});
        const Pair live = load(flags);
        return {live.a != 0.0f ? v.a : all(LOWEST), live.b != 0.0f ? v.b : all(LOWEST)};
    }

    float slope() const { return CAP ? inner * outer : outer; }
};

// ---- Statistics ----------------------------------------------------------------------------------------------------

// Of each row; entropy and squares may be null.
struct Statistics {
    float *log_probs, *top1_log_probs, *log_normalizer, *entropy, *squares;
};

template <bool ENTROPY, bool SQUARES, class T, bool CAP>
static void statistics_row(const T* x, i64 label, i64 vocab, const Softmax<T, CAP>& softmax, const Statistics& out,
                           i64 row) {
    V top_a = all(LOWEST), top_b = top_a;
    each_step(vocab, [&](i64 i, i64 count) __attribute__((always_inline)) {
        const Pair z = softmax.padded_z(x, i, count);
        top_a = larger(z.a, top_a);
        top_b = larger(z.b, top_b);
    });
    const float top = largest(larger(top_a, top_b));
    double total = 0, moment = 0, squares = 0;
    for (i64 start = 0; start < vocab; start += SEGMENT) {
        V total_a{}, total_b{}, moment_a{}, moment_b{}, squares_a{}, squares_b{};
        each_step(std::min(SEGMENT, vocab - start), [&](i64 i, i64 count) __attribute__((always_inline)) {
            // Relative to the largest: an entropy near zero is then exact to rounding, as it is not from the normalizer.
            Pair z = softmax.padded_z(x, start + i, count);
            z = {z.a - top, z.b - top};
            const Pair e = {exponential(z.a), exponential(z.b)};
            total_a += e.a;
            total_b += e.b;
            if (ENTROPY) {
                moment_a = fma(e.a, z.a, moment_a);
                moment_b = fma(e.b, z.b, moment_b);
            }
            if (SQUARES) {
                squares_a = fma(e.a, e.a, squares_a);
                squares_b = fma(e.b, e.b, squares_b);
            }
        });
        total += sum(total_a + total_b);
        if (ENTROPY) moment += sum(moment_a + moment_b);
        if (SQUARES) squares += sum(squares_a + squares_b);
    }
    const double log_total = std::log(total);
    out.log_probs[row] = (float)((double)(softmax.z(x, label, 1).a[0] - top) - log_total);
    out.top1_log_probs[row] = (float)(0.0 - log_total);
    out.log_normalizer[row] = (float)(top + log_total);
    if (ENTROPY) out.entropy[row] = (float)(log_total - moment / total);
    if (SQUARES) out.squares[row] = (float)(squares / (total * total));
}

template <class T, bool CAP>
static void statistics(const T* x, i64 stride, const i64* labels, i64 rows, i64 vocab, const Softmax<T, CAP>& softmax,
                       const Statistics& out, i64 threads) {
    for_all(rows, rows_of(16384, vocab), threads, [&](i64 row) {
        auto run = [&](auto entropy, auto squares) {
            statistics_row<decltype(entropy)::value, decltype(squares)::value>(x + row * stride, labels[row], vocab,
                                                                               softmax, out, row);
        };
        using Yes = std::true_type;
        using No = std::false_type;
        if (out.entropy)
            out.squares ? run(Yes{}, Yes{}) : run(Yes{}, No{});
        else
            out.squares ? run(No{}, Yes{}) : run(No{}, No{});
    });
}

// ---- Gradient ------------------------------------------------------------------------------------------------------

// What each row's gradient is made of; null where no gradient flows. Entropy and squares are the statistics.
struct Flow {
    const float *log_normalizer, *entropy, *squares, *grad_log_probs, *grad_entropy, *grad_squares;
};

// Gradient in x = slope * (p (constant - of_entropy log p + of_squares p) + [label] of_label).
template <bool SIMPLE, class T, bool CAP>
static void gradient_row(T* x, i64 label, i64 vocab, const Softmax<T, CAP>& softmax, const Flow& flow, i64 row) {
    const float slope = softmax.slope(), normalizer = flow.log_normalizer[row];
    const float of_label = flow.grad_log_probs ? flow.grad_log_probs[row] * slope : 0.0f;
    const float of_entropy = flow.grad_entropy ? flow.grad_entropy[row] * slope : 0.0f;
    const float of_squares = flow.grad_squares ? 2.0f * flow.grad_squares[row] * slope : 0.0f;
    float constant = -of_label;
    if (flow.grad_entropy) constant -= of_entropy * flow.entropy[row];
    if (flow.grad_squares) constant -= of_squares * flow.squares[row];
    auto gradient = [&](i64 i, i64 count, float at_label) __attribute__((always_inline)) {
        Pair bend;
        Pair z = softmax.z(x, i, count, CAP ? &bend : nullptr);
        z = {z.a - normalizer, z.b - normalizer};
        const Pair p = {exponential(z.a), exponential(z.b)};
        Pair grad = {p.a * constant + at_label, p.b * constant + at_label};
        if constexpr (!SIMPLE) {
            grad.a = fma(p.a, fma(p.a, all(of_squares), all(constant) - z.a * of_entropy), all(at_label));
            grad.b = fma(p.b, fma(p.b, all(of_squares), all(constant) - z.b * of_entropy), all(at_label));
        }
        if constexpr (CAP) grad = {grad.a * bend.a, grad.b * bend.b};
        return grad;
    };
    const Pair at_label = gradient(label, 1, of_label);
    each_step(vocab, [&](i64 i, i64 count) __attribute__((always_inline)) { store(x + i, count, gradient(i, count, 0)); });
    store(x + label, 1, at_label);
}

template <class T, bool CAP>
static void gradient(T* x, i64 stride, const i64* labels, i64 rows, i64 vocab, const Softmax<T, CAP>& softmax,
                     const Flow& flow, i64 threads) {
    for_all(rows, rows_of(16384, vocab), threads, [&](i64 row) {
        if (flow.grad_entropy || flow.grad_squares)
            gradient_row<false>(x + row * stride, labels[row], vocab, softmax, flow, row);
        else
            gradient_row<true>(x + row * stride, labels[row], vocab, softmax, flow, row);
    });
}

// ---- What ctypes calls ---------------------------------------------------------------------------------------------

#define FOR_TYPE(T, NAME)                                                                                              \
    extern "C" void head_statistics_##NAME(const T* x, i64 stride, const T* bias, const i64* labels, i64 rows,         \
                                           i64 vocab, i64 cap, double inner, double outer, float* log_probs,           \
                                           float* top1_log_probs, float* log_normalizer, float* entropy,               \
                                           float* squares, i64 threads) {                                              \
        const Statistics out{log_probs, top1_log_probs, log_normalizer, entropy, squares};                             \
        if (cap)                                                                                                       \
            statistics(x, stride, labels, rows, vocab, Softmax<T, true>{bias, (float)inner, (float)outer}, out,        \
                       threads);                                                                                       \
        else                                                                                                           \
            statistics(x, stride, labels, rows, vocab, Softmax<T, false>{bias, (float)inner, (float)outer}, out,       \
                       threads);                                                                                       \
    }                                                                                                                  \
    extern "C" void head_gradient_##NAME(T* x, i64 stride, const T* bias, const i64* labels, i64 rows, i64 vocab,      \
                                         i64 cap, double inner, double outer, const float* log_normalizer,             \
                                         const float* entropy, const float* squares, const float* grad_log_probs,      \
                                         const float* grad_entropy, const float* grad_squares, i64 threads) {          \
        const Flow flow{log_normalizer, entropy, squares, grad_log_probs, grad_entropy, grad_squares};                 \
        if (cap)                                                                                                       \
            gradient(x, stride, labels, rows, vocab, Softmax<T, true>{bias, (float)inner, (float)outer}, flow,         \
                     threads);                                                                                         \
        else                                                                                                           \
            gradient(x, stride, labels, rows, vocab, Softmax<T, false>{bias, (float)inner, (float)outer}, flow,        \
                     threads);                                                                                         \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(bf16, bf16)
