// Linear layers over weights with codes with AMX: from 9 rows on, tiles of up to 16 rows times 16 outputs times a group.
//
// The integer sums of a group are stored, and scaled and added with AVX-512 as everywhere else: the bits are those of the
// kernels with AVX512_VNNI, which compute fewer rows, and weights with scales of 16 inputs. A batch of groups is multiplied
// while the sums of the batch before are scaled, because a product can be read only some 70 cycles after it was begun.

#include "linear_kernels.h"

#if defined(OCTAVO_HAS_AMX)

#include <immintrin.h>

#if defined(OCTAVO_EMULATED)  // compiled for the base instruction set, with functions for the intrinsics
#elif defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,amx-tile,amx-int8"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,amx-tile,amx-int8")
#endif

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "linear_blocks.h"
#include "linear_avx512.h"
#include "linear_amx.h"

namespace octavo {
namespace {

constexpr int64_t kVnniRows = 8;      // up to here one tile of VNNI reads the weights once
constexpr int kBatch = 4;             // groups: one for each tile of sums
constexpr int64_t kBlockGroups = 32;  // whose weights take 16 KiB as whole bytes
constexpr int64_t kMaxBlockTiles = 16;
constexpr int64_t kRowGroup = group_bytes<int8_t>();

using Dots = int32_t[kBatch][kTileRows][kPanel];

template <Form kForm>
struct AmxQuantised {
    static constexpr bool kIsInt4 = kForm == Form::kInt4, kIsInt8 = kForm == Form::kInt8;
    static constexpr int64_t kGroupBytes = kIsInt4 ? kInt4Record : (kIsInt8 ? kInt8Codes : kHalfCodes);  // packed
    static constexpr int64_t kScaleBytes = kIsInt4 ? kInt4Record : 2 * kPanel;  // between the scales of two groups

    // Some groups of a panel.
    struct Block {
        const uint8_t* codes;   // whole bytes [group][quad][16][4]
        const uint8_t* scales;  // of the first group
        int64_t count;
    };

    // Some rows at the block's first group.
    struct Rows {
        const uint8_t* first;
        int64_t stride, count;
        const uint8_t* ahead;  // what to prefetch: ahead_bytes a group
        int64_t ahead_bytes;
    };

    // dots[group][row][output] of G groups from `group` on.
    template <int G>
    INLINE void multiply(const Block& block, const Rows& rows, int64_t group, Dots& dots) {
        const uint8_t* codes = block.codes + group * kInt8Codes;
        const uint8_t* row = rows.first + group * kRowGroup + sizeof(GroupHead);
        _tile_zero(0);
        _tile_loadd(4, row, rows.stride);
        _tile_loadd(6, codes, 64);
        _tile_dpbsud(0, 4, 6);
        if (G > 1) {
            _tile_zero(1);
            _tile_loadd(5, row + kRowGroup, rows.stride);
            _tile_loadd(7, codes + kInt8Codes, 64);
            _tile_dpbsud(1, 5, 7);
        }
        if (G > 2) {
            _tile_zero(2);
            _tile_loadd(4, row + 2 * kRowGroup, rows.stride);
            _tile_loadd(6, codes + 2 * kInt8Codes, 64);
            _tile_dpbsud(2, 4, 6);
        }
        if (G > 3) {
            _tile_zero(3);
            _tile_loadd(5, row + 3 * kRowGroup, rows.stride);
            _tile_loadd(7, codes + 3 * kInt8Codes, 64);
            _tile_dpbsud(3, 5, 7);
        }
        _tile_stored(0, dots[0], 64);
        if (G > 1) _tile_stored(1, dots[1], 64);
        if (G > 2) _tile_stored(2, dots[2], 64);
        if (G > 3) _tile_stored(3, dots[3], 64);
    }

