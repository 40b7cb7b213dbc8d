"""What a stranger on the network can do to a fleet: nothing but wait and be cut."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.fleet.fronts import TOKEN, make_agent, offering, open_front, running, until

from octavo.config import LinkConfig
from octavo.errors import ConfigError
from octavo.fleet import connections
from octavo.fleet.connections import read_hosts
from octavo.fleet.link import JOIN, AgentHello, Link, LinkEnds, LinkMessage
from octavo.fleet.security import HostPort, LinkSecurity, parse_address


def cannot_join(lines: list[str]) -> bool:
    return any("cannot join" in line for line in lines)


async def test_a_wrong_token_and_no_token_are_refused(tmp_path: Path) -> None:
    async with open_front(tmp_path) as front:
        for token in (b"another token of the tests", None):
            agent, lines = make_agent(tmp_path, token=token)
            async with running(agent, front.address):
                await until(partial(cannot_join, lines))
        assert front.engines.num_refused and not front.engines.report()
        agent, _ = make_agent(tmp_path)
        async with running(agent, front.address):
            await until(lambda: front.engines.num_engines == 1)


async def test_a_wrong_token_of_a_front_is_refused_by_an_agent(tmp_path: Path) -> None:
    agent, _ = make_agent(tmp_path)
    async with offering(agent) as address:
        async with open_front(tmp_path, token=b"another token of the tests") as stranger:
            stranger.engines.dial(address)
            await asyncio.sleep(1.0)
            assert not stranger.engines.report() and not agent.front
        async with open_front(tmp_path) as front:
            front.engines.dial(address)
            await until(lambda: front.engines.num_engines == 1)


async def test_idle_strangers_do_not_keep_out_an_engine(tmp_path: Path) -> None:
    """A hundred connections without a handshake, and as many that send noise."""
    async with open_front(tmp_path) as front:
        strangers = [await asyncio.open_connection(*front.address) for _ in range(100)]
        assert len(front.engines._listener.pending) <= connections.MAX_PENDING
        agent, _ = make_agent(tmp_path)
        async with running(agent, front.address):
            await until(lambda: front.engines.num_engines == 1)
            await front.serve_all(["one"])
            draw = random.Random(5)
            for _ in range(100):
                _, writer = await asyncio.open_connection(*front.address)
                writer.write(draw.randbytes(draw.randrange(1, 300)))
                strangers.append((_, writer))
            await front.serve_all(["two"])
        for _, writer in strangers:
            writer.close()


async def test_an_address_with_many_wrong_proofs_is_refused_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WRONG_PROOFS_S", 2.0)
    async with open_front(tmp_path) as front:
        for _ in range(connections.MAX_WRONG_PROOFS):
            reader, writer = await asyncio.open_connection(*front.address)
            await reader.readexactly(58)
            writer.write((64).to_bytes(4, "little") + bytes(64))
            assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_connection(*front.address)
        assert await reader.read() == b""
        assert front.engines.num_refused > connections.MAX_WRONG_PROOFS
        writer.close()
        agent, _ = make_agent(tmp_path)
        async with running(agent, front.address):
            await until(lambda: front.engines.num_engines == 1)


class Proxy:
    """Passes bytes between a front and what connects here; `change` may alter those that go to the front."""

    def __init__(self, target: HostPort) -> None:
        self.target = target
        self.change: Callable[[bytes], bytes] = lambda data: data
        self.taken: list[bytes] = []
        self.address = target
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = HostPort("127.0.0.1", server.sockets[0].getsockname()[1])
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self.target)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter, alter: bool) -> None:
            try:
                while data := await source.read(1 << 16):
                    if alter:
                        self.taken.append(data)
                        data = self.change(data)
                    sink.write(data)
                    await sink.drain()
            except OSError:
                pass
            finally:
                sink.close()

        await asyncio.gather(copy(reader, far_writer, True), copy(far_reader, writer, False))


async def test_bytes_that_are_changed_on_the_way_end_the_connection_and_lose_nothing(tmp_path: Path) -> None:
    async with open_front(tmp_path) as front:
        proxy = Proxy(front.address)
        server = await proxy.start()
        one, _ = make_agent(tmp_path)
        two, _ = make_agent(tmp_path)
        async with running(one, proxy.address), running(two, front.address):
            await until(lambda: front.engines.num_engines == 2)
            work = asyncio.create_task(front.serve_all([f"r{number}" for number in range(20)], 100))
            await until(lambda: len(front.supervisor.requests) == 20)
            proxy.change = lambda data: bytes([data[0] ^ 1]) + data[1:]
            await until(lambda: front.engines.num_engines == 1)
            proxy.change = lambda data: data
            await work
            await until(lambda: front.engines.num_engines == 2)
        server.close()


async def test_a_recorded_handshake_is_of_no_use(tmp_path: Path) -> None:
    async with open_front(tmp_path) as front:
        proxy = Proxy(front.address)
        server = await proxy.start()
        agent, _ = make_agent(tmp_path)
        async with running(agent, proxy.address):
            await until(lambda: front.engines.num_engines == 1)
        await until(lambda: not front.engines.report())
        refused = front.engines.num_refused
        reader, writer = await asyncio.open_connection(*front.address)
        writer.write(b"".join(proxy.taken))
        await reader.readexactly(58)
        assert await reader.read() == b""
        assert front.engines.num_refused == refused + 1 and not front.engines.report()
        writer.close()
        server.close()


class Listener(LinkEnds):
    """Notes what it gets."""

    def __init__(self) -> None:
        self.messages: list[LinkMessage] = []
        self.why = ""

    def message(self, link: Link, message: LinkMessage) -> None:
        self.messages.append(message)

    def ended(self, link: Link, why: str) -> None:
        self.why = why or "ended"


async def test_frames_of_a_side_with_the_token_are_checked_too(tmp_path: Path) -> None:
    """Fuzz behind the handshake: what is no message ends that connection only."""
    draw = random.Random(3)
    async with open_front(tmp_path) as front:
        loop = asyncio.get_running_loop()
        for number in range(150):
            ends = Listener()
            _, link = await loop.create_connection(lambda: Link(TOKEN, JOIN, ends, is_dialler=True), *front.address)  # noqa: B023
            await link.opened
            assert link._frames is not None and link._transport is not None
            if number % 3:
                link.send(AgentHello(1, f"agent-{number}", "fuzz", "slow", 0))
            size = draw.choice([0, 1, 5, 9, 40, 400])
            kind = draw.choice([b"", b"\0", b"\1", b"\7", b"\0\x97\xaaEngineReady"])
            link._transport.write(link._frames.seal(kind + draw.randbytes(size)))
            link._transport.write_eof()
            await until(lambda: ends.why)  # noqa: B023
        agent, _ = make_agent(tmp_path)
        async with running(agent, front.address):
            await until(lambda: front.engines.num_engines == 1)
            await front.serve_all(["one"])


# --- TLS


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
async def test_tls_with_one_authority_works_and_with_another_is_refused(tmp_path: Path) -> None:
    ours, theirs = (make_authority(tmp_path / name) for name in ("ours", "theirs"))

    def security(files: dict[str, str]) -> LinkSecurity:
        return LinkSecurity(tmp_path, TOKEN, **files)

    async with open_front(tmp_path) as front:
        front.engines._listener.close()
        front.engines._listener._security = security(ours)
        address = await front.engines.listen(HostPort("127.0.0.1", 0))
        for files, is_good in ((ours, True), (theirs, False), ({}, False)):
            agent, lines = make_agent(tmp_path)
            agent._security = security(files)
            async with running(agent, address):
                if is_good:
                    await until(lambda: front.engines.num_engines == 1)
                    await front.serve_all(["one"])
                else:
                    await until(partial(cannot_join, lines))
            await until(lambda: not front.engines.report())


def make_authority(folder: Path) -> dict[str, str]:
    """An authority, and a certificate of 127.0.0.1 that it signed."""
    folder.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", f"/CN={folder.name}")
    openssl("req", *curve[:-2], "-keyout", "key.pem", "-out", "request.pem", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "request.pem", *signing, "-out", "cert.pem")
    return {"cert": str(folder / "cert.pem"), "key": str(folder / "key.pem"), "ca": str(folder / "ca.pem")}


# --- settings


def test_settings_are_refused_with_a_remedy(tmp_path: Path) -> None:
    def refusal(**values: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            LinkSecurity.of(LinkConfig(**values), tmp_path)
        return str(refused.value)

    (tmp_path / "short").write_text("hunter2\n")
    assert "has 7 bytes" in refusal(fleet_token="hunter2") and "hunter2" not in refusal(fleet_token="hunter2")
    assert "--fleet-token-file has 7 bytes" in refusal(fleet_token_file=str(tmp_path / "short"))
    assert "cannot be read" in refusal(fleet_token_file=str(tmp_path / "none"))
    assert "both set" in refusal(fleet_token="0" * 16, fleet_token_file=str(tmp_path / "short"))
    assert "--fleet-tls-cert" in refusal(fleet_tls_cert=str(tmp_path / "short"))
    assert "without --fleet-tls-cert" in refusal(fleet_tls_key=str(tmp_path / "short"))
    assert "--fleet-tls-ca" in refusal(fleet_tls_ca=str(tmp_path / "short"))
    open_to_all = LinkSecurity.of(LinkConfig(), tmp_path)
    for host in ("10.0.0.1", "::", "example.com"):
        with pytest.raises(ConfigError, match=r"no token.*OCTAVO_FLEET_TOKEN or --fleet-token-file"):
            open_to_all.check(HostPort(host, 1), "--join")
    for host in ("127.0.0.1", "::1", "localhost"):
        open_to_all.check(HostPort(host, 1), "--join")
    (tmp_path / "long").write_text("0123456789abcdef\n")
    given = LinkSecurity.of(LinkConfig(fleet_token_file=str(tmp_path / "long")), tmp_path)
    given.check(HostPort("10.0.0.1", 1), "--join")
    assert given.dialling_token(HostPort("10.0.0.1", 1)) == b"0123456789abcdef"


def test_a_random_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    security = LinkSecurity(tmp_path)
    token = security.listening_token(7)
    assert security.dialling_token(HostPort("127.0.0.1", 7)) == token
    (tmp_path / "link-7.token").chmod(0o644)
    with pytest.raises(ConfigError, match="nothing of this user waits"):
        security.dialling_token(HostPort("127.0.0.1", 7))


def test_addresses_and_files_of_hosts(tmp_path: Path) -> None:
    assert parse_address("[::1]:80", "x") == HostPort("::1", 80) and str(HostPort("::1", 80)) == "[::1]:80"
    for text in ("host", "host:", ":80", "host:port", "host:70000", "http://host:80", ""):
        with pytest.raises(ConfigError, match=r"--join is .*give HOST:PORT"):
            parse_address(text, "--join")
    path = tmp_path / "hosts"
    path.write_text("# all\n10.0.0.1:8765  # first\n\nnode-2:8765\n")
    assert read_hosts(path) == [HostPort("10.0.0.1", 8765), HostPort("node-2", 8765)]
    for text, message in (("a:1\na:1", "line 2.*line 1 too"), ("# none", "no address"), ("a", "line 1, is 'a'")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_hosts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hosts(tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--join", "10.0.0.1:8765"), "there is no token"),
        (("--offer", "[::]:0"), "there is no token"),
        (("--join", "127.0.0.1"), "give HOST:PORT"),
        (("--join", "127.0.0.1:1", "--offer", "127.0.0.1:1"), "are both set"),
    ],
)
def test_the_command_refuses_unsafe_addresses(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    script = tmp_path / "a.json"
    script.write_text('{"rules": [{"say": "yes"}]}')
    command = [sys.executable, "-m", "octavo", "serve", f"scripted:{script}", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and message in done.stderr, done.stderr
