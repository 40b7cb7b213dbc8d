// Shared code of the AVX-512 files: loading, forms of codes, and the kernel of float weights. A panel is one vector.
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

INLINE __m512 halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Of packed codes: whole bytes, half bytes, half bytes that select a value of a table.
enum class Form { kInt8, kInt4, kTable };

INLINE __m512i load_table(const octavo::Weight& weight) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(octavo::table_of(weight.kind))));
}

// A quad of a group's codes from their packed form.
template <Form kForm>
INLINE __m512i quad_of(const uint8_t* group, int quad, __m512i table) {
    const __m512i packed = load(group + (kForm == Form::kInt8 ? quad : quad % 4) * 64);
    if (kForm == Form::kInt8) return packed;
    const __m512i codes =
        _mm512_and_si512(quad < 4 ? packed : _mm512_srli_epi16(packed, 4), _mm512_set1_epi32(0x0f0f0f0f));
    return kForm == Form::kInt4 ? codes : _mm512_shuffle_epi8(table, codes);
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
