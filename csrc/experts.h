// A mixture of experts over the tokens of one step: router, choice of experts, grouped multiplications, weighted sum.
//
// Owns: the structures shared with models/native_mixture.py (all fields have 8 bytes), the phases and their workspace.
// Does not: norm its inputs, add to the residual stream, or start threads (only the C ABI for tests does).
// Invariants: a token's result depends on its row alone, bit for bit: each token has the sum over its experts in
// ascending order, the shared expert last, whatever the other tokens chose and however many threads there are. Of the
// experts' weights, only those of chosen experts are read.
// Shapes: T tokens, E hidden size, X experts, I intermediate size of an expert, C chosen experts of a token.

#pragma once

#include "linear.h"
#include "team.h"

namespace octavo {

constexpr int64_t kMaxExperts = 1024;

enum Scoring : int64_t {
    kSoftmax = 0,          // of all logits, before the choice
    kSoftmaxOfChosen = 1,  // the choice is by logits
    kSigmoid = 2,
};

// How each token chooses and weighs experts. Of equal scores, the lower index is chosen.
struct Router {
    Weight weight;                       // float32 [X, E]; one more row if has_shared_gate
    int64_t num_experts, top_k, scoring;
    int64_t is_normalised;               // weights are divided by their sum, or by least_sum if that is more
    int64_t num_groups, top_groups;      // the choice is among the groups whose two best scores have the highest sums
    int64_t has_shared_gate;             // the sigmoid of logit X weighs the shared expert
    double least_sum, scale;             // at last, weights are multiplied by `scale`
    const float* choice_bias;            // [X] or null: added to scores for the choice only
};

// Equal experts: expert x has outputs [x * I, (x + 1) * I) of gate and up, and [x * E, (x + 1) * E) of down. I and E are
// multiples of 16, so an expert is a run of whole panels. If the intermediate size is 0, there are none.
struct Experts {
    Weight gate, up, down;
    int64_t intermediate_size;
};

struct Mixture {
    Router router;
    Experts routed, shared;              // shared: one expert, of every token
    int64_t activation;                  // enum Activation of rows.h
};

// Choose the experts of one token: chosen [C], in descending order of scores, and their weights [C].
void choose_experts(const Router& router, const float* logits, int32_t* chosen, float* weights);

// Bytes of workspace of a mixture, for any number of threads up to `threads`.
int64_t mixture_workspace(const Mixture& mixture, int64_t tokens, int64_t threads);

// One thread's part of a mixture over the tokens of a step. Every thread of the region makes the same calls.
class MixtureRun {
  public:
    MixtureRun(const Mixture& mixture, int64_t tokens, void* workspace, Team& team, int thread, int threads);

    // Write columns of out [T, E], which are returned, for all tokens; row(t) returns token t's inputs. Wait on the
    // barrier before other columns are read, or the workspace used again.
    template <typename Row>
    Share run(const Row& row, float* out) {
        for (int64_t t = own_.first; t < own_.end; ++t) prepare_inputs(t, row(t));
        return run_prepared(out);
    }

    // Bytes of weights that all threads together have read.
    int64_t bytes_read() const;

    int64_t workspace_bytes() const { return bytes_; }

  private:
    struct Entry {
        int64_t token;
        float weight;
    };
    // The tokens of one expert: entries [first, first + count).
    struct Job {
        const Experts* experts;
        int64_t expert, first, count;
        float* activated;  // [count, I]
        char* prepared;    // of `activated`, for down
    };
    static constexpr int kMaxKinds = 4;

    const Experts& experts_at(int64_t index) const { return index == 0 ? m_.routed : m_.shared; }
    const char* inputs_of(int64_t kind) const;
    void prepare_inputs(int64_t token, const float* x);
    Share run_prepared(float* out);
    void choose();
    void group();
    void gate_up();
    void gate_up_columns(const Job& job, int64_t first_column, int64_t end_column);
    const char* gather(const Job& job, int64_t kind, int64_t first, int64_t count, char* to) const;
    void prepare_activated();
    void down(const Share& columns, float* out);

    const Mixture& m_;
    Team& team_;
    const int64_t tokens_, hidden_;
    const int thread_, threads_;
    const bool is_private_;  // few tokens: each thread prepares and routes all of them, which saves barriers
    const Share own_;        // the tokens that this thread prepares and routes
    int64_t kinds_[kMaxKinds], num_kinds_ = 0, num_entries_ = 0, num_jobs_ = 0, bytes_ = 0;
    char *inputs_[kMaxKinds], *router_inputs_, *gathered_, *prepared_;
    float *logits_, *weights_, *activated_, *tile_;
    int32_t* chosen_;
    Job* jobs_;
    Entry* entries_;
};

}  // namespace octavo
