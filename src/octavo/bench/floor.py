"""The memory floor: the least time of a step on a machine of this bandwidth and arithmetic rate.

Owns: the formula max(weight bytes / bandwidth, linear flops / rate) + KV bytes / bandwidth.
Does not: measure the two rates (machine_probe does) or the steps.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second read from memory, and flops a second of a large matrix product in the model's type."""

    bandwidth: float
    flops: float


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The floor of any step of one model on one machine."""

    rates: Rates
    weight_bytes: int
    linear_flops_per_token: int
    kv_bytes_per_token: int

    def seconds(self, num_query_tokens: int, num_kv_read: int) -> float:
        """Return the floor of a step that computes `num_query_tokens` and reads `num_kv_read` cached positions."""
        linear = max(
            self.weight_bytes / self.rates.bandwidth, num_query_tokens * self.linear_flops_per_token / self.rates.flops
        )
        return linear + num_kv_read * self.kv_bytes_per_token / self.rates.bandwidth
