"""A draft model: a second executor, whose sampled ids are proposals for the target's rows.

Owns: the draft model's lanes (slots of its executor, each with the ids and the KV of one sequence) and their blocks.
Does not: verify drafts (the target does), decide when drafts pay (engine.draft_pace), or know the target's blocks.
A lane follows its sequence by position: ids that differ from its own are overwritten, and positions from there on are
computed again. So rejected drafts, preemption and resumed requests need no message. A new sequence gets the lane that
shares the longest prefix with it. Drafts are drawn with the request's own parameters, seed and positions, so that the
two models' draws agree whenever their distributions nearly do. For rejection sampling they are drawn with another seed,
and the distributions of the latest drafts are kept until the next ones.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from octavo.core.plan import ROW_SAMPLE, Events, NewSequence, StepFailure, StepPlan, StepResult
from octavo.core.proposals import LONG_LOOKUP, DraftRow, may_reject
from octavo.core.request import Request
from octavo.executors.protocol import Capacity, Executor, Ticket

if TYPE_CHECKING:  # an engine without a draft model loads this module before torch
    from torch import Tensor

    from octavo.sampling.rejection import FindDistribution

_LOG = logging.getLogger(__name__)
DRAFT_SEED = 0x5851F42D4C957F2D  # makes the seed of draws that rejection sampling verifies
SOURCES = ("model", "ngram")
SHARED = 16  # ids of a common prefix for which a lane is preferred to the one that was unused for longest


class Pace(Protocol):
    """Decides how many drafts to make (engine.draft_pace.DraftPace)."""

    def length(self, rows: Sequence[DraftRow], count_behind: Callable[[], int]) -> int:
        """Return the most drafts of each row now; `count_behind` returns how many ids must be computed first."""
        ...

    def choose(self, rows: Sequence[DraftRow], num_rows: int) -> list[int]:
        """Return how many ids of each row's lookup to verify in a plan of `num_rows` rows."""
        ...

    def drafted(self, num_rows: int, passes: list[tuple[int, float]]) -> None:
        """Learn the times of passes of the draft model: tokens and seconds of each."""
        ...

    def stepped(self, plan: StepPlan, result: StepResult, slots: frozenset[int]) -> None:
        """Learn the time and the result of a step of the target; `slots` had the draft model's drafts."""
        ...

    def report(self) -> dict[str, object]:
        """Return what was learned, for statistics."""
        ...


@runtime_checkable
class RejectionExecutor(Protocol):
    """What an executor has that makes or verifies drafts by rejection sampling."""

    def verify_by_rejection(self, find_distribution: FindDistribution | None) -> None:
        """Verify drafts by rejection sampling from now on; without `find_distribution`, no model drew them."""
        ...

    def keep_distributions(self, num_ids: int) -> None:
        """Draw only ids below `num_ids` from now on, and keep the distributions that they are drawn from."""
        ...

    def distributions(self, ticket: Ticket) -> list[Tensor]:
        """Return the distributions that a collected step's ids were drawn from, one row for each sampling row."""
        ...


@dataclass(slots=True)
class _Lane:
    """A slot of the draft executor. `ids` are those in the slot, drafts included; `num_computed` of them have KV."""

    slot: int
    request: Request | None = None
    choice: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))
    num_committed: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    last_used: int = 0

    def is_of(self, row: DraftRow) -> bool:
        return self.request is row.request and self.choice == row.choice

    def num_equal(self, ids: array[int]) -> int:
        """Return the length of the common prefix with `ids` that has KV."""
        size = min(self.num_computed, len(ids))
        differs = np.flatnonzero(np.array(self.ids[:size]) != np.array(ids[:size]))
        return int(differs[0]) if len(differs) else size


