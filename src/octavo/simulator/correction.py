"""Fits a Correction of a cost model to measured requests: when each had its first token and its end.

Owns: reading the stamps; the forms; the choice among them; the test on requests that the fit did not see.
Does not: price steps (costs.corrected), or solve (costs.least_squares).
A simulation says which steps lie between two stamps of a request. The measured time between the stamps is then a sum of
these steps' features, linear in a correction's terms (Gauss-Newton's method, with the schedule of the last simulation).
Used are the times from the first token to the end, to the first token of requests that waited for no place, and of
others from when their engine became busy to the first token: what they wait for is all the work since then. Left out
are requests that are preempted in the simulation, because a real engine may preempt others, and the time of an engine's
first step. Times far from the prediction get less weight (Huber).
Choice: ten-fold cross-validation over neighbouring requests; of the forms within a standard error of the best one, that
with the fewest terms (Breiman and others, "Classification and Regression Trees", 1984).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from octavo.core.plan import Event, Events, StepFailure, StepPlan, StepResult
from octavo.core.request import Request
from octavo.core.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.closeness import KINDS, Column, Error, Times, change, mean_misses
from octavo.simulator.cost_model import CostModel, StepShape
from octavo.simulator.costs.corrected import BANDS, NUM_KINDS, NUM_TERMS, CorrectedCosts, Correction, features
from octavo.simulator.costs.least_squares import Array, non_negative
from octavo.simulator.costs.table import CostTable
from octavo.simulator.outcomes import NEVER
from octavo.simulator.rows import csv_rows
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

Places = npt.NDArray[np.int64]
MIN_REQUESTS = 40
MAX_REQUESTS = 1 << 20
NUM_FOLDS = 10
NUM_CHOICES = 2  # of a form
NUM_PASSES = 8  # simulations of a fit
NUM_SOLVES = 20  # of one system, for the weights of its equations and the factors' spread
NUM_PARTS = 3  # each is predicted by a fit of the others
TUNING = 1.345  # Huber's constant
NOT_SEEN = 0.01  # share of the measured seconds below which a kind of step is reported as not seen
LEAST_SPREAD = 0.003  # smaller relative deviations of a kind of time are taken as this
# Standard deviations expected before a fit: of a kind's factor from the common one, of a constant in mean steps.
FACTOR_PRIOR, CONSTANT_PRIOR = 0.03, 0.5
STEP, LARGE = NUM_KINDS, NUM_KINDS + 1  # columns of the constants
DECODE, PROMPT, QUEUE = range(3)  # kinds of times: after the first token, and before it without and with a wait
# Columns of constants beside the factors; in order of their number of terms.
FORMS: dict[str, tuple[int, ...]] = {
    "none": (),
    "factors": (),
    "factors, a constant per step": (STEP,),
    "factors, a constant per large step": (LARGE,),
}


@dataclass(frozen=True, slots=True)
class MeasuredRequests:
    """Measured requests: their positions in the workload, and their stamps in seconds on one clock.

    The clock may start at any time: only differences of a request's stamps are used.
    """

    source: str
    indices: Places
    arrivals: Column
    first_tokens: Column
    ends: Column

    @staticmethod
    def read(path: Path | str) -> MeasuredRequests:
        """Read a CSV file with the columns of `octavo simulate --requests`; lines without an end are left out."""
        rows = []
        for row in csv_rows(Path(path), ("index", "arrival", "first_token", "end")):
            if row.text("end") and row.text("first_token"):
                stamps = [row.number(name) for name in ("arrival", "first_token", "end")]
                if not stamps[0] < stamps[1] <= stamps[2]:
                    raise row.fault("first_token", "give stamps with arrival < first_token <= end")
                rows.append((row.count("index"), *stamps))
            if len(rows) > MAX_REQUESTS:
                raise ConfigError(f"{path}: more than {MAX_REQUESTS} requests; give fewer")
        rows.sort()
        columns = [np.array(column, float) for column in zip(*rows, strict=True)] or [np.zeros(0)] * 4
        return MeasuredRequests(Path(path).name, columns[0].astype(np.int64), *columns[1:])

    def part(self, chosen: Places | slice) -> MeasuredRequests:
        """Return some of the requests."""
        columns = (self.arrivals[chosen], self.first_tokens[chosen], self.ends[chosen])
        return MeasuredRequests(self.source, self.indices[chosen], *columns)


@dataclass(frozen=True, slots=True)
class FormScore:
    """A form's mean loss in cross-validation; its excess over the best form's loss, with a standard error."""

    form: str
    loss: float
    excess: float
    error: float


@dataclass(frozen=True, slots=True)
class CorrectionFit:
    """A fitted correction, how its form was chosen, and its test.

    `held_out` has the errors of the cost model as it was, and of corrections that did not see the third of the requests
    that they predict. `misses` are their mean relative misses of single requests, by kind of time. `shares` are the
    parts of the used seconds that each kind of step has. `first_step` is about measured requests that arrived before
    the end of an engine's first step, whose first tokens no fit uses: by how many seconds these were later than
    predicted, the standard error, and how many requests these are.
    """

    correction: Correction
    scores: tuple[FormScore, ...]
    held_out: tuple[dict[str, dict[str, Error]], dict[str, dict[str, Error]]]
    misses: tuple[dict[str, float], dict[str, float]]
    shares: tuple[float, ...]
    first_step: tuple[float, float, int]

    def report(self) -> str:
        """Return a text with the scores, the terms and the test."""
        made = self.correction
        lines = [f"correction of {made.costs} by {made.num_requests} requests of {made.source}", ""]
        lines += [f"{'form':36}{'loss':>8}   more than the best"]
        for one in self.scores:
            lines.append(f"{one.form:36}{one.loss:8.3f}   {one.excess:.3f} +- {one.error:.3f}")
        lines += ["", f"{'used' if made.is_used else 'not used'}: {made.reason}"]
        if made.is_used:
            bands = [f"to {bound} rows" for bound in BANDS] + [f"over {BANDS[-1]} rows"]
            shares = ["not seen" if share < NOT_SEEN else f"{share:.0%} of the time" for share in self.shares]
            kinds = [f"{factor:.3f} ({share})" for factor, share in zip(made.factors, shares, strict=True)]
            lines += [
                f"  {band:14} factor {plain} without chunks, {mixed} with chunks"
                for band, plain, mixed in zip(bands, kinds[0::2], kinds[1::2], strict=True)
            ]
            lines.append(f"  each step      {made.step_s * 1e3:+.3f} ms")
            if made.large_tokens:
                lines.append(f"  over {made.large_tokens} tokens {made.large_step_s * 1e3:+.3f} ms more")
        if self.first_step[2]:
            seconds, error, count = self.first_step
            words = f"{seconds:+.3f} +- {error:.3f} s more than predicted (first tokens of requests in it: {count})"
            lines.append(f"  left out: the first step of an engine took {words}")
        lines += ["", "held out: each third of the requests, by a fit of the others; errors (95 % of resamples)"]
        for kind in KINDS:
            for title, errors, misses in zip(("not corrected", "corrected"), self.held_out, self.misses, strict=True):
                shown = ", ".join(f"{name} {errors[kind][name]}" for name in ("mean", "p50", "p99"))
                lines.append(f"  {kind} {title:14} {shown}; of one request {100 * misses[kind]:.1f} %")
        return "\n".join(lines)


def fit_correction(workload: Sequence[Arrival], setup: Setup, measured: MeasuredRequests) -> CorrectionFit:
    """Fit a correction of `setup.costs`. It changes nothing if no form beats the costs on requests that it did not see.

    Cross-validation decides this first. Then the whole procedure, the choice included, is carried out on two of three
    parts of the requests, and predicts the third by a simulation; no correction is made if this is worse than none by
    more than a standard error. Raises ConfigError if there are too few requests.
    """
    fitter = _Fitter(workload, setup, measured)
    everything = np.arange(len(measured.indices))
    tested = []
    for inside in np.array_split(everything, NUM_PARTS):
        _, run, _ = fitter.choose(np.delete(everything, inside))
        tested.append(simulated_times(measured.part(inside), run))
    actual = measured_times(measured, fitter.plain)
    predicted = simulated_times(measured, fitter.plain), Times.joined(tested)
    errors, misses = [one.errors(actual) for one in predicted], [one.misses(actual) for one in predicted]
    made, run, scores = fitter.choose(everything)
    shares = fitter.equations(run, made, everything).shares
    first_step = _first_step(measured, run)
    if made.is_used:
        tests = change(misses[1], misses[0])
        reason = f"fits of the others change the misses of each third of the requests by {tests}"
        unused = replace(fitter.none, num_requests=made.num_requests)
        made = replace(unused if tests.value > tests.error else made, reason=reason)
    both = (mean_misses(misses[0]), mean_misses(misses[1]))
    return CorrectionFit(made, scores, (errors[0], errors[1]), both, shares, first_step)


# --- simulated steps


class _PricedSteps(CostModel):
    """A CostModel that notes each step's features under its price, which a sink gets with the committed plan.

    In a group of ranks, the price of the slowest rank is the time of all; so the features found are that rank's.
    """

    def __init__(self, costs: CostModel, correction: Correction) -> None:
        self.name = costs.name
        self.features: dict[float, list[float]] = {}
        self._plain, self._large_tokens = costs, correction.large_tokens
        self._costs = CorrectedCosts(costs, correction)

    def step_s(self, shape: StepShape) -> float:
        """Return the corrected seconds on the device."""
        time_s = self._costs.step_s(shape)
        self.features[time_s] = features(shape, self._plain.step_s(shape), self._large_tokens)
        return time_s

    def host_s(self, shape: StepShape) -> float:
        """Return the seconds on the host, which no correction changes."""
        return self._plain.host_s(shape)


class _StepSink:
    """An EventSink that keeps the ends, the seconds and the features of an engine's steps."""

    def __init__(self, priced: _PricedSteps) -> None:
        self._priced = priced
        self.steps: list[tuple[float, float, list[float]]] = []

    def admitted(self, request: Request) -> None:
        """Do nothing: there is no step."""

    def decided(self, decisions: tuple[Event, ...]) -> None:
        """Do nothing: there is no step."""

    def stepped(self, plan: StepPlan, outcome: StepResult | StepFailure, events: Events) -> None:
        """Keep a step."""
        if plan.slots and isinstance(outcome, StepResult) and outcome.timings is not None:
            seconds = outcome.timings.forward_s
            self.steps.append((events.time, seconds, self._priced.features[seconds]))


