// One step of a Llama-like decoder in one call: the structures with which Python describes the model and each step.
//
// Owns: the structures shared with models/native_decoder.py. All fields have 8 bytes.
// Shapes: T tokens, E hidden size, H query heads, K KV heads, D head size, R rotated size, I intermediate size,
// V vocabulary.

#pragma once

#include "attention.h"
#include "experts.h"
#include "lora.h"
#include "multiply.h"

namespace octavo {

// A norm that a family lacks has no weight; `bias` may be null (and is, for kRmsNorm).
struct Norm {
    const float *weight, *bias;
};

struct Layer {
    Multiplication qkv, output, gate_up, down;
    Norm attention_norm, mlp_norm;                  // [E]: of the stream, before attention and the MLP
    Norm after_attention, after_mlp;                // [E]: of attention's and the MLP's outputs
    Norm query_norm, key_norm;                      // [D]: of each head; if wide, [H * D] and [K * D]: of all heads
    const float* rope_table;                        // [position, 2, R]: cosines, signed sines; null: no rope
    const Mixture* mixture;                         // instead of gate_up and down, or null
    int64_t group;                                  // cache group, an index into Step::groups
    AttentionLayer attention;
};

struct Model {
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim;
    int64_t rope_dim, rope_is_interleaved;          // R: rotated values of each head
    int64_t rope_height, rope_width;                // first pairs of a head that turn by height and by width, if
                                                    // Step::rope_positions is given
    int64_t qk_norm_is_wide, norm_kind;
    int64_t intermediate_size, activation, is_gated;  // not gated: gate_up computes the up projection alone
    int64_t is_parallel;                            // the MLP reads the layer's input too
    double norm_eps, stream_eps;                    // of other norms, and of those of the stream
    double embedding_scale, logits_scale;           // 1 = none
    double logits_cap;                              // 0 = none
    const Layer* layers;
    Multiplication embedding, head;                 // embedding: rows [V, E]; may be the head's own weight
    Norm final_norm;                                // [E]
};

struct StepGroup {
    const AttentionStep* attention;
    const int64_t* slot_mapping;                    // [T] flat pool positions
};

struct Step {
    int64_t num_tokens;
    const int32_t* token_ids;
    const int64_t* positions;
    int64_t num_media;
    const int64_t* media_rows;                      // [num_media] ascending tokens whose embeddings are `media`
    const float* media;                             // [num_media, E], times the scale of the stream
    const int64_t* rope_positions;                  // [3, T] by time, height, width; null: positions
    const StepGroup* groups;
    float* hidden;                                  // out [T, E], after the final norm
    void* workspace;
    int64_t expert_bytes;                           // out: increased by the bytes of weights that mixtures have read
    const LoraStep* lora;                           // rows with adapters, or null
};

}  // namespace octavo
