// The arithmetic of attention_tile.h, for any vector type V: exponentials, and small matrix products in registers.
//
// Owns: the order of computing one element: a chain of multiply-adds by ascending k. Does not: know parts or items.
// Every including file is one translation unit of one instruction set; nothing here has linkage.

#pragma once

#include "attention_kernels.h"

namespace octavo {
namespace {

// e^x for x <= 0 within 2 ulp, and 0 for x < -87; a NaN stays NaN.
template <class V>
INLINE typename V::Reg exp_lanes(typename V::Reg x) {
    typedef typename V::Reg Reg;
    const Reg magic = V::set1(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the rounded integer
    const Reg shifted = V::fma(x, V::set1(1.44269504088896341f), magic), whole = V::sub(shifted, magic);
    const Reg r = V::fma(whole, V::set1(2.12194440e-4f), V::fma(whole, V::set1(-0.693359375f), x));
    Reg y = V::fma(r, V::set1(1.9875691500e-4f), V::set1(1.3981999507e-3f));
    y = V::fma(y, r, V::set1(8.3334519073e-3f));
    y = V::fma(y, r, V::set1(4.1665795894e-2f));
    y = V::fma(y, r, V::set1(1.6666665459e-1f));
    y = V::fma(y, r, V::set1(5.0000001201e-1f));
    y = V::add(V::fma(y, V::mul(r, r), r), V::set1(1.0f));
    return V::zero_where_less(V::times_power(y, shifted), x, V::set1(-87.0f));
}

// e^x for x <= 0 within 3e-6 of it, for what is then rounded to bfloat16; 0 for x < -87. Fitted to 2^f, |f| <= 1/2, by
// Lawson's method.
template <class V>
INLINE typename V::Reg rough_exp_lanes(typename V::Reg x) {
    typedef typename V::Reg Reg;
    const Reg magic = V::set1(12582912.0f), log2e = V::set1(1.44269504088896341f);
    const Reg shifted = V::fma(x, log2e, magic), f = V::fma(x, log2e, V::sub(magic, shifted));
    Reg y = V::fma(f, V::set1(9.570101276e-3f), V::set1(5.591785908e-2f));
    y = V::fma(y, f, V::set1(2.402474433e-1f));
    y = V::fma(y, f, V::set1(6.931217909e-1f));
    y = V::fma(y, f, V::set1(9.999992847e-1f));
    return V::zero_where_less(V::times_power(y, shifted), x, V::set1(-87.0f));
}

template <class V>
INLINE typename V::Reg tanh_lanes(typename V::Reg x) {
    typedef typename V::Reg Reg;
    const Reg size = V::max(V::sub(V::set1(0.0f), x), x), z = V::mul(x, x), one = V::set1(1.0f);
    const Reg e = exp_lanes<V>(V::mul(size, V::set1(-2.0f)));
    const Reg far = V::with_sign_of(V::div(V::sub(one, e), V::add(one, e)), x);
    Reg near = V::fma(z, V::set1(-5.70498872745e-3f), V::set1(2.06390887954e-2f));
    near = V::fma(near, z, V::set1(-5.37397155531e-2f));
    near = V::fma(near, z, V::set1(1.33314422036e-1f));
    near = V::fma(near, z, V::set1(-3.33332819422e-1f));
    near = V::fma(V::mul(near, z), x, x);
    return V::where_less(size, V::set1(0.625f), near, far);
}

// sum + a * b, in each lane; of pairs of bfloat16 the sum of both products.
template <class V>
INLINE typename V::Reg multiply_add(typename V::Reg a, typename V::Reg b, typename V::Reg sum) {
    if constexpr (V::kPacked == 2) {
        return V::dot(a, b, sum);
    } else {
        return V::fma(a, b, sum);
    }
}

// c[m][v] (+)= sum over k of a[m][k] * b[k][v]: M rows, NV vectors, in registers. `Rows` gives the row b[k].
template <class V, int M, int NV, class Rows>
INLINE void multiply(const float* a, int64_t a_stride, const Rows& b, int64_t first, int64_t end, float* c,
                     int64_t c_stride, bool accumulate) {
    typename V::Reg sums[M][NV];
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < NV; ++v)
            sums[m][v] = accumulate ? V::load(c + m * c_stride + v * V::kLanes) : V::set1(0.0f);
    for (int64_t k = first; k < end; ++k) {
        b.ask(k);
        if constexpr (M < NV) {  // the order with fewer registers: with one sum in memory a step took twice as long
            typename V::Reg ones[M];
            for (int m = 0; m < M; ++m) ones[m] = V::set1(a[m * a_stride + k]);
            for (int v = 0; v < NV; ++v) {
                const typename V::Reg row = b.template load<V>(k, v);
                for (int m = 0; m < M; ++m) sums[m][v] = multiply_add<V>(ones[m], row, sums[m][v]);
            }
        } else {
            typename V::Reg row[NV];
            for (int v = 0; v < NV; ++v) row[v] = b.template load<V>(k, v);
            for (int m = 0; m < M; ++m) {
                const typename V::Reg one = V::set1(a[m * a_stride + k]);
                for (int v = 0; v < NV; ++v) sums[m][v] = multiply_add<V>(one, row[v], sums[m][v]);
            }
        }
    }
    for (int m = 0; m < M; ++m)
        for (int v = 0; v < NV; ++v) V::store(sums[m][v], c + m * c_stride + v * V::kLanes);
}

struct PanelRows {  // rows of a packed panel
    const float* panel;
    int64_t width;
    INLINE_MEMBER void ask(int64_t) const {}
    template <class V>
    INLINE_MEMBER typename V::Reg load(int64_t k, int v) const {
        return V::load(panel + k * width + v * V::kLanes);
    }
};

struct FetchingPanelRows : PanelRows {  // also prefetches lines of the pool, evenly: bursts stall
    const void* const* lines;
    int64_t shift;
    INLINE_MEMBER void ask(int64_t k) const { ask_for(lines[k >> shift]); }
};

template <class T, int kLines>
struct PoolRows {  // rows of the pool itself; also prefetches lines of the pool, kLines per position
    const T* pool;
    const int64_t* at;
    int64_t first;
    const void* const* lines;
    INLINE_MEMBER void ask(int64_t k) const {
        for (int i = 0; i < kLines; ++i) ask_for(lines[(k - first) * kLines + i]);
    }
    template <class V>
    INLINE_MEMBER typename V::Reg load(int64_t k, int v) const {
        return V::load(pool + at[k] + v * V::kLanes);
    }
};

template <class T, int kLines>
struct PoolPairs {  // pairs of rows of the pool; k counts pairs of positions
    const T* pool;
    const int64_t* at;
    int64_t first;
    const void* const* lines;
    INLINE_MEMBER void ask(int64_t k) const {
        for (int i = 0; i < 2 * kLines; ++i) ask_for(lines[(k - first) * 2 * kLines + i]);
    }
    template <class V>
    INLINE_MEMBER typename V::Reg load(int64_t k, int v) const {
        return V::pair(pool + at[2 * k] + v * V::kLanes, pool + at[2 * k + 1] + v * V::kLanes);
    }
};

// `multiply` for any number of rows, in evenly sized groups of at most kMost. Not inlined: compiled once.
template <class V, int NV, int kMost, class Rows>
__attribute__((noinline)) void multiply_rows(int64_t num_rows, const float* a, int64_t a_stride, const Rows& b,
                                             int64_t first, int64_t end, float* c, int64_t c_stride, bool accumulate) {
    const int64_t turns = (num_rows + kMost - 1) / kMost;
    for (int64_t turn = 0, row = 0; turn < turns; ++turn) {
        const int64_t count = turns == 1 ? num_rows : (num_rows - row) / (turns - turn);
        const float* from = a + row * a_stride;
        float* to = c + row * c_stride;
        switch (count) {
#define MULTIPLY(M)                                                                                        \
    case M:                                                                                                \
        multiply<V, (M <= kMost ? M : 1), NV>(from, a_stride, b, first, end, to, c_stride, accumulate);    \
        break;
            MULTIPLY(1) MULTIPLY(2) MULTIPLY(3) MULTIPLY(4) MULTIPLY(5) MULTIPLY(6)
            MULTIPLY(7) MULTIPLY(8) MULTIPLY(9) MULTIPLY(10) MULTIPLY(11) MULTIPLY(12)
#undef MULTIPLY
        }
        row += count;
    }
}

}  // namespace
}  // namespace octavo