class _Curve:
    """The features of an engine's steps, summed up to any time. Within a step they grow in proportion to the time."""

    def __init__(self, steps: Iterable[tuple[float, float, list[float]]]) -> None:
        self.ends, self._seconds, self._rows = (np.array(column, float) for column in zip(*steps, strict=True))
        self._before = np.cumsum(self._rows, axis=0) - self._rows

    def at(self, time: float) -> Array:
        """Return the sum of the features up to a time."""
        place = min(int(np.searchsorted(self.ends, time - 1e-9)), len(self.ends) - 1)
        begin = self.ends[place] - self._seconds[place]
        share = min(1.0, max(0.0, (time - begin) / max(float(self._seconds[place]), 1e-12)))
        total: Array = self._before[place] + share * self._rows[place]
        return total

    def num_ends(self, begin: float, end: float) -> int:
        """Return how many steps end in a time."""
        return int(np.searchsorted(self.ends, end + 1e-9) - np.searchsorted(self.ends, begin))


@dataclass(frozen=True, slots=True)
class SimulatedStamps:
    """The workload's requests as simulated, in order; and the curves of the engines that served them."""

    arrivals: Column
    starts: Column
    first_tokens: Column
    ends: Column
    output_tokens: Column
    preemptions: Column
    curves: Sequence[_Curve]

    def waits(self, index: int) -> bool:
        """Return True if a request waited for a place: for more than the step in which it arrived."""
        return self.curves[index].num_ends(self.arrivals[index], self.starts[index]) > 1

    def is_first(self, index: int) -> bool:
        """Return True if a request arrived before the end of its engine's first step."""
        return bool(self.arrivals[index] < self.curves[index].ends[0])


