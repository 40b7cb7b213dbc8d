"""Load the parameters of a decoder from weight files: the whole model, for one device.

Owns: the reading of each part of a decoder, in the model's dtype and on its device.
Does not: compute, or divide a model among ranks (shard_loader.py does).
Shapes: E hidden size, F output rows, V vocabulary, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from octavo.artifacts.families import FAMILIES, layer_norms, linear_shape, linear_tensors
from octavo.artifacts.model_spec import ModelSpec
from octavo.nn.layers import Embedding, Linear, RMSNorm, RopeTable, ScaledEmbedding
from octavo.nn.weights import Weights
from octavo.ops.gated_mul import gelu_mul, silu_mul

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu": gelu_mul}


class Multiplication(Protocol):
    """A linear layer, or one rank's part of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        ...

    @property
    def num_weights(self) -> int:
        """Number of weights, each of which costs a multiplication and an addition per token."""
        ...

    def __call__(self, x_TE: Tensor, /) -> Tensor:
        """Return a new tensor [T, F]."""
        ...


Begin = Callable[[Tensor], Tensor]  # token ids to hidden states
End = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]  # output and residual to (result, their sum)


class Loader:
    """Loads a model from weights. `layers`, `num_heads` and `num_kv_heads` are those of the decoder."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: Weights) -> None:
        self.spec = spec
        self.family = FAMILIES[spec.family]
        self.dtype = dtype
        self.layers = range(spec.num_layers)
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.device = device
        self.weights = weights

    def tables(self) -> tuple[Begin, Multiplication | None]:
        """Read the token embeddings and the head, which is None in a stage that has none."""
        size = (self.spec.vocab_size, self.spec.hidden_size)
        weight_VE = self.tensor(self.embedding_name, *size)
        is_tied = self.spec.tie_word_embeddings
        return embedding_of(self.spec, weight_VE), Linear(weight_VE if is_tied else self.tensor(self.head_name, *size))

    def end(self) -> End:
        """Read the final norm."""
        return self.norm("final_norm")

    @property
    def embedding_name(self) -> str:
        """Name of the embedding's tensor."""
        return f"{self.family.tensor('embedding')}.weight"

    @property
    def head_name(self) -> str:
        """Name of the head's tensor, which the files of a tied model may have too."""
        return f"{self.family.tensor('head')}.weight"

    def check_all_read(self) -> None:
        """Raise ModelFileError for a tensor that was not read."""
        self.weights.check_all_read(frozenset({self.head_name}) if self.spec.tie_word_embeddings else frozenset())

    def activation(self) -> Callable[[Tensor], Tensor]:
        """Return the MLP's gated activation."""
        return _ACTIVATIONS[self.family.activation]

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor, in the model's dtype unless `dtype` is given."""
        self.weights.check_shape(name, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.weights.read_into(name, out)
        return out

    def norm(self, role: str, layer: int | None = None) -> RMSNorm:
        """Read a norm over the hidden size."""
        return RMSNorm(self._norm_weight(role, layer, self.spec.hidden_size), self.spec.rms_norm_eps)

    def with_norm(self, linear: Callable[[Tensor], Tensor], role: str, layer: int) -> Callable[[Tensor], Tensor]:
        """Return a linear layer followed by the norm of this role, if the family has one."""
        if role not in layer_norms(self.spec):
            return linear
        norm = self.norm(role, layer)
        return lambda x_TE: norm(linear(x_TE))[0]

    def _norm_weight(self, role: str, layer: int | None, size: int) -> Tensor:
        name, offset = f"{self.family.tensor(role, layer)}.weight", self.family.norm_offset
        if not offset:
            return self.tensor(name, size)
        return self.tensor(name, size, dtype=torch.float32).add_(offset)

    def linear(self, linear: str, layer: int, has_bias: bool = False) -> Multiplication:
        """Read the tensors of a linear layer into one weight."""
        tensors = linear_tensors(self.spec, linear, layer)
        num_rows, num_inputs = linear_shape(self.spec, linear)
        for name, count in tensors.items():
            self.weights.check_shape(f"{name}.weight", (count, num_inputs))
        weight = torch.empty(num_rows, num_inputs, dtype=self.dtype, device=self.device)
        bias_F = torch.empty(num_rows, dtype=self.dtype, device=self.device) if has_bias else None
        start = 0
        for name, count in tensors.items():
            self.weights.read_into(f"{name}.weight", weight[start : start + count])
            if bias_F is not None:
                self.weights.read_into(f"{name}.bias", bias_F[start : start + count])
            start += count
        return Linear(weight, bias_F)

    def qk_norm(self, layer: int) -> RMSNorm:
        """Read the norms of query and key heads as one weight, [H + K, D].

        Attention divides scores by the root of D. For a model with another divisor, the query norm is scaled to match.
        """
        spec = self.spec
        q_D = self._norm_weight("q_norm", layer, spec.head_dim)
        k_D = self._norm_weight("k_norm", layer, spec.head_dim)
        if spec.query_scalar is not None:
            q_D = q_D * (spec.head_dim / spec.query_scalar) ** 0.5
        weight = torch.cat((q_D.expand(self.num_heads, -1), k_D.expand(self.num_kv_heads, -1)))
        return RMSNorm(weight, spec.rms_norm_eps)

    def ropes(self, max_len: int) -> tuple[RopeTable, ...]:
        """Return one rope table for all layers, and a second one for layers with a window if theirs differs."""
        spec, factors = self.spec, self._rope_factors()
        ropes = [RopeTable(spec, max_len, self.dtype, self.device, factors)]
        if spec.sliding_rope_theta is not None:
            sliding = replace(spec, rope_theta=spec.sliding_rope_theta, rope_scaling=None)
            ropes.append(RopeTable(sliding, max_len, self.dtype, self.device))
        return tuple(ropes)

    def _rope_factors(self) -> Tensor | None:
        """Read the divisors of the inverse frequencies; return None if the files have none."""
        name = self.spec.rope_factors_tensor
        if name is None:
            return None
        self.weights.check_shape(name, (self.spec.head_dim // 2,))
        factors = torch.empty(self.spec.head_dim // 2, dtype=torch.float32)
        self.weights.read_into(name, factors)
        return factors


def embedding_of(spec: ModelSpec, weight_VE: Tensor) -> Embedding:
    """Return the lookup of a table, scaled if the family scales it."""
    if FAMILIES[spec.family].scales_embedding:
        return ScaledEmbedding(weight_VE, spec.hidden_size**0.5)
    return Embedding(weight_VE)
