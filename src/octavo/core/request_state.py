"""The progress of requests: RequestState with its Sequences, the waiting queue, the running list and the deadlines.

Owns: the counters of each sequence, which the scheduler updates; the waiting queue (a heap per line); the running list
(sorted by rank); the heap of deadlines. Does not: decide which request waits or runs.
Invariants: num_computed <= num_scheduled <= num_known; num_known = num_committed + num_pending. A sequence that is not
running holds no device blocks and no slot. Each open request is in either the waiting queue or the running list. Ranks
are unique, so the order is total and equal on every machine. Queue operations are O(log n). Adding to or removing from
the running list also moves its later entries; the cap on sequences bounds their number.
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
    """Whether a request waits, runs or has finished."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """One live continuation of a request: its counters, block tables and executor slot.

    `token_ids` has the committed ids (prompt and outputs), or None if the request has no token ids. `num_pending`
    counts ids that plans in flight sample, without drafts. Positions [0, num_computed) have committed KV; plans in
    flight write [num_computed, num_scheduled). `is_entered`: the executor knows the sequence. `capacity` is the number
    of positions that its blocks have; if `is_counted` (simulations), its tables are empty, and its blocks have no
    numbers. `host_tables` has the host blocks of a swapped sequence. `candidates` are those of a
    beam whose siblings have none yet. `num_drafts` is the number of draft positions after num_scheduled that a plan in
    flight writes; `draft_history` proposes drafts.
    """

    __slots__ = (
        "candidates", "capacity", "choice", "draft_history", "first_live", "host_tables", "in_flight", "in_place_end",
        "is_counted", "is_entered", "keys", "limit", "num_committed", "num_computed", "num_drafts", "num_pending",
        "num_prompt", "num_published", "num_scheduled", "request", "retried_at", "slot", "stale", "tables", "token_ids",
    )  # fmt: skip

    def __init__(self, request: RequestState, choice: int, num_groups: int) -> None:
        submitted = request.request
        self.request = request
        self.choice = choice
        self.slot = -1
        self.is_entered = False
        self.is_counted = False
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
        self.retried_at = -1  # num_committed when a row of this sequence last failed
        self.in_place_end = 0  # a decode below this position needs no new block and no copy, and is not the last token
        self.limit = 0
        self.keys: list[bytes] = []
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.first_live = [0] * num_groups  # per group, the first table entry that still has a block
        self.host_tables: list[list[int]] = []
        self.candidates: tuple[tuple[int, ...], tuple[float, ...]] | None = None

    @property
    def num_known(self) -> int:
        """The number of prompt and output tokens, including outputs still in flight."""
        return self.num_committed + self.num_pending

    @property
    def num_outputs(self) -> int:
        """The number of committed output tokens."""
        return self.num_committed - self.num_prompt

    @property
    def is_void(self) -> bool:
        """True if the sequence's rows in flight must change nothing: its request has ended, or it was discarded."""
        return self.stale > 0 or self.request.status == Status.FINISHED

    def reset_tables(self) -> None:
        """Reset the counters of a sequence that holds no blocks any more: none of its tokens is computed."""
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

    `freed` is the pool's num_freed at that time; `kept` is the number of blocks that had to stay free.
    """

    reason: int
    group: int
    deficit: int
    freed: int
    kept: int


class PrefixSeen(NamedTuple):
    """The result of a request's last prefix lookup: `num_tokens` were cached; the key `missing` ended the match.

    `num_published` is the cache's count of published blocks at that time.
    """

    num_tokens: int
    missing: bytes | None
    num_published: int


class RequestState:
    """The scheduler's state of one request. `rank` = (the policy's key, order of arrival), unique among open requests.

    `sequences` are those that have not ended, oldest choice first. `num_scored` is the first prompt position whose
    log-probability must still be returned. `seen` is the result of the last prefix lookup, and `shortage` the blocks
    that were missing after it; admission repeats the lookup only if either can have changed.
    `num_bypassed` counts the steps of the current wait in which a later request was admitted first.
    `is_passable`: the request waits at a gate that lets other requests be admitted first (see gates).
    `can_run_ahead`: a row may be planned while the preceding id is still in flight. False for a beam search and for a
    request with a grammar, because their next row depends on that id, and with several pipeline stages.
    Another engine has computed the KV of the first `num_remote` tokens; `is_receiving`: the request has blocks for it,
    and it has not arrived. `keeps_kv`: its blocks are held after its end.
    """

    __slots__ = (
        "beams", "cached_tokens", "can_run_ahead", "first_scheduled_at", "has_several", "is_decoding", "is_passable",
        "is_receiving", "is_swapped", "keeps_kv",
        "lane", "max_tokens", "may_draft", "name", "num_bypassed", "num_ended_outputs", "num_preemptions", "num_remote",
        "num_scored",
        "order", "pools", "rank", "request", "samples", "scores", "seen", "sequences", "shortage", "spare_slots",
        "status", "stop_ids", "ticket", "wait_numbers", "wait_reason",
    )  # fmt: skip

    def __init__(self, request: Request, order: int, may_run_ahead: bool = True) -> None:
        self.request = request
        self.name = request.request_id
        self.order = order
        self.rank: Rank = ((), order)
        self.lane = ""
        self.status = Status.WAITING
        self.sequences: list[Sequence] = []
        self.beams: BeamGroup | None = None
        self.spare_slots: list[int] = []  # slots for beams that do not exist now
        params = request.params
        self.has_several = params.num_sequences > 1 or params.beam_width > 0
        # Plain bools, because every row reads them, and testing an enum flag costs ten times as much.
        wants = int(request.wants)
        self.samples = bool(wants & _SAMPLE)
        self.scores = bool(wants & _SCORE)
        self.pools = bool(wants & _POOL)
        self.stop_ids = frozenset((*(() if params.ignore_eos else request.eos_token_ids), *params.stop_token_ids))
        self.can_run_ahead = may_run_ahead and not (params.grammar or params.beam_width)
        self.may_draft = False
        self.is_decoding = False
        self.is_passable = False
        self.is_swapped = False
        self.num_remote = 0
        self.is_receiving = self.keeps_kv = False
        self.max_tokens = 0
        self.ticket = 0  # of its latest entry in the waiting queue
        self.num_scored = request.score_from
        self.cached_tokens = 0
        self.num_preemptions = 0
        self.num_ended_outputs = 0  # output tokens of choices that have ended
        self.first_scheduled_at: float | None = None
        self.wait_numbers = (0, 0, 0)  # (needed, available, step) when admission last looked at the request
        self.forget_waiting()

    def forget_waiting(self) -> None:
        """Reset the fields that describe one stay in the waiting queue. Called when a stay begins or ends."""
        self.num_bypassed = 0
        self.wait_reason = -1
        self.seen: PrefixSeen | None = None
        self.shortage: BlockShortage | None = None

    @property
    def in_flight(self) -> int:
        """The number of this request's rows in plans not yet committed."""
        return sum(sequence.in_flight for sequence in self.sequences)

    @property
    def num_slots(self) -> int:
        """The number of slots that the request takes while it runs: one per sequence, or one per beam if more."""
        return max(len(self.sequences), self.request.params.beam_width)

    def awaits_id(self, sequence: Sequence) -> bool:
        """Return True if no row of a sequence may be planned before a commit.

        The id in flight ends the sequence by length, or the next row depends on that id.
        """
        is_last = sequence.num_known >= sequence.limit and self.samples
        return is_last or (sequence.num_pending > 0 and not self.can_run_ahead)

    def match_cap(self, sequence: Sequence) -> int:
        """Return the longest usable prefix match in tokens.

        A SCORE request must compute the position before the first one to be scored.
        """
        if self.scores and self.num_scored < sequence.num_prompt:
            return self.num_scored - 1
        return sequence.num_known