def simulated_times(measured: MeasuredRequests, run: SimulatedStamps) -> Times:
    """Return the simulated Times of the measured requests."""
    at = measured.indices
    return Times.of(run.arrivals[at], run.first_tokens[at], run.ends[at], run.output_tokens[at])


def measured_times(measured: MeasuredRequests, run: SimulatedStamps) -> Times:
    """Return the measured Times; the simulation says how many tokens a request had."""
    return Times.of(measured.arrivals, measured.first_tokens, measured.ends, run.output_tokens[measured.indices])


# --- the fit


@dataclass(frozen=True, slots=True)
class _Equations:
    """For each used time: its steps' features, its measured seconds, their standard deviation, its request.

    So many as `repeats` says share their steps, and count as one.
    """

    rows: Array
    seconds: Array
    spreads: Array
    repeats: Array
    places: Array

    def part(self, chosen: Array) -> _Equations:
        columns = (self.rows, self.seconds, self.spreads, self.repeats, self.places)
        return _Equations(*(column[chosen] for column in columns))

    @property
    def shares(self) -> tuple[float, ...]:
        """Return each kind of step's share of all the seconds."""
        sums = self.rows[:, :NUM_KINDS].sum(0)
        return tuple((sums / sums.sum()).tolist())


class _Fitter:
    """Fits corrections to parts of the measured requests."""

    def __init__(self, workload: Sequence[Arrival], setup: Setup, measured: MeasuredRequests) -> None:
        if len(measured.indices) < MIN_REQUESTS:
            raise ConfigError(
                f"{measured.source} has {len(measured.indices)} requests with an end; give at least {MIN_REQUESTS}"
            )
        if max(measured.indices) >= len(workload):
            raise ConfigError(
                f"{measured.source} has index {max(measured.indices)}, and the workload has {len(workload)} requests; "
                "index is a request's position in the workload, from 0"
            )
        if setup.groups or setup.failures or setup.drafts is not None or setup.pipeline is not None:
            raise ConfigError(
                "a correction is fitted to engines of one kind, which do not fail; leave out groups, scaling, "
                "failures, drafts and pipelines"
            )
        self._workload, self._setup, self._measured = workload, setup, measured
        large_tokens = setup.costs.captured_tokens if isinstance(setup.costs, CostTable) else 0
        self.none = Correction(setup.costs.name, measured.source, 0, "none", "", large_tokens=large_tokens)
        self.plain = self.simulate(self.none)

    def simulate(self, correction: Correction) -> SimulatedStamps:
        """Simulate the workload with a correction."""
        priced = _PricedSteps(self._setup.costs, correction)
        sinks: list[_StepSink] = []

        def make_sink(scheduler: Scheduler) -> _StepSink:
            del scheduler
            sinks.append(_StepSink(priced))
            return sinks[-1]

        result = simulate(self._workload, replace(self._setup, costs=priced, make_sink=make_sink, sample_s=0.0))
        out = result.outcomes
        order = np.argsort(np.array(out.indices))
        columns = (out.arrivals, out.starts, out.first_tokens, out.ends, out.output_tokens, out.preemptions)
        arrivals, starts, first, ends, tokens, preemptions = (np.array(column, float)[order] for column in columns)
        if np.any(first[self._measured.indices] == NEVER):
            raise ConfigError(
                f"the simulation refuses requests that {self._measured.source} has measured; give the settings of that "
                "server"
            )
        curves = {number: _Curve(sink.steps) for number, sink in enumerate(sinks) if sink.steps}
        served = [curves[replica] for replica in np.array(out.replicas)[order].tolist()]
        return SimulatedStamps(arrivals, starts, first, ends, tokens, preemptions, served)

    def choose(self, chosen: Places) -> tuple[Correction, SimulatedStamps, tuple[FormScore, ...]]:
        """Choose a form by cross-validation within some of the measured requests, and fit it; return its simulation.

        The choice is repeated once with the schedule of the fit, which may be far from the first one.
        """
        reason = "no form predicts requests better than none"
        made, run = replace(self.none, num_requests=len(chosen), reason=reason), self.plain
        scores: tuple[FormScore, ...] = ()
        for _ in range(NUM_CHOICES):
            equations = self.equations(run, made, chosen)
            scores = _cross_validate(equations, self.none.large_tokens > 0)
            within = [one for one in scores if one.excess <= one.error]
            form = min(within, key=lambda one: (num_terms(one.form), one.loss)).form
            if form == made.form:
                break
            made, run = self._fit(replace(made, form=form), run, equations, chosen)
        return made, run, scores

    def _fit(
        self, correction: Correction, run: SimulatedStamps, equations: _Equations, chosen: Places
    ) -> tuple[Correction, SimulatedStamps]:
        """Fit the terms of a form, beginning with the equations of another correction's simulation.

        Steps that get longer take in more prompts, so the schedule's own answer to a change is left out of the
        equations; and where in a step a request arrives is another in each simulation. So the terms are an average of
        the passes' solutions, in which later ones count more (Polyak and Juditsky, SIAM J. Control Optim. 30, 1992).
        """
        if not correction.is_used:
            return _with_terms(correction, np.array(self.none.terms)), self.plain
        made, terms = correction, np.array(correction.terms)
        for number in range(NUM_PASSES):
            terms += (_solve(equations, correction.form) - terms) * min(1.0, 2 / max(1, number))
            made = _with_terms(correction, terms)
            run = self.simulate(made)
            equations = self.equations(run, made, chosen)
        return made, run

    def equations(self, run: SimulatedStamps, correction: Correction, chosen: Places) -> _Equations:
        """Return the equations of some of the measured requests."""
        measured, terms = self._measured.part(chosen), np.array(correction.terms)
        busy_from = _busy_from(run)
        found: list[tuple[Array, float, int, int]] = []
        windows: dict[int, list[tuple[int, float, float]]] = {}
        for place, index in enumerate(measured.indices):
            if run.preemptions[index]:
                continue
            curve, arrival = run.curves[index], run.arrivals[index]
            first, end = run.first_tokens[index], run.ends[index]
            stamps = (measured.arrivals[place], measured.first_tokens[place], measured.ends[place])
            times = []
            if end > first and stamps[2] > stamps[1]:
                times.append((DECODE, first, end, stamps[2] - stamps[1]))
            if run.waits(index):
                begin = busy_from[index]
                times.append((QUEUE, begin, first, stamps[1] - stamps[0] + arrival - begin))
            elif not run.is_first(index):
                times.append((PROMPT, arrival, first, stamps[1] - stamps[0]))
            for kind, begin, until, seconds in times:
                row = curve.at(until) - curve.at(begin)
                idle_s = until - begin - float(row @ terms)  # between steps: the host's, or without work
                found.append((row, max(seconds - idle_s, seconds * 0.01), kind, place))
                windows.setdefault(kind, []).append((id(curve), begin, until))
        if len(found) < MIN_REQUESTS // 2:
            raise ConfigError(
                f"only {len(found)} times of {measured.source} can be compared: the other requests are preempted; "
                "measure more requests"
            )
        rows, seconds, kinds, places = (np.array(column) for column in zip(*found, strict=True))
        overlaps = {kind: _overlap(some) for kind, some in windows.items()}
        repeats = np.array([overlaps[kind] for kind in kinds.tolist()])
        return _Equations(rows, seconds, _spreads(rows @ terms, seconds, kinds), repeats, places)


