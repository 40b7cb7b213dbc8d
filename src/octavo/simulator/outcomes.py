"""The records of a simulation: each request's outcome, each replica's totals, and samples over time.

Owns: the records; the state of open requests; reading decisions and tokens from a commit. Does not: run a simulation
(replica, run) or judge one (summary). Columns are packed: a million outcomes fit in a hundred megabytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from octavo.core.plan import Event, EventKind, Events
from octavo.core.request import FinishReason
from octavo.simulator.arrival import Arrival
from octavo.simulator.kv_transfer import KVTransfer
from octavo.simulator.scaling import ReplicaLifetime

NEVER = -1.0  # a time that was not reached


class Outcomes:
    """Columns with one entry per ended request, in order of ends.

    `arrivals`, `starts` (first scheduled), `first_tokens` and `ends` are seconds on the simulation's clock, or NEVER.
    `reasons` holds FinishReasons; `indices` holds positions in the workload; `replicas` holds the number of the serving
    replica, and `first_replicas` that of the replica that made the first token; `tenants` holds indices into
    `tenant_names`. `cached` counts tokens found in the prefix cache; `restarts` counts restarts after a replica's
    failure. `output_tokens` counts all choices, `longest` the longest choice. `num_keyed` counts the requests that
    arrived with block keys.
    """

    def __init__(self) -> None:
        self.indices = array("q")
        self.arrivals = array("d")
        self.starts = array("d")
        self.first_tokens = array("d")
        self.ends = array("d")
        self.prompt_tokens = array("i")
        self.output_tokens = array("i")
        self.longest = array("i")
        self.cached = array("i")
        self.preemptions = array("i")
        self.restarts = array("i")
        self.replicas = array("i")
        self.first_replicas = array("i")
        self.tenants = array("i")
        self.reasons = array("b")
        self.num_keyed = 0
        self.tenant_names: list[str] = []
        self._tenant_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def tenant(self, name: str) -> int:
        """Return a tenant's number."""
        number = self._tenant_of.setdefault(name, len(self.tenant_names))
        if number == len(self.tenant_names):
            self.tenant_names.append(name)
        return number

    def served(self, index: int) -> bool:
        """Return True if the request ended as requested, not by an error, a timeout or a cancellation."""
        return self.reasons[index] in (FinishReason.STOP, FinishReason.LENGTH)


class SimulatedRequest:
    """A request that arrived and has not ended.

    `emitted` counts the tokens before its replica's last failure, or before it was handed over. A prefill replica hands
    it over after token `handover_at` (0: none); then `source` is its number (-1 before), `handed` the time, and
    `reserved` the time at which the decode replica has blocks for it. Its tokens take `back_s` to the router.
    """

    __slots__ = (
        "arrival", "at", "back_s", "cached", "counts", "emitted", "first", "handed", "handover_at", "index", "name",
        "preemptions", "replica", "reserved", "restarts", "source", "start",
    )  # fmt: skip

    def __init__(self, index: int, arrival: Arrival, at: float) -> None:
        self.index = index
        self.name = f"r{index}"
        self.arrival = arrival
        self.at = at
        self.back_s = 0.0
        self.start = NEVER
        self.first = NEVER
        self.emitted = 0
        self.counts = [0] * len(arrival.choices)  # tokens of each choice; empty for one choice
        self.cached = 0
        self.preemptions = 0
        self.restarts = 0
        self.replica = self.source = -1
        self.handover_at = 0
        self.handed = self.reserved = NEVER


