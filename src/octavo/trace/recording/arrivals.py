"""The requests of a recording as a workload, with what became of them.

Owns: RecordedRequest. Does not: simulate.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.request import FinishReason
from octavo.trace.recording.reader import Recording


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request. Times are seconds since the first call of the first segment; None where one did not come.

    `arrival` is when the engine took it (`time` in Request.arrival is the front's). `output_tokens` has one number for
    each choice. `keys` are those of the prompt's full blocks, `output_keys` those behind them of the first choice, the
    one that straddles both first; one for each `key_tokens` tokens. `life` is its segment's number, from 0.
    `is_resumed`: it was open in an earlier life of the engine, and its first `emitted_tokens` outputs come from there.
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
    emitted_tokens: int = 0
    is_resumed: bool = False

    @property
    def n(self) -> int:
        """Choices, or beams."""
        return len(self.output_tokens)


def arrivals(recording: Recording) -> list[RecordedRequest]:
    """The requests of all segments in order of arrival; replays the recording to know what became of them."""
    raise NotImplementedError