    // Scale them and add them to sums[row][16]. The order of operations is that of linear_portable.cpp.
    template <int G>
    INLINE void add_scaled(const Block& block, const Rows& rows, int64_t group, const Dots& dots, float* sums) {
        __m512 scale[G], min[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const uint8_t* scales = block.scales + (group + g) * kScaleBytes;
            scale[g] = halves(scales);
            min[g] = kIsInt4 ? halves(scales + kMinsOffset) : scale[g];
        }
        const uint8_t* head = rows.first + group * kRowGroup;
        for (int64_t row = 0; row < rows.count; ++row, head += rows.stride, sums += kPanel) {
            __m512 sum = _mm512_loadu_ps(sums);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                const uint8_t* own = head + g * kRowGroup;
                __m512i dot = _mm512_loadu_si512(dots[g][row]);
                if (!kIsInt4) dot = _mm512_add_epi32(dot, broadcast32(own + 4));
                const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), scale[g]);
                sum = _mm512_fmadd_ps(scaled, broadcast_float(own), sum);
                if (kIsInt4) sum = _mm512_fmadd_ps(min[g], broadcast_float(own + 4), sum);
            }
            _mm512_storeu_ps(sums, sum);
        }
    }

    template <int G>
    static void multiply_or_scale(const Block& block, const Rows& rows, int64_t group, Dots& dots, float* sums) {
        if (sums == nullptr) {
            prefetch(rows.ahead + group * rows.ahead_bytes, G * rows.ahead_bytes);
            multiply<G>(block, rows, group, dots);
        } else {
            add_scaled<G>(block, rows, group, dots, sums);
        }
    }

    // Multiply a batch, or, if `sums` is not null, scale and add it. The last batch of a block may be smaller.
    INLINE void run_batch(const Block& block, const Rows& rows, int64_t group, Dots& dots, float* sums) {
        const int64_t count = block.count - group;
        if (count >= 4) return multiply_or_scale<4>(block, rows, group, dots, sums);
        if (count == 3) return multiply_or_scale<3>(block, rows, group, dots, sums);
        if (count == 2) return multiply_or_scale<2>(block, rows, group, dots, sums);
        multiply_or_scale<1>(block, rows, group, dots, sums);
    }

    static void add_block(const Block& block, const Rows& rows, float* sums) {
        alignas(64) Dots dots[2];
        run_batch(block, rows, 0, dots[0], nullptr);
        for (int64_t group = 0; group < block.count; group += kBatch) {
            Dots &own = dots[group / kBatch % 2], &next = dots[(group / kBatch + 1) % 2];
            if (group + kBatch < block.count) run_batch(block, rows, group + kBatch, next, nullptr);
            run_batch(block, rows, group, own, sums);
        }
    }

    static void unpack(const Weight& weight, const uint8_t* packed, int64_t count, uint8_t* codes) {
        const __m512i table = kForm == Form::kTable ? load_table(weight) : _mm512_setzero_si512();
        for (; count > 0; --count, packed += kGroupBytes)
            for (int quad = 0; quad < 8; ++quad, codes += 64)
                _mm512_storeu_si512(codes, quad_of<kForm>(packed, quad, table));
    }

    // Compute a panel for the row tiles [begin, end).
    static void run_tiles(const Weight& weight, const LinearJob& job, const EqualTiles& tiles, int64_t begin,
                          int64_t end, int64_t index) {
        alignas(64) float sums[kMaxBlockTiles * kTileFloats];
        alignas(64) uint8_t codes[kIsInt8 ? 64 : kBlockGroups * kInt8Codes];
        std::memset(sums, 0, static_cast<size_t>((end - begin) * kTileFloats) * sizeof *sums);
        const uint8_t* panel = panel_at(weight, index);
        const uint8_t* packed = panel + (kIsInt4 ? kNibblesOffset : scale_bytes(weight.inputs, weight.group));
        const int64_t groups = weight.inputs / kGroup, ahead_bytes = kGroupBytes / (end - begin);
        for (int64_t first = 0; first < groups; first += kBlockGroups) {
            const int64_t count = smaller(kBlockGroups, groups - first);
            const uint8_t* from = packed + first * kGroupBytes;
            if (!kIsInt8) unpack(weight, from, count, codes);
            const Block block{kIsInt8 ? from : codes, panel + first * kScaleBytes, count};
            finish_writes(codes);
            // The tiles share the prefetching of the next block.
            const uint8_t* ahead = from + count * kGroupBytes;
            for (int64_t tile = begin; tile < end; ++tile, ahead += count * ahead_bytes) {
                const uint8_t* row = job.prepared + tiles.start(tile) * job.prepared_stride + first * kRowGroup;
                const Rows rows{row, job.prepared_stride, tiles.most(), ahead, ahead_bytes};
                add_block(block, rows, sums + (tile - begin) * kTileFloats);
            }
        }
        for (int64_t tile = begin; tile < end; ++tile)
            finish_tile(weight, job, tiles, tile, index, sums + (tile - begin) * kTileFloats);
    }

    static void run_panels(const Weight& weight, const LinearJob& job, int64_t begin, int64_t end) {
        if (job.rows <= kVnniRows || weight.group != kGroup)
            return kVnniLinear[static_cast<int>(kForm)].panels(weight, job, begin, end);
        const EqualTiles tiles(job.rows);
        const Tiles configured(tiles.most(), kGroup);
        const int64_t fitting = kAmxRowBlockBytes / (tiles.most() * job.prepared_stride);
        const int64_t blocks = divide_up(tiles.count, smaller(larger(fitting, 1), kMaxBlockTiles));
        for (int64_t block = 0; block < blocks; ++block)
            for (int64_t panel = begin; panel < end; ++panel)
                run_tiles(weight, job, tiles, tiles.count * block / blocks, tiles.count * (block + 1) / blocks, panel);
    }
};

