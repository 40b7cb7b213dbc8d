"""octavo generate: lines in, lines out, in order."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.cli import main


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.json"
    rules = [{"equals": "slow", "say": "slowly said", "delay_ms": 5}, {"equals": "fail", "say": "x", "fail_after": 0}]
    path.write_text(json.dumps(rules))
    return f"scripted:{path}"


def read(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def test_I05_texts_are_answered_in_their_order(tmp_path: Path, script: str, capsys: Any) -> None:
    file, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    file.write_text("slow\none\n\ntwo é\n")
    assert main(["generate", str(file), "-o", str(out), "-m", script, "--open", "4"]) == 0
    found = read(out.read_text())
    assert [(line["id"], line["text"]) for line in found] == [(1, "slowly said"), (2, "one"), (4, "two é")]
    assert found[0]["finish_reason"] == "stop" and found[0]["usage"]["completion_tokens"] == 12
    said = capsys.readouterr()
    assert said.out == "" and "3 prompts: " in said.err and "tokens/s" in said.err


def test_json_lines_have_fields_of_their_own(tmp_path: Path, script: str, capsys: Any) -> None:
    file = tmp_path / "in.jsonl"
    asks = [
        {"id": "a", "prompt": "cut this", "max_tokens": 3},
        {"id": 7, "messages": [{"role": "user", "content": "hello"}], "n": 2},
        "plain text",
        {"id": "ids", "prompt": [75, 76]},
    ]
    file.write_text("\n".join(map(json.dumps, asks)))
    assert main(["generate", str(file), "-m", script, "-q", "-n", "20"]) == 0
    said = capsys.readouterr()
    found = read(said.out)
    assert [line["id"] for line in found] == ["a", 7, 3, "ids"] and said.err == ""
    assert (found[0]["text"], found[0]["finish_reason"]) == ("cut", "length")
    assert found[1]["texts"] == ["hello", "hello"] and found[2]["text"] == "plain text"


def test_what_fails_is_told_in_its_place(tmp_path: Path, script: str, capsys: Any) -> None:
    file = tmp_path / "in.jsonl"
    lines = [
        '{"id": 1, "prompt": "ok"}',
        "not json",
        '{"id": "f", "prompt": "fail"}',
        '{"id": "t", "prompt": "x", "n": 0}',
    ]
    lines += ['{"text": 1}', '{"prompt": "x", "stream": true}']
    file.write_text("\n".join(lines))
    assert main(["generate", str(file), "-m", script]) == 1
    said = capsys.readouterr()
    found = read(said.out)
    assert "error" not in found[0] and all("error" in line for line in found[1:])
    assert [line["id"] for line in found] == [1, 2, "f", "t", 5, 6]
    assert found[3]["error"]["param"] == "n" and "6 prompts, 5 failed" in said.err


def test_stdin_is_read(script: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"hello\n"), isatty=lambda: False))
    assert main(["generate", "-", "-m", script, "--raw", "-q"]) == 0
    assert read(capsys.readouterr().out)[0]["text"] == "hello"


def test_mistakes_come_before_the_model(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in.txt").write_text("a")
    for words, said in (
        (["none.txt"], "file not found: none.txt; give prompts"),
        ([str(tmp_path)], "is a folder"),
        ([str(tmp_path / "in.txt"), "-o", "/nowhere/x"], "there is no folder /nowhere"),
        ([str(tmp_path / "in.txt"), "--raw", "--system", "x"], "leave out --raw"),
        ([str(tmp_path / "in.txt"), "--temperature", "-1"], "temperature is -1"),
        ([str(tmp_path / "in.txt"), "--open", "0"], "--open is 0"),
    ):
        assert main(["generate", *words]) == 2
        assert said in capsys.readouterr().err
