// The layers of a decoder over the tokens of one step, as phases of one parallel region.
//
// Owns: the order of the phases, the barriers between them, the layout of the workspace.
// Does not: allocate, choose sizes, or know requests. linear.cpp, attention.cpp and rows.cpp own the phases.
// Invariants: a token's result depends on its row of the batch alone, bit for bit. This holds for every phase; the
// number of threads changes only which thread computes what. With few tokens each thread prepares all rows that it
// multiplies by itself, including joined parts of attention; this saves a barrier and costs next to nothing.

#include "decoder_step.h"

#include <algorithm>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "kernel.h"
#include "rows.h"
#include "team.h"

namespace octavo {
namespace {

constexpr int64_t kPrivateRows = 4;  // up to this many tokens, each thread prepares every row for itself; FEW in Python
constexpr int64_t kAlign = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Bytes of the largest prepared row of any weight of the model.
int64_t largest_prepared(const Model& model) {
    int64_t most = 0;
    const auto look = [&most](const Multiplication& m) {
        for (int64_t i = 0; i < m.num_parts; ++i)
            most = std::max(most, prepared_bytes(m.parts[i].kind, m.parts[i].inputs));
    };
    for (int64_t l = 0; l < model.num_layers; ++l) {
        const Layer& layer = model.layers[l];
        look(layer.qkv), look(layer.output), look(layer.gate_up), look(layer.down);
    }
    look(model.head);
    return most;
}

int64_t row_width(const Model& m) { return std::max({m.hidden_size, m.num_heads * m.head_dim, m.intermediate_size}); }

// The addresses of a step's buffers in the workspace; `bytes` is the size of the whole.
struct Workspace {
    float *stream, *qkv, *attended, *gate_up, *added, *scratch, *own_joined;
    char *prepared, *own_prepared;
    int64_t prepared_bytes, scratch_size, joined_size, bytes;

    Workspace(const Model& m, int64_t tokens, int64_t threads, void* memory) {
        char* at = static_cast<char*>(memory);
        const auto take = [&at](int64_t size) {
            char* here = at;
            at += aligned(size);
            return here;
        };
        const auto floats = [&take](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
        prepared_bytes = largest_prepared(m);
        scratch_size = aligned(row_width(m) * 4) / 4;
        stream = floats(tokens * m.hidden_size);
        qkv = floats(tokens * (m.num_heads + 2 * m.num_kv_heads) * m.head_dim);
        attended = floats(tokens * m.num_heads * m.head_dim);
        gate_up = floats(tokens * 2 * m.intermediate_size);
        added = floats(tokens * m.hidden_size);
        scratch = floats(threads * scratch_size);
        joined_size = aligned(kPrivateRows * m.num_heads * m.head_dim * 4) / 4;
        own_joined = floats(threads * joined_size);
        prepared = take(tokens * prepared_bytes);
        own_prepared = take(threads * kPrivateRows * prepared_bytes);
        bytes = at - static_cast<char*>(memory);
    }
};

// One thread's part of a step.
class Runner {
  public:
    Runner(const Model& model, const Workspace& work, Barrier& barrier, int thread, int threads)
        : m_(model), w_(work), barrier_(barrier), rows_(row_kernels()), thread_(thread), threads_(threads),
          scratch_(work.scratch + thread * work.scratch_size), own_joined_(work.own_joined + thread * work.joined_size),
          own_prepared_(work.own_prepared + thread * kPrivateRows * work.prepared_bytes) {}

    void step(const Step& s) {
        tokens_ = s.num_tokens;
        embed(s);
        barrier_.wait();
        for (int64_t l = 0; l < m_.num_layers; ++l) {
            attention_half(m_.layers[l], s);
            mlp_half(m_.layers[l]);
        }
        const Share own(tokens_, thread_, threads_);
        for (int64_t t = own.first; t < own.end; ++t)
            norm(w_.stream + t * m_.hidden_size, m_.final_norm, s.hidden + t * m_.hidden_size);
    }

    void logits(const float* hidden, int64_t rows, float* out, int64_t stride) {
        tokens_ = rows;
        const auto row = [&](int64_t t) { return hidden + t * m_.hidden_size; };
        multiply(m_.head, row, out, stride, false);
    }

  private:
    void norm(const float* x, const float* weight, float* out) {
        rows_.rms_norm(x, weight, m_.hidden_size, static_cast<float>(m_.norm_eps), out);
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
    }

    // out (+)= row(t) times the weight, for every token. `row` returns token t's inputs; it may use scratch_.
    template <typename Row>
    void multiply(const Multiplication& m, const Row& row, float* out, int64_t stride, bool accumulate) {
        const bool is_private = tokens_ <= kPrivateRows;
        char* prepared = is_private ? own_prepared_ : w_.prepared;
        const Share own = is_private ? Share(tokens_, 0, 1) : Share(tokens_, thread_, threads_);
        for (int64_t p = 0; p < m.num_parts; ++p) {
            const Weight& weight = m.parts[p];
            const int64_t bytes = prepared_bytes(weight.kind, weight.inputs);
            if (p == 0 || weight.kind != m.parts[p - 1].kind) {
                if (p > 0 && !is_private) barrier_.wait();  // other threads still read the previous form
                for (int64_t t = own.first; t < own.end; ++t)
                    prepare_row(weight.kind, row(t), weight.inputs, prepared + t * bytes);
                if (!is_private) barrier_.wait();
            }
            linear(weight, prepared, tokens_, out, stride, accumulate, thread_, threads_);
            out += weight.outputs;
        }
    }

