"""bitsandbytes checkpoints: NF4 and FP4 with block maxima, and int8 with one scale a row.

4 bits: `weight` has two consecutive values of the flattened matrix in a byte, the first in the high half;
`weight.absmax` the largest magnitude of each block; `weight.quant_map` 16 values; `weight.quant_state.*` the shape and
the block size, in JSON. If the maxima are quantised too, `weight.absmax` has bytes, which stand for values of
`weight.nested_quant_map`. NF4 is kept with a table of rounded values; FP4 is quantised again as int8.
8 bits: `weight` int8 [F, E] and `SCB` [F], the largest magnitude of each row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import gcd
from typing import Any

import numpy as np

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization
from octavo.errors import ModelFileError
from octavo.nn.checkpoint_formats.coded import INT8, CodedRows, CodedTensor, Grid, Selected, Stored, part, unpack
from octavo.nn.packed_weight import CODE_VALUES, GROUP, NF4_ONE, WeightKind
from octavo.nn.safetensors_file import FLOAT_TYPES, StoredTensor, Values

_STATE = ".weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 12


def find(stored: Stored, quantization: CheckpointQuantization) -> Iterator[tuple[str, CodedTensor]]:
    """Yield the coded matrices, with the names of the weights that they are."""
    for name, tensor in stored.items():
        base, is_four_bit, _ = name.partition(_STATE)
        if is_four_bit:
            yield f"{base}.weight", _four_bit(stored, base, tensor)
        elif name.endswith(".SCB"):
            base = name.removesuffix(".SCB")
            yield f"{base}.weight", _eight_bit(stored, base, tensor)


def _eight_bit(stored: Stored, base: str, maxima: StoredTensor) -> CodedTensor:
    weight = part(stored, base, ".weight", beside=maxima)
    weight.check(("I8",))
    layout = stored.get(f"{base}.weight_format")
    if layout is not None and layout.array.any():
        raise layout.error("names a layout of another device; save the checkpoint again with a newer bitsandbytes")
    num_rows, num_inputs = weight.matrix_shape
    maxima.check(FLOAT_TYPES, (num_rows,))

    def read(rows: slice) -> CodedRows:
        return Grid(weight.array[rows], maxima.floats(rows)[:, None] / np.float32(127), 0)

    parts = (weight.name, maxima.name, *(() if layout is None else (layout.name,)))
    kind = INT8 if num_inputs % GROUP == 0 else None
    return CodedTensor("bitsandbytes int8", weight.path, (num_rows, num_inputs), parts, read, kind)


def _four_bit(stored: Stored, base: str, state: StoredTensor) -> CodedTensor:
    weight = part(stored, base, ".weight", beside=state)
    weight.check(("U8", "BF16", "F16", "F32"))  # the bytes may be stored as numbers of a model's type
    about = _read_state(state)
    (num_rows, num_inputs), block = about["shape"], about["blocksize"]
    num_values = num_rows * num_inputs
    if weight.array.nbytes * 2 != num_values or num_inputs % 2:
        raise weight.error(
            f"has {weight.array.nbytes} bytes, a matrix of {num_rows} x {num_inputs} needs half its values"
        )
    values = part(stored, base, ".weight.quant_map", beside=state)
    values.check(FLOAT_TYPES, (16,))
    table = values.floats()
    absmax = part(stored, base, ".weight.absmax", beside=state)
    num_blocks = -(-num_values // block)
    absmax.check(("U8", *FLOAT_TYPES), (num_blocks,))
    maxima = _nested(stored, base, absmax, about) if absmax.type == "U8" else absmax.floats
    unit = gcd(block, num_inputs)  # consecutive inputs that lie in one block, in every row
    octets = weight.array.reshape(-1).view(np.uint8).reshape(num_rows, num_inputs // 2)

    def read(rows: slice) -> CodedRows:
        selectors = unpack(octets[rows] >> 4 | octets[rows] << 4, 4)
        first = np.arange(rows.start * num_inputs, rows.stop * num_inputs, unit)  # value of each group
        blocks = slice(first[0] // block, -(-(first[-1] + unit) // block))
        scales = maxima(blocks)[first // block - blocks.start]
        return Selected(selectors, scales.reshape(len(selectors), -1), table, NF4_ONE)

    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    names = [name for end in ends if (name := f"{base}.weight.{end}") in stored]
    is_kept = unit % GROUP == 0 and np.allclose(table * NF4_ONE, CODE_VALUES[WeightKind.NF4], rtol=0, atol=0.51)
    kind = (WeightKind.NF4, GROUP) if is_kept else INT8 if num_inputs % GROUP == 0 else None
    label = f"bitsandbytes {about['quant_type']}"
    parts = (weight.name, state.name, *names)
    return CodedTensor(label, weight.path, (num_rows, num_inputs), parts, read, kind, is_kept)


def _nested(stored: Stored, base: str, absmax: StoredTensor, about: dict[str, Any]) -> Callable[[slice], Values]:
    """Return a function from a range of blocks to their maxima, which are quantised."""
    maxima = part(stored, base, ".weight.nested_absmax", beside=absmax)
    values = part(stored, base, ".weight.nested_quant_map", beside=absmax)
    values.check(FLOAT_TYPES, (256,))
    block, offset = about.get("nested_blocksize", 0), about.get("nested_offset", 0.0)
    if not _is_size(block) or not isinstance(offset, (int, float)):
        raise absmax.error(f"has 8-bit numbers, but its state has nested_blocksize {block!r} and offset {offset!r}")
    maxima.check(FLOAT_TYPES, (-(-absmax.array.size // block),))
    table, scales = values.floats(), maxima.floats()

    def read(blocks: slice) -> Values:
        index = np.arange(blocks.start, blocks.stop) // block
        found: Values = table[absmax.array[blocks]] * scales[index] + np.float32(offset)
        return found

    return read


def _read_state(state: StoredTensor) -> dict[str, Any]:
    """Read and check the JSON in a tensor of bytes."""
    state.check(("U8",))
    if state.array.size > _MAX_STATE_BYTES:
        raise state.error(f"has {state.array.size} bytes; at most {_MAX_STATE_BYTES} are read")
    try:
        about = json.loads(state.array.tobytes())
    except ValueError as error:
        raise state.error(f"is not JSON ({error})") from error
    match about:
        case {"quant_type": "nf4" | "fp4", "blocksize": block, "shape": [rows, inputs]} if (
            _is_size(block) and _is_size(rows) and _is_size(inputs)
        ):
            return dict(about)
    raise _damaged(state, about)


def _damaged(state: StoredTensor, about: object) -> ModelFileError:
    return state.error(f"is {str(about)[:99]}; quant_type nf4 or fp4, blocksize and a shape of two sizes are needed")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1 << 32
