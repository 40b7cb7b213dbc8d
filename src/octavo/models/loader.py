"""Load the parameters of a decoder from weight files: the whole model, for one device.

Owns: the reading of each part of a decoder, in the model's dtype and on its device.
Does not: compute, or divide a model among ranks (shard_loader.py does).
Shapes: E hidden size, F output rows, V vocabulary, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from octavo.artifacts.families import FAMILIES, has_bias, layer_linears, layer_norms, linear_shape, linear_tensors
from octavo.artifacts.model_spec import ModelSpec
from octavo.models.native_weights import TABLES
from octavo.nn.coded_linear import CodedEmbedding, CodedLinear, Part, read_parts
from octavo.nn.experts import Expert, Mixture, StackedLinear
from octavo.nn.layers import Embedding, LayerNorm, Linear, NoNorm, RMSNorm, RopeTable, ScaledEmbedding
from octavo.nn.lora import AdaptedLinear, AdapterBank
from octavo.nn.packed_weight import most_frequent_code
from octavo.nn.packing import WantedTensor, WeightRun, recoding_notes
from octavo.nn.weights import Weights
from octavo.ops.gated_mul import activation_of
from octavo.ops.triton import available


class Multiplication(Protocol):
    """A linear layer, or one rank's part of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""

    @property
    def num_weights(self) -> int:
        """Number of weights, each of which costs a multiplication and an addition per token."""

    def __call__(self, x_TE: Tensor, /) -> Tensor:
        """Return a new tensor [T, F]."""


Norm = RMSNorm | LayerNorm | NoNorm
Begin = Callable[[Tensor], Tensor]  # token ids to hidden states
End = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]  # output and residual to (result, their sum)


