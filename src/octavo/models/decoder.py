"""A Llama-like decoder over flat ragged tokens.

Owns: the parameters of a model and the order of operations of one step.
Does not: own KV memory, plan, sample, or pad: the tokens of all rows are concatenated, and only the attention
backend knows where rows begin.
Invariants: outside attention, a token's result depends on that token alone. The residual stream has the weights'
dtype, as in transformers; logits are float32.
Shapes: T tokens of the step, N rows that sample, E hidden size, H query heads, K KV heads, D head size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.models.layer_attention import layer_attention
from octavo.models.loader import Loader, Multiplication
from octavo.models.step_extras import StepExtras
from octavo.nn.experts import Mixture
from octavo.nn.layers import NoNorm, RMSNorm
from octavo.nn.lora import Adapter
from octavo.ops.attention import AttentionBackend, PlacedAttention
from octavo.ops.rope import Rotation


class Decoder:
    """A decoder, or one rank's part of one; the loader decides which. Call it without autograd.

    `max_model_len` can lower the model's context limit, which shrinks the rope table; it cannot raise the limit.
    """

    @torch.no_grad()
    def __init__(self, loader: Loader, max_model_len: int | None = None) -> None:
        """Load every parameter, layer by layer. Raises ModelFileError.

        Besides the parameters, only one layer's unpacked weights exist at a time. A tied head in packed form
        is a copy of the embedding.
        """
        spec = self.spec = loader.spec
        self.dtype = loader.dtype
        self.max_model_len = min(spec.max_model_len, max_model_len or spec.max_model_len)
        self.attention = layer_attention(spec, loader.num_heads, loader.num_kv_heads, loader.sinks())
        self._begin, self._head = loader.tables()
        self._layers = [_Layer(loader, index) for index in loader.layers]
        self._end = loader.end()
        self._ropes = loader.ropes(self.max_model_len)
        self._adapters, self._device = loader.adapters, loader.device
        loader.check_all_read()
        self.notes = loader.notes

    def put_adapter(self, number: int, adapter: Adapter, dtype: torch.dtype) -> None:
        """Add an adapter, which a step's extras name by its number."""
        self._adapters.put(number, adapter, dtype, self._device)

    def drop_adapter(self, number: int) -> None:
        """Remove an adapter."""
        self._adapters.drop(number)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, backend: AttentionBackend, extras: StepExtras | None = None
    ) -> Tensor:
        """Return the hidden states after the final norm, [T, E]. `backend.begin` was called for this step.

        A pipeline stage gets its input from the previous stage and sends the result, without the norm, to the next.
        """
        self._adapters.begin(None if extras is None else extras.adapters_T, self._device)
        ropes = [table.lookup(positions_T) for table in self._ropes]
        x_TE = self._begin(token_ids_T)
        if extras is not None:
            ropes = self._add_extras(extras, x_TE, ropes)
        residual_TE: Tensor | None = None
        placed = backend if isinstance(backend, PlacedAttention) else None
        for layer in self._layers:
            rope = None if layer.rope_index is None else ropes[layer.rope_index]
            x_TE, residual_TE = layer.forward(x_TE, residual_TE, rope, backend, placed)
        return self._end(x_TE, residual_TE)[0]

    def _add_extras(
        self, extras: StepExtras, x_TE: Tensor, ropes: list[tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Replace the embeddings of media rows in `x_TE`; return the step's ropes."""
        if extras.media_rows_M is not None and extras.media_ME is not None:
            media_ME = extras.media_ME / self.spec.residual_multiplier
            x_TE.index_copy_(0, extras.media_rows_M, media_ME.to(x_TE.dtype))
        if extras.rope_positions_DT is None or self.spec.rope_sections is None:
            return ropes
        sections = self.spec.rope_sections
        return [table.lookup_sections(extras.rope_positions_DT, sections) for table in self._ropes]

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Return float32 logits [N, V] of gathered rows of `forward`'s result; 4 * N * V bytes."""
        assert self._head is not None, "only the last stage has a head"
        logits_NV = self._head(hidden_NE).to(torch.float32)
        if self.spec.logits_scale != 1.0:
            logits_NV *= self.spec.logits_scale
        if (cap := self.spec.logits_soft_cap) is not None:
            logits_NV = (logits_NV / cap).tanh_().mul_(cap)
        return logits_NV

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step of many tokens reads: linear layers and the head, not the embedding's table."""
        return sum(part.nbytes for part in self._multiplications())

    @property
    def linear_flops_per_token(self) -> int:
        """Floating-point operations of one sampled token outside attention; of experts, those that it chooses."""
        return sum(2 * part.num_weights for part in self._multiplications())

    @property
    def idle_expert_bytes(self) -> int:
        """Bytes of experts' weights that a step of one token does not read."""
        return sum(part.idle_bytes for part in self._multiplications() if isinstance(part, Mixture))

    @property
    def waits_for_device(self) -> bool:
        """Return True if a step needs values of the device on the host, so that it cannot be captured."""
        return any(isinstance(part, Mixture) and part.stacked is None for part in self._multiplications())

    def _multiplications(self) -> list[Multiplication]:
        head = [] if self._head is None else [self._head]
        return head + [linear for layer in self._layers for linear in layer.linears]


class _Layer:
    """Attention and feed-forward, each after its norm; both of the layer's input if the family is parallel."""

    __slots__ = ("head_dim", "head_norm", "index", "is_parallel", "linears", "mlp", "mlp_norm", "norm", "num_heads",
                 "num_rotated", "output", "qkv", "rope_index", "rope_is_interleaved", "rotated_size",
                 "wide_norm")  # fmt: skip

    def __init__(self, loader: Loader, index: int) -> None:
        spec = loader.spec
        self.index = index
        self.head_dim = spec.head_dim
        self.num_heads = loader.num_heads
        self.num_rotated = loader.num_heads + loader.num_kv_heads
        self.rotated_size = self.num_rotated * spec.head_dim
        self.rope_index = spec.rope_index(index)
        self.rope_is_interleaved = spec.rope_is_interleaved
        self.is_parallel = loader.family.is_parallel
        self.norm = loader.norm_before("attention_norm", index)
        self.qkv = loader.linear("qkv", index)
        qk_norm = loader.qk_norm(index) if spec.qk_norm else None
        self.head_norm = qk_norm if isinstance(qk_norm, RMSNorm) else None
        self.wide_norm = None if isinstance(qk_norm, RMSNorm) else qk_norm
        output = loader.linear("output", index)
        self.mlp_norm = loader.norm_before("mlp_norm", index)
        mlp, of_mlp = loader.mlp(index)
        self.linears = (self.qkv, output, *of_mlp)
        self.output = loader.with_norm(output, "after_attention", index)
        self.mlp = loader.with_norm(mlp, "after_mlp", index)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        rope: tuple[Tensor, Tensor] | None,
        backend: AttentionBackend,
        placed: PlacedAttention | None,
    ) -> tuple[Tensor, Tensor]:
        """Return (this layer's output, the residual stream without that output); the next norm adds the two."""
        x_TE, residual_TE = self.norm(x_TE, residual_TE)
        added_TE = self.output(self._attend(x_TE, rope, backend, placed))
        if self.is_parallel:
            x_TE = x_TE if isinstance(self.mlp_norm, NoNorm) else self.mlp_norm(residual_TE)[0]
            return added_TE + self.mlp(x_TE), residual_TE
        x_TE, residual_TE = self.mlp_norm(added_TE, residual_TE)
        return self.mlp(x_TE), residual_TE

    def _attend(
        self,
        x_TE: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        backend: AttentionBackend,
        placed: PlacedAttention | None,
    ) -> Tensor:
        """Return the attended heads side by side, [T, H * D]. `placed` is the backend if the rotation can write."""
        num_tokens = x_TE.shape[0]
        if not self.num_heads:  # a rank without heads
            return x_TE.new_empty((num_tokens, 0))
        qkv_TF = self.qkv(x_TE)
        qk_THD = qkv_TF[:, : self.rotated_size].view(num_tokens, self.num_rotated, self.head_dim)
        v_TKD = qkv_TF[:, self.rotated_size :].view(num_tokens, -1, self.head_dim)
        if self.wide_norm is not None:
            qk_THD = self.wide_norm(qk_THD)
        norm = self.head_norm
        rotation = Rotation(None if norm is None else norm.weight_E, 0.0 if norm is None else norm.eps, rope,
                            self.rope_is_interleaved)  # fmt: skip
        place = None if placed is None else placed.place(self.index)
        if placed is not None and place is not None:
            o_THD = placed.attend_placed(self.index, rotation.apply_and_write(qk_THD, v_TKD, place))
            return o_THD.reshape(num_tokens, -1)
        qk_THD = rotation.apply(qk_THD)
        o_THD = backend.attend(self.index, qk_THD[:, : self.num_heads], qk_THD[:, self.num_heads :], v_TKD)
        return o_THD.reshape(num_tokens, -1)
