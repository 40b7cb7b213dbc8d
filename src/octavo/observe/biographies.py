"""Biographies: what became of each request, with times; what `explain` answers, also for a while after the end.

Owns: the lives of open requests and of the last ended ones, where their seconds went. Does not: decide, or read a clock
but for how old an answer is. It is an EventSink: a live loop, a replay and a simulation feed it alike.
Invariants: a life keeps its first and last events and counts what lay between, lives are bounded in number, ended ones
in age; the seconds of a life add up to its end minus its arrival; a step costs O(its decisions and first tokens).
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace

from octavo.config import StatisticsConfig
from octavo.core.explanation import Explanation, Standing, shortage_text, times, word
from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import Scheduler
from octavo.observe.forecast import NEW_REQUEST, AnswerLengths, Forecaster, StepTimeModel
from octavo.observe.sink import WatchedLoop
from octavo.observe.verbs import guarded

NUM_FIRST = 16  # events kept from the beginning of a life
NUM_LAST = 48  # and from its end
MAX_LISTED = 256  # that wait, and as many that run, in a list of all
PHASES = ("earlier", "queue", "prefill", "decode", "preempted", "recompute")
_EARLIER, _QUEUE, _PREFILL, _DECODE, _PREEMPTED, _RECOMPUTE = range(len(PHASES))


class Life:
    """One request from its arrival on; `phase` since `since`, and the seconds of those before."""

    __slots__ = ("arrival", "cached_tokens", "end", "first", "first_token_at", "last", "max_tokens", "name",
                 "num_events", "num_preemptions", "num_prompt", "num_recomputed", "phase", "seconds", "since",
                 "tenant")  # fmt: skip

    def __init__(self, request: Request, now: float) -> None:
        self.name = request.request_id
        self.tenant = request.tenant
        self.arrival = self.since = request.arrival
        self.num_prompt = request.num_prompt_tokens
        self.seconds = [0.0] * len(PHASES)
        self.phase = _QUEUE
        self.first: list[Event] = []
        self.last: deque[Event] = deque(maxlen=NUM_LAST)
        self.num_events = 0
        self.num_preemptions = self.num_recomputed = self.cached_tokens = 0
        self.first_token_at: float | None = None
        self.end: Event | None = None
        if request.emitted_token_ids:  # an engine before this one began it
            self.phase = _EARLIER
            self.turn(_QUEUE, now)

    def turn(self, phase: int, now: float) -> None:
        """Another phase begins."""
        if now > self.since:
            self.seconds[self.phase] += now - self.since
            self.since = now
        self.phase = phase

    def tell(self, event: Event) -> None:
        """Keep an event; chunks that follow each other are one."""
        kept: list[Event] | deque[Event] = self.last if self.last else self.first
        before = kept[-1] if kept else None
        if event.kind == EventKind.CHUNKED and before is not None and before.kind == EventKind.CHUNKED:
            kept[-1] = replace(event, num_tokens=before.num_tokens + event.num_tokens)
            return
        self.num_events += 1
        if len(self.first) < NUM_FIRST:
            self.first.append(event)
        else:
            self.last.append(event)

    @property
    def ended_at(self) -> float:
        """When it ended; it has."""
        assert self.end is not None
        return self.end.time


class Biographies:
    """Lives of requests. All methods belong to the thread that steps; `now` is the scheduler's clock."""

    def __init__(
        self, scheduler: Scheduler, now: Callable[[], float], max_ended: int = 1024, max_age_s: float = 600.0
    ) -> None:
        self._scheduler = scheduler
        self._now = now
        self._max_ended = max_ended
        self._max_age_s = max_age_s
        self._open: dict[str, Life] = {}
        self._ended: OrderedDict[str, Life] = OrderedDict()
        self._num_ended: Counter[str] = Counter()  # by tenant
        self._silent: dict[str, Life] = {}  # that run and wait for a token: their first, or the next after a return
        self._ends: list[Life] = []  # told, but the tokens of their step are not yet
        self.forecaster = Forecaster(scheduler, StepTimeModel(), AnswerLengths(), now)

    @property
    def num_kept(self) -> int:
        """Lives kept, of open and of ended requests."""
        return len(self._open) + len(self._ended)

    # --- what the loop tells

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        self._settle()  # an id may be used again at once
        self._forget(request.request_id)
        self._open[request.request_id] = Life(request, self._now() if request.emitted_token_ids else 0.0)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Follow decisions."""
        for event in decisions:
            life = self._open.get(event.request_id)
            if life is None or life.end is not None:
                continue
            life.tell(event)
            kind = event.kind
            if kind == EventKind.ADMITTED or kind == EventKind.RESUMED:
                is_back = life.first_token_at is not None or life.seconds[_EARLIER] > 0
                life.turn(_RECOMPUTE if is_back else _PREFILL, event.time)
                self._silent[life.name] = life
                if kind == EventKind.ADMITTED:
                    life.cached_tokens = event.cached_tokens
            elif kind == EventKind.PREEMPTED:
                life.turn(_PREEMPTED, event.time)
                life.num_preemptions += event.by is not None  # else a row or step failed
                life.num_recomputed += event.num_tokens
                self._silent.pop(life.name, None)
            elif kind == EventKind.FINISHED:
                life.end = event
                self._ends.append(life)
            if event.num_tokens > 0 and event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                self.forecaster.lengths.add(event.num_tokens)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """A plan was committed."""
        if isinstance(outcome, StepResult):
            self.forecaster.step_times.add(plan, events.time)
        if self._silent:
            self._hear(events)
        if self._ends:
            self._settle()

    def _hear(self, events: Events) -> None:
        """Find first tokens among those of a step."""
        silent = self._silent
        for name in [name for name in events.request_ids if name in silent]:  # in one go: most have tokens already
            life = silent.pop(name, None)
            if life is None:
                continue  # another of its choices
            if life.first_token_at is None:
                life.first_token_at = events.time
            life.turn(_DECODE, events.time)

    def _settle(self) -> None:
        """Close the lives that ended; beyond the bound the tenant that has most loses its oldest."""
        for life in self._ends:
            life.turn(life.phase, life.ended_at)
            self._silent.pop(life.name, None)
            self._open.pop(life.name, None)
            self._forget(life.name)
            self._ended[life.name] = life
            self._num_ended[life.tenant] += 1
        self._ends.clear()
        while len(self._ended) > self._max_ended:
            most = max(self._num_ended, key=self._num_ended.__getitem__)
            self._forget(next(name for name, life in self._ended.items() if life.tenant == most))

    def _forget(self, name: str) -> None:
        life = self._ended.pop(name, None)
        if life is not None:
            self._num_ended[life.tenant] -= 1
            if not self._num_ended[life.tenant]:
                del self._num_ended[life.tenant]

    # --- what people ask

    def answer(self, argument: str) -> dict[str, object]:
        """The verb: one request by its id, or with an empty argument all open ones. Plain JSON values.

        `new_request_s`: when a request that came now would be let in; null where that is not known.
        """
        self._settle()
        now = self._now()
        while self._ended and now - next(iter(self._ended.values())).ended_at > self._max_age_s:
            self._forget(next(iter(self._ended)))
        told = self._one(argument, now) if argument else self._all(now)
        found = self.forecaster.next_tokens().get(NEW_REQUEST)
        return {**told, "new_request_s": None if found is None else found.seconds}

    def _one(self, name: str, now: float) -> dict[str, object]:
        life = self._open.get(name) or self._ended.get(name)
        standing = self._scheduler.explain(name, now)
        if standing is None:
            return unknown(name) if life is None or life.end is None else _ended(life, now)
        values = _plain(standing, now) | {"prediction": None}
        told = ""
        if standing.state is not Standing.DECODE:
            predicted, said = self._predict(standing)
            values["prediction"], told = predicted, f"; {said}"
        values |= {"text": standing.text() + told, "public_text": standing.text(is_named=False) + told}
        return values | _lived(life, now)

    def _all(self, now: float) -> dict[str, object]:
        """Open requests: where they stand, without their lives; the first that wait and the first that run."""
        foretold = self.forecaster.next_tokens()
        listed = []
        for one in self._scheduler.explain_all(now, MAX_LISTED):
            lacks = "" if one.shortage is None else shortage_text(one.shortage, () if one.is_first_short else one.room)
            listed.append(
                {
                    "id": one.name,
                    "tenant": one.tenant,
                    "state": one.state.value,
                    "position": one.position,
                    "reason": word(one.reason),
                    "lacks": lacks,
                    "behind": one.behind,
                    "age_s": now - one.arrival,
                    "num_prompt_tokens": one.work.num_prompt_tokens,
                    "num_outputs": one.work.num_outputs,
                    "num_blocks": one.work.num_blocks,
                    "num_preemptions": one.num_preemptions,
                    "next_token_s": foretold[one.name].seconds if one.name in foretold else None,
                }
            )
        gauges = self._scheduler.gauges()
        counts = {"num_waiting": gauges.num_waiting, "num_running": gauges.num_running_requests}
        return {"open": listed, **counts, "num_ended_kept": len(self._ended)}

    def _predict(self, standing: Explanation) -> tuple[dict[str, object], str]:
        """Seconds to the next token, or why they are not known."""
        found = self.forecaster.next_tokens().get(standing.name)
        if found is not None:
            token = "first" if standing.work.num_outputs == 0 else "next"
            values: dict[str, object] = {
                "next_token_s": found.seconds,
                "least_s": found.least,
                "most_s": found.most,
                "why_not": None,
            }
            band = "" if found.least == found.most else f" ({found.least:.2f} to {found.most:.2f} s)"
            return values, f"its {token} token is expected in about {found.seconds:.2f} s{band}"
        if self._scheduler.is_paused:
            why = "the engine is paused"
        elif self.forecaster.step_times.fit() is None:
            why = "too few steps were made yet"
        elif self.forecaster.lengths.is_known:
            why = "it was made before this came here; ask again"
        else:
            why = "it has to wait for answers to end, and how long they get is not known yet"
        return {"next_token_s": None, "least_s": None, "most_s": None, "why_not": why}, f"no prediction: {why}"


def write_biographies(loop: WatchedLoop, scheduler: Scheduler, config: StatisticsConfig) -> Biographies:
    """Watch a loop, and give it the verb `explain`. Call before it starts."""
    lives = Biographies(scheduler, loop.clock.now, config.explain_kept, config.explain_kept_s)
    loop.watch(lives)
    loop.verbs["explain"] = guarded("explain", lives.answer)
    loop.verbs["forecast"] = guarded("forecast", lambda argument: lives.forecaster.new_request(argument == "model"))
    return lives


def unknown(name: str) -> dict[str, object]:
    """The answer about an id that no open request has, and none that ended and is kept."""
    text = "is not known here: no such request was submitted, or it ended and its record was dropped"
    return {"id": name, "state": "unknown", "text": f"{name} {text}", "public_text": text}


def _plain(standing: Explanation, now: float) -> dict[str, object]:
    """An explanation's values, with times as seconds from now, and what is in `work` beside the rest."""
    values = standing.values()
    work = values.pop("work")
    assert isinstance(work, dict)
    del values["now"], values["arrival"]
    del values["deadline"], values["queue_until"]
    return {
        "id": values.pop("name"),
        **values,
        **work,
        "age_s": now - standing.arrival,
        "deadline_in_s": None if standing.deadline is None else standing.deadline - now,
        "queue_timeout_in_s": None if standing.queue_until is None else standing.queue_until - now,
    }


