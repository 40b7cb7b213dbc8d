// The positions of a part in the pool, and prefetching their rows.
//
// Does not: compute. Every including file is one translation unit of one instruction set; nothing here has linkage.
// With few rows, attention is bound by memory. Measured in cycles per position and KV head (one Zen 3 core, 32 rows x
// 200 positions, bfloat16; reading alone takes 45): prefetching the rows of all heads, line after line in memory order,
// 66; the lines of each head separately, 84 to 105; in bursts instead of evenly, 73 to 93; 16 positions ahead instead of
// 32, 85. On one Zen 5 core with AVX-512, 64 positions ahead take 0.75 of the time of 32, and 96 no less; with AVX2 there
// is no difference.

#pragma once

#include "attention_kernels.h"

namespace octavo {
namespace {

constexpr int64_t kMaxBlock = 16;  // most keys that are transposed at once
constexpr int64_t kAhead = 64;    // distance of the prefetch, in positions
constexpr int64_t kMaxLines = (kPart + kMaxRows) * kMaxSize * 4 / 64;  // lines of a part's rows: one head's share

// The pool offsets of the keys of a part's positions [first, end), and of the values. Keys are transposed in whole
// blocks, and values taken in pairs of positions, so the entries around this range repeat a visible position; what is
// computed for these entries is masked.
struct Places {
    int64_t part, first, end;
    bool are_alike;  // rows of values are as wide as rows of keys
    int64_t at[kPart + kMaxBlock], of_values[kPart + kMaxBlock];

    INLINE_MEMBER const int64_t* values_at() const { return are_alike ? at : of_values; }
};

INLINE int64_t low_of(const AttentionLayer& layer, int64_t context) {
    return layer.window > 0 && context > layer.window ? context - layer.window : 0;
}

// Find the positions of a part that any token of the item sees.
template <class T>
INLINE void find_places(const AttentionLayer& layer, const AttentionStep& step, const AttentionItem& item, int64_t part,
                        Places& places) {
    const int64_t* members = step.members + item.first_member;
    int64_t lowest = INT64_MAX, highest = 0;
    for (int64_t i = 0; i < item.num_members; ++i) {
        const int64_t seen = step.seen[members[i]], low = low_of(layer, step.contexts[members[i]]);
        lowest = low < lowest ? low : lowest, highest = seen > highest ? seen : highest;
    }
    const int64_t begin = part * kPart, block_size = layer.block_size;
    const int64_t width = row_width<T>(layer.num_kv_heads, layer.head_dim);
    const int64_t value_width = row_width<T>(layer.num_kv_heads, layer.value_dim);
    const int64_t* table = step.table + step.rows[members[0]] * step.table_stride;
    places.part = part;
    places.first = lowest > begin ? lowest - begin : 0;
    places.end = highest - begin < kPart ? highest - begin : kPart;
    int64_t block = (begin + places.first) / block_size, offset = (begin + places.first) % block_size;
    for (int64_t at = places.first; at < places.end; ++block, offset = 0) {
        int64_t place = (table[block] * block_size + offset) * width;
        for (; offset < block_size && at < places.end; ++offset, place += width) places.at[at++] = place;
    }
    const int64_t seen = places.at[places.first];
    for (int64_t at = places.first / kMaxBlock * kMaxBlock; at < places.first; ++at) places.at[at] = seen;
    for (int64_t at = places.end; at % kMaxBlock != 0; ++at) places.at[at] = seen;
    places.are_alike = value_width == width;
    if (places.are_alike) return;
    const int64_t first = places.first / 2 * 2, end = (places.end + 1) / 2 * 2;
    for (int64_t at = first; at < end; ++at) places.of_values[at] = places.at[at] / width * value_width;
}

// The rows that an item reads, in reading order: a part's keys, the part's values, then the next part's rows.
// A row has the item's heads, which are adjacent; with all heads also their scales.
template <class T>
class Lookahead {
   public:
    INLINE_MEMBER void list(const AttentionLayer& layer, const Places& places, int64_t first_head, int64_t end_head) {
        num_rows_ = 0, heads_ = end_head - first_head;
        const bool has_scales = heads_ == layer.num_kv_heads;
        const int64_t size = layer.head_dim > layer.value_dim ? layer.head_dim : layer.value_dim;
        row_bytes_ = (has_scales ? row_width<T>(heads_, size) : heads_ * size) * static_cast<int64_t>(sizeof(T));
        append(layer, places, first_head, 2 * kPart);
    }

    // Append as many rows of the next part as are prefetched during this part.
    INLINE_MEMBER void list_next(const AttentionLayer& layer, const Places& places, int64_t first_head) {
        append(layer, places, first_head, num_rows_ + kAhead);
    }

    // Prefetch the very first rows, before anything is computed.
    INLINE_MEMBER void begin() const {
        for (int64_t row = 0; row < kAhead && row < num_rows_; ++row)
            for (int64_t byte = 0; byte < row_bytes_; byte += 64) ask_for(rows_[row] + byte);
    }

    // Fill `lines` with the lines to prefetch while `count` rows from `from` are computed for the head at `index`: the
    // head's share of the rows kAhead later. Return their number; at least `least` entries are valid addresses.
    INLINE_MEMBER int64_t lines(int64_t from, int64_t count, int64_t index, int64_t least, const void** lines) const {
        int64_t row = from + kAhead, end = row + count, num = 0;
        if (heads_ > 1) row += count * index / heads_, end = from + kAhead + count * (index + 1) / heads_;
        for (end = end < num_rows_ ? end : num_rows_; row < end; ++row)
            for (int64_t byte = 0; byte < row_bytes_; byte += 64) lines[num++] = rows_[row] + byte;
        for (int64_t i = num; i < least; ++i) lines[i] = lines;
        return num;
    }

   private:
    INLINE_MEMBER void append(const AttentionLayer& layer, const Places& places, int64_t head, int64_t most) {
        append(static_cast<const T*>(layer.keys) + head * layer.head_dim, places, places.at, most);
        append(static_cast<const T*>(layer.values) + head * layer.value_dim, places, places.values_at(), most);
    }

    INLINE_MEMBER void append(const T* from, const Places& places, const int64_t* offsets, int64_t most) {
        for (int64_t at = places.first; at < places.end && num_rows_ < most; ++at)
            rows_[num_rows_++] = reinterpret_cast<const char*>(from + offsets[at]);
    }

    int64_t num_rows_ = 0, heads_ = 1, row_bytes_ = 0;
    const char* rows_[2 * kPart + kAhead];
};

}  // namespace
}  // namespace octavo
