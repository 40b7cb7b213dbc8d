"""The page of headline figures: engine and server in rows of their own, what the README may quote, a busy machine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.source_tree import ROOT
from tools import headline
from tools.sections import read_section, write_section

from octavo.bench.workload import read_workload

RUN = {"date": "2026-01-02 03:04 UTC", "commit": "abc", "cores": 2, "cpu": "A processor", "load": 0.1}
TASKS = ["a.json.gz@32", "b.json.gz@1", "c.json.gz@32"]


def peer(name: str, speed: float, ratio: float | None = None, error: str | None = None) -> dict[str, Any]:
    figures: dict[str, Any] = {"output_tokens_per_s": speed, "ttft_ms": 1234.5, "token_ms": 6.54, "output_tokens": 9.0}
    if ratio:
        figures["ratios"] = {"output_tokens_per_s": {"median": ratio, "min": ratio - 0.1, "max": ratio + 0.1}}
    memory = {"startup_s": 2.0, "peak_memory_bytes": 3 * 2**29, "error": error}
    return {"name": name, **memory, "workloads": {} if error else {task: figures for task in TASKS}}


def report(*peers: dict[str, Any]) -> dict[str, Any]:
    return {"bench": "compare", "rounds": 3, "workloads": TASKS, "peers": list(peers)}


ALONE = report(peer("octavo", 301.4), peer("octavo server", 250.6))
BESIDE = report(peer("octavo", 301.4), peer("octavo server", 250.6), peer("llama.cpp", 80.0, 3.133))


def test_engine_and_server_have_rows_of_their_own_and_only_the_server_is_compared() -> None:
    page = headline.render(BESIDE, RUN, "python -m tools.headline")
    assert "| A | Octavo's engine | 301 | 1,234 | 6.5 |" in page
    assert "| A | Octavo's server | 251 | 1,234 | 6.5 |" in page
    assert "| A | llama.cpp's server | 3.1 (3 to 3.2) |" in page
    assert "begun 2026-01-02 03:04 UTC, commit abc, 2 cores (A processor),\nload average 0.1" in page
    assert "busy" not in page and "No other engine" not in page
    assert "No other engine took part" in headline.render(ALONE, RUN, "")


def test_a_busy_machine_and_a_peer_that_failed_are_told() -> None:
    assert "The machine was busy" in headline.render(ALONE, RUN | {"load": 1.2}, "")
    failed = report(*ALONE["peers"], peer("llama.cpp", 0.0, error="it ended\nwith noise"))
    page = headline.render(failed, RUN, "")
    assert "llama.cpp's server (left out: it ended)" in page and "times" not in headline.sentence(failed, 2)


def test_the_sentence_does_not_mix_the_engine_with_a_server_to_server_ratio() -> None:
    assert headline.sentence(BESIDE, 2) == (
        "On 2 cores the default model gives 301 output tokens/s in process and 251 output tokens/s over HTTP, 32 "
        "requests at a time; over HTTP that is 3.1 times llama.cpp's server."
    )
    assert "llama.cpp" not in headline.sentence(ALONE, 2)


def test_figures_that_the_page_does_not_have_are_noticed() -> None:
    page = headline.render(BESIDE, RUN, "")
    good = headline.sentence(BESIDE, 2).replace(" and ", "\nand ")
    assert headline.strange_figures(f"# Title\n{good}", page) == []
    assert headline.strange_figures("242 output tokens/s, 3.3 times llama.cpp", page) == ["242", "3.3"]
    assert headline.strange_figures("1,234 tokens/s", page) == ["1,234"], "a figure of another column"


def test_the_readme_quotes_the_page() -> None:
    section = read_section(headline.PAGE, headline.SECTION)
    assert headline.FIGURE.findall(section.partition("In one sentence: ")[2])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "docs/performance.md#headline-figures" in readme
    assert headline.strange_figures(readme, section) == []


def test_only_the_text_between_the_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n<!-- a: begin -->\nold\n<!-- a: end -->\nby hand\n")
    write_section(page, "a", "new\n")
    assert page.read_text() == "# Title\n<!-- a: begin -->\n\nnew\n\n<!-- a: end -->\nby hand\n"
    write_section(page, "a", "newer")
    assert read_section(page, "a") == "newer\n"
    for change in (read_section, lambda page, name: write_section(page, name, "x")):
        with pytest.raises(ValueError, match="no section between"):
            change(page, "b")


def test_the_comparison_is_run_with_the_servers_and_its_last_line_read(tmp_path: Path, monkeypatch: Any) -> None:
    script = tmp_path / "python"
    told = tmp_path / "told"
    script.write_text(f"#!/bin/sh\necho \"$OMP_NUM_THREADS|$@\" > {told}\necho noise\necho '{json.dumps(ALONE)}'\n")
    script.chmod(0o755)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert headline.measure(2, "/llama", "smollm2", str(script)) == ALONE
    words = told.read_text()
    assert words.startswith(
        "|-m octavo bench compare smollm2 --own-server --json --rounds 2 --speculate none --workload "
    )
    assert "c.json.gz@32" in words and words.rstrip().endswith("--llama-server /llama")
    script.write_text(f"#!/bin/sh\necho '{json.dumps(report(peer('octavo', 0, error='out of memory')))}'\n")
    with pytest.raises(SystemExit, match="nothing is written: out of memory"):
        headline.measure(2, None, "smollm2", str(script))
    script.write_text("#!/bin/sh\nexit 2\n")
    with pytest.raises(SystemExit, match="the comparison failed"):
        headline.measure(2, None, "smollm2", str(script))


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "output_tokens", "digest"),
    [
        ("a", 64, 9702, 5794, "9e3fe634a7deec94"),
        ("b", 6, 768, 768, "98fbe6be4509eff0"),
        ("c", 128, 53248, 4096, "4a6c7647c6219f25"),
    ],
)
def test_the_workloads_are_what_they_were(
    name: str, requests: int, prompt_tokens: int, output_tokens: int, digest: str
) -> None:
    workload = read_workload(ROOT / "tools" / "workloads" / f"{name}.json.gz")
    assert (workload.num_requests, workload.num_prompt_tokens, workload.num_output_tokens) == (
        requests, prompt_tokens, output_tokens,
    )  # fmt: skip
    state = hashlib.blake2b(digest_size=8)
    for group in workload.groups:
        for item in group:
            state.update(item.prompt_token_ids.tobytes() + item.max_tokens.to_bytes(4, "little"))
    assert state.hexdigest() == digest
