"""The requests of a recording as a workload, with what became of them.

Owns: RecordedRequest, and gathering them in a replay. Does not: simulate, or fold decisions (observe.history).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.core.plan import Events
from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.observe.history import History, RequestHistory
from octavo.observe.recording.format import Admit, Commit, KeyRun, RecordingError
from octavo.observe.recording.reader import Recording, Segment
from octavo.observe.recording.replaying import DivergenceError, Replayer

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
class _Gathered:
    """A request while its segment is replayed."""

    call: Admit
    max_tokens: int
    history: RequestHistory
    counts: list[int]  # tokens of each choice
    keys: list[bytes] = field(default_factory=list)
    first_token: float | None = None


class _SegmentRequests:
    """The requests of one segment, whose history is kept. Times are seconds after `origin`."""

    def __init__(self, segment: Segment, life: int, origin: float, history: History) -> None:
        self._key_tokens = segment.header.key_tokens
        self._life = life
        self._origin = origin
        self._history = history
        self._all: list[_Gathered] = []  # by order of admission
        self._newest: dict[str, _Gathered] = {}  # by id, which may be used again

    def requests(self) -> list[RecordedRequest]:
        """Return all of them, in order; those still open have no end."""
        return [self._request(one) for one in self._all]

    def admitted(self, call: Admit, max_tokens: int) -> None:
        """A request was admitted."""
        request, params = call.request, call.request.params
        self._history.admitted(request)
        history = self._history.open[request.request_id]
        num_choices = params.n if params.beam_width else params.num_sequences
        one = _Gathered(call, max_tokens, history, [len(request.emitted_token_ids or ())] * num_choices)
        self._all.append(one)
        self._newest[request.request_id] = one

    def keyed(self, runs: tuple[KeyRun, ...]) -> None:
        """Sequences got keys; those of each request's first choice count, in order."""
        for run in runs:
            one = self._all[run.order]
            if not run.choice and run.first == len(one.keys):
                one.keys.extend(run.keys)

    def tokens(self, events: Events) -> None:
        """A commit gave tokens."""
        for name, choice in zip(events.request_ids, events.choices, strict=True):
            one = self._newest[name]
            one.counts[choice] += 1
            if one.first_token is None:
                one.first_token = events.time - self._origin

    def _request(self, one: _Gathered) -> RecordedRequest:
        request, history, end = one.call.request, one.history, one.history.end
        num_prompt = request.num_prompt_tokens // self._key_tokens
        return RecordedRequest(
            request.request_id,
            self._life,
            _arrival(one.call) - self._origin,
            request.num_prompt_tokens,
            tuple(one.counts),
            request.tenant,
            request.priority,
            tuple(one.keys[:num_prompt]),
            tuple(one.keys[num_prompt:]),
            self._key_tokens,
            one.max_tokens,
            history.cached_tokens,
            history.num_preemptions,
            request.ttft_objective,
            request.tpot_objective,
            None if history.admitted_at is None else history.admitted_at - self._origin,
            one.first_token,
            None if end is None else end.time - self._origin,
            None if end is None else end.finish_reason,
            taken=one.call.now - self._origin,
            emitted_tokens=len(request.emitted_token_ids or ()),
            is_resumed=request.emitted_token_ids is not None,
        )


def _arrival(call: Admit) -> float:
    """When a request came to the server; by its own account, where that can be."""
    arrival = call.request.arrival
    return arrival if call.now - MAX_ON_THE_WAY_S <= arrival <= call.now else call.now


def arrivals(recording: Recording, at_end: Callable[[Scheduler], object] | None = None) -> list[RecordedRequest]:
    """The requests of all segments in order of arrival; replays the recording to know what became of them.

    `at_end` gets each life's scheduler as it was in the end. Raises RecordingError where the replay is not equal, and
    what replay raises.
    """
    found: list[RecordedRequest] = []
    origin: float | None = None
    for life, segment in enumerate(recording.segments):
        if origin is None:
            first = next((call for call in segment.calls() if isinstance(call, Admit)), None)
            origin = segment.header.clock if first is None else _arrival(first)
        replayer = Replayer(segment)
        history = History(replayer.scheduler, max_ended=0)
        gathered = _SegmentRequests(segment, life, origin, history)
        try:
            for call in segment.calls():
                made = replayer.make(call)
                if isinstance(call, Admit):
                    gathered.admitted(call, made.max_tokens)
                gathered.keyed(getattr(call, "keys", ()))
                history.decided(made.decisions)
                if isinstance(call, Commit) and made.plan is not None and made.events is not None:
                    gathered.tokens(made.events)
                    history.stepped(made.plan, call.outcome, made.events)
        except DivergenceError as divergence:
            raise RecordingError(
                f"{segment.path} does not replay to the same decisions from step {replayer.step} on "
                f"({divergence.lines[0]}); use the version of Octavo that recorded it "
                f"({segment.header.octavo or 'unknown'})"
            ) from None
        if at_end is not None:
            at_end(replayer.scheduler)
        found += gathered.requests()
    return sorted(found, key=lambda one: one.arrival)
