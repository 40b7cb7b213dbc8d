"""The number of KV blocks that fit beside a model's weights.

Owns: that arithmetic, from facts. Does not: measure a device (executors do when they open).
"""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.simulator.costs.devices import DeviceFacts
from octavo.simulator.costs.models import ModelFacts

ACTIVATION_TOKENS_BYTES = 24  # times hidden size, per token of the largest step: hidden, projections and logits' parts
FIXED_BYTES = 1.0e9  # of contexts, graphs and libraries, per device


def pool_blocks(
    model: ModelFacts,
    device: DeviceFacts,
    tp: int = 1,
    *,
    block_size: int = 16,
    max_batch_tokens: int = 2048,
    memory_share: float = 0.9,
) -> int:
    """Return how many blocks of `block_size` tokens fit in `memory_share` of `tp` devices' memory beside the weights.

    Raises ConfigError with the numbers if fewer than 16 fit.
    """
    given = device.memory_bytes * memory_share * tp
    fixed = 0.0 if device.is_measured else FIXED_BYTES * tp
    activations = ACTIVATION_TOKENS_BYTES * model.hidden_size * max_batch_tokens
    left = given - model.weight_bytes - fixed - activations
    copies = max(1, tp // model.num_kv_heads)
    count = int(left // (model.kv_bytes_per_token * copies * block_size)) if left > 0 else 0
    if count < 16:
        raise ConfigError(
            f"{model.name} has {model.weight_bytes / 1e9:.1f} GB of weights; {tp} x {device.name} give "
            f"{given / 1e9:.1f} GB, which leaves {count} KV blocks: take more or larger devices, or a narrower dtype"
        )
    return count
