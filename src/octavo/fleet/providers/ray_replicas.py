"""RayReplicas: how many replicas of a supervisor Ray runs. The counterpart of LocalReplicas for --ray.

Owns: scaling and rolling with Ray; the words of an agent, made from the front's settings.
Does not: attach engines (they join the front by themselves, as agents do that were started by hand), place them
(RayProvider does), or replace a lost one: Ray starts its actor again, and its agent joins as another replica.
Invariant: an agent is stopped only after its replica was drained, or is lost.
"""

from __future__ import annotations

import asyncio
import re
import socket

from octavo.config import ENGINE_SECTIONS, SETTINGS, Config
from octavo.errors import ConfigError, EngineDeadError
from octavo.fleet.providers.ray import RayProvider
from octavo.fleet.providers.ray_agent import ReplicaSpec
from octavo.fleet.replicas import Replicas
from octavo.frontend.engine_supervisor import EngineSupervisor

JOIN_LIMIT_S = 600.0  # how long a replica may take from its placement to its first offer: it loads a model
LOOK_S = 0.2
_PASSED = ("fleet_tls_cert", "fleet_tls_key", "fleet_tls_ca", "log_level", "log_format")


def fleet_name(config: Config) -> str:
    """Return a name for the fleet's actors: the same after a restart of its front, another one for another front."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{socket.gethostname()}-{config.serving.port}")


def replica_spec(config: Config, front: str, token: str = "") -> ReplicaSpec:
    """Return the spec of an agent with the settings of a front, which it joins at `front` (HOST:PORT)."""
    words = ["serve", f"--join={front}", "--quiet"]
    for setting in SETTINGS:
        value = getattr(getattr(config, setting.section), setting.name)
        is_passed = setting.section in ENGINE_SECTIONS or setting.name in _PASSED
        if is_passed and value != setting.default:
            words += _flags(setting.flags[0], value)
    num_gpus = {"cpu": 0.0, "cuda": 1.0}.get(config.execution.device)
    return ReplicaSpec(tuple(words), token, float(config.execution.threads or 1), num_gpus, config.parallel.num_ranks)


def _flags(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    values = value if isinstance(value, tuple) else (value,)
    return [f"{flag}={each}" for each in values]


class RayReplicas(Replicas[ReplicaSpec]):
    """Replicas that Ray places. A new one is ready once it has joined the front."""

    # `numbers` are Ray's, not the supervisor's: a replica that is started again gets another there.
    def __init__(self, supervisor: EngineSupervisor, provider: RayProvider, spec: ReplicaSpec) -> None:
        super().__init__(supervisor, spec)
        self.provider = provider

    async def _scale(self, count: int) -> None:
        missing = count - len(self.numbers)
        added = await asyncio.gather(*(self._add() for _ in range(missing)), return_exceptions=True)
        if failed := next((error for error in added if isinstance(error, BaseException)), None):
            raise failed
        await asyncio.gather(*(self._drain(number) for number in reversed(self.numbers[count:])))

    async def _add(self) -> None:
        number = self.provider.free_number()
        self.numbers.append(number)
        try:
            await self.provider.start(number, self.template)
            async with asyncio.timeout(JOIN_LIMIT_S):
                while await self._replica_of(number) is None:
                    await asyncio.sleep(LOOK_S)
        except BaseException as error:
            self.numbers.remove(number)
            await self.provider.stop(number)
            if isinstance(error, TimeoutError):
                raise EngineDeadError(
                    f"replica {number} was placed and did not join within {JOIN_LIMIT_S:g} s"
                ) from None
            raise

    async def _drain(self, number: int) -> None:
        self.numbers.remove(number)
        try:
            replica = await self._replica_of(number)
            if replica is not None:
                await self.supervisor.drain(replica)
        except (ConfigError, EngineDeadError):
            pass  # it is lost, and its requests are elsewhere
        await self.provider.stop(number)

    async def _replica_of(self, number: int) -> int | None:
        """Return the supervisor's number of a replica, None if it has not joined. Raises EngineDeadError."""
        agent = (await self.provider.address(number)).agent
        return next((each.number for each in self.supervisor.replicas if each.name == agent), None)
