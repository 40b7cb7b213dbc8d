"""Compares engines on the same workloads. In each round the engines run one after another, A B A B.

Owns: the rounds; the exclusion of a peer that fails; medians, and ratios within each round; the busy neighbour of a
task; the report of `octavo bench compare`. All peers stay loaded, and a peer is frozen while another runs.
Does not: know any peer but this engine.
Every pass has its own first token id, so that a prefix cache has no hits from an earlier pass.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from octavo.bench.peers import OWN_ENGINE, OWN_SERVER, Peer, PeerRun
from octavo.bench.processes import BusyNeighbour
from octavo.bench.report import Report, show_rows
from octavo.bench.workload import BenchWorkload, Item, salted
from octavo.errors import OctavoError

FIGURES = ("output_tokens_per_s", "ttft_ms", "token_ms")
WARM_UP_TOKENS = 4
WARM_UP_REQUESTS = 4
_COLUMNS = ("", "tokens/s", "of alone", "ratio", "min", "max", "first token ms", "ratio", "ms/token", "ratio")


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """A workload, the number of requests that are open at a time, and whether another process keeps one core busy."""

    workload: BenchWorkload
    at_once: int
    has_neighbour: bool = False

    @property
    def name(self) -> str:
        """Return the task's name for tables."""
        return f"{self.name_alone}{', busy neighbour' if self.has_neighbour else ''}"

    @property
    def name_alone(self) -> str:
        """Return the name of the same task without a neighbour."""
        return f"{self.workload.name}@{self.at_once}"


@dataclass(slots=True)
class PeerResult:
    """One peer's figures by task, with one list entry per round; `error` is the reason why the peer was excluded."""

    peer: Peer
    figures: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    error: str = ""
    peak_memory_bytes: int = 0

    def drop(self, error: OctavoError) -> None:
        """End the peer and exclude it from the remaining rounds."""
        self.error = str(error)
        self.peak_memory_bytes = self.peer.end()


class Comparison:
    """Runs the tasks on every peer, `rounds` times."""

    def __init__(self, peers: Sequence[Peer], tasks: Sequence[ComparisonTask], rounds: int) -> None:
        self.results = [PeerResult(peer) for peer in peers]
        self._tasks = tasks
        self._rounds = rounds
        self._num_passes = 0
        self._neighbour: BusyNeighbour | None = None

    @property
    def num_turns(self) -> int:
        """Return the number of calls of `advance`: one per start of a peer, and one per run of a task by a peer."""
        return len(self.results) * (1 + self._rounds * len(self._tasks))

    async def run(self, advance: Callable[[str], object] = lambda text: None) -> None:
        """Start all peers, run the rounds, and end the peers. A peer that fails is excluded from the later rounds."""
        try:
            if any(task.has_neighbour for task in self._tasks):
                self._neighbour = BusyNeighbour()
            for result in self.results:
                advance(f"{result.peer.name}: starting")
                await self._start(result)
            for number in range(self._rounds):
                for task in self._tasks:
                    self._num_passes += 1
                    for result in self.results:
                        advance(f"{result.peer.name}: {task.name}, round {number + 1}")
                        await self._run_task(result, task)
        finally:
            for result in self.results:
                result.peak_memory_bytes = result.peer.end() or result.peak_memory_bytes
            if self._neighbour is not None:
                self._neighbour.end()

    async def _start(self, result: PeerResult) -> None:
        first_group = self._tasks[0].workload.groups[0][:WARM_UP_REQUESTS]
        items = [Item(item.prompt_token_ids, min(WARM_UP_TOKENS, item.max_tokens)) for item in first_group]
        try:
            await result.peer.start()
            await result.peer.run(items, self._tasks[0].at_once)
        except OctavoError as error:
            result.drop(error)
        result.peer.freeze()

    async def _run_task(self, result: PeerResult, task: ComparisonTask) -> None:
        if result.error:
            return
        result.peer.thaw()
        run = PeerRun()
        if self._neighbour is not None and task.has_neighbour:
            self._neighbour.thaw()
        try:
            for group in salted(task.workload, self._num_passes).groups:
                run.add(await result.peer.run(group, task.at_once))
        except OctavoError as error:
            result.drop(error)
            return
        finally:
            if self._neighbour is not None:
                self._neighbour.freeze()
        result.peer.freeze()
        figures = {**run.figures(), "output_tokens": run.num_output_tokens}
        result.figures.setdefault(task.name, []).append(figures)