class RequestTracker:
    """Open requests by name, and the outcomes of those that ended."""

    def __init__(self) -> None:
        self.outcomes = Outcomes()
        self.open: dict[str, SimulatedRequest] = {}
        self.last_end = 0.0
        self.reserved: list[tuple[SimulatedRequest, int]] = []  # handed over, with blocks, and tokens cached there
        self._with_choices: dict[str, SimulatedRequest] = {}

    def begin(self, index: int, arrival: Arrival, at: float) -> SimulatedRequest:
        """Add a request that arrives."""
        entry = SimulatedRequest(index, arrival, at)
        self.open[entry.name] = entry
        if arrival.choices:
            self._with_choices[entry.name] = entry
        if arrival.keys:
            self.outcomes.num_keyed += 1
        return entry

    def apply_decisions(self, decisions: tuple[Event, ...]) -> list[SimulatedRequest]:
        """Record decisions; return the requests that ended, or are to be handed over."""
        ended = []
        for event in decisions:
            kind = event.kind
            if kind == EventKind.ADMITTED:
                entry = self.open[event.request_id]
                if entry.start == NEVER:
                    entry.start = event.time
                    entry.cached = event.cached_tokens
                elif entry.source >= 0 and entry.reserved == NEVER:
                    entry.reserved = event.time
                    self.reserved.append((entry, event.cached_tokens))
            elif kind == EventKind.FINISHED:
                assert event.finish_reason is not None
                entry = self.open[event.request_id]
                if entry.handover_at and event.finish_reason == FinishReason.LENGTH:
                    entry.emitted, entry.handed = event.num_tokens, event.time
                else:
                    self.end(entry, event.time, event.finish_reason, event.num_tokens)
                ended.append(entry)
            elif kind == EventKind.PREEMPTED:
                self.open[event.request_id].preemptions += 1
        return ended

    def apply_tokens(self, events: Events) -> list[tuple[str, int]]:
        """Record first tokens, and tokens by choice; return (request, choice) of each choice that is complete."""
        positions, at = events.positions, 0
        for _ in range(positions.count(0)):
            at = positions.index(0, at)
            entry = self.open[events.request_ids[at]]
            if entry.first == NEVER:
                entry.first = events.time
            at += 1
        complete: list[tuple[str, int]] = []
        if not self._with_choices:
            return complete
        for name, choice in zip(events.request_ids, events.choices, strict=True):
            several = self._with_choices.get(name)
            if several is not None:
                several.counts[choice] += 1
                if several.counts[choice] == several.arrival.choices[choice]:
                    complete.append((name, choice))
        return complete

    def end(self, entry: SimulatedRequest, at: float, reason: FinishReason, num_tokens: int) -> None:
        """Move a request to the outcomes."""
        del self.open[entry.name]
        self._with_choices.pop(entry.name, None)
        out, arrival = self.outcomes, entry.arrival
        first, at = entry.first if entry.first == NEVER else entry.first + entry.back_s, at + entry.back_s
        self.last_end = max(self.last_end, at)
        out.indices.append(entry.index)
        out.arrivals.append(entry.at)
        out.starts.append(entry.start)
        out.first_tokens.append(first)
        out.ends.append(at)
        out.prompt_tokens.append(arrival.prompt_tokens)
        out.output_tokens.append(num_tokens)
        out.longest.append(max(entry.counts, default=num_tokens))
        out.cached.append(entry.cached)
        out.preemptions.append(entry.preemptions)
        out.restarts.append(entry.restarts)
        out.replicas.append(entry.replica)
        out.first_replicas.append(entry.replica if entry.source < 0 else entry.source)
        out.tenants.append(out.tenant(arrival.tenant))
        out.reasons.append(reason)


@dataclass(slots=True)
class ReplicaTotals:
    """One engine's totals over all its restarts: seconds, tokens and counts.

    `group` is the name of its group; `up_s` are the seconds in which its devices were held, None the whole run.
    `busy_s` is the device's time, `host_s` the time of scheduling and delivery. `queried_tokens` were looked up in the
    prefix cache for admitted requests; `hit_tokens` were found. Of `steps`, `forwarded_steps` were fast-forwarded.
    `max_blocks_used` is the maximum, over all steps that were not fast-forwarded, of the blocks of running requests.
    `rows` counts sequences over all steps. `steps_at_max_sequences` and `steps_at_max_batch_tokens` count the steps
    that reached these limits, which `max_sequences` and `max_batch_tokens` repeat.
    """

    group: str = ""
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
    up_s: float | None = None
    down_s: float = 0.0
    max_sequences: int = 0
    max_batch_tokens: int = 0
    rows: int = 0
    steps_at_max_sequences: int = 0
    steps_at_max_batch_tokens: int = 0


class Samples:
    """Columns of samples in order of time. A replica is sampled at its first turn after each `sample_s` seconds.

    `used` counts the blocks of the leading cache group that running requests hold. `steps`, and `tokens` (computed),
    count from the replica's last start. `busy_s` and `host_s` are the replica's totals. After the turn's plans,
    `waiting` requests wait, the first one for the WaitReason `reasons` (-1 without one), and `rows` sequences are in
    the turn's first plan. `parts` has len(part_names) entries for each sample: the seconds of that plan by what bounds
    them (StepParts), 0 without a plan; `compute` is the share of these seconds that its FLOP take, -1 if unknown.
    After MANY samples the interval grows, so that a long run's samples fit in memory.
    """

    MANY = 1 << 17

    def __init__(self) -> None:
        self.times = array("d")
        self.replicas = array("i")
        self.used = array("i")
        self.steps = array("q")
        self.tokens = array("q")
        self.busy_s = array("d")
        self.host_s = array("d")
        self.waiting = array("i")
        self.reasons = array("b")
        self.rows = array("i")
        self.part_names: tuple[str, ...] = ()
        self.parts = array("f")
        self.compute = array("f")

    def __len__(self) -> int:
        return len(self.times)


@dataclass(slots=True)
class SimulatedRun:
    """A simulation's result: each request's outcome, each replica's totals, and the time of the last end in seconds.

    If `gave_up`, the outcomes lack the requests that were open or had not arrived. `lifetimes` are those of the
    replicas of scaled groups, `transfers` those of KV between prefill and decode replicas, in order of their ends.
    """

    outcomes: Outcomes
    replicas: list[ReplicaTotals]
    duration: float
    samples: Samples = field(default_factory=Samples)
    gave_up: bool = False
    lifetimes: list[ReplicaLifetime] = field(default_factory=list)
    transfers: list[KVTransfer] = field(default_factory=list)
