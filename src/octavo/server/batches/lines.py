"""The lines of batch files: read requests, encode answers, find the requests that have one.

Owns: OpenAI's formats, the bounds of a line, the repair of an output that a crash truncated.
Does not: send requests.
Format: https://platform.openai.com/docs/api-reference/batch (request input and output objects).
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_LINE_BYTES = 8 << 20  # a body's own bound
MAX_ID_CHARACTERS = 512
_NOT_IN_A_BATCH = (
    ("stream", "an answer in a batch cannot be streamed"),
    ("background", "a response in a batch cannot run in the background"),
)


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request: its line (from 1), its client's id for it, its endpoint and its body."""

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not a request, with the reason."""

    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


def read_asks(
    path: Path, endpoint: str | None = None, least_priority: int | None = None
) -> Generator[BatchLine | BadLine, None, None]:
    """Yield the requests of a file, in order; skip blank lines.

    `endpoint`: the only url that is allowed. `least_priority`: a request with a smaller priority is a BadLine.
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
                ask = _read(number, line, endpoint, least_priority)
                if isinstance(ask, BatchLine):
                    if ask.custom_id in seen:
                        message = f"line {number}: the custom_id {ask.custom_id[:64]!r} was given before"
                        ask = BadLine(number, None, "duplicate_custom_id", message, "custom_id")
                    else:
                        seen.add(ask.custom_id)
                yield ask


def _read(number: int, line: bytes, endpoint: str | None, least_priority: int | None) -> BatchLine | BadLine:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, None, "invalid_json_line", f"line {number} is not JSON: {error}")
    if not isinstance(value, dict):
        return BadLine(number, None, "invalid_json_line", f"line {number} is no JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARACTERS:
        message = f"line {number}: custom_id must be a text of 1 to {MAX_ID_CHARACTERS} characters"
        return BadLine(number, None, "invalid_custom_id", message, "custom_id")

    def bad(param: str, message: str) -> BadLine:
        return BadLine(number, custom_id, "invalid_request", f"line {number}: {message}", param)

    if value.get("method", "POST") != "POST":
        return bad("method", "method must be POST")
    url, body = value.get("url"), value.get("body")
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if not isinstance(url, str) or url not in allowed:
        return bad("url", f"url is {str(url)[:64]!r}; give {' or '.join(allowed)}")
    if not isinstance(body, dict):
        return bad("body", "body must be an object")
    for name, reason in _faults_of(body, least_priority):
        return bad(f"body.{name}", f"{reason}; leave {name} out")
    unknown = sorted(value.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        return bad(unknown[0][:64], f"{unknown[0][:64]} is no field of a request; give custom_id, method, url and body")
    return BatchLine(number, custom_id, url, body)


def _faults_of(body: dict[str, Any], least_priority: int | None) -> Generator[tuple[str, str], None, None]:
    """Yield the fields whose values a request of a batch may not have, each with the reason."""
    yield from ((name, reason) for name, reason in _NOT_IN_A_BATCH if body.get(name))
    priority = body.get("priority")
    if least_priority is not None and isinstance(priority, int | float) and priority < least_priority:
        yield "priority", f"priority is {priority}; requests of this batch may have {least_priority} or more"


def answered(ask: BatchLine, status: int, request_id: str, body: bytes) -> bytes:
    """Return the output line of an answer of any status."""
    made = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body or b"null")}
    return _line(ask.line, ask.custom_id, made, None)


def not_answered(line: int, custom_id: str | None, code: str, message: str) -> bytes:
    """Return the output line of a request that was not sent."""
    return _line(line, custom_id, None, {"code": code, "message": message})


_START = b'{"id":"batch_req_'  # of every line


def _line(line: int, custom_id: str | None, response: object, error: object) -> bytes:
    made = {"id": f"batch_req_{line}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(made) + b"\n"


class _Done(msgspec.Struct):
    """The fields of an output line that name its request."""

    id: str
    custom_id: str | None = None


def is_output(path: Path) -> bool:
    """Return True if a file holds lines of an output, or nothing yet; False for a file of something else."""
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
    """The requests of a file that have an answer, and how many of them failed."""

    custom_ids: set[str]
    lines: set[str]  # ids of those without a custom_id
    num_completed: int = 0
    num_failed: int = 0

    def has(self, ask: BatchLine | BadLine) -> bool:
        """Return True if a request has an answer."""
        if isinstance(ask, BatchLine) or ask.custom_id is not None:
            return ask.custom_id in self.custom_ids
        return f"batch_req_{ask.line}" in self.lines


def read_finished(output: Path, errors: Path) -> AnsweredLines:
    """Return the answered requests in an earlier run's outputs. Lines that are not answers are ignored."""
    found = AnsweredLines(set(), set())
    for path in (output, errors):
        for done in _done(path):
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
    """Tokens as the APIs name them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def totals(self) -> tuple[int, int]:
        """Return the tokens of prompts and of outputs."""
        return self.prompt_tokens + self.input_tokens, self.completion_tokens + self.output_tokens


class _Answered(msgspec.Struct):
    usage: TokenCounts | None = None


class _Response(msgspec.Struct):
    body: _Answered | None = None


class _OutputLine(msgspec.Struct):
    response: _Response | None = None


def usage_of(body: bytes) -> tuple[int, int]:
    """Return the tokens of prompt and output in an answer; 0 if it has no usage."""
    try:
        usage = msgspec.json.decode(body, type=_Answered).usage
    except msgspec.MsgspecError:
        usage = None
    return (0, 0) if usage is None else usage.totals


def usage_in(output: Path) -> tuple[int, int]:
    """Return the tokens of prompts and outputs of all answers in a file."""
    decoder = msgspec.json.Decoder(_OutputLine)
    num_input = num_output = 0
    if output.exists():
        with output.open("rb") as file:
            for line in file:
                with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    response = decoder.decode(line).response
                    usage = None if response is None or response.body is None else response.body.usage
                    if usage is not None:
                        num_input, num_output = num_input + usage.totals[0], num_output + usage.totals[1]
    return num_input, num_output


def _done(path: Path) -> Iterable[_Done]:
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(_Done)
    with path.open("rb") as file:
        for line in file:
            try:
                yield decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
