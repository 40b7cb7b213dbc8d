"""EngineReplica: one of the engines that serve a model at the same time, and what its supervisor knows of it.

Owns: the record and its report.
Does not: start, watch or replace engines (engine_supervisor and the sources do).
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from enum import Enum

from octavo.engine.client import Verb
from octavo.frontend.engine_source import EngineSource, RunningEngine
from octavo.frontend.open_request import BoundEngine


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
