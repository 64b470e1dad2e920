// What a decode step does on a CPU between its products, in bf16 and fp32.
//
// Pointers and sizes are checked by the caller (compiled.py). Sizes and strides count elements; the last axis of every
// tensor is contiguous. All arithmetic is fp32 and rounded to the tensor's type where Hugging Face's modules round.
// A row (of a norm) or a row and key head (of attention) is computed by one thread from beginning to end, so results
// depend neither on the number of threads nor on other rows.

#include "layers.h"

#include <cmath>
#include <utility>
#include <vector>

// ---- The cache -----------------------------------------------------------------------------------------------------

// Keys or values of one layer [blocks, block_size, heads, dim] in any order of the first three axes.
template <class T> struct Buffer {
    T* data;
    i64 block, token, head;
};

// Of one layer, as PagedCache.layouts has it: address and strides of keys and of values, and the block size.
struct Layout {
    i64 key[4], value[4], block_size;
    template <class T> static Buffer<T> buffer(const i64* v) { return {(T*)v[0], v[1], v[2], v[3]}; }
};

// One head of the tokens of a row, one after the other.
template <class T> struct Walk {
    const Buffer<T>& buffer;
    const int32_t* table;
    i64 block_size, head, left;
    const T* place;

    Walk(const Buffer<T>& buffer, const int32_t* table, i64 block_size, i64 head, i64 token)
        : buffer(buffer), table(table + token / block_size), block_size(block_size), head(head), left(0) {
        enter(token % block_size);
    }
    void enter(i64 offset) {
        place = buffer.data + *table++ * buffer.block + head * buffer.head + offset * buffer.token;
        left = block_size - offset;
    }
    inline __attribute__((always_inline)) const T* next() {
        if (left == 0) enter(0);
        const T* here = place;
        place += buffer.token;
        left--;
        return here;
    }
};

// Starts to fetch `count` elements. Rows lie far from each other, and each is too short for the CPU to see where it goes.
// Into the second-level cache: the first has room for few requests, and arithmetic waits behind them.
template <class T> INLINE void fetch(const T* p, i64 count) {
    for (i64 i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 0, 2);
}

template <class T>
static void store_token(const Buffer<T>& buffer, i64 block_size, i64 place, const T* source, i64 source_head, i64 heads,
                        i64 dim) {
    T* target = buffer.data + place / block_size * buffer.block + place % block_size * buffer.token;
    for (i64 head = 0; head < heads; head++)
        memcpy(target + head * buffer.head, source + head * source_head, dim * sizeof(T));
}

// ---- Rotary embedding ----------------------------------------------------------------------------------------------

template <class T>
static void rotate_and_store(T* qkv, const T* cos, const T* sin, const T* q_norm, const T* k_norm, float eps,
                             Buffer<T> key, Buffer<T> value, i64 block_size, const i64* places, i64 tokens,
                             i64 num_heads, i64 num_kv_heads, i64 dim, i64 threads) {
    const i64 heads = num_heads + 2 * num_kv_heads;
    for_all(tokens, rows_of(32768, heads * dim), threads, [&](i64 token) {
        T *query = qkv + token * heads * dim, *keys = query + num_heads * dim, *values = keys + num_kv_heads * dim;
        for (i64 head = 0; head < num_heads + num_kv_heads; head++)
            rotate_head(query + head * dim, query + head * dim, cos + token * dim, sin + token * dim, dim,
                        head < num_heads ? q_norm : k_norm, eps);
        store_token(key, block_size, places[token], keys, dim, num_kv_heads, dim);
        store_token(value, block_size, places[token], values, dim, num_kv_heads, dim);
    });
}

// ---- Attention of one new token a row ------------------------------------------------------------------------------

constexpr i64 MAX_DIM = 512;  // compiled.py knows it.
constexpr i64 SPAN = 256;     // Tokens whose scores are held at once; a multiple of W.
constexpr i64 MAX_STEPS = MAX_DIM / STEP;

