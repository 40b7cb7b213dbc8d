"""Commits one step: tokens, ends, blocks that can be found from now on, and failures.

Owns: the pass over the rows of the oldest plan in flight. Does not: plan, or undo what failed (recover).
Invariants: plans are committed in the order made; a token is appended once; a row of a sequence that ended, or was
discarded since, changes nothing; blocks that a failed step or row wrote cannot be found.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from octavo.core import branching, drafts, recover
from octavo.core.kv.effects import Publication
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


def commit_step(state: State, plan: StepPlan, outcome: StepResult | StepFailure, now: float) -> Events:
    """Commit the oldest plan in flight. Raises InvariantError if `plan` is another."""
    if not state.flight or state.flight[0].plan.step != plan.step:
        expected = f"step {state.flight[0].plan.step}" if state.flight else "none"
        raise InvariantError(f"step {plan.step} is committed, expected is {expected}: commit each plan once, in order")
    commit = StepCommit(state, state.flight.popleft(), now)
    if isinstance(outcome, StepFailure):
        recover.undo_steps(state, commit.flight, now)
    else:
        commit.take(outcome)
    return commit.close()


class StepCommit:
    """The results of one step on their way into the state and into Events."""

    __slots__ = ("choices", "events", "flight", "logprobs", "now", "positions", "searching", "state", "token_ids")

    def __init__(self, state: State, flight: Flight, now: float) -> None:
        self.state = state
        self.flight = flight
        self.now = now
        self.events = Events(flight.plan.step, now)
        self.choices: list[int] = []  # columns in the making: a list grows in half the time of an array
        self.positions: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] | None = None
        self.searching: list[RequestState] = []  # beam searches that may have the candidates of all beams now

    def take(self, result: StepResult) -> None:
        """Append tokens, end what is done, confirm what was published."""
        state, flight, plan = self.state, self.flight, self.flight.plan
        bad = recover.bad_rows(flight, result)
        if bad:
            recover.retry_bad_rows(state, flight, bad, self.now)
        recover.finish_dead_ends(state, flight, result.dead_ends, self.now)
        state.cache.confirm(flight.effects)
        recover.release_blocks(state, flight)
        if result.scores or result.pooled:
            self._take_outputs(result, bad)
        if result.logprobs is not None:
            self.logprobs = []
        self._take_rows(result, is_regular=result.num_token_ids is None and not bad and not plan.num_drafts)
        self._deduplicate(flight.effects.published)
        for request in self.searching:
            self._advance(request)
        if state.limits.encoder_budget:
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

    def close(self) -> Events:
        """Return what became known: the columns of tokens, and all decisions since the last plan or commit."""
        state, events = self.state, self.events
        state.report_ended()
        events.choices = array("i", self.choices)
        events.positions = array("i", self.positions)
        events.token_ids = array("i", self.token_ids)
        events.logprobs = self.logprobs
        events.decisions = tuple(state.events)
        state.events = []
        return events

    # --- rows -----------------------------------------------------------------------------------------

    def _take_rows(self, result: StepResult, is_regular: bool) -> None:
        """Take the result of each row; in a regular step every sampling row gave one token."""
        rows, plan, logprobs = self.flight.rows, self.flight.plan, result.logprobs
        counts, flags = plan.counts, plan.flags
        if is_regular and flags.count(ROW_SAMPLE) + flags.count(_CARRIED) == len(flags):
            self._take_plain_rows(rows, counts, self._sampled(result, len(rows)), logprobs)
            return
        ends = self._result_ends(result)
        begins, ids = [0, *ends], self._sampled(result, ends[-1] if ends else 0)
        others: Iterable[int] = range(len(rows))
        if is_regular:  # plain rows first, together
            plain = [index for index, flag in enumerate(flags) if flag in (ROW_SAMPLE, _CARRIED)]
            others = [index for index, flag in enumerate(flags) if flag not in (ROW_SAMPLE, _CARRIED)]
            self._take_plain_rows(
                [rows[index] for index in plain],
                [counts[index] for index in plain],
                [ids[begins[index]] for index in plain],
                None if logprobs is None else [logprobs[begins[index]] for index in plain],
            )
        for index in others:
            begin, end = begins[index], ends[index]
            self._take_row(index, rows[index], ids[begin:end], None if logprobs is None else logprobs[begin:end])

    def _result_ends(self, result: StepResult) -> list[int]:
        """Return, for each row, where its part of the result's columns ends; only rows that sample have a part."""
        plan, lengths = self.flight.plan, result.num_token_ids
        ends, end, num_sampling = [], 0, 0
        for flag in plan.flags:
            if flag & ROW_SAMPLE:
                end += 1 if lengths is None or num_sampling >= len(lengths) else lengths[num_sampling]
                num_sampling += 1
            ends.append(end)
        if lengths is not None and len(lengths) != num_sampling:
            raise InvariantError(f"step {plan.step}: {len(lengths)} result lengths for {num_sampling} sampling rows")
        return ends

    def _sampled(self, result: StepResult, expected: int) -> array[int]:
        """Return the step's ids; an executor that knows only durations has none, which gives -1 for each."""
        if result.token_ids is None:
            return array("i", [-1]) * expected
        if len(result.token_ids) != expected:
            raise InvariantError(
                f"step {self.flight.plan.step}: {len(result.token_ids)} sampled ids, {expected} expected"
            )
        return result.token_ids

    def _take_plain_rows(
        self,
        rows: list[Sequence],
        counts: Iterable[int],
        ids: Iterable[int],
        logprobs: list[TokenLogprobs | None] | None,
    ) -> None:
        """Take one sampled token per row: the hot path, with the common case entered right here.

        Rows that fill a block, may stop, or are void take the general way.
        """
        add_name, add_choice = self.events.request_ids.append, self.choices.append
        add_position, add_id = self.positions.append, self.token_ids.append
        running, size = Status.RUNNING, self.state.cache.block_size
        for index, (sequence, count, token) in enumerate(zip(rows, counts, ids, strict=True)):
            sequence.in_flight -= 1
            request = sequence.request
            if request.status is not running or sequence.stale:
                self._take_late(sequence, count, token, logprobs[index] if logprobs else None)
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

    def _take_late(self, sequence: Sequence, count: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take a row whose sequence no longer runs: the token of one that was preempted in flight is kept."""
        if self._drop_void(sequence):
            return
        if sequence.request.is_swapped:  # what it wrote was copied to the host after it
            sequence.num_computed += count
        self._append(sequence, token, logprobs)

    @staticmethod
    def _drop_void(sequence: Sequence) -> bool:
        """Drop the result of a row if it is no longer wanted; return True if it was dropped."""
        if sequence.stale:
            sequence.stale -= 1
            return True
        return sequence.request.status == Status.FINISHED

    def _take_row(
        self, index: int, sequence: Sequence, ids: array[int], logprobs: list[TokenLogprobs | None] | None
    ) -> None:
        """Take the result of a row of any kind."""
        request, plan, flags = sequence.request, self.flight.plan, self.flight.plan.flags[index]
        sequence.in_flight -= 1
        if self._drop_void(sequence):
            return
        if flags & ROW_SAMPLE and not ids:
            recover.discard(self.state, sequence, self.now)  # to be sampled again: its logits no longer exist
            return
        num_drafts = plan.num_drafts[index] if plan.num_drafts else 0
        if num_drafts:
            self._take_drafts(sequence, index, ids)
        elif request.status == Status.RUNNING or request.is_swapped:
            # A fork computes nothing itself: its parent's row did.
            computed = plan.starts[index] if flags & ROW_FORK else sequence.num_computed
            sequence.num_computed = computed + plan.counts[index]
        if flags & ROW_BEAM:
            self._take_candidates(sequence, logprobs[0] if logprobs else None)
            return
        for offset, token in enumerate(ids):
            if num_drafts and offset:
                self.state.totals.num_accepted_tokens += 1
            if self._append(sequence, token, logprobs[offset] if logprobs else None):
                return
        if not request.samples and plan.starts[index] + plan.counts[index] >= sequence.num_known:
            # also a request that was preempted in flight: all its results are known
            self.state.finish(request, self.now, FinishReason.STOP)

    def _take_drafts(self, sequence: Sequence, index: int, ids: array[int]) -> None:
        """Check that a row gave accepted drafts and one draw, and drop what was written for the rejected ones."""
        plan = self.flight.plan
        first, num_drafts = sum(plan.num_drafts[:index]), plan.num_drafts[index]
        if len(ids) > 1 + num_drafts or ids[:-1] != plan.draft_token_ids[first : first + len(ids) - 1]:
            raise InvariantError(f"step {plan.step}: row {index} gives other ids than accepted drafts and a draw")
        drafts.take_result(self.state, sequence, plan.starts[index], num_drafts, len(ids))

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Append a sampled token, publish the block it closes; return True if it ends its choice."""
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

    # --- blocks ---------------------------------------------------------------------------------------

    def _publish(self, sequence: Sequence) -> None:
        """Make the blocks findable that are full and computed now."""
        cache = self.state.cache
        if sequence.slot >= 0 and sequence.num_computed >= (sequence.num_published + 1) * cache.block_size:
            self._deduplicate(cache.publish(sequence, sequence.num_computed, None))

    def _deduplicate(self, published: list[Publication]) -> None:
        """Replace full blocks by equal ones that were cached before; the next plan has the edits (K04)."""
        state = self.state
        for made in published:
            if not made.is_duplicate or made.owner.slot < 0:
                continue
            cached = state.cache.find_duplicated(made)
            if cached is not None:
                for sequence in state.cache.dedup(made, cached):
                    state.updates.table_edits.extend((sequence.slot, made.group, made.index, cached))
                    state.defer_release(made.group, made.block)
                state.totals.num_adopted_blocks += 1

    # --- beams, scores, service -----------------------------------------------------------------------

    def _take_candidates(self, sequence: Sequence, given: TokenLogprobs | None) -> None:
        """Keep what may follow a beam until all beams of its request have their candidates."""
        request = sequence.request
        sequence.num_pending -= 1
        if given is not None:
            sequence.candidates = (given.top_ids, given.top_logprobs)
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
        best = branching.advance_beams(self.state, request)
        if best is None:
            return
        for choice, beam in enumerate(best):
            for position, token in enumerate(beam.token_ids):
                self._emit(request.name, choice, position, token, None)
        branching.finish_beams(self.state, request, best, self.now)

    def _take_outputs(self, result: StepResult, bad: dict[int, str]) -> None:
        """Give scores that were not given before, and pooled states, of rows whose results count."""
        requests = {
            index: sequence.request
            for index, sequence in enumerate(self.flight.rows)
            if index not in bad and not sequence.stale and sequence.request.status != Status.FINISHED
        }
        scores = []
        for index, first, entries in result.scores:
            if index in requests:
                request = requests[index]
                skip = max(0, request.num_scored - first)
                if entries[skip:]:
                    scores.append((request.name, first + skip, entries[skip:]))
                    request.num_scored = first + len(entries)
        self.events.scores = tuple(scores)
        self.events.pooled = tuple((requests[index].name, data) for index, data in result.pooled if index in requests)

    def _charge(self) -> None:
        """Tell the policy what each request was given."""
        requests = {sequence.request.name: sequence.request for sequence in self.flight.rows}
        for name, count in Counter(self.events.request_ids).items():
            self.state.policy.tell("served", requests[name], count)
