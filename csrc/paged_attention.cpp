// Causal attention of each query token over its row's paged keys and values, read in place through block tables.
//
// Owns: the C ABI octavo_paged_attention_{f32,bf16}. Decode rows and prompt chunks are the same to it.
// Does not: write keys and values, allocate, or start threads of its own (OpenMP's pool is shared with torch).
// With a window, parts and positions before it are not read at all, nor their table entries: these may be anything.
// Invariants: a token's result depends on its row alone, not on the tokens beside it, the threads or the instruction
// set: a context is cut into parts of kPart positions, whatever the batch; parts are computed in 16 lanes, in float,
// without fused multiply-add, and joined in order. Each key and value is read once for all heads that share it.
//
// Source of the split and its joining: Dao et al., "Flash-Decoding for long-context inference", 2023.

#include "kernel.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors wider than the base instruction set, in inlined functions only

namespace {

constexpr int kLanes = 16;
constexpr int64_t kPart = 256;      // positions of one part
constexpr int64_t kMaxHeads = 128;  // query heads: their scores of one part are on the stack
constexpr float kLowest = -3.0e38f;  // a score below every other

typedef float Lanes __attribute__((vector_size(64)));
typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef uint32_t BitLanes __attribute__((vector_size(64)));

struct Call {
    const void *query, *keys, *values;  // query [token, head, size]; pools [block, position, KV head, size]
    const int64_t *table, *rows;        // blocks [row, index]; the row of each token
    const int64_t *contexts;            // positions that each token sees, its own included
    const int64_t *first_part;          // parts of token t within its window: [first_part[t], first_part[t + 1])
    const int64_t *work;                // [part, 2]: token and place in its context, in the order of computing
    float* partial;                     // [part, head, size + 2]: weighted values, then maximum and sum
    void* output;                       // [token, head, size], contiguous
    int64_t query_stride, table_stride, block_size, num_heads, num_kv_heads, window;
    float scale;
};

INLINE Lanes load(const float* from) {
    Lanes out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

INLINE void store(const Lanes& lanes, float* to) { std::memcpy(to, &lanes, sizeof lanes); }

// 32 elements as two vectors: in order, or for bfloat16 those at even places, then those at odd ones, which is what
// one load, a shift and a mask give. All arithmetic below treats places alike; `save` puts them back in order.
INLINE void load_pair(const float* from, Lanes& a, Lanes& b) { a = load(from), b = load(from + kLanes); }

INLINE void load_pair(const Bfloat16* from, Lanes& a, Lanes& b) {
    BitLanes bits;
    std::memcpy(&bits, from, sizeof bits);
    a = (Lanes)(bits << 16), b = (Lanes)(bits & 0xffff0000u);
}

INLINE void save_pair(const Lanes& a, const Lanes& b, float* to) { store(a, to), store(b, to + kLanes); }

INLINE void save_pair(const Lanes& a, const Lanes& b, Bfloat16* to) {
    for (int j = 0; j < kLanes; ++j) narrow(a[j], to[2 * j]), narrow(b[j], to[2 * j + 1]);
}

INLINE float sum(const Lanes& lanes) {
    Half low, high;
    std::memcpy(&low, &lanes, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&lanes) + sizeof low, sizeof high);
    const Half half = low + high;
    Quarter a, b;
    std::memcpy(&a, &half, sizeof a);
    std::memcpy(&b, reinterpret_cast<const char*>(&half) + sizeof a, sizeof b);
    const Quarter quarter = a + b;
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// e^x for x <= 0 within 2 ulp, 0 far below; a NaN stays one. Cephes' reduction and polynomial (Moshier, 1989).
INLINE Lanes exp_lanes(const Lanes& x) {
    const IntLanes is_low = x < -87.0f;
    const Lanes clamped = is_low ? Lanes{} : x;
    const IntLanes n = __builtin_convertvector(clamped * 1.44269504088896341f - 0.5f, IntLanes);
    const Lanes whole = __builtin_convertvector(n, Lanes);
    const Lanes r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const IntLanes power = (n + 127) << 23;
    return is_low ? Lanes{} : y * (Lanes)power;
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLE 1
// The first (or second) halves of each of the 16 / (2 * kWidth) pieces of x, then of y.
#define FIRST_8(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define SECOND_8(x, y) __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define FIRST_4(x, y) __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define SECOND_4(x, y) __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#define FIRST_2(x, y) __builtin_shufflevector(x, y, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
#define SECOND_2(x, y) __builtin_shufflevector(x, y, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31)
#define FIRST_1(x, y) __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define SECOND_1(x, y) __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#endif
#endif

// The sums of 16 vectors, each by the tree of `sum`; with wide registers the trees are climbed side by side.
template <bool kWide>
INLINE Lanes sums(const Lanes* x) {
#if defined(HAS_SHUFFLE)
    if (kWide) {
        Lanes a[8], b[4], c[2];
        for (int i = 0; i < 8; ++i) a[i] = FIRST_8(x[2 * i], x[2 * i + 1]) + SECOND_8(x[2 * i], x[2 * i + 1]);
        for (int i = 0; i < 4; ++i) b[i] = FIRST_4(a[2 * i], a[2 * i + 1]) + SECOND_4(a[2 * i], a[2 * i + 1]);
        for (int i = 0; i < 2; ++i) c[i] = FIRST_2(b[2 * i], b[2 * i + 1]) + SECOND_2(b[2 * i], b[2 * i + 1]);
        return FIRST_1(c[0], c[1]) + SECOND_1(c[0], c[1]);
    }
#endif
    Lanes out;
    for (int i = 0; i < kLanes; ++i) out[i] = sum(x[i]);
    return out;
}

// One part of one token's context: where its keys and values begin, and how many positions it has.
template <typename T>
struct Part {
    const T *query, *keys[kPart], *values[kPart];
    float* partial;
    int64_t count;
};

// Ask for one head's share of some rows before they are needed: memory is the bound, and arithmetic hides behind it.
template <typename T, int kVectors>
INLINE void fetch(const T* const* rows, int64_t offset, int64_t first, int64_t end) {
    for (int64_t at = first; at < end; ++at)
        for (int64_t i = 0; i < kVectors * kLanes; i += 64 / static_cast<int64_t>(sizeof(T)))
            __builtin_prefetch(rows[at] + offset + i, 0, 2);
}

// Scores of kGroup query heads at `count` positions, whose keys begin at rows[i] + offset. Writes whole vectors.
template <typename T, int kVectors, int kGroup, bool kWide>
INLINE void score(const Part<T>& part, const T* query, float scale, int64_t offset, bool is_first, float* scores) {
    const int64_t count = part.count;
    Lanes q[kGroup][kVectors];
    for (int g = 0; g < kGroup; ++g)
        for (int v = 0; v < kVectors; v += 2) {
            load_pair(query + (g * kVectors + v) * kLanes, q[g][v], q[g][v + 1]);
            q[g][v] *= scale, q[g][v + 1] *= scale;
        }
    for (int64_t at = 0; at < count; at += kLanes) {
        const int64_t end = at + kLanes < count ? at + kLanes : count;
        if (is_first) fetch<T, kVectors>(part.values, offset, at, end);
        Lanes products[kGroup][kLanes];
        for (int i = 0; i < kLanes; ++i) {
            const T* key = part.keys[at + i < count ? at + i : at] + offset;  // behind the end: any row, not used
            Lanes k[kVectors];
            for (int v = 0; v < kVectors; v += 2) load_pair(key + v * kLanes, k[v], k[v + 1]);
            for (int g = 0; g < kGroup; ++g) {
                Lanes product = q[g][0] * k[0];
                for (int v = 1; v < kVectors; ++v) product += q[g][v] * k[v];
                products[g][i] = product;
            }
        }
        for (int g = 0; g < kGroup; ++g) store(sums<kWide>(products[g]), scores + g * kPart + at);
    }
}

// Values weighted for kGroup query heads.
template <typename T, int kVectors, int kGroup>
INLINE void weigh(const Part<T>& part, const Part<T>& next, const float* weights, int64_t offset, bool is_first,
                  float* partial) {
    Lanes total[kGroup][kVectors];
    for (int g = 0; g < kGroup; ++g)
        for (int v = 0; v < kVectors; ++v) total[g][v] = Lanes{};
    for (int64_t at = 0; at < part.count; ++at) {
        if (is_first && at < next.count) fetch<T, kVectors>(next.keys, offset, at, at + 1);
        for (int v = 0; v < kVectors; v += 2) {
            Lanes a, b;
            load_pair(part.values[at] + offset + v * kLanes, a, b);
            for (int g = 0; g < kGroup; ++g) {
                total[g][v] += a * weights[g * kPart + at];
                total[g][v + 1] += b * weights[g * kPart + at];
            }
        }
    }
    if (is_first) fetch<T, kVectors>(next.keys, offset, part.count, next.count);
    for (int g = 0; g < kGroup; ++g)
        for (int v = 0; v < kVectors; ++v) store(total[g][v], partial + (g * kVectors + v) * kLanes + 2 * g);
}

// Turn scores into unnormalised weights; gives their maximum and sum. Behind `count` the weights are zero.
INLINE void soften(float* scores, int64_t count, float* maximum, float* total) {
    const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t i = count; i < padded; ++i) scores[i] = kLowest;
    Lanes best = Lanes{} + kLowest;
    for (int64_t i = 0; i < padded; i += kLanes) {
        const Lanes lanes = load(scores + i);
        best = lanes > best ? lanes : best;
    }
    float highest = best[0];
    for (int j = 1; j < kLanes; ++j) highest = best[j] > highest ? best[j] : highest;
    Lanes sums = Lanes{};
    for (int64_t i = 0; i < padded; i += kLanes) {
        const Lanes weights = exp_lanes(load(scores + i) - highest);
        store(weights, scores + i);
        sums += weights;
    }
    *maximum = highest;
    *total = sum(sums);
}

// The two passes over a part, for kGroup heads from `head` on: scores and their softening, then the values.
template <typename T, int kVectors, int kGroup, bool kWide>
INLINE void attend_heads(const Call& d, const Part<T>& part, const Part<T>* next, int64_t head, float* scores) {
    const int64_t size = kVectors * kLanes, group = d.num_heads / d.num_kv_heads, offset = head / group * size;
    const bool is_first = head % group == 0;
    float* partial = part.partial + head * (size + 2);
    scores += head * kPart;
    if (next != nullptr) {
        weigh<T, kVectors, kGroup>(part, *next, scores, offset, is_first, partial);
        return;
    }
    score<T, kVectors, kGroup, kWide>(part, part.query + head * size, d.scale, offset, is_first, scores);
    for (int g = 0; g < kGroup; ++g) {
        float* tail = partial + g * (size + 2) + size;
        soften(scores + g * kPart, part.count, tail, tail + 1);
    }
}

template <typename T, int kVectors>
INLINE void find_rows(const Call& d, int64_t index, Part<T>& part) {
    const int64_t token = d.work[2 * index], place_in_context = d.work[2 * index + 1];
    const int64_t context = d.contexts[token], width = d.num_kv_heads * kVectors * kLanes;
    const int64_t* table = d.table + d.rows[token] * d.table_stride;
    const int64_t low = d.window > 0 && context > d.window ? context - d.window : 0;
    const int64_t begin = place_in_context * kPart;
    const int64_t end = begin + kPart < context ? begin + kPart : context;
    part.count = 0;
    for (int64_t at = begin > low ? begin : low; at < end; ++at) {
        const int64_t place = (table[at / d.block_size] * d.block_size + at % d.block_size) * width;
        part.keys[part.count] = static_cast<const T*>(d.keys) + place;
        part.values[part.count++] = static_cast<const T*>(d.values) + place;
    }
    part.query = static_cast<const T*>(d.query) + token * d.query_stride;
    const int64_t index_in_token = place_in_context - low / kPart;  // parts before the window are no work
    part.partial = d.partial + (d.first_part[token] + index_in_token) * d.num_heads * (kVectors * kLanes + 2);
}

template <typename T, int kVectors, bool kWide>
INLINE void attend_all(const Call& d, const Part<T>& part, const Part<T>* next, float* scores) {
    // as many heads of a group at once as their queries and sums fit into 32 registers
    constexpr int kMost = !kWide || kVectors > 8 ? 1 : (kVectors <= 4 ? 4 : 2);
    constexpr int kThree = kMost == 4 ? 3 : 1, kTwo = kMost >= 2 ? 2 : 1;
    const int64_t group = d.num_heads / d.num_kv_heads;
    for (int64_t head = 0; head < d.num_heads;) {
        const int64_t left = group - head % group;
        if (left >= kMost) {
            attend_heads<T, kVectors, kMost, kWide>(d, part, next, head, scores), head += kMost;
        } else if (left >= kThree && kThree > kTwo) {
            attend_heads<T, kVectors, kThree, kWide>(d, part, next, head, scores), head += kThree;
        } else if (left >= kTwo) {
            attend_heads<T, kVectors, kTwo, kWide>(d, part, next, head, scores), head += kTwo;
        } else {
            attend_heads<T, kVectors, 1, kWide>(d, part, next, head, scores), head += 1;
        }
    }
}

// Every `step`th part from `first` on. While one is weighed, the keys of the next are on their way.
template <typename T, int kVectors, bool kWide>
INLINE void attend_parts(const Call& d, int64_t first, int64_t step, int64_t num_parts) {
    alignas(64) float scores[kMaxHeads * kPart];
    Part<T> parts[2];
    if (first < num_parts) find_rows<T, kVectors>(d, first, parts[0]);
    for (int64_t index = first, now = 0; index < num_parts; index += step, now = 1 - now) {
        parts[1 - now].count = 0;
        if (index + step < num_parts) find_rows<T, kVectors>(d, index + step, parts[1 - now]);
        attend_all<T, kVectors, kWide>(d, parts[now], nullptr, scores);
        attend_all<T, kVectors, kWide>(d, parts[now], &parts[1 - now], scores);
    }
}

template <typename T, int kVectors>
INLINE void join_token(const Call& d, int64_t token) {
    const int64_t size = kVectors * kLanes, from = d.first_part[token], to = d.first_part[token + 1];
    const int64_t step = d.num_heads * (size + 2);
    T* output = static_cast<T*>(d.output) + token * d.num_heads * size;
    for (int64_t head = 0; head < d.num_heads; ++head) {
        const float* partial = d.partial + from * step + head * (size + 2);
        float highest = partial[size];
        for (int64_t p = 1; p < to - from; ++p)
            highest = partial[p * step + size] > highest ? partial[p * step + size] : highest;
        Lanes total[kVectors];
        for (int v = 0; v < kVectors; ++v) total[v] = Lanes{};
        float weight = 0.0f;
        for (int64_t p = 0; p < to - from; ++p) {
            const float* one = partial + p * step;
            const float factor = exp_lanes(Lanes{} + (one[size] - highest))[0];
            weight += one[size + 1] * factor;
            for (int v = 0; v < kVectors; ++v) total[v] += load(one + v * kLanes) * factor;
        }
        for (int v = 0; v < kVectors; v += 2)
            save_pair(total[v] / weight, total[v + 1] / weight, output + head * size + v * kLanes);
    }
}

// The same two steps for each instruction set; the compiler makes what it can of the vectors above.
template <typename T, int kVectors>
struct Portable {
    static void parts(const Call& d, int64_t first, int64_t step, int64_t num_parts) {
        attend_parts<T, kVectors, false>(d, first, step, num_parts);
    }
    static void join(const Call& d, int64_t token) { join_token<T, kVectors>(d, token); }
};

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2")))
template <typename T, int kVectors>
struct Avx2 {
    AVX2 static void parts(const Call& d, int64_t first, int64_t step, int64_t num_parts) {
        attend_parts<T, kVectors, false>(d, first, step, num_parts);
    }
    AVX2 static void join(const Call& d, int64_t token) { join_token<T, kVectors>(d, token); }
};

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
template <typename T, int kVectors>
struct Avx512 {
    AVX512 static void parts(const Call& d, int64_t first, int64_t step, int64_t num_parts) {
        attend_parts<T, kVectors, true>(d, first, step, num_parts);
    }
    AVX512 static void join(const Call& d, int64_t token) { join_token<T, kVectors>(d, token); }
};
#endif

template <typename Isa>
void run(const Call& d, int64_t num_tokens, int32_t num_threads) {
    const int64_t num_parts = d.first_part[num_tokens];
    if (num_threads <= 1) {  // no parallel region at all: it would wake the pool
        Isa::parts(d, 0, 1, num_parts);
        for (int64_t token = 0; token < num_tokens; ++token) Isa::join(d, token);
        return;
    }
    // in turns, not in runs: contexts ascend, so turns share the work evenly
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int32_t turn = 0; turn < num_threads; ++turn) Isa::parts(d, turn, num_threads, num_parts);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < num_tokens; ++token) Isa::join(d, token);
    }
}

