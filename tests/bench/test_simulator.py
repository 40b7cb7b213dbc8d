"""What `octavo bench simulator` measures, and that it compares both ways."""

from __future__ import annotations

import json

import pytest

from octavo.bench import simulator
from octavo.bench.simulator import SimulatorSetting, measure_simulator
from octavo.cli import main
from octavo.errors import ConfigError


def test_the_measured_run_serves_all_and_steps_are_made_together() -> None:
    cost = measure_simulator(SimulatorSetting(requests=40, replicas=2, rate=2.0, check=20))["cost"]
    assert cost["requests"] == 40 and cost["checked"] == 20
    assert 0 < cost["forwarded_share"] < 1 and cost["rows_per_step"] > 1
    slow = measure_simulator(SimulatorSetting(requests=40, replicas=2, rate=2.0, fast_forward=False))["cost"]
    assert slow["forwarded_share"] == 0 and slow["outcome"] == cost["outcome"] and slow["steps"] == cost["steps"]


def test_ways_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = iter("ab")
    monkeypatch.setattr(simulator, "_digest", lambda _: next(digests))
    with pytest.raises(ConfigError, match="other outcomes"):
        measure_simulator(SimulatorSetting(requests=5, replicas=1, check=3))


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "simulator", "--requests", "12", "--replicas", "2", "--check", "5"]) == 0
    told = capsys.readouterr().out
    assert "steps made together" in told and "both ways equal" in told and "{" not in told
    assert main(["bench", "simulator", "--requests", "12", "--replicas", "2", "--check", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["requests"] == 12
    assert main(["bench", "simulator", "--rate", "0"]) == 2
