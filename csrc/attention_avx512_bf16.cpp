// Attention over a bfloat16 pool with AVX512_BF16: an instruction multiplies and adds pairs of bfloat16, so a product takes
// half the instructions, and transposing keys a quarter. The instruction has its own rounding: subnormal products and sums
// become zero.

#if defined(__x86_64__)

#include <cmath>
#include <limits>

#include "attention_kernels.h"

#if defined(OCTAVO_EMULATED)  // functions for the intrinsics of 512 bits; those of 256 are the machine's
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the compiler's own headers (bug 105593)
#include "attention_avx512.h"
#include "attention_tile.h"

namespace octavo {
namespace {

struct Avx512Pairs : Avx512Lanes {
    static constexpr int kBlock = 16, kPacked = 2;

    static INLINE_MEMBER Reg dot(Reg a, Reg b, Reg sum) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
    }

    // Sixteen pairs: a number of the first row and the same place of the second.
    static INLINE_MEMBER Reg pair(const Bfloat16* first, const Bfloat16* second) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
        return _mm512_castsi512_ps(
            _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
    }

    // Write sixteen numbers, rounded, as eight words.
    static INLINE_MEMBER void pack(Reg x, float* to) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
    }

    // Write the words of count numbers, a multiple of eight, times the scale.
    static INLINE_MEMBER void pack_scaled(const float* from, int64_t count, float scale, float* to) {
        float scaled[kMaxSize];
        for (int64_t d = 0; d < count; ++d) scaled[d] = from[d] * scale;
        save(scaled, count, reinterpret_cast<Bfloat16*>(to));
    }

    // Make the panel [size / 2][width] of words of the keys at sixteen offsets of a pool.
    static INLINE_MEMBER void turn(const Bfloat16* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
        const int64_t words = size / 2;
        for (int64_t word = 0; word < words; word += 16) {
            const int64_t count = words - word < 16 ? words - word : 16;
            const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1u);
            __m512i rows[16], twos[16];
            for (int j = 0; j < 16; ++j) rows[j] = _mm512_maskz_loadu_epi32(mask, pool + at[j] + 2 * word);
            for (int j = 0; j < 16; j += 2) {
                twos[j] = _mm512_unpacklo_epi32(rows[j], rows[j + 1]);
                twos[j + 1] = _mm512_unpackhi_epi32(rows[j], rows[j + 1]);
            }
            for (int j = 0; j < 16; j += 4) {  // rows[j + i]: word i of each quarter, of keys j to j + 3
                rows[j] = _mm512_unpacklo_epi64(twos[j], twos[j + 2]);
                rows[j + 1] = _mm512_unpackhi_epi64(twos[j], twos[j + 2]);
                rows[j + 2] = _mm512_unpacklo_epi64(twos[j + 1], twos[j + 3]);
                rows[j + 3] = _mm512_unpackhi_epi64(twos[j + 1], twos[j + 3]);
            }
            for (int i = 0; i < 4; ++i) {
                const __m512i a = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);       // words i, 8 + i of keys 0 to 7
                const __m512i b = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);       // words 4 + i, 12 + i
                const __m512i c = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);  // of keys 8 to 15
                const __m512i e = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
                twos[i] = _mm512_shuffle_i32x4(a, c, 0x88), twos[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
                twos[4 + i] = _mm512_shuffle_i32x4(b, e, 0x88), twos[12 + i] = _mm512_shuffle_i32x4(b, e, 0xdd);
            }
            float* to = panel + word * width;
            for (int64_t j = 0; j < count; ++j) store(_mm512_castsi512_ps(twos[j]), to + j * width);
        }
    }
};

}  // namespace

const AttendItems kAttendPairs = attend_items<Avx512Pairs, Bfloat16>;

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
