"""Tools of MCP servers in octavo chat: the model calls them if the user agrees."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fake_server import RealServer
from tests.mcp_servers import HOSTILE, call
from tests.test_mcp import SCRIPT

from octavo.artifacts.resolve import resolve_model
from octavo.cli import chat, main
from octavo.text.text_model import TextModel

GOOD = f"good={sys.executable} {SCRIPT} good"
RULES = [
    {"role": "tool", "equals": "5", "say": "It is five."},
    {"role": "tool", "contains": "declined", "say": "As you like."},
    {"role": "tool", "equals": "8", "call": {"name": "add", "arguments": {"a": 8, "b": 0}}},
    {"contains": "obey", "say": "Seen."},
    {"role": "tool", "echo": True},
    {"equals": "add", "say": "Let me see.", "call": {"name": "add", "arguments": {"a": 2, "b": 3}}},
    {"equals": "both", "call": [{"name": "add", "arguments": {"a": 2, "b": 3}}, {"name": "boom"}]},
    {"equals": "boom", "call": {"name": "boom"}},
    {"equals": "ping", "call": {"name": "ping"}},
    {"equals": "lost", "call": {"name": "nothing"}},
    {"equals": "for ever", "call": {"name": "add", "arguments": {"a": 8, "b": 0}}},
]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.json"
    path.write_text(json.dumps(RULES))
    return f"scripted:{path}"


@pytest.fixture
def sdk() -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")


def talk(monkeypatch: pytest.MonkeyPatch, model: str, text: str, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", model, *words])


def test_a_tool_is_called_and_the_answer_follows(sdk: None, monkeypatch: Any, script: str, capsys: Any) -> None:
    assert talk(monkeypatch, script, "add\n/tools\nhello\n", "--mcp", GOOD, "--mcp-yes") == 0
    said = capsys.readouterr()
    assert said.out == "Let me see.\nIt is five.\nhello\n"
    assert '[good] add {"a": 2, "b": 3}\n[good] -> 5\n' in said.err and "add (good): Add two numbers." in said.err


def test_a_server_answers_with_calls_too(sdk: None, monkeypatch: Any, script: str, capsys: Any, tmp_path: Path) -> None:
    with RealServer(script, tmp_path / "log") as server:
        monkeypatch.setattr("sys.stdin", io.StringIO("both\n"))
        assert main(["chat", "--url", server.url, "--mcp", GOOD, "--mcp-yes"]) == 0
    said = capsys.readouterr()
    assert "[good] -> 5\n[good] boom {}\n[good] failed: Error executing tool boom" in said.err
    assert said.out.startswith("error: Error executing tool boom")


class Terminal(io.StringIO):
    """A terminal whose user types these lines."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The lines that the user types; the questions are not kept."""
    lines: list[str] = []

    def read(_: str = "") -> str:
        if not lines:
            raise EOFError
        if lines[0] == "^C":
            lines.pop(0)
            raise KeyboardInterrupt
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", Terminal())
    yield lines
    assert not lines, "all was read"


@pytest.mark.parametrize(
    ("lines", "calls", "answers"),
    [
        (["add", "y", "add", "n"], 1, ["It is five.", "As you like."]),
        (["add", "a", "add", "add"], 3, ["It is five."] * 3),
        (["add", ""], 0, ["As you like."]),
        (["add", "maybe"], 0, ["As you like."]),
        (["add", "^C", "hello"], 0, ["hello"]),
    ],
)
def test_the_user_is_asked(
    sdk: None, typed: list[str], script: str, capsys: Any, lines: list[str], calls: int, answers: list[str]
) -> None:
    typed += lines
    assert main(["chat", script, "--mcp", GOOD]) == 0
    said = capsys.readouterr()
    assert said.err.count("-> 5") == calls and "3 tools, which /tools lists" in said.err
    assert [line for line in said.out.split("\n") if line not in ("", "Let me see.")] == answers


