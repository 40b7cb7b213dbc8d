"""How each layer of a model attends, from its specification.

Owns: the scale, the window and the heads of each layer, and the heads of a rank.
Does not: read tensors: a decoder adds what the weights have, such as sinks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.artifacts.model_spec import ModelSpec
from octavo.ops.attention import LayerAttention


def layer_attention(
    spec: ModelSpec,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    sinks: Sequence[Tensor] = (),
) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer of the model, with a rank's numbers of heads if these are given.

    `sinks` has each layer's sinks, if the family has them. A rank without heads gets one, which it never uses: it has
    the cache groups of the other ranks.
    """
    return tuple(
        LayerAttention(
            num_heads=max(1, spec.num_heads if num_heads is None else num_heads),
            num_kv_heads=max(1, spec.num_kv_heads if num_kv_heads is None else num_kv_heads),
            head_dim=spec.head_dim,
            value_dim=spec.head_dim,
            scale=spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale,
            window=spec.window_of(layer),
            soft_cap=spec.attention_soft_cap,
            sinks_H=sinks[layer] if sinks else None,
        )
        for layer in range(spec.num_layers)
    )
