// Linear layers over bfloat16 weights with AMX: tiles of 16 rows times panels of 16 outputs.
//
// The order of sums, which is TDPBF16PS's (Intel's manual, volume 2), for each output: inputs are taken 32 at a time, the
// last ones filled up with zeros. Of each 32, the products of even inputs and those of odd inputs are summed apart, in
// ascending order from zero, each with a fused multiply-add; then the two sums are added, and this is added to the output.
// Activations are rounded to bfloat16 first. Each operation rounds to nearest even, takes subnormal operands as zeros, and
// makes a subnormal result zero. This is another order than VDPBF16PS's, so all numbers of rows are computed here; one row
// costs as much as 16, which is less than reading the weights.

#include "linear_kernels.h"

#if defined(OCTAVO_HAS_AMX)

#include <immintrin.h>

#if defined(OCTAVO_EMULATED)  // compiled for the base instruction set, with functions for the intrinsics
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,amx-tile,amx-bf16")
#endif

#include "linear_blocks.h"
#include "linear_amx.h"

namespace octavo {
namespace {

constexpr int64_t kStepInputs = 32, kStepPairs = 16;
constexpr int64_t kPairBytes = 64, kStepBytes = kStepPairs * kPairBytes;  // of a panel: a tile as it lies packed
constexpr int64_t kMaxBlockPairs = 8;                                     // of row tiles: their sums take 32 KiB

int64_t bytes(int64_t inputs) { return padded_row(round_up(inputs, kStepInputs) * 2); }

void prepare(const float* x, int64_t inputs, void* out) {
    Bfloat16* to = static_cast<Bfloat16*>(out);
    for (int64_t k = 0; k < inputs; ++k) narrow(x[k], to[k]);
    std::memset(to + inputs, 0, static_cast<size_t>(round_up(inputs, kStepInputs) - inputs) * sizeof *to);
}

// Some steps of one or two row tiles and panels.
struct Pass {
    const uint8_t* rows[2];  // at the first step
    int64_t stride;          // bytes between rows
    const uint8_t* panel;    // at the first step
    int64_t gap;             // bytes to the second panel
    int64_t count;           // of whole steps
    const uint8_t* rest;     // [panel][16 pairs]: a last step filled up with zeros, or null
    bool is_first;           // the sums are zeros
    float* sums;
    const uint8_t* ahead;    // what to prefetch for the first panel: ahead_bytes a step
    int64_t ahead_bytes;
};

// Sums [2][2][16][16] of two row tiles and two panels; R row tiles and P panels are used.
template <int R, int P>
INLINE void zero_sums() {
    _tile_zero(0);
    if (P > 1) _tile_zero(1);
    if (R > 1) _tile_zero(2);
    if (R > 1 && P > 1) _tile_zero(3);
}

template <int R, int P>
INLINE void load_sums(const float* sums) {
    _tile_loadd(0, sums, 64);
    if (P > 1) _tile_loadd(1, sums + kTileFloats, 64);
    if (R > 1) _tile_loadd(2, sums + 2 * kTileFloats, 64);
    if (R > 1 && P > 1) _tile_loadd(3, sums + 3 * kTileFloats, 64);
}

template <int R, int P>
INLINE void store_sums(float* sums) {
    _tile_stored(0, sums, 64);
    if (P > 1) _tile_stored(1, sums + kTileFloats, 64);
    if (R > 1) _tile_stored(2, sums + 2 * kTileFloats, 64);
    if (R > 1 && P > 1) _tile_stored(3, sums + 3 * kTileFloats, 64);
}

template <int R, int P>
INLINE void add_step(const Pass& pass, int64_t step, const uint8_t* panel, int64_t gap) {
    const int64_t at = step * kStepInputs * 2;
    _tile_loadd(6, panel, kPairBytes);
    _tile_loadd(4, pass.rows[0] + at, pass.stride);
    _tile_dpbf16ps(0, 4, 6);
    if (P > 1) {
        _tile_loadd(7, panel + gap, kPairBytes);
        _tile_dpbf16ps(1, 4, 7);
    }
    if (R > 1) {
        _tile_loadd(5, pass.rows[1] + at, pass.stride);
        _tile_dpbf16ps(2, 5, 6);
        if (P > 1) _tile_dpbf16ps(3, 5, 7);
    }
}

template <int R, int P>
void multiply(const Pass& pass) {
    if (pass.is_first)
        zero_sums<R, P>();
    else
        load_sums<R, P>(pass.sums);
    const uint8_t* ahead = pass.ahead;
    for (int64_t step = 0; step < pass.count; ++step, ahead += pass.ahead_bytes) {
        for (int p = 0; p < P; ++p) prefetch(ahead + p * pass.gap, pass.ahead_bytes);
        add_step<R, P>(pass, step, pass.panel + step * kStepBytes, pass.gap);
    }
    if (pass.rest != nullptr) add_step<R, P>(pass, pass.count, pass.rest, kStepBytes);
    store_sums<R, P>(pass.sums);
}

// Compute some panels for the pairs of row tiles [begin, end).
template <int P>
void run_pairs(const Weight& weight, const LinearJob& job, const EqualTiles& tiles, int64_t begin, int64_t end,
               const Panels& panels) {
    alignas(64) float sums[kMaxBlockPairs * 4 * kTileFloats];
    alignas(64) uint8_t rest[2 * kStepBytes];
    const uint8_t* packed = panel_at(weight, panels.first);
    const int64_t gap = panel_at(weight, panels.first + panels.gap) - packed;
    const int64_t whole_steps = weight.inputs / kStepInputs;
    const int64_t rest_pairs = (weight.inputs % kStepInputs + 1) / 2;
    if (rest_pairs > 0) {
        std::memset(rest, 0, sizeof rest);
        for (int p = 0; p < P; ++p)
            std::memcpy(rest + p * kStepBytes, packed + p * gap + whole_steps * kStepBytes,
                        static_cast<size_t>(rest_pairs * kPairBytes));
        finish_writes(rest);
    }
    const int64_t last_tile = tiles.count - 1;
    const bool is_single = end - begin == 1;  // then nothing is read twice
    const int64_t blocks = is_single ? 1 : larger(divide_up(whole_steps * P * kStepBytes, kStepBlockBytes), 1);
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = whole_steps * block / blocks, count = whole_steps * (block + 1) / blocks - first;
        const uint8_t* panel = packed + first * kStepBytes;
        Pass pass{{}, job.prepared_stride, panel, gap, count, nullptr, block == 0, sums, nullptr, 0};
        if (block == blocks - 1 && rest_pairs > 0) pass.rest = rest;
        // The passes share the prefetching of the next block.
        pass.ahead = panel + (is_single ? kAhead : count * kStepBytes);
        pass.ahead_bytes = kStepBytes / (end - begin);
        for (int64_t pair = begin; pair < end; ++pair) {
            for (int64_t i = 0; i < 2; ++i)
                pass.rows[i] = job.prepared + tiles.start(smaller(2 * pair + i, last_tile)) * job.prepared_stride +
                               first * kStepInputs * 2;
            if (2 * pair < last_tile)
                multiply<2, P>(pass);
            else
                multiply<1, P>(pass);
            pass.sums += 4 * kTileFloats;
            pass.ahead += pass.ahead_bytes * count;
        }
    }
    for (int64_t tile = 2 * begin; tile < smaller(2 * end, tiles.count); ++tile)
        for (int p = 0; p < P; ++p)
            finish_tile(weight, job, tiles, tile, panels.first + p * panels.gap,
                        sums + ((tile - 2 * begin) * 2 + p) * kTileFloats);
}

// As run_panels of linear_blocks.h; two panels are read side by side.
void run_amx(const Weight& weight, const LinearJob& job, int64_t begin, int64_t end) {
    if (job.rows == 0) return;
    const EqualTiles tiles(job.rows);
    const Tiles configured(tiles.most(), kStepInputs * 2);
    const int64_t pairs = divide_up(tiles.count, 2);
    const int64_t fitting = kAmxRowBlockBytes / (2 * tiles.most() * job.prepared_stride);
    const int64_t blocks = divide_up(pairs, smaller(larger(fitting, 1), kMaxBlockPairs));
    while (begin < end) {
        const int64_t gap = larger((end - begin) / 2, 1);
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t panel = begin; panel < begin + gap; ++panel) {
                const int64_t first_pair = pairs * block / blocks, end_pair = pairs * (block + 1) / blocks;
                if (end - begin > 1)
                    run_pairs<2>(weight, job, tiles, first_pair, end_pair, {panel, 2, gap});
                else
                    run_pairs<1>(weight, job, tiles, first_pair, end_pair, {panel, 1, gap});
            }
        begin += end - begin > 1 ? 2 * gap : 1;
    }
}

