"""Comparisons: turns and freezing, dropped peers, ratios, the two kinds of peers as processes, the command's checks."""

from __future__ import annotations

import argparse
import ast
import asyncio
import io
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tests.bench import test_online
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.bench import peer_host, peers
from octavo.bench.comparison import Comparison, ComparisonTask, make_comparison_report, show_comparison
from octavo.bench.peers import EnginePeer, PeerRun, PeerSetup, ServerPeer
from octavo.bench.processes import BusyNeighbour
from octavo.bench.workload import draw_workload
from octavo.cli.bench_servers import add_compare_arguments, make_peers, read_task
from octavo.cli.flags import Parser
from octavo.errors import ConfigError, EngineError

FAKE = str(Path(__file__).with_name("fake_engine.py").resolve())
SETUP = PeerSetup(2, 32, 1024)


class FakePeer:
    def __init__(self, name, speed, log, *, is_server=False, fails_at=None):
        self.name, self.speed, self.log, self.is_server, self.fails_at = name, speed, log, is_server, fails_at
        self.startup_s, self.facts = 1.0, {"dtype": "bf16"}
        self.num_runs = 0

    async def start(self):
        self.log.append((self.name, "start"))

    async def run(self, items, at_once):
        self.num_runs += 1
        if self.num_runs == self.fails_at:
            raise EngineError(f"{self.name} broke")
        self.log.append((self.name, "run", items[0].prompt_token_ids[0], at_once))
        return PeerRun(sum(item.max_tokens for item in items) / self.speed, [(1 / self.speed, 2 / self.speed, 2)] * 3)

    def freeze(self):
        self.log.append((self.name, "freeze"))

    def thaw(self):
        self.log.append((self.name, "thaw"))

    def end(self):
        self.log.append((self.name, "end"))
        return 2**30


class FakeNeighbour:
    """Halves the speed of the peers while it is thawed."""

    def __init__(self, peers, log):
        self.peers, self.log, self.is_thawed = peers, log, False

    def thaw(self):
        self.is_thawed = True
        for peer in self.peers:
            peer.speed /= 2

    def freeze(self):
        if self.is_thawed:
            self.is_thawed = False
            for peer in self.peers:
                peer.speed *= 2

    def end(self):
        assert not self.is_thawed
        self.log.append(("neighbour", "end"))


def _compare(peers, rounds=2, neighbours=(False,)):
    tasks = [ComparisonTask(draw_workload(5, 6, 4, 90, 0), 3, neighbour) for neighbour in neighbours]
    comparison = Comparison(peers, tasks, rounds)
    told = []
    asyncio.run(comparison.run(told.append))
    return make_comparison_report(comparison.results, tasks, rounds), told, comparison


