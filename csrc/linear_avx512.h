// Shared code of the AVX-512 files: loading, and the kernel of float weights. A panel is one vector.
//
// Include it after setting the target. tests/ops/emulated_avx512 runs these files on machines without AVX-512.

#pragma once

namespace {

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

// A kernel of weights without scales. A step is a line of 64 bytes of a panel. M has:
//   kParts                  multiplications of a line, each with 4 bytes of a row
//   steps(weight)
//   weights(line, part)     the weights of a multiplication
//   add(sum, weights, x)    the sum with the products of weights and x, the address of the row's 4 bytes
template <class M>
struct Lines {
    static constexpr int kRows = 8, kSums = 24, kStreams = 2;  // of 32 registers; weights take up to four
    static constexpr int64_t kStepBytes = 64, kUnpackedBytes = 0;

    static int64_t steps(const octavo::Weight& weight) { return M::steps(weight); }

    template <int R, int P>
    static void tile(const Tile& tile) {
        float* sums = tile.sums;
        __m512 sum[P][R];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sum[p][r] = _mm512_loadu_ps(sums + (p * R + r) * octavo::kPanel);
        const uint8_t *line = tile.panel + tile.first * 64, *x = tile.rows + tile.first * M::kParts * 4;
        const uint8_t* ahead = tile.ahead;
        for (int64_t step = tile.count; step > 0; --step, line += 64, ahead += tile.ahead_bytes, x += M::kParts * 4) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) __builtin_prefetch(ahead + p * tile.gap, 0, 3);
#pragma GCC unroll 2
            for (int part = 0; part < M::kParts; ++part) {
                decltype(M::weights(line, part)) weights[P];
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) weights[p] = M::weights(line + p * tile.gap, part);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                    for (int p = 0; p < P; ++p)
                        sum[p][r] = M::add(sum[p][r], weights[p], x + r * tile.stride + part * 4);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + (p * R + r) * octavo::kPanel, sum[p][r]);
    }
};

}  // namespace
