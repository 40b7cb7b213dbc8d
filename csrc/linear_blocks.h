// The loops around a linear kernel: rows in blocks that stay in the second-level cache, panels, blocks of steps whose
// weights stay in the first-level cache, and tiles of rows and panels.
//
// Owns: the order of work, which is the same for every kernel. Compiled into each instruction set's file: all names are
// local to that file. Invariants: the sum of a (row, output) takes its inputs in ascending order through one
// accumulator, whatever the blocks.
//
// A kernel K has:
//   kRows           rows of a tile, at most kMaxRows
//   kSums           R rows take up to kSums / R panels, which share the loads of activations, and at least one
//   kStreams        most panels if there is only one tile, which reads weights at the speed of memory
//   kStepBytes      packed bytes of a step of a panel (a group, an input, or a pair of inputs), without scales
//   steps(weight)   steps of a panel
//   tile<R, P>(const Tile&)       add to the sums
//   kUnpackedBytes  of a step; 0 if `tile` reads packed weights. If not 0, it takes a single panel, and K has:
//   unpack(const Tile&, scratch)  unpack the steps of the panel

#pragma once

#include <utility>

#include "linear_prepare.h"

namespace {

constexpr int kMaxRows = 8, kMaxPanels = 4;     // of a tile
constexpr int64_t kRowBlockBytes = 192 * 1024;  // of prepared rows: less than half of a second-level cache
constexpr int64_t kMaxBlockRows = 96, kMinBlockTiles = 4;
constexpr int64_t kStepBlockBytes = 24 * 1024;  // of weights: half of a first-level cache
constexpr int64_t kAhead = 4096;                // bytes to prefetch ahead of a single tile's reading

// Steps [first, first + count) of R rows and P panels.
struct Tile {
    const octavo::Weight& weight;
    const uint8_t* panel;  // packed, or the unpacked steps
    int64_t gap;           // bytes between panels
    int64_t first, count;
    const uint8_t* rows;
    int64_t stride;        // bytes between rows
    float* sums;           // [P][R][16]
    const uint8_t* ahead;  // what to prefetch for the first panel: ahead_bytes a step
    int64_t ahead_bytes;
};

using TileFunction = void (*)(const Tile&);

template <class K, int R, int P>
constexpr TileFunction tile_or_null() {  // null: a combination that does not occur
    constexpr int kMost = K::kUnpackedBytes > 0 ? 1 : 2 * R < K::kRows ? K::kStreams : kMaxPanels;
    if constexpr (P <= kMost && R <= K::kRows && (P == 1 || R * P <= K::kSums))
        return K::template tile<R, P>;
    else
        return nullptr;
}

template <class K, class Indices>
struct TileTable;

template <class K, int... i>
struct TileTable<K, std::integer_sequence<int, i...>> {
    static constexpr TileFunction kAll[] = {tile_or_null<K, i / kMaxPanels + 1, i % kMaxPanels + 1>()...};
};

template <class K>
INLINE TileFunction tile_of(int64_t rows, int64_t panels) {
    using Table = TileTable<K, std::make_integer_sequence<int, kMaxRows * kMaxPanels>>;
    return Table::kAll[(rows - 1) * kMaxPanels + panels - 1];
}

INLINE void prefetch(const uint8_t* at, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(at + line, 0, 3);
}

INLINE const uint8_t* panel_at(const octavo::Weight& weight, int64_t panel) {
    const int64_t bytes = octavo::panel_bytes(weight.kind, weight.inputs, weight.group);
    return static_cast<const uint8_t*>(weight.packed) + panel * bytes;
}

INLINE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

INLINE constexpr int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// The rows of a job, divided evenly into tiles.
struct RowTiles {
    int64_t rows, count;

