"""Replays a recording: the same calls to a scheduler of today, whose plans must have the same digests.

Owns: the comparison, and feeding watchers. Does not: simulate other settings (octavo.simulator does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.core.scheduler import Scheduler
from octavo.trace.recording.calls import Header
from octavo.trace.recording.reader import Recording
from octavo.trace.sink import EventSink

MakeSink = Callable[[Scheduler, Header], EventSink]  # called for each segment, with its scheduler


@dataclass(frozen=True, slots=True)
class Difference:
    """The first plan that came out otherwise: `lines` say where, expected against got."""

    life: int
    step: int
    now: float
    lines: tuple[str, ...]


@dataclass(slots=True)
class ReplayReport:
    """What a replay did: plans compared, and the first difference, if there was one."""

    num_segments: int = 0
    num_calls: int = 0
    num_requests: int = 0
    num_plans: int = 0  # that were not empty: their digests were compared
    num_equal: int = 0
    num_failed_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0  # recorded
    ends: list[str] = field(default_factory=list)  # how each segment ended
    difference: Difference | None = None

    @property
    def is_equal(self) -> bool:
        """Whether every plan was the recorded one."""
        return self.difference is None


def replay(recording: Recording, make_sink: MakeSink | None = None) -> ReplayReport:
    """Replay all segments, telling a watcher what a live engine's would hear; ends at the first difference."""
    raise NotImplementedError
