"""octavo trace: a recording as a trace for Perfetto and as a page."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.engine.fakes import GatedExecutor
from tests.observe.frame_reader import FrameReader
from tests.observe.recording_of import record
from tests.observe.test_perfetto import check_format

from octavo.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording")
    record(folder / "0001.octrec", GatedExecutor(), num_blocks=(24,), headroom=0.0, max_sequences=8)
    return folder


def load(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


def frames_of(page: Path) -> list[dict[str, Any]]:
    found = re.search(r'id="frames">([^<]*)<', page.read_text())
    assert found is not None
    return [json.loads(line) for line in gzip.decompress(base64.b64decode(found[1])).splitlines()]


def test_a_trace_and_a_page_come_of_one_recording(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = tmp_path / "trace.json.gz", tmp_path / "page.html"
    assert main(["trace", str(folder), "--perfetto", str(trace), "--page", str(page)]) == 0
    out = capsys.readouterr().out
    assert "ui.perfetto.dev" in out and str(page) in out and "no track" not in out and "left out" not in out
    events = load(trace)
    check_format(events)
    steps = [event for event in events if event["name"].startswith("step ")]
    parts = {event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1} - {
        event["name"] for event in steps
    }
    assert {"schedule", "emit"} <= parts
    assert sum(event["name"].startswith("finished: length") for event in events) == 15
    assert sum(event["name"] == "finished: cancelled" for event in events) == 1
    reader = FrameReader()
    reader.read(frames_of(page))
    assert reader.head["source"] == "recording" and reader.head["device"] == "cpu" and reader.end is not None
    assert len(reader.steps) == len(steps) and not reader.open


def test_a_part_can_be_chosen(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = tmp_path / "whole.json", tmp_path / "part.json"
    assert main(["trace", str(folder), "--perfetto", str(whole)]) == 0
    steps = [event for event in load(whole) if event["name"].startswith("step ")]
    middle = steps[len(steps) // 2]["ts"] / 1e6
    assert main(["trace", str(folder), "--perfetto", str(part), "--begin", f"{middle:.6f}"]) == 0
    events = load(part)
    check_format(events)
    kept = [event for event in events if event["name"].startswith("step ")]
    assert 0 < len(kept) < len(steps) and kept[-1] == steps[-1]
    assert kept[0]["ts"] + kept[0]["dur"] >= middle * 1e6 - 1
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert len(names) == len(set(names)) and "steps" in names
    capsys.readouterr()
    page = tmp_path / "page.html"
    words = ["--max-requests", "3", "--max-steps", "5", "--page", str(page), "--perfetto", str(part)]
    assert main(["trace", str(folder), *words]) == 0
    out = capsys.readouterr().out
    assert "13 requests have no track: raise --max-requests" in out
    assert f"{len(steps) - 5} steps are left out: raise --max-steps" in out
    assert sum(frame["k"] == "step" for frame in frames_of(page)) == 5
    tracks = [event for event in load(part) if event["name"] == "thread_name"]
    assert len(tracks) == 1 + 3


def test_lives_stand_behind_each_other(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "0001.octrec", tmp_path / "0001.octrec")
    record(tmp_path / "0002.octrec", GatedExecutor())
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    assert main(["trace", str(tmp_path), "--perfetto", str(trace), "--page", str(page)]) == 0
    events = load(trace)
    check_format(events)
    named = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert named == ["engine", "requests", "engine (segment 2)", "requests (segment 2)"]
    kinds = [frame["k"] for frame in frames_of(page)]
    assert kinds.count("head") == 2 and kinds.count("end") == 1 and kinds[-1] == "end"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "there is nothing to write; give --perfetto FILE, --page FILE or both"),
        (["--perfetto", "x", "--begin", "3", "--end", "2"], "--begin is 3 and --end 2"),
        (["--perfetto", "x", "--begin", "-1"], "--begin is -1"),
        (["--page", "x", "--max-steps", "0"], "--max-steps is 0; give a whole number of at least 1"),
        (["--perfetto", "x", "--max-requests", "0"], "--max-requests is 0; give a whole number of at least 1"),
        (["--perfetto", "/none/x.json"], "--perfetto /none/x.json: there is no folder /none; make it"),
        (["--page", "/none/x.html"], "--page /none/x.html: there is no folder /none; make it"),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(folder), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_folder_without_a_recording_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path), "--perfetto", str(tmp_path / "x.json")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