// The self-check: the specified arithmetic in plain C++, and numbers.

float flush(float value) { return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.0f, value) : value; }

float multiply_add(float a, float b, float c) { return flush(__builtin_fmaf(flush(a), flush(b), flush(c))); }

// row[inputs] . column[inputs]: an output's weights in its panel, pairs at a distance of 16 pairs.
float specified_sum(const Bfloat16* row, const Bfloat16* column, int64_t inputs) {
    float sum = 0.0f;
    for (int64_t first = 0; first < inputs; first += kStepInputs) {
        float halves[2] = {0.0f, 0.0f};
        for (int64_t k = first; k < first + kStepInputs; ++k) {
            const bool is_there = k < inputs;
            halves[k % 2] = multiply_add(is_there ? widen(row[k]) : 0.0f,
                                         is_there ? widen(column[k / 2 * 2 * kPanel + k % 2]) : 0.0f, halves[k % 2]);
        }
        sum = flush(sum + flush(halves[0] + halves[1]));
    }
    return sum;
}

// Numbers of all signs and many magnitudes; where `is_tiny`, products of two are subnormal or hardly larger.
Bfloat16 next_number(uint32_t& state, bool is_tiny) {
    state = state * 1664525u + 1013904223u;  // the generator of Numerical Recipes
    const uint32_t exponent = (is_tiny ? 56 : 118) + (state >> 28);
    const bool is_subnormal = (state >> 16 & 31u) == 0;
    return {static_cast<uint16_t>((state >> 8 & 0x807fu) | (is_subnormal ? 0 : exponent << 7))};
}

}  // namespace

