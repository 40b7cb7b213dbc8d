"""Recorded runs of this engine, predicted from their own first part, and what the machine's neighbours explain.

Owns: making the runs, the fit on a part of a recording, the comparison with the rest. Does not: serve (octavo does).
A run is `octavo bench online` with a server of its own that records, or `octavo bench offline` with several passes. A
fit sees the steps before two thirds of the requests arrived, or a third of the passes; the run is simulated with it,
from arrivals, lengths and block keys, and the rest is compared. The first seconds, or the first pass, warm up. Runs of
the same workload tell how far runs are apart.
What neighbours explain: the logarithm of measured over predicted step time, of each second, is fitted linearly in the
cores that neighbours took and in the logarithms of the times of fixed work. The fit's steps are then stretched by what
this gives for the difference between the part that the fit saw and the rest, and the rest is predicted again. The error
that goes away is the neighbours'.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tools.fidelity.neighbours import Neighbours, NeighbourSampler

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import FinishReason, Request
from octavo.observe.history import EventSink
from octavo.observe.recording.columns import StepColumns
from octavo.observe.recording.format import Header
from octavo.observe.recording.reader import RecordedStep, Recording, open_recording, steps
from octavo.observe.recording.requests import RecordedRequest, arrivals
from octavo.simulator.arrival import Arrival
from octavo.simulator.closeness import KINDS, Column, Times
from octavo.simulator.cost_model import CostModel, ScaledCosts, StepShape, shape_of
from octavo.simulator.costs.fitted import WARM_UP_S, Fit, Fitted, add_step, begin_of, fit_columns
from octavo.simulator.costs.least_squares import Array, non_negative
from octavo.simulator.outcomes import Outcomes
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup
from octavo.simulator.workloads.traces import recorded_arrival

LEARNT = 1 / 3
BOUND, P99_BOUND = 0.05, 0.10
QUIET_CORES = 0.1  # a run or a second with less than this taken by others is quiet
MIN_SECONDS = 8  # of steps in the part that a line in cores is fitted to


@dataclass(frozen=True, slots=True)
class Noise:
    """What others took of the machine, and how steps went with it.

    `cores` are mean cores of processes and of the host (steal), in the part that the fit saw and in the rest. `slower`
    are the rest's mean times of reading memory and of a loop, over those of the part that the fit saw. `quiet` and
    `noisy` are measured over predicted step time in the rest's seconds with less than QUIET_CORES taken and in the
    others; None if there are none. `stretch` is the factor of the rest's steps that the neighbours explain. `level` is
    the rest's measured over predicted step time: all that the machine did, with its neighbours.
    """

    cores: tuple[tuple[float, float], tuple[float, float]]
    slower: tuple[float, float]
    quiet: float | None
    noisy: float | None
    stretch: float
    level: float

    @property
    def is_quiet(self) -> bool:
        """Return True if others took less than QUIET_CORES in the part that the fit saw, and in the rest."""
        return all(sum(part) < QUIET_CORES for part in self.cores)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The rest of a run, as it went and as predicted; the fit and the noise of each engine.

    `stretched` is predicted with each second's steps as long as its noise explains, `levelled` with the rest's mean
    step time.
    `noises` is empty if neighbours were not measured.
    """

    fits: tuple[Fit, ...]
    measured: Times
    predicted: Times
    noises: tuple[Noise, ...] = ()
    stretched: Times | None = None
    levelled: Times | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass of an offline run: seconds measured, predicted, and predicted with the neighbours' stretch."""

    measured: float
    predicted: float
    stretched: float
    noise: Noise | None


