"""A Llama-like decoder over flat ragged tokens.

Owns: the parameters of a model and the order of operations of one step.
Does not: own KV memory, plan, sample, or pad: the tokens of all rows are concatenated, and only the attention
backend knows where rows begin.
Invariants: outside attention, a token's result depends on that token alone. The residual stream has the weights'
dtype, as in transformers; logits are float32.
Shapes: T tokens of the step, N rows that sample, E hidden size, H query heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.artifacts.families import FAMILIES, layer_norms, linear_shape, linear_tensors
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.resolve import ModelFiles
from octavo.nn.layers import Embedding, Linear, RMSNorm, RopeTable, ScaledEmbedding
from octavo.nn.weights import Weights, open_weights
from octavo.ops.attention import AttentionBackend
from octavo.ops.gated_mul import gelu_mul, silu_mul
from octavo.ops.rope import apply_rope

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu": gelu_mul}


def load_model(
    files: ModelFiles,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
) -> Decoder:
    """Read the weights into a new decoder. Raises ModelFileError naming the file, the tensor and the reason."""
    decoder = Decoder(spec, dtype, device, max_model_len)
    with torch.no_grad():
        decoder.load(open_weights(files, spec))
    return decoder


class Decoder:
    """A decoder, which has no weights until `load`. Call it without autograd.

    `max_model_len` can lower the model's context limit, which shrinks the rope table; it cannot raise the limit.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, max_model_len: int | None = None
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.max_model_len = min(spec.max_model_len, max_model_len or spec.max_model_len)
        self._layers: list[_Layer] = []

    def load(self, weights: Weights) -> None:
        """Load every parameter, layer by layer. Raises ModelFileError.

        Besides the parameters, only one layer's unpacked weights exist at a time. A tied head in packed form
        is a copy of the embedding.
        """
        loader = _Loader(self.spec, self.dtype, self.device, weights)
        spec = self.spec
        self._embedding = loader.embedding()
        self._layers = [_Layer(loader, index) for index in range(spec.num_layers)]
        self._norm = loader.norm("final_norm")
        head = f"{loader.family.tensor('head')}.weight"
        self._head = Linear(
            self._embedding.weight_VE
            if spec.tie_word_embeddings
            else loader.tensor(head, spec.vocab_size, spec.hidden_size)
        )
        self._ropes = loader.ropes(self.max_model_len)
        weights.check_all_read(frozenset({head}) if spec.tie_word_embeddings else frozenset())

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend) -> Tensor:
        """Return the hidden states after the final norm, [T, E]. `backend.begin` was called for this step."""
        ropes = [table.lookup(positions_T) for table in self._ropes]
        x_TE = self._embedding(token_ids_T)
        residual_TE: Tensor | None = None
        for layer in self._layers:
            x_TE, residual_TE = layer.forward(x_TE, residual_TE, ropes[layer.rope_index], backend)
        return self._norm(x_TE, residual_TE)[0]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits [N, V] of gathered rows of `forward`'s result; 4 * N * V bytes."""
        return self._head(hidden_NE).to(torch.float32)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: the linear layers and the head, not the embedding's table."""
        return self._head.nbytes + sum(linear.nbytes for layer in self._layers for linear in layer.linears)

    @property
    def linear_flops_per_token(self) -> int:
        """Floating-point operations of one sampled token outside attention."""
        linears = [self._head, *(linear for layer in self._layers for linear in layer.linears)]
        return sum(2 * linear.in_features * linear.out_features for linear in linears)


