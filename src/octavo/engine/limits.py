"""The scheduler's limits from the settings, for running and simulated engines.

Owns: which setting becomes which limit. Does not: size a pool (executors and the simulator's facts do).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from octavo.config import CacheConfig, SchedulingConfig
from octavo.core.limits import Limits
from octavo.errors import ConfigError


def configured_limits(scheduling: SchedulingConfig, cache: CacheConfig, policy: str, sizes: Limits) -> Limits:
    """Return an engine's limits. `sizes` has the fields that this function does not set, such as blocks and groups."""
    return replace(
        sizes,
        policy=policy,
        headroom=scheduling.headroom,
        chunked_prefill=scheduling.chunked_prefill,
        max_partial_prefills=scheduling.max_partial_prefills,
        long_prefill_threshold=scheduling.long_prefill_threshold,
        prefix_caching=cache.enable_prefix_caching,
        block_sharing=cache.block_sharing,
        max_kv_read=scheduling.max_kv_read,
        max_bypass=scheduling.max_bypass,
        preemption=cache.preemption,
        host_load_min_tokens=cache.host_load_min_tokens,
        separate_modalities=scheduling.separate_modalities,
        composition=scheduling.composition,
        max_prefill_run=scheduling.max_prefill_run,
    )


def read_tenant_weights(spelled: Iterable[str]) -> tuple[tuple[str, float], ...]:
    """Read texts of the form TENANT=WEIGHT. Raises ConfigError."""
    return tuple(map(_tenant_weight, spelled))


def _tenant_weight(spelled: str) -> tuple[str, float]:
    tenant, is_pair, weight = spelled.rpartition("=")
    try:
        if is_pair and tenant:
            return tenant, float(weight)
    except ValueError:
        pass
    raise ConfigError(f"--tenant-weight is {spelled!r}; give TENANT=WEIGHT, such as batch=0.5")
