// Kernels of weights with codes for AVX2. Only linear_avx2.cpp includes this file.
//
// int4: unsigned codes times signed codes; pairs are summed in 16 bits: 15 * 127 * 2 * 8 quads = 30480, no overflow.
// int8: 8-bit multiplication would saturate, so both sides have 16 bits. A mask extracts the weight's even bytes and a
// shift its odd bytes; for this the quads of the prepared codes are swapped.
// Kinds with a table: magnitudes times codes with the values' signs, 127 * 127 * 2 at most, in 16 bits. Pairs of small
// values, as those of mxfp4, are summed in 16 bits: 12 * 127 * 2 * 8 quads = 24384.

#pragma once

namespace {


INLINE __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }

INLINE __m256 halves(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

INLINE __m256i broadcast32(const uint8_t* from) {
    int32_t value;
    std::memcpy(&value, from, sizeof value);
    return _mm256_set1_epi32(value);
}

INLINE __m256 broadcast_float(const uint8_t* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return _mm256_set1_ps(value);
}

// Keeps a sum where it is: GCC would bring all products of a loop's sums about at once, and spill them.
INLINE void pin(__m256i& sum) { __asm__("" : "+x"(sum)); }

// The codes behind the scales of a panel.
INLINE const uint8_t* codes_of(const octavo::Weight& weight, const uint8_t* panel) {
    return panel + octavo::scale_bytes(weight.inputs, weight.group);
}

template <int R, int P>
INLINE void load_sums(const float* sums, __m256 (&sum)[P][R][2]) {
    for (int p = 0; p < P; ++p)
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half)
                sum[p][r][half] = _mm256_loadu_ps(sums + (p * R + r) * octavo::kPanel + half * 8);
}

template <int R, int P>
INLINE void store_sums(const __m256 (&sum)[P][R][2], float* sums) {
    for (int p = 0; p < P; ++p)
        for (int r = 0; r < R; ++r)
            for (int half = 0; half < 2; ++half)
                _mm256_storeu_ps(sums + (p * R + r) * octavo::kPanel + half * 8, sum[p][r][half]);
}

struct Int4 {
    static constexpr int kRows = 4, kSums = 4, kStreams = 2;
    static constexpr int64_t kStepBytes = octavo::kInt4Record, kUnpackedBytes = 0;
    static constexpr int64_t kRowGroup = group_bytes<int8_t>();

    static int64_t steps(const octavo::Weight& weight) { return weight.inputs / octavo::kGroup; }

    // sum += dot * scale of the weight * scale of the row + min of the weight * scaled sum of the row.
    INLINE __m256 add(__m256 sum, __m256i pairs, __m256 scale, __m256 min, const uint8_t* head) {
        const __m256i dot = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale);
        return _mm256_fmadd_ps(min, broadcast_float(head + 4), _mm256_fmadd_ps(scaled, broadcast_float(head), sum));
    }

    template <int R>
    INLINE void direct_group(const uint8_t* panel, const uint8_t* rows, int64_t stride, __m256 (&sum)[R][2]) {
        const __m256i low = _mm256_set1_epi8(15);
        __m256i pairs[R][2];
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; ++quad)
            for (int half = 0; half < 2; ++half) {
                const __m256i both = load(panel + octavo::kNibblesOffset + quad * 64 + half * 32);
                const __m256i first = _mm256_and_si256(both, low);
                const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
                for (int r = 0; r < R; ++r) {
                    const uint8_t* codes = rows + r * stride + sizeof(octavo::GroupHead) + quad * 4;
                    const __m256i product = _mm256_add_epi16(_mm256_maddubs_epi16(first, broadcast32(codes)),
                                                             _mm256_maddubs_epi16(second, broadcast32(codes + 16)));
                    pairs[r][half] = quad == 0 ? product : _mm256_add_epi16(pairs[r][half], product);
                    pin(pairs[r][half]);
                }
            }
        for (int half = 0; half < 2; ++half) {
            const __m256 scale = halves(panel + half * 16), min = halves(panel + octavo::kMinsOffset + half * 16);
            for (int r = 0; r < R; ++r)
                sum[r][half] = add(sum[r][half], pairs[r][half], scale, min, rows + r * stride);
        }
    }

    template <int R, int P>
    static void tile(const Tile& tile) {
        const uint8_t* panel = tile.panel + tile.first * kStepBytes;
        const uint8_t *rows = tile.rows + tile.first * kRowGroup, *ahead = tile.ahead;
        __m256 sum[P][R][2];
        load_sums<R, P>(tile.sums, sum);
        for (int64_t group = tile.count; group > 0; --group, panel += kStepBytes, rows += kRowGroup) {
            for (int p = 0; p < P; ++p) {
                prefetch(ahead + p * tile.gap, tile.ahead_bytes);
                direct_group<R>(panel + p * tile.gap, rows, tile.stride, sum[p]);
            }
            ahead += tile.ahead_bytes;
        }
        store_sums<R, P>(sum, tile.sums);
    }

};

