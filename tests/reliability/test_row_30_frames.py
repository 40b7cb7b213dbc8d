"""Row 30: frames out of order, of wrong types, cut, repeated, of another epoch, on the engine's socket, both ways.

Fields of real messages are replaced by values of any kind (which gets past the decoder far oftener than random bytes
do), and bytes are turned over on top. Neither side may end, raise, or give a wrong answer to a request beside.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.core.plan import Event, EventKind, Events, TokenLogprobs
from octavo.core.request import FinishReason, SamplingParams, Want
from octavo.engine import wire
from octavo.engine.client import Accepted, finished
from octavo.errors import EngineError, ErrorKind
from octavo.frontend.open_requests import OpenRequests
from octavo.frontend.socket_client import SocketClient
from tests.engine.direct_client import dial
from tests.engine.fakes import GatedExecutor, expected, make_limits, make_request, open_fake
from tests.frontend.test_socket import Server
from tests.reliability.scorecard import Score

SCRAP = (None, True, -1, 0, 1, 2**31, 2**63, -(2**63), 0.5, float("nan"), float("inf"), "", "r1", "é" * 300, b"",
         b"\0" * 7, b"\xff" * 64, [], [None], [1, 2, 3], {}, {"a": 1}, [["r1", 0, []]])  # fmt: skip


def to_engine() -> list[Any]:
    """One of each message that a client may send."""
    several = SamplingParams(n=2, max_tokens=4, seed=3, stop=("x",))
    return [
        wire.Submit.of(1, make_request("fuzz", max_tokens=4)),
        wire.Submit.of(1, make_request("fuzz2", params=several, wants=Want.SAMPLE | Want.SCORE, deadline=1e9)),
        wire.Submit.of(1, make_request("fuzz3", emitted_token_ids=array("i", [4, 5]), queue_timeout=5.0)),
        wire.CancelRequests(1, ("fuzz", "nobody"), FinishReason.STOP, 0),
        wire.ControlRequest(1, 7, "explain", "fuzz"),
        wire.ControlRequest(1, 8, "export_statistics", ""),
    ]


def from_engine() -> list[Any]:
    """One of each message that an engine may send."""
    scores = (("r0", 1, (TokenLogprobs(5, -0.5, 1),)),)
    admitted = Event(EventKind.ADMITTED, "r0", 0.1, 1, cached_tokens=2)
    events = Events(
        1, 0.5, ["r0", "r1"], array("i", [0, 0]), array("i", [0, 9]), array("i", [7, 8]),
        [TokenLogprobs(7, -1.0, 1), None], scores, (("r3", b"abcd"),),
        (admitted, finished("r2", FinishReason.STOP, choice=1), finished("r9", FinishReason.LENGTH)),
    )  # fmt: skip
    return [
        wire.Outputs.of(1, events),
        wire.SubmitReply(1, Accepted("r0", 5, False)),
        wire.ControlReply(1, 0, {"a": 1}),
        wire.ErrorReply(1, ErrorKind.ADMISSION, "no", "prompt", "r5"),
        wire.ErrorReply(1, ErrorKind.MODEL_FILE, "x: y", None, 3),
        wire.Ready(1, wire.VERSION, open_fake(GatedExecutor(), make_limits())),
    ]


def mutate(rng: random.Random, value: Any) -> Any:
    """Replace something in a decoded message, at any depth."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(1 if isinstance(value[0], str) and value[0].istitle() else 0, len(value) + 1)
        if index == len(value):
            return [*value, rng.choice(SCRAP)] if rng.random() < 0.5 else value[:-1]
        return [*value[:index], mutate(rng, value[index]), *value[index + 1 :]]
    return rng.choice(SCRAP)


