"""Drafts in a simulation: a draft model of given cost whose drafts are accepted with a given probability.

Owns: the drafts (ids are unknown), which of them are accepted, and the draft model's time. The engine's own DraftPace
chooses their number from these times, so a simulated engine also stops drafting where drafts do not pay. Drafts as in a
recording have the recorded number instead, and as large a share of the rows has them.
Does not: price a step of the target (costs do).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

from octavo.core.plan import ROW_SAMPLE, StepPlan, StepResult, StepTimings
from octavo.core.proposals import DraftRow
from octavo.engine.draft_pace import DraftPace
from octavo.errors import ConfigError

UNKNOWN = -1  # the id of every simulated token


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """`acceptance`: the probability that a draft is accepted. `cost`: a drafting pass, in plain steps of its rows.

    With `length`, a row has this many drafts with the probability `share`; without it, the pace decides.
    """

    acceptance: float
    cost: float
    share: float = 1.0
    length: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"draft acceptance is {self.acceptance}; give a probability from 0 to 1")
        if not 0 < self.cost < 1e3:
            raise ConfigError(f"draft cost is {self.cost}; give the share of a step that a drafting pass takes, as 0.3")


class SimulatedDrafts:
    """See core.proposals.DraftSource. `result` makes the result of a step with drafts."""

    min_match = 0
    knows_lengths = True

    def __init__(self, settings: DraftSettings, seed: int) -> None:
        self._settings = settings
        self._random = Random(seed)
        self._pace = DraftPace()
        self._slots: frozenset[int] = frozenset()

    def propose(self, rows: list[DraftRow], num_rows: int) -> list[array[int]]:
        """Return as many drafts as the pace wants, or as were recorded."""
        settings = self._settings
        if settings.length is None:
            lengths = [self._pace.length(rows, lambda: 0)] * len(rows) if rows else []
        else:
            lengths = [settings.length if self._random.random() < settings.share else 0 for _ in rows]
        found = [array("i", [UNKNOWN]) * min(length, row.most) for length, row in zip(lengths, rows, strict=True)]
        self._slots = frozenset(row.slot for row, drafts in zip(rows, found, strict=True) if drafts)
        return found

    def drafting_s(self, plan: StepPlan, plain_s: float) -> float:
        """Return the seconds of a plan's drafting passes; `plain_s` is a step of the same rows without drafts."""
        pass_s, num_passes = self._settings.cost * plain_s, max(plan.num_drafts, default=0)
        self._pace.drafted(len(self._slots), [(len(self._slots), pass_s)] * num_passes)
        return pass_s * num_passes

    def result(self, plan: StepPlan, step_s: float) -> StepResult:
        """Return the result of a step of the target that took `step_s`, without drafting."""
        result = StepResult(None, timings=StepTimings(forward_s=step_s))
        if plan.num_drafts:
            rows = zip(plan.flags, plan.num_drafts, strict=True)
            result.num_token_ids = array("i", [1 + self._accept(count) for flags, count in rows if flags & ROW_SAMPLE])
        self._pace.stepped(plan, result, self._slots)
        return result

    def _accept(self, num_drafts: int) -> int:
        accepted = 0
        while accepted < num_drafts and self._random.random() < self._settings.acceptance:
            accepted += 1
        return accepted
