"""MCP servers: their tools as functions for a model, and the calls of these tools.

Owns: reading which servers there are; one session per server, opened when it is first needed and anew after a failure;
the bounds on a server's time, bytes, tools and schemas. Does not: decide which calls may be made (octavo chat asks its
user; the Responses API knows its clients' fields).
Invariants: only tools that a server listed are called. A server's process gets the few variables that the SDK passes
on and those that its settings name. Whatever a server does ends in its result or in one McpError.
The package `mcp` (extra: mcp) has the protocol. Its own stdio transport reads lines of any length, so it is not used.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import re
import shlex
import signal
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.config import McpConfig

MAX_CONFIG_BYTES = 1 << 20
MAX_BYTES = 4 << 20  # that a server may send for one request
MAX_TOOLS = 128  # of one server
MAX_SCHEMA_CHARACTERS = 65_536
MAX_DESCRIPTION_CHARACTERS = 16_384
MAX_RESULT_CHARACTERS = 65_536
MAX_STRAY_LINES = 32  # that a server writes to its output and that are no messages
CONNECT_S = 15.0  # for the handshake and the list of tools
RETRY_S = 5.0  # after which a server that could not be reached is tried again
LIST_AGE_S = 60.0  # after which the tools are listed anew
STOP_S = 1.0  # between closing a server's input, SIGTERM and SIGKILL
_NAMED = re.compile(r"([A-Za-z0-9_-]{1,64})=(.+)", re.DOTALL)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_LOGGERS = ("mcp", "httpx2", "httpcore2")  # they log what servers write, and URLs
_SESSION_UNKNOWN = -32600  # INVALID_REQUEST: what the SDK makes of 404, when a server no longer knows the session
_CLOSED = -32000


class McpError(OctavoError):
    """A call or a list of tools failed. `detail` is for the operator: it may have what the server wrote or a URL."""

    def __init__(self, message: str, detail: str = "", code: int = _CLOSED) -> None:
        super().__init__(message)
        self.detail = detail
        self.code = code  # of JSON-RPC

    @property
    def full(self) -> str:
        """The message with the detail, in one line."""
        return " ".join((f"{self} ({self.detail})" if self.detail else str(self)).split())


class McpServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One server: a command that is started, or a URL. A file gives the same fields."""

    name: str = ""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    url: str | None = None
    headers: dict[str, str] = {}
    type: str = ""


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool that a server listed. `schema` is the JSON schema of its arguments."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]
    annotations: Mapping[str, Any]

    @property
    def is_read_only(self) -> bool:
        """True if the server says that the tool changes nothing."""
        return self.annotations.get("readOnlyHint") is True


@dataclass(frozen=True, slots=True)
class McpResult:
    """A call's result as text. `is_error`: the tool failed, and the text says why."""

    text: str
    is_error: bool = False


def read_specs(config: McpConfig, *, needs_names: bool) -> list[McpServerSpec]:
    """Return the servers of the settings. Raises ConfigError, also if there are some and the extra is not installed."""
    specs = _read_file(Path(config.mcp_config).expanduser()) if config.mcp_config else []
    for text in config.mcp:
        named = _NAMED.fullmatch(text)
        if named is None and needs_names:
            raise ConfigError(f"--mcp is {text!r}; give NAME=COMMAND or NAME=URL, since clients name the server")
        target = named[2] if named is not None else text
        if target.startswith(("http://", "https://")):
            spec = McpServerSpec(url=target)
            name = urlsplit(target).hostname or ""
        else:
            try:
                words = shlex.split(target)
            except ValueError as error:
                raise ConfigError(f"--mcp is {text!r}, which is no command line ({error})") from None
            if not words:
                raise ConfigError(f"--mcp is {text!r}; give a command or a URL")
            spec = McpServerSpec(command=words[0], args=tuple(words[1:]))
            name = Path(words[0]).stem
        name = named[1] if named is not None else _NOT_IN_NAMES.sub("_", name)[:64]
        if named is None and any(other.name == name for other in specs):
            name = f"{name[:60]}_{len(specs) + 1}"
        specs.append(msgspec.structs.replace(spec, name=name))
    for spec in specs:
        if sum(other.name == spec.name for other in specs) > 1:
            raise ConfigError(f"two MCP servers have the name {spec.name!r}; give each a name of its own")
    if specs and importlib.util.find_spec("mcp") is None:
        raise ConfigError("MCP servers need the package mcp; install it with: pip install 'octavo[mcp]'")
    return specs