class _Layer:
    """Attention and feed-forward, each after its norm."""

    __slots__ = ("activation", "down", "gate_up", "head_dim", "index", "linears", "mlp_norm", "norm", "num_heads",
                 "num_rotated", "output", "qk_norm", "qkv", "rope_index", "rotated_size")  # fmt: skip

    def __init__(self, loader: _Loader, index: int) -> None:
        spec = loader.spec
        self.index = index
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads
        self.num_rotated = spec.num_heads + spec.num_kv_heads
        self.rotated_size = self.num_rotated * spec.head_dim
        self.rope_index = int(spec.sliding_rope_theta is not None and spec.window_of(index) is not None)
        self.norm = loader.norm("attention_norm", index)
        self.qkv = loader.linear("qkv", index, has_bias=spec.attention_bias)
        self.qk_norm = loader.qk_norm(index) if spec.qk_norm else None
        output = loader.linear("output", index)
        self.mlp_norm = loader.norm("mlp_norm", index)
        self.gate_up = loader.linear("gate_up", index)
        down = loader.linear("down", index)
        self.activation = _ACTIVATIONS[loader.family.activation]
        self.linears = (self.qkv, output, self.gate_up, down)
        self.output = loader.with_norm(output, "after_attention", index)
        self.down = loader.with_norm(down, "after_mlp", index)

    def forward(
        self, x_TE: Tensor, residual_TE: Tensor | None, rope: tuple[Tensor, Tensor], backend: AttentionBackend
    ) -> tuple[Tensor, Tensor]:
        """Return (this layer's output, the residual stream without that output); the next norm adds the two."""
        x_TE, residual_TE = self.norm(x_TE, residual_TE)
        num_tokens = x_TE.shape[0]
        qkv_TF = self.qkv(x_TE)
        qk_THD = qkv_TF[:, : self.rotated_size].view(num_tokens, self.num_rotated, self.head_dim)
        v_TKD = qkv_TF[:, self.rotated_size :].view(num_tokens, -1, self.head_dim)
        if self.qk_norm is not None:
            qk_THD = self.qk_norm(qk_THD)[0]
        qk_THD = apply_rope(qk_THD, *rope)
        o_THD = backend.attend(self.index, qk_THD[:, : self.num_heads], qk_THD[:, self.num_heads :], v_TKD)
        x_TE = self.output(o_THD.reshape(num_tokens, -1))
        x_TE, residual_TE = self.mlp_norm(x_TE, residual_TE)
        return self.down(self.activation(self.gate_up(x_TE))), residual_TE


class _Loader:
    """Loads a model's layers from weights, in the model's dtype and on its device."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: Weights) -> None:
        self.spec = spec
        self.family = FAMILIES[spec.family]
        self._dtype = dtype
        self._device = device
        self._weights = weights

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Read one tensor, in the model's dtype unless `dtype` is given."""
        self._weights.check_shape(name, shape)
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        self._weights.read_into(name, out)
        return out

    def embedding(self) -> Embedding:
        """Read the table of token embeddings."""
        name = f"{self.family.tensor('embedding')}.weight"
        weight_VE = self.tensor(name, self.spec.vocab_size, self.spec.hidden_size)
        if self.family.scales_embedding:
            return ScaledEmbedding(weight_VE, self.spec.hidden_size**0.5)
        return Embedding(weight_VE)

    def norm(self, role: str, layer: int | None = None) -> RMSNorm:
        """Read a norm over the hidden size."""
        return RMSNorm(self._norm_weight(role, layer, self.spec.hidden_size), self.spec.rms_norm_eps)

    def with_norm(self, linear: Linear, role: str, layer: int) -> Callable[[Tensor], Tensor]:
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

    def linear(self, linear: str, layer: int, has_bias: bool = False) -> Linear:
        """Read the tensors of a linear layer into one weight."""
        tensors = linear_tensors(self.spec, linear, layer)
        num_rows, num_inputs = linear_shape(self.spec, linear)
        for name, count in tensors.items():
            self._weights.check_shape(f"{name}.weight", (count, num_inputs))
        weight = torch.empty(num_rows, num_inputs, dtype=self._dtype, device=self._device)
        bias_F = torch.empty(num_rows, dtype=self._dtype, device=self._device) if has_bias else None
        start = 0
        for name, count in tensors.items():
            self._weights.read_into(f"{name}.weight", weight[start : start + count])
            if bias_F is not None:
                self._weights.read_into(f"{name}.bias", bias_F[start : start + count])
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
        weight = torch.cat((q_D.expand(spec.num_heads, -1), k_D.expand(spec.num_kv_heads, -1)))
        return RMSNorm(weight, spec.rms_norm_eps)

    def ropes(self, max_len: int) -> tuple[RopeTable, ...]:
        """Return one rope table for all layers, and a second one for layers with a window if theirs differs."""
        spec, factors = self.spec, self._rope_factors()
        ropes = [RopeTable(spec, max_len, self._dtype, self._device, factors)]
        if spec.sliding_rope_theta is not None:
            sliding = replace(spec, rope_theta=spec.sliding_rope_theta, rope_scaling=None)
            ropes.append(RopeTable(sliding, max_len, self._dtype, self._device))
        return tuple(ropes)

    def _rope_factors(self) -> Tensor | None:
        """Read the divisors of the inverse frequencies; return None if the files have none."""
        name = self.spec.rope_factors_tensor
        if name is None:
            return None
        self._weights.check_shape(name, (self.spec.head_dim // 2,))
        factors = torch.empty(self.spec.head_dim // 2, dtype=torch.float32)
        self._weights.read_into(name, factors)
        return factors
