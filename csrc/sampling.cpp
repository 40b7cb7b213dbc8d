// One id per row of float32 logits: the best id, or a draw with temperature, top-k, top-p and min-p.
//
// Owns: octavo_sample. Does not: edit logits, or cut by typical-p (the torch twin in sampling/selection.py does).
// Order of candidates: logit descending, id ascending. Top-k, top-p and min-p keep a prefix of that order.
// Cost: the maxima of a row's blocks show where candidates can be, so only a few logits are sorted. If there are many
// candidates (a flat distribution), bins by value find the cuts, and one bin at a time is sorted.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "sampling_passes.h"
#include "team.h"

namespace octavo {
namespace {

constexpr int64_t kFirstLook = 128;    // without top-k: candidates tried before bins
constexpr int64_t kMostSorted = 4096;  // with more candidates than this, bins are used

struct Columns {  // one entry per slot; see sampling/selection.py
    const float *inverse_temperature, *floor;  // 0: take the best id; the lowest scaled logit that min-p keeps
    const double* top_p;
    const int64_t* top_k;
    const uint64_t* seed;
    const int64_t* choice;
};

struct Call {
    const Columns* columns;
    const int64_t *slots, *positions;
    const float* logits;
    int64_t stride, num_rows, size;
    int64_t* ids;
    float* best;
};

struct Scratch {
    std::vector<float> maxima, picked;  // of each block
    std::vector<double> sums;
    std::vector<int32_t> ids;
    std::vector<uint64_t> keys;
    std::vector<double> bin_weights;
    std::vector<int64_t> bin_counts;

    void fit(int64_t size) {
        const size_t blocks = static_cast<size_t>((size + kBlock - 1) / kBlock);
        maxima.resize(blocks);
        sums.resize(blocks);
        ids.resize(static_cast<size_t>(size) + kLanes);
    }
};

// Ascending keys are candidates in order. -0 counts as 0.
INLINE uint64_t key_of(float value, int32_t id) {
    const float plain = value + 0.0f;
    uint32_t bits;
    std::memcpy(&bits, &plain, sizeof bits);
    const uint32_t ascending = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(id);
}

INLINE int64_t id_of(uint64_t key) { return static_cast<int64_t>(key & 0xffffffffu); }

// Return the first id whose logit is `best`, the largest logit; if `best` is NaN, the first id with a NaN.
int64_t first_of(const LogitRow& row, const float* maxima, float best) {
    const bool is_nan = best != best;
    for (int64_t b = 0; b < row.num_blocks(); ++b) {
        if (is_nan ? maxima[b] == maxima[b] : maxima[b] != best) continue;
        for (int64_t i = b * kBlock; i < row.size; ++i)
            if (is_nan ? row.x[i] != row.x[i] : row.x[i] == best) return i;
    }
    return 0;
}

// Return the first id whose cumulative weight exceeds uniform * total. `sums` are sums of the weights that min-p keeps.
int64_t draw_in_id_order(const LogitRow& row, const std::vector<double>& sums, double total) {
    const double target = row.uniform * total;  // below the total, as a uniform is at most 1 - 2^-48
    double reached = 0.0;
    for (int64_t b = 0; b < row.num_blocks(); ++b) {
        if (reached + sums[static_cast<size_t>(b)] <= target) {
            reached += sums[static_cast<size_t>(b)];
            continue;
        }
        for (int64_t i = b * kBlock; i < row.size; ++i) {
            const float scaled = row.scaled(i);
            reached += scaled >= row.floor ? weight(scaled) : 0.0;
            if (reached > target) return i;
        }
    }
    return -1;
}

// Make the candidates of a range the sorted keys. If there are too many, return false and leave them unsorted.
bool sort_range(const LogitRow& row, Scratch& scratch, const LogitRange& range, int64_t most) {
    const int64_t num = sampling_passes().select(row, scratch.maxima.data(), range, scratch.ids.data());
    if (num > most) return false;
    scratch.keys.resize(static_cast<size_t>(num));
    for (size_t n = 0; n < scratch.keys.size(); ++n)
        scratch.keys[n] = key_of(row.x[scratch.ids[n]], scratch.ids[n]);
    // equal logits are in order already, which the sort does not know
    if (!std::is_sorted(scratch.keys.begin(), scratch.keys.end())) std::sort(scratch.keys.begin(), scratch.keys.end());
    return true;
}

// Draw from sorted keys, which are all candidates down to some logit. Return -1 if the cut may be below that logit.
int64_t draw_from_sorted(const LogitRow& row, const std::vector<uint64_t>& keys, double total) {
    size_t limit = keys.size();
    if (row.top_k > 0) {
        if (keys.size() < static_cast<size_t>(row.top_k)) return -1;
        limit = static_cast<size_t>(row.top_k);
        total = 0.0;
        for (size_t n = 0; n < limit; ++n) total += weight(row.scaled(id_of(keys[n])));
    }
    const double mass = row.top_p * total;
    double kept = 0.0;
    size_t num_kept = 0;
    bool is_floored = false;
    for (; num_kept < limit && (kept < mass || num_kept == 0); ++num_kept) {
        const float scaled = row.scaled(id_of(keys[num_kept]));
        is_floored = scaled < row.floor;
        if (is_floored) break;
        kept += weight(scaled);
    }
    if (row.top_k == 0 && kept < mass && !is_floored) return -1;
    const double target = row.uniform * kept;
    double reached = 0.0;
    for (size_t n = 0; n < num_kept; ++n) {
        reached += weight(row.scaled(id_of(keys[n])));
        if (reached > target) return id_of(keys[n]);
    }
    return -1;
}

// Bins of equal width, from the best logit down to the lowest with a weight. Each bin is a run of candidates.
class Bins {
  public:
    Bins(const LogitRow& row, Scratch& scratch) : row_(row), scratch_(scratch) {
        // a little lower, so that rounding leaves out no candidate; ids without a weight do no harm
        const float below = row.best + 1.01f * kLeast / row.inverse - 1e-6f * std::fabs(row.best);
        const float least = std::max(below, -std::numeric_limits<float>::max());
        const float span = row.best - sampling_passes().lowest_from(row, scratch.maxima.data(), least);
        const float scale = static_cast<float>(kBins) / span;
        range_ = {least, row.best, span > 0.0f && std::isfinite(scale) ? scale : 0.0f, 0.0f, 0.0f};
        scratch.bin_weights.assign(kBins + 1, 0.0);
        scratch.bin_counts.assign(kBins + 1, 0);
        num_floored_ = sampling_passes().fill_bins(row, scratch.maxima.data(), range_, scratch.bin_weights.data(),
                                          scratch.bin_counts.data());
    }

