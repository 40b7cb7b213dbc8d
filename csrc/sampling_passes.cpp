// See sampling_passes.h. Vectors of 8 logits; the remaining logits are processed one by one.

#include "sampling_passes.h"

#include <algorithm>
#include <cmath>

namespace octavo {
namespace {

using Float4 = float __attribute__((vector_size(16)));
using Double4 = double __attribute__((vector_size(32)));

INLINE Float8 load(const float* x) {
    Float8 value;
    std::memcpy(&value, x, sizeof value);
    return value;
}

INLINE bool is_any(const Int8& mask) {
    int64_t part[4];
    std::memcpy(part, &mask, sizeof part);
    return (part[0] | part[1] | part[2] | part[3]) != 0;
}

// The weights of 8 scaled logits, or 0 where `is_in` is not set.
INLINE void weigh(const Float8& scaled, const Int8& is_in, Double4& low, Double4& high) {
    const Float8 value = exponential(scaled);
    Int8 bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits &= is_in;
    Float4 half[2];
    std::memcpy(half, &bits, sizeof half);
    low = (__builtin_convertvector(half[0], Double4) + kRound) - kRound;
    high = (__builtin_convertvector(half[1], Double4) + kRound) - kRound;
}

INLINE float place_of(float value, const LogitRange& range) {
    const float place = (range.best - value) * range.bins_per_unit;
    return place < kBins - 1 ? place : static_cast<float>(kBins - 1);
}

INLINE Float8 place_of(const Float8& value, const LogitRange& range) {
    const Float8 place = (range.best - value) * range.bins_per_unit, last = Float8{} + static_cast<float>(kBins - 1);
    return place < last ? place : last;
}

INLINE void find_maxima(const float* x, int64_t size, int64_t first, int64_t end, float* maxima) {
    for (int64_t b = first; b < end; ++b) {
        const float* block = x + b * kBlock;
        const int64_t count = std::min(kBlock, size - b * kBlock);
        Float8 even = Float8{} - INFINITY, odd = even;
        Int8 is_nan = {};
        int64_t i = 0;
        for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
            const Float8 one = load(block + i), two = load(block + i + kLanes);
            even = one > even ? one : even;
            odd = two > odd ? two : odd;
            is_nan |= (one != one) | (two != two);
        }
        float best = -INFINITY;
        bool any = is_any(is_nan);
        for (int j = 0; j < kLanes; ++j) best = std::max(best, std::max(even[j], odd[j]));
        for (; i < count; ++i) {
            best = block[i] > best ? block[i] : best;
            any |= block[i] != block[i];
        }
        maxima[b] = any ? NAN : best;
    }
}

INLINE void sum_weights(const LogitRow& row, const float* maxima, int64_t first, int64_t end, float floor,
                        double* sums) {
    const float best = row.best, inverse = row.inverse;
    for (int64_t b = first; b < end; ++b) {
        sums[b] = 0.0;
        const float highest = (maxima[b] - best) * inverse;
        if (!(highest >= kLeast && highest >= floor)) continue;
        const float* block = row.x + b * kBlock;
        const int64_t count = std::min(kBlock, row.size - b * kBlock);
        Double4 sum_low = {}, sum_high = {}, low, high;
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            const Float8 scaled = (load(block + i) - best) * inverse;
            weigh(scaled, scaled >= floor, low, high);
            sum_low += low;
            sum_high += high;
        }
        for (int j = 0; j < 4; ++j) sums[b] += sum_low[j] + sum_high[j];
        for (; i < count; ++i) {
            const float scaled = (block[i] - best) * inverse;
            sums[b] += scaled >= floor ? weight(scaled) : 0.0;
        }
    }
}

INLINE int64_t select(const LogitRow& row, const float* maxima, const LogitRange& range, int32_t* ids) {
    int64_t num = 0;
    const LogitRange in = range;
    for (int64_t b = 0; b < row.num_blocks(); ++b) {
        if (maxima[b] < in.least) continue;
        const int64_t until = std::min((b + 1) * kBlock, row.size);
        int64_t i = b * kBlock;
        for (; i + kLanes <= until; i += kLanes) {
            const Float8 value = load(row.x + i), place = place_of(value, in);
            const Int8 is_in = (value >= in.least) & (place >= in.first) & (place < in.end);
            if (!is_any(is_in)) continue;
            for (int j = 0; j < kLanes; ++j) {
                ids[num] = static_cast<int32_t>(i + j);
                num -= is_in[j];
            }
        }
        for (; i < until; ++i) {
            const float place = place_of(row.x[i], in);
            ids[num] = static_cast<int32_t>(i);
            num += (row.x[i] >= in.least) & (place >= in.first) & (place < in.end);
        }
    }
    return num;
}

