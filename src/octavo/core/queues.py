"""The two lines requests stand in: waiting (a heap) and running (a sorted list), and the deadlines.

Owns: their order, and that of lines of waiting requests. Does not: decide who moves between them.
Invariants: each live request is in exactly one of waiting and running; ranks are unique, so that order is
total and equal on every machine. Nothing here costs more than O(log n), but for the move of one list's
pointers on removal from `running`, which is bounded by the sequence cap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter

from octavo.core.policy import PolicyGuard
from octavo.core.request import RequestState, Status

_rank = attrgetter("rank")
_Entry = tuple[tuple[tuple[float, ...], int], int, RequestState]


def _place(entry: _Entry) -> tuple[tuple[tuple[float, ...], int], int]:
    return entry[0], entry[1]


def rerank(request: RequestState, policy: PolicyGuard) -> None:
    """Ask the policy again where the request stands. The request must be in neither line."""
    request.rank = policy.rank(request)


class _Lane:
    """Requests of one line by rank, with lazy removal: an entry counts while it is its request's latest."""

    __slots__ = ("heap", "num_dead", "number")

    def __init__(self, number: int) -> None:
        self.heap: list[_Entry] = []
        self.num_dead = 0
        self.number = number

    def head(self) -> RequestState | None:
        while self.heap:
            _, ticket, request = self.heap[0]
            if request.ticket == ticket:
                return request
            heappop(self.heap)
            self.num_dead -= 1
        return None

    def first(self, count: int) -> list[RequestState]:
        """The first live entries in order, without sorting the rest: a child of a heap is never before its parent."""
        heap, found = self.heap, list[RequestState]()
        ahead = [(_place(heap[0]), 0)] if heap else []
        while ahead and len(found) < count:
            _, index = heappop(ahead)
            _, ticket, request = heap[index]
            if request.ticket == ticket:
                found.append(request)
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heappush(ahead, (_place(heap[child]), child))
        return found

    def forget(self) -> None:
        """One entry is dead; clear them out in bulk."""
        self.num_dead += 1
        if self.num_dead > 64 and self.num_dead * 2 > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[2].ticket == entry[1]]
            heapify(self.heap)
            self.num_dead = 0


class WaitingQueue:
    """Waiting requests: lines in the order of the policy's `lane_key`, each by rank.

    A line's key may only grow while anybody waits in it, so the heap of lines is mended as it is read: the first
    whose noted key still holds is the first.
    """

    __slots__ = ("_lanes", "_num_lanes", "_order", "_policy", "_size")

    def __init__(self, policy: PolicyGuard) -> None:
        self._policy = policy
        self._lanes: dict[str, _Lane] = {}
        self._order: list[tuple[float, int, str]] = []  # (noted key, number, name) of each line
        self._num_lanes = 0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def has_one_line(self) -> bool:
        """Whether no line's key can change who is first."""
        return len(self._order) <= 1

    def add(self, request: RequestState) -> None:
        """Put a request at its rank in its line."""
        lane = self._lanes.get(request.lane)
        if lane is None:
            lane = self._lanes[request.lane] = _Lane(self._num_lanes)
            self._num_lanes += 1
            heappush(self._order, (self._policy.lane_key(request.lane), lane.number, request.lane))
        request.ticket += 1
        heappush(lane.heap, (request.rank, request.ticket, request))
        self._size += 1

    def peek(self) -> RequestState | None:
        """The first request, or None."""
        patience = 2 * len(self._order)  # with keys that only grow it is never used up
        while self._order:
            noted, number, name = self._order[0]
            lane = self._lanes[name]
            head = lane.head()
            if head is None:
                heappop(self._order)
                del self._lanes[name]
                continue
            if len(self._order) == 1 or patience <= 0:
                return head
            patience -= 1
            key = self._policy.lane_key(name)
            if key <= noted:
                return head
            heapreplace(self._order, (key, number, name))
        return None

    def pop(self) -> RequestState:
        """Take out the first request; call after peek."""
        lane = self._lanes[self._order[0][2]]
        self._size -= 1
        return heappop(lane.heap)[2]

    def remove(self, request: RequestState) -> None:
        """Take out a waiting request wherever it stands: its entry goes when it comes up, or in bulk."""
        lane = self._lanes[request.lane]
        self._size -= 1
        if lane.heap[0][2] is request and lane.heap[0][1] == request.ticket:
            heappop(lane.heap)
            return
        request.ticket += 1
        lane.forget()

    def first(self, count: int) -> list[RequestState]:
        """The first `count` waiting requests, in order. O(lines + count log count), however many wait: for people."""
        found: list[RequestState] = []
        for _, _, name in sorted(
            (self._policy.lane_key(name), lane.number, name) for name, lane in self._lanes.items()
        ):
            if len(found) >= count:
                break
            found += self._lanes[name].first(count - len(found))
        return found

    def in_order(self) -> list[RequestState]:
        """All waiting requests in order. O(n log n): for people and checks, not for steps."""
        lanes = sorted((self._policy.lane_key(name), lane.number, name) for name, lane in self._lanes.items())
        return [
            request
            for _, _, name in lanes
            for _, ticket, request in sorted(self._lanes[name].heap, key=_place)
            if request.ticket == ticket
        ]


class RunningList:
    """Running requests by rank."""

    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests: list[RequestState] = []

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: RequestState) -> None:
        """Put a request at its rank."""
        insort(self.requests, request, key=_rank)

    def remove(self, request: RequestState) -> None:
        """Take a request out."""
        index = bisect_left(self.requests, request.rank, key=_rank)
        assert self.requests[index] is request
        del self.requests[index]


class Deadlines:
    """Points in time at which requests end unless they were served; lazily cleaned."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, RequestState]] = []

    def add(self, request: RequestState) -> None:
        """Enter the request's deadline and queue timeout, where it has them; what has outputs does not queue."""
        asked = request.request
        if asked.deadline is not None:
            heappush(self._heap, (asked.deadline, request.order, False, request))
        if asked.queue_timeout is not None and not asked.emitted_token_ids:
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
