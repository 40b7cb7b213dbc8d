"""The scheduler: admit, cancel, plan, commit, statistics.

Owns: the public methods, the only interface of the core. Does not: read a clock, start a thread, or touch a file or a
tensor; `now` is an argument.
Read the package in this order: request and plan (the data); this file; step, run and start (how a plan is made); commit
and recover (how results are applied); state; kv/cache. branching, beam_search, drafts, encoder, composition and gates
are optional features: a request that does not use a feature never runs its code.
Invariants: the same calls give the same plans. If requests are open and no plan is in flight, the next plan has a row,
an effect, or a wait for something outside the scheduler. Every admitted request ends with exactly one FINISHED event;
after the last one no block is held, but by keep_kv.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core import saved_state, snapshots
from octavo.core import tap as calls
from octavo.core.branching import add_sequences
from octavo.core.commit import commit_step
from octavo.core.drafts import Drafter, add_drafts, allows
from octavo.core.explain import Explanation, explain, explain_all
from octavo.core.limits import Admission, Limits, check_feasible
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.proposals import DraftSource
from octavo.core.repeat import Repeat, RepeatingRows, RowsBeside, find_rows
from octavo.core.request import FinishError, FinishReason, Request
from octavo.core.request_state import RequestState, Sequence
from octavo.core.run import grant_running
from octavo.core.start import start_waiting
from octavo.core.state import State
from octavo.core.step import Step
from octavo.errors import AdmissionError, DuplicateRequestError, ErrorKind, InvariantError


class Scheduler:
    """Decides what every step computes. Not thread-safe: one caller owns the scheduler."""

    __slots__ = ("_drafter", "_lagging", "_noted", "_rows", "_source", "_tap")

    def __init__(
        self,
        limits: Limits,
        tap: calls.CallTap | None = None,
        source: calls.InputSource | None = None,
        drafts: DraftSource | None = None,
        counts_blocks: bool = False,
    ) -> None:
        """Create an idle scheduler. `counts_blocks` (simulations): see admit."""
        self._lagging = State(limits, counts_blocks)  # counters of repeating rows lag: see _state
        self._rows: RepeatingRows | None = None
        self._tap = tap
        self._source = source
        self._drafter = Drafter(drafts)
        self._noted = calls.NotedKeys(limits)
        if tap is not None:
            self._state.cache.key_maker = self._noted
        if source is not None:
            self._state.cache.key_maker = calls.GivenKeys(limits, source)
            if source.has_drafts:
                self._drafter = calls.GivenDrafts(source)

    @property
    def _state(self) -> State:
        """The state, in which no row repeats any more: all counters are up to date."""
        if self._rows is not None:
            self._rows.settle()
            self._rows = None
        return self._lagging

    def admit(self, request: Request, now: float) -> Admission:
        """Check a request and put it in the waiting queue. It will end with exactly one FINISHED event.

        With counts_blocks, a request without token ids and block keys, whose blocks no other request can find, holds a
        number of blocks without block numbers. Its plans have no table edits; all decisions are the same.
        Raises InvalidRequestError, AdmissionError or DuplicateRequestError; a refused request changes nothing.
        """
        state = self._lagging
        if state.is_draining:
            raise AdmissionError("the engine is draining and takes no new requests; send it to another engine", None)
        if request.request_id in state.requests or request.request_id in state.kept:
            raise DuplicateRequestError(f"request_id {request.request_id!r} is in use; choose another", "request_id")
        admission = check_feasible(request, state.limits)
        new = RequestState(request, state.next_order, state.limits.num_stages <= 1)
        state.next_order += 1
        new.max_tokens = admission.max_tokens
        new.may_draft = bool(state.limits.max_draft_tokens) and allows(request) and self._drafter.knows(request)
        root = Sequence(new, 0, state.cache.num_groups)
        root.limit = root.num_prompt + 1
        if new.samples:
            root.limit = min(root.num_prompt + new.max_tokens, state.limits.max_model_len)
        new.sequences = [root]
        if state.counts_blocks and request.prompt_token_ids is None and request.block_keys is None:
            root.is_counted = not new.has_several
        if new.has_several:
            add_sequences(new, root)
        state.requests[request.request_id] = new
        new.lane = state.policy.lane(new)
        state.policy.notify("arrived", new)
        new.rank = state.policy.rank(new)
        state.waiting.add(new)
        state.deadlines.add(new)
        if self._tap is not None or self._source is not None:
            state.cache.extend_keys(new.sequences[0])
        if self._tap is not None:
            self._tap.called(calls.AdmitCall(now, request, self._noted.take()))
        return admission

    def end_choice(self, request_id: str, choice: int, now: float, reason: FinishReason = FinishReason.STOP) -> bool:
        """End one choice of a waiting or running request; ending its last choice ends the request.

        Return False if the choice has ended or is unknown. No choice of a beam search can be ended alone, because the
        choices are known only at the end of the search.
        """
        request = self._state.requests.get(request_id)
        sequences = [] if request is None or request.beams is not None else request.sequences
        sequence = next((one for one in sequences if one.choice == choice), None)
        if sequence is not None:
            self._state.end_choice(sequence, now, reason)
            self._state.report_ended()
        if self._tap is not None:
            self._tap.called(calls.EndChoiceCall(now, request_id, choice, reason))
        return sequence is not None

    def cancel(
        self,
        request_ids: Iterable[str],
        now: float,
        reason: FinishReason = FinishReason.CANCELLED,
        error: FinishError | None = None,
    ) -> int:
        """End requests, even if they have rows in flight; ignore unknown and finished ids. Return how many ended."""
        names, count = tuple(request_ids), 0
        for name in names:
            request = self._state.requests.get(name)
            if request is not None:
                self._state.finish(request, now, reason, error=error)
                count += 1
        self._state.report_ended()
        if self._tap is not None:
            self._tap.called(calls.CancelCall(now, names, reason, error))
        return count

    def plan(self, now: float, only: frozenset[str] | None = None) -> StepPlan:
        """Make the next step's plan; with `only`, the plan has rows of these requests alone.

        An empty plan's `waits` say why it is empty. Every other plan must be submitted and committed, in order.
        """
        state = self._state
        while (late := state.deadlines.expired(now)) is not None:
            self._expire(late[0], late[1], now)
        state.report_ended()
        step = Step(state, now, only)
        composition = state.composition
        for turn in (None,) if composition is None else composition.turns():
            step.begin_turn(turn)
            grant_running(step)
            start_waiting(step)
            if step.rows or step.num_started:  # a request that was swapped in may get its row in another turn
                if composition is not None and turn is not None:
                    composition.count(turn)
                break
        if state.limits.max_draft_tokens:
            add_drafts(step, self._drafter)
        plan = step.finish()
        if self._tap is not None:
            self._tap.called(calls.PlanCall(now, plan, only, self._noted.take()))
        return plan

    def commit(self, plan: StepPlan, outcome: StepResult | StepFailure, now: float) -> Events:
        """Commit the outcome of the oldest plan in flight; return its new tokens and the decisions.

        A StepFailure also undoes every later plan in flight: do not commit those plans.
        Raises InvariantError if `plan` is not the oldest in flight.
        """
        events = None
        if self._rows is not None and isinstance(outcome, StepResult) and outcome.token_ids is None:
            events = self._rows.commit(plan, outcome, now)
            if events is not None and not self._rows.are_first:
                self._rows.settle()
                self._rows = None
        if events is None:
            events = commit_step(self._state, plan, outcome, now)
        if self._tap is not None:
            self._tap.called(calls.CommitCall(now, plan.step, outcome, self._noted.take()))
        return events

    def take_events(self) -> tuple[Event, ...]:
        """Return the decisions made since the last plan or commit; the next plan or commit does not repeat them."""
        events = tuple(self._lagging.events)
        self._lagging.events = []
        return events

    # --- controls ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Return False, and change nothing, while any block is held."""
        was_reset = self._state.cache.reset()
        self._controlled("reset_prefix_cache")
        return was_reset

    def pause(self) -> None:
        """Admit nothing from the queue until resume(); running requests continue."""
        self._state.is_paused = True
        self._controlled("pause")

    def resume(self) -> None:
        """End a pause."""
        self._state.is_paused = False
        self._controlled("resume")

    def drain(self) -> None:
        """Refuse new requests from now on; open requests are served to their end."""
        self._state.is_draining = True
        self._controlled("drain")

    def limit_step(self, num_tokens: int | None) -> None:
        """Limit each step to `num_tokens` tokens, for example after one ran out of memory; None removes the limit."""
        limits = self._state.limits
        configured, least = limits.max_batch_tokens, max(1, limits.whole_span_tokens)
        self._state.max_step_tokens = configured if num_tokens is None else min(max(least, num_tokens), configured)
        self._controlled("limit_step", num_tokens)

    def _controlled(self, verb: str, num_tokens: int | None = None) -> None:
        if self._tap is not None:
            self._tap.called(calls.ControlCall(verb, num_tokens))

    # --- the whole state --------------------------------------------------------------------------------

    def save(self) -> saved_state.SavedState:
        """Copy the whole state, to be continued by `restore`. O(requests + blocks).

        Raises ConfigError if the policy's state cannot be saved.
        """
        return saved_state.save(self._state)

    def restore(self, saved: saved_state.SavedState) -> tuple[StepPlan, ...]:
        """Continue from a saved state of the same limits; return the plans in flight. Only for a new scheduler.

        Raises InvariantError for another version's state or other limits, ConfigError if the policy refuses its state.
        """
        assert not self._lagging.next_order, "only a new scheduler can be restored"
        key_maker = self._lagging.cache.key_maker
        self._lagging = saved_state.restore(saved, self.limits)
        self._lagging.cache.key_maker = key_maker
        return tuple(saved.plans)

    # --- KV that crosses engines -----------------------------------------------------------------------

    def expect_kv(self, request_id: str, num_tokens: int) -> None:
        """Expect the KV of a waiting request's first `num_tokens` tokens from another engine. It has one choice.

        When it starts it gets blocks for these tokens, and its ADMITTED event says how many of them are cached here.
        It has no row before `receive_kv`. If it is preempted before that or later, the tokens are computed here.
        """
        request = self._lagging.requests[request_id]
        if request.first_scheduled_at is not None or request.has_several or request.request.spans:
            raise InvariantError(f"request {request_id!r} has run, or has several choices or media: it expects no KV")
        if not 0 < num_tokens < request.sequences[0].num_known:
            raise InvariantError(f"KV of {num_tokens} of {request.sequences[0].num_known} tokens is expected")
        request.num_remote = num_tokens
        self._kv_called("expect_kv", request_id, num_tokens)

    def receive_kv(self, request_id: str) -> bool:
        """Note that the expected KV has arrived; return False if the request expects none any more."""
        request = self._lagging.requests.get(request_id)
        was_receiving = request is not None and request.is_receiving
        if request is not None:
            request.is_receiving = False
        self._kv_called("receive_kv", request_id)
        return was_receiving

    def keep_kv(self, request_id: str) -> None:
        """Hold the blocks of an open request after its end by a stop or by length, until `release_kv`."""
        self._lagging.requests[request_id].keeps_kv = True
        self._kv_called("keep_kv", request_id)

    def release_kv(self, request_id: str) -> bool:
        """Free the blocks that were held for a request that has ended; return False if there are none."""
        kept = self._lagging.kept.pop(request_id, [])
        for sequence in kept:
            self._lagging.cache.release(sequence)
        self._kv_called("release_kv", request_id)
        return bool(kept)

    def _kv_called(self, verb: str, request_id: str, num_tokens: int = 0) -> None:
        if self._tap is not None:
            self._tap.called(calls.KVCall(verb, request_id, num_tokens))

    # --- snapshots: none of them changes anything -------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """The limits that were given to the constructor."""
        return self._lagging.limits

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests, including preempted ones."""
        return len(self._lagging.waiting)

    @property
    def num_running(self) -> int:
        """The number of slots in use by running requests."""
        return self._lagging.num_sequences

    @property
    def num_used_blocks(self) -> int:
        """The number of blocks of the leading cache group that requests hold."""
        return self._lagging.cache.pools[0].num_used

    @property
    def has_work(self) -> bool:
        """True if any request is open."""
        return bool(self._lagging.requests)

    @property
    def is_paused(self) -> bool:
        """True during a pause: nothing is admitted from the queue."""
        return self._lagging.is_paused

    def gauges(self) -> snapshots.Gauges:
        """Return current levels and totals since the start. O(groups), cheap enough for every step."""
        state = self._lagging
        cache, totals = state.cache, state.totals
        cached = [len(pool.cached) for pool in cache.pools]
        used = [pool.num_used for pool in cache.pools]
        return snapshots.Gauges(
            state.num_sequences,
            len(state.running),
            len(state.waiting),
            state.num_swapped,
            tuple(used),
            tuple(cached),
            tuple([pool.num_filled for pool in cache.host.pools]) if cache.host.pools else (),
            totals.num_steps,
            totals.num_computed_tokens,
            totals.num_output_tokens,
            totals.num_accepted_tokens,
            totals.num_preemptions,
            sum(totals.finished.values()),
            totals.num_swapped_out_tokens,
            totals.num_swapped_in_tokens,
            totals.num_host_hit_tokens,
            cache.queried_tokens,
            cache.hit_tokens,
        )

    def statistics(self) -> snapshots.Statistics:
        """Return all gauges and totals. O(requests), never part of a step."""
        return snapshots.read_statistics(self._state)

    def explain(self, request_id: str) -> Explanation | None:
        """Explain an open request's state and why it waits; return None if the request is unknown or has ended."""
        return explain(self._state, request_id)

    def explain_all(self, max_requests: int | None = None) -> list[Explanation]:
        """Explain open requests: the first `max_requests` waiting, then the first `max_requests` running."""
        return explain_all(self._state, max_requests)

    def first_waiting(self, max_requests: int) -> list[snapshots.RequestView]:
        """Return the first waiting requests, with their reasons. O(max_requests log waiting)."""
        return snapshots.first_waiting(self._lagging, max_requests)

    def open_work(self) -> snapshots.OpenWork:
        """Return the remaining work of every open request, for forecasts. O(requests log requests)."""
        return snapshots.open_work(self._state)

    def sample_pools(self, max_blocks: int) -> list[snapshots.PoolSample]:
        """Return the state of at most `max_blocks` blocks of the KV pool, evenly spread."""
        return snapshots.sample_pools(self._state, max_blocks)

    def read_tables(self, first_slot: int, max_blocks: int) -> list[snapshots.SlotTables]:
        """Return the block tables of the sequences in slots from `first_slot` on, up to about `max_blocks` entries."""
        return snapshots.read_tables(self._state, first_slot, max_blocks)

    # --- steps made as one, for simulations ------------------------------------------------------------

    def find_repeat(self) -> Repeat | None:
        """Find decode steps that can be repeated; None if the next step may do more. O(running) the first time.

        From then on plans cost no time for the requests that only decode, until a method reads or changes one of them,
        and commits return no tokens of these.
        """
        if self._rows is None:
            self._rows = find_rows(self._lagging)
        return None if self._rows is None else self._rows.find()

    def plan_beside(self, now: float) -> tuple[StepPlan, RowsBeside] | None:
        """Make the next step's plan, without the rows of requests that only decode; return also what these read.

        The step has the same decisions and effects as one that `plan` makes, and must be committed likewise. None if no
        request is known to decode only, or if the step may leave one of these out: call `plan`.
        """
        return None if self._rows is None or self._tap is not None else self._rows.plan(now)

    def repeat(self, num_steps: int, planned: float, committed: float) -> tuple[StepPlan | None, int]:
        """Make `num_steps` steps that find_repeat found; return the plan in flight, and the most blocks in use.

        The last step is planned and committed at these times; requests that reach their length limit end then.
        """
        if self._rows is None:  # the state was read since find_repeat
            self._rows = find_rows(self._lagging)
        assert self._rows is not None
        most_used, flight = self._rows.repeat(num_steps, planned, committed), self._lagging.flight
        return flight[0].plan if flight else None, most_used

    def _expire(self, late: RequestState, is_queue: bool, now: float) -> None:
        """End a request whose deadline, or whose queue timeout (`is_queue`), has passed."""
        request = late.request
        if is_queue:
            kind = ErrorKind.QUEUE_TIMEOUT
            message = f"queue_timeout of {request.queue_timeout} s passed before the request could start"
        else:
            kind = ErrorKind.DEADLINE
            message = f"deadline {request.deadline} passed {now - (request.deadline or 0.0):.3f} s ago"
        self._state.finish(late, now, FinishReason.TIMEOUT, error=FinishError(kind, message))