def _ended(life: Life, now: float) -> dict[str, object]:
    """What is told of a request that has ended."""
    end = life.end
    assert end is not None
    how = "error" if end.finish_reason is None else end.finish_reason.name.lower()
    total = life.ended_at - life.arrival
    parts = ", ".join(f"{spent:.2f} s {phase}" for phase, spent in zip(PHASES, life.seconds, strict=True) if spent > 0)
    again = f", preempted {times(life.num_preemptions)}" if life.num_preemptions else ""
    because = f": {end.message}" if end.message else ""
    text = f"ended ({how}) after {total:.2f} s with {end.num_tokens} tokens{again}{f' ({parts})' if parts else ''}"
    return {
        "id": life.name,
        "tenant": life.tenant,
        "state": Standing.FINISHED.value,
        "text": f"{life.name} {text}{because}",
        "public_text": text + because,
        "age_s": now - life.arrival,
        "num_prompt_tokens": life.num_prompt,
        "num_outputs": end.num_tokens,
        "num_preemptions": life.num_preemptions,
        "cached_tokens": end.cached_tokens,
        "end": {"finish_reason": how, "message": end.message, "total_s": total, "ago_s": now - life.ended_at},
        **_lived(life, now),
    }


def _lived(life: Life | None, now: float) -> dict[str, object]:
    """What became of a request so far: its seconds by phase, and its events."""
    if life is None:  # it came before anybody watched
        return {"seconds": {}, "events": [], "num_events_left_out": 0}
    seconds = list(life.seconds)
    if life.end is None:
        seconds[life.phase] += max(0.0, now - life.since)
    first = None if life.first_token_at is None else life.first_token_at - life.arrival
    return {
        "seconds": dict(zip(PHASES, seconds, strict=True)) | {"total": sum(seconds)},
        "first_token_s": first,
        "num_recomputed_tokens": life.num_recomputed,
        "events": [_event(event, life.arrival) for event in (*life.first, *life.last)],
        "num_events_left_out": life.num_events - len(life.first) - len(life.last),
    }


_FIELDS = {
    EventKind.ADMITTED: ("num_tokens", "cached_tokens"),
    EventKind.RESUMED: ("num_tokens", "cached_tokens"),
    EventKind.CHUNKED: ("num_tokens", "needed"),
    EventKind.DEFERRED: ("reason", "needed", "available"),
    EventKind.PREEMPTED: ("reason", "by", "num_tokens"),
    EventKind.SWAPPED: ("by", "num_tokens"),
    EventKind.FINISHED: ("finish_reason", "num_tokens", "cached_tokens", "message"),
    EventKind.CHOICE_FINISHED: ("choice", "finish_reason", "num_tokens"),
}


def _event(event: Event, arrival: float) -> dict[str, object]:
    """An event with the fields that its kind has; `time_s` since the request's arrival."""
    told: dict[str, object] = {"event": event.kind.name.lower(), "time_s": event.time - arrival, "step": event.step}
    for name in _FIELDS[event.kind]:
        value = getattr(event, name)
        told[name] = value.name.lower() if name in ("reason", "finish_reason") and value is not None else value
    return told
