"""Takes in what a step produced: tokens, stops, blocks that may now be found, and failures.

Owns: the pass over the rows of one finished plan. Does not: compose plans.
Invariants: plans are committed in the order made; a token is appended once; a row whose sequence ended or
was put back with its results void changes nothing; a failed step leaves no block findable that it wrote.
"""

from __future__ import annotations

from array import array

from octavo.core.plan import ROW_CARRY, ROW_SAMPLE, Events, StepFailure, StepPlan, StepResult, TokenLogprobs
from octavo.core.request import FinishReason, RequestState, Sequence, Status, Want
from octavo.core.state import Flight, State
from octavo.errors import InvariantError


class Committer:
    """One step's results on their way into the state."""

    __slots__ = ("events", "flight", "logprobs", "now", "state")

    def __init__(self, state: State, flight: Flight, now: float) -> None:
        self.state = state
        self.flight = flight
        self.now = now
        self.events = Events(flight.plan.step, now)
        self.logprobs: list[TokenLogprobs | None] | None = None

    # --- a step that worked -------------------------------------------------------------------------

    def commit(self, result: StepResult) -> Events:
        """Append tokens, end what is done, confirm what was published."""
        state, flight, plan = self.state, self.flight, self.flight.plan
        bad = dict(result.errors)
        for index in sorted(bad):
            self._poison(flight.rows[index])
        state.cache.confirm(flight.published, plan.step)
        if result.scores or result.pooled:
            self._take_outputs(result, bad)
        if result.num_token_ids is None and not bad and self._is_plain(plan):
            self._commit_plain(result)
        else:
            self._commit_rows(result, bad)
        totals = state.totals
        totals.num_steps += 1
        totals.num_computed_tokens += plan.num_query_tokens
        totals.num_output_tokens += len(self.events.token_ids)
        return self._close()

    def _is_plain(self, plan: StepPlan) -> bool:
        """Every row samples: results and rows go in step."""
        flags = plan.flags
        return flags.count(ROW_SAMPLE) + flags.count(ROW_SAMPLE | ROW_CARRY) == len(flags)

    def _commit_plain(self, result: StepResult) -> None:
        """Take one sampled token per row: the hot path, with the common case entered right here.

        Rows that close a block, may stop, or are no longer wanted take the general way.
        """
        plan, rows, events = self.flight.plan, self.flight.rows, self.events
        ids = self._sampled(result, len(rows))
        logprobs = result.logprobs
        if logprobs is not None:
            self.logprobs = []
        add_name, add_choice = events.request_ids.append, events.choices.append
        add_position, add_id = events.positions.append, events.token_ids.append
        running, size = Status.RUNNING, self.state.cache.block_size
        for index, (sequence, count, token) in enumerate(zip(rows, plan.counts, ids, strict=True)):
            sequence.in_flight -= 1
            request = sequence.request
            if request.status is not running or sequence.stale:
                self._commit_late(request, sequence, token, logprobs[index] if logprobs else None)
                continue
            computed = sequence.num_computed = sequence.num_computed + count
            known = sequence.num_committed
            if (
                logprobs is not None
                or computed % size == 0
                or count > 1
                or known + 1 >= sequence.limit
                or token in request.stop_ids
                or sequence.token_ids is None
            ):
                self._append(request, sequence, token, logprobs[index] if logprobs else None)
                continue
            add_name(request.name)
            add_choice(sequence.choice)
            add_position(known - sequence.num_prompt)
            add_id(token)
            sequence.token_ids.append(token)
            sequence.num_committed = known + 1
            sequence.num_pending -= 1

    def _commit_late(
        self, request: RequestState, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> None:
        """A row whose sequence no longer runs: the token of one that was preempted in flight is kept."""
        if request.status == Status.FINISHED or sequence.stale:
            self._drop(sequence)
        else:
            self._append(request, sequence, token, logprobs)

    def _commit_rows(self, result: StepResult, bad: dict[int, str]) -> None:
        """Take rows of any kind, in order; only those that sample have a result."""
        plan, rows = self.flight.plan, self.flight.rows
        num_sampling = sum(1 for flag in plan.flags if flag & ROW_SAMPLE)
        lengths = result.num_token_ids
        if lengths is not None and len(lengths) != num_sampling:
            raise InvariantError(f"step {plan.step}: {len(lengths)} result lengths for {num_sampling} sampling rows")
        ids = self._sampled(result, num_sampling if lengths is None else sum(lengths))
        if result.logprobs is not None:
            self.logprobs = []
        at = sampling = 0
        for index, sequence in enumerate(rows):
            count = 0
            if plan.flags[index] & ROW_SAMPLE:
                count = 1 if lengths is None else lengths[sampling]
                sampling += 1
            entries = result.logprobs[at : at + count] if result.logprobs is not None else None
            self._commit_row(index, sequence, ids[at : at + count], entries, bad.get(index))
            at += count

    def _commit_row(
        self,
        index: int,
        sequence: Sequence,
        ids: array[int],
        logprobs: list[TokenLogprobs | None] | None,
        error: str | None,
    ) -> None:
        request, plan = sequence.request, self.flight.plan
        sequence.in_flight -= 1
        if request.status == Status.FINISHED or sequence.stale:
            self._drop(sequence)
            return
        if error is not None:
            self.state.finish(request, self.now, FinishReason.ERROR, message=error)
            return
        samples = plan.flags[index] & ROW_SAMPLE
        if samples and not ids:
            self._discard(sequence)  # it has to be sampled again, from logits that are gone
            return
        if request.status == Status.RUNNING:
            sequence.num_computed += plan.counts[index]
        for offset, token in enumerate(ids):
            # mypy holds the status for unchanged, but appending the token before may have ended the request
            if request.status != Status.FINISHED:  # type: ignore[comparison-overlap]
                self._append(request, sequence, token, logprobs[offset] if logprobs else None)
        reached = plan.starts[index] + plan.counts[index]
        if not request.request.wants & Want.SAMPLE and reached >= sequence.num_known:
            # also one that was preempted in flight: it has given all it was asked for
            self.state.finish(request, self.now, FinishReason.STOP)

    def _append(self, request: RequestState, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Make a sampled token known, publish the block it closes, and see whether it ends the request."""
        events = self.events
        events.request_ids.append(request.name)
        events.choices.append(sequence.choice)
        events.positions.append(sequence.num_committed - sequence.num_prompt)
        events.token_ids.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprobs)
        if sequence.token_ids is not None:
            sequence.token_ids.append(token)
        sequence.num_committed += 1
        sequence.num_pending -= 1
        cache = self.state.cache
        if sequence.num_computed >= (sequence.num_published + 1) * cache.block_size and cache.caching:
            cache.publish(sequence, sequence.num_computed, None)
        if (
            token in request.stop_ids
            and sequence.num_committed - sequence.num_prompt > request.request.params.min_tokens
        ):
            stop_id = token if token in request.request.params.stop_token_ids else None
            self.state.finish(request, self.now, FinishReason.STOP, stop_id)
        elif sequence.num_committed >= sequence.limit:
            self.state.finish(request, self.now, FinishReason.LENGTH)

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

    # --- rows and steps that failed -----------------------------------------------------------------

    def _discard(self, sequence: Sequence) -> None:
        """Put a sequence back as if it had just been preempted; what it has in flight is void."""
        request = sequence.request
        sequence.stale = sequence.in_flight
        sequence.num_pending = 0
        if request.status == Status.RUNNING:
            self.state.preempt(request, self.now, None, None)

    def _poison(self, first: Sequence) -> None:
        """A row's KV is unusable: withdraw what it published, and put back all who may have built on it."""
        doubtful = [first]
        while doubtful:
            sequence = doubtful.pop()
            blocks = self._withdraw(sequence)
            if not blocks:
                continue
            for other in self._readers(blocks):
                if other is not sequence and other is not first:
                    doubtful.append(other)
                    # Its own row of the current step is still to be read by the loop over rows.
                    self._discard(other)

    def _withdraw(self, sequence: Sequence) -> set[tuple[int, int]]:
        """Unpublish what a sequence published in flight; returns those blocks and the copies made of them."""
        blocks: set[tuple[int, int]] = set()
        for flight in (self.flight, *self.state.flight):
            mine = [entry for entry in flight.published if entry.sequence is sequence]
            blocks.update((entry.group, entry.block) for entry in mine)
            self.state.cache.unpublish(mine, flight.plan.step)
            flight.published = [entry for entry in flight.published if entry.sequence is not sequence]
            copies = flight.plan.copies
            for group, source, to in zip(copies[::3], copies[1::3], copies[2::3], strict=True):
                if (group, source) in blocks:
                    blocks.add((group, to))
        return blocks

    def _readers(self, blocks: set[tuple[int, int]]) -> list[Sequence]:
        """Sequences in flight that hold one of these blocks, or hold none any more and so may have read it."""
        rows = [sequence for flight in (self.flight, *self.state.flight) for sequence in flight.rows]
        found = []
        for sequence in dict.fromkeys(rows):
            if sequence.request.status != Status.RUNNING:
                found += [] if sequence.stale else [sequence]
            elif any((group, block) in blocks for group, table in enumerate(sequence.tables) for block in table):
                found.append(sequence)
        return found

    def fail(self) -> Events:
        """Undo this plan and every later one: their sequences are put back, their effects will be sent again."""
        state = self.state
        flights = [self.flight, *state.flight]
        state.flight.clear()
        state.totals.num_failed_steps += 1
        finished: list[str] = []
        preempted: list[str] = []
        freed: array[int] = array("i")
        for flight in flights:
            state.cache.unpublish(flight.published, flight.plan.step)
            finished.extend(flight.plan.finished_ids)
            preempted.extend(flight.plan.preempted_ids)
            freed.extend(flight.plan.freed_slots)
        state.finished_ids[:0] = finished
        state.preempted_ids[:0] = preempted
        state.freed_slots = freed + state.freed_slots
        for flight in flights:
            for sequence in flight.rows:
                sequence.in_flight = sequence.stale = sequence.num_pending = 0
                if sequence.request.status == Status.RUNNING:
                    state.preempt(sequence.request, self.now, None, None)
        return self._close()

    def _close(self) -> Events:
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
