"""No process of a server shows a key among its arguments, and a program that cannot hide one says so."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.fake_server import FakeServer
from tests.tiny_models import make_tiny_model

from octavo.cli.flags import Parser, add_settings, respell
from octavo.cli.hide_keys import hide_keys

KEYS = ["sk-first-and-long-enough", "sk-other-and-long-énough"]
PROGRAM = """
import sys
from octavo.cli.hide_keys import hide_keys
print(hide_keys(sys.argv[1:]), flush=True)
print(open("/proc/self/cmdline", "rb").read().hex(), ascii(sys.argv[1:]))
"""


def shown_by(*words: str) -> tuple[str, list[str], str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=True)
    warning, rest = done.stdout.splitlines()
    shown, own = rest.split(" ", 1)
    return warning, bytes.fromhex(shown).decode().split("\0")[3:-1], own


def test_keys_are_overwritten_and_the_program_still_has_them() -> None:
    words = [
        "serve",
        "--api-key",
        "sk-a",
        "--api-key=sk-b",
        "--api-key-file",
        "f",
        "--api-key",
        "--api-key",
        "--api-key",
    ]
    warning, shown, own = shown_by(*words)
    assert warning == "None"
    assert shown == [
        "serve",
        "--api-key",
        "****",
        "--api-key=****",
        "--api-key-file",
        "f",
        "--api-key",
        "*" * 9,
        words[-1],
    ]
    assert own == ascii(words)
    assert shown_by("serve", "--port", "1")[1] == ["serve", "--port", "1"]
    fleet = ["--fleet-token", "secret", "--fleet-token-file", "f", "--fleet-token=other"]
    assert shown_by(*fleet)[1] == ["--fleet-token", "******", "--fleet-token-file", "f", "--fleet-token=*****"]


def test_where_it_cannot_be_done_the_remedy_is_told(tmp_path: Path) -> None:
    for content in ({}, {"stat": "1 (x)"}, {"stat": "1 (x) R " + "0 " * 50, "mem": "y"}):
        proc = tmp_path / str(len(content))
        proc.mkdir()
        (proc / "cmdline").write_bytes(b"octavo\0--api-key\0sk-a\0")
        for name, text in content.items():
            (proc / name).write_text(text)
        for words in (["--api-key", "sk-a"], ["--api-key=sk-a"]):
            told = hide_keys(words, proc)
            assert told is not None and "OCTAVO_API_KEY" in told and "--api-key-file" in told and "sk-a" not in told
        assert hide_keys(["--api-key-file", "x"], proc) is None
    assert hide_keys(["--api-key", "x"], tmp_path / "none") is not None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = tmp_path_factory.mktemp("keys")
    model = str(make_tiny_model("smollm2", folder / "tiny"))
    with FakeServer(model, folder / "log", "--api-key", KEYS[0], f"--api-key={KEYS[1]}") as running:
        yield running


def test_no_process_of_a_server_shows_a_key(server: FakeServer) -> None:
    processes = [psutil.Process(server.process.pid)]
    processes += processes[0].children(recursive=True)
    assert len(processes) >= 3, "supervisor, api, engine"
    arguments = [(Path("/proc") / str(process.pid) / "cmdline").read_bytes() for process in processes]
    assert not [line for line in arguments if any(key.encode() in line for key in KEYS)]
    assert b"--api-key\0" + b"*" * len(KEYS[0].encode()) in arguments[0]
    assert not any(key in server.text for key in KEYS)
    for key in KEYS:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        headers = {"Authorization": b"Bearer " + key.encode()}
        assert server.post("/v1/completions", body, headers=headers)[0] == 200  # type: ignore[arg-type]


def test_a_benchmark_gives_its_server_no_key_as_an_argument() -> None:
    parser = Parser(prog="octavo")
    add_settings(parser)
    assert respell(parser.parse(["--api-key", "sk-a", "--max-num-seqs", "4"])) == ["--max-num-seqs=4"]
