"""The main function of a rank process (any rank but 0): it runs the plans that rank 0 sends, and answers each.

Owns: the rank's two connections, the thread that answers pings even while a step is computed, and the end of the
process. Does not: know which executor runs (assembly passes a function that makes it), decide, or restart.
Invariants: every plan is answered with the digest of what was executed, or with a failure that all ranks voted on. The
end of either connection, or any other error, ends the process at once, since rank 0 ends the epoch then.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.core.plan import ROW_SAMPLE, StepPlan
from octavo.errors import OctavoError
from octavo.executors.protocol import Capacity, Executor, ExecutorSpec, PoolBlocks
from octavo.executors.ranks import frames
from octavo.executors.ranks.frames import Begin, Channel, Kind

EXIT_LOST = 4  # rank 0, or this process's own step, has ended the epoch
EXIT_REFUSED = 5  # this rank could not open; rank 0 has the reason
_LOG = logging.getLogger(__name__)


class RankExecutor(Executor, Protocol):
    """An executor that opens in two steps, between which the ranks agree on sizes."""

    def load(self, spec: ExecutorSpec) -> PoolBlocks:
        """Load this rank's weights, and return how many blocks it can hold. Raises what `open` raises."""
        ...

    def allocate(self, blocks: PoolBlocks) -> Capacity:
        """Allocate the pool, after `load`; every rank gets the same numbers of blocks."""
        ...


@dataclass(frozen=True, slots=True)
class OwnRank:
    """The executor of one rank in its own process.

    `has_voted_failure` returns True if all ranks have voted on the executor's last failure; `leave` leaves the ranks'
    groups.
    """

    executor: RankExecutor
    has_voted_failure: Callable[[], bool] = lambda: False
    leave: Callable[[], object] = lambda: None


MakeRank = Callable[[Begin], OwnRank]


class GrammarSlots:
    """Knows which plans need masks: those in which a slot whose sequence has a grammar samples."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def needs_masks(self, plan: StepPlan) -> bool:
        """Take the plan's new sequences, and return True if one of its rows needs a mask."""
        for new in plan.new_sequences:
            (self._slots.add if new.params.grammar else self._slots.discard)(new.slot)
        if not self._slots:
            return False
        return any(
            flags & ROW_SAMPLE and slot in self._slots for slot, flags in zip(plan.slots, plan.flags, strict=True)
        )


class RankServer:
    """Serves one epoch. `plans` and `pings` are the connections to rank 0."""

    def __init__(self, plans: Channel, pings: Channel, make_rank: MakeRank) -> None:
        self._plans = plans
        self._pings = pings
        self._make_rank = make_rank
        self._last_step = -1
        self._step_s = 0.0
        self._grammars = GrammarSlots()
        self._samples = False

    def run(self) -> int:
        """Open the executor and run plans; return the exit status. The end of a connection ends the process instead."""
        threading.Thread(target=self._answer_pings, name="octavo-pings", daemon=True).start()
        try:
            begin = frames.unpack(Begin, self._plans.expect(Kind.BEGIN))
            self._samples = begin.rank < begin.config.parallel.tensor_parallel_size
            try:
                own = self._make_rank(begin)
                self._plans.send(Kind.LOADED, frames.pack(own.executor.load(begin.spec)))
                blocks = frames.unpack(PoolBlocks, self._plans.expect(Kind.ALLOCATE))
                self._plans.send(Kind.OPENED, frames.pack(own.executor.allocate(blocks)))
            except (EOFError, ConnectionError):
                raise
            except (OctavoError, OSError, MemoryError, ImportError, RuntimeError) as error:
                if not isinstance(error, OctavoError):
                    _LOG.exception("rank %d cannot open", begin.rank)
                self._plans.send(Kind.REFUSED, frames.pack(frames.RankRefusal.of(error)))
                return EXIT_REFUSED
            gc.freeze()
            while True:
                self._run_plan(own)
        except (EOFError, ConnectionError):
            return EXIT_LOST  # the ordinary end: rank 0 has closed the connection
        except Exception:  # the shell: whatever broke, rank 0 notices the end of this process and ends the epoch
            _LOG.exception("a rank process ends")
            return EXIT_LOST

    def _run_plan(self, own: OwnRank) -> None:
        """Wait for a plan, run it, and answer."""
        plan, sampled = frames.decode_plan(self._plans.expect(Kind.PLAN))
        digest, started_at = plan.digest(), time.perf_counter()
        self._last_step = plan.step
        needs_masks = self._grammars.needs_masks(plan) and self._samples
        executor = own.executor
        if sampled:
            executor.collect(executor.submit(StepPlan(plan.step, plan.now, id_edits=sampled)))
        try:
            ticket = executor.submit(plan)
            if needs_masks:
                executor.supply(ticket, frames.decode_masks(self._plans.expect(Kind.MASKS)))
            result = executor.collect(ticket)
        except Exception as error:  # the executor shell: all ranks have voted on the failure, or the epoch ends
            if not own.has_voted_failure():
                raise
            failure = frames.Failure(plan.step, isinstance(error, MemoryError), f"{type(error).__name__}: {error}")
            self._plans.send(Kind.FAILED, frames.pack(failure))
            return
        if self._samples:
            digest = frames.result_digest(digest, result)
        self._step_s = time.perf_counter() - started_at
        self._plans.send(Kind.DONE, frames.Done(plan.step, self._step_s, digest).pack())

    def _answer_pings(self) -> None:
        """Answer pings until the connection ends, then end the process, whatever its main thread does."""
        try:
            while True:
                body = self._pings.expect(Kind.PING)
                number = int.from_bytes(body[:8], "little")
                self._pings.send(Kind.PONG, frames.PONG.pack(number, self._last_step, self._step_s))
        except (EOFError, OSError, OctavoError):
            os._exit(EXIT_LOST)