def test_peers_take_turns_and_only_one_runs() -> None:
    log = []
    report, told, comparison = _compare([FakePeer("octavo", 4.0, log), FakePeer("vllm", 2.0, log)])
    runs = [entry for entry in log if entry[1] == "run"]
    assert [entry[0] for entry in runs] == ["octavo", "vllm", "octavo", "vllm", "octavo", "vllm"]
    assert [entry[2] for entry in runs[2:]] == [101, 101, 102, 102], "each pass has its own first id, the same for both"
    assert len(told) == comparison.num_turns
    thawed = set()
    for name, what, *_ in log:
        if what == "thaw":
            thawed.add(name)
        elif what == "freeze":
            thawed.discard(name)
        assert len(thawed) <= 1
    vllm = report["peers"][1]["workloads"]["random-5x6+4-seed0@3"]
    assert vllm["ratios"]["output_tokens_per_s"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert vllm["ratios"]["ttft_ms"]["median"] == 2.0, "twice as fast, so also above 1"
    assert "ratios" not in report["peers"][0]["workloads"]["random-5x6+4-seed0@3"]
    assert json.dumps(report) and report["peers"][0]["peak_memory_bytes"] == 2**30


def test_servers_are_compared_with_the_server() -> None:
    log = []
    ours = [FakePeer("octavo", 4.0, log), FakePeer("octavo server", 3.0, log, is_server=True)]
    ours[0].facts |= {"quantization": "q4_1"}
    report, _, _ = _compare([*ours, FakePeer("llama.cpp", 1.0, log, is_server=True)])
    result = report["peers"][2]["workloads"]["random-5x6+4-seed0@3"]
    assert result["ratios"]["output_tokens_per_s"]["median"] == 3.0
    out = io.StringIO()
    show_comparison(Console(file=out, width=120), report)
    weights = [line.split()[-3] for line in out.getvalue().splitlines()[-3:]]
    assert weights == ["q4_1", "bf16", "bf16"], "the code of weights, or else their type"


def test_a_peer_that_fails_is_left_out_and_ended() -> None:
    log = []
    report, _, _ = _compare([FakePeer("octavo", 4.0, log), FakePeer("vllm", 2.0, log, fails_at=2)])
    assert report["peers"][1]["error"] == "vllm broke"
    assert report["peers"][1]["workloads"] == {}
    assert len([entry for entry in log if entry[:2] == ("octavo", "run")]) == 3


@pytest.mark.parametrize("fails_at", [None, 3])
def test_rounds_beside_a_busy_neighbour_follow_those_alone(monkeypatch, fails_at) -> None:
    log = []
    fakes = [FakePeer("octavo", 4.0, log), FakePeer("vllm", 2.0, log, fails_at=fails_at)]
    monkeypatch.setattr("octavo.bench.comparison.BusyNeighbour", lambda: FakeNeighbour(fakes, log))
    report, _, _ = _compare(fakes, neighbours=(False, True))
    assert log[-1] == ("neighbour", "end")
    alone, beside = (report["peers"][0]["workloads"][name] for name in report["workloads"])
    assert (alone["output_tokens_per_s"], beside["output_tokens_per_s"]) == pytest.approx((1.2, 0.6))
    assert beside["of_alone"] == {"median": 0.5, "min": 0.5, "max": 0.5} and "of_alone" not in alone
    assert len(report["peers"][1]["workloads"]) == (2 if fails_at is None else 1)
    out = io.StringIO()
    show_comparison(Console(file=out, width=140), report)
    assert "busy neighbour" in out.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_busy_neighbour_uses_one_core_while_it_is_thawed() -> None:
    neighbour = BusyNeighbour()
    try:
        pid = neighbour.process.pid
        assert os.sched_getaffinity(pid) == {max(os.sched_getaffinity(0))}
        for act, states in ((neighbour.freeze, "T"), (neighbour.thaw, "R"), (neighbour.freeze, "T")):
            act()
            deadline = time.monotonic() + 60
            while (state := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) not in states:
                assert time.monotonic() < deadline, state
                time.sleep(0.01)
    finally:
        neighbour.end()
    assert neighbour.returncode is not None


def test_runs_add_up_over_groups() -> None:
    run = PeerRun()
    run.add(PeerRun(1.0, [(0.1, 0.5, 5)]))
    run.add(PeerRun(1.0, [(0.3, 0.3, 1)]))
    assert run.figures() == {"output_tokens_per_s": 3.0, "ttft_ms": pytest.approx(100), "token_ms": pytest.approx(100)}


def _engine(options, timeout_s=30.0):
    return EnginePeer("fake", [sys.executable, FAKE, json.dumps(options)], timeout_s=timeout_s)


def test_an_engine_in_its_own_python_is_timed_there() -> None:
    async def work():
        peer = _engine({})
        try:
            await peer.start()
            peer.freeze()
            peer.thaw()
            runs = [await peer.run(draw_workload(3, 4, 5, 90, 0).groups[0], 2) for _ in range(2)]
        finally:
            peak = peer.end()
        assert peer.end() == peak
        return peer, runs, peak

    peer, runs, peak = asyncio.run(work())
    assert (peer.facts["engine"], runs[1].num_output_tokens) == ("fake", 15)
    assert runs[0].requests[0][2] == 5 and peer.startup_s > 0
    assert peak > 2**20 or sys.platform == "darwin"


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("opening", "failed: ValueError: no weights"),
        ("running", "failed: RuntimeError: out of luck"),
        ("dying", "ended"),
        ("hanging", "did not answer within"),
        ("short", "fake gave 4 tokens of 5, or other lengths"),
        ("fewer", "fake answered 0 requests of 1"),
    ],
)
def test_an_engine_that_fails_is_told(fails, words) -> None:
    async def work():
        peer = _engine({"fails": fails}, 1.5 if fails == "hanging" else 30.0)
        try:
            await peer.start()
            await peer.run(draw_workload(1, 4, 5, 90, 0).groups[0], 2)
        finally:
            peer.end()

    with pytest.raises(EngineError, match=words):
        asyncio.run(work())


def test_an_environment_that_is_not_there() -> None:
    peer = EnginePeer("fake", ["/no/python", FAKE])
    with pytest.raises(EngineError, match="cannot be started"):
        asyncio.run(peer.start())


def test_a_server_is_driven_over_http() -> None:
    async def work():
        peer = ServerPeer("fake", [sys.executable, test_online.FAKE, "{port}"], timeout_s=30.0)
        try:
            await peer.start()
            return await peer.run(draw_workload(3, 4, 5, 90, 0).groups[0], 2)
        finally:
            peer.end()

    run = asyncio.run(work())
    assert run.num_output_tokens == 15 and len(run.requests) == 3


