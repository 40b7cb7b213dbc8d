"""The scheduler's whole state as plain data, to continue from it in another scheduler: save and restore.

Owns: the records, and their copies from and to the objects of the state. Does not: encode or mask them (recordings do).
References between objects are indices into the lists of SavedState. Left out is what follows from the limits, and what
decides nothing: the ids of cached blocks, the indices of prompt lookup, decisions that were not taken yet.
Invariant: a restored scheduler makes the same plans as the saved one if both get the same calls, keys and drafts. So it
needs an InputSource that supplies drafts. Cost: O(requests + blocks), copies only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

from octavo.core.beam_search import BeamGroup, Hypothesis
from octavo.core.encoder import SavedEncoder
from octavo.core.kv.effects import Effects, Publication
from octavo.core.kv.pool import BlockPool
from octavo.core.limits import Limits
from octavo.core.ngrams import DraftHistory
from octavo.core.plan import StepPlan
from octavo.core.request import Request
from octavo.core.request_state import BlockShortage, PrefixSeen, Rank, RequestState, Sequence, Status
from octavo.core.state import Flight, State, Totals, Updates
from octavo.errors import InvariantError

Values = dict[str, bool | int | float | str | None]  # fields by name


def _plain(kind: type, *others: str) -> tuple[str, ...]:
    """Return the fields of a slotted class that are plain numbers, texts or None: all but `others`."""
    return tuple(name for name in kind.__slots__ if name not in others)  # type: ignore[attr-defined]


_SEQUENCE = _plain(
    Sequence, "candidates", "draft_history", "first_live", "host_tables", "keys", "request", "tables", "token_ids"
)
_REQUEST = _plain(
    RequestState, "beams", "name", "pools", "rank", "request", "samples", "scores", "seen", "sequences", "shortage",
    "spare_slots", "status", "stop_ids", "wait_numbers",
)  # fmt: skip
_DRAFTS = _plain(DraftHistory, "index")
_STATE = ("is_draining", "is_paused", "max_step_tokens", "next_order", "num_swapped", "step")
_CACHE = ("hit_tokens", "num_published", "queried_tokens")
_UPDATES = ("freed_slots", "id_edits", "table_edits", "finished_ids", "preempted_ids")
_read_sequence, _read_request, _read_drafts = attrgetter(*_SEQUENCE), attrgetter(*_REQUEST), attrgetter(*_DRAFTS)


@dataclass(slots=True)
class SavedSequence:
    """A Sequence; `request` is its request's index. `drafts` are the fields of its DraftHistory. Ids are packed."""

    request: int
    values: Values
    token_ids: bytes | None
    keys: list[bytes]
    tables: list[list[int]]
    first_live: list[int]
    host_tables: list[list[int]]
    candidates: tuple[tuple[int, ...], tuple[float, ...]] | None = None
    drafts: Values | None = None


@dataclass(slots=True)
class SavedBeams:
    """A BeamGroup; `pool` has the fields of each Hypothesis, its ids packed."""

    max_outputs: int
    scores: list[float]
    num_steps: int
    is_over: bool
    pool: list[tuple[bytes, float, float, int | None]]


@dataclass(slots=True)
class SavedRequest:
    """A RequestState apart from its Request. `sequences` are the indices of those that have not ended."""

    values: Values
    status: Status
    rank: Rank
    wait_numbers: tuple[int, int, int]
    sequences: list[int]
    spare_slots: list[int]
    seen: PrefixSeen | None = None
    shortage: BlockShortage | None = None
    beams: SavedBeams | None = None


@dataclass(slots=True)
class SavedLine:
    """One line of the waiting queue; `noted_key` is its key when it was last compared."""

    name: str
    number: int
    noted_key: float
    requests: list[int]


@dataclass(slots=True)
class SavedPool:
    """A BlockPool. `keys` are those of the blocks `key_blocks`; `cached` is in the order of eviction."""

    num_blocks: int
    references: list[int]
    plain: list[int]
    cached: list[int]
    keys: list[bytes]
    key_blocks: list[int]
    pending: dict[int, int]
    num_freed: int


