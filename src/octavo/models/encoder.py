"""A BERT-like encoder over flat ragged tokens: every token of a row sees the whole row.

Owns: the parameters, and the order of operations of one step; a decoder that is used as an encoder.
Does not: plan, tokenize, pool, or keep keys and values. Families are data (artifacts/encoder_families.py).
Invariants: outside attention a token's result depends on that token alone, and a text's result on that text alone. On
a CPU with the C++ kernels, linear layers have packed weights and activations are float32.
Shapes: T tokens of the step, N rows (texts), E hidden size, F output rows, H query heads, K KV heads, D head size,
L labels or vector size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from octavo.artifacts.encoder_families import ENCODER_FAMILIES, LINEARS, Positions
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.models.decoder import Decoder
from octavo.models.layer_attention import layer_attention
from octavo.models.loader import Loader, rope_tables
from octavo.models.pooling import ACTIVATIONS, Multiply, Pooling, activate, load_dense, small_layer
from octavo.models.shard_loader import ShardLoader
from octavo.nn.layers import Linear, RMSNorm, RopeTable
from octavo.nn.packed_weight import PackedWeight, most_frequent_code
from octavo.nn.packing import WantedTensor, pack_matrices
from octavo.nn.parallel import Parallel
from octavo.nn.segments import PackedLinear
from octavo.nn.weights import open_weights
from octavo.ops.attention_rows import RowAttention


def rotate(x_THD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Return the rotated heads, by products and a sum that are each rounded: in no order can a bit differ."""
    cos_T1D, signed_sin_T1D = rope
    out_THD = x_THD * cos_T1D
    return out_THD.add_(x_THD.roll(x_THD.shape[-1] // 2, -1).mul_(signed_sin_T1D))


class _Pooled(ABC):
    """The step of both kinds of encoder: states of every token, then one output for each text."""

    _attention: RowAttention
    _device: torch.device
    _pooling: Pooling

    @torch.inference_mode()
    def run(self, texts: Sequence[np.ndarray[tuple[int], np.dtype[np.int32]]]) -> Tensor:
        """Return the vector, or the logits, of each text's token ids: float32, [N, L]."""
        counts = [len(text) for text in texts]
        ids_T = torch.from_numpy(np.concatenate(texts)).long().to(self._device)
        positions_T = torch.cat([torch.arange(count, device=self._device) for count in counts])
        self._attention.begin_rows(counts)
        return self._pooling(self._states(ids_T, positions_T, counts), counts)

    @abstractmethod
    def _states(self, ids_T: Tensor, positions_T: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the last layer's states, [T, E]."""


class Encoder(_Pooled):
    """An encoder with its pooling and head. Call it without autograd.

    `max_model_len` can lower the model's limit. `wanted` says how linear layers are packed for the C++ kernels; None
    means torch, in `dtype`.
    """

    @torch.no_grad()
    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        wanted: WantedTensor | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Load every parameter. Raises ModelFileError."""
        assert spec.encoder is not None, "an encoder's specification"
        self.spec, self.encoder = spec, spec.encoder
        self.max_model_len = min(spec.max_model_len, max_model_len or spec.max_model_len)
        loader = _EncoderLoader(files, spec, dtype, device, wanted)
        family = loader.family
        self._device = device
        self._tables = loader.tables(self.max_model_len)
        self._embedding_norm = loader.norm("embedding_norm", self.encoder.embedding_size)
        has_projection = self.encoder.embedding_size != spec.hidden_size
        size = self.encoder.embedding_size
        self._projection = loader.linear("projection", spec.hidden_size, size, True) if has_projection else None
        self._layers = [_EncoderLayer(loader, index) for index in range(spec.num_layers)]
        self._final_norm = loader.norm("final_norm", spec.hidden_size)
        self._ropes = loader.ropes(self.max_model_len) if family.positions is Positions.ROTARY else ()
        head = loader.head() if self.encoder.is_classifier else None
        self._pooling = Pooling(self.encoder, load_dense(files, spec, device), head)
        bias_BH = loader.table("position_bias", self.encoder.num_position_buckets, spec.num_heads)
        self._attention = RowAttention(layer_attention(spec), bias_BH)
        loader.check_all_read()
        self.quantization = most_frequent_code(loader.made) if loader.made else "none"
        self.weight_bytes = loader.nbytes
        self.linear_flops_per_token = 2 * loader.num_weights

    def _states(self, ids_T: Tensor, positions_T: Tensor, counts: Sequence[int]) -> Tensor:
        x_TE = self._embed(ids_T, positions_T, counts)
        ropes = [table.lookup(positions_T) for table in self._ropes]
        for layer in self._layers:
            x_TE = layer.forward(x_TE, ropes[layer.rope_index] if ropes else None, self._attention)
        return x_TE if self._final_norm is None else self._final_norm(x_TE)

    def _embed(self, ids_T: Tensor, positions_T: Tensor, counts: Sequence[int]) -> Tensor:
        x_TE = functional.embedding(ids_T, self._tables["embedding"])
        if (types := self._tables.get("token_types")) is not None:
            x_TE = x_TE + (types[0] if self.encoder.separator_id is None else types[self._types(ids_T, counts)])
        if (positions := self._tables.get("positions")) is not None:
            x_TE = x_TE + positions[positions_T]
        x_TE = x_TE if self._embedding_norm is None else self._embedding_norm(x_TE)
        return x_TE if self._projection is None else self._projection(x_TE)

    def _types(self, ids_T: Tensor, counts: Sequence[int]) -> Tensor:
        """Return each token's type: 0 up to its row's first separator, 1 after it."""
        is_end_T = ids_T.eq(self.encoder.separator_id or 0).long()
        parts = [part.cumsum(0) - part for part in torch.split(is_end_T, list(counts))]
        return torch.cat(parts).clamp(max=1)


class PoolingDecoder(_Pooled):
    """A decoder's layers with an encoder's pooling: EmbeddingGemma, whose tokens see their whole text, and classifiers.

    With `wanted` it is one rank with the arithmetic of several (see ShardLoader), whose rows do not depend on others.
    """

    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        wanted: WantedTensor | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Load every parameter. Raises ModelFileError."""
        assert spec.encoder is not None, "an encoder's specification"
        weights = open_weights(files, spec)
        shape = len(spec.encoder.labels), spec.hidden_size
        head = small_layer(weights, "score", shape, device, False, "") if spec.encoder.is_classifier else None
        if wanted is None:
            self._decoder = Decoder(Loader(spec, dtype, device, weights), max_model_len)
            self.quantization = "none"
        else:
            loader = ShardLoader(spec, (dtype, device), weights, Parallel(), wanted)
            self._decoder = Decoder(loader, max_model_len)
            self.quantization = loader.quantization
        self.max_model_len = self._decoder.max_model_len
        self.weight_bytes = self._decoder.weight_bytes
        self.linear_flops_per_token = self._decoder.linear_flops_per_token
        self._device = device
        self._attention = RowAttention(layer_attention(spec), is_causal=spec.encoder.is_causal)
        self._pooling = Pooling(spec.encoder, load_dense(files, spec, device), head)

    def _states(self, ids_T: Tensor, positions_T: Tensor, counts: Sequence[int]) -> Tensor:
        return self._decoder.forward(ids_T, positions_T, self._attention)


class _EncoderLayer:
    """Attention and feed-forward, each before its norm (BERT) or after it (ModernBERT)."""

    __slots__ = ("activation", "attention_norm", "down", "head_dim", "index", "is_gated", "is_pre_norm", "is_swapped",
                 "mlp_norm", "num_heads", "num_kv_heads", "output", "qkv", "rope_index", "up")  # fmt: skip

    def __init__(self, loader: _EncoderLoader, index: int) -> None:
        spec, family = loader.spec, loader.family
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.index = index
        self.head_dim, self.num_heads, self.num_kv_heads = spec.head_dim, spec.num_heads, spec.num_kv_heads
        self.rope_index = spec.rope_index(index) or 0
        self.is_gated, self.is_pre_norm, self.is_swapped = family.is_gated, family.is_pre_norm, loader.is_swapped
        q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sizes = {
            "qkv": (q_rows + 2 * kv_rows, hidden),
            "output": (hidden, q_rows),
            "up": (inner * (1 + family.is_gated), hidden),
            "down": (hidden, inner),
        }
        biased = loader.encoder.biased
        self.qkv, self.output, self.up, self.down = (
            loader.linear(role, *sizes[role], role in biased, index, (q_rows, kv_rows, kv_rows)) for role in LINEARS
        )
        self.attention_norm = loader.norm("attention_norm", hidden, index)
        self.mlp_norm = loader.norm("mlp_norm", hidden, index)
        self.activation = ACTIVATIONS[loader.encoder.activation]

    def forward(self, x_TE: Tensor, rope: tuple[Tensor, Tensor] | None, attention: RowAttention) -> Tensor:
        """Return this layer's states, [T, E]."""
        if self.is_pre_norm:
            x_TE = x_TE + self._attend(self._normed(self.attention_norm, x_TE), rope, attention)
            return x_TE + self._mlp(self._normed(self.mlp_norm, x_TE))
        x_TE = self._normed(self.attention_norm, self._attend(x_TE, rope, attention) + x_TE)
        return self._normed(self.mlp_norm, self._mlp(x_TE) + x_TE)

    @staticmethod
    def _normed(norm: Multiply | None, x_TE: Tensor) -> Tensor:
        return x_TE if norm is None else norm(x_TE)

    def _attend(self, x_TE: Tensor, rope: tuple[Tensor, Tensor] | None, attention: RowAttention) -> Tensor:
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv_THD = self.qkv(x_TE).view(x_TE.shape[0], sum(heads), self.head_dim)
        q_THD, k_TKD, v_TKD = torch.split(qkv_THD, heads, dim=1)
        if rope is not None:
            q_THD, k_TKD = rotate(q_THD, rope), rotate(k_TKD, rope)
        return self.output(attention.attend(self.index, q_THD, k_TKD, v_TKD).flatten(1))

    def _mlp(self, x_TE: Tensor) -> Tensor:
        up_TF = self.up(x_TE)
        if self.is_gated:
            gate_TI, value_TI = up_TF.chunk(2, dim=1)
            if self.is_swapped:
                gate_TI, value_TI = value_TI, gate_TI
            gate_TI = activate(self.activation, gate_TI.contiguous())
            return self.down(gate_TI.mul_(value_TI))
        return self.down(activate(self.activation, up_TF))


class _EncoderLoader:
    """Reads the parts of an encoder, by role. `made` are the packed weights; `num_weights` counts linear layers'."""

    def __init__(
        self,
        files: ModelFiles,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        wanted: WantedTensor | None,
    ) -> None:
        assert spec.encoder is not None, "an encoder's specification"
        self.spec, self.encoder, self.family = spec, spec.encoder, ENCODER_FAMILIES[spec.family]
        self._files, self._device, self._wanted = files, device, wanted
        self._dtype = dtype if wanted is None else torch.float32
        self.weights = open_weights(files, spec)
        self._layout = self._find_layout()
        self.is_swapped = self._layout in self.family.swapped_layouts
        self.made: list[PackedWeight] = []
        self.num_weights = self.nbytes = 0

    def _find_layout(self) -> int:
        """Return the layout whose names the files have; of none, the first, whose tensors are then missing."""
        for layout in range(len(self.family.layouts)):
            (embedding,), (layer,) = self.family.names(layout, "embedding"), self.family.names(layout, "layer")
            first = layer.format(0) + self.family.names(layout, "qkv")[0]
            if all(f"{self._full(name)}.weight" in self.weights for name in (embedding, first)):
                return layout
        return 0

    def _full(self, name: str) -> str:
        """Return the name with the prefix of a model with a head, if the files have it."""
        full = self.family.prefix + name
        return full if any(f"{full}.{kind}" in self.weights for kind in ("weight", "gamma")) else name

    def _names(self, role: str, layer: int | None = None) -> list[str]:
        names = self.family.names(self._layout, role)
        if layer is not None:
            (prefix,) = self.family.names(self._layout, "layer")
            names = tuple(prefix.format(layer) + name for name in names)
        return [self._full(name) for name in names]

    def _tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.weights.read({name: shape[0]}, *shape[1:], dtype=dtype or self._dtype, device=self._device)

    def tables(self, max_len: int) -> dict[str, Tensor]:
        """Read the tables that are looked up: of tokens, token types and positions."""
        encoder, size = self.encoder, self.encoder.embedding_size
        tables = {"embedding": self._tensor(f"{self._names('embedding')[0]}.weight", self.spec.vocab_size, size)}
        if encoder.num_token_types:
            name = f"{self._names('token_types')[0]}.weight"
            tables["token_types"] = self._tensor(name, encoder.num_token_types, size)
        if self.family.positions is not Positions.ROTARY:
            name = f"{self._names('positions')[0]}.weight"
            shape = self.weights.shape(name)
            needed = encoder.first_position + max_len
            if len(shape) != 2 or shape[0] < needed:
                raise ModelFileError(self._files.weights[0], f"has shape {list(shape)}; {needed} rows are needed", name)
            tables["positions"] = self._tensor(name, shape[0], size)[encoder.first_position :]
        return tables

    def table(self, role: str, *shape: int) -> Tensor | None:
        """Read a table in float32; None if the family has none of this role."""
        names = self._names(role)
        return self._tensor(f"{names[0]}.weight", *shape, dtype=torch.float32) if names else None

    def norm(self, role: str, size: int, layer: int | None = None) -> Multiply | None:
        """Read a norm; None if the family has none of this role, or the layer has none (ModernBERT's first)."""
        names = self._names(role, layer)
        if not names or (layer == 0 and role == "attention_norm" and self._is_absent(names[0])):
            return None
        name, eps = names[0], self.spec.rms_norm_eps
        old = f"{name}.gamma" in self.weights  # as in the first files of BERT
        dtype = torch.float32 if role.startswith("head") else None
        weight_E = self._tensor(f"{name}.{'gamma' if old else 'weight'}", size, dtype=dtype)
        if self.family.rms_norm:
            rms = RMSNorm(weight_E, eps)
            return lambda x_TE: rms(x_TE)[0]
        bias_E = (
            self._tensor(f"{name}.{'beta' if old else 'bias'}", size, dtype=dtype) if self.encoder.norm_bias else None
        )
        return lambda x_TE: functional.layer_norm(x_TE, (size,), weight_E, bias_E, eps)

    def _is_absent(self, name: str) -> bool:
        return self.family.is_pre_norm and self.family.has_windows and f"{name}.weight" not in self.weights

    def linear(
        self,
        role: str,
        num_rows: int,
        inputs: int,
        has_bias: bool,
        layer: int | None = None,
        parts: Sequence[int] = (),
    ) -> Multiply:
        """Read the tensors of a linear layer into one weight; of several tensors, `parts` or equal parts."""
        names = self._names(role, layer)
        count = len(names)
        sizes = list(parts) if count == len(parts) else [num_rows // count] * count
        weights, biases = (
            {f"{name}.{kind}": size for name, size in zip(names, sizes, strict=True)} for kind in ("weight", "bias")
        )
        read = partial(self.weights.read, dtype=self._dtype, device=self._device)
        bias_F = read(biases) if has_bias else None
        self.num_weights += num_rows * inputs
        if self._wanted is None:
            linear = Linear(read(weights, inputs), bias_F)
            self.nbytes += linear.nbytes
            return linear
        packed = pack_matrices(self.weights, weights, inputs, self._wanted, bias_F)
        self.made += packed
        self.nbytes += sum(weight.nbytes for weight in packed)
        return PackedLinear(packed)

    def ropes(self, max_len: int) -> tuple[RopeTable, ...]:
        """Return the rope of layers that see all, and a second one for layers with a window if theirs differs."""
        return rope_tables(self.spec, max_len, self._dtype, self._device)

    def head(self) -> Multiply:
        """Read a classifier's head: a dense layer with its activation, maybe a norm, and the logits. Float32."""
        encoder, hidden = self.encoder, self.spec.hidden_size
        (dense,), (out,) = self._names("head_dense"), self._names("head")
        first = small_layer(
            self.weights, dense, (hidden, hidden), self._device, encoder.head_bias, encoder.head_activation
        )
        last = small_layer(self.weights, out, (len(encoder.labels), hidden), self._device, True, "")
        norm = self.norm("head_norm", hidden)
        return lambda x_NE: last(first(x_NE) if norm is None else norm(first(x_NE)))

    def check_all_read(self) -> None:
        """Raise ModelFileError for a tensor that was not read and belongs to no other head."""
        starts = tuple(start for name in self.family.ignored for start in (name, self.family.prefix + name))
        ignored = {name for name in self.weights.names if name.startswith(starts)}
        self.weights.check_all_read(frozenset(ignored))
