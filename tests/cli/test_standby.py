"""octavo fleet --standby-of: the front is killed in mid-stream, and the standby goes on with the same answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.fake_server import COMMON, FakeServer
from tests.reliability.retrying import Retrying
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.fleet.standby import FrontTerm

ENV = {"FAKE_STEP_S": "0.02"}
WAIT_S = 60.0


class Fleet(FakeServer):
    verb = "fleet"


class Standby:
    """A standby as a process; `FakeServer` would wait until it serves."""

    def __init__(self, model: str, log: Path, *flags: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*FakeServer.program, "fleet", model, *COMMON, *flags],
                stdin=subprocess.DEVNULL,
                stderr=out,
                env={**os.environ, **ENV},
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, words: str) -> None:
        wait_until(lambda: words in self.text, lambda: self.text)


def wait_until(condition: Callable[[], object], explain: Callable[[], str] = str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.05)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="octavo-") as short:  # pytest's are too long for a socket
        monkeypatch.setenv("OCTAVO_RUN_DIR", short)
        yield Path(short)


def stream(port: int, key: str, max_tokens: int = 150) -> Retrying:
    return Retrying(
        port, key, {"prompt": "the cat", "max_tokens": max_tokens, "ignore_eos": True, "seed": 4, "stream": True}
    )


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code


def test_streams_go_on_at_the_standby_after_the_front_was_killed(folder: Path) -> None:
    model = str(make_tiny_model("smollm2", folder / "tiny"))
    front_flags = (
        "--journal",
        str(folder / "a"),
        "--journal-address",
        "127.0.0.1:0",
        "--journal-sync",
        "standby",
    )
    with Fleet(model, folder / "front.log", *front_flags, env=ENV) as front:
        feed = front._found(r"standbys .* at (\S+)", 1)
        flags = ("--journal", str(folder / "b"), "--standby-of", feed, "--takeover-after", "1")
        standby = Standby(model, folder / "standby.log", *flags)
        try:
            standby.wait_for("follows the front")
            url = re.findall(r"(http://\S+) answers 503", standby.text)[0]
            assert [status_of(f"{url}/{path}") for path in ("readyz", "v1/models", "livez")] == [503, 503, 200]
            port = urlsplit(url).port or 0
            clients = asyncio.run(_kill_under_streams(front, standby, port))
            standby.wait_for("takes over")
            assert FrontTerm.read(folder / "b") == FrontTerm(1, is_front=True)
            assert "requests go on" in standby.text
            plain, *cut = clients
            assert all(client.is_done for client in clients), standby.text
            assert [client.choices for client in cut] == [plain.choices] * len(cut)
            assert all(len(client.ids) == 1 for client in cut), "each request ran once"
            standby.process.send_signal(signal.SIGTERM)
            assert standby.process.wait(WAIT_S) == 0, standby.text
            assert "Traceback" not in standby.text
        finally:
            with contextlib.suppress(ProcessLookupError):
                standby.process.kill()
            standby.process.wait(WAIT_S)


async def _kill_under_streams(front: FakeServer, standby: Standby, port: int) -> list[Retrying]:
    """Return an undisturbed stream and those that were open when the front was killed, all read to their ends."""
    at_front = urlsplit(front.url).port or 0
    plain = await stream(at_front, "plain").run()
    cut = [stream(at_front, f"cut-{number}") for number in range(4)]
    running = [asyncio.create_task(client._once()) for client in cut]
    async with asyncio.timeout(WAIT_S):
        while any(len(client.events) < 5 for client in cut):
            await asyncio.sleep(0.01)
    assert not any(client.is_done for client in cut)
    os.kill(front.process.pid, signal.SIGKILL)  # its children end with it
    await asyncio.gather(*running)
    for client in cut:
        client.port = port
    await asyncio.gather(*(client.run() for client in cut))
    return [plain, *cut]


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--standby-of", "127.0.0.1:1"), "--standby-of needs --journal"),
        (("--journal-address", "127.0.0.1:1"), "--journal-address needs --journal"),
        (("--journal", "x", "--standby-of", "nowhere"), "--standby-of is 'nowhere'"),
        (("--journal", "x", "--journal-sync", "standby"), "--journal-sync standby needs --journal-address"),
    ],
)
def test_settings_that_lack_something_are_refused(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["fleet", "--port", "0", *flags]) == 2
    assert message in capsys.readouterr().err
