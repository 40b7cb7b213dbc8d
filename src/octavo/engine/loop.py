"""The step loop: one thread that owns scheduler and executor, and an inbox for other threads.

Owns: the cycle plan, submit, collect, commit, deliver, with up to `depth` plans in flight; recovery from failed steps;
the Outbox, which selects the events that a client needs.
Does not: decide (scheduler), compute (executor), or know sockets, asyncio and text.
Invariants: each admitted request gets exactly one end, even if the engine stops or dies. A loop without work waits on
a condition. Once started, only this thread calls scheduler and executor.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal, cast

from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishError, FinishReason, Request
from octavo.core.scheduler import Scheduler
from octavo.engine.client import ENDS, Accepted, Verb, finished
from octavo.engine.grammars import Built, GrammarBuilds, MaskedTicket, submit_masked
from octavo.engine.heartbeat import HeartbeatWriter
from octavo.engine.suspects import Suspects
from octavo.errors import EngineDeadError, EngineError, ErrorKind, QueueFullError, RequestError
from octavo.executors.protocol import Executor, MediaExecutor, Ticket
from octavo.grammar.bank import GrammarBank
from octavo.grammar.matcher import Matcher
from octavo.media.item import MediaItem, check_media
from octavo.observe.history import EventSink
from octavo.observe.series import StepTimes

_LOG = logging.getLogger(__name__)
_SENT = ENDS | {EventKind.ADMITTED, EventKind.PREEMPTED, EventKind.RESUMED}
MIN_WAIT_S = 0.001  # least wait after an empty plan, so that a deadline just missed causes no busy loop
Reply = Callable[[object], None]  # called once with a value or an Exception, in the loop's or the caller's thread


def ignore(*_: object) -> None:
    """Do nothing."""


class Clock:
    """Seconds on the machine's monotonic clock, which on Linux and macOS is the same in every process."""

    now = staticmethod(time.monotonic)

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Wait on `condition`, which the caller holds, until it is notified or the time `until`; None = no limit."""
        condition.wait(None if until is None else max(0.0, until - self.now()))


@dataclass(slots=True)
class PlanInFlight:
    """A plan in flight: its ticket or the failure of its submission, the seconds of planning, and their begin."""

    plan: StepPlan
    ticket: Ticket
    failure: StepFailure | None
    schedule_s: float
    started_at: float


class Outbox:
    """Tracks the open requests, and selects the events to send to the client.

    Every request opened here gets exactly one FINISHED event, and no token after it. An admission, preemption or
    resumption is sent with the next commit or end, and so costs no message of its own.
    """

    def __init__(self) -> None:
        self._open: dict[str, None] = {}
        self._held: list[Event] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Ids of the open requests, oldest first."""
        return tuple(self._open)

    def open(self, request_id: str) -> None:
        """Add an admitted request, which will get one end."""
        self._open[request_id] = None

    def committed(self, events: Events) -> Events:
        """Return the events of a commit to send. The columns are shared, not copied."""
        if not events.decisions and not self._held:
            return events
        self._take(events.decisions)
        return replace(events, decisions=self._release())

    def decided(self, decisions: tuple[Event, ...]) -> Events | None:
        """Return events with the decisions made outside a commit; None if all of them can wait."""
        if not self._take(decisions):
            return None
        return Events(decisions[-1].step, decisions[-1].time, decisions=self._release())

    def end_all(self, now: float, reason: FinishReason, error: FinishError) -> Events:
        """Return events that end every open request, without the scheduler."""
        ends = tuple(finished(request_id, reason, error, time=now) for request_id in self._open)
        self._open.clear()
        return Events(0, now, decisions=self._release() + ends)

    def _take(self, decisions: Iterable[Event]) -> bool:
        """Hold the decisions that will be sent; return True if one of them is an end."""
        has_end = False
        for event in decisions:
            if event.kind not in _SENT or event.request_id not in self._open:
                continue
            self._held.append(event)
            has_end |= event.kind in ENDS
            if event.kind == EventKind.FINISHED:
                del self._open[event.request_id]
        return has_end

    def _release(self) -> tuple[Event, ...]:
        held, self._held = tuple(self._held), []
        return held


