// Loading, saving and transposing keys on x86: eight keys by eight sizes at a time.
//
// Needs AVX2 and F16C; one instruction set per including file.

#pragma once

#include <immintrin.h>

#include "attention_kernels.h"

namespace octavo {
namespace {

INLINE __m256 load8(const float* from) { return _mm256_loadu_ps(from); }

INLINE __m256 load8(const Bfloat16* from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE __m256 load8(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

// Widen the low eight bytes.
INLINE __m256 widen8(__m128i bytes, Int8) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)); }

INLINE __m256 widen8(__m128i bytes, Float8) {  // through float16, whose exponent has another bias: a product with 2^8
    const __m128i largest = _mm_set1_epi16(0x3f80), moved = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(moved, largest), largest);
    const __m128i half = _mm_or_si128(_mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xbf80))), is_nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

INLINE __m256 load8(const Int8* from) {
    return widen8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), Int8{});
}

INLINE __m256 load8(const Float8* from) {
    return widen8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), Float8{});
}

// Load four sizes of rows j and j + 4: the first step of a transposition, done by the loads.
INLINE __m256 load4_pair(const float* low, const float* high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
}

INLINE __m256 load4_pair(const Float16* low, const Float16* high) {
    return _mm256_cvtph_ps(_mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(low)),
                                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(high))));
}

// Make the panel [size][width] of the keys at eight offsets of a pool.
template <class T>
INLINE void turn8(const T* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
    const T* keys[8];
    for (int j = 0; j < 8; ++j) keys[j] = pool + at[j];
    for (int64_t d = 0; d < size; d += 4) {
        const __m256 a = load4_pair(keys[0] + d, keys[4] + d), b = load4_pair(keys[1] + d, keys[5] + d);
        const __m256 c = load4_pair(keys[2] + d, keys[6] + d), e = load4_pair(keys[3] + d, keys[7] + d);
        const __m256 ab = _mm256_unpacklo_ps(a, b), ce = _mm256_unpacklo_ps(c, e);
        const __m256 ab2 = _mm256_unpackhi_ps(a, b), ce2 = _mm256_unpackhi_ps(c, e);
        float* to = panel + d * width;
        _mm256_storeu_ps(to, _mm256_shuffle_ps(ab, ce, 0x44));
        _mm256_storeu_ps(to + width, _mm256_shuffle_ps(ab, ce, 0xee));
        _mm256_storeu_ps(to + 2 * width, _mm256_shuffle_ps(ab2, ce2, 0x44));
        _mm256_storeu_ps(to + 3 * width, _mm256_shuffle_ps(ab2, ce2, 0xee));
    }
}

// 16-bit values are transposed before widening; the last step widens them, with zeros as the low halves.
INLINE void turn8(const Bfloat16* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
    const Bfloat16* keys[8];
    for (int j = 0; j < 8; ++j) keys[j] = pool + at[j];
    const auto pair = [&keys](int j, int64_t d) {  // eight sizes of keys j and j + 4
        return _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(keys[j] + d))),
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys[j + 4] + d)), 1);
    };
    const __m256i zero = _mm256_setzero_si256();
    for (int64_t d = 0; d < size; d += 8) {
        const __m256i a = pair(0, d), b = pair(1, d), c = pair(2, d), e = pair(3, d);
        const __m256i ab = _mm256_unpacklo_epi16(a, b), ce = _mm256_unpacklo_epi16(c, e);
        const __m256i ab2 = _mm256_unpackhi_epi16(a, b), ce2 = _mm256_unpackhi_epi16(c, e);
        const __m256i twos[4] = {_mm256_unpacklo_epi32(ab, ce), _mm256_unpackhi_epi32(ab, ce),
                                 _mm256_unpacklo_epi32(ab2, ce2), _mm256_unpackhi_epi32(ab2, ce2)};
        float* to = panel + d * width;
        for (int i = 0; i < 4; ++i, to += 2 * width) {
            _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, twos[i])));
            _mm256_storeu_ps(to + width, _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, twos[i])));
        }
    }
}

// Bytes are transposed before widening.
template <class T>
INLINE void turn8_bytes(const T* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
    const T* keys[8];
    for (int j = 0; j < 8; ++j) keys[j] = pool + at[j];
    const auto pair = [&keys](int j, int64_t d) {  // eight sizes of keys j and j + 1, alternating
        return _mm_unpacklo_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(keys[j] + d)),
                                 _mm_loadl_epi64(reinterpret_cast<const __m128i*>(keys[j + 1] + d)));
    };
    for (int64_t d = 0; d < size; d += 8) {
        const __m128i a = pair(0, d), b = pair(2, d), c = pair(4, d), e = pair(6, d);
        const __m128i ab = _mm_unpacklo_epi16(a, b), ab2 = _mm_unpackhi_epi16(a, b);
        const __m128i ce = _mm_unpacklo_epi16(c, e), ce2 = _mm_unpackhi_epi16(c, e);
        const __m128i twos[4] = {_mm_unpacklo_epi32(ab, ce), _mm_unpackhi_epi32(ab, ce),
                                 _mm_unpacklo_epi32(ab2, ce2), _mm_unpackhi_epi32(ab2, ce2)};
        float* to = panel + d * width;
        for (int i = 0; i < 4; ++i, to += 2 * width) {
            _mm256_storeu_ps(to, widen8(twos[i], T{}));
            _mm256_storeu_ps(to + width, widen8(_mm_srli_si128(twos[i], 8), T{}));
        }
    }
}

INLINE void turn8(const Int8* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
    turn8_bytes(pool, at, size, panel, width);
}

INLINE void turn8(const Float8* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
    turn8_bytes(pool, at, size, panel, width);
}

INLINE void save8(__m256 x, float* to) { _mm256_storeu_ps(to, x); }

INLINE void save8(__m256 x, Bfloat16* to) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
}

INLINE void save8(__m256 x, Float16* to) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

INLINE void save8(__m256 x, Float8* to) {
    alignas(32) float values[8];
    _mm256_store_ps(values, x);
    for (int i = 0; i < 8; ++i) narrow(values[i], to[i]);
}

INLINE float total8(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE float greatest8(__m256 x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace
}  // namespace octavo
