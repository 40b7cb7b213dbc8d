"""The admin socket: one line in, one out, for this user alone, within bounds."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError, OctavoError
from octavo.server import admin
from octavo.server.admin import AdminServer


async def echo(argument: str) -> object:
    return {"said": argument}


async def refuse(argument: str) -> object:
    raise OctavoError(f"not {argument}")


async def broken(argument: str) -> object:
    raise ZeroDivisionError("inside")


async def slow(argument: str) -> object:
    await asyncio.sleep(60)


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[AdminServer]:
    server = AdminServer(path, {"echo": echo, "refuse": refuse, "broken": broken, "slow": slow})
    await server.open()
    try:
        yield server
    finally:
        await server.close()


async def ask(path: Path, *lines: bytes) -> list[Any]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    answers: list[Any] = []
    try:
        for line in lines:
            writer.write(line)
            answer = await asyncio.wait_for(reader.readline(), 60)
            if not answer:
                break
            answers.append(json.loads(answer))
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answers


def line(verb: str, argument: str = "") -> bytes:
    return json.dumps({"verb": verb, "argument": argument}).encode() + b"\n"


async def test_a_line_gets_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await ask(path, line("echo", "x"), line("echo")) == [{"ok": {"said": "x"}}, {"ok": {"said": ""}}]
    assert not path.exists()


async def test_mistakes_and_failures_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "VERB_TIMEOUT_S", 0.05)
    path = tmp_path / "a.sock"
    async with serving(path):
        lines = (b"{}\n", b"[1]\n", b'{"verb": "echo", "x": 1}\n', line("fly"), line("refuse", "now"), line("broken"))
        answers = await ask(path, *lines, line("slow"), line("echo"))
    assert [list(answer) for answer in answers] == [["error"]] * 7 + [["ok"]]
    assert "give one of echo, refuse, broken, slow" in answers[3]["error"]
    assert answers[4]["error"] == "not now"
    assert "inside" not in answers[5]["error"]


async def test_bounds_end_one_connection_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "LINE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", 4)
    path = tmp_path / "a.sock"
    async with serving(path):
        assert await ask(path, b'"' + b"x" * (admin.MAX_LINE_BYTES + 100) + b'"\n') == []
        assert await ask(path, b"{") == [], "a line that does not end"
        many = await asyncio.gather(*(asyncio.open_unix_connection(str(path)) for _ in range(8)))
        await asyncio.sleep(0.05)
        for _, writer in many:
            writer.close()
        await asyncio.sleep(0.3)
        assert await ask(path, line("echo")) == [{"ok": {"said": ""}}]


async def test_the_end_of_the_server_ends_its_connections(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(line("slow"))
        await asyncio.sleep(0.02)
    assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_only_a_dead_socket_gives_way(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with serving(path):
        with pytest.raises(ConfigError, match="in use by a running server"):
            await AdminServer(path, {}).open()
        assert await ask(path, line("echo")) == [{"ok": {"said": ""}}]
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        await AdminServer(path, {}).open()
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot be had"):
        await AdminServer(tmp_path / "none" / "a.sock", {}).open()


async def test_another_user_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_is_own", lambda connection: False)
    path = tmp_path / "a.sock"
    async with serving(path):
        assert await ask(path, line("echo")) == []


async def test_a_socket_that_took_the_path_meanwhile_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    async with serving(path):
        path.unlink()
        async with serving(path):
            pass
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            inode = path.stat().st_ino
    assert path.stat().st_ino == inode