INLINE float lowest_from(const LogitRow& row, const float* maxima, float least) {
    Float8 lowest = Float8{} + row.best;
    for (int64_t b = 0; b < row.num_blocks(); ++b) {
        if (maxima[b] < least) continue;
        const int64_t until = std::min((b + 1) * kBlock, row.size);
        int64_t i = b * kBlock;
        for (; i + kLanes <= until; i += kLanes) {
            const Float8 value = load(row.x + i);
            lowest = ((value >= least) & (value < lowest)) ? value : lowest;
        }
        for (; i < until; ++i) lowest[0] = ((row.x[i] >= least) & (row.x[i] < lowest[0])) ? row.x[i] : lowest[0];
    }
    float found = lowest[0];
    for (int j = 1; j < kLanes; ++j) found = std::min(found, lowest[j]);
    return found;
}

INLINE int64_t fill_bins(const LogitRow& row, const float* maxima, const LogitRange& range, double* weights,
                         int64_t* counts) {
    const LogitRange in = range;
    const Int8 below = Int8{} + static_cast<int32_t>(kBins);
    Int8 num_kept = {};
    for (int64_t b = 0; b < row.num_blocks(); ++b) {
        if (maxima[b] < in.least) continue;
        const int64_t count = std::min(kBlock, row.size - b * kBlock);
        float padded[kBlock];  // the last block's padding is below every range
        const float* block = row.x + b * kBlock;
        if (count < kBlock) block = std::fill_n(std::copy_n(block, count, padded), kBlock - count, -INFINITY) - kBlock;
        double one[kBlock];
        int32_t bin[kBlock];
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            const Float8 value = load(block + i), scaled = (value - row.best) * row.inverse;
            const Int8 is_in = value >= in.least, at = is_in ? to_int(place_of(value, in)) : below;
            Double4 halves[2];
            weigh(scaled, is_in, halves[0], halves[1]);
            std::memcpy(one + i, halves, sizeof halves);
            std::memcpy(bin + i, &at, sizeof at);
            num_kept -= is_in & (scaled >= row.floor);
        }
        for (int64_t i = 0; i < kBlock; ++i) {
            weights[bin[i]] += one[i];
            ++counts[bin[i]];
        }
    }
    int64_t kept = 0;
    for (int j = 0; j < kLanes; ++j) kept += num_kept[j];
    return kept;
}

#define DEFINE_PASSES(name, attributes)                                                                                \
    attributes void find_maxima_##name(const float* x, int64_t size, int64_t first, int64_t end, float* maxima) {      \
        find_maxima(x, size, first, end, maxima);                                                                      \
    }                                                                                                                  \
    attributes void sum_weights_##name(const LogitRow& row, const float* maxima, int64_t first, int64_t end,           \
                                       float floor, double* sums) {                                                    \
        sum_weights(row, maxima, first, end, floor, sums);                                                             \
    }                                                                                                                  \
    attributes int64_t select_##name(const LogitRow& row, const float* maxima, const LogitRange& range,                \
                                     int32_t* ids) {                                                                   \
        return select(row, maxima, range, ids);                                                                        \
    }                                                                                                                  \
    attributes float lowest_from_##name(const LogitRow& row, const float* maxima, float least) {                       \
        return lowest_from(row, maxima, least);                                                                        \
    }                                                                                                                  \
    attributes int64_t fill_bins_##name(const LogitRow& row, const float* maxima, const LogitRange& range,             \
                                        double* weights, int64_t* counts) {                                            \
        return fill_bins(row, maxima, range, weights, counts);                                                         \
    }                                                                                                                  \
    const SamplingPasses name##_passes = {find_maxima_##name, sum_weights_##name, select_##name,                       \
                                          lowest_from_##name, fill_bins_##name};

DEFINE_PASSES(portable, )
#if defined(__x86_64__)
DEFINE_PASSES(avx2, __attribute__((target("avx2"))))
DEFINE_PASSES(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))))
#endif

}  // namespace

const SamplingPasses& sampling_passes() {
#if defined(__x86_64__)
    const int32_t isa = octavo_kernels_isa();
    if (isa >= kAvx512) return avx512_passes;
    if (isa == kAvx2) return avx2_passes;
#endif
    return portable_passes;
}

void BestLogit::see(const float* x, int64_t size, int64_t first) {
    float maxima[kMostSeen / kBlock];
    const int64_t num_blocks = (size + kBlock - 1) / kBlock;
    sampling_passes().find_maxima(x, size, 0, num_blocks, maxima);
    int64_t found = -1;
    for (int64_t b = 0; b < num_blocks; ++b)
        if (is_below(maxima[b])) value = maxima[b], found = b;
    if (found < 0) return;
    const bool is_nan = value != value;
    int64_t i = found * kBlock;
    while (is_nan ? x[i] == x[i] : x[i] != value) ++i;
    id = first + i;
}

}  // namespace octavo
