"""octavo chat: a conversation with an engine here or a server, its commands, and how it is stopped."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.fake_server import FakeServer

from octavo.cli import chat, main
from octavo.cli.answers import RemoteAnswerer
from octavo.cli.chat import NUMBERS, ChatSession, CommandError
from octavo.errors import OctavoError


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.json"
    rules = [
        {"contains": "SYSTEM", "where": "prompt", "say": "yes, sir"},
        {"equals": "two\nlines", "say": "seen both"},
        {"equals": "joined\nline", "say": "joined"},
        {"equals": "fail", "say": "half an answer", "fail_after": 4},
    ]
    path.write_text(json.dumps(rules))
    return f"scripted:{path}"


def talk(monkeypatch: pytest.MonkeyPatch, script: str, *lines: str, words: tuple[str, ...] = ()) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    return main(["chat", script, *words])


def test_I05_a_conversation_is_answered_line_by_line(monkeypatch: Any, script: str, capsys: Any) -> None:
    assert talk(monkeypatch, script, "hello", "", "joined\\", "line", '"""two', 'lines"""', "again") == 0
    assert capsys.readouterr().out.split("\n") == ["hello", "joined", "seen both", "again", ""]


def test_a_system_message_comes_first(monkeypatch: Any, script: str, capsys: Any) -> None:
    assert talk(monkeypatch, script, "hi", "/system", "hi", words=("--system", "SYSTEM")) == 0
    assert capsys.readouterr().out.split("\n") == ["yes, sir", "hi", ""]


def test_a_failure_is_told_and_the_conversation_goes_on(monkeypatch: Any, script: str, capsys: Any) -> None:
    assert talk(monkeypatch, script, "fail", "/params max_tokens=2", "hello") == 0
    said = capsys.readouterr()
    assert said.out == "half\nhe\n" and "error: " in said.err and "Traceback" not in said.err


def test_commands_change_the_conversation(tmp_path: Path) -> None:
    talk = ChatSession()
    talk.say("one")
    talk.answer("1")
    talk.say("two")
    talk.answer("")
    assert [m["content"] for m in talk.messages] == ["one", "1"], "what has no answer is taken back"
    path = tmp_path / "kept.json"
    assert talk.command("/params temperature=0.5 max-tokens=7") == "temperature=0.5, max_tokens=7"
    talk.command("/system be brief")
    talk.command(f"/save {path}")
    other = ChatSession()
    assert "2 messages" in other.command(f"/load {path}")
    assert (other.prompt(), other.params) == (talk.prompt(), talk.params)
    assert other.prompt()[0] == {"role": "system", "content": "be brief"}
    assert other.command("/params temperature=") == "max_tokens=7"
    other.command("/retry")
    assert other.wants_answer and [m["role"] for m in other.messages] == ["user"]
    other.command("/undo")
    assert not other.messages
    other.command("/reset")
    assert other.prompt() == [{"role": "system", "content": "be brief"}]
    assert all(f"/{name}" in other.command("/help") for name in ("reset", "system", "params", "save", "load", "exit"))
    other.command("/exit")
    assert other.is_over


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/nothing", "unknown command '/nothing'; give one of /help"),
        ("/params hotness=1", "unknown parameter 'hotness'; give one of temperature"),
        ("/params temperature=warm", "give a number"),
        ("/params temperature=-1", "temperature is -1"),
        ("/save", "give a file"),
        ("/load /nowhere.json", "cannot be read"),
        ("/undo", "no message to undo"),
        ("/retry", "no message to answer again"),
    ],
)
def test_mistakes_are_told_and_change_nothing(line: str, said: str) -> None:
    talk = ChatSession(params={"top_k": 3})
    with pytest.raises(OctavoError, match=said):
        talk.command(line)
    assert talk.params == {"top_k": 3} and not talk.messages


@pytest.mark.parametrize(
    "kept", ['{"messages": 3}', '[{"role": "x", "content": ""}]', "{", '{"messages": [], "params": {"x": 1}}']
)
def test_a_file_that_holds_no_conversation_is_refused(tmp_path: Path, kept: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(kept)
    with pytest.raises(CommandError):
        ChatSession().command(f"/load {path}")


def test_every_parameter_is_one_of_sampling() -> None:
    from octavo.core.request import SamplingParams

    assert all(name in SamplingParams.__dataclass_fields__ for name in NUMBERS)


class Interrupted:
    """An answerer that is stopped in mid-answer, as by Ctrl-C."""

    name, note = "it", "never told"

    def __init__(self) -> None:
        self.was_closed = False

    async def stream(self, messages: Any, params: Mapping[str, float]) -> AsyncGenerator[str, None]:
        try:
            yield "as far as "
            yield "this"
            raise KeyboardInterrupt
        finally:
            self.was_closed = True

    async def close(self) -> None:
        pass


def test_ctrl_c_stops_an_answer_and_keeps_what_there_is(capsys: Any) -> None:
    talk, answerer = ChatSession(), Interrupted()
    talk.say("go on")
    with asyncio.Runner() as runner:
        chat._answer(runner, answerer, talk, True)
    assert talk.messages[-1] == {"role": "assistant", "content": "as far as this"} and answerer.was_closed
    assert capsys.readouterr().err == "stopped\n"


def test_a_server_answers_too(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from tests.tiny_models import make_tiny_model

    model = make_tiny_model("smollm2", tmp_path / "tiny")
    with FakeServer(str(model), tmp_path / "log") as server:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/params temperature=3000\n/params top_k=1\nhello\n"))
        assert main(["chat", "--url", server.url, "-n", "8", "--temperature", "0"]) == 0
        said = capsys.readouterr()
        lines = said.out.split("\n")
        assert lines[0] and lines[-1] == "" and "temperature is 3000" in said.err
        assert main(["chat", "other", "--url", server.url]) == 0
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main(["chat", "other", "--url", server.url]) == 0
        assert "no model 'other' is served here" in capsys.readouterr().err


def test_what_is_no_server_is_told(capsys: Any) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:9"]) == 2
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:9", "--threads", "1"]) == 2
    assert "leave it out with --server or --url" in capsys.readouterr().err


def test_keys_and_urls_are_taken_as_people_write_them(monkeypatch: Any) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env")
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        client = RemoteAnswerer(url)._open()
        assert str(client.base_url) == "http://h:1/v1/"
        assert client.headers["authorization"] == "Bearer from-env"
    assert RemoteAnswerer("http://h", "given")._open().headers["authorization"] == "Bearer given"
