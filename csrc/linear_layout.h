// The bytes of packed weights and prepared activations.
//
// Owns: sizes and offsets. Does not: compute. Invariants: packed weights are equal on every machine. Prepared rows
// exist in one step only, so their form may differ by instruction set.
//
// A weight is a run of panels of 16 outputs (the last one padded with zeros). Each panel is contiguous:
//   float32   [input][16]
//   bfloat16  [pair of inputs][16][2]                                    inputs padded to a multiple of 2
//   int8      scales [group][16] float16, padded to 64 bytes; then codes + 128 as [quad of inputs][16][4]
//   tables    scales as for int8; then for each 32 inputs the half bytes of int4
//   int4      per group: scales [16], mins [16] float16; then [4][16][4] bytes, low half quad j, high half quad j + 4

#pragma once

#include <cstdint>

#include "kernel.h"
#include "linear.h"

namespace octavo {

constexpr int kPanel = 16;              // outputs of a panel
constexpr int64_t kGroup = 32;          // inputs that share an activation scale
constexpr int64_t kInt4Record = 320;    // bytes of an int4 group of one panel
constexpr int64_t kInt8Codes = 512;     // bytes of 32 inputs of one int8 panel
constexpr int64_t kHalfCodes = 256;     // the same for a kind with a table
constexpr int64_t kMinsOffset = 32;     // in an int4 record
constexpr int64_t kNibblesOffset = 64;  // in an int4 record

INLINE constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

INLINE constexpr int64_t num_panels(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }

INLINE constexpr int64_t scale_bytes(int64_t inputs, int64_t group) {
    return round_up(inputs / group * 2 * kPanel, 64);
}

INLINE constexpr int64_t panel_bytes(int64_t kind, int64_t inputs, int64_t group) {
    return kind == kFloat32    ? inputs * kPanel * 4
           : kind == kBfloat16 ? round_up(inputs, 2) * kPanel * 2
           : kind == kInt8     ? scale_bytes(inputs, group) + inputs * kPanel
           : kind == kInt4     ? inputs / kGroup * kInt4Record
                               : scale_bytes(inputs, group) + inputs * kPanel / 2;
}

// The values of kIq4, kMxfp4 (doubled) and kNf4 (times 112.05, where rounding them to integers errs least), plus 128.
// Sources: the GGUF specification, OCP microscaling formats, QLoRA (arXiv 2305.14314).
alignas(16) constexpr uint8_t kTables[3][16] = {
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
    {16, 50, 69, 84, 96, 107, 118, 128, 137, 146, 156, 166, 177, 191, 209, 240},
};

INLINE const uint8_t* table_of(int64_t kind) { return kTables[kind - kIq4]; }

// The values before the codes of each 32 activations.
struct GroupHead {
    float scale;  // NaN where an activation was not finite
    union {
        float scaled_sum;  // int4: scale * sum of codes
        int32_t offset;    // others: -128 * sum of codes, which undoes the 128 added to the weight's codes
    };
    int32_t half_offset[2];  // the same for each 16 codes
};

// Rows at a distance of an odd number of cache lines use different cache sets.
INLINE constexpr int64_t padded_row(int64_t bytes) { return round_up(bytes, 128) + 64; }

}  // namespace octavo
