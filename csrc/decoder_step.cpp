// The layers of a decoder over the tokens of one step, as phases of one parallel region.
//
// Owns: the order of the phases, the barriers between them, the layout of the workspace.
// Does not: allocate, choose sizes, or know requests. linear.cpp, attention.cpp and rows.cpp own the phases.
// Invariants: a token's result depends on its row of the batch alone, bit for bit. This holds for every phase; the
// number of threads changes only which thread computes what. With few tokens each thread prepares all rows that it
// multiplies by itself, including joined parts of attention; this saves a barrier and costs next to nothing.

#include "decoder_step.h"

#include <algorithm>

#include "kernel.h"
#include "rows.h"
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

// The addresses of a step's buffers in the workspace; `bytes` is the size of the whole.
struct Workspace {
    float *stream, *qkv, *attended, *gate_up, *added, *scratch, *own_joined;
    char *prepared, *own_prepared;
    void* mixture;
    int64_t prepared_bytes, scratch_size, joined_size, bytes;

    Workspace(const Model& m, int64_t tokens, int64_t threads, void* memory) {
        Buffers buffers(memory);
        prepared_bytes = largest_prepared(m);
        scratch_size = Buffers::aligned(row_width(m) * 4) / 4;
        joined_size = Buffers::aligned(kPrivateRows * m.num_heads * m.head_dim * 4) / 4;
        stream = buffers.take<float>(tokens * m.hidden_size);
        qkv = buffers.take<float>(tokens * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim);
        attended = buffers.take<float>(tokens * m.num_heads * m.head_dim);
        gate_up = buffers.take<float>(tokens * mlp_width(m));
        added = buffers.take<float>(tokens * m.hidden_size);
        scratch = buffers.take<float>(threads * scratch_size);
        own_joined = buffers.take<float>(threads * joined_size);
        prepared = buffers.take<char>(tokens * prepared_bytes);
        own_prepared = buffers.take<char>(threads * kPrivateRows * prepared_bytes);
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
    Runner(const Model& model, const Workspace& work, Barrier& barrier, int thread, int threads)
        : m_(model), w_(work), barrier_(barrier), rows_(row_kernels()), thread_(thread), threads_(threads),
          scratch_(work.scratch + thread * work.scratch_size), own_joined_(work.own_joined + thread * work.joined_size),
          own_prepared_(work.own_prepared + thread * kPrivateRows * work.prepared_bytes) {}

    void step(Step& s) {
        tokens_ = s.num_tokens;
        lora_ = s.lora;
        embed(s);
        barrier_.wait();
        for (int64_t l = 0; l < m_.num_layers; ++l) {
            const Layer& layer = m_.layers[l];
            layer_ = l;
            const bool has_norm = layer.mlp_norm.weight != nullptr;
            if (m_.is_parallel != 0) mlp_up(layer, has_norm ? layer.mlp_norm : layer.attention_norm);
            attention_half(layer, s);
            if (layer.mixture != nullptr) {
                mix_experts(layer, s);
                continue;
            }
            if (m_.is_parallel == 0) mlp_up(layer, layer.mlp_norm);
            mlp_down(layer);
        }
        const Share own(tokens_, thread_, threads_);
        for (int64_t t = own.first; t < own.end; ++t)
            norm(w_.stream + t * m_.hidden_size, m_.final_norm, m_.stream_eps, s.hidden + t * m_.hidden_size);
    }

    void logits(const float* hidden, int64_t rows, float* out, int64_t stride) {
        tokens_ = rows;
        const auto row = [&](int64_t t) { return hidden + t * m_.hidden_size; };
        multiply(m_.head, kHead, row, out, stride, false);
        if (m_.logits_scale == 1.0 && m_.logits_cap == 0.0) return;
        barrier_.wait();
        const int64_t vocabulary = outputs(m_.head);
        const Share own(vocabulary, thread_, threads_);
        for (int64_t t = 0; t < rows; ++t) {
            float* first = out + t * stride + own.first;
            const int64_t count = own.end - own.first;
            if (m_.logits_scale != 1.0) rows_.scale(static_cast<float>(m_.logits_scale), count, first);
            if (m_.logits_cap != 0.0) rows_.soft_cap(static_cast<float>(m_.logits_cap), count, first);
        }
    }

  private:
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
        const Share own(tokens_, thread_, threads_);
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

    // out (+)= row(t) times the weight, for every token. `row` returns token t's inputs; it may use scratch_.
    template <typename Row>
    void multiply(const Multiplication& m, int64_t adapted, const Row& row, float* out, int64_t stride,
                  bool accumulate) {
        const LoraStep* lora = adapted == kHead ? nullptr : lora_;
        const bool is_private = tokens_ <= kPrivateRows && lora == nullptr;
        const Multiplier multiplier{barrier_, thread_, threads_, is_private ? own_prepared_ : w_.prepared, is_private};
        if (lora == nullptr) return multiplier.multiply(m, tokens_, row, out, stride, accumulate);
        const auto kept = [&](int64_t t) {
            const float* x = row(t);
            if (lora->adapters[t] >= 0) std::copy(x, x + m.parts->inputs, lora->inputs + t * lora->max_inputs);
            return x;
        };
        multiplier.multiply(m, tokens_, kept, out, stride, accumulate);
        lora_down(*lora, layer_ * kNumAdapted + adapted, thread_, threads_);
        barrier_.wait();
        lora_up(*lora, layer_ * kNumAdapted + adapted, out, stride, thread_, threads_);
    }

    // stream += row(t) times the weight, normed first if the family has a norm there. Ends with a barrier.
    template <typename Row>
    void add_to_stream(const Multiplication& m, int64_t adapted, const Row& row, const Norm& after) {
        const bool has_norm = after.weight != nullptr;
        multiply(m, adapted, row, has_norm ? w_.added : w_.stream, m_.hidden_size, !has_norm);
        barrier_.wait();
        if (has_norm) add_normed(after);
    }

    // stream += the norm of what was added. Ends with a barrier.
    void add_normed(const Norm& after) {
        const Share own(tokens_, thread_, threads_);
        for (int64_t t = own.first; t < own.end; ++t) {
            norm(w_.added + t * m_.hidden_size, after, m_.norm_eps, scratch_);
            rows_.add(scratch_, m_.hidden_size, w_.stream + t * m_.hidden_size);
        }
        barrier_.wait();
    }

    void attention_half(const Layer& layer, const Step& s) {
        const StepGroup& group = s.groups[layer.group];
        const int64_t width = (m_.num_heads + 2 * m_.num_kv_heads) * m_.head_dim, size = m_.num_heads * m_.head_dim;
        const auto normed = [&](int64_t t) { return stream_row(t, layer.attention_norm); };
        multiply(layer.qkv, kQkv, normed, w_.qkv, width, false);
        barrier_.wait();
        const Share own(tokens_, thread_, threads_);
        for (int64_t t = own.first; t < own.end; ++t) turn(layer, s, t, w_.qkv + t * width);
        const float* keys = w_.qkv + size;
        write_kv(layer.attention, group.slot_mapping, own.first, own.end,
                 {keys, keys + m_.num_kv_heads * m_.head_dim, width, width});
        barrier_.wait();
        attend(layer.attention, *group.attention, w_.qkv, width, w_.attended, size, thread_, threads_);
        barrier_.wait();
        const AttentionStep& step = *group.attention;
        const bool is_private = tokens_ <= kPrivateRows;
        if (step.num_joins > 0 && is_private) {  // each thread joins all tokens for itself
            attend_join(layer.attention, step, own_joined_, size, 0, 1);
        } else if (step.num_joins > 0) {
            attend_join(layer.attention, step, w_.attended, size, thread_, threads_);
            barrier_.wait();
        }
        const auto attended = [&](int64_t t) {
            return (is_private && step.first_slots[t] != kDirect ? own_joined_ : w_.attended) + t * size;
        };
        add_to_stream(layer.output, kOutput, attended, layer.after_attention);
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
        MixtureRun mixture(*layer.mixture, tokens_, w_.mixture, barrier_, thread_, threads_);
        const Share columns = mixture.run([&](int64_t t) { return stream_row(t, layer.mlp_norm); }, w_.added);
        if (thread_ == 0) s.expert_bytes += mixture.bytes_read();
        if (layer.after_mlp.weight != nullptr) {
            barrier_.wait();
            return add_normed(layer.after_mlp);
        }
        for (int64_t t = 0; t < tokens_; ++t) {
            const int64_t first = t * m_.hidden_size + columns.first;
            rows_.add(w_.added + first, columns.end - columns.first, w_.stream + first);
        }
        barrier_.wait();
    }

    void mlp_up(const Layer& layer, const Norm& before) {
        const auto normed = [&](int64_t t) { return stream_row(t, before); };
        multiply(layer.gate_up, kGateUp, normed, w_.gate_up, mlp_width(m_), false);
        barrier_.wait();
    }

    void mlp_down(const Layer& layer) {
        const int64_t width = mlp_width(m_);
        const auto activated = [&](int64_t t) {
            rows_.activate(m_.activation, m_.is_gated != 0, w_.gate_up + t * width, m_.intermediate_size, scratch_);
            return scratch_;
        };
        add_to_stream(layer.down, kDown, activated, layer.after_mlp);
    }

    const Model& m_;
    const Workspace& w_;
    Barrier& barrier_;
    const RowKernels& rows_;
    const int thread_, threads_;
    float *const scratch_, *const own_joined_;
    char* const own_prepared_;
    int64_t tokens_ = 0, layer_ = 0;
    const LoraStep* lora_ = nullptr;
};

// Run `work(runner)` on every thread of one region.
template <typename Work>
void run(const Model& model, int64_t tokens, void* memory, int32_t threads, const Work& work) {
    const Workspace workspace(model, tokens, std::max(1, threads), memory);
    run_team(threads, [&](Barrier& barrier, int thread, int count) {
        work(Runner(model, workspace, barrier, thread, count));
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
