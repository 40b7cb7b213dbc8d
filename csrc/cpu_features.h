// What this machine can do, and which instruction set is in use.
//
// Owns: detection and the choice. Invariants: a feature function is true only where kAvx512 is in use too, so that
// restricting the instruction set (for tests) restricts all.

#pragma once

#include "kernel.h"

namespace octavo {

Isa isa_in_use();
bool has_vnni();  // AVX512_VNNI
bool has_bf16();  // AVX512_BF16

}  // namespace octavo