def _busy_from(run: SimulatedStamps) -> Column:
    """Return, for each request, since when its engine has had an open request without a break."""
    found, busy = np.zeros(len(run.arrivals)), dict[int, tuple[float, float]]()
    for index in np.argsort(run.arrivals, kind="stable").tolist():
        arrival, engine = float(run.arrivals[index]), id(run.curves[index])
        begin, end = busy.get(engine, (arrival, arrival))
        begin = arrival if arrival > end else begin
        busy[engine], found[index] = (begin, max(end, float(run.ends[index]))), begin
    return found


def num_terms(form: str) -> int:
    """Return the number of terms that a form fits."""
    return 0 if form == "none" else NUM_KINDS + len(FORMS[form])


def _with_terms(correction: Correction, terms: Array) -> Correction:
    values = terms.tolist()
    return replace(correction, factors=tuple(values[:NUM_KINDS]), step_s=values[STEP], large_step_s=values[LARGE])


def _overlap(windows: list[tuple[int, float, float]]) -> float:
    """Return the sum of windows of engines (engine, begin, end), divided by the time that they cover."""
    covered, reached = 0.0, dict[int, float]()
    for engine, begin, end in sorted(windows):
        covered += max(0.0, end - max(begin, reached.get(engine, begin)))
        reached[engine] = max(end, reached.get(engine, end))
    return max(1.0, sum(end - begin for _, begin, end in windows) / max(covered, 1e-9))


