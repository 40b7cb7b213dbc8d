"""Several engines on the same workloads in turn, A B A B: figures of each, and ratios within each round.

Owns: the rounds (all peers stay loaded, those not running are frozen), dropping a peer that fails, medians and ratios.
Does not: know any peer. Every pass has its own first token id, so that no prefix of an earlier pass helps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.peers.octavo_peer import ENGINE, SERVER
from octavo.bench.peers.peer import Peer, PeerRun
from octavo.bench.prompts import salted
from octavo.bench.workload import BenchWorkload, Item
from octavo.errors import OctavoError

FIGURES = ("output_tokens_per_s", "ttft_ms", "token_ms")
WARM_UP_TOKENS = 4
WARM_UP_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """A workload, and how many of its requests are open at a time."""

    workload: BenchWorkload
    at_once: int

    @property
    def name(self) -> str:
        """Return the task's name for tables."""
        return f"{self.workload.name}@{self.at_once}"


@dataclass(slots=True)
class PeerFigures:
    """One peer's figures by task, a list entry a round, and the error that stopped it, if any."""

    peer: Peer
    figures: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    error: str = ""
    peak_memory_bytes: int = 0


class Comparison:
    """Runs the tasks on every peer, `rounds` times."""

    def __init__(self, peers: Sequence[Peer], tasks: Sequence[ComparisonTask], rounds: int) -> None:
        self.standings = [PeerFigures(peer) for peer in peers]
        self._tasks = tasks
        self._rounds = rounds
        self._num_passes = 0

    @property
    def num_turns(self) -> int:
        """Return the number of turns: a start of each peer, and each run of a task by a peer."""
        return len(self.standings) * (1 + self._rounds * len(self._tasks))

    async def run(self, advance: Callable[[str], object] = lambda text: None) -> None:
        """Start all peers, run the rounds, end all. A peer that fails is left out from then on."""
        try:
            for standing in self.standings:
                advance(f"{standing.peer.name}: starting")
                await self._start(standing)
            for number in range(self._rounds):
                for task in self._tasks:
                    self._num_passes += 1
                    for standing in self.standings:
                        advance(f"{standing.peer.name}: {task.name}, round {number + 1}")
                        await self._turn(standing, task)
        finally:
            for standing in self.standings:
                standing.peak_memory_bytes = standing.peer.end() or standing.peak_memory_bytes

    async def _start(self, standing: PeerFigures) -> None:
        groups = self._tasks[0].workload.groups
        items = [Item(item.prompt_token_ids, min(WARM_UP_TOKENS, item.max_tokens)) for item in groups[0]]
        try:
            await standing.peer.start()
            await standing.peer.run(items[:WARM_UP_REQUESTS], self._tasks[0].at_once)
        except OctavoError as error:
            self._drop(standing, error)
        standing.peer.freeze()

    async def _turn(self, standing: PeerFigures, task: ComparisonTask) -> None:
        if standing.error:
            return
        standing.peer.thaw()
        run = PeerRun()
        try:
            for group in salted(task.workload, self._num_passes).groups:
                part = await standing.peer.run(group, task.at_once)
                run.add(part.seconds, part.requests)
        except OctavoError as error:
            self._drop(standing, error)
            return
        standing.peer.freeze()
        standing.figures.setdefault(task.name, []).append(run.figures() | {"output_tokens": run.num_output_tokens})

    def _drop(self, standing: PeerFigures, error: OctavoError) -> None:
        standing.error = str(error)
        standing.peak_memory_bytes = standing.peer.end()


def make_comparison_report(standings: Sequence[PeerFigures], tasks: Sequence[ComparisonTask]) -> dict[str, Any]:
    """Return per peer and task the medians, and this engine's ratios to it: above 1 this engine is ahead."""
    peers = []
    for standing in standings:
        own = _counterpart(standing, standings)
        results = {}
        for task in tasks:
            rounds = standing.figures.get(task.name, [])
            if rounds:
                result: dict[str, Any] = {name: _median(rounds, name) for name in (*FIGURES, "output_tokens")}
                if own is not None:
                    result["ratios"] = _ratios(own.figures.get(task.name, []), rounds)
                results[task.name] = result
        peers.append(
            {
                "name": standing.peer.name,
                **standing.peer.facts,
                "startup_s": round(standing.peer.startup_s, 3),
                "peak_memory_bytes": standing.peak_memory_bytes,
                "error": standing.error or None,
                "workloads": results,
            }
        )
    return {"bench": "compare", "workloads": [task.name for task in tasks], "peers": peers}


def _counterpart(standing: PeerFigures, standings: Sequence[PeerFigures]) -> PeerFigures | None:
    """Return this engine, as a server if the peer is one; None for this engine itself."""
    if standing.peer.name in (ENGINE, SERVER):
        return None
    name = SERVER if standing.peer.is_server else ENGINE
    return next((other for other in standings if other.peer.name == name), None)


def _ratios(own: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return ratios of each figure over the rounds; those of times are inverted, so that more is better."""
    ratios = {}
    for name in FIGURES:
        values = []
        for mine, theirs in zip(own, other, strict=False):
            over, under = (mine, theirs) if name == "output_tokens_per_s" else (theirs, mine)
            if under[name] > 0:
                values.append(over[name] / under[name])
        if values:
            ratios[name] = {
                "median": round(statistics.median(values), 3),
                "min": round(min(values), 3),
                "max": round(max(values), 3),
            }
    return ratios


def _median(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    return round(statistics.median(figures[name] for figures in rounds), 3)
