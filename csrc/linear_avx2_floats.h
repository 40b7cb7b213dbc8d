// Kernels of float32 and bfloat16 weights for AVX2. Only linear_avx2.cpp includes this file.
//
// bfloat16 weights are widened (by a shift or a mask) and multiplied with float32 activations; the products are exact.

#pragma once

namespace {

// Half of the weights of one input: of float32 the only one of a step, of bfloat16 one of a pair.
template <bool kIsFloat>
INLINE __m256 weights_of(const uint8_t* step, int input, int half) {
    if (kIsFloat) return _mm256_loadu_ps(reinterpret_cast<const float*>(step) + half * 8);
    const __m256i pairs = load(step + half * 32);
    return _mm256_castsi256_ps(input == 0 ? _mm256_slli_epi32(pairs, 16)
                                          : _mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}

template <bool kIsFloat>
struct Floats {
    static constexpr int kRows = 6, kSums = kIsFloat ? 6 : 4, kStreams = 4;
    static constexpr int kInputs = kIsFloat ? 1 : 2;  // of a step
    static constexpr int64_t kStepBytes = 64, kUnpackedBytes = 0;

    static int64_t steps(const octavo::Weight& weight) { return (weight.inputs + kInputs - 1) / kInputs; }

    template <int R, int P>
    static void tile(const Tile& tile) {
        const uint8_t *panel = tile.panel + tile.first * kStepBytes, *x = tile.rows + tile.first * kInputs * 4;
        const uint8_t* ahead = tile.ahead;
        __m256 sum[P][R][2];
        load_sums<R, P>(tile.sums, sum);
        for (int64_t step = tile.count; step > 0; --step, panel += kStepBytes, ahead += tile.ahead_bytes)
            for (int i = 0; i < kInputs; ++i, x += 4)
                for (int p = 0; p < P; ++p) {
                    if (i == 0) __builtin_prefetch(ahead + p * tile.gap, 0, 3);
                    const __m256 left = weights_of<kIsFloat>(panel + p * tile.gap, i, 0);
                    const __m256 right = weights_of<kIsFloat>(panel + p * tile.gap, i, 1);
                    for (int r = 0; r < R; ++r) {
                        const __m256 value = broadcast_float(x + r * tile.stride);
                        sum[p][r][0] = _mm256_fmadd_ps(left, value, sum[p][r][0]);
                        sum[p][r][1] = _mm256_fmadd_ps(right, value, sum[p][r][1]);
                    }
                }
        store_sums<R, P>(sum, tile.sums);
    }
};

// bfloat16 weights that are unpacked to float32.
struct UnpackedFloats : Floats<false> {
    static constexpr int64_t kUnpackedBytes = 128;

    static void unpack(const Tile& tile, uint8_t* to) {
        const uint8_t* panel = tile.panel + tile.first * kStepBytes;
        for (int64_t step = tile.count; step > 0; --step, panel += kStepBytes, to += kUnpackedBytes)
            for (int i = 0; i < 4; ++i)
                _mm256_store_ps(reinterpret_cast<float*>(to) + i * 8, weights_of<false>(panel, i / 2, i % 2));
    }

    template <int R, int>
    static void tile(const Tile& tile) {
        Tile floats = tile;
        floats.first *= 2, floats.count *= 2, floats.ahead_bytes /= 2;
        floats.panel -= floats.first * Floats<true>::kStepBytes;
        Floats<true>::tile<R, 1>(floats);
    }
};

}  // namespace
