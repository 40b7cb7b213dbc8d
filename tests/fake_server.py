"""`octavo serve` around a fake executor: real processes, sockets and text, and no torch, so that it starts in a second.

`python fake_server.py serve|fleet ARGUMENTS` is the supervisor, `api` its child, `engine` the child's. A step takes
FAKE_STEP_S seconds (0.005); "broken" in FAKE_ENGINE keeps engines from opening once FAKE_FILE exists; the api logs
FAKE_LINES errors a second, with tracebacks and from a hundred statements.
`FakeServer` runs one for a test.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from octavo.config import Config  # noqa: E402
from octavo.core.limits import Limits  # noqa: E402
from octavo.core.scheduler import Scheduler  # noqa: E402
from octavo.engine.loop import EngineLoop  # noqa: E402
from octavo.engine.observation import observe_engine  # noqa: E402
from octavo.errors import CapacityError  # noqa: E402
from octavo.executors.protocol import Capacity, ExecutorSpec  # noqa: E402
from tests.fake_model import FakeExecutor  # noqa: E402  the path comes first

VOCAB_SIZE = 300  # of the tiny models
MAX_MODEL_LEN = 256
COMMON = ["--port", "0", "--max-model-len", str(MAX_MODEL_LEN)]


class SlowExecutor(FakeExecutor):
    """Its steps take time."""

    def collect(self, ticket: object) -> Any:
        time.sleep(float(os.environ.get("FAKE_STEP_S", "0.005")))
        return super().collect(ticket)


def open_engine(config: Config) -> tuple[EngineLoop, Capacity]:
    if os.environ.get("FAKE_ENGINE") == "broken" and Path(os.environ["FAKE_FILE"]).exists():
        raise CapacityError("the pool holds nothing")
    executor = SlowExecutor(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
    limits = Limits(
        block_size=16,
        num_blocks=(512,),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        max_batch_tokens=512,
        max_sequences=config.scheduling.max_sequences or 32,
    )
    capacity = executor.open(ExecutorSpec(limits.max_sequences, limits.max_batch_tokens, 16, num_blocks=512))
    scheduler = Scheduler(limits)
    loop = EngineLoop(scheduler, executor)
    observe_engine(loop, scheduler, config.statistics)
    return loop, capacity


def _flood(num_lines: int) -> None:
    log = logging.getLogger("octavo.flood")
    try:
        raise ConnectionResetError("a client left")
    except ConnectionResetError:
        fault = sys.exc_info()
    for number in itertools.count():
        log.handle(log.makeRecord(log.name, logging.ERROR, __file__, number % 100, "it failed", (), fault))
        if number % 10 == 0:
            time.sleep(10 / num_lines)


def main(role: str, arguments: list[str]) -> int:
    """Be one of the processes."""
    if role == "engine":
        from octavo.engine.process_side import run_engine_process

        return run_engine_process(open_engine, arguments)
    this = (sys.executable, __file__)
    if role == "api":
        from octavo.cli import api_process

        if num_lines := int(os.environ.get("FAKE_LINES", "0")):
            threading.Thread(target=_flood, args=(num_lines,), daemon=True).start()
        return api_process.main(arguments, (*this, "engine"))
    from octavo import cli
    from octavo.cli import serve

    serve.COMMAND = (*this, "api")
    return cli.main([role, *arguments])


class FakeServer:
    """A running one: its `url`, `admin` (the socket's path), `log` (a file) for what it says."""

    program: tuple[str, ...] = (sys.executable, __file__)
    common: tuple[str, ...] = tuple(COMMON)
    verb = "serve"

    def __init__(self, model: str, log: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        command = [*self.program, self.verb, model, *self.common, *flags]
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stderr=out, env={**os.environ, **(env or {})}
            )
        end = time.monotonic() + 60
        while not re.search(r"^try .*\n", self.text, re.MULTILINE):
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise AssertionError(self.text)
            time.sleep(0.02)
        self.url = self._found(r"http://[^/]+")
        folder = Path({**os.environ, **(env or {})}["OCTAVO_RUN_DIR"])
        (self.admin,) = map(str, folder.glob(f"{self.process.pid}-*/admin.sock"))

    @property
    def text(self) -> str:
        """What it said so far."""
        return self.log.read_text()

    def _found(self, pattern: str, group: int = 0) -> str:
        match = re.search(pattern, self.text)
        assert match is not None, self.text
        return match[group]

    def status(self) -> Any:
        """What its admin socket tells."""
        from octavo.cli.servers import call_admin

        return call_admin(self.admin, "status")

    def pid(self, role: str) -> int:
        """The process of a role now."""
        return int(self.status()["processes"][role])

    def get(self, path: str, timeout_s: float = 60.0) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of a path."""
        return self._open(urllib.request.Request(self.url + path), timeout_s)

    def post(
        self, path: str, body: object, timeout_s: float = 60.0, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers and JSON of what it answers to a body."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self._open(urllib.request.Request(self.url + path, json.dumps(body).encode(), sent), timeout_s)

    def _open(self, request: urllib.request.Request, timeout_s: float) -> tuple[int, dict[str, str], Any]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.status, {k.lower(): v for k, v in answer.headers.items()}, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, {k.lower(): v for k, v in error.headers.items()}, json.load(error)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        """Signal it and wait; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its children end with it
        self.process.wait(30)


class RealServer(FakeServer):
    """A running `octavo serve` with nothing played; start it with a scripted model where torch takes too long."""

    program = (sys.executable, "-m", "octavo")
    common = ("--port", "0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
