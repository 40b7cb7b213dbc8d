"""A client of OpenAI's /v1/completions, for any server. It streams, and records the time of each chunk.

Owns: the request's body and bytes; the connection; the parsing of the response; the result; reading /v1/models and the
step totals in an Octavo server's /metrics. Does not: decide when to send, or judge results.
Each request has its own connection. To save processor time, httptools parses the response, and one pass splits the body
into server-sent events (HTML standard).
Invariant: whatever the server does, send() returns a CompletionResult; only bad addresses and cancellation raise.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from octavo.errors import ConfigError, EngineError

READ_BYTES = 65_536
MAX_HEAD_BYTES = 65_536
MAX_BODY_BYTES = 1 << 20  # limit of a response without a stream, and limit of one event
MAX_ERROR_CHARACTERS = 300
_STEPS = re.compile(r"^octavo_steps_total(?:\{[^}]*\})? (\S+)", re.MULTILINE)
_PART = re.compile(r'^octavo_step_seconds_total\{[^}]*part="(\w+)"[^}]*\} (\S+)', re.MULTILINE)


class ProtocolError(Exception):
    """The server's bytes are not an HTTP/1.1 response."""


class EventParser:
    """An incremental parser of a response: feed() takes bytes and returns the data of the events that they complete.

    `status` is 0 until the head is complete. `body` holds a body that is not an event stream. `last_id` is the id of
    the last complete event with an id.
    """

    def __init__(self) -> None:
        self.status = 0
        self.is_ended = False
        self.is_stream = False
        self.body = b""
        self.last_id = b""
        self._num_head = 0
        self._content_type = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes from the socket. Raises ProtocolError."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ProtocolError(f"no HTTP/1.1 response: {error}, {data[:80]!r}") from None
        if not self.status:
            self._num_head += len(data)
            if self._num_head > MAX_HEAD_BYTES:
                raise ProtocolError(f"a response head of more than {MAX_HEAD_BYTES} bytes")
        events = self._split() if self.is_stream else []
        if len(self.body) > MAX_BODY_BYTES:
            raise ProtocolError(f"a response or an event of more than {MAX_BODY_BYTES} bytes")
        return events

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store the content type (called by httptools)."""
        if name.lower() == b"content-type":
            self._content_type = value

    def on_headers_complete(self) -> None:
        """Store the status (called by httptools)."""
        self.status = self._parser.get_status_code()
        self.is_stream = self.status == 200 and self._content_type.startswith(b"text/event-stream")

    def on_body(self, data: bytes) -> None:
        """Store a part of the body (called by httptools)."""
        self.body += data

    def on_message_complete(self) -> None:
        """Record the end of the response, unless its status is 1xx (called by httptools)."""
        self.is_ended = self.status >= 200

    def _split(self) -> list[bytes]:
        body = self.body.replace(b"\r\n", b"\n") if b"\r" in self.body else self.body
        *whole, self.body = body.split(b"\n\n")
        return [data for data in map(self._data_of, whole) if data]

    def _data_of(self, event: bytes) -> bytes:
        """Return the data lines of one event, joined; return b"" for a comment."""
        if event.startswith(b"data:") and b"\n" not in event:
            return event[5:].strip()
        data = []
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                data.append(line[5:].strip())
            elif line.startswith(b"id:"):
                self.last_id = line[3:].strip()
        return b"\n".join(data)


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class CompletionResult:
    """The client's record of one request. `sent` and `chunk_times` (chunks with a token) are perf_counter seconds.

    `kind` is refused, lost, failed or timeout; `kind` and `error` are empty if the server finished the request.
    `texts` are the texts of the chunks, or None if they are not stored. `last_id` is the id of the last event.
    """

    sent: float
    chunk_times: array[float] = field(default_factory=lambda: array("d"))
    texts: list[str] | None = None
    status: int = 0
    last_id: str = ""
    num_prompt_tokens: int = 0
    usage_tokens: int | None = None
    is_finished: bool = False
    kind: str = ""
    error: str = ""

    @property
    def num_tokens(self) -> int:
        """Return the server's count of output tokens, or the number of chunks if the server reports no count."""
        return len(self.chunk_times) if self.usage_tokens is None else self.usage_tokens

    @property
    def has_failed(self) -> bool:
        """True if the request was refused, lost, failed or timed out."""
        return bool(self.kind)


@dataclass(frozen=True, slots=True)
class Target:
    """A server's address, its name for the model, an API key, and extra fields for every body."""

    base_url: str
    model: str = ""
    api_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0

    def address(self) -> tuple[str, int, bool, str]:
        """Return host, port, whether TLS is used, and the path before /v1. Raises ConfigError."""
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {self.base_url!r}; give a server's URL, such as http://127.0.0.1:8000")
        is_tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return parts.hostname, port or (443 if is_tls else 80), is_tls, path


