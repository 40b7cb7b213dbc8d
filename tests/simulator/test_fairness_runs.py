"""S06 on measured runs: the simulator repeats VTC's experiment on its own arrivals (skipped without the data)."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from tests.public_data import public_file
from tests.source_tree import ROOT

specification = importlib.util.spec_from_file_location("fairness_runs", ROOT / "tools" / "fairness_runs.py")
assert specification is not None and specification.loader is not None
fairness_runs = importlib.util.module_from_spec(specification)
sys.modules["fairness_runs"] = fairness_runs
specification.loader.exec_module(fairness_runs)

UNTIL = 120.0
FACTORS = {"overload": 1.119, "poisson_short_long": 1.037}  # as tools/fairness_runs.py fits them


@pytest.mark.slow
@pytest.mark.parametrize("workload", sorted(FACTORS))
def test_S06_fcfs_diverges_as_measured_and_fair_stays_within_its_bound(workload: str) -> None:
    public_file(f"vtc/FCFS__{workload}.csv.gz")
    gaps = {
        policy: fairness_runs.gap(policy, fairness_runs.simulated(workload, policy, FACTORS[workload], UNTIL), UNTIL)
        for policy in ("fcfs", "fair")
    }
    measured = fairness_runs.gap("FCFS", fairness_runs.measured(f"FCFS__{workload}"), UNTIL)
    assert gaps["fcfs"].end == pytest.approx(measured.end, rel=0.15)
    assert gaps["fcfs"].range > 2 * gaps["fair"].range
    assert gaps["fair"].range <= fairness_runs.bound()


def test_the_picture_of_the_docs_is_there() -> None:
    assert fairness_runs.PICTURE.read_text(encoding="utf-8").startswith("<svg")
