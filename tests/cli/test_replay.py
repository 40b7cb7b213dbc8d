"""A real server under load, recorded: its decisions replay, also when its engine or all of it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.core.harness import limits
from tests.core.random_config import BUILT_IN
from tests.fake_server import FakeServer

from octavo.assembly import build_local
from octavo.cli import main
from octavo.cli import replay as replaying
from octavo.cli.servers import call_admin
from octavo.config.sources import config_from_keywords
from octavo.core.request import SamplingParams
from octavo.frontend.offline import OfflineEngine
from octavo.observe.recording import arrivals, open_recording, steps
from octavo.observe.recording import replay as replay_recording
from octavo.observe.recording.reader import pack_header, preamble

WAIT_S = 60.0
SCRIPT = '{"rules": [{"say": "All is well, and all will be well. ", "finish": "length", "delay_ms": 2}]}'


class ScriptedServer(FakeServer):
    program = (sys.executable, "-m", "octavo")
    common = ("--port", "0")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        monkeypatch.setenv("OCTAVO_RUN_DIR", short)
        (Path(short) / "script.json").write_text(SCRIPT)
        yield Path(short)


def start(folder: Path, *flags: str) -> ScriptedServer:
    record = ("--record", str(folder / "rec"), "--max-num-seqs", "4")
    return ScriptedServer(f"scripted:{folder}/script.json", folder / "log", *record, *flags)


def ask_many(server: FakeServer, count: int, max_tokens: int, every: int = 4) -> list[threading.Thread]:
    """So many requests at once, of several lengths and choices."""

    def post(number: int) -> None:
        prompt, several = "tell " * (1 + number * 7 % 40), 1 + (number % every == every - 1)
        body = {"prompt": prompt, "max_tokens": max_tokens + number, "n": several}
        with contextlib.suppress(OSError):
            server.post("/v1/completions", body, timeout_s=WAIT_S)

    threads = [threading.Thread(target=post, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def statistics(server: FakeServer) -> Any:
    return call_admin(server.admin, "statistics")


def wait_for_tokens(server: FakeServer, least: int) -> None:
    """Until the engine has given so many."""
    end = time.monotonic() + WAIT_S
    while statistics(server)["scheduler"]["num_output_tokens"] < least:
        assert time.monotonic() < end


@pytest.mark.parametrize("policy", BUILT_IN)
def test_an_engine_under_load_replays_for_each_policy(policy: str, folder: Path) -> None:
    settings = {"policy": policy, "record": str(folder / "rec"), "max_num_seqs": 4, "num_gpu_blocks_override": 60}
    engine = build_local(config_from_keywords(f"scripted:{folder}/script.json", settings))
    params = [SamplingParams(max_tokens=20 + 9 * number, n=1 + (number % 4 == 0)) for number in range(12)]
    offline = OfflineEngine(engine.sessions)
    outputs = offline.generate(["tell " * (1 + n * 7 % 40) for n in range(12)], params)
    offline.close()
    assert all(output.finished for output in outputs)
    recording = open_recording(folder / "rec")
    report = replay_recording(recording)
    assert report.is_equal and report.num_requests == 12 and report.num_plans > 100
    assert recording.segments[0].end_reason == "the engine was stopped" and recording.header.limits.policy == policy
    found = arrivals(recording)
    assert sum(sum(one.output_tokens) for one in found) == report.num_tokens
    assert all(one.end is not None and one.first_token is not None for one in found)
    assert all(step.planned >= step.plan.now and step.committed >= step.collected for step in steps(recording))


def test_a_server_records_and_replays(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start(folder, "--policy", "fair") as server:
        for thread in ask_many(server, 10, 30):
            thread.join(WAIT_S)
        told = statistics(server)["recording"]
        assert told["is_recording"] is True
        server.end()
    assert main(["replay", str(folder / "rec"), "--what-if", "policy=fcfs,max-num-seqs=2", "--what-if", "depth=2"]) == 0
    shown = capsys.readouterr().out
    assert "equal: all" in shown and "policy fair" in shown and "0001.octrec ended: the engine was stopped" in shown
    assert "what-if 1: policy=fcfs,max-num-seqs=2" in shown and "ttft p99" in shown and "requests served" in shown
    assert main(["replay", str(folder / "rec"), "--json", "-"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["is_equal"] and facts["replay"]["num_requests"] == 10 and facts["policy"] == "fair"


def test_each_life_of_an_engine_that_is_killed_replays(folder: Path) -> None:
    with start(folder) as server:
        threads = ask_many(server, 8, 400, every=9)  # several choices begin anew
        wait_for_tokens(server, 300)
        os.kill(server.pid("engine"), signal.SIGKILL)
        for thread in threads:
            thread.join(WAIT_S)
        server.end()
    recording = open_recording(folder / "rec")
    report = replay_recording(recording)
    assert report.is_equal and report.num_segments == 2
    assert report.ends == ["cut off", "the engine was stopped"]
    resumed = [one for one in arrivals(recording) if one.is_resumed]
    assert resumed and all(one.segment_index == 1 and one.emitted_tokens > 0 for one in resumed)


def test_a_server_that_is_killed_leaves_a_recording_that_replays(folder: Path) -> None:
    with start(folder) as server:
        ask_many(server, 8, 4000)
        wait_for_tokens(server, 100)
        end = time.monotonic() + WAIT_S
        while not statistics(server)["recording"]["bytes"] > 3000:  # something was written
            assert time.monotonic() < end
        os.kill(server.pid("engine"), signal.SIGKILL)
        server.process.kill()
    report = replay_recording(open_recording(folder / "rec"))
    assert report.is_equal and report.num_plans > 10 and report.ends[0] == "cut off"


def test_a_folder_that_cannot_be_written_to_keeps_the_server_from_starting(folder: Path) -> None:
    (folder / "rec").write_text("a file")
    with pytest.raises(AssertionError, match=r"--record .*cannot be written to.*give another folder"):
        start(folder)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("polcy=fair", "did you mean 'policy'"),
        ("policy=fairest", "unknown policy 'fairest'"),
        ("max_sequences", "give NAME=VALUE"),
        ("max_sequences=0", "max-num-seqs of --what-if is '0'"),
        ("vocab_size=3", "it changes no decision"),
        ("tenant_weights=3", "give octavo simulate --workload DIR --tenant-weight instead"),
        ("router=best", "give one of"),
        ("rate_scale=-1", "give a number above 0"),
        ("", "give at least one NAME=VALUE"),
    ],
)
def test_a_what_if_that_cannot_be_is_refused_with_what_may_be(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.observe.recording.test_segments import make_segment

    make_segment(tmp_path)
    assert main(["replay", str(tmp_path), "--what-if", words]) == 2
    assert message in capsys.readouterr().err


def test_simulations_in_several_processes_are_those_of_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.simulator.test_recorded import recorded

    folder, found = recorded(limits(num_blocks=64, max_sequences=4), 1, tmp_path), []
    what_if = ("policy=fair,max_num_seqs=2", "rate_scale=2", "max_batch_tokens=8")
    words = [word for text in what_if for word in ("--what-if", text)]
    for cores, many in ((2, 0), (8, 0), (2, 1 << 30), (1, 0)):
        monkeypatch.setattr(replaying, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setattr(replaying, "MANY_BYTES", many)
        assert main(["replay", str(folder), "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert list(found[0]["runs"]) == ["recorded", "simulated", *what_if]
    assert found[0]["runs"]["simulated"] != found[0]["runs"][what_if[0]]
    assert found == [found[0]] * 4


def test_a_difference_is_shown_and_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.core.harness import limits, prompt
    from tests.observe.recording.driving import RecordedRun, write_segment

    from octavo.observe.recording.format import Header

    run = RecordedRun(limits())
    run.admit(prompt(9), 6, request_id="slow")
    run.finish_all()
    write_segment(tmp_path / "0001.octrec", Header("tiny", limits(max_batch_tokens=4), 1), run.lives[0])
    assert main(["replay", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "NOT EQUAL after 0 equal plans: step 0 of 0001.octrec" in shown and "row of slow (slot 0)" in shown


def test_no_recording_is_an_error_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path)]) == 2
    assert "holds no recording" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["theirs", "os:path"])
def test_a_policy_that_is_not_here_is_told_of(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.observe.recording.test_segments import make_segment

    path = make_segment(tmp_path)
    segment = open_recording(path).segments[0]
    items = path.read_bytes()[len(preamble()) + len(pack_header(segment.header)) :]
    path.write_bytes(preamble() + pack_header(replace(segment.header, limits=limits(policy=name))) + items)
    assert main(["replay", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "the engine ran under a policy that is not here" in told and name in told and "plug-in" in told
