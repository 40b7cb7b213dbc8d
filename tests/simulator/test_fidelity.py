"""The simulator against measured runs of vLLM: as near as docs/fidelity.md says. Skipped without the data."""

import numpy as np
import pytest
from tools.fidelity import vllm_runs
from tools.fidelity.closeness import table

from octavo.simulator.closeness import Times
from octavo.simulator.costs.corrected import CorrectedCosts

needs_data = pytest.mark.skipif(
    not (vllm_runs.DATA / "measured_vllm").is_dir(), reason=f"no measured runs in {vllm_runs.DATA}"
)


DENSE = ("rtx4090", "rtxpro6000")


@needs_data
@pytest.mark.parametrize(("name", "ttft"), [*((name, 0.03) for name in DENSE), ("experts", 0.10)])
def test_measured_runs_are_predicted_from_operator_tables_without_tuning(name: str, ttft: float) -> None:
    run = vllm_runs.MeasuredRun(vllm_runs.CASES[name])
    _, predicted = run.simulate(run.table_costs())
    errors = predicted.errors(run.measured)
    assert abs(errors["e2e"]["mean"].value) < 0.03
    assert abs(errors["ttft"]["mean"].value) < ttft
    assert abs(errors["tpot"]["mean"].value) < 0.03


@needs_data
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", vllm_runs.CASES)
def test_a_fit_on_a_hundred_requests_predicts_the_others(name: str) -> None:
    run = vllm_runs.MeasuredRun(vllm_runs.CASES[name])
    costs = run.table_costs()
    fit = run.fit(costs, slice(vllm_runs.FITTED))
    assert fit.correction.is_used
    errors = run.errors(run.draws(CorrectedCosts(costs, fit.correction)), slice(vllm_runs.FITTED, None))
    assert all(abs(errors[time]["mean"].value) < 0.02 for time in ("ttft", "tpot", "e2e"))


def test_errors_are_shares_of_what_was_measured_and_requests_of_one_token_have_no_tpot() -> None:
    arrivals, outputs = np.array([0.0, 1.0]), np.array([1, 3])
    measured = Times.of(arrivals, np.array([1.0, 2.0]), np.array([1.0, 4.0]), outputs)
    predicted = Times.of(arrivals, np.array([2.0, 3.0]), np.array([2.0, 4.0]), outputs)
    assert len(measured.tpot) == 1
    assert predicted.errors(measured)["ttft"]["mean"].value == 1.0
    assert predicted.errors(measured)["tpot"]["p50"].value == -0.5
    assert "| ttft | 1 s | 2 s | +100.0 %" in table("x", predicted, measured)