def make_comparison_report(results: Sequence[PeerResult], tasks: Sequence[ComparisonTask], rounds: int) -> Report:
    """Return medians for each peer and task, and this engine's ratios to the peer (above 1: this engine is ahead).

    A task with a busy neighbour also has `of_alone`: the peer's throughput divided by that of the round without it.
    """
    peers = []
    for result in results:
        own = _counterpart(result, results)
        workloads = {}
        for task in tasks:
            of_rounds = result.figures.get(task.name, [])
            if of_rounds:
                medians: dict[str, Any] = {name: _median(of_rounds, name) for name in (*FIGURES, "output_tokens")}
                if own is not None:
                    medians["ratios"] = _ratios(own.figures.get(task.name, []), of_rounds)
                if task.has_neighbour:
                    medians["of_alone"] = _ratios(of_rounds, result.figures.get(task.name_alone, []))[FIGURES[0]]
                workloads[task.name] = medians
        peers.append(
            {
                "name": result.peer.name,
                **result.peer.facts,
                "startup_s": round(result.peer.startup_s, 3),
                "peak_memory_bytes": result.peak_memory_bytes,
                "error": result.error or None,
                "workloads": workloads,
            }
        )
    return {"bench": "compare", "workloads": [task.name for task in tasks], "peers": peers, "rounds": rounds}


def show_comparison(console: Console, report: Report) -> None:
    """Print one table for each workload, then start-up times and memory."""
    for name in report["workloads"]:
        rows = [_row(peer, peer["workloads"][name]) for peer in report["peers"] if name in peer["workloads"]]
        show_rows(console, f"{name}, medians of {report['rounds']}; ratios above 1: octavo is ahead", _COLUMNS, rows)
        console.print()
    starts = [
        (peer["name"], _weights(peer), peer["startup_s"], round(peer["peak_memory_bytes"] / 2**30, 2))
        for peer in report["peers"]
    ]
    show_rows(console, "Processes", ("", "weights", "start-up s", "peak GiB"), starts)


def _weights(peer: Mapping[str, Any]) -> str:
    """Return the code of a peer's weights, or their type."""
    code = peer.get("quantization")
    return str(peer.get("dtype", "")) if code in (None, "none") else str(code)


def _row(peer: dict[str, Any], result: dict[str, Any]) -> tuple[object, ...]:
    ratios = result.get("ratios", {})
    speed = ratios.get("output_tokens_per_s", {})
    first, token = (ratios.get(name, {}).get("median", "") for name in ("ttft_ms", "token_ms"))
    spread = speed.get("median", ""), speed.get("min", ""), speed.get("max", "")
    throughput = result["output_tokens_per_s"], result.get("of_alone", {}).get("median", "")
    return peer["name"], *throughput, *spread, result["ttft_ms"], first, result["token_ms"], token


def _counterpart(result: PeerResult, results: Sequence[PeerResult]) -> PeerResult | None:
    """Return this engine's result: its server's if the peer is a server. Return None if the peer is this engine."""
    if result.peer.name in (OWN_ENGINE, OWN_SERVER):
        return None
    name = OWN_SERVER if result.peer.is_server else OWN_ENGINE
    return next((other for other in results if other.peer.name == name), None)


def _ratios(own: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the median, minimum and maximum ratio of each figure. A ratio above 1 means that `own` is better."""
    ratios = {}
    for name in FIGURES:
        over, under = (own, other) if name == "output_tokens_per_s" else (other, own)
        values = [high[name] / low[name] for high, low in zip(over, under, strict=False) if low[name] > 0]
        if values:
            ratios[name] = {
                "median": round(statistics.median(values), 3),
                "min": round(min(values), 3),
                "max": round(max(values), 3),
            }
    return ratios


def _median(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    return round(statistics.median(figures[name] for figures in rounds), 3)
