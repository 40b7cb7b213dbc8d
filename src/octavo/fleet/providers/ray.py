"""RayProvider: replicas placed by Ray, as the api process sees it: start, address, stop.

Owns: the process that talks to Ray (ray_process), the messages between the two, and starting that process again.
Does not: import ray, find out whether a replica works (its link does), or carry a request: an agent dials the front
itself, and its frames never pass through Ray.
Ray has a process of its own because its driver runs threads that compete with the event loop, handles signals, and ends
its process on a fatal error; that must not end open requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import logging
import os
import random
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

import msgspec

from octavo.errors import ConfigError, EngineDeadError
from octavo.fleet.providers.ray_agent import Placement, ReplicaSpec
from octavo.fleet.security import HostPort
from octavo.restarts import RestartBudget, describe_status

COMMAND: Final = (sys.executable, "-m", "octavo.fleet.providers.ray_process")
# Ray otherwise gives a local node the machine's own address, and its servers then listen on all interfaces.
LOCAL_VARIABLES: Final = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
LOCAL: Final = "local"
CONNECT_S = 120.0
CLOSE_S = 60.0
MAX_LINE = 1 << 20

_LOG = logging.getLogger(__name__)


class Connect(msgspec.Struct, frozen=True, tag=True):
    """The first message. `address` is a cluster's, or "local" for a Ray of this fleet alone."""

    number: int
    fleet: str
    address: str = LOCAL
    folder: str = ""  # of a local Ray's files
    wait_s: float = 300.0  # how long a replica may wait for room in the cluster


class Start(msgspec.Struct, frozen=True, tag=True):
    """Place a replica. One that runs already with the same spec is kept."""

    number: int
    replica: int
    spec: ReplicaSpec


class Address(msgspec.Struct, frozen=True, tag=True):
    """Return where a replica runs."""

    number: int
    replica: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End a replica and free its room."""

    number: int
    replica: int


class Remove(msgspec.Struct, frozen=True, tag=True):
    """End all of the fleet's replicas."""

    number: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to the message of that number. To Connect, the placement is this machine's."""

    number: int
    placement: Placement | None = None
    error: str = ""


class Notice(msgspec.Struct, frozen=True, tag=True):
    """A line for the operator."""

    text: str


Order = Connect | Start | Address | Stop | Remove


