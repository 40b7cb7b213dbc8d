// Packing: canonical weights to panels, and one row of the panels back to floats.
//
// Owns: the C ABI octavo_linear_{packed_bytes,pack}, and unpack_row. Does not: choose codes (Python quantises).

#include "half.h"
#include "linear_layout.h"

namespace octavo {
namespace {

// Rows [first_row, first_row + num_rows) of a weight, and the addresses of their codes, scales and mins.
struct Source {
    const uint8_t* codes;  // of row first_row on: uint8, int8, float32 or bfloat16 bits
    const uint16_t *scales, *mins;
    int64_t inputs, group;
};

INLINE uint32_t load32(const uint8_t* from) {
    uint32_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store32(uint8_t* to, uint32_t value) { std::memcpy(to, &value, sizeof value); }

INLINE void pack_float32(const Source& source, int64_t row, uint8_t* lane) {
    const uint8_t* from = source.codes + row * source.inputs * 4;
    for (int64_t k = 0; k < source.inputs; ++k) store32(lane + k * kPanel * 4, load32(from + k * 4));
}

INLINE void pack_bfloat16(const Source& source, int64_t row, uint8_t* lane) {
    const uint8_t* from = source.codes + row * source.inputs * 2;
    int64_t k = 0;
    for (; k + 2 <= source.inputs; k += 2) store32(lane + k * kPanel * 2, load32(from + k * 2));
    if (k < source.inputs) {
        uint16_t last;
        std::memcpy(&last, from + k * 2, sizeof last);
        store32(lane + k * kPanel * 2, last);
    }
}

INLINE void pack_scales(const Source& source, int64_t row, int64_t slot, uint8_t* panel) {
    const int64_t groups = source.inputs / source.group;
    for (int64_t group = 0; group < groups; ++group)
        std::memcpy(panel + (group * kPanel + slot) * 2, source.scales + row * groups + group, 2);
}

INLINE void pack_int8(const Source& source, int64_t row, int64_t slot, uint8_t* panel) {
    pack_scales(source, row, slot, panel);
    uint8_t* lane = panel + scale_bytes(source.inputs, source.group) + slot * 4;
    const uint8_t* from = source.codes + row * source.inputs;
    for (int64_t k = 0; k < source.inputs; k += 4) store32(lane + k * kPanel, load32(from + k) ^ 0x80808080u);
}

// Two codes in each byte: quads j and j + 4 of 32 inputs.
INLINE void pack_halves(const uint8_t* from, int64_t slot, uint8_t* to) {
    for (int64_t quad = 0; quad < 4; ++quad)
        store32(to + quad * 64 + slot * 4, load32(from + quad * 4) | load32(from + 16 + quad * 4) << 4);
}

INLINE void pack_table(const Source& source, int64_t row, int64_t slot, uint8_t* panel) {
    pack_scales(source, row, slot, panel);
    uint8_t* to = panel + scale_bytes(source.inputs, source.group);
    const uint8_t* from = source.codes + row * source.inputs;
    for (int64_t k = 0; k < source.inputs; k += kGroup, to += kHalfCodes) pack_halves(from + k, slot, to);
}

INLINE void pack_int4(const Source& source, int64_t row, int64_t slot, uint8_t* panel) {
    const int64_t groups = source.inputs / kGroup;
    const uint8_t* from = source.codes + row * source.inputs;
    for (int64_t group = 0; group < groups; ++group, panel += kInt4Record, from += kGroup) {
        std::memcpy(panel + slot * 2, source.scales + row * groups + group, 2);
        std::memcpy(panel + kMinsOffset + slot * 2, source.mins + row * groups + group, 2);
        pack_halves(from, slot, panel + kNibblesOffset);
    }
}

void pack_row(int64_t kind, const Source& source, int64_t row, int64_t slot, uint8_t* panel) {
    if (kind == kFloat32) return pack_float32(source, row, panel + slot * 4);
    if (kind == kBfloat16) return pack_bfloat16(source, row, panel + slot * 4);
    if (kind == kInt8) return pack_int8(source, row, slot, panel);
    if (kind == kInt4) return pack_int4(source, row, slot, panel);
    pack_table(source, row, slot, panel);
}

INLINE void clear_lane(uint8_t* lane, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) store32(lane + at, 0);
}

void clear_slot(int64_t kind, int64_t inputs, int64_t group, int64_t slot, uint8_t* panel) {
    const uint16_t zero = 0;
    if (kind == kInt4) {
        for (int64_t i = 0; i < inputs / kGroup; ++i, panel += kInt4Record) {
            std::memcpy(panel + slot * 2, &zero, sizeof zero);
            std::memcpy(panel + kMinsOffset + slot * 2, &zero, sizeof zero);
            clear_lane(panel + kNibblesOffset + slot * 4, kInt4Record - kNibblesOffset);
        }
    } else if (kind >= kInt8) {
        for (int64_t i = 0; i < inputs / group; ++i) std::memcpy(panel + (i * kPanel + slot) * 2, &zero, sizeof zero);
        clear_lane(panel + scale_bytes(inputs, group) + slot * 4, inputs * kPanel / (kind == kInt8 ? 1 : 2));
    } else {
        clear_lane(panel + slot * 4, panel_bytes(kind, inputs, group));
    }
}

// int8, and the kinds with a table: integer values times scales.
INLINE void unpack_scaled(const Weight& weight, const uint8_t* panel, int64_t slot, float* out) {
    const uint8_t* lane = panel + scale_bytes(weight.inputs, weight.group) + slot * 4;
    for (int64_t k = 0; k < weight.inputs; ++k) {
        uint16_t scale;
        std::memcpy(&scale, panel + (k / weight.group * kPanel + slot) * 2, sizeof scale);
        uint8_t value;
        if (weight.kind == kInt8) {
            value = lane[k / 4 * 64 + k % 4];
        } else {
            const int both = lane[k / kGroup * kHalfCodes + k % 16 / 4 * 64 + k % 4];
            value = table_of(weight.kind)[k % kGroup < 16 ? both & 15 : both >> 4];
        }
        out[k] = static_cast<float>(static_cast<int32_t>(value) - 128) * half_to_float(scale);
    }
}

INLINE void unpack_int4(const Weight& weight, const uint8_t* panel, int64_t slot, float* out) {
    for (int64_t group = 0; group < weight.inputs / kGroup; ++group, panel += kInt4Record, out += kGroup) {
        uint16_t scale_bits, min_bits;
        std::memcpy(&scale_bits, panel + slot * 2, sizeof scale_bits);
        std::memcpy(&min_bits, panel + kMinsOffset + slot * 2, sizeof min_bits);
        const float scale = half_to_float(scale_bits), min = half_to_float(min_bits);
        for (int i = 0; i < 16; ++i) {
            const uint8_t both = panel[kNibblesOffset + i / 4 * 64 + slot * 4 + i % 4];
            out[i] = static_cast<float>(both & 15) * scale + min;
            out[16 + i] = static_cast<float>(both >> 4) * scale + min;
        }
    }
}

}  // namespace

void unpack_row(const Weight& weight, int64_t output, float* out) {
    const int64_t bytes = panel_bytes(weight.kind, weight.inputs, weight.group);
    const uint8_t* panel = static_cast<const uint8_t*>(weight.packed) + output / kPanel * bytes;
    const int64_t slot = output % kPanel;
    if (weight.kind == kInt4) return unpack_int4(weight, panel, slot, out);
    if (weight.kind >= kInt8) return unpack_scaled(weight, panel, slot, out);
    for (int64_t k = 0; k < weight.inputs; ++k) {
        if (weight.kind == kFloat32) {
            std::memcpy(out + k, panel + (k * kPanel + slot) * 4, sizeof *out);
        } else {
            Bfloat16 value;
            std::memcpy(&value, panel + ((k / 2 * kPanel + slot) * 2 + k % 2) * 2, sizeof value);
            out[k] = widen(value);
        }
    }
}

}  // namespace octavo

