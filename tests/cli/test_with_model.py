"""Commands end to end on a tiny model: run, bench offline, latency and sweep."""

from __future__ import annotations

import io
import json
import sys

import pytest
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.observe.recording import arrivals, open_recording

COMMON = ["--threads", "1", "--dtype", "float32", "--kv-cache-tokens", "1K", "-np", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model("smollm2", tmp_path_factory.mktemp("cli") / "tiny"))


def test_run_streams_an_answer_and_says_the_numbers(model, capsys) -> None:
    assert cli.main(["run", model, "the cat", "-n", "5", "--temperature", "0", *COMMON]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert "tokens/s, first after" in err
    assert "prompt" in err


def test_same_seed_same_answer(model, capsys) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        assert cli.main(["run", model, "the cat", "-n", "8", "--seed", seed, "-q", *COMMON]) == 0
        answers.append(capsys.readouterr())
    assert answers[0].out == answers[1].out != answers[2].out
    assert answers[0].err == ""


def test_raw_and_piped_prompt(model, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat sat"))
    assert cli.main(["run", model, "-", "--raw", "-n", "2", *COMMON]) == 0
    raw = int(capsys.readouterr().err.split("prompt ")[1].split()[0])
    assert cli.main(["run", model, "the cat sat", "-n", "2", *COMMON]) == 0
    assert raw < int(capsys.readouterr().err.split("prompt ")[1].split()[0])


def test_a_limit_that_cannot_be_given_is_remarked(model, capsys) -> None:
    assert cli.main(["run", model, "the cat", "-n", "1", "-c", "1M", *COMMON]) == 0
    assert "warning: --max-model-len is 1048576, this model holds 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["-c", "16"], "This model's maximum context length is 16 tokens"),
        (["--policy", "zzz"], "unknown policy 'zzz'; give one of"),
    ],
)
def test_mistakes_are_one_line(model, capsys, words, message) -> None:
    prompt = "the cat sat on the mat while another hat waited"
    assert cli.main(["run", model, prompt, *COMMON, *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.fixture
def quick_probe(monkeypatch):
    monkeypatch.setattr("octavo.bench.kernels.PROBE_BUFFER_BYTES", 2**20)
    monkeypatch.setattr("octavo.bench.kernels.PROBE_BUDGET_S", 0.02)
    monkeypatch.setattr("octavo.machine._largest_cache", lambda root: 0)


def test_bench_offline_prints_tables_or_one_json_object(model, capsys, quick_probe, tmp_path) -> None:
    path = tmp_path / "w.json"
    path.write_text(
        json.dumps(
            [[{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}] * 3, [{"prompt_token_ids": [5], "max_tokens": 2}]]
        )
    )
    words = ["bench", "offline", model, "--workload", str(path), "--runs", "2", *COMMON]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "memory floor" in out and "{" not in out
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (4, 10, 14)
    assert (report["dtype"], report["device"], report["threads"]) == ("float32", "cpu", 1)
    assert len(report["runs_output_tokens_per_s"]) == 2
    assert report["floor_fraction"] > 0
    assert report["peak_memory_bytes"] > 2**20
    assert report["startup_s"] > 0


def test_bench_offline_draws_a_workload(model, capsys, quick_probe) -> None:
    words = ["--num-prompts", "3", "--input-len", "6", "--output-len", "2", "--json"]
    assert cli.main(["bench", "offline", model, *words, *COMMON]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["output_tokens"] == 6


def test_bench_offline_records_its_run(model, capsys, quick_probe, tmp_path) -> None:
    folder = tmp_path / "new" / "rec"
    words = ["--num-prompts", "3", "--input-len", "6", "--output-len", "2", "--json", "--record", str(folder)]
    assert cli.main(["bench", "offline", model, *words, *COMMON]) == 0
    recorded = arrivals(open_recording(folder))
    assert [one.prompt_tokens for one in recorded] == [6] * 4  # the warm-up's, and three
    assert [one.output_tokens for one in recorded] == [(2,)] * 4
    assert cli.main(["replay", str(folder)]) == 0
    (tmp_path / "file").write_text("")
    capsys.readouterr()
    assert cli.main(["bench", "offline", model, *words[:-1], str(tmp_path / "file"), *COMMON]) == 2
    assert capsys.readouterr().err.startswith("error: --record ")


def test_bench_offline_checks_its_numbers(capsys) -> None:
    assert cli.main(["bench", "offline", "--runs", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --runs is 0")


def test_bench_latency_measures_each_number_of_rows(model, capsys, quick_probe) -> None:
    words = ["--rows", "1", "3", "--input-len", "6", "--output-len", "4", "--runs", "1"]
    assert cli.main(["bench", "latency", model, *words, *COMMON]) == 0
    out = capsys.readouterr().out
    assert "{" not in out
    assert cli.main(["bench", "latency", model, *words, *COMMON, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["at_once"] for point in report["points"]] == [1, 3]
    assert all(point["ttft_ms"] > 0 and point["step_ms"] > 0 for point in report["points"])
    assert "floor reached" in out


def test_bench_sweep_draws_its_curves(model, capsys, quick_probe, tmp_path) -> None:
    path = tmp_path / "sweep.svg"
    words = ["--concurrency", "1", "2", "--input-len", "6", "--output-len", "3", "--contexts", "8", "16"]
    words += ["--rows", "2", "--steps", "3", "--runs", "1", "--svg", str(path), "--json"]
    assert cli.main(["bench", "sweep", model, *words, *COMMON]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report = json.loads(out)
    assert ([point["at_once"] for point in report["rows"]], len(report["contexts"])) == ([1, 2], 2)
    assert path.read_text().count('class="line') == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latency", "--rows", "0"], "--rows is 0"),
        (["latency", "--rows", "9"], "9 requests of 256 tokens do not fit"),
        (["latency", "--rows", "1", "--input-len", "900"], "1 requests of 1028 tokens do not fit"),
        (["sweep", "--steps", "1"], "--steps is 1"),
        (
            ["sweep", "--svg", "/no/such/folder/x.svg"],
            "--svg /no/such/folder/x.svg: there is no folder /no/such/folder",
        ),
    ],
)
def test_bench_points_check_their_numbers(model, capsys, words, message) -> None:
    assert cli.main(["bench", words[0], model, *words[1:], *COMMON]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
