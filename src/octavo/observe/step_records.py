"""What each of the last steps was made of and what it found: one packed record a step.

Owns: the columns, and the count of who waits for what. Does not: measure time (StepTimes does) or keep totals (the
scheduler's are written down as they are, and told as differences, so that they add up to the same).
Invariants: memory is bounded; nothing here is O(requests); gauges are as of the step's commit.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.plan import Event, EventKind, StepPlan, WaitReason
from octavo.core.scheduler import Scheduler
from octavo.core.views import Gauges
from octavo.observe.metrics.export import Table
from octavo.observe.metrics.rings import RecordRing
from octavo.observe.step_times import PARTS, StepTimes

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
COLUMNS = ("time_s", *(f"{part}_s" for part in PARTS), *_GAUGES, *_COUNTERS, "waiting_by_reason")
_LAYOUT = f"<dq{len(_GAUGES) + len(_COUNTERS)}q"  # time, number of its entry in StepTimes, gauges, counters


class Waits:
    """Who was last told to wait for what, as the decisions say; O(1) a decision."""

    def __init__(self) -> None:
        self._reason_of: dict[str, WaitReason] = {}
        self._counts = [0] * len(WaitReason)
        self._shown: dict[str, int] | None = {}

    def decided(self, decisions: Iterable[Event]) -> None:
        """Follow decisions, in order."""
        for event in decisions:
            name, kind = event.request_id, event.kind
            if kind == EventKind.CHUNKED or kind == EventKind.CHOICE_FINISHED:
                continue
            old = self._reason_of.pop(name, None)
            if old is not None:
                self._counts[old] -= 1
                self._shown = None
            if kind == EventKind.DEFERRED and event.reason is not None:
                self._reason_of[name] = event.reason
                self._counts[event.reason] += 1
                self._shown = None

    def by_reason(self) -> dict[str, int]:
        """Requests per reason; those never told one are not in it. The same object until something changes."""
        if self._shown is None:
            self._shown = {reason.name.lower(): self._counts[reason] for reason in WaitReason if self._counts[reason]}
        return self._shown


class StepRecords:
    """The last `size` steps that gave a result."""

    def __init__(self, size: int, scheduler: Scheduler, times: StepTimes) -> None:
        self._scheduler = scheduler
        self._times = times
        self._ring = RecordRing(_LAYOUT, size + 1)  # the oldest is what the next one's differences are taken from
        self._waits: list[dict[str, int]] = [{}] * (size + 1)
        self._base = _totals(self._scheduler.gauges())

    def __len__(self) -> int:
        return min(len(self._ring), self._ring.size - 1)

    def add(self, plan: StepPlan, time: float, waits: Waits) -> None:
        """Write down a step that was committed at `time`."""
        gauges = self._scheduler.gauges()
        rows, tokens = len(plan.slots), plan.num_query_tokens
        prefill_rows, fork_rows, prefill_tokens = 0, 0, 0
        if not (plan.is_fast_path and rows == tokens):  # else every row is one token
            prefill_rows, fork_rows, prefill_tokens = make_up(plan)
        place = self._ring.add(
            time,
            self._times.num_steps,
            plan.step,
            rows,
            prefill_rows,
            fork_rows,
            tokens,
            prefill_tokens,
            len(plan.draft_token_ids),
            plan.num_kv_read,
            len(plan.new_sequences),
            gauges.num_running,
            gauges.num_waiting,
            gauges.num_swapped,
            sum(gauges.blocks_used),
            sum(gauges.blocks_cached),
            gauges.host_blocks_used,
            len(plan.copies) // 3,
            len(plan.swap_outs) // 3,
            len(plan.host_loads) // 3,
            *_totals(gauges),
        )
        self._waits[place] = waits.by_reason()

    def table(self) -> Table:
        """Every step kept, oldest first: seconds, counts, and what the totals grew by. None: no longer known."""
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
        return {"columns": COLUMNS, "rows": rows}

    def reset(self) -> None:
        """Forget the steps; what the totals grow by is counted from here."""
        self._ring.reset()
        self._base = _totals(self._scheduler.gauges())


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


def make_up(plan: StepPlan) -> tuple[int, int, int]:
    """Rows of more than one token, rows without any, and the tokens of the former; drafts make no prefill row."""
    counts = plan.counts
    if plan.num_drafts:
        prefills = [count for count, drafts in zip(counts, plan.num_drafts, strict=True) if count > 1 and not drafts]
        return len(prefills), counts.count(0), sum(prefills)
    ones, forks = counts.count(1), counts.count(0)
    return len(counts) - ones - forks, forks, plan.num_query_tokens - ones
