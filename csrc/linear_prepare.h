// Quantising rows of activations: one source, compiled into each instruction set's file.
//
// Invariants: equal codes, scales and sums on every machine: one multiplication by 127 / max, rounded to nearest even.

#pragma once

#include <cstring>

#include "linear_kernels.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

namespace {

constexpr float kSmallestScaled = 1e-30f;   // below, 127 / max could overflow: such a group counts as zeros
constexpr float kRoundingMagic = 12582912;  // 1.5 * 2^23: adding it rounds to an integer, ties to even
constexpr float kNotANumber = __builtin_nanf("");

// Codes of 32 activations as int32, and their scale. An activation that is not finite makes the scale NaN, the codes 0.
INLINE float quantise_group(const float* x, int32_t* codes) {
    int32_t largest_bits = 0;  // of absolute values: ordered as integers, infinities and NaNs last
    for (int i = 0; i < octavo::kGroup; ++i) {
        int32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffff;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    const bool is_finite = largest_bits < 0x7f800000;
    const bool is_scaled = is_finite && largest >= kSmallestScaled;
    if (!is_scaled) {
        for (int i = 0; i < octavo::kGroup; ++i) codes[i] = 0;
        return is_finite ? 0.0f : kNotANumber;
    }
    const float factor = 127.0f / largest;
    for (int i = 0; i < octavo::kGroup; ++i) {
        const float rounded = (x[i] * factor + kRoundingMagic) - kRoundingMagic;
        codes[i] = static_cast<int32_t>(rounded);
    }
    return largest / 127.0f;
}

// Write each group: GroupHead, then 32 codes. `kIsSwapped` orders quads as 0 2 1 3, for 16-bit multiplications.
template <typename Code, bool kIsInt4, bool kIsSwapped>
INLINE void prepare_codes(const float* x, int64_t inputs, void* out) {
    uint8_t* to = static_cast<uint8_t*>(out);
    for (int64_t begin = 0; begin < inputs; begin += octavo::kGroup) {
        int32_t codes[octavo::kGroup];
        octavo::GroupHead head;
        head.scale = quantise_group(x + begin, codes);
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < 16; ++i) sums[0] += codes[i];
        for (int i = 0; i < 16; ++i) sums[1] += codes[16 + i];
        if (kIsInt4)
            head.scaled_sum = head.scale * static_cast<float>(sums[0] + sums[1]);
        else
            head.offset = -128 * (sums[0] + sums[1]);
        head.half_offset[0] = -128 * sums[0], head.half_offset[1] = -128 * sums[1];
        std::memcpy(to, &head, sizeof head);
        to += sizeof head;
        Code narrow_codes[octavo::kGroup];
        for (int i = 0; i < octavo::kGroup; ++i) {
            const int from = !kIsSwapped ? i : (i & ~3) | (i & 1) << 1 | (i & 2) >> 1;
            narrow_codes[i] = static_cast<Code>(codes[from]);
        }
        std::memcpy(to, narrow_codes, sizeof narrow_codes);
        to += sizeof narrow_codes;
    }
}

template <typename Code>
constexpr int64_t group_bytes() {
    return static_cast<int64_t>(sizeof(octavo::GroupHead)) + octavo::kGroup * static_cast<int64_t>(sizeof(Code));
}

template <typename Code>
int64_t codes_bytes(int64_t inputs) {
    return octavo::padded_row(inputs / octavo::kGroup * group_bytes<Code>());
}

INLINE int64_t floats_bytes(int64_t inputs) { return octavo::padded_row((inputs + 1) / 2 * 8); }

// Copy float32 unchanged, padded to an even number with a zero.
INLINE void prepare_floats(const float* x, int64_t inputs, void* out) {
    std::memcpy(out, x, static_cast<size_t>(inputs) * sizeof *x);
    if (inputs % 2 != 0) static_cast<float*>(out)[inputs] = 0.0f;
}

typedef float PanelLanes __attribute__((vector_size(octavo::kPanel * sizeof(float))));

INLINE PanelLanes load_lanes(const float* from) {
    PanelLanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

// Store the sums [row][16] of rows [first, end) of one panel, after adding the bias, or add both to what is there. The
// order is the same everywhere.
INLINE void finish_rows(const octavo::Weight& weight, const octavo::LinearJob& job, int64_t panel, int64_t first,
                        int64_t end, const float* sums) {
    const int64_t column = panel * octavo::kPanel;
    const float* bias = weight.bias == nullptr ? nullptr : weight.bias + column;
    float* out = job.out + first * job.out_stride + column;
    if (weight.outputs - column < octavo::kPanel) {
        for (int64_t row = first; row < end; ++row, out += job.out_stride, sums += octavo::kPanel)
            for (int64_t i = 0; i < weight.outputs - column; ++i) {
                const float sum = bias == nullptr ? sums[i] : sums[i] + bias[i];
                out[i] = job.accumulate ? out[i] + sum : sum;
            }
        return;
    }
    for (int64_t row = first; row < end; ++row, out += job.out_stride, sums += octavo::kPanel) {
        PanelLanes sum = load_lanes(sums);
        if (bias != nullptr) sum += load_lanes(bias);
        if (job.accumulate) sum = load_lanes(out) + sum;
        std::memcpy(out, &sum, sizeof sum);
    }
}

}  // namespace
