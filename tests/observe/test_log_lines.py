"""Lines of the log as JSON: every line of a server's life is an object, and none holds what clients sent."""

import json
import logging
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.observe.log import NOTICES, JsonLines, close_log, print_notice, set_up_log
from tests import fake_server, tiny_models
from tests.server.fakes import Harness

SECRET = "the prompt that nobody may read"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Gives what went to stderr, and ends the log; the log of this process is put back."""
    root, told = logging.getLogger(), logging.getLogger(NOTICES)
    kept = root.handlers[:], root.level, told.level
    root.handlers[:] = []

    def read() -> str:
        close_log()
        return capsys.readouterr().err

    yield read
    close_log()
    root.handlers[:], root.level, told.level = kept[0], kept[1], kept[2]


def test_a_record_is_one_object_with_its_exception(said: Callable[[], str]) -> None:
    set_up_log("json", "warning", "api")
    logging.getLogger("octavo.x").info("unheard")
    try:
        raise ValueError("lines\nin it")
    except ValueError:
        logging.getLogger("octavo.x").exception("it %s", "failed")
    (line,) = [json.loads(text) for text in said().splitlines()]
    assert line["level"] == "error" and line["logger"] == "octavo.x" and line["process"] == "api"
    assert line["message"] == "it failed" and "ValueError: lines\nin it" in line["exception"]
    assert line["time"].endswith("Z") and line["time"][10] == "T"


def test_what_is_told_has_its_level_and_is_told_at_any(said: Callable[[], str]) -> None:
    set_up_log("json", "error", "supervisor")
    for line in ("warning: it is late", "error: it ended", "12 running", ""):
        print_notice(line)
    lines = [json.loads(text) for text in said().splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("warning", "it is late"), ("error", "it ended"), ("info", "12 running"),
    ]  # fmt: skip


def test_text_is_as_it_was_told(said: Callable[[], str]) -> None:
    set_up_log("text", "info", "api")
    print_notice("warning: it is late")
    logging.getLogger("octavo.x").info("heard")
    assert said() == "warning: it is late\noctavo.x: heard\n"


def lines_until(stream: Any, start: str) -> list[dict[str, Any]]:
    """Parsed lines up to the first whose message begins so."""
    lines: list[dict[str, Any]] = []
    for text in stream:
        lines.append(json.loads(text))
        if lines[-1]["message"].startswith(start):
            return lines
    raise AssertionError(lines)


def test_a_servers_whole_life_is_json_lines(tmp_path: Path) -> None:
    model = tiny_models.make_tiny_model("llama3", tmp_path / "model")
    command = [sys.executable, fake_server.__file__, "serve", str(model), *fake_server.COMMON, "--log-format", "json"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = lines_until(process.stderr, "try ")
            url = lines[-1]["message"].split()[2].removesuffix("/v1/chat/completions")
            body = json.dumps({"prompt": SECRET, "max_tokens": 3}).encode()
            sent = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/completions", body, sent)
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 200
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
    lines += [json.loads(text) for text in rest.splitlines()]
    assert {"time", "level", "logger", "process", "pid", "message"} <= set.intersection(*map(set, lines))
    assert {line["process"] for line in lines} <= {"api", "engine", "supervisor"}
    assert SECRET not in json.dumps(lines)


async def test_nothing_that_a_client_sends_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    harness = Harness()
    await harness.chat(messages=[{"role": "user", "content": SECRET}])
    await harness.chat(messages=[{"role": SECRET, "content": "x"}])
    await harness.complete(prompt=SECRET, temperature=SECRET)
    assert SECRET not in caplog.text
    assert isinstance(JsonLines("api").format(logging.makeLogRecord({"msg": "x"})), str)
