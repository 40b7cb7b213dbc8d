// Attention of one item's query rows over parts of a context, for any vector type V: the code of every instruction set.
//
// Owns: the arithmetic and its order. A part's keys are turned into panels [size][keys], so that scores and weighted
// values are both small matrix products with keys (or sizes) in lanes, one chain of multiply-adds per element:
//     score[row, key]   = sum over size, ascending, of (scale * query) * key      weight = exp(score - part's maximum)
//     value[row, size]  = sum over the part's positions, ascending, of weight * value
//     fold: parts ascending; both sides rescaled to the greater maximum.
// What a row does not see has weight 0, and adding 0 * value changes no bit, so tiles and edges do not matter.
// Does not: choose items, or know how the instruction set spells its instructions.
// Every including file is one translation unit of one instruction set; nothing here has linkage.
//
// Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; Goto, van de Geijn, "Anatomy of
// high-performance matrix multiplication", 2008; exp and tanh: Moshier's Cephes, 1989.

#pragma once

#include <cmath>
#include <limits>

#include "attention.h"
#include "attention_kernels.h"
#include "attention_math.h"

namespace octavo {
namespace {

constexpr int64_t kScoreStride = kPart + 16;  // not a power of two: rows would share cache sets
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// Where a part's positions [first, end) are in the pool.
struct Places {
    int64_t part, first, end;
    int64_t at[kPart];
};

INLINE int64_t low_of(const AttentionLayer& layer, int64_t context) {
    return layer.window > 0 && context > layer.window ? context - layer.window : 0;
}

// The positions of a part that any token of the item sees.
INLINE void find_places(const AttentionLayer& layer, const AttentionStep& step, const AttentionItem& item, int64_t part,
                        Places& places) {
    const int64_t* members = step.members + item.first_member;
    int64_t lowest = INT64_MAX, highest = 0;
    for (int64_t i = 0; i < item.num_members; ++i) {
        const int64_t context = step.contexts[members[i]], low = low_of(layer, context);
        lowest = low < lowest ? low : lowest, highest = context > highest ? context : highest;
    }
    const int64_t begin = part * kPart, width = layer.num_kv_heads * layer.head_dim, block_size = layer.block_size;
    const int64_t* table = step.table + step.rows[members[0]] * step.table_stride;
    places.part = part;
    places.first = lowest > begin ? lowest - begin : 0;
    places.end = highest - begin < kPart ? highest - begin : kPart;
    int64_t block = (begin + places.first) / block_size, offset = (begin + places.first) % block_size;
    for (int64_t at = places.first; at < places.end; ++block, offset = 0) {
        int64_t place = (table[block] * block_size + offset) * width;
        for (; offset < block_size && at < places.end; ++offset, place += width) places.at[at++] = place;
    }
}

// One item on its way through the parts of its context.
template <class V, class T>
class Tile {
   public:
    Tile(const AttentionLayer& layer, const AttentionStep& step, const AttentionItem& item, AttentionScratch& scratch)
        : layer_(layer), step_(step), item_(item), s_(scratch), size_(layer.head_dim),
          padded_((size_ + V::kLanes - 1) / V::kLanes * V::kLanes), group_(layer.num_heads / layer.num_kv_heads),
          members_(step.members + item.first_member) {}