def record(folder: Path, number: int, options: Sequence[str], bench: str = "online") -> Path:
    """Make one run, if its figures are not there; options are those of octavo bench online or offline.

    Raises CalledProcessError.
    """
    path = folder / f"{bench}-{number}"
    command = [sys.executable, "-m", "octavo", "bench", bench, "--record", str(path), "--json", *options]
    record_beside_neighbours(
        path, lambda: subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return path


def record_beside_neighbours(path: Path, make: Callable[[], str]) -> None:
    """Make a run that records in this folder, and keep its figures and its neighbours beside it, unless they are there.

    `make` makes the run and returns its figures.
    """
    figures = path.with_name(f"{path.name}.json")
    if figures.is_file():
        return
    sampler = NeighbourSampler()
    sampler.start()
    try:
        text = make()
    finally:
        neighbours = sampler.finish()
    neighbours.save(samples_path(path))
    figures.write_text(text, encoding="utf-8")


def fit_steps(recorded: Iterable[RecordedStep], source: str) -> Fit:
    """Fit the times of a part of a recording's steps. Raises ConfigError for too few of them."""
    columns = StepColumns()
    for step in recorded:
        add_step(columns, step)
    return fit_columns(columns, source)


def predict(path: Path, warm_up_s: float = WARM_UP_S) -> Prediction:
    """Predict a run from its first third, without the warm-up at its beginning."""
    recording = open_recording(path)
    asked = _ended(recording)
    learnt = int(LEARNT * len(asked))
    cut_s = asked[learnt].arrival - asked[0].arrival
    recorded = list(steps(recording))
    begin = recorded[0].plan.now
    early = [step for step in recorded if step.collected <= begin + cut_s]
    seen = [step for step in early if step.plan.now >= begin + warm_up_s]
    fit = fit_steps(seen, path.name)
    rest = np.arange(len(asked)) >= learnt
    measured, predicted = part_of(_measured(asked), rest), part_of(_simulated(recording, asked, Fitted(fit)), rest)
    if not samples_path(path).is_file():
        return Prediction((fit,), measured, predicted)
    meter = NoiseMeter(Neighbours.load(samples_path(path)), recording.header, Fitted(fit), recorded)
    noise = meter.noise(seen, recorded[len(early) :])
    start = origin_of(recording) + asked[0].arrival
    noisy = _NoisyCosts(Fitted(fit), *meter.stretches(seen, start))
    stretched = part_of(_simulated(recording, asked, noisy, noisy), rest)
    levelled = part_of(_simulated(recording, asked, ScaledCosts(Fitted(fit), noise.level)), rest)
    return Prediction((fit,), measured, predicted, (noise,), stretched, levelled)


def predict_batches(path: Path) -> list[Batch]:
    """Predict the passes of a recorded offline run from a third of them. The first pass warms up and is not seen."""
    recording = open_recording(path)
    passes: dict[str, list[RecordedRequest]] = {}
    for one in _ended(recording):
        passes.setdefault(one.name.split("-")[1], []).append(one)
    used = list(passes.values())[2:]  # octavo's own warm-up, and ours
    learnt = max(1, int(LEARNT * len(used)))
    later = used[learnt:]
    recorded, origin = list(steps(recording)), origin_of(recording)
    parts = [_between(recorded, origin + batch[0].arrival, origin + _end(batch)) for batch in used]
    seen = [step for part in parts[:learnt] for step in part]
    fit = Fitted(fit_steps(seen, path.name))
    noises: list[Noise | None] = [None] * len(later)
    if samples_path(path).is_file():
        meter = NoiseMeter(Neighbours.load(samples_path(path)), recording.header, fit, recorded)
        noises = [meter.noise(seen, part) for part in parts[learnt:]]
    stretched = [ScaledCosts(fit, 1.0 if noise is None else noise.stretch) for noise in noises]
    return [
        Batch(_end(batch) - batch[0].arrival, _batch_s(recording, batch, fit), _batch_s(recording, batch, costs), noise)
        for batch, costs, noise in zip(later, stretched, noises, strict=True)
    ]


def _end(batch: Sequence[RecordedRequest]) -> float:
    return max(one.end or 0.0 for one in batch)


def _between(recorded: Sequence[RecordedStep], begin: float, end: float) -> list[RecordedStep]:
    """Return the steps of a pass. Both times are of the recording, whose rounding may differ in the last digits."""
    return [step for step in recorded if begin <= step.plan.now and step.collected <= end + 1e-6]


def _batch_s(recording: Recording, batch: Sequence[RecordedRequest], costs: CostModel) -> float:
    """Return the simulated seconds of a pass. A request that was sent when another had ended follows that one."""
    workload, ends = [], [one.end or 0.0 for one in batch]
    for one in batch:
        before = [index for index, end in enumerate(ends) if end <= one.arrival]
        arrival = recorded_arrival(one, one.output_tokens, one.arrival - batch[0].arrival)
        if before:
            leader = max(before, key=ends.__getitem__)
            arrival = replace(arrival, time=one.arrival - ends[leader], follows=leader)
        workload.append(arrival)
    return simulate(workload, Setup(recording.header.limits, costs, depth=recording.header.depth)).duration


# --- neighbours


def samples_path(path: Path) -> Path:
    """Return where a run's neighbours are kept."""
    return path.with_name(f"{path.name}.neighbours.json")


class NoiseMeter:
    """Says what others took during parts of a run, and by how much this stretched the steps that a fit predicts."""

    def __init__(self, neighbours: Neighbours, header: Header, fit: Fitted, recorded: Sequence[RecordedStep]) -> None:
        self._neighbours, self._offset, self._fit = neighbours, header.began - header.clock, fit
        causes, predicted, measured = self._by_second(recorded)
        self.slopes = np.zeros(causes.shape[1])  # of the logarithm of measured over predicted
        if len(causes) >= MIN_SECONDS:
            spread = causes - np.average(causes, axis=0, weights=predicted)
            spread[:, causes.std(0) < 1e-9] = 0.0
            weighted = spread * predicted[:, None]
            self.slopes = non_negative(weighted.T @ spread, weighted.T @ np.log(measured / predicted))

    def noise(self, seen: Sequence[RecordedStep], rest: Sequence[RecordedStep]) -> Noise:
        """Return the noise of the part that the fit saw and of another one."""
        taken = self._neighbours
        spans = [(part[0].plan.now + self._offset, part[-1].collected + self._offset) for part in (seen, rest)]
        first, second = (taken.between(*span) for span in spans)
        before, after = (
            (float(taken.processes[part].mean()), float(taken.steal[part].mean())) for part in (first, second)
        )
        change = taken.causes[second].mean(0) - taken.causes[first].mean(0)
        causes, predicted, measured = self._by_second(rest)
        quiet = causes[:, 0] < QUIET_CORES
        ratios = [
            float(measured[chosen].sum() / predicted[chosen].sum()) if chosen.any() else None
            for chosen in (quiet, ~quiet)
        ]
        read, loop = np.exp(change[1:]).tolist()
        stretch, level = exp(float(self.slopes @ change)), float(measured.sum() / predicted.sum())
        return Noise((before, after), (read, loop), ratios[0], ratios[1], stretch, level)

    def stretches(self, seen: Sequence[RecordedStep], start: float) -> tuple[Column, Column]:
        """Return the end of each sampled second, from `start` of the recording's clock, and its steps' stretch.

        The stretch is relative to the steps that the fit saw.
        """
        part = self._neighbours.between(seen[0].plan.now + self._offset, seen[-1].collected + self._offset)
        causes = self._neighbours.causes
        return self._neighbours.times - self._offset - start, np.exp((causes - causes[part].mean(0)) @ self.slopes)

    def _by_second(self, recorded: Sequence[RecordedStep]) -> tuple[Array, Column, Column]:
        """Return what may slow steps, predicted and measured seconds of the steps of each sampled second."""
        used = [
            step for step in recorded if step.plan.slots and not step.has_failed and step.collected > begin_of(step)
        ]
        ends, times = np.array([step.collected + self._offset for step in used]), self._neighbours.times
        places = np.minimum(np.searchsorted(times, ends), len(times) - 1)
        predicted, measured = np.zeros(len(times)), np.zeros(len(times))
        np.add.at(predicted, places, [self._fit.step_s(shape_of(step.plan)) for step in used])
        np.add.at(measured, places, [step.collected - begin_of(step) for step in used])
        some = predicted > 0
        return self._neighbours.causes[some], predicted[some], measured[some]


class _NoisyCosts(CostModel):
    """A CostModel: another one's device times, stretched by the second in which the simulation is.

    It is also the EventSink that follows the time: a step begins when the one before it has ended, or later.
    """

    def __init__(self, costs: CostModel, times: Column, stretches: Column) -> None:
        self.name, self._costs = f"{costs.name} with noise", costs
        self._times, self._stretches, self._now = times, stretches, 0.0

    def step_s(self, shape: StepShape) -> float:
        """Return seconds on the device."""
        place = min(int(np.searchsorted(self._times, self._now)), len(self._times) - 1)
        return self._costs.step_s(shape) * float(self._stretches[place])

    def host_s(self, shape: StepShape) -> float:
        """Return the other model's seconds."""
        return self._costs.host_s(shape)

    def admitted(self, request: Request) -> None:
        """Follow the time."""
        self._now = max(self._now, request.arrival)

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Do nothing: a decision takes no time."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Follow the time."""
        self._now = events.time


# --- requests


def _ended(recording: Recording) -> list[RecordedRequest]:
    return [one for one in arrivals(recording) if one.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)]


