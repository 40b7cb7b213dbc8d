// See rows.h. The loops are plain C++, which the compiler vectorises for each instruction set.

#include "rows.h"

#include <cmath>

#include "kernel.h"

namespace octavo {
namespace {

constexpr int kLanes = 16;

// e^x within 2 ulp for |x| <= 87, clamped beyond; a NaN stays NaN. Cephes' reduction and polynomial (Moshier, 1989).
INLINE float exponential(float x) {
    const float clamped = x < -87.0f ? -87.0f : (x > 87.0f ? 87.0f : x);
    const float scaled = clamped * 1.44269504088896341f;
    const int32_t n = static_cast<int32_t>(scaled + (scaled < 0.0f ? -0.5f : 0.5f));
    const float whole = static_cast<float>(n);
    const float r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const uint32_t bits = static_cast<uint32_t>(n + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return y * power;
}

INLINE void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
    float lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int j = 0; j < kLanes; ++j) lane[j] += x[i + j] * x[i + j];
    for (int j = 0; i + j < size; ++j) lane[j] += x[i + j] * x[i + j];
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    const float scale = 1.0f / std::sqrt(lane[0] / static_cast<float>(size) + eps);
    for (int64_t k = 0; k < size; ++k) out[k] = x[k] * scale * weight[k];
}

INLINE void gate_row(int64_t activation, const float* gate_up, int64_t size, float* out) {
    const float* up = gate_up + size;
    if (activation == kSilu) {
        for (int64_t i = 0; i < size; ++i) out[i] = gate_up[i] / (1.0f + exponential(-gate_up[i])) * up[i];
        return;
    }
    // gelu(x) = x / 2 * (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
    for (int64_t i = 0; i < size; ++i) {
        const float x = gate_up[i];
        const float twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
        out[i] = x / (1.0f + exponential(-twice)) * up[i];
    }
}

INLINE void rotate_head(float* head, const float* turn, int64_t size) {
    const int64_t half = size / 2;
    const float *cosine = turn, *sine = turn + size + half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = head[i], b = head[half + i];
        head[i] = a * cosine[i] - b * sine[i];
        head[half + i] = b * cosine[i] + a * sine[i];
    }
}

INLINE void add_row(const float* x, int64_t size, float* out) {
    for (int64_t i = 0; i < size; ++i) out[i] += x[i];
}

INLINE void scale_row(float factor, int64_t size, float* out) {
    for (int64_t i = 0; i < size; ++i) out[i] *= factor;
}

#define DEFINE_ROW_KERNELS(name, attributes)                                                                           \
    attributes void rms_norm_##name(const float* x, const float* weight, int64_t size, float eps, float* out) {        \
        rms_norm_row(x, weight, size, eps, out);                                                                       \
    }                                                                                                                  \
    attributes void gate_##name(int64_t activation, const float* gate_up, int64_t size, float* out) {                  \
        gate_row(activation, gate_up, size, out);                                                                      \
    }                                                                                                                  \
    attributes void rotate_##name(float* head, const float* turn, int64_t size) { rotate_head(head, turn, size); }     \
    attributes void add_##name(const float* x, int64_t size, float* out) { add_row(x, size, out); }                    \
    attributes void scale_##name(float factor, int64_t size, float* out) { scale_row(factor, size, out); }             \
    const RowKernels name##_kernels = {rms_norm_##name, gate_##name, rotate_##name, add_##name, scale_##name};

DEFINE_ROW_KERNELS(portable, )
#if defined(__x86_64__)
DEFINE_ROW_KERNELS(avx2, __attribute__((target("avx2"))))
DEFINE_ROW_KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

}  // namespace

const RowKernels& row_kernels() {
#if defined(__x86_64__)
    const int32_t isa = octavo_kernels_isa();
    if (isa == kAvx512) return avx512_kernels;
    if (isa == kAvx2) return avx2_kernels;
#endif
    return portable_kernels;
}

}  // namespace octavo

// The C ABI, for tests: the rows of one buffer, on one thread.
EXPORT void octavo_rows_rms_norm(const float* x, const float* weight, float eps, float* out, int64_t rows,
                                 int64_t size) {
    for (int64_t r = 0; r < rows; ++r) octavo::row_kernels().rms_norm(x + r * size, weight, size, eps, out + r * size);
}

EXPORT void octavo_rows_gate(int64_t activation, const float* gate_up, float* out, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; ++r)
        octavo::row_kernels().gate(activation, gate_up + 2 * r * size, size, out + r * size);
}

EXPORT void octavo_rows_rotate(float* heads, const float* rope_rows, int64_t rows, int64_t heads_per_row, int64_t size) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < heads_per_row; ++h)
            octavo::row_kernels().rotate(heads + (r * heads_per_row + h) * size, rope_rows + 2 * r * size, size);
}
