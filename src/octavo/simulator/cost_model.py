"""CostModel: how long a step takes; and StepShape, all of a plan that such a model may look at.

Owns: the protocol, the shape of a plan. Does not: know any device or model (costs does).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from octavo.core.plan import ROW_SAMPLE, StepPlan


@dataclass(slots=True)
class StepShape:
    """What a step computes, moves and reads.

    `decode_kv` are the positions that each row of one token attends to, its own among them; `prefills` are (tokens,
    positions before them) of the others, drafts too. `num_samples` rows give a token. Blocks are copied on the device,
    swapped out and loaded as counted.
    """

    decode_kv: list[int]
    prefills: list[tuple[int, int]]
    num_samples: int = 0
    copied_blocks: int = 0
    swapped_out_blocks: int = 0
    loaded_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return len(self.decode_kv) + sum(count for count, _ in self.prefills)


class CostModel(Protocol):
    """Predicts steps. Deterministic: equal shapes take equal times."""

    name: str

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a device takes for a step, once it begins."""
        ...

    def host_s(self, shape: StepShape) -> float:
        """Seconds of scheduling and delivery for a step; with a depth of 2 they pass while the device computes."""
        ...


def shape_of(plan: StepPlan) -> StepShape:
    """Read a plan's shape."""
    starts, counts = plan.starts, plan.counts
    decode_kv = [start + 1 for start, count in zip(starts, counts, strict=True) if count == 1]
    prefills = [(count, start) for start, count in zip(starts, counts, strict=True) if count > 1]
    return StepShape(
        decode_kv,
        prefills,
        sum(map(ROW_SAMPLE.__and__, plan.flags)),  # which is 1: they are counted
        len(plan.copies) // 3,
        len(plan.swap_outs) // 3,
        len(plan.host_loads) // 3,
    )
