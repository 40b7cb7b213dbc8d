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
    static constexpr int kTile = 12, kDirectRows = 4, kDirectPanels = 4;
    static constexpr int64_t kBlockSteps = 256, kScratchBytes = 64;

    static int64_t steps(const Weight& weight) { return (weight.inputs + 1) / 2; }

    INLINE __m512 add(__m512 sum, const uint8_t* weights, const uint8_t* row) {
        return _mm512_dpbf16_ps(sum, (__m512bh)load(weights), (__m512bh)broadcast32(row));
    }

    template <int R, int P>
    INLINE void direct(const Weight& weight, const uint8_t* panel, int64_t gap, const uint8_t* rows, int64_t stride,
                       float* sums) {
        __m512 sum[P][R] = {};
        for (int64_t k = steps(weight); k > 0; --k, panel += 64, rows += 4)
            for (int p = 0; p < P; ++p) {
                __builtin_prefetch(panel + p * gap + kAhead, 0, 3);
                for (int r = 0; r < R; ++r) sum[p][r] = add(sum[p][r], panel + p * gap, rows + r * stride);
            }
        store_sums<R, P>(sum, sums);
    }

    static const uint8_t* unpack(const Weight&, const uint8_t* panel, int64_t first, int64_t, uint8_t*) {
        return panel + first * 64;
    }

    template <int R>
    INLINE void tile(const Weight&, const uint8_t* unpacked, int64_t first, int64_t count, const uint8_t* rows,
                     int64_t stride, float* sums, Ahead ahead) {
        __m512 sum[R];
        load_sums<R>(sums, sum);
        for (rows += first * 4; count > 0; --count, unpacked += 64, rows += 4) {
            prefetch_step<1>(ahead);
            for (int r = 0; r < R; ++r) sum[r] = add(sum[r], unpacked, rows + r * stride);
        }
        keep_sums<R>(sum, sums);
    }
};

int64_t bytes(int64_t inputs) { return padded_row((inputs + 1) / 2 * 4); }

void prepare(const float* x, int64_t inputs, void* out) {
    Bfloat16* to = static_cast<Bfloat16*>(out);
    for (int64_t k = 0; k < inputs; ++k) narrow(x[k], to[k]);
    if (inputs % 2 != 0) to[inputs].bits = 0;
}

}  // namespace

const LinearKernels kBf16Linear = {bytes, prepare, run_panels<Pairs>};

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
