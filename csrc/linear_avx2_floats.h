// Kernels of float32 and bfloat16 weights for AVX2. Only linear_avx2.cpp includes this file.
//
// bfloat16 weights are widened (by a shift or a mask) and multiplied with float32 activations; the products are exact.

#pragma once

namespace {

// Two inputs of a panel, [2][16], as four vectors.
INLINE void load_pair(const float* from, __m256 (&out)[2][2]) {
    for (int k = 0; k < 2; ++k)
        for (int half = 0; half < 2; ++half) out[k][half] = _mm256_loadu_ps(from + k * octavo::kPanel + half * 8);
}

INLINE void load_pair(const Bfloat16* from, __m256 (&out)[2][2]) {
    const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
    for (int half = 0; half < 2; ++half) {
        const __m256i both = load(from + half * 16);
        out[0][half] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
        out[1][half] = _mm256_castsi256_ps(_mm256_and_si256(both, high));
    }
}

template <typename T>
struct Floats {
    static constexpr bool kIsFloat = sizeof(T) == 4;
    static constexpr int kTile = 6, kDirectRows = 6, kDirectPanels = 4;
    static constexpr int64_t kBlockSteps = 256;  // inputs; even
    static constexpr int64_t kScratchBytes = kIsFloat ? 64 : kBlockSteps * octavo::kPanel * 4;

    static int64_t steps(const octavo::Weight& weight) { return weight.inputs; }

    template <int R, int P>
    INLINE void direct(const octavo::Weight& weight, const uint8_t* panel, int64_t gap, const uint8_t* rows,
                       int64_t stride, float* sums) {
        __m256 sum[P][R][2] = {};
        int64_t k = 0;
        for (; k + 2 <= weight.inputs + (kIsFloat ? 0 : 1); k += 2, panel += 2 * octavo::kPanel * sizeof(T), rows += 8)
            for (int p = 0; p < P; ++p) {
                prefetch_record(panel + p * gap + kAhead, 2 * octavo::kPanel * sizeof(T));
                __m256 pair[2][2];
                load_pair(reinterpret_cast<const T*>(panel + p * gap), pair);
                for (int i = 0; i < 2; ++i)
                    for (int r = 0; r < R; ++r)
                        for (int half = 0; half < 2; ++half)
                            sum[p][r][half] = _mm256_fmadd_ps(pair[i][half], broadcast_float(rows + r * stride + i * 4),
                                                              sum[p][r][half]);
            }
        if (kIsFloat && k < weight.inputs)
            for (int p = 0; p < P; ++p)
                for (int r = 0; r < R; ++r)
                    for (int half = 0; half < 2; ++half)
                        sum[p][r][half] = _mm256_fmadd_ps(
                            _mm256_loadu_ps(reinterpret_cast<const float*>(panel + p * gap) + half * 8),
                            broadcast_float(rows + r * stride), sum[p][r][half]);
        store_sums<R, P>(sum, sums);
    }

    static const uint8_t* unpack(const octavo::Weight&, const uint8_t* panel, int64_t first, int64_t count,
                                 uint8_t* scratch) {
        panel += first * octavo::kPanel * static_cast<int64_t>(sizeof(T));
        if (kIsFloat) return panel;
        float* to = reinterpret_cast<float*>(scratch);
        for (; count > 0; count -= 2, panel += 2 * octavo::kPanel * sizeof(T), to += 2 * octavo::kPanel) {
            __m256 pair[2][2];
            load_pair(reinterpret_cast<const T*>(panel), pair);
            for (int i = 0; i < 4; ++i) _mm256_store_ps(to + i * 8, pair[i / 2][i % 2]);
        }
        return scratch;
    }

    template <int R>
    INLINE void tile(const octavo::Weight&, const uint8_t* unpacked, int64_t first, int64_t count, const uint8_t* rows,
                     int64_t stride, float* sums, Ahead ahead) {
        rows += first * 4;
        __m256 sum[R][2];
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half) sum[r][half] = _mm256_load_ps(sums + r * octavo::kPanel + half * 8);
        for (; count > 0; --count, unpacked += octavo::kPanel * 4, rows += 4) {
            prefetch_step<1>(ahead);
            const __m256 left = _mm256_load_ps(reinterpret_cast<const float*>(unpacked));
            const __m256 right = _mm256_load_ps(reinterpret_cast<const float*>(unpacked) + 8);
            for (int r = 0; r < R; ++r) {
                const __m256 x = broadcast_float(rows + r * stride);
                sum[r][0] = _mm256_fmadd_ps(left, x, sum[r][0]);
                sum[r][1] = _mm256_fmadd_ps(right, x, sum[r][1]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half) _mm256_store_ps(sums + r * octavo::kPanel + half * 8, sum[r][half]);
    }
};

}  // namespace
