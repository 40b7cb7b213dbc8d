"""`octavo simulate`: what it prints and writes, and how it refuses what makes no sense."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from tests.settings import load_config
from tests.simulator.costs.steps_of import LIMITS, fit_steps, steps_of, workload

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.fleet.plan import read_fleet_plan
from octavo.simulator.costs import Hardware, cost_model

SMALL = ["--workload", "poisson:rate=6,requests=60,prompt=200,output=20,tenants=2"]


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run it, and give what it printed."""
    assert main(["simulate", *words]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run what is refused, and give the reason."""
    assert main(["simulate", *words]) == 2
    return capsys.readouterr().err


def test_figures_of_one_policy(capsys: pytest.CaptureFixture[str]) -> None:
    told = simulate(capsys, *SMALL, "--objective", "ttft=1,tpot=0.05")
    for words in ("llama-3.1-8b", "h100", "ttft", "tpot", "e2e", "goodput", "requests served", "$ per million"):
        assert words in told


def test_parallel_sizes_make_engines_and_their_prices(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--model", "qwen3-30b-a3b", "--price", "2", "--json", "-")
    sizes = ("--data-parallel-size", "2", "--pipeline-parallel-size", "2", "--enable-expert-parallel")
    facts = json.loads(simulate(capsys, *words, *sizes, "--tensor-parallel-size", "2"))
    run, described = facts["runs"]["fcfs"], facts["settings"]
    assert described["device"] == "8 x h100"
    assert described["parallel"] == "tensor 2, data 2, pipeline 2, whole experts"
    assert run["replicas"]["count"] == 4  # ranks x stages
    assert run["requests"]["served"] == 60
    assert run["cost"]["price_per_hour"] == 16.0
    dense = json.loads(simulate(capsys, *SMALL, "--data-parallel-size", "3", "--json", "-"))
    apart = json.loads(simulate(capsys, *SMALL, "--replicas", "3", "--json", "-"))
    assert dense["runs"] == apart["runs"]


def test_groups_of_replicas_have_their_own_devices_sizes_and_prices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    groups = (
        "--group", "h100:replicas=2,tp=2", "--group", "l4:replicas=3,max_num_seqs=8,price=1",
        "--group", "l4:name=late,kv-cache-tokens=4K", "--max-num-seqs", "32",
    )  # fmt: skip
    page = tmp_path / "page.html"
    told = simulate(capsys, *SMALL, *groups, "--html", str(page))
    for words in ("group h100", "2 x 2 x h100", "group l4", "group late", "l4: ttft p99"):
        assert words in told
    assert "<td>5 late</td>" in page.read_text() and "on 2 x 2 x h100, 3 x l4, 1 x l4" in page.read_text()
    facts = json.loads(simulate(capsys, *SMALL, *groups, "--policy", "fcfs,fair", "--json", "-"))
    assert "sequences at once 8" in facts["settings"]["group l4"]
    assert "sequences at once 32" in facts["settings"]["group late"]
    assert "256 blocks of 16" in facts["settings"]["group late"] and facts["settings"]["replicas"] == "6"
    for run in facts["runs"].values():
        assert run["cost"]["price_per_hour"] == pytest.approx(2 * 2 * 3.0 + 3 * 1.0 + 0.71)
        assert sum(group["requests"] for group in run["groups"].values()) == 60
        assert run["cost"]["total"] == pytest.approx(sum(group["cost"] for group in run["groups"].values()))
    plain = json.loads(simulate(capsys, *SMALL, "--replicas", "3", "--json", "-"))["runs"]["fcfs"]
    two = ("--group", "h100:replicas=2", "--group", "h100:name=another")
    same = json.loads(simulate(capsys, *SMALL, *two, "--json", "-"))["runs"]["fcfs"]
    assert same | {"groups": {}} == plain


def test_a_range_of_replicas_is_scaled_by_a_rule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rule = ("--autoscale", "requests:0.5,every_s=0.5,start_s=1,down_s=2", "--router", "least_requests")
    page = tmp_path / "page.html"
    told = simulate(capsys, *SMALL, "--replicas", "1-4", *rule, "--html", str(page))
    for words in ("1 to 4", "replicas ready, mean", "replica hours", "queued during start-ups, p99"):
        assert words in told
    assert "on 1 to 4 x h100" in page.read_text() and "starting" in page.read_text()
    facts = json.loads(simulate(capsys, *SMALL, "--replicas", "1-4", *rule, "--json", "-"))
    assert facts["settings"]["scaling"] == rule[1] and facts["settings"]["replicas"] == "1 to 4"
    run = facts["runs"]["fcfs"]
    assert run["requests"]["served"] == 60 and 1 < run["scaling"]["groups"][""]["ready_most"] <= 4
    assert run["cost"]["total"] == pytest.approx(run["scaling"]["groups"][""]["hours"] * 3.0)
    fixed = json.loads(simulate(capsys, *SMALL, "--replicas", "2", "--json", "-"))["runs"]["fcfs"]
    same = json.loads(simulate(capsys, *SMALL, "--replicas", "2-2", "--json", "-"))["runs"]["fcfs"]
    assert same | {"scaling": {}} == fixed
    groups = ("--group", "h100:replicas=1", "--group", "l4:replicas=1-3", *rule)
    run = json.loads(simulate(capsys, *SMALL, *groups, "--json", "-"))["runs"]["fcfs"]
    assert list(run["scaling"]["groups"]) == ["l4"] and run["groups"]["l4"]["requests"] > 0


def test_prefill_and_decode_replicas_have_a_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    groups = (
        "--group", "h100:name=p,role=prefill,tp=2", "--group", "l40s:name=d,role=decode,replicas=2",
        "--kv-link", "bandwidth=1e9,latency=1ms",
    )  # fmt: skip
    files = {name: tmp_path / f"{name}.out" for name in ("html", "requests")}
    written = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    told = simulate(capsys, *SMALL, *groups, *written)
    for words in ("role prefill", "1 GB/s, 1000 us", "KV transfers", "p: ttft p99", "d: tpot p99", "KV ports sending"):
        assert words in told
    rows = list(csv.DictReader(files["requests"].read_text().splitlines()))
    assert {row["first_replica"] for row in rows} == {"0"} and {row["replica"] for row in rows} == {"1", "2"}
    facts = json.loads(simulate(capsys, *SMALL, *groups, "--json", "-"))
    run = facts["runs"]["fcfs"]
    assert facts["settings"]["KV link"].endswith("1 GB/s, 1000 us")
    assert run["transfers"]["bytes"] == 60 * 200 * 2 * 8 * 128 * 2 * 32  # K and V, heads, their size, 2 bytes, layers
    assert run["transfers"]["time"]["mean"] == pytest.approx(0.001 + 200 * 131072 / 1e9)
    fast = json.loads(simulate(capsys, *SMALL, *groups[:-1], "nvlink4", "--json", "-"))["runs"]["fcfs"]
    assert fast["tpot"]["mean"] < run["tpot"]["mean"] and fast["ttft"] == run["ttft"]


def test_policies_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    told = simulate(capsys, *SMALL, "--policy", "fcfs,fair,shortest_prefill")
    head = next(line for line in told.splitlines() if "shortest_prefi" in line and not line.startswith("advice "))
    assert head.split() == ["fcfs", "fair", "shortest_prefi"]


def test_the_same_words_give_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (
        simulate(capsys, *SMALL, "--json", "-", "--replicas", "2", "--router", "power_of_two") for _ in "ab"
    )
    assert first == second
    facts = json.loads(first)
    assert facts["runs"]["fcfs"]["requests"]["served"] == 60
    assert facts["settings"]["router"] == "power_of_two"
    assert first != simulate(
        capsys, *SMALL, "--json", "-", "--replicas", "2", "--router", "power_of_two", "--seed", "1"
    )


def test_every_file_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.out" for name in ("json", "html", "requests", "page", "perfetto")}
    simulate(capsys, *SMALL, *(word for name, path in files.items() for word in (f"--{name}", str(path))))
    assert json.loads(files["json"].read_text())["notes"] == {}
    assert files["html"].read_text().startswith("<!doctype html>")
    rows = list(csv.DictReader(files["requests"].read_text().splitlines()))
    assert len(rows) == 60 and {row["reason"] for row in rows} == {"length"}
    assert [float(row["arrival"]) for row in rows] == sorted(float(row["arrival"]) for row in rows)
    assert 'id="frames"' in files["page"].read_text()
    assert len(json.loads(files["perfetto"].read_text())["traceEvents"]) > 100


def test_saved_runs_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.json" for name in ("small", "large")]
    for path, count in zip(paths, ("2", "64"), strict=True):
        simulate(capsys, *SMALL, "--max-num-seqs", count, "--json", str(path))
    told = simulate(capsys, "--compare", *map(str, paths), "--html", str(tmp_path / "both.html"))
    lines = told.splitlines()
    assert lines[0].split() == ["sequences", "at", "once", "2", "64"]
    assert sum("p99 rests on the slowest of 60 requests" in line for line in lines) == 1
    assert any(line.split() == ["small", "large"] for line in lines)
    text = (tmp_path / "both.html").read_text()
    assert "<th>setting</th><th>small</th><th>large</th>" in text and "<h1>Simulations: small, large</h1>" in text
    several = tmp_path / "policies.json"
    simulate(capsys, *SMALL, "--policy", "fcfs,fair", "--json", str(several))
    assert "policies fcfs" in simulate(capsys, "--compare", str(several), str(paths[0]))
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "other.json").write_text('{"runs": {}}')
    saved = json.loads(paths[0].read_text())
    del saved["cases"][0]["replicas"]
    (tmp_path / "edited.json").write_text(json.dumps(saved))
    for words, reason in (
        (["--compare", "/none.json"], "--compare /none.json cannot be read: No such file"),
        (["--compare", str(tmp_path / "torn.json")], "is no JSON"),
        (["--compare", str(tmp_path / "other.json")], "has no runs of this version; make it anew"),
        (["--compare", str(tmp_path / "edited.json")], "edited.json has no runs of this version"),
        (["--compare", str(paths[0]), str(paths[0])], "two runs with the name 'small'"),
        (["--compare", str(paths[0]), "--json", "-"], "--compare looks at saved runs alone"),
    ):
        assert main(["simulate", *words]) == 2
        assert reason in capsys.readouterr().err


def test_advice_is_printed_in_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--workload", "poisson:rate=6,requests=60,prompt=200,output=20", "--router", "prefix_hash")
    told = simulate(capsys, *load, "--policy", "fcfs,fair", "--replicas", "2")
    advice = [line for line in told.splitlines() if line.startswith("advice ")]
    starts = (
        "prefix_hash compares prefixes",
        "p99 rests on",
        "fair: fair divides",
        "fcfs and fair have the same figures",
    )
    assert all(sum(line.removeprefix("advice").strip().startswith(start) for line in advice) == 1 for start in starts)
    assert json.loads(simulate(capsys, *load, "--replicas", "2", "--json", "-"))["advice"][0].startswith("prefix_hash")


def test_each_policy_has_its_own_file_of_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    simulate(capsys, *SMALL, "--policy", "fcfs,fair", "--requests", str(tmp_path / "out.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.fair.csv", "out.fcfs.csv"]


def test_watching_changes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = json.loads(simulate(capsys, *SMALL, "--json", "-"))
    watched = json.loads(simulate(capsys, *SMALL, "--json", "-", "--page", str(tmp_path / "page.html")))
    assert watched == plain


def test_a_failure_restarts_requests_and_loses_none(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--replicas", "2", "--fail", "0@4+3", "--json", "-")
    facts = json.loads(simulate(capsys, *words))["runs"]["fcfs"]
    assert facts["requests"]["served"] == 60 and facts["replicas"]["failures"] == 1


def test_what_is_too_long_is_refused_clipped_or_dropped_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--workload", "constant:rate=1,requests=4,prompt=900,output=200", "--max-model-len", "1000")
    assert "which refuses such prompts and ends such answers" in simulate(capsys, *words)
    assert "4 of 4 requests were refused" in simulate(capsys, *words[:2], "--max-model-len", "800")
    assert "4 longer than 1000 tokens, shortened to it" in simulate(capsys, *words, "--too-long", "clip")
    assert "has no request here" in refused(capsys, *words, "--too-long", "drop")


def test_the_kinds_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    told = simulate(capsys, "--workload", "help")
    assert all(f"  {kind} " in told for kind in ("poisson", "azure", "mooncake", "agentic", "recording", "chat"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--policy", "fcfs,fcfs"], "--policy is 'fcfs,fcfs'; give each of at most 16 once"),
        (["--policy", "nope"], "unknown policy 'nope'; give one of deadline, fair"),
        (["--policy", "fcfs,fair", "--page", "x"], "show one policy; give one"),
        (["--policy", "fiar"], "unknown policy 'fiar'; did you mean 'fair'?"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'; give one of smollm2-135m"),
        (["--model", "llama-3.1-8"], "unknown model 'llama-3.1-8'; did you mean 'llama-3.1-8b'"),
        (["--device", "abacus"], "unknown device 'abacus'; give one of t4"),
        (["--cost", "guess"], "unknown cost 'guess'; give one of roofline"),
        (["--router", "nearest"], "unknown --router 'nearest'; give one of round_robin, random"),
        (["--tp", "0"], "--tensor-parallel-size is 0; give a whole number from 1 to 64"),
        (["--dp", "0"], "--data-parallel-size is 0; give a whole number from 1 to 1024"),
        (["--pp", "33"], "pipeline_parallel_size is 33; llama-3.1-8b has 32 layers"),
        (["--ep"], "enable_expert_parallel is on; llama-3.1-8b has no experts, leave it out"),
        (["--pp", "2", "--depth", "2"], "depth is 2; give 1 with a pipeline"),
        (["--price", "-1"], "--price is -1; give a number of at least 0"),
        (["--depth", "3"], "depth is 3; an engine has 1 or 2 plans in flight"),
        (["--replicas", "0"], "replicas is 0; give at least 1"),
        (["--rate-scale", "0"], "rate_scale is 0.0; give a number above 0"),
        (["--start", "9", "--end", "4"], "end is 4.0; give seconds above the start, 9"),
        (["--start", "1e9"], "has no request here; look at --start, --end and --too-long"),
        (["--group", "h100:replicas=0"], "replicas of group 'h100' is 0; give at least 1"),
        (["--group", "h100:replicas=x"], "replicas is 'x'; give a whole number, or a range such as 1-8"),
        (["--replicas", "4-2"], "max_replicas of group '' is 2; give at least 4"),
        (["--replicas", "1-2", "--dp", "2"], "engines of llama-3.1-8b share nothing; leave it out"),
        (["--autoscale", "requests:4"], "--autoscale needs a range of replicas; give --replicas MIN-MAX"),
        (["--replicas", "1-2", "--autoscale", "cpu:4"], "the metric 'cpu'; give one of requests, kv"),
        (["--replicas", "1-2", "--autoscale", "kv"], "--autoscale is 'kv'; give requests:N or kv:SHARE"),
        (["--replicas", "1-2", "--autoscale", "kv:1,up=3"], "--autoscale 'kv:1,up=3': unknown key 'up'"),
        (["--replicas", "1-2", "--search", "--objective", "ttft=1"], "--replicas has a range; a search finds"),
        (["--group", "h100:maxnumseqs=3"], "unknown key 'maxnumseqs'; did you mean 'max_num_seqs'"),
        (["--group", "abacus"], "unknown device 'abacus'"),
        (["--group", "h100:max_num_seqs=x"], "--group 'h100:max_num_seqs=x': max_num_seqs is 'x'; give a whole number"),
        (["--group", "h100:role=prefil"], "unknown role 'prefil'; did you mean 'prefill'"),
        (["--group", "h100:role=prefill"], "the KV needs a link; give --kv-link one of nvlink3"),
        (["--group", "h100:role=prefill", "--kv-link", "ib-ndr"], "give every group one, prefill or decode"),
        (["--kv-link", "ib-ndr"], "--kv-link is between prefill and decode replicas; give role=prefill"),
        (
            ["--group", "h100:role=prefill", "--group", "l4:role=decode", "--kv-link", "ib"],
            "unknown KV link 'ib'; give one of nvlink3",
        ),
        (
            ["--group", "h100:role=prefill", "--group", "l4:role=decode", "--kv-link", "ib-ndr", "--fail", "0@1"],
            "a failure of prefill or decode replicas is not simulated",
        ),
        (["--group", ":replicas=2"], "--group is ':replicas=2'; give DEVICE:option=value"),
        (["--group", "h100:ep=maybe"], "unknown ep 'maybe'; give one of no, yes"),
        (["--group", "h100", "--group", "h100"], "--group has h100 twice; give each a name"),
        (["--group", "h100", "--replicas", "2"], "--replicas is of a fleet of one device"),
        (["--group", "h100", "--search", "--objective", "ttft=1"], "--group is of one run"),
        (["--group", "h100", "--fail", "1@3"], "a failure names replica 1; there are 0 to 0"),
        (["--fail", "0:3"], "--fail is '0:3'; give REPLICA@SECONDS+SECONDS"),
        (["--fail", "7@3"], "a failure names replica 7"),
        (["--tenant-weight", "a"], "--tenant-weight is 'a'; give TENANT=WEIGHT"),
        (["--objective", "speed=1"], "unknown objective 'speed'; give STATISTIC=SECONDS"),
        (["--max-model-len", "1M"], "has positions for 131072"),
        (["--model", "llama-3.1-70b"], "take more or larger devices"),
        (["--fit", "x"], "--fit looks at a recording alone"),
        (["--search"], "a search has nothing to reach"),
        (["--search", "--objective", "ttft=1", "--html", "x"], "--html is of one run"),
        (["--search", "--objective", "ttft=1", "--policy", "fcfs,fair"], "--search-space policy=A|B"),
        (
            ["--search", "--objective", "ttft=1", "--max-replicas", "0"],
            "--max-replicas is 0; give a whole number from",
        ),
        (["--search", "--objective", "ttft=1", "--search-space", "colour=red"], "search space has 'colour=red'"),
        (["--search", "--objective", "ttft=1", "--search-space", "device=abacus"], "unknown device 'abacus'; give"),
        (
            ["--search", "--objective", "ttft=1", "--search-space", "tp=1", "--model", "llama-3.1-70b"],
            "no setting of --search-space can be simulated; tensor_parallel_size=1: llama-3.1-70b has 141.1 GB",
        ),
        (
            ["--search", "--objective", "ttft=1", "--search-space", "device=h100", "--cost", "table:x"],
            "leave device out of --search-space",
        ),
        (["--price", "h100=1,l4"], "--price is l4; give a number of at least 0, or DEVICE=NUMBER"),
        (
            ["--html", "/no/such/folder/x.html"],
            "--html /no/such/folder/x.html: there is no folder /no/such/folder; make it",
        ),
    ],
)
def test_nonsense_is_refused_with_a_remedy(capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    assert reason in refused(capsys, *SMALL, *words)


def test_objectives_of_all_requests_decide_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--objective", "ttft_p99=9,tpot=0.1,goodput=0.9"]) == 0
    assert "fcfs reaches the objectives: ttft_p99" in capsys.readouterr().out
    assert main(["simulate", *SMALL, "--objective", "ttft_p99=0.001"]) == 1
    assert "fcfs misses the objectives: ttft_p99" in capsys.readouterr().out
    assert main(["simulate", *SMALL, "--objective", "ttft=0.001"]) == 0  # each one's alone are counted, no more


def test_a_search_finds_the_fewest_replicas_and_says_what_it_tried(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    load = ("--workload", "poisson:rate=40,requests=200,prompt=400,output=30")
    words = ("--search", "--search-space", "max_sequences=4|64", "--json", str(tmp_path / "found.json"))
    told = simulate(capsys, *load, *words, "--objective", "ttft_p99=0.5")
    found = json.loads((tmp_path / "found.json").read_text())
    answer = found["answer"]
    assert f"answer      {answer['replicas']} replica" in told and f"{len(found['trials'])} trials" in told
    assert "limited by" in told and answer["limited_by"] in told and f"octavo fleet --plan {tmp_path}" in told
    tried = {(one["settings"], one["replicas"]): one["reached"] for one in found["trials"]}
    assert tried[answer["settings"], answer["replicas"]]
    assert all("ttft_p99" in one["summary"] for one in found["trials"])
    assert answer["replicas"] == 1 or not tried[answer["settings"], answer["replicas"] - 1]
    missed = ("--max-replicas", "1", "--objective", "ttft_p99=0.0001", "--json", str(tmp_path / "missed.json"))
    assert main(["simulate", *load, "--search", *missed]) == 1
    assert "nothing among" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no fleet reached the search's objectives"):
        read_fleet_plan(tmp_path / "missed.json")


def test_a_search_s_file_is_the_plan_of_a_fleet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    words = ("--search", "--search-space", "max_sequences=4|64,router=least_loaded", "--json", str(path))
    own = ("--block-size", "32", "--policy", "fair", "--max-model-len", "4096", "--tp", "2", "--router", "random")
    simulate(
        capsys, "--workload", "poisson:rate=40,requests=200,prompt=400,output=30", *words, *own,
        "--objective", "ttft_p99=0.5",
    )  # fmt: skip
    answer, plan = json.loads(path.read_text())["answer"], read_fleet_plan(path)
    assert (plan.model, plan.replicas, plan.router) == ("llama-3.1-8b", answer["replicas"], "least_loaded")
    assert (plan.device, plan.num_devices) == ("h100", 2)
    assert plan.objective == "ttft_p99=0.5" and plan.reached.startswith("ttft_p99 0.")
    assert plan.settings == {
        "block_size": 32, "policy": "fair", "max_sequences": answer["max_sequences"],
        "max_batch_tokens": 8192, "max_model_len": 4096, "tensor_parallel_size": 2,
    }  # fmt: skip
    assert load_config(plan.settings).scheduling.max_sequences == answer["max_sequences"]


@pytest.fixture
def fit(tmp_path: Path) -> str:
    """A fit's file, of an engine with limits of its own."""
    steps = steps_of(cost_model("roofline", Hardware.of("smollm2-135m", "l4")), workload(40))
    limits = {item.name: getattr(LIMITS, item.name) for item in fields(LIMITS) if item.name != "groups"}
    engine = {"model": "tiny", "device": "cpu", "depth": 2, "limits": limits}
    (tmp_path / "fit.json").write_text(replace(fit_steps(steps, "test"), engine=engine).as_json())
    return str(tmp_path / "fit.json")


def test_a_fit_brings_its_engine_and_flags_change_it(capsys: pytest.CaptureFixture[str], fit: str) -> None:
    first = json.loads(simulate(capsys, *SMALL, "--cost", f"fitted:{fit}", "--json", "-"))["settings"]
    assert (first["model"], first["device"], first["plans in flight"]) == ("tiny", "cpu", "2")
    assert first["KV pool"].startswith("400 blocks of 16") and first["sequences at once"] == "16"
    words = ("--max-num-seqs", "4", "--policy", "fair", "--num-gpu-blocks-override", "300", "--depth", "1")
    changed = json.loads(simulate(capsys, *SMALL, "--cost", f"fitted:{fit}", *words, "--json", "-"))["settings"]
    assert (changed["sequences at once"], changed["policy"], changed["plans in flight"]) == ("4", "fair", "1")
    assert changed["KV pool"].startswith("300 blocks") and changed["tokens a step"] == first["tokens a step"]
    assert "give --model and --device" in refused(capsys, *SMALL, "--cost", f"fitted:{fit}", "--block-size", "32")


@pytest.mark.slow  # several simulations; tests/simulator/test_correction.py has the fit alone
def test_measured_requests_correct_the_cost_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stamps, fit = str(tmp_path / "stamps.csv"), str(tmp_path / "fit.json")

    def mean_e2e(cost: str, *words: str) -> float:
        facts = json.loads(simulate(capsys, *SMALL, "--cost", cost, *words, "--json", "-"))
        assert isinstance(facts, dict)
        return float(facts["runs"]["fcfs"]["e2e"]["mean"])

    measured = mean_e2e("roofline*1.1", "--requests", stamps)
    told = simulate(capsys, *SMALL, "--fit-requests", stamps, "--json", fit)
    assert "\nused: " in told and "held out" in told and f"--cost 'roofline*{fit}'" in told
    assert mean_e2e(f"roofline*{fit}") == pytest.approx(measured, rel=0.01)
    assert mean_e2e("roofline") < 0.95 * measured
    right = simulate(capsys, *SMALL, "--cost", "roofline*1.1", "--fit-requests", stamps)
    assert "\nnot used: no form predicts requests better than none" in right
    assert "give the --workload" in refused(capsys, "--fit-requests", stamps)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\nfrom octavo.cli import main\n"
        "main(['simulate', '--workload', 'poisson:rate=9,requests=5', '--json', '-'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
