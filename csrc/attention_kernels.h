// What all instruction sets share for attention: the scratch of a thread, the table of functions.
//
// Does not: compute attention (attention_tile.h does), or choose an instruction set (attention.cpp does).

#pragma once

#include "attention.h"
#include "attention_codes.h"

#define INLINE_MEMBER inline __attribute__((always_inline))

// Prefetch the cache line at an address, which need not be valid.
INLINE void ask_for(const void* line) { __builtin_prefetch(line); }

namespace octavo {

constexpr int64_t kMaxLanes = 16;

// Buffers of one thread. Rows are dense at the head size in use, so small heads touch little of the buffers.
struct alignas(64) AttentionScratch {
    float query[kMaxRows * kMaxSize], part[kMaxRows * kMaxSize], total[kMaxRows * kMaxSize];
    float scores[kMaxRows * (kPart + 16)];
    float panel[4 * kMaxLanes * kMaxSize];  // keys [size][4 vectors], or values [kPart][2 vectors]
    float scales[kPart + 16];
    float part_max[kMaxRows], part_sum[kMaxRows], total_max[kMaxRows], total_sum[kMaxRows];
};

AttentionScratch& attention_scratch();

typedef void (*AttendItems)(const AttentionLayer&, const AttentionStep&, const float* query, int64_t query_stride,
                            float* out, int64_t out_stride, int64_t thread, int64_t threads);

struct AttentionKernels {
    AttendItems items[kKvKinds];
    void (*join)(const AttentionLayer&, const AttentionStep&, float* out, int64_t out_stride, int64_t first,
                 int64_t end);
    void (*write[kKvKinds])(const AttentionLayer&, const int64_t* slots, int64_t first, int64_t end, const NewKv& kv);
};

extern const AttentionKernels kAttentionPortable;
#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx2, kAttentionAvx512;
extern const AttendItems kAttendPairs;  // of a bfloat16 pool, with AVX512_BF16
#endif

}  // namespace octavo
