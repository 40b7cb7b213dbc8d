// Attention with AVX2, FMA and F16C: eight lanes, sixteen registers.

#if defined(__x86_64__)

#include <cmath>
#include <limits>

#include "attention_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "attention_x86.h"
#include "attention_tile.h"

namespace octavo {
namespace {

struct Avx2Lanes {
    static constexpr int kPacked = 1;
    static constexpr int kLanes = 8, kRows = 6, kBlock = 8;  // 6 x 2 or 3 x 4 sums, a row of keys, one weight
    typedef __m256 Reg;

    static INLINE_MEMBER Reg set1(float x) { return _mm256_set1_ps(x); }
    template <class T>
    static INLINE_MEMBER Reg load(const T* from) {
        return load8(from);
    }
    template <class T>
    static INLINE_MEMBER float one(const T* from) {
        return widen(*from);
    }
    static INLINE_MEMBER void store(Reg x, float* to) { _mm256_storeu_ps(to, x); }
    static INLINE_MEMBER float first(Reg x) { return _mm256_cvtss_f32(x); }
    static INLINE_MEMBER Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static INLINE_MEMBER Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static INLINE_MEMBER Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static INLINE_MEMBER Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
    static INLINE_MEMBER Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
    static INLINE_MEMBER Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static INLINE_MEMBER Reg where_less(Reg x, Reg bound, Reg yes, Reg no) {
        return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(x, bound, _CMP_LT_OQ));
    }
    static INLINE_MEMBER Reg zero_where_less(Reg y, Reg x, Reg bound) {
        return _mm256_andnot_ps(_mm256_cmp_ps(x, bound, _CMP_LT_OQ), y);
    }
    static INLINE_MEMBER Reg with_sign_of(Reg size, Reg x) {
        return _mm256_or_ps(size, _mm256_and_ps(x, _mm256_set1_ps(-0.0f)));
    }
    static INLINE_MEMBER Reg times_power(Reg y, Reg shifted) {
        return _mm256_castsi256_ps(
            _mm256_add_epi32(_mm256_castps_si256(y), _mm256_slli_epi32(_mm256_castps_si256(shifted), 23)));
    }
    static INLINE_MEMBER float total(Reg x) { return total8(x); }
    static INLINE_MEMBER float greatest(Reg x) { return greatest8(x); }
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

constexpr AttentionKernels kTable = kernels_of<Avx2Lanes>();  // no code of this file runs at loading
const AttentionKernels kAttentionAvx2 = kTable;

}  // namespace octavo

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
