// Linear layers in plain C++ for any machine. For quantised kinds all other kernels equal these, bit for bit.

#include "half.h"
#include "linear_prepare.h"

namespace octavo {
namespace {

constexpr int kQuads = 8;  // of a group

// dot[16] += codes of `quads` quads . unsigned weight codes [quad][16][4].
INLINE void dot_quads(const uint8_t* weights, const int8_t* codes, int quads, int32_t* dot) {
    for (int quad = 0; quad < quads; ++quad)
        for (int i = 0; i < kPanel; ++i) {
            int32_t sum = 0;
            const uint8_t* quad_weights = weights + quad * 64 + i * 4;
            for (int j = 0; j < 4; ++j) sum += static_cast<int32_t>(quad_weights[j]) * codes[quad * 4 + j];
            dot[i] += sum;
        }
}

INLINE void add_scaled(const int32_t* dot, const uint16_t* scales, float scale, float* sums) {
    for (int i = 0; i < kPanel; ++i)
        sums[i] = __builtin_fmaf(static_cast<float>(dot[i]) * half_to_float(scales[i]), scale, sums[i]);
}

INLINE void split_halves(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < kHalfCodes; ++i) {
        codes[i] = from[i] & 15u;
        codes[kHalfCodes + i] = static_cast<uint8_t>(from[i] >> 4);
    }
}

INLINE void int4_row(const Weight& weight, const uint8_t* panel, const uint8_t* row, float* sums) {
    constexpr int64_t kRowGroup = group_bytes<int8_t>();
    for (int64_t group = weight.inputs / kGroup; group > 0; --group, panel += kInt4Record, row += kRowGroup) {
        GroupHead head;
        std::memcpy(&head, row, sizeof head);
        uint8_t weights[2 * kHalfCodes];
        split_halves(panel + kNibblesOffset, weights);
        int32_t dot[kPanel] = {};
        dot_quads(weights, reinterpret_cast<const int8_t*>(row + sizeof head), kQuads, dot);
        uint16_t scales[kPanel], mins[kPanel];
        std::memcpy(scales, panel, sizeof scales);
        std::memcpy(mins, panel + kMinsOffset, sizeof mins);
        add_scaled(dot, scales, head.scale, sums);
        for (int i = 0; i < kPanel; ++i) sums[i] = __builtin_fmaf(half_to_float(mins[i]), head.scaled_sum, sums[i]);
    }
}

// int8, or a kind with a table: its codes become values first.
template <bool kHasTable>
INLINE void scaled_row(const Weight& weight, const uint8_t* panel, const uint8_t* row, float* sums) {
    const uint8_t* packed = panel + scale_bytes(weight.inputs, weight.group);
    const int parts = static_cast<int>(kGroup / weight.group);  // scales within 32 inputs: 1 or 2
    const int quads = kQuads / parts;
    for (int64_t group = 0; group < weight.inputs / kGroup; ++group, row += group_bytes<int8_t>()) {
        GroupHead head;
        std::memcpy(&head, row, sizeof head);
        const int8_t* codes = reinterpret_cast<const int8_t*>(row + sizeof head);
        uint8_t values[kInt8Codes];
        if (kHasTable) {
            split_halves(packed + group * kHalfCodes, values);
            for (uint8_t& value : values) value = table_of(weight.kind)[value];
        }
        const uint8_t* weights = kHasTable ? values : packed + group * kInt8Codes;
        for (int part = 0; part < parts; ++part, weights += quads * 64, codes += quads * 4, panel += 2 * kPanel) {
            int32_t dot[kPanel];
            for (int i = 0; i < kPanel; ++i) dot[i] = parts == 1 ? head.offset : head.half_offset[part];
            dot_quads(weights, codes, quads, dot);
            uint16_t scales[kPanel];
            std::memcpy(scales, panel, sizeof scales);
            add_scaled(dot, scales, head.scale, sums);
        }
    }
}

INLINE void float_row(const Weight& weight, const uint8_t* panel, const uint8_t* row, float* sums) {
    const float* weights = reinterpret_cast<const float*>(panel);
    const float* x = reinterpret_cast<const float*>(row);
    for (int64_t k = 0; k < weight.inputs; ++k)
        for (int i = 0; i < kPanel; ++i) sums[i] += weights[k * kPanel + i] * x[k];
}

INLINE void bfloat_row(const Weight& weight, const uint8_t* panel, const uint8_t* row, float* sums) {
    const Bfloat16* weights = reinterpret_cast<const Bfloat16*>(panel);
    const float* x = reinterpret_cast<const float*>(row);
    for (int64_t k = 0; k < weight.inputs + weight.inputs % 2; ++k)
        for (int i = 0; i < kPanel; ++i) sums[i] += widen(weights[(k / 2 * kPanel + i) * 2 + k % 2]) * x[k];
}

template <void (*kRow)(const Weight&, const uint8_t*, const uint8_t*, float*)>
void panels(const Weight& weight, const LinearJob& job, int64_t begin, int64_t end) {
    const int64_t bytes = panel_bytes(weight.kind, weight.inputs, weight.group);
    for (int64_t panel = begin; panel < end; ++panel)
        for (int64_t row = 0; row < job.rows; ++row) {
            float sums[kPanel] = {};
            kRow(weight, static_cast<const uint8_t*>(weight.packed) + panel * bytes,
                 job.prepared + row * job.prepared_stride, sums);
            finish_rows(weight, job, panel, row, row + 1, sums);
        }
}

template <bool kIsInt4>
void prepare(const float* x, int64_t inputs, void* out) {
    prepare_codes<int8_t, kIsInt4, false>(x, inputs, out);
}

}  // namespace

const LinearKernels kPortableLinear[5] = {
    {floats_bytes, prepare_floats, panels<float_row>},
    {floats_bytes, prepare_floats, panels<bfloat_row>},
    {codes_bytes<int8_t>, prepare<false>, panels<scaled_row<false>>},
    {codes_bytes<int8_t>, prepare<true>, panels<int4_row>},
    {codes_bytes<int8_t>, prepare<false>, panels<scaled_row<true>>},
};

}  // namespace octavo
