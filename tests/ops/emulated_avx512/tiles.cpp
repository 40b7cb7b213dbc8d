// The door of tests to the emulated tiles.

#include "tiles.h"

#include "linear_kernels.h"

EXPORT int32_t octavo_kernels_use_isa(int32_t wanted);

// Let the next products be computed with this EmulatedFault.
EXPORT void octavo_plant_fault(int32_t fault) { emulated_fault = fault; }

// As csrc/cpu_features.cpp: use AMX if its sums have the specified bits. Return the instruction set in use.
EXPORT int32_t octavo_try_amx() {
    octavo_kernels_use_isa(octavo::amx_agrees() ? kAmx : kAvx512);
    return octavo_kernels_isa();
}

// Return 1 if this thread's tiles are configured.
EXPORT int32_t octavo_tiles_are_configured() { return emulated_tiles.are_configured; }
