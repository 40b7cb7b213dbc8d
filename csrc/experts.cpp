// See experts.h. The phases: inputs; logits; choice and groups; gate, up and activation; preparation; down and sum.

#include "experts.h"

#include <algorithm>
#include <cmath>

#include "kernel.h"
#include "linear_layout.h"
#include "rows.h"

namespace octavo {
namespace {

constexpr int64_t kPrivateEntries = 8;       // up to this many, each thread prepares every activated row
constexpr int64_t kFewRows = 4;              // up to this many rows, an expert's columns are computed in one piece
constexpr int64_t kPieceColumns = 128;       // columns of more rows that are computed in one piece
constexpr int64_t kBlockBytes = 192 * 1024;  // of gathered rows: less than half of a second-level cache
constexpr int64_t kMinBlock = 32, kMaxBlock = 96;  // rows
constexpr int64_t kReadCost = 4;  // rows whose multiplication takes as long as reading the panel

int64_t bytes_of(const Weight& weight, int64_t outputs) {
    return num_panels(outputs) * panel_bytes(weight.kind, weight.inputs, weight.group);
}

// Outputs [first, first + count) of a weight; both are multiples of a panel.
Weight outputs_of(const Weight& weight, int64_t first, int64_t count) {
    Weight part = weight;
    part.outputs = count;
    part.packed = static_cast<const char*>(weight.packed) + bytes_of(weight, first);
    part.bias = weight.bias == nullptr ? nullptr : weight.bias + first;
    return part;
}

int64_t block_rows(int64_t row_bytes) { return std::clamp(kBlockBytes / row_bytes, kMinBlock, kMaxBlock); }

int64_t row_bytes(const Weight& weight) { return prepared_bytes(weight.kind, weight.inputs); }

// The index of the best score that is not taken; of equal ones, and among NaNs, the first.
int64_t best_of(const float* scores, int64_t count, const bool* taken) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i)
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    return best;
}

// Take the experts of groups that are not chosen.
void take_other_groups(const Router& router, const float* scores, bool* taken) {
    const int64_t size = router.num_experts / router.num_groups;
    float sums[kMaxExperts];
    bool is_chosen[kMaxExperts] = {};
    for (int64_t g = 0; g < router.num_groups; ++g) {
        bool seen[kMaxExperts] = {};
        const float* of_group = scores + g * size;
        const int64_t first = best_of(of_group, size, seen);
        seen[first] = true;
        const int64_t second = best_of(of_group, size, seen);
        sums[g] = second < 0 ? of_group[first] : of_group[first] + of_group[second];
    }
    for (int64_t i = 0; i < router.top_groups; ++i) is_chosen[best_of(sums, router.num_groups, is_chosen)] = true;
    for (int64_t x = 0; x < router.num_experts; ++x) taken[x] = !is_chosen[x / size];
}

