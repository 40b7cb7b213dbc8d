"""Row 26: what the processes of one server listen on: the API's port alone, on loopback."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fake_server import FakeServer
from tests.reliability.scorecard import Score
from tests.tiny_models import make_tiny_model

LISTEN = "0A"
TABLES = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def listening(pid: int) -> Iterator[tuple[str, str, int]]:
    """Protocol, address and port of everything that a process could be reached on from elsewhere."""
    own = sockets_of(pid)
    for table in TABLES:
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in own and (words[3] == LISTEN or not table.startswith("tcp")):
                address, _, port = words[1].partition(":")
                yield table, spelled(address), int(port, 16)


def spelled(address: str) -> str:
    packed = b"".join(struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net is Linux's")
def test_row_26_one_server_listens_on_one_port_of_loopback(tmp_path: Path, score: Score) -> None:
    model = str(make_tiny_model("smollm2", tmp_path / "tiny"))
    with FakeServer(model, tmp_path / "log", "--standby") as server:
        while not server.status()["engine"]["has_standby"]:
            time.sleep(0.05)
        assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2})[0] == 200
        tree = [
            server.process.pid,
            *(child.pid for child in psutil.Process(server.process.pid).children(recursive=True)),
        ]
        assert {server.pid(role) for role in ("supervisor", "api", "engine", "standby")} <= set(tree)
        found = {entry for pid in tree for entry in listening(pid)}
        assert server.end() == 0
    api = ("tcp", "127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    score.count("listeners beside the API's port", len(found - {api}))
    score.share("the API's port on loopback", int(api in found), 1)


def test_the_look_at_listeners_sees_some() -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        expected = {("tcp", *tcp.getsockname()), ("udp", *udp.getsockname())}
        assert expected <= set(listening(os.getpid()))
