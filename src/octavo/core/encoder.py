"""The cache of encoder outputs, keyed by media content: which outputs exist, and which to encode or drop (E01, E02).

Owns: the encoder budget of a step, the space of the cache, and which requests need which output. Ids only, no tensors.
Does not: encode, or know positions beyond a request's spans. A request without media never gets here.
Invariants: the outputs fit the capacity. An output that a request needs is not evicted. A plan never frees a key that
it also encodes or uses, so that frees can run before encode jobs. Sizes are in media tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from octavo.core.plan import EncodeJob
from octavo.core.request import Span


def whole_chunk(spans: tuple[Span, ...], start: int, count: int, most: int) -> int:
    """Return how many of the positions [start, start + count) to compute so that the last is not inside an item.

    An item that begins before `start + 1` is computed to its end instead, if `most` tokens allow that; else 0.
    """
    end = start + count
    for span in spans:
        after = span.start + span.length
        if span.start < end < after:
            whole = after - start if after - start <= most else 0
            return span.start - start if span.start > start else whole
    return count


@dataclass(slots=True)
class _Output:
    """An output that exists once the plans in flight have run, and the number of requests' needs for it."""

    size: int
    num_needs: int = 0


@dataclass(frozen=True, slots=True)
class _Need:
    """One request's need for an output: the item's key, the position after the item, and the request's slot."""

    key: bytes
    end: int
    slot: int


@dataclass(slots=True)
class SavedEncoder:
    """An EncoderCache: (key, size, needs) of each output, and (request, span, key, end, slot) of each need."""

    outputs: list[tuple[bytes, int, int]]
    needs: list[tuple[str, int, bytes, int, int]]
    lost: list[bytes]


class EncoderCache:
    """Outputs by content key, shared by all requests. Outputs that no request needs are evicted in LRU order."""

    __slots__ = ("_capacity", "_frees", "_jobs", "_left", "_limit", "_lost", "_needs", "_outputs")

    def __init__(self, budget: int, capacity: int) -> None:
        self._limit = budget
        self._capacity = capacity
        self._left = budget
        self._outputs: OrderedDict[bytes, _Output] = OrderedDict()  # outputs without needs are in LRU order
        self._needs: dict[str, dict[int, _Need]] = {}  # request -> index of its span -> need
        self._jobs: list[EncodeJob] = []  # jobs of the plan in the making
        self._frees: list[bytes] = []  # keys that the plan in the making evicts; they exist until the plan runs
        self._lost: list[bytes] = []  # keys that failed plans encoded or freed; their outputs may or may not exist

    @property
    def num_needs(self) -> int:
        """The number of needs of all requests."""
        return sum(output.num_needs for output in self._outputs.values())

    def begin_plan(self) -> None:
        """Start a plan with the whole encoder budget."""
        self._left = self._limit

    def end_plan(self) -> tuple[tuple[EncodeJob, ...], tuple[bytes, ...]]:
        """Return what the plan encodes, and the keys of outputs that it drops.

        After a failed plan the dropped keys include keys that may have no output.
        """
        lost = [key for key in dict.fromkeys(self._lost) if key not in self._outputs]
        jobs, frees = tuple(self._jobs), (*self._frees, *lost)
        self._jobs, self._frees, self._lost = [], [], []
        return jobs, frees

    def grant(self, name: str, slot: int, spans: tuple[Span, ...], start: int, count: int) -> int:
        """Return how many of the positions [start, start + count) may be granted: up to the first item that must wait.

        A missing item is encoded whole. The request needs each item in the range until the item's last position is
        committed.
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
        """Make an output available to this plan. Return False, and change nothing, if budget or space is lacking."""
        if span.key in self._outputs:
            return True
        exists = span.key in self._frees  # evicted by this plan, so not dropped yet
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
        """Drop a request's needs for items before position `end`, because those positions are computed."""
        held = self._needs.get(name, {})
        for index in [index for index, need in held.items() if need.end <= end]:
            self._drop(held.pop(index))
        if not held:
            self._needs.pop(name, None)

    def release(self, name: str) -> None:
        """Drop all needs of a request, and the current plan's jobs that only this request needed."""
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
        """Give a released request's job to another request that needs the output, or cancel the job."""
        for held in self._needs.values():
            for index, need in held.items():
                if need.key == job.key:
                    return (EncodeJob(need.slot, index, job.key, job.num_tokens),)
        self._left += job.num_tokens
        del self._outputs[job.key]
        return ()

    def undo(self, jobs: tuple[EncodeJob, ...], frees: tuple[bytes, ...]) -> None:
        """Undo a failed plan: the outputs that it encoded or freed count as absent, and the next plan drops them.

        Undo several plans in reverse order. The caller computes the requests that needed the outputs again.
        """
        self._lost += [*(job.key for job in jobs), *frees]
        void = [job.key for job in jobs if self._outputs.pop(job.key, None) is not None]
        for name, held in list(self._needs.items()):
            self._needs[name] = {index: need for index, need in held.items() if need.key not in void}
            if not self._needs[name]:
                del self._needs[name]

    def save(self) -> SavedEncoder:
        """Return a copy, between two plans."""
        return SavedEncoder(
            [(key, output.size, output.num_needs) for key, output in self._outputs.items()],
            [
                (name, index, need.key, need.end, need.slot)
                for name, held in self._needs.items()
                for index, need in held.items()
            ],
            self._lost[:],
        )

    def restore(self, saved: SavedEncoder) -> None:
        """Fill an empty cache with what `save` returned."""
        self._outputs.update((key, _Output(size, num_needs)) for key, size, num_needs in saved.outputs)
        for name, index, key, end, slot in saved.needs:
            self._needs.setdefault(name, {})[index] = _Need(key, end, slot)
        self._lost = list(saved.lost)
