// Rows times weights, as phases of a parallel region. With few rows each thread prepares all of them by itself; this
// saves a barrier and costs next to nothing.

#pragma once

#include <algorithm>

#include "linear.h"
#include "team.h"

namespace octavo {

// One multiplication: weights over consecutive runs of outputs, with the same inputs.
struct Multiplication {
    const Weight* parts;
    int64_t num_parts;
};

// Bytes of the largest prepared row of any part.
inline int64_t largest_prepared(const Multiplication& m) {
    int64_t most = 0;
    for (int64_t i = 0; i < m.num_parts; ++i)
        most = std::max(most, prepared_bytes(m.parts[i].kind, m.parts[i].inputs));
    return most;
}

constexpr int64_t kMaxBlockRows = 64;

// How many blocks of at most kMaxBlockRows the rows of a step are divided into, if each thread computes whole rows; 0 if
// the threads divide columns. Blocks must be so large that multiplying them takes longer than reading all weights, which
// every thread does then.
inline int64_t row_blocks(const Weight& weight, int64_t tokens, int64_t threads) {
    if (threads > 1 && tokens < threads * (weight.kind >= kInt8 ? 8 : 32)) return 0;
    const int64_t turn = threads * kMaxBlockRows;
    return (tokens + turn - 1) / turn * threads;
}

// One thread of a region, and where it prepares rows: a buffer for all rows if it shares them with the other threads.
struct Multiplier {
    Team& team;
    int thread, threads;
    char* prepared;
    bool is_private;

    // Prepare every row, and call work(weight, first output) for each part of the weights. `row` returns the inputs of
    // row t. Wait on the barrier before anything is prepared again.
    template <typename Row, typename Work>
    void for_parts(const Multiplication& m, int64_t rows, const Row& row, const Work& work) const {
        const Share own = is_private ? Share(rows, 0, 1) : Share(rows, thread, threads);
        int64_t first = 0;
        for (int64_t p = 0; p < m.num_parts; ++p) {
            const Weight& weight = m.parts[p];
            const int64_t bytes = prepared_bytes(weight.kind, weight.inputs);
            if (p == 0 || weight.kind != m.parts[p - 1].kind) {
                if (p > 0 && !is_private) team.wait();  // other threads still read the previous form
                for (int64_t t = own.first; t < own.end; ++t)
                    prepare_row(weight.kind, row(t), weight.inputs, prepared + t * bytes);
                if (!is_private) team.wait();
            }
            work(weight, first);
            first += weight.outputs;
        }
    }

    // out (+)= row(t) times the weights, for every row. Wait on the barrier before `out` is read.
    template <typename Row>
    void multiply(const Multiplication& m, int64_t rows, const Row& row, float* out, int64_t stride,
                  bool accumulate) const {
        for_parts(m, rows, row, [&](const Weight& weight, int64_t first) {
            linear(weight, prepared, rows, out + first, stride, accumulate, thread, threads);
        });
    }
};

}  // namespace octavo
