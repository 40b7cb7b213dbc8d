"""Load on a running server: requests arrive on a schedule, and each is timed from its arrival.

Owns: sending at the arrivals' times within the bounds, the client's own delay and processor time.
Does not: make arrivals or bodies, or report. Invariant: every body has an answer, or is counted as not sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from octavo.bench.arrivals import Arrivals
from octavo.bench.completion_client import CompletionClient, CompletionResult


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    """The schedule of requests: arrivals, how many may be open at once (0: no bound), and when sending ends."""

    arrivals: Arrivals
    max_concurrency: int = 0
    duration_s: float = float("inf")


@dataclass(slots=True)
class OnlineRun:
    """The result of one run. `arrived` are perf_counter seconds; an answer's times count from its arrival."""

    answers: list[CompletionResult] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    num_not_sent: int = 0
    duration_s: float = 0.0
    client_cpu_s: float = 0.0
    max_open: int = 0

    @property
    def done(self) -> list[tuple[float, CompletionResult]]:
        """Return arrivals and answers of the requests that finished with at least one token."""
        pairs = zip(self.arrived, self.answers, strict=True)
        return [(at, answer) for at, answer in pairs if not answer.has_failed and answer.chunk_times]

    @property
    def num_output_tokens(self) -> int:
        """Return the output tokens of the finished requests."""
        return sum(answer.num_tokens for _, answer in self.done)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the prompt tokens of the finished requests, as the server counts them."""
        return sum(answer.num_prompt_tokens for _, answer in self.done)

    def failures(self) -> dict[str, int]:
        """Return the number of failed requests by kind; `no_tokens` are those that ended without a token."""
        counts: dict[str, int] = {}
        for answer in self.answers:
            kind = answer.kind or ("" if answer.chunk_times else "no_tokens")
            if kind:
                counts[kind] = counts.get(kind, 0) + 1
        return counts

    def ttft_s(self) -> list[float]:
        """Return the times from arrival to first token."""
        return [answer.chunk_times[0] - at for at, answer in self.done]

    def e2e_s(self) -> list[float]:
        """Return the times from arrival to last token."""
        return [answer.chunk_times[-1] - at for at, answer in self.done]

    def tpot_s(self) -> list[float]:
        """Return the mean time of each request's tokens after the first; requests of one token have none."""
        return [_tpot(answer) for _, answer in self.done if answer.num_tokens > 1]

    def between_chunks_s(self) -> list[float]:
        """Return the gaps between the chunks that carry tokens; most servers send one token a chunk."""
        gaps: list[float] = []
        for _, answer in self.done:
            times = answer.chunk_times
            gaps += [after - before for before, after in pairwise(times)]
        return gaps

    def late_s(self) -> list[float]:
        """Return the times from arrival to sending: this client's own delay, and the wait for room under the bound."""
        return [answer.sent - at for at, answer in zip(self.arrived, self.answers, strict=True)]

    def times_of(self, arrived: float, answer: CompletionResult) -> dict[str, float]:
        """Return a finished request's times by the objectives' names."""
        times = answer.chunk_times
        return {"ttft": times[0] - arrived, "tpot": _tpot(answer), "e2e": times[-1] - arrived}


async def run_online(
    client: CompletionClient,
    bodies: Sequence[bytes],
    load: OnlineLoad,
    advance: Callable[[int], object] = lambda tokens: None,
) -> OnlineRun:
    """Send the bodies and wait for their ends; `advance` gets the number of new chunks with a token."""
    run, room = OnlineRun(), asyncio.Semaphore(load.max_concurrency or max(1, len(bodies)))
    tasks: list[asyncio.Task[CompletionResult]] = []
    num_open = 0

    async def send(body: bytes) -> CompletionResult:
        nonlocal num_open
        num_open += 1
        run.max_open = max(run.max_open, num_open)
        try:
            return await client.send(body, advance)
        finally:
            num_open -= 1
            room.release()

    start, cpu = time.perf_counter(), time.process_time()
    for body, planned_s in zip(bodies, load.arrivals.times(), strict=False):
        if planned_s > load.duration_s:
            break
        await _sleep_until(start + planned_s)
        await room.acquire()
        now = time.perf_counter()
        if now - start > load.duration_s:
            room.release()
            break
        run.arrived.append(start + planned_s if load.arrivals.is_open_loop else now)
        tasks.append(asyncio.create_task(send(body)))
    run.num_not_sent = len(bodies) - len(tasks)
    run.answers = list(await asyncio.gather(*tasks))
    run.duration_s = time.perf_counter() - start
    run.client_cpu_s = time.process_time() - cpu
    return run


async def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        await asyncio.sleep(left)


def _tpot(answer: CompletionResult) -> float:
    times = answer.chunk_times
    return (times[-1] - times[0]) / max(1, answer.num_tokens - 1)
