"""A drill: greedy streams of a server while its engine is killed and stopped, compared with their unfaulted texts.

Owns: the streams, the faults and their times, judging each answer. Does not: find the server, or print.
Invariants: a stopped process that still exists at the end is continued; a stream that the server refused (busy,
starting) is no loss and is asked for again. If the api is killed too, streams have an Idempotency-Key and resume after
their last event over another connection, as a careful client's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from octavo.bench.completion_client import CompletionClient, CompletionResult
from octavo.errors import EngineError

REFUSED = (429, 503)
RETRY_S = 0.25
MAX_PROMPTS = 16
MAX_CONNECTIONS = 50  # of one stream, if the api is killed
# Fault -> the role and the signal.
FAULTS = {
    "kill_engine": ("engine", signal.SIGKILL),
    "stop_engine": ("engine", signal.SIGSTOP),
    "kill_api": ("api", signal.SIGKILL),
}


@dataclass(frozen=True, slots=True)
class Drill:
    """The parameters of a drill: `every_s` by kind of fault, and the number, tokens and duration of streams."""

    every_s: dict[str, float]
    num_streams: int = 16
    max_tokens: int = 64
    duration_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Expected:
    """An unfaulted text, and where its chunks end: a chunk is a token, unless several arrived at once."""

    text: str
    ends: tuple[int, ...]
    num_tokens: int

    @classmethod
    def of(cls, answer: CompletionResult) -> Expected:
        """Return the text of a finished answer."""
        ends, length = [], 0
        for text in answer.texts or ():
            length += len(text)
            ends.append(length)
        return cls("".join(answer.texts or ()), tuple(ends), answer.num_tokens)


@dataclass(slots=True)
class Outcome:
    """The results of a drill. Gaps are seconds between chunks of a stream; `fault_gaps` are those with a fault."""

    num_finished: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_lost: int = 0
    num_duplicated: int = 0
    num_different: int = 0  # streams
    errors: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[str, float, int]] = field(default_factory=list)  # kind, when, process
    num_skipped: int = 0  # faults for which there was no engine
    gaps: list[float] = field(default_factory=list)
    fault_gaps: list[float] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True if no token was lost, doubled or changed."""
        return not (self.num_lost or self.num_duplicated or self.num_different)


def judge(answer: CompletionResult, expected: Expected) -> tuple[int, int]:
    """Return the number of lost tokens, and of tokens that are too many or different."""
    got = "".join(answer.texts or ())
    same = next((i for i, pair in enumerate(zip(got, expected.text, strict=False)) if pair[0] != pair[1]), None)
    same = min(len(got), len(expected.text)) if same is None else same
    per_chunk = expected.num_tokens / max(1, len(expected.ends))
    lost = round(sum(end > same for end in expected.ends) * per_chunk)
    too_much = len(got) - same
    extra = max(1, round(too_much * expected.num_tokens / max(1, len(expected.text)))) if too_much else 0
    if not (lost or extra) and answer.num_tokens != expected.num_tokens and answer.usage_tokens is not None:
        extra = abs(answer.num_tokens - expected.num_tokens)  # a token without text
    return lost, extra


def joined(before: CompletionResult, after: CompletionResult) -> CompletionResult:
    """Return one answer that arrived over two connections."""
    after.sent = before.sent
    after.chunk_times = before.chunk_times + after.chunk_times
    after.texts = [*(before.texts or ()), *(after.texts or ())]
    after.last_id = after.last_id or before.last_id
    if after.usage_tokens is None:
        after.usage_tokens = before.usage_tokens
    return after


def _is_cut(answer: CompletionResult) -> bool:
    """Return True if another connection may get the rest."""
    return answer.kind in ("lost", "refused") or answer.status in REFUSED