    // All of the item for heads [first_of_group, + heads) of each group. `places` are those of its first part; behind
    // the call, those of the next item's, where there is one.
    void run(int64_t first_of_group, int64_t heads, const AttentionItem* next, const float* query, int64_t query_stride,
             float* out, int64_t out_stride, Places& places) {
        first_of_group_ = first_of_group, heads_ = heads, rows_ = item_.num_members * heads;
        const bool is_direct = step_.first_slots[members_[0]] == kDirect;
        load_queries(query, query_stride);
        for (int64_t i = 0, row = 0; i < item_.num_members; ++i)
            for (int64_t j = 0; j < heads; ++j, ++row) {
                const int64_t context = step_.contexts[members_[i]];
                seen_[row] = {low_of(layer_, context), context, members_[i], first_of_group + j};
            }
        for (int64_t part = item_.first_part; part < item_.end_part; ++part) {
            Places ahead;
            const bool has_next = part + 1 < item_.end_part || next != nullptr;
            if (part + 1 < item_.end_part) {
                find_places(layer_, step_, item_, part + 1, ahead);
            } else if (next != nullptr) {
                find_places(layer_, step_, *next, next->first_part, ahead);
            }
            for (int64_t head = item_.first_head; head < item_.end_head; ++head) {
                if (head + 1 < item_.end_head) {
                    attend_part(places, head, places, head + 1);
                } else {
                    const int64_t first = part + 1 < item_.end_part || !has_next ? item_.first_head : next->first_head;
                    attend_part(places, head, has_next ? ahead : places, first);
                }
                if (is_direct) {
                    fold_rows(part, head);
                } else {
                    save_rows(part, head);
                }
            }
            if (has_next) places = ahead;
        }
        if (is_direct) write_rows(out, out_stride);
    }

    // Adds a part's maximum, sum and values to those so far.
    static INLINE_MEMBER void fold(int64_t padded, const float* part, float part_max, float part_sum, float* total,
                                   float* total_max, float* total_sum) {
        const float highest = part_max > *total_max ? part_max : *total_max;
        const auto old = exp_lanes<V>(V::set1(*total_max - highest)), now = exp_lanes<V>(V::set1(part_max - highest));
        const auto sum = V::fma(V::set1(part_sum), now, V::mul(V::set1(*total_sum), old));
        *total_max = highest, *total_sum = V::first(sum);
        for (int64_t d = 0; d < padded; d += V::kLanes)
            V::store(V::fma(V::load(part + d), now, V::mul(V::load(total + d), old)), total + d);
    }

    static INLINE_MEMBER void write(int64_t size, const float* total, float sum, float* out) {
        const float factor = 1.0f / sum;
        int64_t d = 0;
        for (; d + V::kLanes <= size; d += V::kLanes) V::store(V::mul(V::load(total + d), V::set1(factor)), out + d);
        for (; d < size; ++d) out[d] = total[d] * factor;
    }

   private:
    static constexpr int kWide = 4, kNarrow = 2;               // vectors of a panel: for few rows, for many
    static constexpr int kFew = V::kRows / 2, kMost = V::kRows;  // rows whose sums fit into the registers

    INLINE_MEMBER int64_t base_row(int64_t head) const { return (head - item_.first_head) * rows_; }

    void load_queries(const float* query, int64_t stride) {
        const float scale = static_cast<float>(layer_.scale);
        float* to = s_.query;
        for (int64_t head = item_.first_head; head < item_.end_head; ++head)
            for (int64_t i = 0; i < item_.num_members; ++i) {
                const float* from = query + members_[i] * stride + (head * group_ + first_of_group_) * size_;
                for (int64_t d = 0; d < heads_ * size_; ++d) *to++ = from[d] * scale;
            }
    }

