"""Commits one step: appends tokens, ends requests, confirms published blocks and handles failures.

Owns: the pass over the rows of the oldest plan in flight. Does not: plan, or undo what failed (recover).
Invariants: plans are committed in the order made. A token is appended once. A row changes nothing if its sequence has
ended or been discarded since it was planned. Blocks that a failed step or row wrote cannot be found.
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
from octavo.core.request import FinishReason
from octavo.core.request_state import RequestState, Sequence, Status
from octavo.core.state import Flight, State
from octavo.errors import InvariantError

_PLAIN = (ROW_SAMPLE, ROW_SAMPLE | ROW_CARRY)  # flags of rows whose result is one token


def commit_step(state: State, plan: StepPlan, outcome: StepResult | StepFailure, now: float) -> Events:
    """Commit the oldest plan in flight; return its tokens, and all decisions since the last plan or commit.

    Raises InvariantError if `plan` is not the oldest plan.
    """
    if not state.flight or state.flight[0].plan.step != plan.step:
        expected = f"step {state.flight[0].plan.step}" if state.flight else "none"
        raise InvariantError(f"step {plan.step} is committed, expected is {expected}: commit each plan once, in order")
    commit = StepCommit(state, state.flight.popleft(), now)
    if isinstance(outcome, StepFailure):
        recover.undo_steps(state, commit.flight, now)
    else:
        commit.take(outcome)
    state.report_ended()
    decisions, state.events = tuple(state.events), []
    return Events(
        plan.step,
        now,
        commit.names,
        array("i", commit.choices),
        array("i", commit.positions),
        array("i", commit.token_ids),
        commit.logprobs,
        commit.scores,
        commit.pooled,
        decisions,
    )


class StepCommit:
    """Applies the results of one step to the state, and collects the step's Events.

    Row i has the entries [begins[i], begins[i + 1]) of the result's token ids and log-probabilities.
    """

    __slots__ = (
        "begins", "choices", "flight", "given_logprobs", "ids", "logprobs", "names", "now", "pooled", "positions",
        "scores", "searching", "state", "token_ids",
    )  # fmt: skip

    def __init__(self, state: State, flight: Flight, now: float) -> None:
        self.state = state
        self.flight = flight
        self.now = now
        self.names: list[str] = []  # columns in the making: a list grows in half the time of an array
        self.choices: list[int] = []
        self.positions: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] | None = None
        self.scores: tuple[tuple[str, int, tuple[TokenLogprobs, ...]], ...] = ()
        self.pooled: tuple[tuple[str, bytes], ...] = ()
        self.searching: list[RequestState] = []  # beam searches of which some beam got candidates in this step

    def take(self, result: StepResult) -> None:
        """Append tokens, end finished requests, confirm published blocks."""
        state, flight = self.state, self.flight
        bad = recover.retry_bad_rows(state, flight, result.errors, self.now) if result.errors else {}
        for index, error in result.dead_ends:  # the row's KV is valid, but no token can follow
            if not flight.rows[index].is_void:
                state.finish(flight.rows[index].request, self.now, FinishReason.ERROR, error=error)
        state.cache.confirm(flight.effects)
        if flight.releases:
            state.release_deferred(flight)
        if result.scores or result.pooled:
            self._take_outputs(result, bad)
        self._take_rows(result, is_regular=result.num_token_ids is None and not bad and not flight.plan.num_drafts)
        if flight.effects.published:
            deduplicate(state, flight.effects.published)
        for request in self.searching:
            self._advance(request)
        if state.limits.encoder_budget:
            self._commit_media()
        if state.policy.tracks_service:
            self._charge()
        totals = state.totals
        totals.num_steps += 1
        totals.num_computed_tokens += flight.plan.num_query_tokens
        totals.num_output_tokens += len(self.token_ids)
        totals.num_drafted_rows += len(flight.plan.num_drafts) - flight.plan.num_drafts.count(0)
        totals.num_drafted_tokens += len(flight.plan.draft_token_ids)

    # --- rows -----------------------------------------------------------------------------------------

    def _take_rows(self, result: StepResult, is_regular: bool) -> None:
        """Take the result of each row. `is_regular`: every sampling row has exactly one token."""
        rows, counts, flags = self.flight.rows, self.flight.plan.counts, self.flight.plan.flags
        is_plain = is_regular and sum(map(flags.count, _PLAIN)) == len(flags)
        begins = self.begins = range(len(flags) + 1) if is_plain else self._find_begins(result)
        self.given_logprobs = result.logprobs
        if result.logprobs is not None:
            self.logprobs = []
        if result.token_ids is None:  # from an executor that knows only durations
            self.ids = array("i", [-1]) * begins[-1]
        elif len(result.token_ids) == begins[-1]:
            self.ids = result.token_ids
        else:
            step = self.flight.plan.step
            raise InvariantError(f"step {step}: {len(result.token_ids)} sampled ids, {begins[-1]} expected")
        if is_plain:
            self._take_plain_rows(zip(range(len(flags)), rows, counts, self.ids, strict=True))
            return
        plain = [index for index, flag in enumerate(flags) if is_regular and flag in _PLAIN]
        self._take_plain_rows([(index, rows[index], counts[index], self.ids[begins[index]]) for index in plain])
        for index, flag in enumerate(flags):
            if not (is_regular and flag in _PLAIN):
                self._take_row(index)

    def _find_begins(self, result: StepResult) -> list[int]:
        """Return the begin of each row's entries in the result, then the end. Rows that do not sample have none."""
        plan, lengths = self.flight.plan, result.num_token_ids
        num_sampling = sum(flag & ROW_SAMPLE for flag in plan.flags)
        if lengths is not None and len(lengths) != num_sampling:
            raise InvariantError(f"step {plan.step}: {len(lengths)} result lengths for {num_sampling} sampling rows")
        left, begins = iter(lengths or [1] * num_sampling), [0]
        for flag in plan.flags:
            begins.append(begins[-1] + (next(left) if flag & ROW_SAMPLE else 0))
        return begins

    def _take_plain_rows(self, entries: Iterable[tuple[int, Sequence, int, int]]) -> None:
        """Take rows of one sampled token each, as (index, sequence, count, token).

        The hot path: the common case is inline. `_take_row` handles a row that fills a block, may stop or is void.
        """
        add_name, add_choice = self.names.append, self.choices.append
        add_position, add_id = self.positions.append, self.token_ids.append
        running, size, has_logprobs = Status.RUNNING, self.state.cache.block_size, self.logprobs is not None
        for index, sequence, count, token in entries:
            request = sequence.request
            computed = sequence.num_computed + count
            known = sequence.num_committed
            if (
                has_logprobs
                or request.status is not running
                or sequence.stale
                or computed % size == 0
                or count > 1
                or known + 1 >= sequence.limit
                or token in request.stop_ids
            ):
                self._take_row(index)
                continue
            add_name(request.name)
            add_choice(sequence.choice)
            add_position(known - sequence.num_prompt)
            add_id(token)
            if sequence.token_ids is not None:
                sequence.token_ids.append(token)
            sequence.in_flight -= 1
            sequence.num_computed = computed
            sequence.num_committed = known + 1
            sequence.num_pending -= 1

    def _take_row(self, index: int) -> None:
        """Take the result of a row of any kind; tokens of a request that was preempted in flight are kept."""
        plan, sequence = self.flight.plan, self.flight.rows[index]
        request, flags, logprobs = sequence.request, plan.flags[index], self.given_logprobs
        begin, ids = self.begins[index], self.ids[self.begins[index] : self.begins[index + 1]]
        sequence.in_flight -= 1
        if sequence.is_void:
            sequence.stale = max(0, sequence.stale - 1)
            return
        if flags & ROW_SAMPLE and not ids:
            recover.discard(self.state, sequence, self.now)  # computed again, because its logits no longer exist
            return
        num_drafts = plan.num_drafts[index] if plan.num_drafts else 0
        if num_drafts:
            self._take_drafts(sequence, index, ids)
        elif request.status == Status.RUNNING or request.is_swapped:  # a swap also copies what plans in flight write
            # A fork's row computes nothing; its parent's row computed the shared positions.
            computed = plan.starts[index] if flags & ROW_FORK else sequence.num_computed
            sequence.num_computed = computed + plan.counts[index]
        if flags & ROW_BEAM:
            self._take_candidates(sequence, None if logprobs is None else logprobs[begin])
            return
        for offset, token in enumerate(ids):
            if num_drafts and offset:
                self.state.totals.num_accepted_tokens += 1
            if self._append(sequence, token, None if logprobs is None else logprobs[begin + offset]):
                return
        if not request.samples and plan.starts[index] + plan.counts[index] >= sequence.num_known:
            # also if the request was preempted in flight, because all its results are known
            self.state.finish(request, self.now, FinishReason.STOP)

    def _take_drafts(self, sequence: Sequence, index: int, ids: array[int]) -> None:
        """Check that a row's ids are accepted drafts and one draw, and drop the KV of the rejected drafts."""
        plan = self.flight.plan
        first, num_drafts = sum(plan.num_drafts[:index]), plan.num_drafts[index]
        if len(ids) > 1 + num_drafts or ids[:-1] != plan.draft_token_ids[first : first + len(ids) - 1]:
            raise InvariantError(f"step {plan.step}: row {index} gives other ids than accepted drafts and a draw")
        drafts.take_result(self.state, sequence, plan.starts[index], num_drafts, len(ids))

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Append a sampled token and publish the block that it fills; return True if the token ends its choice."""
        request = sequence.request
        self.names.append(request.name)
        self.choices.append(sequence.choice)
        self.positions.append(sequence.num_committed - sequence.num_prompt)
        self.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprobs)
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

    # --- blocks ---------------------------------------------------------------------------------------

    def _publish(self, sequence: Sequence) -> None:
        """Publish the sequence's full, computed blocks in the prefix cache."""
        cache = self.state.cache
        if sequence.slot >= 0 and sequence.num_computed >= (sequence.num_published + 1) * cache.block_size:
            deduplicate(self.state, cache.publish(sequence, sequence.num_computed, None))

    # --- beams, scores, service -----------------------------------------------------------------------

    def _take_candidates(self, sequence: Sequence, given: TokenLogprobs | None) -> None:
        """Store a beam's candidates until every beam of its request has candidates."""
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
        """Extend a beam search by one token; when the search is over, report the best beams and finish the request."""
        if request.status != Status.RUNNING or any(beam.candidates is None for beam in request.sequences):
            return
        best = branching.advance_beams(self.state, request)
        if best is None:
            return
        for choice, beam in enumerate(best):
            num = len(beam.token_ids)
            self.names += [request.name] * num
            self.choices += [choice] * num
            self.positions += range(num)
            self.token_ids += beam.token_ids
            if self.logprobs is not None:
                self.logprobs += [None] * num
        branching.finish_beams(self.state, request, best, self.now)

    def _take_outputs(self, result: StepResult, bad: dict[int, str]) -> None:
        """Report the new scores and the pooled states of the rows that are neither bad nor void."""
        requests = {
            index: sequence.request
            for index, sequence in enumerate(self.flight.rows)
            if index not in bad and not sequence.is_void
        }
        scores = []
        for index, first, entries in result.scores:
            if index in requests:
                request = requests[index]
                skip = max(0, request.num_scored - first)
                if entries[skip:]:
                    scores.append((request.name, first + skip, entries[skip:]))
                    request.num_scored = first + len(entries)
        self.scores = tuple(scores)
        self.pooled = tuple((requests[index].name, data) for index, data in result.pooled if index in requests)

    def _commit_media(self) -> None:
        """Release the encoder outputs of media items whose positions are computed."""
        for sequence in self.flight.rows:
            if sequence.request.request.spans:
                self.state.encoder.commit(sequence.request.name, sequence.num_computed)

    def _charge(self) -> None:
        """Notify the policy how many tokens each request got."""
        requests = {sequence.request.name: sequence.request for sequence in self.flight.rows}
        for name, count in Counter(self.names).items():
            self.state.policy.notify("served", requests[name], count)


def deduplicate(state: State, published: list[Publication]) -> None:
    """Replace duplicate blocks by the equal cached blocks; the next plan has the table edits (K04)."""
    for made in published:
        if not made.is_duplicate or made.owner.slot < 0:
            continue
        cached = state.cache.find_duplicated(made)
        if cached is not None:
            for sequence in state.cache.dedup(made, cached):
                state.updates.table_edits.extend((sequence.slot, made.group, made.index, cached))
                state.defer_release(made.group, made.blocks[0])
            state.totals.num_adopted_blocks += 1
