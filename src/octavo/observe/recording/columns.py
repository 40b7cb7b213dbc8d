"""The numbers of a recording's steps as columns: what each step computed, and how long it took.

Owns: StepColumns; reading them from the records (ColumnsReader), without plans and results.
Does not: price steps (the simulator does).
Most plans continue every row of the plan before by one token. Such a plan costs O(1) here, and is never made.
"""

from __future__ import annotations

from array import array
from collections import deque
from math import nan
from typing import Any, NamedTuple

from octavo.core.plan import ROW_SAMPLE
from octavo.observe.recording.format import COMMIT, PLAN, STATE, CallDecoder, Header, PlanRows, RowDeltas
from octavo.observe.recording.reader import Recording


class StepNumbers(NamedTuple):
    """What a step computes: rows of one token (`decodes`) and longer ones (`chunks`), and blocks that are moved.

    `decode_kv` are the positions that the decodes attend to, their own included. A chunk of n tokens after s positions
    has n * s + n * (n + 1) / 2 `chunk_pairs`. `samples` rows sample. `moved` blocks cross to or from the host.
    """

    decodes: int = 0
    decode_kv: int = 0
    chunks: int = 0
    chunk_tokens: int = 0
    chunk_pairs: int = 0
    samples: int = 0
    copied: int = 0
    moved: int = 0


_MOVING = frozenset(("copies", "swap_outs", "host_loads"))
_WIDTH = len(StepNumbers._fields) + 3  # and when it was planned, and the seconds of the device and of the host


class StepColumns:
    """Numbers and times of successful steps. A step whose time is unknown has none there (NaN).

    ColumnsReader also adds up the seconds in which the device was busy and those of the host between steps; a plan that
    computes and moves nothing takes the host's.
    """

    def __init__(self) -> None:
        self.busy_s = self.host_s = 0.0
        self._flat = array("d")

    def __len__(self) -> int:
        return len(self._flat) // _WIDTH

    def add(self, numbers: tuple[int, ...], planned: float, device_s: float = nan, host_s: float = nan) -> None:
        """Add a step's StepNumbers, and when it was planned, by the engine's clock.

        Host seconds count from the end of the step to the next plan, if that is the next call.
        """
        self._flat.fromlist([*numbers, planned, device_s, host_s])  # `extend` takes three times as long

    def by_name(self) -> dict[str, array[float]]:
        """Return the columns by the names of StepNumbers, `planned`, `device_s` and `host_s`."""
        names = (*StepNumbers._fields, "planned", "device_s", "host_s")
        return {name: self._flat[column::_WIDTH] for column, name in enumerate(names)}


def read_columns(recording: Recording) -> StepColumns:
    """Read the steps of all segments. Raises RecordingError."""
    columns = StepColumns()
    for segment in recording.segments:
        reader = ColumnsReader(segment.header, columns)
        segment.read(reader.take)
        reader.end()
    return columns


class ColumnsReader:
    """Adds the steps of one segment: pairs its plans with their commits, as reader.StepPairs does."""

    def __init__(self, header: Header, columns: StepColumns) -> None:
        self._header, self._columns = header, columns
        self._rows = RowDeltas()
        self._num_rows = self._num_samples = 0  # of the last plan
        self._ends = 0  # the sum of its rows' ends
        # The plans in flight: their StepNumbers, whether they have rows and whether they move blocks, and their times.
        self._flight: deque[tuple[tuple[int, ...], bool, bool, float]] = deque()
        self._free_from: float | None = None
        self._ended: tuple[tuple[int, ...], float, float, float] | None = None  # a step whose next plan is not known
        self._host_from = 0.0  # when its host time began
        self._has_begun = False

    def take(self, records: list[Any]) -> None:
        """Add the next records."""
        for record in records:
            kind = record[0]
            if kind == PLAN:
                now = record[1]
                if self._ended is not None:
                    self.end(now)
                if record[4]:  # its digest: it is not empty
                    self._plan(now, record[5], record[6])
            elif kind == COMMIT:
                if self._flight:
                    self._commit(record[1], record[6] is not None)
            elif kind == STATE:
                self._begin(record)
            self._has_begun = True

    def _begin(self, record: Any) -> None:
        """Begin anew after a state; if it is the first record, with its plans in flight."""
        self._rows = RowDeltas()
        self._num_rows = self._num_samples = self._ends = 0
        saved = None if self._has_begun else getattr(CallDecoder(self._header).decode(record).call, "saved", None)
        for plan in () if saved is None else saved.plans:
            rows = PlanRows(plan.slots, plan.starts, plan.counts, plan.flags)
            numbers = _numbers(rows, len(plan.copies), len(plan.swap_outs) + len(plan.host_loads))
            self._flight.append((numbers, len(rows.slots) > 0, numbers.copied + numbers.moved > 0, plan.now))

    def end(self, next_plan: float | None = None) -> None:
        """Add the last step, if it was not added yet."""
        if self._ended is not None:
            numbers, planned, device_s, collected = self._ended
            host_s = nan
            if next_plan is not None:
                host_s = max(next_plan - collected, 1e-9)
                self._columns.host_s += next_plan - self._host_from
            self._columns.add(numbers, planned, device_s, host_s)
            self._ended = None

    def _plan(self, now: float, columns: Any, values: dict[str, Any]) -> None:
        self._rows.advance(columns)
        copied = moved = 0
        if not _MOVING.isdisjoint(values):
            copied = len(values.get("copies", ()))
            moved = len(values.get("swap_outs", ())) + len(values.get("host_loads", ()))
        if columns is not None:
            rows = self._rows.rows()
            made = _numbers(rows, copied, moved)
            self._num_rows, self._num_samples = len(rows.slots), made.samples
            self._ends = sum(rows.starts) + sum(rows.counts)
            numbers: tuple[int, ...] = made
        else:  # as StepNumbers, which takes ten times as long to make
            self._ends += self._num_rows
            numbers = self._num_rows, self._ends, 0, 0, 0, self._num_samples, copied // 3, moved // 3
        self._flight.append((numbers, self._num_rows > 0, copied + moved > 0, now))

    def _commit(self, now: float, has_failed: bool) -> None:
        self.end()
        numbers, has_rows, moves, planned = self._flight.popleft()
        begin = planned if self._free_from is None else max(planned, self._free_from)
        self._free_from = now
        if has_failed:
            self._flight.clear()
        else:
            self._ended = numbers, planned, now - begin if has_rows and now > begin else nan, now
            self._host_from = now if has_rows or moves else begin
            self._columns.busy_s += self._host_from - begin


def _numbers(rows: PlanRows, copied: int, moved: int) -> StepNumbers:
    """Return the numbers of rows, and of flat columns of blocks, which have three entries for each block."""
    decode_kv = chunks = chunk_tokens = pairs = 0
    for start, count in zip(rows.starts, rows.counts, strict=True):
        if count == 1:
            decode_kv += start + 1
        elif count:
            chunks += 1
            chunk_tokens += count
            pairs += count * start + count * (count + 1) // 2
    samples = sum(map(ROW_SAMPLE.__and__, rows.flags))
    decodes = rows.counts.count(1)
    return StepNumbers(decodes, decode_kv, chunks, chunk_tokens, pairs, samples, copied // 3, moved // 3)
