"""The bench of kernels: turns, tables, what is not there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from octavo import cli
from octavo.bench.kernel_table import KernelTable, Sizes, best_s
from octavo.cli.bench_kernel import linear_tables


def test_works_take_turns_and_the_first_round_is_not_counted() -> None:
    log = []
    times = best_s([lambda: log.append("a"), lambda: log.append("b")], 0.0)
    assert log == ["a", "b"] * (len(log) // 2) and len(log) >= 4
    assert len(times) == 2 and all(0 < seconds < float("inf") for seconds in times)


def test_the_command_shows_what_there_is(capsys, monkeypatch) -> None:
    monkeypatch.setitem(cli_modules(), "linear", "octavo.bench.no_such_kernels")
    words = ["--kernels", "rows", "linear", "--rows", "1", "2", "--budget", "0.001", "--threads", "1"]
    assert cli.main(["bench", "kernel", *words]) == 0
    out, err = capsys.readouterr()
    assert "RMSNorm" in out and "{" not in out and "kernels of linear are not measured" in err
    assert cli.main(["bench", "kernel", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all([row["rows"] for row in table["rows"]] == [1, 2] for table in report["tables"])


def test_figures_of_layers_become_tables() -> None:
    @dataclass
    class Figure:
        candidate: str
        seconds: float

    module = SimpleNamespace(
        SHAPES={"qkv": (96, 32)},
        measure=lambda layer, rows, threads: [Figure("int4", rows * 1.0), Figure("torch", 9.0)],
    )
    (table,) = linear_tables(module, Sizes((1, 2), 1, 0.1))
    assert table.columns == ["rows", "candidate", "seconds"]
    assert table.rows == [[1, "int4", 1.0], [1, "torch", 9.0], [2, "int4", 2.0], [2, "torch", 9.0]]


def cli_modules() -> dict[str, str]:
    from octavo.cli.bench_kernel import MODULES

    return MODULES


def test_tables_as_json() -> None:
    assert KernelTable("t", ("a", "b"), [(1, 2)]).as_dict() == {"title": "t", "rows": [{"a": 1, "b": 2}]}


@pytest.mark.parametrize(("words", "message"), [(["--rows", "0"], "--rows is 0"), (["--budget", "0"], "--budget is 0")])
def test_mistakes(capsys, words, message) -> None:
    assert cli.main(["bench", "kernel", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
