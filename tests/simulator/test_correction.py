"""Corrections by measured requests: known distortions are found, and a cost model that is right is left alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.simulator.costs.steps_of import LIMITS, workload
from tests.simulator.fakes import LinearCosts

from octavo.errors import ConfigError
from octavo.simulator.arrival import Arrival
from octavo.simulator.correction import FORMS, MeasuredRequests, fit_correction, num_terms
from octavo.simulator.costs.corrected import UNTOUCHED, CorrectedCosts, Correction
from octavo.simulator.run import simulate
from octavo.simulator.setup import Setup

WORKLOAD = workload(60)
SETUP = Setup(LIMITS, LinearCosts(), depth=2)


def measured(
    factors: tuple[float, ...], step_s: float = 0.0, noise: float = 0.0, arrived: Sequence[Arrival] = WORKLOAD
) -> MeasuredRequests:
    """The stamps of an engine whose steps are the linear model's, distorted; each request's with some noise."""
    truth = CorrectedCosts(LinearCosts(), Correction("linear", "truth", 0, "any", "", factors, step_s))
    out = simulate(arrived, Setup(LIMITS, truth, depth=2)).outcomes
    order = np.argsort(np.array(out.indices))
    arrivals, first, ends = (np.array(column)[order] for column in (out.arrivals, out.first_tokens, out.ends))
    off = 1.0 + noise * np.random.default_rng(1).standard_normal((2, len(order)))
    first_at = arrivals + (first - arrivals) * off[0]
    return MeasuredRequests("made.csv", np.arange(len(order)), arrivals, first_at, first_at + (ends - first) * off[1])


def test_one_factor_is_found() -> None:
    fit = fit_correction(WORKLOAD, SETUP, measured((1.2,) * 6, noise=0.01))
    assert fit.correction.form == "factors"
    assert fit.correction.factors == pytest.approx((1.2,) * 6, rel=0.01)
    assert abs(fit.held_out[1]["e2e"]["mean"].value) < 0.02
    assert fit.held_out[0]["e2e"]["mean"].value < -0.1
    assert "used" in fit.report()


def test_steps_with_chunks_get_their_own_factor() -> None:
    fit = fit_correction(WORKLOAD, SETUP, measured((1.0, 1.3, 1.0, 1.3, 1.0, 1.3), noise=0.01))
    factors = fit.correction.factors
    assert fit.correction.is_used
    assert factors[1] - factors[0] > 0.15
    assert all(abs(fit.held_out[1][kind]["mean"].value) < 0.02 for kind in ("ttft", "tpot", "e2e"))


def test_a_constant_per_step_is_found() -> None:
    fit = fit_correction(WORKLOAD, SETUP, measured(UNTOUCHED, step_s=0.003, noise=0.01))
    assert "constant per step" in fit.correction.form
    assert fit.correction.step_s == pytest.approx(0.003, rel=0.25)
    assert abs(fit.held_out[1]["tpot"]["p99"].value) < 0.05


def test_kinds_of_steps_that_were_not_seen_get_what_the_others_agree_on() -> None:
    alike = fit_correction(WORKLOAD, SETUP, measured((0.97,) * 6, noise=0.003))
    factors = alike.correction.factors
    assert factors[:2] == pytest.approx((0.97,) * 2, abs=0.005)
    assert all(max(factors[:2]) < factor < 1.0 for factor in factors[2:])
    assert alike.report().count("(not seen)") == 4
    unlike = fit_correction(WORKLOAD, SETUP, measured((0.97, 1.02) * 3, noise=0.003)).correction.factors
    assert unlike[2:] == pytest.approx((1.0,) * 4, abs=0.005)


def test_times_that_scatter_do_not_make_predictions_too_short() -> None:
    fit = fit_correction(WORKLOAD, SETUP, measured((1.2,) * 6, noise=0.2))
    assert fit.correction.factors == pytest.approx((1.2,) * 6, rel=0.03)


def test_the_waits_of_late_requests_tell_of_steps_before_them() -> None:
    early = [Arrival(0.001 * place, 600, 5) for place in range(40)]
    late = [Arrival(0.1 + 0.001 * place, 1, 40) for place in range(60)]  # no chunks: prompts of one token
    stamps = measured((1.0, 1.3) * 3, noise=0.003, arrived=[*early, *late])
    fit = fit_correction([*early, *late], SETUP, stamps.part(slice(40, None)))
    assert fit.correction.factors[1] - fit.correction.factors[0] > 0.25


def test_the_first_step_of_an_engine_is_reported_and_not_fitted() -> None:
    stamps = measured(UNTOUCHED, noise=0.02)
    lost = 0.3 * (stamps.indices == 0)
    fit = fit_correction(
        WORKLOAD, SETUP, replace(stamps, first_tokens=stamps.first_tokens + lost, ends=stamps.ends + lost)
    )
    seconds, error, count = fit.first_step
    assert count == 1
    assert abs(seconds - 0.3) < 2 * error < 0.03
    assert not fit.correction.is_used
    assert "the first step of an engine took +0.300" in fit.report()


def test_a_cost_model_that_is_right_is_not_corrected() -> None:
    fit = fit_correction(WORKLOAD, SETUP, measured(UNTOUCHED, noise=0.02))
    assert not fit.correction.is_used
    assert fit.correction.factors == UNTOUCHED
    assert "not used" in fit.report()


def test_noise_alone_changes_little() -> None:
    fit = fit_correction(WORKLOAD, SETUP, measured(UNTOUCHED, noise=0.3))
    assert fit.correction.factors == pytest.approx(UNTOUCHED, abs=0.15)


def test_forms_are_in_order_of_their_terms() -> None:
    counts = list(map(num_terms, FORMS))
    assert counts[0] == 0
    assert max(counts) == counts[-1] == 7


def test_stamps_are_read_from_what_requests_writes(tmp_path: Path) -> None:
    path = tmp_path / "stamps.csv"
    path.write_text("index,end,first_token,arrival,reason\n7,3.5,2,1,stop\n4,9,8.5,0.5,length\n5,,,2,error\n")
    stamps = MeasuredRequests.read(path)
    assert stamps.indices.tolist() == [4, 7]
    assert stamps.ends.tolist() == [9.0, 3.5]
    path.write_text("index,end,first_token,arrival\n1,2,3,1\n")
    with pytest.raises(ConfigError, match="line 2, column first_token"):
        MeasuredRequests.read(path)


def test_too_few_requests_and_unknown_ones_are_refused() -> None:
    stamps = measured(UNTOUCHED)
    with pytest.raises(ConfigError, match="has 20 requests"):
        fit_correction(WORKLOAD, SETUP, stamps.part(slice(20)))
    with pytest.raises(ConfigError, match="has index 59, and the workload has 50"):
        fit_correction(WORKLOAD[:50], SETUP, stamps)
