"""Fits of steps whose truth is known: prices, bounds, held-out error, files, and the alarm when the truth changes."""

import json
from collections.abc import Iterable
from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.simulator.costs.steps_of import LIMITS, columns_of, fit_steps, steps_of, workload

from octavo.core.plan import StepFailure
from octavo.errors import ConfigError
from octavo.observe.recording.columns import StepNumbers
from octavo.observe.recording.reader import RecordedStep
from octavo.simulator.cost_model import CostModel, StepShape, shape_of
from octavo.simulator.costs import cost_model
from octavo.simulator.costs.fitted import (
    BLOCK,
    NAMES,
    DriftMonitor,
    Fit,
    Fitted,
    begin_of,
    features,
    fit_columns,
    load_fit,
    numbers_of,
)
from octavo.simulator.costs.least_squares import non_negative, solve
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup


class Truth(CostModel):
    """A device whose prices are known, with noise of a given share that looks random and is not."""

    name = "truth"

    def __init__(self, noise: float = 0.0, factor: float = 1.0) -> None:
        self._noise, self._factor = noise, factor
        self._random = np.random.default_rng(7)

    def step_s(self, shape: StepShape) -> float:
        pairs = sum(count * before + count * count / 2 for count, before in shape.prefills)
        time_s = 4e-3 + 2e-4 * shape.num_tokens + 1e-6 * sum(shape.decode_kv) + 3e-7 * pairs
        return time_s * self._factor * float(1 + self._noise * self._random.standard_normal())

    def host_s(self, shape: StepShape) -> float:
        return 1e-3 + 1e-5 * (len(shape.decode_kv) + len(shape.prefills))


@pytest.mark.parametrize("depth", [1, 2])
def test_a_fit_finds_the_device_and_the_host_that_made_the_steps(depth: int) -> None:
    steps = steps_of(Truth(), workload(), depth)
    costs, truth = Fitted(fit_steps(steps)), Truth()
    assert abs(costs.fit.held_out_bias) < 0.01
    for step in steps[::17]:
        shape = StepShape([100] * len(step.plan.slots), [], len(step.plan.slots))
        assert costs.step_s(shape) == pytest.approx(truth.step_s(shape), rel=0.05)
        assert costs.host_s(shape) == pytest.approx(truth.host_s(shape), rel=0.05)


def test_a_simulation_with_the_fit_equals_one_with_the_truth() -> None:
    costs = Fitted(fit_steps(steps_of(Truth(), workload())))
    arrivals = workload(90, 0.15)
    runs = [simulate(arrivals, Setup(LIMITS, model)) for model in (Truth(), costs)]
    means = [np.mean(np.array(run.outcomes.ends) - np.array(run.outcomes.arrivals)) for run in runs]
    assert means[1] == pytest.approx(means[0], rel=0.02)


def test_noise_widens_the_bounds_and_the_truth_lies_within() -> None:
    quiet, noisy = (fit_steps(steps_of(Truth(noise), workload())) for noise in (0.01, 0.2))
    place = NAMES.index("step")
    widths = [fit.device[place].high - fit.device[place].low for fit in (quiet, noisy)]
    assert widths[1] > widths[0]
    assert abs(noisy.held_out_bias) < 0.05
    assert 0.1 < noisy.held_out_error < 0.3


def test_the_fast_path_equals_the_slow_one() -> None:
    costs = Fitted(fit_steps(steps_of(Truth(), workload())))
    assert costs.decode_s is not None
    for _ in range(2):  # the second time from what is kept of each number of rows
        for num_rows in (1, 3, 100, 700):
            lengths = [10 + 37 * place % 1000 for place in range(num_rows)]
            expected = costs.step_s(StepShape(lengths, [], num_rows))
            assert costs.decode_s(num_rows, sum(lengths)) == expected


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=700))
def test_features_of_decode_rows_follow_from_their_sums(lengths: list[int]) -> None:
    numbers = StepNumbers(len(lengths), sum(lengths), samples=len(lengths))
    assert numbers == numbers_of(StepShape(lengths, [], len(lengths)))
    assert len(features(numbers_of(StepShape(lengths, [(3, 4)], 1)))) == len(NAMES)


def test_stretches_that_no_step_reached_cost_what_the_one_before_them_does() -> None:
    costs = Fitted(fit_steps(steps_of(Truth(), workload())))
    times = [costs.step_s(StepShape([], [(count, 0)], 1)) for count in (128, 512, 2048)]
    assert times[1] > times[0]
    assert times[2] - times[1] > 2 * (times[1] - times[0])


def test_a_hiccup_is_not_the_machines_speed() -> None:
    steps = steps_of(Truth(), workload())
    late = [replace(steps[200], collected=steps[200].collected + 10.0)]
    plain, shaken = Fitted(fit_steps(steps)), Fitted(fit_steps([*steps[:200], *late, *steps[201:]]))
    shape = StepShape([100] * 8, [], 8)
    assert shaken.step_s(shape) == pytest.approx(plain.step_s(shape), rel=0.05)


def test_failed_steps_and_idle_gaps_are_left_out() -> None:
    steps = steps_of(Truth(), workload(20, 30.0))  # one at a time, with long waits between
    seen = columns_of(steps).by_name()
    assert np.nanmax(seen["host_s"]) < 0.01
    assert np.nanmax(seen["device_s"]) < 1.0
    failed = [replace(step, outcome=StepFailure("out of memory")) for step in steps]
    assert not len(columns_of(failed))


