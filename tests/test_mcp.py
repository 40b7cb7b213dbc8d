"""MCP servers: what is read from settings; good servers over stdio and HTTP; what hostile ones can do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from octavo import mcp
from octavo.config import McpConfig
from octavo.errors import ConfigError
from octavo.mcp import McpError, McpServers, McpServerSpec, McpTool, function_names, read_arguments, read_specs
from tests.ports import free_port
from tests.quick import one_in

SCRIPT = Path(__file__).parent / "mcp_servers.py"
OWN = f"of-{os.getpid()}"  # in the command lines of this process's servers: other tests start the same ones
MOST_STALLED_S = 2.5  # of the event loop, while a server misbehaves: less than it is waited for


@pytest.fixture
def sdk() -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")


def stdio(mode: str, **env: str) -> McpServerSpec:
    return McpServerSpec(name="it", command=sys.executable, args=(str(SCRIPT), mode, OWN), env=env)


@contextlib.asynccontextmanager
async def opened(spec: McpServerSpec, timeout_s: float = 30.0) -> AsyncIterator[McpServers]:
    servers = McpServers([spec], timeout_s)
    try:
        yield servers
    finally:
        await servers.close()


async def call(servers: McpServers, name: str = "ping", most: int = 1000, **arguments: object) -> mcp.McpResult:
    tools = {tool.name: tool for tool in await servers.tools("it")}
    return await servers.call(tools[name], arguments, most)


# --- settings


def specs(*servers: str, file: Path | None = None, needs_names: bool = False) -> list[McpServerSpec]:
    return read_specs(McpConfig(mcp=servers, mcp_config=None if file is None else str(file)), needs_names=needs_names)


def test_a_server_is_a_command_or_a_url_with_or_without_a_name(sdk: None) -> None:
    found = specs("a=run 'x y' --to=z", "http://host:1/mcp?key=1", "/bin/run.sh --x=1", "run 2")
    assert [(spec.name, spec.command, spec.args, spec.url) for spec in found] == [
        ("a", "run", ("x y", "--to=z"), None),
        ("host", None, (), "http://host:1/mcp?key=1"),
        ("run", "/bin/run.sh", ("--x=1",), None),
        ("run_4", "run", ("2",), None),
    ]


def test_a_file_has_the_fields_usual(sdk: None, tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    file = {"one": {"command": "run", "args": ["x"], "env": {"A": "b"}, "disabled": False}}
    file["two"] = {"url": "https://h/mcp", "headers": {"Authorization": "Bearer secret"}, "type": "http"}
    path.write_text(json.dumps({"mcpServers": file}))
    one, two, three = specs("three=run", file=path, needs_names=True)
    assert (one.name, one.command, one.args, one.env) == ("one", "run", ("x",), {"A": "b"})
    assert (two.name, two.url, two.headers) == ("two", "https://h/mcp", {"Authorization": "Bearer secret"})
    assert three.name == "three"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "give a command"),
        ("a='", "no command line"),
        ("a= ", "give a command"),
        ("a=x --mcp a=y", "two MCP servers have the name .a."),
    ],
)
def test_what_is_no_server_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        specs(*text.split(" --mcp "))


@pytest.mark.parametrize(
    "file",
    [
        "{",
        "[]",
        "{}",
        '{"mcpServers": []}',
        '{"mcpServers": {"a": {}}}',
        '{"mcpServers": {"a b": {"command": "x"}}}',
        '{"mcpServers": {"a": {"command": "x", "url": "http://y"}}}',
        '{"mcpServers": {"a": {"command": ["x"]}}}',
        '{"mcpServers": {"a": {"url": "ftp://y"}}}',
        '{"mcpServers": {"a": {"url": "http://y", "type": "sse"}}}',
        " " * (mcp.MAX_CONFIG_BYTES + 1),
    ],
)
def test_a_file_with_a_mistake_is_named(tmp_path: Path, file: str) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(file)
    with pytest.raises(ConfigError, match=r"--mcp-config .*mcp\.json"):
        specs(file=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        specs(file=tmp_path / "none.json")


def test_a_server_of_clients_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="NAME=COMMAND"):
        specs("run it", needs_names=True)


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[mcp\]'"):
        specs("a=run")
    assert specs() == []


def test_tools_of_one_name_are_told_apart() -> None:
    def tool(server: str, name: str) -> McpTool:
        return McpTool(server, name, "", {}, {})

    names = function_names([tool("a", "x"), tool("b", "x"), tool("a", "y.z/1"), tool("a", "mine")], ["mine"])
    assert {name: (each.server, each.name) for name, each in names.items()} == {
        "a_x": ("a", "x"),
        "b_x": ("b", "x"),
        "y_z_1": ("a", "y.z/1"),
        "a_mine": ("a", "mine"),
    }


@pytest.mark.parametrize("text", ["[1]", "{", "3", "[" * 100_000])
def test_arguments_are_an_object(text: str) -> None:
    assert read_arguments("") == {} and read_arguments('{"a": 1}') == {"a": 1}
    with pytest.raises(McpError, match="not a JSON object"):
        read_arguments(text)


# --- good servers


async def check_good(servers: McpServers) -> None:
    tools = {tool.name: tool for tool in await servers.tools("it")}
    assert set(tools) == {"add", "boom", "slow"} and tools["add"].description == "Add two numbers."
    assert tools["add"].is_read_only and not tools["boom"].is_read_only
    assert await call(servers, "add", a=2, b=3) == mcp.McpResult("5")
    assert (await call(servers, "boom")).is_error
    assert (await call(servers, "add", a="two", b=3)).is_error, "the server checks the arguments"
    with pytest.raises(McpError, match="has no tool 'other'"):
        await servers.call(McpTool("it", "other", "", {}, {}), {}, 100)


async def test_a_process(sdk: None) -> None:
    async with opened(stdio("good")) as servers:
        await check_good(servers)


@pytest.fixture
def http_port(sdk: None) -> Iterator[int]:
    port = free_port()
    with running(port):
        yield port


@contextlib.contextmanager
def running(port: int) -> Iterator[None]:
    """A server over HTTP."""
    with subprocess.Popen([sys.executable, str(SCRIPT), "http", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                with contextlib.suppress(OSError), __import__("socket").create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield
        finally:
            process.kill()


def http(port: int, **headers: str) -> McpServerSpec:
    return McpServerSpec(name="it", url=f"http://127.0.0.1:{port}/mcp", headers=headers)


async def test_a_url(http_port: int) -> None:
    async with opened(http(http_port)) as servers:
        await check_good(servers)


async def test_a_server_that_began_anew_is_reached_again(sdk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "RETRY_S", 0.0)
    port = free_port()
    async with opened(http(port)) as servers:
        with running(port):
            assert (await call(servers, "add", a=1, b=1)).text == "2"
        with pytest.raises(McpError):
            await call(servers, "add", a=1, b=1)
        with running(port):
            assert (await call(servers, "add", a=1, b=2)).text == "3"


async def test_calls_of_one_server_run_side_by_side_and_a_cancelled_one_disturbs_none(http_port: int) -> None:
    async with opened(http(http_port)) as servers:
        await servers.tools("it")
        slow = asyncio.create_task(call(servers, "slow", seconds=20))
        await asyncio.sleep(0.2)
        assert (await call(servers, "add", a=1, b=1)).text == "2"
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert (await call(servers, "add", a=1, b=1)).text == "2"


# --- hostile servers


@contextlib.asynccontextmanager
async def watching_the_loop() -> AsyncIterator[None]:
    """Check that the event loop is never busy for long."""
    gc.collect()
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            worst = max(worst, time.monotonic() - begun)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
    assert worst < MOST_STALLED_S


SAID = {
    "silent": "did not answer within",
    "hang": "did not answer within",
    "die": "ended",
    "rubbish": "lines that are no messages",
    "huge": "more than 4 MiB",
    "flood": "did not answer within|more than 4 MiB",
    "many": "more than 128 tools",
    "schema": "schema of 1000037 characters for its tool 'ping'",
    "wrong": "sent no valid answer",
    "fail": "answered with an error: bad",
    "stubborn": "did not answer within",
    "stderr": "did not answer within",
}


@pytest.mark.parametrize("mode", one_in(3, SAID))
async def test_a_hostile_server_gives_one_line(sdk: None, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "CONNECT_S", 2.0 if mode in ("silent", "stderr") else 30.0)
    async with opened(stdio(mode), timeout_s=1.0 if "did not" in SAID[mode] else 30.0) as servers:
        async with watching_the_loop():
            for _ in range(2):  # the second time with a new session, or with the error of the first
                with pytest.raises(McpError, match=f"MCP server 'it' .*({SAID[mode]})") as caught:
                    await call(servers)
                assert "\n" not in caught.value.full and len(caught.value.full) < 2000
        process = servers._sessions  # for the next check
        await servers.close()
    assert not process
    listed = subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert f"{SCRIPT} {mode} {OWN}" not in listed, "the server and its children have ended"


async def test_what_a_dying_server_wrote_is_for_the_operator(sdk: None) -> None:
    async with opened(stdio("die")) as servers:
        with pytest.raises(McpError) as caught:
            await call(servers)
    assert "goodbye" in caught.value.full and "goodbye" not in str(caught.value)


async def test_a_server_that_died_is_started_again(sdk: None, tmp_path: Path) -> None:
    async with opened(stdio("die-once", FLAG=str(tmp_path / "flag"))) as servers:
        with pytest.raises(McpError, match="ended"):
            await call(servers)
        assert (await call(servers)).text == "pong"


async def test_a_server_that_cannot_start_is_not_tried_at_every_call(sdk: None) -> None:
    async with opened(McpServerSpec(name="it", command="/nowhere/server")) as servers:
        with pytest.raises(McpError, match="cannot be reached") as first:
            await servers.tools("it")
        with pytest.raises(McpError) as second:
            await servers.tools("it")
    assert second.value is first.value and "/nowhere/server" in first.value.full


async def test_a_result_is_not_checked_against_the_servers_patterns(sdk: None) -> None:
    async with opened(stdio("regex")) as servers, watching_the_loop():
        assert (await call(servers)).text == "checked"


async def test_a_long_result_is_cut(sdk: None) -> None:
    async with opened(stdio("long")) as servers, watching_the_loop():
        text = (await call(servers, most=10)).text
        assert text == f"{'x' * 10}\n[cut: 3000000 characters, of which 10 are shown]"
        assert len((await call(servers, most=1 << 30)).text) < mcp.MAX_RESULT_CHARACTERS + 100


async def test_endless_pages_of_tools_end(sdk: None) -> None:
    async with opened(stdio("pages")) as servers:
        assert [tool.name for tool in await servers.tools("it")] == ["ping0", "ping1", "ping2"]


async def test_a_process_gets_few_variables(sdk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    async with opened(stdio("env", MINE="1")) as servers:
        variables = json.loads((await call(servers, most=10_000)).text)
    assert variables["MINE"] == "1" and variables["PATH"] == os.environ["PATH"]
    assert "OCTAVO_API_KEY" not in variables


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def huge(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000002\r\n\r\n")
    for _ in range(1000):
        writer.write(b"x" * 100_000)
        await writer.drain()


async def bomb(writer: asyncio.StreamWriter) -> None:
    body = gzip.compress(b" " * 50_000_000)
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)


async def events(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    while True:
        writer.write(b'data: {"jsonrpc": "2.0", "method": "notifications/x"}\n\n' * 100)
        await writer.drain()
        await asyncio.sleep(0)


async def refuse(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")


async def redirect(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.2:9/steal\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize("answer", one_in(2, [hang, huge, bomb, events, refuse, redirect]))
async def test_a_hostile_url_gives_one_line(
    sdk: None, answer: Answer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tasks: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        writer.transport.abort()

    monkeypatch.setattr(mcp, "CONNECT_S", 3.0)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with caplog.at_level("DEBUG"):
        async with opened(http(port, Authorization="Bearer s3cret")) as servers, watching_the_loop():
            with pytest.raises(McpError, match="MCP server 'it' ") as caught:
                await servers.tools("it")
            assert "s3cret" not in caught.value.full and "\n" not in caught.value.full
    assert "s3cret" not in caplog.text
    server.close()
    for task in filter(None, tasks):
        task.cancel()
    await asyncio.gather(*filter(None, tasks))
