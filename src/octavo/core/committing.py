"""Takes in what a step produced: tokens, stops, blocks that may now be found, and failures.

Owns: the pass over the rows of one finished plan. Does not: compose plans, or undo what failed (see recovery).
Invariants: plans are committed in the order made; a token is appended once; a row whose sequence ended or
was put back with its results void changes nothing; a failed step leaves no block findable that it wrote.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from octavo.core import recovery, searching, speculation
from octavo.core.kv.cache import Publication
from octavo.core.plan import (
    ROW_BEAM,
    ROW_CARRY,
    ROW_FORK,
    ROW_SAMPLE,
    Events,
    StepFailure,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.core.request import FinishReason, RequestState, Sequence, Status
from octavo.core.state import Flight, State
from octavo.errors import InvariantError

_CARRIED = ROW_SAMPLE | ROW_CARRY


class Committer:
    """One step's results on their way into the state."""

    __slots__ = (
        "choices",
        "events",
        "flight",
        "logprobs",
        "now",
        "positions",
        "searching",
        "state",
        "token_ids",
    )

    def __init__(self, state: State, flight: Flight, now: float) -> None:
        self.state = state
        self.flight = flight
        self.now = now
        self.events = Events(flight.plan.step, now)
        self.choices: list[int] = []  # columns in the making: a list grows in half the time of an array
        self.positions: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] | None = None
        self.searching: list[RequestState] = []  # beam searches whose every beam may have its candidates now

    # --- a step that worked -------------------------------------------------------------------------

    def commit(self, result: StepResult) -> Events:
        """Append tokens, end what is done, confirm what was published."""
        state, flight, plan = self.state, self.flight, self.flight.plan
        bad = self._bad_rows(result)
        if bad:
            recovery.reject(state, flight, bad, self.now)
        recovery.end(state, flight, result.dead_ends, self.now)
        state.cache.confirm(flight.published, plan.step)
        state.cache.host.confirm(flight.saved, plan.step)
        recovery.release(state, flight)
        if result.scores or result.pooled:
            self._take_outputs(result, bad)
        if result.logprobs is not None:
            self.logprobs = []
        if result.num_token_ids is None and not bad and not plan.num_drafts:
            self._commit_regular(result)
        else:
            self._commit_rows(result)
        self._adopt_twins(flight.published)
        for request in self.searching:
            self._advance(request)
        if state.encoder.num_references:
            for sequence in flight.rows:
                if sequence.request.request.spans:
                    state.encoder.commit(sequence.request.name, sequence.num_computed)
        if state.policy.tracks_service:
            self._charge()
        totals = state.totals
        totals.num_steps += 1
        totals.num_computed_tokens += plan.num_query_tokens
        totals.num_output_tokens += len(self.token_ids)
        totals.num_drafted_tokens += len(plan.draft_token_ids)
        return self._close()

    def _bad_rows(self, result: StepResult) -> dict[int, str]:
        """Rows without a usable result, and the forks behind them: they stand on the same KV and logits."""
        bad = dict(result.errors)
        for index, reason in result.errors:
            for fork in recovery.forks_behind(self.flight, index):
                bad.setdefault(fork, reason)
        return bad

    def _commit_regular(self, result: StepResult) -> None:
        """Take a step in which every sampling row gave one token: plain rows together, others each by itself."""
        plan, rows, logprobs = self.flight.plan, self.flight.rows, result.logprobs
        flags = plan.flags
        if flags.count(ROW_SAMPLE) + flags.count(_CARRIED) == len(flags):  # rows and results go in step
            self._commit_plain(rows, plan.counts, self._sampled(result, len(rows)), logprobs)
            return
        plain, picks, odd, at = [], [], [], 0
        for index, flag in enumerate(flags):
            if flag in (ROW_SAMPLE, _CARRIED):
                plain.append(index)
                picks.append(at)
            else:
                odd.append((index, at))
            at += flag & ROW_SAMPLE
        ids = self._sampled(result, at)
        self._commit_plain(
            [rows[index] for index in plain],
            [plan.counts[index] for index in plain],
            [ids[pick] for pick in picks],
            None if logprobs is None else [logprobs[pick] for pick in picks],
        )
        for index, at in odd:
            end = at + (flags[index] & ROW_SAMPLE)
            self._commit_row(index, rows[index], ids[at:end], None if logprobs is None else logprobs[at:end])

    def _commit_plain(
        self,
        rows: list[Sequence],
        counts: Iterable[int],
        ids: Iterable[int],
        logprobs: list[TokenLogprobs | None] | None,
    ) -> None:
        """Take one sampled token per row: the hot path, with the common case entered right here.

        Rows that close a block, may stop, or are no longer wanted take the general way.
        """
        add_name, add_choice = self.events.request_ids.append, self.choices.append
        add_position, add_id = self.positions.append, self.token_ids.append
        running, size = Status.RUNNING, self.state.cache.block_size
        for index, (sequence, count, token) in enumerate(zip(rows, counts, ids, strict=True)):
            sequence.in_flight -= 1
            request = sequence.request
            if request.status is not running or sequence.stale:
                self._commit_late(sequence, count, token, logprobs[index] if logprobs else None)
                continue
            computed = sequence.num_computed = sequence.num_computed + count
            known = sequence.num_committed
            if (
                logprobs is not None
                or computed % size == 0
                or count > 1
                or known + 1 >= sequence.limit
                or token in request.stop_ids
            ):
                self._append(sequence, token, logprobs[index] if logprobs else None)
                continue
            add_name(request.name)
            add_choice(sequence.choice)
            add_position(known - sequence.num_prompt)
            add_id(token)
            if sequence.token_ids is not None:
                sequence.token_ids.append(token)
            sequence.num_committed = known + 1
            sequence.num_pending -= 1

    def _commit_late(self, sequence: Sequence, count: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """A row whose sequence no longer runs: the token of one that was preempted in flight is kept."""
        if sequence.request.status == Status.FINISHED or sequence.stale:
            self._drop(sequence)
            return
        if sequence.request.is_swapped:  # what it wrote was copied to the host behind it
            sequence.num_computed += count
        self._append(sequence, token, logprobs)

    def _commit_rows(self, result: StepResult) -> None:
        """Take rows of any kind, in order; only those that sample have a result. Bad ones are stale by now."""
        plan, rows = self.flight.plan, self.flight.rows
        num_sampling = sum(1 for flag in plan.flags if flag & ROW_SAMPLE)
        lengths = result.num_token_ids
        if lengths is not None and len(lengths) != num_sampling:
            raise InvariantError(f"step {plan.step}: {len(lengths)} result lengths for {num_sampling} sampling rows")
        ids = self._sampled(result, num_sampling if lengths is None else sum(lengths))
        at = sampling = 0
        for index, sequence in enumerate(rows):
            count = 0
            if plan.flags[index] & ROW_SAMPLE:
                count = 1 if lengths is None else lengths[sampling]
                sampling += 1
            entries = result.logprobs[at : at + count] if result.logprobs is not None else None
            self._commit_row(index, sequence, ids[at : at + count], entries)
            at += count

    def _commit_row(
        self,
        index: int,
        sequence: Sequence,
        ids: array[int],
        logprobs: list[TokenLogprobs | None] | None,
    ) -> None:
        request, plan = sequence.request, self.flight.plan
        sequence.in_flight -= 1
        if request.status == Status.FINISHED or sequence.stale:
            self._drop(sequence)
            return
        flags = plan.flags[index]
        if flags & ROW_SAMPLE and not ids:
            recovery.discard(self.state, sequence, self.now)  # it has to be sampled again, from logits that are gone
            return
        num_drafts = plan.num_drafts[index] if plan.num_drafts else 0
        if num_drafts:
            self._take_drafts(sequence, index, ids, logprobs)
            return
        if request.status == Status.RUNNING or request.is_swapped:
            # A fork computes nothing itself: its parent's row did.
            computed = plan.starts[index] if flags & ROW_FORK else sequence.num_computed
            sequence.num_computed = computed + plan.counts[index]
        if flags & ROW_BEAM:
            self._take_candidates(sequence, logprobs[0] if logprobs else None)
            return
        for offset, token in enumerate(ids):
            if self._append(sequence, token, logprobs[offset] if logprobs else None):
                return
        reached = plan.starts[index] + plan.counts[index]
        if not request.samples and reached >= sequence.num_known:
            # also one that was preempted in flight: it has given all it was asked for
            self.state.finish(request, self.now, FinishReason.STOP)

    def _take_drafts(
        self, sequence: Sequence, index: int, ids: array[int], logprobs: list[TokenLogprobs | None] | None
    ) -> None:
        """Take what a row of drafts gave: the accepted ones and one draw more."""
        plan = self.flight.plan
        first, num_drafts = sum(plan.num_drafts[:index]), plan.num_drafts[index]
        if len(ids) > 1 + num_drafts or ids[:-1] != plan.draft_token_ids[first : first + len(ids) - 1]:
            raise InvariantError(f"step {plan.step}: row {index} gives other ids than accepted drafts and a draw")
        speculation.take_result(self.state, sequence, plan.starts[index], num_drafts, len(ids))
        for offset, token in enumerate(ids):
            self.state.totals.num_accepted_tokens += offset > 0
            if self._append(sequence, token, logprobs[offset] if logprobs else None):
                return

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Make a sampled token known, publish the block it closes; True when it ends its choice."""
        request = sequence.request
        self._emit(request.name, sequence.choice, sequence.num_outputs, token, logprobs)
        if sequence.token_ids is not None:
            sequence.token_ids.append(token)
        sequence.num_committed += 1
        sequence.num_pending -= 1
        self._publish(sequence)
        params = request.request.params
        if token in request.stop_ids and sequence.num_outputs > params.min_tokens:
            stop_id = token if token in params.stop_token_ids else None
            self.state.end_choice(sequence, self.now, FinishReason.STOP, stop_id)
        elif sequence.num_committed >= sequence.limit:
            self.state.end_choice(sequence, self.now, FinishReason.LENGTH)
        else:
            return False
        return True

    def _emit(self, name: str, choice: int, position: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """Enter one token in the columns."""
        self.events.request_ids.append(name)
        self.choices.append(choice)
        self.positions.append(position)
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprobs)

    def _publish(self, sequence: Sequence) -> None:
        """Make the blocks findable that are full and computed now."""
        cache = self.state.cache
        if sequence.slot >= 0 and sequence.num_computed >= (sequence.num_published + 1) * cache.block_size:
            self._adopt_twins(cache.publish(sequence, sequence.num_computed, None))

    def _adopt_twins(self, made: list[Publication]) -> None:
        """A full block equal to a cached one gives way to it; the edit goes with the next plan (K04)."""
        for entry in made:
            if not entry.is_duplicate or entry.owner.slot < 0:
                continue
            twin = self.state.cache.find_duplicated(entry)
            if twin is not None:
                for sequence in self.state.cache.dedup(entry, twin):
                    self.state.table_edits.extend((sequence.slot, entry.group, entry.index, twin))
                    self.state.defer_release(entry.group, entry.block)
                self.state.totals.num_adopted_blocks += 1

    # --- beams --------------------------------------------------------------------------------------

    def _take_candidates(self, sequence: Sequence, entry: TokenLogprobs | None) -> None:
        """Keep what may follow a beam until all beams of its request have theirs."""
        request = sequence.request
        sequence.num_pending -= 1
        if entry is not None:
            sequence.candidates = (entry.top_ids, entry.top_logprobs)
        else:  # from an executor that knows only durations
            num = 2 * request.request.params.beam_width
            sequence.candidates = ((-1,) * num, tuple(-0.1 * (i + 1) for i in range(num)))
        self._publish(sequence)
        if request not in self.searching:
            self.searching.append(request)

    def _advance(self, request: RequestState) -> None:
        """Take the next token of a beam search; when it is over, give the best beams' tokens and end the request."""
        if request.status != Status.RUNNING or any(beam.candidates is None for beam in request.sequences):
            return
        if not searching.advance(self.state, request):
            return
        best = searching.best(request)
        for choice, beam in enumerate(best):
            for position, token in enumerate(beam.token_ids):
                self._emit(request.name, choice, position, token, None)
        searching.finish(self.state, request, best, self.now)

    def _sampled(self, result: StepResult, expected: int) -> array[int]:
        """The step's ids; an executor that knows only durations has none, and -1 stands for each."""
        if result.token_ids is None:
            return array("i", [-1]) * expected
        if len(result.token_ids) != expected:
            raise InvariantError(
                f"step {self.flight.plan.step}: {len(result.token_ids)} sampled ids, {expected} expected"
            )
        return result.token_ids

    def _take_outputs(self, result: StepResult, bad: dict[int, str]) -> None:
        """Pass on scores not given before, and pooled states, of rows whose results count."""
        scores = []
        for index, first, entries in result.scores:
            request = self.flight.rows[index].request
            if not self._counts(index, bad):
                continue
            skip = max(0, request.num_scored - first)
            if entries[skip:]:
                scores.append((request.name, first + skip, entries[skip:]))
                request.num_scored = first + len(entries)
        self.events.scores = tuple(scores)
        self.events.pooled = tuple(
            (self.flight.rows[index].request.name, data) for index, data in result.pooled if self._counts(index, bad)
        )

    def _counts(self, index: int, bad: dict[int, str]) -> bool:
        """Whether anybody still wants what a row gave."""
        sequence = self.flight.rows[index]
        return index not in bad and not sequence.stale and sequence.request.status != Status.FINISHED

    def _drop(self, sequence: Sequence) -> None:
        """A row whose result nobody wants any more."""
        if sequence.stale:
            sequence.stale -= 1

    def _charge(self) -> None:
        """Tell the policy what each request was given."""
        requests = {sequence.request.name: sequence.request for sequence in self.flight.rows}
        counts: dict[str, int] = {}
        for name in self.events.request_ids:
            counts[name] = counts.get(name, 0) + 1
        for name, count in counts.items():
            self.state.policy.tell("served", requests[name], count)

    def fail(self) -> Events:
        """Undo this plan and every later one."""
        recovery.fail(self.state, self.flight, self.now)
        return self._close()

    def _close(self) -> Events:
        self.state.settle()
        self.events.choices = array("i", self.choices)
        self.events.positions = array("i", self.positions)
        self.events.token_ids = array("i", self.token_ids)
        self.events.logprobs = self.logprobs
        self.events.decisions = tuple(self.state.events)
        self.state.events = []
        return self.events


def apply(state: State, plan: StepPlan, outcome: StepResult | StepFailure, now: float) -> Events:
    """Commit the oldest plan in flight."""
    if not state.flight or state.flight[0].plan.step != plan.step:
        expected = f"step {state.flight[0].plan.step}" if state.flight else "none"
        raise InvariantError(f"step {plan.step} is committed, expected is {expected}: commit each plan once, in order")
    committer = Committer(state, state.flight.popleft(), now)
    if isinstance(outcome, StepFailure):
        return committer.fail()
    return committer.commit(outcome)