@pytest.mark.parametrize(
    ("behaviour", "words"), [("short", "gave 4 tokens of 5"), ("bare", "did not report the usage"), ("error", "failed")]
)
def test_a_server_that_does_not_give_what_was_asked_for_is_told(behaviour, words) -> None:
    async def work():
        peer = ServerPeer("fake", [sys.executable, test_online.FAKE, "{port}", behaviour], timeout_s=30.0)
        try:
            await peer.start()
            await peer.run(draw_workload(3, 4, 5, 90, 0).groups[0], 2)
        finally:
            peer.end()

    with pytest.raises(EngineError, match=words):
        asyncio.run(work())


def test_this_engine_runs_under_the_same_protocol(tmp_path) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    options = {"model": model, "at_once": 4, "settings": {"threads": 1, "kv_cache_tokens": 1024}}
    drawn = draw_workload(3, 4, 5, 90, 0).groups[0]

    async def work():
        peer = EnginePeer("octavo", [sys.executable, peers.HOST, "octavo", json.dumps(options)])
        items = [replace(item, max_tokens=count) for item, count in zip(drawn, (9, 2, 4), strict=True)]
        try:
            await peer.start()
            return peer, await peer.run(items, 2)
        finally:
            peer.end()

    peer, run = asyncio.run(work())
    assert run.num_output_tokens == 15
    assert peer.facts["threads"] == 1


def test_the_script_for_other_environments_imports_the_standard_library_alone() -> None:
    tree = ast.parse(Path(peer_host.__file__).read_text())
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(module.split(".")[0] in sys.stdlib_module_names for module in names), names


def test_adapters_say_how_their_peer_is_started(tmp_path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    python = str(tmp_path / "bin" / "python")
    vllm = peers.vllm(python, "w", SETUP)
    assert vllm.env["LD_PRELOAD"].endswith("libiomp5.so")
    assert json.loads(vllm.command[3])["at_once"] == 32
    llama = peers.llama_server("llama-server", "m.gguf", SETUP)
    assert llama.command[llama.command.index("-c") + 1] == str(32 * 1024)
    assert json.loads(peers.transformers(python, "w", SETUP).command[3])["threads"] == 2
    assert peers.mistralrs(python, "w.gguf", SETUP).command[2] == "mistralrs"


def _arguments(*words) -> argparse.Namespace:
    parser = Parser(prog="x")
    add_compare_arguments(parser)
    return parser.parse(words)


def test_peers_are_those_whose_places_are_given(tmp_path) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    here = sys.executable
    words = [
        model,
        "--vllm-python",
        here,
        "--llama-server",
        here,
        "--weights",
        model,
        "--gguf",
        model,
        "--threads",
        "3",
    ]
    tasks = [ComparisonTask(draw_workload(2, 10, 10, 90, 0), 4)]
    made = make_peers(_arguments(*words), tasks)
    assert [peer.name for peer in made] == ["octavo", "vllm", "octavo server", "llama.cpp"]
    assert json.loads(made[1].command[3]) == {
        "model": model, "threads": 3, "at_once": 4, "max_len": 64, "dtype": "bfloat16",
    }  # fmt: skip
    assert [peer.name for peer in make_peers(_arguments(model, "--own-server"), tasks)] == ["octavo", "octavo server"]


def test_tasks_are_files_with_their_concurrency(tmp_path) -> None:
    path = tmp_path / "w.json"
    path.write_text(json.dumps([[{"prompt_token_ids": [5, 6], "max_tokens": 2}] * 3] * 2))
    task = read_task(f"{path}@2", 1, None)
    assert (task.at_once, task.workload.num_requests, task.name) == (2, 2, "w.json@2")
    assert read_task(str(path), None, 1).at_once == 32
    for word in (f"{path}@0", f"{path}@x"):
        with pytest.raises(ConfigError, match="at least 1"):
            read_task(word, None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no --workload is given"),
        (["--max-requests", "0"], "--max-requests is 0; give a whole number of at least 1"),
        (["--workload", "/no/w.json"], "workload /no/w.json cannot be read"),
        (["--workload", "W", "--vllm-python", "/no/python", "--weights", "."], "/no/python does not exist"),
        (["--workload", "W", "--vllm-python", sys.executable], "vLLM needs weights; give --weights"),
        (["--workload", "W", "--rounds", "0"], "--rounds is 0"),
    ],
)
def test_mistakes_are_told(capsys, tmp_path, words, message) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    path = tmp_path / "w.json"
    path.write_text(json.dumps([{"prompt_token_ids": [5, 6], "max_tokens": 2}]))
    words = [str(path) if word == "W" else word for word in words]
    assert cli.main(["bench", "compare", model, *words]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {message}")
