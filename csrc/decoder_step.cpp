// The layers of a decoder over the tokens of one step, as phases of one parallel region.
//
// Owns: the order of the phases, how the threads divide them, the layout of the workspace.
// Does not: allocate, choose sizes, or know requests. linear.cpp, attention.cpp and rows.cpp own the phases.
// Invariants: a token's result depends on its row of the batch alone, bit for bit. This holds for every phase; the
// number of threads, and how they divide the work, change only which thread computes what.
// Many tokens are divided by rows: a block of rows goes from attention to the next layer's keys in one thread's caches,
// with two phases a layer. Few tokens are divided by columns, so that each weight is read once, with a barrier after
// each multiplication. With very few each thread prepares all rows that it multiplies by itself, including joined parts
// of attention; this saves a barrier and costs next to nothing.

#include "decoder_step.h"

#include <algorithm>
#include <limits>

#include "kernel.h"
#include "linear_layout.h"
#include "rows.h"
#include "sampling_passes.h"
#include "team.h"

namespace octavo {
namespace {

// The linear layers of a layer that adapters change, in the order of LoraStep's weights; kHead has no adapter.
enum AdaptedLinear : int64_t { kQkv = 0, kOutput = 1, kGateUp = 2, kDown = 3, kNumAdapted = 4, kHead = -1 };

// Bytes of the largest prepared row of any weight of the model.
int64_t largest_prepared(const Model& model) {
    int64_t most = 0;
    const auto look = [&most](const Multiplication& m) { most = std::max(most, largest_prepared(m)); };
    for (int64_t l = 0; l < model.num_layers; ++l) {
        const Layer& layer = model.layers[l];
        look(layer.qkv), look(layer.output), look(layer.gate_up), look(layer.down);
    }
    look(model.head);
    return most;
}

// Values that the MLP's first multiplication gives a token.
int64_t mlp_width(const Model& m) { return (m.is_gated != 0 ? 2 : 1) * m.intermediate_size; }

int64_t row_width(const Model& m) { return std::max({m.hidden_size, m.num_heads * m.head_dim, m.intermediate_size}); }

int64_t outputs(const Multiplication& m) {
    int64_t sum = 0;
    for (int64_t i = 0; i < m.num_parts; ++i) sum += m.parts[i].outputs;
    return sum;
}

// How many columns of logits of so many rows a thread computes before it looks at them: few enough to stay in a cache.
int64_t block_panels(int64_t rows) {
    constexpr int64_t kMost = kMostSeen / kPanel, kLeast = 4;
    return std::max(kLeast, kMost / std::max<int64_t>(1, rows));
}

// The addresses of a step's buffers in the workspace; `bytes` is the size of the whole.
struct Workspace {
    float *stream, *qkv, *attended, *gate_up, *added, *scratch, *own_joined, *own_gate_up, *own_logits;
    BestLogit* own_best;
    char *prepared, *own_prepared;
    void* mixture;
    int64_t prepared_bytes, scratch_size, joined_size, mlp_stride, own_rows, logits_stride, bytes;

    Workspace(const Model& m, int64_t tokens, int64_t threads, void* memory) {
        Buffers buffers(memory);
        own_rows = std::max(kPrivateRows, kMaxBlockRows);
        prepared_bytes = largest_prepared(m);
        scratch_size = Buffers::aligned(row_width(m) * 4) / 4;
        joined_size = Buffers::aligned(kPrivateRows * m.num_heads * m.head_dim * 4) / 4;
        mlp_stride = mlp_width(m) + kPanel;  // rows a multiple of 4096 bytes apart would share cache sets
        stream = buffers.take<float>(tokens * m.hidden_size);
        qkv = buffers.take<float>(tokens * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim);
        attended = buffers.take<float>(tokens * m.num_heads * m.head_dim);
        gate_up = buffers.take<float>(tokens * mlp_stride);
        added = buffers.take<float>(tokens * m.hidden_size);
        scratch = buffers.take<float>(threads * scratch_size);
        own_joined = buffers.take<float>(threads * joined_size);
        own_gate_up = buffers.take<float>(threads * own_rows * mlp_stride);
        prepared = buffers.take<char>(tokens * prepared_bytes);
        own_prepared = buffers.take<char>(threads * own_rows * prepared_bytes);
        logits_stride = (block_panels(tokens) + 1) * kPanel;  // see mlp_stride
        own_logits = buffers.take<float>(threads * tokens * logits_stride);
        own_best = buffers.take<BestLogit>(threads * tokens);
        int64_t mixture_bytes = 0;
        for (int64_t l = 0; l < m.num_layers; ++l)
            if (m.layers[l].mixture != nullptr)
                mixture_bytes = std::max(mixture_bytes, mixture_workspace(*m.layers[l].mixture, tokens, threads));
        mixture = buffers.take<char>(mixture_bytes);
        bytes = buffers.bytes();
    }
};

// One thread's part of a step.
class Runner {
  public:
    Runner(const Model& model, const Workspace& work, Team& team, int thread, int threads)
        : m_(model), w_(work), team_(team), rows_(row_kernels()), thread_(thread), threads_(threads),
          scratch_(work.scratch + thread * work.scratch_size),
          own_joined_(work.own_joined + thread * work.joined_size),
          own_prepared_(work.own_prepared + thread * work.own_rows * work.prepared_bytes),
          own_gate_up_(work.own_gate_up + thread * work.own_rows * work.mlp_stride) {}