class Drilling:
    """One run of a drill. `find` returns the pid of a role, None if there is none now; it may block."""

    def __init__(self, drill: Drill, client: CompletionClient, find: Callable[[str], int | None]) -> None:
        self.drill = drill
        self.outcome = Outcome()
        self._client = client
        self._find = find
        self._name = f"drill-{secrets.token_hex(6)}"
        self._expected: list[Expected] = []
        self._answers: list[CompletionResult] = []
        self._stopped: set[int] = set()
        self._end = 0.0

    async def run(self) -> Outcome:
        """Get the unfaulted texts, then stream and cause faults until the time is over. Raises EngineError."""
        bodies = [self._client.body(text, self.drill.max_tokens) for text in _prompts(self.drill.num_streams)]
        for answer in await asyncio.gather(*map(self._client.send, bodies)):
            if answer.has_failed:
                raise EngineError(f"no unfaulted text can be had: {answer.kind}, {answer.error}")
            self._expected.append(Expected.of(answer))
        self._end = time.perf_counter() + self.drill.duration_s
        faults = [asyncio.create_task(self._make(kind, every_s)) for kind, every_s in self.drill.every_s.items()]
        try:
            await asyncio.gather(*(self._stream(index, bodies) for index in range(self.drill.num_streams)))
        finally:
            for task in faults:
                task.cancel()
            await asyncio.gather(*faults, return_exceptions=True)
            for pid in self._stopped:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGCONT)
        self._count_gaps()
        return self.outcome

    async def _stream(self, index: int, bodies: Sequence[bytes]) -> None:
        """Request one text after another until the drill's end; read each to its own end, also after that."""
        turn = index
        while time.perf_counter() < self._end:
            answer = await self._ask(bodies[turn % len(bodies)], f"{index}-{turn}")
            if _is_cut(answer) and not answer.chunk_times:
                self.outcome.num_refused += 1
                await asyncio.sleep(RETRY_S)
                continue
            self._note(answer, self._expected[turn % len(bodies)])
            turn += 1

    async def _ask(self, body: bytes, name: str) -> CompletionResult:
        """Return one answer, over as many connections as needed if the api is killed too."""
        if "kill_api" not in self.drill.every_s:
            return await self._client.send(body)
        key = f"Idempotency-Key: {self._name}-{name}\r\n"
        answer = await self._client.send(body, headers=key)
        for _ in range(MAX_CONNECTIONS):
            if not _is_cut(answer):
                break
            await asyncio.sleep(RETRY_S)
            last = f"Last-Event-ID: {answer.last_id}\r\n" if answer.last_id else ""
            answer = joined(answer, await self._client.send(body, headers=key + last))
        return answer

    def _note(self, answer: CompletionResult, expected: Expected) -> None:
        lost, extra = judge(answer, expected)
        outcome = self.outcome
        outcome.num_lost += lost
        outcome.num_duplicated += extra
        outcome.num_different += bool(lost or extra)
        outcome.num_tokens += answer.num_tokens
        outcome.num_finished += not answer.has_failed
        if answer.has_failed:
            outcome.errors[f"{answer.kind}: {answer.error}"] += 1
        self._answers.append(answer)

    async def _make(self, kind: str, every_s: float) -> None:
        """Cause faults of one kind repeatedly, but none in the last moments, when its effect could not be seen."""
        while (start := time.perf_counter()) + every_s < self._end:
            await asyncio.sleep(every_s)
            role, number = FAULTS[kind]
            pid = await asyncio.to_thread(self._find, role)
            try:
                if pid is None:
                    raise ProcessLookupError
                os.kill(pid, number)
            except ProcessLookupError:
                self.outcome.num_skipped += 1
                continue
            self.outcome.faults.append((kind, max(start, time.perf_counter()), pid))
            if number == signal.SIGSTOP:
                self._stopped.add(pid)

    def _count_gaps(self) -> None:
        moments = [moment for _, moment, _ in self.outcome.faults]
        for answer in self._answers:
            times = answer.chunk_times
            for before, after in pairwise(times):
                self.outcome.gaps.append(after - before)
                if any(before <= moment < after for moment in moments):
                    self.outcome.fault_gaps.append(after - before)


def _prompts(num_streams: int) -> list[str]:
    count = min(num_streams, MAX_PROMPTS)
    return [
        f"Drill {number}. Tell me a story in which the number {number * 7 + 3} is found." for number in range(count)
    ]
