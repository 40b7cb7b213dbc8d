"""Row 7: aborts in any state leave nothing behind, and an abort of what has ended does nothing.

First the engine's loop alone, where the state that each abort met is counted; then client and server over a Unix
socket, with the ways in which a front end gives up: before the answer, while waiting, while reading, twice, or without
reading on. The whole dose is 10,000 aborts through each.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import threading
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from octavo.core.request import FinishReason, Request, SamplingParams
from octavo.core.request_state import RequestState, Status
from octavo.core.scheduler import Scheduler
from octavo.engine.client import Accepted
from octavo.engine.loop import EngineLoop
from octavo.engine.socket_server import EngineServer
from octavo.errors import OctavoError
from tests.core import invariants
from tests.engine.direct_client import DirectClient
from tests.engine.fakes import VOCAB_SIZE, GatedExecutor, Harness, make_limits, open_fake
from tests.reliability.scorecard import Score

STATES = ("waiting", "put back", "swapped", "in prefill", "decoding", "in flight", "mid-beam", "of several choices")
SCARCE = {"num_blocks": (24,), "max_sequences": 8, "max_batch_tokens": 12, "headroom": 0.0, "preemption": "auto"}


class HostExecutor(GatedExecutor):
    """With a host tier to swap to."""

    def make_pool(self, block_size: int, num_blocks: Any, host_blocks: Any = ()) -> None:
        super().make_pool(block_size, num_blocks, (40,))


def limits() -> Any:
    """So small that requests wait, are put back and are swapped."""
    return make_limits(host_blocks=(40,), **SCARCE)


def make(name: str, rng: random.Random) -> Request:
    """A request of any shape, that would run for long."""
    shape: dict[str, Any] = rng.choice(({}, {}, {"n": 2}, {"n": 3}, {"beam_width": 2, "n": 1}))
    width = shape.get("beam_width", shape.get("n", 1))
    params = SamplingParams(max_tokens=rng.randrange(6, 48 // width), seed=3, temperature=0.0, **shape)
    ids = [rng.randrange(3, 9) for _ in range(rng.choice((4, 16)))]
    ids += [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 30 // width))]
    return Request(name, array("i", ids), params, eos_token_ids=())


def states_of(entry: RequestState) -> list[str]:
    """What an abort meets."""
    met = ["of several choices"] * (len(entry.sequences) > 1 and entry.beams is None)
    met += ["in flight"] * bool(entry.in_flight)
    if entry.status == Status.WAITING:
        return [*met, "swapped" if entry.is_swapped else "put back" if entry.first_scheduled_at else "waiting"]
    mid_beam = entry.beams is not None and entry.is_decoding
    return [*met, "mid-beam" if mid_beam else "decoding" if entry.is_decoding else "in prefill"]


class WatchedScheduler(Scheduler):
    """Counts what each abort meets, and how many of those already ended changed anything."""

    __slots__ = ("met", "num_again")

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.met: Counter[str] = Counter()
        self.num_again = 0

    def cancel(self, request_ids: Iterable[str], *args: Any, **options: Any) -> int:
        names = tuple(request_ids)
        for name in dict.fromkeys(names):
            if name in self._state.requests:
                self.met.update(states_of(self._state.requests[name]))
                self.met["aborts"] += 1
        count = super().cancel(names, *args, **options)
        self.num_again += super().cancel(names, *args, **options)
        return count


class AbortHarness(Harness):
    def __init__(self, depth: int) -> None:
        executor = HostExecutor(lazy=depth > 1)
        super().__init__(executor, limits=limits(), depth=depth)
        self.scheduler = WatchedScheduler(self.limits)
        self.loop = EngineLoop(self.scheduler, executor, depth=depth)
        self.loop.attach(self.receive)


def test_row_07_aborts_in_any_state_leave_nothing_in_the_engine(score: Score) -> None:
    met: Counter[str] = Counter()
    num_aborts = score.dose(800, 10_000)
    num_held = num_open = num_again = num_unanswered = 0
    threads = threading.active_count()
    for depth in (1, 2, 3):
        rng = random.Random(depth)
        with AbortHarness(depth) as harness:
            scheduler = harness.scheduler
            assert isinstance(scheduler, WatchedScheduler)
            count = 0
            while scheduler.met["aborts"] < num_aborts / 3:
                while sum(not harness.inbox(name).ends for name in harness.requests) < 24:
                    harness.post(make(f"r{count}", rng))
                    count += 1
                harness.loop.control("explain", "r0", lambda _: None)
                for _ in range(rng.randrange(6)):  # let some steps pass
                    harness.ask(harness.loop.control, "statistics", "")
                open_names = [name for name in harness.requests if not harness.inbox(name).ends]
                names = rng.choice((open_names, open_names[:6], open_names[:12]))  # the first ones are running
                names = rng.sample(names, min(len(names), rng.choice((1, 1, 2, 6))))
                if rng.random() < 0.1:
                    harness.loop.cancel(names[:1], FinishReason.STOP, 0)  # one choice of it
                names += rng.sample(list(harness.requests), 2)  # ended ones too
                harness.loop.cancel(names * 2)
                if rng.random() < 0.02:
                    harness.ask(harness.loop.control, rng.choice(("drain", "pause", "reset_prefix_cache")), "")
                    for _ in range(3):
                        harness.loop.cancel(rng.sample(open_names, min(len(open_names), 1)))
                    harness.ask(harness.loop.control, "resume", "")
                for name in [name for name in harness.requests if harness.inbox(name).ends][:-40]:
                    assert len(harness.inbox(name).ends) == 1
                    del harness.requests[name]
            harness.ask(harness.loop.control, "drain", "")
            harness.ask(harness.loop.control, "cancel_all", "")
            harness.ends()
            harness.ask(harness.loop.control, "statistics", "")
            num_unanswered += sum(len(harness.inbox(name).ends) != 1 for name in harness.requests)
            statistics: Any = harness.ask(harness.loop.control, "statistics", "")
            num_held += statistics["scheduler"]["num_blocks_used"] + statistics["scheduler"]["num_swapped"]
            num_open += statistics["loop"]["open_requests"]
            num_again += scheduler.num_again
        invariants.check_no_leaks(harness.scheduler)
        met.update(scheduler.met)
    score.least("aborts", met["aborts"], num_aborts)
    score.tell("states met", ", ".join(f"{met[state]} {state}" for state in STATES))
    score.count("states not met", sum(met[state] < score.dose(1, 100) for state in STATES))
    score.count("aborts that had an effect twice", num_again)
    score.count("requests without exactly one end", num_unanswered)
    score.count("blocks or swapped requests left", num_held)
    score.count("open requests left", num_open)
    score.count("threads left", threading.active_count() - threads)


# -- over the socket


@asynccontextmanager
async def serving(depth: int) -> AsyncIterator[tuple[DirectClient, Scheduler, EngineLoop]]:
    """An engine behind its socket, in a thread; all of it is closed behind."""
    executor, sizes = HostExecutor(lazy=depth > 1), limits()
    capacity, scheduler = open_fake(executor, sizes), Scheduler(sizes)
    loop = EngineLoop(scheduler, executor, depth=depth)
    client_end, server_end = socket.socketpair()
    server = EngineServer(server_end, 1)

    def run() -> None:
        server.serve(loop, capacity)
        server.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = await DirectClient.over(client_end, 1)
    try:
        yield client, scheduler, loop
    finally:
        await client.close()
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()


async def give_up(client: DirectClient, name: str, rng: random.Random) -> str:
    """Submit a request and abort it in some way; how."""
    way = rng.choice(("before the answer", "while waiting", "while reading", "twice", "and do not read on"))
    request = make(name, rng)
    submitting = asyncio.ensure_future(client.submit(request))
    if way == "before the answer":
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        submitting.cancel()
        try:
            await submitting
        except (asyncio.CancelledError, OctavoError):
            return way
        client.cancel([name])  # the answer was quicker
    assert isinstance(await submitting, Accepted)
    if way in ("while waiting", "and do not read on"):
        client.cancel([name])
    if way == "and do not read on":
        return way
    num_outputs, most, ends = 0, rng.randrange(4), 0
    async for output in client.outputs(name):
        num_outputs += 1
        ends += output.is_final
        if num_outputs == most + 1:
            client.cancel([name])
            if way == "twice":
                client.cancel([name, "nobody"])
    assert ends == 1
    client.cancel([name])  # it has ended
    return way


async def test_row_07_aborts_over_the_socket_leave_nothing_in_the_front(score: Score) -> None:
    num_aborts, ways = score.dose(800, 10_000), Counter[str]()
    gc.collect()
    await asyncio.to_thread(int)  # asyncio keeps the threads that it makes for this
    fds, tasks, threads = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), threading.active_count()
    num_open = num_awaited = num_held = num_unread = 0
    for depth in (1, 2):
        async with serving(depth) as (client, scheduler, loop):
            await client.ready()
            rng, names = random.Random(depth), iter(range(num_aborts // 2))

            async def keep_giving_up(
                client: DirectClient = client, rng: random.Random = rng, names: Any = names
            ) -> None:
                for number in names:
                    ways[await give_up(client, f"r{number}", rng)] += 1

            await asyncio.gather(*(keep_giving_up() for _ in range(24)))
            statistics: Any = await client.statistics()
            while statistics["loop"]["open_requests"]:  # aborts before the answer may still be on their way
                statistics = await client.statistics()
            num_held += statistics["scheduler"]["num_blocks_used"] + statistics["scheduler"]["num_swapped"]
            num_open += len(client.requests) + statistics["loop"]["open_requests"]
            num_awaited += len(client._pending)
            num_unread = max(num_unread, client.requests.num_unread)
            assert client.num_malformed == 0 and loop.failure is None
        invariants.check_no_leaks(scheduler)
    del client
    gc.collect()
    score.least("aborts", ways.total(), num_aborts)
    score.tell("ways", ", ".join(f"{count} {way}" for way, count in sorted(ways.items())))
    score.count("blocks or swapped requests left", num_held)
    score.count("open records and requests left", num_open)
    score.count("answers still waited for", num_awaited)
    score.count("ended records that were not read", num_unread, most=1024)  # the ledger's bound
    score.count("asyncio tasks left", len(asyncio.all_tasks()) - tasks)
    score.count("threads left", threading.active_count() - threads)
    score.count("file descriptors left", len(os.listdir("/proc/self/fd")) - fds)
