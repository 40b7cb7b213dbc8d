"""The interface of an engine in a comparison: Peer, its setup, and the result of one run.

Owns: the interface between the comparison and the adapters. Does not: start anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.bench.percentiles import percentile
from octavo.bench.workload import Item


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The same for every peer: threads, most requests at once, longest request, type of float weights, timeout."""

    threads: int
    at_once: int
    max_len: int
    dtype: str = "bfloat16"
    timeout_s: float = 1200.0


@dataclass(slots=True)
class PeerRun:
    """One pass: its seconds, and per request the seconds to the first token and to the last, and its tokens."""

    seconds: float = 0.0
    requests: list[tuple[float, float, int]] = field(default_factory=list)

    def add(self, seconds: float, requests: Sequence[tuple[float, float, int]]) -> None:
        """Add another group of the same pass."""
        self.seconds += seconds
        self.requests += requests

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens of all requests."""
        return sum(tokens for _, _, tokens in self.requests)

    def figures(self) -> dict[str, float]:
        """Return the compared figures: throughput, and medians over the requests."""
        token_s = [(last - first) / (tokens - 1) for first, last, tokens in self.requests if tokens > 1]
        return {
            "output_tokens_per_s": self.num_output_tokens / self.seconds if self.seconds else 0.0,
            "ttft_ms": percentile([first for first, _, _ in self.requests], 50) * 1e3,
            "token_ms": percentile(token_s, 50) * 1e3,
        }


class Peer(Protocol):
    """An engine in its own processes. Raises EngineError when it fails."""

    name: str
    is_server: bool  # compared with this engine's server, else with this engine alone
    startup_s: float
    facts: dict[str, Any]

    async def start(self) -> None:
        """Start the engine and wait until it is ready."""
        ...

    async def run(self, items: Sequence[Item], at_once: int) -> PeerRun:
        """Run the requests, `at_once` open at a time."""
        ...

    def freeze(self) -> None:
        """Stop its processes, so that they use nothing while other peers run."""
        ...

    def thaw(self) -> None:
        """Continue its processes."""
        ...

    def end(self) -> int:
        """End it; return the peak of its memory in bytes, 0 if unknown. Idempotent."""
        ...