def origin_of(recording: Recording) -> float:
    """Return the engine's time at which recorded requests count from: the first arrival."""
    first = next(step for step in steps(recording) if step.plan.slots)
    earliest = min(one.first_scheduled or 0.0 for one in arrivals(recording))
    return first.plan.now - earliest


def _measured(asked: Sequence[RecordedRequest]) -> tuple[Column, ...]:
    columns = [(one.arrival, one.first_token or 0.0, one.end or 0.0, one.output_tokens[0]) for one in asked]
    return tuple(np.array(column, float) for column in zip(*columns, strict=True))


def _simulated(
    recording: Recording, asked: Sequence[RecordedRequest], costs: CostModel, sink: EventSink | None = None
) -> tuple[Column, ...]:
    """The same columns of a simulation of the whole run."""
    start = asked[0].arrival
    workload = [recorded_arrival(one, one.output_tokens, one.arrival - start) for one in asked]
    header = recording.header
    make_sink = None if sink is None else lambda _: sink
    return simulated_columns(workload, Setup(header.limits, costs, depth=header.depth, make_sink=make_sink))[0]


def simulated_columns(workload: Sequence[Arrival], setup: Setup) -> tuple[tuple[Column, ...], Outcomes]:
    """Simulate; return arrivals, first tokens, ends and output tokens in order of the workload, and all outcomes."""
    outcomes = simulate(workload, setup).outcomes
    order = np.argsort(np.array(outcomes.indices))
    columns = (outcomes.arrivals, outcomes.first_tokens, outcomes.ends, outcomes.output_tokens)
    return tuple(np.array(column, float)[order] for column in columns), outcomes


