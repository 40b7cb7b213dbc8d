"""Running a file of requests: its lines, sending them to the application, and the files of answers.

Owns: OpenAI's line formats, a line's bounds, the order of sending (the file's), retries after temporary refusals,
appending answers, the repair of an output that a crash truncated.
Does not: know folders or tenants, or check a key (the KeyInfo is in the request's scope, which clients cannot set).
Invariant: a run that is interrupted at any point can be continued. Answers are appended whole and are on disk before
they are counted, and a request with an answer in either file is not sent again.
Format: https://platform.openai.com/docs/api-reference/batch (request input and output objects).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message

from octavo.server.api.fields import shown_value
from octavo.server.http.auth import KEY
from octavo.server.http.keys import KeyInfo


@dataclass(slots=True)
class InnerResponse:
    """A complete HTTP response. Header names are in lower case."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


InnerCall = Callable[[str, bytes], Awaitable[InnerResponse]]  # (path, JSON body) -> response


def inner_call(app: ASGIApp, holder: KeyInfo) -> InnerCall:
    """Return a function that sends POST requests to the app with the rights of a key."""
    return partial(_post, app, holder)


async def _post(app: ASGIApp, holder: KeyInfo, path: str, body: bytes) -> InnerResponse:
    answer = InnerResponse()
    parts: list[bytes] = []
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if not is_sent:
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # this client never disconnects: a call ends by cancellation
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": headers,
        "server": ("batch", 0),
        "client": ("batch", 0),
        KEY: holder,
    }
    await app(scope, receive, send)
    answer.body = b"".join(parts)
    return answer


BATCH_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE_BYTES = 8 << 20  # the bound of a body
MAX_ID_CHARACTERS = 512
_NOT_IN_A_BATCH = (
    ("stream", "an answer in a batch cannot be streamed"),
    ("background", "a response in a batch cannot run in the background"),
)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request: its line number (from 1), the client's id, the endpoint and the body."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a valid request, and the reason."""

    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


def read_lines(
    path: Path, endpoint: str | None = None, least_priority: int | None = None
) -> Generator[BatchLine | BadLine, None, None]:
    """Yield the requests of a file in order, without blank lines.

    `endpoint` is the only url allowed. A request whose priority is a number below `least_priority` becomes a BadLine.
    """
    seen: set[str] = set()
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                yield BadLine(number, None, "line_too_large", f"line {number} has more than {MAX_LINE_BYTES} bytes")
            elif line.strip():
                entry = _read_line(number, line, endpoint, least_priority)
                if isinstance(entry, BatchLine):
                    if entry.custom_id in seen:
                        message = f"line {number}: the custom_id {entry.custom_id[:64]!r} was given before"
                        entry = BadLine(number, None, "duplicate_custom_id", message, "custom_id")
                    else:
                        seen.add(entry.custom_id)
                yield entry


def _read_line(number: int, line: bytes, endpoint: str | None, least_priority: int | None) -> BatchLine | BadLine:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, None, "invalid_json_line", f"line {number} is not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, None, "invalid_json_line", f"line {number} is no JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        shown = f"is {shown_value(custom_id)}" if "custom_id" in value else "is missing"
        message = f"line {number}: custom_id {shown}; give a text of 1 to {MAX_ID_CHARACTERS} characters"
        return BadLine(number, None, "invalid_custom_id", message, "custom_id")

    def bad(param: str, message: str) -> BadLine:
        return BadLine(number, custom_id, "invalid_request", f"line {number}: {message}", param)

    if value.get("method", "POST") != "POST":
        return bad("method", f"method is {shown_value(value['method'])}; give 'POST'")
    url, body = value.get("url"), value.get("body")
    allowed = BATCH_PATHS if endpoint is None else (endpoint,)
    if not isinstance(url, str) or url not in allowed:
        return bad("url", f"url is {shown_value(url)}; give {' or '.join(map(repr, allowed))}")
    if not isinstance(body, dict):
        return bad("body", f"body is {shown_value(body)}; give an object, the request's fields")
    for name, reason in _faults_of(body, least_priority):
        return bad(f"body.{name}", f"{reason}; leave {name} out")
    unknown = sorted(value.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        return bad(unknown[0][:64], f"{unknown[0][:64]} is no field of a request; give custom_id, method, url and body")
    return BatchLine(number, custom_id, url, body)


def _faults_of(body: dict[str, Any], least_priority: int | None) -> Generator[tuple[str, str], None, None]:
    """Yield (field, reason) for each value that a batch's request may not have."""
    yield from ((name, reason) for name, reason in _NOT_IN_A_BATCH if body.get(name))
    priority = body.get("priority")
    if least_priority is not None and isinstance(priority, int | float) and priority < least_priority:
        yield "priority", f"priority is {priority}; requests of this batch may have {least_priority} or more"


def answered(entry: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """Return the output line of an answer, whatever its status."""
    made = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body or b"null")}
    return _line(entry.line, entry.custom_id, made, None)


