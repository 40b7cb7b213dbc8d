// Attention with AVX-512: sixteen lanes, thirty-two registers.

#if defined(__x86_64__)

#include <cmath>
#include <limits>

#include "attention_kernels.h"

#if defined(OCTAVO_EMULATED)  // functions for the intrinsics of 512 bits; those of 256 are the machine's
#pragma GCC target("avx2,fma,f16c")
#elif defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                             apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of the compiler's own headers (bug 105593)
#include "attention_avx512.h"
#include "attention_tile.h"

namespace octavo {

constexpr AttentionKernels kTable = kernels_of<Avx512Lanes>();  // no code of this file runs at loading
const AttentionKernels kAttentionAvx512 = kTable;

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
