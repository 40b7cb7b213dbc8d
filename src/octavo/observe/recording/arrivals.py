"""Extract the requests of a recording as a workload, with their outcomes.

Owns: RecordedRequest, and collecting them in a replay. Does not: simulate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.request import FinishReason
from octavo.core.scheduler import Scheduler
from octavo.core.tap import AdmitCall
from octavo.observe.history import History, RequestHistory
from octavo.observe.recording.format import RecordingError
from octavo.observe.recording.reader import Recording, Segment
from octavo.observe.recording.replaying import DivergenceError, Replayer

MAX_ON_THE_WAY_S = 3600.0  # from the front end to the engine; a longer time means another clock


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request. Times are seconds since the first arrival of all; None if the event did not happen.

    `arrival` is its arrival at the server, `taken` its admission by the engine, between two steps. `output_tokens` has
    one number for each choice. `keys` are those of the prompt's full blocks, `output_keys` the later ones of the first
    choice, beginning with the block that holds the prompt's end; one for each `key_tokens` tokens. `segment_index` is
    that of its segment. `is_resumed`: it was open in an earlier engine process, which generated its first
    `emitted_tokens` outputs.
    """

    name: str
    segment_index: int
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


class _Gathered:
    """The data of a request collected while its segment is replayed, beside its history."""

    def __init__(self, call: AdmitCall, max_tokens: int, history: RequestHistory) -> None:
        params, emitted = call.request.params, len(call.request.emitted_token_ids or ())
        self.call = call
        self.max_tokens = max_tokens
        self.history = history
        self.keys: list[bytes] = []
        self.num_emitted = emitted
        self.num_outputs = [emitted] * (params.n if params.beam_width else params.num_sequences)

    def request(self, segment_index: int, origin: float, key_tokens: int) -> RecordedRequest:
        """Return the request, with times relative to `origin`."""
        request, history, end = self.call.request, self.history, self.history.end
        num_prompt_keys = request.num_prompt_tokens // key_tokens

        def at(now: float | None) -> float | None:
            return None if now is None else now - origin

        return RecordedRequest(
            request.request_id,
            segment_index,
            _arrival(self.call) - origin,
            request.num_prompt_tokens,
            tuple(self.num_outputs),
            request.tenant,
            request.priority,
            tuple(self.keys[:num_prompt_keys]),
            tuple(self.keys[num_prompt_keys:]),
            key_tokens,
            self.max_tokens,
            history.cached_tokens,
            history.num_preemptions,
            request.ttft_objective,
            request.tpot_objective,
            first_scheduled=at(history.admitted_at),
            first_token=at(history.first_token_at),
            end=None if end is None else end.time - origin,
            finish_reason=None if end is None else end.finish_reason,
            taken=self.call.now - origin,
            emitted_tokens=self.num_emitted,
            is_resumed=request.emitted_token_ids is not None,
        )


def _arrival(call: AdmitCall) -> float:
    """Return when a request arrived at the server: its own time if that is plausible, else its admission's."""
    arrival = call.request.arrival
    return arrival if call.now - MAX_ON_THE_WAY_S <= arrival <= call.now else call.now


def arrivals(recording: Recording, at_end: Callable[[Scheduler], object] | None = None) -> list[RecordedRequest]:
    """Return the requests of all segments in order of arrival; replays the recording to find their outcomes.

    `at_end` is called with each segment's scheduler in its last state. Raises RecordingError if the replay differs,
    and replay's errors.
    """
    found: list[RecordedRequest] = []
    origin: float | None = None
    for index, segment in enumerate(recording.segments):
        if origin is None:
            first = next((one.call for one in segment.calls() if isinstance(one.call, AdmitCall)), None)
            origin = segment.header.clock if first is None else _arrival(first)
        replayer = Replayer(segment)
        gathered = _gather(segment, replayer)
        if at_end is not None:
            at_end(replayer.scheduler)
        found += [one.request(index, origin, segment.header.key_tokens) for one in gathered]
    return sorted(found, key=lambda one: one.arrival)


def _gather(segment: Segment, replayer: Replayer) -> list[_Gathered]:
    """Replay a segment; return its requests in order of admission."""
    history = History(replayer.scheduler, max_ended=0)
    gathered: list[_Gathered] = []
    newest: dict[str, _Gathered] = {}  # by id, which may be used again
    try:
        for made in replayer.play(history):
            call = made.recorded.call
            if isinstance(call, AdmitCall):
                name = call.request.request_id
                newest[name] = _Gathered(call, made.max_tokens, history.open[name])
                gathered.append(newest[name])
            for run in getattr(call, "keys", ()):
                one = gathered[run.order]
                if not run.choice and run.first == len(one.keys):  # of the first choice, in order
                    one.keys.extend(run.keys)
            if made.events is not None:
                for name, choice in zip(made.events.request_ids, made.events.choices, strict=True):
                    newest[name].num_outputs[choice] += 1
    except DivergenceError as divergence:
        raise RecordingError(
            f"{segment.path} does not replay to the same decisions from step {replayer.step} on "
            f"({divergence.lines[0]}); use the Octavo that recorded it ({segment.header.octavo or 'unknown'})"
        ) from None
    return gathered
