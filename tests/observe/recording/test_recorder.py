"""The writer: bounded in bytes and in calls, never waiting, ending with a reason."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from pathlib import Path

import pytest

from octavo.config import RecordingConfig
from octavo.core.tap import PlanCall
from octavo.errors import ConfigError
from octavo.observe.recording import arrivals, open_recording, recorder, replay
from octavo.observe.recording.format import Header
from octavo.observe.recording.reader import read_header, read_records
from octavo.observe.recording.recorder import Recorder, open_recorder
from tests.core.harness import limits, prompt
from tests.observe.recording.driving import RecordedRun


def some_items(count: int = 6) -> RecordedRun:
    run = RecordedRun(limits())
    for number in range(count):
        run.admit(prompt(9, number), 8)
        run.steps(2)
    run.finish_all()
    return run


def feed(writer: Recorder, run: RecordedRun) -> None:
    for item in run.lives[0]:
        writer.called(item.call)


def make(folder: Path, max_bytes: int = 1 << 20) -> Recorder:
    return Recorder(folder, max_bytes, Header("tiny", limits(), 1), lambda: 1.5)


def test_what_was_put_is_read_back_and_replays(tmp_path: Path) -> None:
    run, writer = some_items(), make(tmp_path)
    feed(writer, run)
    writer.close()
    recording = open_recording(tmp_path)
    report = replay(recording)
    assert report.is_equal and report.num_calls == len(run.lives[0])
    assert report.ends == ["the engine was stopped"]
    assert recording.segments[0].path.stat().st_mode & 0o777 == 0o600
    status = writer.status()
    assert status["calls"] == len(run.lives[0]) and status["bytes"] == recording.segments[0].num_bytes
    assert status["is_recording"] is False


def test_nothing_is_written_before_a_request_comes(tmp_path: Path) -> None:
    run, writer = some_items(), make(tmp_path)
    for item in run.lives[0]:
        if isinstance(item.call, PlanCall):
            writer.called(item.call)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_each_life_has_a_segment_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        writer = make(tmp_path)
        feed(writer, some_items())
        writer.close()
    assert [segment.path.name for segment in open_recording(tmp_path).segments] == [
        "0001.octrec", "0002.octrec", "0003.octrec",
    ]  # fmt: skip
    assert replay(open_recording(tmp_path)).num_segments == 3


def test_the_bound_in_bytes_ends_it_with_a_marker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "FRAME_CALLS", 8)
    run, writer = some_items(40), make(tmp_path, 8192)
    with caplog.at_level(logging.WARNING):
        feed(writer, run)
        writer.close("unheard: it is over already")
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8192
    assert "its bound" in caplog.text
    report = replay(open_recording(tmp_path))
    assert report.is_equal and 8 <= report.num_calls < len(run.lives[0])
    assert "bound of 8192 bytes (--record-bytes)" in report.ends[0] and "its bound" in str(writer.status()["ended"])


def test_a_folder_that_is_full_already_gets_no_segment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0001.octrec").write_bytes(bytes(9000))
    writer = make(tmp_path, 8192)
    with caplog.at_level(logging.WARNING):
        feed(writer, some_items())
        writer.close()
    assert "name another folder, or raise --record-bytes" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["0001.octrec"]


def test_a_writer_that_falls_behind_ends_the_recording_and_not_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_QUEUED", 20)
    hold, held = threading.Event(), threading.Event()

    class Slow(Recorder):
        def _open(self) -> bool:
            held.set()
            hold.wait(30)
            return super()._open()

    writer = Slow(tmp_path, 1 << 20, Header("tiny", limits(), 1), lambda: 0.0)
    run = some_items()
    writer.called(run.lives[0][0].call)
    assert held.wait(30)
    for item in run.lives[0][1:]:
        writer.called(item.call)
    assert "20 calls to write" in str(writer.status()["ended"])
    hold.set()
    writer.close()
    report = replay(open_recording(tmp_path))
    assert report.is_equal and report.num_calls == 20 and "calls to write" in report.ends[0]


def test_a_disk_that_is_full_ends_it_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    writer = make(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        feed(writer, some_items())
        writer.close()
    assert "No space left on device" in caplog.text and "No space left" in str(writer.status()["ended"])


def test_a_folder_that_cannot_be_written_to_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    config = RecordingConfig(record=str(tmp_path / "file" / "rec"))
    with pytest.raises(ConfigError, match=r"--record .* cannot be written to \(.*give another folder"):
        open_recorder(config, Header("tiny", limits(), 1), lambda: 0.0)


def test_the_header_has_the_clock_and_the_version(tmp_path: Path) -> None:
    writer = open_recorder(RecordingConfig(record=str(tmp_path / "new")), Header("tiny", limits(), 1), lambda: 7.0)
    feed(writer, some_items())
    writer.close()
    header = open_recording(tmp_path / "new").header
    assert header.clock == 7.0 and header.began > 1e9 and header.octavo and header.limits == limits()


def test_a_tenant_made_of_an_api_key_gets_another_name(tmp_path: Path) -> None:
    of_a_key = hashlib.sha256(b"sk-secret").hexdigest()
    sizes = limits(policy="fair", tenant_weights=((of_a_key, 3.0), ("web", 2.0)), max_sequences=2)
    run = RecordedRun(sizes)
    for number in range(9):
        run.admit(prompt(9, number), 8, tenant=(of_a_key, "web", "")[number % 3])
    run.finish_all()
    writer = Recorder(tmp_path, 1 << 20, Header("tiny", sizes, 1), lambda: 0.0)
    feed(writer, run)
    writer.close()
    recording = open_recording(tmp_path)
    assert replay(recording).is_equal
    names = dict.fromkeys(one.tenant for one in arrivals(recording))
    (masked,) = [name for name in names if name.startswith("key-")]
    assert list(names) == [masked, "web", ""] and recording.header.limits.tenant_weights == (
        (masked, 3.0),
        ("web", 2.0),
    )
    assert of_a_key[:12].encode() not in b"".join(map(zlib_text, [recording.segments[0].path]))


def zlib_text(path: Path) -> bytes:
    """What stands in a segment, unpacked."""
    return repr([*read_records(path), read_header(path)]).encode()
