"""What `octavo bench router` prints. Its times are no test: they depend on the machine."""

from __future__ import annotations

import json

import pytest

from octavo.bench.router import POINTS, RouterSetting, measure_router
from octavo.cli import main


def test_each_choice_is_measured_with_its_floors() -> None:
    report = measure_router(RouterSetting(replicas=3, tokens=256, requests=60))
    assert (report["replicas"], report["tokens"], report["requests"]) == (3, 256, 60)
    for name in ("choose", "hash and choose", "floor", "hash floor"):
        assert list(report["us"][name]) == [f"p{point:g}" for point in POINTS]
    assert report["us"]["hash and choose"]["p50"] > report["us"]["choose"]["p50"] > 0


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "router", "--replicas", "2", "--tokens", "64", "--requests", "9"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "hash and choose" in told and "1,500" in told and "{" not in told
    assert main([*words, "--router", "least_loaded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["router"] == "least_loaded"
