"""Find out how each layer of a transformers model attends, and which models cannot run on paged keys and values.

Owns: the attention functions that transformers calls; the probe, one short run that records every call of attention
and of linear layers. Does not: load models or compute attention (an AttentionBackend does).
Invariants: a layer's scale, window, caps, sinks and sizes are what the model passes, never what a configuration
says. A layer's window is read from the mask function that transformers would apply, at the length that is served.
Shapes: T tokens, H query heads, K KV heads, D size of keys, V size of values, P positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from octavo.errors import ConfigError
from octavo.ops.attention import AttentionBackend, LayerAttention
from octavo.ops.attention_kernel import PoolLayers

SERVED, PROBED = "octavo", "octavo_probe"  # names of attention implementations
PROBE_TOKENS = 8

_IGNORED = {
    "dropout", "position_ids", "use_cache", "output_attentions", "sliding_window", "is_causal", "cache_position",
    "training", "past_key_values", "deterministic", "layer_idx", "position_embeddings", "target_dtype", "softmax_scale",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "output_router_logits", "return_dict",
    "output_hidden_states", "logits_to_keep",
}  # fmt: skip
_USED = {"scaling", "softcap", "s_aux"}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class UnfitModelError(Exception):
    """The model cannot run on paged keys and values; the text is the reason."""


class CallRecorder(Protocol):
    """What records a model's operations while it runs."""

    def leaf(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call and record it as one operation."""


class _Running(threading.local):
    """The step that this thread runs, and what records it."""

    step: StepAttention | None = None
    recorder: CallRecorder | None = None


class StepAttention(Protocol):
    """What attention does while a model runs."""

    def attend(
        self, module: nn.Module, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Return the attended heads [1, T, H, V] of queries, keys and values [1, heads, T, size]."""


running = _Running()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' AttentionInterface does."""
    assert running.step is not None, "a model of the transformers decoder runs outside of a step"
    return running.step.attend(module, (query, key, value), attention_mask, options), None


def _mask(q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
    """Return a mask that is only an identity: the probe finds the function by it."""
    assert isinstance(running.step, Probe), "masks are made only for a probe"
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool)
    running.step.masks[mask.untyped_storage().data_ptr()] = (mask, mask_function)
    return mask


def register(library: Any) -> None:
    """Register the attention functions in transformers. Raises ConfigError if it is too old."""
    if not hasattr(library, "AttentionMaskInterface"):
        raise ConfigError(f"transformers {library.__version__} has no AttentionMaskInterface; install 5.0 or later")
    for name in (SERVED, PROBED):
        library.AttentionInterface.register(name, _attend)
    library.AttentionMaskInterface.register(PROBED, _mask)


class PagedStep:
    """A step on paged attention: the calls of attention are the model's layers, in order."""

    __slots__ = ("_index", "attend_heads", "layers")

    def __init__(self, backend: AttentionBackend, layers: PoolLayers | None = None) -> None:
        self.attend_heads = backend.attend
        self.layers = layers  # for kernels that attend by themselves
        self._index = 0

    def attend(
        self, module: nn.Module, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Attend in the next layer."""
        index = self._index
        self._index = index + 1
        return self.attend_layer(index, *states)

    def attend_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend in this layer."""
        return self.attend_heads(
            layer, query.squeeze(0).transpose(0, 1), key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
        ).unsqueeze(0)


@dataclass(slots=True)
class LinearCall:
    """One call of a linear layer: `source` is the tensor that it got."""

    module: nn.Module
    source: Tensor


@dataclass
class Probe:
    """Records one run of a model that serves `max_model_len` positions."""

    max_model_len: int
    attention: list[LayerAttention] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, MaskFunction]] = field(default_factory=dict)
    linears: list[LinearCall] = field(default_factory=list)

    def attend(
        self, module: nn.Module, states: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        """Record how a layer attends, and return zeros. Raises UnfitModelError."""
        query, key, value = states
        name = type(module).__name__
        unknown = [
            key
            for key, option in options.items()
            if key not in _IGNORED | _USED and option is not None and option is not False
        ]
        if unknown:
            raise UnfitModelError(f"{name} passes {', '.join(sorted(unknown))} to its attention")
        if key.shape[2] != query.shape[2] or query.shape[0] != 1:
            raise UnfitModelError(f"{name} attends to other positions than the step's tokens")
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_heads % num_kv_heads or value.shape[1] != num_kv_heads:
            raise UnfitModelError(f"{name} has {num_heads} query, {num_kv_heads} key and {value.shape[1]} value heads")
        scale, sinks = options.get("scaling"), options.get("s_aux")
        self.attention.append(
            LayerAttention(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=query.shape[3],
                value_dim=value.shape[3],
                scale=float(query.shape[3] ** -0.5 if scale is None else scale),
                window=self._window(module, mask),
                soft_cap=float(cap) if (cap := options.get("softcap")) else None,
                sinks_H=None if sinks is None else sinks.detach().float().reshape(-1).contiguous(),
            )
        )
        return value.new_zeros((1, query.shape[2], num_heads, value.shape[3]))

    def _window(self, module: nn.Module, mask: Tensor | None) -> int | None:
        name = type(module).__name__
        if mask is None:
            if getattr(module, "is_causal", True) is False:
                raise UnfitModelError(f"{name} is not causal")
            return None
        found = self.masks.get(mask.untyped_storage().data_ptr())
        if found is None:
            raise UnfitModelError(f"{name} changes its attention mask, as with a bias by position")
        return window_of(found[1], self.max_model_len)


def window_of(sees: MaskFunction, max_len: int) -> int | None:
    """Return how many positions a query sees by a mask function, None for all earlier ones. Raises UnfitModelError."""
    where_P, zero = torch.arange(max_len), torch.zeros((), dtype=torch.int64)

    def seen(query: int) -> Tensor:
        return sees(zero, zero, torch.tensor(query), where_P).broadcast_to((max_len,))

    window = int(seen(max_len - 1).sum())
    steps = (2**i + j for i in range(max_len.bit_length()) for j in (-1, 0, 1))
    for query in sorted({min(max_len - 1, step) for step in steps} | {max_len - 1, max_len // 3}):
        expected_P = (where_P <= query) & (where_P > query - window)
        if window < 1 or not torch.equal(seen(query), expected_P):
            raise UnfitModelError(
                f"within {max_len} positions its attention mask is neither causal nor a sliding window"
            )
    return None if window >= max_len else window


def probe(base: nn.Module, linears: Mapping[nn.Module, str], vocab_size: int, max_model_len: int) -> Probe:
    """Run the base model over a few tokens; return what it did. Raises UnfitModelError."""
    recorder = Probe(max_model_len)
    hooks = [
        module.register_forward_pre_hook(lambda module, args: recorder.linears.append(LinearCall(module, args[0])))
        for module in linears
    ]
    device = next(base.parameters()).device
    ids = torch.arange(PROBE_TOKENS, device=device)[None] % vocab_size
    try:
        running.step = recorder
        base(input_ids=ids, position_ids=torch.arange(PROBE_TOKENS, device=device)[None], use_cache=False)
    finally:
        running.step = None
        for hook in hooks:
            hook.remove()
    if not recorder.attention:
        raise UnfitModelError(f"{type(base).__name__} does not attend through AttentionInterface")
    return recorder
