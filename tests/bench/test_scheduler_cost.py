"""The scheduler bench reaches its decode state and gives plausible medians."""

from __future__ import annotations

import json

import pytest

from octavo import cli
from octavo.bench.scheduler_cost import measure_one


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (8, 20)])
def test_costs_are_measured(running, waiting) -> None:
    cost = measure_one(running, waiting, steps=5)
    assert (cost.running, cost.waiting) == (running, waiting)
    assert 0 < cost.plan_us < 1e5
    assert 0 < cost.commit_us < 1e5
    assert 0 < cost.admit_us < 1e5
    assert cost.step_us <= cost.step_p99_us


def test_last_line_is_one_json_object(capsys) -> None:
    assert cli.main(["bench", "scheduler", "--running", "2", "--waiting", "0", "3", "--steps", "3"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cost["waiting"] for cost in report["costs"]] == [0, 3]


def test_counts_must_be_possible(capsys) -> None:
    assert cli.main(["bench", "scheduler", "--running", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --running is 0")
