// Causal attention of query tokens over their rows' paged keys and values, in phases of one parallel region.
//
// Owns: the layout of a layer's pools and of a step's work, and the phases that compute the work.
// Does not: allocate pools, start threads, or hold barriers. AttentionPlan in ops/attention_plan.py fills the work.
// Invariants: a token's result depends on its own row alone, bit for bit. Contexts are cut into parts of kPart
// positions at fixed multiples. Within a part every sum runs in a fixed order of positions and sizes, whatever the
// tile. Parts are folded in order. Neither the tokens of an item nor the items of a thread therefore change a bit.
// Positions before a token's window, their table entries, and positions after a context are not read.

#pragma once

#include <algorithm>
#include <cstdint>

#include "kernel.h"
#include "team.h"

namespace octavo {

constexpr int64_t kPart = 128;     // positions of one part
constexpr int64_t kMaxRows = 96;   // query rows (token x head) that an item computes at once; see AttentionItem
constexpr int64_t kMaxSize = 256;  // head_dim and value_dim: multiples of 8 up to this

// Int8 has a scale for each position and KV head, float8 (e4m3) has none. See attention_codes.h.
enum KvKind : int64_t { kKvFloat32 = 0, kKvBfloat16 = 1, kKvFloat16 = 2, kKvInt8 = 3, kKvFloat8 = 4, kKvKinds = 5 };

struct AttentionLayer {
    void *keys, *values;  // [block, position, KV head, size], for int8 [block, position, row]
    int64_t kv_kind;
    int64_t block_size, num_heads, num_kv_heads, head_dim, value_dim, window;  // window 0 = none
    double scale, soft_cap;                                                    // soft_cap 0 = none
    const float *sinks, *slopes;  // of each query head, or null: see LayerAttention in ops/attention.py
};

// Some tokens that see the same keys and values in parts [first_part, end_part), for KV heads [first_head, end_head).
// tokens * heads * (num_heads / num_kv_heads) <= kMaxRows, unless there are only one token and one KV head.
struct AttentionItem {
    int64_t first_member, num_members;  // its tokens: members[first_member ...]; keys and values of the first one's row
    int64_t first_part, end_part, first_head, end_head;
};

struct AttentionStep {
    int64_t num_tokens, num_rows, table_stride;
    const int64_t* table;                // [row, index]: block numbers
    const int64_t *rows, *contexts;      // of each token: its row; its place in the sequence, plus 1
    const int64_t* seen;                 // of each token: how many positions it sees (before a window); contexts or more
    int64_t num_items;
    const AttentionItem* items;
    const int64_t* members;              // tokens, by item
    const int64_t* costs;                // [num_items + 1], ascending from 0: a share is a run of equal cost
    const int64_t* first_slots;          // of each token: slot of its part 0 in `partial` (may be < 0: a window), or
                                         // kDirect where one item has all its parts and writes its output itself
    int64_t num_joins;
    const int64_t* joins;                // ascending tokens whose parts are in `partial`
    float* partial;                      // [slot, head, value_dim + kTail]: weighted values, then maximum and sum
};

constexpr int64_t kDirect = INT64_MIN;
constexpr int64_t kTail = 8;

// Rows of keys and of values, one a token: [KV head, size] at k + token * k_stride.
struct NewKv {
    const float *k, *v;
    int64_t k_stride, v_stride;
};

// Write keys and values of tokens [first_token, end_token) into their slots, rounded to the pool's kind.
void write_kv(const AttentionLayer& layer, const int64_t* slot_mapping, int64_t first_token, int64_t end_token,
              const NewKv& kv);

// First phase: compute one of several shares of the items. Query and output rows are [head, size]; strides are in floats.
void attend(const AttentionLayer& layer, const AttentionStep& step, const float* query, int64_t query_stride,
            float* out, int64_t out_stride, int64_t share, int64_t shares);

// How many shares the threads of a region take, if they are not dealt.
inline int64_t attention_shares(int64_t threads) { return threads == 1 ? 1 : 2 * threads; }

// Second phase, when all items are computed: fold the parts of units [first, end); a unit is a query head of one of
// `joins`, so there are num_joins * num_heads.
void attend_join(const AttentionLayer& layer, const AttentionStep& step, float* out, int64_t out_stride, int64_t first,
                 int64_t end);

// The units of tokens [rows.first, rows.end), each of which has `heads` query heads.
inline Share join_units(const AttentionStep& step, int64_t heads, const Share& rows) {
    const int64_t* end = step.joins + step.num_joins;
    const int64_t* first = std::lower_bound(step.joins, end, rows.first);
    return {(first - step.joins) * heads, (std::lower_bound(first, end, rows.end) - step.joins) * heads};
}

}  // namespace octavo