def _read_file(path: Path) -> list[McpServerSpec]:
    """Return the servers of a file {"mcpServers": {name: {command, args, env} or {url, headers}}}."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"--mcp-config {path} has more than {MAX_CONFIG_BYTES} bytes")
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("mcpServers")
        found = msgspec.convert(given, dict[str, McpServerSpec])
    except OSError as error:
        raise ConfigError(f"--mcp-config {path} cannot be read ({error.strerror or error})") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f'--mcp-config {path} is not {{"mcpServers": {{NAME: ...}}}} in JSON ({error})') from None
    for name, spec in found.items():
        if _NAMED.fullmatch(f"{name}=x") is None:
            raise ConfigError(f"--mcp-config {path}: the name {name!r} has other characters than A-Z a-z 0-9 _ -")
        if (spec.command is None) == (spec.url is None) or spec.type == "sse":
            raise ConfigError(f"--mcp-config {path}: {name} needs a command, or the url of a streamable HTTP server")
        if spec.url is not None and not spec.url.startswith(("http://", "https://")):
            raise ConfigError(f"--mcp-config {path}: the url of {name} must begin with http:// or https://")
    return [msgspec.structs.replace(spec, name=name) for name, spec in found.items()]


def function_names(tools: Iterable[McpTool], taken: Iterable[str] = ()) -> dict[str, McpTool]:
    """Return the tools by the names that a model sees: their own, after their server's if another tool has it too."""
    tools, found = list(tools), dict[str, McpTool]()
    used = set(taken)
    names = [_NOT_IN_NAMES.sub("_", tool.name)[:64] for tool in tools]
    for tool, plain in zip(tools, names, strict=True):
        name = plain if names.count(plain) == 1 and plain not in used else f"{tool.server}_{plain}"[:128]
        while name in used:
            name = f"{name[:120]}_{len(used)}"
        used.add(name)
        found[name] = tool
    return found


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments that a model wrote. Raises McpError."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise McpError("the arguments are not a JSON object", code=-32602)
    return value


class McpServers:
    """The servers of the settings, by name. Sessions are opened when they are needed. Call in one event loop."""

    def __init__(self, specs: Sequence[McpServerSpec] = (), timeout_s: float = 60.0) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self._timeout_s = timeout_s
        self._sessions: dict[str, _Session] = {}
        self._ending: set[asyncio.Task[None]] = set()
        if specs:
            importlib.import_module("mcp.client")  # takes a second, which no event loop should wait

    async def tools(self, name: str) -> tuple[McpTool, ...]:
        """Return a server's tools. Raises McpError."""
        session = await self._session(name)
        if time.monotonic() - session.listed_at > LIST_AGE_S:
            try:
                await session.list(self._timeout_s)
            except McpError:
                self._drop(session)
                session = await self._session(name)
        return session.tools

    async def call(self, tool: McpTool, arguments: Mapping[str, Any], max_characters: int) -> McpResult:
        """Call a tool; the text of the result is cut to this length. Raises McpError."""
        for is_last in (False, True):
            session = await self._session(tool.server)
            if all(tool.name != known.name for known in session.tools):
                raise McpError(f"MCP server {tool.server!r} has no tool {tool.name[:128]!r}", code=-32602)
            try:
                return await session.call(tool.name, arguments, self._timeout_s, max_characters)
            except McpError as error:
                if error.code in (_CLOSED, _SESSION_UNKNOWN):
                    self._drop(session)
                if error.code != _SESSION_UNKNOWN or is_last:
                    raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """End all sessions and the processes of servers."""
        for session in list(self._sessions.values()):
            session.end("is closed")
            self._drop(session)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _session(self, name: str) -> _Session:
        session = self._sessions.get(name)
        if session is not None and session.is_over and time.monotonic() >= session.retry_at:
            self._drop(session)
            session = None
        if session is None:
            session = self._sessions[name] = _Session(self.specs[name])
        await asyncio.shield(session.ready)
        return session

    def _drop(self, session: _Session) -> None:
        """Forget a session; it ends when its last call has."""
        if self._sessions.get(session.spec.name) is session:
            del self._sessions[session.spec.name]
        session.leave()
        self._ending.add(session.task)
        session.task.add_done_callback(self._ending.discard)


