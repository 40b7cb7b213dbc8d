"""Weights in 4-bit floats: MXFP4 (GPT-OSS, compressed-tensors) and NVFP4.

A number has a sign, two bits of exponent and one of mantissa. MXFP4 has a power of two as scale of 32 inputs (OCP
Microscaling Formats, version 1.0), NVFP4 an 8-bit float as scale of 16, divided by the matrix's global scale.
GPT-OSS stacks the matrices of all experts, [experts, F, G, 16]: they become the rows of one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization
from octavo.nn.checkpoint_formats.coded import CodedRows, CodedTensor, Selected, Stored, part, unpack
from octavo.nn.packed_weight import CODE_VALUES, GROUP, WeightKind
from octavo.nn.safetensors_file import FLOAT_TYPES, StoredTensor, Values, powers_of_two

_ONE = 2  # of the packed kind's table, which has integers
_TABLE: Values = CODE_VALUES[WeightKind.MXFP4].astype(np.float32) / np.float32(_ONE)


def find(stored: Stored, quantization: CheckpointQuantization) -> Iterator[tuple[str, CodedTensor]]:
    """Yield the coded matrices of GPT-OSS, with the names of the weights that they are."""
    for name, blocks in stored.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            yield base, _stacked(blocks, part(stored, base, "_scales", beside=blocks))


def _stacked(blocks: StoredTensor, scales: StoredTensor) -> CodedTensor:
    blocks.check(("U8",))
    if len(blocks.shape) < 3 or blocks.shape[-1] != 16:
        raise blocks.error(f"has shape {list(blocks.shape)}; blocks of 16 bytes are needed")
    scales.check(("U8",), blocks.shape[:-1])
    num_groups = blocks.shape[-2]
    codes, exponents = blocks.array.reshape(-1, num_groups * 16), scales.array.reshape(-1, num_groups)

    def read(rows: slice) -> CodedRows:
        return Selected(unpack(codes[rows], 4), powers_of_two(exponents[rows]), _TABLE, _ONE)

    shape = (len(codes), num_groups * GROUP)
    return CodedTensor("MXFP4", blocks.path, shape, (blocks.name, scales.name), read, (WeightKind.MXFP4, GROUP))


def packed_matrix(stored: Stored, base: str, weight: StoredTensor) -> CodedTensor:
    """Return the matrix of a `weight_packed` of bytes: MXFP4 if its scales are bytes, else NVFP4."""
    num_rows, num_bytes = weight.matrix_shape
    num_inputs = num_bytes * 2
    scales = part(stored, base, ".weight_scale", beside=weight)
    is_mx = scales.type in ("U8", "F8_E8M0")
    group = GROUP if is_mx else 16
    scales.check((scales.type,) if is_mx else ("F8_E4M3", *FLOAT_TYPES), (num_rows, num_inputs // group))
    names = [weight.name, scales.name]
    divisor: Values = np.ones(1, np.float32)
    if not is_mx:
        whole = part(stored, base, ".weight_global_scale", beside=weight)
        whole.check(FLOAT_TYPES, (1,), ())
        names.append(whole.name)
        divisor = whole.floats().reshape(1)

    def read(rows: slice) -> CodedRows:
        found = powers_of_two(scales.array[rows]) if is_mx else scales.floats(rows)
        return Selected(unpack(weight.array[rows], 4), found / divisor, _TABLE, _ONE)

    kind = (WeightKind.MXFP4, group) if num_inputs % GROUP == 0 else None
    label = "MXFP4" if is_mx else "NVFP4"
    return CodedTensor(label, weight.path, (num_rows, num_inputs), tuple(names), read, kind)