def frames(rng: random.Random, messages: list[Any], count: int) -> Iterator[bytes]:
    """Bodies of frames, most of them wrong."""
    for _ in range(count):
        body = wire.frame(rng.choice(messages))[4:]
        if rng.random() < 0.8:
            body = msgspec.msgpack.encode(mutate(rng, msgspec.msgpack.decode(body)))
        if rng.random() < 0.2:
            broken = bytearray(body)
            for _ in range(rng.randrange(1, 4)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            body = bytes(broken[: rng.randrange(1, len(broken) + 1)])
        yield body


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("seed", [1, 2])
def test_row_30_an_engine_goes_on_whatever_its_client_sends(score: Score, seed: int) -> None:
    server, rng = Server(GatedExecutor()), random.Random(seed)
    connection = server.client_end
    connection.settimeout(60)
    splitter, count = wire.FrameSplitter(), score.dose(1500, 20_000)
    for number, body in enumerate(frames(rng, to_engine(), count)):
        connection.sendall(framed(body))
        if number % 64 == 0:
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for body in splitter.feed(connection.recv(1 << 20)):
                    wire.decode_from_engine(body)
            connection.settimeout(60)
    request = make_request("good", max_tokens=9)
    connection.sendall(
        wire.frame(wire.CancelRequests(1, tuple(e for e in server.loop._outbox.open_ids), FinishReason.STOP))
    )
    connection.sendall(wire.frame(wire.Submit.of(1, request)))
    ids: dict[int, int] = {}
    has_ended = False
    while not has_ended:
        data = connection.recv(1 << 20)
        assert data, f"the engine hung up: {server.loop.failure}"
        for body in splitter.feed(data):
            message = wire.decode_from_engine(body)
            if isinstance(message, wire.Outputs):
                events = message.events()
                for name, position, token in zip(events.request_ids, events.positions, events.token_ids, strict=True):
                    if name == "good":
                        ids[position] = token
                has_ended |= any(e.request_id == "good" and e.kind == EventKind.FINISHED for e in events.decisions)
    assert [ids[position] for position in sorted(ids)] == expected(request)
    score.tell(
        "frames to an engine: dropped, of another epoch",
        f"{server.server.num_malformed}, {server.server.num_stale} of {count}",
    )
    score.count("engines that ended", int(server.loop.failure is not None or not server.loop.is_alive))
    assert server.server.num_malformed > count // 10
    connection.close()
    server.join()


async def test_row_30_a_keeper_goes_on_whatever_its_engine_sends(score: Score) -> None:
    """What is left of the stream is right: three requests beside the noise get their ids, each once."""
    rng, count = random.Random(5), score.dose(1500, 20_000)
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    requests = [make_request(f"q{i}", max_tokens=12) for i in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "s"

        async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            noise = frames(rng, from_engine(), count)
            for position in range(12):
                for _, body in zip(range(count // 12), noise, strict=False):
                    writer.write(framed(body))
                column = array("i", [position] * 3)
                ids = array("i", [expected(request)[position] for request in requests])
                events = Events(1, 0.0, [r.request_id for r in requests], array("i", [0] * 3), column, ids)
                writer.write(wire.frame(wire.Outputs.of(1, events)))
                await writer.drain()
            ends = tuple(finished(request.request_id, FinishReason.LENGTH) for request in requests)
            writer.write(wire.frame(wire.Outputs.of(1, Events(1, 0.0, decisions=ends))))
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(hostile, str(path))
        requests_here = OpenRequests()
        client = await SocketClient.over(dial(path), 1, requests_here.accept)
        requests_here.begin_epoch(client)
        submits = [asyncio.create_task(requests_here.submit(request)) for request in requests]
        await asyncio.sleep(0)
        equal = 0
        for request in requests:
            ids = [i async for output in requests_here.outputs(request.request_id) for i in output.token_ids]
            equal += ids == expected(request)
        score.tell(
            "frames to a client: dropped, of another epoch", f"{client.num_malformed}, {client.num_stale} of {count}"
        )
        score.share("correct requests beside them", equal, len(requests))
        client.abandon()
        await client.ended()
        for submit in submits:
            submit.cancel()
        await asyncio.gather(*submits, return_exceptions=True)
        server.close()
        await server.wait_closed()
    score.count("errors raised by frames", len(raised))
    assert client.num_malformed > count // 10


async def test_row_30_an_impossible_length_ends_the_connection_and_is_no_crash() -> None:
    with tempfile.TemporaryDirectory() as folder:

        async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\xff\xff\xff\x7f" + b"x" * 100)
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(hostile, str(Path(folder) / "s"))
        client = await SocketClient.over(dial(Path(folder) / "s"), 1, lambda epoch, events: None)
        with pytest.raises(EngineError, match="announced"):
            await client.control("statistics")
        await client.ended()
        server.close()
        await server.wait_closed()
