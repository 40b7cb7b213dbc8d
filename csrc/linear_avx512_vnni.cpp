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
#endif

#include "linear_blocks.h"
#include "linear_avx512.h"

namespace octavo {
namespace {

INLINE __m512 halves(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

enum class Form { kInt8, kInt4, kTable };

// kParts: number of scales within 32 inputs. Unpacked: codes [8][16][4], then scales (and mins for int4) as floats.
template <Form kForm, int kParts>
struct Quantised {
    static constexpr bool kIsInt4 = kForm == Form::kInt4, kIsInt8 = kForm == Form::kInt8;
    static constexpr int64_t kCodes = kIsInt8 ? kInt8Codes : kHalfCodes;  // bytes of a group
    static constexpr int64_t kUnpacked = 512 + 64 * (kIsInt4 ? 2 : kParts);
    static constexpr int kTile = 8, kDirectRows = 4, kDirectPanels = 4;
    static constexpr int64_t kBlockSteps = 24, kScratchBytes = kBlockSteps * kUnpacked;
    static constexpr int64_t kRowGroup = group_bytes<int8_t>();
    static constexpr int kPartQuads = 8 / kParts;

    static int64_t steps(const Weight& weight) { return weight.inputs / kGroup; }

    INLINE __m512i start(const uint8_t* head, int part) {
        if (kIsInt4) return _mm512_setzero_si512();
        return broadcast32(head + (kParts == 1 ? 4 : 8 + part * 4));
    }

    // Compute one part of a group for R rows. For int4 the order of operations is that of linear_portable.cpp.
    template <int R>
    INLINE void part_of(const __m512i (&weights)[kPartQuads], __m512 scale, __m512 min, const uint8_t* rows,
                        int64_t stride, int part, __m512 (&sum)[R]) {
        __m512i dot[R];
        for (int r = 0; r < R; ++r) dot[r] = start(rows + r * stride, part);
#pragma GCC unroll 8
        for (int quad = 0; quad < kPartQuads; ++quad)
            for (int r = 0; r < R; ++r) {
                const uint8_t* codes = rows + r * stride + sizeof(GroupHead) + (part * kPartQuads + quad) * 4;
                dot[r] = _mm512_dpbusd_epi32(dot[r], weights[quad], broadcast32(codes));
            }
        for (int r = 0; r < R; ++r) {
            const uint8_t* head = rows + r * stride;
            sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), scale), broadcast_float(head), sum[r]);
            if (kIsInt4) sum[r] = _mm512_fmadd_ps(min, broadcast_float(head + 4), sum[r]);
        }
    }

    INLINE __m512i table(const Weight& weight) {
        if (kForm != Form::kTable) return _mm512_setzero_si512();
        return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table_of(weight.kind))));
    }

    // Load the codes of a group's part from their packed form: whole bytes for int8, else half bytes.
    INLINE void packed_codes(const uint8_t* group, int part, __m512i table, __m512i (&weights)[kPartQuads]) {
        const __m512i low = _mm512_set1_epi32(0x0f0f0f0f);
        for (int i = 0; i < kPartQuads; ++i) {
            const int quad = part * kPartQuads + i;
            weights[i] = load(group + (kIsInt8 ? quad : quad % 4) * 64);
            if (kIsInt8) continue;
            weights[i] = _mm512_and_si512(quad < 4 ? weights[i] : _mm512_srli_epi16(weights[i], 4), low);
            if (!kIsInt4) weights[i] = _mm512_shuffle_epi8(table, weights[i]);
        }
    }

    // The addresses of a panel's codes of group `group`, and of its scales of the group's part `part`.
    INLINE const uint8_t* codes_at(const Weight& weight, const uint8_t* panel, int64_t group) {
        if (kIsInt4) return panel + group * kInt4Record + kNibblesOffset;
        return panel + scale_bytes(weight.inputs, weight.group) + group * kCodes;
    }

    INLINE const uint8_t* scales_at(const uint8_t* panel, int64_t group, int part) {
        return panel + (kIsInt4 ? group * kInt4Record : (group * kParts + part) * 32);
    }

    template <int R, int P>
    INLINE void direct(const Weight& weight, const uint8_t* panel, int64_t gap, const uint8_t* rows, int64_t stride,
                       float* sums) {
        const __m512i values = table(weight);
        __m512 sum[P][R] = {};
        for (int64_t group = 0; group < steps(weight); ++group, rows += kRowGroup)
            for (int p = 0; p < P; ++p)
                for (int part = 0; part < kParts; ++part) {
                    const uint8_t* from = codes_at(weight, panel + p * gap, group);
                    prefetch_record(from + part * kCodes / kParts + kAhead, kIsInt4 ? kInt4Record : kCodes / kParts);
                    __m512i weights[kPartQuads];
                    packed_codes(from, part, values, weights);
                    const uint8_t* scales = scales_at(panel + p * gap, group, part);
                    const __m512 min = kIsInt4 ? halves(scales + kMinsOffset) : _mm512_setzero_ps();
                    part_of<R>(weights, halves(scales), min, rows, stride, part, sum[p]);
                }
        store_sums<R, P>(sum, sums);
    }

    static const uint8_t* unpack(const Weight& weight, const uint8_t* panel, int64_t first, int64_t count,
                                 uint8_t* scratch) {
        const __m512i values = table(weight);
        uint8_t* to = scratch;
        for (int64_t group = first; group < first + count; ++group, to += kUnpacked)
            for (int part = 0; part < kParts; ++part) {
                __m512i weights[kPartQuads];
                packed_codes(codes_at(weight, panel, group), part, values, weights);
                for (int quad = 0; quad < kPartQuads; ++quad)
                    _mm512_storeu_si512(to + (part * kPartQuads + quad) * 64, weights[quad]);
                const uint8_t* scales = scales_at(panel, group, part);
                float* floats = reinterpret_cast<float*>(to + 512);
                _mm512_storeu_ps(floats + part * kPanel, halves(scales));
                if (kIsInt4) _mm512_storeu_ps(floats + kPanel, halves(scales + kMinsOffset));
            }
        return scratch;
    }

    template <int R>
    INLINE void tile(const Weight&, const uint8_t* unpacked, int64_t first, int64_t count, const uint8_t* rows,
                     int64_t stride, float* sums, Ahead ahead) {
        __m512 sum[R];
        load_sums<R>(sums, sum);
        for (rows += first * kRowGroup; count > 0; --count, unpacked += kUnpacked, rows += kRowGroup) {
            prefetch_step<4>(ahead);
            const float* scales = reinterpret_cast<const float*>(unpacked + 512);
            for (int part = 0; part < kParts; ++part) {
                __m512i weights[kPartQuads];
                for (int quad = 0; quad < kPartQuads; ++quad)
                    weights[quad] = load(unpacked + (part * kPartQuads + quad) * 64);
                const __m512 min = kIsInt4 ? _mm512_loadu_ps(scales + kPanel) : _mm512_setzero_ps();
                part_of<R>(weights, _mm512_loadu_ps(scales + part * kPanel), min, rows, stride, part, sum);
            }
        }
        keep_sums<R>(sum, sums);
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
