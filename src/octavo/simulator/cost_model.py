"""CostModel (predicts step times), StepShape (what it may read of a plan), StepParts, TimeFloor, ScaledCosts.

Owns: the base of all cost models, and the conversion of a plan to its shape. Does not: know any device or model
(costs does).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.errors import ConfigError

DecodeSeconds = Callable[[int, int], float]


@dataclass(slots=True)
class StepShape:
    """The work of a step: tokens to compute, KV positions to read, blocks to move.

    `decode_kv` has, for each one-token row, the number of positions that the row attends to, its own included.
    `prefills` has (tokens, positions before them) for each other row, including rows with drafts. `num_samples` rows
    sample a token. The next three fields count the blocks copied on the device, swapped out and loaded. `peer_tokens`
    has the tokens of each other rank of a data-parallel group in the same step (see lockstep).
    """

    decode_kv: list[int]
    prefills: list[tuple[int, int]]
    num_samples: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    loaded_blocks: int = 0
    peer_tokens: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Return the tokens that the model computes."""
        return len(self.decode_kv) + sum([count for count, _ in self.prefills])


class StepParts(NamedTuple):
    """A step's device time by what bounds it: `seconds` has the same names for every step, and adds up to step_s.

    `compute_s`: seconds that the step's FLOP alone take, at the rate that kernels reach; None if unknown.
    """

    seconds: Mapping[str, float]
    compute_s: float | None = None


class TimeFloor(NamedTuple):
    """Seconds that every step with a token takes at least: `fixed_s`, and more for what the step computes.

    `token_s` is for each token, `kv_s` for each position that a one-token row attends to, and `pair_s` for each pair of
    positions of longer rows.
    """

    fixed_s: float
    token_s: float
    kv_s: float = 0.0
    pair_s: float = 0.0


class CostModel(ABC):
    """Predicts step times. Deterministic: equal shapes have equal times.

    `decode_s(num_rows, kv_sum)` returns, in constant time, step_s of a plan with decode rows only. It is None if the
    time depends on more than these two numbers.
    """

    name: str
    decode_s: DecodeSeconds | None = None

    @abstractmethod
    def step_s(self, shape: StepShape) -> float:
        """Return the seconds from a step's begin on the device to the step's end."""

    @abstractmethod
    def host_s(self, shape: StepShape) -> float:
        """Return the seconds of scheduling and delivery. With a depth of 2, the device computes at the same time."""

    def parts(self, shape: StepShape) -> StepParts:
        """Return the parts of step_s; a single one, `device`, if they are not known. May be slower than step_s."""
        return StepParts({"device": self.step_s(shape)})

    def floors(self, max_tokens: int) -> tuple[TimeFloor, ...]:
        """Return floors, each of which holds for every step of at most `max_tokens` tokens; none if none is known."""
        return ()


def token_floors(seconds_of: Callable[[int], float], max_tokens: int) -> tuple[TimeFloor, TimeFloor]:
    """Return two floors of steps whose n tokens take at least `seconds_of(n)` seconds, which are 0 or more.

    One has the time of the smallest step, the other none: they bound small steps and large steps.
    """
    seconds = [seconds_of(count) for count in range(1, max_tokens + 1)]
    first = min(seconds)
    slope = min(((time_s - first) / count for count, time_s in enumerate(seconds[1:], 1)), default=0.0)
    slope = min(slope, first)
    per_token = min(time_s / count for count, time_s in enumerate(seconds, 1))
    return TimeFloor(first - slope, slope), TimeFloor(0.0, per_token)


def shape_of(plan: StepPlan, peer_tokens: tuple[int, ...] = ()) -> StepShape:
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
        peer_tokens,
    )


class ScaledCosts(CostModel):
    """A CostModel whose device times are another model's times `factor`; host times are the other model's."""

    def __init__(self, costs: CostModel, factor: float) -> None:
        if not 0 < factor < 1e6:
            raise ConfigError(f"cost factor is {factor}; give a number above 0, such as 1.05")
        self.name = f"{costs.name}*{factor:g}"
        self._costs = costs
        self._factor = factor
        self.decode_s = None if costs.decode_s is None else self._decode_s

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        return max(0.0, self._costs.step_s(shape) * self._factor)

    def host_s(self, shape: StepShape) -> float:
        """Return the other model's seconds."""
        return self._costs.host_s(shape)

    def parts(self, shape: StepShape) -> StepParts:
        """Return the other model's parts, scaled; the FLOP of a step stay the same."""
        parts = self._costs.parts(shape)
        return StepParts({name: time_s * self._factor for name, time_s in parts.seconds.items()}, parts.compute_s)

    def floors(self, max_tokens: int) -> tuple[TimeFloor, ...]:
        """Return the other model's floors, scaled."""
        floors = self._costs.floors(max_tokens)
        return tuple(TimeFloor(*(time_s * self._factor for time_s in floor)) for floor in floors)

    def _decode_s(self, num_rows: int, kv_sum: int) -> float:
        assert self._costs.decode_s is not None
        return max(0.0, self._costs.decode_s(num_rows, kv_sum) * self._factor)
