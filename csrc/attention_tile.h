// Attention of one item's query rows over parts of a context, for any vector type V: the code of every instruction set.
//
// Owns: the arithmetic and its order. A part's keys are turned into panels [size][keys], so that scores and weighted
// values are both small matrix products with keys (or sizes) in lanes, one chain of multiply-adds per element:
//     score[row, key]   = sum over size, ascending, of (scale * query) * key      weight = exp(score - part's maximum)
//     value[row, size]  = sum over the part's positions, ascending, of weight * value
//     fold: parts ascending; both sides are rescaled to the larger maximum. A sink joins the sum after the last part.
// If the vectors have pairs of bfloat16 (V::kPacked is 2), scaled queries and weights are rounded to bfloat16, and the
// sums take two sizes, or two positions, at once: positions 2i and 2i + 1 of the part. A "word" below is one or two numbers.
// Scales of int8 keys multiply the scores, and scales of values the weights, after the weights were summed.
// A position that a row does not see has weight 0, and adding 0 * value changes no bit, so tiles and edges do not
// matter. Does not: choose items, or know the instruction set's intrinsics.
// Every including file is one translation unit of one instruction set; nothing here has linkage.
//
// Sources: Dao et al., "Flash-Decoding for long-context inference", 2023; Goto, van de Geijn, "Anatomy of
// high-performance matrix multiplication", 2008; exp and tanh: Moshier's Cephes, 1989.

#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "attention.h"
#include "attention_kernels.h"
#include "attention_math.h"
#include "attention_places.h"

namespace octavo {
namespace {

constexpr int64_t kScoreStride = kPart + 16;  // not a power of two, or rows would share cache sets
constexpr int64_t kChunk = 32;               // positions whose values are weighted at once, for few rows
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// One item, computed part by part of its context.
template <class V, class T>
class Tile {
   public:
    Tile(const AttentionLayer& layer, const AttentionStep& step, const AttentionItem& item, AttentionScratch& scratch)
        : layer_(layer), step_(step), item_(item), s_(scratch), size_(layer.head_dim), value_size_(layer.value_dim),
          padded_((value_size_ + V::kLanes - 1) / V::kLanes * V::kLanes), words_(size_ / V::kPacked), group_(layer.num_heads / layer.num_kv_heads),
          members_(step.members + item.first_member) {}