def not_answered(line: int, custom_id: str | None, code: str, message: str) -> bytes:
    """Return the output line of a request that was not sent."""
    return _line(line, custom_id, None, {"code": code, "message": message})


_START = b'{"id":"batch_req_'  # the first bytes of every output line


def _line(line: int, custom_id: str | None, response: object, error: object) -> bytes:
    made = {"id": f"batch_req_{line}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(made) + b"\n"


class _FinishedLine(msgspec.Struct):
    """The fields of an output line that identify its request."""

    id: str
    custom_id: str | None = None


def is_output(path: Path) -> bool:
    """Return True if a file is empty, absent or contains output lines; False if it contains anything else."""
    try:
        with path.open("rb") as file:
            return _START.startswith(file.read(len(_START)))
    except FileNotFoundError:
        return True


def repair(path: Path) -> int:
    """Remove an incomplete last line; return the number of bytes removed."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        at = end
        while at:
            begin = max(0, at - 65_536)
            file.seek(begin)
            found = file.read(at - begin).rfind(b"\n")
            if found >= 0:
                at = begin + found + 1
                break
            at = begin
        if at < end:
            file.truncate(at)
            file.flush()
            os.fsync(file.fileno())
        return end - at


@dataclass(slots=True)
class AnsweredLines:
    """The requests of a file that have an answer; and the numbers of completed and failed ones."""

    custom_ids: set[str]
    lines: set[str]  # ids of requests without a custom_id
    num_completed: int = 0
    num_failed: int = 0

    def has(self, entry: BatchLine | BadLine) -> bool:
        """Return True if a request has an answer."""
        if isinstance(entry, BatchLine) or entry.custom_id is not None:
            return entry.custom_id in self.custom_ids
        return f"batch_req_{entry.line}" in self.lines


def read_finished(output: Path, errors: Path) -> AnsweredLines:
    """Return the requests that an earlier run answered. Lines that are not answers are ignored."""
    found = AnsweredLines(set(), set())
    for path in (output, errors):
        for done in _finished_lines(path):
            if done.custom_id is None:
                found.lines.add(done.id)
            else:
                found.custom_ids.add(done.custom_id)
            if path == output:
                found.num_completed += 1
            else:
                found.num_failed += 1
    return found


class TokenCounts(msgspec.Struct):
    """Token counts, under the names of all APIs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def totals(self) -> tuple[int, int]:
        """The tokens of the prompt, and the tokens of the output."""
        return self.prompt_tokens + self.input_tokens, self.completion_tokens + self.output_tokens


class _Answered(msgspec.Struct):
    usage: TokenCounts | None = None


class _Response(msgspec.Struct):
    body: _Answered | None = None


class _OutputLine(msgspec.Struct):
    response: _Response | None = None


# Made here because several threads read batches, and the first use of a Struct is not safe for threads (see
# artifacts.script).
_FINISHED_LINES = msgspec.json.Decoder(_FinishedLine)
_OUTPUT_LINES = msgspec.json.Decoder(_OutputLine)
_ANSWERED = msgspec.json.Decoder(_Answered)


def usage_of(body: bytes) -> tuple[int, int]:
    """Return the prompt tokens and output tokens of an answer; zeros if it has no usage."""
    try:
        usage = _ANSWERED.decode(body).usage
    except msgspec.MsgspecError:
        usage = None
    return (0, 0) if usage is None else usage.totals


def usage_in(output: Path) -> tuple[int, int]:
    """Return the prompt tokens and output tokens of all answers in a file."""
    num_input = num_output = 0
    if output.exists():
        with output.open("rb") as file:
            for line in file:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    response = _OUTPUT_LINES.decode(line).response
                    usage = None if response is None or response.body is None else response.body.usage
                    if usage is not None:
                        num_input, num_output = num_input + usage.totals[0], num_output + usage.totals[1]
    return num_input, num_output


def _finished_lines(path: Path) -> Iterable[_FinishedLine]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield _FINISHED_LINES.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue


_log = logging.getLogger(__name__)
_RETRIED = (408, 429, 503)  # 408: the request waited too long in the queue
_MAX_WAIT_S = 60.0
_QUEUED = 256  # answers that wait to be written
_CLOSE_S = 5.0  # time to write the remaining answers of a cancelled run; requests without an answer are sent again


@dataclass(frozen=True, slots=True)
class BatchPaths:
    """The files of a run: requests, answers and errors."""

    requests: Path
    output: Path
    errors: Path


@dataclass(slots=True)
class Counts:
    """The progress of a run. `num_failed` requests are not in `num_completed`."""

    num_completed: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def num_done(self) -> int:
        """The number of requests with an answer, completed or failed."""
        return self.num_completed + self.num_failed


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run. `num_open` requests are open at once; each is sent up to `max_tries` times (0: no bound).

    `endpoint` and `least_priority` are those of `read_lines`.
    """

    num_open: int = 8
    max_tries: int = 0
    endpoint: str | None = None
    least_priority: int | None = None


@dataclass(slots=True)
class BatchRun:
    """One run over a file. `write` runs the work that appends answers; `on_progress` is called after each write."""

    call: InnerCall
    paths: BatchPaths
    options: RunOptions = RunOptions()
    on_progress: Callable[[Counts], object] = lambda counts: None
    write: Callable[[Callable[[], object]], Awaitable[object]] = asyncio.to_thread
    counts: Counts = field(default_factory=Counts)

    async def run(self) -> Counts:
        """Send all requests without an answer. A cancelled run can be continued."""
        finished = await asyncio.to_thread(self._read_answers)
        entries = read_lines(self.paths.requests, self.options.endpoint, self.options.least_priority)
        written: asyncio.Queue[tuple[bool, bytes] | None] = asyncio.Queue(_QUEUED)
        reading = asyncio.Lock()
        writer = asyncio.create_task(self._write(written))
        workers = [
            asyncio.create_task(self._work(entries, reading, finished, written)) for _ in range(self.options.num_open)
        ]
        try:
            await _wait_for_workers(workers, writer)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await _close(writer, written)
            with suppress(ValueError):  # a thread may still be iterating
                entries.close()
        return self.counts

    def _read_answers(self) -> AnsweredLines:
        for path in (self.paths.output, self.paths.errors):
            repair(path)
        finished = read_finished(self.paths.output, self.paths.errors)
        self.counts.num_completed, self.counts.num_failed = finished.num_completed, finished.num_failed
        return finished

    async def _work(
        self,
        entries: Generator[BatchLine | BadLine, None, None],
        reading: asyncio.Lock,
        finished: AnsweredLines,
        written: asyncio.Queue[tuple[bool, bytes] | None],
    ) -> None:
        def take() -> BatchLine | BadLine | None:
            return next((entry for entry in entries if not finished.has(entry)), None)

        while True:
            async with reading:
                entry = await asyncio.to_thread(take)
            if entry is None:
                return
            if isinstance(entry, BadLine):
                await written.put((False, not_answered(entry.line, entry.custom_id, entry.code, entry.message)))
                continue
            answer = await self._send_until_final(entry)
            is_fine = answer.status == 200
            if is_fine:
                prompt, output = usage_of(answer.body)
                self.counts.prompt_tokens += prompt
                self.counts.completion_tokens += output
            request_id = answer.headers.get("x-request-id", "")
            await written.put((is_fine, answered(entry, answer.status, request_id, answer.body)))

    async def _send_until_final(self, entry: BatchLine) -> InnerResponse:
        """Send a request until its answer is not a temporary refusal, or its tries are used up."""
        body = msgspec.json.encode(entry.body)
        tries = 0
        while True:
            answer = await self.call(entry.url, body)
            tries += 1
            is_final = answer.status not in _RETRIED or answer.headers.get("x-should-retry") == "false"
            if is_final or tries == self.options.max_tries:
                return answer
            await asyncio.sleep(_wait_s(answer))

    async def _write(self, written: asyncio.Queue[tuple[bool, bytes] | None]) -> None:
        """Append answers until None arrives. Answers that are queued together share one sync per file."""
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


async def _wait_for_workers(workers: list[asyncio.Task[None]], writer: asyncio.Task[None]) -> None:
    """Wait for the workers. Raises the error of a worker, or of a writer that ends before the workers."""
    pending = {*workers, writer}
    while not pending <= {writer}:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _close(writer: asyncio.Task[None], written: asyncio.Queue[tuple[bool, bytes] | None]) -> None:
    """Wait up to _CLOSE_S until the writer has written its queue. Raises the writer's error."""
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
    """Append whole lines and wait for the disk. On OSError, nothing was appended."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            write_whole(file, data)
        except OSError:
            file.truncate(size)
            raise


def write_whole(file: FileIO, data: bytes) -> None:
    """Write all data to an unbuffered file and wait for the disk. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    os.fsync(file.fileno())


def _wait_s(answer: InnerResponse) -> float:
    try:
        return min(_MAX_WAIT_S, max(0.05, float(answer.headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0
