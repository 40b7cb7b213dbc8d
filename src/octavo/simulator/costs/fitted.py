"""Fitted, a cost model fitted to a recording's steps; DriftMonitor, an alarm when live steps deviate from a fit.

Owns: a step's features; the split of a recording's time into device and host; the fit, its errors and its file; the
alarm. Does not: solve (least_squares), or read recordings (observe.recording).
Device time: from a plan's begin, or the previous step's collection if that is later, to the step's collection. Host
time: from the collection to the next plan, which an engine makes at once, even if the plan is empty.
Tokens are split into ranges, and each range has its own price per token. A step's second token may therefore cost
almost nothing, while the time grows in proportion from the hundredth token on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import log, nan
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octavo.core.limits import Limits
from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.errors import ConfigError
from octavo.observe.recording.columns import StepColumns, StepNumbers, read_columns
from octavo.observe.recording.reader import RecordedStep, Recording
from octavo.simulator.cost_model import CostModel, StepParts, StepShape, TimeFloor, shape_of, token_floors
from octavo.simulator.costs.least_squares import NUM_DRAWS, Array, solve

VERSION = 1  # of the files of fits and corrections
MIN_STEPS = 64
# The beginning of a recording in which steps take longer, because caches and pages are touched first (measured: 10 %).
# It is left out of recordings that last long enough, if enough steps remain.
WARM_UP_S, LONG_S, MANY_STEPS = 10.0, 60.0, 4 * MIN_STEPS
HELD_OUT = 1 / 3
BLOCK = 32  # steps per block; drift is measured by block
KNOTS = (0, 2, 8, 32, 128, 512)  # first token of each range; the last range has no end
NAMES = (
    "step",
    *(f"token from {low}" for low in KNOTS),
    "decode row",
    "decode position read",
    "chunk",
    "chunk position pair",
    "sample",
    "block copied",
    "block moved to or from the host",
)
HOST_NAMES = ("step", "row", "sample")
T = TypeVar("T")


def numbers_of(shape: StepShape) -> StepNumbers:
    """Return what a step of this shape computes and moves."""
    return StepNumbers(
        len(shape.decode_kv),
        sum(shape.decode_kv),
        len(shape.prefills),
        sum([count for count, _ in shape.prefills]),
        sum([count * before + count * (count + 1) // 2 for count, before in shape.prefills]),
        shape.num_samples,
        shape.copied_blocks,
        shape.swapped_out_blocks + shape.loaded_blocks,
    )


def features(of: StepNumbers) -> list[float]:
    """Return the step's features, one for each of NAMES. The predicted time is their weighted sum."""
    return _in_order(_tokens(of.decodes + of.chunk_tokens), of)


def _in_order(tokens: list[Any], of: StepNumbers) -> list[Any]:
    """Return features in the order of NAMES, from the tokens of each range; columns of them from columns."""
    decodes, decode_kv, chunks, _, chunk_pairs, samples, copied, moved = of
    return [*tokens, decodes, decode_kv, chunks, chunk_pairs, samples, copied, moved]


def _tokens(count: int) -> list[float]:
    """Return 1, and the number of tokens in each range."""
    ends = (*KNOTS[1:], count)
    return [1.0, *(float(max(0, min(count, end) - low)) for low, end in zip(KNOTS, ends, strict=True))]