    int64_t draw(double total) {
        int64_t limit = std::max<int64_t>(1, num_floored_);
        if (row_.top_k > 0) {
            total = sum_first(row_.top_k, std::numeric_limits<double>::infinity());
            limit = std::min(limit, row_.top_k);
        }
        const double target = row_.uniform * sum_first(limit, row_.top_p * total);
        double reached = 0.0;
        for (size_t b = 0; b < kBins; ++b) {
            if (reached + scratch_.bin_weights[b] <= target) {
                reached += scratch_.bin_weights[b];
                continue;
            }
            sort_bin(b);
            for (const uint64_t key : scratch_.keys) {
                reached += weight(row_.scaled(id_of(key)));
                if (reached > target) return id_of(key);
            }
        }
        return -1;
    }

  private:
    // Sum the weights of the first candidates, until `limit` of them are counted or the sum reaches `mass`.
    double sum_first(int64_t limit, double mass) {
        int64_t count = 0;
        double sum = 0.0;
        for (size_t b = 0; b < kBins && count < limit && sum < mass; ++b) {
            if (count + scratch_.bin_counts[b] <= limit && sum + scratch_.bin_weights[b] < mass) {
                count += scratch_.bin_counts[b];
                sum += scratch_.bin_weights[b];
                continue;
            }
            sort_bin(b);
            for (size_t n = 0; n < scratch_.keys.size() && count < limit && sum < mass; ++n, ++count)
                sum += weight(row_.scaled(id_of(scratch_.keys[n])));
        }
        return sum;
    }

    void sort_bin(size_t b) {
        LogitRange range = range_;
        range.first = static_cast<float>(b);
        range.end = static_cast<float>(b + 1);
        sort_range(row_, scratch_, range, row_.size);
    }

