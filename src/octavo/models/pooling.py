"""Make one output of a text's states: pooling, dense layers, the scaling to length 1, and the head of a classifier.

Owns: these parts and reading them, in float32; activations that do not depend on the other rows of a batch.
Does not: compute states.
Invariant: a text's output depends on its states alone.
Shapes: T tokens, N texts, E hidden size, F output rows, L labels or vector size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from octavo.artifacts.encoder_spec import EncoderSpec
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.nn.weights import Weights, open_weights

Multiply = Callable[[Tensor], Tensor]
InPlace = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, InPlace] = {
    "": lambda x: x,
    "gelu": torch.ops.aten.gelu_,
    "gelu_new": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "relu": functional.relu_,
    "silu": torch.ops.aten.silu_,
    "tanh": torch.tanh_,
}
# torch computes the last elements of a tensor, or of one thread's part of it, by another formula than whole vectors of
# elements. Calls below its grain size run on one thread, and whole vectors make up rows of this multiple.
_GRAIN, _VECTORS = 32_768, 64


def activate(function: InPlace, x_TF: Tensor) -> Tensor:
    """Apply an activation in place; a row's result does not depend on the other rows."""
    width = x_TF.shape[1]
    if x_TF.device.type != "cpu":
        return function(x_TF)
    for rows in torch.split(x_TF, max(1, _GRAIN // width) if width % _VECTORS == 0 else 1):
        function(rows)
    return x_TF


class Pooling:
    """Makes an encoder's outputs. `dense` layers follow the pooling; `head` gives a classifier's logits."""

    def __init__(self, encoder: EncoderSpec, dense: Sequence[Multiply], head: Multiply | None = None) -> None:
        self._encoder, self._dense, self._head = encoder, tuple(dense), head

    def __call__(self, x_TE: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the output for each row of states: float32, [N, L]."""
        if self._encoder.pooling == "late":
            assert self._head is not None, "only a classifier's head is applied to every token"
            return _pooled(self._head(x_TE.float()), counts, "mean")
        pooled_NE = _pooled(x_TE.float(), counts, self._encoder.pooling)
        for dense in self._dense:
            pooled_NE = dense(pooled_NE)
        if self._head is not None:
            return self._head(pooled_NE)
        return functional.normalize(pooled_NE, dim=1) if self._encoder.normalize else pooled_NE


def _pooled(x_TE: Tensor, counts: Sequence[int], kind: str) -> Tensor:
    """Return one state per row; each row is reduced by itself, so that it does not depend on the others."""
    rows = torch.split(x_TE, list(counts))
    if kind == "cls":
        return torch.stack([row[0] for row in rows])
    if kind == "last":
        return torch.stack([row[-1] for row in rows])
    if kind == "max":
        return torch.stack([row.amax(dim=0) for row in rows])
    assert kind == "mean", kind
    return torch.stack([row.mean(dim=0) for row in rows])


def load_dense(files: ModelFiles, spec: ModelSpec, device: torch.device) -> list[Multiply]:
    """Read the layers after pooling, each from its own folder. They are small, and float32."""
    assert spec.encoder is not None, "an encoder's specification"
    found: list[Multiply] = []
    for layer in spec.encoder.dense:
        folder = files.root / layer.folder
        own = replace(files, root=folder, weights=tuple(sorted(folder.glob("*.safetensors"))))
        if not own.weights:
            raise ModelFileError(folder, "has no .safetensors file with the weights of this layer")
        weights = open_weights(own, spec)
        shape = (layer.outputs, layer.inputs)
        found.append(small_layer(weights, "linear", shape, device, layer.has_bias, layer.activation))
        weights.check_all_read()
    return found


def small_layer(
    weights: Weights, name: str, shape: tuple[int, int], device: torch.device, has_bias: bool, activation: str
) -> Multiply:
    """Read a float32 layer whose rows are multiplied one by one, since torch's sums depend on their number."""
    weight_FE = weights.read({f"{name}.weight": shape[0]}, shape[1], device=device)
    bias_F = weights.read({f"{name}.bias": shape[0]}, device=device) if has_bias else None
    function = ACTIVATIONS[activation]

    def multiply(x_NE: Tensor) -> Tensor:
        return torch.cat([function(functional.linear(row, weight_FE, bias_F)) for row in torch.split(x_NE, 1)])

    return multiply
