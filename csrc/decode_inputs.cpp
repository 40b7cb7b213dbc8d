// The inputs of a step in which every row has one token.
//
// Owns: octavo_decode_inputs, one pass over the rows. Does not: order rows, or know chunks, drafts and forks;
// executors/step_inputs.py computes the inputs of any step, and this kernel gives the same numbers.

#include <algorithm>

#include "kernel.h"

namespace octavo {
namespace {

struct SlotMemory {  // twin: SlotMemory in executors/slots.py
    const int32_t* ids;  // [slot, position]
    int64_t ids_width, table_width, block_size, num_groups;
    const int64_t* const* tables;  // of each cache group: [slot, index]: block numbers
    const int64_t* null_blocks;    // of each cache group
};

}  // namespace
}  // namespace octavo

// Row i computes position starts[i] of slots[i]. Columns [4 + groups, num_rows]: slots, positions, contexts, where the
// sampled id is written in `ids`, and of each group the flat position of the token's KV. Of each group, own_tables
// [num_rows, table_width] gets the blocks of each row's context; what follows them is left as it was. Return the longest
// context, or -1 if a row writes past its block table.
EXPORT int64_t octavo_decode_inputs(const void* slot_memory, const int32_t* slots, const int32_t* starts,
                                    int64_t num_rows, int64_t* columns, int32_t* token_ids,
                                    int64_t* const* own_tables) {
    const auto& memory = *static_cast<const octavo::SlotMemory*>(slot_memory);
    int64_t longest = 0;
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t slot = slots[i], position = starts[i], context = position + 1;
        const int64_t at = slot * memory.ids_width + position;
        longest = context > longest ? context : longest;
        token_ids[i] = memory.ids[at];
        const int64_t row[] = {slot, position, context, at + 1};
        for (int64_t c = 0; c < 4; ++c) columns[c * num_rows + i] = row[c];
        const int64_t last = position / memory.block_size;
        for (int64_t g = 0; g < memory.num_groups; ++g) {
            const int64_t* table = memory.tables[g] + slot * memory.table_width;
            const int64_t block = table[last];
            if (block == memory.null_blocks[g]) return -1;
            std::copy(table, table + last + 1, own_tables[g] + i * memory.table_width);
            columns[(4 + g) * num_rows + i] = block * memory.block_size + position % memory.block_size;
        }
    }
    return longest;
}
