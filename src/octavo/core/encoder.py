"""Encoder outputs of media items, by content: which exist, which have to be encoded or may be dropped (E01, E02).

Owns: the encoder budget of a step, the space of the cache, and which requests need which output. Ids only, no tensors.
Does not: encode, or know positions beyond a request's spans. A request without media never gets here.
Invariants: used <= capacity; a referenced output stays; a plan never frees a key that it also encodes or uses, so that
frees can run before encode jobs. Sizes are in media tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from octavo.core.plan import EncodeJob
from octavo.core.request import Span


@dataclass(frozen=True, slots=True)
class _Reference:
    """One request's need of an output: the item's key, the position after it, and the slot that has its data."""

    key: bytes
    end: int
    slot: int


class EncoderCache:
    """Outputs by content key, shared by all requests; unreferenced ones are evicted least recently used first."""

    __slots__ = (
        "_capacity", "_counts", "_frees", "_idle", "_jobs", "_left", "_limit", "_lost", "_references", "_sizes",
        "_used",
    )  # fmt: skip

    def __init__(self, budget: int, capacity: int) -> None:
        self._limit = budget
        self._capacity = capacity
        self._left = budget
        self._used = 0
        self._sizes: dict[bytes, int] = {}  # outputs that exist once the plans in flight ran
        self._counts: dict[bytes, int] = {}  # references, where there are any
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # the others, least recently used first
        self._references: dict[str, dict[int, _Reference]] = {}  # request -> index of its span -> need
        self._jobs: list[EncodeJob] = []  # of the plan in the making
        self._frees: list[bytes] = []  # evicted by the plan in the making: they exist until it runs
        self._lost: list[bytes] = []  # outputs that failed plans encoded or freed: they may exist or not

    @property
    def num_references(self) -> int:
        """Needs of all requests."""
        return sum(self._counts.values())

    def begin_plan(self) -> None:
        """Start a plan with the whole encoder budget."""
        self._left = self._limit

    def grant(self, name: str, slot: int, spans: tuple[Span, ...], start: int, count: int) -> int:
        """Return how many of positions [start, start + count) may be granted: up to the first item that has to wait.

        Items that are missing are scheduled whole; every item touched is held until its last position is committed.
        """
        held = self._references.setdefault(name, {})
        for index, span in enumerate(spans):
            if span.start >= start + count:
                break
            if span.start + span.length <= start or index in held:
                continue
            if not self._provide(span, EncodeJob(slot, index, span.key, span.length)):
                count = max(0, span.start - start)
                break
            held[index] = _Reference(span.key, span.start + span.length, slot)
            self._counts[span.key] = self._counts.get(span.key, 0) + 1
            self._idle.pop(span.key, None)
        if not held:
            del self._references[name]
        return count

    def _provide(self, span: Span, job: EncodeJob) -> bool:
        """Provide an output for this plan. Return False, and change nothing, without budget or space."""
        if span.key in self._sizes:
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
        self._sizes[span.key] = span.length
        self._used += span.length
        return True

    def _make_space(self, size: int) -> bool:
        idle = sum(self._sizes[key] for key in self._idle)
        if self._used - idle + size > self._capacity:
            return False
        while self._used + size > self._capacity:
            key, _ = self._idle.popitem(last=False)
            self._used -= self._sizes.pop(key)
            self._frees.append(key)
        return True

    def commit(self, name: str, end: int) -> None:
        """Drop a request's needs of items before `end`: these positions are computed."""
        held = self._references.get(name, {})
        for index in [index for index, need in held.items() if need.end <= end]:
            self._drop(held.pop(index))
        if not held:
            self._references.pop(name, None)

    def release(self, name: str) -> None:
        """Drop all needs of a request, and the jobs of the plan in the making that were for it alone."""
        held = self._references.pop(name, {})
        for need in held.values():
            self._drop(need)
        if self._jobs:
            slots = {need.slot for need in held.values()}
            self._jobs = [
                new for job in self._jobs for new in ((job,) if job.slot not in slots else self._pass_on(job))
            ]

    def _pass_on(self, job: EncodeJob) -> tuple[EncodeJob, ...]:
        """Give the job of a released request to another that needs the output, or cancel it."""
        for needs in self._references.values():
            for index, need in needs.items():
                if need.key == job.key:
                    return (EncodeJob(need.slot, index, job.key, job.num_tokens),)
        self._left += job.num_tokens
        self._used -= self._sizes.pop(job.key)
        del self._idle[job.key]
        return ()

    def void(self, jobs: tuple[EncodeJob, ...], frees: tuple[bytes, ...]) -> None:
        """Undo a plan that failed: what it was to encode or drop counts as absent, and is dropped by the next plan.

        Of several plans the last is undone first. Requests that needed the outputs are computed again.
        """
        self._lost += [*(job.key for job in jobs), *frees]
        void = dict.fromkeys(job.key for job in jobs if job.key in self._sizes)
        for name, held in list(self._references.items()):
            self._references[name] = {index: need for index, need in held.items() if need.key not in void}
            if not self._references[name]:
                del self._references[name]
        for key in void:
            self._counts.pop(key, None)
            self._idle.pop(key, None)
            self._used -= self._sizes.pop(key)

    def end_plan(self) -> tuple[tuple[EncodeJob, ...], tuple[bytes, ...]]:
        """Return what the plan encodes, and the keys of outputs that it drops.

        After a failed plan these include keys that may have no output.
        """
        jobs, frees = tuple(self._jobs), (*self._frees, *[k for k in dict.fromkeys(self._lost) if k not in self._sizes])
        self._jobs, self._frees, self._lost = [], [], []
        return jobs, frees

    def _drop(self, need: _Reference) -> None:
        left = self._counts[need.key] - 1
        if left:
            self._counts[need.key] = left
        else:
            del self._counts[need.key]
            self._idle[need.key] = None