def test_the_first_ten_seconds_of_a_long_recording_are_left_out_as_a_warm_up() -> None:
    steps = steps_of(Truth(), workload(200, 0.4))
    begin = steps[0].plan.now
    assert steps[-1].plan.now - begin > 60.0
    slow = [replace(one, collected=one.collected + 0.5 * (one.plan.now - begin < 10.0)) for one in steps]
    fit = fit_steps(slow, has_warm_up=True)
    assert fit.num_left_out == sum(one.plan.now - begin < 10.0 for one in steps if one.plan.slots)
    after = fit_steps([one for one in slow if one.plan.now - begin >= 10.0])
    assert fit.device == after.device and fit.host == after.host
    assert f"left out: the first {fit.num_left_out} steps (10 s), a warm-up" in fit.report()
    assert fit_steps(slow).num_left_out == 0


def test_short_recordings_and_those_with_few_steps_are_fitted_whole() -> None:
    short = fit_steps(steps_of(Truth(), workload()), has_warm_up=True)
    assert short.num_left_out == 0 and "left out" not in short.report()
    few = steps_of(Truth(), workload(8, 12.0))
    assert few[-1].plan.now - few[0].plan.now > 60.0
    assert fit_steps(few, has_warm_up=True).num_left_out == 0


def test_a_fit_without_errors_has_the_same_prices() -> None:
    columns = columns_of(steps_of(Truth(0.05), workload()))
    whole, prices = fit_columns(columns, "steps"), fit_columns(columns, "steps", has_errors=False)
    for one, other in ((whole.device, prices.device), (whole.host, prices.host)):
        assert [each.value for each in one] == [each.value for each in other]
    assert isnan(prices.held_out_bias) and isnan(prices.held_out_error) and isnan(prices.spread)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 64 are needed"):
        fit_steps(steps_of(Truth(), workload(2)), "short")


def test_a_fit_is_kept_in_a_file(tmp_path: Path) -> None:
    fit = fit_steps(steps_of(Truth(), workload()), "here")
    (tmp_path / "fit.json").write_text(fit.as_json())
    assert load_fit(tmp_path / "fit.json") == fit
    assert cost_model(f"fitted:{tmp_path / 'fit.json'}").name == "fitted:here"
    assert "held out" in fit.report()
    assert "per decode position read" in fit.report()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(version=9), "another version"),
        (lambda values: values.pop("spread"), "holds no fit"),
        (lambda values: values["device"].pop(), "not those of this version"),
    ],
)
def test_a_damaged_fit_is_refused(tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "fit.json"
    values = json.loads(fit_steps(steps_of(Truth(), workload())).as_json())
    assert callable(change)
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        load_fit(path)
    path.write_text("[")
    with pytest.raises(ConfigError, match="holds no fit"):
        load_fit(path)
    with pytest.raises(ConfigError, match="holds no fit"):
        load_fit(tmp_path / "none.json")


@given(st.integers(1, 6), st.integers(0, 10_000))
def test_non_negative_squares_are_no_worse_than_any_neighbour(size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    columns, wanted = random.normal(size=(20, size)), random.normal(size=20)
    gram, moment = columns.T @ columns, columns.T @ wanted
    values = non_negative(gram, moment)
    assert (values >= 0).all()
    slope = moment - gram @ values  # the conditions of Karush, Kuhn and Tucker
    assert (slope <= 1e-6 * max(1.0, float(np.abs(moment).max()))).all()
    assert abs(slope[values > 0]).max(initial=0.0) < 1e-6 * max(1.0, float(np.abs(moment).max()))


def test_equal_steps_give_an_equal_fit() -> None:
    rows, wanted = np.random.default_rng(1).random((200, 3)), np.random.default_rng(2).random(200) + 1
    first, second = solve(rows, wanted), solve(rows, wanted)
    assert (first.values == second.values).all()
    assert (first.high == second.high).all()


def drift_of(steps: Iterable[RecordedStep], fit: Fit) -> DriftMonitor:
    """Compare recorded steps with a fit of other ones."""
    drift = DriftMonitor(fit)
    for step in steps:
        if step.plan.slots and not step.has_failed and step.collected > begin_of(step):
            drift.add(shape_of(step.plan), step.collected - begin_of(step))
    return drift


def test_the_alarm_is_silent_while_the_truth_holds_and_comes_when_it_changes() -> None:
    fit = fit_steps(steps_of(Truth(0.05), workload()))
    same = drift_of(steps_of(Truth(0.05), workload(200)), fit)
    assert same.num_alarms == 0
    assert same.ratio == pytest.approx(1.0, abs=0.05)
    slower = drift_of(steps_of(Truth(0.05, factor=1.5), workload()), fit)
    assert slower.is_drifting
    assert slower.ratio == pytest.approx(1.5, abs=0.1)
    assert drift_of(steps_of(Truth(0.05, factor=0.7), workload()), fit).is_drifting


def test_the_alarm_ends_when_the_truth_is_back() -> None:
    fit = fit_steps(steps_of(Truth(0.02), workload()))
    drift, costs = DriftMonitor(fit), Fitted(fit)
    shape = StepShape([50] * 4, [], 4)
    for factor, expected in ((1.0, False), (2.0, True), (1.0, False)):
        for _ in range(60 * BLOCK):
            drift.add(shape, factor * costs.step_s(shape))
        assert drift.is_drifting == expected
    assert drift.num_alarms == 1
    assert drift.summary()["steps"] == 180 * BLOCK


def test_a_sink_sees_what_a_recording_shows() -> None:
    steps = steps_of(Truth(0.05), workload(), 2)
    fit = fit_steps(steps)
    live = DriftMonitor(fit)
    simulate(workload(), Setup(LIMITS, Truth(0.05), depth=2, make_sink=lambda scheduler: live))
    assert live.summary() == drift_of(steps, fit).summary() and live.num_steps > BLOCK
