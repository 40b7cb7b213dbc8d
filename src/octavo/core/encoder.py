"""Encoder outputs of media items, by content: what is there, what has to be encoded, what may be dropped (E01, E02).

Owns: the compute budget of a step, the space of the cache, and who still needs which output. Ids only, no tensors.
Does not: encode, or know positions beyond a request's spans.
Invariants: used <= capacity; an output that anybody references stays; a plan never frees a key that it also encodes
or uses, so frees can run before encode jobs. Sizes are in media tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from octavo.core.plan import EncodeJob
from octavo.core.request import Span
from octavo.errors import InvariantError


@dataclass(frozen=True, slots=True)
class _Reference:
    """One request's need of an output: the item's key, the position behind it, and the slot that has its data."""

    key: bytes
    end: int
    slot: int


class EncoderCache:
    """Outputs by content key, shared by all requests; unreferenced ones are evicted least recently used first."""

    __slots__ = (
        "_capacity",
        "_counts",
        "_frees",
        "_idle",
        "_jobs",
        "_left",
        "_limit",
        "_lost",
        "_references",
        "_sizes",
        "_used",
    )

    def __init__(self, budget: int, capacity: int) -> None:
        self._limit = budget
        self._capacity = capacity
        self._left = budget
        self._used = 0
        self._sizes: dict[bytes, int] = {}  # outputs that are there, or will be once the plans in flight ran
        self._counts: dict[bytes, int] = {}  # references, where there are any
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # the others, least recently used first
        self._references: dict[str, dict[int, _Reference]] = {}  # request -> index of its span -> need
        self._jobs: list[EncodeJob] = []  # of the plan in the making
        self._frees: list[bytes] = []  # evicted by the plan in the making: still there, until it runs
        self._lost: list[bytes] = []  # what failed plans encoded or freed: there or not, nobody knows

    @property
    def num_references(self) -> int:
        """Needs of all requests; 0 when nobody holds anything."""
        return sum(self._counts.values())

    def renew(self) -> None:
        """Start a plan: the whole compute budget is there again."""
        self._left = self._limit

    def grant(self, name: str, slot: int, spans: tuple[Span, ...], start: int, count: int) -> int:
        """How many of positions [start, start + count) may be granted: up to the first item that cannot be encoded now.

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
        """Have an output there for this plan. False, and nothing changed, without budget or space."""
        if span.key in self._sizes:
            return True
        is_there = span.key in self._frees  # evicted by this very plan, so not dropped yet
        if not is_there and span.length > self._left:
            return False
        if not self._make_space(span.length):
            return False
        if is_there:
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
        """Positions up to `end` of a request are computed: it needs the items before no more."""
        held = self._references.get(name, {})
        for index in [index for index, need in held.items() if need.end <= end]:
            self._drop(held.pop(index))
        if not held:
            self._references.pop(name, None)

    def release(self, name: str) -> None:
        """A request leaves: its needs go, and what was scheduled in the plan in the making for it alone."""
        held = self._references.pop(name, {})
        for need in held.values():
            self._drop(need)
        if self._jobs:
            slots = {need.slot for need in held.values()}
            self._jobs = [
                new for job in self._jobs for new in ((job,) if job.slot not in slots else self._pass_on(job))
            ]

    def _pass_on(self, job: EncodeJob) -> tuple[EncodeJob, ...]:
        """A job of a request that leaves: another that needs the output takes it over, or it is not made."""
        for needs in self._references.values():
            for index, need in needs.items():
                if need.key == job.key:
                    return (EncodeJob(need.slot, index, job.key, job.num_tokens),)
        self._left += job.num_tokens
        self._used -= self._sizes.pop(job.key)
        del self._idle[job.key]
        return ()

    def void(self, jobs: tuple[EncodeJob, ...], frees: tuple[bytes, ...]) -> None:
        """A plan did not run, or not to its end: what it was to encode or drop counts as absent, and is dropped next.

        Of several plans the last is undone first. Whoever needed the outputs is computed anew.
        """
        self._lost += [*(job.key for job in jobs), *frees]
        for job in jobs:
            if job.key not in self._sizes:
                continue
            for name in [
                name for name, held in self._references.items() if any(n.key == job.key for n in held.values())
            ]:
                self._references[name] = {i: n for i, n in self._references[name].items() if n.key != job.key}
            self._references = {name: held for name, held in self._references.items() if held}
            self._counts.pop(job.key, None)
            self._idle.pop(job.key, None)
            self._used -= self._sizes.pop(job.key)

    def take_jobs(self) -> tuple[EncodeJob, ...]:
        """What the plan has to encode."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def take_frees(self) -> tuple[bytes, ...]:
        """Keys whose outputs the plan drops; after a failed one, maybe outputs that are not there."""
        lost = [key for key in dict.fromkeys(self._lost) if key not in self._sizes]
        frees = (*self._frees, *lost)
        self._frees, self._lost = [], []
        return frees

    def check(self) -> None:
        """Raise InvariantError if the counts disagree."""
        counts: dict[bytes, int] = {}
        for held in self._references.values():
            for need in held.values():
                counts[need.key] = counts.get(need.key, 0) + 1
        if counts != self._counts:
            raise InvariantError(f"encoder cache: {len(self._counts)} keys are counted as needed, {len(counts)} are")
        if self._used != sum(self._sizes.values()) or self._used > self._capacity:
            raise InvariantError(f"encoder cache: {self._used} of {self._capacity} tokens used do not add up")
        if len(self._idle) + len(counts) != len(self._sizes) or not all(key in self._sizes for key in counts):
            raise InvariantError("encoder cache: an output is lost, or needed and idle at once")

    def _drop(self, need: _Reference) -> None:
        left = self._counts[need.key] - 1
        if left:
            self._counts[need.key] = left
        else:
            del self._counts[need.key]
            self._idle[need.key] = None
