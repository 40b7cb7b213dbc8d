// What all instruction sets share for attention: float16, the scratch of a thread, the table of functions.
//
// Does not: compute attention (attention_tile.h does), or choose an instruction set (attention.cpp does).

#pragma once

#include "attention.h"

#define INLINE_MEMBER inline __attribute__((always_inline))

struct Float16 {
    uint16_t bits;
};

INLINE float widen(Float16 value) {
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
    // the exponent is rebiased by a product, which also makes the subnormals normal
    uint32_t bits = rest << 13;
    float wide, factor = 5.192296858534828e33f;  // 2^112
    std::memcpy(&wide, &bits, sizeof wide);
    wide *= factor;
    std::memcpy(&bits, &wide, sizeof bits);
    if (rest >= 0x7c00u) bits = 0x7f800000u | (rest & 0x3ffu) << 13;
    bits |= sign;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Round to nearest, ties to even. A value that is too large becomes infinity; a NaN stays NaN.
INLINE void narrow(float value, Float16& out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u;
    } else if (rest >= 0x477ff000u) {
        half = 0x7c00u;
    } else if (rest >= 0x38800000u) {
        half = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
    } else {  // subnormal: the sum with 0.5 has its last bit at 2^-24, and rounds there
        float small;
        std::memcpy(&small, &rest, sizeof small);
        small += 0.5f;
        std::memcpy(&half, &small, sizeof half);
        half -= 0x3f000000u;
    }
    out.bits = static_cast<uint16_t>(sign | half);
}

// Prefetch the cache line at an address, which need not be valid.
INLINE void ask_for(const void* line) { __builtin_prefetch(line); }

namespace octavo {

constexpr int64_t kMaxLanes = 16;

// Buffers of one thread. Rows are dense at the head size in use, so small heads touch little of the buffers.
struct alignas(64) AttentionScratch {
    float query[kMaxRows * kMaxSize], part[kMaxRows * kMaxSize], total[kMaxRows * kMaxSize];
    float scores[kMaxRows * (kPart + 16)];
    float panel[4 * kMaxLanes * kMaxSize];  // keys [size][4 vectors], or values [kPart][2 vectors]
    float part_max[kMaxRows], part_sum[kMaxRows], total_max[kMaxRows], total_sum[kMaxRows];
};

AttentionScratch& attention_scratch();

struct AttentionKernels {
    void (*items[3])(const AttentionLayer&, const AttentionStep&, const float* query, int64_t query_stride, float* out,
                     int64_t out_stride, int64_t thread, int64_t threads);
    void (*join)(const AttentionLayer&, const AttentionStep&, float* out, int64_t out_stride, int64_t thread,
                 int64_t threads);
    void (*write[3])(const AttentionLayer&, const int64_t* slots, int64_t first, int64_t end, const float* k,
                     const float* v, int64_t stride);
};

extern const AttentionKernels kAttentionPortable;
#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx2, kAttentionAvx512;
#endif

}  // namespace octavo