    // Scores, weights and weighted values of one part; on the way, asks for the keys of (ahead, next_head).
    INLINE_MEMBER void attend_part(const Places& places, int64_t head, const Places& ahead, int64_t next_head) {
        static const T zeros[kMaxSize] = {};
        const T *keys[kPart + V::kBlock], *values[kPart], *next[kPart];
        const T *all_keys = static_cast<const T*>(layer_.keys), *all_values = static_cast<const T*>(layer_.values);
        first_ = places.first, end_ = places.end;
        // whole blocks of keys are turned: what is not seen is zero there
        for (int64_t at = first_ / V::kBlock * V::kBlock; at < first_; ++at) keys[at] = zeros;
        for (int64_t at = first_; at < end_; ++at) {
            keys[at] = all_keys + places.at[at] + head * size_;
            values[at] = all_values + places.at[at] + head * size_;
            next[at] = values[at];
        }
        for (int64_t at = end_; at % V::kBlock != 0; ++at) keys[at] = zeros;
        for (int64_t at = ahead.first > first_ ? ahead.first : first_; at < ahead.end && at < end_; ++at)
            next[at] = all_keys + ahead.at[at] + next_head * size_;
        if (rows_ <= kFew) {
            score<kWide, kFew>(keys, values, head);
        } else {
            score<kNarrow, kMost>(keys, values, head);
        }
        soften(places.part);
        if (rows_ <= kFew && size_ % (kWide * V::kLanes) == 0) {
            for (int64_t d = 0; d < size_; d += kWide * V::kLanes)
                multiply_rows<V, kWide, kFew>(rows_, s_.scores, kScoreStride,
                                              PoolRows<T>{values, d, next, d == 0 ? size_ : 0}, first_, end_,
                                              s_.part + d, padded_);
        } else {
            weigh(values, next);
        }
    }

    template <int kVectors, int kRows>
    INLINE_MEMBER void score(const T* const* keys, const T* const* values, int64_t head) {
        constexpr int64_t kWidth = kVectors * V::kLanes;
        const float* query = s_.query + base_row(head) * size_;
        const int64_t first_block = first_ / V::kBlock * V::kBlock;
        for (int64_t at = first_ / kWidth * kWidth; at < end_; at += kWidth) {
            const int64_t end = at + kWidth < end_ ? at + kWidth : end_;
            for (int64_t i = at > first_block ? at : first_block; i < end; i += V::kBlock) {
                for (int64_t j = i > first_ ? i : first_; j < i + V::kBlock && j < end; ++j) fetch(values[j], size_);
                V::turn(keys + i, size_, s_.panel + (i - at), kWidth);
            }
            const PanelRows panel{s_.panel, kWidth};
            float* scores = s_.scores + at;
            const int64_t vectors = (end - at + V::kLanes - 1) / V::kLanes;
            if (vectors == kVectors) {
                multiply_rows<V, kVectors, kRows>(rows_, query, size_, panel, 0, size_, scores, kScoreStride);
            } else if (vectors == 1) {
                multiply_rows<V, 1, kRows>(rows_, query, size_, panel, 0, size_, scores, kScoreStride);
            } else if (vectors == 2) {
                multiply_rows<V, 2, kRows>(rows_, query, size_, panel, 0, size_, scores, kScoreStride);
            } else if constexpr (kVectors == kWide) {
                multiply_rows<V, 3, kRows>(rows_, query, size_, panel, 0, size_, scores, kScoreStride);
            }
        }
    }

    // Scores to weights, with each row's maximum and sum; what a row does not see weighs 0.
    INLINE_MEMBER void soften(int64_t part) {
        const int64_t from = first_ / V::kLanes * V::kLanes, to = (end_ + V::kLanes - 1) / V::kLanes * V::kLanes;
        const auto cap = V::set1(static_cast<float>(layer_.soft_cap));
        for (int64_t row = 0; row < rows_; ++row) {
            const int64_t low = seen_[row].low - part * kPart, high = seen_[row].context - part * kPart;
            float* scores = s_.scores + row * kScoreStride;
            if (layer_.soft_cap > 0)
                for (int64_t at = from; at < to; at += V::kLanes)
                    V::store(V::mul(cap, tanh_lanes<V>(V::div(V::load(scores + at), cap))), scores + at);
            for (int64_t at = from; at < low && at < to; ++at) scores[at] = kHidden;
            for (int64_t at = high > from ? high : from; at < to; ++at) scores[at] = kHidden;
            auto best = V::load(scores + from);
            for (int64_t at = from + V::kLanes; at < to; at += V::kLanes) best = V::max(best, V::load(scores + at));
            const float highest = V::greatest(best);
            const auto shift = V::set1(highest);
            auto sum = V::set1(0.0f);
            for (int64_t at = from; at < to; at += V::kLanes) {
                const auto weights = exp_lanes<V>(V::sub(V::load(scores + at), shift));
                V::store(weights, scores + at);
                sum = V::add(sum, weights);
            }
            s_.part_max[row] = highest, s_.part_sum[row] = V::total(sum);
            if (!sees(row, part))
                for (int64_t at = from; at < to; ++at) scores[at] = 0.0f;
        }
    }

