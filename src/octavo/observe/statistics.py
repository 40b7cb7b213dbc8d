"""Statistics: figures of an engine's last steps and requests, as tables and summaries.

Owns: the collector, which reads the history's records; its verbs (reset, export) and the status line while busy.
Does not: fold events, keep anything unbounded, or read a clock: every time is that of an event.
Invariants: without collection nothing is called by a step; the scheduler's totals never go back, also by a reset.
Gauges of a step are as of its commit. Totals are kept as they are and shown as differences, so that they add up.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict

from octavo.config import StatisticsConfig
from octavo.core.request import FinishReason
from octavo.core.views import Gauges
from octavo.observe.history import History, RequestFigures, RequestHistory, StepRecord, make_up
from octavo.observe.metrics.export import Table
from octavo.observe.metrics.rings import RecordRing
from octavo.observe.metrics.series import Histogram
from octavo.observe.status_line import STATUS_LINE_S, StatusLine
from octavo.observe.step_times import PARTS, StepTimes

_LOG = logging.getLogger(__name__)
MEMORY_RECORDS = 720  # an hour of them
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_GAUGES = (
    "step", "rows", "prefill_rows", "fork_rows", "tokens", "prefill_tokens", "drafted_tokens", "kv_read_tokens",
    "new_sequences",
    "running", "waiting", "swapped", "blocks_used", "blocks_cached", "host_blocks_used", "blocks_copied",
    "blocks_swapped_out", "blocks_loaded",
)  # fmt: skip
_COUNTERS = (
    "preemptions", "queried_tokens", "hit_tokens", "host_hit_tokens", "swapped_out_tokens", "swapped_in_tokens",
    "output_tokens", "accepted_tokens",
)  # fmt: skip
STEP_COLUMNS = ("time_s", *(f"{part}_s" for part in PARTS), *_GAUGES, *_COUNTERS, "waiting_by_reason")
_STEP_LAYOUT = f"<dq{len(_GAUGES) + len(_COUNTERS)}q"  # time, its number in the step times, gauges, counters
REQUEST_COLUMNS = (
    "request_id", "finish_reason", "arrival_s", "queue_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens",
    "cached_tokens", "preemptions", "gap_mean_s", "gap_p50_s", "gap_p90_s", "gap_p99_s", "gap_max_s",
)  # fmt: skip


class StepTable:
    """The last `size` steps that gave a result, one packed record each."""

    def __init__(self, size: int, gauges: Gauges, times: StepTimes) -> None:
        self._times = times
        self._ring = RecordRing(_STEP_LAYOUT, size + 1)  # the oldest is what the next one's differences are taken from
        self._waits: list[dict[str, int]] = [{}] * (size + 1)
        self._base = _totals(gauges)

    def __len__(self) -> int:
        return min(len(self._ring), self._ring.size - 1)

    def add(self, record: StepRecord, waiting_by_reason: dict[str, int]) -> None:
        """Keep a step. The mapping is not changed after."""
        assert record.slots is not None
        gauges, moved = record.gauges, record.moved
        prefill_rows, fork_rows, prefill_tokens = 0, 0, 0
        if not record.is_decode:
            prefill_rows, fork_rows, prefill_tokens = make_up(record.counts, record.num_drafts, record.num_tokens)
        place = self._ring.add(
            record.end,
            record.timing,
            record.step,
            len(record.slots),
            prefill_rows,
            fork_rows,
            record.num_tokens,
            prefill_tokens,
            sum(record.num_drafts),
            record.num_kv_read,
            len(record.taken),
            gauges.num_running,
            gauges.num_waiting,
            gauges.num_swapped,
            sum(gauges.blocks_used),
            sum(gauges.blocks_cached),
            gauges.host_blocks_used,
            moved[2],
            moved[0],
            moved[1],
            *_totals(gauges),
        )
        self._waits[place] = waiting_by_reason

    def table(self) -> Table:
        """Return every step kept, oldest first: seconds, counts, and what the totals grew by. None: not known."""
        ring, before, rows = self._ring, self._base, []
        first = ring.num_added - len(ring)
        for number, record in enumerate(ring, first):
            time, timing, gauges = record[0], int(record[1]), record[2 : 2 + len(_GAUGES)]
            totals = record[2 + len(_GAUGES) :]
            if number > first or ring.num_added < ring.size:
                grown = [new - old for new, old in zip(totals, before, strict=True)]
                seconds = self._times.get(timing) or (None,) * len(PARTS)
                rows.append((time, *seconds, *gauges, *grown, self._waits[number % ring.size]))
            before = totals
        return {"columns": STEP_COLUMNS, "rows": rows}

    def reset(self, gauges: Gauges) -> None:
        """Forget the steps; what the totals grow by is counted from these gauges on."""
        self._ring.reset()
        self._base = _totals(gauges)


def _totals(gauges: Gauges) -> tuple[float, ...]:
    return (
        gauges.num_preemptions,
        gauges.queried_tokens,
        gauges.hit_tokens,
        gauges.num_host_hit_tokens,
        gauges.num_swapped_out_tokens,
        gauges.num_swapped_in_tokens,
        gauges.num_output_tokens,
        gauges.num_accepted_tokens,
    )


def request_table(figures: RequestFigures) -> Table:
    """Return the ended requests kept, oldest first. O(tokens of theirs): for an export, not for a step."""
    times = [time for (time,) in figures.token_times]
    first = figures.token_times.num_added - len(times)
    rows = [_request_row(request, request.gaps(times, first)) for request in figures.ended]
    return {"columns": REQUEST_COLUMNS, "rows": rows}


def _request_row(request: RequestHistory, gaps: list[float]) -> tuple[object, ...]:
    end = request.end
    assert end is not None
    shares = [gaps[min(len(gaps) - 1, int(share * len(gaps)))] if gaps else None for share in (0.5, 0.9, 0.99)]
    return (
        request.request_id,
        (FinishReason.ERROR if end.finish_reason is None else end.finish_reason).name.lower(),
        request.arrival,
        request.queue_s,
        request.ttft_s,
        max(0.0, end.time - request.arrival),
        request.num_prompt_tokens,
        end.num_tokens,
        end.cached_tokens,
        request.num_preemptions,
        request.mean_gap_s,
        *shares,
        gaps[-1] if gaps else None,
    )


class Collector:
    """Keeps the last steps and requests of a history that has figures. All methods belong to the engine's thread."""

    def __init__(self, config: StatisticsConfig, history: History, times: StepTimes) -> None:
        assert history.figures is not None
        self._history = history
        self._scheduler = history.scheduler
        self._requests = history.figures
        self._steps = StepTable(config.step_records, self._scheduler.gauges(), times)
        self._has_memory = config.memory_analysis
        self._memory: deque[tuple[float, Mapping[str, int | float]]] = deque(maxlen=MEMORY_RECORDS)
        self._step_tokens = Histogram(STEP_TOKENS)  # since the start, as every total
        self._status_line = StatusLine()
        self._next_line: float | None = None
        self._last_time = 0.0

    def read(self, record: StepRecord) -> None:
        """Take in a record of the history."""
        if record.slots is None:
            return
        now = record.end
        if record.failure is None:
            self._steps.add(record, self._history.waits.by_reason())
            self._step_tokens.observe(record.num_tokens)
        if self._next_line is None or record.begin - self._last_time >= STATUS_LINE_S:  # the first, or after a rest
            self._next_line = now + STATUS_LINE_S
            self._line(now)
        elif now >= self._next_line:
            self._next_line = now + STATUS_LINE_S
            line = self._line(now)
            if line is not None:
                _LOG.info("%s", line)
            if self._has_memory:
                self._memory.append((now, asdict(self._scheduler.memory().total)))
        self._last_time = now

    def figures(self) -> Mapping[str, object]:
        """Return requests' quantiles, ends of choices, and how much is kept."""
        self._history.settle()
        kept = self._requests
        return {
            "requests": {
                "num_open": len(self._history.open),
                "num_ended": kept.num_ended,
                "queue_s": kept.queue_s.summary(),
                "ttft_s": kept.ttft_s.summary(),
                "gap_s": kept.gap_s.summary(),
                "e2e_s": kept.e2e_s.summary(),
            },
            "choice_ends": dict(kept.choice_ends),
            "step_tokens": {"buckets": dict(self._step_tokens.cumulative()), "total": self._step_tokens.total},
            "num_step_records": len(self._steps),
            "num_request_records": len(kept.ended),
        }

    def export(self) -> Mapping[str, Table]:
        """Return everything kept, as tables: steps, requests, memory, and the totals since the start."""
        self._history.settle()
        totals = asdict(self._scheduler.statistics())
        memory = [(time, *values.values()) for time, values in self._memory]
        names = tuple(self._memory[0][1]) if self._memory else ()
        return {
            "totals": {"columns": tuple(totals), "rows": [tuple(totals.values())]},
            "steps": self._steps.table(),
            "requests": request_table(self._requests),
            "memory": {"columns": ("time_s", *names), "rows": memory},
        }

    def reset(self) -> bool:
        """Forget what is kept; totals since the start and open requests stay."""
        self._history.settle()
        self._steps.reset(self._scheduler.gauges())
        self._requests.reset()
        self._memory.clear()
        return True

    def _line(self, now: float) -> str | None:
        """Return the status line since the one before, unless the log does not show it."""
        if not _LOG.isEnabledFor(logging.INFO):
            return None
        return self._status_line.line({"scheduler": asdict(self._scheduler.statistics())}, now)
