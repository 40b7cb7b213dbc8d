"""The requests of a recording as a workload, with what became of them.

Owns: RecordedRequest, and the watcher of a replay that gathers them. Does not: simulate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.core.plan import Event, EventKind, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishReason, Request
from octavo.core.scheduler import Scheduler
from octavo.observe.recording.calls import Admit, Header, KeyRun
from octavo.observe.recording.errors import RecordingError
from octavo.observe.recording.reader import Recording
from octavo.observe.recording.replaying import Replay, ReplayReport

MAX_ON_THE_WAY_S = 3600.0  # from the front to the engine; more than that is another clock


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request. Times are seconds since the first request of all came; None where one did not come.

    `arrival` is when it came to the server, `taken` when the engine took it in, between two steps. `output_tokens` has
    one number for each choice. `keys` are those of the prompt's full blocks, `output_keys` those behind them of the
    first choice, the one that straddles both first; one for each `key_tokens` tokens. `life` is its segment's number,
    from 0. `is_resumed`: it was open in an earlier life of the engine, and its first `emitted_tokens` outputs come from
    there.
    """

    name: str
    life: int
    arrival: float
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    keys: tuple[bytes, ...] = ()
    output_keys: tuple[bytes, ...] = ()
    key_tokens: int = 0
    max_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    ttft_objective: float | None = None
    tpot_objective: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    end: float | None = None
    finish_reason: FinishReason | None = None
    taken: float = 0.0
    emitted_tokens: int = 0
    is_resumed: bool = False

    @property
    def n(self) -> int:
        """Choices, or beams."""
        return len(self.output_tokens)


@dataclass(slots=True)
class _Open:
    """A request while it is gathered."""

    first: RecordedRequest
    counts: list[int]
    keys: list[bytes] = field(default_factory=list)
    cached: int = 0
    preemptions: int = 0
    scheduled: float | None = None
    token: float | None = None

    def closed(self, end: float | None, reason: FinishReason | None) -> RecordedRequest:
        num_prompt = self.first.prompt_tokens // self.first.key_tokens
        return replace(
            self.first,
            output_tokens=tuple(self.counts),
            keys=tuple(self.keys[:num_prompt]),
            output_keys=tuple(self.keys[num_prompt:]),
            cached_tokens=self.cached,
            num_preemptions=self.preemptions,
            first_scheduled=self.scheduled,
            first_token=self.token,
            end=end,
            finish_reason=reason,
        )


class Gatherer:
    """An EventSink that writes down what became of each request of one life."""

    def __init__(self, header: Header, life: int, origin: float) -> None:
        self._header = header
        self._life = life
        self._origin = origin
        self._open: dict[str, _Open] = {}
        self._by_order: dict[int, str] = {}
        self.requests: dict[int, RecordedRequest] = {}  # by order of arrival
        self._orders: dict[str, int] = {}
        self._num_arrived = 0

    def at(self, now: float) -> float:
        """Seconds since the recording's first call."""
        return now - self._origin

    def arrived(self, request: Request, max_tokens: int, now: float) -> None:
        """A request was taken at `now`; the replay tells its time, which a watcher is not told."""
        params, emitted = request.params, len(request.emitted_token_ids or ())
        first = RecordedRequest(
            request.request_id,
            self._life,
            self.at(_came(request, now)),
            request.num_prompt_tokens,
            (),
            request.tenant,
            request.priority,
            taken=self.at(now),
            key_tokens=self._header.key_tokens,
            max_tokens=max_tokens,
            ttft_objective=request.ttft_objective,
            tpot_objective=request.tpot_objective,
            emitted_tokens=emitted,
            is_resumed=request.emitted_token_ids is not None,
        )
        counts = [emitted] * (params.n if params.beam_width else params.num_sequences)
        self._open[request.request_id] = _Open(first, counts)
        order, self._num_arrived = self._num_arrived, self._num_arrived + 1
        self._orders[request.request_id] = order
        self._by_order[order] = request.request_id

    def keyed(self, runs: tuple[KeyRun, ...]) -> None:
        """Keys that sequences got; those of each request's first choice count, in order."""
        for run in runs:
            one = self._open.get(self._by_order.get(run.order, ""))
            if one is not None and not run.choice and run.first == len(one.keys):
                one.keys.extend(run.keys)

    def admitted(self, request: Request) -> None:
        """See arrived."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Follow starts, preemptions and ends."""
        for event in decisions:
            one = self._open.get(event.request_id)
            if one is None:
                continue
            if event.kind == EventKind.ADMITTED:
                one.scheduled, one.cached = self.at(event.time), event.cached_tokens
            elif event.kind == EventKind.PREEMPTED:
                one.preemptions += event.by is not None
            elif event.kind == EventKind.FINISHED:
                self._close(event.request_id, self.at(event.time), event.finish_reason)

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """See tokens."""

    def tokens(self, events: Events) -> None:
        """Count tokens; to be told in front of the decisions of the same commit."""
        for name, choice in zip(events.request_ids, events.choices, strict=True):
            one = self._open.get(name)
            if one is not None:
                one.counts[choice] += 1
                if one.token is None:
                    one.token = self.at(events.time)

    def close(self) -> None:
        """The life is over: whoever is open has no end."""
        for name in list(self._open):
            self._close(name, None, None)

    def _close(self, name: str, end: float | None, reason: FinishReason | None) -> None:
        order = self._orders.pop(name)
        del self._by_order[order]
        self.requests[order] = self._open.pop(name).closed(end, reason)


def _came(request: Request, now: float) -> float:
    """When a request that was taken in now came; its own word for it where that can be."""
    return request.arrival if now - MAX_ON_THE_WAY_S <= request.arrival <= now else now


def arrivals(recording: Recording, at_end: Callable[[Scheduler], object] | None = None) -> list[RecordedRequest]:
    """The requests of all segments in order of arrival; replays the recording to know what became of them.

    `at_end` gets each life's scheduler as it was in the end. Raises RecordingError where the replay is not equal, and
    what replay raises.
    """
    report = ReplayReport()
    found: list[RecordedRequest] = []
    origin: float | None = None
    for life, segment in enumerate(recording.segments):
        if origin is None:
            first = next((call for call in segment.calls() if isinstance(call, Admit)), None)
            origin = segment.header.clock if first is None else _came(first.request, first.now)
        one = Replay(segment, report, None)
        gatherer = Gatherer(segment.header, life, origin)
        one.gather(gatherer)
        one.run(life)
        if report.difference is not None:
            where = report.difference
            raise RecordingError(
                f"{segment.path} does not replay to the same decisions from step {where.step} on "
                f"({where.lines[0]}); use the version of Octavo that recorded it ({segment.header.octavo or 'unknown'})"
            )
        gatherer.close()
        if at_end is not None:
            at_end(one.scheduler)
        found += [gatherer.requests[order] for order in sorted(gatherer.requests)]
    return sorted(found, key=lambda one: one.arrival)
