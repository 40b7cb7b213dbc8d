// See rows.h. The loops are plain C++, which the compiler vectorises for each instruction set.

#include "rows.h"

#include <cmath>

#include "kernel.h"

namespace octavo {
namespace {

constexpr int kLanes = 16;

INLINE float as_float(int32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int32_t as_bits(float value) {
    int32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// e^x within 2 ulp for |x| <= 87, clamped beyond; a NaN stays NaN. Cephes' reduction and polynomial (Moshier, 1989).
// Clamped as an integer: GCC makes chains of masks of comparisons of floats, half as many instructions again.
INLINE float exponential(float x) {
    constexpr int32_t kBound = 0x42ae0000;  // 87
    const int32_t size = as_bits(x) & 0x7fffffff;
    const float clamped = std::copysign(as_float(size < kBound ? size : kBound), x);
    const float scaled = clamped * 1.44269504088896341f;
    const int32_t n = static_cast<int32_t>(scaled + std::copysign(0.5f, scaled));
    const float whole = static_cast<float>(n);
    const float r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    float y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const int32_t nan_bits = size > 0x7f800000 ? -1 : 0;
    return as_float(as_bits(y * as_float((n + 127) << 23)) | nan_bits);
}

INLINE float tree_sum(float* lane) {
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
    return lane[0];
}

INLINE void rms_norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
    float lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int j = 0; j < kLanes; ++j) lane[j] += x[i + j] * x[i + j];
    for (int j = 0; i + j < size; ++j) lane[j] += x[i + j] * x[i + j];
    const float scale = 1.0f / std::sqrt(tree_sum(lane) / static_cast<float>(size) + eps);
    for (int64_t k = 0; k < size; ++k) out[k] = x[k] * scale * weight[k];
}

INLINE void layer_norm_row(const float* x, const float* weight, const float* bias, int64_t size, float eps,
                           float* out) {
    float lane[kLanes] = {}, square[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        for (int j = 0; j < kLanes; ++j) lane[j] += x[i + j];
    for (int j = 0; i + j < size; ++j) lane[j] += x[i + j];
    const float mean = tree_sum(lane) / static_cast<float>(size);
    for (i = 0; i + kLanes <= size; i += kLanes)
        for (int j = 0; j < kLanes; ++j) square[j] += (x[i + j] - mean) * (x[i + j] - mean);
    for (int j = 0; i + j < size; ++j) square[j] += (x[i + j] - mean) * (x[i + j] - mean);
    const float scale = 1.0f / std::sqrt(tree_sum(square) / static_cast<float>(size) + eps);
    for (int64_t k = 0; k < size; ++k) out[k] = (x[k] - mean) * scale * weight[k];
    if (bias != nullptr)
        for (int64_t k = 0; k < size; ++k) out[k] += bias[k];
}

struct Silu {
    INLINE float at(float x) { return x / (1.0f + exponential(-x)); }
};

// gelu(x) = x / 2 * (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
struct GeluTanh {
    INLINE float at(float x) {
        const float twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
        return x / (1.0f + exponential(-twice));
    }
};

// gelu(x) = x * (1 + erf(x / sqrt(2))) / 2. erf within 1.5e-7 by Abramowitz and Stegun, 7.1.26.
struct Gelu {
    INLINE float at(float x) {
        const float z = (x < 0.0f ? -x : x) * 0.70710678118654752f;
        const float t = 1.0f / (1.0f + 0.3275911f * z);
        float p = (1.061405429f * t - 1.453152027f) * t + 1.421413741f;
        p = ((p * t - 0.284496736f) * t + 0.254829592f) * t;
        const float tail = 0.5f * p * exponential(-z * z);
        return x * (x < 0.0f ? tail : 1.0f - tail);
    }
};

struct Relu {
    INLINE float at(float x) { return x < 0.0f ? 0.0f : x; }
};

struct Relu2 {
    INLINE float at(float x) { return x < 0.0f ? 0.0f : x * x; }
};

template <typename Activation>
INLINE void activate_with(bool is_gated, const float* x, int64_t size, float* out) {
    if (is_gated) {
        const float* up = x + size;
        for (int64_t i = 0; i < size; ++i) out[i] = Activation::at(x[i]) * up[i];
    } else {
        for (int64_t i = 0; i < size; ++i) out[i] = Activation::at(x[i]);
    }
}

// GPT-OSS: both halves clamped at 7, the gate only from above; silu with a steeper sigmoid; and 1 added to up.
INLINE void clamped_swiglu_row(const float* x, int64_t size, float* out) {
    const float* ups = x + size;
    for (int64_t i = 0; i < size; ++i) {
        const float gate = x[i] > 7.0f ? 7.0f : x[i];
        const float above = ups[i] > 7.0f ? 7.0f : ups[i], up = above < -7.0f ? -7.0f : above;
        out[i] = (up + 1.0f) * (gate / (1.0f + exponential(-1.702f * gate)));
    }
}

INLINE void activate_row(int64_t activation, bool is_gated, const float* x, int64_t size, float* out) {
    if (activation == kSilu) return activate_with<Silu>(is_gated, x, size, out);
    if (activation == kGeluTanh) return activate_with<GeluTanh>(is_gated, x, size, out);
    if (activation == kGelu) return activate_with<Gelu>(is_gated, x, size, out);
    if (activation == kClampedSwiglu) return clamped_swiglu_row(x, size, out);
    if (activation == kRelu) return activate_with<Relu>(is_gated, x, size, out);
    activate_with<Relu2>(is_gated, x, size, out);
}

INLINE void rotate_head(float* head, const float* turn, int64_t size, bool is_interleaved) {
    const int64_t half = size / 2;
    if (is_interleaved) {
        const float *cosine = turn, *sine = turn + size;
        for (int64_t i = 0; i < size; i += 2) {
            const float a = head[i], b = head[i + 1];
            head[i] = a * cosine[i] + b * sine[i];
            head[i + 1] = b * cosine[i + 1] + a * sine[i + 1];
        }
        return;
    }
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

// tanh(v) = (1 - e^-2|v|) / (1 + e^-2|v|), with v's sign.
INLINE void soft_cap_row(float cap, int64_t size, float* out) {
    for (int64_t i = 0; i < size; ++i) {
        const float v = out[i] / cap;
        const float e = exponential(v < 0.0f ? 2.0f * v : -2.0f * v);
        const float t = (1.0f - e) / (1.0f + e);
        out[i] = cap * (v < 0.0f ? -t : t);
    }
}

#define DEFINE_ROW_KERNELS(name, attributes)                                                                           \
    attributes void rms_norm_##name(const float* x, const float* weight, int64_t size, float eps, float* out) {        \
        rms_norm_row(x, weight, size, eps, out);                                                                       \
    }                                                                                                                  \
    attributes void layer_norm_##name(const float* x, const float* weight, const float* bias, int64_t size, float eps, \
                                      float* out) {                                                                    \
        layer_norm_row(x, weight, bias, size, eps, out);                                                               \
    }                                                                                                                  \
    attributes void activate_##name(int64_t activation, bool is_gated, const float* x, int64_t size, float* out) {     \
        activate_row(activation, is_gated, x, size, out);                                                              \
    }                                                                                                                  \
    attributes void rotate_##name(float* head, const float* turn, int64_t size, bool is_interleaved) {                 \
        rotate_head(head, turn, size, is_interleaved);                                                                 \
    }                                                                                                                  \
    attributes void add_##name(const float* x, int64_t size, float* out) { add_row(x, size, out); }                    \
    attributes void scale_##name(float factor, int64_t size, float* out) { scale_row(factor, size, out); }             \
    attributes void soft_cap_##name(float cap, int64_t size, float* out) { soft_cap_row(cap, size, out); }             \
    const RowKernels name##_kernels = {rms_norm_##name, layer_norm_##name, activate_##name, rotate_##name,             \
                                       add_##name,      scale_##name,      soft_cap_##name};

