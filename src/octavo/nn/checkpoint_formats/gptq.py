"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

`qweight` [E * bits / 32, F] has codes of consecutive inputs in words; `qzeros` [G, F * bits / 32] zero points of
consecutive outputs, less one unless the checkpoint is of version 2; `scales` [G, F]; `g_idx` [E] each input's group.
If inputs were quantised in the order of their activations, groups are no runs of inputs, so that no kernel of ours can
keep the codes: the values are quantised again as int8.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization
from octavo.nn.checkpoint_formats.coded import (
    CodedRows,
    CodedTensor,
    Grid,
    Stored,
    grid_kind,
    group_order,
    part,
    unpack,
    unpack_slice,
    whole_groups,
)
from octavo.nn.safetensors_file import FLOAT_TYPES, StoredTensor

_BITS = (2, 3, 4, 8)  # layers of one checkpoint may differ


def find(stored: Stored, quantization: CheckpointQuantization) -> Iterator[tuple[str, CodedTensor]]:
    """Yield the coded matrices, with the names of the weights that they are."""
    for name, qweight in stored.items():
        base, _, suffix = name.rpartition(".")
        if suffix == "qweight":
            yield f"{base}.weight", _matrix(stored, base, qweight, quantization)


def _matrix(stored: Stored, base: str, qweight: StoredTensor, quantization: CheckpointQuantization) -> CodedTensor:
    qweight.check(("I32", "U32"))
    qzeros = part(stored, base, ".qzeros", beside=qweight)
    qzeros.check(("I32", "U32"))
    (num_words, num_rows), (_, width) = qweight.matrix_shape, qzeros.matrix_shape
    bits = next((bits for bits in _BITS if width == -(-num_rows * bits // 32)), None)
    if bits is None or num_words * 32 % bits:
        raise qzeros.error(f"has shape {list(qzeros.shape)}, which is of no number of bits for {num_rows} outputs")
    num_inputs = num_words * 32 // bits
    scales = part(stored, base, ".scales", beside=qweight)
    num_groups = scales.shape[0] if len(scales.shape) == 2 else 0
    scales.check(FLOAT_TYPES, (num_groups, num_rows))
    whole_groups(scales, num_inputs, num_groups)
    qzeros.check(("I32", "U32"), (num_groups, width))
    order = group_order(stored.get(f"{base}.g_idx"), num_inputs, num_groups)
    mask = (1 << bits) - 1
    is_offset = quantization.is_zero_offset

    def read(rows: slice) -> CodedRows:
        codes = unpack(qweight.array[:, rows].T, bits)
        zeros = unpack_slice(qzeros.array, bits, rows).T
        if is_offset:
            zeros = zeros + np.uint8(1) & np.uint8(mask)
        return Grid(codes, scales.floats(slice(None), rows).T, zeros, order)

    parts = tuple(f"{base}.{end}" for end in ("qweight", "qzeros", "scales", "g_idx") if f"{base}.{end}" in stored)
    has_zeros = _has_zeros(qzeros, bits, is_offset)
    kind, is_kept = grid_kind(bits, num_inputs, num_groups, has_zeros, order is not None)
    label = f"GPTQ {bits}-bit{'' if order is None else ' with activation order'}"
    return CodedTensor(label, qweight.path, (num_rows, num_inputs), parts, read, kind, is_kept)


def _has_zeros(qzeros: StoredTensor, bits: int, is_offset: bool) -> bool:
    """Return True unless all zero points of 8-bit codes are the middle, as symmetric quantization makes them."""
    return bits == 8 and bool((np.ascontiguousarray(qzeros.array).view(np.uint8) != 128 - is_offset).any())