    int64_t first_row(int64_t tile) const { return rows * tile / count; }
    int64_t size(int64_t tile) const { return first_row(tile + 1) - first_row(tile); }
    int64_t most() const { return divide_up(rows, count); }
};

// Panels side by side: `first`, first + gap, and so on.
struct Panels {
    int64_t first, count, gap;
};

// Compute some panels for the tiles [begin, end).
template <class K>
void run_tiles(const octavo::Weight& weight, const octavo::LinearJob& job, const RowTiles& tiles, int64_t begin,
               int64_t end, const Panels& panels) {
    constexpr bool kUnpacks = K::kUnpackedBytes > 0;
    alignas(64) uint8_t scratch[kUnpacks ? kStepBlockBytes : 64];
    alignas(64) float sums[kMaxBlockRows * kMaxPanels * octavo::kPanel];
    const int64_t row_sums = panels.count * octavo::kPanel, first_row = tiles.first_row(begin);
    std::memset(sums, 0, static_cast<size_t>((tiles.first_row(end) - first_row) * row_sums) * sizeof *sums);
    for (int64_t row = first_row; row < tiles.first_row(end); ++row)  // what finish_rows writes
        for (int64_t p = 0; p < panels.count; ++p)
            __builtin_prefetch(job.out + row * job.out_stride + (panels.first + p * panels.gap) * octavo::kPanel, 1);
    const bool is_single = tiles.count == 1;  // then nothing is read twice
    const int64_t steps = K::steps(weight);
    const int64_t fitting = kStepBlockBytes / (panels.count * (kUnpacks ? K::kUnpackedBytes : K::kStepBytes));
    const int64_t blocks = is_single ? 1 : divide_up(steps, fitting);
    const int64_t block_steps = divide_up(steps, blocks);
    const uint8_t* packed = panel_at(weight, panels.first);
    const uint8_t* codes = panel_at(weight, panels.first + 1) - steps * K::kStepBytes;  // scales are before them
    const int64_t gap_bytes = panel_at(weight, panels.first + panels.gap) - packed;
    Tile tile{weight, packed, gap_bytes, 0, 0, nullptr, job.prepared_stride, nullptr, nullptr, 0};
    for (; tile.first < steps; tile.first += block_steps) {
        tile.count = smaller(block_steps, steps - tile.first);
        if constexpr (kUnpacks) {
            tile.panel = packed;
            K::unpack(tile, scratch);
            tile.panel = scratch;
        }
        // The tiles share the prefetching of the next block.
        tile.ahead = codes + tile.first * K::kStepBytes + (is_single ? kAhead : tile.count * K::kStepBytes);
        tile.ahead_bytes = K::kStepBytes / (end - begin);
        for (int64_t index = begin; index < end; ++index, tile.ahead += tile.ahead_bytes * tile.count) {
            const int64_t row = tiles.first_row(index);
            tile.rows = job.prepared + row * job.prepared_stride;
            tile.sums = sums + (row - first_row) * row_sums;
            tile_of<K>(tiles.size(index), panels.count)(tile);
        }
    }
    const float* from = sums;
    for (int64_t index = begin; index < end; ++index)
        for (int64_t p = 0; p < panels.count; ++p, from += tiles.size(index) * octavo::kPanel)
            finish_rows(weight, job, panels.first + p * panels.gap, tiles.first_row(index), tiles.first_row(index + 1),
                        from);
}

// The panels are cut into runs that are read side by side.
template <class K>
void run_kernel(const octavo::Weight& weight, const octavo::LinearJob& job, const RowTiles& tiles, int64_t begin,
                int64_t end) {
    const int64_t block_rows = smaller(kRowBlockBytes / job.prepared_stride, kMaxBlockRows);
    const int64_t blocks = divide_up(tiles.count, larger(block_rows / tiles.most(), kMinBlockTiles));
    while (begin < end) {
        const int64_t most = K::kUnpackedBytes > 0 ? 1 : tiles.count == 1 ? K::kStreams : kMaxPanels;
        const int64_t count = smaller(smaller(most, larger(K::kSums / tiles.most(), 1)), end - begin);
        const int64_t gap = (end - begin) / count;
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t panel = begin; panel < begin + gap; ++panel)
                run_tiles<K>(weight, job, tiles, tiles.count * block / blocks, tiles.count * (block + 1) / blocks,
                             {panel, count, gap});
        begin += gap * count;
    }
}

// `Many` is the kernel of more than kRows rows, if that is another one.
template <class K, class Many = K>
void run_panels(const octavo::Weight& weight, const octavo::LinearJob& job, int64_t begin, int64_t end) {
    if (job.rows == 0) return;
    if (job.rows <= K::kRows)
        run_kernel<K>(weight, job, {job.rows, 1}, begin, end);
    else
        run_kernel<Many>(weight, job, {job.rows, divide_up(job.rows, K::kRows)}, begin, end);
}

}  // namespace
