"""The online bench on a played server: arrivals, parsing, times, bounds, failures, the report; a server's process."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
import re
import statistics
import sys
from array import array
from pathlib import Path

import pytest
from rich.console import Console
from tests.bench.fake_server import FakeServer

from octavo import cli
from octavo.bench.completion_client import (
    CompletionClient,
    CompletionResult,
    EventParser,
    ProtocolError,
    Target,
    first_model,
    read_step_totals,
    step_split,
)
from octavo.bench.online import Arrivals, Objectives, OnlineLoad, OnlineRun, make_online_report, run_online, show_online
from octavo.bench.processes import ServerProcess
from octavo.bench.workload import draw_workload, read_texts, salted
from octavo.errors import ConfigError, EngineError

FACTS = {"server": "s", "workload": "w"}
FAKE = str(Path(__file__).with_name("fake_server.py"))


def _times(count, **options):
    return list(itertools.islice(Arrivals(**options).times(), count))


def test_arrivals_have_their_rate_and_spread() -> None:
    gaps = {}
    for kind, shape in (("poisson", None), ("fixed", None), ("bursty", None), ("poisson", 4.0)):
        times = _times(20_001, rate=10.0, kind=kind, shape=shape, seed=1)
        gaps[kind, shape] = [after - before for before, after in itertools.pairwise(times)]
        assert times[0] == 0.0
        assert statistics.mean(gaps[kind, shape]) == pytest.approx(0.1, rel=0.1)
    spread = {key: statistics.pstdev(values) / statistics.mean(values) for key, values in gaps.items()}
    assert spread["fixed", None] == pytest.approx(0, abs=1e-6)
    assert spread["poisson", None] == pytest.approx(1, rel=0.05)
    assert spread["bursty", None] == pytest.approx(2, rel=0.1)
    assert spread["poisson", 4.0] == pytest.approx(0.5, rel=0.05)


def test_arrivals_depend_on_the_seed_alone_and_inf_has_no_gaps() -> None:
    assert _times(9, rate=2.0, seed=3) == _times(9, rate=2.0, seed=3) != _times(9, rate=2.0, seed=4)
    assert _times(3) == [0, 0, 0]


@pytest.mark.parametrize("options", [{"rate": 0}, {"rate": math.nan}, {"kind": "x"}, {"shape": 0.0}, {"rate": -1}])
def test_bad_arrivals(options) -> None:
    with pytest.raises(ConfigError, match="give"):
        Arrivals(**options)


def test_objectives() -> None:
    objectives = Objectives.read(["ttft:500", "tpot:50"])
    assert objectives.are_met({"ttft": 0.5, "tpot": 0.05, "e2e": 9})
    assert not objectives.are_met({"ttft": 0.6, "tpot": 0.05, "e2e": 9})
    assert Objectives.read([]).are_met({"ttft": 9, "tpot": 9, "e2e": 9})
    for name in ("ttft", "tpot"):  # a time that is not known keeps no bound
        assert not objectives.are_met({"ttft": 0.5, "tpot": 0.05, "e2e": 9, name: math.nan})
    for words in (["ttft"], ["x:1"], ["ttft:-1"], ["ttft:a"], ["ttft:1", "ttft:2"], ["e2e:inf"]):
        with pytest.raises(ConfigError, match="--goodput"):
            Objectives.read(words)


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_come_out_whole_however_the_bytes_come(size) -> None:
    body = b": hi\n\ndata: a\n\ndata: b\r\n\r\ndata: c\ndata: d\n\n"
    chunks = b"".join(b"%X;x=1\r\n%s\r\n" % (len(part), part) for part in (body[:9], body[9:11], body[11:]))
    data, parser, events = _HEAD + chunks + b"0\r\n\r\n", EventParser(), []
    for start in range(0, len(data), size):
        events += parser.feed(data[start : start + size])
    assert events == [b"a", b"b", b"c\nd"]
    assert parser.status == 200 and parser.is_ended


@pytest.mark.parametrize("data", [b"SSH-2.0\r\n\r\n", _HEAD + b"zz\r\n", b"x" * 70_000, b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_no_response_is_told(data) -> None:
    with pytest.raises(ProtocolError):
        EventParser().feed(data)


async def _run(behaviour="stream", *, num=5, load=None, timeout_s=5.0, num_output=4):
    async with FakeServer(behaviour) as server:
        client = CompletionClient(Target(server.url, "tiny", timeout_s=timeout_s))
        bodies = [client.body(array("i", [number, 2, 3]), num_output) for number in range(num)]
        return await run_online(client, bodies, load or OnlineLoad(Arrivals())), server


def test_every_request_is_timed() -> None:
    run, server = asyncio.run(_run())
    assert run.failures() == {}
    assert (run.num_output_tokens, run.num_prompt_tokens, len(run.done)) == (20, 15, 5)
    assert len(run.times_s("ttft")) == len(run.times_s("e2e")) == len(run.times_s("tpot")) == 5
    assert len(run.between_chunks_s()) == 15
    assert all(0 < first <= whole for first, whole in zip(run.times_s("ttft"), run.times_s("e2e"), strict=True))
    body = server.bodies[0]
    assert (body["ignore_eos"], body["stream"], body["temperature"], body["max_tokens"]) == (True, True, 0, 4)
    assert sorted(body["prompt"][0] for body in server.bodies) == [0, 1, 2, 3, 4]


def test_a_server_without_usage_and_chunks_is_understood() -> None:
    run, _ = asyncio.run(_run("bare"))
    assert (run.failures(), run.num_output_tokens) == ({}, 20)


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ("plain", "failed", "status 400: bad"),
        ("cut", "lost", "without a finish reason"),
        ("error", "failed", "the engine died"),
        ("silent", "timeout", "no end within"),
    ],
)
def test_failures_are_counted_by_kind(behaviour, kind, words) -> None:
    run, _ = asyncio.run(_run(behaviour, num=2, timeout_s=0.2 if behaviour == "silent" else 5.0))
    assert run.failures() == {kind: 2}
    assert all(words in answer.error for answer in run.answers)
    report = make_online_report(FACTS, OnlineLoad(Arrivals()), Objectives.read([]), run)
    assert (report["requests_failed"], report["requests_done"], report["output_tokens"]) == (2, 0, 0)


def test_a_server_that_is_not_there_refuses() -> None:
    async def work():
        async with FakeServer() as server:
            url = server.url
        client = CompletionClient(Target(url))
        with pytest.raises(EngineError, match=r"no server answers at http://127\.0\.0\.1:\d+ \(connection refused\)"):
            await first_model(client)
        return await client.send(client.body("hi", 1))

    assert asyncio.run(work()).kind == "refused"


def test_concurrency_is_bounded() -> None:
    run, server = asyncio.run(_run(num=9, load=OnlineLoad(Arrivals(), max_concurrency=2)))
    assert server.max_open <= 2 and run.max_open <= 2 and len(run.done) == 9


def test_sending_ends_with_the_duration() -> None:
    load = OnlineLoad(Arrivals(rate=100.0, kind="fixed"), duration_s=0.035)
    run, _ = asyncio.run(_run(num=50, load=load))
    assert len(run.answers) + run.num_not_sent == 50
    assert 1 <= len(run.answers) <= 4


def test_open_loop_counts_from_the_arrival_and_says_how_late_it_was() -> None:
    answer = CompletionResult(10.5, array("d", [11.0, 11.5, 12.5]), usage_tokens=4, is_finished=True)
    run = OnlineRun([answer], [10.0], duration_s=2.0)
    assert (run.times_s("ttft"), run.late_s(), run.times_s("e2e")) == ([1.0], [0.5], [2.5])
    assert run.times_s("tpot") == [0.5]
    assert run.between_chunks_s() == [0.5, 1.0]
    report = make_online_report(FACTS, OnlineLoad(Arrivals(2.0)), Objectives.read(["ttft:900"]), run)
    assert (report["goodput_share"], report["output_tokens_per_s"]) == (0, 2.0)


@pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:80", "http://", "http://x:99999"])
def test_bad_addresses(url) -> None:
    with pytest.raises(ConfigError, match="--url"):
        CompletionClient(Target(url))


def test_addresses_keep_their_path_and_lose_v1() -> None:
    assert Target("https://h/a/v1/").address() == ("h", 443, True, "/a")
    assert Target("http://[::1]:7").address() == ("::1", 7, False, "")


def test_texts(tmp_path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("one\n\n two \n")
    assert read_texts(path) == ["one", "two"]
    path.write_text("\n")
    with pytest.raises(ConfigError, match="no lines"):
        read_texts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_texts(tmp_path / "none")


def test_salt_changes_the_first_id_alone() -> None:
    workload = draw_workload(3, 5, 2, 50, 0)
    first, second = salted(workload, 1), salted(workload, 2)
    assert {item.prompt_token_ids[0] for item in first.groups[0]} == {101}
    assert {item.prompt_token_ids[0] for item in second.groups[0]} == {102}
    assert [item.prompt_token_ids[1:] for item in first.groups[0]] == [
        item.prompt_token_ids[1:] for item in workload.groups[0]
    ]
    assert first.num_output_tokens == workload.num_output_tokens


def test_step_split_of_a_server_that_tells_it() -> None:
    text = 'octavo_steps_total{model="m"} 4.0\nocta_x 1\n' + "".join(
        f'octavo_step_seconds_total{{model="m",part="{part}"}} {value}\n'
        for part, value in (("forward", 0.6), ("sample", 0.1), ("step", 1.0))
    )
    after = read_step_totals(text)
    before = {"steps": 2.0, "forward": 0.2, "sample": 0.1, "step": 0.5}
    assert step_split(before, after) == {
        "steps": 2,
        "step_ms": {"total": 250.0, "forward": 200.0, "sample": 0.0, "other": 50.0},
    }
    assert read_step_totals("nothing") == {} == step_split({}, after)


def test_a_process_is_started_watched_and_ended() -> None:
    async def work():
        server = await ServerProcess.start([sys.executable, FAKE, "{port}"])
        try:
            assert re.search(r"serving on (\d+)", server.output())[1] in server.base_url
            server.freeze()
            server.thaw()
            client = CompletionClient(Target(server.base_url))
            assert await first_model(client) == "tiny"
        finally:
            peak = server.end()
        assert server.members() == []
        assert server.end() == peak
        return peak, server.startup_s

    peak, startup_s = asyncio.run(work())
    assert startup_s > 0
    assert peak > 2**20 or sys.platform == "darwin"


def test_a_server_that_cannot_start_tells_its_last_words() -> None:
    words = [sys.executable, "-c", "import sys; sys.exit('no such weights')"]
    with pytest.raises(EngineError, match="status 1 before it was ready\nno such weights"):
        asyncio.run(ServerProcess.start(words))
    with pytest.raises(EngineError, match="cannot be started"):
        asyncio.run(ServerProcess.start(["/nowhere/server"]))


def _command(words):
    async def work():
        async with FakeServer() as server:
            return await asyncio.to_thread(cli.main, ["bench", "online", "--url", server.url, *words])

    return asyncio.run(work())


def test_the_command_measures_a_running_server(capsys) -> None:
    words = ["--num-prompts", "6", "--output-len", "3", "--request-rate", "500", "--goodput", "e2e:60000"]
    assert _command(words) == 0
    out = capsys.readouterr().out
    assert "Latency, ms" in out and "{" not in out
    assert _command([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests_done"], report["output_tokens"], report["model"]) == (6, 18, "tiny")
    assert report["goodput_share"] == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "h", "model"], "http://h is a running server"),
        (["--request-rate", "0"], "--request-rate is 0"),
        (["--duration", "0"], "--duration is 0"),
        (["--goodput", "x:1"], "--goodput is 'x:1'"),
        (["--extra-body", "[]", "--url", "http://h"], "--extra-body is not a JSON object"),
        (["--max-concurrency", "-1"], "--max-concurrency is -1"),
        (["--text", "a", "--workload", "b"], "--text and --workload"),
    ],
)
def test_mistakes_are_told(capsys, words, message) -> None:
    assert cli.main(["bench", "online", *words]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_the_tables_say_what_failed() -> None:
    answer = CompletionResult(1.0, kind="lost", error="x")
    run = OnlineRun([answer], [1.0], duration_s=1.0)
    facts = {**FACTS, "model": "m", "dtype": "f", "startup_s": 1.0, "peak_memory_bytes": 2**30}
    report = make_online_report(facts, OnlineLoad(Arrivals()), Objectives.read(["ttft:5"]), run)
    out = io.StringIO()
    show_online(Console(file=out, width=120), report)
    assert "0 of 1, 1 lost" in out.getvalue() and "goodput" in out.getvalue()
