// float16 to float32 in plain C++.

#pragma once

#include <cstring>

#include "kernel.h"

// Exact for every float16. A subtraction of floats handles subnormals, the widened exponent infinities and NaNs.
INLINE float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    uint32_t bits = static_cast<uint32_t>(half & 0x7fffu) << 13;
    const uint32_t exponent = bits & 0x0f800000u;
    bits += 112u << 23;
    float value;
    if (exponent == 0) {
        bits += 1u << 23;
        const float smallest_normal = 6.103515625e-05f;
        std::memcpy(&value, &bits, sizeof value);
        value -= smallest_normal;
        std::memcpy(&bits, &value, sizeof bits);
    } else if (exponent == 0x0f800000u) {
        bits += 112u << 23;
    }
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
