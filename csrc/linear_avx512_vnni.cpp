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

template <bool kIsInt4>
void prepare(const float* x, int64_t inputs, void* out) {
    prepare_codes<int8_t, kIsInt4, false>(x, inputs, out);
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
