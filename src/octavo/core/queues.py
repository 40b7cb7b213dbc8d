"""The two lines requests stand in: waiting (a heap) and running (a sorted list), and the deadlines.

Owns: their order. Does not: decide who moves between them.
Invariants: each live request is in exactly one of waiting and running; ranks are unique, so that order is
total and equal on every machine. Nothing here costs more than O(log n), but for the move of one list's
pointers on removal from `running`, which is bounded by the sequence cap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from operator import attrgetter

from octavo.core.policy import Judge
from octavo.core.request import RequestState, Status

_rank = attrgetter("rank")
_Entry = tuple[tuple[tuple[float, ...], int], int, RequestState]


def rerank(request: RequestState, judge: Judge) -> None:
    """Ask the policy again where the request stands. The request must be in neither line."""
    request.rank = judge.rank(request)


class WaitingQueue:
    """Waiting requests by rank, with lazy removal: an entry counts while it is its request's latest."""

    __slots__ = ("_heap", "_num_dead")

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._num_dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._num_dead

    def add(self, request: RequestState) -> None:
        """Put a request at its rank."""
        request.ticket += 1
        heappush(self._heap, (request.rank, request.ticket, request))

    def peek(self) -> RequestState | None:
        """The first request, or None."""
        while self._heap:
            _, ticket, request = self._heap[0]
            if request.ticket == ticket:
                return request
            heappop(self._heap)
            self._num_dead -= 1
        return None

    def pop(self) -> RequestState:
        """Take out the first request; call after peek."""
        return heappop(self._heap)[2]

    def remove(self, request: RequestState) -> None:
        """Take out a waiting request wherever it stands: its entry goes when it comes up, or in bulk."""
        if self._heap[0][2] is request and self._heap[0][1] == request.ticket:
            heappop(self._heap)
            return
        request.ticket += 1
        self._num_dead += 1
        if self._num_dead > 64 and self._num_dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)
            self._num_dead = 0

    def in_order(self) -> list[RequestState]:
        """All waiting requests by rank. O(n log n): for people and checks, not for steps."""
        return [request for _, ticket, request in sorted(self._heap) if request.ticket == ticket]


class RunningList:
    """Running requests by rank."""

    __slots__ = ("num_sequences", "requests")

    def __init__(self) -> None:
        self.requests: list[RequestState] = []
        self.num_sequences = 0

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: RequestState) -> None:
        """Put a request at its rank."""
        insort(self.requests, request, key=_rank)
        self.num_sequences += len(request.sequences)

    def remove(self, request: RequestState) -> None:
        """Take a request out."""
        index = bisect_left(self.requests, request.rank, key=_rank)
        assert self.requests[index] is request
        del self.requests[index]
        self.num_sequences -= len(request.sequences)


class Deadlines:
    """Points in time at which requests end unless they were served; lazily cleaned."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, RequestState]] = []

    def add(self, request: RequestState) -> None:
        """Enter the request's deadline and queue timeout, where it has them."""
        asked = request.request
        if asked.deadline is not None:
            heappush(self._heap, (asked.deadline, request.order, False, request))
        if asked.queue_timeout is not None:
            heappush(self._heap, (asked.arrival + asked.queue_timeout, request.order, True, request))

    def next(self) -> float | None:
        """The earliest point in time that still matters."""
        while self._heap:
            time, _, is_queue, request = self._heap[0]
            if request.status != Status.FINISHED and not (is_queue and request.first_scheduled_at is not None):
                return time
            heappop(self._heap)
        return None

    def expired(self, now: float) -> tuple[RequestState, bool] | None:
        """Take out one request that is past its time, with whether it was the queue's; None when there is none."""
        time = self.next()
        if time is None or time > now:
            return None
        _, _, is_queue, request = heappop(self._heap)
        return request, is_queue
