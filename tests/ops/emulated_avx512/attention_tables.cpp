// Stands for the attention of the other instruction sets in the emulated library, which chooses AVX-512 always.

#include "attention_kernels.h"

namespace octavo {

const AttentionKernels kAttentionPortable = {}, kAttentionAvx2 = {};

}  // namespace octavo
