"""The scheduler: admit, cancel, plan, commit, statistics.

Owns: the verbs. Does not: read a clock, start a thread, touch a file or a tensor; `now` is an argument.
Invariants: two schedulers given the same calls make the same plans; work pending and nothing in flight
means that the next plan has a row, an effect, or a typed external wait; every admitted request ends with
exactly one FINISHED event; after the last one no block is held.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.admission import Admission, prove
from octavo.core.beam_search import BeamGroup, BeamRules
from octavo.core.committing import apply
from octavo.core.explaining import explain
from octavo.core.explanation import Explanation
from octavo.core.intake import Intake
from octavo.core.limits import Limits
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.planning import Planner
from octavo.core.queues import rerank
from octavo.core.request import FinishReason, Request, RequestState, Sequence
from octavo.core.speculation import add_drafts, allows
from octavo.core.state import State
from octavo.core.statistics import Statistics, snapshot
from octavo.errors import AdmissionError, DuplicateRequestError


class Scheduler:
    """Decides every step. Not thread-safe: one caller owns it."""

    __slots__ = ("state",)

    def __init__(self, limits: Limits) -> None:
        self.state = State(limits)

    def admit(self, request: Request, now: float) -> Admission:
        """Take a request in. It will end with exactly one FINISHED event.

        Raises InvalidRequestError, AdmissionError or DuplicateRequestError; nothing is changed then.
        """
        state = self.state
        if state.is_draining:
            raise AdmissionError("the engine is draining and takes no new requests; send it to another engine", None)
        if request.request_id in state.requests:
            raise DuplicateRequestError(f"request_id {request.request_id!r} is in use; choose another", "request_id")
        admission = prove(request, state.limits)
        entry = RequestState(request, state.next_order)
        state.next_order += 1
        params = request.params
        eos = () if params.ignore_eos else request.eos_token_ids
        entry.stop_ids = frozenset((*eos, *params.stop_token_ids))
        entry.max_tokens = admission.max_tokens
        entry.can_run_ahead = not (params.grammar or params.beam_width)
        entry.may_draft = bool(state.limits.max_draft_tokens) and allows(request) and state.drafter.knows(request)
        self._make_sequences(entry)
        state.requests[request.request_id] = entry
        entry.lane = state.policy.lane(entry)
        state.policy.tell("arrived", entry)
        rerank(entry, state.policy)
        state.waiting.add(entry)
        state.deadlines.add(entry)
        return admission

    def _make_sequences(self, entry: RequestState) -> None:
        """One sequence per choice; a beam search begins with one."""
        params = entry.request.params
        root = Sequence(entry, 0, self.state.cache.num_groups)
        if entry.samples:
            root.limit = min(root.num_prompt + entry.max_tokens, self.state.limits.max_model_len)
        else:
            root.limit = root.num_prompt + 1
        entry.sequences.append(root)
        if params.beam_width:
            entry.beams = BeamGroup(
                BeamRules(
                    params.beam_width,
                    params.length_penalty,
                    params.early_stopping,
                    root.num_prompt,
                    root.limit,
                    entry.stop_ids,
                    params.min_tokens,
                )
            )
            return
        for choice in range(1, params.num_sequences):
            entry.sequences.append(root.fork(choice))

    def end_choice(
        self,
        request_id: str,
        choice: int,
        now: float,
        reason: FinishReason = FinishReason.STOP,
        message: str | None = None,
    ) -> bool:
        """End one choice of a request, in any state; the last one ends the request. False when it has ended.

        The choices of a beam search are known only at its end, so none of them can be ended alone.
        """
        entry = self.state.requests.get(request_id)
        if entry is None or entry.beams is not None:
            return False
        for sequence in entry.sequences:
            if sequence.choice == choice:
                self.state.end_choice(sequence, now, reason, message=message)
                self.state.settle()
                return True
        return False

    def cancel(
        self,
        request_ids: Iterable[str],
        now: float,
        reason: FinishReason = FinishReason.CANCELLED,
        message: str | None = None,
    ) -> int:
        """End requests in any state, in flight too; unknown and finished ids are ignored. Returns how many ended."""
        count = 0
        for name in request_ids:
            entry = self.state.requests.get(name)
            if entry is not None:
                self.state.finish(entry, now, reason, message=message)
                count += 1
        self.state.settle()
        return count

    def plan(self, now: float, only: frozenset[str] | None = None) -> StepPlan:
        """Make the next step's plan; with `only`, from these requests alone. An empty plan says why it is.

        A plan that is not empty must be submitted and committed, in the order made.
        """
        while (late := self.state.deadlines.expired(now)) is not None:
            self._expire(late[0], late[1], now)
        self.state.settle()
        composition = self.state.composition
        planner = Planner(self.state, now, only)
        for turn in composition.turns():
            planner.grant_running(turn)
            Intake(planner).run()
            if planner.rows or planner.num_admitted:  # what came back from the host may have its row in another turn
                composition.took(turn)
                break
        if self.state.limits.max_draft_tokens:
            add_drafts(planner)
        return planner.finish()

    def commit(self, plan: StepPlan, outcome: StepResult | StepFailure, now: float) -> Events:
        """Take in what the oldest plan in flight produced.

        A StepFailure discards that plan and every later one in flight: do not commit those.
        Raises InvariantError on a plan that is not the oldest in flight.
        """
        return apply(self.state, plan, outcome, now)

    def take_events(self) -> tuple[Event, ...]:
        """Hand over decisions made since the last plan or commit, without waiting for the next."""
        events = tuple(self.state.events)
        self.state.events = []
        return events

    def statistics(self) -> Statistics:
        """A snapshot of gauges and totals."""
        return snapshot(self.state)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. False, and nothing changed, while any block is held."""
        return self.state.cache.reset()

    def pause(self) -> None:
        """Admit nobody from the queue until resume(); what runs goes on."""
        self.state.is_paused = True

    def resume(self) -> None:
        """End a pause."""
        self.state.is_paused = False

    def drain(self) -> None:
        """Take no new requests; those taken are served to their end."""
        self.state.is_draining = True

    def limit_step(self, num_tokens: int | None) -> None:
        """Grant at most so many tokens in a step, as after one ran out of memory; None = as configured."""
        most = self.state.limits.max_batch_tokens
        self.state.token_budget.limit = most if num_tokens is None else max(1, min(num_tokens, most))

    @property
    def num_waiting(self) -> int:
        """Requests that wait, preempted ones included."""
        return len(self.state.waiting)

    @property
    def num_running(self) -> int:
        """Sequences that run."""
        return self.state.sequence_budget.used

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.state.requests)

    def explain(self, request_id: str, now: float = 0.0) -> Explanation | None:
        """Say where an open request stands, and why; None for one that is unknown or has ended. For people."""
        return explain(self.state, request_id, now)

    def _expire(self, entry: RequestState, is_queue: bool, now: float) -> None:
        asked = entry.request
        if is_queue:
            message = f"queue_timeout of {asked.queue_timeout} s passed before the request could start"
        else:
            message = f"deadline {asked.deadline} passed {now - (asked.deadline or 0.0):.3f} s ago"
        self.state.finish(entry, now, FinishReason.TIMEOUT, message=message)