class _Session:
    """One connection to a server, held open by a task: the SDK's client must be closed where it was opened."""

    def __init__(self, spec: McpServerSpec) -> None:
        self.spec = spec
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tools: tuple[McpTool, ...] = ()
        self.listed_at = 0.0
        self.retry_at = 0.0  # when the next session may be tried, if this one is over
        self.why = ""  # why the server ended it
        self.num_received = 0  # bytes since the last message to the server
        self.stderr_tail = b""  # the end of what the server wrote to stderr
        self._heard_at = 0.0
        self._num_calls = 0
        self._is_left = False
        self._end = asyncio.Event()
        self._client: Any = None
        self.task = asyncio.create_task(self._run())

    @property
    def is_over(self) -> bool:
        """True if no more calls can be made."""
        return self._end.is_set() or self.task.done()

    def leave(self) -> None:
        """End the session when no call is open."""
        self._is_left = True
        if not self._num_calls:
            self._end.set()

    def end(self, why: str) -> None:
        """End the session now, since the server ended or broke a rule."""
        self.why = self.why or why
        self._end.set()

    def received(self, num_bytes: int) -> None:
        """Count what the server sent. Raises McpError above the bound."""
        self._heard_at = time.monotonic()
        self.num_received += num_bytes
        if self.num_received > MAX_BYTES:
            self.end(f"sent more than {MAX_BYTES >> 20} MiB for one request")
            raise McpError(self.why)

    async def list(self, timeout_s: float) -> None:
        """List the tools. Raises McpError."""
        tools: dict[str, McpTool] = {}
        cursor = None
        for _ in range(MAX_TOOLS):
            page = await self._request(lambda after=cursor: self._client.list_tools(cursor=after), timeout_s)
            for tool in page.tools:
                tools[tool.name] = self._tool(tool)
                if len(tools) > MAX_TOOLS:
                    raise self._error(f"lists more than {MAX_TOOLS} tools")
            cursor = page.next_cursor
            if cursor is None:
                break
        self.tools, self.listed_at = tuple(tools.values()), time.monotonic()

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float, max_characters: int) -> McpResult:
        """Call a tool. Raises McpError."""
        from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult

        # Not client.call_tool: it checks the result against the server's schema, whose patterns can take hours.
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(arguments)))
        self._num_calls += 1
        try:
            result = await self._request(lambda: self._client.session.send_request(request, CallToolResult), timeout_s)
        finally:
            self._num_calls -= 1
            if self._is_left:
                self.leave()
        return McpResult(_text_of(result, min(max_characters, MAX_RESULT_CHARACTERS)), bool(result.is_error))

    async def _request(self, send: Any, timeout_s: float) -> Any:
        """Send a request and return its result. Raises McpError."""
        from mcp.shared.exceptions import MCPError

        begun_at = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await send()
        except TimeoutError:
            if self.spec.command is not None and self._heard_at < begun_at:
                self.end(f"was silent for {timeout_s:g} s")
            raise self._error(f"did not answer within {timeout_s:g} s", code=-32001) from None
        except MCPError as error:
            if self.why:
                raise self._error(self.why) from None
            raise self._error("answered with an error", error.message, error.code, shows=True) from None
        except Exception as error:  # a hostile server can bring the SDK to raise anything
            raise self._error(self.why or "sent no valid answer", f"{type(error).__name__}: {error}") from None

    def _tool(self, tool: Any) -> McpTool:
        schema = tool.input_schema
        size = len(json.dumps(schema))
        if size > MAX_SCHEMA_CHARACTERS:
            raise self._error(
                f"has a schema of {size} characters for its tool {tool.name[:64]!r}; "
                f"at most {MAX_SCHEMA_CHARACTERS} are taken"
            )
        if not 0 < len(tool.name) <= 128:
            raise self._error(f"has a tool whose name has {len(tool.name)} characters; give 1 to 128")
        annotations = {} if tool.annotations is None else tool.annotations.model_dump(by_alias=True, exclude_none=True)
        description = (tool.description or "")[:MAX_DESCRIPTION_CHARACTERS]
        return McpTool(self.spec.name, tool.name, description, schema, annotations)

    def _error(self, what: str, detail: str = "", code: int = _CLOSED, *, shows: bool = False) -> McpError:
        """Return the error. `shows`: the detail is the server's own answer, and clients may see it."""
        message = f"MCP server {self.spec.name!r} {what}"
        if shows:
            return McpError(f"{message}: {' '.join(detail[:512].split())}", code=code)
        lines = self.stderr_tail.decode(errors="replace").strip().splitlines()
        return McpError(message, "; ".join(filter(None, [detail[:512], *lines[-1:]])), code)

    async def _run(self) -> None:
        """Hold the session open."""
        failure: McpError | None = None
        try:
            async with asyncio.timeout(CONNECT_S) as limit, self._open() as self._client:
                await self.list(CONNECT_S)
                limit.reschedule(None)
                self.ready.set_result(None)
                await self._end.wait()
        except McpError as error:
            failure = error
        except TimeoutError:
            failure = self._error(f"did not answer within {CONNECT_S:g} s")
        except Exception as error:  # of the SDK's groups of tasks, or of starting the process
            cause = _cause(error)
            reason = f"{type(cause).__name__}: {cause}"
            failure = cause if isinstance(cause, McpError) else self._error(self.why or "cannot be reached", reason)
        self._end.set()
        if not self.ready.done():
            failure = failure or self._error(self.why or "ended")
            self.retry_at = time.monotonic() + RETRY_S
            self.ready.set_exception(failure)
            self.ready.exception()  # nothing may wait for it

    def _open(self) -> Any:
        """Return the SDK's client over the transport."""
        from mcp.client import Client

        for name in _LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        return Client(_stdio(self) if self.spec.url is None else _http(self), cache=None)


