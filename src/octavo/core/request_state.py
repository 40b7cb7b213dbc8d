"""How far the scheduler is with a request: RequestState with its Sequences, and the orders of waiting and running.

Owns: the counters of each sequence, which the scheduler moves; the waiting queue (a heap per line), the running list
(sorted by rank), and their deadlines. Does not: decide anything, or which request moves between the orders.
Invariants: num_computed <= num_scheduled <= num_known; num_known = num_committed + num_pending; a sequence that is not
running holds no blocks and no slot. Each open request is in exactly one of waiting and running; ranks are unique, so
the order is total and equal on every machine. Operations on an order are O(log n), except for moving the pointers of
one list when a request is removed from the running list; the cap on sequences bounds that.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import NamedTuple

from octavo.core.beam_search import BeamGroup
from octavo.core.ngrams import DraftHistory
from octavo.core.request import Request, Want

MAX_RETURNS = 3  # preemptions after which a request is preempted last (PolicyGuard.victim_rank, start.growth_blocks)
Rank = tuple[tuple[float, ...], int]  # the policy's key, then the order of arrival
_SAMPLE, _SCORE, _POOL = (want.value for want in (Want.SAMPLE, Want.SCORE, Want.POOL))


class Status(IntEnum):
    """Which queue a request is in."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """One live continuation of a request: its counters, block tables and executor slot.

    `token_ids` holds committed ids (prompt and outputs), or None for a request known by length only.
    `num_pending` counts ids sampled by plans still in flight, without drafts. Positions [0, num_computed) have
    committed KV; [num_computed, num_scheduled) are being written by plans in flight. `is_entered`: the executor
    knows it. `host_tables` hold its blocks while it is swapped out. `candidates` wait for a beam's siblings.
    `num_drafts`: positions after num_scheduled that drafts in flight write; `draft_history` is the source of drafts.
    """

    __slots__ = (
        "candidates", "capacity", "choice", "draft_history", "first_live", "host_tables", "in_flight", "in_place_end",
        "is_entered", "keys", "limit", "num_committed", "num_computed", "num_drafts", "num_pending", "num_prompt",
        "num_published", "num_scheduled", "request", "retried_at", "slot", "stale", "tables", "token_ids",
    )  # fmt: skip

    def __init__(self, request: RequestState, choice: int, num_groups: int) -> None:
        submitted = request.request
        self.request = request
        self.choice = choice
        self.slot = -1
        self.is_entered = False
        self.num_prompt = submitted.num_prompt_tokens
        self.token_ids: array[int] | None = None
        if submitted.prompt_token_ids is not None:
            self.token_ids = submitted.prompt_token_ids[:]
            if submitted.emitted_token_ids is not None:
                self.token_ids.extend(submitted.emitted_token_ids)
        self.num_committed = self.num_prompt + len(submitted.emitted_token_ids or ())
        self.num_pending = 0
        self.num_scheduled = 0
        self.num_computed = 0
        self.num_published = 0
        self.num_drafts = 0
        self.draft_history: DraftHistory | None = None
        self.capacity = 0
        self.in_flight = 0
        self.stale = 0  # rows in flight whose results must be dropped
        self.retried_at = -1  # committed ids when a row of it failed last
        self.in_place_end = 0  # below it a decode needs no block, writes no shared one and ends nothing by length
        self.limit = 0
        self.keys: list[bytes] = []
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_live = [0] * num_groups  # per group, the first table entry that still has a block
        self.host_tables: list[list[int]] = []
        self.candidates: tuple[tuple[int, ...], tuple[float, ...]] | None = None

    @property
    def num_known(self) -> int:
        """Prompt and output tokens, those still in flight included."""
        return self.num_committed + self.num_pending

    @property
    def num_outputs(self) -> int:
        """Output tokens committed."""
        return self.num_committed - self.num_prompt

    @property
    def is_void(self) -> bool:
        """Return True if its rows in flight change nothing: its request has ended, or they were discarded."""
        return self.stale > 0 or self.request.status == Status.FINISHED

    def reset_tables(self) -> None:
        """Note that the sequence holds no blocks, so none of its tokens are computed."""
        self.capacity = self.in_place_end = self.num_published = 0
        self.num_scheduled = self.num_computed = self.num_drafts = 0
        self.first_live = [0] * len(self.tables)

    def fork(self, choice: int) -> Sequence:
        """Return a sequence of the same request with the same ids, without blocks."""
        child = Sequence(self.request, choice, len(self.tables))
        child.token_ids = None if self.token_ids is None else self.token_ids[:]
        child.num_committed = self.num_committed
        child.limit = self.limit
        return child


@dataclass(frozen=True, slots=True)
class BlockShortage:
    """Why admission had no room for a request: `deficit` blocks were missing in `group`.

    `freed` is the pool's count of freed blocks at that time, `kept` the blocks that had to stay free.
    """

    reason: int
    group: int
    deficit: int
    freed: int
    kept: int


class PrefixSeen(NamedTuple):
    """What the cache had of a request when it was last looked up: tokens, the key that ended the match.

    `num_published` is the cache's count of published blocks at that time.
    """

    num_tokens: int
    missing: bytes | None
    num_published: int


class RequestState:
    """The scheduler's state of one request. `rank` = (the policy's key, order of arrival), unique among open requests.

    `sequences` are those that have not ended, oldest choice first. `num_scored` is the first prompt position whose
    log-probability must still be returned. `seen` is the last look into the cache, `shortage` what
    it lacked then: until that can have changed, no look is needed.
    `num_bypassed` counts the steps since its last admission in which a later request was admitted before it.
    `is_passable`: it waits at a gate that lets others be admitted before it (see gates).
    `can_run_ahead`: a row may be planned while the id before it is in flight; not for beams, and not where a grammar
    decides which ids may follow.
    """

    __slots__ = (
        "beams", "cached_tokens", "can_run_ahead", "first_scheduled_at", "has_several", "is_decoding", "is_passable",
        "is_swapped",
        "lane", "max_tokens", "may_draft", "name", "num_bypassed", "num_ended_outputs", "num_preemptions", "num_scored",
        "order", "pools", "rank", "request", "samples", "scores", "seen", "sequences", "shortage", "spare_slots",
        "status", "stop_ids", "ticket", "wait_numbers", "wait_reason",
    )  # fmt: skip

    def __init__(self, request: Request, order: int) -> None:
        self.request = request
        self.name = request.request_id
        self.order = order
        self.rank: Rank = ((), order)
        self.lane = ""
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []
        self.beams: BeamGroup | None = None
        self.spare_slots: list[int] = []  # slots of beams that do not exist yet, or no longer
        params = request.params
        self.has_several = params.num_sequences > 1 or params.beam_width > 0
        # Looked at for every row, and a flag of an enum costs ten times as much.
        wants = int(request.wants)
        self.samples = bool(wants & _SAMPLE)
        self.scores = bool(wants & _SCORE)
        self.pools = bool(wants & _POOL)
        self.stop_ids = frozenset((*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids))
        self.can_run_ahead = not (params.grammar or params.beam_width)
        self.may_draft = False
        self.is_decoding = False
        self.is_passable = False
        self.is_swapped = False
        self.max_tokens = 0
        self.ticket = 0  # of its latest entry in the waiting queue
        self.num_scored = request.score_from
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.num_ended_outputs = 0  # of choices that ended
        self.first_scheduled_at: float | None = None
        self.wait_numbers = (0, 0, 0)  # needed, available, step: as of the last look
        self.forget_waiting()

    def forget_waiting(self) -> None:
        """Reset what concerns one stay in the waiting queue: it starts, or ends."""
        self.num_bypassed = 0
        self.wait_reason = -1
        self.seen: PrefixSeen | None = None
        self.shortage: BlockShortage | None = None

    @property
    def in_flight(self) -> int:
        """Rows of this request in plans not yet committed."""
        return sum(sequence.in_flight for sequence in self.sequences)

    @property
    def num_slots(self) -> int:
        """Slots that it takes while it runs: one for each sequence, and for each beam that does not exist yet."""
        return max(len(self.sequences), self.request.params.beam_width)

    def awaits_id(self, sequence: Sequence) -> bool:
        """Return True if no row may follow the id in flight.

        It is the last one (the sequence ends by length), or the next row depends on it.
        """
        is_last = sequence.num_known >= sequence.limit and self.samples
        return is_last or (sequence.num_pending > 0 and not self.can_run_ahead)

    def match_cap(self, sequence: Sequence) -> int:
        """Return the longest usable prefix match: a score needs the logits before the first position to be scored."""
        if self.scores and self.num_scored < sequence.num_prompt:
            return self.num_scored - 1
        return sequence.num_known


# --- orders of requests ------------------------------------------------------------------------------------------

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

    __slots__ = ("_lane_key", "_lines", "_num_lines", "_order", "_size")

    def __init__(self, lane_key: Callable[[str], float]) -> None:
        self._lane_key = lane_key
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
            heappush(self._order, (self._lane_key(request.lane), line.number, request.lane))
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
            key = self._lane_key(name)
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
        keys = {name: self._lane_key(name) for name in self._lines}
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
