"""`octavo explain`: the story of a request in words, over the admin socket and over HTTP; all open ones; --follow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.core.harness import limits
from tests.fake_server import FakeServer
from tests.observe.test_history import Bench
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.cli import explain
from octavo.cli.explain import open_lines, request_lines

QUEUE = {"num_waiting": 2, "max_waiting": 32, "num_waiting_tokens": 40, "max_waiting_tokens": 4096, "wait_s": 1.5}
BODY = {"prompt": "the cat", "max_tokens": 5, "temperature": 0, "seed": 1}


def told(*answers: dict[str, object]) -> dict[str, Any]:
    return {"explanations": list(answers), "num_left_out": 0, "queue": QUEUE}


def shown(bench: Bench, name: str) -> str:
    return "\n".join(request_lines(told(bench.explainer.answer(name))))


def test_the_story_of_one_that_waits() -> None:
    bench = Bench(limits(max_sequences=1, policy="priority"))
    bench.admit("running", 6, 30)
    bench.step()
    bench.admit("first", 6, 4, priority=1)
    bench.admit("mine", 12, 3, priority=2, deadline=9.0, queue_timeout=4.0)
    for _ in range(5):
        bench.step()
    lines = shown(bench, "mine").splitlines()
    assert lines[0].startswith(
        "mine waits at position 2 of 2, after first: behind; the first in line lacks sequence_cap: needs 1 of 1 "
        "sequences, 0 left; no prediction: it has to wait for answers to end"
    )
    text = "\n".join(lines)
    assert "order    priority: smaller priority first, with ageing; then order of arrival; priority 2, as if it" in text
    assert "ahead    first (priority 1, as if it had arrived 60 s later)" in text
    assert "timeout  in 8.9" in text and "unless it has started by then" in text
    assert "tokens   12 in the prompt, 0 generated of at most 3" in text
    assert (
        "queue: 2 of at most 32 sequences, 40 of at most 4096 prompt tokens; a new request would wait about 1.5 s"
        in text
    )
    bench.run()


def test_the_story_of_one_that_was_preempted_and_ended() -> None:
    bench = Bench(limits(num_blocks=9))
    bench.admit("other", 8, 25)
    bench.admit("mine", 9, 12)
    bench.run()
    text = shown(bench, "mine")
    assert text.startswith("mine ended (length) after ") and "preempted once" in text
    assert "preempted       kv_blocks, by other, " in text and "tokens to compute again" in text
    assert "s preempted" in text and "first token after" in text and " s recompute" in text
    assert "resumed" in text and "finished        length, 12 tokens" in text


def test_another_tenants_request_has_no_name() -> None:
    bench = Bench(limits(num_blocks=9))
    bench.admit("other", 8, 25)
    bench.admit("mine", 9, 12)
    bench.run()
    answer: Any = bench.explainer.answer("mine")
    answer["events"] = [{**event, "by": None} if "by" in event else event for event in answer["events"]]
    assert "by another tenant's request" in "\n".join(request_lines(told(answer)))


def test_all_that_are_open() -> None:
    bench = Bench(limits(max_sequences=1))
    for name in ("a", "b"):
        bench.admit(name, 4, 9)
    bench.step()
    lines = open_lines({**bench.explainer.answer(""), "queue": QUEUE})
    assert lines[0].split() == ["ID", "STATE", "POSITION", "REASON", "AGE", "PROMPT", "OUTPUT", "NEXT", "TOKEN"]
    assert lines[1].split()[:4] == ["b", "waiting", "1", "sequence_cap"] and "0 left)" in lines[1]
    assert lines[2].split()[:4] == ["a", "decode", "-", "-"]
    assert lines[3].startswith("queue: ")
    assert open_lines({**bench.explainer.answer(""), "queue": QUEUE, "num_waiting": 300})[3] == "... and 299 more"
    bench.run()
    assert open_lines({**bench.explainer.answer(""), "queue": QUEUE})[0] == "no request is open"


def test_it_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(limits(max_sequences=1))
    bench.admit("a", 4, 3)
    bench.admit("b", 4, 3)
    asked = 0

    def ask(path: str, verb: str, argument: str) -> object:
        nonlocal asked
        assert (path, verb, argument) == ("/socket", "explain", "b")
        asked += 1
        bench.step()
        return told(bench.explainer.answer("b"))

    monkeypatch.setattr(explain, "call_admin", ask)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert cli.main(["explain", "b", "--follow", "--socket", "/socket"]) == 0
    text = capsys.readouterr().out
    assert text.index("b waits at position 1 of 1: sequence_cap") < text.index("b is decoding") < text.index("b ended")
    assert asked < 20 and text.count("b waits") <= 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://h", "--socket", "s", "x"], "each name a server; give one"),
        (["--url", "http://h"], "give its ID"),
        (["--follow"], "give its ID"),
        (["x", "--interval", "0"], "--interval is 0; give a number above 0"),
        (["x", "--api-key", "k"], "--api-key is for --url"),
        (["x", "--url", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9/v1/requests/x/explain"),
    ],
)
def test_mistakes_are_told_with_the_remedy(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = tmp_path_factory.mktemp("explain")
    with FakeServer(str(make_tiny_model("smollm2", folder / "tiny")), folder / "log", "--api-key", "sk-1") as running:
        yield running


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_a_live_server_tells_over_both_ways(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    admin = ("--socket", server.admin)
    assert "no request is open" in out(capsys, *admin)
    assert cli.main(["admin", "pause", *admin]) == 0
    headers = {"X-Request-Id": "mine", "Authorization": "Bearer sk-1"}
    asking = threading.Thread(target=lambda: server.post("/v1/completions", BODY, headers=headers))
    asking.start()
    while json.loads(out(capsys, "--json", *admin).removeprefix("true\n"))["open"] == []:
        time.sleep(0.01)
    listed = out(capsys, *admin)
    assert "mine~" in listed and "paused" in listed
    assert "waits at position 1 of 1: paused" in out(capsys, "mine", *admin)
    over_http = out(capsys, "mine", "--url", server.url + "/v1", "--api-key", "sk-1")
    assert over_http.startswith("waits at position 1 of 1: paused; no prediction: the engine is paused")
    assert cli.main(["admin", "resume", *admin]) == 0
    capsys.readouterr()
    followed = out(capsys, "mine", "--follow", "--interval", "0.02", *admin)
    asking.join(30)
    assert "ended (length)" in followed and "finished        length, 5 tokens" in followed
    assert cli.main(["explain", "nobody", *admin]) == 2 and "nobody is not known here" in capsys.readouterr().err
    assert cli.main(["explain", "nobody", "--url", server.url, "--api-key", "sk-1"]) == 2
    assert "answers 404: no request 'nobody' of yours is open" in capsys.readouterr().err
    assert cli.main(["explain", "mine", "--url", server.url, "--api-key", "wrong"]) == 2
    assert "answers 401" in capsys.readouterr().err


def test_the_story_goes_on_in_the_next_engine(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    admin = ("--socket", server.admin)
    headers = {"X-Request-Id": "heir", "Authorization": "Bearer sk-1"}
    assert cli.main(["admin", "pause", *admin]) == 0
    asking = threading.Thread(target=lambda: server.post("/v1/completions", BODY, headers=headers))
    asking.start()
    while server.status()["engine"]["open_requests"] == 0:
        time.sleep(0.01)
    assert cli.main(["admin", "kill_engine", *admin]) == 0
    epoch = 1
    while epoch == 1:
        status = server.status()
        epoch = status["engine"]["epoch"] if status["engine"]["state"] == "ready" else 1
        time.sleep(0.01)
    capsys.readouterr()
    text = out(capsys, "heir", *admin)
    assert "resumed by the engine of epoch 2, it arrived in epoch 1" in text
    assert "engine   epoch 2, resumed once\n" in text
    assert cli.main(["admin", "resume", *admin]) == 0
    asking.join(30)
