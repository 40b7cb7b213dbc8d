// A run of operations over the rows of one step, in one parallel region.
//
// Owns: the barriers between operations, the layout of the workspace. Does not: allocate, or choose what is run.
// Invariants: a token's result depends on its row of the batch alone, bit for bit, as in decoder_step.cpp. Only
// multiplication and attention have barriers: of the other operations, and of preparing rows, each thread does its share
// of the tokens; with few tokens it does all of them by itself, in buffers of its own. With many tokens, a thread computes
// all operations between two attentions for a block of rows.

#include "operations.h"

#include <algorithm>
#include <vector>

#include "kernel.h"
#include "rows.h"

namespace octavo {
namespace {

// The addresses of a step's buffers; `bytes` is the size of those in the workspace. Of these, one is used again after
// its last reader. If all threads read all of it, which is so for products, a barrier must come between: that of the next
// multiplication.
class RunMemory {
  public:
    const bool is_private;  // few tokens: each thread has its own copy of what is no product
    float* attended;
    char *prepared, *own_prepared;
    int64_t prepared_bytes = 0, bytes;

    RunMemory(const Run& run, int64_t tokens, int64_t threads, float* const* tensors, void* workspace)
        : is_private(tokens <= kPrivateRows), run_(run), buffers_(threads * run.num_buffers) {
        Buffers taken(workspace);
        int64_t attended_width = 0;
        std::vector<int64_t> last(run.num_buffers), unread, spare;
        std::vector<bool> is_by_rows(run.num_buffers);  // each thread writes and reads its rows, or copy
        for (int64_t i = 0; i < run.num_operations; ++i) {
            const Operation& o = run.operations[i];
            prepared_bytes = std::max(prepared_bytes, largest_prepared(o.product));
            if (o.kind == kAttendRows) attended_width = std::max(attended_width, run.widths[o.out]);
            for (const int64_t b : {o.x, o.other, o.out, o.sum})
                if (b >= 0) last[b] = i;
            for (const int64_t b : {o.out, o.sum})
                if (b >= 0) is_by_rows[b] = o.kind != kMultiplyRows;
        }
        const auto take = [&](int64_t b) {
            const bool is_own = is_private && is_by_rows[b];
            for (int64_t thread = 0; thread < threads; ++thread) {
                float*& buffer = buffers_[thread * run.num_buffers + b];
                if (thread > 0 && !is_own) buffer = at(0, b);
                else if (thread == 0 && b < run.num_tensors) buffer = tensors == nullptr ? nullptr : tensors[b];
                else buffer = taken.take<float>(tokens * run.widths[b]);
            }
        };
        for (int64_t b = 0; b < run.num_tensors; ++b) take(b);
        for (int64_t i = 0; i < run.num_operations; ++i) {
            const Operation& o = run.operations[i];
            for (const int64_t b : {o.out, o.sum}) {
                if (b < run.num_tensors) continue;
                const auto found = std::find_if(spare.begin(), spare.end(), [&](int64_t other) {
                    return run.widths[other] == run.widths[b] && is_by_rows[other] == is_by_rows[b];
                });
                if (found == spare.end()) {
                    take(b);
                    continue;
                }
                for (int64_t first = 0; first < threads * run.num_buffers; first += run.num_buffers)
                    buffers_[first + b] = buffers_[first + *found];
                spare.erase(found);
            }
            for (const int64_t b : {o.x, o.other, o.out, o.sum})
                if (b >= run.num_tensors && last[b] == i) (is_by_rows[b] ? spare : unread).push_back(b), last[b] = -1;
            if (o.kind != kMultiplyRows) continue;
            spare.insert(spare.end(), unread.begin(), unread.end());
            unread.clear();
        }
        attended = taken.take<float>(is_private ? tokens * attended_width : 0);
        prepared = taken.take<char>(is_private ? 0 : tokens * prepared_bytes);
        own_prepared = taken.take<char>(threads * kMaxBlockRows * prepared_bytes);
        bytes = taken.bytes();
    }

    float* at(int64_t thread, int64_t buffer) const { return buffers_[thread * run_.num_buffers + buffer]; }

  private:
    const Run& run_;
    std::vector<float*> buffers_;  // [thread, buffer]
};

// One thread's part of a run.
class OperationRunner {
  public:
    OperationRunner(const Run& run, const RunStep& step, const RunMemory& memory, Team& team, int thread,
                    int threads)
        : run_(run), step_(step), memory_(memory), team_(team), rows_(row_kernels()), thread_(thread),
          threads_(threads), split_(step.num_tokens, thread, threads),
          own_(memory.is_private ? Share(step.num_tokens, 0, 1) : split_) {}

    void run() {
        const Operation *o = run_.operations, *end = o + run_.num_operations;
        const Operation* product = std::find_if(o, end, [](const Operation& any) { return any.kind == kMultiplyRows; });
        const int64_t blocks = product == end ? 0 : row_blocks(*product->product.parts, step_.num_tokens, threads_);
        if (blocks > 0 && !memory_.is_private) return run_by_rows(blocks);
        for (; o < end; ++o) apply(*o);
    }

  private:
    int64_t width(int64_t buffer) const { return run_.widths[buffer]; }
    float* row(int64_t buffer, int64_t t) const { return memory_.at(thread_, buffer) + t * run_.widths[buffer]; }

