"""What the command line says of mistakes that newcomers make: the word at fault, the value, and what to do."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import errors
from tests.fake_server import FakeServer
from tests.source_tree import ROOT
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.cli.chat import ChatSession, _turn
from octavo.cli.flags import Parser, UsageError, add_settings, check_output
from octavo.cli.server_registry import ServerRecord, open_server_folder
from octavo.config import ServingConfig
from octavo.config.other_engines import RENAMED_FLAGS, UNSUPPORTED_FLAGS
from octavo.machine import listener_of
from octavo.server.http.listener import open_socket


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        monkeypatch.setenv("OCTAVO_RUN_DIR", short)
        yield


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main([*words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Errno" not in err
    return err.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--url", "http://h"], "unknown flag '--url'; see octavo serve --help"),
        (["serve", "--base-url", "http://h"], "unknown flag '--base-url'; see octavo serve --help"),
        (["serve", "--gpu-layers", "99"], "--gpu-layers is not supported: a model runs whole on one device (--device)"),
        (["run", "-ngl", "99", "hi"], "-ngl is not supported: a model runs whole on one device (--device)"),
        (["serve", "--max-cpu-loras", "4"], "--max-cpu-loras is not supported: loaded adapters stay in memory"),
        (["serve", "--trust-remote-code"], "--trust-remote-code is not supported: code from model repositories is "),
        (["serve", "--tp-size=2"], "unknown flag '--tp-size'; did you mean '--tensor-parallel-size'?"),
        (["serve", "--n-ctx", "4096"], "unknown flag '--n-ctx'; did you mean '--max-model-len'?"),
        (["run", "--system-prompt", "x", "hi"], "unknown flag '--system-prompt'; did you mean '--system'?"),
        (["serve", "--quantisation", "int8"], "unknown flag '--quantisation'; did you mean '--quantization'?"),
        (["serve", "--max-tokens", "5"], "unknown flag '--max-tokens'; see octavo serve --help"),
        (["serve", "--dtype", "bfloat"], "unknown --dtype 'bfloat'; did you mean 'bfloat16'?"),
        (["bench", "online", "--arrivals", "posson"], "unknown --arrivals 'posson'; did you mean 'poisson'?"),
        (["replay", "/none", "--what-if", "x=1"], "/none does not exist"),
        (["start"], "unknown command 'start'; did you mean 'serve'?"),
        (["run", "smollm2", "a", "b"], '3 words are given; put the prompt in quotes: octavo run smollm2 "a b"'),
        (["run", "hi", "there", "you"], '3 words are given; put the prompt in quotes: octavo run "hi there you"'),
        (["serve", "--api-key", ""], "--api-key is empty"),
        (["chat", "--url", "127.0.0.1:9"], "no server answers at http://127.0.0.1:9 ("),
        (["chat", "--url", "ftp://h"], "--url is 'ftp://h'; give a server's URL, such as http://127.0.0.1:8000"),
        (["chat", "--server", "9700"], "no server of this user runs here (9700); start one with: octavo serve"),
        (["bench", "online", "--url", "127.0.0.1:9"], "no server answers at http://127.0.0.1:9 ("),
        (["explain"], "no server of this user runs here; start one with: octavo serve"),
        (["top", "x", "--url", "y:1"], "--url y:1 and x each name a server; give one of them"),
        (["admin", "status", "8000"], "status takes no '8000'; choose a server with --server NAME|PID|PORT"),
        (["serve", "--host", "no.such.name.invalid", "--insecure"], "cannot listen on no.such.name.invalid, port 8000"),
        (["serve", "--host", "192.0.2.1", "--insecure"], "cannot listen on 192.0.2.1, port 8000: cannot assign "),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_remedy(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *words).startswith(message)


def test_a_config_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "words.yaml"
    path.write_text("just words")
    message = f"config file {path} is not a list of settings; give 'name: value' lines"
    assert said(capsys, "serve", "--config", str(path)) == message
    assert said(capsys, "serve", "--config", "/none.yaml") == "config file not found: /none.yaml"


def test_a_chat_template_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    assert said(capsys, "run", model, "hi", "--chat-template", "nope.jinja") == "file not found: nope.jinja"


def test_a_pool_larger_than_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    message = said(capsys, "run", model, "hi", "--kv-cache-memory-bytes", "900T")
    assert re.match(r"--kv-cache-memory-bytes 921600.0 GiB exceeds the [\d.]+ .iB free, which would hold \d+ ", message)


def test_no_network_is_said_in_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*args: object, **options: object) -> None:
        client = sys.modules[errors.HfHubHTTPError.__bases__[0].__module__]  # httpx, or httpx2
        raise client.ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    message = said(capsys, "run", "owner/name", "hi")
    assert message.startswith("no network: could not reach the hub for 'owner/name'; give a local folder or .gguf file")


def test_a_port_in_use_names_who_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_socket(ServingConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        assert listener_of(port) == (os.getpid(), Path("/proc/self/comm").read_text().strip())
        message = said(capsys, "serve", "--port", str(port))
        assert re.fullmatch(
            rf"port {port} is used by .+ \(pid {os.getpid()}\); give another, such as --port \d+", message
        )
        with open_server_folder() as home:
            home.publish(ServerRecord(839, f"http://127.0.0.1:{port}", "smollm2", "/x", 0.0))
            message = said(capsys, "serve", "--port", str(port))
    remedy = rf"octavo stop {port}, or --port (\d+)"
    free = re.fullmatch(rf"port {port} is used by octavo smollm2 \(pid 839\); {remedy}", message)
    assert free is not None and int(free[1]) > port
    with socket.create_server(("127.0.0.1", int(free[1]))):
        assert listener_of(port) is None


def test_every_foreign_flag_has_one_answer() -> None:
    parser = Parser(prog="octavo serve")
    add_settings(parser)
    own = set(parser._option_string_actions)
    assert not own & {*RENAMED_FLAGS, *UNSUPPORTED_FLAGS} and not RENAMED_FLAGS.keys() & UNSUPPORTED_FLAGS.keys()
    for flag, ours in RENAMED_FLAGS.items():
        with pytest.raises(UsageError) as caught:
            parser.parse([flag, "x"])
        assert ours not in own or str(caught.value) == f"unknown flag {flag!r}; did you mean {ours!r}?"
    with pytest.raises(UsageError, match="unknown flag '-n'; see octavo serve --help"):  # not a short form of -np
        parser.parse(["-n", "5"])


def test_the_page_on_migration_knows_every_flag_as_the_command_line_does() -> None:
    parser = Parser(prog="octavo serve")
    add_settings(parser)
    own = set(parser._option_string_actions)
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?`-.*?) \| (.*) \|$", page, re.MULTILINE)
    flags = [(flag, ours) for theirs, ours in rows for flag in re.findall(r"`(--?[a-z][a-z-]*)", theirs)]
    assert len(flags) > 100
    for flag, ours in flags:
        assert flag in own or not ours.startswith("the same"), flag
        assert flag in {*own, *RENAMED_FLAGS, *UNSUPPORTED_FLAGS, "--temp"}, flag


@pytest.mark.parametrize("line", ["/bye", "/exit", "/quit", "exit", "quit", " exit "])
def test_a_conversation_is_left_in_every_usual_way(line: str) -> None:
    conversation = ChatSession()
    _turn(conversation, line)
    assert conversation.is_over and not conversation.messages


def test_an_unknown_command_of_a_conversation_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = ChatSession()
    _turn(conversation, "/clear")
    told = capsys.readouterr().err
    assert "unknown command '/clear'; give one of /help, /reset, /system" in told and "/bye" in told
    _turn(conversation, "/sytem x")
    assert "unknown command '/sytem'; did you mean '/system'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "--output", "x"],
        ["simulate", "--html", "/none/x.html"],
        ["simulate", "--json", "/none/x.json"],
        ["simulate", "--requests", "/none/x.csv"],
        ["replay", "/also-none", "--json", "/none/x.json"],
        ["trace", "/also-none", "--page", "/none/x.html"],
        ["bench", "sweep", "--svg", "/none/x.svg"],
        ["generate", "/dev/null", "-o", "/none/x.jsonl"],
        ["batch", __file__, "-o", "/none/x.jsonl"],
        ["serve", "--record", "/dev/null/x"],
    ],
)
def test_an_output_that_cannot_be_written_is_told_before_the_work(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*args: object, **options: object) -> None:
        raise AssertionError("the work began")

    for name in ("simulate.make_plan", "replay.open_recording", "trace.open_recording", "bench.load_engine"):
        monkeypatch.setattr(f"octavo.cli.{name}", work)
    for name in ("batch.load_engine", "serve.open_socket"):
        monkeypatch.setattr(f"octavo.cli.{name}", work)
    message = said(capsys, *words)
    assert "there is no folder /none" in message or "give another folder" in message or "unknown flag" in message


def test_an_output_must_be_a_file_that_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_output("--html", str(tmp_path / "x.html"))
    check_output("--json", "-")
    with pytest.raises(UsageError, match="is a folder; give a file"):
        check_output("--html", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="permission denied"):
        check_output("--html", str(tmp_path / "x.html"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_command_names_a_server_in_one_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    with FakeServer(model, tmp_path / "log", "--served-model-name", "mine") as server:
        place = server.url.removeprefix("http://")
        port = place.rpartition(":")[2]
        (tmp_path / "prompts").write_text("hello")
        bench = ["bench", "online", "--text", str(tmp_path / "prompts"), "--output-len", "2", "--json"]
        for which in ("mine", str(server.process.pid), port):
            for words in (
                ["top", which, "--json"],
                ["admin", "status", "--server", which],
                ["explain", "--server", which],
            ):
                assert cli.main(words) == 0, words
        for url in (place, f"http://localhost:{port}/v1", server.url):
            for words in (["top", "--json"], ["admin", "status"], ["explain"], bench):
                assert cli.main([*words, "--url", url]) == 0, words
        capsys.readouterr()
        for words in ([*bench, "--server", "mine"], [*bench, "--base-url", place]):
            assert cli.main(words) == 0
            assert json.loads(capsys.readouterr().out)["requests_done"] == 1
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert cli.main(["chat", "--server", port, "--max-tokens", "2"]) == 0 and capsys.readouterr().out
        assert said(capsys, "top", "mime") == "unknown server 'mime'; did you mean 'mine'?"
        assert said(capsys, "stop", "1") == (
            f"unknown server '1'; running: mine (pid {server.process.pid}, port {port})"
        )
        _chaos_asks_first(server, capsys, monkeypatch)


def _chaos_asks_first(server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    drill = ["chaos", "--kill-engine", "5s", "--duration", "1s"]
    monkeypatch.setattr("octavo.cli.chaos._run", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    message = f"a drill loads mine at {server.url}, and kills its engine every 5 s; give --yes to start it without a "
    assert said(capsys, *drill).startswith(message)
    for answer in ("\n", "n\n", ""):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        assert cli.main(drill) == 2
        told = capsys.readouterr().err
        assert told.startswith(
            f"This drill keeps 16 streams open on mine at {server.url} for 1 s, and kills its engine"
        )
        assert "Start? [y/N] " in told and "error: not confirmed; nothing was done" in told
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    with pytest.raises(TypeError):  # it went on to _run
        cli.main(drill)
