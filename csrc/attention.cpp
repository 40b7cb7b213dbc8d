// The choice of an instruction set for attention, and attention's phases through the C ABI.
//
// Owns: the choice, the threads' scratch, octavo_attention and octavo_write_kv (for the torch decoder and tests; the
// native decoder calls the phases itself). Does not: compute.

#include "attention.h"

#include "attention_kernels.h"
#include "cpu_features.h"

namespace octavo {

namespace {

const AttentionKernels& kernels() {
#if defined(__x86_64__)
    const int32_t isa = octavo_kernels_isa();
    if (isa >= kAvx512) return kAttentionAvx512;
    if (isa == kAvx2) return kAttentionAvx2;
#endif
    return kAttentionPortable;
}

}  // namespace

AttentionScratch& attention_scratch() {
    static thread_local AttentionScratch scratch;
    return scratch;
}

void write_kv(const AttentionLayer& layer, const int64_t* slot_mapping, int64_t first_token, int64_t end_token,
              const NewKv& kv) {
    kernels().write[layer.kv_kind](layer, slot_mapping, first_token, end_token, kv);
}

void attend(const AttentionLayer& layer, const AttentionStep& step, const float* query, int64_t query_stride,
            float* out, int64_t out_stride, int64_t share, int64_t shares) {
#if defined(__x86_64__)
    if (layer.kv_kind == kKvBfloat16 && has_bf16())
        return kAttendPairs(layer, step, query, query_stride, out, out_stride, share, shares);
#endif
    kernels().items[layer.kv_kind](layer, step, query, query_stride, out, out_stride, share, shares);
}

void attend_join(const AttentionLayer& layer, const AttentionStep& step, float* out, int64_t out_stride, int64_t first,
                 int64_t end) {
    if (first < end) kernels().join(layer, step, out, out_stride, first, end);
}

}  // namespace octavo

// Positions of a part, and the most rows of an item. The caller's plan uses both.
EXPORT int32_t octavo_attention_part() { return octavo::kPart; }
EXPORT int32_t octavo_attention_max_rows() { return octavo::kMaxRows; }

// Both phases over all tokens of a step. Strides are in floats.
EXPORT void octavo_attention(const octavo::AttentionLayer* layer, const octavo::AttentionStep* step, const float* query,
                             int64_t query_stride, float* out, int64_t out_stride, int32_t num_threads) {
    const int64_t units = step->num_joins * layer->num_heads;
    if (num_threads <= 1) {  // no parallel region at all: it would wake the pool
        octavo::attend(*layer, *step, query, query_stride, out, out_stride, 0, 1);
        octavo::attend_join(*layer, *step, out, out_stride, 0, units);
        return;
    }
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static, 1)
        for (int32_t turn = 0; turn < num_threads; ++turn)
            octavo::attend(*layer, *step, query, query_stride, out, out_stride, turn, num_threads);
#pragma omp for schedule(static, 1)
        for (int32_t turn = 0; turn < num_threads; ++turn)
            octavo::attend_join(*layer, *step, out, out_stride, units * turn / num_threads,
                                units * (turn + 1) / num_threads);
    }
}

EXPORT void octavo_write_kv(const octavo::AttentionLayer* layer, const int64_t* slot_mapping, int64_t num_tokens,
                            const float* k, int64_t k_stride, const float* v, int64_t v_stride, int32_t num_threads) {
    const octavo::NewKv kv{k, v, k_stride, v_stride};
    if (num_threads <= 1) return octavo::write_kv(*layer, slot_mapping, 0, num_tokens, kv);
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int32_t turn = 0; turn < num_threads; ++turn)
        octavo::write_kv(*layer, slot_mapping, num_tokens * turn / num_threads,
                         num_tokens * (turn + 1) / num_threads, kv);
}
