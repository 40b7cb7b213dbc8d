// Linear layers with AVX2, FMA and F16C.

#if defined(__x86_64__)

#include <immintrin.h>

#include "linear_kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#include "linear_blocks.h"

#include "linear_avx2_quantised.h"

#include "linear_avx2_floats.h"

namespace octavo {
namespace {

void prepare_int4(const float* x, int64_t inputs, void* out) { prepare_codes<int8_t, true, false>(x, inputs, out); }

void prepare_int8(const float* x, int64_t inputs, void* out) { prepare_codes<int16_t, false, true>(x, inputs, out); }

void int8_panels(const Weight& weight, const LinearJob& job, int64_t begin, int64_t end) {
    if (weight.group == kGroup)
        run_panels<Int8<1>, UnpackedInt8<1>>(weight, job, begin, end);
    else
        run_panels<Int8<2>, UnpackedInt8<2>>(weight, job, begin, end);
}

void table_panels(const Weight& weight, const LinearJob& job, int64_t begin, int64_t end) {
    if (weight.kind != kMxfp4)
        run_panels<Table<1, false>, UnpackedTable<1, false>>(weight, job, begin, end);
    else if (weight.group == kGroup)
        run_panels<Table<1, true>, UnpackedTable<1, true>>(weight, job, begin, end);
    else
        run_panels<Table<2, true>, UnpackedTable<2, true>>(weight, job, begin, end);
}

}  // namespace

const LinearKernels kAvx2Linear[5] = {
    {floats_bytes, prepare_floats, run_panels<Floats<true>>},
    {floats_bytes, prepare_floats, run_panels<Floats<false>, UnpackedFloats>},
    {codes_bytes<int16_t>, prepare_int8, int8_panels},
    {codes_bytes<int8_t>, prepare_int4, run_panels<Int4, UnpackedInt4>},
    {codes_bytes<int8_t>, prepare_int4, table_panels},
};

}  // namespace octavo

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