// Unpacked: codes [8][16][4], then scales and mins as floats.
struct UnpackedInt4 : Int4 {
    static constexpr int64_t kUnpackedBytes = 640;

    static void unpack(const Tile& tile, uint8_t* to) {
        const __m256i low = _mm256_set1_epi8(15);
        const uint8_t* panel = tile.panel + tile.first * kStepBytes;
        for (int64_t step = tile.count; step > 0; --step, to += kUnpackedBytes, panel += kStepBytes) {
            for (int i = 0; i < 8; ++i) {
                const __m256i both = load(panel + octavo::kNibblesOffset + i * 32);
                _mm256_store_si256(reinterpret_cast<__m256i*>(to + i * 32), _mm256_and_si256(both, low));
                _mm256_store_si256(reinterpret_cast<__m256i*>(to + 256 + i * 32),
                                   _mm256_and_si256(_mm256_srli_epi16(both, 4), low));
            }
            for (int i = 0; i < 4; ++i)
                _mm256_store_ps(reinterpret_cast<float*>(to + 512) + i * 8, halves(panel + i * 16));
        }
    }

    template <int R, int>
    static void tile(const Tile& tile) {
        const uint8_t *unpacked = tile.panel, *ahead = tile.ahead;
        const uint8_t* rows = tile.rows + tile.first * kRowGroup;
        const int64_t stride = tile.stride;
        float* sums = tile.sums;
        for (int64_t step = tile.count; step > 0; --step, unpacked += kUnpackedBytes, rows += kRowGroup) {
            prefetch(ahead, tile.ahead_bytes);
            ahead += tile.ahead_bytes;
            __m256i pairs[R][2];
#pragma GCC unroll 8
            for (int quad = 0; quad < 8; ++quad) {
                const __m256i left = load(unpacked + quad * 64), right = load(unpacked + quad * 64 + 32);
                for (int r = 0; r < R; ++r) {
                    const __m256i codes = broadcast32(rows + r * stride + sizeof(octavo::GroupHead) + quad * 4);
                    const __m256i a = _mm256_maddubs_epi16(left, codes), b = _mm256_maddubs_epi16(right, codes);
                    pairs[r][0] = quad == 0 ? a : _mm256_add_epi16(pairs[r][0], a);
                    pairs[r][1] = quad == 0 ? b : _mm256_add_epi16(pairs[r][1], b);
                    pin(pairs[r][0]), pin(pairs[r][1]);
                }
            }
            const float* scales = reinterpret_cast<const float*>(unpacked + 512);
            for (int half = 0; half < 2; ++half)
                for (int r = 0; r < R; ++r) {
                    float* sum = sums + r * octavo::kPanel + half * 8;
                    _mm256_store_ps(sum, add(_mm256_load_ps(sum), pairs[r][half], _mm256_load_ps(scales + half * 8),
                                             _mm256_load_ps(scales + 16 + half * 8), rows + r * stride));
                }
        }
    }
};

// kParts: scales within 32 inputs.
template <int kParts>
struct Int8 {
    static constexpr int kRows = 4, kSums = 4, kStreams = 2;
    static constexpr int64_t kStepBytes = octavo::kInt8Codes, kUnpackedBytes = 0;
    static constexpr int64_t kRowGroup = group_bytes<int16_t>();
    static constexpr int kPartPairs = 16 / kParts;

    static int64_t steps(const octavo::Weight& weight) { return weight.inputs / octavo::kGroup; }

