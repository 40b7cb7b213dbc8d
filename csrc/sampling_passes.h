// Passes over a row of logits, for the instruction set in use, and the definition of a weight.
//
// Owns: the loops over a whole vocabulary. Does not: choose ids (sampling.cpp does) or split work among threads.
// Definition, equal bit for bit to that of the torch twin in sampling/selection.py: scaled = (logit - best) * (1 /
// temperature) in float32; weight = e^scaled in float32, rounded to a multiple of 2^-34 in double. A weight is at most
// 1 and a vocabulary has at most 2^19 ids, so every sum of weights is exact in any order: threads, vectors, blocks and
// bins cannot change an id.

#pragma once

#include <cstdint>

#include "kernel.h"

namespace octavo {

constexpr int64_t kBlock = 256;
constexpr int64_t kLanes = 8;
constexpr int64_t kBins = 2048;
constexpr float kLeast = -25.0f;  // e^-25 < 2^-35: the weight is 0 below it

struct LogitRow {
    const float* x;
    int64_t size;
    float best, inverse, floor;
    double top_p, uniform;
    int64_t top_k;  // 0 = all

    float scaled(int64_t i) const { return (x[i] - best) * inverse; }
    int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
};

// The logits to look for: at least `least`, and in one of the bins [first, end) below `best`.
struct LogitRange {
    float least, best, bins_per_unit, first, end;
};

#pragma GCC diagnostic ignored "-Wpsabi"  // no vector crosses a function that is not inlined

using Float8 = float __attribute__((vector_size(32)));  // the compilers' own vectors: any instruction set has them
using Int8 = int32_t __attribute__((vector_size(32)));

INLINE int32_t to_int(float value) { return static_cast<int32_t>(value); }

INLINE Int8 to_int(const Float8& value) { return __builtin_convertvector(value, Int8); }

// e^x of x <= 0 within 2 ulp: Cephes' reduction and polynomial (Moshier, 1989). An x below -30 counts as -30.
// Works on one float or on a vector of floats, with the same operations on each.
template <typename Float>
INLINE Float exponential(const Float& x) {
    const Float clamped = x < -30.0f ? Float{} - 30.0f : x;
    const Float whole = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // to nearest, ties to even
    const Float r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Float y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const auto bits = (to_int(whole) + 127) << 23;
    Float power;
    std::memcpy(&power, &bits, sizeof power);
    return y * power;
}

constexpr double kRound = 393216.0;  // 1.5 * 2^18: its last place is 2^-34

INLINE double weight(float scaled) { return (static_cast<double>(exponential(scaled)) + kRound) - kRound; }

struct SamplingPasses {
    // Find the largest logit of each block in [first, end); NaN if the block has a NaN.
    void (*find_maxima)(const float* x, int64_t size, int64_t first, int64_t end, float* maxima);
    // Sum the weights of each block in [first, end). Weights of scaled logits below `floor` count as 0.
    void (*sum_weights)(const LogitRow&, const float* maxima, int64_t first, int64_t end, float floor, double* sums);
    // Write the ids of the logits in a range, ascending; return their number. `ids` has room for all, and kLanes more.
    int64_t (*select)(const LogitRow&, const float* maxima, const LogitRange&, int32_t* ids);
    // Return the lowest logit that is at least `least`.
    float (*lowest_from)(const LogitRow&, const float* maxima, float least);
    // Add counts and weights of the logits from `range.least` on to their bins; lower logits go to bin kBins.
    // Return how many of these logits min-p keeps.
    int64_t (*fill_bins)(const LogitRow&, const float* maxima, const LogitRange&, double* weights, int64_t* counts);
};

const SamplingPasses& sampling_passes();

// The best logit of the ids seen so far, and the first id that has it. A NaN is better than any number.
struct BestLogit {
    float value;
    int64_t id;

    bool is_below(float other) const { return other > value || (other != other && value == value); }

    // See the logits of `size` ids from `first` on, all of them higher than those seen before; size <= kMostSeen.
    void see(const float* x, int64_t size, int64_t first);

    // See what another run of ids gave.
    void see(const BestLogit& other) {
        const bool is_equal = other.value == value || (other.value != other.value && value != value);
        if (is_below(other.value) || (is_equal && other.id < id)) *this = other;
    }
};

constexpr int64_t kMostSeen = 32768;

}  // namespace octavo
