"""What the documents name exists: files, names, flags, make targets. The page of behaviours is current."""

import ast
import importlib.util
import re
import sys

import pytest

from octavo.config import SETTINGS
from tests.source_tree import ROOT, modules

DOCUMENTS = sorted((ROOT / "docs").glob("*.md")) + [path for path in [ROOT / "README.md"] if path.exists()]
FOLDERS = ["", "src", "src/octavo", "docs", "tests"]
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w./-]+\.(py|cpp|toml|md|yml|yaml|sh)|[\w.-]+(/[\w.-]+)*/")
DOTTED = re.compile(r"octavo(\.\w+)+")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")

specification = importlib.util.spec_from_file_location("behaviours", ROOT / "tools" / "behaviours.py")
assert specification is not None and specification.loader is not None
behaviours = importlib.util.module_from_spec(specification)
sys.modules["behaviours"] = behaviours  # where its dataclass looks for itself
specification.loader.exec_module(behaviours)
Claim = behaviours.Claim


def spans(text: str) -> list[str]:
    """What stands in backticks, fenced blocks left out."""
    return CODE.findall(FENCE.sub("", text))


def missing_paths(text: str) -> list[str]:
    """Paths in backticks that no folder of ours holds."""
    names = [name for name in spans(text) if PATH.fullmatch(name)]
    return [name for name in names if not any((ROOT / folder / name).exists() for folder in FOLDERS)]


def missing_names(text: str) -> list[str]:
    """Dotted names in backticks that are neither a module nor defined at the top of one."""
    known = {module.name: module for module in modules()} | {"octavo": None}
    missing = []
    for name in (name for name in spans(text) if DOTTED.fullmatch(name)):
        owner, _, leaf = name.rpartition(".")
        module = known.get(owner)
        if name not in known and (module is None or leaf not in top_names(module.tree)):
            missing.append(name)
    return missing


