"""CostModel (predicts step times), StepShape (the part of a plan that a cost model may read) and ScaledCosts.

Owns: the protocol, and the conversion of a plan to its shape. Does not: know any device or model (costs does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.errors import ConfigError

DecodeSeconds = Callable[[int, int, int], float]


@dataclass(slots=True)
class StepShape:
    """The work of a step: tokens to compute, KV positions to read, blocks to move.

    `decode_kv` has, for each one-token row, the number of positions that the row attends to, its own included.
    `prefills` has (tokens, positions before them) for each other row, including rows with drafts. `num_samples` rows
    sample a token. The last three fields count the blocks copied on the device, swapped out and loaded.
    """

    decode_kv: list[int]
    prefills: list[tuple[int, int]]
    num_samples: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    loaded_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the tokens that the model computes."""
        return len(self.decode_kv) + sum(count for count, _ in self.prefills)


class CostModel(Protocol):
    """Predicts step times. Deterministic: equal shapes have equal times.

    `decode_s(num_rows, kv_sum, kv_max)` returns, in constant time, step_s of a plan with decode rows only. It is None
    if the time depends on more than these three numbers.
    """

    name: str
    decode_s: DecodeSeconds | None

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds from a step's begin on the device to the step's end."""
        ...

    def host_s(self, shape: StepShape) -> float:
        """Return the seconds of scheduling and delivery. With a depth of 2, the device computes at the same time."""
        ...


def shape_of(plan: StepPlan) -> StepShape:
    """Return a plan's shape."""
    starts, counts = plan.starts, plan.counts
    decode_kv = [start + 1 for start, count in zip(starts, counts, strict=True) if count == 1]
    prefills = [(count, start) for start, count in zip(starts, counts, strict=True) if count > 1]
    return StepShape(
        decode_kv,
        prefills,
        sum(map(ROW_SAMPLE.__and__, plan.flags)),  # the flag is 1, so the sum counts the rows
        len(plan.copies) // 3,
        len(plan.swap_outs) // 3,
        len(plan.host_loads) // 3,
    )


class ScaledCosts:
    """A CostModel whose device times are another model's times `factor`; host times are the other model's."""

    def __init__(self, costs: CostModel, factor: float) -> None:
        if not 0 < factor < 1e6:
            raise ConfigError(f"cost factor is {factor}; give a number above 0, such as 1.05")
        self.name = f"{costs.name}*{factor:g}"
        self.host_s = costs.host_s
        self._costs = costs
        self._factor = factor
        self.decode_s: DecodeSeconds | None = self._decode_s if costs.decode_s is not None else None

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        return max(0.0, self._costs.step_s(shape) * self._factor)

    def _decode_s(self, num_rows: int, kv_sum: int, kv_max: int) -> float:
        assert self._costs.decode_s is not None
        return max(0.0, self._costs.decode_s(num_rows, kv_sum, kv_max) * self._factor)
