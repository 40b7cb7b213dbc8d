// Linear layers over bfloat16 weights with AVX512_BF16. Activations are rounded to bfloat16. One instruction multiplies
// and adds pairs, with its own rounding (subnormal products become zero).

#if defined(__x86_64__)

#include <immintrin.h>

#include "linear_kernels.h"

#if defined(OCTAVO_EMULATED)  // compiled for the base instruction set, with functions for the intrinsics
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,avx512bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,avx512bf16")
#endif

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header
#endif

#include "linear_blocks.h"
#include "linear_avx512.h"

namespace octavo {
namespace {

struct Pairs {
    static constexpr int kParts = 1;

    static int64_t steps(const Weight& weight) { return (weight.inputs + 1) / 2; }

    INLINE __m512i weights(const uint8_t* line, int) { return load(line); }

    INLINE __m512 add(__m512 sum, __m512i weights, const uint8_t* x) {
        return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)broadcast32(x));
    }
};

int64_t bytes(int64_t inputs) { return padded_row((inputs + 1) / 2 * 4); }

void prepare(const float* x, int64_t inputs, void* out) {
    Bfloat16* to = static_cast<Bfloat16*>(out);
    for (int64_t k = 0; k < inputs; ++k) narrow(x[k], to[k]);
    if (inputs % 2 != 0) to[inputs].bits = 0;
}

}  // namespace

const LinearKernels kBf16Linear = {bytes, prepare, run_panels<Lines<Pairs>>};

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