template <class T> struct Attention {
    const T* query;  // [rows, heads, key_dim]
    i64 query_row, query_head;
    Buffer<T> key, value;
    const int32_t* tables;  // [rows, any]
    i64 table_row, block_size;
    const int32_t* lengths;
    T* out;  // [rows, heads, value_dim]
    i64 heads, kv_heads, key_dim, value_dim;
    float scaling, softcap;  // No soft-cap: 0.
    i64 window;              // No window: 0.
};

template <int S, std::size_t... LANE> INLINE V fold(V x, V y, std::index_sequence<LANE...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, y, (LANE & S ? W + LANE - S : LANE)...) +
           __builtin_shufflevector(x, y, (LANE & S ? W + LANE : LANE + S)...);
#else
    return __builtin_shuffle(x, y, I{(int)(LANE & S ? W + LANE - S : LANE)...}) +
           __builtin_shuffle(x, y, I{(int)(LANE & S ? W + LANE : LANE + S)...});
#endif
}

// Lane i of the result is the sum of the lanes of v[i].
template <int S = 1> INLINE V sums(V* v) {
    for (int i = 0; i < W / (2 * S); i++) v[i] = fold<S>(v[2 * i], v[2 * i + 1], std::make_index_sequence<W>());
    if constexpr (2 * S < W) return sums<2 * S>(v);
    return v[0];
}

INLINE V lanes() {
    V v;
    for (int i = 0; i < W; i++) v[i] = (float)i;
    return v;
}

// G query heads of one key head over `count` tokens: scores into [G][SPAN], -inf past the end of the last vector.
template <int G, int N, class T>
INLINE void scores_of(const Pair (*whole_query)[G], i64 dim, Walk<T>& keys, Walk<T> values, i64 value_dim, i64 count,
                      float softcap, float (*scores)[SPAN]) {
    // Where the number of steps is known the query stays in registers.
    Pair query[N ? N : MAX_STEPS][G];
    memcpy(query, whole_query, N ? sizeof query : (dim + STEP - 1) / STEP * sizeof query[0]);
    if (N) dim = N * STEP;
    for (i64 start = 0; start < count; start += W) {
        V parts[G][W];
        const int here = (int)std::min<i64>(W, count - start);
        for (int t = 0; t < here; t++) {
            const T* key = keys.next();
            fetch(values.next(), value_dim);
            V a[G] = {}, b[G] = {};
            each_step(dim, [&](i64 i, i64 n) __attribute__((always_inline)) {
                const Pair k = load(key + i, n), *q = query[i / STEP];
                for (int g = 0; g < G; g++) {
                    a[g] = fma(q[g].a, k.a, a[g]);
                    b[g] = fma(q[g].b, k.b, b[g]);
                }
            });
            for (int g = 0; g < G; g++) parts[g][t] = a[g] + b[g];
        }
        for (int t = here; t < W; t++)
            for (int g = 0; g < G; g++) parts[g][t] = V{};
        for (int g = 0; g < G; g++) {
            V s = sums(parts[g]);
            // tanh(x) = 1 - 2 / (e^2x + 1)
            if (softcap != 0) s = softcap * (1.0f - 2.0f / (exponential(s * (2 / softcap)) + 1.0f));
            if (here < W) s = lanes() < (float)here ? s : all(-INF);
            memcpy(scores[g] + start, &s, sizeof s);
        }
    }
}