def _spreads(predicted: Array, seconds: Array, kinds: Places) -> Array:
    """Return each equation's standard deviation: a share of the prediction at its right level, for each kind of time.

    A share of the measured seconds would give short times more weight, and so make predictions too short.
    """
    spreads = predicted * float(np.median(seconds / predicted))
    off = seconds / spreads - 1.0
    for kind in np.unique(kinds):
        mine = off[kinds == kind]
        robust = 1.4826 * float(np.median(np.abs(mine - np.median(mine))))
        spreads[kinds == kind] *= max(LEAST_SPREAD, robust)
    return spreads


def _first_step(measured: MeasuredRequests, run: SimulatedStamps) -> tuple[float, float, int]:
    """Return what CorrectionFit.first_step is; its error is from how much other requests without a wait scatter."""
    off = (measured.first_tokens - measured.arrivals) - (run.first_tokens - run.arrivals)[measured.indices]
    at = measured.indices.tolist()
    is_first = np.array([run.is_first(index) for index in at])
    others = off[~is_first & ~np.array([run.waits(index) for index in at])]
    count = int(is_first.sum())
    if not count or len(others) < 2:
        return 0.0, 0.0, 0
    return float(off[is_first].mean()), float(others.std(ddof=1)) / count**0.5, count


def _solve(equations: _Equations, form: str) -> Array:
    """Return the terms of a form by weighted least squares, none of them below 0.

    Expectations are further equations: factors scatter around a common one, constants around 0. The factors' spread is
    their own, found by expectation and maximisation from FACTOR_PRIOR. The common factor is expected at 1, which is the
    cost model's own time, with a variance of what its square distance from 1 is beyond its own variance (empirical
    Bayes: Efron and Morris, "Stein's estimation rule and its competitors", JASA 68, 1973). So a kind of step of which
    the times hold nothing gets a factor between 1 and the others', by how far these agree.
    """
    terms = np.array([1.0] * NUM_KINDS + [0.0] * (NUM_TERMS - NUM_KINDS))
    if form == "none":
        return terms
    columns = [*range(NUM_KINDS), *FORMS[form]]
    size = len(columns) + 1  # the common factor is the last unknown
    rows = np.column_stack([equations.rows[:, columns], np.zeros(len(equations.rows))]) / equations.spreads[:, None]
    wanted = equations.seconds / equations.spreads
    mean_step_s = equations.rows[:, :NUM_KINDS].sum() / max(1.0, equations.rows[:, STEP].sum())
    from_common = np.eye(NUM_KINDS, size)
    from_common[:, -1] = -1.0
    expected, target, variance = np.zeros((size, size)), np.zeros(size), FACTOR_PRIOR**2
    expected[range(NUM_KINDS, size - 1), range(NUM_KINDS, size - 1)] = 1 / (CONSTANT_PRIOR * mean_step_s)
    values, whole = np.zeros(size), 1.0 / np.sqrt(equations.repeats)
    weights = whole
    for left in reversed(range(NUM_SOLVES)):
        expected[:NUM_KINDS] = from_common / variance**0.5
        matrix = np.vstack([rows * weights[:, None], expected])
        gram = matrix.T @ matrix
        values = non_negative(gram, matrix.T @ np.concatenate([wanted * weights, target]))
        covariance = np.linalg.inv(gram)
        if left > 2:
            scatter = ((from_common @ values) ** 2).sum() + np.trace(from_common @ covariance @ from_common.T)
            variance = (FACTOR_PRIOR**2 + float(scatter)) / (1 + NUM_KINDS)
        elif left == 2:  # nothing has been expected of the common factor so far
            beyond = (values[-1] - 1.0) ** 2 - float(covariance[-1, -1])
            expected[-1, -1] = target[-1] = 1.0 / max(beyond, 1e-8) ** 0.5
        off = np.abs(wanted - rows @ values)
        weights = whole * np.sqrt(np.minimum(1.0, TUNING / np.maximum(off, 1e-9)))
    terms[columns] = values[:-1]
    return terms


def _cross_validate(equations: _Equations, has_large: bool) -> tuple[FormScore, ...]:
    """Return the forms' losses on folds of neighbouring requests that they were not fitted to."""
    _, order = np.unique(equations.places, return_inverse=True)
    folds = order * NUM_FOLDS // (order.max() + 1)
    losses: dict[str, Array] = {}
    for form, constants in FORMS.items():
        if LARGE in constants and not has_large:
            continue
        found = []
        for fold in range(NUM_FOLDS):
            held = folds == fold
            terms = _solve(equations.part(~held), form)
            off = np.abs(equations.seconds[held] - equations.rows[held] @ terms) / equations.spreads[held]
            huber = np.where(off < TUNING, off**2 / 2, TUNING * off - TUNING**2 / 2)
            found.append(float(huber.mean()))
        losses[form] = np.array(found)
    best = min(losses.values(), key=lambda values: float(values.mean()))
    return tuple(
        FormScore(
            form, float(values.mean()), float((values - best).mean()),
            float(np.std(values - best, ddof=1) / NUM_FOLDS**0.5),
        )
        for form, values in losses.items()
    )  # fmt: skip
