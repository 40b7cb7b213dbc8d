"""SimulatedRun: requests' outcomes, replicas' totals and samples over time.

Owns: the records. Does not: fill them (replica, fleet) or judge them (summary).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from octavo.simulator.outcomes import Outcomes


@dataclass(slots=True)
class ReplicaTotals:
    """What one replica did, over all its lives. Seconds, tokens and counts.

    `busy_s`: the device computed; `host_s`: scheduling and delivery. `queried_tokens` of admitted requests were looked
    up in the prefix cache, `hit_tokens` were found. `forwarded_steps` of `steps` were computed together with others.
    `max_blocks_used` is the most that running requests held of `num_blocks`, sampled when a plan was made by itself.
    """

    requests: int = 0
    steps: int = 0
    forwarded_steps: int = 0
    busy_s: float = 0.0
    host_s: float = 0.0
    computed_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    rejected: int = 0
    failures: int = 0
    num_blocks: int = 0
    max_blocks_used: int = 0
    down_s: float = 0.0


class Samples:
    """Columns of samples, at the first turn of a replica after each `sample_s`, in order of time.

    `running` and `waiting` are requests, `used` and `cached` blocks of the leading cache group: held by running
    requests, and kept for their prefix alone. `steps` and `tokens` (computed) count from the replica's last start.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self.replicas = array("i")
        self.running = array("i")
        self.waiting = array("i")
        self.used = array("i")
        self.cached = array("i")
        self.steps = array("q")
        self.tokens = array("q")

    def __len__(self) -> int:
        return len(self.times)


@dataclass(slots=True)
class SimulatedRun:
    """A simulation's result: each request's outcome, each replica's totals, the time of the last end (seconds).

    If `gave_up`, the requests that were open or had not arrived are not among the outcomes.
    """

    outcomes: Outcomes
    replicas: list[ReplicaTotals]
    duration: float
    samples: Samples = field(default_factory=Samples)
    gave_up: bool = False
