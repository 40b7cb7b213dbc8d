"""Weights in 8-bit floats with scales: FP8 checkpoints of several tools, and compressed-tensors' float formats.

`weight` [F, E] has the numbers. Its scales are one number, one a row, or one a block of rows and columns; a value is
the number times its scale, also where the scales are named `weight_scale_inv`. No kernel reads 8-bit floats: values
are quantised again as int8 with a scale per 32 inputs, which has half the memory of bfloat16. On normal weights this
adds less than a tenth of the error that the 8-bit floats made (tests/nn/test_checkpoint_formats.py).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization
from octavo.nn.checkpoint_formats.coded import INT8, CodedRows, CodedTensor, Floats, Stored
from octavo.nn.packed_weight import GROUP
from octavo.nn.safetensors_file import FLOAT_TYPES, StoredTensor, Values

TYPES = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale", "weight_scale_inv")
_BLOCKS = (128, 64, 32, 256)  # at most one of them fits a matrix that has more than one block


def find(stored: Stored, quantization: CheckpointQuantization) -> Iterator[tuple[str, CodedTensor]]:
    """Yield the coded matrices, with the names of the weights that they are."""
    for name, weight in stored.items():
        if weight.type in TYPES and name.endswith(".weight"):
            yield name, float_matrix(stored, name.removesuffix(".weight"), weight)


def float_matrix(stored: Stored, base: str, weight: StoredTensor) -> CodedTensor:
    """Return the matrix of a `weight` of 8-bit floats. Raises ModelFileError."""
    names = [f"{base}.{end}" for end in _SCALES if f"{base}.{end}" in stored]
    if not names:
        raise weight.error(f"has type {weight.type}, but there is no tensor {base}.{' or '.join(_SCALES)}")
    scale = stored[names[0]]
    num_rows, num_inputs = weight.matrix_shape
    block = _block(weight, scale)

    def read(rows: slice) -> CodedRows:
        return Floats(weight.floats(rows) * _scales(scale, rows, block, num_inputs))

    kind = INT8 if num_inputs % GROUP == 0 else None
    label = f"FP8 ({weight.type[3:]})"
    return CodedTensor(label, weight.path, (num_rows, num_inputs), (weight.name, *names), read, kind, is_kept=False)


def _block(weight: StoredTensor, scale: StoredTensor) -> tuple[int, int] | None:
    """Return the rows and columns of a block that shares a scale; None for one scale, or one a row."""
    scale.check((*FLOAT_TYPES, "F8_E8M0"))
    num_rows, num_inputs = weight.shape
    if scale.shape in ((), (1,), (num_rows,), (num_rows, 1), (1, 1)):
        return None
    for size in _BLOCKS:
        if scale.shape == (-(-num_rows // size), -(-num_inputs // size)):
            return size, size
    if len(scale.shape) == 2 and scale.shape[0] == num_rows and num_inputs % scale.shape[1] == 0:
        return 1, num_inputs // scale.shape[1]
    raise scale.error(
        f"has shape {list(scale.shape)}; a matrix of {num_rows} x {num_inputs} needs one scale, one a row, or one a "
        f"block of {_BLOCKS[0]} x {_BLOCKS[0]}"
    )


def _scales(scale: StoredTensor, rows: slice, block: tuple[int, int] | None, num_inputs: int) -> Values:
    """Return the scales of some rows, in a shape that multiplies them."""
    if block is not None:
        height, width = block
        first, end = rows.start // height, -(-rows.stop // height)
        blocks = np.repeat(np.repeat(scale.floats(slice(first, end)), width, axis=1), height, axis=0)
        return blocks[rows.start - first * height : rows.stop - first * height, :num_inputs]
    if scale.array.size == 1:
        return scale.floats().reshape(1, 1)
    return scale.floats(rows).reshape(-1, 1)
