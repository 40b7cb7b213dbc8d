// Shared code of the AMX files: tiles and their shapes.
//
// A tile is a register of up to 16 rows of 64 bytes; there are eight. Here tiles 0 to 3 hold sums of (row tile, panel):
// 0 1 for the first rows, 2 3 for the second. 4 and 5 hold rows of activations, 6 and 7 weights. The numbers are literals
// everywhere, because the intrinsics are macros that paste them.
//
// A thread configures the tiles inside a kernel's call and releases them before it returns, so that no thread carries
// their 8 KiB through context switches. Include this after setting the target. tests/ops/emulated_avx512 runs these
// files on machines without AMX.

#pragma once

namespace {

constexpr int kTileRows = 16;
constexpr int64_t kAmxRowBlockBytes = 1280 * 1024;  // of prepared rows: these processors have 2 MiB of second-level cache
constexpr int64_t kTileFloats = kTileRows * octavo::kPanel;

// The operand of LDTILECFG. All bytes that are not named must be zero.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "as the instruction reads it");

// GCC's tile loads do not say that they read memory, and its _tile_loadconfig declares 8 of the 64 bytes: what was written
// before must be in memory.
INLINE void finish_writes(const void* written) { __asm__ volatile("" : : "r"(written) : "memory"); }

// Configured tiles, for as long as this object lives.
class Tiles {
public:
    // `rows` of activations in a tile, and the bytes of a step of each: four for each row of a tile of weights.
    __attribute__((always_inline)) Tiles(int64_t rows, int64_t step_bytes) {
        TileConfig config;
        for (int tile = 0; tile < 8; ++tile) {
            config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : step_bytes / 4);
            config.row_bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? step_bytes : 64);
        }
        finish_writes(&config);
        _tile_loadconfig(&config);
    }
    __attribute__((always_inline)) ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

// Rows in tiles of equal height, at most 16; the last tile begins early enough to be full, and computes a row again.
struct EqualTiles : RowTiles {
    explicit EqualTiles(int64_t rows) : RowTiles{rows, divide_up(rows, kTileRows)} {}

    int64_t start(int64_t tile) const { return smaller(first_row(tile), rows - most()); }
};

// Finish the rows of a tile that no tile before it has.
INLINE void finish_tile(const octavo::Weight& weight, const octavo::LinearJob& job, const EqualTiles& tiles,
                        int64_t tile, int64_t panel, const float* sums) {
    for (int64_t row = tiles.first_row(tile); row < tiles.first_row(tile + 1); ++row)
        finish_rows(weight, job, panel, row, row + 1, sums + (row - tiles.start(tile)) * octavo::kPanel);
}

}  // namespace