    void step(Step& s) {
        tokens_ = s.num_tokens;
        lora_ = s.lora;
        const bool may_be_by_rows = lora_ == nullptr && m_.num_layers > 0;
        const int64_t blocks = may_be_by_rows ? row_blocks(*m_.layers->qkv.parts, tokens_, threads_) : 0;
        if (blocks > 0) return step_by_rows(s, blocks);
        block_ = {0, tokens_}, gate_up_ = w_.gate_up;
        embed(s);
        team_.wait();
        for (layer_ = 0; layer_ < m_.num_layers; ++layer_) {
            const Layer& layer = m_.layers[layer_];
            project(layer, s);
            team_.wait();
            attend(layer.attention, *s.groups[layer.group].attention, w_.qkv, qkv_width(), w_.attended, attended_width(),
                   thread_, threads_);
            team_.wait();
            transform(layer, s);
            if (layer.mixture != nullptr) mix_experts(layer, s);
        }
        finish(s);
    }

    void logits(const float* hidden, int64_t rows, float* out, int64_t stride) {
        tokens_ = rows;
        block_ = {0, rows};
        const auto row = [&](int64_t t) { return hidden + t * m_.hidden_size; };
        multiply(m_.head, kHead, row, out, stride, false);
        if (m_.logits_scale == 1.0 && m_.logits_cap == 0.0) return;
        team_.wait();
        const Share own(outputs(m_.head), thread_, threads_);
        for (int64_t t = 0; t < rows; ++t) scale_logits(own.end - own.first, out + t * stride + own.first);
    }

    // The best logit of each row and its id, as of `logits`. Logits leave no cache: each thread looks at those of a
    // block of columns before it computes the next block.
    void best(const float* hidden, int64_t rows, float* best, int64_t* ids) {
        const bool is_private = rows <= kPrivateRows;
        const Multiplier multiplier{team_, thread_, threads_, is_private ? own_prepared_ : w_.prepared, is_private};
        const int64_t panels = block_panels(rows), stride = w_.logits_stride;
        float* const logits = w_.own_logits + thread_ * rows * stride;
        BestLogit* const own = w_.own_best + thread_ * rows;
        std::fill_n(own, rows, BestLogit{-std::numeric_limits<float>::infinity(), 0});
        const auto look = [&](const Weight& weight, int64_t first) {
            const Share share(num_panels(weight.outputs), thread_, threads_);
            for (int64_t panel = share.first; panel < share.end; panel += panels) {
                const Weight some = some_panels(weight, panel, std::min(panel + panels, share.end));
                linear(some, multiplier.prepared, rows, logits, stride, false, 0, 1);
                for (int64_t t = 0; t < rows; ++t) {
                    scale_logits(some.outputs, logits + t * stride);
                    own[t].see(logits + t * stride, some.outputs, first + panel * kPanel);
                }
            }
        };
        multiplier.for_parts(m_.head, rows, [&](int64_t t) { return hidden + t * m_.hidden_size; }, look);
        team_.wait();
        if (thread_ > 0) return;
        for (int64_t t = 0; t < rows; ++t) {
            for (int64_t other = 1; other < threads_; ++other) own[t].see(w_.own_best[other * rows + t]);
            best[t] = own[t].value, ids[t] = own[t].id;
        }
    }

