"""Find the coded matrices of a checkpoint, and the tensors beside them that need no reading.

Owns: which module reads which method. Does not: know a format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from octavo.artifacts.checkpoint_quantization import CheckpointQuantization, QuantMethod
from octavo.nn.checkpoint_formats import awq, bitsandbytes, compressed, four_bit, fp8, gptq
from octavo.nn.checkpoint_formats.coded import CodedTensor, Stored

_FINDERS: Mapping[QuantMethod, Callable[[Stored, CheckpointQuantization], Iterator[tuple[str, CodedTensor]]]] = {
    QuantMethod.GPTQ: gptq.find,
    QuantMethod.AWQ: awq.find,
    QuantMethod.FP8: fp8.find,
    QuantMethod.COMPRESSED_TENSORS: compressed.find,
    QuantMethod.BITSANDBYTES: bitsandbytes.find,
    QuantMethod.MXFP4: four_bit.find,
}
# Scales of activations and of an 8-bit KV cache, by the ends of their names. They are not used.
_OF_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale", ".input_scale_ub", ".activation_scale",
                   ".output_scale", ".output_zero_point")  # fmt: skip
_OF_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point", ".prob_output_scale")


@dataclass(frozen=True, slots=True)
class FoundMatrices:
    """A checkpoint's coded matrices by the names of the weights that they are; all tensors that are no weights."""

    matrices: Mapping[str, CodedTensor]
    parts: frozenset[str]
    notes: tuple[str, ...]


def find_matrices(stored: Stored, quantization: CheckpointQuantization) -> FoundMatrices:
    """Find the coded matrices. Raises ModelFileError for a part that is missing or of another shape."""
    matrices = dict(_FINDERS[quantization.method](stored, quantization))
    activations = [name for name in stored if name.endswith(_OF_ACTIVATIONS)]
    cache = [name for name in stored if name.endswith(_OF_CACHE)]
    notes = []
    if activations:
        notes.append(f"{len(activations)} scales of activations are not used: activations keep their precision")
    if cache:
        notes.append(f"{len(cache)} scales of an 8-bit KV cache are not used")
    parts = {name for matrix in matrices.values() for name in matrix.parts}
    return FoundMatrices(matrices, frozenset(parts.union(activations, cache)), tuple(notes))
