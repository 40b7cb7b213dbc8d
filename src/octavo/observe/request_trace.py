"""RequestTrace: when a request was queued, prefilled, decoded and preempted, as plain data.

Owns: the spans and their attributes (OpenTelemetry's gen_ai.* names). Does not: send anything, know OpenTelemetry's
package, or hold a prompt or an answer. Times are seconds on the monotonic clock; a trace is complete when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Value = str | bool | int | float | Sequence[str]


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A part of a request, half-open in time."""

    name: str
    start: float
    end: float
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of one prompt: `arrival` in the engine's queue and `ended` on the clock, others in seconds from it."""

    arrival: float
    queue_s: float
    ttft_s: float
    ended: float
    preempted: Sequence[tuple[float, float]] = ()
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class RequestTrace:
    """One HTTP request. `parent` has its traceparent and tracestate headers, as received."""

    name: str
    start: float
    parent: Mapping[str, str] = field(default_factory=dict)
    attributes: dict[str, Value] = field(default_factory=dict)
    spans: list[TraceSpan] = field(default_factory=list)
    end: float | None = None
    error: str | None = None
    _timed: list[Timed] = field(default_factory=list)
    _reasons: list[str] = field(default_factory=list)

    def timed(self, times: Timed, reason: str) -> None:
        """Add the spans of one prompt that ended, and its finish reason."""
        scheduled, first = times.arrival + times.queue_s, times.arrival + times.ttft_s
        self.spans.append(TraceSpan("queue", times.arrival, scheduled))
        self.spans.append(
            TraceSpan("prefill", scheduled, max(scheduled, first), {"octavo.cached_tokens": times.cached_tokens})
        )
        self.spans.append(TraceSpan("decode", max(scheduled, first), max(first, times.ended)))
        self.spans += [
            TraceSpan("preempted", times.arrival + out, times.arrival + back) for out, back in times.preempted
        ]
        self._timed.append(times)
        self._reasons.append(reason)

    def finish(self, now: float) -> None:
        """Set the totals; only the first call has an effect."""
        if self.end is not None:
            return
        self.end = now
        if self._timed:
            first = min(times.arrival + times.ttft_s for times in self._timed) - self.start
            self.attributes |= {
                "gen_ai.usage.input_tokens": sum(times.input_tokens for times in self._timed),
                "gen_ai.usage.output_tokens": sum(times.output_tokens for times in self._timed),
                "gen_ai.usage.cache_read.input_tokens": sum(times.cached_tokens for times in self._timed),
                "gen_ai.response.finish_reasons": list(self._reasons),
                "gen_ai.latency.time_in_queue": max(times.queue_s for times in self._timed),
                "gen_ai.latency.time_to_first_token": first,
                "gen_ai.latency.e2e": now - self.start,
            }
