"""What each of the last requests saw: queue, first token, the gaps between tokens, end to end.

Owns: figures of open requests, a bounded list of ended ones, histograms over all since the start or a reset.
Does not: read a clock (times are those of the events) or count tokens (an end says how many there were).
Method: most requests get a token in every step, so gaps are kept per step, and a request keeps only the steps at which
an unbroken run of tokens began and ended: the cost of a step grows with what changed since the one before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import sub
from typing import Any

from octavo.core.plan import Event, EventKind
from octavo.core.request import FinishReason, Request
from octavo.observe.metrics.export import Table
from octavo.observe.metrics.rings import RecordRing
from octavo.observe.metrics.series import FINE_SECONDS, Histogram

TOKEN_STEPS = 65_536  # steps whose times are kept; a request that began before them has no quantiles of its gaps
COLUMNS = (
    "request_id", "finish_reason", "arrival_s", "queue_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens",
    "cached_tokens", "preemptions", "gap_mean_s", "gap_p50_s", "gap_p90_s", "gap_p99_s", "gap_max_s",
)  # fmt: skip
_FIGURES = len(COLUMNS) - 4  # those before the quantiles, which are worked out when asked for


class _Open:
    """An open request. Steps are numbers of steps that gave anybody a token; -1 = none yet."""

    __slots__ = ("arrival", "breaks", "first_at", "first_step", "last_at", "last_step", "num_preemptions", "num_prompt",
                 "queue_s")  # fmt: skip

    def __init__(self, arrival: float, num_prompt: int) -> None:
        self.arrival = arrival
        self.num_prompt = num_prompt
        self.queue_s: float | None = None
        self.num_preemptions = 0
        self.first_at = self.last_at = 0.0
        self.first_step = -1
        self.last_step = -1  # of its last run, once that is over
        self.breaks: list[int] = []  # flat (last step of a run, first step of the next)


class RequestRecords:
    """Figures of requests, open and ended; at most `size` ended ones are kept."""

    def __init__(self, size: int) -> None:
        self.histograms = {name: Histogram(FINE_SECONDS) for name in ("queue_s", "ttft_s", "gap_s", "e2e_s")}
        self.choice_ends: dict[str, int] = {}
        self.num_ended = 0
        self._gaps = self.histograms["gap_s"]
        self._open: dict[str, _Open] = {}
        self._ends: list[Event] = []  # told, but the tokens of their step are not yet
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=size)
        self._times = RecordRing("<d", TOKEN_STEPS)
        self._ids: Sequence[str] = ()  # of the last step with tokens, and each once
        self._names: set[str] = set()
        self._last_time = 0.0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def num_open(self) -> int:
        """Requests without an end."""
        return len(self._open) - len(self._ends)

    def admitted(self, request: Request) -> None:
        """A request was taken."""
        self.settle()  # an id may be used again at once
        self._open[request.request_id] = _Open(request.arrival, request.num_prompt_tokens)

    def decided(self, decisions: Iterable[Event]) -> None:
        """Follow decisions; the ends among them are entered by settle()."""
        for event in decisions:
            kind = event.kind
            if kind == EventKind.CHOICE_FINISHED:
                reason = _word(event.finish_reason)
                self.choice_ends[reason] = self.choice_ends.get(reason, 0) + 1
                continue
            entry = self._open.get(event.request_id)
            if entry is None:
                continue
            if kind == EventKind.ADMITTED and entry.queue_s is None:
                entry.queue_s = max(0.0, event.time - entry.arrival)
                self.histograms["queue_s"].observe(entry.queue_s)
            elif kind == EventKind.PREEMPTED:  # a swap is told beside it
                entry.num_preemptions += event.by is not None  # else a row or step failed
            elif kind == EventKind.FINISHED:
                self._ends.append(event)

    def tokens(self, ids: Sequence[str], now: float) -> None:
        """A step gave tokens to these requests (one entry a token), at `now`."""
        step, gap, gaps = self._times.num_added, now - self._last_time, self._gaps
        self._times.add(now)
        if ids == self._ids:
            gaps.observe(gap, len(self._names))
        else:
            names = set(ids)
            num_stayed = len(names)
            for name in names ^ self._names:  # in any order: each is by itself
                if name in names:
                    num_stayed -= 1
                    self._enter(name, step, now)
                else:
                    self._leave(name, step - 1)
            if num_stayed:
                gaps.observe(gap, num_stayed)
            self._ids, self._names = ids, names
        self._last_time = now

    def settle(self) -> None:
        """Enter the ends told so far: their tokens are all in by now."""
        for event in self._ends:
            entry = self._open.pop(event.request_id, None)
            if entry is None:
                continue
            if event.request_id in self._names:
                self._last_of_run(entry, self._times.num_added - 1)
                self._names.remove(event.request_id)
                self._ids = ()
            e2e_s = max(0.0, event.time - entry.arrival)
            self.histograms["e2e_s"].observe(e2e_s)
            self.num_ended += 1
            self._ended.append(
                (
                    event.request_id,
                    _word(event.finish_reason),
                    entry.arrival,
                    entry.queue_s,
                    entry.first_at - entry.arrival if entry.first_step >= 0 else None,
                    e2e_s,
                    entry.num_prompt,
                    event.num_tokens,
                    event.cached_tokens,
                    entry.num_preemptions,
                    _mean_gap(entry),
                    entry.first_step,
                    entry.last_step,
                    tuple(entry.breaks),
                )
            )
        self._ends.clear()

    def summary(self) -> dict[str, object]:
        """Open and ended requests, and quantiles in seconds over all since the start or the reset."""
        self.settle()
        figures: dict[str, object] = {"num_open": self.num_open, "num_ended": self.num_ended}
        figures.update((name, histogram.summary()) for name, histogram in self.histograms.items())
        return figures

    def table(self) -> Table:
        """The ended requests kept, oldest first. O(tokens of theirs): for an export, not for a step."""
        self.settle()
        times = [time for (time,) in self._times]
        first = self._times.num_added - len(times)
        rows = [(*record[:_FIGURES], *_gap_quantiles(record[_FIGURES:], times, first)) for record in self._ended]
        return {"columns": COLUMNS, "rows": rows}

    def reset(self) -> None:
        """Forget ended requests and quantiles; open requests go on."""
        self.settle()
        self._ended.clear()
        self.choice_ends.clear()
        self.num_ended = 0
        for histogram in self.histograms.values():
            histogram.reset()

    def _enter(self, name: str, step: int, now: float) -> None:
        """A request has a token, and had none in the step before."""
        entry = self._open.get(name)
        if entry is None:
            return
        if entry.first_step < 0:
            entry.first_step, entry.first_at = step, now
            self.histograms["ttft_s"].observe(max(0.0, now - entry.arrival))
        else:
            self._gaps.observe(now - entry.last_at)
            entry.breaks += (entry.last_step, step)

    def _leave(self, name: str, last: int) -> None:
        entry = self._open.get(name)
        if entry is not None:
            self._last_of_run(entry, last)

    def _last_of_run(self, entry: _Open, last: int) -> None:
        entry.last_step, entry.last_at = last, self._last_time


def _word(reason: FinishReason | None) -> str:
    return (FinishReason.ERROR if reason is None else reason).name.lower()


def _mean_gap(entry: _Open) -> float | None:
    num_gaps = entry.last_step - entry.first_step
    for left, entered in zip(entry.breaks[::2], entry.breaks[1::2], strict=True):
        num_gaps -= entered - left - 1
    return (entry.last_at - entry.first_at) / num_gaps if entry.first_step >= 0 and num_gaps else None


def _gap_quantiles(steps: tuple[Any, ...], times: Sequence[float], first: int) -> tuple[float | None, ...]:
    """Median, 90th and 99th hundredth, and the greatest gap; None where there is none, or times are gone."""
    begin, end, breaks = steps
    if begin < first or begin == end:
        return (None,) * 4
    gaps: list[float] = []
    for left, entered in zip(breaks[::2], breaks[1::2], strict=True):
        run = times[begin - first : left - first + 1]
        gaps += map(sub, run[1:], run)
        gaps.append(times[entered - first] - times[left - first])
        begin = entered
    run = times[begin - first : end - first + 1]
    gaps += map(sub, run[1:], run)
    gaps.sort()
    return (*(gaps[min(len(gaps) - 1, int(share * len(gaps)))] for share in (0.5, 0.9, 0.99)), gaps[-1])