// Bytes of a packed weight, including the last panel's padding.
EXPORT int64_t octavo_linear_packed_bytes(int64_t kind, int64_t outputs, int64_t inputs, int64_t group) {
    return octavo::num_panels(outputs) * octavo::panel_bytes(kind, inputs, group);
}

// Pack `num_rows` rows as the weight's rows from first_row on. The rows are given as codes [num_rows, inputs], with
// scales and mins [num_rows, inputs / group]. Calls for different rows may run at once. Packing the last row clears the
// padding after it.
EXPORT void octavo_linear_pack(int64_t kind, int64_t outputs, int64_t inputs, int64_t group,
                               const void* codes_or_values, const uint16_t* scales, const uint16_t* mins, void* packed,
                               int64_t first_row, int64_t num_rows) {
    using namespace octavo;
    const Source source{static_cast<const uint8_t*>(codes_or_values), scales, mins, inputs, group};
    const int64_t bytes = panel_bytes(kind, inputs, group);
    uint8_t* panels = static_cast<uint8_t*>(packed);
    // Scales are padded to whole cache lines; the padding is cleared when the panel's first row is packed.
    const bool is_padded = kind >= kInt8 && kind != kInt4;
    const int64_t unpadded = is_padded ? inputs / group * 2 * kPanel : 0;
    for (int64_t row = 0; row < num_rows; ++row) {
        const int64_t panel = (first_row + row) / kPanel, slot = (first_row + row) % kPanel;
        uint8_t* at = panels + panel * bytes;
        if (is_padded && slot == 0)
            std::memset(at + unpadded, 0, static_cast<size_t>(scale_bytes(inputs, group) - unpadded));
        pack_row(kind, source, row, slot, at);
    }
    if (first_row + num_rows < outputs || outputs % kPanel == 0) return;
    for (int64_t slot = outputs % kPanel; slot < kPanel; ++slot)
        clear_slot(kind, inputs, group, slot, panels + outputs / kPanel * bytes);
}
