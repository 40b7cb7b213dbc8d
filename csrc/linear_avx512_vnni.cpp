// Linear layers over weights with codes, with AVX512_VNNI, which adds four products to a 32-bit sum, exactly.

#if defined(__x86_64__)

#include <immintrin.h>

#include "linear_kernels.h"

#if defined(OCTAVO_EMULATED)  // compiled for the base instruction set, with functions for the intrinsics
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,avx512vnni")
#endif

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "linear_blocks.h"
#include "linear_avx512.h"

namespace octavo {
namespace {

// kParts: number of scales within 32 inputs. The integer sums stay in registers, the float sums in memory.
template <Form kForm, int kParts>
struct Quantised {
    static constexpr bool kIsInt4 = kForm == Form::kInt4, kIsInt8 = kForm == Form::kInt8;
    static constexpr int kRows = 8, kSums = 16, kStreams = 2;
    static constexpr int64_t kStepBytes = kIsInt4 ? kInt4Record : (kIsInt8 ? kInt8Codes : kHalfCodes);
    static constexpr int64_t kUnpackedBytes = 0;
    static constexpr int64_t kRowGroup = group_bytes<int8_t>();
    static constexpr int kPartQuads = 8 / kParts;

    static int64_t steps(const Weight& weight) { return weight.inputs / kGroup; }

    INLINE __m512i start(const uint8_t* head, int part) {
        if (kIsInt4) return _mm512_setzero_si512();
        return broadcast32(head + (kParts == 1 ? 4 : 8 + part * 4));
    }

    // Add one part of a group. For int4 the order of operations is that of linear_portable.cpp.
    template <int R, int P>
    INLINE void add_part(const uint8_t* group, const uint8_t* scales, int64_t gap, __m512i table, const uint8_t* rows,
                         int64_t stride, int part, float* sums) {
        __m512i dot[P][R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) dot[p][r] = start(rows + r * stride, part);
#pragma GCC unroll 8
        for (int quad = part * kPartQuads; quad < (part + 1) * kPartQuads; ++quad) {
            __m512i weights[P];
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) weights[p] = quad_of<kForm>(group + p * gap, quad, table);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const __m512i codes = broadcast32(rows + r * stride + sizeof(GroupHead) + quad * 4);
#pragma GCC unroll 4
                for (int p = 0; p < P; ++p) dot[p][r] = _mm512_dpbusd_epi32(dot[p][r], weights[p], codes);
            }
        }
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
            const __m512 scale = halves(scales + p * gap);
            const __m512 min = kIsInt4 ? halves(scales + p * gap + kMinsOffset) : scale;
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const uint8_t* head = rows + r * stride;
                float* to = sums + (p * R + r) * kPanel;
                const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[p][r]), scale);
                __m512 sum = _mm512_fmadd_ps(scaled, broadcast_float(head), _mm512_loadu_ps(to));
                if (kIsInt4) sum = _mm512_fmadd_ps(min, broadcast_float(head + 4), sum);
                _mm512_storeu_ps(to, sum);
            }
        }
    }

    template <int R, int P>
    static void tile(const Tile& tile) {
        const __m512i values = kForm == Form::kTable ? load_table(tile.weight) : _mm512_setzero_si512();
        const int64_t codes_offset = kIsInt4 ? kNibblesOffset : scale_bytes(tile.weight.inputs, tile.weight.group);
        constexpr int64_t kPartScales = kIsInt4 ? kInt4Record : 32;
        const uint8_t* group = tile.panel + codes_offset + tile.first * kStepBytes;
        const uint8_t* scales = tile.panel + tile.first * kParts * kPartScales;
        const uint8_t *ahead = tile.ahead, *rows = tile.rows + tile.first * kRowGroup;
        const int64_t gap = tile.gap, stride = tile.stride, ahead_bytes = tile.ahead_bytes;
        float* sums = tile.sums;
        for (int64_t step = tile.count; step > 0; --step) {
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) prefetch(ahead + p * gap, R <= 4 ? kStepBytes : ahead_bytes);
            for (int part = 0; part < kParts; ++part, scales += kPartScales)
                add_part<R, P>(group, scales, gap, values, rows, stride, part, sums);
            group += kStepBytes, ahead += ahead_bytes, rows += kRowGroup;
            // Else GCC would keep copies of many float sums too, and spill them.
            if (R * P > 8) __asm__ volatile("" ::: "memory");
        }
    }
};

typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef int32_t IntHalf __attribute__((vector_size(32)));
typedef int8_t ByteLanes __attribute__((vector_size(16)));

// Lane i is lane i + n of x; the last n lanes are those of its start.
template <int n>
INLINE IntHalf turned(IntHalf x) {
#if defined(__clang__)
    return __builtin_shufflevector(x, x, n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7);
#else
    const IntHalf lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    return __builtin_shuffle(x, (lanes + n) & 7);
#endif
}

INLINE IntHalf larger_of(IntHalf a, IntHalf b) { return a > b ? a : b; }

// The bits of eight absolute values.
INLINE IntHalf sizes_at(const float* from) {
    IntHalf bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits & 0x7fffffff;
}

// prepare_codes with vectors of 16 lanes. Vectors of eight lanes find the largest, and an instruction that adds bytes
// makes the sums: a shuffle of 16 lanes costs twice as much.
template <bool kIsInt4>
void prepare(const float* x, int64_t inputs, void* out) {
    uint8_t* to = static_cast<uint8_t*>(out);
    for (const float* end = x + inputs; x < end; x += kGroup, to += group_bytes<int8_t>()) {
        IntHalf sizes = larger_of(larger_of(sizes_at(x), sizes_at(x + 8)), larger_of(sizes_at(x + 16), sizes_at(x + 24)));
        sizes = larger_of(sizes, turned<4>(sizes)), sizes = larger_of(sizes, turned<2>(sizes));
        const int32_t largest_bits = larger_of(sizes, turned<1>(sizes))[0];
        float largest;
        std::memcpy(&largest, &largest_bits, sizeof largest);
        const bool is_finite = largest_bits < 0x7f800000, is_scaled = is_finite && largest >= kSmallestScaled;
        const float factor = is_scaled ? 127.0f / largest : 0.0f;
        __m128i halves[2];  // codes
        int32_t sums[2];
        for (int i = 0; i < 2; ++i) {
            const PanelLanes rounded = (load_lanes(x + 16 * i) * factor + kRoundingMagic) - kRoundingMagic;
            halves[i] = (__m128i)__builtin_convertvector(__builtin_convertvector(rounded, IntLanes), ByteLanes);
            if (!is_scaled) halves[i] = _mm_setzero_si128();
            const __m128i shifted = _mm_xor_si128(halves[i], _mm_set1_epi8(-128));  // codes + 128, without a sign
            const __m128i eights = _mm_sad_epu8(shifted, _mm_setzero_si128());
            sums[i] = _mm_cvtsi128_si32(_mm_add_epi64(eights, _mm_unpackhi_epi64(eights, eights))) - 16 * 128;
        }
        GroupHead head;
        head.scale = is_scaled ? largest / 127.0f : is_finite ? 0.0f : kNotANumber;
        if (kIsInt4)
            head.scaled_sum = head.scale * static_cast<float>(sums[0] + sums[1]);
        else
            head.offset = -128 * (sums[0] + sums[1]);
        head.half_offset[0] = -128 * sums[0], head.half_offset[1] = -128 * sums[1];
        std::memcpy(to, &head, sizeof head);
        std::memcpy(to + sizeof head, halves, sizeof halves);
    }
}

template <Form kForm>
void scaled_panels(const Weight& weight, const LinearJob& job, int64_t begin, int64_t end) {
    if (weight.group == kGroup)
        run_panels<Quantised<kForm, 1>>(weight, job, begin, end);
    else
        run_panels<Quantised<kForm, 2>>(weight, job, begin, end);
}

}  // namespace

const LinearKernels kVnniLinear[3] = {
    {codes_bytes<int8_t>, prepare<false>, scaled_panels<Form::kInt8>},
    {codes_bytes<int8_t>, prepare<true>, run_panels<Quantised<Form::kInt4, 1>>},
    {codes_bytes<int8_t>, prepare<false>, scaled_panels<Form::kTable>},
};

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
