"""Readers that do not read: outputs in slices, a bound on what waits, an error at the end, and going on with a key."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import ServingConfig
from octavo.frontend.sessions import MAX_SLICE, slice_tokens
from octavo.server import reply
from octavo.server.http import connection
from octavo.server.http.errors import ApiError
from octavo.server.http.limits import HttpLimits
from octavo.server.http.listener import open_socket
from octavo.server.resumable_stream import Position
from tests.server.fakes import Harness, Wire
from tests.server.test_idempotency import CHAT, assembled, blocks, chat_body, key, plain
from tests.server.test_run import KEY, running


def test_slices_with_many_log_probabilities_are_short() -> None:
    assert slice_tokens(None) == MAX_SLICE and slice_tokens(20) * 21 <= MAX_SLICE and slice_tokens(10_000) == 1


PLACES = st.lists(
    st.one_of(st.just((-1, 0)), st.tuples(st.integers(0, 10**6), st.integers(0, 2))), min_size=1, max_size=9
)


@given(PLACES, st.booleans())
def test_positions_are_read_as_they_were_told(places: list[tuple[int, int]], has_usage: bool) -> None:
    position = Position(places, has_usage)
    assert Position.parse(position.text(), len(places)) == position
    for other in (len(places) - 1, len(places) + 1):
        with pytest.raises(ApiError):
            Position.parse(position.text(), other)


@given(st.text(max_size=20), st.integers(1, 3))
def test_whatever_the_event_id_it_is_read_or_refused(text: str, num_choices: int) -> None:
    try:
        position = Position.parse(text, num_choices)
    except ApiError as error:
        assert error.code == "invalid_event_id"
    else:
        assert len(position.places) == num_choices


async def test_a_slow_reader_with_a_key_is_cut_and_goes_on_later() -> None:
    harness = Harness(limits=HttpLimits(stall_timeout_s=0.05))
    body = chat_body(stream=True, logprobs=True)
    cuts: list[bytes] = []
    slow = Wire(harness.app, CHAT, body, key())
    slow.scope |= {connection.CUT: cuts.append}  # type: ignore[dict-item]
    slow.pause_after = 2
    reading = slow.start()
    await asyncio.wait_for(reading, 60)
    assert len(cuts) == 1 and json.loads(cuts[0].split(b"\n")[0][6:])["error"]["code"] == "slow_reader"
    assert not harness.engine.cancelled
    had = blocks(slow.text)
    last = had[-1][0] if had else None
    rest = Wire(harness.app, CHAT, body, key(last=last))
    await asyncio.wait_for(rest.start(), 60)
    whole = Wire(harness.app, CHAT, body, key())
    await asyncio.wait_for(whole.start(), 60)
    assert assembled(plain(had) + plain(blocks(rest.text))) == assembled(plain(blocks(whole.text)))


async def test_what_waits_for_a_reader_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply, "LOOK_S", 0.01)
    harness = Harness()

    async def cut_after(unread_bytes: int, patience_s: float) -> bool:
        monkeypatch.setattr("octavo.server.generation.Generation.unread_bytes", property(lambda self: unread_bytes))
        wire = Wire(harness.app, CHAT, chat_body(stream=True))
        wire.pause_after = 1
        reading = wire.start()
        done, _ = await asyncio.wait((reading,), timeout=patience_s)
        wire.reads.set()
        wire.leave()
        await reading
        return bool(done)

    assert await cut_after(harness.limits.max_unread_bytes + 1, 10)
    assert not await cut_after(harness.limits.max_unread_bytes, 0.2)


def test_a_whole_answer_that_nobody_reads_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is dropped: written and not read, it would be held for ever."""

    def open_small(serving: ServingConfig) -> socket.socket:
        listener = open_socket(serving)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # what it accepts inherits it
        return listener

    monkeypatch.setattr(connection, "LINGER_S", 0.2)
    monkeypatch.setattr("tests.server.test_run.open_socket", open_small)
    with running(limits=HttpLimits(stall_timeout_s=0.2)) as server, socket.socket() as sock:
        server.engine.text = "x" * 1_000
        body = json.dumps({"prompt": "hi", "n": 2, "logprobs": 5}).encode()
        host, port = server.url.removeprefix("http://").split(":")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(60)
        sock.connect((host, int(port)))
        lines = f"host: localhost\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
        sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{lines}".encode() + body)
        assert sock.recv(12) == b"HTTP/1.1 200"
        end = time.monotonic() + 60
        while server.server._server.server_state.connections:
            assert time.monotonic() < end, "its connection is still there"
            time.sleep(0.01)
