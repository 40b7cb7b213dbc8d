// Linear layers over packed weights: float32, bfloat16, and codes of 8 or 4 bits with a scale per group of inputs.
//
// Owns: the functions for other files. linear_layout.h owns the bytes, linear_kernels.h the tables of kernels.
// Does not: allocate, start threads (only the C ABI's own parallel regions do), or know torch.
// Invariants: an output depends on its row of activations and its row of the weight alone, bit for bit: not on the
// number of rows, the threads, or neighbours. Quantised kinds do not depend on the instruction set either: integer
// products are exact, and one float accumulator takes a fused multiply-add per group, in ascending order.

#pragma once

#include <cstdint>

namespace octavo {

// Codes of the last three select one of 16 int8 values of the kind: those of IQ4_NL and IQ4_XS, E2M1, NormalFloat.
enum WeightKind : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3, kIq4 = 4, kMxfp4 = 5, kNf4 = 6 };

// Python fills this struct: 8-byte fields only.
struct Weight {
    int64_t kind, outputs, inputs, group;  // group: inputs per scale: 32; int8 and mxfp4 also 16; floats: 0
    const void* packed;                    // octavo_linear_packed_bytes bytes, 64-byte aligned; equal for all machines
    const float* bias;                     // [outputs] or null
};

// Bytes of one prepared row: a multiple of 64. Like the form of the row, it depends on the instruction set in use.
int64_t prepared_bytes(int64_t kind, int64_t inputs);

// Convert a row of activations to the form that `linear` reads: int8 codes with a scale per 32, bfloat16, or a copy.
// `out` is 64-byte aligned. A group with a NaN or an infinity makes all outputs of the row NaN.
void prepare_row(int64_t kind, const float* x, int64_t inputs, void* out);

// A phase: out[t * out_stride + f] = (accumulate ? out : 0) + (prepared[t] . weight[f] + bias[f]) for this thread's
// outputs f and all rows t. No barrier inside.
void linear(const Weight& weight, const void* prepared, int64_t rows, float* out, int64_t out_stride, bool accumulate,
            int thread, int threads);

// The outputs of the panels [begin, end), of 16 outputs each, as a weight of their own.
Weight some_panels(const Weight& weight, int64_t begin, int64_t end);

// Dequantise row `output` of the weight into out[inputs]: the embedding lookup of a tied table.
void unpack_row(const Weight& weight, int64_t output, float* out);

}  // namespace octavo