class CompletionClient:
    """Sends completion requests to one server, each over its own connection."""

    def __init__(self, target: Target, *, keeps_texts: bool = False) -> None:
        self._target = target
        self._keeps_texts = keeps_texts
        self._host, self._port, is_tls, path = target.address()
        self._tls = ssl.create_default_context() if is_tls else None
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._head = (
            "{method} " + path + "{path} HTTP/1.1\r\n"
            f"Host: {host}:{self._port}\r\n{key}{{headers}}Connection: close\r\n"
            "Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        )

    @property
    def url(self) -> str:
        """Return the server's URL."""
        return self._target.base_url

    def body(self, prompt: array[int] | str, max_tokens: int) -> bytes:
        """Return the JSON of one request: greedy, without an end-of-sequence stop, streamed, with usage at the end."""
        body: dict[str, Any] = {
            "model": self._target.model,
            "prompt": prompt if isinstance(prompt, str) else prompt.tolist(),
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= self._target.extra
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})

    async def send(
        self, body: bytes, advance: Callable[[int], object] = lambda tokens: None, *, headers: str = ""
    ) -> CompletionResult:
        """Send one body that body() made, with the extra header lines `headers`; return the result."""
        answer = CompletionResult(time.perf_counter(), texts=[] if self._keeps_texts else None)
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._exchange(body, answer, advance, headers)
        except TimeoutError:
            _fail(answer, "timeout", f"no end within {self._target.timeout_s:g} s")
        except ConnectionRefusedError as error:
            _fail(answer, "refused", str(error))
        except (OSError, ProtocolError, msgspec.MsgspecError) as error:
            _fail(answer, "lost", f"{type(error).__name__}: {error}")
        if not (answer.kind or answer.is_finished):
            _fail(answer, "lost", "the stream ended without a finish reason")
        return answer

    async def get(self, path: str) -> tuple[int, bytes]:
        """Fetch a path of the server, such as /metrics. Raises OSError, ProtocolError, TimeoutError."""
        parser = EventParser()
        async with asyncio.timeout(self._target.timeout_s):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            try:
                writer.write(self._head.format(method="GET", path=path, length=0, headers="").encode())
                while not parser.is_ended and (data := await reader.read(READ_BYTES)):
                    parser.feed(data)
            finally:
                writer.close()
        return parser.status, parser.body

    async def _exchange(
        self, body: bytes, answer: CompletionResult, advance: Callable[[int], object], headers: str
    ) -> None:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            head = self._head.format(method="POST", path="/v1/completions", length=len(body), headers=headers)
            writer.write(head.encode() + body)
            parser = EventParser()
            while not parser.is_ended and (data := await reader.read(READ_BYTES)):
                now, before = time.perf_counter(), len(answer.chunk_times)
                for event in parser.feed(data):
                    _note(answer, event, now)
                answer.last_id = parser.last_id.decode("ascii", "replace")
                if len(answer.chunk_times) > before:
                    advance(len(answer.chunk_times) - before)
            if not parser.is_stream and parser.status:
                text = parser.body.decode("utf-8", "replace")
                answer.status = parser.status
                _fail(answer, "failed", f"status {parser.status}: {text}")
        finally:
            writer.close()


def _note(answer: CompletionResult, event: bytes, now: float) -> None:
    """Record one event. A chunk without text and with a finish reason has no token."""
    if event == b"[DONE]":
        return
    chunk = _DECODE(event)
    if chunk.error is not None:
        _fail(answer, "failed", str(chunk.error))
    if chunk.usage is not None:
        answer.usage_tokens = chunk.usage.completion_tokens
        answer.num_prompt_tokens = chunk.usage.prompt_tokens
    for choice in chunk.choices:
        if choice.text or choice.finish_reason is None:
            answer.chunk_times.append(now)
            if answer.texts is not None:
                answer.texts.append(choice.text)
        if choice.finish_reason is not None:
            answer.is_finished = True


def _fail(answer: CompletionResult, kind: str, message: str) -> None:
    answer.kind, answer.error = kind, message[:MAX_ERROR_CHARACTERS]


async def first_model(client: CompletionClient) -> str:
    """Return the name of the first model served. Raises EngineError if there is no response or no model."""
    try:
        status, body = await client.get("/v1/models")
        names = [entry["id"] for entry in msgspec.json.decode(body)["data"]] if status == 200 else []
    except (OSError, ProtocolError, TimeoutError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number).lower() if number > 0 else str(error) or type(error).__name__
        raise EngineError(f"no server answers at {client.url} ({reason})") from None
    except (msgspec.MsgspecError, KeyError, TypeError):
        names = []
    if not names:
        raise EngineError(f"/v1/models names no model (status {status}); give it with --served-model")
    return str(names[0])


async def step_totals(client: CompletionClient) -> dict[str, float]:
    """Return the number of steps and the seconds of each part since the server's start; {} if it is not an Octavo."""
    try:
        status, body = await client.get("/metrics")
    except (OSError, ProtocolError, TimeoutError):
        return {}
    return read_step_totals(body.decode("utf-8", "replace")) if status == 200 else {}


def read_step_totals(text: str) -> dict[str, float]:
    """Parse the text of /metrics: return the number of steps and the seconds of each part of a step."""
    steps = _STEPS.search(text)
    parts = {part: float(value) for part, value in _PART.findall(text)}
    return {"steps": float(steps[1]), **parts} if steps and parts else {}


def step_split(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Return the mean milliseconds of each part of a step between two totals; {} if there were no steps."""
    steps = after.get("steps", 0.0) - before.get("steps", 0.0)
    if not before or not after or steps <= 0:
        return {}
    means = {part: (after[part] - before.get(part, 0.0)) / steps * 1e3 for part in after if part != "steps"}
    whole = means.pop("step", 0.0)
    split = {"total": whole, **means, "other": max(0.0, whole - sum(means.values()))}
    return {"steps": int(steps), "step_ms": {part: round(value, 4) for part, value in split.items()}}