    INLINE __m256 add(__m256 sum, __m256i dot, __m256 scale, const uint8_t* head) {
        return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale), broadcast_float(head), sum);
    }

    INLINE __m256i start(const uint8_t* head, int part) { return broadcast32(head + (kParts == 1 ? 4 : 8 + part * 4)); }

    template <int R>
    INLINE void direct_part(const uint8_t* weights, const uint8_t* scales, const uint8_t* rows, int64_t stride,
                            int part, __m256 (&sum)[R][2]) {
        const __m256i low = _mm256_set1_epi16(255);
        __m256i dot[R][2];
        for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = start(rows + r * stride, part);
#pragma GCC unroll 8
        for (int quad = 0; quad < kPartPairs / 2; ++quad)
            for (int half = 0; half < 2; ++half) {
                const __m256i both = load(weights + quad * 64 + half * 32);
                const __m256i even = _mm256_and_si256(both, low), odd = _mm256_srli_epi16(both, 8);
                for (int r = 0; r < R; ++r) {
                    const uint8_t* codes = rows + r * stride + sizeof(octavo::GroupHead) + part * 32 + quad * 8;
                    const __m256i product = _mm256_add_epi32(_mm256_madd_epi16(even, broadcast32(codes)),
                                                             _mm256_madd_epi16(odd, broadcast32(codes + 4)));
                    dot[r][half] = _mm256_add_epi32(dot[r][half], product);
                    pin(dot[r][half]);
                }
            }
        for (int half = 0; half < 2; ++half)
            for (int r = 0; r < R; ++r)
                sum[r][half] = add(sum[r][half], dot[r][half], halves(scales + half * 16), rows + r * stride);
    }

    template <int R, int P>
    static void tile(const Tile& tile) {
        const uint8_t* weights = codes_of(tile.weight, tile.panel) + tile.first * kStepBytes;
        const uint8_t* scales = tile.panel + tile.first * kParts * 32;
        const uint8_t *rows = tile.rows + tile.first * kRowGroup, *ahead = tile.ahead;
        __m256 sum[P][R][2];
        load_sums<R, P>(tile.sums, sum);
        for (int64_t group = tile.count; group > 0; --group, rows += kRowGroup, ahead += tile.ahead_bytes) {
            for (int p = 0; p < P; ++p) prefetch(ahead + p * tile.gap, tile.ahead_bytes);
            for (int part = 0; part < kParts; ++part, scales += 32, weights += kPartPairs * 32)
                for (int p = 0; p < P; ++p)
                    direct_part<R>(weights + p * tile.gap, scales + p * tile.gap, rows, tile.stride, part, sum[p]);
        }
        store_sums<R, P>(sum, tile.sums);
    }

};

// Unpacked: codes [16 pairs][16][2], then scales as floats.
template <int kParts>
struct UnpackedInt8 : Int8<kParts> {
    using Base = Int8<kParts>;
    static constexpr int64_t kUnpackedBytes = 1024 + 64 * kParts;

    static void unpack(const Tile& tile, uint8_t* to) {
        const __m256i low = _mm256_set1_epi16(255);
        const uint8_t* weights = codes_of(tile.weight, tile.panel) + tile.first * Base::kStepBytes;
        const uint8_t* scales = tile.panel + tile.first * kParts * 32;
        for (int64_t step = tile.count; step > 0; --step, to += kUnpackedBytes, weights += Base::kStepBytes) {
            for (int i = 0; i < 16; ++i) {
                const __m256i both = load(weights + i * 32);
                uint8_t* pair = to + i / 2 * 128 + i % 2 * 32;
                _mm256_store_si256(reinterpret_cast<__m256i*>(pair), _mm256_and_si256(both, low));
                _mm256_store_si256(reinterpret_cast<__m256i*>(pair + 64), _mm256_srli_epi16(both, 8));
            }
            for (int i = 0; i < 2 * kParts; ++i, scales += 16)
                _mm256_store_ps(reinterpret_cast<float*>(to + 1024) + i * 8, halves(scales));
        }
    }