@dataclass(frozen=True, slots=True)
class Coefficient:
    """Seconds per unit of a feature, with a 95 % bootstrap interval."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fit of `num_steps` steps, which can be written to and read from JSON.

    `held_out_bias` and `held_out_error` test a fit of the first two thirds of the steps on the last third. The bias is
    (sum predicted - sum measured) / sum measured, the error the mean of |predicted - measured| / measured. `spread` is
    the standard deviation of log(measured / predicted) over blocks of steps, and the unit in which drift is measured.
    `num_left_out` steps at the beginning were taken for a warm-up and not fitted.
    `engine` describes the recorded engine: `model`, `device`, `depth` and `limits` (the fields of Limits; one cache
    group only).
    """

    source: str
    num_steps: int
    device: tuple[Coefficient, ...]
    host: tuple[Coefficient, ...]
    held_out_bias: float
    held_out_error: float
    spread: float
    engine: Mapping[str, object] = field(default_factory=dict)
    num_left_out: int = 0

    @property
    def limits(self) -> Limits | None:
        """Return the Limits of the recorded engine's scheduler; None if the fit has none."""
        values = self.engine.get("limits")
        if not isinstance(values, dict):
            return None
        try:
            return Limits(**{name: _tupled(value) for name, value in values.items()})
        except TypeError as error:
            raise ConfigError(
                f"fit of {self.source}: its limits are not this version's ({error}); make it anew"
            ) from error

    def as_json(self) -> str:
        """Return the fit as JSON text."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    def report(self) -> str:
        """Return a text with each coefficient in microseconds, its interval, and the held-out error."""
        lines = [f"fit of {self.num_steps} steps of {self.source}; microseconds, with bounds of 95 of 100 resamples"]
        if self.num_left_out:
            lines.append(f"  left out: the first {self.num_left_out} steps ({WARM_UP_S:g} s), a warm-up")
        for part, coefficients in (("device", self.device), ("host", self.host)):
            for one in coefficients:
                if one.high > 0:
                    values = f"{one.value * 1e6:12.4g} ({one.low * 1e6:.4g} to {one.high * 1e6:.4g})"
                    lines.append(f"  {part:6} per {one.name:32} {values}")
        lines.append(
            f"  held out (the last third, by a fit of the rest): {100 * self.held_out_bias:+.1f} % of its total time, "
            f"{100 * self.held_out_error:.1f} % of a step's on the mean"
        )
        return "\n".join(lines)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


class Fitted(CostModel):
    """The CostModel of a fit."""

    def __init__(self, fit: Fit) -> None:
        self.name = f"fitted:{fit.source}"
        self.fit = fit
        self._device = [one.value for one in fit.device]
        self._host = [one.value for one in fit.host]
        self._read_s, self._sample_s = (self._device[NAMES.index(name)] for name in ("decode position read", "sample"))
        self._decodes: dict[int, float] = {}  # number of decode rows -> seconds of what precedes the positions read
        self.decode_s = self._decode_s

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        return _priced(features(numbers_of(shape)), self._device)

    def host_s(self, shape: StepShape) -> float:
        """Return seconds of the host."""
        return _priced((1.0, len(shape.decode_kv) + len(shape.prefills), shape.num_samples), self._host)

    def parts(self, shape: StepShape) -> StepParts:
        """Return the seconds of each kind of work, from the prices of its features."""
        priced = [number * price for number, price in zip(features(numbers_of(shape)), self._device, strict=True)]
        of = dict(zip(NAMES, priced, strict=True))
        attention_s = of["decode position read"] + of["chunk position pair"]
        copies_s = of["block copied"] + of["block moved to or from the host"]
        return StepParts({
            "tokens and rows": sum(priced) - attention_s - copies_s - of["step"],
            "attention": attention_s,
            "copies of blocks": copies_s,
            "fixed costs": of["step"],
        })  # fmt: skip

    def floors(self, max_tokens: int) -> tuple[TimeFloor, ...]:
        """Return floors from the prices of a step, its tokens, its first row, and its attention."""
        of = dict(zip(NAMES, self._device, strict=True))
        if min(self._device) < 0:
            return ()
        row_s = min(of["decode row"], of["chunk"])
        plain = token_floors(lambda count: _priced(_tokens(count), self._device[: 1 + len(KNOTS)]) + row_s, max_tokens)
        kv_s, pair_s = of["decode position read"], of["chunk position pair"]
        return tuple(one._replace(kv_s=kv_s, pair_s=pair_s) for one in plain)

    def _decode_s(self, num_rows: int, kv_sum: int) -> float:
        """Return what step_s returns, with its order of additions."""
        before = self._decodes.get(num_rows)
        if before is None:
            numbers = features(StepNumbers(num_rows, kv_sum, samples=num_rows))[: NAMES.index("decode position read")]
            before = self._decodes[num_rows] = _priced(numbers, self._device[: len(numbers)])
        return before + kv_sum * self._read_s + num_rows * self._sample_s


def _priced(numbers: Sequence[float], prices: Sequence[float]) -> float:
    total = 0.0
    for number, price in zip(numbers, prices, strict=True):
        total += number * price
    return total


def add_step(columns: StepColumns, step: RecordedStep) -> None:
    """Add a step's numbers, device seconds and host seconds if it has a result; read_columns reads the same faster."""
    if step.has_failed:
        return
    begin = begin_of(step)
    device_s = step.collected - begin if step.plan.slots and step.collected > begin else nan
    host_s = nan if step.next_plan is None else max(step.next_plan - step.collected, 1e-9)
    columns.add(numbers_of(shape_of(step.plan)), step.plan.now, device_s, host_s)


def begin_of(step: RecordedStep) -> float:
    """Return when the device began a step: at the step's plan, or at the previous step's end if that is later."""
    return step.plan.now if step.free_from is None else max(step.plan.now, step.free_from)