// Adds weights x values to `sums`, for N steps of the dims.
template <int G, int N, class T>
INLINE void add_values(const float (*weights)[SPAN], Walk<T> values, i64 first_dim, i64 last, i64 count,
                       Pair (*total)[MAX_STEPS], const T* upcoming, i64 upcoming_token) {
    Pair acc[N][G];
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) acc[n][g] = total[g][first_dim / STEP + n];
    for (i64 t = 0; t < count; t++) {
        const T* value = values.next() + first_dim;
        if (first_dim == 0) fetch(upcoming + t * upcoming_token, 64);
        for (int n = 0; n < N; n++) {
            const Pair v = n + 1 < N ? load(value + n * STEP) : load(value + n * STEP, last);
            for (int g = 0; g < G; g++) {
                const V w = all(weights[g][t]);
                acc[n][g] = {fma(w, v.a, acc[n][g].a), fma(w, v.b, acc[n][g].b)};
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++) total[g][first_dim / STEP + n] = acc[n][g];
}

template <int G, class T> static void attend(const Attention<T>& a, i64 row, i64 kv_head, i64 head, const T* next) {
    const i64 length = a.lengths[row], first = a.window ? std::max<i64>(0, length - a.window) : 0;
    const int32_t* table = a.tables + row * a.table_row;
    Pair query[MAX_STEPS][G], total[G][MAX_STEPS] = {};
    for (int g = 0; g < G; g++) {
        const T* q = a.query + row * a.query_row + (head + g) * a.query_head;
        each_step(a.key_dim, [&](i64 i, i64 n) __attribute__((always_inline)) {
            Pair v = load(q + i, n);
            query[i / STEP][g] = {v.a * a.scaling, v.b * a.scaling};
        });
    }
    float scores[G][SPAN], highest[G], weight[G] = {};
    std::fill(highest, highest + G, -INF);
    Walk<T> keys(a.key, table, a.block_size, kv_head, first), values(a.value, table, a.block_size, kv_head, first);
    for (i64 start = first; start < length; start += SPAN) {
        const i64 count = std::min(SPAN, length - start);
        if (a.key_dim == 2 * STEP)
            scores_of<G, 2>(query, a.key_dim, keys, values, a.value_dim, count, a.softcap, scores);
        else
            scores_of<G, 0>(query, a.key_dim, keys, values, a.value_dim, count, a.softcap, scores);
        for (int g = 0; g < G; g++) {
            V top = all(highest[g]), added{};
            for (i64 t = 0; t < count; t += W) {
                V s;
                memcpy(&s, scores[g] + t, sizeof s);
                top = larger(s, top);
            }
            const float now = largest(top), shrink = start == first ? 0.0f : std::exp(highest[g] - now);
            for (i64 t = 0; t < count; t += W) {
                V s;
                memcpy(&s, scores[g] + t, sizeof s);
                s = exponential(s - now);
                added += s;
                memcpy(scores[g] + t, &s, sizeof s);
            }
            weight[g] = weight[g] * shrink + sum(added);
            highest[g] = now;
            if (start != first)
                for (i64 i = 0; i * STEP < a.value_dim; i++) total[g][i] = {total[g][i].a * shrink, total[g][i].b * shrink};
        }
        const T* upcoming = start + count < length ? keys.place : next;
        i64 dim = 0;
        for (; dim + 2 * STEP <= a.value_dim; dim += 2 * STEP) add_values<G, 2>(scores, values, dim, STEP, count, total, upcoming, a.key.token);
        for (; dim < a.value_dim; dim += STEP) add_values<G, 1>(scores, values, dim, a.value_dim - dim, count, total, upcoming, a.key.token);
        if (start + count < length)
            for (i64 t = 0; t < count; t++) values.next();
    }
    for (int g = 0; g < G; g++) {
        T* out = a.out + (row * a.heads + head + g) * a.value_dim;
        const float scale = 1.0f / weight[g];
        each_step(a.value_dim, [&](i64 i, i64 n) __attribute__((always_inline)) {
            store(out + i, n, {total[g][i / STEP].a * scale, total[g][i / STEP].b * scale});
        });
    }
}

template <class T> static void decode_attention(const Attention<T>& a, i64 rows, i64 threads) {
    const i64 group = a.heads / a.kv_heads;
    for_all(rows * a.kv_heads, a.kv_heads, threads, [&](i64 task) {
        const i64 row = task / a.kv_heads, kv_head = task % a.kv_heads;
        i64 head = kv_head * group, left = group;
        const i64 after = std::min(task + 1, rows * a.kv_heads - 1);
        const T* next = a.key.data + a.tables[after / a.kv_heads * a.table_row] * a.key.block + after % a.kv_heads * a.key.head;
        // As many query heads at once as there are registers for; the keys of a row stay in the cache.
        for (; left >= 4 && left != 5; left -= 4, head += 4) attend<4>(a, row, kv_head, head, next);
        if (left == 5) attend<3>(a, row, kv_head, head, next), left -= 3, head += 3;
        if (left == 3) attend<3>(a, row, kv_head, head, next);
        if (left == 2) attend<2>(a, row, kv_head, head, next);
        if (left == 1) attend<1>(a, row, kv_head, head, next);
    });
}

// ---- Sampling ------------------------------------------------------------------------------------------------------

constexpr i64 SEGMENT = 256;  // Neighbouring tokens whose fp32 weights are summed before float64 takes over.

INLINE void in_order(const float*, Pair v, float* out) { memcpy(out, &v, sizeof v); }

INLINE void in_order(const bf16*, Pair v, float* out) {
    for (int i = 0; i < W; i++) out[2 * i] = v.a[i], out[2 * i + 1] = v.b[i];
}

// sampler.py's `uniforms`: SplitMix64 of a stream's key at a position.
static double uniform(i64 key, i64 position) {
    uint64_t z = (uint64_t)key + (uint64_t)(position + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (double)(z >> 11) * 0x1p-53;
}

template <class T>
static void draw_row(const T* logits, i64 vocab, float temperature, double u, i64* token, float* log_prob) {
    V a = all(-INF), b = a;
    each_step(vocab, [&](i64 i, i64 n) __attribute__((always_inline)) {
        if (n < STEP) {
            float rest[STEP];
            in_order(logits, load(logits + i, n), rest);
            for (i64 j = 0; j < n; j++) a[0] = std::max(a[0], rest[j]);
            return;
        }
        const Pair x = load(logits + i);
        a = larger(x.a, a), b = larger(x.b, b);
    });
    const float top = largest(larger(a, b));
    // 1 / 1e-45 is infinite, which nothing may be multiplied with.
    const float inverse = temperature == 0 ? 1.0f : std::min(1.0f / temperature, 1e30f);
    auto weights = [&](i64 i, i64 n) __attribute__((always_inline)) {
        const Pair x = load(logits + i, n);
        return Pair{exponential((x.a - top) * inverse), exponential((x.b - top) * inverse)};
    };
    // The weights of a segment in the order of the vocabulary.
    float inside[SEGMENT];
    auto segment_of = [&](i64 start) {
        const i64 count = std::min(SEGMENT, vocab - start);
        for (i64 i = 0; i < count; i += STEP) in_order(logits, weights(start + i, count - i), inside + i);
        return count;
    };
    std::vector<double> cumulative((vocab + SEGMENT - 1) / SEGMENT);
    double total = 0;
    for (i64 start = 0; start < vocab; start += SEGMENT) {
        float mass = 0;
        if (start + SEGMENT <= vocab) {
            V mass_a{}, mass_b{};
            for (i64 i = 0; i < SEGMENT; i += STEP) {
                const Pair w = weights(start + i, STEP);
                mass_a += w.a, mass_b += w.b;
            }
            mass = sum(mass_a + mass_b);
        } else {
            for (i64 i = 0, count = segment_of(start); i < count; i++) mass += inside[i];
        }
        cumulative[start / SEGMENT] = total += mass;
    }
    i64 chosen = 0;
    if (temperature == 0) {
        // Of equal ones the lowest.
        for (i64 start = 0; start < vocab; start += STEP) {
            float rest[STEP];
            in_order(logits, load(logits + start, vocab - start), rest);
            const i64 count = std::min<i64>(STEP, vocab - start);
            const i64 found = std::find(rest, rest + count, top) - rest;
            chosen = start + found;
            if (found < count) break;
        }
    } else if (total == total) {
        const double threshold = u * total;
        i64 segment = 0;
        const i64 last = (i64)cumulative.size() - 1;
        // Rounding may lift the threshold to the total, which nothing exceeds; the last token with a weight it is then.
        while (segment < last && !(cumulative[segment] > threshold || cumulative[segment] == total)) segment++;
        const double left = threshold - (segment ? cumulative[segment - 1] : 0.0);
        const i64 count = segment_of(segment * SEGMENT);
        double mass = 0;
        i64 place = 0;
        for (i64 i = 0; i < count; i++) {
            if (inside[i] > 0) place = i;
            if ((mass += inside[i]) > left) break;
        }
        chosen = segment * SEGMENT + place;
    }
    *token = std::min(chosen, vocab - 1);
    float value[STEP];
    in_order(logits, load(logits + *token, 1), value);
    *log_prob = (float)((double)((value[0] - top) * inverse) - std::log(total));
}

template <class T>
static void draw(const T* logits, i64 row_stride, i64 rows, i64 vocab, const float* temperature, const i64* keys,
                 const i64* positions, i64* tokens, float* log_probs, i64 threads) {
    for_all(rows, rows_of(16384, vocab), threads, [&](i64 row) {
        draw_row(logits + row * row_stride, vocab, temperature[row], uniform(keys[row], positions[row]), tokens + row,
                 log_probs + row);
    });
}

// ---- What ctypes calls ---------------------------------------------------------------------------------------------

#define FOR_TYPE(T, NAME)                                                                                              \
    extern "C" void rms_norm_##NAME(const T* x, i64 x_row, const T* residual, i64 residual_row, const T* weight, T* h, \
                                    T* out, i64 rows, i64 n, double eps, double offset, i64 threads) {                 \
        rms_norm(x, x_row, residual, residual_row, weight, h, out, nullptr, rows, n, (float)eps, (float)offset, threads); \
    }                                                                                                                  \
    extern "C" void silu_mul_##NAME(const T* gate_up, i64 row, T* out, i64 rows, i64 n, i64 threads) {                 \
        silu_mul(gate_up, row, out, rows, n, threads);                                                                 \
    }                                                                                                                  \
    extern "C" void rotate_and_store_##NAME(                                                                           \
        T* qkv, const T* cos, const T* sin, const T* q_norm, const T* k_norm, double eps, const Layout* cache,         \
        const i64* places, i64 tokens, i64 num_heads, i64 num_kv_heads, i64 dim, i64 threads) {                        \
        rotate_and_store(qkv, cos, sin, q_norm, k_norm, (float)eps, Layout::buffer<T>(cache->key),                     \
                         Layout::buffer<T>(cache->value), cache->block_size, places, tokens, num_heads, num_kv_heads,  \
                         dim, threads);                                                                                \
    }                                                                                                                  \
    extern "C" void store_##NAME(const Layout* cache, const i64* places, const T* key, i64 key_token, i64 key_head,     \
                                 const T* value, i64 value_token, i64 value_head, i64 tokens, i64 heads, i64 key_dim,  \
                                 i64 value_dim) {                                                                      \
        for (i64 i = 0; i < tokens; i++) {                                                                             \
            store_token(Layout::buffer<T>(cache->key), cache->block_size, places[i], key + i * key_token, key_head,    \
                        heads, key_dim);                                                                               \
            store_token(Layout::buffer<T>(cache->value), cache->block_size, places[i], value + i * value_token,        \
                        value_head, heads, value_dim);                                                                 \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" void decode_attention_##NAME(                                                                           \
        const T* query, i64 query_row, i64 query_head, const Layout* cache, const int32_t* tables, i64 table_row,      \
        const int32_t* lengths, T* out, i64 rows, i64 heads, i64 kv_heads, i64 key_dim, i64 value_dim,                 \
        double scaling, double softcap, i64 window, i64 threads) {                                                     \
        decode_attention<T>({query, query_row, query_head, Layout::buffer<T>(cache->key),                              \
                             Layout::buffer<T>(cache->value), tables, table_row, cache->block_size, lengths, out,      \
                             heads, kv_heads, key_dim, value_dim, (float)scaling, (float)softcap, window},             \
                            rows, threads);                                                                            \
    }                                                                                                                  \
    extern "C" void draw_##NAME(const T* logits, i64 row, i64 rows, i64 vocab, const float* temperature,               \
                                const i64* keys, const i64* positions, i64* tokens, float* log_probs, i64 threads) {   \
        draw(logits, row, rows, vocab, temperature, keys, positions, tokens, log_probs, threads);                      \
    }

FOR_TYPE(float, fp32)
FOR_TYPE(bf16, bf16)