# --- orders of requests ------------------------------------------------------------------------------------------

_rank = attrgetter("rank")
_Entry = tuple[Rank, int, RequestState]  # rank and ticket are unique, so requests are never compared


class _Line:
    """A heap of one line's requests, by rank. Removal is lazy: an entry without its request's latest ticket is dead."""

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
        """Return the first `count` requests in order, without sorting the rest of the heap."""
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
        """Count a dead entry; when most entries are dead, drop the dead ones in bulk."""
        self.num_dead += 1
        if self.num_dead > 64 and self.num_dead * 2 > len(self.heap):
            self.heap = [entry for entry in self.heap if entry[2].ticket == entry[1]]
            heapify(self.heap)
            self.num_dead = 0


class WaitingQueue:
    """Waiting requests: lines are ordered by the policy's `lane_key`, and requests within a line by rank.

    A line's key may only grow while requests wait in the line. So `peek` corrects the heap of lines as it reads: it
    stops at the first line whose stored key is up to date.
    """

    __slots__ = ("_lane_key", "_lines", "_order", "_size", "num_lines")

    def __init__(self, lane_key: Callable[[str], float]) -> None:
        self._lane_key = lane_key
        self._lines: dict[str, _Line] = {}
        self._order: list[tuple[float, int, str]] = []  # (stored key, number, name) of each line
        self.num_lines = 0  # lines created since the start
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
            line = self._lines[request.lane] = _Line(self.num_lines)
            self.num_lines += 1
            heappush(self._order, (self._lane_key(request.lane), line.number, request.lane))
        request.ticket += 1
        heappush(line.heap, (request.rank, request.ticket, request))
        self._size += 1

    def peek(self) -> RequestState | None:
        """Return the first request, or None."""
        num_looks = 2 * len(self._order)  # a bound that is reached only if a policy's keys do not merely grow
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
        """Remove any waiting request. Its entry is dropped when it is first in its line, or in bulk."""
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

    def lines(self) -> list[tuple[str, int, float, list[RequestState]]]:
        """Return the name, the number, the stored key and the requests, in no order, of each line."""
        return [
            (name, number, noted, [entry[2] for entry in self._lines[name].heap if entry[2].ticket == entry[1]])
            for noted, number, name in self._order
        ]

    def restore(self, lines: list[tuple[str, int, float, list[RequestState]]], num_lines: int) -> None:
        """Fill an empty queue with what `lines` returned."""
        self.num_lines = num_lines
        for name, number, noted, requests in lines:
            line = self._lines[name] = _Line(number)
            line.heap = [(request.rank, request.ticket, request) for request in requests]
            heapify(line.heap)
            self._order.append((noted, number, name))
            self._size += len(requests)

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
    """Deadlines and queue timeouts of open requests; entries that no longer matter are dropped lazily."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, bool, RequestState]] = []  # (time, order, is a queue timeout, request)

    def add(self, request: RequestState) -> None:
        """Add a request's deadline and the end of its queue timeout, if it has them."""
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
        """Remove and return an expired request, with True if its queue timeout expired; None if none has expired."""
        time = self.next()
        if time is None or time > now:
            return None
        _, _, is_queue, request = heappop(self._heap)
        return request, is_queue
