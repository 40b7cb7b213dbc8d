// See lora.h. Vectors have 16 lanes on every instruction set, which the compiler maps to registers of its width.

#include "lora.h"

#include <cstring>

#include "kernel.h"
#include "team.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace octavo {
namespace {

constexpr int64_t kLanes = 16;
constexpr int kTile = 4;  // rows that read a weight together
constexpr int64_t kAhead = 2048;  // values to fetch ahead, also of what an adapter's next phase reads

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t WideLanes __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfLanes __attribute__((vector_size(kLanes * 2)));

INLINE Lanes load(const float* from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

INLINE Lanes load(const Bfloat16* from) {
    HalfLanes bits;
    std::memcpy(&bits, from, sizeof bits);
    const WideLanes wide = __builtin_convertvector(bits, WideLanes) << 16;
    Lanes lanes;
    std::memcpy(&lanes, &wide, sizeof lanes);
    return lanes;
}

// 16 ranks of R rows: even and odd inputs have sums of their own.
template <typename T, int R>
INLINE void down_tile(const T* a, int64_t inputs, const float* const* rows, float* const* hidden) {
    Lanes even[R] = {}, odd[R] = {};
    int64_t k = 0;
    for (; k + 1 < inputs; k += 2) {
        __builtin_prefetch(a + k * kLanes + kAhead, 0, 2);
        if (sizeof(T) == 4) __builtin_prefetch(a + (k + 1) * kLanes + kAhead, 0, 2);
        const Lanes first = load(a + k * kLanes), second = load(a + (k + 1) * kLanes);
        for (int r = 0; r < R; ++r) {
            even[r] += first * rows[r][k];
            odd[r] += second * rows[r][k + 1];
        }
    }
    if (k < inputs)
        for (int r = 0; r < R; ++r) even[r] += load(a + k * kLanes) * rows[r][k];
    for (int r = 0; r < R; ++r) {
        const Lanes sum = even[r] + odd[r];
        std::memcpy(hidden[r], &sum, sizeof sum);
    }
}

// Outputs [first, end) of a piece, of R rows; `first` is a panel's.
template <typename T, int R>
INLINE void up_tile(const T* b, int64_t rank, const float* const* hidden, float* const* out, int64_t first,
                    int64_t end) {
    b += first * rank;
    for (int64_t f = first; f < end; f += kLanes, b += rank * kLanes) {
        Lanes sum[R] = {};
        for (int64_t k = 0; k < rank; ++k) {
            __builtin_prefetch(b + k * kLanes + kAhead, 0, 2);
            const Lanes weights = load(b + k * kLanes);
            for (int r = 0; r < R; ++r) sum[r] += weights * hidden[r][k];
        }
        if (end - f >= kLanes) {
            for (int r = 0; r < R; ++r) {
                const Lanes total = load(out[r] + f) + sum[r];
                std::memcpy(out[r] + f, &total, sizeof total);
            }
            continue;
        }
        for (int r = 0; r < R; ++r) {
            float values[kLanes];
            std::memcpy(values, &sum[r], sizeof values);
            for (int64_t i = 0; i < end - f; ++i) out[r][f + i] += values[i];
        }
    }
}

// Up to kTile rows: what is read and written of each.
struct Tile {
    const float* from[kTile];
    float* to[kTile];
    int64_t count;
};

template <typename T>
INLINE void down(const void* weights, int64_t offset, int64_t inputs, const Tile& tile) {
    const T* a = static_cast<const T*>(weights) + offset;
    if (tile.count == 4) return down_tile<T, 4>(a, inputs, tile.from, tile.to);
    if (tile.count == 3) return down_tile<T, 3>(a, inputs, tile.from, tile.to);
    if (tile.count == 2) return down_tile<T, 2>(a, inputs, tile.from, tile.to);
    down_tile<T, 1>(a, inputs, tile.from, tile.to);
}

template <typename T>
INLINE void up(const LoraPiece& piece, const Tile& tile, int64_t first, int64_t end) {
    const T* b = static_cast<const T*>(piece.b);
    if (tile.count == 4) return up_tile<T, 4>(b, piece.rank, tile.from, tile.to, first, end);
    if (tile.count == 3) return up_tile<T, 3>(b, piece.rank, tile.from, tile.to, first, end);
    if (tile.count == 2) return up_tile<T, 2>(b, piece.rank, tile.from, tile.to, first, end);
    up_tile<T, 1>(b, piece.rank, tile.from, tile.to, first, end);
}

INLINE int64_t tiles_of(int64_t rows) { return (rows + kTile - 1) / kTile; }

INLINE void down_share(const LoraStep& s, int64_t linear, int thread, int threads) {
    int64_t total = 0;
    for (int64_t g = 0; g < s.num_groups; ++g)
        total += s.weights[g][linear].rank / kLanes * tiles_of(s.group_starts[g + 1] - s.group_starts[g]);
    const Share own(total, thread, threads);
    int64_t item = 0;
    for (int64_t g = 0; g < s.num_groups && item < own.end; ++g) {
        const LoraWeight& weight = s.weights[g][linear];
        const int64_t first = s.group_starts[g], end = s.group_starts[g + 1];
        for (int64_t block = 0; block < weight.rank / kLanes; ++block)
            for (int64_t at = first; at < end; at += kTile, ++item) {
                if (item < own.first || item >= own.end) continue;
                Tile tile{{}, {}, end - at < kTile ? end - at : kTile};
                for (int64_t r = 0; r < tile.count; ++r) {
                    tile.from[r] = s.inputs + s.rows[at + r] * s.max_inputs;
                    tile.to[r] = s.hidden + (at + r) * s.max_rank + block * kLanes;
                }
                const int64_t offset = block * weight.inputs * kLanes;
                if (weight.is_bfloat16 != 0)
                    down<Bfloat16>(weight.a, offset, weight.inputs, tile);
                else
                    down<float>(weight.a, offset, weight.inputs, tile);
            }
    }
}

INLINE void up_share(const LoraStep& s, int64_t linear, float* out, int64_t stride, int thread, int threads) {
    for (int64_t g = 0; g < s.num_groups; ++g) {
        const LoraWeight& weight = s.weights[g][linear];
        for (int64_t p = 0; weight.rank > 0 && p < weight.num_pieces; ++p) {
            const LoraPiece& piece = weight.pieces[p];
            const Share panels((piece.outputs + kLanes - 1) / kLanes, thread, threads);
            const int64_t first = panels.first * kLanes;
            const int64_t end = panels.end * kLanes < piece.outputs ? panels.end * kLanes : piece.outputs;
            for (int64_t at = s.group_starts[g]; at < s.group_starts[g + 1]; at += kTile) {
                const int64_t rows = s.group_starts[g + 1] - at;
                Tile tile{{}, {}, rows < kTile ? rows : kTile};
                for (int64_t r = 0; r < tile.count; ++r) {
                    tile.from[r] = s.hidden + (at + r) * s.max_rank + piece.first_rank;
                    tile.to[r] = out + s.rows[at + r] * stride + piece.first_output;
                }
                if (weight.is_bfloat16 != 0)
                    up<Bfloat16>(piece, tile, first, end);
                else
                    up<float>(piece, tile, first, end);
            }
        }
    }
}

#define DEFINE_LORA(name, attributes)                                                                                  \
    attributes void down_##name(const LoraStep& step, int64_t linear, int thread, int threads) {                       \
        down_share(step, linear, thread, threads);                                                                     \
    }                                                                                                                  \
    attributes void up_##name(const LoraStep& step, int64_t linear, float* out, int64_t stride, int thread,            \
                              int threads) {                                                                           \
        up_share(step, linear, out, stride, thread, threads);                                                          \
    }

DEFINE_LORA(portable, )
#if defined(__x86_64__)
DEFINE_LORA(avx2, __attribute__((target("avx2"))))
DEFINE_LORA(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

}  // namespace

void lora_down(const LoraStep& step, int64_t linear, int thread, int threads) {
#if defined(__x86_64__)
    const int32_t isa = octavo_kernels_isa();
    if (isa >= kAvx512) return down_avx512(step, linear, thread, threads);
    if (isa == kAvx2) return down_avx2(step, linear, thread, threads);
#endif
    down_portable(step, linear, thread, threads);
}

void lora_up(const LoraStep& step, int64_t linear, float* out, int64_t stride, int thread, int threads) {
#if defined(__x86_64__)
    const int32_t isa = octavo_kernels_isa();
    if (isa >= kAvx512) return up_avx512(step, linear, out, stride, thread, threads);
    if (isa == kAvx2) return up_avx2(step, linear, out, stride, thread, threads);
#endif
    up_portable(step, linear, out, stride, thread, threads);
}

}  // namespace octavo
