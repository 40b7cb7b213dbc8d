// Run AMX code as it was compiled on a processor without AMX: the processor refuses each instruction with SIGILL, and a
// handler executes it by the functions of tiles.h and steps over it. Shows what functions in place of the intrinsics
// cannot: operands, addresses, and memory accesses that a compiler moves. Encodings: Intel's manual, volume 2.
//
// Stands for the kernels of the other instruction sets, of which the library has none but the portable ones.

#include "tiles.h"

#include <csignal>
#include <ucontext.h>

#include "linear_kernels.h"

namespace octavo {

const LinearKernels kAvx2Linear[5] = {}, kAvx512Linear[2] = {}, kVnniLinear[3] = {}, kBf16Linear = {};

}  // namespace octavo

namespace {

struct sigaction previous;

// Registers by their number in instructions.
constexpr int kRegisters[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

struct Memory {
    uint8_t* address;  // without the index
    int64_t index;     // times its scale: a tile's stride
    int bytes;         // of the instruction, from the byte ModRM on
};

// Decode ModRM, SIB and displacement. `flags` is the VEX byte with inverted R, X and B.
Memory memory_of(const uint8_t* at, uint8_t flags, const greg_t* registers) {
    const int mod = at[0] >> 6, rm = at[0] & 7, extend_base = (flags & 0x20) != 0 ? 0 : 8;
    const bool has_sib = rm == 4;
    int bytes = has_sib ? 2 : 1, base = rm + extend_base;
    Memory found{nullptr, 0, 0};
    if (has_sib) {
        const int index = (at[1] >> 3 & 7) + ((flags & 0x40) != 0 ? 0 : 8);
        if (index != 4) found.index = static_cast<int64_t>(registers[kRegisters[index]]) << (at[1] >> 6);
        base = (at[1] & 7) + extend_base;
    }
    emulated_require(mod != 3 && !(mod == 0 && (base & 7) == 5));  // no address relative to RIP occurs
    int64_t offset = 0;
    if (mod == 1) {
        offset = static_cast<int8_t>(at[bytes]);
        bytes += 1;
    } else if (mod == 2) {
        int32_t wide;
        std::memcpy(&wide, at + bytes, sizeof wide);
        offset = wide;
        bytes += 4;
    }
    found.address = reinterpret_cast<uint8_t*>(registers[kRegisters[base]] + offset);
    found.bytes = bytes;
    return found;
}

// Execute an AMX instruction and return its length, or 0 if it is none.
int execute(const uint8_t* code, const greg_t* registers) {
    if (code[0] != 0xc4 || (code[1] & 0x1f) != 2 || (code[2] & 0x84) != 0) return 0;  // VEX.128.0F38.W0
    const int prefix = code[2] & 3, opcode = code[3];  // prefix: none, 66, F3, F2
    const int third = ~(code[2] >> 3) & 15, reg = code[4] >> 3 & 7, rm = code[4] & 7;
    const bool is_register = code[4] >> 6 == 3;
    if (opcode == 0x49 && prefix == 0 && is_register) {
        emulated_tile_release();
    } else if (opcode == 0x49 && prefix == 0) {
        const Memory memory = memory_of(code + 4, code[1], registers);
        emulated_tile_loadconfig(memory.address + memory.index);
        return 4 + memory.bytes;
    } else if (opcode == 0x49 && prefix == 3) {
        emulated_tile_zero(reg);
    } else if (opcode == 0x4b) {
        const Memory memory = memory_of(code + 4, code[1], registers);
        if (prefix == 3)
            emulated_tile_loadd(reg, memory.address, memory.index);
        else if (prefix == 2)
            emulated_tile_stored(reg, memory.address, memory.index);
        else
            return 0;
        return 4 + memory.bytes;
    } else if (opcode == 0x5c && prefix == 2 && is_register) {
        emulated_tile_dpbf16ps(reg, rm, third);
    } else if (opcode == 0x5e && prefix == 2 && is_register) {
        emulated_tile_dpbsud(reg, rm, third);
    } else {
        return 0;
    }
    return 5;
}

void handle(int, siginfo_t*, void* context) {
    greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    const int bytes = execute(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
    if (bytes == 0) sigaction(SIGILL, &previous, nullptr);  // and the instruction is refused again
    registers[REG_RIP] += bytes;
}

}  // namespace

// Execute AMX instructions from now on.
EXPORT void octavo_trap_tiles() {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGILL, &action, &previous);
}

EXPORT void octavo_untrap_tiles() { sigaction(SIGILL, &previous, nullptr); }
