// Stands for csrc/cpu_features.cpp in the emulated library: every feature, chosen by a test.

#include "cpu_features.h"

namespace {

int32_t isa = kAvx512;
bool has_extensions = true;

}  // namespace

namespace octavo {

Isa isa_in_use() { return static_cast<Isa>(isa); }
bool has_vnni() { return isa >= kAvx512 && has_extensions; }
bool has_bf16() { return isa >= kAvx512 && has_extensions; }

}  // namespace octavo

EXPORT int32_t octavo_kernels_isa() { return isa; }

EXPORT int32_t octavo_kernels_use_isa(int32_t wanted) { return isa = wanted < kAmx ? wanted : kAmx; }

EXPORT void octavo_use_extensions(int32_t wanted) { has_extensions = wanted != 0; }