    template <int R, int>
    static void tile(const Tile& tile) {
        const uint8_t *unpacked = tile.panel, *ahead = tile.ahead;
        const uint8_t* rows = tile.rows + tile.first * Base::kRowGroup;
        const int64_t stride = tile.stride;
        float* sums = tile.sums;
        for (int64_t step = tile.count; step > 0; --step, unpacked += kUnpackedBytes, rows += Base::kRowGroup) {
            prefetch(ahead, tile.ahead_bytes);
            ahead += tile.ahead_bytes;
            for (int part = 0; part < kParts; ++part) {
                __m256i dot[R][2];
                for (int r = 0; r < R; ++r) dot[r][0] = dot[r][1] = Base::start(rows + r * stride, part);
#pragma GCC unroll 16
                for (int i = 0; i < Base::kPartPairs; ++i) {
                    const int pair = part * Base::kPartPairs + i;
                    const __m256i left = load(unpacked + pair * 64), right = load(unpacked + pair * 64 + 32);
                    for (int r = 0; r < R; ++r) {
                        const __m256i codes = broadcast32(rows + r * stride + sizeof(octavo::GroupHead) + pair * 4);
                        dot[r][0] = _mm256_add_epi32(dot[r][0], _mm256_madd_epi16(left, codes));
                        dot[r][1] = _mm256_add_epi32(dot[r][1], _mm256_madd_epi16(right, codes));
                        pin(dot[r][0]), pin(dot[r][1]);
                    }
                }
                const float* scales = reinterpret_cast<const float*>(unpacked + 1024) + part * octavo::kPanel;
                for (int half = 0; half < 2; ++half)
                    for (int r = 0; r < R; ++r) {
                        float* sum = sums + r * octavo::kPanel + half * 8;
                        _mm256_store_ps(
                            sum, Base::add(_mm256_load_ps(sum), dot[r][half], _mm256_load_ps(scales + half * 8),
                                           rows + r * stride));
                    }
            }
        }
    }
};

// Kinds with a table. Of a small one, no value is above 12.
template <int kParts, bool kIsSmall>
struct Table {
    static constexpr int kRows = 4, kSums = 4, kStreams = 2;
    static constexpr int64_t kStepBytes = octavo::kHalfCodes, kUnpackedBytes = 0;
    static constexpr int64_t kRowGroup = group_bytes<int8_t>();
    static constexpr int kPartQuads = 8 / kParts;

    static int64_t steps(const octavo::Weight& weight) { return weight.inputs / octavo::kGroup; }

    // The table's values, without the 128 that was added.
    INLINE __m256i values_of(const octavo::Weight& weight) {
        const __m128i* from = reinterpret_cast<const __m128i*>(octavo::table_of(weight.kind));
        return _mm256_xor_si256(_mm256_broadcastsi128_si256(_mm_load_si128(from)), _mm256_set1_epi8(-128));
    }

    // Which values half a quad selects, of the eight quads of 32 inputs.
    INLINE __m256i selected(const uint8_t* codes, int quad, int half) {
        const __m256i both = load(codes + quad % 4 * 64 + half * 32);
        return _mm256_and_si256(quad < 4 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
    }

    // Add four products to each sum: pairs of 16 bits if small, else 32 bits.
    INLINE void add_quad(__m256i& dot, __m256i value, __m256i magnitude, const uint8_t* codes, bool is_first) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(broadcast32(codes), value));
        const __m256i product = kIsSmall ? pairs : _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
        if (is_first)
            dot = product;
        else
            dot = kIsSmall ? _mm256_add_epi16(dot, product) : _mm256_add_epi32(dot, product);
        pin(dot);
    }

    INLINE __m256 add(__m256 sum, __m256i dot, __m256 scale, const uint8_t* head) {
        const __m256i whole = kIsSmall ? _mm256_madd_epi16(dot, _mm256_set1_epi16(1)) : dot;
        return _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(whole), scale), broadcast_float(head), sum);
    }

    template <int R>
    INLINE void direct_part(const uint8_t* weights, const uint8_t* scales, __m256i values, __m256i magnitudes,
                            const uint8_t* rows, int64_t stride, int part, __m256 (&sum)[R][2]) {
        __m256i dot[R][2];
#pragma GCC unroll 8
        for (int i = 0; i < kPartQuads; ++i)
            for (int half = 0; half < 2; ++half) {
                const int quad = part * kPartQuads + i;
                const __m256i codes = selected(weights, quad, half);
                const __m256i value = _mm256_shuffle_epi8(values, codes);
                const __m256i magnitude = _mm256_shuffle_epi8(magnitudes, codes);
                for (int r = 0; r < R; ++r)
                    add_quad(dot[r][half], value, magnitude, rows + r * stride + sizeof(octavo::GroupHead) + quad * 4,
                             i == 0);
            }
        for (int half = 0; half < 2; ++half)
            for (int r = 0; r < R; ++r)
                sum[r][half] = add(sum[r][half], dot[r][half], halves(scales + half * 16), rows + r * stride);
    }

    template <int R, int P>
    static void tile(const Tile& tile) {
        const uint8_t* weights = codes_of(tile.weight, tile.panel) + tile.first * kStepBytes;
        const uint8_t* scales = tile.panel + tile.first * kParts * 32;
        const uint8_t *rows = tile.rows + tile.first * kRowGroup, *ahead = tile.ahead;
        const __m256i values = values_of(tile.weight), magnitudes = _mm256_abs_epi8(values);
        __m256 sum[P][R][2];
        load_sums<R, P>(tile.sums, sum);
        for (int64_t group = tile.count; group > 0; --group, rows += kRowGroup, weights += kStepBytes) {
            for (int p = 0; p < P; ++p) {
                prefetch(ahead + p * tile.gap, tile.ahead_bytes);
                for (int part = 0; part < kParts; ++part)
                    direct_part<R>(weights + p * tile.gap, scales + p * tile.gap + part * 32, values, magnitudes, rows,
                                   tile.stride, part, sum[p]);
            }
            scales += kParts * 32, ahead += tile.ahead_bytes;
        }
        store_sums<R, P>(sum, tile.sums);
    }

};

