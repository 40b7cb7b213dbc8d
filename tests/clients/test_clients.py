"""The quick part of `make clients`: scripts that say FAST, with this environment's packages, against a scripted model.

Owns: the server that they share. Does not: write docs/clients.md; `make clients` does, with every client's own package.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.source_tree import ROOT

FOLDER = ROOT / "tools" / "clients"
specification = importlib.util.spec_from_file_location("clients_runner", FOLDER / "runner.py")
assert specification is not None and specification.loader is not None
runner: Any = importlib.util.module_from_spec(specification)
sys.modules["clients_runner"] = runner  # dataclasses look their module up
specification.loader.exec_module(runner)

SCRIPTS = runner.scripts()
FAST = [script for script in SCRIPTS if script.is_fast]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    with runner.serving(("--model", "scripted:fast.yaml", "--served-model-name", "scripted")) as served:
        yield served


@pytest.mark.parametrize("script", FAST, ids=lambda script: script.client)
def test_the_quick_clients_pass_every_check(script: Any, server: tuple[str, str]) -> None:
    outcome = runner.run_script(script, Path(sys.executable), server)
    failed = [f"{line['check']}: {line['detail']}" for line in outcome.lines if line["status"] == "fail"]
    assert not failed and not outcome.trouble, (failed, outcome.trouble)
    assert outcome.count("pass") + outcome.count("skip") == len(outcome.lines) > 0


def test_the_promised_clients_have_scripts() -> None:
    promised = {"openai", "anthropic", "ollama", "langchain", "lm_eval", "llm", "schemathesis", "curl", "node"}
    promised |= {"codex", "litellm", "litellm_proxy", "guidellm", "anthropic_tools", "anthropic_node", "vercel"}
    promised |= {"pydantic_ai", "openai_agents"}
    assert promised <= {script.path.stem.removeprefix("check_") for script in SCRIPTS}
    assert {"openai", "curl", "node"} <= {script.path.stem.removeprefix("check_") for script in FAST}


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "check_x.py"
    path.write_text('"""What it is."""\nCLIENT = "x"\nPACKAGES = ["y>=1"]\nraise SystemExit\n')
    script = runner.Script.read(path)
    assert (script.client, script.packages, script.about, script.is_fast) == ("x", ("y>=1",), "What it is.", False)
    path.write_text('CLIENT = "x"\n')
    with pytest.raises(ValueError, match="PACKAGES"):
        runner.Script.read(path)


def told(status: str, **more: Any) -> dict[str, Any]:
    line = {"client": "x", "check": "c", "status": status, "detail": "", "count": 1, "about": "", "version": "1"}
    return line | {"packages": {}} | more


def test_the_page_counts_and_says_why(tmp_path: Path) -> None:
    script = runner.Script(tmp_path / "check_x.py", "x", (), ("--model", "smollm2"), False, "What it is.")
    lines = [told("pass", count=7), told("skip", detail="no node here"), told("fail", detail=f"{ROOT}/a|b <c>")]
    page = runner.page([runner.Outcome(script, lines, "ended with status 1")], "today")
    assert "| x | 1 | 7 | 2 | 1 | What it is. |" in page
    assert "today: 7 checks passed, 2 failed, 1 skipped." in page and "Fuzzed" not in page
    assert "no node here" in page and "a\\|b &lt;c>" in page and "the script ended with status 1" in page


def test_the_page_counts_fuzzed_requests_apart_and_names_packages(tmp_path: Path) -> None:
    script = runner.Script(tmp_path / "check_x.py", "x", (), ("--model", "smollm2"), False, "Checks.")
    fuzz = runner.Script(tmp_path / "check_y.py", "y", (), ("--model", "smollm2"), False, "Fuzz.", is_fuzz=True)
    lines = [told("pass", count=2, packages={"ai": "6.0", "zod": "4.1"})]
    outcomes = [runner.Outcome(fuzz, [told("pass", count=40), told("fail")]), runner.Outcome(script, lines)]
    page = runner.page(outcomes, "today")
    assert "today: 2 checks passed, 0 failed, 0 skipped." in page
    assert "40 generated requests passed and 1 operations failed" in page and "status is below 500" in page
    assert (
        page.index("| x | 1 | 2 | 0 | 0 | Checks. |") < page.index("Fuzzed requests") < page.index("| y | 1 | 40 | 1 |")
    )
    assert "Packages: ai 6.0, zod 4.1" in page
    tables = runner.tables(outcomes, "today")
    assert tables in page and "Packages" not in tables
    text = runner.PAGE.read_text(encoding="utf-8")
    changed = runner.with_tables(text, tables)
    assert tables in changed and runner.with_tables(changed, "") == runner.with_tables(text, "")
    assert changed.startswith("# Clients") and len(runner.with_tables(text, "")) > 2000, "what people wrote stays"
    with pytest.raises(ValueError, match="checks: make clients"):
        runner.with_tables("# Clients", tables)
    scripts = {script.path.stem: script for script in SCRIPTS}
    assert scripts["check_schemathesis"].is_fuzz and not scripts["check_openai"].is_fuzz


def test_packages_are_installed_apart_and_without_npm_the_check_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "check_x.py"
    path.write_text('CLIENT = "x"\nPACKAGES = []\nNODE_PACKAGES = ["ai"]\nENVIRONMENT = "other"\n')
    script = runner.Script.read(path)
    assert script.node_packages == ("ai",) and script.node_home == runner.ENVIRONMENT / "node" / "x"
    assert script.python == runner.ENVIRONMENT / "environments" / "other" / "bin" / "python"
    monkeypatch.setattr(runner.shutil, "which", lambda name: None)
    monkeypatch.setattr(runner, "ENVIRONMENT", tmp_path / "environment")
    (outcome,) = runner.run_all([script])
    assert (outcome.count("skip"), outcome.count("fail")) == (1, 0)
    assert "npm is not installed here" in runner.page([outcome], "today")
    assert not (tmp_path / "environment").exists()


def test_a_script_that_tells_nothing_or_dies_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "check_x.py"
    script = runner.Script(path, "x", (), (), False, "")
    line = json.dumps(told("pass"))
    for text, trouble in (("print('hello')", "reported nothing"), (f"print({line!r}); 1/0", "status")):
        path.write_text(text)
        outcome = runner.run_script(script, Path(sys.executable), ("http://127.0.0.1:9", "x"))
        assert trouble in outcome.trouble and outcome.count("fail") == 1
