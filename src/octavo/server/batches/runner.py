"""Run the requests of a file: a bounded number at once; each answer is on disk before it is counted.

Owns: the order (that of the file), retries of temporary refusals, appending answers, counts.
Does not: know folders, tenants, or the content of answers.
Invariant: a run that is interrupted at any point can be continued: answers are appended whole, and a request with an
answer in either file is not sent again.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path

import msgspec

from octavo.server.batches.inner_call import InnerCall, InnerResponse
from octavo.server.batches.lines import (
    AnsweredLines,
    BadLine,
    BatchLine,
    answered,
    not_answered,
    read_asks,
    read_finished,
    repair,
    usage_of,
)

_log = logging.getLogger(__name__)
_RETRIED = (408, 429, 503)  # 408: it waited too long in the queue
_MAX_WAIT_S = 60.0
_QUEUED = 256  # lines on their way to the disk
_CLOSE_S = 5.0  # to write the remaining answers of a cancelled run; requests without one are sent again


@dataclass(frozen=True, slots=True)
class BatchPaths:
    """The files of a run: requests, answers, and what failed."""

    requests: Path
    output: Path
    errors: Path


@dataclass(slots=True)
class Counts:
    """The progress of a run. Failed requests count neither as completed nor as open."""

    num_completed: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def num_done(self) -> int:
        """Requests with an answer, completed or failed."""
        return self.num_completed + self.num_failed


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run: open requests, tries of one refused temporarily (0 = no bound), the url, the least priority."""

    num_open: int = 8
    max_tries: int = 0
    endpoint: str | None = None
    least_priority: int | None = None


async def in_thread(work: Callable[[], object]) -> None:
    """Do work that waits for the disk in another thread."""
    await asyncio.to_thread(work)


@dataclass(slots=True)
class BatchRun:
    """One run over a file. `write` runs the writes of answers; `on_progress` is called after them."""

    call: InnerCall
    paths: BatchPaths
    options: RunOptions = RunOptions()
    on_progress: Callable[[Counts], object] = lambda counts: None
    write: Callable[[Callable[[], object]], Awaitable[None]] = in_thread
    counts: Counts = field(default_factory=Counts)

    async def run(self) -> Counts:
        """Send all requests that have no answer yet. A run that is cancelled can be continued."""
        finished = await asyncio.to_thread(self._read_answers)
        asks = read_asks(self.paths.requests, self.options.endpoint, self.options.least_priority)
        written: asyncio.Queue[tuple[bool, bytes] | None] = asyncio.Queue(_QUEUED)
        reading = asyncio.Lock()
        writer = asyncio.create_task(self._write(written))
        workers = [
            asyncio.create_task(self._work(asks, reading, finished, written)) for _ in range(self.options.num_open)
        ]
        try:
            await _all(workers, writer)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await _close(writer, written)
            with suppress(ValueError):  # a thread may still be iterating
                asks.close()
        return self.counts

    def _read_answers(self) -> AnsweredLines:
        for path in (self.paths.output, self.paths.errors):
            repair(path)
        finished = read_finished(self.paths.output, self.paths.errors)
        self.counts.num_completed, self.counts.num_failed = finished.num_completed, finished.num_failed
        return finished

    async def _work(
        self,
        asks: Generator[BatchLine | BadLine, None, None],
        reading: asyncio.Lock,
        finished: AnsweredLines,
        written: asyncio.Queue[tuple[bool, bytes] | None],
    ) -> None:
        def take() -> BatchLine | BadLine | None:
            return next((ask for ask in asks if not finished.has(ask)), None)

        while True:
            async with reading:
                ask = await asyncio.to_thread(take)
            if ask is None:
                return
            if isinstance(ask, BadLine):
                await written.put((False, not_answered(ask.line, ask.custom_id, ask.code, ask.message)))
                continue
            answer = await self._answer(ask)
            is_fine = answer.status == 200
            if is_fine:
                prompt, output = usage_of(answer.body)
                self.counts.prompt_tokens += prompt
                self.counts.completion_tokens += output
            request_id = answer.headers.get("x-request-id", "")
            await written.put((is_fine, answered(ask, answer.status, request_id, answer.body)))

    async def _answer(self, ask: BatchLine) -> InnerResponse:
        """Send a request until it is not refused temporarily."""
        body = msgspec.json.encode(ask.body)
        tries = 0
        while True:
            answer = await self.call(ask.url, body)
            tries += 1
            is_final = answer.status not in _RETRIED or answer.headers.get("x-should-retry") == "false"
            if is_final or tries == self.options.max_tries:
                return answer
            await asyncio.sleep(_wait_s(answer))

    async def _write(self, written: asyncio.Queue[tuple[bool, bytes] | None]) -> None:
        """Append answers until None arrives; those queued together share one sync per file."""
        is_open = True
        while is_open:
            taken = [await written.get()]
            while not written.empty():
                taken.append(written.get_nowait())
            is_open = None not in taken
            lines = [line for line in taken if line is not None]
            for path, is_fine in ((self.paths.output, True), (self.paths.errors, False)):
                data = b"".join(line for fine, line in lines if fine is is_fine)
                if data:
                    await self.write(partial(append, path, data))
            num_fine = sum(fine for fine, _ in lines)
            self.counts.num_completed += num_fine
            self.counts.num_failed += len(lines) - num_fine
            if lines:
                self.on_progress(self.counts)


async def _all(workers: list[asyncio.Task[None]], writer: asyncio.Task[None]) -> None:
    """Wait for the workers. Raises what a worker raised, or a writer that ended before them."""
    pending = {*workers, writer}
    while not pending <= {writer}:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _close(writer: asyncio.Task[None], written: asyncio.Queue[tuple[bool, bytes] | None]) -> None:
    """Wait up to _CLOSE_S until the writer has written its queue. Raises what it raised."""
    try:
        async with asyncio.timeout(_CLOSE_S):
            if not writer.done():
                await written.put(None)
            await asyncio.shield(writer)
    except TimeoutError:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        _log.warning("answers of a batch could not be written; their requests are sent again when it continues")


def append(path: Path, data: bytes) -> None:
    """Append whole lines and wait for the disk. Raises OSError, and then nothing is appended."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            write_whole(file, data)
        except OSError:
            file.truncate(size)
            raise


def write_whole(file: FileIO, data: bytes) -> None:
    """Write all data to an unbuffered file, and wait for the disk. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def _wait_s(answer: InnerResponse) -> float:
    try:
        return min(_MAX_WAIT_S, max(0.05, float(answer.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0
