// Row operations of a decoder step, in float32: norms, activations, rotation, scales.
//
// Owns: operations on one row (or head), for the instruction set in use. Does not: split work among threads.
// Invariants: a row's result depends on that row alone. Every sum is made in 16 lanes and one tree.

#pragma once

#include <cstdint>

namespace octavo {

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3, kRelu2 = 4, kClampedSwiglu = 5 };
enum NormKind : int64_t { kRmsNorm = 0, kLayerNorm = 1 };

struct RowKernels {
    // out = x / sqrt(mean(x^2) + eps) * weight. `out` may be `x`.
    void (*rms_norm)(const float* x, const float* weight, int64_t size, float eps, float* out);
    // out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias (null: none). `out` may be `x`.
    void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t size, float eps, float* out);
    // out[i] = act(x[i]) * x[size + i] if gated (kClampedSwiglu, always gated, adds 1 to a clamped x[size + i]), else act(x[i])
    void (*activate)(int64_t activation, bool is_gated, const float* x, int64_t size, float* out);
    // Rotate the first `size` values of a head (Su et al., "RoFormer", 2021): pairs of neighbours if interleaved, else
    // of values half of `size` apart. turn: cosines [size], signed sines [size], in the order of the values.
    void (*rotate)(float* head, const float* turn, int64_t size, bool is_interleaved);
    void (*add)(const float* x, int64_t size, float* out);
    void (*scale)(float factor, int64_t size, float* out);
    // out = cap * tanh(out / cap)
    void (*soft_cap)(float cap, int64_t size, float* out);
};

const RowKernels& row_kernels();

}  // namespace octavo
