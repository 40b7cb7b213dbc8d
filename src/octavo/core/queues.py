"""The order of requests: waiting (a heap per line), running (a sorted list), and their deadlines.

Owns: these orders, and the order of lines of waiting requests. Does not: decide which request moves between them.
Invariants: each open request is in exactly one of waiting and running; ranks are unique, so the order is total and
equal on every machine. Nothing here costs more than O(log n), except for moving the pointers of one list when a request
is removed from `running`; the cap on sequences bounds that.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter

from octavo.core.policy.base import PolicyGuard, Rank
from octavo.core.request import RequestState, Status

_rank = attrgetter("rank")
_Entry = tuple[Rank, int, RequestState]  # rank and ticket are unique, so requests are never compared


class _Line:
    """Requests of one line by rank. Removal is lazy: an entry is dead unless it has its request's latest ticket."""

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
        """Return the first requests in order without sorting the rest: a child in a heap is never before its parent."""
        heap, found = self.heap, list[RequestState]()
        candidates = [(heap[0][:2], 0)] if heap else []
        while candidates and len(found) < count:
            _, index = heappop(candidates)
            _, ticket, request = heap[index]
            if request.ticket == ticket:
                found.append(request)
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heappush(candidates, (heap[child][:2], child))
        return found

    def note_dead(self) -> None:
        """Count a dead entry; when most are dead, drop them in bulk."""
        self.num_dead += 1
        if self.num_dead > 64 and self.num_dead * 2 > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[2].ticket == entry[1]]
            heapify(self.heap)
            self.num_dead = 0


class WaitingQueue:
    """Waiting requests: lines in the order of the policy's `lane_key`, and each line by rank.

    A line's key may only grow while requests wait in it, so the heap of lines is corrected as it is read: the first
    line whose noted key is still right is the first.
    """

    __slots__ = ("_lines", "_num_lines", "_order", "_policy", "_size")

    def __init__(self, policy: PolicyGuard) -> None:
        self._policy = policy
        self._lines: dict[str, _Line] = {}
        self._order: list[tuple[float, int, str]] = []  # (noted key, number, name) of each line
        self._num_lines = 0  # since the start
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def has_one_line(self) -> bool:
        """True if no line's key can change which request is first."""
        return len(self._order) <= 1

    def add(self, request: RequestState) -> None:
        """Put a request at its rank in its line."""
        line = self._lines.get(request.lane)
        if line is None:
            line = self._lines[request.lane] = _Line(self._num_lines)
            self._num_lines += 1
            heappush(self._order, (self._policy.lane_key(request.lane), line.number, request.lane))
        request.ticket += 1
        heappush(line.heap, (request.rank, request.ticket, request))
        self._size += 1

    def peek(self) -> RequestState | None:
        """Return the first request, or None."""
        num_looks = 2 * len(self._order)  # keys that only grow never use it up
        while self._order:
            noted, number, name = self._order[0]
            line = self._lines[name]
            head = line.head()
            if head is None:
                heappop(self._order)
                del self._lines[name]
                continue
            if len(self._order) == 1 or num_looks <= 0:
                return head
            num_looks -= 1
            key = self._policy.lane_key(name)
            if key <= noted:
                return head
            heapreplace(self._order, (key, number, name))
        return None

    def pop(self) -> RequestState:
        """Remove and return the first request; call after peek."""
        self._size -= 1
        return heappop(self._lines[self._order[0][2]].heap)[2]

    def remove(self, request: RequestState) -> None:
        """Remove a waiting request anywhere in the queue. Its entry is dropped at the head of its line, or in bulk."""
        line = self._lines[request.lane]
        self._size -= 1
        if line.heap[0][2] is request and line.heap[0][1] == request.ticket:
            heappop(line.heap)
            return
        request.ticket += 1
        line.note_dead()

    def first(self, count: int) -> list[RequestState]:
        """Return the first `count` waiting requests in order. O(lines + count log count)."""
        found: list[RequestState] = []
        for line in self._in_order():
            if len(found) >= count:
                break
            found += line.first(count - len(found))
        return found

    def in_order(self) -> list[RequestState]:
        """Return all waiting requests in order. For people and checks: O(n log n)."""
        return [
            request
            for line in self._in_order()
            for _, ticket, request in sorted(line.heap, key=lambda entry: entry[:2])
            if request.ticket == ticket
        ]

    def _in_order(self) -> list[_Line]:
        keys = {name: self._policy.lane_key(name) for name in self._lines}
        return [self._lines[name] for name in sorted(keys, key=lambda name: (keys[name], self._lines[name].number))]


class RunningList:
    """Running requests by rank."""

    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests: list[RequestState] = []

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: RequestState) -> None:
        """Insert a request at its rank."""
        insort(self.requests, request, key=_rank)

    def remove(self, request: RequestState) -> None:
        """Remove a request."""
        index = bisect_left(self.requests, request.rank, key=_rank)
        assert self.requests[index] is request
        del self.requests[index]


class Deadlines:
    """Deadlines and queue timeouts of open requests; those that no longer matter are dropped lazily."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, RequestState]] = []  # (time, order, is a queue timeout, request)

    def add(self, request: RequestState) -> None:
        """Enter a request's deadline and the end of its queue timeout, if it has them."""
        deadline, queue_until = request.request.deadline, request.request.queue_until
        if deadline is not None:
            heappush(self._heap, (deadline, request.order, False, request))
        if queue_until is not None:
            heappush(self._heap, (queue_until, request.order, True, request))

    def next(self) -> float | None:
        """Return the earliest time that still matters, or None."""
        while self._heap:
            time, _, is_queue, request = self._heap[0]
            if request.status != Status.FINISHED and not (is_queue and request.first_scheduled_at is not None):
                return time
            heappop(self._heap)
        return None

    def expired(self, now: float) -> tuple[RequestState, bool] | None:
        """Remove and return a request that is past its time, with True if that was its queue timeout; or None."""
        time = self.next()
        if time is None or time > now:
            return None
        _, _, is_queue, request = heappop(self._heap)
        return request, is_queue
