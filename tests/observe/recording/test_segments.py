"""Files of a recording: cut anywhere they read up to the last whole frame; what is no recording is refused in words."""

from __future__ import annotations

import struct
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.plan import StepPlan
from octavo.observe.recording import open_recording, replay
from octavo.observe.recording.format import Header, RecordingError, RowDeltas
from octavo.observe.recording.reader import MARK, PREAMBLE_BYTES, pack_header, preamble
from tests.core.harness import limits, prompt
from tests.observe.recording.driving import RecordedRun, write_segment


def make_segment(folder: Path, per_frame: int = 4) -> Path:
    """A short recorded run as one segment of small frames."""
    run = RecordedRun(limits(num_blocks=12))
    for number in range(4):
        run.admit(prompt(5 + number, number), 6, n=1 + number % 2)
        run.steps(2)
    run.finish_all()
    path = folder / "0001.octrec"
    write_segment(path, Header("tiny", run.limits, 1), run.lives[0], per_frame)
    return path


def test_a_file_cut_at_every_byte_reads_up_to_its_last_whole_frame(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    whole, calls = path.read_bytes(), list(open_recording(path).segments[0].calls())
    first_frame = len(preamble()) + len(pack_header(open_recording(path).header))
    num_read = []
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        if end < first_frame:
            with pytest.raises(RecordingError, match="nothing was recorded"):
                open_recording(path)
            continue
        recording = open_recording(path)
        read = list(recording.segments[0].calls())
        assert read == calls[: len(read)] and recording.segments[0].end_reason == "cut off"
        num_read.append(len(read))
        if end % 97 == 0:
            assert replay(recording).is_equal
    assert num_read == sorted(num_read) and num_read[0] == 0 and num_read[-1] >= len(calls) - 4


def test_a_damaged_byte_ends_the_reading_in_front_of_its_frame(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    whole, calls = path.read_bytes(), list(open_recording(path).segments[0].calls())
    first_frame = len(preamble()) + len(pack_header(open_recording(path).header))
    for place in range(first_frame, len(whole), 5):
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        segment = open_recording(path).segments[0]
        read = list(segment.calls())
        assert read == calls[: len(read)] and segment.end_reason == "cut off"


def test_a_whole_segment_says_how_it_ended(tmp_path: Path) -> None:
    segment = open_recording(make_segment(tmp_path)).segments[0]
    assert list(segment.calls()) and segment.end_reason == "the engine was stopped"


def test_another_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    data = path.read_bytes()
    path.write_bytes(MARK + struct.pack("<H", 7) + data[PREAMBLE_BYTES:])
    with pytest.raises(
        RecordingError, match="format 7, this Octavo reads 2 to 3: read it with the version that wrote it"
    ):
        open_recording(tmp_path)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="does not exist"):
        open_recording(tmp_path / "nowhere")
    with pytest.raises(RecordingError, match="holds no recording"):
        open_recording(tmp_path)
    (tmp_path / "notes.txt").write_text("something else altogether")
    with pytest.raises(RecordingError, match="is no recording"):
        open_recording(tmp_path / "notes.txt")


def test_lives_are_read_in_order_and_empty_files_are_left_out(tmp_path: Path) -> None:
    first = make_segment(tmp_path)
    (tmp_path / "0002.octrec").write_bytes(first.read_bytes()[:5])
    (tmp_path / "0003.octrec").write_bytes(first.read_bytes())
    recording = open_recording(tmp_path)
    assert [segment.path.name for segment in recording.segments] == ["0001.octrec", "0003.octrec"]
    report = replay(recording)
    assert report.is_equal and report.num_segments == 2 and report.num_requests == 8


def test_the_first_difference_is_shown_with_its_column_and_request(tmp_path: Path) -> None:
    run = RecordedRun(limits())
    run.admit(prompt(9), 6, request_id="slow")
    run.steps(3)
    run.finish_all()
    write_segment(tmp_path / "0001.octrec", Header("tiny", limits(max_batch_tokens=4), 1), run.lives[0])
    report = replay(open_recording(tmp_path))
    assert report.difference is not None and report.difference.step == 0
    assert (
        "row of slow (slot 0): expected positions 0 to 9, flags 1, 0 drafts, got positions 0 to 4"
        in (report.difference.lines[0])
    )


_ROWS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 2**31 - 99), st.sampled_from((0, 1, 1, 1, 1, 7)), st.integers(0, 63)),
    max_size=10,
    unique_by=lambda row: row[0],
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(_ROWS, max_size=6))
def test_rows_come_back_from_their_differences(plans: list[list[tuple[int, int, int, int]]]) -> None:
    writer, reader, rare = RowDeltas(), RowDeltas(), RowDeltas()
    for rows in plans:
        columns = [array("i", [row[place] for row in rows]) for place in range(4)]
        encoded = writer.encode(StepPlan(0, 0.0, *columns))
        assert list(reader.decode(encoded)) == columns
        rare.advance(encoded)
        if len(rows) % 2:  # the rows between are never made
            assert list(rare.rows()) == columns


def test_rows_that_go_on_cost_nothing() -> None:
    rows = RowDeltas()
    plan = StepPlan(0, 0.0, array("i", [4, 2]), array("i", [7, 0]), array("i", [1, 12]), array("i", [1, 1]))
    assert rows.encode(plan) is not None
    after = StepPlan(1, 0.0, array("i", [4, 2]), array("i", [8, 12]), array("i", [1, 1]), array("i", [1, 1]))
    assert rows.encode(after) is None