class EngineLoop:
    """The step loop of a scheduler and an opened executor.

    The receiver set by `attach` gets the Events of each step, in the loop's thread. `max_waiting` bounds the waiting
    requests (0 = no bound): beyond it `submit` replies QueueFullError. Without a `bank`, requests with a grammar are
    refused. Methods may be called from any thread; those with a result pass it to `reply`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Clock | None = None,
        depth: int = 1,
        max_waiting: int = 0,
        bank: GrammarBank | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.step_times = StepTimes()
        self.sections: dict[str, Callable[[], object]] = {}  # more statistics, read in the loop's thread
        self.verbs: dict[str, Callable[[str], object]] = {}  # more verbs for `control`; set before start
        self.closers: list[Callable[[], object]] = [executor.close]  # called at the end
        self.heartbeat: HeartbeatWriter | None = None  # set before start
        self.warm_up: Callable[[], Mapping[int, float]] = dict  # runs before the first turn; set before start
        self.attach_flight: Callable[[Sequence[int]], object] = (
            ignore  # takes the flight recorder's files; before start
        )
        self.check_request: Callable[[Request], object] = ignore  # raises RequestError; set before start
        self.num_turns = 0
        self.num_discarded = 0
        self._scheduler = scheduler
        self._executor = executor
        self._depth = depth
        self._max_waiting = max_waiting
        self._bank = bank
        self._active_bank: GrammarBank | None = None  # the bank while an open request has a grammar
        self._builds = GrammarBuilds(bank, partial(self._post, ignore, ignore))
        self._receive: Callable[[Events], None] = ignore
        self._ended: Callable[[], None] = ignore
        self._in_flight: deque[PlanInFlight] = deque()
        self._outbox = Outbox()
        self._sinks: list[EventSink] = []
        self._suspects = Suspects(scheduler.limit_step)
        self._with_media: set[str] = set()  # open requests whose media the executor has
        self._owners: dict[int, str] = {}  # executor slot -> request, as of the last collected plan
        self._condition = threading.Condition()
        self._inbox: deque[tuple[Callable[[], object], Reply]] = deque()
        self._is_stopping = False
        self._has_ended = False
        self._is_draining = False
        self._failure: str | None = None
        self._is_warm = threading.Event()
        self._thread: threading.Thread | None = None

    def attach(self, receive: Callable[[Events], None], ended: Callable[[], None] | None = None) -> None:
        """Set the receiver of events, and `ended`, which is called after the last events. Call before start."""
        self._receive = receive
        self._ended = ended or ignore

    def watch(self, sink: EventSink) -> None:
        """Report all events to this sink, unless it raises. Call before start."""
        self._sinks.append(sink)

    def _report(self, verb: Literal["admitted", "decided", "stepped"], *facts: object) -> None:
        for sink in tuple(self._sinks):
            try:
                getattr(sink, verb)(*facts)
            except Exception:  # the instrument shell
                _LOG.exception("%s failed and is switched off", type(sink).__name__)
                self._sinks.remove(sink)

    def start(self) -> None:
        """Start the thread. Idempotent; an engine that ended cannot start again (EngineDeadError)."""
        with self._condition:
            if self._has_ended:
                raise EngineDeadError(self._end_message())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
                self._thread.start()

    def wait_warm(self) -> bool:
        """Wait until the warm-up is over; return False if it failed. Call after start."""
        self._is_warm.wait()
        return self._failure is None

    def stop(self) -> None:
        """Ask the loop to answer all requests and end. Idempotent; does not wait (see join)."""
        with self._condition:
            self._is_stopping = True
            never_started = self._thread is None and not self._has_ended
            self._condition.notify_all()
        if never_started:
            self._end()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the loop's end; return True if it has ended. Idempotent, and harmless in the loop's own thread."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            return not thread.is_alive()
        return self._has_ended

    @property
    def is_alive(self) -> bool:
        """True if requests can be submitted."""
        return not (self._has_ended or self._is_stopping)

    @property
    def failure(self) -> str | None:
        """Why the engine died, or None."""
        return self._failure

    def submit(self, request: Request, reply: Reply, media: tuple[MediaItem, ...] = ()) -> None:
        """Submit a request with its media; replies Accepted, a RequestError or an EngineError."""
        if not request.params.grammar:
            self._post(partial(self._admit, request, reply, None, media), reply)
            return
        admit = partial(self._admit, request, reply, media=media)
        self._builds.begin(request, self.clock.now(), lambda built: self._post(partial(admit, built), reply))

    def cancel(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None
    ) -> None:
        """End waiting or running requests, or only one choice of each; ignore unknown and finished requests."""
        self._post(partial(self._cancel, tuple(request_ids), reason, choice), ignore)

    def control(self, verb: Verb | str, argument: str, reply: Reply) -> None:
        """Run a verb; replies its result (see EngineClient.control), or an EngineError."""
        self._post(lambda: reply(self._control(verb, argument)), reply)

    def fail(self, reason: str) -> None:
        """End the engine because its executor is lost. From any thread; takes effect when the loop runs commands."""

        def end() -> None:
            raise EngineDeadError(reason)

        self._post(end, ignore)

    def _post(self, command: Callable[[], object], reply: Reply) -> None:
        with self._condition:
            if not self._has_ended:
                self._inbox.append((command, reply))
                self._condition.notify_all()
                return
        reply(EngineDeadError(self._end_message()))

    def _run(self) -> None:
        try:
            step_seconds = self.warm_up()
            if self.heartbeat is not None:
                self.heartbeat.warmed_up(step_seconds)
            self._is_warm.set()
            while not self._is_stopping:
                self._turn()
        except Exception as error:  # the shell: whatever broke, every request is answered
            self._failure = f"{type(error).__name__}: {error}"
            _LOG.exception("the engine died")
        finally:
            self._is_warm.set()
            self._end()

    def _turn(self) -> None:
        """Run the commands in the inbox, submit plans, and finish the oldest; wait if there is nothing to do."""
        self.num_turns += 1
        self._run_commands()
        only = self._suspects.only
        empty = self._submit_plans(only)
        if self._in_flight:
            self._finish_step()
        elif only is not None:
            self._suspects.set_aside(only)
        elif empty is not None:
            now = self.clock.now()
            until = None if empty.wake_at is None else max(empty.wake_at, now + MIN_WAIT_S)
            if self._builds.begun_at:
                until = self._builds.wake_by(until, now)
            if self.heartbeat is not None:
                self.heartbeat.idle()
            with self._condition:
                if not (self._inbox or self._is_stopping):
                    self.clock.wait(self._condition, until)

    def _run_commands(self) -> None:
        if self._inbox and self.heartbeat is not None:
            self.heartbeat.commands_begin()
        for _ in range(len(self._inbox)):  # commands posted from now on run after the next step
            command, reply = self._inbox.popleft()
            try:
                command()
            except Exception as error:  # it kills the engine, but its caller is answered first
                reply(EngineDeadError(f"the engine died: {type(error).__name__}: {error}"))
                raise

    def _submit_plans(self, only: frozenset[str] | None) -> StepPlan | None:
        """Plan and submit until `depth` plans are in flight; return the empty plan, if planning stopped at one."""
        if self._in_flight and self._in_flight[-1].failure is not None:
            return None  # no plan may run after a plan whose submission failed
        depth = self._depth if only is None else 1
        while len(self._in_flight) < depth:
            started_at = self.clock.now()
            plan = self._scheduler.plan(started_at, only)
            schedule_s = self.clock.now() - started_at
            self._deliver_decisions(plan.events)
            if plan.is_empty:
                return plan
            if self.heartbeat is not None:
                self.heartbeat.step_begins(plan)
            ticket, failure = None, None
            try:
                if self._active_bank is None:
                    ticket = self._executor.submit(plan)
                else:
                    ticket = submit_masked(self._executor, plan, self._active_bank)
            except EngineDeadError:
                raise
            except Exception as error:  # the executor shell: a step that fails is retried, then bisected
                failure = _step_failure(plan, error)
            self._in_flight.append(PlanInFlight(plan, ticket, failure, schedule_s, started_at))
            if failure is not None:
                break
        return None

    def _finish_step(self) -> None:
        """Collect and commit the oldest plan in flight, deliver its events, and note the times."""
        step = self._in_flight.popleft()
        plan = step.plan
        for new in plan.new_sequences:
            self._owners[new.slot] = new.request_id
        outcome = self._collect(step)
        collected = self.clock.now()
        if isinstance(outcome, StepFailure):
            self._discard_later_plans()
        events = self._scheduler.commit(plan, outcome, collected)
        committed = self.clock.now()
        if self._active_bank is not None:
            self._active_bank.committed(events)
        self._send(self._outbox.committed(events))
        if isinstance(outcome, StepResult):
            self._suspects.stepped(plan, self._owners, events.request_ids)
        self._note_decisions(events.decisions)
        self._report("stepped", plan, outcome, events)
        if self.heartbeat is not None:
            self.heartbeat.step_ended(isinstance(outcome, StepResult))
        if isinstance(outcome, StepFailure):
            self._recover(plan, outcome)
            return
        delivered, parts = self.clock.now(), outcome.timings
        schedule_s, step_s = step.schedule_s + committed - collected, delivered - step.started_at
        computed = parts.prepare_s, parts.forward_s, parts.sample_s
        self.step_times.add((schedule_s, *computed, delivered - committed, step_s))

    def _collect(self, step: PlanInFlight) -> StepResult | StepFailure:
        if step.failure is not None:
            return step.failure
        try:
            if isinstance(step.ticket, MaskedTicket):
                return step.ticket.collect(self._executor)
            return self._executor.collect(step.ticket)
        except EngineDeadError:
            raise
        except Exception as error:  # the executor shell
            return _step_failure(step.plan, error)

    def _discard_later_plans(self) -> None:
        """Collect the plans submitted after a failed one, in order, and discard their results."""
        while self._in_flight:
            later = self._in_flight.popleft()
            self.num_discarded += 1
            if later.failure is None:
                self._collect(later)

    def _deliver_decisions(self, decisions: tuple[Event, ...]) -> None:
        """Send decisions that were made outside a commit to the client and the observers."""
        if decisions:
            self._send(self._outbox.decided(decisions))
            self._note_decisions(decisions)

    def _send(self, events: Events | None) -> None:
        if events is not None and not events.is_empty:
            self._receive(events)

    def _note_decisions(self, decisions: tuple[Event, ...]) -> None:
        if decisions:
            if self._active_bank is not None:
                self._active_bank.ended(decisions)
                if self._active_bank.is_empty:
                    self._active_bank = None
            if self._with_media:
                ended = {event.request_id for event in decisions if event.kind is EventKind.FINISHED}
                if ended := ended & self._with_media:
                    self._with_media -= ended
                    cast(MediaExecutor, self._executor).drop_media(sorted(ended))
            self._suspects.ended(decisions)
            self._report("decided", decisions)

    def _recover(self, plan: StepPlan, failure: StepFailure) -> None:
        """Choose what the next plan may contain after a failed step, and fail the requests that cause failures."""
        names = [self._owners[slot] for slot in plan.slots]
        memory_tokens = plan.num_query_tokens if failure.is_memory else 0
        culprits = self._suspects.failed([name for name in names if name in self._outbox], memory_tokens)
        if culprits:
            message = f"steps with this request fail, those without it do not: {failure.message}"
            error = FinishError(ErrorKind.STEP_FAILED, message)
            self._scheduler.cancel(culprits, self.clock.now(), FinishReason.ERROR, error)
        if self._suspects.is_executor_broken:
            raise EngineDeadError(f"no step succeeds any more: {failure.message}")

    def _admit(self, request: Request, reply: Reply, built: Built, media: tuple[MediaItem, ...] = ()) -> None:
        try:
            ends_as = self._builds.finish(request, built) if request.params.grammar else None
            if self._is_draining:
                raise QueueFullError("the engine is draining and takes no new requests; try another, or later")
            if self._max_waiting and self._scheduler.num_waiting >= self._max_waiting:
                raise QueueFullError(f"{self._scheduler.num_waiting} requests wait already; try again later")
            if request.spans:
                check_media(request, media)
            self.check_request(request)
            admission = self._scheduler.admit(request, self.clock.now())
        except RequestError as error:
            reply(error)
            return
        if media:
            self._with_media.add(request.request_id)
            cast(MediaExecutor, self._executor).add_media(request, media)
        if self._bank is not None and isinstance(built, Matcher):
            self._bank.open(request.request_id, built)
            self._active_bank = self._bank
        self._outbox.open(request.request_id)
        self._report("admitted", request)
        reply(Accepted(request.request_id, admission.max_tokens, admission.capped))
        if ends_as is not None:
            self._cancel((request.request_id,), ends_as)

    def _cancel(self, request_ids: tuple[str, ...], reason: FinishReason, choice: int | None = None) -> int:
        now = self.clock.now()
        if choice is None:
            self._builds.cancel(request_ids, reason)
            num_ended = self._scheduler.cancel(request_ids, now, reason)
        else:
            num_ended = sum(self._scheduler.end_choice(name, choice, now, reason) for name in request_ids)
        self._deliver_decisions(self._scheduler.take_events())
        return num_ended

    def _control(self, verb: str, argument: str) -> object:
        if verb in self.verbs:
            return self.verbs[verb](argument)
        if verb == "statistics":
            return self._statistics()
        if verb == "reset_prefix_cache":
            return self._scheduler.reset_prefix_cache()
        if verb == "cancel_all":
            building = tuple(self._builds.begun_at)  # they end when their grammars are built
            return self._cancel((*self._outbox.open_ids, *building), FinishReason.CANCELLED) + len(building)
        if verb == "pause":
            self._scheduler.pause()
        elif verb == "resume":
            self._is_draining = False
            self._scheduler.resume()
        elif verb == "drain":
            self._is_draining = True
        else:
            known = ("statistics", "pause", "resume", "drain", "cancel_all", "reset_prefix_cache", *self.verbs)
            return EngineError(f"no verb {verb!r}; known are {', '.join(known)}")
        return True

    def _statistics(self) -> Mapping[str, object]:
        values = asdict(self._scheduler.statistics())
        loop = {
            "open_requests": len(self._outbox),
            "in_flight": len(self._in_flight),
            "turns": self.num_turns,
            "discarded_plans": self.num_discarded,
            "max_step_tokens": self._suspects.step_limit.tokens,
            "is_draining": self._is_draining,
        }
        more = {name: read() for name, read in self.sections.items()}
        return {"scheduler": values, "loop": loop, "steps": self.step_times.summary(), **more}

    def _end(self) -> None:
        """End every request, answer pending commands, then close the executor."""
        if self._failure is None:
            self._finish_requests()
        reason = FinishReason.CANCELLED if self._failure is None else FinishReason.ERROR
        attempt(lambda: self._send(self._outbox.end_all(self.clock.now(), reason, self._end_error())))
        with self._condition:
            self._has_ended = True
            left, self._inbox = self._inbox, deque()
        for _, reply in left:
            attempt(partial(reply, EngineDeadError(self._end_message())))
        attempt(self._ended)
        if self._bank is not None:
            self._bank.close()
        for close in self.closers:
            attempt(close)

    def _finish_requests(self) -> None:
        """Finish the steps in flight, cancel the remaining requests through the scheduler, and send their ends."""
        try:
            while self._in_flight:
                self._finish_step()
            self._scheduler.cancel(self._outbox.open_ids, self.clock.now(), error=self._end_error())
            self._deliver_decisions(self._scheduler.take_events())
        except Exception as error:  # the shell: whatever broke, every request is answered
            self._failure = f"{type(error).__name__}: {error}"
            _LOG.exception("the engine failed while stopping")

    def _end_error(self) -> FinishError:
        return FinishError(ErrorKind.ENGINE_DEAD, self._end_message())

    def _end_message(self) -> str:
        return f"the engine died: {self._failure}" if self._failure is not None else "the engine was stopped"


def _step_failure(plan: StepPlan, error: Exception) -> StepFailure:
    """Log and return the failure of a step. The exception is not stored: its frames hold the failed step's memory."""
    message = f"{type(error).__name__}: {error}"
    _LOG.warning("step %d failed: %s", plan.step, message)
    return StepFailure(message, isinstance(error, MemoryError))


def attempt(action: Callable[[], object]) -> None:
    """Run one action of an engine's shutdown; log its error, so that the other actions still run."""
    try:
        action()
    except Exception:  # the shell: there is nothing left to answer
        _LOG.exception("something failed at the engine's end")