template <bool kIsInt4>
void prepare(const float* x, int64_t inputs, void* out) {
    prepare_codes<int8_t, kIsInt4, false>(x, inputs, out);
}

uint32_t next_bits(uint32_t& state) {
    state = state * 1664525u + 1013904223u;  // the generator of Numerical Recipes
    return state >> 8;
}

// Fill a weight with codes of all values and scales around one.
void fill(Weight& weight, uint8_t* packed, int64_t panels, uint32_t& state) {
    const int64_t bytes = panel_bytes(weight.kind, weight.inputs, weight.group);
    for (int64_t i = 0; i < panels * bytes; ++i) packed[i] = static_cast<uint8_t>(next_bits(state) >> 8);
    const bool is_int4 = weight.kind == kInt4;
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t i = 0; i < weight.inputs / kGroup * kPanel * (is_int4 ? 2 : 1); ++i) {
            const int64_t at = is_int4 ? i / (2 * kPanel) * kInt4Record + i % (2 * kPanel) * 2 : i * 2;
            packed[panel * bytes + at + 1] = static_cast<uint8_t>(0x38 + next_bits(state) % 4);  // float16's high byte
        }
}

}  // namespace

const LinearKernels kAmxQuantised[3] = {
    {codes_bytes<int8_t>, prepare<false>, AmxQuantised<Form::kInt8>::run_panels},
    {codes_bytes<int8_t>, prepare<true>, AmxQuantised<Form::kInt4>::run_panels},
    {codes_bytes<int8_t>, prepare<false>, AmxQuantised<Form::kTable>::run_panels},
};

bool amx_quantised_agrees() {
    constexpr int64_t kRows = 31, kInputs = 6 * kGroup, kPanels = 2;  // overlapping row tiles, a batch of two groups
    constexpr int64_t kRowBytes = padded_row(6 * kRowGroup), kOutputs = kPanels * kPanel;
    alignas(64) uint8_t packed[kPanels * panel_bytes(kInt8, kInputs, kGroup)], rows[kRows * kRowBytes];
    float out[kRows * kOutputs], expected[kRows * kOutputs];
    uint32_t state = 1;
    for (int64_t kind = kInt8; kind <= kIq4; ++kind) {
        Weight weight{kind, kOutputs, kInputs, kGroup, packed, nullptr};
        fill(weight, packed, kPanels, state);
        const LinearKernels& kernels = kAmxQuantised[kind - kInt8];
        for (int64_t row = 0; row < kRows; ++row) {
            float x[kInputs];
            for (float& value : x) value = static_cast<float>(next_bits(state)) * 0x1p-23f - 1.0f;
            kernels.prepare(x, kInputs, rows + row * kRowBytes);
        }
        LinearJob job{rows, kRowBytes, kRows, out, kOutputs, false};
        kernels.panels(weight, job, 0, kPanels);
        job.out = expected;
        kPortableLinear[kind].panels(weight, job, 0, kPanels);
        if (std::memcmp(out, expected, sizeof out) != 0) return false;
    }
    return true;
}

}  // namespace octavo

#if defined(__clang__) && !defined(OCTAVO_EMULATED)
#pragma clang attribute pop
#endif

#endif
