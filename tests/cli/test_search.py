"""`octavo simulate --search` over machines: candidates, forms of the answer, and its neighbours on a public trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.public_data import public_file
from tools.search_neighbours import main as check_neighbours

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.fleet.plan import read_fleet_plan
from octavo.simulator.search import CapacitySearch, SearchResult


def simulate(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    """Run it, and give what it printed, or with a status of 2 the reason."""
    assert main(["simulate", *words]) == status
    said = capsys.readouterr()
    return said.err if status == 2 else said.out


MACHINES = (
    "--workload", "poisson:rate=20,requests=150,prompt=400,output=30", "--objective", "ttft_p99=0.5,tpot_p95=0.05",
    "--search",
)  # fmt: skip


def test_a_search_chooses_among_machines_and_skips_what_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, values = tmp_path / "found.json", tmp_path / "kustomization.yaml"
    space = "device=l4|h100|t4,tensor_parallel_size=1|2|3,pipeline_parallel_size=1|2,max_sequences=256"
    told = simulate(
        capsys, *MACHINES, "--search-space", space, "--json", str(path), "--kubernetes", str(values)
    )  # fmt: skip
    found = json.loads(path.read_text())
    skipped = {one["settings"]: one["why"] for one in found["skipped"]}
    assert len(skipped) + len(found["settings"]) == 18
    odd = [why for name, why in skipped.items() if "tensor_parallel_size=3" in name]
    assert len(odd) == 6 and all("tp is 3; give a number that divides the 32 heads" in why for why in odd)
    lacking = "device=t4, tensor_parallel_size=1, pipeline_parallel_size=1, max_sequences=256"
    assert "take more or larger devices" in skipped[lacking] and "as device=l4, tensor_parallel_size=3" in told
    assert found["answer"]["price_per_hour"] == min(
        one["replicas"] * one["cost_of_replica"] for one in found["settings"] if one["fate"] == "found"
    )
    plan = read_fleet_plan(path)
    assert plan.num_devices * plan.replicas == found["answer"]["devices"] and plan.device == found["answer"]["device"]
    assert values.read_text() == plan.kustomization() and f"kubernetes  {values}" in told
    dear = json.loads(simulate(capsys, *MACHINES, "--search-space", space, "--json", "-", "--price", "l4=90,h100=2"))
    assert dear["answer"]["device"] == "h100"
    free = json.loads(simulate(capsys, *MACHINES, "--search-space", space, "--json", "-", "--price", "0"))
    assert free["answer"]["price_per_hour"] is None
    assert free["answer"]["devices"] == min(
        one["replicas"] * one["cost_of_replica"] for one in free["settings"] if one["fate"] == "found"
    )


def test_a_plan_of_stages_has_the_sequences_of_all_and_one_of_experts_says_what_runs_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    words = (*MACHINES, "--json", str(path), "--kubernetes", str(tmp_path / "values.yaml"), "--search-space")
    simulate(capsys, *words, "pipeline_parallel_size=2,max_sequences=64")
    assert json.loads(path.read_text())["answer"]["max_sequences"] == 32, "of each stage's engine"
    plan = read_fleet_plan(path)
    assert (plan.settings["max_sequences"], plan.settings["pipeline_parallel_size"]) == (64, 2)
    experts = ("--model", "qwen3-30b-a3b", "--tp", "2")
    told = simulate(capsys, *words, "data_parallel_size=1|2,enable_expert_parallel=yes", *experts)
    assert "command     none: no engine has enable-expert-parallel True: experts are not divided among ranks" in told
    assert "kubernetes  none: no engine has" in told and "expert" not in (tmp_path / "values.yaml").read_text()
    with pytest.raises(ConfigError, match="no engine has enable-expert-parallel True"):
        read_fleet_plan(path)
    assert "data_parallel_size is 2; llama-3.1-8b has no experts, give replicas instead" in simulate(
        capsys, *words, "data_parallel_size=2", status=2
    )


@pytest.mark.slow
def test_the_answer_for_azure_s_trace_is_that_of_whole_simulations_of_its_neighbours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = public_file("azure2023/AzureLLMInferenceTrace_conv.csv.gz")
    words = ["--workload", f"azure:{trace}", "--limit", "1500", "--rate-scale", "4", "--router", "least_loaded"]
    words += ["--model", "llama-3.1-70b", "--objective", "ttft_p99=2.0,tpot_p95=0.06", "--search-space"]
    space = "device=h100|l40s|a100-80g,tp=2|4|8,pp=1|2,max_sequences=64|128"
    assert check_neighbours([*words, space]) == 0
    told = capsys.readouterr().out
    assert "REFUTED" not in told and told.count("confirmed") >= 5 and "answer: 3 replicas" in told


def test_a_wrong_answer_is_refuted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*MACHINES[:-1], "--search-space", "device=l4|h100,max_sequences=8|64"]
    assert check_neighbours(words) == 0 and "REFUTED" not in capsys.readouterr().out
    search = CapacitySearch.run

    def wasteful(self: CapacitySearch, *more: Any) -> SearchResult:
        result = search(self, *more)
        assert result.best is not None
        result.best = replace(result.best, replicas=result.best.replicas + 1)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(CapacitySearch, "run", wasteful)
        assert check_neighbours(words) == 1 and "REFUTED" in capsys.readouterr().out
    monkeypatch.setattr("octavo.simulator.search.fewest_engines", lambda *_: 9.0)
    with pytest.raises(AssertionError, match="8 replicas reach the goals, against a bound"):
        check_neighbours(words)
