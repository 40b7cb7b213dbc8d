"""The bench of start-ups: the clocks of the child, processes in turn, the report, and the child on a tiny model."""

from __future__ import annotations

import importlib
import json
import sys

import pytest
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.bench import startup
from octavo.bench.startup import make_startup_report, measure_startup
from octavo.bench.startup_child import TorchClock, timed
from octavo.config import Config
from octavo.errors import EngineError

CHILD = """import json, os, sys
config = json.loads(sys.stdin.readline())
cache = os.environ["OCTAVO_CACHE_DIR"]
is_warm = os.path.exists(cache + "/w")
open(cache + "/w", "w").close()
facts = {"model": config["model"]["model"], "dtype": "f", "quantization": None, "speculate": None, "device": "cpu",
         "threads": 1, "weight_bytes": 1}
parts = {"weights": 0.1 if is_warm else 0.5, "first_token": 1.0 if is_warm else 2.0}
print(json.dumps({"parts": parts, "facts": facts, "peak_memory_bytes": 2**30}))
"""


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("octavo.bench.startup._BARE", {"python": "pass", "import torch": "pass"})


def test_caches_are_warm_and_cold_in_turn(quick) -> None:
    told = []
    found = measure_startup(Config(), 4, 2, lambda: told.append(1), (sys.executable, "-c", CHILD))
    assert len(told) == 5
    assert [parts["weights"] for parts in found["warm weight cache"].parts] == [0.1, 0.1]
    assert [parts["weights"] for parts in found["cold weight cache"].parts] == [0.5, 0.5]
    assert len(found["import torch"].wall_s) == 2
    report = make_startup_report(found, 2)
    assert report["warm_weight_cache"]["parts_ms"] == {"weights": 100.0, "first_token": 1000.0}
    assert report["cold_weight_cache"]["first_token_s"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert report["first_token_per_import_torch"] > 0


def test_a_child_that_fails_says_why(quick) -> None:
    with pytest.raises(EngineError, match="no weights here"):
        measure_startup(Config(), 4, 1, command=(sys.executable, "-c", "import sys; sys.exit('no weights here')"))


def test_times_add_up_also_when_it_raises() -> None:
    seconds: dict[str, float] = {}
    assert timed(lambda x: x + 1, "part", seconds)(1) == 2
    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 / 0, "part", seconds)()
    assert list(seconds) == ["part"] and seconds["part"] >= 0


def test_the_clock_of_torch_leaves_other_imports_alone(tmp_path, monkeypatch) -> None:
    (tmp_path / "torch.py").write_text("X = 1\n")
    seconds: dict[str, float] = {}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [TorchClock(seconds), *sys.meta_path])
    assert importlib.import_module("torch").X == 1
    assert list(seconds) == ["torch"]
    monkeypatch.delitem(sys.modules, "torch")


def test_a_mistaken_model_does_not_wait(capsys) -> None:
    assert cli.main(["bench", "startup", "/no/such/model"]) == 2
    assert cli.main(["bench", "startup", "--runs", "0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: --runs is 0")


def test_a_cold_process_tells_its_parts(quick, capsys, tmp_path, monkeypatch) -> None:
    measure, found = startup.measure_startup, []

    def once(*given):
        found[:] = found or [measure(*given)]
        return found[0]

    monkeypatch.setattr(startup, "measure_startup", once)
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    words = ["--runs", "1", "--input-len", "4", "--threads", "1", "--kv-cache-tokens", "1K", "-np", "4"]
    assert cli.main(["bench", "startup", model, *words]) == 0
    out = capsys.readouterr().out
    assert cli.main(["bench", "startup", model, *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    parts = report["cold_weight_cache"]["parts_ms"]
    assert {"interpreter", "imports", "torch", "pool", "open", "first_step", "first_token"} <= set(parts)
    assert parts["first_token"] >= parts["interpreter"] + parts["torch"] + parts["pool"]
    assert "first token" in out and "{" not in out
