// What the kernels share: exported names, bfloat16, rounding.
//
// Owns: the conversions between bfloat16 and float. Does not: hold state (cpu_features.cpp holds the instruction set).

#pragma once

#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

struct Bfloat16 {
    uint16_t bits;
};

INLINE float widen(float value) { return value; }

INLINE float widen(Bfloat16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

INLINE void narrow(float value, float& out) { out = value; }

// Round to nearest, ties to even. A NaN becomes 0x7fc0, because rounding its payload up could give an infinity.
INLINE void narrow(float value, Bfloat16& out) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out.bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

// Each has all before it. kAmx is kAvx512 with VNNI and tiles, which only linear layers use.
enum Isa : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// Compilers that know AMX; only on Linux, where a process asks for the tiles in a way of its own.
#if defined(OCTAVO_EMULATED)
#define OCTAVO_HAS_AMX
#elif defined(__x86_64__) && defined(__linux__) && defined(__clang__)
#if __clang_major__ >= 12
#define OCTAVO_HAS_AMX
#endif
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#if __GNUC__ >= 11
#define OCTAVO_HAS_AMX
#endif
#endif

EXPORT int32_t octavo_kernels_isa();
