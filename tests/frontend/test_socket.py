"""Client and server over a Unix socket in one process: the same promises as in process, and hostile bytes."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engine.direct_client import DirectClient, dial
from tests.engine.fakes import (
    GatedExecutor,
    ScriptedExecutor,
    expected,
    make_limits,
    make_request,
    make_text,
    open_fake,
)

from octavo.config import StatisticsConfig
from octavo.core.request import FinishReason, SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.engine import wire
from octavo.engine.client import Accepted
from octavo.engine.loop import EngineLoop
from octavo.engine.observation import observe_engine
from octavo.engine.socket_server import EngineServer
from octavo.errors import (
    AdmissionError,
    DuplicateRequestError,
    EngineDeadError,
    EngineError,
    ErrorKind,
    InvalidRequestError,
)
from octavo.frontend.sessions import Sessions
from octavo.observe.explainer import unknown
from octavo.server.http.listener import new_event_loop


class Server:
    """An EngineServer in a thread."""

    def __init__(self, executor: GatedExecutor, epoch: int = 1) -> None:
        self.executor = executor
        self.client_end, server_end = socket.socketpair()
        limits = make_limits()
        self.capacity = open_fake(executor, limits)
        scheduler = Scheduler(limits)
        self.loop = EngineLoop(scheduler, executor)
        observe_engine(self.loop, scheduler, StatisticsConfig())
        self.server = EngineServer(server_end, epoch)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        self.server.serve(self.loop, self.capacity)
        self.server.close()

    def join(self) -> None:
        self.executor.gate.set()
        self.thread.join(20)
        assert not self.thread.is_alive() and self.loop.join(0)


@asynccontextmanager
async def connected(
    executor: GatedExecutor | None = None, epoch: int = 1
) -> AsyncIterator[tuple[DirectClient, Server]]:
    server = Server(executor or GatedExecutor())
    client = await DirectClient.over(server.client_end, epoch)
    try:
        yield client, server
    finally:
        server.executor.gate.set()
        client.abandon()
        await client.ended()
        await asyncio.to_thread(server.join)


async def read(client: DirectClient, name: str) -> tuple[list[int], Any]:
    ids: list[int] = []
    async for output in client.outputs(name):
        assert output.position == len(ids)
        ids += output.token_ids
        last = output
    return ids, last


async def test_requests_run_end_to_end() -> None:
    async with connected() as (client, server):
        capacity = await client.ready()
        assert capacity == server.capacity
        requests = [make_request(f"r{i}", max_tokens=3 + i) for i in range(12)]
        accepted = await asyncio.gather(*map(client.submit, requests))
        assert accepted == [Accepted(r.request_id, r.params.max_tokens or 0, False) for r in requests]
        answers = await asyncio.gather(*(read(client, r.request_id) for r in requests))
        for request, (ids, last) in zip(requests, answers, strict=True):
            assert ids == expected(request) and last.finish_reason is FinishReason.LENGTH
        statistics: Any = await client.statistics()
        assert statistics["scheduler"]["finished"]["length"] == 12
        assert len(client.requests) == 0


async def test_refusals_keep_their_class() -> None:
    async with connected() as (client, _):
        with pytest.raises(AdmissionError, match="128") as caught:
            await client.submit(make_request("long", length=400))
        assert caught.value.param == "prompt"
        await client.submit(make_request("long", max_tokens=2))
        with pytest.raises(EngineError, match="no verb"):
            await client.control("dance")  # type: ignore[arg-type]
        assert await client.control("explain", "nobody") == {**unknown("nobody"), "new_request_s": None}


async def test_L06_duplicates_are_refused_on_this_side_already() -> None:
    async with connected() as (client, server):
        server.executor.gate.clear()
        await client.submit(make_request("a", max_tokens=50))
        with pytest.raises(DuplicateRequestError):
            await client.submit(make_request("a"))
        server.executor.gate.set()
        assert (await read(client, "a"))[1].finish_reason is FinishReason.LENGTH


async def test_L03_stream_then_cancel() -> None:
    executor = GatedExecutor()
    executor.shut_after = 4
    async with connected(executor) as (client, server):
        await client.submit(make_request("a", max_tokens=100))
        await asyncio.to_thread(executor.shut.wait, 20)
        client.cancel(["a", "nobody"])
        while not server.loop._inbox:
            await asyncio.sleep(0.002)
        executor.gate.set()
        assert (await read(client, "a"))[1].finish_reason is FinishReason.CANCELLED


async def test_S19_control_verbs_cross() -> None:
    async with connected() as (client, _):
        assert await client.control("pause") is True
        await client.submit(make_request("a"))
        told = await client.control("explain", "a")
        assert isinstance(told, dict) and (told["state"], told["reason"]) == ("waiting", "paused")
        assert await client.control("resume") is True
        await read(client, "a")
        assert await client.control("reset_prefix_cache") is True


async def test_text_sessions_run_over_a_socket() -> None:
    async with connected() as (client, _):
        sessions = Sessions(client, make_text())
        session = await sessions.submit([5, 6], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        (delta,) = await session.collect()
        assert len(delta.token_ids) == 9 and delta.usage is not None


async def test_P05_choices_end_one_by_one_over_a_socket() -> None:
    said = {"a/0": "the END" + "x" * 60, "a/1": "it goes on and on", "a/2": "no"}
    text = make_text()
    executor = ScriptedExecutor({name: text.tokenizer.encode(words) for name, words in said.items()})
    async with connected(executor) as (client, server):
        sessions = Sessions(client, text, capacity=await client.ready())
        params = SamplingParams(n=3, max_tokens=90, stop=("END",))
        session = await sessions.submit(text.tokenizer.encode("Say something:"), params, request_id="a")
        deltas = [delta async for delta in session]
        statistics: Any = await client.statistics()
    texts = ["".join(delta.text for delta in deltas if delta.choice == choice) for choice in range(3)]
    assert texts == ["the ", "it goes on and on", "no"]
    ended = [delta.choice for delta in deltas if delta.finish_reason is not None]
    assert sorted(ended) == [0, 1, 2] and deltas[-1].usage is not None
    assert statistics["scheduler"]["num_blocks_used"] == 0 and client.num_malformed == server.server.num_malformed == 0


async def test_an_engine_of_another_version_is_refused(tmp_path: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        capacity = open_fake(GatedExecutor(), make_limits())
        writer.write(wire.frame(wire.Ready(1, wire.VERSION - 1, capacity)))
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(greet, str(tmp_path / "engine.sock")):
        client = await DirectClient.over(dial(tmp_path / "engine.sock"), 1)
        with pytest.raises(EngineError, match=f"version {wire.VERSION - 1}"):
            await client.ready()
        await client.ended()


async def test_L04_close_answers_open_requests_and_ends_the_server() -> None:
    executor = GatedExecutor()
    async with connected(executor) as (client, server):
        executor.gate.clear()
        await client.submit(make_request("a", max_tokens=100))
        reading = asyncio.create_task(read(client, "a"))
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.01)
        executor.gate.set()
        await closing
        await client.close()
        assert (await reading)[1].finish_reason is FinishReason.CANCELLED
        await asyncio.to_thread(server.thread.join, 20)
        with pytest.raises(EngineDeadError, match="stopped"):
            await client.submit(make_request("b"))


@pytest.mark.parametrize("answer", [object(), "x" * (wire.MAX_FRAME_BYTES + 1), "\ud800", 2**70])
async def test_an_answer_that_cannot_be_sent_is_an_error_and_the_engine_goes_on(answer: object) -> None:
    async with connected() as (client, server):
        server.loop.verbs["odd"] = lambda _: answer
        with pytest.raises(EngineError, match="cannot be sent"):
            await client.control("odd")  # type: ignore[arg-type]
        await client.submit(make_request("a", max_tokens=3))
        assert (await read(client, "a"))[1].finish_reason is FinishReason.LENGTH


async def test_a_writer_that_breaks_ends_the_connection() -> None:
    async with connected() as (client, server):
        server.server._encode = lambda _: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(EngineDeadError):
            await client.submit(make_request("a", max_tokens=3))
        await client.ended()
        await asyncio.to_thread(server.thread.join, 20)
        assert not server.thread.is_alive()


async def test_a_connection_that_ends_answers_everyone_with_an_error() -> None:
    executor = GatedExecutor()
    async with connected(executor) as (client, server):
        executor.gate.clear()
        await client.submit(make_request("a", max_tokens=100))
        asking = asyncio.create_task(client.statistics())
        submitting = asyncio.create_task(client.submit(make_request("b")))
        reading = asyncio.create_task(read(client, "a"))
        await asyncio.sleep(0.01)
        server.server._connection.shutdown(socket.SHUT_RDWR)
        for task in (asking, submitting):
            with pytest.raises(EngineDeadError):
                await task
        last = (await reading)[1]
        assert last.finish_reason is FinishReason.ERROR and last.error.kind is ErrorKind.ENGINE_DEAD
        assert not client.is_alive
        client.cancel(["a"])


async def test_a_dying_engine_says_why_and_ends_its_server() -> None:
    executor = GatedExecutor()
    async with connected(executor) as (client, server):
        executor.fail = lambda plan, owners: EngineDeadError("the device is gone")
        await client.ready()
        try:
            await client.submit(make_request("a", max_tokens=50))
        except EngineDeadError:
            pass
        else:
            assert "the device is gone" in (await read(client, "a"))[1].message
        await client.ended()
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await client.submit(make_request("b"))
        await asyncio.to_thread(server.thread.join, 20)


async def test_a_client_that_is_gone_stops_the_engine() -> None:
    async with connected() as (client, server):
        await client.submit(make_request("a", max_tokens=100))
        client.abandon()
        await asyncio.to_thread(server.thread.join, 20)
        assert not server.loop.is_alive and server.loop.failure is None


async def test_frames_of_another_epoch_are_dropped_and_counted() -> None:
    async with connected(epoch=2) as (client, server):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.submit(make_request("a"))
        assert client.num_stale >= 1 and server.server.num_stale >= 1
        assert len(client.requests) == 0


async def test_a_request_over_the_frame_cap_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected() as (client, _):
        await client.ready()
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 500)
        with pytest.raises(InvalidRequestError, match="too large"):
            await client.submit(make_request("a", length=500))
        assert len(client.requests) == 0


def test_reliability_30_fuzzed_frames_at_the_server_are_dropped() -> None:
    """Malformed messages are dropped and counted; the connection goes on; an impossible length ends it."""
    server, rng = Server(GatedExecutor()), random.Random(3)
    connection = server.client_end
    good = wire.frame(wire.Submit.of(1, make_request("a")))
    for _ in range(300):
        body = bytearray(good[4:])
        for _ in range(rng.randrange(1, 20)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        body = body[: rng.randrange(len(body))] if rng.random() < 0.3 else body
        connection.sendall(struct.pack("<I", len(body)) + body)
    connection.sendall(wire.frame(wire.ControlRequest(1, 5, "statistics", "")))
    splitter, answer = wire.FrameSplitter(), None
    while answer is None:
        data = connection.recv(1 << 16)
        assert data, "the server hung up"
        messages = [wire.decode_from_engine(body) for body in splitter.feed(data)]
        answer = next((m for m in messages if isinstance(m, wire.ControlReply)), None)
    assert server.server.num_malformed > 200
    connection.sendall(b"\xff\xff\xff\xff")
    while connection.recv(1 << 16):
        pass
    connection.close()
    server.join()


async def test_reliability_30_fuzzed_frames_at_the_client_are_dropped() -> None:
    rng = random.Random(4)
    with tempfile.TemporaryDirectory() as folder:
        path, done = Path(folder) / "s", asyncio.Event()

        async def hostile(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            good = wire.frame(wire.SubmitReply(1, Accepted("a", 5, True)))[4:]
            for _ in range(200):
                body = bytearray(good)
                body[rng.randrange(len(body))] = rng.randrange(256)
                writer.write(struct.pack("<I", len(body)) + bytes(body) + struct.pack("<I", 3) + rng.randbytes(3))
            await done.wait()
            writer.write(b"\xff\xff\xff\xff")
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(hostile, str(path))
        client = await DirectClient.over(dial(path), 1)
        submitting = asyncio.create_task(client.submit(make_request("z")))
        while client.num_malformed < 150:
            await asyncio.sleep(0.005)
        done.set()
        with pytest.raises(EngineDeadError, match="announced"):
            await submitting
        await client.ended()
        server.close()
        await server.wait_closed()


def test_what_is_sent_between_a_break_and_its_notice_is_answered_at_the_end(tmp_path: Path) -> None:
    """uvloop refuses to write to a transport that has just broken, asyncio does not."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_unix_server(silent, str(tmp_path / "s"))
        client = await DirectClient.over(dial(tmp_path / "s"), 1)
        client._writer.transport.abort()
        assert client.is_alive, "not noticed yet"
        answer = client.send(make_request("a"))
        client.post_cancel(("a",))
        client.post_control("pause")
        with pytest.raises(EngineDeadError):
            await client.statistics()
        with pytest.raises(EngineDeadError):
            await answer
        assert not client.is_alive
        await asyncio.sleep(0.01)
        server.close()
        await server.wait_closed()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(main())
