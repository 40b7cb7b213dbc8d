"""`octavo serve --journal`: what is open when it is told to end goes on when it is started again."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.fake_server import FakeServer
from tests.reliability.retrying import Retrying
from tests.tiny_models import make_tiny_model

ENV = {"FAKE_STEP_S": "0.02"}


def asking(server: FakeServer, key: str) -> Retrying:
    port = urlsplit(server.url).port
    assert port is not None
    return Retrying(port, key, {"prompt": "the cat", "max_tokens": 150, "ignore_eos": True, "seed": 4, "stream": True})


@pytest.mark.slow
def test_a_stream_that_was_cut_by_the_end_goes_on_after_a_new_start(tmp_path: Path) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    flags = ("--journal", str(tmp_path / "journal"), "--shutdown-timeout", "0.1")
    with FakeServer(model, tmp_path / "log", *flags, env=ENV) as server:
        plain = asyncio.run(asking(server, "plain").run())
        cut = asking(server, "cut")

        async def ended() -> None:
            running = asyncio.create_task(cut._once())
            while len(cut.events) < 5:
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            await running

        asyncio.run(ended())
        assert server.process.wait(30) == 0 and not cut.is_done, server.text
        num_before = len(cut.events)
    with FakeServer(model, tmp_path / "log2", *flags, env=ENV) as server:
        assert "journal: 1 requests go on, 1 answers are kept" in server.text
        cut.port = urlsplit(server.url).port or 0
        asyncio.run(cut.run())
        kept = asyncio.run(asking(server, "plain").run())
        assert server.end() == 0
    assert cut.is_done and cut.choices == plain.choices == kept.choices
    assert 5 <= num_before < len(cut.events) and cut.ids != plain.ids and kept.ids == plain.ids


@pytest.mark.slow
def test_a_journal_serves_one_server(tmp_path: Path) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    flags = ("--journal", str(tmp_path / "journal"))
    with FakeServer(model, tmp_path / "log", *flags) as server:
        with pytest.raises(AssertionError, match="in use by another server"):
            FakeServer(model, tmp_path / "log2", *flags)
        assert server.end() == 0