    const LogitRow& row_;
    Scratch& scratch_;
    LogitRange range_;
    int64_t num_floored_;
};

int64_t draw_from_best(const LogitRow& row, Scratch& scratch, double total) {
    const int64_t wanted = row.top_k > 0 ? row.top_k : kFirstLook;
    if (wanted < row.num_blocks() * 3 / 4) {  // the maxima of this many blocks are as many candidates
        scratch.picked = scratch.maxima;
        const auto last = scratch.picked.begin() + (wanted - 1);
        std::nth_element(scratch.picked.begin(), last, scratch.picked.end(), [](float a, float b) { return a > b; });
        if (std::isfinite(*last) && sort_range(row, scratch, {*last, row.best, 0.0f, 0.0f, 1.0f}, kMostSorted)) {
            const int64_t id = draw_from_sorted(row, scratch.keys, total);
            if (id >= 0) return id;
        }
    }
    return Bins(row, scratch).draw(total);
}

// --- rows

// SplitMix64, as in sampling/selection.py: one number in [0, 1) from the top 48 bits.
INLINE uint64_t splitmix64(uint64_t state, uint64_t index) {
    uint64_t z = state + (index + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

LogitRow row_of(const Call& call, int64_t r) {
    const Columns& columns = *call.columns;
    const int64_t slot = call.slots[r];
    const uint64_t state = splitmix64(columns.seed[slot], static_cast<uint64_t>(columns.choice[slot]));
    const uint64_t drawn = splitmix64(state, static_cast<uint64_t>(call.positions[r])) >> 16;
    return {call.logits + r * call.stride,
            call.size,
            -std::numeric_limits<float>::infinity(),
            columns.inverse_temperature[slot],
            columns.floor[slot],
            columns.top_p[slot],
            static_cast<double>(drawn) * 0x1p-48,
            std::min(columns.top_k[slot], call.size)};
}

// One row, computed by a team whose threads share its vocabulary. `sync` is the team's barrier.
template <typename Sync>
void sample_row(const Call& call, int64_t r, Scratch& scratch, int thread, int threads, const Sync& sync) {
    LogitRow row = row_of(call, r);
    const SamplingPasses& on = sampling_passes();
    const Share share(row.num_blocks(), thread, threads);
    on.find_maxima(row.x, row.size, share.first, share.end, scratch.maxima.data());
    sync();
    for (const float one : scratch.maxima) row.best = one > row.best || one != one ? one : row.best;
    const bool is_drawn = row.inverse > 0.0f && std::isfinite(row.best);
    const bool is_whole = row.top_k == 0 && row.top_p >= 1.0;
    double total = 0.0;
    if (is_drawn && row.top_k == 0) {
        const float floor = is_whole ? row.floor : -std::numeric_limits<float>::infinity();
        on.sum_weights(row, scratch.maxima.data(), share.first, share.end, floor, scratch.sums.data());
        sync();
        for (const double one : scratch.sums) total += one;
    }
    if (thread == 0) {
        int64_t id = -1;
        if (is_drawn)
            id = is_whole ? draw_in_id_order(row, scratch.sums, total) : draw_from_best(row, scratch, total);
        call.ids[r] = id >= 0 ? id : first_of(row, scratch.maxima.data(), row.best);
        call.best[r] = row.best;
    }
}

Scratch& scratch_of_thread(int64_t size) {
    static thread_local Scratch scratch;
    scratch.fit(size);
    return scratch;
}

void sample_rows(const Call& call, int num_threads) {
    const auto alone = [] {};
    if (num_threads <= 1) {  // no parallel region at all: it would wake the pool
        Scratch& scratch = scratch_of_thread(call.size);
        for (int64_t r = 0; r < call.num_rows; ++r) sample_row(call, r, scratch, 0, 1, alone);
        return;
    }
#if defined(_OPENMP)
    if (call.num_rows >= num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads)
        for (int64_t r = 0; r < call.num_rows; ++r) sample_row(call, r, scratch_of_thread(call.size), 0, 1, alone);
        return;
    }
    Scratch& shared = scratch_of_thread(call.size);
#pragma omp parallel num_threads(num_threads)
    {
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const auto sync = [] {
#pragma omp barrier
        };
        for (int64_t r = 0; r < call.num_rows; ++r) {
            sample_row(call, r, shared, thread, threads, sync);
            sync();
        }
    }
#endif
}

}  // namespace
}  // namespace octavo

// Return one id per row, and the row's best logit (NaN if any logit is). If the best logit is not finite, or the slot's
// inverse temperature is 0, the id is the first with the best logit. Vocabularies have at most 2^19 ids.
EXPORT void octavo_sample(const void* columns, const int64_t* slots, const int64_t* positions, const float* logits,
                          int64_t stride, int64_t num_rows, int64_t size, int64_t* ids, float* best,
                          int32_t num_threads) {
    const auto* of_slots = static_cast<const octavo::Columns*>(columns);
    octavo::sample_rows({of_slots, slots, positions, logits, stride, num_rows, size, ids, best}, num_threads);
}
