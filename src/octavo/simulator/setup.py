"""Setup describes a simulated fleet; SimulatedEngine derives one replica's limits from settings.

Owns: the number of engines, the router, failures, observers, checks of these; the KV pool's size; the defaults that
depend on the device; an engine's description. Does not: parse flags (cli), or know facts of models and devices (costs).
Invariant: a recorded engine keeps every setting that the user does not give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from octavo.config import CacheConfig, SchedulingConfig
from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.engine.limits import configured_limits
from octavo.errors import ConfigError
from octavo.observe.history import EventSink
from octavo.plugins import find_policy
from octavo.simulator.cost_model import CostModel
from octavo.simulator.costs import Hardware
from octavo.simulator.drafts import DraftSettings
from octavo.simulator.kv_transfer import KVLink
from octavo.simulator.network_hop import NetworkHop
from octavo.simulator.outcomes import RequestTracker
from octavo.simulator.pipeline import PipelineFacts
from octavo.simulator.scaling import ScalingRule

# An engine's default (tokens per step, sequences), as in assembly.DEVICE_DEFAULTS.
CPU_DEFAULTS, GPU_DEFAULTS = (512, 32), (8192, 256)
# Setting -> the field of Limits with another name.
_RENAMED = {"enable_prefix_caching": "prefix_caching"}


@dataclass(frozen=True, slots=True)
class ReplicaFailure:
    """A replica fails at `time`, and restarts with an empty cache `restart_s` later (None: never). In seconds."""

    replica: int
    time: float
    restart_s: float | None = 30.0


@dataclass(frozen=True, slots=True)
class ReplicaSetup:
    """One replica: `ranks` data-parallel engines that step together, or `pipeline.stages` times as many.

    `limits` are of one engine. The engines of a fleet are numbered in order, those of replica 0 first. An engine's KV
    is divided over `kv_devices` devices, each with its own ports of a KV link.
    """

    limits: Limits
    costs: CostModel
    ranks: int = 1
    pipeline: PipelineFacts | None = None
    kv_devices: int = 1

    @property
    def num_engines(self) -> int:
        """Return the number of schedulers."""
        return self.ranks * (1 if self.pipeline is None else self.pipeline.stages)


class Role(IntEnum):
    """What replicas do: whole requests, their prompts and first tokens, or all later tokens."""

    WHOLE = 0
    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """Equal replicas of a fleet. Groups have different names.

    With a `scaling` rule there are from `replicas` to `max_replicas`, and `replicas` at the begin.
    """

    name: str
    replica: ReplicaSetup
    replicas: int = 1
    scaling: ScalingRule | None = None
    max_replicas: int = 0
    role: Role = Role.WHOLE

    def __post_init__(self) -> None:
        least = 1 if self.scaling is None else 0
        if self.replicas < least:
            raise ConfigError(f"replicas of group {self.name!r} is {self.replicas}; give at least {least}")
        if self.scaling is not None and self.max_replicas < max(1, self.replicas):
            raise ConfigError(
                f"max_replicas of group {self.name!r} is {self.max_replicas}; give at least {max(1, self.replicas)}"
            )

    @property
    def most(self) -> int:
        """Return the most replicas that there can be at once."""
        return self.replicas if self.scaling is None else self.max_replicas


@dataclass(frozen=True, slots=True)
class Setup:
    """The engines of a simulation, and its options.

    Every replica is a ReplicaSetup of `limits`, `costs`, `ranks` and `pipeline`. With `groups`, they have the replicas
    instead, which are numbered in order of the groups; the router chooses among all of them. Each engine has up to
    `depth` plans in flight and up to `max_waiting` waiting requests (0: no limit). `router` is a name in
    fleet.routing.ROUTERS, and chooses an engine. `make_sink` is called with each new scheduler; with it, every step is
    planned separately. Without it, `fast_forward` computes unchanged decode steps together, with the same outcome.
    `sample_s` is the time between samples of each engine (0: none). `give_up` is called at intervals with the
    requests and the time; if it returns True, the run ends. `drafts`: the engines have a draft model. With groups of
    prefill and of decode replicas, the KV of a token (`kv_token_bytes`) crosses `link`. `hop`: the engines are apart
    from the router; latencies are those at the router.
    """

    limits: Limits
    costs: CostModel
    depth: int = 1
    replicas: int = 1
    router: str = "round_robin"
    failures: tuple[ReplicaFailure, ...] = ()
    max_waiting: int = 0
    make_sink: Callable[[Scheduler], EventSink | None] | None = None
    fast_forward: bool = True
    sample_s: float = 0.0
    seed: int = 0
    give_up: Callable[[RequestTracker, float], bool] | None = None
    drafts: DraftSettings | None = None
    ranks: int = 1
    pipeline: PipelineFacts | None = None
    groups: tuple[ReplicaGroup, ...] = ()
    link: KVLink | None = None
    kv_token_bytes: float = 0.0
    hop: NetworkHop | None = None

    def __post_init__(self) -> None:
        for name, minimum in (("depth", 1), ("replicas", 1), ("max_waiting", 0), ("sample_s", 0), ("ranks", 1)):
            if getattr(self, name) < minimum:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; give at least {minimum}")
        if self.depth > 2:
            raise ConfigError(f"depth is {self.depth}; an engine has 1 or 2 plans in flight")
        if self.depth > 1 and any(one.replica.pipeline is not None for one in self.fleet):
            raise ConfigError(f"depth is {self.depth}; give 1 with a pipeline, whose stages have a plan in flight each")
        self._check_groups()
        for failure in self.failures:
            if not 0 <= failure.replica < self.num_replicas:
                raise ConfigError(f"a failure names replica {failure.replica}; there are 0 to {self.num_replicas - 1}")
            if failure.time < 0 or (failure.restart_s is not None and failure.restart_s < 0):
                raise ConfigError(f"a failure is at {failure.time} s, back after {failure.restart_s} s; give 0 or more")

    def _check_groups(self) -> None:
        names = [group.name for group in self.fleet]
        for group in self.fleet:
            if names.count(group.name) > 1:
                raise ConfigError(f"two groups have the name {group.name!r}; give each another name")
        if self.is_disaggregated:
            self._check_roles()
        if self.hop is not None and (self.failures or self.is_disaggregated):
            what = "failures" if self.failures else "roles"
            raise ConfigError(f"a network hop of a fleet with {what} is not simulated; leave out the hop or the {what}")

    def _check_roles(self) -> None:
        roles = {group.role for group in self.fleet}
        if roles != {Role.PREFILL, Role.DECODE}:
            raise ConfigError("a group has a role; give every group one, prefill or decode, and at least one of each")
        if self.link is None:
            raise ConfigError("prefill and decode replicas need a link for the KV; give one such as ib-ndr")
        if self.failures:
            raise ConfigError("a failure of prefill or decode replicas is not simulated; leave out the failures")
        if self.drafts is not None:
            raise ConfigError("drafts of prefill and decode replicas are not simulated; leave out the draft model")

    @property
    def fleet(self) -> tuple[ReplicaGroup, ...]:
        """Return the groups; one without a name unless `groups` are given."""
        common = ReplicaSetup(self.limits, self.costs, self.ranks, self.pipeline)
        return self.groups or (ReplicaGroup("", common, self.replicas),)

    @property
    def is_disaggregated(self) -> bool:
        """True if some replicas do not serve whole requests."""
        return any(group.role is not Role.WHOLE for group in self.groups)

    @property
    def num_replicas(self) -> int:
        """Return the most replicas in all groups."""
        return sum(group.most for group in self.fleet)


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The engine of one replica: a model on `hardware`, or an engine with the Limits of a recording (`recorded`).

    `price` is dollars per engine and hour (a rank of a pipeline has as many engines as stages).
    """

    model: str
    device: str
    depth: int
    price: float
    hardware: Hardware | None = None
    recorded: Limits | None = None

    @staticmethod
    def of_hardware(hardware: Hardware) -> SimulatedEngine:
        """Return the engine of a model on a device."""
        devices = hardware.tp * hardware.dp * hardware.pp
        device = hardware.device.name if devices == 1 else f"{devices} x {hardware.device.name}"
        return SimulatedEngine(hardware.model.name, device, 1, hardware.device.price * hardware.tp, hardware=hardware)

    @property
    def ranks(self) -> int:
        """Return the data-parallel ranks that step together."""
        return 1 if self.hardware is None else self.hardware.dp

    @property
    def pipeline(self) -> PipelineFacts | None:
        """Return the pipeline of each rank."""
        return None if self.hardware is None else self.hardware.pipeline

    def limits(
        self, scheduling: SchedulingConfig, cache: CacheConfig, given: Collection[str], max_model_len: int | None = None
    ) -> Limits:
        """Return one replica's Limits. `given` names the settings that the user gave. Raises ConfigError."""
        if self.recorded is not None:
            return _change_limits(self.recorded, scheduling, cache, given, max_model_len)
        assert self.hardware is not None
        return _hardware_limits(self.hardware, scheduling, cache, max_model_len)

    def describe(self, limits: Limits) -> dict[str, str]:
        """Return a description of the engine for a report."""
        blocks = limits.num_blocks[0]
        description = {
            "model": self.model,
            "device": self.device,
            "KV pool": f"{blocks:,} blocks of {limits.block_size} tokens, {blocks * limits.block_size:,} in all",
            "tokens a step": f"{limits.max_batch_tokens:,}",
            "sequences at once": f"{limits.max_sequences:,}",
            "longest request": f"{limits.max_model_len:,} tokens",
            "prefix cache": "on" if limits.prefix_caching else "off",
            "chunked prefill": "on" if limits.chunked_prefill else "off",
        }
        if self.hardware is not None and self.hardware.dp * self.hardware.pp > 1:
            sizes = self.hardware
            experts = ", whole experts" if sizes.is_expert_parallel else ""
            description["parallel"] = f"tensor {sizes.tp}, data {sizes.dp}, pipeline {sizes.pp}{experts}"
        if limits.host_blocks:
            description["host tier"] = f"{limits.host_blocks[0]:,} blocks"
        if limits.headroom is not None:
            description["headroom"] = f"{limits.headroom:g}"
        if limits.composition != "mixed":
            description["steps"] = limits.composition
        if limits.tenant_weights:
            description["weights"] = ", ".join(f"{tenant}={weight:g}" for tenant, weight in limits.tenant_weights)
        return description


