"""Encoder outputs of media items, by content: which exist, which have to be encoded or may be dropped (E01, E02).

Owns: the encoder budget of a step, the space of the cache, and which requests need which output. Ids only, no tensors.
Does not: encode, or know positions beyond a request's spans. A request without media never gets here.
Invariants: the outputs fit the capacity; one that is needed stays; a plan never frees a key that it also encodes or
uses, so that frees can run before encode jobs. Sizes are in media tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from octavo.core.plan import EncodeJob
from octavo.core.request import Span


@dataclass(slots=True)
class _Output:
    """An output that exists once the plans in flight ran, and how many needs there are of it."""

    size: int
    num_needs: int = 0


@dataclass(frozen=True, slots=True)
class _Need:
    """One request's need of an output: the item's key, the position after it, and the slot that has its data."""

    key: bytes
    end: int
    slot: int


class EncoderCache:
    """Outputs by content key, shared by all requests; unneeded ones are evicted least recently used first."""

    __slots__ = ("_capacity", "_frees", "_jobs", "_left", "_limit", "_lost", "_needs", "_outputs")

    def __init__(self, budget: int, capacity: int) -> None:
        self._limit = budget
        self._capacity = capacity
        self._left = budget
        self._outputs: OrderedDict[bytes, _Output] = OrderedDict()  # those without needs: least recently used first
        self._needs: dict[str, dict[int, _Need]] = {}  # request -> index of its span -> need
        self._jobs: list[EncodeJob] = []  # of the plan in the making
        self._frees: list[bytes] = []  # evicted by the plan in the making: they exist until it runs
        self._lost: list[bytes] = []  # outputs that failed plans encoded or freed: they may exist or not

    @property
    def num_needs(self) -> int:
        """Needs of all requests."""
        return sum(output.num_needs for output in self._outputs.values())

    def begin_plan(self) -> None:
        """Start a plan with the whole encoder budget."""
        self._left = self._limit

    def end_plan(self) -> tuple[tuple[EncodeJob, ...], tuple[bytes, ...]]:
        """Return what the plan encodes, and the keys of outputs that it drops.

        After a failed plan these include keys that may have no output.
        """
        lost = [key for key in dict.fromkeys(self._lost) if key not in self._outputs]
        jobs, frees = tuple(self._jobs), (*self._frees, *lost)
        self._jobs, self._frees, self._lost = [], [], []
        return jobs, frees

    def grant(self, name: str, slot: int, spans: tuple[Span, ...], start: int, count: int) -> int:
        """Return how many of positions [start, start + count) may be granted: up to the first item that has to wait.

        Items that are missing are scheduled whole; every item touched is needed until its last position is committed.
        """
        held = self._needs.setdefault(name, {})
        for index, span in enumerate(spans):
            if span.start >= start + count:
                break
            if span.start + span.length <= start or index in held:
                continue
            if not self._provide(span, EncodeJob(slot, index, span.key, span.length)):
                count = max(0, span.start - start)
                break
            held[index] = _Need(span.key, span.start + span.length, slot)
            self._outputs[span.key].num_needs += 1
        if not held:
            del self._needs[name]
        return count

    def _provide(self, span: Span, job: EncodeJob) -> bool:
        """Provide an output for this plan. Return False, and change nothing, without budget or space."""
        if span.key in self._outputs:
            return True
        exists = span.key in self._frees  # evicted by this very plan, so not dropped yet
        if not exists and span.length > self._left:
            return False
        if not self._make_space(span.length):
            return False
        if exists:
            self._frees.remove(span.key)
        else:
            self._left -= span.length
            self._jobs.append(job)
        self._outputs[span.key] = _Output(span.length)
        return True

    def _make_space(self, size: int) -> bool:
        space = self._capacity - sum(output.size for output in self._outputs.values())
        idle = [key for key, output in self._outputs.items() if not output.num_needs]
        if space + sum(self._outputs[key].size for key in idle) < size:
            return False
        for key in idle:
            if space >= size:
                break
            space += self._outputs.pop(key).size
            self._frees.append(key)
        return True

    def commit(self, name: str, end: int) -> None:
        """Drop a request's needs of items before `end`: these positions are computed."""
        held = self._needs.get(name, {})
        for index in [index for index, need in held.items() if need.end <= end]:
            self._drop(held.pop(index))
        if not held:
            self._needs.pop(name, None)

    def release(self, name: str) -> None:
        """Drop all needs of a request, and the jobs of the plan in the making that were for it alone."""
        held = self._needs.pop(name, {})
        for need in held.values():
            self._drop(need)
        slots = [need.slot for need in held.values()]
        self._jobs = [new for job in self._jobs for new in ((job,) if job.slot not in slots else self._pass_on(job))]

    def _drop(self, need: _Need) -> None:
        output = self._outputs[need.key]
        output.num_needs -= 1
        if not output.num_needs:
            self._outputs.move_to_end(need.key)

    def _pass_on(self, job: EncodeJob) -> tuple[EncodeJob, ...]:
        """Give the job of a released request to another that needs the output, or cancel it."""
        for held in self._needs.values():
            for index, need in held.items():
                if need.key == job.key:
                    return (EncodeJob(need.slot, index, job.key, job.num_tokens),)
        self._left += job.num_tokens
        del self._outputs[job.key]
        return ()

    def undo(self, jobs: tuple[EncodeJob, ...], frees: tuple[bytes, ...]) -> None:
        """Undo a plan that failed: outputs that it was to encode or drop count as absent, and the next plan drops them.

        Of several plans the last is undone first. Requests that needed the outputs are computed again.
        """
        self._lost += [*(job.key for job in jobs), *frees]
        void = [job.key for job in jobs if self._outputs.pop(job.key, None) is not None]
        for name, held in list(self._needs.items()):
            self._needs[name] = {index: need for index, need in held.items() if need.key not in void}
            if not self._needs[name]:
                del self._needs[name]
