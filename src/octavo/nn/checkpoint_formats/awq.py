"""AWQ checkpoints in the order of its GEMM kernels.

`qweight` [E, F / 8] and `qzeros` [G, F / 8] have eight consecutive outputs in a word, interleaved; `scales` [G, F].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization
from octavo.nn.checkpoint_formats.coded import (
    CodedRows,
    CodedTensor,
    Grid,
    Stored,
    grid_kind,
    part,
    unpack,
    whole_groups,
)
from octavo.nn.packed_weight import Bytes
from octavo.nn.safetensors_file import FLOAT_TYPES, StoredTensor

_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place of each of eight outputs in a word, from the lowest four bits


def find(stored: Stored, quantization: CheckpointQuantization) -> Iterator[tuple[str, CodedTensor]]:
    """Yield the coded matrices, with the names of the weights that they are."""
    for name, qweight in stored.items():
        base, _, suffix = name.rpartition(".")
        if suffix == "qweight":
            yield f"{base}.weight", _matrix(stored, base, qweight, quantization.label)


def _matrix(stored: Stored, base: str, qweight: StoredTensor, label: str) -> CodedTensor:
    qweight.check(("I32", "U32"))
    num_inputs, num_words = qweight.matrix_shape
    num_rows = num_words * 8
    scales = part(stored, base, ".scales", beside=qweight)
    num_groups = scales.shape[0] if len(scales.shape) == 2 else 0
    scales.check(FLOAT_TYPES, (num_groups, num_rows))
    whole_groups(scales, num_inputs, num_groups)
    qzeros = part(stored, base, ".qzeros", beside=qweight)
    qzeros.check(("I32", "U32"), (num_groups, num_words))

    def read(rows: slice) -> CodedRows:
        codes, zeros = _outputs(qweight.array, rows), _outputs(qzeros.array, rows)
        return Grid(codes, scales.floats(slice(None), rows).T, zeros)

    parts = tuple(f"{base}.{end}" for end in ("qweight", "qzeros", "scales"))
    kind, is_kept = grid_kind(4, num_inputs, num_groups, has_zeros=True)
    return CodedTensor(label, qweight.path, (num_rows, num_inputs), parts, read, kind, is_kept)


def _outputs(words: npt.NDArray[np.generic], rows: slice) -> Bytes:
    """Return the codes of some outputs, [F, E or G]."""
    first, end = rows.start // 8, -(-rows.stop // 8)
    codes = unpack(words[:, first:end], 4).reshape(len(words), -1, 8)[..., _ORDER].reshape(len(words), -1)
    return np.ascontiguousarray(codes[:, rows.start - first * 8 : rows.stop - first * 8].T)