template <typename T, int kVectors>
void attend_size(const Call& d, int64_t num_tokens, int32_t num_threads) {
#if defined(__x86_64__)
    const int32_t isa = octavo_kernels_isa();
    if (isa == kAvx512) return run<Avx512<T, kVectors>>(d, num_tokens, num_threads);
    if (isa == kAvx2) return run<Avx2<T, kVectors>>(d, num_tokens, num_threads);
#endif
    run<Portable<T, kVectors>>(d, num_tokens, num_threads);
}

template <typename T>
void attend(const Call& d, int64_t head_dim, int64_t num_tokens, int32_t num_threads) {
    switch (head_dim) {
        case 32: return attend_size<T, 2>(d, num_tokens, num_threads);
        case 64: return attend_size<T, 4>(d, num_tokens, num_threads);
        case 96: return attend_size<T, 6>(d, num_tokens, num_threads);
        case 128: return attend_size<T, 8>(d, num_tokens, num_threads);
        case 256: return attend_size<T, 16>(d, num_tokens, num_threads);
    }
}

}  // namespace

// Positions of one part: callers cut contexts by it.
EXPORT int32_t octavo_paged_attention_part() { return kPart; }

// Sizes are in elements. `sizes`: query_stride, table_stride, block_size, num_heads, num_kv_heads, head_dim, window
// (0 = none), num_tokens. head_dim is one of 32, 64, 96, 128, 256; anything else does nothing.
#define DEFINE_PAGED_ATTENTION(name, type)                                                                             \
    EXPORT void octavo_paged_attention_##name(const void* query, const void* keys, const void* values,                 \
                                              const int64_t* table, const int64_t* rows, const int64_t* contexts,      \
                                              const int64_t* first_part, const int64_t* work, float* partial,          \
                                              void* output, const int64_t* sizes, float scale, int32_t num_threads) {  \
        const Call d{query,   keys,     values,   table,    rows,     contexts, first_part, work, partial,             \
                     output,  sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[6],   scale};                    \
        attend<type>(d, sizes[5], sizes[7], num_threads);                                                              \
    }

DEFINE_PAGED_ATTENTION(f32, float)
DEFINE_PAGED_ATTENTION(bf16, Bfloat16)