@asynccontextmanager
async def _http(session: _Session) -> AsyncIterator[Any]:
    """Open streamable HTTP, as the SDK's client expects a transport."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    class Bounded(httpx2.AsyncByteStream):
        """The body of a response, up to MAX_BYTES."""

        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for part in self._stream:
                num_bytes += len(part)
                if num_bytes > MAX_BYTES:
                    session.end(f"sent more than {MAX_BYTES >> 20} MiB in one response")
                    raise httpx2.StreamError(session.why)
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def bound(response: Any) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":  # a small body could be a large one
            session.end("sent a compressed response, which was not asked for")
            raise httpx2.StreamError(session.why)
        response.stream = Bounded(response.stream)

    headers = {**session.spec.headers, "accept-encoding": "identity"}
    timeout = httpx2.Timeout(CONNECT_S, read=None)
    async with (
        httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks={"response": [bound]}) as client,
        streamable_http_client(session.spec.url, http_client=client) as streams,
    ):
        yield streams


@asynccontextmanager
async def _stdio(session: _Session) -> AsyncIterator[Any]:
    """Start a server's process, as the SDK's client expects a transport; end it and its children at the end."""
    import anyio
    from mcp.client.stdio import get_default_environment

    spec = session.spec
    assert spec.command is not None
    process = await asyncio.create_subprocess_exec(
        spec.command,
        *spec.args,
        env={**get_default_environment(), **spec.env},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C in a chat is not for it
        limit=MAX_BYTES,
    )
    incoming, read = anyio.create_memory_object_stream[Any](0)
    write, outgoing = anyio.create_memory_object_stream[Any](0)
    tasks = [
        asyncio.create_task(_read_messages(session, process, incoming)),
        asyncio.create_task(_write_messages(session, process, outgoing)),
        asyncio.create_task(_read_stderr(session, process)),
    ]
    try:
        yield read, write
    finally:
        try:
            await _stop(process)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (incoming, read, write, outgoing):
                stream.close()


async def _read_messages(session: _Session, process: asyncio.subprocess.Process, incoming: Any) -> None:
    """Pass the lines of a server's output to the SDK, until the server ends or exceeds a bound."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    assert process.stdout is not None
    num_stray = 0
    try:
        while line := await process.stdout.readline():
            session.received(len(line))
            try:
                message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError:
                num_stray += 1
                if num_stray > MAX_STRAY_LINES:
                    session.end(f"wrote more than {MAX_STRAY_LINES} lines that are no messages")
                    break
                continue
            await incoming.send(message)
    except ValueError:  # of readline
        session.end(f"sent a message of more than {MAX_BYTES >> 20} MiB")
    except (McpError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        pass
    finally:
        incoming.close()  # open requests fail
        session.end("ended")
    while await process.stdout.read(65_536):  # a server that is blocked in a write ends late
        pass


async def _write_messages(session: _Session, process: asyncio.subprocess.Process, outgoing: Any) -> None:
    assert process.stdin is not None
    async for message in outgoing:
        session.num_received = 0
        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
        with suppress(OSError):  # the reader finds the end
            process.stdin.write(text.encode() + b"\n")
            await process.stdin.drain()


async def _read_stderr(session: _Session, process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while data := await process.stderr.read(4096):
        session.stderr_tail = (session.stderr_tail + data)[-512:]


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close the server's input, then send SIGTERM and SIGKILL to its process group, with time between them."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            _kill(process, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
    finally:
        _kill(process, signal.SIGKILL)


def _kill(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _text_of(result: Any, max_characters: int) -> str:
    """Return a result's content as text. Images and the like are named, not shown."""
    texts: list[str] = []
    for part in result.content:
        resource = getattr(part, "resource", None)
        text = getattr(part, "text", None) or getattr(resource, "text", None)
        if text is None:
            kind = getattr(part, "mime_type", None) or getattr(resource, "mime_type", None) or part.type
            where = getattr(part, "uri", None) or getattr(resource, "uri", None)
            text = f"[{kind}{f' at {where}' if where else ''}, not shown]"
        texts.append(text)
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    whole = "\n".join(texts)
    if len(whole) <= max_characters:
        return whole
    return f"{whole[:max_characters]}\n[cut: {len(whole)} characters, of which {max_characters} are shown]"


def _cause(error: BaseException) -> BaseException:
    """Return the first error of groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