  private:
    // Two phases a layer: blocks of rows between two attentions, and attention's items.
    void step_by_rows(Step& s, int64_t blocks) {
        Team::Progress progress;
        is_alone_ = true, gate_up_ = own_gate_up_;
        const auto for_blocks = [&](const auto& work) {
            team_.share_out(thread_, progress, blocks, [&](int64_t block) {
                block_ = {tokens_ * block / blocks, tokens_ * (block + 1) / blocks};
                work();
            });
        };
        for_blocks([&] {
            embed(s);
            project(m_.layers[0], s);
        });
        for (layer_ = 0; layer_ < m_.num_layers; ++layer_) {
            const Layer& layer = m_.layers[layer_];
            team_.share_out(thread_, progress, attention_shares(threads_), [&](int64_t share) {
                attend(layer.attention, *s.groups[layer.group].attention, w_.qkv, qkv_width(), w_.attended,
                       attended_width(), share, attention_shares(threads_));
            });
            const auto go_on = [&] {
                if (layer_ + 1 == m_.num_layers) return finish(s);
                project(m_.layers[layer_ + 1], s);
            };
            if (layer.mixture == nullptr) {
                for_blocks([&] { transform(layer, s), go_on(); });
                continue;
            }
            for_blocks([&] { transform(layer, s); });
            is_alone_ = false, block_ = {0, tokens_};
            mix_experts(layer, s);
            is_alone_ = true;
            for_blocks(go_on);
        }
    }

    // Of the block's rows, those whose row operations this thread does.
    Share own_rows() const { return is_alone_ ? block_ : Share(tokens_, thread_, threads_); }

    void scale_logits(int64_t count, float* logits) {
        if (m_.logits_scale != 1.0) rows_.scale(static_cast<float>(m_.logits_scale), count, logits);
        if (m_.logits_cap != 0.0) rows_.soft_cap(static_cast<float>(m_.logits_cap), count, logits);
    }

    // Wait for the other threads, if they compute the same block.
    void sync() {
        if (!is_alone_) team_.wait();
    }

    int64_t qkv_width() const { return (m_.num_heads + 2 * m_.num_kv_heads) * m_.head_dim; }
    int64_t attended_width() const { return m_.num_heads * m_.head_dim; }

    void norm(const float* x, const Norm& norm, double eps, float* out) {
        const float e = static_cast<float>(eps);
        if (m_.norm_kind == kLayerNorm) return rows_.layer_norm(x, norm.weight, norm.bias, m_.hidden_size, e, out);
        rows_.rms_norm(x, norm.weight, m_.hidden_size, e, out);
    }

    // Token t of the stream, normed into scratch_ if the family has a norm there.
    const float* stream_row(int64_t t, const Norm& before) {
        const float* row = w_.stream + t * m_.hidden_size;
        if (before.weight == nullptr) return row;
        norm(row, before, m_.stream_eps, scratch_);
        return scratch_;
    }

    void embed(const Step& s) {
        const Share own = own_rows();
        for (int64_t t = own.first; t < own.end; ++t) {
            float* out = w_.stream + t * m_.hidden_size;
            int64_t id = s.token_ids[t];
            const Weight* part = m_.embedding.parts;
            while (id >= part->outputs) id -= part->outputs, ++part;
            unpack_row(*part, id, out);
            if (m_.embedding_scale != 1.0) rows_.scale(static_cast<float>(m_.embedding_scale), m_.hidden_size, out);
        }
        const int64_t* end = s.media_rows + s.num_media;
        const int64_t* row = std::lower_bound(s.media_rows, end, own.first);
        for (; row != end && *row < own.end; ++row) {
            const float* from = s.media + (row - s.media_rows) * m_.hidden_size;
            std::copy(from, from + m_.hidden_size, w_.stream + *row * m_.hidden_size);
        }
    }

    void finish(const Step& s) {
        const Share own = own_rows();
        for (int64_t t = own.first; t < own.end; ++t)
            norm(w_.stream + t * m_.hidden_size, m_.final_norm, m_.stream_eps, s.hidden + t * m_.hidden_size);
    }

    // out (+)= row(t) times the weight, for every token of the block, whose first has the output `out`. `row` returns
    // token t's inputs; it may use scratch_.
    template <typename Row>
    void multiply(const Multiplication& m, int64_t adapted, const Row& row, float* out, int64_t stride,
                  bool accumulate) {
        const LoraStep* lora = adapted == kHead ? nullptr : lora_;
        const bool is_private = is_alone_ || (tokens_ <= kPrivateRows && lora == nullptr);
        char* prepared = is_private ? own_prepared_ : w_.prepared;
        const Multiplier multiplier{team_, is_alone_ ? 0 : thread_, is_alone_ ? 1 : threads_, prepared, is_private};
        const int64_t count = block_.end - block_.first;
        if (lora == nullptr)
            return multiplier.multiply(
                m, count, [&](int64_t t) { return row(block_.first + t); }, out, stride, accumulate);
        const auto kept = [&](int64_t t) {
            const float* x = row(t);
            if (lora->adapters[t] >= 0) std::copy(x, x + m.parts->inputs, lora->inputs + t * lora->max_inputs);
            return x;
        };
        multiplier.multiply(m, tokens_, kept, out, stride, accumulate);
        lora_down(*lora, layer_ * kNumAdapted + adapted, thread_, threads_);
        team_.wait();
        lora_up(*lora, layer_ * kNumAdapted + adapted, out, stride, thread_, threads_);
    }