def fit_columns(columns: StepColumns, source: str, has_warm_up: bool = False, has_errors: bool = True) -> Fit:
    """Fit device times and host times, without a warm-up if there is one. Raises ConfigError for too few steps.

    Without `has_errors` the fit has the same prices and takes a third of the time: their intervals are empty, and the
    errors and the spread are not known (NaN).
    """
    everything = {name: np.array(column) for name, column in columns.by_name().items()}
    rows, seconds, host_rows, host_s = feature_rows(_after_warm_up(everything) if has_warm_up else everything)
    if len(seconds) < MIN_STEPS:
        raise ConfigError(
            f"{source} has {len(seconds)} steps to fit; at least {MIN_STEPS} are needed: record a longer run"
        )
    num_draws = NUM_DRAWS if has_errors else 0
    solution = solve(rows, seconds, num_draws)
    values, low, high = (_extended(one, rows) for one in (solution.values, solution.low, solution.high))
    host = solve(host_rows, host_s, num_draws) if len(host_s) >= 8 else None
    nothing = np.zeros(len(HOST_NAMES))
    bias, error = _held_out(rows, seconds) if has_errors else (nan, nan)
    return Fit(
        source,
        len(seconds),
        _coefficients(NAMES, values, low, high),
        _coefficients(HOST_NAMES, *((nothing,) * 3 if host is None else (host.values, host.low, host.high))),
        bias,
        error,
        _spread(rows @ solution.values, seconds) if has_errors else nan,
        num_left_out=int(np.sum(~np.isnan(everything["device_s"]))) - len(seconds),
    )


def _held_out(rows: Array, seconds: Array) -> tuple[float, float]:
    """Return the bias and the error of a fit of the first steps on the last third (see Fit)."""
    cut = int(len(seconds) * (1 - HELD_OUT))
    held = rows[cut:] @ solve(rows[:cut], seconds[:cut], num_draws=0).values
    return float(held.sum() / seconds[cut:].sum() - 1), float(np.mean(np.abs(held / seconds[cut:] - 1)))