@dataclass(slots=True)
class SavedFlight:
    """A Flight apart from its plan. `rows` are sequences, `swapped` requests, `published` blocks of Publications."""

    rows: list[int]
    published: list[tuple[int, int, int, int, bool]]
    saved: list[tuple[int, int]]
    swapped: list[int]
    releases: list[tuple[int, int]]


@dataclass(slots=True)
class SavedState:
    """A State. `requests` and `progress` have one entry per request, `plans` and `flights` one per plan in flight.

    A request that has ended is among them if a plan in flight has a row of it.
    """

    values: Values
    requests: list[Request]
    progress: list[SavedRequest]
    sequences: list[SavedSequence]
    plans: list[StepPlan]
    flights: list[SavedFlight]
    lines: list[SavedLine]
    num_lines: int
    overdue: list[int]
    free_slots: list[int]
    updates: dict[str, Any]
    new_sequences: list[int]
    pools: list[SavedPool]
    host_pools: list[SavedPool]
    is_load_wanted: bool
    cache: Values
    encoder: SavedEncoder
    composition: tuple[bool, int]
    totals: dict[str, Any]
    policy: Any = None
    policy_errors: tuple[int, str] = (0, "")

    def without_totals(self) -> SavedState:
        """Return this state with counts that begin here; they decide nothing."""
        return replace(self, totals=asdict(Totals()), cache=self.cache | {"hit_tokens": 0, "queried_tokens": 0})


# --- save -----------------------------------------------------------------------------------------------------


class _Numbers:
    """Numbers the requests and sequences of a state, in the order in which they are found."""

    def __init__(self, state: State) -> None:
        self.requests: dict[RequestState, int] = {}
        self.sequences: dict[Sequence, int] = {}
        for request in state.requests.values():
            self._add(request)
        for flight in state.flight:
            for request in flight.effects.swapped_requests:
                self._add(request)
            for sequence in (*flight.rows, *(made.owner for made in flight.effects.published)):
                self._add(sequence.request)
                self.sequences.setdefault(sequence, len(self.sequences))  # it may have ended before its request

    def _add(self, request: RequestState) -> None:
        if request not in self.requests:
            self.requests[request] = len(self.requests)
            for sequence in request.sequences:
                self.sequences.setdefault(sequence, len(self.sequences))

    def of_requests(self, requests: Iterable[RequestState]) -> list[int]:
        """Return the numbers of requests."""
        return [self.requests[request] for request in requests]

    def of_sequences(self, sequences: Iterable[Sequence]) -> list[int]:
        """Return the numbers of sequences."""
        return [self.sequences[sequence] for sequence in sequences]


def save(state: State) -> SavedState:
    """Copy a state between two calls. Raises ConfigError if the policy's state cannot be saved."""
    assert not (state.counts_blocks or state.kept), "blocks without numbers, and kept KV, are of simulations"
    assert not state.ended, "the policy is notified of ended requests before a call returns"
    numbers, cache = _Numbers(state), state.cache
    updates = {name: getattr(state.updates, name)[:] for name in _UPDATES}
    composition = state.composition
    return SavedState(
        values={name: getattr(state, name) for name in _STATE},
        requests=[request.request for request in numbers.requests],
        progress=[_save_request(request, numbers) for request in numbers.requests],
        sequences=[_save_sequence(sequence, numbers) for sequence in numbers.sequences],
        plans=[flight.plan for flight in state.flight],
        flights=[_save_flight(flight, numbers) for flight in state.flight],
        lines=[
            SavedLine(name, number, noted, numbers.of_requests(requests))
            for name, number, noted, requests in state.waiting.lines()
        ],
        num_lines=state.waiting.num_lines,
        overdue=numbers.of_requests([one for one in state.overdue if one.status == Status.WAITING]),
        free_slots=state.free_slots[:],
        updates=updates,
        new_sequences=numbers.of_sequences(state.updates.sequences),
        pools=[_save_pool(pool) for pool in cache.pools],
        host_pools=[_save_pool(pool) for pool in cache.host.pools],
        is_load_wanted=cache.host.is_load_wanted,
        cache={name: getattr(cache, name) for name in _CACHE},
        encoder=state.encoder.save(),
        composition=(False, 0) if composition is None else (composition.media_next, composition.num_prefills),
        totals=asdict(state.totals),
        policy=state.policy.save(),
        policy_errors=(state.policy.num_errors, state.policy.first_error),
    )


