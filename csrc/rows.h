// Row operations of a decoder step, in float32: norm, gated activation, rotation.
//
// Owns: operations on one row (or head), for the instruction set in use. Does not: split work among threads.
// Invariants: a row's result depends on that row alone. Every sum is made in 16 lanes and one tree.

#pragma once

#include <cstdint>

namespace octavo {

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

struct RowKernels {
    // out = x / sqrt(mean(x^2) + eps) * weight. `out` may be `x`.
    void (*rms_norm)(const float* x, const float* weight, int64_t size, float eps, float* out);
    // out[i] = act(gate_up[i]) * gate_up[size + i]
    void (*gate)(int64_t activation, const float* gate_up, int64_t size, float* out);
    // Rotate one head of `size`, halves split (Su et al., "RoFormer", 2021). turn: cosines [size], signed sines [size].
    void (*rotate)(float* head, const float* turn, int64_t size);
    void (*add)(const float* x, int64_t size, float* out);
    void (*scale)(float factor, int64_t size, float* out);
};

const RowKernels& row_kernels();

}  // namespace octavo
