// Shared code of the AVX-512 files: loading, and sums of whole panels. A panel is one vector.
//
// Include it after setting the target. tests/ops/emulated_avx512 runs these files on machines without AVX-512.

#pragma once

namespace {

constexpr int kAhead = 4096;  // bytes to prefetch ahead of a single row's reading

INLINE __m512i load(const void* from) { return _mm512_loadu_si512(from); }

INLINE __m512i broadcast32(const uint8_t* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return _mm512_set1_epi32(value);
}

INLINE __m512 broadcast_float(const uint8_t* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return _mm512_set1_ps(value);
}

INLINE void prefetch_record(const uint8_t* at, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 3);
}

template <int R, int P>
INLINE void store_sums(const __m512 (&sum)[P][R], float* sums) {
    for (int p = 0; p < P; ++p)
        for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + (p * R + r) * octavo::kPanel, sum[p][r]);
}

template <int R>
INLINE void load_sums(const float* sums, __m512 (&sum)[R]) {
    for (int r = 0; r < R; ++r) sum[r] = _mm512_loadu_ps(sums + r * octavo::kPanel);
}

template <int R>
INLINE void keep_sums(const __m512 (&sum)[R], float* sums) {
    for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + r * octavo::kPanel, sum[r]);
}

}  // namespace
