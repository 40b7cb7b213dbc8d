"""Statistics: figures of an engine's last steps and requests, as tables, summaries and a status line.

Owns: the collector, which reads the history's records; the reset and the export; the status line of a busy engine.
Does not: fold events, store without bounds, or read a clock: all times are those of events.
Invariants: if statistics are not collected, a step calls no function of this module. A reset does not change the
scheduler's totals. A step's gauges are as of its commit.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter, sub
from typing import Any

from octavo.config import StatisticsConfig
from octavo.core.request import FinishReason
from octavo.core.snapshots import Gauges
from octavo.observe.history import History, RequestHistory, StepRecord
from octavo.observe.metrics.export import Table
from octavo.observe.series import PARTS, Histogram, StepTimes

STATUS_LINE_S = 5.0  # between two lines while the engine is busy


@dataclass(slots=True)
class StatusLine:
    """Maker of a line from two snapshots of the scheduler's statistics; no line while the engine is idle."""

    last: Mapping[str, Any] | None = None
    at: float = 0.0

    def line(self, statistics: Mapping[str, Any], now: float) -> str | None:
        """Return the line for the time since the last snapshot; None if nothing was computed, or at the first one."""
        new, old, seconds = statistics["scheduler"], self.last, now - self.at
        self.last, self.at = new, now
        if old is None or seconds <= 0:
            return None
        computed = new["num_computed_tokens"] - old["num_computed_tokens"]
        if computed < 0 or new["num_output_tokens"] < old["num_output_tokens"]:
            return None  # another engine, which counts from 0
        if computed == 0 and new["num_running"] == 0:
            return None
        produced = new["num_output_tokens"] - old["num_output_tokens"]
        queried = new["prefix_queried_tokens"] - old["prefix_queried_tokens"]
        hits = new["prefix_hit_tokens"] - old["prefix_hit_tokens"]
        used = new["num_blocks_used"] / max(1, new["num_blocks"])
        prompt = max(0, computed - produced)
        hit = f", prefix hits {hits / queried:.0%}" if queried else ""
        drafted = new.get("num_drafted_tokens", 0) - old.get("num_drafted_tokens", 0)
        accepted = new.get("num_accepted_tokens", 0) - old.get("num_accepted_tokens", 0)
        guessed = f", {accepted / drafted:.0%} of {drafted} drafts accepted" if drafted else ""
        swapped = f", {new['num_swapped']} swapped" if new.get("num_swapped") else ""
        load = f"{new['num_running']} running, {new['num_waiting']} waiting{swapped}, KV {used:.0%}"
        rates = f"{prompt / seconds:,.0f} prompt + {produced / seconds:,.0f} output tokens/s"
        return f"{rates}, {load}{hit}{guessed}"


_LOG = logging.getLogger(__name__)
ReadPools = Callable[[], dict[str, Any]]
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
_TOTALS = attrgetter(
    "num_preemptions", "queried_tokens", "hit_tokens", "num_host_hit_tokens", "num_swapped_out_tokens",
    "num_swapped_in_tokens", "num_output_tokens", "num_accepted_tokens",
)  # fmt: skip
STEP_COLUMNS = ("time_s", *(f"{part}_s" for part in PARTS), *_GAUGES, *_COUNTERS, "waiting_by_reason")
REQUEST_COLUMNS = (
    "request_id", "finish_reason", "arrival_s", "queue_s", "ttft_s", "e2e_s", "prompt_tokens", "output_tokens",
    "cached_tokens", "preemptions", "gap_mean_s", "gap_p50_s", "gap_p90_s", "gap_p99_s", "gap_max_s",
)  # fmt: skip


class StepTable:
    """The last `size` steps that have a result."""

    def __init__(self, size: int, gauges: Gauges, times: StepTimes) -> None:
        self._times = times
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=size)  # as in the table, but with the number in step times
        self._totals: tuple[int, ...] = _TOTALS(gauges)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, record: StepRecord, waiting_by_reason: dict[str, int]) -> None:
        """Add a step. The mapping must not change later."""
        assert record.slots is not None
        gauges = record.gauges
        prefill_rows, fork_rows, prefill_tokens = record.prefill
        num_swapped_out, num_loaded, num_copied = record.moved
        totals = _TOTALS(gauges)
        self._rows.append(
            (
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
                sum(gauges.host_blocks_used),
                num_copied,
                num_swapped_out,
                num_loaded,
                *map(sub, totals, self._totals),
                waiting_by_reason,
            )
        )
        self._totals = totals

    def table(self) -> Table:
        """Return the steps, oldest first: seconds, counts, and the increases of the totals. None: not known."""
        unknown = (None,) * len(PARTS)
        rows = [(time, *(self._times.get(timing) or unknown), *rest) for time, timing, *rest in self._rows]
        return {"columns": STEP_COLUMNS, "rows": rows}

    def reset(self, gauges: Gauges) -> None:
        """Drop the steps; increases of the totals are counted from these gauges on."""
        self._rows.clear()
        self._totals = _TOTALS(gauges)


def request_table(history: History) -> Table:
    """Return the ended requests that are kept, oldest first. O(their tokens): for an export, not for a step."""
    times = list(history.token_times)
    first = history.num_token_steps - len(times)
    rows = [_request_row(request, request.gaps(times, first)) for request in history.figures.ended]
    return {"columns": REQUEST_COLUMNS, "rows": rows}


def _request_row(request: RequestHistory, gaps: list[float]) -> tuple[object, ...]:
    end = request.end
    assert end is not None
    quantiles = [gaps[min(len(gaps) - 1, int(share * len(gaps)))] if gaps else None for share in (0.5, 0.9, 0.99, 1)]
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
        *quantiles,
    )


class Collector:
    """Collector of the last steps, which reports on them and on the history's requests, in the engine's thread."""

    def __init__(
        self, config: StatisticsConfig, history: History, times: StepTimes, read_pools: ReadPools | None = None
    ) -> None:
        self._history = history
        self._scheduler = history.scheduler
        self._requests = history.figures
        self._steps = StepTable(config.step_records, self._scheduler.gauges(), times)
        self._read_pools = read_pools
        self._memory: deque[tuple[float, Mapping[str, int | float]]] = deque(maxlen=MEMORY_RECORDS)
        self._step_tokens = Histogram(STEP_TOKENS)  # since the start, as every total
        self._status_line = StatusLine()
        self._next_line: float | None = None
        self._last_time = 0.0

    def read(self, record: StepRecord) -> None:
        """Add a record of the history."""
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
            if self._read_pools is not None:
                self._memory.append((now, self._read_pools()["total"]))
        self._last_time = now

    def figures(self) -> Mapping[str, object]:
        """Return requests' quantiles, ends of choices, and the numbers of records kept."""
        self._history.settle()
        kept = self._requests
        histograms = {name: getattr(kept, name).summary() for name in ("queue_s", "ttft_s", "gap_s", "e2e_s")}
        return {
            "requests": {"num_open": len(self._history.open), "num_ended": kept.num_ended, **histograms},
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
            "requests": request_table(self._history),
            "memory": {"columns": ("time_s", *names), "rows": memory},
        }

    def reset(self) -> bool:
        """Drop the records; totals since the start and open requests are kept."""
        self._history.settle()
        self._steps.reset(self._scheduler.gauges())
        self._requests.reset()
        self._memory.clear()
        return True

    def _line(self, now: float) -> str | None:
        """Return the status line for the time since the last one; None if the log does not show it."""
        if not _LOG.isEnabledFor(logging.INFO):
            return None
        return self._status_line.line({"scheduler": asdict(self._scheduler.statistics())}, now)
