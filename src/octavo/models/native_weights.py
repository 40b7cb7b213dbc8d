"""The weights of a native decoder: packed multiplications, float32 vectors.

Owns: what a layer consists of, and which packed weights stand for its multiplications.
Does not: compute, or know a packed layout. It lies here and not under nn because it reads the families.
Invariants: a multiplication is one or more packed weights over consecutive runs of output rows, in order: more than
one only where its parts have different types. Vectors are contiguous float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.nn.packed_weight import PackedWeight
from octavo.nn.weight_cache import WeightCache

Vector = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer. Norms have the family's offset added, in float32; `q_norm` also has the query scalar.

    `after_attention` and `after_mlp` are norms of what a half of the layer adds, None where the family has none.
    Biases are in the packed weights. The first `PackedWeight.outputs` rows of a fused result are the first weight's.
    """

    qkv: tuple[PackedWeight, ...]
    output: tuple[PackedWeight, ...]
    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    attention_norm: Vector
    mlp_norm: Vector
    after_attention: Vector | None = None
    after_mlp: Vector | None = None
    q_norm: Vector | None = None
    k_norm: Vector | None = None


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """A whole model. A tied head is the embedding's own object. `notes` are for the user: one sentence each."""

    layers: tuple[NativeLayer, ...]
    embedding: PackedWeight
    head: PackedWeight
    final_norm: Vector
    rope_factors: Vector | None
    notes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all packed weights; a tied head counts once."""
        raise NotImplementedError


def load_native_weights(
    files: ModelFiles, spec: ModelSpec, quantization: str, dtype: torch.dtype, cache: WeightCache | None = None
) -> NativeWeights:
    """Pack the model's weights, or map them from `cache` (None: pack, keep in memory). Raises ModelFileError.

    `quantization` is one of nn.quantize.choose_quantization's results; `dtype` is for what stays float.
    """
    raise NotImplementedError
