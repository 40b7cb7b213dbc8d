// Detection by cpuid, and the C ABI octavo_kernels_{abi,isa,use_isa,has_openmp}.

#include "cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(OCTAVO_HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>

#include "linear_kernels.h"
#endif

namespace {

struct Features {
    Isa isa = kPortable;
    bool vnni = false, bf16 = false;
};

#if defined(OCTAVO_HAS_AMX)
// Return True if the processor has AMX with bfloat16 and int8, and the system saves tiles and lets this process use
// them. It refuses if a thread's signal stack is too small for them.
bool may_use_tiles() {
    unsigned a = 0, b = 0, c = 0, d = 0, saved = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_OSXSAVE) == 0) return false;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
    if ((saved >> 17 & 3u) != 3) return false;
    constexpr unsigned kAmxFeatures = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, int8
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAmxFeatures) != kAmxFeatures) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of Linux 5.16
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

Features detect() {
    Features found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c) found.isa = kAvx2;
    if (found.isa == kAvx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found.isa = kAvx512;
    if (found.isa == kAvx512 && __get_cpuid_count(7, 0, &a, &b, &c, &d)) found.vnni = (c >> 11 & 1u) != 0;
    if (found.isa == kAvx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.bf16 = (a >> 5 & 1u) != 0;
#if defined(OCTAVO_HAS_AMX)
    if (found.isa == kAvx512 && found.vnni && may_use_tiles() && octavo::amx_agrees()) found.isa = kAmx;
#endif
#endif
    return found;
}

const Features features = detect();
Isa isa = features.isa;

}  // namespace

namespace octavo {

Isa isa_in_use() { return isa; }
bool has_vnni() { return isa >= kAvx512 && features.vnni; }
bool has_bf16() { return isa >= kAvx512 && features.bf16; }

}  // namespace octavo

// Version of this ABI. The loader refuses any other version.
EXPORT int32_t octavo_kernels_abi() { return 13; }

// Instruction set in use: 0 portable, 1 AVX2 (with FMA and F16C), 2 AVX-512 (F, BW, DQ, VL), 3 AMX too.
EXPORT int32_t octavo_kernels_isa() { return isa; }

// Use an instruction set, at most the best that this machine has; return the one in use. For tests.
EXPORT int32_t octavo_kernels_use_isa(int32_t wanted) {
    isa = static_cast<Isa>(wanted < 0 ? 0 : (wanted < features.isa ? wanted : features.isa));
    return isa;
}

// Return 1 if the build has OpenMP, else 0.
EXPORT int32_t octavo_kernels_has_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}
