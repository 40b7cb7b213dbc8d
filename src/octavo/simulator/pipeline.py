"""When devices compute: the stages of a pipeline, and Stepper, the turns and commits of what steps by itself.

Owns: PipelineFacts, PipelineStages and Stepper. Does not: schedule, or price a step (a stage takes an equal share of
it).
A replica with n stages has n engines with an equal share of the KV pool and of the sequences (the virtual engines of
vLLM before 0.9), so up to n steps are in flight. A stage computes one step at a time, in the order of their begins:
n stages do not shorten a step, and end up to n steps in the time of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from octavo.errors import ConfigError
from octavo.simulator.outcomes import SimulatedRequest

MIN_WAIT_S = 0.001  # minimum seconds between an empty plan and the next plan, as in engine.loop


@dataclass(frozen=True, slots=True)
class PipelineFacts:
    """A pipeline of `stages`. Between two stages, a step of n tokens takes hop_s + n * hop_token_s."""

    stages: int
    hop_s: float = 0.0
    hop_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ConfigError(f"a pipeline has {self.stages} stages; give at least 2")


class PipelineStages:
    """The stages that the engines of one replica share."""

    def __init__(self, facts: PipelineFacts) -> None:
        self._facts = facts
        self._free_at = [0.0] * facts.stages

    def run(self, begin: float, step_s: float, tokens: int) -> float:
        """Pass a step of `step_s` seconds in all through the stages; return its end. `begin` never decreases."""
        facts, at = self._facts, begin
        hop_s = facts.hop_s + tokens * facts.hop_token_s
        for stage, free_at in enumerate(self._free_at):
            at = max(at + (hop_s if stage else 0.0), free_at) + step_s / facts.stages
            self._free_at[stage] = at
        return at


class Stepper:
    """What steps by itself: an engine, or the ranks of a group (lockstep). The caller must call `advance` at `next_at`.

    In a turn it makes plans, and if some are in flight then, it commits the oldest at its end; then the next turn
    begins. Without a plan in flight it is idle until `wake` is called. `stages`: those of its pipeline.
    """

    def __init__(self, number: int, stages: PipelineStages | None) -> None:
        self.number = number
        self.is_up = True
        self._stages = stages
        self._clear()

    def _clear(self) -> None:
        self._is_retiring = False
        self._is_idle, self._idle_since = True, 0.0  # no turn begins before _idle_since
        self._free_at = 0.0  # when the device has finished all its plans
        self.next_at = inf

    def wake(self, at: float) -> None:
        """End the idle time: a request, or KV, arrived at `at`."""
        if self._is_idle:
            self._is_idle, self.next_at = False, max(at, self._idle_since)

    def restart(self, at: float) -> None:
        """Restart after a failure or a stop, with an empty cache."""
        self.is_up = True
        self._idle_since = at

    def advance(self) -> list[SimulatedRequest]:
        """Run the turn or the commit that is due at `next_at`; return the requests that ended."""
        return self._retire() if self._is_retiring else self._turn()

    def fail(self, at: float) -> list[SimulatedRequest]:
        """Drop all state; return the open requests, with `emitted` updated, in order of arrival."""
        raise NotImplementedError

    def stop(self, at: float) -> None:
        """Drop all state, without open requests; `restart` starts it again."""
        raise NotImplementedError

    def _turn(self) -> list[SimulatedRequest]:
        raise NotImplementedError

    def _retire(self) -> list[SimulatedRequest]:
        raise NotImplementedError

    def _compute(self, now: float, step_s: float, num_tokens: int, drafting_s: float = 0.0) -> float:
        """Queue a step, and its drafting before it, on the device; return its end."""
        begin = max(now, self._free_at)
        if self._stages is None:
            self._free_at = begin + drafting_s + step_s
        else:
            self._free_at = self._stages.run(begin, drafting_s + step_s, num_tokens)
        return self._free_at

    def _end_turn(self, now: float, end: float | None, wake_at: float | None) -> None:
        """Set what is next: a commit at `end` of the oldest plan in flight, or without one a turn at `wake_at`."""
        if end is not None:
            self._is_retiring = True
            self.next_at = max(now, end)
        else:
            self._is_idle, self._idle_since = True, now
            self.next_at = inf if wake_at is None else max(wake_at, now + MIN_WAIT_S)
