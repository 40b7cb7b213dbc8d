// The loops around a linear kernel: rows in blocks that stay in the second-level cache, panels, blocks of inputs whose
// weights stay unpacked in the first-level cache, and tiles of rows.
//
// Owns: the order of work, which is the same for every kernel. Compiled into each instruction set's file: all names are
// local to that file. Invariants: the sum of a (row, output) takes its inputs in ascending order through one
// accumulator, whatever the blocks.
//
// A kernel K has:
//   kTile               rows of a tile, at most 8
//   kDirectRows         up to this many rows, weights are read in their packed form; at most kTile
//   kDirectPanels       panels that `direct` takes at once for a single row
//   kBlockSteps         steps (groups, or inputs) of a block; kScratchBytes: the bytes of a block's unpacked steps
//   steps(weight)       steps of a panel
//   direct<R, P>(weight, panel, gap, rows, stride, sums)           all inputs of P panels, which are gap bytes apart:
//                                                                  sums[P][R][16]
//   unpack(weight, panel, first, count, scratch)                   returns the address of the unpacked steps
//   tile<R>(weight, unpacked, first, count, rows, stride, sums, ahead)    sums[R][16] += ...; prefetches by steps

#pragma once

#include "linear_prepare.h"

namespace {

constexpr int64_t kRowBlockBytes = 192 * 1024;  // of prepared rows: less than half of a second-level cache
constexpr int64_t kMaxBlockRows = 96;

// Weights to prefetch while a tile computes. The tiles of a block share the prefetching of the next block.
struct Ahead {
    const uint8_t* at;
    int64_t step;  // bytes
};

template <int kLines>
INLINE void prefetch_step(Ahead& ahead) {
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(ahead.at + line * 64, 0, 2);
    ahead.at += ahead.step;
}

INLINE const uint8_t* panel_at(const octavo::Weight& weight, int64_t panel) {
    const int64_t bytes = octavo::panel_bytes(weight.kind, weight.inputs, weight.group);
    return static_cast<const uint8_t*>(weight.packed) + panel * bytes;
}

// Compute P panels side by side: `panel`, panel + gap, and so on.
template <class K, int R, int P>
INLINE void direct_panels(const octavo::Weight& weight, const octavo::LinearJob& job, int64_t panel, int64_t gap) {
    alignas(64) float sums[P * R * octavo::kPanel];
    const int64_t gap_bytes = panel_at(weight, panel + gap) - panel_at(weight, panel);
    K::template direct<R, P>(weight, panel_at(weight, panel), gap_bytes, job.prepared, job.prepared_stride, sums);
    for (int p = 0; p < P; ++p)
        for (int row = 0; row < R; ++row)
            finish_row(weight, job, panel + p * gap, row, sums + (p * R + row) * octavo::kPanel);
}

// The panels are cut into P runs that are read side by side, because memory serves several streams faster than one.
template <class K, int R>
void run_direct(const octavo::Weight& weight, const octavo::LinearJob& job, int64_t begin, int64_t end) {
    constexpr int kPanels = R == 1 ? K::kDirectPanels : (K::kDirectPanels > 1 && R == 2) ? 2 : 1;
    const int64_t gap = (end - begin) / kPanels;
    for (int64_t panel = begin; panel < begin + gap; ++panel) direct_panels<K, R, kPanels>(weight, job, panel, gap);
    for (int64_t panel = begin + gap * kPanels; panel < end; ++panel) direct_panels<K, R, 1>(weight, job, panel, 0);
}

// Compute tiles of R rows while R rows remain, then smaller tiles.
template <class K, int R>
INLINE void run_tiles(const octavo::Weight& weight, const uint8_t* unpacked, int64_t first, int64_t count,
                      const uint8_t* rows, int64_t stride, int64_t num_rows, float* sums, Ahead ahead) {
    for (; num_rows >= R; num_rows -= R, rows += R * stride, sums += R * octavo::kPanel) {
        K::template tile<R>(weight, unpacked, first, count, rows, stride, sums, ahead);
        ahead.at += ahead.step * count;
    }
    if constexpr (R > 1)
        if (num_rows > 0) run_tiles<K, R - 1>(weight, unpacked, first, count, rows, stride, num_rows, sums, ahead);
}

template <class K>
void run_blocks(const octavo::Weight& weight, const octavo::LinearJob& job, int64_t begin, int64_t end) {
    alignas(64) uint8_t scratch[K::kScratchBytes];
    alignas(64) float sums[kMaxBlockRows * octavo::kPanel];
    const int64_t fitting = kRowBlockBytes / job.prepared_stride / K::kTile * K::kTile;
    const int64_t most = kMaxBlockRows / K::kTile * K::kTile;
    const int64_t least = 4 * K::kTile;
    const int64_t block_rows = fitting > most ? most : (fitting < least ? least : fitting);
    const int64_t steps = K::steps(weight), stride = job.prepared_stride;
    const int64_t step_bytes = octavo::panel_bytes(weight.kind, weight.inputs, weight.group) / steps;
    for (int64_t first_row = 0; first_row < job.rows; first_row += block_rows) {
        const int64_t rows = job.rows - first_row < block_rows ? job.rows - first_row : block_rows;
        const uint8_t* prepared = job.prepared + first_row * job.prepared_stride;
        for (int64_t panel = begin; panel < end; ++panel) {
            const uint8_t* packed = panel_at(weight, panel);
            std::memset(sums, 0, static_cast<size_t>(rows) * octavo::kPanel * sizeof *sums);
            for (int64_t first = 0; first < steps; first += K::kBlockSteps) {
                const int64_t count = steps - first < K::kBlockSteps ? steps - first : K::kBlockSteps;
                const uint8_t* unpacked = K::unpack(weight, packed, first, count, scratch);
                const int64_t tiles = (rows + K::kTile - 1) / K::kTile;
                const Ahead ahead{packed + (first + count) * step_bytes, step_bytes / tiles};
                run_tiles<K, K::kTile>(weight, unpacked, first, count, prepared, stride, rows, sums, ahead);
            }
            for (int64_t row = 0; row < rows; ++row)
                finish_row(weight, job, panel, first_row + row, sums + row * octavo::kPanel);
        }
    }
}

template <class K, int R = K::kDirectRows>
void run_panels(const octavo::Weight& weight, const octavo::LinearJob& job, int64_t begin, int64_t end) {
    if (job.rows > K::kDirectRows) return run_blocks<K>(weight, job, begin, end);
    if (job.rows == R) return run_direct<K, R>(weight, job, begin, end);
    if constexpr (R > 1) run_panels<K, R - 1>(weight, job, begin, end);
}

}  // namespace
