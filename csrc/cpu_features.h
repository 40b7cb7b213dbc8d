// The features of this machine, and the instruction set in use.
//
// Owns: detection and the choice. Invariants: a feature function is true only while kAvx512 or kAmx is in use, so
// restricting the instruction set (for tests) restricts the features too. kAmx is in use only where its sums have
// the specified bits (linear_kernels.h).

#pragma once

#include "kernel.h"

namespace octavo {

Isa isa_in_use();
bool has_vnni();  // AVX512_VNNI
bool has_bf16();  // AVX512_BF16

}  // namespace octavo
