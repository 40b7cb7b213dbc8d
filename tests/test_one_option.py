"""An option is one field of a section: added to a copy of the source, it has a flag, a variable, a key and a help."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import SRC

ANCHOR = (
    '    depth: int | None = option(None, "plans in flight (default: 2 on CUDA, else 1)", "--pipeline-depth", '
    "within=(1, 8))\n"
)
FIELD = """\
    patience: int = option(
        3, "steps before it yawns", "--patience", "--calm", within=(1, 9), brief="steps before a yawn"
    )
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with one more field."""
    root = tmp_path_factory.mktemp("source")
    shutil.copytree(SRC / "octavo", root / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    path = root / "octavo" / "config" / "engine.py"
    text = path.read_text(encoding="utf-8")
    assert text.count(ANCHOR) == 1
    path.write_text(text.replace(ANCHOR, ANCHOR + FIELD), encoding="utf-8")
    return root


def run(tree: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables, "PYTHONPATH": str(tree), "COLUMNS": "100"}
    return subprocess.run([sys.executable, *words], env=environ, capture_output=True, text=True)


def shown(tree: Path, *words: str, **variables: str) -> dict[str, object]:
    done = run(tree, "-m", "octavo", "config", "show", "--json", *words, **variables)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)["patience"]
    return found


def test_it_is_a_flag_a_variable_a_key_and_a_default(tree: Path, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("execution:\n  patience: 7\n")
    assert shown(tree) == {"value": 3, "origin": "default"}
    assert shown(tree, "--config", str(file)) == {"value": 7, "origin": f"{file}: patience"}
    assert shown(tree, "--config", str(file), OCTAVO_PATIENCE="5") == {"value": 5, "origin": "OCTAVO_PATIENCE"}
    assert shown(tree, "--calm", "4", OCTAVO_PATIENCE="5") == {"value": 4, "origin": "--patience"}


def test_its_values_are_checked_wherever_they_come_from(tree: Path) -> None:
    remedy = "give a whole number from 1 to 9"
    for words, variables, spelled in (
        (("--patience", "10"), {}, "--patience"),
        ((), {"OCTAVO_PATIENCE": "10"}, "OCTAVO_PATIENCE"),
    ):
        done = run(tree, "-m", "octavo", "config", "show", *words, **variables)
        assert (done.returncode, done.stderr) == (2, f"error: {spelled} is '10'; {remedy}\n")
    done = run(tree, "-m", "octavo", "config", "show", "--patiense", "3")
    assert done.stderr == "error: unknown flag '--patiense'; did you mean '--patience'?\n"


def test_it_is_in_both_helps_the_search_and_the_completions(tree: Path) -> None:
    short = " ".join(run(tree, "-m", "octavo", "run", "--help").stdout.split())
    assert "--patience N steps before a yawn [3]" in short
    whole = run(tree, "-m", "octavo", "serve", "--help-all").stdout
    assert "--patience, --calm N" in whole and "steps before it yawns [3]" in whole
    assert (
        "--patience, --calm\n    steps before it yawns [3]\n    of: "
        in run(tree, "-m", "octavo", "help", "yawns").stdout
    )
    assert "--patience" in run(tree, "-m", "octavo", "completions", "bash").stdout


def test_it_is_an_argument_of_the_library_and_in_the_config(tree: Path) -> None:
    code = (
        "from octavo.config import Config\n"
        "from octavo.config.sources import config_from_keywords\n"
        "print(Config().execution.patience, config_from_keywords('m', {'calm': '8'}).execution.patience)"
    )
    assert run(tree, "-c", code).stdout == "3 8\n"