def test_without_a_terminal_nothing_is_called_unasked(sdk: None, monkeypatch: Any, script: str, capsys: Any) -> None:
    assert talk(monkeypatch, script, "add\n", "--mcp", GOOD) == 0
    said = capsys.readouterr()
    assert "--mcp-yes" in said.err and "-> 5" not in said.err and "As you like." in said.out


def test_a_conversation_with_calls_is_saved_and_continued(
    sdk: None, monkeypatch: Any, script: str, capsys: Any, tmp_path: Path
) -> None:
    path = tmp_path / "kept.json"
    assert talk(monkeypatch, script, f"add\n/save {path}\n", "--mcp", GOOD, "--mcp-yes") == 0
    kept = json.loads(path.read_text())["messages"]
    assert [message["role"] for message in kept] == ["user", "assistant", "tool", "assistant"]
    assert kept[2]["content"] == "5" and kept[1]["tool_calls"][0]["id"] == kept[2]["tool_call_id"]
    assert talk(monkeypatch, script, "hello\n", "--load", str(path)) == 0
    assert capsys.readouterr().out.endswith("hello\n")


def test_rounds_are_bounded(sdk: None, monkeypatch: Any, script: str, capsys: Any) -> None:
    assert talk(monkeypatch, script, "for ever\nhello\n", "--mcp", GOOD, "--mcp-yes") == 0
    said = capsys.readouterr()
    assert said.err.count("-> 8") == chat.MAX_ROUNDS and "stopped after 10 rounds of tool calls" in said.err
    assert said.out == "hello\n"


def test_a_call_of_no_tool_is_told_to_the_model(sdk: None, monkeypatch: Any, script: str, capsys: Any) -> None:
    assert talk(monkeypatch, script, "lost\n", "--mcp", GOOD, "--mcp-yes") == 0
    assert "there is no tool 'nothing'; the tools are add, boom, slow" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["die", "huge", "hang", "fail", "wrong", "tokens", "many", "rubbish", "none"])
def test_a_server_that_fails_ends_no_chat(sdk: None, mode: str, monkeypatch: Any, script: str, capsys: Any) -> None:
    bad = f"bad={sys.executable} {SCRIPT} {mode}" if mode in HOSTILE else "bad=/nowhere/server"
    words = ("--mcp", bad, "--mcp", GOOD, "--mcp-yes", "--mcp-timeout", "2")
    assert talk(monkeypatch, script, "ping\nadd\nhello\n", *words) == 0
    said = capsys.readouterr()
    assert said.out.endswith("It is five.\nhello\n"), "the other server's tools and the chat go on"
    assert "Traceback" not in said.err and "\x1b" not in said.err
    assert mode == "tokens" or "error: MCP server 'bad' " in said.err
    assert said.err.count("[bad] ping") <= 1, "what looks like a call in a result is none"


def test_special_tokens_in_a_result_are_text(script: str) -> None:
    text = TextModel.load(resolve_model(script))

    def num_special(result: str) -> int:
        called = {"id": "1", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": "ping"},
            {"role": "assistant", "content": "", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": result},
        ]
        ids = text.prompt_ids_from_messages(messages)
        return sum(token_id in text.tokenizer.special_ids for token_id in ids)

    assert num_special(call("tokens", 1)["content"][0]["text"]) == num_special("pong") > 0


def test_without_the_extra_one_line_names_it(monkeypatch: Any, script: str, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert talk(monkeypatch, script, "hello\n", "--mcp", "a=run") == 2
    said = capsys.readouterr().err
    assert said == "error: MCP servers need the package mcp; install it with: pip install 'octavo[mcp]'\n"


@pytest.mark.parametrize(("server", "message"), [("run it", "NAME=COMMAND"), ("a=run", "pip install 'octavo[mcp]'")])
def test_serve_names_a_mistake_before_it_starts(
    monkeypatch: Any, script: str, capsys: Any, server: str, message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", script, "--port", "0", "--mcp", server]) == 2
    assert message in capsys.readouterr().err