DEFINE_ROW_KERNELS(portable, )
#if defined(__x86_64__)
DEFINE_ROW_KERNELS(avx2, __attribute__((target("avx2"))))
DEFINE_ROW_KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

}  // namespace

const RowKernels& row_kernels() {
#if defined(__x86_64__)
    const int32_t isa = octavo_kernels_isa();
    if (isa >= kAvx512) return avx512_kernels;
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

EXPORT void octavo_rows_layer_norm(const float* x, const float* weight, const float* bias, float eps, float* out,
                                   int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; ++r)
        octavo::row_kernels().layer_norm(x + r * size, weight, bias, size, eps, out + r * size);
}

EXPORT void octavo_rows_activate(int64_t activation, int64_t is_gated, const float* x, float* out, int64_t rows,
                                 int64_t size) {
    for (int64_t r = 0; r < rows; ++r)
        octavo::row_kernels().activate(activation, is_gated != 0, x + (is_gated != 0 ? 2 : 1) * r * size, size,
                                       out + r * size);
}

// Rotate the first `rope_size` values of heads [rows, heads_per_row, size].
EXPORT void octavo_rows_rotate(float* heads, const float* rope_rows, int64_t rows, int64_t heads_per_row, int64_t size,
                               int64_t rope_size, int64_t is_interleaved) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < heads_per_row; ++h)
            octavo::row_kernels().rotate(heads + (r * heads_per_row + h) * size, rope_rows + 2 * r * rope_size,
                                         rope_size, is_interleaved != 0);
}

EXPORT void octavo_rows_soft_cap(float cap, float* x, int64_t size) { octavo::row_kernels().soft_cap(cap, size, x); }