// Unpacked: [8 quads][2 halves]: values, magnitudes; then scales as floats.
template <int kParts, bool kIsSmall>
struct UnpackedTable : Table<kParts, kIsSmall> {
    using Base = Table<kParts, kIsSmall>;
    static constexpr int64_t kUnpackedBytes = 1024 + 64 * kParts;

    static void unpack(const Tile& tile, uint8_t* to) {
        const uint8_t* weights = codes_of(tile.weight, tile.panel) + tile.first * Base::kStepBytes;
        const uint8_t* scales = tile.panel + tile.first * kParts * 32;
        const __m256i values = Base::values_of(tile.weight), magnitudes = _mm256_abs_epi8(values);
        for (int64_t step = tile.count; step > 0; --step, to += kUnpackedBytes, weights += Base::kStepBytes) {
            for (int i = 0; i < 16; ++i) {
                const __m256i codes = Base::selected(weights, i / 2, i % 2);
                __m256i* pair = reinterpret_cast<__m256i*>(to + i * 64);
                _mm256_store_si256(pair, _mm256_shuffle_epi8(values, codes));
                _mm256_store_si256(pair + 1, _mm256_shuffle_epi8(magnitudes, codes));
            }
            for (int i = 0; i < 2 * kParts; ++i, scales += 16)
                _mm256_store_ps(reinterpret_cast<float*>(to + 1024) + i * 8, halves(scales));
        }
    }

    template <int R, int>
    static void tile(const Tile& tile) {
        const uint8_t *unpacked = tile.panel, *ahead = tile.ahead;
        const uint8_t* rows = tile.rows + tile.first * Base::kRowGroup;
        const int64_t stride = tile.stride;
        float* sums = tile.sums;
        for (int64_t step = tile.count; step > 0; --step, unpacked += kUnpackedBytes, rows += Base::kRowGroup) {
            prefetch(ahead, tile.ahead_bytes);
            ahead += tile.ahead_bytes;
            for (int part = 0; part < kParts; ++part) {
                __m256i dot[R][2];
#pragma GCC unroll 8
                for (int i = 0; i < Base::kPartQuads; ++i)
                    for (int half = 0; half < 2; ++half) {
                        const int quad = part * Base::kPartQuads + i;
                        const uint8_t* pair = unpacked + (quad * 2 + half) * 64;
                        const __m256i value = load(pair), magnitude = load(pair + 32);
                        for (int r = 0; r < R; ++r)
                            Base::add_quad(dot[r][half], value, magnitude,
                                     rows + r * stride + sizeof(octavo::GroupHead) + quad * 4, i == 0);
                    }
                const float* scales = reinterpret_cast<const float*>(unpacked + 1024) + part * octavo::kPanel;
                for (int half = 0; half < 2; ++half)
                    for (int r = 0; r < R; ++r) {
                        float* sum = sums + r * octavo::kPanel + half * 8;
                        _mm256_store_ps(
                            sum, Base::add(_mm256_load_ps(sum), dot[r][half], _mm256_load_ps(scales + half * 8),
                                           rows + r * stride));
                    }
            }
        }
    }
};

}  // namespace
