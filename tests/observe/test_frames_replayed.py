"""The frames of a recording's replay are those that a live engine gave, and a page can be made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.scheduler import Scheduler
from octavo.observe.frames import Frame, FrameSource, FrameSpool, FrameWriter, Window
from octavo.observe.history import History
from octavo.observe.recording import Header, open_recording, replay
from tests.engine.fakes import GatedExecutor, make_limits
from tests.observe.recording_of import record
from tests.observe.test_frames import LOADS, TieredExecutor

ONLY_LIVE = ("parts", "idle", "source", "life", "began", "device")


def comparable(frames: list[Frame]) -> list[dict[str, Any]]:
    return [{key: value for key, value in frame.items() if key not in ONLY_LIVE} for frame in frames]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("load", LOADS)
def test_a_replay_gives_the_frames_of_the_live_engine(load: str, depth: int, tmp_path: Path) -> None:
    live: list[Frame] = []
    told: list[Frame] = []
    writers: list[FrameWriter] = []
    window = Window(look_s=0.0)  # a look at the queue and the pool after each step

    def watch(scheduler: Scheduler) -> History:
        history = History(scheduler)
        writers.append(FrameWriter(history, live.append, FrameSource("live", "fake"), window))
        history.add_reader(writers[-1].read)
        return history

    def watch_again(scheduler: Scheduler, header: Header) -> History:
        history = History(scheduler)
        writers.append(FrameWriter(history, told.append, FrameSource("recording", header.model), window))
        history.add_reader(writers[-1].read)
        return history

    executor = TieredExecutor() if make_limits(**LOADS[load]).host_blocks else GatedExecutor()
    record(tmp_path / "0001.octrec", executor, watch, depth, **LOADS[load])
    report = replay(open_recording(tmp_path), watch_again)
    assert report.is_equal and report.num_equal > 10
    for writer in writers:
        writer.end()
    assert comparable(told) == comparable(live)
    kinds = [frame["k"] for frame in told]
    assert kinds.count("queue") == kinds.count("blocks") == kinds.count("step") > 10
    assert kinds[0] == "head" and kinds[-1] == "end"


def test_a_spool_gives_back_what_it_was_given() -> None:
    spool, frames = FrameSpool(), [{"k": "head", "x": [1, 2.5, None, "é"]}, {"k": "end", "t": 1.0}]
    for frame in frames:
        spool.write(frame)
    assert len(spool) == 2 and list(spool) == list(spool) == json.loads(json.dumps(frames))