    // Values copied to panels [positions][sizes], then weighed.
    INLINE_MEMBER void weigh(const T* const* values, const T* const* next) {
        constexpr int64_t kWidth = kNarrow * V::kLanes;
        for (int64_t d = 0; d < size_; d += kWidth) {
            const int64_t vectors = d + V::kLanes < size_ ? 2 : 1;
            for (int64_t at = first_; at < end_; ++at) {
                float* to = s_.panel + at * kWidth;
                if (d == 0) fetch(next[at], size_);
                if (d + vectors * V::kLanes <= size_) {
                    for (int64_t v = 0; v < vectors * V::kLanes; v += V::kLanes)
                        V::store(V::load(values[at] + d + v), to + v);
                } else {
                    for (int64_t i = 0; i < vectors * V::kLanes; ++i)
                        to[i] = d + i < size_ ? V::one(values[at] + d + i) : 0.0f;
                }
            }
            const PanelRows panel{s_.panel, kWidth};
            if (vectors == 2) {
                multiply_rows<V, 2, kMost>(rows_, s_.scores, kScoreStride, panel, first_, end_, s_.part + d, padded_);
            } else {
                multiply_rows<V, 1, kMost>(rows_, s_.scores, kScoreStride, panel, first_, end_, s_.part + d, padded_);
            }
        }
    }

    INLINE_MEMBER bool sees(int64_t row, int64_t part) const {
        return part * kPart < seen_[row].context && (part + 1) * kPart > seen_[row].low;
    }

    INLINE_MEMBER void fold_rows(int64_t part, int64_t head) {
        for (int64_t row = 0; row < rows_; ++row) {
            if (!sees(row, part)) continue;
            const int64_t at = base_row(head) + row;
            float *total = s_.total + at * padded_, *from = s_.part + row * padded_;
            if (seen_[row].low / kPart < part) {
                fold(padded_, from, s_.part_max[row], s_.part_sum[row], total, s_.total_max + at, s_.total_sum + at);
            } else {
                s_.total_max[at] = s_.part_max[row], s_.total_sum[at] = s_.part_sum[row];
                for (int64_t d = 0; d < padded_; d += V::kLanes) V::store(V::load(from + d), total + d);
            }
        }
    }

    INLINE_MEMBER void save_rows(int64_t part, int64_t head) {
        const int64_t stride = size_ + kTail;
        for (int64_t row = 0; row < rows_; ++row) {
            if (!sees(row, part)) continue;
            const int64_t slot = step_.first_slots[seen_[row].token] + part;
            const int64_t query_head = head * group_ + seen_[row].head;
            float* to = step_.partial + (slot * layer_.num_heads + query_head) * stride;
            std::memcpy(to, s_.part + row * padded_, size_ * sizeof(float));
            to[size_] = s_.part_max[row], to[size_ + 1] = s_.part_sum[row];
        }
    }

    void write_rows(float* out, int64_t stride) {
        for (int64_t head = item_.first_head; head < item_.end_head; ++head)
            for (int64_t row = 0; row < rows_; ++row) {
                const int64_t at = base_row(head) + row, query_head = head * group_ + seen_[row].head;
                write(size_, s_.total + at * padded_, s_.total_sum[at],
                      out + seen_[row].token * stride + query_head * size_);
            }
    }