    // stream += row(t) times the weight, normed first if the family has a norm there.
    template <typename Row>
    void add_to_stream(const Multiplication& m, int64_t adapted, const Row& row, const Norm& after) {
        const bool has_norm = after.weight != nullptr;
        float* out = (has_norm ? w_.added : w_.stream) + block_.first * m_.hidden_size;
        multiply(m, adapted, row, out, m_.hidden_size, !has_norm);
        sync();
        if (has_norm) add_normed(after);
    }

    // stream += the norm of what was added.
    void add_normed(const Norm& after) {
        const Share own = own_rows();
        for (int64_t t = own.first; t < own.end; ++t) {
            norm(w_.added + t * m_.hidden_size, after, m_.norm_eps, scratch_);
            rows_.add(scratch_, m_.hidden_size, w_.stream + t * m_.hidden_size);
        }
        sync();
    }

    // The block's queries, and its keys and values, which are written to the pool.
    void project(const Layer& layer, const Step& s) {
        const int64_t width = qkv_width();
        const auto normed = [&](int64_t t) { return stream_row(t, layer.attention_norm); };
        multiply(layer.qkv, kQkv, normed, w_.qkv + block_.first * width, width, false);
        sync();
        const Share own = own_rows();
        for (int64_t t = own.first; t < own.end; ++t) turn(layer, s, t, w_.qkv + t * width);
        const float* keys = w_.qkv + attended_width();
        write_kv(layer.attention, s.groups[layer.group].slot_mapping, own.first, own.end,
                 {keys, keys + m_.num_kv_heads * m_.head_dim, width, width});
    }

    // Everything of a layer after attention, except a mixture of experts.
    void transform(const Layer& layer, const Step& s) {
        const bool has_norm = layer.mlp_norm.weight != nullptr, has_mlp = layer.mixture == nullptr;
        if (has_mlp && m_.is_parallel != 0) mlp_up(layer, has_norm ? layer.mlp_norm : layer.attention_norm);
        const AttentionStep& step = *s.groups[layer.group].attention;
        const int64_t size = attended_width(), heads = m_.num_heads;
        const bool is_private = !is_alone_ && tokens_ <= kPrivateRows;
        if (is_private) {  // each thread joins all tokens for itself
            attend_join(layer.attention, step, own_joined_, size, 0, step.num_joins * heads);
        } else if (is_alone_) {
            const Share units = join_units(step, heads, block_);
            attend_join(layer.attention, step, w_.attended, size, units.first, units.end);
        } else if (step.num_joins > 0) {
            const Share units(step.num_joins * heads, thread_, threads_);
            attend_join(layer.attention, step, w_.attended, size, units.first, units.end);
            team_.wait();
        }
        const auto attended = [&](int64_t t) {
            return (is_private && step.first_slots[t] != kDirect ? own_joined_ : w_.attended) + t * size;
        };
        add_to_stream(layer.output, kOutput, attended, layer.after_attention);
        if (!has_mlp) return;
        if (m_.is_parallel == 0) mlp_up(layer, layer.mlp_norm);
        mlp_down(layer);
    }

    // Norm and rotate the heads of token t.
    void turn(const Layer& layer, const Step& s, int64_t t, float* heads) {
        const int64_t size = m_.num_heads * m_.head_dim;
        norm_heads(layer.query_norm, m_.num_heads, heads);
        norm_heads(layer.key_norm, m_.num_kv_heads, heads + size);
        if (layer.rope_table == nullptr) return;
        float joined[2 * kMaxSize];
        const float* rope_row = layer.rope_table + s.positions[t] * 2 * m_.rope_dim;
        if (s.rope_positions != nullptr) rope_row = join_ropes(layer, s.rope_positions + t, joined);
        for (int64_t h = 0; h < m_.num_heads + m_.num_kv_heads; ++h)
            rows_.rotate(heads + h * m_.head_dim, rope_row, m_.rope_dim, m_.rope_is_interleaved != 0);
    }

