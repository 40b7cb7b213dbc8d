"""What a comparison needs of an engine, whatever it is: Peer, what it is started for, and what one run gave.

Owns: the seam between the comparison and the adapters. Does not: start anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.bench.percentiles import percentile
from octavo.bench.workload import Item


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """The same for every peer: threads, requests at once and the longest at most, type of float weights, patience."""

    threads: int
    at_once: int
    max_len: int
    dtype: str = "bfloat16"
    timeout_s: float = 1200.0


@dataclass(slots=True)
class PeerRun:
    """One pass: its seconds, and per request those to the first token and to the last, and its tokens."""

    seconds: float = 0.0
    requests: list[tuple[float, float, int]] = field(default_factory=list)

    def add(self, seconds: float, requests: Sequence[tuple[float, float, int]]) -> None:
        """Count another group of the same pass."""
        self.seconds += seconds
        self.requests += requests

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all requests."""
        return sum(tokens for _, _, tokens in self.requests)

    def figures(self) -> dict[str, float]:
        """What is compared: throughput, and medians over the requests."""
        token_s = [(last - first) / (tokens - 1) for first, last, tokens in self.requests if tokens > 1]
        return {
            "output_tokens_per_s": self.num_output_tokens / self.seconds if self.seconds else 0.0,
            "ttft_ms": percentile([first for first, _, _ in self.requests], 50) * 1e3,
            "token_ms": percentile(token_s, 50) * 1e3,
        }


class Peer(Protocol):
    """An engine in processes of its own. Raises EngineError when it fails."""

    name: str
    is_server: bool  # compared with this engine's server, else with it without one
    startup_s: float
    facts: dict[str, Any]

    async def start(self) -> None:
        """Start it and wait until it is ready."""
        ...

    async def run(self, items: Sequence[Item], at_once: int) -> PeerRun:
        """Run the requests, `at_once` open at a time."""
        ...

    def freeze(self) -> None:
        """Stop it where it is, so that it spends nothing while others run."""
        ...

    def thaw(self) -> None:
        """Let it go on."""
        ...

    def end(self) -> int:
        """End it; the peak of its memory in bytes, 0 where that is not known. Idempotent."""
        ...
