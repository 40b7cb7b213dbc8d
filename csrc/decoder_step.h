// One step of a Llama-like decoder in one call: the structures with which Python describes the model and each step.
//
// Owns: the structures shared with models/native_decoder.py. All fields have 8 bytes.
// Shapes: T tokens, E hidden size, H query heads, K KV heads, D head size, I intermediate size, V vocabulary.

#pragma once

#include "attention.h"
#include "linear.h"

namespace octavo {

// One multiplication: weights over consecutive runs of outputs, with the same inputs.
struct Multiplication {
    const Weight* parts;
    int64_t num_parts;
};

struct Layer {
    Multiplication qkv, output, gate_up, down;
    const float *attention_norm, *mlp_norm;         // [E]
    const float *after_attention, *after_mlp;       // [E] or null: norms of attention's and the MLP's outputs
    const float *query_norm, *key_norm;             // [D] or null
    const float* rope_table;                        // [position, 2, D]: cosines, signed sines
    int64_t group;                                  // cache group, an index into Step::groups
    AttentionLayer attention;
};

struct Model {
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, activation;
    double norm_eps, embedding_scale;               // scale 1 = none
    const Layer* layers;
    Multiplication embedding, head;                 // embedding: rows [V, E]; may be the head's own weight
    const float* final_norm;                        // [E]
};

struct StepGroup {
    const AttentionStep* attention;
    const int64_t* slot_mapping;                    // [T] flat pool positions
};

struct Step {
    int64_t num_tokens;
    const int32_t* token_ids;
    const int64_t* positions;
    const StepGroup* groups;
    float* hidden;                                  // out [T, E], after the final norm
    void* workspace;
};

}  // namespace octavo
