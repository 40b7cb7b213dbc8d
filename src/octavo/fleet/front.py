"""FleetFront: what `octavo fleet` runs in its api process beside the server: the replicas of each model.

Owns: how many replicas are started, and where; changes of a running fleet, one at a time; the lines that describe it.
Does not: run engines or keep requests (EngineSupervisor does), choose engines (FleetRouter does), or know HTTP.
Invariant: a change that fails leaves the replicas that run as they are; `change` keeps its error.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from octavo.config import Config, FleetConfig
from octavo.errors import ConfigError, OctavoError
from octavo.executors.protocol import Fingerprint
from octavo.fleet.connections import read_hosts
from octavo.fleet.fleet_router import FleetRouter
from octavo.fleet.providers.ray import LOCAL, RayProvider
from octavo.fleet.providers.ray_agent import ReplicaSpec
from octavo.fleet.providers.ray_replicas import RayReplicas, fleet_name, replica_spec
from octavo.fleet.remote_engines import FrontModel, RemoteEngines
from octavo.fleet.replicas import LocalReplicas, share_machine
from octavo.fleet.security import HostPort, LinkSecurity, parse_address
from octavo.fleet.standby import JournalFeed
from octavo.frontend.engine_process import COMMAND
from octavo.frontend.engine_supervisor import EngineSupervisor
from octavo.frontend.journal import Journal
from octavo.frontend.open_request import LedgerObserver
from octavo.observe.log import print_notice

_LOG = logging.getLogger(__name__)
WAIT_S = 0.05  # between checks whether the first engine has joined


@dataclass(frozen=True, slots=True)
class ModelFleet:
    """The replicas of one model: its settings, its supervisor, and the replicas that this front started."""

    config: Config
    supervisor: EngineSupervisor
    local: LocalReplicas | RayReplicas


class FleetFront:
    """All replicas of this front, by the name of their model. For one event loop."""

    def __init__(self, command: Sequence[str] = COMMAND, folder: Path | None = None) -> None:
        """`folder` is this user's folder of servers, which has the tokens of connections on this machine."""
        self.models: dict[str, ModelFleet] = {}
        self.term = 0  # greater than that of each earlier front of these engines
        self.change: dict[str, object] | None = None  # the last change: what, whether it ended, its error
        self._command = tuple(command)
        self._changing: asyncio.Task[None] | None = None
        self._folder = folder or Path()
        self._remote: RemoteEngines | None = None  # engines on other machines
        self._ray: RayProvider | None = None
        self._token = ""  # that engines which Ray places need
        self._joins_at: HostPort | None = None
        self._feed: JournalFeed | None = None
        self._feed_address: HostPort | None = None

    async def start(self, config: Config, observer: LedgerObserver | None = None) -> EngineSupervisor:
        """Start the replicas of a model. Raises the error of an opening, and leaves no process then."""
        router = FleetRouter.from_config(config, config.fleet.router)
        supervisor = EngineSupervisor(
            observer, router=router, term=self.term, awaits_replicas=takes_remote(config.fleet)
        )
        count = num_started(config.fleet)
        name = config.model.shown_name(config.model.model)
        try:
            await self._open_remote(config)
            local = self._replicas(config, supervisor, max(1, count))
            self.models[name] = ModelFleet(config, supervisor, local)
            await local.scale(count)
            if count == 0:
                await self._wait_for_engine(name, supervisor)
        except BaseException:
            self.models.pop(name, None)
            await supervisor.close()
            if not self.models:
                await self.close()
            raise
        return supervisor

    def _replicas(self, config: Config, supervisor: EngineSupervisor, count: int) -> LocalReplicas | RayReplicas:
        """Return what starts the replicas of a model: Ray, or this machine."""
        if self._ray is not None:
            return RayReplicas(supervisor, self._ray, self._ray_spec(config, count))
        shared = share_machine(config, count)
        return LocalReplicas(supervisor, lambda: supervisor.spawner(shared, self._command))

    def _ray_spec(self, config: Config, count: int) -> ReplicaSpec:
        """Return what Ray is to run: an engine with these settings, which joins this front."""
        assert self._ray is not None and self._joins_at is not None
        if config.fleet.ray != LOCAL:
            return replica_spec(config, str(self._joins_at), self._token)
        spec = replica_spec(share_machine(config, count), str(self._joins_at), self._token)
        return msgspec.structs.replace(spec, num_cpus=0.0)  # they share this machine's cores, as without Ray

    # --- engines on other machines

    async def _open_remote(self, config: Config) -> None:
        """Wait for engines that join and dial those that are listed, unless this front does already."""
        fleet = config.fleet
        if not takes_remote(fleet) or self._remote is not None:
            return
        hosts = [] if fleet.hosts is None else read_hosts(Path(fleet.hosts))
        security = LinkSecurity.of(config.link, self._folder)
        address = None if fleet.fleet_address is None else parse_address(fleet.fleet_address, "--fleet-address")
        if fleet.ray is not None:
            self._ray = await RayProvider.connect(fleet_name(config), fleet.ray, print_notice)
            if security.token is None and fleet.ray != LOCAL:  # Ray's actors hand it to the engines
                security = replace(security, token=secrets.token_hex(32).encode())
            self._token = (security.token or b"").decode()
            address = address or HostPort(self._ray.host, 0)
        self._remote = RemoteEngines(self._find_served, security, term=self.term)
        if address is not None:
            listening = await self._remote.listen(address)
            self._joins_at = listening if self._ray is None else self._ray.dial_address(listening)
        for host in hosts:
            self._remote.dial(host)

    def _find_served(self, model: str) -> FrontModel | None:
        """Return the model of this name; the only model serves engines of any name, whose fingerprint decides."""
        fleet = next(iter(self.models.values())) if len(self.models) == 1 else self.models.get(model)
        if fleet is None:
            return None
        supervisor = fleet.supervisor
        return FrontModel(supervisor, lambda: _fingerprint(supervisor))

    async def _wait_for_engine(self, name: str, supervisor: EngineSupervisor) -> None:
        where = f" at {self._joins_at}" if self._joins_at is not None else ""
        print_notice(f"waiting for the first engine of {name} to join{where}")
        while not _has_engine(supervisor):
            await asyncio.sleep(WAIT_S)

    # --- standby fronts

    async def feed_standbys(self, journal: Journal, config: Config) -> None:
        """Let standby fronts follow the journal at --journal-address, if it is set. Raises ConfigError."""
        if config.fleet.journal_address is not None:
            feed = JournalFeed(journal, LinkSecurity.of(config.link, self._folder), self.term)
            self._feed_address = await feed.listen(parse_address(config.fleet.journal_address, "--journal-address"))
            self._feed = feed

    # --- models

    def find(self, model: str | None) -> ModelFleet:
        """Return the fleet of a model, or of the only model. Raises ConfigError, also for one that is unloaded."""
        if model is None and len(self.models) == 1:
            model = next(iter(self.models))
        if model not in self.models:
            given = "--model is missing" if model is None else f"--model is {model!r}"
            raise ConfigError(f"{given}; give one of {', '.join(self.models)}")
        if self.models[model].supervisor.is_closed:
            raise ConfigError(f"model {model} is not loaded; a request for it loads it")
        return self.models[model]

    # --- changes

    def scale(self, count: int, model: str | None = None) -> None:
        """Have this many replicas, in the background. Raises ConfigError."""
        self._begin(f"scale {count}", self.find(model).local.scale(count))

    def roll(self, model: str | None, to: str | None, revision: str | None) -> None:
        """Replace the replicas one after another, in the background: by another model, revision, or the same.

        Raises ConfigError.
        """
        fleet = self.find(model)
        if isinstance(fleet.local, RayReplicas) and (to or revision):
            raise ConfigError(
                "--to and --revision are for replicas of this machine: an engine that joins must have the fleet's "
                "model; leave them out, or start another fleet"
            )
        known = fleet.config.model
        changed = replace(known, model=to or known.model, revision=revision if to or revision else known.revision)
        config = replace(fleet.config, model=changed)
        shared = share_machine(config, max(1, len(fleet.local.numbers)))
        words = " ".join(filter(None, ("roll", to and f"--to {to}", revision and f"--revision {revision}")))
        if isinstance(fleet.local, RayReplicas):
            self._begin(words, fleet.local.roll(self._ray_spec(config, max(1, len(fleet.local.numbers)))))
        else:
            self._begin(words, fleet.local.roll(lambda: fleet.supervisor.spawner(shared, self._command)))

    def drain(self, number: int, model: str | None = None) -> None:
        """Stop a replica after its requests have ended, in the background. Raises ConfigError."""
        fleet = self.find(model)
        fleet.supervisor.replica(number)
        self._begin(f"drain_replica {number}", fleet.supervisor.drain(number))

    async def remove(self, number: int, model: str | None = None) -> None:
        """Stop a replica now; its requests go on at others. Raises ConfigError."""
        await self.find(model).supervisor.remove(number)

    def _begin(self, what: str, work: Coroutine[object, object, None]) -> None:
        if self._changing is not None and not self._changing.done():
            work.close()
            raise ConfigError(f"{self.change and self.change['what']} has not ended; see octavo admin replicas")
        self.change = {"what": what, "state": "running", "error": None}
        self._changing = asyncio.create_task(self._run(self.change, work), name="octavo-fleet-change")

    async def _run(self, change: dict[str, object], work: Coroutine[object, object, None]) -> None:
        try:
            await work
            change["state"] = "done"
        except (OctavoError, OSError, TimeoutError) as error:
            _LOG.error("%s failed: %s", change["what"], error)
            change |= {"state": "failed", "error": str(error) or type(error).__name__}

    # --- the end and the start-up report

    async def close(self) -> None:
        """End a change that runs, and the connections. The supervisors are closed by their owners. Idempotent."""
        if self._changing is not None:
            self._changing.cancel()
            await asyncio.gather(self._changing, return_exceptions=True)
        if self._ray is not None:
            await self._ray.close()
        if self._feed is not None:
            self._feed.close()
        if self._remote is not None:
            await self._remote.close()

    def lines(self) -> Iterator[str]:
        """Yield the lines of the start-up report about this fleet."""
        if self._joins_at is not None:
            yield f"joining   octavo serve MODEL --join {self._joins_at}"
        if self._feed_address is not None:
            yield f"standbys  may follow this front, of term {self.term}, at {self._feed_address}"
        for name, fleet in self.models.items():
            of = f" of {name}" if len(self.models) > 1 else ""
            yield f"replicas  {len(fleet.supervisor.replicas)}{of}, router {fleet.config.fleet.router}"


def takes_remote(fleet: FleetConfig) -> bool:
    """Return True if engines on other machines may serve this front."""
    return fleet.hosts is not None or fleet.fleet_address is not None or fleet.ray is not None


def _has_engine(supervisor: EngineSupervisor) -> bool:
    return hasattr(supervisor, "capacity")  # it is set by the first engine


def _fingerprint(supervisor: EngineSupervisor) -> Fingerprint:
    """Return the fingerprint that an engine must have: that of the first one."""
    return supervisor.capacity.fingerprint if _has_engine(supervisor) else Fingerprint()


def num_started(fleet: FleetConfig) -> int:
    """Return how many replicas the front starts itself."""
    if fleet.replicas is not None:
        return fleet.replicas
    return 0 if fleet.hosts is not None else 1
