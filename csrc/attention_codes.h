// The kinds of numbers in a KV pool besides float32 and bfloat16, and the layout of a position's row.
//
// Owns: float16, float8 (e4m3, without infinities), int8 with scales; rounding to them and back, one number at a time.
// Invariants: a position's row is [KV head, size]. Int8 rows have a scale of each KV head after these, as bfloat16, so
// that the row is one run of memory: a number is code * scale. A head that is not finite has the scale NaN.
// Rounding gives the same bits with every instruction set, and as in torch (ops/kv_codes.py).
//
// Source of float8: Micikevicius et al., "FP8 formats for deep learning", 2022.

#pragma once

#include "kernel.h"

struct Float16 {
    uint16_t bits;
};

struct Float8 {
    uint8_t bits;
};

struct Int8 {
    int8_t code;
};

namespace octavo {

template <class T>
constexpr bool kIsScaled = false;
template <>
constexpr bool kIsScaled<Int8> = true;
constexpr int64_t kScaleBytes = 2;

// Numbers of type T from one position to the next.
template <class T>
constexpr int64_t row_width(int64_t num_heads, int64_t size) {
    return num_heads * (size + (kIsScaled<T> ? kScaleBytes : 0));
}

// The scale of a head of the row at `row`.
INLINE float scale_of(const Int8* row, int64_t num_heads, int64_t size, int64_t head) {
    Bfloat16 scale;
    std::memcpy(&scale, row + num_heads * size + head * kScaleBytes, sizeof scale);
    return widen(scale);
}

}  // namespace octavo

INLINE float widen(Float16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    // the exponent is rebiased by a product, which also makes the subnormals normal
    uint32_t bits = rest << 13;
    float wide, factor = 5.192296858534828e33f;  // 2^112
    std::memcpy(&wide, &bits, sizeof wide);
    wide *= factor;
    std::memcpy(&bits, &wide, sizeof bits);
    if (rest >= 0x7c00u) bits = 0x7f800000u | (rest & 0x3ffu) << 13;
    bits |= sign;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

INLINE float widen(Float8 value) {
    const uint32_t rest = value.bits & 0x7fu;
    uint32_t bits = static_cast<uint32_t>(value.bits & 0x80u) << 24 | rest << 20;
    float wide, factor = 1.329227995784916e36f;  // 2^120
    std::memcpy(&wide, &bits, sizeof wide);
    wide *= factor;
    std::memcpy(&bits, &wide, sizeof bits);
    if (rest == 0x7fu) bits |= 0x7fc00000u;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

INLINE float widen(Int8 value) { return value.code; }  // without its scale

// Round to nearest, ties to even. A value that is too large becomes infinity; a NaN stays NaN.
INLINE void narrow(float value, Float16& out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u;
    } else if (rest >= 0x477ff000u) {
        half = 0x7c00u;
    } else if (rest >= 0x38800000u) {
        half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    } else {  // subnormal: the sum with 0.5 has its last bit at 2^-24, and rounds there
        float small;
        std::memcpy(&small, &rest, sizeof small);
        small += 0.5f;
        std::memcpy(&half, &small, sizeof half);
        half -= 0x3f000000u;
    }
    out.bits = static_cast<uint16_t>(sign | half);
}

// Round to nearest, ties to even. A finite value that is too large becomes the largest, 448; others become NaN.
INLINE void narrow(float value, Float8& out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = (bits >> 24) & 0x80u, rest = bits & 0x7fffffffu;
    const uint32_t bounded = rest < 0x43e00000u ? rest : 0x43e00000u;  // 448
    float small;  // for a subnormal the sum with 2^14 has its last bit at 2^-9, and rounds there
    std::memcpy(&small, &bounded, sizeof small);
    small += 16384.0f;
    uint32_t low;
    std::memcpy(&low, &small, sizeof low);
    const uint32_t normal = (bounded - 0x3c000000u + 0x7ffffu + ((bounded >> 20) & 1u)) >> 20;
    const uint32_t code = bounded >= 0x3c800000u ? normal : low - 0x46800000u;
    out.bits = static_cast<uint8_t>(sign | (rest >= 0x7f800000u ? 0x7fu : code));
}

// Round a head to codes and a scale: the largest number's share of 127, rounded up to bfloat16, so that no code is above
// 127. A largest number below 127 * 2^-126 becomes 0.
INLINE void narrow_head(const float* from, int64_t size, Int8* codes, Int8* scale) {
    uint32_t most = 0;  // of integers, since magnitudes order as their bits do, NaN last
    for (int64_t d = 0; d < size; ++d) {
        uint32_t bits;
        std::memcpy(&bits, from + d, sizeof bits);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    float largest, step, inverse = 0.0f;
    std::memcpy(&largest, &most, sizeof largest);
    step = largest / 127.0f;
    uint32_t bits;
    std::memcpy(&bits, &step, sizeof bits);
    bits = (bits + 0xffffu) & 0xffff0000u;
    if (bits < 0x00800000u) bits = 0;
    if (most >= 0x7f800000u) bits = 0x7fc00000u;
    std::memcpy(&step, &bits, sizeof step);
    if (step > 0.0f) inverse = 1.0f / step;
    for (int64_t d = 0; d < size; ++d) {
        const float shifted = (inverse > 0.0f ? from[d] : 0.0f) * inverse + 12582912.0f;  // 1.5 * 2^23: the sum rounds
        int32_t code;
        std::memcpy(&code, &shifted, sizeof code);
        codes[d].code = static_cast<int8_t>(code);
    }
    const uint16_t high = static_cast<uint16_t>(bits >> 16);
    std::memcpy(scale, &high, sizeof high);
}