    // Compute the item for heads [first_of_group, + heads) of each group. On entry `places` are those of the item's
    // first part; on return they are those of the next item's first part, if there is a next item.
    void run(int64_t first_of_group, int64_t heads, const AttentionItem* next, const float* query, int64_t query_stride,
             float* out, int64_t out_stride, Places& places) {
        first_of_group_ = first_of_group, heads_ = heads, rows_ = item_.num_members * heads;
        const bool is_direct = step_.first_slots[members_[0]] == kDirect;
        load_queries(query, query_stride);
        for (int64_t i = 0, row = 0; i < item_.num_members; ++i)
            for (int64_t j = 0; j < heads; ++j, ++row) {
                const int64_t low = low_of(layer_, step_.contexts[members_[i]]);
                seen_[row] = {low, step_.seen[members_[i]], members_[i], first_of_group + j};
            }
        for (int64_t part = item_.first_part; part < item_.end_part; ++part) {
            Places ahead;
            const bool has_next = part + 1 < item_.end_part || next != nullptr;
            if (part + 1 < item_.end_part) {
                find_places<T>(layer_, step_, item_, part + 1, ahead);
            } else if (next != nullptr) {
                find_places<T>(layer_, step_, *next, next->first_part, ahead);
            }
            const bool is_last = part + 1 == item_.end_part;
            attend_part(places, has_next ? &ahead : nullptr, is_last && has_next ? next->first_head : item_.first_head);
            for (int64_t head = item_.first_head; head < item_.end_head; ++head) {
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

    // Add a part's maximum, sum and values to the totals so far.
    static INLINE_MEMBER void fold(int64_t padded, const float* part, float part_max, float part_sum, float* total,
                                   float* total_max, float* total_sum) {
        const float highest = part_max > *total_max ? part_max : *total_max;
        const auto old = exp_lanes<V>(V::set1(*total_max - highest)), now = exp_lanes<V>(V::set1(part_max - highest));
        const auto sum = V::fma(V::set1(part_sum), now, V::mul(V::set1(*total_sum), old));
        *total_max = highest, *total_sum = V::first(sum);
        for (int64_t d = 0; d < padded; d += V::kLanes)
            V::store(V::fma(V::load(part + d), now, V::mul(V::load(total + d), old)), total + d);
    }

    // Return the factor that makes a head's weighted values its output: 1 / the sum of the weights and of the sink's.
    static INLINE_MEMBER float factor_of(const AttentionLayer& layer, int64_t query_head, float highest, float sum) {
        if (layer.sinks == nullptr) return 1.0f / sum;
        const float sink = layer.sinks[query_head];
        if (sink <= highest) return 1.0f / (sum + V::first(exp_lanes<V>(V::set1(sink - highest))));
        const float share = V::first(exp_lanes<V>(V::set1(highest - sink)));
        return share / V::first(V::fma(V::set1(sum), V::set1(share), V::set1(1.0f)));
    }

    static INLINE_MEMBER void write(int64_t size, const float* total, float factor, float* out) {
        int64_t d = 0;
        for (; d + V::kLanes <= size; d += V::kLanes) V::store(V::mul(V::load(total + d), V::set1(factor)), out + d);
        for (; d < size; ++d) out[d] = total[d] * factor;
    }

   private:
    static constexpr int kWide = 4, kNarrow = 2;               // vectors of a panel: for few rows; for many rows
    static constexpr int kFew = V::kRows / 2, kMost = V::kRows;  // rows whose sums fit into the registers

    INLINE_MEMBER int64_t base_row(int64_t head) const { return (head - item_.first_head) * rows_; }

    void load_queries(const float* query, int64_t stride) {
        const float scale = static_cast<float>(layer_.scale);
        float* to = s_.query;
        for (int64_t head = item_.first_head; head < item_.end_head; ++head)
            for (int64_t i = 0; i < item_.num_members; ++i) {
                const float* from = query + members_[i] * stride + (head * group_ + first_of_group_) * size_;
                if constexpr (V::kPacked == 2) {
                    for (int64_t j = 0; j < heads_; ++j, from += size_, to += words_)
                        V::pack_scaled(from, size_, scale, to);
                } else {
                    for (int64_t d = 0; d < heads_ * size_; ++d) *to++ = from[d] * scale;
                }
            }
    }

    // Compute scores, weights and weighted values of one part; meanwhile prefetch the rows kAhead positions later. All
    // heads are computed before the next positions, because the heads of a position are adjacent.
    INLINE_MEMBER void attend_part(const Places& places, const Places* ahead, int64_t next_head) {
        first_ = places.first, end_ = places.end;
        lookahead_.list(layer_, places, item_.first_head, item_.end_head);
        if (ahead != nullptr) lookahead_.list_next(layer_, *ahead, next_head);
        if (rows_ <= kFew) {
            score<kWide, kFew>(places);
        } else {
            score<kNarrow, kMost>(places);
        }
        soften(places.part);
        const bool in_place = rows_ <= kFew && value_size_ % (kWide * V::kLanes) == 0;
        const int64_t chunk = rows_ <= kMost ? kChunk : kPart;
        for (int64_t at = first_; at < end_;) {
            const int64_t end = (at / chunk + 1) * chunk < end_ ? (at / chunk + 1) * chunk : end_;
            for (int64_t head = item_.first_head; head < item_.end_head; ++head) {
                scale_rows(layer_.values, places.values_at(), value_size_, at, end, head);
                if (in_place) {
                    weigh_in_place(places, at, end, head);
                } else {
                    weigh(places, at, end, head);
                }
            }
            at = end;
        }
    }

    // Compute the scores of all heads, a block of keys at a time. Few rows also prefetch during the products: half of
    // the lines.
    template <int kVectors, int kRows>
    INLINE_MEMBER void score(const Places& places) {
        constexpr int64_t kWidth = kVectors * V::kLanes;
        const int64_t shift = sizeof(T) == 1 ? (kWidth <= 32 ? 2 : 1) : sizeof(T) == 2 && kWidth <= 32 ? 1 : 0;
        const int64_t in_product = ((words_ - 1) >> shift) + 1;
        const int64_t first_block = first_ / V::kBlock * V::kBlock;
        for (int64_t at = first_ / kWidth * kWidth; at < end_; at += kWidth) {
            const int64_t end = at + kWidth < end_ ? at + kWidth : end_, begin = at > first_block ? at : first_block;
            const int64_t vectors = (end - at + V::kLanes - 1) / V::kLanes, from = at > first_ ? at : first_;
            const int64_t blocks = (end - begin + V::kBlock - 1) / V::kBlock;
            const int64_t later = kVectors == kWide && vectors == kVectors ? in_product : 0;
            for (int64_t head = item_.first_head; head < item_.end_head; ++head) {
                const int64_t num = lookahead_.lines(from - first_, end - from, head - item_.first_head, later, lines_);
                const int64_t now = num > later ? num - later : 0, each = (now + blocks - 1) / blocks;
                const T* keys = static_cast<const T*>(layer_.keys) + head * size_;
                for (int64_t i = begin, line = 0; i < end; i += V::kBlock) {
                    for (const int64_t stop = line + each < now ? line + each : now; line < stop; ++line)
                        ask_for(lines_[line]);
                    V::turn(keys, places.at + i, size_, s_.panel + (i - at), kWidth);
                }
                multiply_panel<kVectors, kRows>(vectors, PanelRows{s_.panel, kWidth}, lines_ + now, shift,
                                                s_.query + base_row(head) * words_,
                                                s_.scores + base_row(head) * kScoreStride + at);
                scale_rows(layer_.keys, places.at, size_, from, end, head);
            }
        }
    }

    // Multiply a head's scores or weights at positions [first, end) by the scales in the pool, if its kind has any.
    INLINE_MEMBER void scale_rows(const void* pool, const int64_t* at, int64_t size, int64_t first, int64_t end,
                                  int64_t head) {
        if constexpr (kIsScaled<T>) {
            const T* rows = static_cast<const T*>(pool);
            for (int64_t i = first; i < end; ++i)
                s_.scales[i - first] = scale_of(rows + at[i], layer_.num_kv_heads, size, head);
            const int64_t count = (end - first + V::kLanes - 1) / V::kLanes * V::kLanes;
            for (int64_t i = end - first; i < count; ++i) s_.scales[i] = 1.0f;  // these are not the rows' to change
            float* row = s_.scores + base_row(head) * kScoreStride + first;
            for (int64_t r = 0; r < rows_; ++r, row += kScoreStride)
                for (int64_t i = 0; i < count; i += V::kLanes)
                    V::store(V::mul(V::load(row + i), V::load(s_.scales + i)), row + i);
        }
    }

    template <int kVectors, int kRows>
    INLINE_MEMBER void multiply_panel(int64_t vectors, const PanelRows& panel, const void* const* lines, int64_t shift,
                                      const float* query, float* scores) {
        if (vectors == kVectors) {
            if constexpr (kVectors == kWide) {
                const FetchingPanelRows fetching{panel, lines, shift};
                multiply_rows<V, kVectors, kRows>(rows_, query, words_, fetching, 0, words_, scores, kScoreStride, false);
            } else {
                multiply_rows<V, kVectors, kRows>(rows_, query, words_, panel, 0, words_, scores, kScoreStride, false);
            }
        } else if (vectors == 1) {
            multiply_rows<V, 1, kRows>(rows_, query, words_, panel, 0, words_, scores, kScoreStride, false);
        } else if (vectors == 2) {
            multiply_rows<V, 2, kRows>(rows_, query, words_, panel, 0, words_, scores, kScoreStride, false);
        } else if constexpr (kVectors == kWide) {
            multiply_rows<V, 3, kRows>(rows_, query, words_, panel, 0, words_, scores, kScoreStride, false);
        }
    }

    // Convert scores to weights, with each row's maximum and sum. A position that a row does not see has weight 0.
    INLINE_MEMBER void soften(int64_t part) {
        const int64_t from = first_ / V::kLanes * V::kLanes, to = (end_ + V::kLanes - 1) / V::kLanes * V::kLanes;
        const auto cap = V::set1(static_cast<float>(layer_.soft_cap));
        const int64_t num_rows = base_row(item_.end_head);
        for (int64_t row = 0, of_head = 0; row < num_rows; ++row, of_head = of_head + 1 < rows_ ? of_head + 1 : 0) {
            const int64_t low = seen_[of_head].low - part * kPart, high = seen_[of_head].context - part * kPart;
            float* scores = s_.scores + row * kScoreStride;
            if (layer_.soft_cap > 0)
                for (int64_t at = from; at < to; at += V::kLanes)
                    V::store(V::mul(cap, tanh_lanes<V>(V::div(V::load(scores + at), cap))), scores + at);
            if (layer_.slopes != nullptr) slope(row, part * kPart - seen_[of_head].context + 1, from, to);
            for (int64_t at = from; at < low && at < to; ++at) scores[at] = kHidden;
            for (int64_t at = high > from ? high : from; at < to; ++at) scores[at] = kHidden;
            auto best = V::load(scores + from);
            for (int64_t at = from + V::kLanes; at < to; at += V::kLanes) best = V::max(best, V::load(scores + at));
            const float highest = V::greatest(best);
            const auto shift = V::set1(highest);
            auto sum = V::set1(0.0f);
            for (int64_t at = from; at < to; at += V::kLanes) {
                const auto difference = V::sub(V::load(scores + at), shift);
                if constexpr (V::kPacked == 2) {
                    const auto weights = rough_exp_lanes<V>(difference);
                    V::pack(weights, scores + at / 2);  // in place: at / 2 is behind what is still to be read
                    sum = V::add(sum, weights);
                } else {
                    const auto weights = exp_lanes<V>(difference);
                    V::store(weights, scores + at);
                    sum = V::add(sum, weights);
                }
            }
            s_.part_max[row] = highest, s_.part_sum[row] = V::total(sum);
            if (!sees(of_head, part))
                for (int64_t word = from / V::kPacked; word < to / V::kPacked; ++word) scores[word] = 0.0f;
        }
    }

    // Add the slope's share of each position: its distance from the query's position is first_distance + at.
    INLINE_MEMBER void slope(int64_t row, int64_t first_distance, int64_t from, int64_t to) {
        alignas(64) float lanes[V::kLanes];
        for (int i = 0; i < V::kLanes; ++i) lanes[i] = static_cast<float>(i);
        const int64_t query_head = (item_.first_head + row / rows_) * group_ + seen_[row % rows_].head;
        const auto each = V::set1(layer_.slopes[query_head]), ramp = V::load(lanes);
        float* scores = s_.scores + row * kScoreStride;
        for (int64_t at = from; at < to; at += V::kLanes) {
            const auto distance = V::add(V::set1(static_cast<float>(first_distance + at)), ramp);
            V::store(V::fma(each, distance, V::load(scores + at)), scores + at);
        }
    }

    // Weight the values of positions [first, end) in place, without copying them.
    INLINE_MEMBER void weigh_in_place(const Places& places, int64_t first, int64_t end, int64_t head) {
        constexpr int64_t kWidth = kWide * V::kLanes, kLines = kWidth * static_cast<int64_t>(sizeof(T)) / 64;
        const int64_t begin = first / V::kPacked, stop = (end + V::kPacked - 1) / V::kPacked;  // words of weights
        const int64_t row = base_row(head), lines_each = (stop - begin) * V::kPacked * kLines;
        const int64_t in_products = lines_each * (value_size_ / kWidth);
        const T* values = static_cast<const T*>(layer_.values) + head * value_size_;
        const int64_t num = lines_of_values(first, end, head, in_products);
        int64_t line = 0;
        for (; line < num - in_products; ++line) ask_for(lines_[line]);
        for (int64_t d = 0; d < value_size_; d += kWidth, line += lines_each) {
            typedef std::conditional_t<V::kPacked == 2, PoolPairs<T, kLines>, PoolRows<T, kLines>> Rows;
            const Rows pool_rows{values + d, places.values_at(), begin, lines_ + line};
            multiply_rows<V, kWide, kFew>(rows_, s_.scores + row * kScoreStride, kScoreStride, pool_rows, begin, stop,
                                          s_.part + row * padded_ + d, padded_, first > first_);
        }
    }

    INLINE_MEMBER int64_t lines_of_values(int64_t first, int64_t end, int64_t head, int64_t least) {
        return lookahead_.lines(end_ - first_ + first - first_, end - first, head - item_.first_head, least, lines_);
    }

    // Copy the values of positions [first, end) to panels [words of positions][sizes], then weight the panels.
    INLINE_MEMBER void weigh(const Places& places, int64_t first, int64_t end, int64_t head) {
        constexpr int64_t kWidth = kNarrow * V::kLanes;
        const T* values = static_cast<const T*>(layer_.values) + head * value_size_;
        const int64_t* offsets = places.values_at();
        const int64_t begin = first / V::kPacked, stop = (end + V::kPacked - 1) / V::kPacked;  // words of weights
        const int64_t num = lines_of_values(first, end, head, 0), each = (num + stop - begin - 1) / (stop - begin);
        const float* weights = s_.scores + base_row(head) * kScoreStride;
        int64_t line = 0;
        for (int64_t d = 0; d < value_size_; d += kWidth) {
            const int64_t vectors = d + V::kLanes < value_size_ ? 2 : 1;
            for (int64_t at = begin; at < stop; ++at) {
                if (d == 0)
                    for (const int64_t last = line + each < num ? line + each : num; line < last; ++line)
                        ask_for(lines_[line]);
                copy_values(values + d, offsets + at * V::kPacked, vectors * V::kLanes, value_size_ - d,
                            s_.panel + at * kWidth);
            }
            const PanelRows panel{s_.panel, kWidth};
            float* to = s_.part + base_row(head) * padded_ + d;
            const bool goes_on = first > first_;
            if (vectors == 2) {
                multiply_rows<V, 2, kMost>(rows_, weights, kScoreStride, panel, begin, stop, to, padded_, goes_on);
            } else {
                multiply_rows<V, 1, kMost>(rows_, weights, kScoreStride, panel, begin, stop, to, padded_, goes_on);
            }
        }
    }

    // Copy `count` sizes of the position at `at[0]`, or of a pair of positions, of which `left` are the head's own.
    INLINE_MEMBER void copy_values(const T* values, const int64_t* at, int64_t count, int64_t left, float* to) {
        if constexpr (V::kPacked == 2) {
            T padded[2][V::kLanes] = {};
            for (int64_t d = 0; d < count; d += V::kLanes) {
                const T *first = values + at[0] + d, *second = values + at[1] + d;
                if (d + V::kLanes > left) {
                    for (int64_t i = 0; d + i < left; ++i) padded[0][i] = first[i], padded[1][i] = second[i];
                    first = padded[0], second = padded[1];
                }
                V::store(V::pair(first, second), to + d);
            }
        } else if (count <= left) {
            for (int64_t d = 0; d < count; d += V::kLanes) V::store(V::load(values + at[0] + d), to + d);
        } else {
            for (int64_t i = 0; i < count; ++i) to[i] = i < left ? V::one(values + at[0] + i) : 0.0f;
        }
    }

    INLINE_MEMBER bool sees(int64_t row, int64_t part) const {
        return part * kPart < seen_[row].context && (part + 1) * kPart > seen_[row].low;
    }

    INLINE_MEMBER void fold_rows(int64_t part, int64_t head) {
        for (int64_t row = 0; row < rows_; ++row) {
            if (!sees(row, part)) continue;
            const int64_t at = base_row(head) + row;
            float *total = s_.total + at * padded_, *from = s_.part + at * padded_;
            if (seen_[row].low / kPart < part) {
                fold(padded_, from, s_.part_max[at], s_.part_sum[at], total, s_.total_max + at, s_.total_sum + at);
            } else {
                s_.total_max[at] = s_.part_max[at], s_.total_sum[at] = s_.part_sum[at];
                for (int64_t d = 0; d < padded_; d += V::kLanes) V::store(V::load(from + d), total + d);
            }
        }
    }

    INLINE_MEMBER void save_rows(int64_t part, int64_t head) {
        const int64_t stride = value_size_ + kTail;
        for (int64_t row = 0; row < rows_; ++row) {
            if (!sees(row, part)) continue;
            const int64_t slot = step_.first_slots[seen_[row].token] + part;
            const int64_t query_head = head * group_ + seen_[row].head;
            float* to = step_.partial + (slot * layer_.num_heads + query_head) * stride;
            const int64_t at = base_row(head) + row;
            std::memcpy(to, s_.part + at * padded_, value_size_ * sizeof(float));
            to[value_size_] = s_.part_max[at], to[value_size_ + 1] = s_.part_sum[at];
        }
    }

    void write_rows(float* out, int64_t stride) {
        for (int64_t head = item_.first_head; head < item_.end_head; ++head)
            for (int64_t row = 0; row < rows_; ++row) {
                const int64_t at = base_row(head) + row, query_head = head * group_ + seen_[row].head;
                const float factor = factor_of(layer_, query_head, s_.total_max[at], s_.total_sum[at]);
                write(value_size_, s_.total + at * padded_, factor,
                      out + seen_[row].token * stride + query_head * value_size_);
            }
    }

    const AttentionLayer& layer_;
    const AttentionStep& step_;
    const AttentionItem& item_;
    AttentionScratch& s_;
    const int64_t size_, value_size_, padded_, words_, group_;
    const int64_t* members_;
    int64_t first_of_group_ = 0, heads_ = 0, rows_ = 0;  // rows of one KV head: (member, head of the group)
    int64_t first_ = 0, end_ = 0;                        // positions of the part that any row sees
    Lookahead<T> lookahead_;
    const void* lines_[kMaxLines];
    struct {
        int64_t low, context, token, head;  // per row: it sees positions [low, context); head within the group
    } seen_[kMaxRows];
};

// Return the first item whose work begins at or after the share of `thread`.
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
    if (first < end) {
        const AttentionItem& item = step.items[first];
        find_places<T>(layer, step, item, item.first_part, places);
        Lookahead<T> lookahead;
        lookahead.list(layer, places, item.first_head, item.end_head);
        lookahead.begin();
    }
    for (int64_t index = first; index < end; ++index) {
        const AttentionItem &item = step.items[index], *next = index + 1 < end ? &step.items[index + 1] : nullptr;
        Tile<V, T> tile(layer, step, item, scratch);
        for (int64_t head = 0; head < group; head += kMaxRows) {
            const bool is_last = head + kMaxRows >= group;
            if (head > 0) find_places<T>(layer, step, item, item.first_part, places);
            tile.run(head, is_last ? group - head : kMaxRows, is_last ? next : nullptr, query, query_stride, out,
                     out_stride, places);
        }
    }
}

template <class V>
void join_tokens(const AttentionLayer& layer, const AttentionStep& step, float* out, int64_t out_stride,
                 int64_t first_unit, int64_t end_unit) {
    typedef Tile<V, float> Any;
    const int64_t size = layer.value_dim, padded = (size + V::kLanes - 1) / V::kLanes * V::kLanes;
    const int64_t heads = layer.num_heads, stride = size + kTail;
    alignas(64) float total[kMaxSize + V::kLanes], part[kMaxSize + V::kLanes] = {};
    for (int64_t unit = first_unit; unit < end_unit; ++unit) {
        const int64_t token = step.joins[unit / heads], head = unit % heads;
        const int64_t first = low_of(layer, step.contexts[token]) / kPart, last = (step.seen[token] - 1) / kPart;
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
        const float factor = Any::factor_of(layer, head, highest, sum);
        Any::write(size, total, factor, out + token * out_stride + head * size);
    }
}

template <class V, class T>
INLINE void write_row(const float* from, int64_t num_heads, int64_t size, T* row) {
    if constexpr (kIsScaled<T>) {
        for (int64_t head = 0; head < num_heads; ++head)
            narrow_head(from + head * size, size, row + head * size, row + num_heads * size + head * kScaleBytes);
    } else {
        V::save(from, num_heads * size, row);
    }
}

template <class V, class T>
void write_tokens(const AttentionLayer& layer, const int64_t* slots, int64_t first, int64_t end, const NewKv& kv) {
    const int64_t heads = layer.num_kv_heads, size = layer.head_dim, value_size = layer.value_dim;
    T *keys = static_cast<T*>(layer.keys), *values = static_cast<T*>(layer.values);
    for (int64_t token = first; token < end; ++token) {
        write_row<V>(kv.k + token * kv.k_stride, heads, size, keys + slots[token] * row_width<T>(heads, size));
        write_row<V>(kv.v + token * kv.v_stride, heads, value_size,
                     values + slots[token] * row_width<T>(heads, value_size));
    }
}

template <class V>
constexpr AttentionKernels kernels_of() {
    return {{attend_items<V, float>, attend_items<V, Bfloat16>, attend_items<V, Float16>, attend_items<V, Int8>,
             attend_items<V, Float8>},
            join_tokens<V>,
            {write_tokens<V, float>, write_tokens<V, Bfloat16>, write_tokens<V, Float16>, write_tokens<V, Int8>,
             write_tokens<V, Float8>}};
}

}  // namespace
}  // namespace octavo
