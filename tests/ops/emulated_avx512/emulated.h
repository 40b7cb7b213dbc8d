// What the emulated intrinsics share.

#pragma once

#include <cstdint>
#include <cstring>

// Not inlined, which halves the time to compile; but where vectors of 256 bits are returned, since how that is done
// depends on the instruction set, which a file may choose after it includes this one.
#define EMULATED [[gnu::noinline, gnu::unused]] static
#define EMULATED_INLINE static inline __attribute__((always_inline))

template <typename To, typename From>
EMULATED To emulated_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
