// Residual addition and RMSNorm over rows, in one pass over memory.
//
// Owns: the C ABI octavo_add_rms_norm_{f32,bf16}.
// Does not: allocate, know torch or Python, or start threads of its own (OpenMP's pool is shared with torch).
// Invariants: a row's result depends on that row alone, not on the row count, the threads or the instruction set:
// every path sums in the same 16 lanes and the same tree, without fused multiply-add (-ffp-contract=off).
// Rounding is that of the torch twin in ops/rms_norm.py; only the order of the sum of squares is different.

#include <cmath>

#include "cpu_features.h"

namespace {

constexpr int kLanes = 16;

struct Rows {
    const void* x;
    const void* residual;  // null: nothing to add
    const void* weight;
    void* normed;
    void* sum;  // written only if there is a residual
    int64_t x_stride, residual_stride, normed_stride, sum_stride;  // in elements
    int64_t num_columns;
    float eps;
};

INLINE float reduce(float* lane) {
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}

template <typename T>
INLINE void norm_row(const Rows& rows, int64_t row) {
    const int64_t columns = rows.num_columns;
    const T* x = static_cast<const T*>(rows.x) + row * rows.x_stride;
    if (rows.residual != nullptr) {
        const T* residual = static_cast<const T*>(rows.residual) + row * rows.residual_stride;
        T* sum = static_cast<T*>(rows.sum) + row * rows.sum_stride;
        for (int64_t i = 0; i < columns; ++i) narrow(widen(x[i]) + widen(residual[i]), sum[i]);
        x = sum;
    }

    float lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= columns; i += kLanes)
        for (int j = 0; j < kLanes; ++j) {
            const float value = widen(x[i + j]);
            lane[j] += value * value;
        }
    for (int j = 0; i + j < columns; ++j) {
        const float value = widen(x[i + j]);
        lane[j] += value * value;
    }
    const float scale = 1.0f / std::sqrt(reduce(lane) / static_cast<float>(columns) + rows.eps);

    const T* weight = static_cast<const T*>(rows.weight);
    T* normed = static_cast<T*>(rows.normed) + row * rows.normed_stride;
    for (int64_t k = 0; k < columns; ++k) {
        T rounded;
        narrow(widen(x[k]) * scale, rounded);
        narrow(widen(rounded) * widen(weight[k]), normed[k]);
    }
}

template <typename T>
void norm_row_portable(const Rows& rows, int64_t row) {
    norm_row<T>(rows, row);
}

#if defined(__x86_64__)
template <typename T>
__attribute__((target("avx2"))) void norm_row_avx2(const Rows& rows, int64_t row) {
    norm_row<T>(rows, row);
}

template <typename T>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void norm_row_avx512(const Rows& rows, int64_t row) {
    norm_row<T>(rows, row);
}
#endif

template <typename T>
auto choose_norm_row() {
#if defined(__x86_64__)
    const Isa isa = octavo::isa_in_use();
    if (isa >= kAvx512) return norm_row_avx512<T>;
    if (isa == kAvx2) return norm_row_avx2<T>;
#endif
    return norm_row_portable<T>;
}

template <typename T>
void norm_rows(const Rows& rows, int64_t num_rows, int32_t num_threads) {
    const auto norm = choose_norm_row<T>();
    if (num_threads <= 1) {  // no parallel region at all: it would wake the pool
        for (int64_t row = 0; row < num_rows; ++row) norm(rows, row);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t row = 0; row < num_rows; ++row) norm(rows, row);
}

}  // namespace

#define DEFINE_ADD_RMS_NORM(name, type)                                                                                \
    EXPORT void octavo_add_rms_norm_##name(const void* x, int64_t x_stride, const void* residual,                      \
                                           int64_t residual_stride, const void* weight, float eps, void* normed,       \
                                           int64_t normed_stride, void* sum, int64_t sum_stride, int64_t num_rows,     \
                                           int64_t num_columns, int32_t num_threads) {                                 \
        const Rows rows{x,        residual,        weight,        normed,     sum,         x_stride,                   \
                        residual_stride, normed_stride, sum_stride, num_columns, eps};                                 \
        norm_rows<type>(rows, num_rows, num_threads);                                                                  \
    }

DEFINE_ADD_RMS_NORM(f32, float)
DEFINE_ADD_RMS_NORM(bf16, Bfloat16)
