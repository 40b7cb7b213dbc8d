// Attention on any machine: four lanes, with the compiler's own vectors.

#include "attention_tile.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octavo {
namespace {

#if defined(OCTAVO_TEST_LANES)  // 16: the shapes of AVX-512 on a machine without it
constexpr int kCount = OCTAVO_TEST_LANES;
#else
constexpr int kCount = 4;
#endif

struct PortableLanes {
    static constexpr int kPacked = 1;
    static constexpr int kLanes = kCount, kRows = 6, kBlock = kCount < 8 ? kCount : 8;
    typedef float Reg __attribute__((vector_size(4 * kCount)));
    typedef int32_t Ints __attribute__((vector_size(4 * kCount)));
    typedef uint32_t Bits __attribute__((vector_size(4 * kCount)));

    static INLINE_MEMBER Reg set1(float x) { return Reg{} + x; }
    static INLINE_MEMBER Reg load(const float* from) {
        Reg out;
        std::memcpy(&out, from, sizeof out);
        return out;
    }
    template <class T>
    static INLINE_MEMBER Reg load(const T* from) {
        Reg out;
        for (int i = 0; i < kLanes; ++i) out[i] = widen(from[i]);
        return out;
    }
    template <class T>
    static INLINE_MEMBER float one(const T* from) {
        return widen(*from);
    }
    static INLINE_MEMBER void store(Reg x, float* to) { std::memcpy(to, &x, sizeof x); }
    static INLINE_MEMBER float first(Reg x) { return x[0]; }
    static INLINE_MEMBER Reg add(Reg a, Reg b) { return a + b; }
    static INLINE_MEMBER Reg sub(Reg a, Reg b) { return a - b; }
    static INLINE_MEMBER Reg mul(Reg a, Reg b) { return a * b; }
    static INLINE_MEMBER Reg div(Reg a, Reg b) { return a / b; }
    static INLINE_MEMBER Reg max(Reg a, Reg b) { return where_less(b, a, a, b); }
    static INLINE_MEMBER Reg fma(Reg a, Reg b, Reg c) {
#if defined(__aarch64__)
        if constexpr (kCount == 4) return (Reg)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
        return a * b + c;
    }
    static INLINE_MEMBER Reg where_less(Reg x, Reg bound, Reg yes, Reg no) {
        const Ints is_less = x < bound;
        return (Reg)((is_less & (Ints)yes) | (~is_less & (Ints)no));
    }
    static INLINE_MEMBER Reg zero_where_less(Reg y, Reg x, Reg bound) { return where_less(x, bound, Reg{}, y); }
    static INLINE_MEMBER Reg with_sign_of(Reg size, Reg x) { return (Reg)((Ints)size | ((Ints)x & INT32_MIN)); }
    static INLINE_MEMBER Reg times_power(Reg y, Reg shifted) { return (Reg)((Bits)y + ((Bits)shifted << 23)); }
    static INLINE_MEMBER float total(Reg x) {
        float lanes[kLanes];
        store(x, lanes);
        for (int width = kLanes / 2; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
        return lanes[0];
    }
    static INLINE_MEMBER float greatest(Reg x) {
        float best = x[0];
        for (int i = 1; i < kLanes; ++i) best = x[i] > best ? x[i] : best;
        return best;
    }
    // Make the panel [size][width] of kBlock keys.
    template <class T>
    static INLINE_MEMBER void turn(const T* pool, const int64_t* at, int64_t size, float* panel, int64_t width) {
        for (int64_t d = 0; d < size; ++d)
            for (int j = 0; j < kBlock; ++j) panel[d * width + j] = widen(pool[at[j] + d]);
    }
    template <class T>
    static INLINE_MEMBER void save(const float* from, int64_t count, T* to) {
        for (int64_t i = 0; i < count; ++i) narrow(from[i], to[i]);
    }
};

}  // namespace

constexpr AttentionKernels kTable = kernels_of<PortableLanes>();  // no code of this file runs at loading
const AttentionKernels kAttentionPortable = kTable;

}  // namespace octavo