def _save_sequence(sequence: Sequence, numbers: _Numbers) -> SavedSequence:
    history, ids = sequence.draft_history, sequence.token_ids
    return SavedSequence(
        numbers.requests[sequence.request],
        dict(zip(_SEQUENCE, _read_sequence(sequence), strict=True)),
        None if ids is None else ids.tobytes(),
        sequence.keys[:],
        [table[:] for table in sequence.tables],
        sequence.first_live[:],
        [table[:] for table in sequence.host_tables],
        sequence.candidates,
        None if history is None else dict(zip(_DRAFTS, _read_drafts(history), strict=True)),
    )


def _save_request(request: RequestState, numbers: _Numbers) -> SavedRequest:
    beams = request.beams
    return SavedRequest(
        dict(zip(_REQUEST, _read_request(request), strict=True)),
        request.status,
        request.rank,
        request.wait_numbers,
        numbers.of_sequences(request.sequences) if request.status != Status.FINISHED else [],
        request.spare_slots[:],
        request.seen,
        request.shortage,
        None if beams is None else _save_beams(beams),
    )


def _save_beams(beams: BeamGroup) -> SavedBeams:
    pool = [(one.token_ids.tobytes(), one.score, one.cumulative_logprob, one.stop_token_id) for one in beams.pool]
    return SavedBeams(beams.max_outputs, beams.scores[:], beams.num_steps, beams.is_over, pool)


def _save_pool(pool: BlockPool) -> SavedPool:
    keys, blocks = list(pool.block_of), list(pool.block_of.values())
    return SavedPool(
        pool.num_blocks,
        pool.references[:],
        pool.plain[:],
        list(pool.cached),
        keys,
        blocks,
        dict(pool.pending),
        pool.num_freed,
    )


def _save_flight(flight: Flight, numbers: _Numbers) -> SavedFlight:
    effects = flight.effects
    return SavedFlight(
        numbers.of_sequences(flight.rows),
        [
            (made.group, block, made.index, numbers.sequences[made.owner], made.is_duplicate)
            for made in effects.published
            for block in made.blocks
        ],
        effects.saved[:],
        numbers.of_requests(effects.swapped_requests),
        flight.releases[:],
    )


# --- restore --------------------------------------------------------------------------------------------------


def restore(saved: SavedState, limits: Limits) -> State:
    """Return the saved state. Raises InvariantError if it is of another version, or of other limits."""
    state = State(limits)
    if (len(saved.pools), len(saved.host_pools)) != (len(state.cache.pools), len(state.cache.host.pools)):
        raise InvariantError(f"{len(saved.pools)} pools were saved, the limits have {len(state.cache.pools)}")
    _set(state, _STATE, saved.values)
    _set(state.cache, _CACHE, saved.cache)
    requests, sequences = _restore_requests(saved, state)
    waiting = [
        (line.name, line.number, line.noted_key, [requests[number] for number in line.requests]) for line in saved.lines
    ]
    state.waiting.restore(waiting, saved.num_lines)
    state.overdue = [requests[number] for number in saved.overdue]
    state.free_slots = saved.free_slots[:]
    state.updates = Updates(sequences=[sequences[number] for number in saved.new_sequences])
    for name in _UPDATES:
        values = saved.updates[name]
        setattr(state.updates, name, list(values) if name.endswith("_ids") else array("i", values))
    for pool, one in zip((*state.cache.pools, *state.cache.host.pools), (*saved.pools, *saved.host_pools), strict=True):
        _restore_pool(pool, one)
    state.cache.host.is_load_wanted = saved.is_load_wanted
    state.cache.effects = Effects(state.step - 1)
    for plan, flight in zip(saved.plans, saved.flights, strict=True):
        state.flight.append(_restore_flight(plan, flight, requests, sequences))
    state.encoder.restore(saved.encoder)
    if state.composition is not None:
        state.composition.media_next, state.composition.num_prefills = saved.composition
    state.totals = Totals(**saved.totals)
    state.policy.num_errors, state.policy.first_error = saved.policy_errors
    state.policy.restore(saved.policy, {request.order: request for request in state.requests.values()})
    return state


