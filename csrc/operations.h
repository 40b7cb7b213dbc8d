// Operations over rows of float32, one row a token: the structures with which Python describes a run of them.
//
// Owns: the structures shared with models/transformers_runs.py. All fields have 8 bytes.
// Shapes: T tokens, H query heads, K KV heads, D size of a head, I intermediate size.

#pragma once

#include "decoder_step.h"

namespace octavo {

enum OperationKind : int64_t {
    kAddRows = 0,       // sum = x + other
    kNormRows = 1,      // out = RMS norm of each `size` values of x; with `other`, sum = x + other is normed instead
    kScaleRows = 2,     // out = x * number
    kMultiplyRows = 3,  // out = x times the weights
    kActivateRows = 4,  // out [I] = the activation of x [2 * I]
    kAttendRows = 5,    // out [H, D] of x [H + 2 * K, D]; x is rotated in place by `other` [2, D], and its last heads are
                        // values
};

// Buffers are given by index. -1: none.
struct Operation {
    int64_t kind, x, other, out, sum;
    int64_t size, activation;
    double number;                    // a norm's eps, or a factor
    const float* weight;              // [size]
    Multiplication product;
    const AttentionLayer* attention;
    int64_t group;                    // an index into RunStep::groups
};

struct Run {
    const Operation* operations;
    int64_t num_operations;
    const int64_t* widths;            // of each buffer: floats of a token
    int64_t num_buffers, num_tensors;  // the first buffers are tensors of the caller, the others lie in the workspace
};

struct RunStep {
    int64_t num_tokens;
    float* const* tensors;
    const StepGroup* groups;
    void* workspace;
};

}  // namespace octavo