def top_names(tree: ast.Module) -> set[str]:
    """Names that a module defines or assigns at its top."""
    names = {node.name for node in tree.body if hasattr(node, "name")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing_flags(text: str) -> list[str]:
    """Flags of ours, in backticks or code blocks, that neither a setting nor a command spells."""
    lines = spans(text) + [line for block in FENCE.finditer(text) for line in block[0].splitlines()]
    used = {flag for line in lines if line.startswith("--") or "octavo " in line for flag in FLAG.findall(line)}
    sources = "\n".join(module.text for module in modules() + modules("tools"))
    known = {flag for setting in SETTINGS for flag in setting.flags} | set(re.findall(r'"(--[a-z0-9-]+)"', sources))
    return sorted(flag for flag in used if {flag, flag.replace("--no-", "--", 1)}.isdisjoint(known))


def missing_targets(text: str) -> list[str]:
    """`make x` where the Makefile has no x."""
    code = "\n".join(spans(text) + [block[0] for block in FENCE.finditer(text)])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return sorted(set(TARGET.findall(code)) - targets)


def test_there_are_documents():
    names = {path.name for path in DOCUMENTS}
    assert {"design.md", "glossary.md", "life-of-a-request.md", "behaviours.md"} <= names


@pytest.mark.parametrize("check", [missing_paths, missing_names, missing_flags, missing_targets])
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_only_what_exists(document, check):
    assert check(document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "check, text",
    [
        (missing_paths, "see `core/telepathy.py`"),
        (missing_names, "`octavo.core.plan.NoSuchThing`"),
        (missing_names, "`octavo.telepathy`"),
        (missing_flags, "`octavo serve --read-minds`"),
        (missing_flags, "```\noctavo serve --read-minds\n```"),
        (missing_targets, "`make coffee`"),
    ],
)
def test_each_check_catches_an_invention(check, text):
    assert check(text)


def test_each_check_passes_what_exists():
    text = "`core/plan.py` `octavo.core.plan.StepPlan` `octavo.core.plan` `--max-model-len` `make test`"
    assert not any(check(text) for check in (missing_paths, missing_names, missing_flags, missing_targets))


def test_the_glossary_has_the_nouns():
    text = (ROOT / "docs" / "glossary.md").read_text()
    core = ["Request", "RequestState", "Sequence", "Row", "StepPlan", "StepResult", "Event", "Block", "Group", "Policy"]
    nouns = [*core, "Executor", "Adapter", "Grammar", "Span", "Ledger"]
    assert [noun for noun in nouns if f"**{noun}**" not in text] == []


def test_the_behaviours_page_is_current():
    assert behaviours.page() == (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8"), "run `make docs`"


def test_names_of_tests_claim_rows():
    assert behaviours.rows_of("test_S07_victim_is_last") == ["S07"]
    assert behaviours.rows_of("test_S07_K01_both") == ["S07", "K01"]
    assert behaviours.rows_of("test_bug_17_no_thrash") == ["bug 17"]
    assert behaviours.rows_of("test_bug_4_bug_17_both") == ["bug 04", "bug 17"]
    assert behaviours.rows_of("test_row_28_K01_damage") == ["R28", "K01"]
    assert behaviours.rows_of("test_something_else") == []


def folder_of(tmp_path, **files):
    """A folder of tests with these files."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_skipped_and_failing_tests_prove_nothing(tmp_path):
    folder = folder_of(
        tmp_path,
        test_a="def test_S01_a(): ...\n"
        "@pytest.mark.skip\ndef test_S02_b(): ...\n"
        "@pytest.mark.xfail(reason='x')\ndef test_S03_c(): ...\n"
        "@pytest.mark.skipif(NO_GPU, reason='x')\ndef test_S04_d(): ...\n"
        "class TestMore:\n    async def test_bug_02_e(self): ...\n"
        "def helper_test_S05_f(): ...\n",
    )
    assert behaviours.claims_by_row(folder) == {
        "S01": [Claim("tests/test_a.py:test_S01_a", False)],
        "S04": [Claim("tests/test_a.py:test_S04_d", False)],
        "bug 02": [Claim("tests/test_a.py:test_bug_02_e", False)],
    }


def test_a_test_is_end_to_end_by_what_it_uses_through_helpers_fixtures_and_other_files(tmp_path):
    folder = folder_of(
        tmp_path,
        conftest="from octavo.server.app import create_app\n@fixture\ndef app(): return create_app()\n",
        helper="from octavo import LLM\nfrom octavo.core.scheduler import Scheduler\n"
        "def engine():\n    return LLM('m')\ndef fake():\n    return Scheduler()\n",
        test_a="from tests.helper import engine, fake\n"
        "from octavo.executors.torch_executor import TorchExecutor\n"
        "def opened(): return TorchExecutor()\n"
        "def test_S01_by_a_helper_of_another_file(): engine()\n"
        "def test_S02_fake(): fake()\n"
        "def test_S03_by_a_function_of_this_file(): opened()\n"
        "def test_S04_by_a_fixture(app): ...\n"
        "def test_S05_alone(): ...\n"
        "class TestMore:\n    def test_S06_in_a_class(self): engine()\n",
    )
    claims = behaviours.claims_by_row(folder)
    assert [claims[f"S0{number}"][0].is_end_to_end for number in range(1, 7)] == [True, False, True, True, False, True]


@pytest.mark.parametrize(
    "note, claims, scored, state",
    [
        ("", [], "", "open"),
        ("", [False], "", "scheduler's interface"),
        ("", [False, True], "", "end to end"),
        ("", [True], "misses", "misses"),
        ("", [True], "in part", "in part"),
        ("", [True], "holds", "end to end"),
        ("open: the half of it", [True], "", "open"),
        ("scheduler's interface: nothing sets it", [True], "", "scheduler's interface"),
        ("scheduler's interface: nothing sets it", [], "", "open"),
        ("end to end: a process", [False], "holds", "end to end"),
        ("end to end: a process", [False], "misses", "misses"),
    ],
)
def test_a_row_is_as_far_as_its_tests_its_note_and_its_scorecard_allow(note, claims, scored, state):
    assert behaviours.state_of(note, [Claim("x", reaches) for reaches in claims], scored) == state


def test_no_row_of_the_page_says_more_than_the_scorecard():
    scorecard = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")
    scored = dict(behaviours.SCORED.findall(scorecard))
    shown = dict(re.findall(r"^\| (R\d\d) \|[^|]*\|[^|]*\| ([^|]+) \|", page, re.MULTILINE))
    assert len(scored) == 42 and scored.keys() == shown.keys()
    for row, state in scored.items():
        if state != "holds":
            assert shown[row].startswith(state.partition(":")[0]), row


def test_a_row_that_does_not_exist_is_an_error():
    table = {"scheduling": {"S01": ["a", "HF"]}, "bugs": {"01": ["b", "HF", "end to end: why"]}}
    with pytest.raises(ValueError, match="S99"):
        behaviours.render(table, {"S99": [Claim("tests/x.py:test_S99_", True)]})
    text = behaviours.render(table, {"bug 01": [Claim("tests/x.py:test_bug_01_", False)]})
    assert "| S01 | a | HF | open |  |  |" in text
    assert "| 01 | b | HF | end to end: why |  | `tests/x.py` 1 |" in text
    assert "Of 2 rows: end to end 1, scheduler's interface 0, open 1." in text


def test_the_tool_runs_as_a_program(capsys):
    assert behaviours.main(["--check"]) in (0, 1)
    assert "docs/behaviours.md" in capsys.readouterr().out
