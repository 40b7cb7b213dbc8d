// Sixteen lanes of float32 with AVX-512, for attention. One instruction set per including file.

#pragma once

#include "attention_x86.h"

namespace octavo {
namespace {

INLINE __m512 load16(const float* from) { return _mm512_loadu_ps(from); }

INLINE __m512 load16(const Bfloat16* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __m512 load16(const Float16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

INLINE __m512 load16(const Int8* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

INLINE __m512 load16(const Float8* from) {  // as widen8
    const __m256i bytes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i largest = _mm256_set1_epi16(0x3f80), moved = _mm256_slli_epi16(bytes, 7);
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(moved, largest), largest);
    const __m256i half =
        _mm256_or_si256(_mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))), is_nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

struct Avx512Lanes {
    static constexpr int kLanes = 16, kRows = 12, kBlock = 8, kPacked = 1;  // 12 x 2 or 6 x 4 sums
    typedef __m512 Reg;

    static INLINE_MEMBER Reg set1(float x) { return _mm512_set1_ps(x); }
    template <class T>
    static INLINE_MEMBER Reg load(const T* from) {
        return load16(from);
    }
    template <class T>
    static INLINE_MEMBER float one(const T* from) {
        return widen(*from);
    }
    static INLINE_MEMBER void store(Reg x, float* to) { _mm512_storeu_ps(to, x); }
    static INLINE_MEMBER float first(Reg x) { return _mm_cvtss_f32(_mm512_castps512_ps128(x)); }
    static INLINE_MEMBER Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
    static INLINE_MEMBER Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static INLINE_MEMBER Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
    static INLINE_MEMBER Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
    static INLINE_MEMBER Reg max(Reg a, Reg b) { return _mm512_max_ps(a, b); }
    static INLINE_MEMBER Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
    static INLINE_MEMBER Reg where_less(Reg x, Reg bound, Reg yes, Reg no) {
        return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), yes);
    }
    static INLINE_MEMBER Reg zero_where_less(Reg y, Reg x, Reg bound) {
        return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), _mm512_setzero_ps());
    }
    static INLINE_MEMBER Reg with_sign_of(Reg size, Reg x) {
        return _mm512_or_ps(size, _mm512_and_ps(x, _mm512_set1_ps(-0.0f)));
    }
    static INLINE_MEMBER Reg times_power(Reg y, Reg shifted) {
        return _mm512_castsi512_ps(
            _mm512_add_epi32(_mm512_castps_si512(y), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
    }
    static INLINE_MEMBER float total(Reg x) {
        return total8(_mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    }
    static INLINE_MEMBER float greatest(Reg x) {
        return greatest8(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)));
    }
    template <class T>
    static INLINE_MEMBER void turn(const T* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
        turn8(pool, at, size, panel, width);
    }
    template <class T>
    static INLINE_MEMBER void save(const float* from, int64_t count, T* to) {
        for (int64_t i = 0; i < count; i += 8) save8(load8(from + i), to + i);
    }
};

}  // namespace
}  // namespace octavo
