"""The interfaces through which EngineSupervisor runs engines: a source starts them, a running engine reports its end.

Owns: the protocols, EngineDeath, and EngineReplica, a supervisor's record of one replica. Implemented by
engine_process (a process on this machine) and by the fleet's link (an engine on another machine). Does not: restart,
route, or keep requests.
Invariants: an engine's epoch is unique among all engines of a supervisor and its predecessors, and later engines of one
source have greater epochs. After `watch` has returned, no event of that engine is received any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Protocol

from octavo.engine.client import Verb
from octavo.executors.protocol import Capacity
from octavo.frontend.flight_recordings import FlightRecordings
from octavo.frontend.open_request import BoundEngine, EngineLink


@dataclass(frozen=True, slots=True)
class EngineDeath:
    """How an engine ended. `at` is when that was noticed, on the monotonic clock.

    `in_commands`: it ran commands, so that an unanswered one may be the cause.
    `batch` has the requests in its last step or last commands, which may be the cause; `unanswered` those that were
    sent and neither accepted nor refused. `was_useful`: it committed a step. `stalled`: it was killed because it
    stalled. `num_malformed` and `num_stale` count dropped frames.
    """

    what: str
    at: float
    batch: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()
    was_useful: bool = False
    stalled: bool = False
    in_commands: bool = False
    num_malformed: int = 0
    num_stale: int = 0


class EngineConnection(EngineLink, Protocol):
    """The link to a running engine, with its verbs."""

    num_malformed: int
    num_stale: int

    @property
    def is_alive(self) -> bool:
        """True until the connection has ended."""

    def post_control(self, verb: Verb, argument: str = "") -> None:
        """Send a verb whose answer is not needed, without waiting."""

    async def control(self, verb: Verb, argument: str = "") -> object:
        """See EngineClient. Raises EngineDeadError."""


class RunningEngine(Protocol):
    """A running engine."""

    @property
    def capacity(self) -> Capacity:
        """The sizes and the fingerprint of the engine."""

    @property
    def client(self) -> EngineConnection:
        """The connection to it; `client.epoch` is its number."""

    @property
    def pid(self) -> int:
        """The process id, on its own machine."""

    def trouble(self) -> str | None:
        """Return why the engine makes no progress now; None if it is idle or its steps are in time."""

    @property
    def flight(self) -> FlightRecordings | None:
        """What its flight recorder keeps; None if it has none on this machine."""

    async def watch(self) -> EngineDeath:
        """Wait until the engine has ended; kill it if it stalls. Call this once."""

    def kill(self) -> None:
        """Kill the engine at once; `watch` returns soon after."""

    async def close(self) -> None:
        """Let the engine end its requests and itself. Idempotent."""


class EngineSource(Protocol):
    """Starts the engines of one replica, one after another.

    `is_lasting`: the replica stays known when no engine follows. A replica that came from outside does not.
    """

    is_lasting: bool

    async def next(self) -> RunningEngine:
        """Return the first engine once it is ready. Raises the error of its opening, or EngineDeadError."""

    async def replace(self, was_useful: bool) -> RunningEngine:
        """Return the next engine after one died. Raises EngineDeadError if there will be none."""

    def prepare(self, is_settled: Callable[[], bool]) -> None:
        """Handle the begin of an engine; `is_settled` returns True once the requests that it resumes have progress.

        A source may then start a standby.
        """

    @property
    def standby(self) -> RunningEngine | None:
        """An engine that is ready and not used, or None."""

    async def close(self) -> None:
        """End what was started and not returned. Idempotent."""


class EngineState(Enum):
    """The state of a replica; of all replicas together, the first of these that one has."""

    READY = "ready"
    DRAINING = "draining"  # it finishes its requests and gets no others
    RECOVERING = "recovering"
    STARTING = "starting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(slots=True, eq=False)
class EngineReplica:
    """One replica: its source, its current engine, and counts since it was added.

    `bound` is the ledger's view of the engine. `killed` is the reason while the engine is being killed on purpose.
    `orders` are the verbs that were posted to this engine.
    """

    number: int
    name: str
    source: EngineSource
    state: EngineState = EngineState.STARTING
    engine: RunningEngine | None = None
    bound: BoundEngine | None = None
    num_restarts: int = 0
    num_stalls: int = 0
    killed: str = ""
    failure: str = ""
    orders: set[Verb] = field(default_factory=set)
    opening: asyncio.Future[RunningEngine] | None = None
    running: asyncio.Task[None] | None = None

    def report(self) -> dict[str, object]:
        """Return the state and the counts, as plain JSON values."""
        bound, engine = self.bound, self.engine
        return {
            "number": self.number,
            "name": self.name,
            "where": "local" if self.source.is_lasting else self.name,
            "state": self.state.value,
            "epoch": None if bound is None else bound.epoch,
            "pid": None if engine is None else engine.pid,
            "fingerprint": None if engine is None else asdict(engine.capacity.fingerprint),
            "open_requests": 0 if bound is None else bound.num_open,
            "open_prompt_tokens": 0 if bound is None else bound.load,
            "num_slots": 0 if engine is None else engine.capacity.num_slots,
            "restarts": self.num_restarts,
            "stalls": self.num_stalls,
            "failure": self.failure or None,
            "ranks": [asdict(one) | {"state": self.state.value} for one in (engine.capacity.ranks if engine else ())],
        }
