// Low-rank adapters (Hu et al., "LoRA", arXiv 2106.09685) of a step's rows: y += B (A x), where rows have different ones.
//
// Owns: the structures shared with models/native_adapters.py (all fields have 8 bytes), and the two phases.
// Does not: read files, scale (B has the scale), or know which linear layer it is.
// Invariants: a row's result depends on that row and its adapter alone, bit for bit: not on other rows, the threads, or
// the instruction set, because products and sums are rounded one by one, in one order.

#pragma once

#include <cstdint>

namespace octavo {

// B of some consecutive outputs of a linear layer.
struct LoraPiece {
    int64_t first_rank, rank, first_output, outputs;
    const void* b;  // [panel of 16 outputs][rank][16], the last panel padded
};

// The adapter of one linear layer: the ranks of its pieces are stacked. Float32 or bfloat16.
struct LoraWeight {
    int64_t is_bfloat16, rank, inputs, num_pieces;  // rank: a multiple of 16; 0: the layer has no adapter
    const void* a;                                  // [block of 16 ranks][input][16]
    const LoraPiece* pieces;
};

// The rows of a step that have adapters, grouped by adapter.
struct LoraStep {
    int64_t num_rows, num_groups, max_inputs, max_rank;
    const int32_t* adapters;           // [T] of each row of the step, -1: none
    const int64_t* rows;               // [num_rows] rows of the step
    const int64_t* group_starts;       // [num_groups + 1] positions in `rows`
    const LoraWeight* const* weights;  // [num_groups] -> [layers * 4]
    float* inputs;                     // workspace [T, max_inputs]
    float* hidden;                     // workspace [num_rows, max_rank]
};

// A phase: hidden = A x for this thread's share of rows and ranks. `linear` is an index into each group's weights.
void lora_down(const LoraStep& step, int64_t linear, int thread, int threads);

// A phase, after a barrier: out[t] += B hidden for this thread's share of outputs.
void lora_up(const LoraStep& step, int64_t linear, float* out, int64_t out_stride, int thread, int threads);

}  // namespace octavo
