// The choice of a linear layer's kernels, dividing its outputs among threads, and the C ABI octavo_linear*.

#include "linear.h"

#include <algorithm>

#include "cpu_features.h"
#include "linear_kernels.h"

namespace octavo {
namespace {

const LinearKernels& kernels_for(int64_t kind) {
    if (kind > kIq4) kind = kIq4;
#if defined(__x86_64__)
    const Isa isa = isa_in_use();
#if defined(OCTAVO_HAS_AMX)
    if (kind == kBfloat16 && isa == kAmx) return kAmxLinear;
    if (kind >= kInt8 && isa == kAmx) return kAmxQuantised[kind - kInt8];
#endif
    if (kind == kBfloat16 && has_bf16()) return kBf16Linear;
    if (kind >= kInt8 && has_vnni()) return kVnniLinear[kind - kInt8];
    if (kind < kInt8 && isa >= kAvx512) return kAvx512Linear[kind];
    if (isa >= kAvx2) return kAvx2Linear[kind];
#endif
    return kPortableLinear[kind];
}

}  // namespace

int64_t prepared_bytes(int64_t kind, int64_t inputs) { return kernels_for(kind).bytes(inputs); }

void prepare_row(int64_t kind, const float* x, int64_t inputs, void* out) { kernels_for(kind).prepare(x, inputs, out); }

void linear(const Weight& weight, const void* prepared, int64_t rows, float* out, int64_t out_stride, bool accumulate,
            int thread, int threads) {
    const LinearKernels& kernels = kernels_for(weight.kind);
    const LinearJob job{static_cast<const uint8_t*>(prepared), kernels.bytes(weight.inputs), rows, out, out_stride,
                        accumulate};
    const int64_t panels = num_panels(weight.outputs);
    kernels.panels(weight, job, panels * thread / threads, panels * (thread + 1) / threads);
}

Weight some_panels(const Weight& weight, int64_t begin, int64_t end) {
    Weight some = weight;
    some.packed = static_cast<const uint8_t*>(weight.packed) + begin * panel_bytes(weight.kind, weight.inputs, weight.group);
    some.outputs = std::min(weight.outputs, end * kPanel) - begin * kPanel;
    if (weight.bias != nullptr) some.bias = weight.bias + begin * kPanel;
    return some;
}

}  // namespace octavo

// Bytes of one prepared row.
EXPORT int64_t octavo_linear_prepared_bytes(int64_t kind, int64_t inputs) {
    return octavo::prepared_bytes(kind, inputs);
}

// prepare_row for each row of x[rows, inputs]; `out` is 64-byte aligned.
EXPORT void octavo_linear_prepare(int64_t kind, const float* x, int64_t x_stride, int64_t rows, int64_t inputs,
                                  void* out, int32_t num_threads) {
    const int64_t bytes = octavo::prepared_bytes(kind, inputs);
    uint8_t* to = static_cast<uint8_t*>(out);
    if (num_threads <= 1) {  // no parallel region at all: it would wake the pool
        for (int64_t row = 0; row < rows; ++row)
            octavo::prepare_row(kind, x + row * x_stride, inputs, to + row * bytes);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < rows; ++row) octavo::prepare_row(kind, x + row * x_stride, inputs, to + row * bytes);
}

// All shares of `linear`, on num_threads threads.
EXPORT void octavo_linear(const octavo::Weight* weight, const void* prepared, int64_t rows, float* out,
                          int64_t out_stride, int32_t accumulate, int32_t num_threads) {
    if (num_threads <= 1) return octavo::linear(*weight, prepared, rows, out, out_stride, accumulate != 0, 0, 1);
#pragma omp parallel for schedule(static, 1) num_threads(num_threads)
    for (int32_t share = 0; share < num_threads; ++share)
        octavo::linear(*weight, prepared, rows, out, out_stride, accumulate != 0, share, num_threads);
}

// Dequantise the rows `outputs`[count] of a weight into out[count, inputs].
EXPORT void octavo_linear_unpack_rows(const octavo::Weight* weight, const int64_t* outputs, int64_t count, float* out,
                                      int64_t out_stride) {
    for (int64_t i = 0; i < count; ++i) octavo::unpack_row(*weight, outputs[i], out + i * out_stride);
}
