"""The encoder of the fake model: outputs of media items kept under their content keys.

Owns: which outputs are there, and the checks of encode jobs and encoder frees. Does not: know blocks.
"""

from __future__ import annotations

from octavo.core.plan import EncodeJob, Row, StepPlan
from octavo.core.request import Span
from tests.fake_pool import FakeModelError, Slot


class FakeEncoder:
    """`spans` tells where the items of each request lie; `budget` and `room` are in tokens, 0 = none."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.spans: dict[str, tuple[Span, ...]] = {}
        self.outputs: dict[bytes, int] = {}
        self.void_keys: set[bytes] = set()  # encoded or freed by a discarded plan: there or not
        self.budget = self.room = 0
        self.num_encoded = 0

    def encode(self, plan: StepPlan, slots: dict[int, Slot]) -> None:
        """Run a plan's jobs."""
        for job in plan.encode_jobs:
            self._check(job, slots)
            self.outputs[job.key] = job.num_tokens
            self.void_keys.discard(job.key)
            self.num_encoded += 1
        total = sum(job.num_tokens for job in plan.encode_jobs)
        if self.strict and total > self.budget:
            raise FakeModelError(f"{total} media tokens are encoded in one step, the budget is {self.budget}")

    def _check(self, job: EncodeJob, slots: dict[int, Slot]) -> None:
        if job.slot not in slots:
            raise FakeModelError(f"{job} names an empty slot")
        spans = self.spans.get(slots[job.slot].request_id, ())
        if not 0 <= job.span < len(spans) or (spans[job.span].key, spans[job.span].length) != (job.key, job.num_tokens):
            raise FakeModelError(f"{job} is not an item of {slots[job.slot].request_id!r}: {spans}")
        if self.strict and job.key in self.outputs and job.key not in self.void_keys:
            raise FakeModelError(f"{job}: this item's output is there already")

    def require(self, state: Slot, row: Row) -> None:
        """A row that overlaps an item needs its output."""
        for span in self.spans.get(state.request_id, ()):
            overlaps = span.start < row.start + row.count and row.start < span.start + span.length
            if overlaps and self.strict and span.key not in self.outputs:
                raise FakeModelError(
                    f"{state.request_id!r} positions [{row.start}, {row.start + row.count}): no encoder output for the "
                    f"item at {span.start}"
                )

    def present(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """The items whose outputs are there: without, a position computes something else."""
        return tuple(span for span in spans if span.key in self.outputs)

    def free(self, plan: StepPlan) -> None:
        """Drop outputs, behind the rows of the step."""
        for key in plan.encoder_frees:
            if self.strict and key not in self.outputs and key not in self.void_keys:
                raise FakeModelError(f"the encoder output {key!r} is freed, but is not there")
            self.outputs.pop(key, None)
            self.void_keys.discard(key)
        held = sum(self.outputs.values())
        if self.strict and held > self.room and self.outputs:
            raise FakeModelError(f"{held} media tokens are kept, there is room for {self.room}")

    def void(self, plan: StepPlan) -> None:
        """Nobody knows how far a discarded plan came: its outputs may be encoded, or freed, once more."""
        self.void_keys.update(plan.encoder_frees)
        self.void_keys.update(job.key for job in plan.encode_jobs)