class Loader:
    """Loads a model from weights. `layers`, `num_heads` and `num_kv_heads` are those of the decoder.

    `path` is that of linear layers of floats (nn.layers.Linear). `coded` says which codes linear layers keep on a
    device (None: they become floats).
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        weights: Weights,
        path: str | None = None,
        coded: WantedTensor | None = None,
    ) -> None:
        self.spec = spec
        self.family = FAMILIES[spec.family]
        self.dtype = dtype
        self.layers = range(spec.num_layers)
        self.num_heads, self.num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.device = device
        self.weights = weights
        self.adapters = AdapterBank()
        self._path, self._coded = path, coded
        self._runs: list[WeightRun] = []  # of what was read with codes, and of floats beside them

    def tables(self) -> tuple[Begin, Multiplication | None]:
        """Read the token embeddings and the head, which is None in a stage that has none."""
        embedding, (vocab_size, size) = self.embedding_name, (self.spec.vocab_size, self.spec.hidden_size)
        wanted = self._coded
        if wanted is not None:
            wanted = replace(wanted, quantization=TABLES.get(wanted.quantization, wanted.quantization))
        (table,) = self._parts({embedding: vocab_size}, size, wanted)
        is_tied = self.spec.tie_word_embeddings
        (head,) = (table,) if is_tied else self._parts({self.head_name: vocab_size}, size, wanted)
        return self._lookup(table), self._linear([head], None)

    def _lookup(self, table: Part) -> Begin:
        """Return the lookup of a table's rows, scaled if the family scales them."""
        if isinstance(table, Tensor):
            return embedding_of(self.spec, table)
        return CodedEmbedding(table, self.dtype, self.spec.stream_scale)

    @property
    def quantization(self) -> str:
        """The code of most values on the device, or "none" if most are floats."""
        return most_frequent_code(run.shape for run in self._runs) if self._runs else "none"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user."""
        recoded = self._coded is not None and self._coded.quantization == "auto"
        return (*self.weights.notes, *(recoding_notes(self.weights, self._runs) if recoded else ()))

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
        """Return the MLP's activation, gated or not."""
        return activation_of(self.spec.activation, self.family.has("gate_proj"))

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor, in the model's dtype unless `dtype` is given."""
        return self.weights.read({name: shape[0]}, *shape[1:], dtype=dtype or self.dtype, device=self.device)

    def norm(self, role: str, layer: int | None = None, size: int | None = None, eps: float | None = None) -> Norm:
        """Read a norm over the hidden size (or `size`) of the residual stream (or with `eps`)."""
        name, size, eps = self.family.tensor(role, layer), size or self.spec.hidden_size, eps or self.spec.stream_eps
        weight, offset = f"{name}.weight", self.family.norm_offset
        weight_E = self.tensor(weight, size, dtype=torch.float32 if offset else None)
        weight_E = weight_E.add_(offset) if offset else weight_E
        if self.family.norm == "rms":
            return RMSNorm(weight_E, eps)
        bias_E = self.tensor(f"{name}.bias", size) if self.family.norm_bias else None
        return LayerNorm(weight_E.to(self.dtype), bias_E, eps)

    def norm_before(self, role: str, layer: int) -> Norm:
        """Read the norm of the residual stream at the beginning of a half of a layer, if the family has one."""
        return self.norm(role, layer) if self.family.has(role) else NoNorm()

    def with_norm(self, linear: Callable[[Tensor], Tensor], role: str, layer: int) -> Callable[[Tensor], Tensor]:
        """Return a linear layer followed by the norm of this role, if the family has one."""
        if not self.family.has(role):
            return linear
        norm = self.norm(role, layer, eps=self.spec.rms_norm_eps)
        return lambda x_TE: norm(linear(x_TE))[0]

    def linear(self, linear: str, layer: int) -> Multiplication:
        """Read the tensors of a linear layer into one weight."""
        return AdaptedLinear(self._linear(*self._rows(linear, layer)), self.adapters, (layer, linear))

    def mlp(self, layer: int) -> tuple[Callable[[Tensor], Tensor], tuple[Multiplication, ...]]:
        """Read the layer's MLP, or its mixture of experts; return it and what it multiplies by."""
        if "router" in layer_linears(self.spec, layer):
            mixture = self._mixture(layer)
            return mixture, (mixture,)
        gate_up, down, activation = self.linear("gate_up", layer), self.linear("down", layer), self.activation()
        return lambda x_TE: down(activation(gate_up(x_TE))), (gate_up, down)

    def _mixture(self, layer: int) -> Mixture:
        spec, mixture = self.spec, self.spec.mixture
        assert mixture is not None, "a layer with experts"
        (weight,), bias = self._rows("router", layer, is_router=True)
        router = self._linear([weight], bias)
        stacked = self._stacked(("expert_gate", "expert_up", "expert_down"), mixture.num_experts, layer)
        shared = None
        if mixture.shared_size:
            roles = ("shared_gate_proj", "shared_up_proj", "shared_down_proj")
            (shared,) = self._experts(self._stacked(roles, 1, layer))
        choice_bias = None
        if mixture.has_choice_bias:
            name = f"{self.family.tensor('choice_bias', layer)}.bias"
            choice_bias = self.tensor(name, mixture.num_experts, dtype=torch.float32)
        experts, activation = self._experts(stacked), activation_of(spec.activation, True)
        has_kernels = available.uses_kernels(torch.empty(0, device=self.device))
        return Mixture(mixture, router, experts, shared, choice_bias, activation, stacked if has_kernels else None)

    def _stacked(self, names: Sequence[str], count: int, layer: int) -> tuple[StackedLinear, StackedLinear]:
        """Read equal experts whose matrices are one tensor for each of the names of gate, up and down."""
        (gate, gate_bias), (up, up_bias), (down, down_bias) = (self._stack(name, count, layer) for name in names)
        gate_up = [gate, up]
        if isinstance(gate, Tensor) and isinstance(up, Tensor):
            pairs = (part.view(count, -1, part.shape[1]) for part in (gate, up))
            gate_up = [torch.cat(list(pairs), 1).flatten(0, 1)]
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias), 1)
        return StackedLinear(count, gate_up, bias), StackedLinear(count, [down], down_bias)

    def _stack(self, name: str, count: int, layer: int) -> tuple[Part, Tensor | None]:
        """Read one role's matrices and biases [X, F] of all experts."""
        (part,), bias = self._rows(name, layer)
        return part, None if bias is None else bias.view(count, -1)

    def _experts(self, stacked: tuple[StackedLinear, StackedLinear]) -> list[Expert]:
        """Return the experts as layers of their own; on a device these are windows of the stacked weights."""
        gate_up, down = ([self._linear(*part.of_expert(one)) for one in range(part.num_experts)] for part in stacked)
        return [Expert(*layers) for layers in zip(gate_up, down, strict=True)]

    def _rows(self, linear: str, layer: int, is_router: bool = False) -> tuple[list[Part], Tensor | None]:
        """Read the tensors of a linear layer into parts, and one bias. A router's are float32."""
        tensors = linear_tensors(self.spec, linear, layer)
        dtype = torch.float32 if is_router else self.dtype
        rows = {f"{name}.weight": count for name, count in tensors.items()}
        parts = self._parts(rows, linear_shape(self.spec, linear)[1], None if is_router else self._coded, dtype)
        if not has_bias(self.spec, linear):
            return parts, None
        biases = {f"{name}.bias": count for name, count in tensors.items()}
        return parts, self.weights.read(biases, dtype=dtype, device=self.device)

    def _parts(
        self, rows: dict[str, int], inputs: int, wanted: WantedTensor | None, dtype: torch.dtype | None = None
    ) -> list[Part]:
        """Read matrices into one tensor, or into parts if some may have codes."""
        if wanted is None:
            return [self.weights.read(rows, inputs, dtype=dtype or self.dtype, device=self.device)]
        parts, runs = read_parts(self.weights, rows, inputs, wanted, (self.dtype, self.device))
        self._runs += runs
        return parts

    def _linear(self, parts: Sequence[Part], bias: Tensor | None) -> Linear | CodedLinear:
        """Return a linear layer of these parts."""
        if len(parts) == 1 and isinstance(parts[0], Tensor):
            return Linear(parts[0], bias, self._path)
        return CodedLinear(parts, bias)

    def qk_norm(self, layer: int) -> RMSNorm | Callable[[Tensor], Tensor]:
        """Read the norms of query and key heads; return the norm of each head, or what norms all, [T, H + K, D]."""
        spec, sizes = self.spec, layer_norms(self.spec)
        q, k = (self.norm(role, layer, sizes[role], spec.rms_norm_eps) for role in ("q_norm", "k_norm"))
        assert isinstance(q, RMSNorm) and isinstance(k, RMSNorm)
        if not self.family.qk_norm_is_wide:
            weight = torch.cat((q.weight_E.expand(self.num_heads, -1), k.weight_E.expand(self.num_kv_heads, -1)))
            return RMSNorm(weight, spec.rms_norm_eps)
        num_heads = self.num_heads

        def wide(qk_THD: Tensor) -> Tensor:
            q_TF, k_TF = qk_THD[:, :num_heads].flatten(1), qk_THD[:, num_heads:].flatten(1)
            return torch.cat((q(q_TF)[0], k(k_TF)[0]), 1).view(qk_THD.shape)

        return wide

    def sinks(self) -> list[Tensor]:
        """Read the attention sinks of every layer; none if the family has none."""
        if not self.family.has("sinks"):
            return []
        names = [f"{self.family.tensor('sinks', layer)}.weight" for layer in self.layers]
        return [self.tensor(name, self.spec.num_heads, dtype=torch.float32) for name in names]

    def ropes(self, max_len: int) -> tuple[RopeTable, ...]:
        """Return the tables of the spec's ropes, of which layers have one each (ModelSpec.rope_index)."""
        return rope_tables(self.spec, max_len, self.dtype, self.device, self._rope_factors())

    def _rope_factors(self) -> Tensor | None:
        """Read the divisors of the inverse frequencies; return None if the files have none."""
        names, size = self.spec.rope_factors_tensors, self.spec.rope_dim // 2
        return self.weights.read(dict.fromkeys(names, size)).view(-1, size) if names else None


def rope_tables(
    spec: ModelSpec, max_len: int, dtype: torch.dtype, device: torch.device, factors_NF: Tensor | None = None
) -> tuple[RopeTable, ...]:
    """Return one rope table for all layers, and a second one for layers with a window if theirs differs."""
    ropes = [RopeTable(spec, max_len, dtype, device, factors_NF)]
    if spec.sliding_rope_theta is not None:
        sliding = replace(spec, rope_theta=spec.sliding_rope_theta, rope_scaling=None)
        ropes.append(RopeTable(sliding, max_len, dtype, device))
    return tuple(ropes)


def embedding_of(spec: ModelSpec, weight_VE: Tensor) -> Embedding:
    """Return the lookup of a table, scaled if the family scales it."""
    return Embedding(weight_VE) if spec.stream_scale == 1.0 else ScaledEmbedding(weight_VE, spec.stream_scale)