    void run_by_rows(int64_t blocks) {
        const Operation *o = run_.operations, *end = o + run_.num_operations, *before = nullptr;
        Team::Progress progress;
        is_alone_ = true;
        while (o < end || before != nullptr) {
            const Operation* next = std::find_if(o, end, [](const Operation& any) { return any.kind == kAttendRows; });
            team_.share_out(thread_, progress, blocks, [&](int64_t block) {
                split_ = own_ = {step_.num_tokens * block / blocks, step_.num_tokens * (block + 1) / blocks};
                if (before != nullptr) join(*before);
                for (const Operation* each = o; each < next; ++each) apply(*each);
                if (next < end) write_keys(*next);
            });
            if (next < end)
                team_.share_out(thread_, progress, attention_shares(threads_), [&](int64_t share) {
                    attend_share(*next, row(next->out, 0), share, attention_shares(threads_));
                });
            before = next < end ? next : nullptr;
            o = next < end ? next + 1 : end;
        }
    }

    void apply(const Operation& o) {
        if (o.kind == kMultiplyRows) return multiply(o);
        if (o.kind == kAttendRows) return attend_rows(o);
        for (int64_t t = own_.first; t < own_.end; ++t) apply_to_row(o, t);
    }

    void apply_to_row(const Operation& o, int64_t t) {
        const float* x = row(o.x, t);
        if (o.sum >= 0) {
            float* sum = row(o.sum, t);
            std::copy(x, x + width(o.x), sum);
            rows_.add(row(o.other, t), width(o.x), sum);
            x = sum;
        }
        if (o.kind == kNormRows) {
            const float eps = static_cast<float>(o.number);
            for (int64_t i = 0; i < width(o.x); i += o.size)
                rows_.rms_norm(x + i, o.weight, o.size, eps, row(o.out, t) + i);
        } else if (o.kind == kScaleRows) {
            std::copy(x, x + width(o.x), row(o.out, t));
            rows_.scale(static_cast<float>(o.number), width(o.x), row(o.out, t));
        } else if (o.kind == kActivateRows) {
            rows_.activate(o.activation, true, x, width(o.out), row(o.out, t));
        }
    }

    void multiply(const Operation& o) {
        const bool is_private = is_alone_ || memory_.is_private;
        char* own = memory_.own_prepared + thread_ * kMaxBlockRows * memory_.prepared_bytes;
        const Multiplier multiplier{team_, is_alone_ ? 0 : thread_, is_alone_ ? 1 : threads_,
                                    is_private ? own : memory_.prepared, is_private};
        const Share block = is_alone_ ? own_ : Share(0, step_.num_tokens);
        multiplier.multiply(
            o.product, block.end - block.first, [&](int64_t t) { return row(o.x, block.first + t); },
            row(o.out, block.first), width(o.out), false);
        if (!is_alone_) team_.wait();
    }

    // Rotate queries and keys, and write keys and values to the pool.
    void write_keys(const Operation& o) {
        const AttentionLayer& layer = *o.attention;
        const int64_t size = layer.num_heads * layer.head_dim, kv_size = layer.num_kv_heads * layer.head_dim;
        for (int64_t t = split_.first; t < split_.end; ++t)
            for (int64_t i = 0; i < size + kv_size; i += layer.head_dim)
                rows_.rotate(row(o.x, t) + i, row(o.other, t), layer.head_dim, false);
        const float* keys = row(o.x, 0) + size;
        write_kv(layer, step_.groups[o.group].slot_mapping, split_.first, split_.end,
                 {keys, keys + kv_size, width(o.x), width(o.x)});
    }

    void attend_share(const Operation& o, float* out, int64_t share, int64_t shares) {
        const AttentionLayer& layer = *o.attention;
        attend(layer, *step_.groups[o.group].attention, row(o.x, 0), width(o.x), out, layer.num_heads * layer.head_dim,
               share, shares);
    }

    // Join the parts of the thread's own rows.
    void join(const Operation& o) {
        const AttentionStep& step = *step_.groups[o.group].attention;
        const Share units = join_units(step, o.attention->num_heads, own_);
        attend_join(*o.attention, step, row(o.out, 0), o.attention->num_heads * o.attention->head_dim, units.first,
                    units.end);
    }

    void attend_rows(const Operation& o) {
        write_keys(o);
        team_.wait();
        attend_share(o, memory_.is_private ? memory_.attended : row(o.out, 0), thread_, threads_);
        team_.wait();
        const AttentionStep& step = *step_.groups[o.group].attention;
        if (memory_.is_private) {
            const int64_t size = o.attention->num_heads * o.attention->head_dim;
            for (int64_t t = 0; t < step_.num_tokens; ++t)
                if (step.first_slots[t] == kDirect) std::copy_n(memory_.attended + t * size, size, row(o.out, t));
        }
        if (step.num_joins == 0) return;
        join(o);
        if (!memory_.is_private) team_.wait();
    }

    const Run& run_;
    const RunStep& step_;
    const RunMemory& memory_;
    Team& team_;
    const RowKernels& rows_;
    const int thread_, threads_;
    Share split_, own_;      // this thread's share of the tokens; those that it computes, all of few
    bool is_alone_ = false;  // both are a block, which no other thread computes
};

}  // namespace
}  // namespace octavo

// Return the bytes of workspace for a step of `tokens` rows.
EXPORT int64_t octavo_run_workspace(const octavo::Run* run, int64_t tokens, int64_t threads) {
    return octavo::RunMemory(*run, tokens, threads, nullptr, nullptr).bytes;
}

EXPORT void octavo_run_operations(const octavo::Run* run, const octavo::RunStep* step, int32_t threads) {
    const octavo::RunMemory memory(*run, step->num_tokens, std::max(1, threads), step->tensors, step->workspace);
    octavo::run_team(threads, [&](octavo::Team& team, int thread, int count) {
        octavo::OperationRunner(*run, *step, memory, team, thread, count).run();
    });
}