    // The turn of a token by its three positions, each for some pairs of values (Qwen2-VL; not interleaved).
    const float* join_ropes(const Layer& layer, const int64_t* positions, float* out) {
        const int64_t half = m_.rope_dim / 2, bounds[] = {0, m_.rope_height, m_.rope_width, half};
        for (int64_t axis = 0; axis < 3; ++axis) {
            const float* row = layer.rope_table + positions[axis * tokens_] * 2 * m_.rope_dim;
            for (int64_t part = 0; part < 4; ++part)
                std::copy(row + part * half + bounds[axis], row + part * half + bounds[axis + 1],
                          out + part * half + bounds[axis]);
        }
        return out;
    }

    void norm_heads(const Norm& norm, int64_t num_heads, float* heads) {
        if (norm.weight == nullptr) return;
        const float eps = static_cast<float>(m_.norm_eps);
        const int64_t size = m_.qk_norm_is_wide != 0 ? num_heads * m_.head_dim : m_.head_dim;
        for (int64_t i = 0; i < num_heads * m_.head_dim; i += size)
            rows_.rms_norm(heads + i, norm.weight, size, eps, heads + i);
    }

    void mix_experts(const Layer& layer, Step& s) {
        MixtureRun mixture(*layer.mixture, tokens_, w_.mixture, team_, thread_, threads_);
        const Share columns = mixture.run([&](int64_t t) { return stream_row(t, layer.mlp_norm); }, w_.added);
        if (thread_ == 0) s.expert_bytes += mixture.bytes_read();
        if (layer.after_mlp.weight != nullptr) {
            team_.wait();
            return add_normed(layer.after_mlp);
        }
        for (int64_t t = 0; t < tokens_; ++t) {
            const int64_t first = t * m_.hidden_size + columns.first;
            rows_.add(w_.added + first, columns.end - columns.first, w_.stream + first);
        }
        team_.wait();
    }

    void mlp_up(const Layer& layer, const Norm& before) {
        const auto normed = [&](int64_t t) { return stream_row(t, before); };
        multiply(layer.gate_up, kGateUp, normed, gate_up_, w_.mlp_stride, false);
        sync();
    }

    void mlp_down(const Layer& layer) {
        const auto activated = [&](int64_t t) {
            const float* x = gate_up_ + (t - block_.first) * w_.mlp_stride;
            rows_.activate(m_.activation, m_.is_gated != 0, x, m_.intermediate_size, scratch_);
            return scratch_;
        };
        add_to_stream(layer.down, kDown, activated, layer.after_mlp);
    }

    const Model& m_;
    const Workspace& w_;
    Team& team_;
    const RowKernels& rows_;
    const int thread_, threads_;
    float *const scratch_, *const own_joined_;
    char* const own_prepared_;
    float* const own_gate_up_;
    float* gate_up_ = nullptr;  // of the block's rows
    int64_t tokens_ = 0, layer_ = 0;
    bool is_alone_ = false;     // the block is this thread's, else all threads divide its columns
    Share block_{0, 0};         // the rows in work
    const LoraStep* lora_ = nullptr;
};

// Run `work(runner)` on every thread of one region.
template <typename Work>
void run(const Model& model, int64_t tokens, void* memory, int32_t threads, const Work& work) {
    const Workspace workspace(model, tokens, std::max(1, threads), memory);
    run_team(threads, [&](Team& team, int thread, int count) {
        work(Runner(model, workspace, team, thread, count));
    });
}

}  // namespace
}  // namespace octavo

// Return the bytes of workspace for a step, or for logits, of `rows` rows.
EXPORT int64_t octavo_decoder_workspace(const octavo::Model* model, int64_t rows, int64_t threads) {
    return octavo::Workspace(*model, rows, threads, nullptr).bytes;
}

EXPORT void octavo_decoder_step(const octavo::Model* model, octavo::Step* step, int32_t threads) {
    octavo::run(*model, step->num_tokens, step->workspace, threads,
                [step](octavo::Runner runner) { runner.step(*step); });
}

// out [rows, stride] = head of hidden [rows, E].
EXPORT void octavo_decoder_logits(const octavo::Model* model, const float* hidden, int64_t rows, float* out,
                                  int64_t stride, void* workspace, int32_t threads) {
    octavo::run(*model, rows, workspace, threads,
                [=](octavo::Runner runner) { runner.logits(hidden, rows, out, stride); });
}

// best [rows], ids [rows] = the largest value of each row of octavo_decoder_logits, and the first id that has it; if a
// value is NaN, NaN and the first such id.
EXPORT void octavo_decoder_best(const octavo::Model* model, const float* hidden, int64_t rows, float* best, int64_t* ids,
                                void* workspace, int32_t threads) {
    octavo::run(*model, rows, workspace, threads, [=](octavo::Runner runner) { runner.best(hidden, rows, best, ids); });
}
