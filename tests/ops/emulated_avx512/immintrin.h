// The AVX-512 intrinsics that csrc/linear_avx512*.cpp, csrc/linear_amx*.cpp and csrc/attention_avx512*.cpp use, as plain
// functions: for machines without the instructions. Found before the compiler's own header, which it includes. Those of
// AMX are in tiles.h.
// Source: Intel's intrinsics guide.

#pragma once

#include_next <immintrin.h>

#include "emulated.h"

struct EmulatedFloats {
    float at[16];
};
struct EmulatedInts {
    int32_t at[16];
};
struct EmulatedBytes {
    uint8_t at[64];
};
struct EmulatedHalves {
    uint16_t at[32];
};

EMULATED __m512 emulated_loadu_ps(const void* from) {
    __m512 out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
EMULATED void emulated_storeu(void* to, const __m512& value) { std::memcpy(to, &value, sizeof value); }
EMULATED void emulated_storeu(void* to, const __m512i& value) { std::memcpy(to, &value, sizeof value); }
EMULATED __m512i emulated_loadu_si512(const void* from) { return emulated_bits<__m512i>(emulated_loadu_ps(from)); }

EMULATED __m512 emulated_set1_ps(float value) {
    EmulatedFloats out;
    for (float& lane : out.at) lane = value;
    return emulated_bits<__m512>(out);
}
EMULATED __m512i emulated_set1_epi32(int32_t value) {
    EmulatedInts out;
    for (int32_t& lane : out.at) lane = value;
    return emulated_bits<__m512i>(out);
}

EMULATED __m512 emulated_mul_ps(const __m512& a, const __m512& b) {
    EmulatedFloats x = emulated_bits<EmulatedFloats>(a);
    const EmulatedFloats y = emulated_bits<EmulatedFloats>(b);
    for (int i = 0; i < 16; ++i) x.at[i] *= y.at[i];
    return emulated_bits<__m512>(x);
}
EMULATED __m512 emulated_fmadd_ps(const __m512& a, const __m512& b, const __m512& c) {
    EmulatedFloats x = emulated_bits<EmulatedFloats>(a);
    const EmulatedFloats y = emulated_bits<EmulatedFloats>(b), z = emulated_bits<EmulatedFloats>(c);
    for (int i = 0; i < 16; ++i) x.at[i] = __builtin_fmaf(x.at[i], y.at[i], z.at[i]);
    return emulated_bits<__m512>(x);
}
EMULATED __m512 emulated_cvtepi32_ps(const __m512i& a) {
    const EmulatedInts x = emulated_bits<EmulatedInts>(a);
    EmulatedFloats out;
    for (int i = 0; i < 16; ++i) out.at[i] = static_cast<float>(x.at[i]);
    return emulated_bits<__m512>(out);
}
EMULATED __m512i emulated_and(const __m512i& a, const __m512i& b) {
    EmulatedInts x = emulated_bits<EmulatedInts>(a);
    const EmulatedInts y = emulated_bits<EmulatedInts>(b);
    for (int i = 0; i < 16; ++i) x.at[i] &= y.at[i];
    return emulated_bits<__m512i>(x);
}
EMULATED __m512i emulated_slli_epi32(const __m512i& a, unsigned count) {
    EmulatedInts x = emulated_bits<EmulatedInts>(a);
    for (int32_t& lane : x.at) lane = static_cast<int32_t>(static_cast<uint32_t>(lane) << count);
    return emulated_bits<__m512i>(x);
}
EMULATED __m512i emulated_srli_epi16(const __m512i& a, unsigned count) {
    EmulatedHalves x = emulated_bits<EmulatedHalves>(a);
    for (uint16_t& lane : x.at) lane = static_cast<uint16_t>(lane >> count);
    return emulated_bits<__m512i>(x);
}

EMULATED __m512i emulated_broadcast_i32x4(__m128i a) {
    __m128i four[4] = {a, a, a, a};
    return emulated_loadu_si512(four);
}

// Within each 16 bytes; indices are below 16.
EMULATED __m512i emulated_shuffle_epi8(const __m512i& a, const __m512i& indices) {
    const EmulatedBytes x = emulated_bits<EmulatedBytes>(a);
    EmulatedBytes y = emulated_bits<EmulatedBytes>(indices);
    for (int i = 0; i < 64; ++i) y.at[i] = x.at[i / 16 * 16 + y.at[i]];
    return emulated_bits<__m512i>(y);
}

// Unsigned bytes of a times signed bytes of b, four to a sum.
EMULATED __m512i emulated_dpbusd_epi32(const __m512i& sum, const __m512i& a, const __m512i& b) {
    EmulatedInts out = emulated_bits<EmulatedInts>(sum);
    const EmulatedBytes x = emulated_bits<EmulatedBytes>(a), y = emulated_bits<EmulatedBytes>(b);
    for (int i = 0; i < 64; ++i) out.at[i / 4] += static_cast<int32_t>(x.at[i]) * static_cast<int8_t>(y.at[i]);
    return emulated_bits<__m512i>(out);
}

// sum + (a1 * b1) + (a0 * b0), each operation rounded; the instruction also takes subnormal numbers as zeros.
EMULATED __m512 emulated_dpbf16_ps(const __m512& sum, const __m512i& a, const __m512i& b) {
    EmulatedFloats out = emulated_bits<EmulatedFloats>(sum);
    const EmulatedHalves x = emulated_bits<EmulatedHalves>(a), y = emulated_bits<EmulatedHalves>(b);
    const auto wide = [](uint16_t half) { return emulated_bits<float>(static_cast<uint32_t>(half) << 16); };
    for (int i = 0; i < 16; ++i)
        for (int j = 1; j >= 0; --j)
            out.at[i] = __builtin_fmaf(wide(x.at[2 * i + j]), wide(y.at[2 * i + j]), out.at[i]);
    return emulated_bits<__m512>(out);
}

// float16 to float32: the exponent is moved by a multiplication, which is exact.
EMULATED __m512 emulated_cvtph_ps(const __m256i& a) {
    uint16_t halves[16];
    std::memcpy(halves, &a, sizeof halves);
    EmulatedFloats out;
    for (int i = 0; i < 16; ++i) {
        const uint32_t magnitude = static_cast<uint32_t>(halves[i] & 0x7fffu) << 13;
        float value = emulated_bits<float>(magnitude) * 0x1p112f;
        if (value >= 65536.0f) value = emulated_bits<float>(magnitude | 0x7f800000u);
        out.at[i] = (halves[i] & 0x8000u) != 0 ? -value : value;
    }
    return emulated_bits<__m512>(out);
}

// What attention uses besides.

// f(a, b) of each lane.
template <typename Lanes, typename Vector, typename Function>
EMULATED Vector emulated_pairs(const Vector& a, const Vector& b, const Function& f) {
    Lanes x = emulated_bits<Lanes>(a);
    const Lanes y = emulated_bits<Lanes>(b);
    for (int i = 0; i < 16; ++i) x.at[i] = f(x.at[i], y.at[i]);
    return emulated_bits<Vector>(x);
}

EMULATED __m512 emulated_add_ps(const __m512& a, const __m512& b) {
    return emulated_pairs<EmulatedFloats>(a, b, [](float x, float y) { return x + y; });
}
EMULATED __m512 emulated_sub_ps(const __m512& a, const __m512& b) {
    return emulated_pairs<EmulatedFloats>(a, b, [](float x, float y) { return x - y; });
}
EMULATED __m512 emulated_div_ps(const __m512& a, const __m512& b) {
    return emulated_pairs<EmulatedFloats>(a, b, [](float x, float y) { return x / y; });
}
// The second operand where either is a NaN, and where both are zeros.
EMULATED __m512 emulated_max_ps(const __m512& a, const __m512& b) {
    return emulated_pairs<EmulatedFloats>(a, b, [](float x, float y) { return x > y ? x : y; });
}
EMULATED __m512 emulated_and_ps(const __m512& a, const __m512& b) {
    return emulated_pairs<EmulatedInts>(a, b, [](int32_t x, int32_t y) { return x & y; });
}
EMULATED __m512 emulated_or_ps(const __m512& a, const __m512& b) {
    return emulated_pairs<EmulatedInts>(a, b, [](int32_t x, int32_t y) { return x | y; });
}
EMULATED __m512i emulated_add_epi32(const __m512i& a, const __m512i& b) {
    return emulated_pairs<EmulatedInts>(a, b, [](int32_t x, int32_t y) {
        return static_cast<int32_t>(static_cast<uint32_t>(x) + static_cast<uint32_t>(y));
    });
}

// Only the predicate that is used; false where either is a NaN.
EMULATED __mmask16 emulated_cmp_ps_mask(const __m512& a, const __m512& b, int predicate) {
    if (predicate != _CMP_LT_OQ) __builtin_trap();
    const EmulatedFloats x = emulated_bits<EmulatedFloats>(a), y = emulated_bits<EmulatedFloats>(b);
    unsigned mask = 0;
    for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(x.at[i] < y.at[i]) << i;
    return static_cast<__mmask16>(mask);
}
// Lanes of `a` where the mask is set, of `otherwise` elsewhere.
EMULATED __m512 emulated_mask_mov_ps(const __m512& otherwise, __mmask16 mask, const __m512& a) {
    EmulatedInts out = emulated_bits<EmulatedInts>(otherwise);
    const EmulatedInts x = emulated_bits<EmulatedInts>(a);
    for (int i = 0; i < 16; ++i)
        if ((mask >> i & 1) != 0) out.at[i] = x.at[i];
    return emulated_bits<__m512>(out);
}

EMULATED __m512i emulated_cvtepi8_epi32(const __m128i& a) {
    int8_t bytes[16];
    std::memcpy(bytes, &a, sizeof bytes);
    EmulatedInts out;
    for (int i = 0; i < 16; ++i) out.at[i] = bytes[i];
    return emulated_bits<__m512i>(out);
}
EMULATED __m512i emulated_cvtepu16_epi32(const __m256i& a) {
    uint16_t halves[16];
    std::memcpy(halves, &a, sizeof halves);
    EmulatedInts out;
    for (int i = 0; i < 16; ++i) out.at[i] = halves[i];
    return emulated_bits<__m512i>(out);
}

EMULATED __m128 emulated_castps512_ps128(const __m512& a) {
    __m128 out;
    std::memcpy(&out, &a, sizeof out);
    return out;
}
// The lower half, or the upper one.
EMULATED_INLINE __m256 emulated_extractf32x8_ps(const __m512& a, int half) {
    const EmulatedFloats x = emulated_bits<EmulatedFloats>(a);
    __m256 out;
    std::memcpy(&out, x.at + (half & 1) * 8, sizeof out);
    return out;
}

// Of each quarter, lanes of `a` and `b` in turn: the first two of each, or the last two; then the same of 64 bits.
EMULATED __m512i emulated_unpack_epi32(const __m512i& a, const __m512i& b, int half) {
    const EmulatedInts x = emulated_bits<EmulatedInts>(a), y = emulated_bits<EmulatedInts>(b);
    EmulatedInts out;
    for (int i = 0; i < 16; ++i) out.at[i] = (i % 2 == 0 ? x : y).at[i / 4 * 4 + 2 * half + i % 4 / 2];
    return emulated_bits<__m512i>(out);
}
EMULATED __m512i emulated_unpack_epi64(const __m512i& a, const __m512i& b, int half) {
    const EmulatedInts x = emulated_bits<EmulatedInts>(a), y = emulated_bits<EmulatedInts>(b);
    EmulatedInts out;
    for (int i = 0; i < 16; ++i) out.at[i] = (i % 4 < 2 ? x : y).at[i / 4 * 4 + 2 * half + i % 2];
    return emulated_bits<__m512i>(out);
}
// Two quarters of `a`, then two of `b`.
EMULATED __m512i emulated_shuffle_i32x4(const __m512i& a, const __m512i& b, int which) {
    const EmulatedInts x = emulated_bits<EmulatedInts>(a), y = emulated_bits<EmulatedInts>(b);
    EmulatedInts out;
    for (int i = 0; i < 16; ++i) out.at[i] = (i < 8 ? x : y).at[(which >> i / 4 * 2 & 3) * 4 + i % 4];
    return emulated_bits<__m512i>(out);
}
EMULATED __m512i emulated_maskz_loadu_epi32(__mmask16 mask, const void* from) {
    EmulatedInts out = {};
    for (int i = 0; i < 16; ++i)
        if ((mask >> i & 1) != 0) std::memcpy(&out.at[i], static_cast<const char*>(from) + 4 * i, 4);
    return emulated_bits<__m512i>(out);
}
EMULATED __m512i emulated_or(const __m512i& a, const __m512i& b) {
    return emulated_pairs<EmulatedInts>(a, b, [](int32_t x, int32_t y) { return x | y; });
}
// Rounded to the nearest even bfloat16; the instruction also takes subnormal numbers as zeros.
EMULATED_INLINE __m256i emulated_cvtneps_pbh(const __m512& a) {
    const EmulatedInts x = emulated_bits<EmulatedInts>(a);
    uint16_t halves[16];
    for (int i = 0; i < 16; ++i) {
        const uint32_t bits = static_cast<uint32_t>(x.at[i]), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
        halves[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
    }
    __m256i out;
    std::memcpy(&out, halves, sizeof out);
    return out;
}

#define __m512bh __m512i
#define _mm512_unpacklo_epi32(a, b) emulated_unpack_epi32(a, b, 0)
#define _mm512_unpackhi_epi32(a, b) emulated_unpack_epi32(a, b, 1)
#define _mm512_unpacklo_epi64(a, b) emulated_unpack_epi64(a, b, 0)
#define _mm512_unpackhi_epi64(a, b) emulated_unpack_epi64(a, b, 1)
#define _mm512_shuffle_i32x4 emulated_shuffle_i32x4
#define _mm512_maskz_loadu_epi32 emulated_maskz_loadu_epi32
#define _mm512_or_si512 emulated_or
#define _mm512_cvtneps_pbh emulated_cvtneps_pbh
#define _mm512_loadu_ps emulated_loadu_ps
#define _mm512_storeu_ps emulated_storeu
#define _mm512_storeu_si512 emulated_storeu
#define _mm512_loadu_si512 emulated_loadu_si512
#define _mm512_set1_ps emulated_set1_ps
#define _mm512_set1_epi32 emulated_set1_epi32
#define _mm512_setzero_ps() emulated_set1_ps(0.0f)
#define _mm512_setzero_si512() emulated_set1_epi32(0)
#define _mm512_mul_ps emulated_mul_ps
#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_and_si512 emulated_and
#define _mm512_slli_epi32 emulated_slli_epi32
#define _mm512_srli_epi16 emulated_srli_epi16
#define _mm512_broadcast_i32x4 emulated_broadcast_i32x4
#define _mm512_shuffle_epi8 emulated_shuffle_epi8
#define _mm512_dpbusd_epi32 emulated_dpbusd_epi32
#define _mm512_dpbf16_ps emulated_dpbf16_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_castsi512_ps emulated_bits<__m512, __m512i>
#define _mm512_castps_si512 emulated_bits<__m512i, __m512>
#define _mm512_castps512_ps128 emulated_castps512_ps128
#define _mm512_castps512_ps256(a) emulated_extractf32x8_ps(a, 0)
#define _mm512_add_ps emulated_add_ps
#define _mm512_sub_ps emulated_sub_ps
#define _mm512_div_ps emulated_div_ps
#define _mm512_max_ps emulated_max_ps
#define _mm512_and_ps emulated_and_ps
#define _mm512_or_ps emulated_or_ps
#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_mask_mov_ps emulated_mask_mov_ps
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#undef _mm512_cmp_ps_mask  // macros of the compiler's header where it does not optimise
#undef _mm512_extractf32x8_ps
#define _mm512_cmp_ps_mask emulated_cmp_ps_mask
#define _mm512_extractf32x8_ps emulated_extractf32x8_ps
// The header's own _mm256_loadu_si256 needs AVX.
#if !defined(__AVX__)
EMULATED_INLINE __m256i emulated_loadu_si256(const void* from) {
    __m256i out;
    std::memcpy(&out, from, sizeof out);
    return out;
}
#define _mm256_loadu_si256 emulated_loadu_si256
#endif

#include "tiles.h"