    // stream += row(t) times the weight, normed first if the family has a norm there. Ends with a barrier.
    template <typename Row>
    void add_to_stream(const Multiplication& m, const Row& row, const float* norm_after) {
        multiply(m, row, norm_after == nullptr ? w_.stream : w_.added, m_.hidden_size, norm_after == nullptr);
        barrier_.wait();
        if (norm_after == nullptr) return;
        const Share own(tokens_, thread_, threads_);
        for (int64_t t = own.first; t < own.end; ++t) {
            norm(w_.added + t * m_.hidden_size, norm_after, scratch_);
            rows_.add(scratch_, m_.hidden_size, w_.stream + t * m_.hidden_size);
        }
        barrier_.wait();
    }

    void attention_half(const Layer& layer, const Step& s) {
        const StepGroup& group = s.groups[layer.group];
        const int64_t width = (m_.num_heads + 2 * m_.num_kv_heads) * m_.head_dim, size = m_.num_heads * m_.head_dim;
        const auto normed = [&](int64_t t) {
            norm(w_.stream + t * m_.hidden_size, layer.attention_norm, scratch_);
            return scratch_;
        };
        multiply(layer.qkv, normed, w_.qkv, width, false);
        barrier_.wait();
        const Share own(tokens_, thread_, threads_);
        for (int64_t t = own.first; t < own.end; ++t) turn(layer, s.positions[t], w_.qkv + t * width);
        const float* keys = w_.qkv + size;
        write_kv(layer.attention, group.slot_mapping, own.first, own.end, keys, keys + m_.num_kv_heads * m_.head_dim,
                 width);
        barrier_.wait();
        attend(layer.attention, *group.attention, w_.qkv, width, w_.attended, size, thread_, threads_);
        barrier_.wait();
        const AttentionStep& step = *group.attention;
        const bool is_private = tokens_ <= kPrivateRows;
        if (step.num_joins > 0 && is_private) {  // each thread joins all tokens for itself
            attend_join(layer.attention, step, w_.qkv, width, own_joined_, size, 0, 1);
        } else if (step.num_joins > 0) {
            attend_join(layer.attention, step, w_.qkv, width, w_.attended, size, thread_, threads_);
            barrier_.wait();
        }
        const auto attended = [&](int64_t t) {
            return (is_private && step.first_slots[t] != kDirect ? own_joined_ : w_.attended) + t * size;
        };
        add_to_stream(layer.output, attended, layer.after_attention);
    }

    // Norm and rotate the heads of one token.
    void turn(const Layer& layer, int64_t position, float* heads) {
        const float* rope_row = layer.rope_table + position * 2 * m_.head_dim;
        for (int64_t h = 0; h < m_.num_heads + m_.num_kv_heads; ++h) {
            float* head = heads + h * m_.head_dim;
            const float* weight = h < m_.num_heads ? layer.query_norm : layer.key_norm;
            if (weight != nullptr) rows_.rms_norm(head, weight, m_.head_dim, static_cast<float>(m_.norm_eps), head);
            rows_.rotate(head, rope_row, m_.head_dim);
        }
    }

    void mlp_half(const Layer& layer) {
        const int64_t size = m_.intermediate_size;
        const auto normed = [&](int64_t t) {
            norm(w_.stream + t * m_.hidden_size, layer.mlp_norm, scratch_);
            return scratch_;
        };
        multiply(layer.gate_up, normed, w_.gate_up, 2 * size, false);
        barrier_.wait();
        const auto gated = [&](int64_t t) {
            rows_.gate(m_.activation, w_.gate_up + t * 2 * size, size, scratch_);
            return scratch_;
        };
        add_to_stream(layer.down, gated, layer.after_mlp);
    }

    const Model& m_;
    const Workspace& w_;
    Barrier& barrier_;
    const RowKernels& rows_;
    const int thread_, threads_;
    float *const scratch_, *const own_joined_;
    char* const own_prepared_;
    int64_t tokens_ = 0;
};

// Run `work(runner)` on every thread of one region.
template <typename Work>
void run(const Model& model, int64_t tokens, void* memory, int32_t threads, const Work& work) {
    const Workspace workspace(model, tokens, std::max(1, threads), memory);
#if defined(_OPENMP)
    if (threads > 1) {
        Barrier* barrier = nullptr;
#pragma omp parallel num_threads(threads)
        {
            const int count = omp_get_num_threads();  // may be fewer than requested
#pragma omp single
            barrier = new Barrier(count);
            work(Runner(model, workspace, *barrier, omp_get_thread_num(), count));
        }
        delete barrier;
        return;
    }
#endif
    Barrier barrier(1);
    work(Runner(model, workspace, barrier, 0, 1));
}

}  // namespace
}  // namespace octavo

// Return the bytes of workspace for a step, or for logits, of `rows` rows.
EXPORT int64_t octavo_decoder_workspace(const octavo::Model* model, int64_t rows, int64_t threads) {
    return octavo::Workspace(*model, rows, threads, nullptr).bytes;
}

EXPORT void octavo_decoder_step(const octavo::Model* model, const octavo::Step* step, int32_t threads) {
    octavo::run(*model, step->num_tokens, step->workspace, threads,
                [step](octavo::Runner runner) { runner.step(*step); });
}

// out [rows, stride] = head of hidden [rows, E].
EXPORT void octavo_decoder_logits(const octavo::Model* model, const float* hidden, int64_t rows, float* out,
                                  int64_t stride, void* workspace, int32_t threads) {
    octavo::run(*model, rows, workspace, threads,
                [=](octavo::Runner runner) { runner.logits(hidden, rows, out, stride); });
}