def _change_limits(
    limits: Limits, scheduling: SchedulingConfig, cache: CacheConfig, given: Collection[str], max_model_len: int | None
) -> Limits:
    """Return a recorded engine's Limits, changed by the settings that the user gave."""
    for name in ("block_size", "kv_cache_bytes", "memory_fraction", "host_cache_bytes"):
        if name in given:
            raise ConfigError(
                f"{name} is of a model and a device, and the fit knows neither; give --model and --device"
            )
    changes: dict[str, Any] = {}
    for part in (scheduling, cache):
        for name in given:
            field = _RENAMED.get(name, name)
            if hasattr(part, name) and hasattr(limits, field) and field not in ("policy", "num_blocks"):
                value = getattr(part, name)
                changes |= {} if value is None and field != "headroom" else {field: value}
    if "policy" in given:
        changes["policy"] = find_policy(scheduling.policy)
    if cache.num_blocks is not None or cache.kv_cache_tokens is not None:
        changes["num_blocks"] = (cache.num_blocks or max(1, (cache.kv_cache_tokens or 0) // limits.block_size),)
    if max_model_len is not None:
        changes["max_model_len"] = max_model_len
    return replace(limits, **changes)


def _hardware_limits(
    hardware: Hardware, scheduling: SchedulingConfig, cache: CacheConfig, max_model_len: int | None
) -> Limits:
    batch_tokens, sequences = CPU_DEFAULTS if hardware.device.is_measured else GPU_DEFAULTS
    max_batch_tokens = scheduling.max_batch_tokens or batch_tokens
    length = max_model_len or hardware.model.max_model_len
    if length > hardware.model.max_model_len:
        raise ConfigError(
            f"--max-model-len is {length}; {hardware.model.name} has positions for {hardware.model.max_model_len}"
        )
    sizes = Limits(
        block_size=cache.block_size,
        num_blocks=(_num_blocks(hardware, cache, max_batch_tokens),),
        max_model_len=length,
        vocab_size=hardware.model.vocab_size,
        max_batch_tokens=max_batch_tokens,
        max_sequences=max(1, (scheduling.max_sequences or sequences) // hardware.pp),
        host_blocks=_host_blocks(hardware, cache),
    )
    return configured_limits(scheduling, cache, find_policy(scheduling.policy), sizes)


def _num_blocks(hardware: Hardware, cache: CacheConfig, max_batch_tokens: int) -> int:
    if cache.num_blocks is not None:
        return cache.num_blocks
    if cache.kv_cache_tokens is not None:
        return max(1, cache.kv_cache_tokens // cache.block_size)
    if cache.kv_cache_bytes is not None:
        count = cache.kv_cache_bytes // int(hardware.model.kv_bytes_per_token * cache.block_size)
        if count < 1:
            raise ConfigError(f"--kv-cache-bytes is {cache.kv_cache_bytes}; a block of {hardware.model.name} is larger")
        return count
    share = 0.9 if cache.memory_fraction is None else cache.memory_fraction
    return hardware.pool_blocks(max_batch_tokens, share)


def _host_blocks(hardware: Hardware, cache: CacheConfig) -> tuple[int, ...]:
    count = cache.host_cache_bytes // int(hardware.model.kv_bytes_per_token * cache.block_size)
    return (count,) if count else ()