const LinearKernels kAmxLinear = {bytes, prepare, run_amx};

bool amx_bfloat16_agrees() {
    constexpr int64_t kRows = 31, kInputs = 70, kOutputs = 35;  // overlapping row tiles, a rest, an odd panel
    constexpr int64_t kPanels = (kOutputs + kPanel - 1) / kPanel, kPanelNumbers = kInputs * kPanel;
    constexpr int64_t kRowNumbers = 160;  // at least bytes(kInputs)
    alignas(64) Bfloat16 packed[kPanels * kPanelNumbers], rows[kRows * kRowNumbers] = {};
    alignas(64) float out[kRows * kOutputs];
    uint32_t state = 1;
    for (int64_t i = 0; i < kPanels * kPanelNumbers; ++i)
        packed[i] = next_number(state, i / 2 % kPanel == 3);
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t k = 0; k < kInputs; ++k) rows[row * kRowNumbers + k] = next_number(state, row % 5 == 3);
    const Weight weight{kBfloat16, kOutputs, kInputs, 0, packed, nullptr};
    const LinearJob job{reinterpret_cast<const uint8_t*>(rows), kRowNumbers * 2, kRows, out, kOutputs, false};
    run_amx(weight, job, 0, kPanels);
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t i = 0; i < kOutputs; ++i) {
            const Bfloat16* column = packed + i / kPanel * kPanelNumbers + i % kPanel * 2;
            const float expected = specified_sum(rows + row * kRowNumbers, column, kInputs);
            if (std::memcmp(&expected, out + row * kOutputs + i, sizeof expected) != 0) return false;
        }
    return true;
}

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
