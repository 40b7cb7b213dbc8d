// A run of operations over the rows of one step, in one parallel region.
//
// Owns: the barriers between operations, the layout of the workspace. Does not: allocate, or choose what is run.
// Invariants: a token's result depends on its row of the batch alone, bit for bit, as in decoder_step.cpp.

#include "operations.h"

#include <algorithm>
#include <vector>

#include "kernel.h"
#include "rows.h"

namespace octavo {
namespace {

// The addresses of a step's buffers; `bytes` is the size of those in the workspace. Of these, one is used again as soon
// as no operation reads it any more.
struct RunMemory {
    std::vector<float*> buffers;
    char *prepared, *own_prepared;
    int64_t prepared_bytes = 0, bytes;

    RunMemory(const Run& run, int64_t tokens, int64_t threads, float* const* tensors, void* workspace)
        : buffers(run.num_buffers) {
        if (tensors != nullptr) std::copy(tensors, tensors + run.num_tensors, buffers.begin());
        Buffers taken(workspace);
        std::vector<int64_t> last(run.num_buffers), spare;
        for (int64_t i = 0; i < run.num_operations; ++i) {
            const Operation& o = run.operations[i];
            prepared_bytes = std::max(prepared_bytes, largest_prepared(o.product));
            for (const int64_t b : {o.x, o.other, o.out, o.sum})
                if (b >= 0) last[b] = i;
        }
        for (int64_t i = 0; i < run.num_operations; ++i) {
            const Operation& o = run.operations[i];
            for (const int64_t b : {o.out, o.sum}) {
                if (b < run.num_tensors) continue;
                const auto same = [&](int64_t other) { return run.widths[other] == run.widths[b]; };
                const auto found = std::find_if(spare.begin(), spare.end(), same);
                buffers[b] = found == spare.end() ? taken.take<float>(tokens * run.widths[b]) : buffers[*found];
                if (found != spare.end()) spare.erase(found);
            }
            for (const int64_t b : {o.x, o.other, o.out, o.sum})
                if (b >= run.num_tensors && last[b] == i) spare.push_back(b), last[b] = -1;
        }
        prepared = taken.take<char>(tokens * prepared_bytes);
        own_prepared = taken.take<char>(threads * kPrivateRows * prepared_bytes);
        bytes = taken.bytes();
    }
};

// One thread's part of a run.
class OperationRunner {
  public:
    OperationRunner(const Run& run, const RunStep& step, const RunMemory& memory, Barrier& barrier, int thread,
                    int threads)
        : run_(run), step_(step), memory_(memory), barrier_(barrier), rows_(row_kernels()), thread_(thread),
          threads_(threads), own_(step.num_tokens, thread, threads) {}

    void run() {
        for (int64_t i = 0; i < run_.num_operations; ++i) {
            apply(run_.operations[i]);
            barrier_.wait();
        }
    }

  private:
    int64_t width(int64_t buffer) const { return run_.widths[buffer]; }
    float* row(int64_t buffer, int64_t t) const { return memory_.buffers[buffer] + t * run_.widths[buffer]; }

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
        const bool is_private = step_.num_tokens <= kPrivateRows;
        char* prepared = is_private ? memory_.own_prepared + thread_ * kPrivateRows * memory_.prepared_bytes
                                    : memory_.prepared;
        const Multiplier multiplier{barrier_, thread_, threads_, prepared, is_private};
        multiplier.multiply(
            o.product, step_.num_tokens, [&](int64_t t) { return row(o.x, t); }, row(o.out, 0), width(o.out), false);
    }

    void attend_rows(const Operation& o) {
        const AttentionLayer& layer = *o.attention;
        const StepGroup& group = step_.groups[o.group];
        const int64_t size = layer.num_heads * layer.head_dim, kv_size = layer.num_kv_heads * layer.head_dim;
        for (int64_t t = own_.first; t < own_.end; ++t)
            for (int64_t i = 0; i < size + kv_size; i += layer.head_dim)
                rows_.rotate(row(o.x, t) + i, row(o.other, t), layer.head_dim, false);
        const float* keys = row(o.x, 0) + size;
        write_kv(layer, group.slot_mapping, own_.first, own_.end, {keys, keys + kv_size, width(o.x), width(o.x)});
        barrier_.wait();
        attend(layer, *group.attention, row(o.x, 0), width(o.x), row(o.out, 0), size, thread_, threads_);
        if (group.attention->num_joins == 0) return;
        barrier_.wait();
        attend_join(layer, *group.attention, row(o.out, 0), size, thread_, threads_);
    }

    const Run& run_;
    const RunStep& step_;
    const RunMemory& memory_;
    Barrier& barrier_;
    const RowKernels& rows_;
    const int thread_, threads_;
    const Share own_;
};

}  // namespace
}  // namespace octavo

// Return the bytes of workspace for a step of `tokens` rows.
EXPORT int64_t octavo_run_workspace(const octavo::Run* run, int64_t tokens, int64_t threads) {
    return octavo::RunMemory(*run, tokens, threads, nullptr, nullptr).bytes;
}

EXPORT void octavo_run_operations(const octavo::Run* run, const octavo::RunStep* step, int32_t threads) {
    const octavo::RunMemory memory(*run, step->num_tokens, std::max(1, threads), step->tensors, step->workspace);
    octavo::run_team(threads, [&](octavo::Barrier& barrier, int thread, int count) {
        octavo::OperationRunner(*run, *step, memory, barrier, thread, count).run();
    });
}
