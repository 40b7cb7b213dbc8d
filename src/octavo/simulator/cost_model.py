"""CostModel: how long a step takes; and StepShape: all of a plan that a cost model may read.

Owns: the protocol, the shape of a plan. Does not: know any device or model (costs does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.plan import ROW_SAMPLE, StepPlan


@dataclass(slots=True)
class StepShape:
    """What a step computes, moves and reads.

    `decode_kv` are the positions that each one-token row attends to, its own included; `prefills` are (tokens,
    positions before them) of the other rows, with drafts too. `num_samples` rows sample a token. The last three count
    the blocks copied on the device, swapped out and loaded.
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
    """Predicts step times. Deterministic: equal shapes take equal times."""

    name: str

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds that a device takes for a step, once it begins."""
        ...

    def host_s(self, shape: StepShape) -> float:
        """Return the seconds of scheduling and delivery; with a depth of 2 the device computes meanwhile."""
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