class DraftModel:
    """See core.proposals.DraftSource. Also an EventSink of the engine's loop, from which the pace learns."""

    knows_lengths = False

    def __init__(
        self,
        executor: Executor,
        capacity: Capacity,
        pace: Pace,
        vocab_size: int,
        chunk: int,
        beside_ngrams: bool = False,
    ) -> None:
        """Wrap an opened executor. `vocab_size` is the target's. Each pass computes at most `chunk` tokens."""
        self._executor = executor
        self._capacity = capacity
        self._pace = pace
        self._vocab_size = vocab_size
        self._chunk = chunk
        self.min_match = LONG_LOOKUP if beside_ngrams else 0
        self._lanes = [_Lane(slot) for slot in range(capacity.num_slots)]
        self._free = list(range(min(capacity.num_blocks)))
        self._next = StepPlan(0, 0.0)
        self._clock = 0
        self._slots: set[int] = set()  # of the target, with drafts in a plan in flight
        self._num_drafted = dict.fromkeys(SOURCES, 0)
        self._num_accepted = dict.fromkeys(SOURCES, 0)
        self._failure: str | None = None
        self._rejection: RejectionExecutor | None = None  # the executor, if drafts are for rejection sampling
        self._probs: list[Tensor] = []  # distributions of the latest pass
        self._drawn_from: dict[int, tuple[int, list[Tensor]]] = {}  # slot of the target -> first position, and from it

    def draw_for_rejection(self) -> None:
        """Draw drafts that rejection sampling verifies."""
        assert isinstance(self._executor, RejectionExecutor), "an executor that keeps distributions"
        self._rejection = self._executor
        self._rejection.keep_distributions(self._vocab_size)

    def distribution(self, slot: int, position: int) -> Tensor | None:
        """Return the distribution of the latest draft for this slot of the target at this position; None if unknown."""
        first, drawn_from = self._drawn_from.get(slot, (0, []))
        return drawn_from[position - first] if 0 <= position - first < len(drawn_from) else None

    def propose(self, rows: list[DraftRow], num_rows: int) -> list[array[int]]:
        """Return drafts for each row: its lookup, or the draft model's, unless they do not pay or it has failed."""
        counts = self._pace.choose(rows, num_rows) if self.min_match else [0] * len(rows)
        drafts = [row.lookup.ids[:count] for row, count in zip(rows, counts, strict=True)]
        rest = [index for index, count in enumerate(counts) if not count]
        for index, ids in zip(rest, self._propose([rows[index] for index in rest]), strict=True):
            drafts[index] = ids
        return drafts

    def _propose(self, rows: list[DraftRow]) -> list[array[int]]:
        """Return the draft model's drafts for each row."""
        found = [array("i") for _ in rows]
        self._drawn_from = {}
        if not rows or self._failure is not None or len(rows) > len(self._lanes):
            return found
        length = self._pace.length(rows, lambda: self._num_behind(rows))
        if length:
            try:
                self._draft(rows, self._choose_lanes(rows), length, found)
            except (MemoryError, RuntimeError) as error:  # generation goes on without drafts
                self._failure = f"{type(error).__name__}: {error}"
                _LOG.exception("the draft model failed and is switched off")
                return [array("i") for _ in rows]
            self._slots |= {row.slot for row, ids in zip(rows, found, strict=True) if ids}
        return found

    # --- the sink of the loop's events ----------------------------------------------------------------

    def admitted(self, request: Request) -> None:
        """Do nothing."""

    def decided(self, decisions: tuple[object, ...]) -> None:
        """Do nothing."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Learn from a step of the target, and count its drafts."""
        own = frozenset(self._slots.intersection(plan.slots))
        self._slots -= own
        if isinstance(outcome, StepResult):
            self._pace.stepped(plan, outcome, own)
            if plan.num_drafts:
                self._count(plan, outcome, own)

    def _count(self, plan: StepPlan, result: StepResult, own: frozenset[int]) -> None:
        sampling = _sampling(plan)
        for row, count in zip(sampling, result.num_token_ids or [1] * len(sampling), strict=True):
            source = SOURCES[plan.slots[row] not in own]
            self._num_drafted[source] += plan.num_drafts[row]
            self._num_accepted[source] += max(0, count - 1)

    def report(self) -> dict[str, object]:
        """Return what the pace learned, the drafts by source, and why the draft model is off if it failed."""
        counts = {"drafted_tokens": dict(self._num_drafted), "accepted_tokens": dict(self._num_accepted)}
        return {**self._pace.report(), **counts, "failure": self._failure}

    def close(self) -> None:
        """Close the executor. Idempotent."""
        self._executor.close()

    # --- lanes ----------------------------------------------------------------------------------------

    def _num_behind(self, rows: list[DraftRow]) -> int:
        """Return how many ids the rows' lanes lack, beside the last id of each."""
        lanes = self._choose_lanes(rows)
        return sum(len(row.token_ids) - self._num_reused(lane, row) - 1 for lane, row in zip(lanes, rows, strict=True))

    def _choose_lanes(self, rows: list[DraftRow]) -> list[_Lane]:
        """Return each row's lane; a row without one gets that with the longest common prefix, or the least used."""
        self._clock += 1
        found = [next((lane for lane in self._lanes if lane.is_of(row)), None) for row in rows]
        taken = {lane.slot for lane in found if lane is not None}
        lanes = []
        for row, lane in zip(rows, found, strict=True):
            if lane is None:
                free = [one for one in self._lanes if one.slot not in taken]
                shared = {one.slot: one.num_equal(row.token_ids) for one in free}
                lane = max(free, key=lambda one: (shared[one.slot] // SHARED, -one.last_used))
                taken.add(lane.slot)
            lane.last_used = self._clock
            lanes.append(lane)
        return lanes

    def _num_reused(self, lane: _Lane, row: DraftRow) -> int:
        """Return how many positions of the row's known ids have KV in the lane; the last id is always computed."""
        return min(self._first_difference(lane, row), lane.num_computed, len(row.token_ids) - 1)

    def _first_difference(self, lane: _Lane, row: DraftRow) -> int:
        if not lane.is_of(row):
            return lane.num_equal(row.token_ids)
        ids, size = row.token_ids, min(len(lane.ids), len(row.token_ids))
        return next((at for at in range(min(lane.num_committed, size), size) if lane.ids[at] != ids[at]), size)

    def _is_rejected(self, row: DraftRow) -> bool:
        return self._rejection is not None and may_reject(row.request.params)

    def _follow(self, lane: _Lane, row: DraftRow) -> None:
        """Give the lane the row's known ids; the next plan has the changes."""
        ids, first = row.token_ids, self._first_difference(lane, row)
        lane.num_computed = self._num_reused(lane, row)
        if lane.is_of(row):
            for position in range(first, len(ids)):
                known = min(ids[position], self._capacity.vocab_size - 1)  # the target may have more ids
                self._next.id_edits.extend((lane.slot, position, known))
            del lane.ids[first:]
            lane.ids.extend(ids[first:])
        else:
            lane.request, lane.choice, lane.ids = row.request, row.choice, ids[:]
            params = row.request.params
            # the target returns the log-probabilities, and obeys the grammar
            seed = (params.seed or 0) ^ DRAFT_SEED if self._is_rejected(row) else params.seed
            params = replace(params, logprobs=None, prompt_logprobs=None, grammar="", n=1, best_of=None, seed=seed)
            name, ends = row.request.request_id, row.request.eos_token_ids
            num_prompt = row.request.num_prompt_tokens
            self._next.new_sequences += (NewSequence(lane.slot, name, row.choice, num_prompt, ids[:], params, ends),)
            self._edit_table(lane, 0)
        lane.num_committed = len(ids)

    def _extend(self, lane: _Lane, end: int) -> bool:
        """Give the lane blocks for its positions up to `end`, if need be those of the lanes unused for longest."""
        wanted, first = -(-end // self._capacity.block_size), len(lane.blocks)
        if end > self._capacity.max_model_len:
            return False
        idle = sorted((one for one in self._lanes if one.last_used < self._clock), key=lambda one: one.last_used)
        for other in idle:
            if len(self._free) >= wanted - first:
                break
            self._free += other.blocks
            self._lanes[other.slot] = _Lane(other.slot)
        if len(self._free) < wanted - first:
            return False
        lane.blocks += [self._free.pop() for _ in range(wanted - first)]
        self._edit_table(lane, first)
        return True

    def _edit_table(self, lane: _Lane, first: int) -> None:
        for group in range(len(self._capacity.groups)):
            for index in range(first, len(lane.blocks)):
                self._next.edits.extend((lane.slot, group, index, lane.blocks[index]))

    # --- passes ---------------------------------------------------------------------------------------

    def _draft(self, rows: list[DraftRow], lanes: list[_Lane], length: int, found: list[array[int]]) -> None:
        """Compute the ids that the lanes lack, then up to `length` drafts of each row that lacks none, into `found`."""
        left, passes, active = self._chunk, list[tuple[int, float]](), list[int]()
        plan = self._next
        for index, (row, lane) in enumerate(zip(rows, lanes, strict=True)):
            self._follow(lane, row)
            start, size = lane.num_computed, len(lane.ids)
            count = min(size - start, left)
            is_last = start + count == size
            most = min(length, row.most) if is_last else 0
            if not count or not self._extend(lane, size + most):
                continue
            left -= count
            _add(plan, lane, count, ROW_SAMPLE if is_last else 0)
            if is_last:
                active.append(index)
        sampled = self._run(passes)
        while active:
            more = []
            for at, (index, token) in enumerate(zip(active, sampled, strict=True)):
                lane, row = lanes[index], rows[index]
                if token is None or token >= self._vocab_size:
                    continue
                found[index].append(token)
                lane.ids.append(token)
                if self._is_rejected(row):
                    self._drawn_from.setdefault(row.slot, (len(row.token_ids), []))[1].append(self._probs[at])
                if len(found[index]) < min(length, row.most):
                    more.append(index)
                    _add(self._next, lane, 1, ROW_SAMPLE)
            active = more
            sampled = self._run(passes) if active else []
        self._pace.drafted(len(rows), passes)

    def _run(self, passes: list[tuple[int, float]]) -> list[int | None]:
        """Run the next plan; return the id of each row that samples, or None if the row's result is unusable."""
        plan, self._next = self._next, StepPlan(0, 0.0)
        if plan.is_empty:
            return []
        plan.num_query_tokens, started_at = sum(plan.counts), time.perf_counter()
        ticket = self._executor.submit(plan)
        result = self._executor.collect(ticket)
        passes.append((plan.num_query_tokens, time.perf_counter() - started_at))
        if self._rejection is not None and result.token_ids:
            self._probs = self._rejection.distributions(ticket)
        bad = {row for row, _ in (*result.errors, *result.dead_ends)}
        ids = iter(result.token_ids or ())
        return [next(ids) if row not in bad else (next(ids), None)[1] for row in _sampling(plan)]


def _sampling(plan: StepPlan) -> list[int]:
    return [row for row, flags in enumerate(plan.flags) if flags & ROW_SAMPLE]


def _add(plan: StepPlan, lane: _Lane, count: int, flags: int) -> None:
    """Add a row with the lane's next `count` ids."""
    plan.slots.append(lane.slot)
    plan.starts.append(lane.num_computed)
    plan.counts.append(count)
    plan.flags.append(flags)
    lane.num_computed += count
