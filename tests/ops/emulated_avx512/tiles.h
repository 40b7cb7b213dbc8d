// The AMX intrinsics that csrc/linear_amx*.cpp use, as plain functions over a thread's tiles. What the processor would
// refuse traps here. Source: the operation sections of LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS and TDPBSUD in Intel's
// manual, volume 2.

#pragma once

#include "emulated.h"

// What a planted fault changes in TDPBF16PS; the last one in TDPBSUD.
enum EmulatedFault { kNoFault, kOneSum, kKeptSubnormals, kOneBit, kOneBitOfCodes };
inline int emulated_fault = kNoFault;

struct EmulatedTiles {
    bool are_configured;
    uint8_t rows[8];
    uint16_t row_bytes[8];
    uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles emulated_tiles = {};

EMULATED void emulated_require(bool is_met) {
    if (!is_met) __builtin_trap();
}

EMULATED void emulated_tile_release() { emulated_tiles = {}; }

EMULATED void emulated_tile_loadconfig(const void* config) {
    uint8_t at[64];
    std::memcpy(at, config, sizeof at);
    emulated_tile_release();
    emulated_require(at[0] == 1 && at[1] == 0);  // palette, start_row
    for (int i = 2; i < 16; ++i) emulated_require(at[i] == 0);
    for (int tile = 0; tile < 16; ++tile) {
        const int row_bytes = at[16 + 2 * tile] | at[17 + 2 * tile] << 8, rows = at[48 + tile];
        emulated_require(tile < 8 ? row_bytes <= 64 && rows <= 16 && (row_bytes == 0) == (rows == 0)
                                  : row_bytes == 0 && rows == 0);
        if (tile >= 8) continue;
        emulated_tiles.rows[tile] = static_cast<uint8_t>(rows);
        emulated_tiles.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    }
    emulated_tiles.are_configured = true;
}

EMULATED void emulated_tile_zero(int tile) {
    emulated_require(emulated_tiles.are_configured && emulated_tiles.rows[tile] > 0);
    std::memset(emulated_tiles.data[tile], 0, sizeof emulated_tiles.data[tile]);
}

EMULATED void emulated_tile_loadd(int tile, const void* from, int64_t stride) {
    emulated_tile_zero(tile);
    for (int row = 0; row < emulated_tiles.rows[tile]; ++row)
        std::memcpy(emulated_tiles.data[tile][row], static_cast<const uint8_t*>(from) + row * stride,
                    emulated_tiles.row_bytes[tile]);
}

EMULATED void emulated_tile_stored(int tile, void* to, int64_t stride) {
    emulated_require(emulated_tiles.are_configured && emulated_tiles.rows[tile] > 0);
    for (int row = 0; row < emulated_tiles.rows[tile]; ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, emulated_tiles.data[tile][row],
                    emulated_tiles.row_bytes[tile]);
}

// The rules for the shapes of c += a * b.
EMULATED void emulated_check_shapes(int c, int a, int b) {
    const EmulatedTiles& t = emulated_tiles;
    emulated_require(t.are_configured && c != a && c != b && a != b);
    emulated_require(t.rows[c] > 0 && t.rows[a] > 0 && t.rows[b] > 0);
    emulated_require(t.row_bytes[c] % 4 == 0 && t.row_bytes[a] % 4 == 0 && t.row_bytes[b] % 4 == 0);
    emulated_require(t.rows[c] == t.rows[a] && t.row_bytes[c] == t.row_bytes[b] && t.row_bytes[a] / 4 == t.rows[b]);
}

// Subnormal operands are zeros, and so are subnormal results.
EMULATED float emulated_normal(float value) {
    if (emulated_fault == kKeptSubnormals) return value;
    const uint32_t bits = emulated_bits<uint32_t>(value);
    return (bits & 0x7f800000u) == 0 ? emulated_bits<float>(bits & 0x80000000u) : value;
}

EMULATED float emulated_bf16(const uint8_t* row, int index) {
    uint16_t half;
    std::memcpy(&half, row + 2 * index, sizeof half);
    return emulated_normal(emulated_bits<float>(static_cast<uint32_t>(half) << 16));
}

EMULATED void emulated_tile_dpbf16ps(int c, int a, int b) {
    emulated_check_shapes(c, a, b);
    EmulatedTiles& t = emulated_tiles;
    for (int m = 0; m < t.rows[c]; ++m) {
        float sums[32] = {};  // of even inputs and of odd inputs, for each output
        for (int k = 0; k < t.row_bytes[a] / 4; ++k)
            for (int i = 0; i < t.row_bytes[c] / 2; ++i) {
                float& sum = sums[emulated_fault == kOneSum ? i & ~1 : i];
                sum = emulated_normal(__builtin_fmaf(emulated_bf16(t.data[a][m], 2 * k + i % 2),
                                                     emulated_bf16(t.data[b][k], i), sum));
            }
        for (int n = 0; n < t.row_bytes[c] / 4; ++n) {
            float out;
            std::memcpy(&out, t.data[c][m] + 4 * n, sizeof out);
            out = emulated_normal(emulated_normal(out) + emulated_normal(sums[2 * n] + sums[2 * n + 1]));
            if (emulated_fault == kOneBit && m == 15 && n == 15)
                out = emulated_bits<float>(emulated_bits<uint32_t>(out) ^ 1u);
            std::memcpy(t.data[c][m] + 4 * n, &out, sizeof out);
        }
    }
}

// Signed bytes of a times unsigned bytes of b, four to a sum, exactly.
EMULATED void emulated_tile_dpbsud(int c, int a, int b) {
    emulated_check_shapes(c, a, b);
    EmulatedTiles& t = emulated_tiles;
    for (int m = 0; m < t.rows[c]; ++m)
        for (int n = 0; n < t.row_bytes[c] / 4; ++n) {
            uint32_t out;
            std::memcpy(&out, t.data[c][m] + 4 * n, sizeof out);
            for (int k = 0; k < t.row_bytes[a] / 4; ++k)
                for (int i = 0; i < 4; ++i)
                    out += static_cast<uint32_t>(static_cast<int8_t>(t.data[a][m][4 * k + i]) *
                                                 static_cast<int32_t>(t.data[b][k][4 * n + i]));
            if (emulated_fault == kOneBitOfCodes && m == 15 && n == 15) out ^= 1u;
            std::memcpy(t.data[c][m] + 4 * n, &out, sizeof out);
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_release emulated_tile_release
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_zero emulated_tile_zero
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#define _tile_dpbsud emulated_tile_dpbsud
