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

struct Floats {
    static constexpr int kParts = 1;

    static int64_t steps(const Weight& weight) { return weight.inputs; }

    INLINE __m512 weights(const uint8_t* line, int) { return _mm512_loadu_ps(reinterpret_cast<const float*>(line)); }

    INLINE __m512 add(__m512 sum, __m512 weights, const uint8_t* x) {
        return _mm512_fmadd_ps(weights, broadcast_float(x), sum);
    }
};

// A line has pairs of inputs: the low halves of 32 bits, and the high halves.
struct WidenedPairs : Floats {
    static constexpr int kParts = 2;

    static int64_t steps(const Weight& weight) { return (weight.inputs + 1) / 2; }

    INLINE __m512 weights(const uint8_t* line, int part) {
        const __m512i pairs = load(line);
        return _mm512_castsi512_ps(part == 0 ? _mm512_slli_epi32(pairs, 16)
                                             : _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)));
    }
};

}  // namespace

const LinearKernels kAvx512Linear[2] = {
    {floats_bytes, prepare_floats, run_panels<Lines<Floats>>},
    {floats_bytes, prepare_floats, run_panels<Lines<WidenedPairs>>},
};

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
