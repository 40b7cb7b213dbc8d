"""The facts about the measured engine that all reports share, under the same names.

Owns: those names, the probe of the machine for the floor, this process's peak memory. Does not: measure the engine.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

from octavo import machine
from octavo.bench.floor import StepFloor
from octavo.config import Config
from octavo.executors.protocol import Capacity


def engine_facts(model: str, config: Config, capacity: Capacity) -> dict[str, Any]:
    """Return model, types, device and threads, the first entries of a report."""
    return {
        "model": model,
        "dtype": capacity.dtype,
        "quantization": _first(capacity, config, "quantization"),
        "speculate": _first(capacity, config, "speculate"),
        "device": capacity.device,
        "threads": capacity.num_threads,
    }


def memory_facts(capacity: Capacity) -> dict[str, Any]:
    """Return the bytes of weights and of KV per token, and the number of KV blocks."""
    return {
        "weight_bytes": capacity.weight_bytes,
        "kv_bytes_per_token": capacity.kv_bytes_per_token,
        "kv_blocks": sum(capacity.num_blocks),
    }


def floor_facts(floor: StepFloor) -> dict[str, Any]:
    """Return the two rates from which floors are computed."""
    return {
        "bandwidth_gb_per_s": round(floor.rates.bandwidth / 1e9, 2),
        "gemm_gflop_per_s": round(floor.rates.flops / 1e9, 1),
    }


def headline(report: dict[str, Any]) -> str:
    """Return model, types and threads as text."""
    words = [report["model"], report["dtype"]]
    words += [f"{name} {report[name]}" for name in ("quantization", "speculate") if report[name] not in (None, "none")]
    return ", ".join([*words, report["device"], f"{report['threads']} threads"])


def probe_floor(capacity: Capacity) -> StepFloor:
    """Measure the machine's rates for the model's device and type. Takes a second; loads torch."""
    from octavo.bench.machine_probe import probe  # loads torch

    rates = probe(capacity.device, capacity.dtype, machine.look().cache_bytes, capacity.quantization)
    return StepFloor(rates, capacity.weight_bytes, capacity.linear_flops_per_token, capacity.kv_bytes_per_token)


def peak_memory_bytes() -> int:
    """Return the most host memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _first(capacity: Capacity, config: Config, name: str) -> object:
    """Return the engine's own value, else the setting of that name in any part; None if there is neither."""
    parts = (config.model, config.scheduling, config.execution)
    found = (getattr(part, name) for part in (capacity, *parts) if hasattr(part, name))
    return next(found, None)