class RayProvider:
    """Replicas of one fleet on Ray. Made by connect(); used by one event loop. `notice` gets lines for the operator."""

    def __init__(self, fleet: str, address: str, notice: Callable[[str], None], wait_s: float) -> None:
        self.pid = 0  # of the process that talks to Ray
        self.host = ""  # this machine's address in the cluster
        self._connect = Connect(0, fleet, address, wait_s=wait_s)
        self._folder = ""  # of a local Ray
        self._notice = notice
        self._is_closed = False
        self._wanted: dict[int, ReplicaSpec] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Placement | None]] = {}
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]
        self._keeping: asyncio.Task[None]
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def connect(
        cls, fleet: str, address: str, notice: Callable[[str], None], wait_s: float = 300.0
    ) -> RayProvider:
        """Connect to the cluster at `address`, or start a local Ray ("local"). Raises ConfigError with the remedy."""
        provider = cls(fleet, address, notice, wait_s)
        await provider._open()
        provider._keeping = asyncio.create_task(provider._keep(), name="octavo-ray")
        return provider

    def dial_address(self, listening: HostPort) -> HostPort:
        """Return where replicas dial a front that listens here: not the address that stands for all interfaces.

        Raises ConfigError if they cannot reach it.
        """
        try:
            address, own = ipaddress.ip_address(listening.host), ipaddress.ip_address(self.host)
        except ValueError:  # a name
            return listening
        if not address.is_unspecified:
            return listening
        if address.version != own.version:
            raise ConfigError(
                f"--fleet-address is {str(listening)!r}, which listens on IPv{address.version} only, and this "
                f"machine's address in Ray is {self.host}; give {HostPort(self.host, listening.port)}, or leave it out"
            )
        return HostPort(self.host, listening.port)

    def free_number(self) -> int:
        """Return the lowest number that no replica has."""
        return next(number for number in itertools.count() if number not in self._wanted)

    async def start(self, replica: int, spec: ReplicaSpec) -> Placement:
        """Place a replica and start its agent. Waits while the cluster has no room.

        Raises EngineDeadError naming what is missing.
        """
        self._wanted[replica] = spec
        try:
            return _placed(await self._ask(Start(next(self._numbers), replica, spec)))
        except EngineDeadError:
            if self._process.returncode is None:  # else it is started again, with the replicas that are wanted
                self._wanted.pop(replica, None)
            raise

    async def address(self, replica: int) -> Placement:
        """Return where a replica runs. Raises EngineDeadError with the last lines of a failed agent."""
        return _placed(await self._ask(Address(next(self._numbers), replica)))

    async def stop(self, replica: int) -> None:
        """End a replica's agent, remove its actor, free its room. Does nothing if there is none."""
        self._wanted.pop(replica, None)
        await self._ask(Stop(next(self._numbers), replica))

    async def close(self) -> None:
        """Remove all of the fleet's replicas, then disconnect. Idempotent.

        A local Ray always ends, with its replicas.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._keeping.cancel()
        await asyncio.gather(self._keeping, *self._tasks, return_exceptions=True)
        if self._process.returncode is None:
            with contextlib.suppress(EngineDeadError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._ask(Remove(next(self._numbers)))
        await self._end()

    async def _open(self) -> None:
        local = {}
        if self._connect.address == LOCAL:
            local = {
                **LOCAL_VARIABLES,
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
            }  # a token of its own, which no file keeps
            # A short path: Ray's sockets lie below it, and the path of a socket has at most 107 bytes.
            self._folder = tempfile.mkdtemp(prefix="octavo-ray-", dir="/tmp")
        self._process = await asyncio.create_subprocess_exec(
            *COMMAND,
            env={**os.environ, **local, "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
            start_new_session=True,  # so that the terminal signals only the parent
        )
        self.pid = self._process.pid
        self._reading = asyncio.create_task(self._read(), name="octavo-ray-answers")
        try:
            async with asyncio.timeout(CONNECT_S):
                answer = await self._ask(msgspec.structs.replace(self._connect, folder=self._folder))
                self.host = _placed(answer).host
        except (EngineDeadError, TimeoutError) as error:
            await self._end()
            raise ConfigError(str(error) or f"Ray did not answer within {CONNECT_S:g} s; see `ray status`") from None

    async def _end(self) -> None:
        """End the process: it disconnects once its stdin ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading
        self._remove_folder()

    def _remove_folder(self) -> None:
        """Remove a local Ray's files, also after its process was killed."""
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _ask(self, order: Order) -> Placement | None:
        assert self._process.stdin is not None
        if self._process.returncode is not None:
            raise EngineDeadError("the process that talks to Ray ended and is being started again")
        answer: asyncio.Future[Placement | None] = asyncio.get_running_loop().create_future()
        self._answers[order.number] = answer
        try:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            return await answer
        finally:
            self._answers.pop(order.number, None)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(Answer | Notice)
        async for line in self._process.stdout:
            message = decoder.decode(line)
            if isinstance(message, Notice):
                self._notice(message.text)
                continue
            answer = self._answers.get(message.number)
            if answer is None or answer.done():
                continue
            if message.error:
                answer.set_exception(EngineDeadError(message.error))
            else:
                answer.set_result(message.placement)
        status = await self._process.wait()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(f"the process that talks to Ray ended: {describe_status(status)}"))

    async def _keep(self) -> None:
        """Start the process again when it ends, and the replicas that are wanted; a cluster's replicas still run."""
        budget = RestartBudget()
        was_useful = True
        while True:
            await asyncio.wait([self._reading])
            self._remove_folder()
            wait_s = budget.ended(time.monotonic(), random.random(), was_useful=was_useful)
            if wait_s is None:
                self._notice("Ray: the process that talks to it ended too often; no replica is placed from now on")
                return
            _LOG.warning("the process that talks to Ray ended and is started again")
            await asyncio.sleep(wait_s)
            try:
                await self._open()
                was_useful = True
            except (ConfigError, OSError) as error:
                _LOG.error("Ray: %s", error)
                was_useful = False
                continue
            for replica, spec in self._wanted.items():
                task = asyncio.create_task(self._start_again(replica, spec), name=f"octavo-ray-{replica}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _start_again(self, replica: int, spec: ReplicaSpec) -> None:
        try:
            await self.start(replica, spec)
        except EngineDeadError as error:
            self._notice(f"Ray: {error}")


def _placed(placement: Placement | None) -> Placement:
    assert placement is not None
    return placement