void softmax(const float* x, int64_t count, float* out) {
    float largest = x[0];
    for (int64_t i = 1; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
    float sum = 0.0f;
    for (int64_t i = 0; i < count; ++i) sum += out[i] = std::exp(x[i] - largest);
    for (int64_t i = 0; i < count; ++i) out[i] /= sum;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

void choose_experts(const Router& router, const float* logits, int32_t* chosen, float* weights) {
    const int64_t count = router.num_experts, top = router.top_k;
    float scores[kMaxExperts], choices[kMaxExperts];
    bool taken[kMaxExperts] = {};
    if (router.scoring == kSoftmax)
        softmax(logits, count, scores);
    else
        for (int64_t x = 0; x < count; ++x) scores[x] = router.scoring == kSigmoid ? sigmoid(logits[x]) : logits[x];
    for (int64_t x = 0; x < count; ++x)
        choices[x] = router.choice_bias == nullptr ? scores[x] : scores[x] + router.choice_bias[x];
    if (router.num_groups > router.top_groups) take_other_groups(router, choices, taken);
    for (int64_t i = 0; i < top; ++i) {
        const int64_t best = best_of(choices, count, taken);
        taken[best] = true;
        chosen[i] = static_cast<int32_t>(best);
        weights[i] = scores[best];
    }
    if (router.scoring == kSoftmaxOfChosen) softmax(weights, top, weights);
    float divisor = 1.0f;
    if (router.is_normalised) {
        divisor = 0.0f;
        for (int64_t i = 0; i < top; ++i) divisor += weights[i];
        const float least = static_cast<float>(router.least_sum);
        divisor = divisor < least ? least : divisor;
    }
    for (int64_t i = 0; i < top; ++i) weights[i] = weights[i] / divisor * static_cast<float>(router.scale);
}

MixtureRun::MixtureRun(const Mixture& mixture, int64_t tokens, void* workspace, Team& team, int thread,
                       int threads)
    : m_(mixture), team_(team), tokens_(tokens), hidden_(mixture.router.weight.inputs), thread_(thread),
      threads_(threads), is_private_(tokens <= kPrivateRows),
      own_(is_private_ ? Share(tokens, 0, 1) : Share(tokens, thread, threads)) {
    Buffers buffers(workspace);
    const int64_t top = m_.router.top_k, copies = is_private_ ? threads : 1;
    const int copy = is_private_ ? thread : 0;
    const bool has_shared = m_.shared.intermediate_size > 0;
    const int64_t of_routed = tokens * top, of_shared = has_shared ? tokens : 0;
    int64_t widest = row_bytes(m_.router.weight);
    router_inputs_ = buffers.take_own<char>(tokens * widest, copy, copies);
    for (int64_t i = 0; i < 2; ++i) {
        const Experts& experts = experts_at(i);
        if (experts.intermediate_size == 0) continue;
        for (const Weight* weight : {&experts.gate, &experts.up}) {
            if (std::find(kinds_, kinds_ + num_kinds_, weight->kind) != kinds_ + num_kinds_) continue;
            widest = std::max(widest, row_bytes(*weight));
            kinds_[num_kinds_] = weight->kind;
            inputs_[num_kinds_++] = buffers.take_own<char>(tokens * row_bytes(*weight), copy, copies);
        }
    }
    const int64_t largest = std::max(m_.routed.intermediate_size, m_.shared.intermediate_size);
    const int64_t down_bytes = of_routed * row_bytes(m_.routed.down) + (has_shared ? of_shared * row_bytes(m_.shared.down) : 0);
    logits_ = buffers.take<float>(tokens * m_.router.weight.outputs);
    chosen_ = buffers.take_own<int32_t>(of_routed, copy, copies);
    weights_ = buffers.take_own<float>(of_routed, copy, copies);
    activated_ = buffers.take<float>(of_routed * m_.routed.intermediate_size + of_shared * m_.shared.intermediate_size);
    num_entries_ = of_routed + of_shared;
    const bool prepares_all = num_entries_ <= kPrivateEntries;
    prepared_ = buffers.take_own<char>(down_bytes, prepares_all ? thread : 0, prepares_all ? threads : 1);
    jobs_ = buffers.take_own<Job>(m_.router.num_experts + 1, thread, threads);
    entries_ = buffers.take_own<Entry>(num_entries_, thread, threads);
    gathered_ = buffers.take_own<char>(kMaxBlock * widest, thread, threads);
    tile_ = buffers.take_own<float>(std::max({kMaxBlock * kPieceColumns * 2, kFewRows * 2 * largest, kFewRows * hidden_}),
                                   thread, threads);
    bytes_ = buffers.bytes();
}

int64_t mixture_workspace(const Mixture& mixture, int64_t tokens, int64_t threads) {
    Team team(1);
    return MixtureRun(mixture, tokens, nullptr, team, 0, static_cast<int>(threads)).workspace_bytes();
}

int64_t MixtureRun::bytes_read() const {
    int64_t sum = bytes_of(m_.router.weight, m_.router.weight.outputs);
    for (const Job* job = jobs_; job < jobs_ + num_jobs_; ++job) {
        const Experts& experts = *job->experts;
        sum += bytes_of(experts.gate, experts.intermediate_size) + bytes_of(experts.up, experts.intermediate_size) +
               bytes_of(experts.down, hidden_);
    }
    return sum;
}

const char* MixtureRun::inputs_of(int64_t kind) const {
    return inputs_[std::find(kinds_, kinds_ + num_kinds_, kind) - kinds_];
}

void MixtureRun::prepare_inputs(int64_t token, const float* x) {
    const int64_t router_bytes = row_bytes(m_.router.weight);
    prepare_row(m_.router.weight.kind, x, hidden_, router_inputs_ + token * router_bytes);
    for (int64_t i = 0; i < num_kinds_; ++i)
        prepare_row(kinds_[i], x, hidden_, inputs_[i] + token * prepared_bytes(kinds_[i], hidden_));
}

Share MixtureRun::run_prepared(float* out) {
    if (!is_private_) team_.wait();
    linear(m_.router.weight, router_inputs_, tokens_, logits_, m_.router.weight.outputs, false, thread_, threads_);
    team_.wait();
    choose();
    if (!is_private_) team_.wait();
    group();
    gate_up();
    team_.wait();
    prepare_activated();
    const Share panels(num_panels(hidden_), thread_, threads_);
    Share columns = panels;
    columns.first = panels.first * kPanel, columns.end = panels.end * kPanel;
    down(columns, out);
    return columns;
}

void MixtureRun::choose() {
    const int64_t top = m_.router.top_k;
    for (int64_t t = own_.first; t < own_.end; ++t)
        choose_experts(m_.router, logits_ + t * m_.router.weight.outputs, chosen_ + t * top, weights_ + t * top);
}

// Make the jobs: chosen experts in ascending order, each with its tokens in ascending order; the shared expert last.
void MixtureRun::group() {
    const int64_t top = m_.router.top_k, count = m_.router.num_experts, size = m_.routed.intermediate_size;
    const int64_t down_bytes = row_bytes(m_.routed.down);
    int64_t ends[kMaxExperts + 1] = {};  // first the counts, then where each expert's next entry belongs
    for (int64_t i = 0; i < tokens_ * top; ++i) ++ends[chosen_[i] + 1];
    num_jobs_ = 0;
    for (int64_t x = 0; x < count; ++x) {
        const int64_t first = ends[x], tokens = ends[x + 1];
        if (tokens > 0)
            jobs_[num_jobs_++] = {&m_.routed, x, first, tokens, activated_ + first * size, prepared_ + first * down_bytes};
        ends[x + 1] += first;
    }
    for (int64_t i = 0; i < tokens_ * top; ++i) entries_[ends[chosen_[i]]++] = {i / top, weights_[i]};
    if (m_.shared.intermediate_size == 0) return;
    const int64_t first = tokens_ * top;
    for (int64_t t = 0; t < tokens_; ++t) {
        const float weight = m_.router.has_shared_gate ? sigmoid(logits_[t * (count + 1) + count]) : 1.0f;
        entries_[first + t] = {t, weight};
    }
    jobs_[num_jobs_++] = {&m_.shared, 0, first, tokens_, activated_ + first * size, prepared_ + first * down_bytes};
}

// Divide the panels of all jobs among the threads by their cost.
void MixtureRun::gate_up() {
    const auto cost = [](const Job& job) { return std::max(job.count, kReadCost); };
    const auto panels = [](const Job& job) { return job.experts->intermediate_size / kPanel; };
    int64_t total = 0;
    for (const Job* job = jobs_; job < jobs_ + num_jobs_; ++job) total += panels(*job) * cost(*job);
    const Share own(total, thread_, threads_);
    int64_t start = 0;
    for (const Job* job = jobs_; job < jobs_ + num_jobs_; ++job) {
        const int64_t of_panel = cost(*job), last = panels(*job);
        const auto panel_at = [&](int64_t at) {  // the first panel that begins there or later
            return std::clamp<int64_t>((at - start + of_panel - 1) / of_panel, 0, last);
        };
        const int64_t first = panel_at(std::max(own.first, start)), end = panel_at(std::max(own.end, start));
        if (first < end) gate_up_columns(*job, first * kPanel, end * kPanel);
        start += last * of_panel;
    }
}

void MixtureRun::gate_up_columns(const Job& job, int64_t first_column, int64_t end_column) {
    const Experts& experts = *job.experts;
    const int64_t size = experts.intermediate_size;
    const int64_t block = block_rows(std::max(row_bytes(experts.gate), row_bytes(experts.up)));
    for (int64_t first = 0; first < job.count; first += block) {
        const int64_t rows = std::min(block, job.count - first);
        const int64_t piece = rows <= kFewRows ? end_column - first_column : kPieceColumns;
        const bool is_one_kind = experts.gate.kind == experts.up.kind;
        const char* inputs = is_one_kind ? gather(job, experts.gate.kind, first, rows, gathered_) : nullptr;
        for (int64_t column = first_column; column < end_column; column += piece) {
            const int64_t columns = std::min(piece, end_column - column), start = job.expert * size + column;
            const Weight gate = outputs_of(experts.gate, start, columns), up = outputs_of(experts.up, start, columns);
            const auto rows_of = [&](int64_t kind) {
                return is_one_kind ? inputs : gather(job, kind, first, rows, gathered_);
            };
            linear(gate, rows_of(gate.kind), rows, tile_, 2 * columns, false, 0, 1);
            linear(up, rows_of(up.kind), rows, tile_ + columns, 2 * columns, false, 0, 1);
            for (int64_t row = 0; row < rows; ++row)
                row_kernels().activate(m_.activation, true, tile_ + row * 2 * columns, columns,
                                   job.activated + (first + row) * size + column);
        }
    }
}

// Return the prepared inputs of some rows of a job side by side: in place if they are so already, else copied.
const char* MixtureRun::gather(const Job& job, int64_t kind, int64_t first, int64_t count, char* to) const {
    const Entry* entries = entries_ + job.first + first;
    const char* inputs = inputs_of(kind);
    const int64_t bytes = prepared_bytes(kind, hidden_);
    if (entries[count - 1].token - entries[0].token == count - 1) return inputs + entries[0].token * bytes;
    for (int64_t row = 0; row < count; ++row)
        std::memcpy(to + row * bytes, inputs + entries[row].token * bytes, static_cast<size_t>(bytes));
    return to;
}

void MixtureRun::prepare_activated() {
    const bool prepares_all = num_entries_ <= kPrivateEntries;
    const Share own = prepares_all ? Share(num_entries_, 0, 1) : Share(num_entries_, thread_, threads_);
    for (const Job* job = jobs_; job < jobs_ + num_jobs_; ++job) {
        const Weight& weight = job->experts->down;
        const int64_t bytes = row_bytes(weight), first = std::max<int64_t>(0, own.first - job->first);
        for (int64_t row = first; row < std::min(job->count, own.end - job->first); ++row)
            prepare_row(weight.kind, job->activated + row * weight.inputs, weight.inputs, job->prepared + row * bytes);
    }
    if (!prepares_all) team_.wait();
}

void MixtureRun::down(const Share& columns, float* out) {
    const RowKernels& kernels = row_kernels();
    for (int64_t t = 0; t < tokens_; ++t) std::fill(out + t * hidden_ + columns.first, out + t * hidden_ + columns.end, 0.0f);
    for (const Job* job = jobs_; job < jobs_ + num_jobs_; ++job) {
        const Weight& whole = job->experts->down;
        const int64_t bytes = row_bytes(whole), block = block_rows(bytes);
        for (int64_t first = 0; first < job->count; first += block) {
            const int64_t rows = std::min(block, job->count - first);
            const int64_t piece = rows <= kFewRows ? columns.end - columns.first : 2 * kPieceColumns;
            for (int64_t column = columns.first; column < columns.end; column += piece) {
                const int64_t width = std::min(piece, columns.end - column);
                const Weight part = outputs_of(whole, job->expert * hidden_ + column, width);
                linear(part, job->prepared + first * bytes, rows, tile_, width, false, 0, 1);
                for (int64_t row = 0; row < rows; ++row) {
                    const Entry& entry = entries_[job->first + first + row];
                    kernels.scale(entry.weight, width, tile_ + row * width);
                    kernels.add(tile_ + row * width, width, out + entry.token * hidden_ + column);
                }
            }
        }
    }
}

}  // namespace octavo

// The C ABI, for tests: one mixture over x [tokens, E], both out and x contiguous. `bytes_read` is increased by the
// bytes of the weights that were read.
EXPORT int64_t octavo_mixture_workspace(const octavo::Mixture* mixture, int64_t tokens, int64_t threads) {
    return octavo::mixture_workspace(*mixture, tokens, threads);
}

EXPORT void octavo_mixture(const octavo::Mixture* mixture, const float* x, int64_t tokens, float* out, void* workspace,
                           int64_t* bytes_read, int32_t threads) {
    octavo::run_team(threads, [=](octavo::Team& team, int thread, int count) {
        octavo::MixtureRun run(*mixture, tokens, workspace, team, thread, count);
        run.run([=](int64_t t) { return x + t * mixture->router.weight.inputs; }, out);
        if (thread == 0) *bytes_read += run.bytes_read();
    });
}

// Choose the experts of each row of logits [tokens, logits_stride]: chosen and weights [tokens, C].
EXPORT void octavo_choose_experts(const octavo::Router* router, const float* logits, int64_t logits_stride,
                                  int64_t tokens, int32_t* chosen, float* weights) {
    for (int64_t t = 0; t < tokens; ++t)
        octavo::choose_experts(*router, logits + t * logits_stride, chosen + t * router->top_k,
                               weights + t * router->top_k);
}