def part_of(columns: tuple[Column, ...], chosen: npt.NDArray[np.bool_]) -> Times:
    """Return the Times of a part of the requests, given their arrivals, first tokens, ends and output tokens."""
    return Times.of(*(column[chosen] for column in columns))


# --- words


def spread(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Standard deviation over runs of each measured mean, as a share of their mean; 0 for one run."""
    found = {}
    for name in KINDS:
        means = np.array([np.mean(getattr(one.measured, name)) for one in predictions])
        found[name] = float(np.std(means, ddof=1) / np.mean(means)) if len(means) > 1 else 0.0
    return found


def verdict(predictions: Sequence[Prediction]) -> str:
    """Each run's errors of means and p99, the cores that others took, and which runs are within the bounds."""
    lines = [
        "| run | cores taken | " + " | ".join(f"{name}: mean, error, p99" for name in KINDS) + " |",
        "|---" * 5 + "|",
    ]
    inside = {name: [0, 0] for name in KINDS}
    for number, one in enumerate(predictions):
        stretched, levelled = (" with each second's noise", one.stretched), (" with its own level", one.levelled)
        for title, predicted in (("", one.predicted), stretched, levelled):
            if predicted is None:
                continue
            errors = predicted.errors(one.measured)
            cells = []
            for name in KINDS:
                mean, p99 = errors[name]["mean"], errors[name]["p99"]
                if not title:
                    inside[name][0] += abs(mean.value) <= BOUND
                    inside[name][1] += abs(p99.value) <= P99_BOUND
                cells.append(f"{np.mean(getattr(one.measured, name)):.4g} s, {mean}, {p99}")
            noise = "" if title else " / ".join(map(describe_noise, one.noises or (None,)))
            lines.append(f"| {number}{title} | {noise} | {' | '.join(cells)} |")
    count = len(predictions)
    bounds = ", ".join(f"{name} {inside[name][0]} and {inside[name][1]} of {count}" for name in KINDS)
    limits = f"{100 * BOUND:.0f} % of the mean and {100 * P99_BOUND:.0f} % of the p99"
    text = "\n".join(lines) + f"\n\nwithin {limits}: {bounds}"
    shares = ", ".join(f"{name} {100 * value:.1f} %" for name, value in spread(predictions).items())
    return f"{text}\nruns differ by (standard deviation): {shares}"


def batch_verdict(runs: Sequence[Sequence[Batch]]) -> str:
    """Each predicted pass's seconds and error, without and with the neighbours' stretch."""
    lines = ["| run, predicted pass | cores taken | seconds | error | with the neighbours' stretch |", "|---" * 5 + "|"]
    for number, passes in enumerate(runs):
        for place, one in enumerate(passes, 1):
            errors = [f"{100 * (seconds / one.measured - 1):+.1f} %" for seconds in (one.predicted, one.stretched)]
            lines.append(
                f"| {number}, {place} | {describe_noise(one.noise)} | {one.measured:.2f} | {' | '.join(errors)} |"
            )
    every = [one for passes in runs for one in passes]
    quiet = [one for one in every if one.noise is not None and one.noise.is_quiet]
    within = [sum(abs(one.predicted / one.measured - 1) <= BOUND for one in some) for some in (quiet, every)]
    counts = f"{within[0]} of {len(quiet)} quiet passes, {within[1]} of all {len(every)}"
    return "\n".join(lines) + f"\n\nwithin {100 * BOUND:.0f} %: {counts}"


def describe_noise(noise: Noise | None) -> str:
    """Return what others took, in words."""
    if noise is None:
        return "not measured"
    parts = [f"{processes:.2f} + {steal:.2f} steal" for processes, steal in noise.cores]
    ratios = [
        f"steps in {name} seconds {ratio:.3f} of the fit"
        for name, ratio in (("quiet", noise.quiet), ("noisy", noise.noisy))
        if ratio is not None
    ]
    speed = f"reading memory {noise.slower[0]:.3f}, a loop {noise.slower[1]:.3f} times as long"
    factors = f"{speed}; stretch {noise.stretch:.3f}, level {noise.level:.3f}"
    loudness = "" if noise.is_quiet else " (not quiet)"
    return f"{parts[0]}, then {parts[1]}{loudness}; {', '.join(ratios)}; {factors}"
