"""The newcomer's path: every block of docs/first-steps.md does what the page says, run as it stands there.

Owns: servers, a free port in place of 8000 and 8001, and a folder for what the commands write. One server answers all
tasks that ask one. A block's last word is looked at; how clever the model is is not.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.source_tree import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here"),
]
PAGE = (ROOT / "docs" / "first-steps.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MAX_LINES = 9  # "under ten lines"


@dataclass(frozen=True)
class Task:
    """A numbered section: its blocks are (language, text)."""

    number: int
    title: str
    blocks: list[tuple[str, str]]


def tasks() -> dict[int, Task]:
    """The page's tasks by number."""
    found = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        number, title = re.match(r"(\d+)\. (.*)\n", part).groups()  # type: ignore[union-attr]
        found[int(number)] = Task(int(number), title, BLOCK.findall(part))
    return found


TASKS = tasks()


@dataclass
class Place:
    """Where blocks run: a folder, and the ports that stand for the page's."""

    folder: Path
    ports: dict[str, str]

    def text(self, block: str) -> str:
        for written, real in self.ports.items():
            block = block.replace(f":{written}", f":{real}").replace(f"--port {written}", f"--port {real}")
        return block

    @property
    def environ(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "OCTAVO_RUN_DIR": str(self.folder / "run"), "OMP_NUM_THREADS": "2"}

    def run(self, language: str, block: str) -> str:
        """What a block prints; it must end well."""
        command = [sys.executable, "-c"] if language == "python" else ["bash", "-euo", "pipefail", "-c"]
        done = subprocess.run(
            [*command, self.text(block)],
            cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def serving(self, command: str) -> Iterator[str]:
        """A server of the page's command, until it says how to call it: what it said."""
        log = self.folder / "log"
        with log.open("wb") as out:
            words = ["bash", "-c", "exec env " + self.text(command)]  # a variable may come first
            process = subprocess.Popen(words, cwd=self.folder, env=self.environ, stderr=out, stdin=subprocess.DEVNULL)
        try:
            while not re.search(r"^try .*\n", log.read_text(), re.MULTILINE):
                assert process.poll() is None, log.read_text()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
            yield log.read_text()
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.send_signal(signal.SIGTERM)  # open requests end now
            process.wait(60)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("steps")
    (folder / "run").mkdir(mode=0o700)
    return Place(folder, {"8000": free_port(), "8001": free_port()})


@pytest.fixture(scope="module")
def served(place: Place) -> Iterator[Place]:
    """The server of task 1, which tasks 3 to 7 and 10 ask."""
    ((language, command),) = TASKS[1].blocks
    assert (language, command) == ("sh", "octavo serve\n")
    with place.serving(f"octavo serve --port {place.ports['8000']}"):
        yield place


def test_there_are_ten_tasks_each_short() -> None:
    assert sorted(TASKS) == list(range(1, 11))
    for task in TASKS.values():
        assert task.blocks, f"{task.title} has no block"
        lines = [line for _, block in task.blocks for line in block.splitlines() if line]
        assert len(lines) <= MAX_LINES, f"{task.title} takes {len(lines)} lines"


def test_01_serve(served: Place) -> None:
    assert served.run("sh", "curl -s http://127.0.0.1:8000/v1/models").startswith("{")


def test_02_chat(place: Place) -> None:
    assert only(place, 2).strip()


def test_03_stream_from_python(served: Place) -> None:
    assert only(served, 3).strip()


def test_04_json_that_fits_a_schema(served: Place) -> None:
    answer = json.loads(only(served, 4))
    assert answer.keys() == {"city", "is_capital"} and isinstance(answer["is_capital"], bool)


def test_05_a_tool_is_called(served: Place) -> None:
    assert "name='get_weather'" in only(served, 5)


def test_06_a_file_of_requests(place: Place) -> None:
    only(place, 6)
    (line,) = (place.folder / "questions.output.jsonl").read_text().splitlines()
    assert json.loads(line)["response"]["status_code"] == 200


def test_07_metrics(served: Place) -> None:
    assert "octavo_requests_finished_total" in only(served, 7)


def test_08_memory_is_limited(place: Place) -> None:
    ((_, command),) = TASKS[8].blocks
    with place.serving(command) as said:
        tokens, mebibytes = re.search(r"KV pool +([\d,]+) tokens, (\d+) MiB", said).groups()  # type: ignore[union-attr]
        assert 0 < int(mebibytes) <= 64 and int(tokens.replace(",", "")) > 2048
    assert "KV" in place.run("sh", "octavo plan smollm2")


def test_09_a_key_is_asked_for(place: Place) -> None:
    ((_, block),) = TASKS[9].blocks
    serve, ask = block.splitlines()
    with place.serving(serve):
        assert "smollm2" in place.run("sh", ask)
        without = re.sub(r" -H '.*'", " -o /dev/null -w '%{http_code}'", ask)
        assert place.run("sh", without) == "401"


def test_10_why_a_request_waits(served: Place) -> None:
    ((_, block),) = TASKS[10].blocks
    many, ask = block.splitlines()
    with subprocess.Popen(
        ["bash", "-c", served.text(many) + "\nwait"], env=served.environ, cwd=served.folder
    ) as asking:
        try:
            said = served.run("sh", ask)
            for number in itertools.cycle(range(40, 0, -1)):  # whoever came late: curls do not keep the order
                if "waits at position" in said:
                    break
                assert asking.poll() is None, said
                said = served.run("sh", ask.replace("mine-40", f"mine-{number}"))
            (explanation,) = json.loads(said)["explanations"]
            assert re.search(r"waits at position \d+ of \d+: \w+", explanation["text"]), explanation
        finally:
            names = [f"http://127.0.0.1:8000/v1/requests/mine-{number}/cancel" for number in range(1, 41)]
            served.run("sh", f"curl -s -o /dev/null -X POST {' '.join(names)}")
            asking.kill()


def only(place: Place, number: int) -> str:
    """What the one block of a task prints."""
    ((language, block),) = TASKS[number].blocks
    return place.run(language, block)
