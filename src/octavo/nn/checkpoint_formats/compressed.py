"""Checkpoints of compressed-tensors: packed and plain integers, 8-bit floats, and 4-bit floats.

Integers: `weight_packed` [F, E * bits / 32] has unsigned codes of consecutive inputs in words, or `weight` [F, E] has
int8; `weight_scale` [F, G]; `weight_zero_point` [F, G], packed along the outputs if the weight is packed.
4-bit floats: `weight_packed` [F, E / 2] bytes, `weight_scale` [F, G], for NVFP4 `weight_global_scale`, which divides.
Bits and groups follow from the shapes, so that layers of one checkpoint may differ.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization
from octavo.nn.checkpoint_formats import four_bit, fp8
from octavo.nn.checkpoint_formats.coded import (
    CodedRows,
    CodedTensor,
    Grid,
    Stored,
    grid_kind,
    group_order,
    part,
    unpack_slice,
    whole_groups,
)
from octavo.nn.safetensors_file import FLOAT_TYPES, StoredTensor, Values


def find(stored: Stored, quantization: CheckpointQuantization) -> Iterator[tuple[str, CodedTensor]]:
    """Yield the coded matrices, with the names of the weights that they are."""
    for name, tensor in stored.items():
        base, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            make = four_bit.packed_matrix if tensor.type == "U8" else _packed
            yield f"{base}.weight", make(stored, base, tensor)
        elif suffix == "weight" and tensor.type in fp8.TYPES:
            yield name, fp8.float_matrix(stored, base, tensor)
        elif suffix == "weight" and tensor.type == "I8":
            yield name, _integers(stored, base, tensor)


def _packed(stored: Stored, base: str, words: StoredTensor) -> CodedTensor:
    words.check(("I32", "U32"))
    stated = part(stored, base, ".weight_shape", beside=words)
    stated.check(("I64", "I32"), (2,))
    num_rows, num_inputs = shape = tuple(int(size) for size in stated.array)
    fitting = [bits for bits in range(1, 9) if words.shape == (num_rows, -(-num_inputs * bits // 32))]
    if not fitting:
        raise words.error(f"has shape {list(words.shape)}, which holds no matrix of {num_rows} x {num_inputs}")
    bits = fitting[0]
    scales, num_groups, order = _scales(stored, base, words, shape)
    zeros = stored.get(f"{base}.weight_zero_point")
    if zeros is not None:
        zeros.check(("I32", "U32"), (-(-num_rows * bits // 32), num_groups))

    def read(rows: slice) -> CodedRows:
        codes = unpack_slice(words.array[rows], bits, slice(0, num_inputs))
        zeros_FG = 1 << bits - 1 if zeros is None else unpack_slice(zeros.array.T, bits, rows).T
        return Grid(codes, _of_rows(scales, rows), zeros_FG, order)

    kind, is_kept = grid_kind(bits, num_inputs, num_groups, zeros is not None, order is not None)
    label = f"{bits}-bit integers{'' if order is None else ' with activation order'}"
    parts = _present(stored, base, "packed", "shape", "scale", "zero_point", "g_idx")
    return CodedTensor(label, words.path, (num_rows, num_inputs), parts, read, kind, is_kept)


def _integers(stored: Stored, base: str, weight: StoredTensor) -> CodedTensor:
    num_rows, num_inputs = shape = weight.matrix_shape
    scales, num_groups, order = _scales(stored, base, weight, shape)
    zeros = stored.get(f"{base}.weight_zero_point")
    if zeros is not None:
        zeros.check(("I8",), scales.shape)
        zeros = zeros if zeros.array.any() else None

    def read(rows: slice) -> CodedRows:
        zeros_FG = 0 if zeros is None else _of_rows(zeros, rows)
        return Grid(weight.array[rows], _of_rows(scales, rows), zeros_FG, order)

    kind, is_kept = grid_kind(8, num_inputs, num_groups, zeros is not None, order is not None)
    parts = (weight.name, *_present(stored, base, "scale", "zero_point", "g_idx"))
    return CodedTensor("8-bit integers", weight.path, (num_rows, num_inputs), parts, read, kind, is_kept)


def _scales(
    stored: Stored, base: str, weight: StoredTensor, shape: tuple[int, ...]
) -> tuple[StoredTensor, int, npt.NDArray[np.int64] | None]:
    """Return the scales (one, one a row, or [F, G]), G, and each input's group if groups are no runs of inputs."""
    num_rows, num_inputs = shape
    scales = part(stored, base, ".weight_scale", beside=weight)
    num_groups = scales.shape[1] if len(scales.shape) == 2 else 1
    scales.check(FLOAT_TYPES, (num_rows, num_groups), (num_rows,), (1,), ())
    whole_groups(scales, num_inputs, num_groups)
    return scales, num_groups, group_order(stored.get(f"{base}.weight_g_idx"), num_inputs, num_groups)


def _of_rows(tensor: StoredTensor, rows: slice) -> Values:
    """Return the scales or zero points of some rows, [F, G]."""
    num_rows = rows.stop - rows.start
    if tensor.array.size == 1:
        return np.broadcast_to(tensor.floats().reshape(1, 1), (num_rows, 1))
    return tensor.floats(rows).reshape(num_rows, -1)


def _present(stored: Stored, base: str, *ends: str) -> tuple[str, ...]:
    return tuple(name for end in ends if (name := f"{base}.weight_{end}") in stored)
