// Linear layers with AVX-512: float32 weights, and bfloat16 weights widened to float32.

#if defined(__x86_64__)

#include <immintrin.h>

#include "linear_kernels.h"

#if defined(OCTAVO_EMULATED)  // compiled for the base instruction set, with functions for the intrinsics
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#endif

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header
#endif

#include "linear_blocks.h"
#include "linear_avx512.h"

namespace octavo {
namespace {

template <typename T>
struct Floats {
    static constexpr bool kIsFloat = sizeof(T) == 4;
    static constexpr int kTile = 12, kDirectRows = 4, kDirectPanels = 4;
    static constexpr int64_t kBlockSteps = 256;  // inputs; even
    static constexpr int64_t kScratchBytes = kIsFloat ? 64 : kBlockSteps * kPanel * 4;
    static constexpr int64_t kStep = kPanel * static_cast<int64_t>(sizeof(T));

    static int64_t steps(const Weight& weight) { return weight.inputs; }

    // Input k of a panel; for bfloat16, the low or the high half of a pair.
    INLINE __m512 input(const uint8_t* panel, int64_t k) {
        if (kIsFloat) return _mm512_loadu_ps(reinterpret_cast<const float*>(panel + k * kStep));
        const __m512i pair = load(panel + k / 2 * 2 * kStep);
        return _mm512_castsi512_ps(k % 2 == 0 ? _mm512_slli_epi32(pair, 16)
                                              : _mm512_and_si512(pair, _mm512_set1_epi32(-65536)));
    }

    template <int R, int P>
    INLINE void direct(const Weight& weight, const uint8_t* panel, int64_t gap, const uint8_t* rows, int64_t stride,
                       float* sums) {
        __m512 sum[P][R] = {};
        for (int64_t k = 0; k < weight.inputs; ++k)
            for (int p = 0; p < P; ++p) {
                __builtin_prefetch(panel + p * gap + k * kStep + kAhead, 0, 3);
                const __m512 values = input(panel + p * gap, k);
                for (int r = 0; r < R; ++r)
                    sum[p][r] = _mm512_fmadd_ps(values, broadcast_float(rows + r * stride + k * 4), sum[p][r]);
            }
        store_sums<R, P>(sum, sums);
    }

    static const uint8_t* unpack(const Weight&, const uint8_t* panel, int64_t first, int64_t count, uint8_t* scratch) {
        panel += first * kStep;
        if (kIsFloat) return panel;
        float* to = reinterpret_cast<float*>(scratch);
        for (int64_t k = 0; k < count; ++k) _mm512_storeu_ps(to + k * kPanel, input(panel, k));
        return scratch;
    }

    template <int R>
    INLINE void tile(const Weight&, const uint8_t* unpacked, int64_t first, int64_t count, const uint8_t* rows,
                     int64_t stride, float* sums, Ahead ahead) {
        __m512 sum[R];
        load_sums<R>(sums, sum);
        for (rows += first * 4; count > 0; --count, unpacked += kPanel * 4, rows += 4) {
            prefetch_step<1>(ahead);
            const __m512 values = _mm512_loadu_ps(reinterpret_cast<const float*>(unpacked));
            for (int r = 0; r < R; ++r)
                sum[r] = _mm512_fmadd_ps(values, broadcast_float(rows + r * stride), sum[r]);
        }
        keep_sums<R>(sum, sums);
    }
};

}  // namespace

const LinearKernels kAvx512Linear[2] = {
    {floats_bytes, prepare_floats, run_panels<Floats<float>>},
    {floats_bytes, prepare_floats, run_panels<Floats<Bfloat16>>},
};

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