    const AttentionLayer& layer_;
    const AttentionStep& step_;
    const AttentionItem& item_;
    AttentionScratch& s_;
    const int64_t size_, padded_, group_;
    const int64_t* members_;
    int64_t first_of_group_ = 0, heads_ = 0, rows_ = 0;  // rows of one KV head: (member, head of the group)
    int64_t first_ = 0, end_ = 0;                        // positions of the part that any row sees
    struct {
        int64_t low, context, token, head;  // of a row: positions [low, context) seen; head within the group
    } seen_[kMaxRows];
};

// The first item whose work begins at or behind the share of `thread`.
INLINE int64_t first_item(const AttentionStep& step, int64_t thread, int64_t threads) {
    const int64_t cost = step.costs[step.num_items] * thread / threads;
    int64_t low = 0, high = step.num_items;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (step.costs[middle] < cost) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

template <class V, class T>
void attend_items(const AttentionLayer& layer, const AttentionStep& step, const float* query, int64_t query_stride,
                  float* out, int64_t out_stride, int64_t thread, int64_t threads) {
    AttentionScratch& scratch = attention_scratch();
    const int64_t group = layer.num_heads / layer.num_kv_heads;
    const int64_t first = first_item(step, thread, threads), end = first_item(step, thread + 1, threads);
    Places places;
    if (first < end) find_places(layer, step, step.items[first], step.items[first].first_part, places);
    for (int64_t index = first; index < end; ++index) {
        const AttentionItem &item = step.items[index], *next = index + 1 < end ? &step.items[index + 1] : nullptr;
        Tile<V, T> tile(layer, step, item, scratch);
        for (int64_t head = 0; head < group; head += kMaxRows) {
            const bool is_last = head + kMaxRows >= group;
            if (head > 0) find_places(layer, step, item, item.first_part, places);
            tile.run(head, is_last ? group - head : kMaxRows, is_last ? next : nullptr, query, query_stride, out,
                     out_stride, places);
        }
    }
}

template <class V>
void join_tokens(const AttentionLayer& layer, const AttentionStep& step, float* out, int64_t out_stride, int64_t thread,
                 int64_t threads) {
    typedef Tile<V, float> Any;
    const int64_t size = layer.head_dim, padded = (size + V::kLanes - 1) / V::kLanes * V::kLanes;
    const int64_t heads = layer.num_heads, units = step.num_joins * heads, stride = size + kTail;
    alignas(64) float total[kMaxSize + V::kLanes], part[kMaxSize + V::kLanes] = {};
    for (int64_t unit = units * thread / threads; unit < units * (thread + 1) / threads; ++unit) {
        const int64_t token = step.joins[unit / heads], head = unit % heads, context = step.contexts[token];
        const int64_t first = low_of(layer, context) / kPart, last = (context - 1) / kPart;
        float highest = 0.0f, sum = 0.0f;
        for (int64_t index = first; index <= last; ++index) {
            const float* from = step.partial + ((step.first_slots[token] + index) * heads + head) * stride;
            std::memcpy(index == first ? total : part, from, size * sizeof(float));
            if (index == first) {
                highest = from[size], sum = from[size + 1];
            } else {
                Any::fold(padded, part, from[size], from[size + 1], total, &highest, &sum);
            }
        }
        Any::write(size, total, sum, out + token * out_stride + head * size);
    }
}

template <class V, class T>
void write_tokens(const AttentionLayer& layer, const int64_t* slots, int64_t first, int64_t end, const float* k,
                  const float* v, int64_t stride) {
    const int64_t width = layer.num_kv_heads * layer.head_dim;
    T *keys = static_cast<T*>(layer.keys), *values = static_cast<T*>(layer.values);
    for (int64_t token = first; token < end; ++token) {
        V::save(k + token * stride, width, keys + slots[token] * width);
        V::save(v + token * stride, width, values + slots[token] * width);
    }
}

template <class V>
constexpr AttentionKernels kernels_of() {
    return {{attend_items<V, float>, attend_items<V, Bfloat16>, attend_items<V, Float16>},
            join_tokens<V>,
            {write_tokens<V, float>, write_tokens<V, Bfloat16>, write_tokens<V, Float16>}};
}

}  // namespace
}  // namespace octavo