def _set(target: object, names: tuple[str, ...], values: Mapping[str, object]) -> None:
    """Set the fields of an object. Raises InvariantError if other fields were saved."""
    if set(names) != set(values):
        odd = ", ".join(sorted(set(names) ^ set(values)))
        raise InvariantError(f"{type(target).__name__} was saved by another version of Octavo: {odd}")
    for name in names:
        setattr(target, name, values[name])


def _restore_requests(saved: SavedState, state: State) -> tuple[list[RequestState], list[Sequence]]:
    """Add the requests with their sequences to the state, except those in the waiting queue."""
    requests = [RequestState(request, 0, state.limits.num_stages <= 1) for request in saved.requests]
    sequences = [_restore_sequence(one, requests[one.request]) for one in saved.sequences]
    for request, one in zip(requests, saved.progress, strict=True):
        _set(request, _REQUEST, one.values)
        request.status, request.rank, request.wait_numbers = one.status, one.rank, one.wait_numbers
        request.seen, request.shortage, request.spare_slots = one.seen, one.shortage, one.spare_slots[:]
        request.sequences = [sequences[number] for number in one.sequences]
        if one.beams is not None:
            request.beams = _restore_beams(one.beams, request)
        if request.status == Status.FINISHED:
            continue
        state.requests[request.name] = request
        state.deadlines.add(request)
        if request.status == Status.RUNNING:
            state.running.add(request)
            for gate in state.gates:
                gate.take(request)
    for sequence in sequences:
        if sequence.slot >= 0:
            state.slot_owner[sequence.slot] = sequence
    return requests, sequences


def _restore_sequence(saved: SavedSequence, request: RequestState) -> Sequence:
    sequence = Sequence(request, 0, len(saved.tables))
    _set(sequence, _SEQUENCE, saved.values)
    sequence.token_ids = None if saved.token_ids is None else array("i", saved.token_ids)
    sequence.keys, sequence.first_live = saved.keys[:], saved.first_live[:]
    sequence.tables = [table[:] for table in saved.tables]
    sequence.host_tables = [table[:] for table in saved.host_tables]
    sequence.candidates = saved.candidates
    if saved.drafts is not None:
        sequence.draft_history = DraftHistory()
        _set(sequence.draft_history, _DRAFTS, saved.drafts)
    return sequence


def _restore_beams(saved: SavedBeams, request: RequestState) -> BeamGroup:
    beams = BeamGroup(request.request.params, saved.max_outputs, request.stop_ids)
    beams.scores, beams.num_steps, beams.is_over = saved.scores[:], saved.num_steps, saved.is_over
    beams.pool = [Hypothesis(array("i", ids), score, total, stop_id) for ids, score, total, stop_id in saved.pool]
    return beams


def _restore_pool(pool: BlockPool, saved: SavedPool) -> None:
    if saved.num_blocks != pool.num_blocks:
        raise InvariantError(f"a pool of {saved.num_blocks} blocks was saved, the limits have {pool.num_blocks}")
    pool.references, pool.plain = saved.references[:], saved.plain[:]
    pool.key_of, pool.ids_of = [None] * len(pool.references), [None] * len(pool.references)
    pool.cached = OrderedDict.fromkeys(saved.cached)
    pool.block_of = dict(zip(saved.keys, saved.key_blocks, strict=True))
    for key, block in pool.block_of.items():
        pool.key_of[block] = key
    pool.pending, pool.num_freed = dict(saved.pending), saved.num_freed


def _restore_flight(
    plan: StepPlan, saved: SavedFlight, requests: list[RequestState], sequences: list[Sequence]
) -> Flight:
    effects = Effects(plan.step)
    effects.published = [
        Publication(group, [entry[1] for entry in entries], index, sequences[owner], is_duplicate)
        for (group, index, owner, is_duplicate), entries in groupby(saved.published, itemgetter(0, 2, 3, 4))
    ]
    effects.saved = list(saved.saved)
    effects.swapped_requests = [requests[number] for number in saved.swapped]
    return Flight(plan, [sequences[number] for number in saved.rows], effects, list(saved.releases))
