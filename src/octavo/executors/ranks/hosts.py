"""Ranks on several hosts: host 0 waits for the rank processes of the others, which dial until it answers.

Owns: the sealed connections between hosts, the check that both run the same model and version, and which rank a process
of another host gets. Does not: start processes (cli.agent does on the other hosts).
Two connections a process: plans, and pings. Tensors travel beside them, by torch.distributed, and are not sealed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, field

from octavo.config import ParallelConfig
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.executors.ranks import frames
from octavo.executors.ranks.frames import PURPOSE, Channel, Hello, Kind
from octavo.executors.ranks.group import RankPeer
from octavo.sealing import SealError, connect

WAIT_LIMIT_S = 590.0  # for the ranks of all hosts; an engine process that opens is killed after 600 s
TELL_S = 10.0  # between two lines in the log about hosts that are missing
DIAL_S = 0.25  # between two attempts to reach host 0
REFUSED_S = 2.0  # before another attempt after a refusal
HELLO_LIMIT_S = 5.0
PONG_LIMIT_S = 1.0  # for the rest of a frame that has begun
LOST_S = 10.0  # without a ping, a rank on another host ends: the network to host 0 is broken
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankHosts:
    """What both sides compare: the shared token, the model's fingerprint and the version; and the sizes."""

    parallel: ParallelConfig
    token: bytes = field(repr=False)
    fingerprint: str
    version: str

    @property
    def num_local(self) -> int:
        """Ranks on each host."""
        return self.parallel.num_ranks // self.parallel.nnodes

    def accept(self) -> list[RankPeer]:
        """Wait for the rank processes of all other hosts. Raises ConfigError, EngineDeadError."""
        address = self.parallel.master_addr, self.parallel.master_port
        try:
            listener = socket.create_server(address)
        except OSError as error:
            raise ConfigError(
                f"--master-addr {address[0]} and --master-port {address[1]} cannot be listened on ({error.strerror}); "
                "give an address of this host, and a port that is free"
            ) from None
        found: dict[int, list[RankPeer]] = {node: [] for node in range(1, self.parallel.nnodes)}
        halves: dict[bytes, tuple[Hello, Channel]] = {}
        until, tell_at = time.monotonic() + WAIT_LIMIT_S, time.monotonic() + TELL_S
        with listener:
            listener.settimeout(1.0)
            while any(len(peers) < self.num_local for peers in found.values()):
                if time.monotonic() > tell_at:
                    tell_at = time.monotonic() + TELL_S
                    missing = [str(node) for node, peers in found.items() if len(peers) < self.num_local]
                    _LOG.warning("ranks of host %s are missing; start octavo serve there", ", ".join(missing))
                if time.monotonic() > until:
                    raise EngineDeadError(f"not all ranks of {self.parallel.nnodes} hosts have connected in time")
                with contextlib.suppress(TimeoutError):
                    self._greet(listener.accept()[0], found, halves)
        return [peer for node in found for peer in found[node]]

    def _greet(
        self, connection: socket.socket, found: dict[int, list[RankPeer]], halves: dict[bytes, tuple[Hello, Channel]]
    ) -> None:
        """Take one connection; log and close it if it is not of a rank that is missing."""
        try:
            connection.settimeout(HELLO_LIMIT_S)
            channel = Channel(connection, connect(connection, self.token, PURPOSE, is_dialler=False))
            hello = frames.unpack(Hello, channel.expect(Kind.HELLO))
            self.check(hello, found)
        except (OctavoError, OSError, EOFError) as error:
            _LOG.warning("a connection to the port of ranks was refused: %s", error)
            connection.close()
            return
        other = halves.pop(hello.process_key, None)
        if other is None or other[0].is_control == hello.is_control:
            halves[hello.process_key] = hello, channel
            return
        plans, pings = (other[1], channel) if hello.is_control else (channel, other[1])
        plans.set_timeout(None)
        pings.set_timeout(PONG_LIMIT_S)
        peers = found[hello.node_rank]
        rank = hello.node_rank * self.num_local + len(peers)
        peers.append(RankPeer(rank, hello.host, hello.pid, plans, pings, heard_at=time.monotonic()))

    def check(self, hello: Hello, found: dict[int, list[RankPeer]]) -> None:
        """Raise ConfigError unless the process can be a rank of this engine."""
        where = f"{hello.host} (--node-rank {hello.node_rank})"
        if hello.version != self.version:
            raise ConfigError(f"{where} runs octavo {hello.version}, this host {self.version}; install the same")
        if hello.fingerprint != self.fingerprint:
            raise ConfigError(f"{where} has other files of the model; copy them from one host to the other")
        if len(found.get(hello.node_rank, range(self.num_local))) >= self.num_local:
            raise ConfigError(f"{where} is no missing host of --nnodes {self.parallel.nnodes}; number hosts from 0")

    def dial(self) -> tuple[Channel, Channel]:
        """Connect to host 0 as soon as its engine waits for ranks; return the connections of plans and of pings."""
        key = secrets.token_bytes(16)
        while True:
            try:
                plans = self._connect(key, is_control=False)
                pings = self._connect(key, is_control=True)
            except OSError:
                time.sleep(DIAL_S)
                continue
            except SealError as error:
                _LOG.warning("host 0 (%s) refused this rank: %s", self.parallel.master_addr, error)
                time.sleep(REFUSED_S)
                continue
            pings.set_timeout(LOST_S)
            return plans, pings

    def _connect(self, key: bytes, *, is_control: bool) -> Channel:
        address = self.parallel.master_addr, self.parallel.master_port
        connection = socket.create_connection(address, timeout=HELLO_LIMIT_S)
        channel = Channel(connection, connect(connection, self.token, PURPOSE, is_dialler=True))
        channel.set_timeout(None)
        channel.send(Kind.HELLO, frames.pack(self.hello(key, is_control=is_control)))
        return channel

    def hello(self, key: bytes, *, is_control: bool) -> Hello:
        """Return this process's first message on a connection."""
        node = self.parallel.node_rank
        return Hello(key, is_control, node, socket.gethostname(), os.getpid(), self.fingerprint, self.version)