def _after_warm_up(of: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the columns after the first WARM_UP_S; all of them if they are of a short time, or few."""
    planned = of["planned"][~np.isnan(of["device_s"])]
    if not len(planned) or planned[-1] - planned[0] < LONG_S:
        return of
    kept = planned[planned >= planned[0] + WARM_UP_S]
    if len(kept) < MANY_STEPS:
        return of
    return {name: column[of["planned"] >= kept[0]] for name, column in of.items()}


def feature_rows(of: Mapping[str, Array]) -> tuple[Array, Array, Array, Array]:
    """Return features and seconds of steps with device time, then those of the host (HOST_NAMES) with host time."""
    numbers = StepNumbers._make(of[name] for name in StepNumbers._fields)
    tokens = of["decodes"] + of["chunk_tokens"]
    ones = np.ones(len(tokens))
    ranges = [np.clip(tokens, low, end) - low for low, end in zip(KNOTS, (*KNOTS[1:], np.inf), strict=True)]
    rows = np.column_stack(_in_order([ones, *ranges], numbers))
    host_rows = np.column_stack([ones, of["decodes"] + of["chunks"], of["samples"]])
    has_device, has_host = ~np.isnan(of["device_s"]), ~np.isnan(of["host_s"])
    return rows[has_device], of["device_s"][has_device], host_rows[has_host], of["host_s"][has_host]


def _extended(values: Array, rows: Array) -> Array:
    """Copy the price of the previous token range to each range that no step reached."""
    values = values.copy()
    for column in range(2, 1 + len(KNOTS)):
        if not rows[:, column].any():
            values[column] = values[column - 1]
    return values


def _coefficients(names: Sequence[str], values: Array, low: Array, high: Array) -> tuple[Coefficient, ...]:
    return tuple(map(Coefficient, names, values.tolist(), low.tolist(), high.tolist()))


def _spread(predicted: Array, seconds: Array) -> float:
    """Return the standard deviation of log(measured / predicted) over blocks of steps."""
    blocks = [slice(begin, begin + BLOCK) for begin in range(0, len(seconds) - BLOCK + 1, BLOCK)]
    ratios = [float(np.log(seconds[block].sum() / predicted[block].sum())) for block in blocks]
    return float(np.std(ratios)) if len(ratios) > 1 else 0.0


def fit_recording(recording: Recording, columns: StepColumns | None = None, has_errors: bool = True) -> Fit:
    """Fit the steps of a recording, or these columns of them, without the warm-up that one from an engine's start has.

    `has_errors` is as in fit_columns. Raises RecordingError, or ConfigError if it is too short.
    """
    header = recording.header
    engine: dict[str, object] = {"model": header.model, "device": header.device, "depth": header.depth}
    if len(header.limits.num_blocks) == 1 and isinstance(header.limits.policy, str):
        values = {entry.name: getattr(header.limits, entry.name) for entry in fields(header.limits)}
        del values["groups"]
        engine["limits"] = values
    columns = columns or read_columns(recording)
    fit = fit_columns(columns, recording.path.name, not header.has_state, has_errors)
    return replace(fit, engine=engine)


def load_fit(path: Path | str) -> Fit:
    """Read a fit's JSON. Raises ConfigError naming the file and the fault."""
    return load_json(path, _fit_of, "fit", "--fit")


def _fit_of(values: dict[str, Any]) -> Fit:
    device, host = (tuple(Coefficient(**one) for one in values.pop(part)) for part in ("device", "host"))
    if tuple(one.name for one in device) != NAMES or tuple(one.name for one in host) != HOST_NAMES:
        raise ValueError("its coefficients are not those of this version")
    return Fit(**values, device=device, host=host)


def load_json(path: Path | str, make: Callable[[dict[str, Any]], T], what: str, flag: str) -> T:
    """Read a file of octavo simulate `flag`. Raises ConfigError naming the file and the fault."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        if values.pop("version") != VERSION:
            raise ValueError("another version of Octavo wrote it")
        return make(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no {what} ({error}); make one with octavo simulate {flag}") from error


# --- drift -------------------------------------------------------------------------------------------

SLACK = 1.0  # deviation of a block that is ignored, in units of Fit.spread
BOUND = 8.0  # cumulative deviation beyond the slack that raises the alarm, in units of Fit.spread
LEAST_SPREAD = 0.03
MEMORY = 0.2  # weight of the last block in `ratio`


class DriftMonitor:
    """An EventSink that compares a live engine's steps with a fit. Costs about 20 microseconds a step.

    `ratio` is measured / predicted time of recent steps; 1.0 before the first block. The alarm is a two-sided
    cumulative sum (Page, "Continuous inspection schemes", Biometrika 41, 1954) of log(measured / predicted) over blocks
    of steps, in units of the fit's `spread`. `is_drifting` is True from the alarm until the sum is 0 again.
    `num_alarms` counts the alarms.
    """

    def __init__(self, fit: Fit) -> None:
        self._costs = Fitted(fit)
        self._spread = max(fit.spread, LEAST_SPREAD)
        self.ratio = 1.0
        self.is_drifting = False
        self.num_alarms = 0
        self.num_steps = 0
        self._slower = self._faster = 0.0
        self._measured = self._predicted = 0.0
        self._free_from = 0.0

    def admitted(self, request: Request) -> None:
        """Do nothing: there is no step to compare."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Do nothing: there is no step to compare."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Compare one step's time, measured from the step's plan or the previous step's end, whichever is later."""
        begin = max(plan.now, self._free_from)
        self._free_from = events.time
        if plan.slots and isinstance(outcome, StepResult) and events.time > begin:
            self.add(shape_of(plan), events.time - begin)

    def add(self, shape: StepShape, seconds: float) -> None:
        """Add a step and its measured seconds."""
        self._measured += seconds
        self._predicted += self._costs.step_s(shape)
        self.num_steps += 1
        if self.num_steps % BLOCK == 0:
            self._judge(self._measured / max(self._predicted, 1e-12))
            self._measured = self._predicted = 0.0

    def _judge(self, ratio: float) -> None:
        self.ratio = ratio if self.num_steps == BLOCK else self.ratio + MEMORY * (ratio - self.ratio)
        off = log(max(ratio, 1e-12)) / self._spread
        self._slower = min(2 * BOUND, max(0.0, self._slower + off - SLACK))
        self._faster = min(2 * BOUND, max(0.0, self._faster - off - SLACK))
        worst = max(self._slower, self._faster)
        if worst > BOUND and not self.is_drifting:
            self.is_drifting = True
            self.num_alarms += 1
        elif worst == 0.0:
            self.is_drifting = False

    def summary(self) -> dict[str, object]:
        """Return the state as plain JSON values."""
        return {
            "steps": self.num_steps,
            "ratio": self.ratio,
            "is_drifting": self.is_drifting,
            "alarms": self.num_alarms,
            "spread": self._spread,
        }
