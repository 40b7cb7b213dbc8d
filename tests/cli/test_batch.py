"""octavo batch: OpenAI's batch format, resumed after a kill, bounded, with a summary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from octavo.server.api.batches.run import BadLine, BatchLine, read_lines, repair

CHAT = "/v1/chat/completions"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.jsonl"
    rules = [{"equals": "fail", "say": "x", "fail_after": 0}, {"equals": "slow", "say": "slowly", "delay_ms": 20}]
    path.write_text("\n".join(map(json.dumps, rules)))
    return f"scripted:{path}"


def ask(name: str, text: str = "hello", url: str = CHAT, **body: Any) -> str:
    prompt = {"prompt": text} if url == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {**prompt, **body}})


def write(folder: Path, *asks: str) -> Path:
    path = folder / "in.jsonl"
    path.write_text("\n".join(asks) + "\n")
    return path


def read(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in found}) == len(found), "no line twice"
    return {line["custom_id"]: line for line in found}


def test_I07_every_line_is_answered_in_openais_format(tmp_path: Path, script: str, capsys: Any) -> None:
    file = write(tmp_path, ask("a"), ask("b", "say this", "/v1/completions", max_tokens=3), ask("c", n=2))
    assert main(["batch", str(file), "--model", script]) == 0
    answers = read(tmp_path / "in.output.jsonl")
    assert sorted(answers) == ["a", "b", "c"] and not (tmp_path / "in.output.errors.jsonl").exists()
    assert answers["a"]["error"] is None and answers["a"]["response"]["status_code"] == 200
    assert answers["a"]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert answers["b"]["response"]["body"]["choices"][0]["text"] == "say"
    assert len(answers["c"]["response"]["body"]["choices"]) == 2
    said = capsys.readouterr().err
    assert "3 requests: 3 answered, 0 failed" in said and "tokens/s" in said and "\x1b" not in said


def test_all_four_endpoints_are_taken(tmp_path: Path, script: str) -> None:
    asks = [
        ask("chat"),
        ask("text", url="/v1/completions"),
        json.dumps({"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "hello"}}),
        json.dumps({"custom_id": "response", "url": "/v1/responses", "body": {"input": "hello"}}),
    ]
    assert main(["batch", str(write(tmp_path, *asks)), "-m", script, "-q", "--open", "1K"]) == 0
    bodies = {name: line["response"]["body"] for name, line in read(tmp_path / "in.output.jsonl").items()}
    assert len(bodies["vector"]["data"][0]["embedding"]) == 64
    assert bodies["response"]["output"][0]["content"][0]["text"] == "hello"
    assert bodies["text"]["object"] == "text_completion" and bodies["chat"]["object"] == "chat.completion"


def test_what_fails_stands_beside_and_can_be_asked_again(tmp_path: Path, script: str, capsys: Any) -> None:
    bad = '{"custom_id": "x", "url": "/v1/nothing", "body": {}}'
    file = write(tmp_path, ask("good"), ask("bad", "fail"), "not json", bad, ask("good"))
    out = tmp_path / "answers.jsonl"
    command = ["batch", str(file), "-o", str(out), "-m", script, "-q"]
    assert main(command) == 1 and capsys.readouterr().err == ""
    errors = [json.loads(line) for line in (tmp_path / "answers.errors.jsonl").read_text().splitlines()]
    codes = {line["custom_id"] or line["id"]: (line["error"] or {}).get("code") for line in errors}
    assert codes == {
        "bad": None,
        "batch_req_3": "invalid_json_line",
        "x": "invalid_request",
        "batch_req_5": "duplicate_custom_id",
    }
    failed = next(line for line in errors if line["custom_id"] == "bad")
    assert failed["response"]["status_code"] == 500
    before = out.read_bytes(), (tmp_path / "answers.errors.jsonl").read_bytes()
    assert main(command) == 1, "nothing is asked again"
    assert (out.read_bytes(), (tmp_path / "answers.errors.jsonl").read_bytes()) == before
    write(tmp_path, ask("good"), ask("bad", "better"))
    assert main([*command, "--retry-failed"]) == 0
    assert sorted(read(out)) == ["bad", "good"]
    assert main([*command, "--overwrite"]) == 0
    assert sorted(read(out)) == ["bad", "good"]


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, script: str) -> None:
    file = write(tmp_path, *(ask(f"r{i}", "slow") for i in range(24)))
    out = tmp_path / "in.output.jsonl"
    command = [sys.executable, "-m", "octavo", "batch", str(file), "-m", script, "--open", "2", "-q"]
    process = subprocess.Popen(command)
    end = time.monotonic() + 60
    while not (out.exists() and out.read_bytes().count(b"\n") >= 4):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    num_before = out.read_bytes().count(b"\n")
    assert 4 <= num_before < 24
    with out.open("ab") as cut:
        cut.write(b'{"id": "batch_req_9", "custom')
    done = subprocess.run([*command[:-1]], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(read(out)) == sorted(f"r{i}" for i in range(24))
    assert "24 requests: 24 answered" in done.stderr


def test_ctrl_c_leaves_what_can_be_gone_on_with(tmp_path: Path, script: str) -> None:
    file = write(tmp_path, *(ask(f"r{i}", "slow") for i in range(200)))
    out = tmp_path / "in.output.jsonl"
    command = [sys.executable, "-m", "octavo", "batch", str(file), "-m", script, "--open", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_interrupts)
    end = time.monotonic() + 60
    while not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command continues where it was" in said and "Traceback" not in said
    assert out.read_bytes().endswith(b"\n") and 2 <= len(read(out)) < 200


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background run of the tests ignores them


def test_mistakes_are_told_before_the_model_loads(tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path, ask("a"))
    for words, said in (
        ([str(tmp_path / "none.jsonl")], "file not found: "),
        ([str(file), "-o", str(tmp_path / "no" / "out.jsonl")], "there is no folder"),
        ([str(file), "-o", str(file)], "three files"),
        ([str(file), "--open", "0"], "--open is 0"),
    ):
        assert main(["batch", *words]) == 2
        assert said in capsys.readouterr().err


def test_two_runs_do_not_share_an_output(tmp_path: Path, script: str, capsys: Any) -> None:
    import fcntl

    file = write(tmp_path, ask("a"))
    with (tmp_path / "in.output.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(["batch", str(file), "-m", script]) == 2
    assert "another run writes to" in capsys.readouterr().err


def test_lines_are_read_one_by_one_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(ask("a").encode() + b"\n\n" + b"x" * (9 << 20) + b"\n" + ask("b").encode())
    found = list(read_lines(path))
    assert [type(each) for each in found] == [BatchLine, BadLine, BatchLine]
    assert [each.line for each in found] == [1, 3, 4] and found[1].code == "line_too_large"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "data, kept",
    [(b"", b""), (b"{}\n", b"{}\n"), (b"{}\n{", b"{}\n"), (b"{", b""), (b"{}\n" + b"x" * 200_000, b"{}\n")],
)
def test_a_last_line_that_was_cut_is_taken_off(tmp_path: Path, data: bytes, kept: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(data)
    assert repair(path) == len(data) - len(kept)
    assert path.read_bytes() == kept
    assert repair(tmp_path / "none") == 0
    assert os.path.exists(path)


@pytest.mark.parametrize("flag", ["--output", "--errors"])
@pytest.mark.parametrize("more", [[], ["--retry-failed"]])
def test_a_file_that_is_no_output_is_refused_and_stays(
    tmp_path: Path, script: str, capsys: Any, flag: str, more: list[str]
) -> None:
    file, thesis = write(tmp_path, ask("a")), tmp_path / "thesis.txt"
    thesis.write_text("a line that does not end")
    assert main(["batch", str(file), "--model", script, flag, str(thesis), *more]) == 2
    assert f"{flag} {thesis} is not a file of answers" in capsys.readouterr().err
    assert thesis.read_text() == "a line that does not end"
