// The interface between linear.cpp, which chooses kernels, and the files of one instruction set each, which have them.
//
// Owns: the tables' type. A kind's three functions belong together: `panels` reads the rows that `prepare` wrote.

#pragma once

#include "kernel.h"
#include "linear_layout.h"

namespace octavo {

struct LinearJob {
    const uint8_t* prepared;
    int64_t prepared_stride;  // bytes between rows
    int64_t rows;
    float* out;
    int64_t out_stride;
    bool accumulate;
};

struct LinearKernels {
    int64_t (*bytes)(int64_t inputs);  // of one prepared row
    void (*prepare)(const float* x, int64_t inputs, void* out);
    void (*panels)(const Weight& weight, const LinearJob& job, int64_t begin, int64_t end);
};

// By kind; all kinds with a table have the kernels of kIq4.
extern const LinearKernels kPortableLinear[5];
extern const LinearKernels kAvx2Linear[5];
extern const LinearKernels kAvx512Linear[2];  // float32, and bfloat16 widened
extern const LinearKernels kVnniLinear[3];    // from int8 on: AVX512_VNNI
extern const LinearKernels kBf16Linear;       // bfloat16: AVX512_BF16

#if defined(OCTAVO_HAS_AMX)
extern const LinearKernels kAmxLinear;        // bfloat16: AMX-BF16
extern const LinearKernels kAmxQuantised[3];  // from int8 on: AMX-INT8, and kVnniLinear for few rows

// Compute small products with these kernels and in plain C++; return True if all bits are equal. Takes about 1 ms.
bool amx_bfloat16_agrees();
bool amx_quantised_agrees();

inline bool amx_agrees() { return amx_bfloat16_agrees() && amx_quantised_agrees(); }
#endif

}  // namespace octavo
