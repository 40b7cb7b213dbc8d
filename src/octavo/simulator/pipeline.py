"""Pipeline stages: the facts of a pipeline, and when its stages compute.

Owns: PipelineFacts and PipelineStages. Does not: schedule, or price a step (a stage takes an equal share of it).
A replica with n stages has n engines with an equal share of the KV pool and of the sequences (the virtual engines of
vLLM before 0.9), so up to n steps are in flight. A stage computes one step at a time, in the order of their begins:
n stages do not shorten a step, and end up to n steps in the time of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError


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
