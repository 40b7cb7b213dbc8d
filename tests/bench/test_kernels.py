"""The bench of kernels: turns, tables, the machine's rates, what the attention cases count."""

from __future__ import annotations

import json

import pytest
import torch

from octavo import cli
from octavo.bench import kernels
from octavo.bench.kernels import AttentionCase, AttentionShape, attention_row, best_s, probe_rates


def test_works_take_turns_and_the_first_round_is_not_counted() -> None:
    log = []
    times = best_s([lambda: log.append("a"), lambda: log.append("b")], 0.0)
    assert log == ["a", "b"] * (len(log) // 2) and len(log) >= 4
    assert len(times) == 2 and all(0 < seconds < float("inf") for seconds in times)


def test_short_works_are_repeated_within_one_timing() -> None:
    log = []
    (seconds,) = best_s([lambda: log.append(1)], 0.0, min_s=0.001)
    assert len(log) > 10 and seconds > 0


def test_the_command_shows_tables_or_json(capsys, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "LINEAR_SHAPES", {"qkv": (96, 64)})
    words = ["--kernels", "rows", "linear", "--rows", "1", "2", "--budget", "0.001", "--threads", "1"]
    assert cli.main(["bench", "kernel", *words]) == 0
    out = capsys.readouterr().out
    assert "RMSNorm" in out and "qkv: 96 outputs of 64 inputs" in out and "{" not in out
    assert cli.main(["bench", "kernel", *words, "--json"]) == 0
    *of_rows, linear = json.loads(capsys.readouterr().out)["tables"]
    assert all([row["rows"] for row in table["rows"]] == [1, 2] for table in of_rows)
    candidates = [row["candidate"] for row in linear["rows"] if row["rows"] == 1]
    assert {"octavo int4", "torch float32"} <= set(candidates) and len(set(candidates)) == len(candidates)
    assert set(linear["rows"][0]) == {"rows", "candidate", "seconds", "weight_bytes", "num_products"}
    assert linear["rows"][-1]["num_products"] == 2 * 96 * 64


@pytest.mark.parametrize(("words", "message"), [(["--rows", "0"], "--rows is 0"), (["--budget", "0"], "--budget is 0")])
def test_mistakes(capsys, words, message) -> None:
    assert cli.main(["bench", "kernel", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_rates_are_plausible(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "PROBE_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(kernels, "PROBE_BUDGET_S", 0.02)
    for dtype, quantization in (("float32", "none"), ("bfloat16", "int8")):
        bandwidth, flops = probe_rates("cpu", dtype, quantization=quantization)
        assert 1e8 < bandwidth < 1e13
        assert 1e8 < flops < 1e15


def test_the_least_bytes_and_the_operations_of_a_case() -> None:
    shape = AttentionShape(2, 1, 8)
    assert shape.work(AttentionCase("decodes", (10, 20), (1, 1)), 4) == (2 * 30 * 8 * 4, 4 * 30 * 2 * 8)
    assert shape.work(AttentionCase("prompt", (3,), (3,)), 2) == (2 * 3 * 8 * 2, 4 * (1 + 2 + 3) * 2 * 8)
    assert shape.work(AttentionCase("shared", (32, 32), (1, 1), 16), 4)[0] == 2 * (64 - 16) * 8 * 4


def test_attention_cases_are_timed_by_the_command(capsys, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "PROBE_BUFFER_BYTES", 2**20)
    monkeypatch.setattr(kernels, "PROBE_BUDGET_S", 0.02)
    cases = (AttentionCase("a", (20, 40), (1, 7)), AttentionCase("b", (33, 34), (1, 1), 16))
    monkeypatch.setattr(kernels, "ATTENTION_CASES", cases)
    shape = AttentionShape(2, 1, 8)
    monkeypatch.setattr(kernels, "ATTENTION_SHAPES", (shape,))
    assert cli.main(["bench", "kernel", "--kernels", "attention", "--budget", "0.001", "--threads", "1", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    kinds = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    row, *others = (attention_row(shape, kind, cases[0], (1e9, 1e9), 0.0) for kind in kinds)
    assert [one["case"] for one in table["rows"]] == ["a", "b"] * sum(each is not None for each in (row, *others))
    assert all(set(one) == set(row) and one["kernel ms"] > 0 for one in table["rows"])
